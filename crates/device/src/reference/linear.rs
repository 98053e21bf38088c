//! Matrix products over stored weights, widened to float64.

use quant::{Encoding, Matrix, dequantize_row_f64};

use super::{
    MAGNITUDE_MAX, Reference, Result, memory,
    parallel::{WORK_MIN, parallel},
};
use crate::{
    Buffer, MatrixRef,
    cpu::isa::{Isa, by_isa},
};

/// Outputs computed together, so that one read of `x` serves all of them.
const TILE: usize = 4;
/// Outputs a thread takes at a time; a multiple of [`TILE`].
const OUTPUTS: usize = 32;
/// Lanes of a sum.
const LANES: usize = 8;

/// Most bytes of float64 copies of weights on one device. Enough for small models whole; of larger ones the
/// matrices that come later are dequantized again wherever they are used.
pub(super) const WIDE_BYTES_MAX: usize = 512 << 20;

/// A weight matrix and, while there is room, its float64 values.
pub(super) struct Weights {
    pub(super) stored: Matrix,
    wide: Vec<f64>,
}

impl Weights {
    /// Takes a matrix; `wide_bytes` counts what the device's copies hold.
    pub(super) fn new(stage: &'static str, matrix: &Matrix, wide_bytes: &mut usize) -> Result<Self> {
        let (rows, cols) = (matrix.rows(), matrix.cols());
        let bytes = rows * cols * size_of::<f64>();
        let mut wide = Vec::new();
        if bytes <= WIDE_BYTES_MAX - *wide_bytes {
            *wide_bytes += bytes;
            wide = memory::zeros(stage, &[rows, cols])?;
            for (row, out) in wide.chunks_exact_mut(cols).enumerate() {
                dequantize_row_f64(matrix, row, out);
            }
        }
        Ok(Self { stored: matrix.clone(), wide })
    }

    /// Output features.
    pub(super) fn rows(&self) -> usize {
        self.stored.rows()
    }

    /// Input features.
    pub(super) fn cols(&self) -> usize {
        self.stored.cols()
    }

    /// Bytes held, stored and widened.
    pub(super) fn bytes(&self) -> usize {
        self.stored.bytes() + self.wide.len() * size_of::<f64>()
    }

    /// Values of `out.len() / cols` rows from `first` on.
    fn read(&self, first: usize, out: &mut [f64]) {
        if self.wide.is_empty() {
            for (row, out) in out.chunks_exact_mut(self.cols()).enumerate() {
                dequantize_row_f64(&self.stored, first + row, out);
            }
        } else {
            out.copy_from_slice(&self.wide[first * self.cols()..][..out.len()]);
        }
    }
}

by_isa! {
    /// `x` times each of the [`TILE`] rows of `weights`: lane `l` adds `x[i] * w[i]` for i = l mod 8
    /// ascending, then the lanes are added ascending. Products are rounded, so every instruction set gives
    /// the same bits.
    fn dots(x: &[f64], weights: &[f64], out: &mut [f64; TILE]) = dots_body
}

#[inline(always)]
fn dots_body(x: &[f64], weights: &[f64], out: &mut [f64; TILE]) {
    let n = x.len();
    let whole = n / LANES * LANES;
    let mut sums = [[0.0; LANES]; TILE];
    for at in (0..whole).step_by(LANES) {
        let x = &x[at..at + LANES];
        for (tile, sums) in sums.iter_mut().enumerate() {
            let weights = &weights[tile * n + at..][..LANES];
            for lane in 0..LANES {
                sums[lane] += x[lane] * weights[lane];
            }
        }
    }
    for (tile, (sums, out)) in sums.iter_mut().zip(out).enumerate() {
        for at in whole..n {
            sums[at - whole] += x[at] * weights[tile * n + at];
        }
        *out = sums.iter().sum();
    }
}

pub(super) fn linear(device: &mut Reference, x: Buffer, rows: usize, to: &[(MatrixRef, Buffer)]) -> Result {
    let stage = "linear";
    for &(matrix, out) in to {
        let matrix = memory::matrix(device, stage, matrix)?;
        let x = memory::rows(device, stage, x, rows, matrix.cols())?;
        let width = matrix.rows();
        let values = product(device.threads, device.isa, matrix, x);
        memory::store(device, stage, out, width, &values)?;
    }
    Ok(())
}

/// `x W^T`, `[rows, out]`, for `x` `[rows, in]`. A row that grouped weights would meet as a fault is all NaN.
pub(super) fn product(threads: usize, isa: Isa, weights: &Weights, x: &[f64]) -> Vec<f64> {
    let (outputs, inputs) = (weights.rows(), weights.cols());
    let rows = x.len() / inputs;
    let threads = if (rows + 4) * inputs * outputs < WORK_MIN { 1 } else { threads };
    let blocks: Vec<usize> = (0..outputs).step_by(OUTPUTS).collect();
    let parts = parallel(threads, blocks, |first| block(isa, weights, x, first));
    let mut out = vec![0.0; rows * outputs];
    for (first, part) in (0..outputs).step_by(OUTPUTS).zip(&parts) {
        let count = OUTPUTS.min(outputs - first);
        for (out, part) in out.chunks_exact_mut(outputs).zip(part.chunks_exact(count)) {
            out[first..first + count].copy_from_slice(part);
        }
    }
    if matches!(weights.stored.encoding(), Encoding::Grouped(_)) {
        for (x, out) in x.chunks_exact(inputs).zip(out.chunks_exact_mut(outputs)) {
            if x.iter().any(|&x| is_fault(x)) {
                out.fill(f64::NAN);
            }
        }
    }
    out
}

/// Whether a quantizing device refuses the value.
pub(super) fn is_fault(x: f64) -> bool {
    x.is_nan() || x.abs() >= MAGNITUDE_MAX
}

/// Up to [`OUTPUTS`] outputs from `first` on, `[rows, count]`.
fn block(isa: Isa, weights: &Weights, x: &[f64], first: usize) -> Vec<f64> {
    let inputs = weights.cols();
    let count = OUTPUTS.min(weights.rows() - first);
    let mut out = vec![0.0; x.len() / inputs * count];
    let mut values = vec![0.0; TILE * inputs];
    for tile in (0..count).step_by(TILE) {
        let width = TILE.min(count - tile);
        weights.read(first + tile, &mut values[..width * inputs]);
        let mut sums = [0.0; TILE];
        for (x, out) in x.chunks_exact(inputs).zip(out.chunks_exact_mut(count)) {
            dots(isa, x, &values, &mut sums);
            out[tile..tile + width].copy_from_slice(&sums[..width]);
        }
    }
    out
}
