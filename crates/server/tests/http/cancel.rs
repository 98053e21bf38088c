//! T66: a client that leaves, at every stage.

use std::time::Duration;

use serde_json::json;

use crate::support::{Server, Setup, chat};

fn slow() -> Server {
    Server::with(Setup { step: Duration::from_millis(10), slots: Some(1), ..Setup::default() })
}

const FOREVER: usize = 900;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_decoding() {
    let server = slow();
    let live = server.listen().await;
    for stream in [true, false] {
        for effort in ["none", "high"] {
            let fields = json!({"stream": stream, "ignore_eos": true, "max_tokens": FOREVER,
                "reasoning_effort": effort});
            let client = live.post("/v1/chat/completions", &chat(fields)).await;
            server.until("it decodes", |status| status.decoding == 1).await;
            let slots = server.get("/slots").await.ok();
            assert_eq!(slots[0]["state"], "decode");
            drop(client);
            server.idle().await;
            assert_eq!(server.get("/slots").await.ok()[0]["state"], "idle");
        }
    }
    let text = server.get("/metrics").await;
    assert!(text.text().contains(r#"clary_cancelled_total{stage="decode"} 4"#), "{}", text.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_queued() {
    let server = slow();
    let live = server.listen().await;
    let first =
        live.post("/v1/chat/completions", &chat(json!({"ignore_eos": true, "max_tokens": FOREVER}))).await;
    server.until("one runs", |status| status.decoding == 1).await;
    for stream in [true, false] {
        let second =
            live.post("/v1/chat/completions", &chat(json!({"stream": stream, "ignore_eos": true}))).await;
        server.until("one waits", |status| status.queued == 1).await;
        drop(second);
        server.until("none waits", |status| status.queued == 0).await;
        assert_eq!(server.engine.status().decoding, 1, "the other goes on");
    }
    drop(first);
    server.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_prompt_is_read() {
    let server = Server::with(Setup { step: Duration::from_millis(150), slots: Some(1), ..Setup::default() });
    let live = server.listen().await;
    let words = "word ".repeat(900);
    let fields = json!({"messages": [{"role": "user", "content": words}], "stream": true, "ignore_eos": true,
        "max_tokens": FOREVER});
    let client = live.post("/v1/chat/completions", &chat(fields)).await;
    server.until("it prefills", |status| status.prefilling == 1).await;
    drop(client);
    server.idle().await;
    assert_eq!(server.engine.status().counters.generated, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_call_is_written() {
    let server = slow();
    let live = server.listen().await;
    server.say(&format!("<tool_call>\n<function=f>\n<parameter=x>\n{}", "word ".repeat(600)));
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let fields = json!({"stream": true, "tools": tools, "max_tokens": FOREVER});
    let mut client = live.post("/v1/chat/completions", &chat(fields)).await;
    client.until("assistant").await;
    server.until("it decodes", |status| status.decoding == 1).await;
    drop(client);
    server.idle().await;
}

/// A cancelled reply leaves its state in the cache (T09).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_computed_is_kept() {
    let server = slow();
    let live = server.listen().await;
    let fields = json!({"stream": true, "ignore_eos": true, "max_tokens": FOREVER});
    let mut client = live.post("/v1/chat/completions", &chat(fields)).await;
    client.until("\"content\":\"\"").await;
    server.until("it decodes", |status| status.counters.generated > 5).await;
    drop(client);
    server.idle().await;
    let again = server.chat(json!({"max_tokens": 1})).await.ok();
    assert!(again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0);
}
