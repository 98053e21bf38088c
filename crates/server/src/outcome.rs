//! A finished reply.

use engine::{FinishReason, ReplyError, Stats};
use serde_json::{Map, Value};
use text::{Content, End, Message, Piece, Reply, Role, ToolCall, call_id};

use crate::ReplyReader;

/// Why a reply ended, in the API's terms.
#[derive(Clone, Debug, PartialEq)]
pub enum Finish {
    /// An end token, a stop token or a stop string.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
    /// The model stopped by itself after at least one complete call.
    ToolCalls,
    /// The caller gave up.
    Cancelled,
    /// It failed.
    Failed(ReplyError),
}

impl Finish {
    /// What an engine's reason means, given whether the text side ended the reply and how many calls are
    /// complete.
    pub(crate) fn of(reason: FinishReason, ended_here: bool, calls: usize) -> Self {
        match reason {
            FinishReason::Failed(error) => Self::Failed(error),
            FinishReason::Cancelled if !ended_here => Self::Cancelled,
            FinishReason::Length if !ended_here => Self::Length,
            _ if calls > 0 => Self::ToolCalls,
            _ => Self::Stop,
        }
    }

    /// How the reply's text ended.
    pub(crate) fn end(&self) -> End {
        match self {
            Self::Stop | Self::ToolCalls => End::Stop,
            Self::Length | Self::Cancelled | Self::Failed(_) => End::Length,
        }
    }

    /// The API's word: `stop`, `length`, `tool_calls`; `cancelled` and `failed` never reach a client.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
            Self::Cancelled => "cancelled",
            Self::Failed(_) => "failed",
        }
    }
}

/// What ended the reply by the request's wish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// A stop string.
    Text(String),
    /// A token of the request's `stop_token_ids`.
    Token(u32),
}

/// Token counts of a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens taken from the prefix cache.
    pub cached_tokens: usize,
    /// Tokens generated, the end token included.
    pub completion_tokens: usize,
    /// Generated tokens that are reasoning, its markers included.
    pub reasoning_tokens: usize,
}

/// A finished reply.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Reasoning, content and calls.
    pub reply: Reply,
    /// Why it ended.
    pub finish: Finish,
    /// Which wish of the request ended it, if one did.
    pub stop_reason: Option<StopReason>,
    /// Token counts.
    pub usage: Usage,
    /// The engine's numbers.
    pub stats: Stats,
    /// The generated ids, the end token included.
    pub ids: Vec<u32>,
}

impl Outcome {
    /// Ends the reading of a reply: the last pieces, and what it all came to.
    pub(crate) fn close(reader: &mut ReplyReader, reason: FinishReason, stats: Stats) -> (Vec<Piece>, Self) {
        let ended_here = reader.ended();
        let pieces = reader.finish(Finish::of(reason.clone(), ended_here, 0).end());
        let reply = reader.reply().clone();
        let usage = Usage {
            prompt_tokens: stats.prompt_tokens,
            cached_tokens: stats.cache.hit_tokens,
            completion_tokens: reader.ids().len(),
            reasoning_tokens: reader.reasoning_tokens(),
        };
        let finish = Finish::of(reason, ended_here, reply.calls.len());
        let (stop_reason, ids) = (reader.stop_reason().cloned(), reader.ids().to_vec());
        (pieces, Self { reply, finish, stop_reason, usage, stats, ids })
    }

    /// The reply as a message for the history. `id` names the reply; ids of its calls are made from it.
    pub fn message(&self, id: &str) -> Message {
        let mut message = Message::text(Role::Assistant, self.reply.content.clone());
        if self.reply.content.is_empty() && !self.reply.calls.is_empty() {
            message.content = Content::Absent;
        }
        message.reasoning = Some(self.reply.reasoning.clone()).filter(|text| !text.is_empty());
        message.tool_calls = (self.reply.calls.iter())
            .map(|call| ToolCall {
                id: Some(call_id(id, call.index)),
                name: call.name.clone(),
                arguments: arguments(&call.arguments),
                is_text: false,
            })
            .collect();
        message
    }
}

/// The parser writes a JSON object; see [`text::Call::arguments`].
fn arguments(json: &str) -> Map<String, Value> {
    serde_json::from_str(json).expect("arguments of a parsed call are a JSON object")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_in_the_words_of_the_api() {
        let check = |reason: FinishReason, ended_here: bool, calls: usize, wanted: &str| {
            assert_eq!(Finish::of(reason.clone(), ended_here, calls).name(), wanted, "{reason:?}");
        };
        check(FinishReason::Eos(1), false, 0, "stop");
        check(FinishReason::Eos(1), false, 2, "tool_calls");
        check(FinishReason::Stop(1), false, 0, "stop");
        check(FinishReason::Length, false, 2, "length");
        check(FinishReason::Length, true, 0, "stop");
        check(FinishReason::Cancelled, false, 1, "cancelled");
        check(FinishReason::Cancelled, true, 1, "tool_calls");
        check(FinishReason::Failed(ReplyError::NumericalFault { position: 3 }), true, 1, "failed");
    }

    #[test]
    fn a_reply_becomes_a_message() {
        let call = text::Call { index: 0, name: "f".into(), arguments: r#"{"b":1,"a":[]}"#.into() };
        let outcome = Outcome {
            reply: Reply { reasoning: "r".into(), calls: vec![call], ..Reply::default() },
            finish: Finish::ToolCalls,
            stop_reason: None,
            usage: Usage::default(),
            stats: Stats::default(),
            ids: Vec::new(),
        };
        let message = outcome.message("x");
        assert_eq!(message.content, Content::Absent);
        assert_eq!(message.reasoning.as_deref(), Some("r"));
        assert_eq!(message.tool_calls[0].id, Some(call_id("x", 0)));
        let keys: Vec<&String> = message.tool_calls[0].arguments.keys().collect();
        assert_eq!(keys, ["b", "a"]);
    }
}
