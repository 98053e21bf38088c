//! Streams: their order, their usage chunk, and that they equal whole replies (E4).

use serde_json::{Value, json};

use crate::support::{Server, Setup, comparable, joined};

/// Random numbers that a seed decides.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
    fn coin(&mut self) -> bool {
        self.below(2) == 0
    }
}

const CALL: &str = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>";
const PIECES: [&str; 14] = [
    "Hello",
    " own",
    " fox",
    "\n\n",
    " ",
    "삼겹살 👩‍👩‍👧 Å",
    "</think>",
    "<think>",
    CALL,
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "<tool",
    "37 + 58",
];

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties":
        {"x": {"type": "integer"}}}}}])
}

/// T35 and E4: whatever the model says, however it is asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streamed_equals_whole() {
    let server = Server::new();
    for seed in 0..120 {
        let mut dice = Dice(seed);
        let text: String = (0..dice.below(9)).map(|_| PIECES[dice.below(PIECES.len())]).collect();
        server.say(&text);
        let mut fields = json!({"reasoning_effort": if dice.coin() { "high" } else { "none" },
            "max_tokens": 10 + dice.below(80), "n": 1 + dice.below(3)});
        if dice.coin() {
            fields["tools"] = tools();
        }
        if dice.coin() {
            fields["logprobs"] = true.into();
            fields["top_logprobs"] = dice.below(3).into();
        }
        if dice.coin() {
            fields["stop"] = json!(["own fox", "\n\n"]);
            fields["stop_in_reasoning"] = dice.coin().into();
        }
        if dice.below(4) == 0 {
            fields["reasoning_format"] = "raw".into();
        }
        let whole = server.chat(fields.clone()).await.ok();
        fields["stream"] = true.into();
        let (events, done) = server.chat(fields.clone()).await.events();
        assert!(done);
        assert_eq!(joined(&events), comparable(&whole), "seed {seed}: {text:?} {fields}");
    }
}

/// T62: characters over several tokens are never cut.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn characters_stay_whole() {
    let server = Server::new();
    let text = "삼겹살 👩‍👩‍👧 Å";
    server.say(text);
    let (events, _) = server.chat(json!({"stream": true, "max_tokens": 200})).await.events();
    let content = joined(&events)[0]["message"]["content"].clone();
    assert_eq!(content, text);
    assert!(events.len() > 4, "the text came in pieces");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_come_in_order() {
    let server = Server::new();
    server.say(&format!("a\n</think>\n\nb {CALL}\n{CALL}"));
    let fields = json!({"stream": true, "reasoning_effort": "low", "tools": tools(), "max_tokens": 300});
    let answer = server.chat(fields).await;
    assert_eq!(answer.headers["cache-control"], "no-store");
    assert_eq!(answer.headers["x-accel-buffering"], "no");
    let (events, done) = answer.events();
    assert!(done);
    let mut kinds = Vec::new();
    for event in &events {
        assert_eq!((&event["id"], &event["created"]), (&events[0]["id"], &events[0]["created"]));
        assert_eq!(event["object"], "chat.completion.chunk");
        assert!(event.get("usage").is_none(), "no usage unasked: {event}");
        let choice = &event["choices"][0];
        let delta = choice["delta"].as_object().unwrap();
        let kind = match delta.keys().next().map(String::as_str) {
            Some("role") => "role".to_owned(),
            Some("tool_calls") => format!("call {}", delta["tool_calls"][0]["index"]),
            Some(name) => name.to_owned(),
            None => choice["finish_reason"].as_str().unwrap().to_owned(),
        };
        if kinds.last() != Some(&kind) {
            kinds.push(kind);
        }
    }
    assert_eq!(kinds, ["role", "reasoning_content", "content", "call 0", "call 1", "tool_calls"]);
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
}

/// T82: usage exactly where it was asked for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_is_a_chunk_of_its_own() {
    let server = Server::new();
    server.say("It is 95.");
    let whole = server.chat(json!({})).await.ok();
    let fields = json!({"stream": true, "stream_options": {"include_usage": true}, "clary": {"notes": true}});
    let (events, done) = server.chat(fields).await.events();
    assert!(done);
    let (last, others) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
    assert_eq!(last["clary"]["version"], 1);
    for event in others {
        assert_eq!(event.get("usage"), Some(&Value::Null));
        assert_eq!(event["choices"].as_array().unwrap().len(), 1);
        assert!(event.get("clary").is_none());
    }
    let (events, _) = server.chat(json!({"stream": true, "clary": {"notes": true}})).await.events();
    let last = events.last().unwrap();
    assert_eq!(
        (&last["choices"][0]["finish_reason"], &last["clary"]["version"]),
        (&json!("stop"), &json!(1))
    );
    assert!(events.iter().all(|event| event["choices"] != json!([])));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_keep_their_status_in_streams() {
    let server = Server::new();
    assert_eq!(server.chat(json!({"stream": true, "temperature": 9})).await.error().0, 400);
    let long = "word ".repeat(1200);
    let answer = server.chat(json!({"stream": true, "messages": [{"role": "user", "content": long}]})).await;
    assert_eq!(answer.error().1, "context_length_exceeded");
    server.faults.nan_in(0);
    let answer = server.chat(json!({"stream": true})).await;
    assert!(answer.status == 200 || answer.error().1 == "numerical_fault");
}

/// 64 clients at once, all served, each with the reply it would have alone (E2).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_clients() {
    let server = std::sync::Arc::new(Server::with(Setup::default()));
    let fields = |index: usize| {
        json!({"messages": [{"role": "user", "content": format!("question {}", index % 8)}],
            "seed": index % 8, "temperature": 1, "max_tokens": 12, "ignore_eos": true,
            "stream": index.is_multiple_of(2)})
    };
    let mut alone = Vec::new();
    for index in 0..8 {
        let mut fields = fields(index);
        fields["stream"] = false.into();
        alone.push(comparable(&server.chat(fields).await.ok()));
    }
    let mut clients = tokio::task::JoinSet::new();
    for index in 0..64 {
        let server = server.clone();
        clients.spawn(async move { (index, server.chat(fields(index)).await) });
    }
    while let Some(done) = clients.join_next().await {
        let (index, answer) = done.unwrap();
        let choices = if index % 2 == 0 { joined(&answer.events().0) } else { comparable(&answer.ok()) };
        assert_eq!(choices, alone[index % 8], "client {index}");
    }
    server.idle().await;
}
