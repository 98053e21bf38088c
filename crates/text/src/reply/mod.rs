//! The model's text to reasoning, content and tool calls (`docs/api.md` 3.4 and 3.7).
//!
//! One state machine for streams and whole replies. Text is given out as soon as nothing that may follow can
//! change its meaning: a beginning of a marker, white space that may stand before a call, and what may still
//! be the end of a call's value are held back. What is given out therefore depends on the text alone and not
//! on how it was cut into pieces.

mod call;
mod typing;

use std::sync::Arc;

use crate::error::Note;
use crate::message::Tool;
use crate::render::{THINK_CLOSE, THINK_OPEN};

use call::{CallReader, Step};

pub use call::call_id;

/// Opens a tool call.
const CALL_OPEN: &str = "<tool_call>";
/// Closes a tool call.
const CALL_CLOSE: &str = "</tool_call>";
/// A call longer than this, in bytes, is given out as content.
pub const CALL_BYTES_MAX: usize = 4 << 20;
/// Content with one of these looks like a call that went wrong.
const LOOKS_LIKE_CALL: [&str; 5] = ["<tool_call", "</tool_call", "<function=", "</function>", "<parameter="];

/// How to read a reply.
#[derive(Clone, Debug, Default)]
pub struct ReplyOptions {
    /// Whether the prompt ends inside reasoning ([`crate::Rendered::in_reasoning`]).
    pub in_reasoning: bool,
    /// Leave reasoning and its tags in the content (`reasoning_format: raw`).
    pub raw_reasoning: bool,
    /// The functions that may be called; with none, calls are not looked for.
    pub tools: Arc<[Tool]>,
}

/// A complete tool call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Position among the calls that the reply began, from 0.
    pub index: usize,
    /// Name of the function.
    pub name: String,
    /// Compact JSON object, keys in the order written.
    pub arguments: String,
}

/// A piece of a reply. Pieces of one kind join to the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Reasoning.
    Reasoning(String),
    /// The answer.
    Content(String),
    /// A call begins: its place and its function.
    CallBegin {
        /// As [`Call::index`].
        index: usize,
        /// As [`Call::name`].
        name: String,
    },
    /// More of the arguments of the call that began. The parts join to [`Call::arguments`] if it becomes
    /// whole.
    CallArguments {
        /// As [`Call::index`].
        index: usize,
        /// Part of a JSON object, of whole characters and escapes.
        json: String,
    },
    /// A call that has come whole, with all of what its parts gave before.
    ToolCall(Call),
    /// The call that began is none after all: its text comes as content.
    CallDropped {
        /// As [`Call::index`].
        index: usize,
    },
    /// The text of a call that was cut by the length limit, whether its parts have begun or not.
    IncompleteCall(String),
    /// Something the client may want to know.
    Note(Note),
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By itself: an end token or a stop string.
    Stop,
    /// At a length limit.
    Length,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Reasoning,
    Content,
    Call,
}

/// What lies between the last marker and the next text of the content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gap {
    /// Nothing was generated yet.
    Start,
    /// Reasoning ended; its line breaks are scaffold.
    AfterReasoning,
    /// A call ended.
    AfterCall,
    /// Content has begun.
    None,
}

/// Reader of one reply.
#[derive(Clone, Debug)]
pub struct ReplyParser {
    options: ReplyOptions,
    state: State,
    gap: Gap,
    /// Text not given out yet. In a call: the call from its opening marker on.
    held: String,
    /// Held white space before the call; content again if the call is none.
    lead: String,
    /// The call under way.
    call: CallReader,
    /// Whether this stretch of reasoning has text.
    reasoning_begun: bool,
    /// Complete calls.
    calls: usize,
    /// Calls that were begun and dropped.
    dropped: usize,
    /// Last bytes of the content, to see [`LOOKS_LIKE_CALL`] across pieces.
    content_tail: String,
    noted: bool,
}

