//! Bodies at every limit: what fits is served, one more is refused in the documented way.

use std::sync::Arc;

use serde_json::{Value, json};
use text::GrammarCompiler;

use crate::alone;
use crate::support::{MODEL, Server, Setup, chat, text_side};

/// A chat with these fields is served.
async fn fits(server: &Server, fields: Value) {
    let answer = server.chat(fields.clone()).await;
    let short: String = fields.to_string().chars().take(120).collect();
    assert_eq!(answer.status, 200, "{short}: {}", answer.text());
}

/// A chat with these fields is refused with this code.
async fn over(server: &Server, fields: Value, code: &str) {
    let answer = server.chat(fields.clone()).await;
    let short: String = fields.to_string().chars().take(120).collect();
    assert_eq!(answer.error().1, code, "{short}");
    assert!(answer.text().len() < 2000, "a refusal is short: {}", answer.text());
}

fn tool(name: &str, description: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "description": description}})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fields_at_their_limits() {
    let _alone = alone().await;
    let text = text_side();
    let compiler = GrammarCompiler::new(&text.tokenizer, &text.defaults.stop_ids).unwrap();
    let server = Server::with(Setup { grammar: Some(Arc::new(compiler)), ..Setup::default() });
    server.say("ok");
    let invalid = "invalid_value";
    let dry = |mut fields: Value| {
        // The limits hold before the context does.
        fields["dry_run"] = true.into();
        fields
    };
    let messages =
        |count: usize| dry(json!({"messages": vec![json!({"role": "user", "content": "a"}); count]}));
    fits(&server, messages(4096)).await;
    over(&server, messages(4097), invalid).await;
    let parts = |count: usize| {
        let parts = vec![json!({"type": "text", "text": "a"}); count];
        dry(json!({"messages": [{"role": "user", "content": parts}]}))
    };
    fits(&server, parts(256)).await;
    over(&server, parts(257), invalid).await;
    let tools = |count: usize| {
        let tools: Vec<Value> = (0..count).map(|at| tool(&format!("f{at}"), "d")).collect();
        dry(json!({"tools": tools}))
    };
    fits(&server, tools(256)).await;
    over(&server, tools(257), invalid).await;
    let named = |length: usize| dry(json!({"tools": [tool(&"f".repeat(length), "d")]}));
    fits(&server, named(64)).await;
    over(&server, named(65), invalid).await;
    fits(&server, json!({"stop": vec!["never"; 64]})).await;
    over(&server, json!({"stop": vec!["never"; 65]}), invalid).await;
    fits(&server, json!({"stop": ["x".repeat(1024)]})).await;
    over(&server, json!({"stop": ["x".repeat(1025)]}), invalid).await;
    let bias = |count: usize| {
        let entries = (0..count).map(|id| (id.to_string(), json!(-1)));
        json!({"logit_bias": serde_json::Map::from_iter(entries)})
    };
    fits(&server, bias(1024)).await;
    over(&server, bias(1025), invalid).await;
    let choices =
        |count: usize| json!({"guided_choice": (0..count).map(|at| format!("c{at}")).collect::<Vec<_>>()});
    fits(&server, choices(1024)).await;
    over(&server, choices(1025), invalid).await;
    over(&server, json!({"guided_regex": "x".repeat((8 << 10) + 1)}), invalid).await;
    fits(&server, json!({"n": 4, "max_tokens": 1})).await;
    over(&server, json!({"n": 5}), invalid).await;
    fits(&server, json!({"cache_salt": "x".repeat(256)})).await;
    over(&server, json!({"cache_salt": "x".repeat(257)}), invalid).await;
    fits(&server, json!({"user": vec![0; 4_000_000]})).await;
    over(&server, json!({"user": vec![0; 5_000_000]}), "invalid_json").await;
    let schema = |length: usize| {
        let mut tool = tool("f", "d");
        tool["function"]["parameters"] = json!({"type": "object", "description": "x".repeat(length)});
        dry(json!({"tools": [tool]}))
    };
    fits(&server, schema(255 << 10)).await;
    over(&server, schema(256 << 10), invalid).await;
    let all = |each: usize| {
        dry(json!({"tools": (0..10).map(|at| {
        let mut tool = tool(&format!("f{at}"), "d");
        tool["function"]["parameters"] = json!({"type": "object", "description": "x".repeat(each)});
        tool
    }).collect::<Vec<_>>()}))
    };
    fits(&server, all(200 << 10)).await;
    over(&server, all(250 << 10), invalid).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nesting_and_prompts_at_their_limits() {
    let _alone = alone().await;
    let server = Server::new();
    server.say("ok");
    let deep = |depth: usize| {
        let inner = depth - 1;
        let body = chat(json!({"user": 0})).to_string();
        body.replace("\"user\":0", &format!("\"user\":{}{}", "[".repeat(inner), "]".repeat(inner)))
    };
    assert_eq!(server.post_text("/v1/chat/completions", deep(64)).await.status, 200);
    assert_eq!(server.post_text("/v1/chat/completions", deep(65)).await.error().1, "invalid_json");
    let prompts = |count: usize| json!({"prompt": vec!["a"; count], "max_tokens": 1});
    assert_eq!(server.complete(prompts(64)).await.ok()["choices"].as_array().unwrap().len(), 64);
    assert_eq!(server.complete(prompts(65)).await.error().1, "invalid_value");
    // The longest prompt leaves room for one token; one more does not fit.
    let ids = |count: usize| json!({"prompt": vec![5; count], "max_tokens": 4});
    let last = server.complete(ids(1023)).await.ok();
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    assert_eq!(server.complete(ids(1024)).await.error().1, "context_length_exceeded");
}

/// The whole 64 MiB, on a socket.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_longest_body() {
    let _alone = alone().await;
    let server = Server::new();
    server.say("ok");
    let live = server.listen().await;
    let limit = server.app.settings().limits.body;
    assert_eq!(limit, 64 << 20);
    for (length, status) in [(limit, "200"), (limit + 1, "413")] {
        let frame = json!({"model": MODEL, "prompt": "a", "max_tokens": 1, "user": ""}).to_string();
        let filler = "x".repeat(length - frame.len());
        let body = frame.replace("\"user\":\"\"", &format!("\"user\":\"{filler}\""));
        assert_eq!(body.len(), length);
        let mut client = live.connect().await;
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             connection: close\r\ncontent-length: {length}\r\n\r\n"
        );
        client.send(&head).await;
        // A refusal may come before the last byte is sent, and the rest then finds a closed door.
        let _ = tokio::io::AsyncWriteExt::write_all(&mut client.stream, body.as_bytes()).await;
        let answer = client.rest().await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{length}: {:.300}", answer);
    }
    server.idle().await;
}
