//! Whether the server can answer, told by the progress of its engine; numbers of the process.

use std::time::Duration;

use serde_json::json;

use crate::support::{Server, Setup, chat};

/// A step that takes long makes the server unready, and new requests hear of it at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stall_is_told_and_goes_by() {
    let mut setup = Setup { step: Duration::from_millis(1500), ..Setup::default() };
    setup.typed.stall_after = Duration::from_millis(100);
    let server = Server::with(setup);
    let first = server.chat(json!({"max_tokens": 2, "cache_prompt": false}));
    let late = async {
        server.until("it runs", |status| status.prefilling == 1).await;
        assert_eq!(server.get("/ready").await.status, 200, "no step is late yet");
        tokio::time::sleep(Duration::from_millis(300)).await;
        let ready = server.get("/ready").await;
        assert_eq!((ready.status.as_u16(), &ready.json()["reason"]), (503, &json!("stalled")));
        assert!(ready.json()["last_step_age_ms"].as_u64().unwrap() >= 100);
        let refused = server.chat(json!({})).await;
        assert_eq!(refused.error(), (503, "stalled".into(), None));
        assert!(refused.headers.contains_key("retry-after"));
        assert_eq!(server.get("/health").await.status, 200, "the process lives");
    };
    let (first, ()) = tokio::join!(first, late);
    first.ok();
    server.idle().await;
    assert_eq!(server.get("/ready").await.status, 200);
    let text = server.get("/metrics").await;
    assert!(text.text().contains(r#"clary_rejected_total{reason="stalled"} 1"#), "{}", text.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_that_are_there_from_the_start() {
    let server = Server::new();
    let text = server.get("/metrics").await;
    for line in [
        r#"clary_cancelled_total{stage="queued"} 0"#,
        r#"clary_tool_calls_total{result="unparsed"} 0"#,
        r#"clary_generated_tokens_total{kind="reasoning"} 0"#,
        r#"clary_prompt_tokens_total{source="cached"} 0"#,
        r#"clary_device_memory_bytes{use="weights"} 5"#,
        "clary_draft_proposed_total 0",
        "clary_numerical_faults_total 0",
        "clary_last_step_age_seconds 0",
        "clary_cache_limit_bytes ",
        "clary_kv_tokens 0",
        "clary_inter_token_seconds_count 0",
        "clary_queue_seconds_count 0",
        "clary_prefill_seconds_count 0",
        "clary_request_seconds_count 0",
        "process_resident_memory_bytes ",
        r#"vllm:generation_tokens_total{model_name="demo"} 0"#,
    ] {
        assert!(text.text().contains(line), "{line} is missing in\n{}", text.text());
    }
    // No label carries a user's text.
    server.post("/v1/chat/completions", &chat(json!({"model": "secret words"}))).await.ok();
    server.get("/secret/words").await;
    let text = server.get("/metrics").await;
    assert!(!text.text().contains("secret"), "{}", text.text());
}
