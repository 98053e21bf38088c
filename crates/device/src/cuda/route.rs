//! The stage `route` on CUDA.

use super::driver::Result;
use super::lower::Lowering;
use crate::{Buffer, DeviceError, Picks};

/// [`crate::Device::route`].
pub(super) fn lower(_c: &mut Lowering<'_>, _logits: Buffer, _rows: usize, _picks: Picks) -> Result {
    Err(DeviceError::Failed { stage: "route", message: "not yet on CUDA; use --device cpu".into() })
}
