//! Token ids of a reply to its pieces.

use std::collections::BTreeSet;

use text::{Delta, Detokenizer, End, GenerationDefaults, Piece, Reply, ReplyOptions, ReplyParser};
use text::{RequestError, Specials, StopStrings, Tokenizer};

use crate::StopReason;

/// How to read a reply.
#[derive(Clone, Debug, Default)]
pub struct ReaderOptions {
    /// How to tell reasoning, content and calls apart.
    pub reply: ReplyOptions,
    /// Ids that end a reply and have no text.
    pub end_ids: BTreeSet<u32>,
    /// Those of them that the request asked for.
    pub stop_ids: BTreeSet<u32>,
    /// Texts that end the content.
    pub stop: Vec<String>,
    /// Whether the matched stop string stays in the content.
    pub include_stop: bool,
    /// Whether the first complete call ends the reply.
    pub single_call: bool,
    /// Whether stop strings end reasoning too.
    pub stop_in_reasoning: bool,
}

impl ReaderOptions {
    /// A reply that ends at ids of the request, and at the model's own unless they are ignored.
    pub(crate) fn new(
        reply: ReplyOptions,
        defaults: &GenerationDefaults,
        stop_ids: &[u32],
        ignore_eos: bool,
    ) -> Self {
        let stop_ids: BTreeSet<u32> = stop_ids.iter().copied().collect();
        let mut end_ids = stop_ids.clone();
        if !ignore_eos {
            end_ids.extend(&defaults.stop_ids);
        }
        Self { reply, end_ids, stop_ids, ..Self::default() }
    }
}

/// Reads one reply. What it gives out depends on the ids alone, not on how they were grouped.
#[derive(Debug)]
pub struct ReplyReader {
    detokenizer: Detokenizer,
    parser: ReplyParser,
    stops: StopStrings,
    end_ids: BTreeSet<u32>,
    stop_ids: BTreeSet<u32>,
    include_stop: bool,
    single_call: bool,
    stop_in_reasoning: bool,
    /// Whether the text that `stops` holds back is reasoning.
    held_is_reasoning: bool,
    reply: Reply,
    ids: Vec<u32>,
    reasoning_tokens: usize,
    stop_reason: Option<StopReason>,
    ended: bool,
}

impl ReplyReader {
    /// A reader at the start of a reply. Stop strings beyond the limits of [`StopStrings::new`] are refused.
    pub fn new(tokenizer: &Tokenizer, options: ReaderOptions) -> Result<Self, RequestError> {
        Ok(Self {
            detokenizer: Detokenizer::new(tokenizer, Specials::Skip),
            parser: ReplyParser::new(options.reply),
            stops: StopStrings::new(options.stop)?,
            end_ids: options.end_ids,
            stop_ids: options.stop_ids,
            include_stop: options.include_stop,
            single_call: options.single_call,
            stop_in_reasoning: options.stop_in_reasoning,
            held_is_reasoning: false,
            reply: Reply::default(),
            ids: Vec::new(),
            reasoning_tokens: 0,
            stop_reason: None,
            ended: false,
        })
    }

    /// Whether the text itself ended the reply: an end token, a stop string, or the only call allowed. Later
    /// ids are ignored.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Whether the next id is taken as reasoning.
    pub fn in_reasoning(&self) -> bool {
        self.parser.in_reasoning()
    }

    /// Whether the next id is taken as part of a tool call.
    pub fn in_call(&self) -> bool {
        self.parser.in_call()
    }

    /// Takes the next ids and returns what they decided.
    pub fn push(&mut self, ids: &[u32]) -> Vec<Piece> {
        let mut out = Vec::new();
        for &id in ids {
            if self.ended {
                break;
            }
            self.ids.push(id);
            if self.end_ids.contains(&id) {
                self.ended = true;
                self.stop_reason = self.stop_ids.contains(&id).then_some(StopReason::Token(id));
                break;
            }
            let was_reasoning = self.parser.in_reasoning();
            let Delta { text, control } = self.detokenizer.push_apart(id);
            let mut pieces = self.parser.push(&text);
            if let Some(control) = control {
                pieces.extend(self.parser.push_control(&control));
            }
            self.reasoning_tokens += usize::from(was_reasoning || self.parser.in_reasoning());
            self.take(pieces, &mut out);
        }
        out
    }

