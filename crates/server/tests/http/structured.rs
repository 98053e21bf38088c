//! Structured output over HTTP, with the real grammars: T56 to T59 of `docs/troubles.md`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::fake::FakeDrafts;
use serde_json::{Value, json};
use text::GrammarCompiler;

use crate::support::{Server, Setup, comparable, joined, text_side};

/// A server over the fake model, which writes at random.
fn server() -> Server {
    let text = text_side();
    let compiler = GrammarCompiler::new(&text.tokenizer, &text.defaults.stop_ids).unwrap();
    Server::with(Setup {
        grammar: Some(Arc::new(compiler)),
        drafts: Some(FakeDrafts::Sometimes(60)),
        ..Setup::default()
    })
}

fn schema() -> Value {
    json!({"type": "object", "properties": {"ok": {"type": "boolean"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["ok", "size"], "additionalProperties": false})
}

fn format(schema: Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}})
}

/// T56, T57: thinking or not, constrained or not, streamed or not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_eight_ways() {
    let server = server();
    for (effort, constrained) in [("none", true), ("high", true), ("none", false), ("high", false)] {
        let mut fields = json!({"reasoning_effort": effort, "thinking_budget": 6, "temperature": 1, "seed": 4,
            "max_tokens": 120});
        if constrained {
            fields["response_format"] = format(schema());
        }
        let whole = server.chat(fields.clone()).await.ok();
        fields["stream"] = json!(true);
        let (events, done) = server.chat(fields).await.events();
        assert!(done);
        assert_eq!(joined(&events), comparable(&whole));
        let choice = &whole["choices"][0];
        assert_eq!(choice["message"].get("reasoning_content").is_some(), effort == "high", "{choice}");
        let content = choice["message"]["content"].as_str().unwrap();
        let value: Option<Value> = serde_json::from_str(content).ok();
        let is_valid = value
            .is_some_and(|value| value["ok"].is_boolean() && value["size"].as_u64().is_some_and(|n| n < 100));
        assert_eq!(is_valid, constrained, "{choice}");
        if constrained {
            assert_eq!(choice["finish_reason"], "stop");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_wish() {
    let server = server();
    let ask = async |mut fields: Value| {
        fields["temperature"] = json!(1);
        fields["max_tokens"] = json!(200);
        server.chat(fields).await.ok()["choices"][0].clone()
    };
    let text = |choice: &Value| choice["message"]["content"].as_str().unwrap().to_owned();
    assert!(["red", "green"].contains(&&*text(&ask(json!({"guided_choice": ["red", "green"]})).await)));
    let code = text(&ask(json!({"structured_outputs": {"regex": "[A-Z]{3}-[0-9]{2}"}})).await);
    assert!(code.len() == 6 && code.as_bytes()[3] == b'-', "{code}");
    let tools = json!([{"type": "function", "function": {"name": "now"}}, {"type": "function", "function":
        {"name": "paint", "strict": true, "parameters": {"type": "object", "required": ["color"],
        "properties": {"color": {"enum": ["red", "green"]}}}}}]);
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "paint"}})] {
        let reply = ask(json!({"tools": tools, "tool_choice": choice, "parallel_tool_calls": false})).await;
        assert_eq!(reply["finish_reason"], "tool_calls", "{reply}");
        let call = &reply["message"]["tool_calls"][0]["function"];
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        match call["name"].as_str() {
            Some("paint") => assert!(["red", "green"].contains(&arguments["color"].as_str().unwrap())),
            name => assert!(name == Some("now") && choice == "required", "{reply}"),
        }
    }
    // The model may call or answer.
    let reply = ask(json!({"tools": tools, "response_format": format(schema())})).await;
    match reply["finish_reason"].as_str() {
        Some("tool_calls") => assert_eq!(reply["message"]["content"], Value::Null, "{reply}"),
        _ => assert!(serde_json::from_str::<Value>(&text(&reply)).unwrap()["ok"].is_boolean(), "{reply}"),
    }
}

