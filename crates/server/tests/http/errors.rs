//! Every refusal: status, code and path, and that the server goes on.

use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::support::{MODEL, Server, Setup, request};

fn user(content: Value) -> Value {
    json!([{"role": "user", "content": content}])
}

async fn check(server: &Server, fields: Value, status: u16, code: &str, param: &str) {
    let answer = server.chat(fields.clone()).await;
    let (found, found_code, found_param) = answer.error();
    assert_eq!((found, found_code.as_str()), (status, code), "{fields}: {}", answer.text());
    assert_eq!(found_param.unwrap_or_default(), param, "{fields}: {}", answer.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chat_fields_out_of_range() {
    let server = Server::new();
    let invalid = [
        (json!({"temperature": 5.1}), "temperature"),
        (json!({"temperature": -0.1}), "temperature"),
        (json!({"temperature": "0"}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"top_p": 1.1}), "top_p"),
        (json!({"top_k": -1}), "top_k"),
        (json!({"top_k": 1e9}), "top_k"),
        (json!({"min_p": 2}), "min_p"),
        (json!({"presence_penalty": 2.1}), "presence_penalty"),
        (json!({"frequency_penalty": -2.1}), "frequency_penalty"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias.1"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias.x"),
        (json!({"logit_bias": {"7": 1, "07": 1}}), "logit_bias"),
        (json!({"logit_bias": []}), "logit_bias"),
        (json!({"seed": 0.5}), "seed"),
        (json!({"n": 0}), "n"),
        (json!({"n": 9}), "n"),
        (json!({"n": 5}), "n"),
        (json!({"best_of": 2}), "best_of"),
        (json!({"stop": ""}), "stop[0]"),
        (json!({"stop": ["a", "x".repeat(1025)]}), "stop[1]"),
        (json!({"stop": vec!["a"; 65]}), "stop"),
        (json!({"stop": 1}), "stop"),
        (json!({"stop_token_ids": [99999]}), "stop_token_ids[0]"),
        (json!({"ignore_eos": 1}), "ignore_eos"),
        (json!({"logprobs": 1}), "logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"top_logprobs": 1}), "top_logprobs"),
        (json!({"prompt_logprobs": 21}), "prompt_logprobs"),
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"max_tokens": 5, "max_completion_tokens": 6}), "max_tokens"),
        (json!({"reasoning_effort": "huge"}), "reasoning_effort"),
        (json!({"thinking_budget": -2}), "thinking_budget"),
        (json!({"reasoning_format": "other"}), "reasoning_format"),
        (json!({"cache_salt": "x".repeat(257)}), "cache_salt"),
        (json!({"speculative": {"max_draft": 9}}), "speculative.max_draft"),
        (json!({"chat_template_kwargs": {"enable_thinking": 1}}), "chat_template_kwargs.enable_thinking"),
        (json!({"chat_template_kwargs": {"add_vision_id": []}}), "chat_template_kwargs.add_vision_id"),
        (json!({"stream": "yes"}), "stream"),
        (json!({"stream_options": {"include_usage": 1}}), "stream_options.include_usage"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": user(json!(1))}), "messages[0].content"),
        (
            json!({"messages": user(json!(vec![json!({"type": "text", "text": "a"}); 257]))}),
            "messages[0].content",
        ),
        (json!({"messages": user(json!([{"type": "video_url"}]))}), "messages[0].content[0].type"),
        (json!({"messages": [{"role": "robot", "content": "a"}]}), "messages[0].role"),
        (json!({"messages": call(json!([1]))}), "messages[1].tool_calls[0].function.arguments"),
        (
            json!({"messages": [{"role": "tool", "tool_call_id": "z", "content": ""}]}),
            "messages[0].tool_call_id",
        ),
        (json!({"continue_final_message": true}), "continue_final_message"),
        (json!({"tools": tool(json!({"name": "a b"}))}), "tools[0].function.name"),
        (json!({"tools": vec![tool(json!({"name": "f"}))[0].clone(); 257]}), "tools"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"structured_outputs": {"choice": []}}), "structured_outputs.choice"),
        (json!({"guided_regex": "x".repeat(8193)}), "guided_regex"),
    ];
    for (fields, param) in invalid {
        check(&server, fields, 400, "invalid_value", param).await;
    }
}

/// A chat with a call that has these arguments.
fn call(arguments: Value) -> Value {
    json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": null, "tool_calls": [{
        "id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "a", "content": "1"}])
}

