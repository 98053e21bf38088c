//! Constraints as the engine takes them: a grammar's matcher as a mask, and the mask that leaves reasoning
//! free.

use std::sync::{Arc, OnceLock};

use engine::{Allowed, Mask};
use text::{
    Calls, Grammar, GrammarCompiler, GrammarError, GrammarFault, Matcher, Note, THINK_CLOSE, TextError,
    Tokenizer,
};

use crate::TextSide;
use crate::http::{ApiError, Code, Compiled, Wish, Wishes};

impl crate::http::Grammar for GrammarCompiler {
    fn compile(&self, wishes: &Wishes, _: &Tokenizer) -> Result<Compiled, ApiError> {
        let (tools, required) = match &wishes.call {
            Some((_, tools)) => (tools.as_slice(), true),
            None => (&*wishes.tools, false),
        };
        let calls = Calls { tools, required, parallel: wishes.parallel };
        let calls = Some(&calls).filter(|calls| !calls.tools.is_empty());
        let answer = wishes.answer.as_ref().map(|(_, wish)| wish);
        let grammar = self.compile(answer, calls).map_err(|error| refusal(&error, wishes, tools))?;
        let notes = grammar.loosened().iter().map(|loosened| {
            let place = placed(wishes, tools, loosened.tool);
            let path = format!("/tools/{place}/function/parameters{}", loosened.pointer);
            Note { code: "schema_not_enforced", path }
        });
        Ok(Compiled { mask: Box::new(GrammarMask::new(&grammar)), notes: notes.collect() })
    }
}

/// Where the client has a function of those that are compiled.
fn placed(wishes: &Wishes, tools: &[text::Tool], index: usize) -> usize {
    let name = tools.get(index).map(|tool| &tool.name);
    wishes.tools.iter().position(|tool| Some(&tool.name) == name).unwrap_or(index)
}

/// The error as the API words it: schemas are pointed into with a JSON pointer from the request's root.
fn refusal(error: &GrammarError, wishes: &Wishes, tools: &[text::Tool]) -> ApiError {
    let pointed = |path: &str| {
        let path = path.replace(['.', '['], "/").replace(']', "");
        format!("/{path}{}", error.pointer)
    };
    let (param, is_schema) = match (&wishes.answer, error.index) {
        (Some((path, Wish::Choice(_))), Some(index)) => (format!("{path}[{index}]"), false),
        (_, Some(index)) => {
            let place = placed(wishes, tools, index);
            (pointed(&format!("tools[{place}].function.parameters")), true)
        }
        (Some((path, Wish::Schema(_))), None) => (pointed(path), true),
        (Some((path, _)), None) => (path.clone(), false),
        (None, None) => ("tools".to_owned(), true),
    };
    let code = match error.fault {
        GrammarFault::Unsupported if is_schema => Code::UnsupportedSchema,
        GrammarFault::Unsupported | GrammarFault::Invalid => Code::InvalidValue,
        GrammarFault::TooComplex => Code::ConstraintTooComplex,
    };
    match error.index.and_then(|index| tools.get(index)).filter(|_| is_schema) {
        Some(tool) => ApiError::at(code, param, format!("function {}: {}", tool.name, error.detail)),
        None => ApiError::at(code, param, &error.detail),
    }
}

/// A grammar's matcher.
pub(crate) struct GrammarMask {
    matcher: Matcher,
    /// Tokens since one that was not allowed. The engine sends none; if one came, nothing may follow.
    strayed: usize,
}

impl GrammarMask {
    pub(crate) fn new(grammar: &Grammar) -> Self {
        Self { matcher: grammar.matcher(), strayed: 0 }
    }
}

impl Mask for GrammarMask {
    fn allowed(&mut self, bits: &mut [u32]) -> Allowed {
        match self.strayed == 0 && self.matcher.allowed(bits) {
            true => Allowed::Some,
            false => Allowed::None,
        }
    }

    fn advance(&mut self, token: u32) {
        if self.strayed > 0 || self.matcher.advance(token).is_err() {
            self.strayed += 1;
        }
    }

    fn rollback(&mut self, count: usize) {
        let strayed = count.min(self.strayed);
        self.strayed -= strayed;
        self.matcher.rollback(count - strayed);
    }

