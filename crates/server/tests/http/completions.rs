//! Text completions: scores of prompt and reply, several prompts, streams.

use engine::fake::FakeDrafts;
use serde_json::{Value, json};

use crate::support::{Server, Setup};

fn ids(server: &Server, text: &str) -> Vec<u32> {
    server.text.tokenizer.encode_raw(text).unwrap()
}

/// T79: 20 tokens and one more are 21 entries, the first null.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn echo_scores_the_prompt() {
    let server = Server::new();
    let prompt: Vec<u32> = (300..320).collect();
    let reply =
        server.complete(json!({"prompt": prompt, "echo": true, "logprobs": 1, "max_tokens": 1})).await.ok();
    let lists = &reply["choices"][0]["logprobs"];
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(lists[name].as_array().unwrap().len(), 21, "{name}");
    }
    assert!(lists["token_logprobs"][0].is_null() && lists["top_logprobs"][0].is_null());
    for index in 1..21 {
        let top = lists["top_logprobs"][index].as_object().unwrap();
        let own = lists["token_logprobs"][index].as_f64().unwrap();
        assert!((1..=2).contains(&top.len()));
        assert!(top.values().any(|value| value.as_f64() == Some(own)), "{top:?} {own}");
    }
    let text = reply["choices"][0]["text"].as_str().unwrap();
    let offsets: Vec<usize> = serde_json::from_value(lists["text_offset"].clone()).unwrap();
    assert!(offsets.is_sorted() && *offsets.last().unwrap() <= text.chars().count());
    assert_eq!(reply["usage"]["prompt_tokens"], 20);
    let only =
        server.complete(json!({"prompt": prompt, "echo": true, "logprobs": 1, "max_tokens": 0})).await.ok();
    assert_eq!(only["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap()[..], {
        let all = lists["token_logprobs"].as_array().unwrap();
        all[..20].to_vec()
    });
}

