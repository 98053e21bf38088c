//! The Responses dialect: items, events, and what is skipped.

use serde_json::{Value, json};

use crate::support::{Answer, MODEL, Server};

const CALL: &str = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>";
const PATCH: &str =
    "<tool_call>\n<function=patch>\n<parameter=input>\n*** Begin\n</parameter>\n</function>\n</tool_call>";

fn tools() -> Value {
    json!([{"type": "function", "name": "f", "parameters": {"type": "object", "properties":
        {"x": {"type": "integer"}}}}, {"type": "custom", "name": "patch", "description": "d"},
        {"type": "web_search"}, {"type": "local_shell"}])
}

async fn ask(server: &Server, fields: Value) -> Answer {
    let mut body = json!({"model": MODEL, "input": "Hello", "temperature": 0, "max_output_tokens": 300,
        "reasoning": {"effort": "none"}});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    server.post("/v1/responses", &body).await
}

/// Walks the events by their grammar; returns the last response, whose items the events must have told.
pub fn walk(text: &str) -> Value {
    let mut items: Vec<Value> = Vec::new();
    let mut told = String::new();
    let mut open = false;
    let mut last = Value::Null;
    for (number, block) in text.split("\n\n").filter(|block| !block.is_empty()).enumerate() {
        assert!(last.is_null(), "nothing follows the end");
        let (name, data) = block.split_once('\n').unwrap();
        let name = name.strip_prefix("event: ").unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!((&data["type"], &data["sequence_number"]), (&json!(name), &json!(number)));
        if let Some(index) = data["output_index"].as_u64() {
            let wanted = items.len() as u64 - u64::from(name != "response.output_item.added");
            assert_eq!(index, wanted, "{name}");
        }
        match (number, name) {
            (0, name) => assert_eq!(name, "response.created"),
            (1, name) => assert_eq!(name, "response.in_progress"),
            (_, "response.output_item.added") => {
                assert!(!std::mem::replace(&mut open, true), "an item is done before the next");
                items.push(data["item"].clone());
                told.clear();
            }
            (_, "response.output_item.done") => {
                assert!(std::mem::replace(&mut open, false));
                let item = &data["item"];
                assert_eq!(item["id"], items.last().unwrap()["id"]);
                let parts = [&item["content"][0]["text"], &item["arguments"], &item["input"]];
                assert!(parts.iter().any(|part| part.as_str() == Some(&told)), "{item}: {told}");
                *items.last_mut().unwrap() = item.clone();
            }
            (_, "response.completed" | "response.incomplete" | "response.failed") => {
                last = data["response"].clone();
            }
            (_, name) if name.ends_with(".delta") => {
                assert_eq!(data["item_id"], items.last().unwrap()["id"]);
                told.push_str(data["delta"].as_str().unwrap());
            }
            (_, name) => assert!(name.ends_with(".done") || name.ends_with("part.added"), "{name}"),
        }
    }
    assert_eq!(last["output"], json!(items));
    last
}

