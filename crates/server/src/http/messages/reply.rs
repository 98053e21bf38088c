//! What an Anthropic reply says, whole or as events. Both are made of the same blocks.

use serde::Serialize;
use serde_json::{Map, Value};
use text::Piece;
use utoipa::ToSchema;

use super::super::chat::{Clary, Head};
use super::super::error::{ApiError, Dialect};
use super::super::flow::{Whole, Writer, sse_event};
use super::super::ids::derived;
use super::super::running::{Running, Update};
use crate::{Finish, Outcome, StopReason};

/// `message`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct MessageReply {
    /// `msg_…`.
    pub id: String,
    /// `message`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// `assistant`.
    pub role: &'static str,
    /// The served id.
    pub model: String,
    /// Blocks in the order made.
    pub content: Vec<Block>,
    /// `end_turn`, `max_tokens`, `stop_sequence` or `tool_use`; null before the end.
    pub stop_reason: Option<&'static str>,
    /// The stop string that ended the reply.
    pub stop_sequence: Option<String>,
    /// Token counts.
    pub usage: MessageUsage,
    /// Only where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clary: Option<Clary>,
}

/// Token counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct MessageUsage {
    /// Of the prompt, cached ones not counted.
    pub input_tokens: usize,
    /// Of the prompt, from the cache.
    pub cache_read_input_tokens: usize,
    /// Always 0.
    pub cache_creation_input_tokens: usize,
    /// Generated.
    pub output_tokens: usize,
}

/// A content block.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Block {
    /// Reasoning.
    Thinking {
        /// The text.
        thinking: String,
        /// Opaque.
        signature: String,
    },
    /// The answer.
    Text {
        /// The text.
        text: String,
    },
    /// A call.
    ToolUse {
        /// `toolu_…`.
        id: String,
        /// Name of the function.
        name: String,
        /// Arguments.
        #[schema(value_type = Object)]
        input: Map<String, Value>,
    },
}

/// An event of a stream.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event<'a> {
    MessageStart {
        message: &'a MessageReply,
    },
    ContentBlockStart {
        index: usize,
        content_block: &'a Block,
    },
    ContentBlockDelta {
        index: usize,
        delta: Delta<'a>,
    },
    ContentBlockStop {
        index: usize,
    },
    MessageDelta {
        delta: MessageEnd,
        usage: MessageUsage,
        #[serde(skip_serializing_if = "Option::is_none")]
        clary: Option<&'a Clary>,
    },
    MessageStop,
    Ping,
}

#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type")]
enum Delta<'a> {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "signature_delta")]
    Signature { signature: &'a str },
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: &'a str },
}

#[derive(Clone, Debug, Serialize)]
struct MessageEnd {
    stop_reason: &'static str,
    stop_sequence: Option<String>,
}

impl Event<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
            Self::Ping => "ping",
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        sse_event(out, self.name(), self);
    }
}

/// Writes events and keeps the blocks, which a whole reply consists of.
pub(crate) struct MessageWriter {
    pub(crate) head: Head,
    request_id: String,
    blocks: Vec<Block>,
    /// Whether the last block is still open.
    is_open: bool,
    /// Blocks of calls that did not become whole: a whole reply has none of them.
    broken: Vec<usize>,
}

impl MessageWriter {
    pub(crate) fn new(head: Head, request_id: String) -> Self {
        Self { head, request_id, blocks: Vec::new(), is_open: false, broken: Vec::new() }
    }

    fn message(&self, running: &Running) -> MessageReply {
        MessageReply {
            id: self.head.id.clone(),
            kind: "message",
            role: "assistant",
            model: self.head.model.clone(),
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: usage(running),
            clary: None,
        }
    }