    fn fork(&self) -> Box<dyn Mask> {
        Box::new(Self { matcher: self.matcher.clone(), strayed: self.strayed })
    }
}

/// Bytes of [`THINK_CLOSE`].
const MARK: &[u8; 8] = b"</think>";
/// The whole mark is spelled.
const CLOSED: u8 = MARK.len() as u8;

/// How reasoning ends in a model's replies, worked out when it is first asked for. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reasoning(Arc<OnceLock<Arc<ReasoningEnd>>>);

impl Reasoning {
    /// The mask of a reply that may have a budget for reasoning, must not end inside it (`close`), or has a
    /// constraint behind it; `None` where nothing is ever masked. `in_reasoning` says whether the prompt ends
    /// inside reasoning.
    pub(crate) fn mask(
        &self,
        text: &TextSide,
        in_reasoning: bool,
        budget: Option<usize>,
        close: bool,
        inner: Option<Box<dyn Mask>>,
    ) -> Result<Option<Box<dyn Mask>>, TextError> {
        if !in_reasoning || (budget.is_none() && inner.is_none() && !close) {
            return Ok(inner);
        }
        let end = match self.0.get() {
            Some(end) => end.clone(),
            None => {
                let end = Arc::new(ReasoningEnd::new(&text.tokenizer, &text.defaults.stop_ids)?);
                self.0.get_or_init(|| end).clone()
            }
        };
        Ok(Some(Box::new(AfterReasoning::new(end, budget, close, inner))))
    }
}

/// How reasoning ends with a tokenizer.
#[derive(Debug)]
struct ReasoningEnd {
    tokenizer: Tokenizer,
    /// The control token, if the mark is one.
    close: Option<u32>,
    /// A line break, the mark and a blank line: how the template closes reasoning.
    closing: Vec<u32>,
    /// Tokens of `closing` up to the mark's end.
    closed: usize,
    /// By bytes of the mark already spelled with letters: tokens that would spell its rest and run on.
    running_on: [Vec<u32>; MARK.len()],
    end_ids: Vec<u32>,
}

impl ReasoningEnd {
    fn new(tokenizer: &Tokenizer, end_ids: &[u32]) -> Result<Self, TextError> {
        let close = tokenizer.control_id(THINK_CLOSE);
        let mut closing = tokenizer.encode_text("\n")?;
        match close {
            Some(id) => closing.push(id),
            None => closing.extend(tokenizer.encode_text(THINK_CLOSE)?),
        }
        let closed = closing.len();
        closing.extend(tokenizer.encode_text("\n\n")?);
        let mut running_on: [Vec<u32>; MARK.len()] = Default::default();
        for id in 0..tokenizer.vocab_size() as u32 {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            if !bytes.contains(&b'>') || Some(id) == close {
                continue;
            }
            for (spelled, ids) in running_on.iter_mut().enumerate() {
                if spell(spelled as u8, bytes).is_none() {
                    ids.push(id);
                }
            }
        }
        let end_ids = end_ids.to_vec();
        Ok(Self { tokenizer: tokenizer.clone(), close, closing, closed, running_on, end_ids })
    }

    /// Bytes of the mark that are spelled after one more token of the reasoning.
    fn after(&self, spelled: u8, token: u32) -> u8 {
        if Some(token) == self.close {
            return CLOSED;
        }
        // Special tokens are no part of the text, which goes on behind them.
        if self.tokenizer.is_special(token) {
            return spelled;
        }
        spell(spelled, self.tokenizer.token_bytes(token).unwrap_or_default()).unwrap_or(CLOSED)
    }
}

/// Bytes of the mark that are spelled after these; `None` if the mark is complete before the last of them.
fn spell(spelled: u8, bytes: &[u8]) -> Option<u8> {
    let mut spelled = spelled;
    for &byte in bytes {
        if spelled == CLOSED {
            return None;
        }
        // The mark's first byte is nowhere else in it.
        spelled = if byte == MARK[usize::from(spelled)] { spelled + 1 } else { u8::from(byte == MARK[0]) };
    }
    Some(spelled)
}