fn without_ids(mut response: Value) -> Value {
    for name in ["id", "created_at"] {
        response[name] = Value::Null;
    }
    for item in response["output"].as_array_mut().unwrap() {
        for name in ["id", "call_id"] {
            item.as_object_mut().unwrap().remove(name);
        }
    }
    response
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_join_to_the_whole_response() {
    let server = Server::new();
    for (text, fields, status, kinds) in [
        ("It is 95.".to_owned(), json!({}), "completed", vec!["message"]),
        ("It is 95 and".to_owned(), json!({"max_output_tokens": 2}), "incomplete", vec!["message"]),
        (
            format!("t\n</think>\n\na {CALL}\n{PATCH} b"),
            json!({"reasoning": {"effort": "high", "summary": "auto"}}),
            "completed",
            vec!["reasoning", "message", "function_call", "custom_tool_call", "message"],
        ),
    ] {
        server.say(&text);
        let mut fields = fields;
        fields["tools"] = tools();
        fields["cache_prompt"] = false.into();
        let whole = ask(&server, fields.clone()).await.ok();
        assert_eq!((&whole["status"], &whole["object"]), (&json!(status), &json!("response")));
        let found = whole["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap());
        assert_eq!(found.collect::<Vec<_>>(), kinds);
        fields["stream"] = true.into();
        let streamed = walk(ask(&server, fields).await.text());
        assert_eq!(without_ids(streamed), without_ids(whole));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_are_echoed() {
    let server = Server::new();
    let fields = json!({"instructions": "Be brief.", "metadata": {"a": "b"}, "tools": tools(), "store": true,
        "clary": {"notes": true}, "include": ["reasoning.encrypted_content"], "temperature": 0.3, "seed": 7});
    let reply = ask(&server, fields).await.ok();
    for (name, wanted) in [
        ("instructions", json!("Be brief.")),
        ("metadata", json!({"a": "b"})),
        ("tools", tools()),
        ("tool_choice", json!("auto")),
        ("store", json!(false)),
        ("previous_response_id", Value::Null),
        ("temperature", json!(0.3)),
        ("truncation", json!("disabled")),
    ] {
        assert_eq!(reply[name], wanted, "{name}");
    }
    // T84: tools that only OpenAI runs are skipped.
    let skipped = |path: &str| json!({"code": "tool_skipped", "path": path});
    assert_eq!(reply["clary"]["notes"], json!([skipped("tools[2]"), skipped("tools[3]")]));
    let usage = &reply["usage"];
    assert!(usage["input_tokens"].as_u64().unwrap() > 0 && usage["output_tokens_details"].is_object());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn items_become_a_history() {
    let server = Server::new();
    let input = json!([
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "REASONS"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"x\":1}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "two"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "one"}]},
        {"type": "compaction", "data": 1}
    ]);
    let mut input = input;
    let foreign = [
        "file_search_call",
        "web_search_call",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "shell_call",
        "apply_patch_call",
    ];
    input.as_array_mut().unwrap().extend(foreign.map(|kind| json!({"type": kind, "id": "x"})));
    let fields = json!({"input": input, "tools": tools(), "clary": {"notes": true}});
    let notes = ask(&server, fields).await.ok()["clary"]["notes"].clone();
    let skipped = |at: usize| json!({"code": "item_skipped", "path": format!("input[{at}]")});
    for at in 8..9 + foreign.len() {
        assert!(notes.as_array().unwrap().contains(&skipped(at)), "{at}: {notes}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals() {
    let server = Server::new();
    for (fields, code, param) in [
        (json!({"previous_response_id": "r"}), "unsupported_parameter", "previous_response_id"),
        (json!({"conversation": "c"}), "unsupported_parameter", "conversation"),
        (json!({"background": true}), "unsupported_parameter", "background"),
        (json!({"truncation": "auto"}), "invalid_value", "truncation"),
        (json!({"input": 1}), "invalid_value", "input"),
        (json!({"input": null}), "missing_field", "input"),
        (json!({"input": [{"type": "function_call", "name": "f"}]}), "missing_field", "input[0].call_id"),
        (
            json!({"input": [{"type": "compaction"},
                {"type": "function_call_output", "call_id": "z", "output": ""}]}),
            "invalid_value",
            "input[1].call_id",
        ),
        (json!({"input": [{"type": "item_reference", "id": "msg_1"}]}), "unsupported_parameter", "input[0]"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"},
                {"type": "input_file", "file_id": "f"}]}]}),
            "unsupported_parameter",
            "input[0].content[1]",
        ),
        (
            json!({"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}),
            "unsupported_schema",
            "text.format.schema",
        ),
    ] {
        let answer = ask(&server, fields.clone()).await;
        assert_eq!(answer.error(), (400, code.into(), Some(param.into())), "{fields}");
    }
    assert_eq!(server.get("/v1/responses/resp_1").await.error(), (404, "not_found".into(), None));
    server.faults.nan_in(3);
    let failed = ask(&server, json!({"stream": true, "ignore_eos": true})).await;
    assert!(failed.text().contains("event: error\n") && failed.text().contains("event: response.failed\n"));
}
