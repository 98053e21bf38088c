//! Log-probabilities: which tokens belong to which piece of a reply, and how they are written.

use std::collections::VecDeque;

use engine::Score;
use serde::Serialize;
use text::{Piece, Tokenizer};
use utoipa::ToSchema;

/// Least log-probability that is written.
const LOGPROB_MIN: f32 = -9999.0;

/// Which tokens are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Those that content and reasoning are made of, each in its list.
    Parsed,
    /// Every generated token, as content.
    Raw,
}

/// Holds the scores of tokens until their text is given out.
#[derive(Debug)]
pub(crate) struct ScoreLog {
    scope: Scope,
    tokenizer: Tokenizer,
    /// Scores of tokens whose text is held back.
    held: VecDeque<Score>,
    /// Bytes given out minus those of the tokens released so far.
    credit: i64,
    content: Vec<Score>,
    reasoning: Vec<Score>,
}

impl ScoreLog {
    pub(crate) fn new(scope: Scope, tokenizer: &Tokenizer) -> Self {
        Self {
            scope,
            tokenizer: tokenizer.clone(),
            held: VecDeque::new(),
            credit: 0,
            content: Vec::new(),
            reasoning: Vec::new(),
        }
    }

    /// A token was read. One that ends the reply has no text.
    pub(crate) fn push(&mut self, score: Option<Score>, is_end: bool) {
        let Some(score) = score else { return };
        let is_marker = self.tokenizer.control_content(score.token).is_some();
        if self.scope == Scope::Raw || !(is_end || is_marker) {
            self.held.push_back(score);
        }
    }

    /// Reasoning ended: what is still held of it is scaffold.
    pub(crate) fn boundary(&mut self) {
        if self.scope == Scope::Parsed {
            self.held.clear();
            self.credit = 0;
        }
    }

    /// The scores that go with a piece.
    pub(crate) fn release(&mut self, piece: &Piece) -> Vec<Score> {
        let released: Vec<Score> = match (piece, self.scope) {
            (Piece::Note(_), _) => Vec::new(),
            (_, Scope::Raw) => self.held.drain(..).collect(),
            // Tokens of a call are needed again if it turns out to be content.
            (
                Piece::CallBegin { .. } | Piece::CallArguments { .. } | Piece::CallDropped { .. },
                Scope::Parsed,
            ) => Vec::new(),
            (Piece::ToolCall(_) | Piece::IncompleteCall(_), Scope::Parsed) => {
                self.held.clear();
                self.credit = 0;
                Vec::new()
            }
            (Piece::Content(text), Scope::Parsed) => self.covering(text, self.content.is_empty()),
            (Piece::Reasoning(text), Scope::Parsed) => self.covering(text, self.reasoning.is_empty()),
        };
        match piece {
            Piece::Reasoning(_) if self.scope == Scope::Parsed => self.reasoning.extend(released.clone()),
            _ => self.content.extend(released.clone()),
        }
        released
    }

    /// Tokens whose text begins in `text`, which is what comes next of the tokens held.
    fn covering(&mut self, text: &str, is_first: bool) -> Vec<Score> {
        if is_first && !text.starts_with(['\n', '\r']) {
            // Line breaks between a marker and the text are scaffold.
            let is_break = |score: &Score| {
                let bytes = self.tokenizer.token_bytes(score.token).unwrap_or_default();
                bytes.iter().all(|byte| matches!(byte, b'\n' | b'\r'))
            };
            let breaks = self.held.iter().take_while(|score| is_break(score)).count();
            self.held.drain(..breaks);
        }
        self.credit += text.len() as i64;
        let mut released = Vec::new();
        while self.credit > 0 {
            let Some(score) = self.held.pop_front() else { break };
            let bytes = self.tokenizer.token_bytes(score.token).map_or(0, <[u8]>::len);
            self.credit -= bytes as i64;
            released.push(score);
        }
        if self.held.is_empty() {
            // A replacement character is longer than the byte it stands for.
            self.credit = self.credit.min(0);
        }
        released
    }

    /// At the end of the reply: scores without text.
    pub(crate) fn rest(&mut self) -> Vec<Score> {
        let rest: Vec<Score> = match self.scope {
            Scope::Raw => self.held.drain(..).collect(),
            Scope::Parsed => Vec::new(),
        };
        self.content.extend(rest.clone());
        rest
    }

    /// All scores of the content and of the reasoning.
    pub(crate) fn take(&mut self) -> (Vec<Score>, Vec<Score>) {
        (std::mem::take(&mut self.content), std::mem::take(&mut self.reasoning))
    }
}

/// One token of a distribution.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct TopLogprob {
    /// The token's text; `bytes:\xNN…` where it is no whole text.
    pub token: String,
    /// Natural logarithm, of the raw distribution.
    pub logprob: f32,
    /// The token's bytes.
    pub bytes: Vec<u8>,
}

/// One token of a reply or prompt.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct TokenLogprob {
    /// The token's text; `bytes:\xNN…` where it is no whole text.
    pub token: String,
    /// Natural logarithm, of the raw distribution.
    pub logprob: f32,
    /// The token's bytes.
    pub bytes: Vec<u8>,
    /// The best alternatives, best first; the token itself is always among them where any are asked for.
    pub top_logprobs: Vec<TopLogprob>,
}

/// The text of a token in lists: its own, or its bytes where they are no whole text.
pub(crate) fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| format!("{text}\\x{byte:02x}")),
    }
}

/// What is written of a log-probability.
pub(crate) fn written(logprob: f32) -> f32 {
    logprob.max(LOGPROB_MIN)
}

/// A score as it is written.
pub(crate) fn logprob(tokenizer: &Tokenizer, score: &Score) -> TokenLogprob {
    let one = |id: u32, value: f32| TopLogprob {
        token: token_text(tokenizer, id),
        logprob: written(value),
        bytes: tokenizer.token_bytes(id).unwrap_or_default().to_vec(),
    };
    let mut top: Vec<TopLogprob> = score.top.iter().map(|&(id, value)| one(id, value)).collect();
    let is_listed = score.top.iter().any(|&(id, _)| id == score.token);
    if !top.is_empty() && !is_listed {
        top.push(one(score.token, score.logprob));
    }
    let TopLogprob { token, logprob, bytes } = one(score.token, score.logprob);
    TokenLogprob { token, logprob, bytes, top_logprobs: top }
}

/// Some scores as they are written.
pub(crate) fn logprobs(tokenizer: &Tokenizer, scores: &[Score]) -> Vec<TokenLogprob> {
    scores.iter().map(|score| logprob(tokenizer, score)).collect()
}
