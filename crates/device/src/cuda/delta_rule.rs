//! The stage `delta_rule` on CUDA.

use super::driver::Result;
use super::lower::Lowering;
use crate::{Buffer, DeviceError, StatePool, VectorRef};

/// [`crate::Device::delta_rule`].
pub(super) fn lower(
    _c: &mut Lowering<'_>,
    _mixed: Buffer,
    _a: Buffer,
    _b: Buffer,
    _decay: VectorRef,
    _dt_bias: VectorRef,
    _pool: StatePool,
    _out: Buffer,
) -> Result {
    Err(DeviceError::Failed { stage: "delta_rule", message: "not yet on CUDA; use --device cpu".into() })
}
