//! Logits to tokens on CUDA (`docs/arithmetic.md`, logits to tokens).

/// Scratch of draws, kept between calls.
#[derive(Default)]
pub(super) struct Draws {}

use super::Cuda;
use super::driver::Result;
use crate::{Buffer, DeviceError, Draw, Drawn};

impl Cuda {
    /// [`crate::Device::draw`] after a flush.
    pub(super) fn draw_rows(&mut self, _logits: Buffer, _draws: &[Draw]) -> Result<Vec<Drawn>> {
        Err(DeviceError::Failed { stage: "draw", message: "not yet on CUDA; use --device cpu".into() })
    }
}
