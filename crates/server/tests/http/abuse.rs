//! Requests that are wrong in every way that a field, a header or a path can be: always a documented status
//! and shape, never a fault, never a word about this machine.

mod answers;

use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::{Map, Value, json};

use self::answers::{MARK, check};
use crate::support::{MODEL, Server};

/// Cases of the two properties.
const BODIES: u32 = 500;
const HEADS: u32 = 250;

/// A change of a request's body. Values are of [`values`], places are paths of the body.
#[derive(Clone, Debug)]
enum Change {
    /// Another value at a place that the body has.
    Set(Index, Index),
    /// A field that the route knows, at the top.
    Add(Index, Index),
    /// One place less.
    Remove(Index),
    /// The body ends early.
    Cut(Index),
    /// Another byte.
    Byte(Index, u8),
    /// Something after the end.
    Tail(&'static str),
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let index = any::<Index>;
    let change = prop_oneof![
        8 => (index(), index()).prop_map(|(place, value)| Change::Set(place, value)),
        8 => (index(), index()).prop_map(|(name, value)| Change::Add(name, value)),
        2 => index().prop_map(Change::Remove),
        1 => index().prop_map(Change::Cut),
        1 => (index(), any::<u8>()).prop_map(|(at, byte)| Change::Byte(at, byte)),
        1 => select(&["}", " 1", "\0", ",{}", "\n\n"]).prop_map(Change::Tail),
    ];
    vec(change, 1..4)
}

/// Values at the limits of every type, as JSON text; some are no JSON.
const VALUES: &[&str] = &[
    "null",
    "true",
    "false",
    "0",
    "-0",
    "1",
    "-1",
    "2",
    "4",
    "5",
    "8",
    "9",
    "17",
    "20",
    "21",
    "100",
    "101",
    "1024",
    "1025",
    "0.5",
    "-0.5",
    "1.0",
    "5.0",
    "5.0001",
    "2.0",
    "-2.0",
    "2.0001",
    "1e-320",
    "1e308",
    "1e400",
    "-1e400",
    "9007199254740993",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "-9223372036854775808",
    "-9223372036854775809",
    "4294967296",
    "NaN",
    "Infinity",
    "01",
    "+1",
    ".5",
    "0x10",
    "''",
    "\"\"",
    "\" \"",
    "\"a\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "\"\\udc00\\ud800\"",
    "\"\\ud83d\\ude00\"",
    "\"<|im_end|>\"",
    "\"</think>\"",
    "\"../../etc/passwd\"",
    "\"file:///etc/passwd\"",
    "\"http://127.0.0.1/a.png\"",
    "\"data:image/png;base64,AAAA\"",
    "\"data:,\"",
    "\"auto\"",
    "\"none\"",
    "\"required\"",
    "\"high\"",
    "\"max\"",
    "\"system\"",
    "\"tool\"",
    "\"assistant\"",
    "\"json_schema\"",
    "[]",
    "[null]",
    "[0]",
    "[-1]",
    "[[]]",
    "[[0]]",
    "[99999999]",
    "[\"\"]",
    "[\"a\",\"a\"]",
    "[{}]",
    "[[[[]]]]",
    "{}",
    "{\"\":0}",
    "{\"a\":null}",
    "{\"1\":1}",
    "{\"-1\":1}",
    "{\"99999999\":1}",
    "{\"type\":\"x\"}",
    "{\"type\":\"text\"}",
    "{\"type\":\"function\"}",
    "{\"type\":\"json_schema\",\"json_schema\":{}}",
    "{\"regex\":\"(((((a{99}){99}){99}){99}){99})\"}",
    "{\"regex\":\"(\"}",
    "{\"choice\":[\"a\"],\"json\":{}}",
    "{\"json\":{\"$ref\":\"#\"}}",
    "{\"json\":{\"type\":\"object\",\"not\":{}}}",
    "{\"a\":1,\"a\":2}",
    "{\"enable_thinking\":null}",
    "{\"enabled\":true,\"max_draft\":-1}",
    "{\"include_usage\":1}",
];

/// These and long ones.
fn values() -> Vec<String> {
    let mut values: Vec<String> = VALUES.iter().map(|&value| value.to_owned()).collect();
    let words = |count: usize| format!("\"{}\"", format!("{MARK} ").repeat(count));
    let list = |item: &str, count: usize| format!("[{}]", vec![item; count].join(","));
    values.extend([words(14), words(43), words(171), words(2000), words(20_000)]);
    values.push(format!("\"{}\"", "é".repeat(257)));
    values.extend([
        list("\"a\"", 64),
        list("\"a\"", 65),
        list("\"a\"", 1025),
        list("{}", 257),
        list("0", 5000),
    ]);
    values.push(list("{\"role\":\"user\",\"content\":\"a\"}", 4097));
    for depth in [63, 64, 65, 5000] {
        values.push(format!("{}{}", "[".repeat(depth), "]".repeat(depth)));
        values.push(format!("{}1{}", "{\"a\":".repeat(depth), "}".repeat(depth)));
    }
    values
}

/// A chat that uses most of what its route knows.
fn chat(function: &Value) -> Value {
    let messages = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "t"},
    ]);
    json!({"model": MODEL, "messages": messages, "stream": false,
        "stream_options": {"include_usage": true}, "max_tokens": 4, "temperature": 0.5, "top_p": 0.9,
        "top_k": 5, "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": 1}, "seed": 7, "n": 1, "stop": ["x"], "stop_token_ids": [5], "ignore_eos": false,
        "logprobs": true, "top_logprobs": 2, "prompt_logprobs": null,
        "tools": [{"type": "function", "function": function}], "tool_choice": "auto",
        "parallel_tool_calls": true, "response_format": {"type": "text"},
        "chat_template_kwargs": {"enable_thinking": false}, "reasoning_effort": "none", "thinking_budget": 5,
        "reasoning_format": "parsed", "cache_prompt": true, "cache_salt": "a", "dry_run": false,
        "speculative": {"enabled": false, "max_draft": 1}, "clary": {"notes": true, "timings": true}})
}

