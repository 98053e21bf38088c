//! A folder on disk becomes named canonical tensors, without changing a code or a scale.
//!
//! This crate knows file formats and tensor names; shapes are told to it by the model as a list of
//! [`Expected`] things.

mod error;
mod expected;

pub use error::{Error, HeaderProblem, PROBLEMS_SHOWN, Problem, UnsupportedKind};
pub use expected::{Expected, Format, Kind, Projection, Source};
