//! Constraints on the reply's tokens: wishes of a request, whoever can compile them, and the mask that waits
//! until reasoning is over.

use std::sync::Arc;

use engine::{Allowed, Mask};
use serde_json::Value;
use text::{THINK_CLOSE, Tokenizer, Tool};

use super::error::{ApiError, Code};

/// What a reply must look like behind its reasoning.
#[derive(Clone, Debug, PartialEq)]
pub enum Wish {
    /// Any JSON object.
    JsonObject,
    /// JSON of a schema.
    Schema(Value),
    /// A text that matches a regular expression as a whole.
    Regex(String),
    /// One of some texts.
    Choice(Vec<String>),
}

/// A request's wishes: about the text, about its calls, or both.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wishes {
    /// Form of the answer, with the path of the field that asks for it.
    pub answer: Option<(String, Wish)>,
    /// The reply must call one of these functions (paths as for the answer).
    pub call: Option<(String, Vec<Tool>)>,
    /// Functions the model may call; those that are strict want arguments of their schema.
    pub tools: Arc<[Tool]>,
    /// Whether more than one call may be made.
    pub parallel: bool,
}

impl Wishes {
    /// Path of the first field that needs a grammar.
    fn path(&self) -> Option<String> {
        let strict = || {
            let index = self.tools.iter().position(|tool| tool.strict)?;
            Some(format!("tools[{index}].function.strict"))
        };
        let answer = self.answer.as_ref().map(|(path, _)| path.clone());
        answer.or_else(|| self.call.as_ref().map(|(path, _)| path.clone())).or_else(strict)
    }
}

/// Compiles wishes to masks over a tokenizer's ids. Takes at most a second and 64 MiB for any wish.
pub trait Grammar: Send + Sync {
    /// The mask at the reply's first token behind the reasoning, or why there is none
    /// ([`Code::UnsupportedSchema`], [`Code::ConstraintTooComplex`] or [`Code::InvalidValue`]).
    fn compile(&self, wishes: &Wishes, tokenizer: &Tokenizer) -> Result<Box<dyn Mask>, ApiError>;
}

/// The mask for a request's wishes; `None` where it has none. There is no unconstrained fallback.
pub(crate) fn compile(
    grammar: Option<&dyn Grammar>,
    wishes: &Wishes,
    tokenizer: &Tokenizer,
) -> Result<Option<Box<dyn Mask>>, ApiError> {
    match (wishes.path(), grammar) {
        (None, _) => Ok(None),
        (Some(_), Some(grammar)) => grammar.compile(wishes, tokenizer).map(Some),
        (Some(path), None) => {
            let is_schema = matches!(wishes.answer, Some((_, Wish::Schema(_))));
            let code = if is_schema { Code::UnsupportedSchema } else { Code::UnsupportedParameter };
            Err(ApiError::at(code, path, "this build cannot constrain replies; leave the field out"))
        }
    }
}

/// Leaves reasoning free up to its budget, closes it there, and hands over to a constraint behind it.
pub(crate) struct Gate {
    /// Closes the reasoning.
    close: u32,
    /// What is forced where the budget ends: the closing marker with its line breaks.
    closing: Arc<[u32]>,
    /// Tokens of reasoning before `closing`.
    budget: Option<usize>,
    /// Whether the reply begins inside reasoning.
    in_reasoning: bool,
    /// The constraint behind the reasoning.
    inner: Option<Box<dyn Mask>>,
    /// Tokens of the reply.
    tokens: usize,
    /// Where in the reply the reasoning ended.
    closed_at: Option<usize>,
    /// Where the forced tokens began, if they did.
    forced_at: Option<usize>,
}

impl Gate {
    /// A mask at the start of a reply; `None` where nothing is ever masked.
    pub(crate) fn new(
        tokenizer: &Tokenizer,
        in_reasoning: bool,
        budget: Option<usize>,
        inner: Option<Box<dyn Mask>>,
    ) -> Result<Option<Box<dyn Mask>>, ApiError> {
        if !in_reasoning {
            return Ok(inner);
        }
        let close = tokenizer.control_id(THINK_CLOSE).filter(|_| budget.is_some() || inner.is_some());
        let Some(close) = close else { return Ok(None) };
        let mut closing = tokenizer.encode_text("\n")?;
        closing.push(close);
        closing.extend(tokenizer.encode_text("\n\n")?);
        let (tokens, closed_at, forced_at) = (0, None, None);
        let closing = closing.into();
        Ok(Some(Box::new(Self { close, closing, budget, in_reasoning, inner, tokens, closed_at, forced_at })))
    }