impl ReplyParser {
    /// A reader at the start of a reply.
    pub fn new(options: ReplyOptions) -> Self {
        Self {
            state: if options.in_reasoning { State::Reasoning } else { State::Content },
            options,
            gap: Gap::Start,
            held: String::new(),
            lead: String::new(),
            call: CallReader::new(0),
            reasoning_begun: false,
            calls: 0,
            dropped: 0,
            content_tail: String::new(),
            noted: false,
        }
    }

    /// Whether the next text is taken as reasoning.
    pub fn in_reasoning(&self) -> bool {
        self.state == State::Reasoning
    }

    /// Whether the next text is taken as part of a tool call.
    pub fn in_call(&self) -> bool {
        self.state == State::Call
    }

    /// Complete calls so far.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Takes text of ordinary tokens. Markers are recognised where they may stand.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        let mut pieces = Vec::new();
        self.held.push_str(text);
        self.advance(&mut pieces);
        pieces
    }

    /// Takes the spelling of a control token. As [`Self::push`], but the reasoning markers are obeyed
    /// wherever they come and never become text: the model meant the token, not its letters.
    pub fn push_control(&mut self, content: &str) -> Vec<Piece> {
        let opens = content == THINK_OPEN;
        if self.options.raw_reasoning || !(opens || content == THINK_CLOSE) {
            return self.push(content);
        }
        let mut pieces = Vec::new();
        match self.state {
            State::Call => return self.push(content),
            State::Reasoning if opens => {}
            State::Reasoning => return self.push(content),
            State::Content => {
                let held = std::mem::take(&mut self.held);
                if self.gap == Gap::None || !held.trim_start().is_empty() {
                    self.content(&held, &mut pieces);
                }
                self.gap = Gap::AfterReasoning;
                if opens {
                    self.begin_reasoning();
                }
            }
        }
        pieces
    }

    /// Ends the reply.
    pub fn finish(mut self, end: End) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let held = std::mem::take(&mut self.held);
        match (self.state, end) {
            (State::Reasoning, _) => {
                self.reasoning(&held, &mut pieces);
                if end == End::Stop && !self.options.raw_reasoning {
                    pieces.push(Piece::Note(Note::new("ended_in_reasoning", "")));
                }
            }
            (State::Content, _) => {
                let is_gap = matches!(self.gap, Gap::AfterReasoning | Gap::AfterCall);
                if !(is_gap && held.trim_start().is_empty()) {
                    let text = self.without_scaffold(&held).to_owned();
                    self.content(&text, &mut pieces);
                }
            }
            (State::Call, End::Length) => pieces.push(Piece::IncompleteCall(held)),
            (State::Call, End::Stop) => {
                self.drop_call(&mut pieces);
                let text = std::mem::take(&mut self.lead) + &held;
                self.content(&text, &mut pieces);
            }
        }
        pieces
    }

    fn advance(&mut self, pieces: &mut Vec<Piece>) {
        loop {
            let goes_on = match self.state {
                State::Reasoning => self.step_reasoning(pieces),
                State::Content if self.gap != Gap::None => self.step_gap(pieces),
                State::Content => self.step_content(pieces),
                State::Call => self.step_call(pieces),
            };
            if !goes_on {
                return;
            }
        }
    }

    fn begin_reasoning(&mut self) {
        self.state = State::Reasoning;
        self.reasoning_begun = false;
    }

    /// Each step returns whether another may follow, that is, whether the state or gap changed.
    fn step_reasoning(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let raw = self.options.raw_reasoning;
        if !raw && !self.reasoning_begun {
            // The line break after the opening marker is scaffold; so is the marker when the prompt has it.
            let scaffold = self.held.len() - self.held.trim_start_matches(['\n', '\r']).len();
            self.held.drain(..scaffold);
            if self.held.starts_with(THINK_OPEN) {
                self.held.drain(..THINK_OPEN.len());
                return true;
            }
            if THINK_OPEN.starts_with(&self.held) {
                return false;
            }
        }
        if let Some(at) = self.held.find(THINK_CLOSE) {
            let end = at + THINK_CLOSE.len();
            let block: String = self.held.drain(..end).collect();
            let text = if raw { &block } else { block[..at].trim_end_matches(['\n', '\r']) };
            self.reasoning(text, pieces);
            (self.state, self.gap) = (State::Content, Gap::AfterReasoning);
            return true;
        }
        let mut certain = self.held.len() - marker_tail(&self.held, THINK_CLOSE);
        if !raw {
            certain = self.held[..certain].trim_end_matches(['\n', '\r']).len();
        }
        let text: String = self.held.drain(..certain).collect();
        self.reasoning(&text, pieces);
        false
    }

    /// White space, and what follows it, where no content has begun.
    fn step_gap(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let rest = self.held.trim_start();
        let space = self.held.len() - rest.len();
        let (calls, raw) = (!self.options.tools.is_empty(), self.options.raw_reasoning);
        if calls && rest.starts_with(CALL_OPEN) {
            let lead: String = self.held.drain(..space).collect();
            self.lead = self.without_scaffold(&lead).to_owned();
            self.begin_call();
            return true;
        }
        if rest.starts_with(THINK_OPEN) {
            let text: String = self.held.drain(..space + THINK_OPEN.len()).collect();
            if raw {
                self.content(&text, pieces);
            }
            self.begin_reasoning();
            return true;
        }
        if !raw && rest.starts_with(THINK_CLOSE) {
            self.held.drain(..space + THINK_CLOSE.len());
            self.gap = Gap::AfterReasoning;
            return true;
        }
        let markers = [Some(THINK_OPEN), calls.then_some(CALL_OPEN), (!raw).then_some(THINK_CLOSE)];
        // An empty rest is the beginning of every marker.
        if markers.into_iter().flatten().any(|marker| marker.starts_with(rest)) {
            return false;
        }
        self.held = self.without_scaffold(&self.held).to_owned();
        self.gap = Gap::None;
        true
    }

    /// Content in the gap without the line breaks that belong to the end of reasoning.
    fn without_scaffold<'t>(&self, text: &'t str) -> &'t str {
        let is_scaffold = self.gap == Gap::AfterReasoning && !self.options.raw_reasoning;
        if is_scaffold { text.trim_start_matches(['\n', '\r']) } else { text }
    }

    fn step_content(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let calls = !self.options.tools.is_empty();
        let found = if calls { self.held.find(CALL_OPEN) } else { None };
        let held = if calls { marker_tail(&self.held, CALL_OPEN) } else { 0 };
        let text: String = self.held.drain(..found.unwrap_or(self.held.len() - held)).collect();
        self.content(&text, pieces);
        if found.is_some() {
            self.lead.clear();
            self.begin_call();
        }
        found.is_some()
    }

    /// `held` begins with the opening marker.
    fn begin_call(&mut self) {
        self.state = State::Call;
        self.call = CallReader::new(self.calls + self.dropped);
    }

    fn step_call(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let most = CALL_BYTES_MAX + CALL_CLOSE.len();
        let block = &self.held[..boundary_below(&self.held, self.held.len().min(most))];
        let before = self.call.arguments().len();
        let step = self.call.advance(block, &self.options.tools);
        self.arguments(before, pieces);
        match step {
            // Too long: no longer a call, wherever its end may come.
            Step::More if self.held.len() >= most => self.no_call(pieces),
            Step::More => return false,
            Step::Broken => self.no_call(pieces),
            Step::Unknown => {
                self.no_call(pieces);
                pieces.push(Piece::Note(Note::new("tool_unknown", "")));
            }
            Step::Whole(end) => {
                self.held.drain(..end);
                self.lead.clear();
                (self.state, self.gap) = (State::Content, Gap::AfterCall);
                self.calls += 1;
                let (call, notes) = std::mem::replace(&mut self.call, CallReader::new(0)).into_call();
                pieces.push(Piece::ToolCall(call));
                pieces.extend(notes.into_iter().map(Piece::Note));
            }
        }
        true
    }

    /// Gives out the arguments from `before` on.
    fn arguments(&self, before: usize, pieces: &mut Vec<Piece>) {
        let (index, more) = (self.calls + self.dropped, &self.call.arguments()[before..]);
        if more.is_empty() {
            return;
        }
        if before == 0 {
            pieces.push(Piece::CallBegin { index, name: self.call.name().to_owned() });
        }
        pieces.push(Piece::CallArguments { index, json: more.to_owned() });
    }

    /// The call under way is none. Its marker is content; what follows it is read again, for a good call may
    /// stand behind one that was never closed.
    fn no_call(&mut self, pieces: &mut Vec<Piece>) {
        self.drop_call(pieces);
        self.held.drain(..CALL_OPEN.len());
        (self.state, self.gap) = (State::Content, Gap::None);
        let text = std::mem::take(&mut self.lead) + CALL_OPEN;
        self.content(&text, pieces);
    }

    fn drop_call(&mut self, pieces: &mut Vec<Piece>) {
        if !self.call.arguments().is_empty() {
            pieces.push(Piece::CallDropped { index: self.calls + self.dropped });
            self.dropped += 1;
        }
    }

    fn reasoning(&mut self, text: &str, pieces: &mut Vec<Piece>) {
        if text.is_empty() {
            return;
        }
        self.reasoning_begun = true;
        if self.options.raw_reasoning {
            pieces.push(Piece::Content(text.to_owned()));
        } else {
            pieces.push(Piece::Reasoning(text.to_owned()));
        }
    }

    /// Gives out content, and once per reply the note that it looks like a call.
    fn content(&mut self, text: &str, pieces: &mut Vec<Piece>) {
        if text.is_empty() {
            return;
        }
        pieces.push(Piece::Content(text.to_owned()));
        if self.noted || self.options.tools.is_empty() {
            return;
        }
        self.content_tail.push_str(text);
        if LOOKS_LIKE_CALL.iter().any(|mark| self.content_tail.contains(mark)) {
            self.noted = true;
            pieces.push(Piece::Note(Note::new("tool_call_unparsed", "")));
        }
        let surplus = self.content_tail.len().saturating_sub(CALL_CLOSE.len());
        self.content_tail.drain(..boundary_below(&self.content_tail, surplus));
    }
}

