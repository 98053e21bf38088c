//! A small request in each dialect, whole and streamed.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::Client;
use crate::error::{Exit, Failure, Result};

/// Most tokens of a reply: enough to see that some come.
const TOKENS: u32 = 16;

/// What a client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// OpenAI's chat completions.
    Chat,
    /// OpenAI's Responses.
    Responses,
    /// Anthropic's messages.
    Messages,
    /// Ollama's chat.
    Ollama,
}

/// How long both kinds of reply took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tried {
    /// The whole reply.
    pub(super) whole: Duration,
    /// The stream's first line with data.
    pub(super) first: Duration,
    /// The whole stream.
    pub(super) stream: Duration,
}

impl Dialect {
    /// What people call it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Chat => "OpenAI chat completions",
            Self::Responses => "OpenAI Responses",
            Self::Messages => "Anthropic messages",
            Self::Ollama => "Ollama chat",
        }
    }

    /// Its route.
    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::Ollama => "/api/chat",
        }
    }

    fn request(self, model: &str, stream: bool) -> Value {
        let messages = json!([{"role": "user", "content": "What is 37 + 58?"}]);
        match self {
            Self::Chat => {
                json!({"model": model, "messages": messages, "max_tokens": TOKENS, "temperature": 0,
                "reasoning_effort": "none", "stream": stream, "stream_options": {"include_usage": stream}})
            }
            Self::Responses => json!({"model": model, "input": "What is 37 + 58?", "temperature": 0,
                "max_output_tokens": TOKENS, "reasoning": {"effort": "none"}, "stream": stream}),
            Self::Messages => json!({"model": model, "messages": messages, "max_tokens": TOKENS,
                "temperature": 0, "thinking": {"type": "disabled"}, "stream": stream}),
            Self::Ollama => json!({"model": model, "messages": messages, "think": false, "stream": stream,
                "options": {"temperature": 0, "num_predict": TOKENS}}),
        }
    }

    /// Tokens of a whole reply.
    fn tokens(self, reply: &Value) -> Option<u64> {
        match self {
            Self::Chat => reply["usage"]["completion_tokens"].as_u64(),
            Self::Responses | Self::Messages => reply["usage"]["output_tokens"].as_u64(),
            Self::Ollama => reply["eval_count"].as_u64(),
        }
    }

    /// Whether a line is the last of a stream that came to its end.
    fn ends(self, line: &str) -> bool {
        match self {
            Self::Chat => line == "data: [DONE]",
            Self::Responses => {
                line.starts_with("event: response.completed")
                    || line.starts_with("event: response.incomplete")
            }
            Self::Messages => line.starts_with("event: message_stop"),
            Self::Ollama => line.contains("\"done\":true"),
        }
    }

    /// Sends a small request twice.
    pub(super) fn try_out(self, client: &Client, model: &str) -> Result<Tried> {
        let wrong = |what: &str| {
            Failure::new(Exit::Failure, format!("{}: {what}", self.path()))
                .hint("the server's log may say why")
        };
        let start = Instant::now();
        let reply = client.post(self.path(), &self.request(model, false))?.ok(self.path())?.json();
        let whole = start.elapsed();
        if self.tokens(&reply).is_none_or(|tokens| tokens == 0) {
            return Err(wrong("the reply has no tokens"));
        }
        let start = Instant::now();
        let (status, mut lines) = client.stream(self.path(), &self.request(model, true))?;
        if status != 200 {
            return Err(wrong(&format!("the stream began with status {status}")));
        }
        let (mut first, mut ended) = (None, false);
        while let Some(line) =
            lines.next().map_err(|error| wrong(&format!("the stream broke off: {error}")))?
        {
            if !line.is_empty() && !line.starts_with(':') {
                first.get_or_insert_with(|| start.elapsed());
            }
            ended |= self.ends(&line);
        }
        if !ended {
            return Err(wrong("the stream ended before its last event"));
        }
        Ok(Tried { whole, first: first.unwrap_or_default(), stream: start.elapsed() })
    }
}
