//! Paged K/V codes on CUDA.

use std::sync::Arc;

use super::driver::{Driver, Result};
use super::lower::Lowering;
use super::memory::Span;
use crate::{Buffer, DeviceError, KvPool, KvShape};

/// Pages of one layer.
pub(super) struct KvPages {}

fn missing(stage: &'static str) -> DeviceError {
    DeviceError::Failed { stage, message: "not yet on CUDA; use --device cpu".into() }
}

impl KvPages {
    pub(super) fn new(_driver: &Arc<dyn Driver>, _shape: KvShape) -> Result<Self> {
        Ok(Self {})
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        0
    }

    pub(super) fn export(&self, _page: u32) -> Result<Vec<u8>> {
        Err(missing("kv_export"))
    }

    pub(super) fn import(&self, _page: u32, _bytes: &[u8]) -> Result {
        Err(missing("kv_import"))
    }
}

/// `words`: count, then `WINDOW_ROWS_MAX` pairs (from, to) of keys `page * 64 + slot`, moved in order (u32 each).
pub(super) fn lower_keep(_c: &mut Lowering<'_>, _keeps: &[(KvPool, Span)]) -> Result {
    Err(missing("kv_keep"))
}

pub(super) fn lower_append(_c: &mut Lowering<'_>, _k: Buffer, _v: Buffer, _pool: KvPool) -> Result {
    Err(missing("kv_append"))
}
