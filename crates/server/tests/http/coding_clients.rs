//! What coding clients really send: requests recorded between the programs of `docs/clients.md` and this
//! server, with their texts and descriptions cut short and their schemas whole. `says` is what the model
//! answers.

use axum::body::Body;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::support::{Answer, Server, Setup, comparable, joined, request};
use crate::{messages, responses};

/// Stands for the data of a picture.
const PICTURE: &str = "PICTURE";

/// A reply in the words of all dialects.
#[derive(Debug, Default, PartialEq)]
struct Told {
    thought: String,
    text: String,
    /// Names and arguments.
    calls: Vec<Value>,
    /// Whether the client is to run the calls.
    waits: bool,
    prompt_tokens: u64,
    cached_tokens: u64,
}

/// The request as it was sent, with its tools and its picture put back.
fn sent(recorded: &Value, tools: &[Value]) -> String {
    let mut body = recorded["body"].clone();
    if let Some(index) = body["tools"].as_u64() {
        body["tools"] = tools[index as usize].clone();
    }
    let picture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo/eval/images/dev-248-0.png");
    let picture = STANDARD.encode(std::fs::read(picture).unwrap());
    body.to_string().replace(PICTURE, &picture)
}

async fn ask(server: &Server, recorded: &Value, body: String) -> Answer {
    let (method, path) = (recorded["method"].as_str().unwrap(), recorded["path"].as_str().unwrap());
    let mut builder = request(method, path);
    for (name, value) in recorded["headers"].as_object().unwrap() {
        builder = builder.header(name, value.as_str().unwrap());
    }
    let is_empty = recorded["body"].is_null();
    let builder = if is_empty { builder } else { builder.header("content-type", "application/json") };
    server.call(builder.body(if is_empty { Body::empty() } else { body.into() }).unwrap()).await
}

fn of_messages(message: &Value) -> Told {
    let mut told = Told { waits: message["stop_reason"] == "tool_use", ..Told::default() };
    for block in message["content"].as_array().unwrap() {
        match block["type"].as_str().unwrap() {
            "thinking" => told.thought.push_str(block["thinking"].as_str().unwrap()),
            "text" => told.text.push_str(block["text"].as_str().unwrap()),
            _ => told.calls.push(json!([block["name"], block["input"]])),
        }
    }
    let tokens = |name: &str| message["usage"][name].as_u64().unwrap();
    told.cached_tokens = tokens("cache_read_input_tokens");
    told.prompt_tokens = tokens("input_tokens") + told.cached_tokens;
    told
}

