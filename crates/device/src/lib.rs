//! Devices: memory and the named stages of a forward pass.
//!
//! [`Device`] is the seam between the model and what computes it. A stage is coarse and named for the model's
//! step; its float operations and their order are fixed by `docs/arithmetic.md`, so every device gives the
//! same bits. The CPU device ([`cpu`]) is the executable definition; the [`reference`] device computes the
//! same stages in float64 and judges errors. A device knows buffers and stages, never layers or tensor names.

pub mod cpu;
pub mod cuda;
mod error;
mod handles;
pub mod host_math;
mod open;
mod patches;
pub mod reference;
mod stages;
mod step;

// What tests of this crate share with those outside names it from outside.
#[cfg(test)]
extern crate self as device;

pub use error::DeviceError;
pub use handles::{
    AttentionShape, Buffer, DeltaShape, DeltaState, ExpertsRef, KvForm, KvPool, KvShape, MatrixRef, Memory,
    Picks, Rotary, StatePool, VectorRef,
};
pub use open::{OpenSettings, best, card, open};
pub use patches::{Between, CHANNELS, Pixels};
pub use stages::{Activation, Adjust, Device, Draw, Drawn};
pub use step::{Row, Step, StepError, Window};

/// Tokens of one K/V page: one attention block (`docs/arithmetic.md`, K/V cache).
pub const PAGE_TOKENS: usize = 64;
/// Most rows of a window that is not committed at once (a draft window): the rows a state pool can replay.
pub const WINDOW_ROWS_MAX: usize = 32;
