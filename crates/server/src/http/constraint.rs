//! Constraints on the reply's tokens: wishes of a request, and whoever can compile them.

use std::sync::Arc;

use engine::Mask;
use text::{Note, Tokenizer, Tool};

use super::error::{ApiError, Code};

/// What a reply must look like behind its reasoning.
pub use text::Answer as Wish;

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

/// A constraint, and what of the wishes it leaves out.
pub struct Compiled {
    /// The mask at the reply's first token behind the reasoning.
    pub mask: Box<dyn Mask>,
    /// Conditions on arguments of functions that are not strict which are not enforced.
    pub notes: Vec<Note>,
}

/// Compiles wishes to masks over a tokenizer's ids. Takes at most a second and 64 MiB for any wish.
pub trait Grammar: Send + Sync {
    /// The mask at the reply's first token behind the reasoning, or why there is none
    /// ([`Code::UnsupportedSchema`], [`Code::ConstraintTooComplex`] or [`Code::InvalidValue`]).
    fn compile(&self, wishes: &Wishes, tokenizer: &Tokenizer) -> Result<Compiled, ApiError>;
}

/// The mask for a request's wishes; `None` where it has none. There is no unconstrained fallback.
pub(crate) fn compile(
    grammar: Option<&dyn Grammar>,
    wishes: &Wishes,
    tokenizer: &Tokenizer,
) -> Result<Option<Compiled>, ApiError> {
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
