//! Ollama's dialect.

use axum::body::Body;
use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::support::{Answer, MODEL, Server, Setup, request};

const CALL: &str = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>";

async fn ask(server: &Server, path: &str, fields: Value) -> Answer {
    let mut body = json!({"model": MODEL, "think": false, "options": {"temperature": 0, "num_predict": 200}});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    server.post(path, &body).await
}

fn lines(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.headers["content-type"], "application/x-ndjson");
    answer.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lines_join_to_the_whole_reply() {
    let server = Server::new();
    server.say(&format!("t\n</think>\n\nIt is 95. {CALL}"));
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object",
        "properties": {"x": {"type": "integer"}}}}}]);
    let fields = json!({"messages": [{"role": "user", "content": "Hello"}], "think": true, "tools": tools});
    let lines = lines(&ask(&server, "/api/chat", fields.clone()).await);
    let (last, others) = lines.split_last().unwrap();
    let join =
        |name: &str| -> String { others.iter().filter_map(|line| line["message"][name].as_str()).collect() };
    assert!(others.iter().all(|line| line["done"] == false && line["model"] == MODEL));
    let mut whole_fields = fields;
    whole_fields["stream"] = false.into();
    let whole = ask(&server, "/api/chat", whole_fields).await.ok();
    assert_eq!(whole["message"]["content"], join("content"));
    assert_eq!((&whole["message"]["thinking"], join("thinking").as_str()), (&json!("t"), "t"));
    assert_eq!(whole["message"]["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
    for reply in [last, &whole] {
        assert_eq!((&reply["done"], &reply["done_reason"]), (&json!(true), &json!("stop")));
        assert!(reply["prompt_eval_count"].as_u64().unwrap() > 0 && reply["total_duration"].is_u64());
    }
    assert!(whole["created_at"].as_str().unwrap().ends_with('Z'));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_with_and_without_a_template() {
    let server = Server::new();
    server.say("It is 95.");
    let whole = async |fields: Value| {
        let mut fields = fields;
        fields["stream"] = false.into();
        ask(&server, "/api/generate", fields).await.ok()
    };
    let templated = whole(json!({"prompt": "Hello", "system": "Be brief."})).await;
    assert_eq!(templated["response"], "It is 95.");
    let raw = whole(json!({"prompt": "Hello", "raw": true})).await;
    assert_eq!(raw["prompt_eval_count"], server.text.tokenizer.encode_raw("Hello").unwrap().len());
    assert!(templated["prompt_eval_count"].as_u64() > raw["prompt_eval_count"].as_u64());
    assert_eq!(whole(json!({})).await["done_reason"], "load");
    let loaded = ask(&server, "/api/chat", json!({"messages": []})).await.ok();
    assert_eq!(loaded["done_reason"], "load");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn histories_with_results() {
    let server = Server::new();
    let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls":
        [{"function": {"name": "f", "arguments": {"x": 1}}}, {"function": {"name": "g", "arguments": {}}}]},
        {"role": "tool", "tool_name": "g", "content": "two"}, {"role": "tool", "content": "one"}]);
    assert_eq!(ask(&server, "/api/chat", json!({"messages": messages})).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn facts_and_refusals() {
    let server = Server::new();
    assert_eq!(server.get("/api/version").await.ok()["version"], server::http::VERSION);
    assert_eq!(server.get("/api/tags").await.ok()["models"][0]["name"], MODEL);
    assert_eq!(server.get("/api/ps").await.ok()["models"][0]["model"], MODEL);
    let show = server.post("/api/show", &json!({"model": "x"})).await.ok();
    assert_eq!(show["model_info"]["qwen3_5_moe.context_length"], 1024);
    for path in ["/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"] {
        let answer = server.post(path, &json!({})).await;
        assert_eq!(answer.status, 501, "{path}");
        assert!(answer.json()["error"].is_string());
    }
    let chat = json!([{"role": "user", "content": "a"}]);
    for (fields, wanted) in [
        (json!({"messages": chat, "options": {"num_ctx": 4096}}), "options.num_ctx"),
        (json!({"messages": chat, "options": {"temperature": 9}}), "temperature"),
        (json!({"messages": chat, "think": 1}), "think"),
        (
            json!({"messages": [{"role": "user", "content": "a", "images": ["AA"]}]}),
            "messages[0].images[0]: ",
        ),
        (json!({"messages": [{"role": "user", "content": "a", "images": "AA"}]}), "messages[0].images: "),
        (json!({"messages": [{"role": "user", "content": "a", "images": [7]}]}), "messages[0].images[0]: "),
        (json!({"messages": [{"role": "user", "content": 7}]}), "messages[0].content: "),
    ] {
        let answer = ask(&server, "/api/chat", fields.clone()).await;
        assert_eq!(answer.status, 400, "{fields}");
        assert!(answer.json()["error"].as_str().unwrap().starts_with(wanted), "{}", answer.text());
    }
    for (fields, wanted) in [
        (json!({"images": ["AA", "AA"]}), "images[0]: "),
        (json!({"images": ["AA"], "system": "s"}), "images[0]: "),
        (json!({"images": {}}), "images: "),
        (json!({"images": ["AA", null]}), "images[1]: "),
        (json!({"images": ["AA"], "raw": true}), "images: a raw prompt"),
    ] {
        let mut body = fields.clone();
        body["prompt"] = "p".into();
        let answer = ask(&server, "/api/generate", body).await;
        assert_eq!(answer.status, 400, "{fields}");
        assert!(answer.json()["error"].as_str().unwrap().starts_with(wanted), "{}", answer.text());
    }
    let ignored = json!({"messages": chat, "options": {"mirostat": 2, "num_ctx": 512}, "stream": false,
        "clary": {"notes": true}});
    let reply = ask(&server, "/api/chat", ignored).await.ok();
    assert_eq!(reply["clary"]["notes"], json!([{"code": "option_ignored", "path": "options.mirostat"}]));
    let mut setup = Setup::default();
    setup.typed.ollama = false;
    assert_eq!(Server::with(setup).get("/api/tags").await.status, 404);
}

/// Some clients of this dialect leave the type out. A browser that a web page makes do so names the page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_without_a_type_is_json_unless_a_page_sent_it() {
    let server = Server::new();
    let status = async |path: &str, headers: &[(&str, &str)]| {
        let asked =
            headers.iter().fold(request("POST", path), |asked, (name, value)| asked.header(*name, *value));
        server.call(asked.body(Body::from(json!({"model": MODEL}).to_string())).unwrap()).await.status
    };
    for path in ["/api/chat", "/api/generate", "/api/show"] {
        assert_eq!(status(path, &[]).await, StatusCode::OK, "{path}");
        let refused = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        assert_eq!(status(path, &[("origin", "https://a.example")]).await, refused, "{path}");
        assert_eq!(status(path, &[("content-type", "text/plain")]).await, refused, "{path}");
    }
    assert_eq!(status("/v1/chat/completions", &[]).await, StatusCode::UNSUPPORTED_MEDIA_TYPE);
}
