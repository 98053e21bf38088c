//! Tool calls in streams of every dialect: in pieces as they come, cut, and not what they seemed.

use serde_json::{Value, json};

use crate::support::{Answer, MODEL, Server, joined};

const PARAMETERS: &str = r#"{"type": "object", "properties": {"path": {"type": "string"},
    "text": {"type": "string"}, "count": {"type": "integer"}, "more": {"type": "object"}}}"#;
const TEXT: &str = "fn main() {\n    println!(\"\u{1f600} \\t\");\n}\n";

fn parameters() -> Value {
    serde_json::from_str(PARAMETERS).unwrap()
}

fn written() -> String {
    format!(
        "<tool_call>\n<function=write>\n<parameter=path>\na.rs\n</parameter>\n<parameter=text>\n{TEXT}\n\
         </parameter>\n<parameter=count>\n5.0\n</parameter>\n<parameter=more>\n{{\"a\": [1, 2]}}\n\
         </parameter>\n</function>\n</tool_call>"
    )
}

fn arguments() -> String {
    json!({"path": "a.rs", "text": TEXT, "count": 5, "more": {"a": [1, 2]}}).to_string()
}

async fn chat(server: &Server, fields: Value) -> Answer {
    let mut body = json!({"model": MODEL, "temperature": 0, "max_tokens": 500, "reasoning_effort": "none",
        "messages": [{"role": "user", "content": "Hello"}], "cache_prompt": false,
        "tools": [{"type": "function", "function": {"name": "write", "parameters": parameters()}}]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    server.post("/v1/chat/completions", &body).await
}

async fn messages(server: &Server, fields: Value) -> Answer {
    let mut body = json!({"model": MODEL, "temperature": 0, "max_tokens": 500,
        "thinking": {"type": "disabled"},
        "messages": [{"role": "user", "content": "Hello"}], "cache_prompt": false,
        "tools": [{"name": "write", "input_schema": parameters()}]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    server.post("/v1/messages", &body).await
}

async fn responses(server: &Server, fields: Value) -> Answer {
    let mut body = json!({"model": MODEL, "temperature": 0, "max_output_tokens": 500, "input": "Hello",
        "reasoning": {"effort": "none"}, "cache_prompt": false, "tools": [
            {"type": "function", "name": "write", "parameters": parameters()},
            {"type": "custom", "name": "patch"}]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    server.post("/v1/responses", &body).await
}

/// Values at `pointer` of the events that have one.
fn found(answer: &Answer, pointer: &str) -> Vec<String> {
    let events = answer.text().lines().filter_map(|line| line.strip_prefix("data: "));
    let events = events.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    events.filter_map(|event| event.pointer(pointer)?.as_str().map(str::to_owned)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn arguments_come_in_pieces_in_every_dialect() {
    let server = Server::new();
    server.say(&written());
    let stream = json!({"stream": true});
    let openai = chat(&server, stream.clone()).await;
    let pieces = found(&openai, "/choices/0/delta/tool_calls/0/function/arguments");
    assert_eq!(pieces.concat(), arguments());
    let anthropic = found(&messages(&server, stream.clone()).await, "/delta/partial_json");
    assert_eq!(anthropic.concat(), arguments());
    let answer = responses(&server, stream).await;
    let events = answer.text().split("\n\n").filter(|event| event.contains("function_call_arguments.delta"));
    let response: Vec<String> = events
        .map(|event| {
            let data = event.split_once("data: ").unwrap().1;
            serde_json::from_str::<Value>(data).unwrap()["delta"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(response.concat(), arguments());
    for pieces in [pieces, anthropic, response] {
        assert!(pieces.len() > 10, "{pieces:?}");
    }
    let whole = chat(&server, json!({})).await.ok();
    let call = &whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"];
    assert_eq!(call, &json!(arguments()));
}

/// The text of a custom tool comes as text, not as JSON.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn custom_tools_stream_their_text() {
    let server = Server::new();
    let said = |key: &str| {
        format!(
            "<tool_call>\n<function=patch>\n<parameter={key}>\n{TEXT}\n</parameter>\n</function>\n\
             </tool_call>"
        )
    };
    for (key, wanted, least) in
        [("input", TEXT.to_owned(), 5), ("else", json!({"else": TEXT}).to_string(), 1)]
    {
        server.say(&said(key));
        let answer = responses(&server, json!({"stream": true})).await;
        let pieces: Vec<Value> = answer
            .text()
            .split("\n\n")
            .filter(|event| event.contains("custom_tool_call_input.delta"))
            .map(|event| serde_json::from_str(event.split_once("data: ").unwrap().1).unwrap())
            .collect();
        let text: String = pieces.iter().map(|piece| piece["delta"].as_str().unwrap()).collect();
        assert_eq!(text, wanted);
        assert!(pieces.len() >= least, "{}", pieces.len());
        let whole = responses(&server, json!({})).await.ok();
        assert_eq!(whole["output"][0]["input"], wanted);
    }
}

/// A call cut by length is in no list of calls, and is not lost either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_calls_are_told_of() {
    let server = Server::new();
    let ids = server.text.tokenizer.encode_raw(&written()).unwrap();
    server.say_ids(ids.clone());
    let most = ids.len() - 30;
    let whole = chat(&server, json!({"max_tokens": most})).await.ok();
    let choice = &whole["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("length"), &json!("")));
    assert!(choice["message"].get("tool_calls").is_none());
    let told = whole["clary"]["incomplete_tool_call"].as_str().unwrap();
    assert!(written().starts_with(told), "{told}");
    let streamed = chat(&server, json!({"max_tokens": most, "stream": true})).await;
    let (events, done) = streamed.events();
    assert!(done && joined(&events)[0]["finish_reason"] == "length");
    let begun = found(&streamed, "/choices/0/delta/tool_calls/0/function/arguments").concat();
    assert!(arguments().starts_with(&begun) && !begun.is_empty());
    assert!(events.last().unwrap()["clary"]["incomplete_tool_call"].is_string());
    let message = messages(&server, json!({"max_tokens": most})).await.ok();
    assert_eq!((&message["content"], &message["stop_reason"]), (&json!([]), &json!("max_tokens")));
    assert!(message["clary"]["incomplete_tool_call"].is_string());
    let response = responses(&server, json!({"max_output_tokens": most})).await.ok();
    let item = &response["output"][0];
    assert_eq!((&response["status"], &item["status"]), (&json!("incomplete"), &json!("incomplete")));
    assert!(arguments().starts_with(item["arguments"].as_str().unwrap()));
}

/// What began as a call and is none comes as text in whole replies and in streams.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_are_none_come_as_text() {
    let server = Server::new();
    let text = "<tool_call>\n<function=write>\n<parameter=path>\na.rs\n</parameter>\nand then";
    server.say(text);
    let whole = chat(&server, json!({})).await.ok();
    let (events, _) = chat(&server, json!({"stream": true})).await.events();
    let choice = &joined(&events)[0];
    for choice in [&whole["choices"][0], choice] {
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(text), &json!("stop")));
    }
    let message = messages(&server, json!({})).await.ok();
    assert_eq!(message["content"], json!([{"type": "text", "text": text}]));
    let response = responses(&server, json!({})).await.ok();
    let items: Vec<&Value> =
        response["output"].as_array().unwrap().iter().map(|item| &item["status"]).collect();
    assert_eq!(items, ["incomplete", "completed"]);
    // A function that nobody offered is not called.
    let other = "<tool_call>\n<function=rm>\n<parameter=path>\n/\n</parameter>\n</function>\n</tool_call>";
    server.say(other);
    let reply = chat(&server, json!({"clary": {"notes": true}})).await.ok();
    assert_eq!(reply["choices"][0]["message"]["content"], other);
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    assert!(reply["clary"]["notes"].as_array().unwrap().iter().any(|note| note["code"] == "tool_unknown"));
}

/// A client that kept the beginning of a cut call can go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_arguments_of_the_history_stay_text() {
    let server = Server::new();
    let history = json!([{"role": "user", "content": "u"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "a", "type": "function",
            "function": {"name": "write", "arguments": "{\"path\": \"a.r"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "no JSON"}]);
    let reply = chat(&server, json!({"messages": history, "clary": {"notes": true}})).await.ok();
    let note = json!({"code": "arguments_kept_as_text",
        "path": "messages[1].tool_calls[0].function.arguments"});
    assert!(reply["clary"]["notes"].as_array().unwrap().contains(&note), "{reply}");
    let user = json!({"role": "user", "content": "u"});
    let input = json!([user, {"type": "function_call", "call_id": "c", "name": "write",
            "arguments": "{\"path\": \"a.r"},
        {"type": "function_call_output", "call_id": "c", "output": "no JSON"}]);
    responses(&server, json!({"input": input})).await.ok();
    let wrong = json!([user, {"type": "function_call", "call_id": "c", "name": "write", "arguments": 7}]);
    let error = responses(&server, json!({"input": wrong})).await.error();
    assert_eq!(error, (400, "invalid_value".into(), Some("input[1].arguments".into())));
}