    /// Adds a piece to the blocks and writes what that means.
    fn piece(&mut self, piece: Piece, out: &mut Vec<u8>) {
        match piece {
            Piece::Reasoning(more) => {
                if !matches!((self.is_open, self.blocks.last()), (true, Some(Block::Thinking { .. }))) {
                    self.open(Block::Thinking { thinking: String::new(), signature: String::new() }, out);
                }
                self.delta(Delta::Thinking { thinking: &more }, out);
                if let Some(Block::Thinking { thinking, .. }) = self.blocks.last_mut() {
                    thinking.push_str(&more);
                }
            }
            Piece::Content(more) if more.is_empty() => {}
            Piece::Content(more) => {
                if !matches!((self.is_open, self.blocks.last()), (true, Some(Block::Text { .. }))) {
                    self.open(Block::Text { text: String::new() }, out);
                }
                self.delta(Delta::Text { text: &more }, out);
                if let Some(Block::Text { text }) = self.blocks.last_mut() {
                    text.push_str(&more);
                }
            }
            Piece::CallBegin { index, name } => {
                let id = derived("toolu_", &self.head.id, &index.to_string());
                self.open(Block::ToolUse { id, name, input: Map::new() }, out);
            }
            Piece::CallArguments { json, .. } => self.delta(Delta::InputJson { partial_json: &json }, out),
            Piece::ToolCall(call) => {
                if let Some(Block::ToolUse { input, .. }) = self.blocks.last_mut() {
                    *input = serde_json::from_str(&call.arguments).unwrap_or_default();
                }
                self.close(out);
            }
            Piece::CallDropped { .. } | Piece::IncompleteCall(_) => {
                if let (true, Some(Block::ToolUse { .. })) = (self.is_open, self.blocks.last()) {
                    self.broken.push(self.blocks.len() - 1);
                    self.close(out);
                }
            }
            Piece::Note(_) => {}
        }
    }

    fn open(&mut self, block: Block, out: &mut Vec<u8>) {
        self.close(out);
        Event::ContentBlockStart { index: self.blocks.len(), content_block: &block }.write(out);
        self.blocks.push(block);
        self.is_open = true;
    }

    fn delta(&self, delta: Delta<'_>, out: &mut Vec<u8>) {
        Event::ContentBlockDelta { index: self.blocks.len() - 1, delta }.write(out);
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        let index = self.blocks.len() - 1;
        if let Some(Block::Thinking { signature, .. }) = self.blocks.last_mut() {
            *signature = derived("sig_", &self.head.id, &index.to_string());
            let delta = Delta::Signature { signature };
            Event::ContentBlockDelta { index, delta }.write(out);
        }
        Event::ContentBlockStop { index }.write(out);
    }
}

impl Writer for MessageWriter {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn begin(&mut self, running: &Running, out: &mut Vec<u8>) {
        Event::MessageStart { message: &self.message(running) }.write(out);
        Event::Ping.write(out);
    }

    fn update(&mut self, _: &Running, update: Update, out: &mut Vec<u8>) {
        if let Update::Piece(_, piece, _) = update {
            self.piece(piece, out);
        }
    }

    fn end(&mut self, running: &Running, out: &mut Vec<u8>) {
        self.close(out);
        for ended in running.ended() {
            let (stop_reason, stop_sequence) = stop(&ended.outcome);
            let delta = MessageEnd { stop_reason, stop_sequence };
            let (usage, clary) = (usage(running), self.head.clary(running));
            Event::MessageDelta { delta, usage, clary: clary.as_ref() }.write(out);
        }
        Event::MessageStop.write(out);
    }

    fn failed(&mut self, _: &Running, error: &ApiError, out: &mut Vec<u8>) {
        sse_event(out, "error", &error.body(Dialect::Anthropic, &self.request_id));
    }

    fn keep_alive(&mut self, out: &mut Vec<u8>) {
        Event::Ping.write(out);
    }
}

impl Whole for MessageWriter {
    type Reply = MessageReply;

    fn whole(mut self, running: &Running) -> Self::Reply {
        self.close(&mut Vec::new());
        let Some(ended) = running.ended().next() else { return self.message(running) };
        let (stop_reason, stop_sequence) = stop(&ended.outcome);
        let clary = self.head.clary(running);
        let blocks = std::mem::take(&mut self.blocks).into_iter().enumerate();
        let content = blocks.filter(|(index, _)| !self.broken.contains(index)).map(|(_, block)| block);
        let content = content.collect();
        MessageReply {
            content,
            stop_reason: Some(stop_reason),
            stop_sequence,
            clary,
            ..self.message(running)
        }
    }
}

fn stop(outcome: &Outcome) -> (&'static str, Option<String>) {
    match (&outcome.finish, &outcome.stop_reason) {
        (Finish::ToolCalls, _) => ("tool_use", None),
        (Finish::Stop, Some(StopReason::Text(text))) => ("stop_sequence", Some(text.clone())),
        (Finish::Stop, _) => ("end_turn", None),
        _ => ("max_tokens", None),
    }
}

/// Token counts so far.
fn usage(running: &Running) -> MessageUsage {
    let (prompt, cached) = running.prompt_tokens();
    let generated = running.ended().map(|ended| ended.outcome.usage.completion_tokens);
    MessageUsage {
        input_tokens: prompt - cached,
        cache_read_input_tokens: cached,
        cache_creation_input_tokens: 0,
        output_tokens: generated.sum(),
    }
}
