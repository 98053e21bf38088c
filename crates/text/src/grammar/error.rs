//! Why a constraint cannot be had.

use std::fmt;

/// What kind of obstacle a [`GrammarError`] names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrammarFault {
    /// It asks for something that would not be enforced, or that no reply can satisfy (`unsupported_schema`).
    Unsupported,
    /// It is not a schema, a regular expression or a list of choices (`invalid_value`).
    Invalid,
    /// It is larger or costlier than the limits allow (`constraint_too_complex`).
    TooComplex,
}

/// An obstacle, with its place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct GrammarError {
    /// JSON pointer into the schema; empty for the whole of it, and for a regular expression.
    pub pointer: String,
    /// Index of the choice, or of the tool whose parameters it concerns.
    pub index: Option<usize>,
    /// Expected and found, and how to go on.
    pub detail: String,
    /// The kind of obstacle.
    pub fault: GrammarFault,
}

impl GrammarError {
    pub(super) fn unsupported(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { pointer: pointer.into(), index: None, detail: detail.into(), fault: GrammarFault::Unsupported }
    }

    pub(super) fn invalid(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { fault: GrammarFault::Invalid, ..Self::unsupported(pointer, detail) }
    }

    pub(super) fn too_complex(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { fault: GrammarFault::TooComplex, ..Self::unsupported(pointer, detail) }
    }

    pub(super) fn at_index(self, index: usize) -> Self {
        Self { index: Some(index), ..self }
    }
}

impl fmt::Display for GrammarError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(index) = self.index {
            write!(f, "[{index}]")?;
        }
        f.write_str(&self.pointer)?;
        if self.index.is_some() || !self.pointer.is_empty() {
            f.write_str(": ")?;
        }
        f.write_str(&self.detail)
    }
}
