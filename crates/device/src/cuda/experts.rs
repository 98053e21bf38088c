//! Routed experts on CUDA.

use std::sync::Arc;

use quant::Matrix;

use super::driver::{Driver, Result};
use super::lower::Lowering;
use crate::{Buffer, DeviceError, ExpertsRef, Picks};

/// All routed experts of a layer.
pub(super) struct PackedExperts {}

impl PackedExperts {
    pub(super) fn new(
        _driver: &Arc<dyn Driver>,
        _gate: &[Matrix],
        _up: &[Matrix],
        _down: &[Matrix],
    ) -> Result<Self> {
        Ok(Self {})
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        0
    }
}

/// [`crate::Device::routed_experts`].
pub(super) fn lower(
    _c: &mut Lowering<'_>,
    _x: Buffer,
    _rows: usize,
    _picks: Picks,
    _experts: ExpertsRef,
    _out: Buffer,
) -> Result {
    Err(DeviceError::Failed { stage: "routed_experts", message: "not yet on CUDA; use --device cpu".into() })
}