    /// Ends the reply and returns the last pieces.
    pub fn finish(&mut self, end: End) -> Vec<Piece> {
        let mut out = Vec::new();
        // A stop string or the only call has cut the text already; an end token has not.
        let is_cut = self.stops.matched().is_some() || self.single_call && self.parser.calls() > 0;
        if !is_cut {
            self.ended = false;
            let rest = self.detokenizer.finish();
            let mut pieces = self.parser.push(&rest);
            let parser = std::mem::replace(&mut self.parser, ReplyParser::new(ReplyOptions::default()));
            pieces.extend(parser.finish(end));
            self.take(pieces, &mut out);
            self.flush_stops(&mut out);
        }
        self.ended = true;
        out
    }

    /// The reply as read so far.
    pub fn reply(&self) -> &Reply {
        &self.reply
    }

    /// The ids that belong to the reply so far, the end token included.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// How many of the ids are reasoning, its markers included.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// Which wish of the request ended the reply, if one did.
    pub fn stop_reason(&self) -> Option<&StopReason> {
        self.stop_reason.as_ref()
    }

    /// Passes pieces on: content through the stop strings, the rest as it is.
    fn take(&mut self, pieces: Vec<Piece>, out: &mut Vec<Piece>) {
        for piece in pieces {
            match piece {
                Piece::Note(_) => self.give(piece, out),
                _ if self.ended => {}
                Piece::Content(text) => self.stoppable(&text, false, out),
                Piece::Reasoning(text) if self.stop_in_reasoning => {
                    self.stoppable(&text, true, out);
                }
                Piece::ToolCall(_) => {
                    self.flush_stops(out);
                    self.give(piece, out);
                    self.ended = self.single_call;
                }
                Piece::Reasoning(_)
                | Piece::CallBegin { .. }
                | Piece::CallArguments { .. }
                | Piece::CallDropped { .. }
                | Piece::IncompleteCall(_) => {
                    self.flush_stops(out);
                    self.give(piece, out);
                }
            }
        }
    }

    /// Gives out text up to a stop string, which ends the reply.
    fn stoppable(&mut self, text: &str, is_reasoning: bool, out: &mut Vec<Piece>) {
        if self.held_is_reasoning != is_reasoning {
            self.flush_stops(out);
            self.held_is_reasoning = is_reasoning;
        }
        let step = self.stops.push(text);
        self.text(step.text, out);
        if let Some(index) = step.matched {
            let stop = self.stops.stop(index).to_owned();
            if self.include_stop {
                self.text(stop.clone(), out);
            }
            self.stop_reason = Some(StopReason::Text(stop));
            self.ended = true;
        }
    }

    fn flush_stops(&mut self, out: &mut Vec<Piece>) {
        let rest = self.stops.flush().text;
        self.text(rest, out);
    }

    fn text(&mut self, text: String, out: &mut Vec<Piece>) {
        match text.is_empty() {
            true => {}
            false if self.held_is_reasoning => self.give(Piece::Reasoning(text), out),
            false => self.give(Piece::Content(text), out),
        }
    }