/// Routes with a body that uses most of what they know.
fn bodies() -> Vec<(&'static str, Value)> {
    let schema = json!({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]});
    let function = json!({"name": "look_up", "description": "d", "parameters": schema});
    let chat = chat(&function);
    let completion = json!({"model": MODEL, "prompt": ["a", "b"], "max_tokens": 3, "echo": true,
        "logprobs": 2, "stop": "x", "temperature": 0, "n": 1, "seed": 1, "stream": false,
        "add_special_tokens": false});
    let blocks = json!([
        {"role": "user", "content": [{"type": "text", "text": "u", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "tool_use", "id": "c", "name": "look_up", "input": {"x": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r",
            "is_error": false}]},
    ]);
    let claude = json!({"model": MODEL, "messages": blocks, "max_tokens": 4,
        "system": [{"type": "text", "text": "s"}], "temperature": 0, "top_p": 0.9, "top_k": 5,
        "stop_sequences": ["x"], "stream": false,
        "thinking": {"type": "enabled", "budget_tokens": 5}, "tool_choice": {"type": "auto"},
        "tools": [{"name": "look_up", "description": "d", "input_schema": schema}],
        "metadata": {"user_id": "u"}});
    let items = json!([
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
    ]);
    let responses = json!({"model": MODEL, "input": items, "instructions": "i", "max_output_tokens": 4,
        "temperature": 0, "top_p": 0.9, "parallel_tool_calls": true, "tool_choice": "auto", "stream": false,
        "tools": [{"type": "function", "name": "look_up", "parameters": schema}],
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "none", "summary": "auto"},
        "truncation": "disabled", "store": false, "include": []});
    let ollama = json!({"model": MODEL, "messages": [{"role": "user", "content": "u", "images": []}],
        "stream": false, "think": false, "format": null, "tools": [{"type": "function",
        "function": function}], "keep_alive": "5m",
        "options": {"temperature": 0, "num_predict": 4, "num_ctx": 64, "top_k": 5, "seed": 1,
        "stop": ["x"]}});
    vec![
        ("/v1/chat/completions", chat.clone()),
        ("/v1/completions", completion),
        ("/v1/messages", claude.clone()),
        ("/v1/messages/count_tokens", claude),
        ("/v1/responses", responses),
        ("/api/chat", ollama),
        (
            "/api/generate",
            json!({"model": MODEL, "prompt": "p", "system": "s", "stream": false, "raw": false,
            "options": {"num_predict": 4}, "images": [], "format": null}),
        ),
        ("/api/show", json!({"model": MODEL})),
        (
            "/tokenize",
            json!({"prompt": "p", "parse_special": true, "with_pieces": true, "add_special_tokens": false}),
        ),
        ("/detokenize", json!({"tokens": [1, 2, 3]})),
        ("/apply-template", chat),
    ]
}

/// Every place of a value, deepest last.
fn places(value: &Value, path: String, into: &mut Vec<String>) {
    let inside: Vec<(String, &Value)> = match value {
        Value::Object(map) => {
            map.iter().map(|(name, value)| (name.replace('~', "~0").replace('/', "~1"), value)).collect()
        }
        Value::Array(list) => list.iter().enumerate().map(|(at, value)| (at.to_string(), value)).collect(),
        _ => Vec::new(),
    };
    for (name, value) in inside {
        let path = format!("{path}/{name}");
        into.push(path.clone());
        places(value, path, into);
    }
}