/// T58, T59: nothing is served without the constraint it asked for, and the answer comes at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals() {
    let server = server();
    let nested = format!("{}1{}", "{\"items\":".repeat(60_000), "}".repeat(60_000));
    let parentheses = format!("{}a{}", "(".repeat(60_000), ")".repeat(60_000));
    let schema_at = "/response_format/json_schema/schema";
    for (fields, code, param) in [
        (
            json!({"response_format": format(json!({"properties": {"a": {"not": {}}}}))}),
            "unsupported_schema",
            format!("{schema_at}/properties/a/not"),
        ),
        (
            json!({"response_format": format(json!({"pattern": parentheses}))}),
            "constraint_too_complex",
            format!("{schema_at}/pattern"),
        ),
        (
            json!({"response_format": format(json!({"pattern": "["}))}),
            "invalid_value",
            format!("{schema_at}/pattern"),
        ),
        (json!({"guided_regex": "("}), "invalid_value", "guided_regex".into()),
        (json!({"guided_json": nested}), "invalid_value", "guided_json".into()),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f", "strict": true,
            "parameters": {"type": "object", "properties": {"a": {"uniqueItems": true}}}}}]}),
            "unsupported_schema",
            "/tools/0/function/parameters/properties/a/uniqueItems".into(),
        ),
    ] {
        let begin = Instant::now();
        let error = server.chat(fields).await.error();
        assert!(begin.elapsed() < Duration::from_millis(500), "{:?} for {param}", begin.elapsed());
        assert_eq!(error, (400, code.into(), Some(param)));
    }
    server.chat(json!({"max_tokens": 1})).await.ok();
}

/// What cannot be enforced is refused for a strict function, and said for another, in every dialect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schemas_that_cannot_be_enforced() {
    let server = server();
    let parameters = json!({"type": "object",
        "properties": {"link": {"type": "string", "format": "uri", "maxLength": 5},
        "count": {"type": "integer", "minimum": 1, "maximum": 3}}, "required": ["count"]});
    let messages = json!([{"role": "user", "content": "x"}]);
    let common = json!({"model": crate::support::MODEL, "max_tokens": 300, "temperature": 1, "seed": 3,
        "clary": {"notes": true}});
    let with = |fields: Value| {
        let mut body = common.clone();
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        body
    };
    let chat = |strict: bool| {
        with(json!({"messages": messages, "tool_choice": "required", "reasoning_effort": "none",
            "tools": [{"type": "function", "function": {"name": "now"}}, {"type": "function", "function":
                {"name": "f", "strict": strict, "parameters": parameters}}]}))
    };
    let anthropic = |strict: bool| {
        with(json!({"messages": messages, "tool_choice": {"type": "any"}, "thinking": {"type": "disabled"},
            "tools": [{"type": "web_search_20250305", "name": "web_search"},
                {"name": "f", "strict": strict, "input_schema": parameters}]}))
    };
    let responses = |strict: bool| {
        with(json!({"input": "x", "tool_choice": "required", "reasoning": {"effort": "none"},
            "tools": [{"type": "web_search"},
                {"type": "function", "name": "f", "strict": strict, "parameters": parameters}]}))
    };
    for (route, ask, path) in [
        ("/v1/chat/completions", &chat as &dyn Fn(bool) -> Value, "/tools/1/function/parameters"),
        ("/v1/messages", &anthropic, "/tools/1/input_schema"),
        ("/v1/responses", &responses, "/tools/1/parameters"),
    ] {
        let path = format!("{path}/properties/link/format");
        let refused = server.post(route, &ask(true)).await;
        assert_eq!(refused.status, 400);
        let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with(&format!("{path}: function f: ")), "{route}: {message}");
        let reply = server.post(route, &ask(false)).await.ok();
        let notes = reply["clary"]["notes"].as_array().unwrap();
        assert!(notes.contains(&json!({"code": "schema_not_enforced", "path": path})), "{route}: {notes:?}");
    }
    // The rest holds.
    let body = with(json!({"messages": messages, "reasoning_effort": "none",
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}));
    let reply = server.post("/v1/chat/completions", &body).await.ok();
    let call = &reply["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"];
    let arguments: Value = serde_json::from_str(call.as_str().unwrap()).unwrap();
    assert!((1..=3).contains(&arguments["count"].as_i64().unwrap()), "{reply}");
}

/// Anthropic's two fields for the form of an answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forms_of_anthropic_answers() {
    let server = server();
    let form = json!({"type": "json_schema", "schema": schema()});
    let ask = async |fields: Value| {
        let mut body = json!({"model": crate::support::MODEL, "max_tokens": 200, "temperature": 1, "seed": 2,
            "messages": [{"role": "user", "content": "x"}], "thinking": {"type": "disabled"}});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        server.post("/v1/messages", &body).await
    };
    for fields in
        [json!({"output_format": form}), json!({"output_config": {"format": form, "effort": "low"}})]
    {
        let reply = ask(fields).await.ok();
        let value: Value = serde_json::from_str(reply["content"][0]["text"].as_str().unwrap()).unwrap();
        assert!(value["ok"].is_boolean() && value["size"].is_u64(), "{reply}");
    }
    let twice = ask(json!({"output_format": form, "output_config": {"format": form}})).await;
    assert!(twice.json()["error"]["message"].as_str().unwrap().starts_with("output_config.format:"));
}