/// E5 and T78: scores of a prompt are those of decoding the same tokens, with drafts as without.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scored_equals_decoded() {
    let server = Server::with(Setup { drafts: Some(FakeDrafts::Sometimes(60)), ..Setup::default() });
    let prompt = ids(&server, "The quick brown");
    let ask = async |fields: Value| server.complete(fields).await.ok()["choices"][0].clone();
    let decoded = json!({"prompt": prompt, "logprobs": 3, "max_tokens": 12, "ignore_eos": true});
    let decoded = ask(decoded).await["logprobs"].clone();
    let raw = server
        .complete(json!({"prompt": prompt, "max_tokens": 12, "ignore_eos": true, "logprobs": 0}))
        .await
        .ok();
    assert_eq!(raw["choices"][0]["logprobs"]["tokens"], decoded["tokens"]);
    // The ids of the reply: greedy with a bias of nothing draws them again one prompt later.
    let generated: Vec<u32> = {
        let tokens: Vec<String> = serde_json::from_value(decoded["tokens"].clone()).unwrap();
        let known = |text: &String| {
            (0..server.text.tokenizer.vocab_size() as u32).find(|&id| {
                server.text.tokenizer.token_bytes(id).is_some_and(|bytes| bytes == text.as_bytes())
            })
        };
        match tokens.iter().map(known).collect::<Option<Vec<u32>>>() {
            Some(ids) => ids,
            // Tokens that are no whole text are not found by their text.
            None => return,
        }
    };
    let all: Vec<u32> = prompt.iter().chain(&generated).copied().collect();
    let scored =
        ask(json!({"prompt": all, "logprobs": 3, "echo": true, "max_tokens": 0})).await["logprobs"].clone();
    for name in ["token_logprobs", "top_logprobs"] {
        let tail = &scored[name].as_array().unwrap()[prompt.len()..];
        assert_eq!(tail, decoded[name].as_array().unwrap(), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_prompts_in_order() {
    let server = Server::new();
    let one = async |prompt: &str| {
        let reply =
            server.complete(json!({"prompt": prompt, "max_tokens": 6, "ignore_eos": true})).await.ok();
        reply["choices"][0]["text"].clone()
    };
    let (a, b) = (one("first").await, one("second").await);
    let reply = server
        .complete(json!({"prompt": ["first", "second"], "n": 2, "max_tokens": 6, "ignore_eos": true}))
        .await;
    let reply = reply.ok();
    let choices = reply["choices"].as_array().unwrap();
    let found: Vec<&Value> = choices.iter().map(|choice| &choice["text"]).collect();
    assert_eq!(found, [&a, &a, &b, &b]);
    assert_eq!(
        choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect::<Vec<_>>(),
        [0, 1, 2, 3]
    );
    assert_eq!(reply["usage"]["completion_tokens"], 24);
    let prompts = ids(&server, "first").len() + ids(&server, "second").len();
    assert_eq!(reply["usage"]["prompt_tokens"], prompts);
    let by_ids = json!({"prompt": [ids(&server, "first")], "max_tokens": 6, "ignore_eos": true});
    assert_eq!(server.complete(by_ids).await.ok()["choices"][0]["text"], a);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_joins_to_the_whole() {
    let server = Server::new();
    for fields in [
        json!({"prompt": ["Hello 삼", "a"], "n": 2, "echo": true, "logprobs": 2, "max_tokens": 8}),
        json!({"prompt": "Hello", "stop": "own", "max_tokens": 30,
            "stream_options": {"include_usage": true}}),
        json!({"prompt": "Hello", "logprobs": 0, "max_tokens": 0}),
    ] {
        let mut fields = fields;
        server.say("삼겹살 brown fox");
        let whole = server.complete(fields.clone()).await.ok();
        fields["stream"] = true.into();
        let (events, done) = server.complete(fields.clone()).await.events();
        assert!(done);
        for choice in whole["choices"].as_array().unwrap() {
            let chunks = || {
                let all = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
                all.filter(|chunk| chunk["index"] == choice["index"])
            };
            let text: String = chunks().map(|chunk| chunk["text"].as_str().unwrap()).collect();
            assert_eq!(choice["text"], text, "{fields}");
            assert_eq!(chunks().next_back().unwrap()["finish_reason"], choice["finish_reason"]);
            for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                let lists = chunks()
                    .flat_map(|chunk| chunk["logprobs"][name].as_array().cloned().unwrap_or_default());
                let wanted = choice["logprobs"][name].as_array().cloned().unwrap_or_default();
                assert_eq!(lists.collect::<Vec<_>>(), wanted, "{name} {fields}");
            }
        }
        let has_usage = events.last().unwrap()["usage"].is_object();
        assert_eq!(has_usage, fields.get("stream_options").is_some());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_spellings_and_bad_prompts() {
    let server = Server::new();
    let tokens = async |fields: Value| server.complete(fields).await.ok()["usage"]["prompt_tokens"].clone();
    assert_eq!(tokens(json!({"prompt": "<|im_start|>"})).await, 1);
    assert_ne!(tokens(json!({"prompt": "<|im_start|>", "parse_special": false})).await, 1);
    let refused = async |fields: Value| server.complete(fields).await.error();
    for (prompt, param) in [
        (json!([]), "prompt"),
        (json!(1), "prompt"),
        (json!(""), "prompt[0]"),
        (json!([1, 99999]), "prompt[1]"),
        (json!([1, "a"]), "prompt[1]"),
        (json!([["a"]]), "prompt[0][0]"),
        (json!(vec!["a"; 65]), "prompt"),
    ] {
        let wanted = (400, "invalid_value".to_owned(), Some(param.to_owned()));
        assert_eq!(refused(json!({"prompt": prompt})).await, wanted, "{prompt}");
    }
    assert_eq!(refused(json!({})).await.1, "missing_field");
    let default = server.complete(json!({"prompt": "a", "ignore_eos": true})).await.ok();
    assert_eq!(default["usage"]["completion_tokens"], 16);
}