fn remove(body: &mut Value, path: &str) {
    let (parent, name) = path.rsplit_once('/').expect("a place has a parent");
    match body.pointer_mut(parent) {
        Some(Value::Object(map)) => drop(map.shift_remove(&name.replace("~1", "/").replace("~0", "~"))),
        Some(Value::Array(list)) => {
            if let Some(at) = name.parse().ok().filter(|at: &usize| *at < list.len()) {
                list.remove(at);
            }
        }
        _ => {}
    }
}

/// The body's bytes after the changes. A value that is no JSON stands in as a text until the body is written.
fn spoiled(body: &Value, names: &[String], values: &[String], changes: &[Change]) -> Vec<u8> {
    let mut body = body.clone();
    let stand_in = |value: &Index| json!(format!("@@{}@@", value.index(values.len())));
    for change in changes {
        let mut all = Vec::new();
        places(&body, String::new(), &mut all);
        match change {
            Change::Set(place, value) if !all.is_empty() => {
                let place = body.pointer_mut(&all[place.index(all.len())]);
                *place.expect("it was just found") = stand_in(value);
            }
            Change::Add(name, value) => {
                let name = names[name.index(names.len())].clone();
                body.as_object_mut().expect("bodies are objects").insert(name, stand_in(value));
            }
            Change::Remove(place) if !all.is_empty() => remove(&mut body, &all[place.index(all.len())]),
            _ => {}
        }
    }
    let mut text = body.to_string();
    for (at, value) in values.iter().enumerate() {
        text = text.replace(&format!("\"@@{at}@@\""), value);
    }
    let mut bytes = text.into_bytes();
    for change in changes {
        match change {
            Change::Cut(at) => bytes.truncate(at.index(bytes.len() + 1)),
            Change::Byte(at, byte) if !bytes.is_empty() => {
                let at = at.index(bytes.len());
                bytes[at] = *byte;
            }
            Change::Tail(tail) => bytes.extend_from_slice(tail.as_bytes()),
            _ => {}
        }
    }
    bytes
}

fn runner(cases: u32) -> TestRunner {
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 200, ..Config::default() };
    TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha))
}

/// Names of all fields that any route documents.
fn field_names(document: &Value) -> Vec<String> {
    let schemas = document["components"]["schemas"].as_object().expect("schemas");
    let of = |schema: &Value| {
        let parts = schema["allOf"].as_array().cloned().unwrap_or_default();
        let all = std::iter::once(schema.clone()).chain(parts);
        all.flat_map(|part| part["properties"].as_object().cloned().unwrap_or_default())
            .collect::<Map<_, _>>()
    };
    let requests = schemas.iter().filter(|(name, _)| name.ends_with("Request") || *name == "Params");
    let mut names: Vec<String> = requests.flat_map(|(_, schema)| of(schema)).map(|(name, _)| name).collect();
    let more = [
        "functions",
        "function_call",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "structured_outputs",
        "response_format",
        "max_completion_tokens",
        "best_of",
        "suffix",
        "add_generation_prompt",
        "modalities",
        "continue_final_message",
        "prompt_cache_key",
        "stop_in_reasoning",
        "include_stop_str_in_output",
        "audio",
        "previous_response_id",
        "background",
        "conversation",
        "prediction",
        "web_search_options",
        "content",
        "template",
        "context",
        "raw",
        "images",
        "unheard_of",
    ];
    names.extend(more.map(str::to_owned));
    names.sort();
    names.dedup();
    names
}