/// Length of the longest end of `text` that is a beginning of `marker`, but not all of it.
fn marker_tail(text: &str, marker: &str) -> usize {
    let longest = text.len().min(marker.len() - 1);
    (1..=longest).rev().find(|&length| text.as_bytes().ends_with(&marker.as_bytes()[..length])).unwrap_or(0)
}

/// The last character boundary at or before `at`, which must lie in the text.
fn boundary_below(text: &str, at: usize) -> usize {
    (0..=at).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// A whole reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// Reasoning, without its markers.
    pub reasoning: String,
    /// The answer.
    pub content: String,
    /// Complete calls, in order.
    pub calls: Vec<Call>,
    /// The text of a call cut by the length limit.
    pub incomplete_call: Option<String>,
    /// Notes, in order.
    pub notes: Vec<Note>,
}

impl Reply {
    /// Adds a piece.
    pub fn absorb(&mut self, piece: Piece) {
        match piece {
            Piece::Reasoning(text) => self.reasoning.push_str(&text),
            Piece::Content(text) => self.content.push_str(&text),
            Piece::ToolCall(call) => self.calls.push(call),
            Piece::IncompleteCall(text) => self.incomplete_call = Some(text),
            Piece::Note(note) => self.notes.push(note),
            // Whole calls come with all of it.
            Piece::CallBegin { .. } | Piece::CallArguments { .. } | Piece::CallDropped { .. } => {}
        }
    }

    /// Reads a reply at once.
    pub fn read(options: ReplyOptions, text: &str, end: End) -> Self {
        let mut parser = ReplyParser::new(options);
        let mut reply = Self::default();
        parser.push(text).into_iter().for_each(|piece| reply.absorb(piece));
        parser.finish(end).into_iter().for_each(|piece| reply.absorb(piece));
        reply
    }
}