    fn give(&mut self, piece: Piece, out: &mut Vec<Piece>) {
        self.reply.absorb(piece.clone());
        out.push(piece);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use super::*;

    fn tokenizer() -> Tokenizer {
        let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo"));
        Tokenizer::open(dir).unwrap()
    }

    fn tools() -> Arc<[text::Tool]> {
        let tool = serde_json::json!([{"type": "function", "function": {"name": "f", "parameters":
            {"type": "object", "properties": {"x": {"type": "integer"}}}}}]);
        text::Tool::parse_all(&tool).unwrap().into()
    }

    /// Reads `ids` in groups of `size`; the joined pieces must be the reply.
    fn read(ids: &[u32], size: usize, options: &ReaderOptions, end: End) -> ReplyReader {
        let mut reader = ReplyReader::new(&tokenizer(), options.clone()).unwrap();
        let mut pieces = Vec::new();
        ids.chunks(size).for_each(|ids| pieces.extend(reader.push(ids)));
        pieces.extend(reader.finish(end));
        let mut joined = Reply::default();
        pieces.into_iter().for_each(|piece| joined.absorb(piece));
        assert_eq!(&joined, reader.reply());
        reader
    }

    fn check(
        text: &str,
        options: ReaderOptions,
        reasoning: &str,
        content: &str,
        calls: usize,
    ) -> ReplyReader {
        let ids = tokenizer().encode_raw(text).unwrap();
        let whole = read(&ids, ids.len(), &options, End::Stop);
        for size in [1, 2, 3, 7] {
            let streamed = read(&ids, size, &options, End::Stop);
            assert_eq!(streamed.reply(), whole.reply(), "{text}");
            assert_eq!(streamed.ids(), whole.ids());
            assert_eq!(streamed.reasoning_tokens(), whole.reasoning_tokens());
            assert_eq!(streamed.stop_reason(), whole.stop_reason());
        }
        let reply = whole.reply();
        assert_eq!((reply.reasoning.as_str(), reply.content.as_str()), (reasoning, content), "{text}");
        assert_eq!(reply.calls.len(), calls, "{text}");
        whole
    }

    fn thinking() -> ReaderOptions {
        ReaderOptions {
            reply: ReplyOptions { in_reasoning: true, tools: tools(), ..ReplyOptions::default() },
            ..ReaderOptions::default()
        }
    }

    const CALL: &str = "<tool_call>\n<function=f>\n<parameter=x>\n3\n</parameter>\n</function>\n</tool_call>";

    #[test]
    fn reasoning_content_and_calls() {
        let text = format!("37 plus 58.\n</think>\n\nIt is 95. 😀\n{CALL}");
        let reader = check(&text, thinking(), "37 plus 58.", "It is 95. 😀\n", 1);
        assert!(reader.reasoning_tokens() > 3 && reader.reasoning_tokens() < reader.ids().len());
        assert_eq!(reader.reply().calls[0].arguments, r#"{"x":3}"#);
    }

    #[test]
    fn stop_strings_end_content_but_not_reasoning() {
        let options = |include_stop| ReaderOptions { stop: vec!["is 9".into()], include_stop, ..thinking() };
        let text = "it is 95\n</think>\n\nIt is 95 and more";
        let reader = check(text, options(false), "it is 95", "It ", 0);
        assert_eq!(reader.stop_reason(), Some(&StopReason::Text("is 9".into())));
        assert!(reader.ids().len() < tokenizer().encode_raw(text).unwrap().len());
        check(text, options(true), "it is 95", "It is 9", 0);
        check("a</think>It is", options(false), "a", "It is", 0);
        let everywhere = ReaderOptions { stop_in_reasoning: true, ..options(false) };
        let reader = check("it is 95\n</think>\n\nIt", everywhere.clone(), "it ", "", 0);
        assert_eq!(reader.stop_reason(), Some(&StopReason::Text("is 9".into())));
        check("it is</think>\n\n 9 is 97", everywhere, "it is", " 9 ", 0);
    }

    #[test]
    fn one_call_ends_the_reply_where_more_are_not_allowed() {
        let text = format!("a\n</think>\n\n{CALL}\n{CALL}");
        check(&text, thinking(), "a", "", 2);
        let reader = check(&text, ReaderOptions { single_call: true, ..thinking() }, "a", "", 1);
        assert!(reader.ended());
    }

    #[test]
    fn end_tokens_have_no_text() {
        let end = tokenizer().control_id("<|im_end|>").unwrap();
        let word = tokenizer().encode_text(" is").unwrap();
        let mut options = ReaderOptions { end_ids: [end, word[0]].into(), ..ReaderOptions::default() };
        let reader = check("It is<|im_end|>", options.clone(), "", "It", 0);
        assert_eq!((reader.ids().last(), reader.stop_reason()), (Some(&word[0]), None));
        options.stop_ids.insert(word[0]);
        let reader = check("It is<|im_end|>", options, "", "It", 0);
        assert_eq!(reader.stop_reason(), Some(&StopReason::Token(word[0])));
    }

    #[test]
    fn limits_of_stop_strings_are_checked() {
        let options = ReaderOptions { stop: vec![String::new()], ..ReaderOptions::default() };
        assert_eq!(ReplyReader::new(&tokenizer(), options).unwrap_err().path, "stop[0]");
    }
}
