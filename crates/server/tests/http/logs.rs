//! The log: one line a request when it is over, with numbers and without words.

use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use axum::body::Body;
use serde_json::{Value, json};
use tracing_subscriber::fmt::MakeWriter;

use crate::support::{Server, Setup, chat, request};

/// What all tests of this binary log.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;
    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// The one log of the process: requests end on any thread.
fn lines() -> &'static Lines {
    static LINES: OnceLock<Lines> = OnceLock::new();
    LINES.get_or_init(|| {
        let lines = Lines::default();
        tracing_subscriber::fmt().json().flatten_event(true).with_writer(lines.clone()).init();
        lines
    })
}

/// The line of a request, once it is written.
async fn line_of(id: &str) -> Value {
    for _ in 0..2000 {
        let text = String::from_utf8(lines().0.lock().unwrap().clone()).unwrap();
        let mut parsed = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        if let Some(line) = parsed.find(|line| line["request_id"] == id) {
            return line;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("no line of {id}");
}

fn posted(id: &str, body: &Value) -> axum::http::Request<Body> {
    let request = request("POST", "/v1/chat/completions").header("content-type", "application/json");
    request.header("x-request-id", id).body(Body::from(body.to_string())).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_line_for_each_request() {
    lines();
    let server = Server::new();
    server.say("An answer of several secret words.");
    for (id, stream) in [("log-whole", false), ("log-stream", true)] {
        let body = chat(json!({"stream": stream, "messages": [{"role": "user", "content": "confidential"}]}));
        assert_eq!(server.call(posted(id, &body)).await.status, 200);
        let line = line_of(id).await;
        assert_eq!(
            (&line["status"], &line["finish"], &line["level"]),
            (&json!(200), &json!("stop"), &json!("INFO"))
        );
        assert_eq!((&line["route"], &line["method"]), (&json!("/v1/chat/completions"), &json!("POST")));
        assert!(
            line["prompt_tokens"].as_u64().unwrap() > 5 && line["generated_tokens"].as_u64().unwrap() > 3
        );
        for time in ["queue_ms", "prefill_ms", "decode_ms", "ttft_ms", "total_ms"] {
            assert!(line[time].as_f64().is_some_and(|ms| ms >= 0.0), "{time}: {line}");
        }
        assert!(line["total_ms"].as_f64() >= line["ttft_ms"].as_f64(), "{line}");
        assert!(line["timestamp"].is_string() && line.get("code").is_none(), "{line}");
    }
    let wrong = chat(json!({"temperature": 9}));
    assert_eq!(server.call(posted("log-wrong", &wrong)).await.status, 400);
    let line = line_of("log-wrong").await;
    assert_eq!((&line["status"], &line["code"]), (&json!(400), &json!("invalid_value")));
    assert!(line.get("prompt_tokens").is_none(), "{line}");
    server.faults.nan_in(0);
    let failing = chat(json!({"cache_prompt": false}));
    assert_eq!(server.call(posted("log-fault", &failing)).await.status, 500);
    let line = line_of("log-fault").await;
    assert_eq!((&line["code"], &line["level"]), (&json!("numerical_fault"), &json!("WARN")));
    let text = String::from_utf8(lines().0.lock().unwrap().clone()).unwrap();
    for secret in ["confidential", "secret", "An answer"] {
        assert!(!text.contains(secret), "{secret} is logged");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_is_logged() {
    lines();
    let server = Server::with(Setup { step: Duration::from_millis(5), ..Setup::default() });
    let live = server.listen().await;
    for (id, stream) in [("log-left-whole", false), ("log-left-stream", true)] {
        let body = chat(json!({"stream": stream, "ignore_eos": true, "max_tokens": 900})).to_string();
        let mut client = live.connect().await;
        let length = body.len();
        client
            .send(&format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: {id}\r\n\
                 content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
            ))
            .await;
        server.until("it decodes", |status| status.decoding == 1).await;
        drop(client);
        server.idle().await;
        let line = line_of(id).await;
        let status = if stream { 200 } else { 499 };
        assert_eq!((&line["finish"], &line["status"]), (&json!("left_decode"), &json!(status)), "{line}");
    }
}

/// All lines of a request, once there is one whose message begins so.
async fn lines_of(id: &str, wanted: &str) -> Vec<Value> {
    for _ in 0..2000 {
        let text = String::from_utf8(lines().0.lock().unwrap().clone()).unwrap();
        let parsed = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let found: Vec<Value> = parsed.filter(|line| line["request_id"] == id).collect();
        if found.iter().any(|line| line["message"].as_str().is_some_and(|text| text.starts_with(wanted))) {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("no line of {id} begins with {wanted}");
}

/// Prompts are in the log where that is asked for, and nowhere else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_are_logged_on_demand() {
    lines();
    for (id, log_prompts) in [("log-with", true), ("log-without", false)] {
        let mut setup = Setup::default();
        setup.typed.log_prompts = log_prompts;
        let server = Server::with(setup);
        let messages = json!([{"role": "user", "content": "a very private word"}]);
        server.call(posted(id, &chat(json!({"messages": messages, "max_tokens": 1})))).await.ok();
        let found = lines_of(id, "request").await;
        let shown = found.iter().filter_map(|line| line["prompt"].as_str()).collect::<String>();
        assert_eq!(shown.contains("<|im_start|>user\na very private word"), log_prompts, "{found:?}");
        assert_eq!(format!("{found:?}").contains("private"), log_prompts);
    }
}

/// Greedy replies are made once more when nobody asks for anything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn greedy_replies_are_audited() {
    lines();
    let mut setup = Setup { drafts: Some(engine::fake::FakeDrafts::Sometimes(60)), ..Setup::default() };
    setup.typed.audit = 100.0;
    let server = Server::with(setup);
    server.call(posted("audit-greedy", &chat(json!({"max_tokens": 20, "stop": ["e"]})))).await.ok();
    let found = lines_of("audit-greedy", "audit").await;
    assert!(found.iter().any(|line| line["message"] == "audit: equal"), "{found:?}");
    server
        .call(posted("audit-seeded", &chat(json!({"max_tokens": 20, "temperature": 1, "seed": 1}))))
        .await
        .ok();
    server.call(posted("audit-last", &chat(json!({"max_tokens": 5})))).await.ok();
    lines_of("audit-last", "audit").await;
    counted(&server, r#"clary_audit_total{result="equal"} 2"#).await;
    counted(&server, r#"clary_audit_total{result="different"} 0"#).await;
}

/// Waits for a line of the metrics: what is logged is counted right after.
async fn counted(server: &Server, line: &str) {
    for _ in 0..2000 {
        if server.get("/metrics").await.text().lines().any(|found| found == line) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{line} is not among\n{}", server.get("/metrics").await.text());
}

/// A device that says another token the second time: the audit counts it, says where, and goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_that_differs_is_told_loudly() {
    lines();
    let mut setup = Setup { flip: Some(40), ..Setup::default() };
    setup.typed.audit = 100.0;
    let server = Server::with(setup);
    let said = server.text.tokenizer.encode_raw("It is 95, surely.").unwrap();
    assert!(said.len() > 3 && said[1] != 40, "{said:?}");
    server.say_ids(said.clone());
    let asked = chat(json!({"max_tokens": 20, "clary": {"receipt": true}}));
    let reply = server.call(posted("audit-differs", &asked)).await.ok();
    assert_eq!(reply["choices"][0]["message"]["content"], "It is 95, surely.");
    let found = lines_of("audit-differs", "AUDIT").await;
    let told = found.iter().find(|line| line["message"].as_str().unwrap().starts_with("AUDIT")).unwrap();
    assert_eq!(told["level"], "ERROR", "{told}");
    assert_eq!((&told["token"], &told["served"], &told["plain"]), (&json!(1), &json!(said[1]), &json!(40)));
    assert!(!found.iter().any(|line| line["message"] == "audit: equal"), "{found:?}");
    counted(&server, r#"clary_audit_total{result="different"} 1"#).await;
    counted(&server, r#"clary_audit_total{result="equal"} 0"#).await;
    assert_eq!(server.get("/ready").await.status, 200, "one bad reply does not end the server");
    assert_eq!(server.chat(json!({})).await.status, 200);
}

/// Probes of a server that is loading do not fill the log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_are_quiet() {
    lines();
    let server = Server::with(Setup { loading: true, ..Setup::default() });
    for _ in 0..3 {
        let probe = request("GET", "/ready").header("x-request-id", "probe-loading");
        assert_eq!(server.call(probe.body(Body::empty()).unwrap()).await.status, 503);
    }
    let ask = posted("probe-end", &chat(json!({})));
    assert_eq!(server.call(ask).await.status, 503);
    line_of("probe-end").await;
    let text = String::from_utf8(lines().0.lock().unwrap().clone()).unwrap();
    assert!(!text.contains("probe-loading"), "probes are logged at debug level only");
}
