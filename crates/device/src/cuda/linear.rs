//! Grouped and dense matrices on CUDA.

use std::sync::Arc;

use quant::Matrix;

use super::driver::{Driver, Result};
use super::lower::Lowering;
use crate::{Buffer, DeviceError, MatrixRef};

/// A weight matrix in the layout of the kernels.
pub(super) struct PackedMatrix {
    rows: usize,
}

impl PackedMatrix {
    pub(super) fn new(_driver: &Arc<dyn Driver>, source: &Matrix) -> Result<Self> {
        Ok(Self { rows: source.rows() })
    }

    /// Outputs; rows of an embedding table.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        0
    }
}

fn missing(stage: &'static str) -> DeviceError {
    DeviceError::Failed { stage, message: "not yet on CUDA; use --device cpu".into() }
}

/// `out = x W^T` of several matrices.
pub(super) fn lower(_c: &mut Lowering<'_>, _x: Buffer, _rows: usize, _to: &[(MatrixRef, Buffer)]) -> Result {
    Err(missing("linear"))
}

/// Embedding rows of the step's tokens; rows without a token are left.
pub(super) fn lower_embed(_c: &mut Lowering<'_>, _table: MatrixRef, _out: Buffer) -> Result {
    Err(missing("embed"))
}
