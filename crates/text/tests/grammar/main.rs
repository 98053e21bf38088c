//! Constraints: what they allow is valid, what they cannot enforce is refused, and going back is exact.

// A test's own helpers may fail by panicking.
#![allow(clippy::unwrap_used)]

mod calls;
mod corpus;
mod limits;
mod moves;
mod refusals;
mod support;
mod validity;
