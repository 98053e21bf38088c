//! The stage `conv` on CUDA.

use super::driver::Result;
use super::lower::Lowering;
use crate::{Buffer, DeviceError, StatePool, VectorRef};

/// [`crate::Device::conv`].
pub(super) fn lower(
    _c: &mut Lowering<'_>,
    _x: Buffer,
    _taps: VectorRef,
    _pool: StatePool,
    _out: Buffer,
) -> Result {
    Err(DeviceError::Failed { stage: "conv", message: "not yet on CUDA; use --device cpu".into() })
}