fn of_responses(response: &Value) -> Told {
    assert_eq!(response["status"], "completed");
    let mut told = Told::default();
    for item in response["output"].as_array().unwrap() {
        match item["type"].as_str().unwrap() {
            "reasoning" => told.thought.push_str(item["content"][0]["text"].as_str().unwrap()),
            "message" => told.text.push_str(item["content"][0]["text"].as_str().unwrap()),
            _ => told.calls.push(json!([item["name"], parsed(&item["arguments"])])),
        }
    }
    told.waits = !told.calls.is_empty();
    told.prompt_tokens = response["usage"]["input_tokens"].as_u64().unwrap();
    told.cached_tokens = response["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap();
    told
}

fn of_chat(choice: &Value, usage: &Value) -> Told {
    let message = &choice["message"];
    let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
    let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
    let call = |call: &Value| json!([call["function"]["name"], parsed(&call["function"]["arguments"])]);
    Told {
        thought: text("reasoning_content"),
        text: text("content"),
        calls: calls.iter().map(call).collect(),
        waits: choice["finish_reason"] == "tool_calls",
        prompt_tokens: usage["prompt_tokens"].as_u64().unwrap_or_default(),
        cached_tokens: usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default(),
    }
}

fn parsed(arguments: &Value) -> Value {
    serde_json::from_str(arguments.as_str().unwrap()).unwrap()
}

/// The reply of a stream, whose order the walks of the dialects check, or of a whole reply.
fn told(path: &str, answer: &Answer, is_stream: bool) -> Told {
    match (path, is_stream) {
        ("/v1/messages?beta=true", true) => of_messages(&messages::walk(answer.text())),
        ("/v1/messages?beta=true", false) => of_messages(&answer.ok()),
        ("/v1/responses", true) => of_responses(&responses::walk(answer.text())),
        ("/v1/responses", false) => of_responses(&answer.ok()),
        (_, true) => {
            let (events, is_done) = answer.events();
            assert!(is_done);
            of_chat(&joined(&events)[0], &events.last().unwrap()["usage"])
        }
        (_, false) => of_chat(&comparable(&answer.ok())[0], &answer.json()["usage"]),
    }
}

/// Sends one recorded request, streamed as it was and whole, and holds the replies against what is wanted.
/// Gives the tokens of the prompt.
async fn replay(server: &Server, recorded: &Value, body: String, before: u64) -> u64 {
    let (about, wanted) = (&recorded["about"], &recorded["wanted"]);
    if let Some(says) = recorded["says"].as_str() {
        server.say(says);
    }
    let answer = ask(server, recorded, body.clone()).await;
    assert_eq!(
        u64::from(answer.status.as_u16()),
        wanted["status"].as_u64().unwrap_or(200),
        "{about}: {}",
        answer.text()
    );
    if let Some(start) = wanted["error"].as_str() {
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with(start), "{about}: {message}");
        return before;
    }
    if recorded["says"].is_null() {
        let counted = || answer.json()["input_tokens"].as_u64().unwrap();
        assert!(recorded["method"] == "HEAD" || counted() > 20, "{about}: {}", answer.text());
        return before;
    }
    let path = recorded["path"].as_str().unwrap();
    let streamed = told(path, &answer, true);
    assert_eq!(streamed.thought, "Look first.", "{about}");
    assert_eq!(streamed.text, wanted["text"].as_str().unwrap_or_default(), "{about}");
    let calls = wanted["calls"].as_array().cloned().unwrap_or_default();
    assert_eq!((&streamed.calls, streamed.waits), (&calls, !calls.is_empty()), "{about}");
    if wanted["follows"] == true {
        assert!(streamed.cached_tokens * 10 > before * 9, "{about}: {streamed:?}, {before} before");
    }
    let mut whole: Value = serde_json::from_str(&body).unwrap();
    whole["stream"] = false.into();
    whole.as_object_mut().unwrap().shift_remove("stream_options");
    let whole = told(path, &ask(server, recorded, whole.to_string()).await, false);
    // The cache knows the prompt by now, and not every client asks a stream for its usage.
    let Told { prompt_tokens, cached_tokens, .. } = whole;
    assert_eq!(whole, Told { prompt_tokens, cached_tokens, ..streamed }, "{about}");
    prompt_tokens
}

fn recorded(client: &str) -> Value {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/http/coding");
    serde_json::from_slice(&std::fs::read(format!("{folder}/{client}.json")).unwrap()).unwrap()
}

async fn session(client: &str) {
    let recorded = recorded(client);
    let server = Server::with(Setup { vision: true, context: Some(16384), ..Setup::default() });
    let tools = recorded["tools"].as_array().unwrap();
    let mut before = 0;
    for request in recorded["requests"].as_array().unwrap() {
        before = replay(&server, request, sent(request, tools), before).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claude_code() {
    session("claude-code").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn codex() {
    session("codex").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn opencode() {
    session("opencode").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn aider() {
    session("aider").await;
}

/// A tool's picture that the model cannot see does not end the session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_with_pictures_go_on_where_the_server_is_blind() {
    for client in ["claude-code", "codex"] {
        let recorded = recorded(client);
        let server = Server::with(Setup { context: Some(16384), ..Setup::default() });
        let is_picture = |request: &&Value| request["about"] == "a picture in a result";
        let request = recorded["requests"].as_array().unwrap().iter().find(is_picture).unwrap();
        let mut request = request.clone();
        // Nothing was asked before.
        request["wanted"]["follows"] = false.into();
        let body = sent(&request, recorded["tools"].as_array().unwrap());
        replay(&server, &request, body, 0).await;
    }
}

/// A person's picture that cannot be taken is named so that Claude Code takes it out of the chat and goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blind_server_names_the_picture() {
    let server = Server::with(Setup { context: Some(16384), ..Setup::default() });
    let source = json!({"type": "base64", "media_type": "image/png", "data": "AAAA"});
    let content = json!([{"type": "text", "text": "What?"}, {"type": "image", "source": source}]);
    let body = json!({"model": "demo", "max_tokens": 3, "messages": [{"role": "user", "content": content}]});
    let answer = server.post("/v1/messages", &body).await;
    let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(answer.status.as_u16(), 400);
    assert!(message.starts_with("messages[0].content[1].image: "), "{message}");
}
