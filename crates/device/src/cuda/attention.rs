//! The stage `attention` on CUDA.

use super::driver::Result;
use super::lower::Lowering;
use crate::{AttentionShape, Buffer, DeviceError, KvPool};

/// [`crate::Device::attention`].
pub(super) fn lower(
    _c: &mut Lowering<'_>,
    _q: Buffer,
    _shape: AttentionShape,
    _pool: KvPool,
    _out: Buffer,
) -> Result {
    Err(DeviceError::Failed { stage: "attention", message: "not yet on CUDA; use --device cpu".into() })
}
