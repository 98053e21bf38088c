//! A chat reply in chunks (`docs/api.md` 3.9).

use engine::Score;
use serde::Serialize;
use text::Piece;
use utoipa::ToSchema;

use super::super::error::{ApiError, Dialect};
use super::super::flow::{Writer, sse_data};
use super::super::running::{Ended, Running, Update, finish_name};
use super::super::scores::{TokenLogprob, logprobs};
use super::reply::{ChatUsage, Clary, Head, Logprobs, StopWord, stop_word, usage};

/// `chat.completion.chunk`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatChunk {
    /// The same in every chunk.
    pub id: String,
    /// `chat.completion.chunk`.
    pub object: &'static str,
    /// The same in every chunk.
    pub created: u64,
    /// The same in every chunk.
    pub model: String,
    /// Version, backend and build.
    pub system_fingerprint: String,
    /// One; none in the usage chunk.
    pub choices: Vec<ChunkChoice>,
    /// Only with `include_usage`: null but in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<ChatUsage>>,
    /// In the last chunk, where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<Option<TokenLogprob>>>,
    /// In the last chunk, where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clary: Option<Clary>,
}

/// What is new of a choice.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChunkChoice {
    /// Which choice.
    pub index: usize,
    /// What is new.
    pub delta: Delta,
    /// Of the tokens that the delta is made of.
    pub logprobs: Option<Logprobs>,
    /// Set in the choice's last chunk.
    pub finish_reason: Option<&'static str>,
    /// Only in the choice's last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<Option<StopWord>>,
}

/// What is new of a message.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct Delta {
    /// In the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// More content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// More reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same under another name, where the server is set to send it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// One call, or more of its arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<[DeltaCall; 1]>,
}

/// A call, or more of its arguments.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct DeltaCall {
    /// Which call.
    pub index: usize,
    /// Where the call begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `function`, where the call begins.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    /// Name and arguments.
    pub function: DeltaFunction,
}

/// The function of a call.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct DeltaFunction {
    /// Where the call begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// More of a JSON object.
    pub arguments: String,
}

/// Writes the chunks.
pub(crate) struct ChatWriter {
    pub(crate) head: Head,
    /// Choices that are over.
    ended: usize,
    choices: usize,
}

impl ChatWriter {
    pub(crate) fn new(head: Head) -> Self {
        let choices = head.facts.params.n.unwrap_or(1) as usize;
        Self { head, ended: 0, choices }
    }

    fn has_usage(&self) -> bool {
        self.head.facts.params.stream_options.include_usage
    }

    fn chunk(&self, choices: Vec<ChunkChoice>) -> ChatChunk {
        ChatChunk {
            id: self.head.id.clone(),
            object: "chat.completion.chunk",
            created: self.head.created,
            model: self.head.model.clone(),
            system_fingerprint: self.head.fingerprint.clone(),
            choices,
            usage: self.has_usage().then_some(None),
            prompt_logprobs: None,
            clary: None,
        }
    }

    fn delta(&self, index: usize, delta: Delta, logprobs: Option<Logprobs>, out: &mut Vec<u8>) {
        let choice = ChunkChoice { index, delta, logprobs, finish_reason: None, stop_reason: None };
        sse_data(out, &self.chunk(vec![choice]));
    }

    fn piece(&self, running: &Running, index: usize, piece: Piece, scores: &[Score], out: &mut Vec<u8>) {
        let tokenizer = &running.served().session.text().tokenizer;
        let listed = || logprobs(tokenizer, scores);
        let wanted = self.head.facts.logprobs && !scores.is_empty();
        match piece {
            Piece::Content(text) => {
                let logprobs = wanted.then(|| Logprobs { content: listed(), reasoning: Vec::new() });
                self.delta(index, Delta { content: Some(text), ..Delta::default() }, logprobs, out);
            }
            Piece::Reasoning(text) => {
                let logprobs = wanted.then(|| Logprobs { content: Vec::new(), reasoning: listed() });
                let reasoning = self.head.reasoning_both.then(|| text.clone());
                let delta = Delta { reasoning_content: Some(text), reasoning, ..Delta::default() };
                self.delta(index, delta, logprobs, out);
            }
            Piece::CallBegin { index: call, name } => {
                let function = DeltaFunction { name: Some(name), arguments: String::new() };
                let id = Some(self.head.call_id(index, call));
                self.call(index, DeltaCall { index: call, id, kind: Some("function"), function }, out);
            }
            Piece::CallArguments { index: call, json } => {
                let function = DeltaFunction { name: None, arguments: json };
                self.call(index, DeltaCall { index: call, id: None, kind: None, function }, out);
            }
            // All of a whole call was said, and nothing can be taken back of one that is none.
            Piece::ToolCall(_) | Piece::CallDropped { .. } => {}
            Piece::IncompleteCall(_) | Piece::Note(_) => {}
        }
    }

    fn call(&self, choice: usize, call: DeltaCall, out: &mut Vec<u8>) {
        self.delta(choice, Delta { tool_calls: Some([call]), ..Delta::default() }, None, out);
    }

    fn finish(&mut self, running: &Running, index: usize, ended: &Ended, out: &mut Vec<u8>) {
        self.ended += 1;
        let choice = ChunkChoice {
            index,
            delta: Delta::default(),
            logprobs: None,
            finish_reason: Some(finish_name(&ended.outcome.finish)),
            stop_reason: Some(stop_word(&ended.outcome)),
        };
        let mut chunk = self.chunk(vec![choice]);
        if self.ended == self.choices && !self.has_usage() {
            chunk.prompt_logprobs = self.head.prompt_logprobs(running);
            chunk.clary = self.head.clary(running);
        }
        sse_data(out, &chunk);
    }
}

impl Writer for ChatWriter {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn begin(&mut self, _: &Running, out: &mut Vec<u8>) {
        for index in 0..self.choices {
            let delta = Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() };
            self.delta(index, delta, None, out);
        }
    }

    fn update(&mut self, running: &Running, update: Update, out: &mut Vec<u8>) {
        match update {
            Update::Admitted => {}
            Update::Piece(index, piece, scores) => self.piece(running, index, piece, &scores, out),
            Update::Finished(index, ended) => self.finish(running, index, &ended, out),
        }
    }

    fn end(&mut self, running: &Running, out: &mut Vec<u8>) {
        if self.has_usage() {
            let mut chunk = self.chunk(Vec::new());
            chunk.usage = Some(Some(usage(running)));
            chunk.prompt_logprobs = self.head.prompt_logprobs(running);
            chunk.clary = self.head.clary(running);
            sse_data(out, &chunk);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn failed(&mut self, _: &Running, error: &ApiError, out: &mut Vec<u8>) {
        sse_data(out, &error.body(Dialect::OpenAi, ""));
    }

    fn keep_alive(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(b": keep-alive\n\n");
    }
}