/// Leaves reasoning free up to its budget, closes it there, and hands over to a constraint behind the blank
/// line that the template puts after it. Under a constraint, or where it must be closed, the reply cannot end
/// inside the reasoning; under a constraint no token reaches from the reasoning into the answer.
struct AfterReasoning {
    end: Arc<ReasoningEnd>,
    /// Tokens of reasoning before it is closed by force.
    budget: Option<usize>,
    /// End tokens are not allowed inside.
    close: bool,
    inner: Option<Box<dyn Mask>>,
    /// After each token of the reasoning, its mark included: bytes of the mark that are spelled.
    spelled: Vec<u8>,
    /// Tokens behind the mark.
    behind: usize,
}

impl AfterReasoning {
    fn new(end: Arc<ReasoningEnd>, budget: Option<usize>, close: bool, inner: Option<Box<dyn Mask>>) -> Self {
        Self { end, budget, close, inner, spelled: Vec::new(), behind: 0 }
    }

    /// Bytes of the mark that are spelled.
    fn state(&self) -> u8 {
        self.spelled.last().copied().unwrap_or(0)
    }

    fn is_closed(&self) -> bool {
        self.state() == CLOSED
    }

    /// Tokens forced behind the mark: all of the closing, if it was begun by force or something must follow.
    fn tail(&self) -> usize {
        let by_force = self.budget.is_some_and(|budget| self.spelled.len() == budget + self.end.closed);
        if by_force || self.inner.is_some() { self.end.closing.len() - self.end.closed } else { 0 }
    }

    /// The only token that may follow, if there is but one.
    fn forced(&self) -> Option<u32> {
        if self.is_closed() {
            return (self.behind < self.tail()).then(|| self.end.closing[self.end.closed + self.behind]);
        }
        let begun = self.spelled.len().checked_sub(self.budget?)?;
        self.end.closing.get(begun).copied()
    }
}

impl Mask for AfterReasoning {
    fn allowed(&mut self, bits: &mut [u32]) -> Allowed {
        if let Some(token) = self.forced() {
            bits[token as usize / 32] |= 1 << (token % 32);
            return Allowed::Some;
        }
        let (is_closed, state) = (self.is_closed(), self.state());
        match &mut self.inner {
            None if is_closed || !self.close => Allowed::All,
            Some(inner) if is_closed => inner.allowed(bits),
            inner => {
                bits.fill(u32::MAX);
                let running_on: &[u32] = match inner {
                    Some(_) => &self.end.running_on[usize::from(state)],
                    None => &[],
                };
                for &id in running_on.iter().chain(&self.end.end_ids) {
                    if let Some(word) = bits.get_mut(id as usize / 32) {
                        *word &= !(1 << (id % 32));
                    }
                }
                Allowed::Some
            }
        }
    }

    fn advance(&mut self, token: u32) {
        if !self.is_closed() {
            self.spelled.push(self.end.after(self.state(), token));
            return;
        }
        let is_open = self.behind >= self.tail();
        if let Some(inner) = self.inner.as_mut().filter(|_| is_open) {
            inner.advance(token);
        }
        self.behind += 1;
    }

    fn rollback(&mut self, count: usize) {
        let behind = count.min(self.behind);
        let inside = behind.min(self.behind.saturating_sub(self.tail()));
        if let Some(inner) = self.inner.as_mut().filter(|_| inside > 0) {
            inner.rollback(inside);
        }
        self.behind -= behind;
        self.spelled.truncate(self.spelled.len().saturating_sub(count - behind));
    }

