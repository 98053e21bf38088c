//! States of delta-net layers on CUDA.

use std::sync::Arc;

use super::driver::{Driver, Result};
use super::lower::Lowering;
use super::memory::Span;
use crate::{DeltaShape, DeltaState, DeviceError, StatePool};

/// States of one layer.
pub(super) struct States {}

fn missing(stage: &'static str) -> DeviceError {
    DeviceError::Failed { stage, message: "not yet on CUDA; use --device cpu".into() }
}

impl States {
    pub(super) fn new(_driver: &Arc<dyn Driver>, _shape: DeltaShape, _places: usize) -> Result<Self> {
        Ok(Self {})
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        0
    }

    pub(super) fn read(&self, _place: u32) -> Result<DeltaState> {
        Err(missing("state_read"))
    }

    pub(super) fn write(&self, _place: u32, _state: &DeltaState) -> Result {
        Err(missing("state_write"))
    }
}

pub(super) fn lower_clear(_c: &mut Lowering<'_>, _pool: StatePool, _place: u32) -> Result {
    Err(missing("state_clear"))
}

pub(super) fn lower_copy(_c: &mut Lowering<'_>, _pool: StatePool, _from: u32, _to: u32) -> Result {
    Err(missing("state_copy"))
}

/// `words`: place, count, then `WINDOW_ROWS_MAX` rows of which `count` are meant (u32 each).
pub(super) fn lower_keep(_c: &mut Lowering<'_>, _keeps: &[(StatePool, Span)]) -> Result {
    Err(missing("state_keep"))
}
