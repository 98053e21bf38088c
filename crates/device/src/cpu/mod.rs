//! The CPU device: the executable definition of `docs/arithmetic.md`.

pub(crate) mod isa;

pub use isa::Isa;