    fn fork(&self) -> Box<dyn Mask> {
        Box::new(Self {
            end: self.end.clone(),
            budget: self.budget,
            close: self.close,
            inner: self.inner.as_ref().map(|inner| inner.fork()),
            spelled: self.spelled.clone(),
            behind: self.behind,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;
    use text::{Answer, Specials, Tool};

    use super::*;
    use crate::http::Grammar as Compile;

    fn demo() -> (TextSide, GrammarCompiler) {
        let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo"));
        let text = TextSide::open(dir).unwrap();
        let compiler = GrammarCompiler::new(&text.tokenizer, &text.defaults.stop_ids).unwrap();
        (text, compiler)
    }

    fn set(mask: &mut dyn Mask, ids: usize) -> (Allowed, Vec<u32>) {
        let mut bits = vec![0_u32; ids.div_ceil(32)];
        let allowed = mask.allowed(&mut bits);
        (allowed, (0..ids as u32).filter(|id| bits[*id as usize / 32] >> (id % 32) & 1 == 1).collect())
    }

    fn choice(compiler: &GrammarCompiler) -> Box<dyn Mask> {
        let answer = Answer::Choice(vec!["yes".into(), "no".into()]);
        Box::new(GrammarMask::new(&compiler.compile(Some(&answer), None).unwrap()))
    }

    #[test]
    fn reasoning_that_must_be_closed_does_not_end_the_reply() {
        let (text, _) = demo();
        let ids = text.tokenizer.vocab_size();
        let mask = |close| Reasoning::default().mask(&text, true, None, close, None).unwrap();
        assert!(mask(false).is_none());
        let mut mask = mask(true).unwrap();
        let (allowed, free) = set(&mut *mask, ids);
        assert_eq!((allowed, free.len()), (Allowed::Some, ids - text.defaults.stop_ids.len()));
        mask.advance(text.tokenizer.control_id(THINK_CLOSE).unwrap());
        assert_eq!(set(&mut *mask, ids).0, Allowed::All);
        mask.rollback(1);
        assert_eq!(set(&mut *mask.fork(), ids).1, free);
    }

    #[test]
    fn reasoning_is_free_but_for_its_end() {
        let (text, compiler) = demo();
        let ids = text.tokenizer.vocab_size();
        let inner = Some(choice(&compiler));
        let mut mask = Reasoning::default().mask(&text, true, None, false, inner).unwrap().unwrap();
        let (allowed, free) = set(&mut *mask, ids);
        assert_eq!(allowed, Allowed::Some);
        assert_eq!(free.len(), ids - text.defaults.stop_ids.len());
        let close = text.tokenizer.control_id(THINK_CLOSE).unwrap();
        // By the token or by letters: both end it, and the same must follow.
        let letter = |c: char| text.tokenizer.encode_text(&c.to_string()).unwrap()[0];
        let letters: Vec<u32> = THINK_CLOSE.chars().map(letter).collect();
        for ways in [vec![close], letters] {
            let mut mask = mask.fork();
            for token in text.tokenizer.encode_text("Hm, no < yes").unwrap().into_iter().chain(ways) {
                assert!(set(&mut *mask, ids).1.contains(&token));
                mask.advance(token);
            }
            let mut rest = Vec::new();
            while let (Allowed::Some, next) = set(&mut *mask, ids) {
                let Some(token) = next.into_iter().find(|id| !text.defaults.stop_ids.contains(id)) else {
                    break;
                };
                rest.push(token);
                mask.advance(token);
            }
            let rest = text.tokenizer.decode(&rest, Specials::Keep);
            assert!(rest == "\n\nyes" || rest == "\n\nno", "{rest:?}");
        }
    }

    #[test]
    fn the_mark_is_spelled_exactly_or_not_at_all() {
        assert_eq!(spell(0, b"a</thi"), Some(5));
        assert_eq!(spell(5, b"nk>"), Some(CLOSED));
        assert_eq!(spell(5, b"nk>\n"), None);
        assert_eq!(spell(5, b"n</t"), Some(3));
        assert_eq!(spell(0, b"<</think>"), Some(CLOSED));
    }

    #[test]
    fn budgets_close_reasoning() {
        let (text, compiler) = demo();
        let reasoning = Reasoning::default();
        let ids = text.tokenizer.vocab_size();
        let word = text.tokenizer.encode_text("so").unwrap()[0];
        for inner in [None, Some(choice(&compiler))] {
            let has_inner = inner.is_some();
            let mut mask = reasoning.mask(&text, true, Some(2), false, inner).unwrap().unwrap();
            mask.advance(word);
            mask.advance(word);
            let mut forced = Vec::new();
            while let (Allowed::Some, next) = set(&mut *mask, ids)
                && next.len() == 1
            {
                forced.push(next[0]);
                mask.advance(next[0]);
            }
            assert_eq!(text.tokenizer.decode(&forced, Specials::Keep), "\n</think>\n\n");
            assert_eq!(set(&mut *mask, ids).0 == Allowed::All, !has_inner);
            mask.rollback(forced.len() + 1);
            assert!(set(&mut *mask, ids).1.len() != 1);
        }
        assert!(reasoning.mask(&text, true, None, false, None).unwrap().is_none());
        assert!(reasoning.mask(&text, false, Some(3), false, None).unwrap().is_none());
    }

    /// Wherever it goes, on and back, a mask answers as a fresh one that went there straight.
    #[test]
    fn going_back_is_exact() {
        let (text, compiler) = demo();
        let reasoning = Reasoning::default();
        let ids = text.tokenizer.vocab_size();
        let close = text.tokenizer.control_id(THINK_CLOSE).unwrap();
        for budget in [None, Some(0), Some(3), Some(9)] {
            let fresh =
                || reasoning.mask(&text, true, budget, false, Some(choice(&compiler))).unwrap().unwrap();
            let mut mask = fresh();
            let mut path: Vec<u32> = Vec::new();
            let mut dice = 88_172_645_463_325_252_u64;
            let mut below = |limit: usize| {
                dice ^= dice << 13;
                dice ^= dice >> 7;
                dice ^= dice << 17;
                (dice >> 11) as usize % limit
            };
            for _ in 0..120 {
                for _ in 0..below(5) {
                    let next = set(&mut *mask, ids).1;
                    let token =
                        if below(4) == 0 && next.contains(&close) { close } else { next[below(next.len())] };
                    mask.advance(token);
                    path.push(token);
                }
                let mut straight = fresh();
                path.iter().for_each(|&token| straight.advance(token));
                assert_eq!(set(&mut *mask, ids), set(&mut *straight, ids));
                let mut fork = mask.fork();
                let back = below(path.len().min(6) + 1);
                mask.rollback(back);
                assert_eq!(set(&mut *fork, ids), set(&mut *straight, ids));
                path.truncate(path.len() - back);
            }
        }
    }

    #[test]
    fn refusals_point_into_the_request() {
        let (text, compiler) = demo();
        let refused = |wishes: Wishes| Compile::compile(&compiler, &wishes, &text.tokenizer);
        let answer = |path: &str, wish| Wishes { answer: Some((path.to_owned(), wish)), ..Wishes::default() };
        let schema = Wish::Schema(json!({"properties": {"a": {"not": {}}}}));
        let tools = json!([{"type": "function", "function": {"name": "f"}},
            {"type": "function", "function": {"name": "g", "strict": true, "parameters": {"allOf": [{}]}}}]);
        let tools: Arc<[Tool]> = Tool::parse_all(&tools).unwrap().into();
        let deep = (0..70).fold(json!({}), |inner, _| json!({"items": inner}));
        for (wishes, param, code) in [
            (
                answer("response_format.json_schema.schema", schema),
                "/response_format/json_schema/schema/properties/a/not",
                Code::UnsupportedSchema,
            ),
            (answer("guided_json", Wish::Schema(deep)), "/guided_json", Code::ConstraintTooComplex),
            (answer("guided_regex", Wish::Regex("(".into())), "guided_regex", Code::InvalidValue),
            (
                answer("guided_choice", Wish::Choice(vec![String::new()])),
                "guided_choice[0]",
                Code::InvalidValue,
            ),
            (
                Wishes { tools: tools.clone(), ..Wishes::default() },
                "/tools/1/function/parameters/allOf",
                Code::UnsupportedSchema,
            ),
            (
                Wishes {
                    call: Some(("tool_choice".into(), vec![tools[1].clone()])),
                    tools: tools.clone(),
                    ..Wishes::default()
                },
                "/tools/1/function/parameters/allOf",
                Code::UnsupportedSchema,
            ),
        ] {
            let error = refused(wishes).err().unwrap();
            assert_eq!((error.param.as_deref(), error.code), (Some(param), code), "{error}");
        }
        let fine = Wishes { tools: tools[..1].into(), ..answer("response_format.type", Wish::JsonObject) };
        assert!(refused(fine).is_ok());
    }
}
