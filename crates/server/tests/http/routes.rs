//! Routes that show.

use serde_json::{Value, json};

use crate::support::{MODEL, Server, Setup};
use server::http::Typed;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_and_facts() {
    let server = Server::new();
    let list = server.get("/v1/models").await.ok();
    let model = &list["data"][0];
    assert_eq!(
        (&list["object"], &model["id"], &model["owned_by"]),
        (&json!("list"), &json!(MODEL), &json!("clary"))
    );
    assert_eq!((&model["max_model_len"], &model["meta"]["n_ctx"]), (&json!(1024), &json!(1024)));
    assert_eq!(server.get("/v1/models/demo").await.ok(), *model);
    let props = server.get("/props").await.ok();
    assert_eq!(props["total_slots"], 4);
    assert_eq!(props["default_generation_settings"]["params"]["top_k"], 20);
    assert_eq!(props["chat_template"], server.text.template.source());
    assert_eq!(server.get("/version").await.ok()["backend"], "cpu");
    let info = server.get("/tokenizer_info").await.ok();
    assert_eq!(info["vocab_size"], server.text.tokenizer.vocab_size());
    let slots = server.get("/slots").await.ok();
    assert_eq!(slots.as_array().unwrap().len(), 4);
    assert!(slots.as_array().unwrap().iter().all(|slot| slot["state"] == "idle"));
    assert_eq!(server.get("/health").await.ok(), json!({"status": "ok"}));
    let ready = server.get("/ready").await.ok();
    assert_eq!((&ready["running"], &ready["last_step_age_ms"]), (&json!(0), &json!(0)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_both_ways() {
    let server = Server::new();
    let text = "Hello <|im_end|> 삼";
    let raw = server.text.tokenizer.encode_raw(text).unwrap();
    let tokens = server.post("/tokenize", &json!({"prompt": text})).await.ok();
    assert_eq!((&tokens["tokens"], &tokens["count"]), (&json!(raw), &json!(raw.len())));
    assert_eq!(tokens["max_model_len"], 1024);
    let plain = server.post("/tokenize", &json!({"content": text, "parse_special": false})).await.ok();
    assert_eq!(plain["tokens"], json!(server.text.tokenizer.encode_text(text).unwrap()));
    let back = server.post("/detokenize", &json!({"tokens": raw})).await.ok();
    assert_eq!((&back["prompt"], &back["content"]), (&json!(text), &json!(text)));
    let pieces = server.post("/tokenize", &json!({"prompt": text, "with_pieces": true})).await.ok();
    let bytes: Vec<u8> = pieces["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|piece| serde_json::from_value::<Vec<u8>>(piece["bytes"].clone()).unwrap())
        .collect();
    assert_eq!(bytes, text.as_bytes());
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let chat = server.post("/tokenize", &json!({"messages": messages})).await.ok();
    let applied = server.post("/apply-template", &json!({"messages": messages})).await.ok();
    assert_eq!(chat["tokens"], applied["prompt_token_ids"]);
    assert!(applied["prompt"].as_str().unwrap().contains("Hello"));
    assert_eq!(server.post("/detokenize", &json!({"tokens": [99999]})).await.error().2.unwrap(), "tokens[0]");
    assert_eq!(server.post("/detokenize", &json!({})).await.error().1, "missing_field");
    assert_eq!(server.post("/tokenize", &json!({})).await.error().1, "missing_field");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_count() {
    let server = Server::new();
    server.say("It is 95.");
    server.chat(json!({})).await.ok();
    server.chat(json!({"temperature": 9})).await;
    server.get("/nothing").await;
    server.idle().await;
    let answer = server.get("/metrics").await;
    assert!(answer.headers["content-type"].to_str().unwrap().starts_with("application/openmetrics-text"));
    let text = answer.text();
    for line in [
        r#"clary_requests_total{route="/v1/chat/completions",status="200"} 1"#,
        r#"clary_requests_total{route="/v1/chat/completions",status="400"} 1"#,
        r#"clary_requests_total{route="none",status="404"} 1"#,
        r#"clary_rejected_total{reason="invalid_value"} 1"#,
        r#"clary_slots{state="idle"} 4"#,
        r#"clary_build_info{version="#,
        "clary_queue 0",
        "clary_ttft_seconds_count 1",
        r#"vllm:num_requests_running{model_name="demo"} 0"#,
        r#"vllm:num_requests_waiting{model_name="demo"} 0"#,
        r#"vllm:time_to_first_token_seconds_count{model_name="demo"} 1"#,
        r#"vllm:e2e_request_latency_seconds_count{model_name="demo"} 1"#,
        r#"vllm:kv_cache_usage_perc{model_name="demo"} 0"#,
        r#"vllm:gpu_cache_usage_perc{model_name="demo"} 0"#,
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
    let prompt = server.engine.status().counters.prompt_computed;
    assert!(text.contains(&format!("clary_prompt_tokens_total{{source=\"computed\"}} {prompt}")));
    assert!(text.contains(&format!("vllm:prompt_tokens_total{{model_name=\"demo\"}} {prompt}")));
}

/// Every documented path answers, and every shared field of a request is documented.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_document_fits_the_routes() {
    let server = Server::new();
    let document = server.get("/openapi.json").await.ok();
    for (path, methods) in document["paths"].as_object().unwrap() {
        let path = path.replace("{id}", MODEL);
        for method in methods.as_object().unwrap().keys() {
            let answer = match method.as_str() {
                "get" => server.get(&path).await,
                _ => server.post(&path, &json!({})).await,
            };
            assert!(
                !matches!(answer.status.as_u16(), 404 | 405 | 500..),
                "{method} {path}: {}",
                answer.text()
            );
        }
    }
    let names = |schema: &str| {
        let mut names = Vec::new();
        collect(&document, &document["components"]["schemas"][schema], &mut names);
        names
    };
    for name in
        ["messages", "temperature", "tools", "tool_choice", "stream", "clary", "seed", "thinking_budget"]
    {
        assert!(names("ChatRequest").contains(&name.to_owned()), "{name}");
    }
    for name in ["prompt", "echo", "logprobs", "top_k"] {
        assert!(names("CompletionRequest").contains(&name.to_owned()), "{name}");
    }
}

/// Streams and errors stand in the document, and routes that are left out do not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_document_has_streams_errors_and_only_what_is_served() {
    let document = Server::new().get("/openapi.json").await.ok();
    let chat = &document["paths"]["/v1/chat/completions"]["post"]["responses"];
    assert!(chat["200"]["content"]["text/event-stream"].is_object());
    assert!(
        document["paths"]["/api/chat"]["post"]["responses"]["200"]["content"]["application/x-ndjson"]
            .is_object()
    );
    let schema = |path: &str, status: &str| {
        let answer = &document["paths"][path]["post"]["responses"][status];
        answer["content"]["application/json"]["schema"]["$ref"].as_str().unwrap_or_default().to_owned()
    };
    assert!(schema("/v1/chat/completions", "429").ends_with("/OpenAiError"));
    assert!(schema("/v1/messages", "400").ends_with("/AnthropicError"));
    assert!(schema("/api/chat", "413").ends_with("/OllamaError"));
    let typed = Typed { ollama: false, anthropic: false, responses: false, ..Typed::default() };
    let document = Server::with(Setup { typed, ..Setup::default() }).get("/openapi.json").await.ok();
    let left: Vec<&String> = document["paths"].as_object().unwrap().keys().collect();
    assert!(left.contains(&&"/v1/chat/completions".to_owned()), "{left:?}");
    let others = ["/api/", "/v1/messages", "/v1/responses"];
    assert!(left.iter().all(|path| !others.iter().any(|other| path.starts_with(other))), "{left:?}");
}

fn collect(document: &Value, schema: &Value, names: &mut Vec<String>) {
    names.extend(schema["properties"].as_object().into_iter().flatten().map(|(name, _)| name.clone()));
    for part in schema["allOf"].as_array().into_iter().flatten() {
        let target = part["$ref"].as_str().and_then(|path| path.rsplit('/').next());
        let part = target.map_or(part, |name| &document["components"]["schemas"][name]);
        collect(document, part, names);
    }
}
