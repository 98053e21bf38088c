//! The CPU device: the executable definition of `docs/arithmetic.md`.

pub(crate) mod experts;
pub(crate) mod isa;
pub(crate) mod linear;
pub(crate) mod math;
pub(crate) mod pool;
pub mod probe;

pub use isa::Isa;