#[test]
fn bodies_that_are_wrong_at_every_place() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(async { Server::new() });
    server.say("It is 95.");
    let document = runtime.block_on(server.get("/openapi.json")).json();
    let (names, values, bodies) = (field_names(&document), values(), bodies());
    for (path, body) in &bodies {
        let answer = runtime.block_on(server.post(path, body));
        assert_eq!(answer.status, 200, "{path} takes its own body: {}", answer.text());
    }
    let cases = (any::<Index>(), any::<bool>(), changes());
    let outcome = runner(BODIES).run(&cases, |(route, stream, changes)| {
        let (path, body) = &bodies[route.index(bodies.len())];
        let mut body = body.clone();
        if stream && body.get("stream").is_some() {
            body["stream"] = true.into();
        }
        let bytes = spoiled(&body, &names, &values, &changes);
        let answer = runtime.block_on(server.post_text(path, bytes));
        check(path, &answer)
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    runtime.block_on(async {
        server.idle().await;
        assert_eq!(server.engine.stopped(), None);
        assert_eq!(server.get("/ready").await.status, 200);
    });
}

/// A request's line and headers.
#[derive(Clone, Debug)]
struct Head {
    method: &'static str,
    path: String,
    headers: Vec<(&'static str, Vec<u8>)>,
}

/// Paths of routes, and some that are none.
const PATHS: &[&str] = &[
    "/",
    "/v1/models",
    "/v1/models/",
    "/v1/models/a/b",
    "/v1/chat/completions",
    "/v1/chat/completions/",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/x",
    "/v1/embeddings",
    "/api/chat",
    "/api/pull",
    "/api/nothing",
    "/health",
    "/ready",
    "/metrics",
    "/slots",
    "/props",
    "/version",
    "/tokenizer_info",
    "/openapi.json",
    "//",
    "/v1/../etc/passwd",
    "/%2e%2e/%2e%2e/etc",
    "/%00",
    "/%ff%fe",
    "/v1/models/%F0%9F%99%82",
    "/?x=%zz",
    "/health?a=b&a=b#c",
];

/// Names of headers that the server looks at.
const HEADERS: &[&str] = &[
    "host",
    "content-type",
    "content-encoding",
    "content-length",
    "authorization",
    "x-api-key",
    "x-request-id",
    "origin",
    "access-control-request-method",
    "anthropic-version",
    "accept",
    "expect",
    "cookie",
];

/// Values of headers, right and wrong.
const TEXTS: &[&str] = &[
    "",
    " ",
    "localhost",
    "localhost:99999",
    "evil.example",
    "127.0.0.1.evil.example",
    "[::1",
    "a b",
    "*",
    "null",
    "application/json",
    "text/html",
    "APPLICATION/JSON; charset=latin1",
    "gzip",
    "identity, gzip",
    "-1",
    "1e9",
    "99999999999999999999",
    "Bearer",
    "Bearer ",
    "Bearer \u{7f}",
    "Basic YTpi",
    "100-continue",
    "..\\..",
    "https://evil.example",
];

fn heads() -> impl Strategy<Value = Head> {
    let method =
        select(&["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW"]);
    let path = prop_oneof![
        6 => select(PATHS).prop_map(str::to_owned),
        1 => "/[a-z0-9/._~%-]{0,300}".prop_filter("a path", |path| path.parse::<axum::http::Uri>().is_ok()),
    ];
    let name = select(HEADERS);
    let value = prop_oneof![
        6 => select(TEXTS).prop_map(|text| text.as_bytes().to_vec()),
        1 => vec(0x21u8..=0xff, 0..100),
        1 => Just(vec![b'x'; 17 << 10]),
    ];
    let headers = vec((name, value), 0..4);
    (method, path, headers).prop_map(|(method, path, headers)| Head { method, path, headers })
}

#[test]
fn heads_that_are_wrong() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(async { Server::new() });
    let outcome = runner(HEADS).run(&heads(), |head| {
        let mut request = Request::builder().method(head.method).uri(&head.path);
        for (name, value) in &head.headers {
            // What cannot be a header's value never gets this far.
            if let Ok(value) = axum::http::HeaderValue::from_bytes(value) {
                request = request.header(*name, value);
            }
        }
        if !head.headers.iter().any(|(name, _)| *name == "host") {
            request = request.header("host", "localhost");
        }
        let Ok(request) = request.body(Body::from("{}")) else { return Ok(()) };
        let answer = runtime.block_on(server.call(request));
        // An answer to HEAD may have no body.
        if head.method == "HEAD" && !answer.status.is_success() {
            return Ok(());
        }
        let path = head.path.split(['?', '#']).next().unwrap_or_default();
        check(path, &answer)
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

/// Bytes that are no HTTP at all, on a socket.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_are_no_request() {
    let server = Server::new();
    let live = server.listen().await;
    let junk = [
        "\r\n\r\n",
        "GET\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "\u{16}\u{3}\u{1}\u{2}\0\u{1}",
        "GET / HTTP/1.1\r\n a\r\n\r\n",
        "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}",
        "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n{}",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET http://a/ HTTP/1.1\r\n\r\n",
    ];
    for text in junk {
        let mut client = live.connect().await;
        client.send(text).await;
        // A line that never ends is closed by its time; here the client leaves first.
        let answer = tokio::time::timeout(Duration::from_millis(50), client.rest()).await.unwrap_or_default();
        assert!(!answer.starts_with("HTTP/1.1 2") && !answer.starts_with("HTTP/1.1 5"), "{text:?}: {answer}");
    }
    assert_eq!(server.get("/ready").await.status, 200);
}
