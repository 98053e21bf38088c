//! Receipts and records: what they hold, that every dialect gives them, and that running a request again
//! gives the same.

use std::os::unix::fs::PermissionsExt;

use serde_json::{Map, Value, json};
use server::http::{Bundle, Receipt, RerunError, Typed, ids_digest, rerun};

use crate::support::{MODEL, Server, Setup, chat, sse};

fn receipt(reply: &Value) -> Receipt {
    serde_json::from_value(reply["clary"]["receipt"].clone())
        .unwrap_or_else(|error| panic!("{error}: {reply}"))
}

fn map(value: &Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

/// A request for every route, sampled with a seed.
fn asked() -> Vec<(&'static str, Value)> {
    let clary = json!({"all": true});
    let user = json!([{"role": "user", "content": "Hello"}]);
    let options = json!({"temperature": 1, "seed": 7, "num_predict": 20});
    vec![
        ("/v1/chat/completions", chat(json!({"temperature": 1, "seed": 7, "clary": clary, "n": 2}))),
        (
            "/v1/completions",
            json!({"model": MODEL, "prompt": ["one", "two"], "seed": 7, "max_tokens": 20, "clary": clary}),
        ),
        (
            "/v1/messages",
            json!({"model": MODEL, "messages": user, "max_tokens": 20, "seed": 7, "clary": clary}),
        ),
        (
            "/v1/responses",
            json!({"model": MODEL, "input": "Hello", "max_output_tokens": 20, "seed": 7, "clary": clary}),
        ),
        ("/api/chat", json!({"model": MODEL, "messages": user, "options": options, "clary": clary})),
        ("/api/generate", json!({"model": MODEL, "prompt": "Hello", "options": options, "clary": clary})),
    ]
}

/// The last object of a stream that has a `clary` member, wherever the dialect puts it.
fn last_clary(text: &str) -> Value {
    let lines = text.lines().filter_map(|line| line.strip_prefix("data: ").or(Some(line)));
    let objects = lines.rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut found = objects.filter_map(|object| match &object["response"]["clary"] {
        Value::Null => object.get("clary").map(|_| object.clone()),
        _ => Some(object["response"].clone()),
    });
    found.next().unwrap_or_else(|| panic!("no clary object: {text}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_dialect_gives_the_same_receipt_whole_streamed_and_again() {
    let server = Server::new();
    let plain = Server::new();
    for (route, mut body) in asked() {
        body["stream"] = false.into();
        let whole = server.post(route, &body).await.ok();
        let clary = &whole["clary"];
        for member in ["notes", "timings", "draft", "cache", "contracts", "seed", "version"] {
            assert!(!clary[member].is_null(), "{route}: {member}: {clary}");
        }
        let receipt = receipt(&whole);
        assert_eq!((receipt.route.as_str(), receipt.seed), (route, 7));
        assert_eq!((receipt.model.as_str(), receipt.kv.as_str()), ("sha256:00", "int8"));
        assert_eq!(receipt.template, format!("sha256:{}", server.text.template.digest()));
        assert_eq!(receipt.contradiction(), None);
        let choices = if route == "/v1/chat/completions" || route == "/v1/completions" { 2 } else { 1 };
        assert_eq!(receipt.output_ids.len(), choices, "{route}");
        body["stream"] = true.into();
        let streamed = server.post(route, &body).await;
        let streamed = self::receipt(&last_clary(streamed.text()));
        assert_eq!(streamed, receipt, "{route}");
        let again = rerun(&plain.app, route, map(&body), 7).await.unwrap();
        assert_eq!(again.receipt, receipt, "{route}");
        body["clary"] = json!({"receipt": false});
        body["stream"] = false.into();
        assert!(server.post(route, &body).await.ok()["clary"].is_null(), "{route}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn digests_are_those_of_the_ids() {
    let server = Server::new();
    let body = chat(json!({"clary": {"receipt": true, "prompt": true}}));
    let mut dry = body.clone();
    dry["dry_run"] = true.into();
    let prompt = server.post("/v1/chat/completions", &dry).await.ok()["prompt_token_ids"].clone();
    let prompt: Vec<u32> = serde_json::from_value(prompt).unwrap();
    let reply = server.post("/v1/chat/completions", &body).await.ok();
    let receipt = receipt(&reply);
    assert_eq!(receipt.prompt, ids_digest([prompt.as_slice()].into_iter()));
    assert_eq!(receipt.output_ids[0].len() as u64, reply["usage"]["completion_tokens"].as_u64().unwrap());
    assert_eq!(receipt.output, ids_digest(receipt.output_ids.iter().map(Vec::as_slice)));
    assert_eq!(receipt.sampling.max_tokens, Some(24));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seed_that_nobody_named_is_reported_and_used_again() {
    let server = Server::new();
    let body = chat(json!({"temperature": 1, "clary": {"receipt": true}}));
    let first = receipt(&server.post("/v1/chat/completions", &body).await.ok());
    let again = rerun(&server.app, "/v1/chat/completions", map(&body), first.seed).await.unwrap();
    assert_eq!(again.receipt, first);
    let other = rerun(&server.app, "/v1/chat/completions", map(&body), first.seed ^ 1).await.unwrap();
    assert_ne!(other.receipt.output, first.output);
    let error = rerun(&server.app, "/v1/models", map(&body), 0).await.unwrap_err();
    assert_eq!(error, RerunError::Route("/v1/models".into()));
    let refused = rerun(&server.app, "/v1/chat/completions", map(&json!({"model": MODEL})), 0).await;
    let Err(RerunError::Refused { status: 400, code, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(code, "missing_field");
}

fn recording(dir: &std::path::Path) -> Server {
    Server::with(Setup { typed: Typed { record: Some(dir.into()), ..Typed::default() }, ..Setup::default() })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_recorded_and_run_again() {
    let dir = tempfile::tempdir().unwrap();
    let server = recording(dir.path());
    let ask = async |id: &str, body: &Value| {
        let request = crate::support::request("POST", "/v1/chat/completions").header("x-request-id", id);
        let request = request.header("content-type", "application/json");
        server.call(request.body(body.to_string().into()).unwrap()).await
    };
    let read = |id: &str| -> Bundle {
        let path = dir.path().join(format!("{id}.bundle.json"));
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    };
    let body = chat(json!({"temperature": 1, "stream": true}));
    let (events, done) = sse(ask("one", &body).await.text());
    assert!(done);
    let bundle = read("one");
    assert!(bundle.reply_id.starts_with("chatcmpl-") && events[0]["id"] == bundle.reply_id.as_str());
    assert_eq!((Value::Object(bundle.request.clone()), bundle.error.as_deref()), (body, None));
    assert_eq!(bundle.receipt.prompt, ids_digest(bundle.prompt_ids.iter().map(Vec::as_slice)));
    let route = bundle.receipt.route.clone();
    let again = rerun(&server.app, &route, bundle.request, bundle.receipt.seed).await.unwrap();
    assert_eq!(again.receipt, bundle.receipt);

    server.faults.nan_in(3);
    ask("..", &chat(json!({}))).await.error();
    let failed = read("..");
    assert_eq!(failed.error.as_deref(), Some("numerical_fault"));
    assert_eq!(failed.receipt.contradiction(), None);
    // A request that is refused did not run.
    ask("refused", &chat(json!({"messages": []}))).await.error();
    assert!(!dir.path().join("refused.bundle.json").exists());
    let partial = |name: &std::ffi::OsStr| name.to_string_lossy().ends_with(".partial");
    assert!(!std::fs::read_dir(dir.path()).unwrap().any(|entry| partial(&entry.unwrap().file_name())));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_recorded_is_answered_and_noted() {
    let dir = tempfile::tempdir().unwrap();
    let server = recording(&dir.path().join("gone"));
    let reply = server.chat(json!({"clary": {"notes": true}})).await.ok();
    let notes = reply["clary"]["notes"].as_array().unwrap().clone();
    assert!(notes.contains(&json!({"code": "not_recorded", "path": ""})), "{reply}");
}
