//! Norm and rotation of queries and keys on CUDA.

use std::sync::Arc;

use super::driver::{Driver, Result};
use super::lower::Lowering;
use crate::{AttentionShape, Buffer, DeviceError, Rotary, VectorRef};

/// Cosines and sines.
pub(super) struct RotaryTable {}

impl RotaryTable {
    pub(super) fn new(_driver: &Arc<dyn Driver>, _cos: &[f32], _sin: &[f32], _axes: &[u8]) -> Result<Self> {
        Ok(Self {})
    }

    /// Positions of the table.
    pub(super) fn positions(&self) -> usize {
        0
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        0
    }
}

/// [`crate::Device::qk_norm_rope`].
pub(super) fn lower(
    _c: &mut Lowering<'_>,
    _qg: Buffer,
    _k: Buffer,
    _q_weight: VectorRef,
    _k_weight: VectorRef,
    _eps: f32,
    _rotary: Rotary,
    _shape: AttentionShape,
    _q: Buffer,
) -> Result {
    Err(DeviceError::Failed { stage: "qk_norm_rope", message: "not yet on CUDA; use --device cpu".into() })
}
