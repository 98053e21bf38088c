//! Anthropic's dialect: requests of its clients, and a state machine over its events.

use serde_json::{Value, json};

use crate::support::{Answer, MODEL, Server, Setup};

const CALL: &str = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>";

fn body(fields: Value) -> Value {
    let mut body = json!({"model": MODEL, "max_tokens": 200, "temperature": 0,
        "messages": [{"role": "user", "content": "Hello"}], "thinking": {"type": "disabled"}});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

async fn ask(server: &Server, fields: Value) -> Answer {
    server.post("/v1/messages", &body(fields)).await
}

fn tools() -> Value {
    json!([{"name": "f", "description": "d", "input_schema": {"type": "object", "properties":
        {"x": {"type": "integer"}}}},
        {"type": "web_search_20250305", "name": "web_search"}])
}

/// T85: walks the events by their grammar and puts the message together.
pub fn walk(text: &str) -> Value {
    let mut message = Value::Null;
    let mut open: Option<usize> = None;
    let mut stopped = false;
    for block in text.split("\n\n").filter(|block| !block.is_empty()) {
        let (name, data) = block.split_once('\n').unwrap();
        let name = name.strip_prefix("event: ").unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(data["type"], name);
        assert!(!stopped, "nothing follows message_stop");
        let index = data["index"].as_u64().map(|index| index as usize);
        match name {
            "message_start" => {
                assert!(message.is_null());
                message = data["message"].clone();
                assert_eq!((&message["content"], &message["stop_reason"]), (&json!([]), &Value::Null));
            }
            "content_block_start" => {
                assert_eq!((open, index), (None, Some(message["content"].as_array().unwrap().len())));
                open = index;
                message["content"].as_array_mut().unwrap().push(data["content_block"].clone());
            }
            "content_block_delta" => {
                assert_eq!(open, index);
                extend(&mut message["content"][index.unwrap()], &data["delta"]);
            }
            "content_block_stop" => {
                assert_eq!(open.take(), index);
                let block = &mut message["content"][index.unwrap()];
                assert!(block["type"] != "thinking" || block["signature"] != "", "a signature comes first");
                if let Some(Value::String(json)) = block.as_object_mut().unwrap().remove("partial") {
                    block["input"] = serde_json::from_str(&json).unwrap();
                }
            }
            "message_delta" => {
                assert_eq!(open, None);
                for name in ["stop_reason", "stop_sequence"] {
                    message[name] = data["delta"][name].clone();
                }
                message["usage"] = data["usage"].clone();
            }
            "message_stop" => stopped = true,
            "ping" => {}
            other => panic!("{other}"),
        }
    }
    assert!(stopped);
    message
}

fn extend(block: &mut Value, delta: &Value) {
    let (from, to) = match delta["type"].as_str().unwrap() {
        "thinking_delta" => ("thinking", "thinking"),
        "signature_delta" => ("signature", "signature"),
        "text_delta" => ("text", "text"),
        "input_json_delta" => ("partial_json", "partial"),
        other => panic!("{other}"),
    };
    assert!(block["signature"].as_str().is_none_or(str::is_empty), "the signature is the last delta");
    let text = format!("{}{}", block[to].as_str().unwrap_or_default(), delta[from].as_str().unwrap());
    block[to] = text.into();
}

fn without_ids(mut message: Value) -> Value {
    message["id"] = Value::Null;
    for block in message["content"].as_array_mut().unwrap() {
        for name in ["id", "signature"] {
            block.as_object_mut().unwrap().remove(name);
        }
    }
    message
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_join_to_the_whole_message() {
    let server = Server::new();
    for (text, thinking, stop, wanted) in [
        ("It is 95.", "disabled", "zebra", "end_turn"),
        ("37 + 58\n</think>\n\nIt is 95.", "enabled", "zebra", "end_turn"),
        ("a\n</think>\n\nb ", "adaptive", "b", "stop_sequence"),
        ("", "disabled", "zebra", "end_turn"),
    ] {
        server.say(text);
        let mut fields =
            json!({"thinking": {"type": thinking}, "stop_sequences": [stop], "cache_prompt": false});
        let whole = ask(&server, fields.clone()).await.ok();
        assert_eq!((&whole["stop_reason"], &whole["type"]), (&json!(wanted), &json!("message")));
        fields["stream"] = true.into();
        let answer = ask(&server, fields).await;
        assert_eq!(without_ids(walk(answer.text())), without_ids(whole), "{text:?}");
    }
    let text = format!("x\n</think>\n\nfirst {CALL}\n{CALL} and more");
    server.say(&text);
    let mut fields = json!({"thinking": {"type": "enabled", "budget_tokens": 32000}, "tools": tools(),
        "cache_prompt": false});
    let whole = ask(&server, fields.clone()).await.ok();
    let kinds: Vec<&str> =
        whole["content"].as_array().unwrap().iter().map(|block| block["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use", "tool_use", "text"]);
    assert_eq!(whole["content"][2]["input"], json!({"x": 1}));
    assert_ne!(whole["content"][2]["id"], whole["content"][3]["id"]);
    assert_eq!(whole["stop_reason"], "tool_use");
    fields["stream"] = true.into();
    assert_eq!(without_ids(walk(ask(&server, fields).await.text())), without_ids(whole));
    let cut = ask(&server, json!({"max_tokens": 1, "cache_prompt": false})).await.ok();
    assert_eq!(cut["stop_reason"], "max_tokens");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn histories_are_understood() {
    let server = Server::new();
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "any"},
            {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "u1", "name": "f", "input": {"x": 1}},
            {"type": "tool_use", "id": "u2", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u2", "content":
                [{"type": "text", "text": "two"}]},
            {"type": "tool_result", "tool_use_id": "u1", "is_error": true, "content": "one"},
            {"type": "text", "text": "c"},
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "DOC"}}]}
    ]);
    let fields = json!({"messages": messages, "tools": tools(), "metadata": {"user_id": "u"}, "anything": 1,
        "clary": {"notes": true}});
    let reply = ask(&server, fields.clone()).await.ok();
    let codes: Vec<&str> = reply["clary"]["notes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|note| note["code"].as_str().unwrap())
        .collect();
    assert!(codes.contains(&"tool_skipped"), "{codes:?}");
    let count = server.post("/v1/messages/count_tokens", &body(fields)).await.ok();
    let usage = &reply["usage"];
    assert_eq!(count["input_tokens"], usage["input_tokens"]);
    let again = ask(&server, json!({"messages": messages, "tools": tools()})).await.ok();
    let (input, cached) = (&again["usage"]["input_tokens"], &again["usage"]["cache_read_input_tokens"]);
    assert!(cached.as_u64().unwrap() > 0);
    assert_eq!(input.as_u64().unwrap() + cached.as_u64().unwrap(), count["input_tokens"].as_u64().unwrap());
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn document(source: Value) -> Value {
    json!({"type": "document", "title": "Report", "source": source})
}

/// What Anthropic's own clients may put into a turn, and what becomes of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documents_and_foreign_blocks() {
    let server = Server::new();
    let plain = document(json!({"type": "text", "media_type": "text/plain", "data": "DOC"}));
    let parts = document(json!({"type": "content", "content": [text("one"), text("two")]}));
    let search = json!({"type": "search_result", "source": "https://a.example", "title": "Found",
        "content": [text("hit")], "citations": {"enabled": true}});
    let result = json!({"type": "tool_result", "tool_use_id": "u", "is_error": true,
        "content": [plain, {"type": "tool_reference", "tool_name": "g"}]});
    let foreign = |kind: &str| json!({"type": kind, "id": "s"});
    let messages = json!([
        {"role": "user", "content": [text("Read:"), plain, parts, search, text("Well?")]},
        {"role": "assistant", "content": [foreign("redacted_thinking"), foreign("server_tool_use"),
            foreign("web_search_tool_result"), foreign("mcp_tool_use"), foreign("mcp_tool_result"),
            text("b"), {"type": "tool_use", "id": "u", "name": "f", "input": {}}]},
        {"role": "user", "content": [result]}
    ]);
    let shown = async |messages: &Value| {
        let fields =
            json!({"messages": messages, "max_tokens": 1, "clary": {"notes": true, "receipt": true}});
        let reply = ask(&server, fields).await.ok();
        let prompt = reply["clary"]["receipt"]["prompt"].clone();
        (prompt, reply["clary"]["notes"].clone())
    };
    let note = |code: &str, path: &str| json!({"code": code, "path": path});
    let (prompt, notes) = shown(&messages).await;
    let mut wanted = vec![note("citations_not_made", "messages[0].content[3].citations")];
    wanted.extend((0..5).map(|at| note("block_skipped", &format!("messages[1].content[{at}]"))));
    wanted.push(note("is_error_not_shown", "messages[2].content[0].is_error"));
    assert_eq!(notes, json!(wanted));
    let same = json!([
        {"role": "user", "content": "Read:\n\nReport\n\nDOC\n\nReport\n\none\n\ntwo\n\n\
            Found\nhttps://a.example\n\nhit\n\nWell?"},
        {"role": "assistant", "content": [text("b"),
            {"type": "tool_use", "id": "u", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u",
            "content": "Report\n\nDOC\n\ng"}]}
    ]);
    assert_eq!(shown(&same).await.0, prompt, "blocks read as their text");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documents_that_are_not_read() {
    let server = Server::new();
    let pdf = json!({"type": "base64", "media_type": "application/pdf", "data": "AA"});
    for (block, path, told) in [
        (document(pdf), "messages[0].content[1].document", "PDF documents are not read; send the text"),
        (
            document(json!({"type": "url", "url": "https://a.example/x.pdf"})),
            "messages[0].content[1].document",
            "PDF",
        ),
        (
            document(json!({"type": "file", "file_id": "f"})),
            "messages[0].content[1].document",
            "keeps no files",
        ),
        (json!({"type": "container_upload", "file_id": "f"}), "messages[0].content[1]", "keeps no files"),
        (
            json!({"type": "image", "source": {"type": "file"}}),
            "messages[0].content[1].image.source",
            "no files",
        ),
        (document(json!({"type": "tape"})), "messages[0].content[1].document.source.type", "not \"tape\""),
        (document(json!({"type": "text"})), "messages[0].content[1].document.source.data", "not null"),
        (
            document(json!({"type": "content", "content": [{"type": "document"}]})),
            "messages[0].content[1].document.source.content[0].type",
            "not \"document\"",
        ),
        (json!({"type": "hologram"}), "messages[0].content[1].type", "not \"hologram\""),
        // Behind a document of several parts the paths are still the client's.
        (
            document(json!({"type": "content", "content": [text("one"),
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}]})),
            "messages[0].content[1].document.source.content[1].image",
            "",
        ),
    ] {
        let fields = json!({"messages": [{"role": "user", "content": [text("a"), block]}]});
        let answer = ask(&server, fields).await;
        let error = answer.json()["error"].clone();
        let message = error["message"].as_str().unwrap();
        assert_eq!((answer.status.as_u16(), &error["type"]), (400, &json!("invalid_request_error")));
        assert!(message.starts_with(&format!("{path}: ")) && message.contains(told), "{path}: {message}");
    }
}

