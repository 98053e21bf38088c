//! Constraints: what they allow is valid, what they cannot enforce is refused, and going back is exact.

mod calls;
mod corpus;
mod limits;
mod moves;
mod refusals;
mod support;
mod validity;
