//! Matrix products over weights that keep their stored codes.

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

by_isa! {
    /// `x` times each of the [`TILE`] rows of `weights`: lane `l` adds `x[i] * w[i]` for i = l mod 8 ascending, then
    /// the lanes are added ascending. Products are rounded, so every instruction set gives the same bits.
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
pub(super) fn product(threads: usize, isa: Isa, matrix: &Matrix, x: &[f64]) -> Vec<f64> {
    let (outputs, inputs) = (matrix.rows(), matrix.cols());
    let rows = x.len() / inputs;
    let threads = if (rows + 4) * inputs * outputs < WORK_MIN { 1 } else { threads };
    let blocks: Vec<usize> = (0..outputs).step_by(OUTPUTS).collect();
    let parts = parallel(threads, blocks, |first| block(isa, matrix, x, first));
    let mut out = vec![0.0; rows * outputs];
    for (first, part) in (0..outputs).step_by(OUTPUTS).zip(&parts) {
        let count = OUTPUTS.min(outputs - first);
        for (out, part) in out.chunks_exact_mut(outputs).zip(part.chunks_exact(count)) {
            out[first..first + count].copy_from_slice(part);
        }
    }
    if matches!(matrix.encoding(), Encoding::Grouped(_)) {
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
fn block(isa: Isa, matrix: &Matrix, x: &[f64], first: usize) -> Vec<f64> {
    let inputs = matrix.cols();
    let count = OUTPUTS.min(matrix.rows() - first);
    let mut out = vec![0.0; x.len() / inputs * count];
    let mut weights = vec![0.0; TILE * inputs];
    for tile in (0..count).step_by(TILE) {
        let width = TILE.min(count - tile);
        for (row, weights) in weights.chunks_exact_mut(inputs).take(width).enumerate() {
            dequantize_row_f64(matrix, first + tile + row, weights);
        }
        let mut sums = [0.0; TILE];
        for (x, out) in x.chunks_exact(inputs).zip(out.chunks_exact_mut(count)) {
            dots(isa, x, &weights, &mut sums);
            out[tile..tile + width].copy_from_slice(&sums[..width]);
        }
    }
    out
}