/// T87: a changing first line of the system prompt is left out, so that the cache still hits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn billing_lines_are_left_out() {
    let server = Server::new();
    let ask = async |line: &str| {
        let system = json!([{"type": "text", "text": format!("x-anthropic-billing-header: {line}")},
            {"type": "text", "text": "word ".repeat(100)}]);
        ask(&server, json!({"system": system, "clary": {"notes": true}})).await.ok()
    };
    ask("one").await;
    let second = ask("two").await;
    assert!(second["usage"]["cache_read_input_tokens"].as_u64().unwrap() > 90);
    assert_eq!(second["clary"]["notes"][0], json!({"code": "billing_header_dropped", "path": "system[0]"}));
}

/// What a model without vision cannot see of a tool's result is named as the client knows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn omitted_pictures_have_the_clients_path() {
    let source = json!({"type": "base64", "media_type": "image/png", "data": "AA"});
    let result = json!([{"type": "text", "text": "c"}, {"type": "image", "source": source}]);
    let messages = json!([{"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "u", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "text", "text": "b"},
            {"type": "tool_result", "tool_use_id": "u", "content": result}]}]);
    let reply = ask(&Server::new(), json!({"messages": messages, "clary": {"notes": true}})).await.ok();
    let path = "messages[2].content[1].tool_result.content[1].image";
    assert_eq!(reply["clary"]["notes"][0], json!({"code": "picture_omitted", "path": path}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_have_their_shape() {
    let server = Server::new();
    for (fields, wanted) in [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"messages": [{"role": "robot", "content": "a"}]}), "messages[0].role"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "video"}]}]}),
            "messages[0].content[0].type",
        ),
        (
            json!({"system": [{"type": "text", "text": "s"}], "messages": [{"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u"}]}]}),
            "messages[1].content[0].tool_use_id",
        ),
        (
            json!({"system": "s", "messages": [{"role": "user", "content": [{"type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}]}]}),
            "messages[0].content[0].image",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"},
                {"type": "document",
                 "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}}]}]}),
            "messages[0].content[1].document",
        ),
        (
            json!({"messages": [{"role": "user",
                "content": [{"type": "document", "source": {"type": "text"}}]}]}),
            "messages[0].content[0].document.source.data",
        ),
        (json!({"tool_choice": {"type": "any"}, "tools": tools()}), "tool_choice"),
        (json!({"tool_choice": {"type": "tool", "name": "g"}, "tools": tools()}), "tool_choice.name"),
        (json!({"thinking": {"type": "maybe"}}), "thinking.type"),
    ] {
        let answer = ask(&server, fields.clone()).await;
        let error = answer.json();
        assert_eq!((answer.status.as_u16(), &error["type"]), (400, &json!("error")), "{fields}");
        assert_eq!(error["error"]["type"], "invalid_request_error");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("{wanted}:")), "{fields}: {message}");
        assert_eq!(error["request_id"], answer.headers["x-request-id"].to_str().unwrap());
    }
    let long = ask(&server, json!({"messages": [{"role": "user", "content": "word ".repeat(1200)}]})).await;
    assert!(long.json()["error"]["message"].as_str().unwrap().contains("prompt is too long"));
    server.faults.nan_in(2);
    let failed = ask(&server, json!({"stream": true, "ignore_eos": true})).await;
    assert!(failed.text().contains("event: error\ndata: {\"type\":\"error\""), "{}", failed.text());
    assert!(!failed.text().contains("message_stop"));
    let mut setup = Setup::default();
    setup.typed.anthropic = false;
    assert_eq!(Server::with(setup).post("/v1/messages", &body(json!({}))).await.status, 404);
}

/// Anthropic's clients look for the id under a name of their own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_request_has_its_id() {
    let server = Server::new();
    let refused = ask(&server, json!({"max_tokens": 0})).await;
    assert_eq!(refused.headers["request-id"], refused.headers["x-request-id"]);
    assert_eq!(refused.json()["request_id"], refused.headers["request-id"].to_str().unwrap());
    assert!(!server.get("/v1/models").await.headers.contains_key("request-id"));
}
