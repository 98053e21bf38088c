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