    /// Index in `closing` of the token that must come next.
    fn forced(&self) -> Option<usize> {
        let begun = match self.forced_at {
            Some(at) => Some(at),
            None if self.closed_at.is_none() => self.budget.filter(|&budget| self.tokens >= budget),
            None => None,
        };
        begun.map(|at| self.tokens - at).filter(|&index| index < self.closing.len())
    }

    /// Whether the constraint has taken over: the reasoning, forced tokens included, is behind.
    fn is_open(&self) -> bool {
        !self.in_reasoning || (self.closed_at.is_some() && self.forced().is_none())
    }
}

impl Mask for Gate {
    fn allowed(&mut self, bits: &mut [u32]) -> Allowed {
        if let Some(index) = self.forced() {
            let token = self.closing[index] as usize;
            bits[token / 32] |= 1 << (token % 32);
            return Allowed::Some;
        }
        match &mut self.inner {
            Some(inner) if self.closed_at.is_some() => inner.allowed(bits),
            _ => Allowed::All,
        }
    }

    fn advance(&mut self, token: u32) {
        if self.is_open() {
            if let Some(inner) = &mut self.inner {
                inner.advance(token);
            }
        } else if self.forced() == Some(0) {
            self.forced_at = Some(self.tokens);
        }
        self.tokens += 1;
        if self.closed_at.is_none() && token == self.close {
            self.closed_at = Some(self.tokens);
        }
    }

    fn rollback(&mut self, count: usize) {
        for _ in 0..count {
            self.tokens -= 1;
            self.closed_at = self.closed_at.filter(|&at| at <= self.tokens);
            self.forced_at = self.forced_at.filter(|&at| at < self.tokens);
            if self.is_open()
                && let Some(inner) = &mut self.inner
            {
                inner.rollback(1);
            }
        }
    }

    fn fork(&self) -> Box<dyn Mask> {
        Box::new(Self {
            closing: self.closing.clone(),
            inner: self.inner.as_ref().map(|inner| inner.fork()),
            ..*self
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Allows one token after another.
    struct Script(Vec<u32>, usize);

    impl Mask for Script {
        fn allowed(&mut self, bits: &mut [u32]) -> Allowed {
            let Some(&token) = self.0.get(self.1) else { return Allowed::None };
            bits[token as usize / 32] |= 1 << (token % 32);
            Allowed::Some
        }
        fn advance(&mut self, token: u32) {
            assert_eq!(token, self.0[self.1]);
            self.1 += 1;
        }
        fn rollback(&mut self, count: usize) {
            self.1 -= count;
        }
        fn fork(&self) -> Box<dyn Mask> {
            Box::new(Self(self.0.clone(), self.1))
        }
    }

    fn next(mask: &mut dyn Mask) -> Option<u32> {
        let mut bits = vec![0; 128];
        match mask.allowed(&mut bits) {
            Allowed::Some => {
                let set = |id: &u32| bits[*id as usize / 32] >> (id % 32) & 1 == 1;
                Some((0..4096).find(set).unwrap())
            }
            _ => None,
        }
    }

    #[test]
    fn reasoning_is_free_up_to_its_budget() {
        let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo"));
        let tokenizer = Tokenizer::open(dir).unwrap();
        let close = tokenizer.control_id(THINK_CLOSE).unwrap();
        let inner = || -> Option<Box<dyn Mask>> { Some(Box::new(Script(vec![5, 6], 0))) };
        let mut mask = Gate::new(&tokenizer, true, Some(2), inner()).unwrap().unwrap();
        let mut forced = Vec::new();
        mask.advance(1);
        assert_eq!(next(&mut *mask), None);
        mask.advance(2);
        while let Some(token) = next(&mut *mask) {
            forced.push(token);
            mask.advance(token);
            if token == 6 {
                break;
            }
        }
        let at = forced.iter().position(|&token| token == close).unwrap();
        assert_eq!(forced[forced.len() - 2..], [5, 6]);
        assert_eq!(tokenizer.decode(&forced[..at], text::Specials::Keep), "\n");
        // Back into the reasoning, and out of it by the model's own will.
        let mut other = mask.fork();
        mask.rollback(forced.len() + 1);
        assert_eq!(next(&mut *mask), None);
        mask.advance(close);
        assert_eq!(next(&mut *mask), Some(5));
        other.rollback(1);
        assert_eq!(next(&mut *other), Some(6));
        other.rollback(1);
        assert_eq!(next(&mut *other), Some(5));
    }

    #[test]
    fn without_reasoning_or_wishes_there_is_no_gate() {
        let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo"));
        let tokenizer = Tokenizer::open(dir).unwrap();
        assert!(Gate::new(&tokenizer, false, Some(2), None).unwrap().is_none());
        assert!(Gate::new(&tokenizer, true, None, None).unwrap().is_none());
    }
}