/// Tools with this function alone.
fn tool(function: Value) -> Value {
    json!([{"type": "function", "function": function}])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chat_fields_that_are_not_supported() {
    let server = Server::new();
    let part = |part: Value| json!({"messages": user(json!([{"type": "text", "text": "a"}, part]))});
    let unsupported = [
        (json!({"functions": []}), "functions"),
        (json!({"function_call": "auto"}), "function_call"),
        (json!({"modalities": ["audio"]}), "modalities"),
        (json!({"web_search_options": {}}), "web_search_options"),
        (json!({"chat_template_kwargs": {"x": 1}}), "chat_template_kwargs.x"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": tool(json!({"name": "f"})), "tool_choice": "required"}), "tool_choice"),
        (json!({"tools": tool(json!({"name": "f", "strict": true}))}), "tools[0].function.strict"),
        (json!({"response_format": {"type": "json_object"}}), "response_format.type"),
        (json!({"guided_choice": ["a"]}), "guided_choice"),
        (
            json!({"messages": user(json!([{"type": "image_url", "image_url":
                {"url": "data:image/png;base64,AA"}}]))}),
            "messages[0].content[0]",
        ),
        (part(json!({"type": "file", "file": {"file_id": "f"}})), "messages[0].content[1]"),
        (part(json!({"type": "input_image", "file_id": "f"})), "messages[0].content[1].file_id"),
        (part(json!({"type": "input_audio", "input_audio": {"data": "AA"}})), "messages[0].content[1]"),
    ];
    for (fields, param) in unsupported {
        check(&server, fields, 400, "unsupported_parameter", param).await;
    }
    let schema =
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}});
    check(&server, schema, 400, "unsupported_schema", "response_format.json_schema.schema").await;
    check(&server, json!({"model": null}), 400, "missing_field", "model").await;
    check(&server, json!({"messages": null}), 400, "missing_field", "messages").await;
    assert_eq!(server.chat(json!({"functions": null, "modalities": null})).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_are_no_json() {
    let server = Server::new();
    let path = "/v1/chat/completions";
    let deep = format!(r#"{{"model":"demo","messages":{}1{}}}"#, "[".repeat(60_000), "]".repeat(60_000));
    for body in ["", "{", "nul", r#"{"model":"a","model":"b"}"#, "\u{feff}{}", &deep] {
        let began = Instant::now();
        let answer = server.post_text(path, body.to_owned()).await;
        assert_eq!(answer.error(), (400, "invalid_json".into(), None), "{}", answer.text());
        assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
    }
    assert_eq!(server.post_text(path, vec![b'{', 0xff, b'}']).await.error().1, "invalid_json");
    assert_eq!(server.post_text(path, "[]").await.error().1, "invalid_value");
    let typed = |kind: &str| request("POST", path).header("content-type", kind);
    for kind in ["text/plain", "application/jsonp", ""] {
        let answer = server.call(typed(kind).body(Body::from("{}")).unwrap()).await;
        assert_eq!(answer.error().1, "unsupported_media_type");
        assert_eq!(answer.status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    }
    let packed = typed("application/json").header("content-encoding", "gzip");
    assert_eq!(server.call(packed.body(Body::from("{}")).unwrap()).await.status, 415);
    let answer = server.call(typed("application/json; charset=utf-8").body(Body::from("{}")).unwrap()).await;
    assert_eq!(answer.error().1, "missing_field");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_bodies_and_headers() {
    let mut setup = Setup::default();
    setup.typed.limits.body = 1000;
    let server = Server::with(setup);
    let long = json!({"model": "x".repeat(2000)}).to_string();
    let answer = server.post_text("/v1/completions", long.clone()).await;
    assert_eq!(answer.error(), (413, "body_too_large".into(), None));
    let declared = request("POST", "/v1/completions").header("content-type", "application/json");
    let declared = declared.header("content-length", "5000").body(Body::empty()).unwrap();
    assert_eq!(server.call(declared).await.status, 413);
    let header = |name: &str, length: usize| request("GET", "/version").header(name, "x".repeat(length));
    assert_eq!(
        server.call(header("x-a", 16 << 10).body(Body::empty()).unwrap()).await.error().1,
        "headers_too_large"
    );
    let mut many = request("GET", "/version");
    for index in 0..5 {
        many = many.header(format!("x-{index}"), "x".repeat(15 << 10));
    }
    assert_eq!(server.call(many.body(Body::empty()).unwrap()).await.status, 431);
    assert_eq!(server.call(header("x-a", 15 << 10).body(Body::empty()).unwrap()).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_that_are_not_there() {
    let server = Server::new();
    assert_eq!(server.get("/v1/nothing").await.error(), (404, "not_found".into(), None));
    let wrong = server.get("/v1/chat/completions").await;
    assert_eq!(wrong.error(), (405, "method_not_allowed".into(), None));
    assert_eq!(wrong.headers["allow"], "POST");
    let wrong = server.post("/health", &json!({})).await;
    assert_eq!(wrong.status, 405);
    assert!(wrong.headers["allow"].to_str().unwrap().contains("GET"));
    for path in ["/v1/embeddings", "/infill", "/v1/rerank", "/v1/audio/speech", "/v1/images/generations"] {
        assert_eq!(
            server.post(path, &json!({})).await.error(),
            (501, "not_implemented".into(), None),
            "{path}"
        );
    }
    let suffix = server.complete(json!({"prompt": "a", "suffix": "b"})).await;
    assert_eq!(suffix.error(), (501, "not_implemented".into(), Some("suffix".into())));
    assert_eq!(server.get("/v1/models/other").await.error().1, "model_not_found");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_models_are_noted_or_refused() {
    let server = Server::new();
    let reply = server.chat(json!({"model": "gpt-9", "clary": {"notes": true}})).await.ok();
    assert_eq!(reply["model"], MODEL);
    assert_eq!(reply["clary"]["notes"], json!([{"code": "model_substituted", "path": "model"}]));
    let mut setup = Setup::default();
    setup.typed.reject_unknown_model = true;
    setup.typed.aliases = vec!["small".into()];
    let server = Server::with(setup);
    check(&server, json!({"model": "gpt-9"}), 404, "model_not_found", "model").await;
    assert_eq!(server.chat(json!({"model": "small"})).await.ok()["model"], MODEL);
    assert_eq!(server.get("/v1/models/small").await.ok()["id"], MODEL);
}

/// T83: the words that clients look for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overflow_is_said_in_known_words() {
    let server = Server::new();
    let words = "word ".repeat(1200);
    let answer = server.chat(json!({"messages": user(json!(words))})).await;
    assert_eq!(answer.error(), (400, "context_length_exceeded".into(), None));
    let error = answer.json()["error"].clone();
    let (tokens, context) = (error["n_prompt_tokens"].as_u64().unwrap(), error["n_ctx"].as_u64().unwrap());
    assert_eq!(context, 1024);
    assert_eq!(
        error["message"],
        format!(
            "This model's maximum context length is {context} tokens, but the prompt is too long: {tokens} \
             tokens > {context} maximum. The request ({tokens} tokens) exceeds the available context size \
             ({context} tokens). Reduce the length of the messages."
        )
    );
    let message = error["message"].as_str().unwrap().to_lowercase();
    for pattern in
        ["maximum context length is", "prompt is too long", "exceeds the available context size", "maximum"]
    {
        assert!(message.contains(pattern), "{pattern}");
    }
    assert_eq!(server.complete(json!({"prompt": words})).await.error().1, "context_length_exceeded");
    // What fits without its reply runs to the end of the context.
    let near = server
        .chat(json!({"messages": user(json!("word ".repeat(900))), "max_tokens": 5000,
        "ignore_eos": true}))
        .await
        .ok();
    assert_eq!(near["choices"][0]["finish_reason"], "length");
    let dry = server.chat(json!({"messages": user(json!(words)), "dry_run": true})).await.ok();
    assert_eq!((&dry["fits"], &dry["n_ctx"]), (&json!(false), &json!(1024)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_the_engine() {
    let server = Server::new();
    // Without the cache the whole prompt is one step.
    server.faults.nan_in(0);
    let answer = server.chat(json!({"cache_prompt": false})).await;
    assert_eq!(answer.error(), (500, "numerical_fault".into(), None));
    server.faults.nan_in(3);
    let (events, done) = server.chat(json!({"stream": true, "ignore_eos": true})).await.events();
    assert!(!done, "a failed stream has no [DONE]");
    assert_eq!(events.last().unwrap()["error"]["code"], "numerical_fault");
    server.faults.nan_in(0);
    let scored = json!({"logprobs": true, "top_logprobs": 3, "cache_prompt": false});
    assert_eq!(server.chat(scored).await.error().1, "numerical_fault");
    server.faults.fail_in(0);
    let answer = server.chat(json!({})).await;
    assert_eq!(answer.error(), (500, "device_fault".into(), None));
    assert!(!answer.text().contains("injected"), "no library text: {}", answer.text());
    assert_eq!(server.chat(json!({})).await.status, 200);
    server.faults.panic_in(0);
    assert_eq!(server.chat(json!({})).await.error().0, 500);
    assert_eq!(server.chat(json!({})).await.error(), (500, "internal".into(), None));
    let ready = server.get("/ready").await;
    assert_eq!((ready.status.as_u16(), &ready.json()["reason"]), (503, &json!("faulted")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_still_loading() {
    let server = Server::with(Setup { loading: true, ..Setup::default() });
    server.app.loading(0.42);
    let health = server.get("/health").await;
    assert_eq!(
        (health.status.as_u16(), health.json()),
        (503, json!({"status": "loading", "progress": 0.42}))
    );
    assert_eq!(server.get("/ready").await.json()["reason"], "loading");
    for path in ["/v1/models", "/slots", "/props"] {
        let answer = server.get(path).await;
        assert_eq!(answer.error(), (503, "loading".into(), None), "{path}");
        assert!(answer.headers.contains_key("retry-after"));
    }
    assert_eq!(server.chat(json!({})).await.error().1, "loading");
    assert_eq!(server.get("/metrics").await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_and_a_long_wait() {
    let setup = Setup {
        step: Duration::from_millis(20),
        slots: Some(1),
        queue_max: Some(1),
        queue_timeout: Some(Duration::from_millis(100)),
        ..Setup::default()
    };
    let server = Server::with(setup);
    let long = json!({"ignore_eos": true, "max_tokens": 40});
    let late = async {
        server.until("one runs", |status| status.decoding == 1).await;
        let waiting = server.chat(long.clone());
        let refused = async {
            server.until("one waits", |status| status.queued == 1).await;
            server.chat(long.clone()).await
        };
        tokio::join!(waiting, refused)
    };
    let (first, (waited, refused)) = tokio::join!(server.chat(long.clone()), late);
    assert_eq!(first.status, 200);
    assert_eq!(waited.error(), (503, "queue_timeout".into(), None));
    assert_eq!(refused.error(), (429, "queue_full".into(), None));
    assert!(waited.headers.contains_key("retry-after") && refused.headers.contains_key("retry-after"));
}

/// What is far too long says so, however long it is, and what is too many names the limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn very_large_requests_have_the_right_codes() {
    let server = Server::new();
    let huge = "word and more ".repeat(1 << 20);
    let message = json!([{"role": "user", "content": huge}]);
    let answer = server.chat(json!({"messages": message})).await;
    assert_eq!(answer.error(), (400, "context_length_exceeded".into(), None));
    let told = answer.json()["error"]["n_prompt_tokens"].as_u64().unwrap();
    assert!((1 << 20..8 << 20).contains(&told), "{told}");
    let parts = json!([{"role": "user", "content": [{"type": "text", "text": huge}]}]);
    let body = json!({"model": MODEL, "messages": parts, "max_tokens": 5});
    let answer = server.post("/v1/messages", &body).await;
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("prompt is too long"));
    let counted = server.post("/v1/messages/count_tokens", &body).await;
    assert!(counted.json()["error"]["message"].as_str().unwrap().contains("prompt is too long"));
    // Arguments of calls are text as well, be it one string or a million numbers.
    for arguments in [json!({"text": huge}), json!({"numbers": vec![1; 1 << 20]})] {
        let call = json!({"id": "c", "function": {"name": "f", "arguments": arguments.to_string()}});
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "b"}]);
        let answer = server.chat(json!({"messages": messages})).await;
        assert_eq!(answer.error(), (400, "context_length_exceeded".into(), None));
        let told = answer.json()["error"]["n_prompt_tokens"].as_u64().unwrap();
        assert!((1 << 19..8 << 20).contains(&told), "{told}");
    }
    let answer = server.complete(json!({"prompt": ["a", huge]})).await;
    assert_eq!(answer.error(), (400, "context_length_exceeded".into(), None));
    let many: Vec<Value> = (0..5001)
        .map(|at| json!({"role": if at % 2 == 0 { "user" } else { "assistant" }, "content": "a"}))
        .collect();
    let error = server.chat(json!({"messages": many})).await;
    assert_eq!(error.error(), (400, "invalid_value".into(), Some("messages".into())));
    let message = error.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("5001 messages, at most 4096"), "{message}");
    let body = json!({"model": MODEL, "messages": many, "max_tokens": 5});
    let answer = server.post("/v1/messages", &body).await;
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("at most 4096"));
}

/// Answers that come before a body has been read say that the connection ends; others do not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_was_not_read_ends_the_connection() {
    let live = Server::new().listen().await;
    let closes = "connection: close\r\n";
    for (path, status) in [("/api/pull", 501), ("/v1/nothing", 404), ("/v1/models", 405)] {
        let mut client = live.connect().await;
        let head = "host: localhost\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n";
        client.send(&format!("POST {path} HTTP/1.1\r\n{head}")).await;
        let answer = client.until("\r\n\r\n").await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(closes),
            "{path}: {answer}"
        );
    }
    let mut client = live.connect().await;
    for body in [json!({}), json!({"model": MODEL, "messages": user(json!("hi")), "max_tokens": 1})] {
        client.read.clear();
        client.post("/v1/chat/completions", &body).await;
        let answer = client.until("}").await;
        assert!(!answer.contains(closes), "{answer}");
    }
}
