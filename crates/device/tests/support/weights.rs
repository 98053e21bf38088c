//! Random weights for tests of matrices, inside the crate and outside.

use quant::{Dtype, Encoding, Matrix, Scheme, Zero, bf16_from_f32, f16_from_f32};

/// A small generator for test data.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 32) as u32
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((self.bits() as u64 * n as u64) >> 32) as usize
    }

    /// Uniform in -1..1.
    pub(crate) fn signed(&mut self) -> f32 {
        self.bits() as i32 as f32 / 2147483648.0
    }

    /// About normal.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..6).map(|_| self.signed()).sum::<f32>() * 0.7
    }
}

/// Bytes of a dtype, little-endian.
pub(crate) fn floats(dtype: Dtype, values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for value in values {
        match dtype {
            Dtype::Bf16 => bytes.extend(bf16_from_f32(value).to_le_bytes()),
            Dtype::F16 => bytes.extend(f16_from_f32(value).to_le_bytes()),
            Dtype::F32 => bytes.extend(value.to_le_bytes()),
        }
    }
    bytes
}

/// Scales of which a few are zero, or too small to count.
pub(crate) fn scales(random: &mut Random, count: usize) -> Vec<f32> {
    let scale = |_| match random.below(40) {
        0 => 0.0,
        1 => 2f32.powi(-51),
        2 => -2f32.powi(-50),
        _ => random.signed() * 0.01,
    };
    (0..count).map(scale).collect()
}

/// A matrix of `scheme` from packed codes and scales; biases are those that put the zero near the middle of
/// the codes.
pub(crate) fn grouped_of(rows: usize, cols: usize, scheme: Scheme, codes: Vec<u8>, scales: &[f32]) -> Matrix {
    let middle = scheme.center() as f32 - 0.3;
    let biases = match scheme.zero {
        Zero::Affine => floats(scheme.scales, scales.iter().map(|s| -s * middle)),
        Zero::Symmetric => Vec::new(),
    };
    let scales = floats(scheme.scales, scales.iter().copied());
    Matrix::new(rows, cols, Encoding::Grouped(scheme), codes.into(), scales.into(), biases.into())
        .expect("a valid matrix")
}

/// Weights about normal.
pub(crate) fn dense(random: &mut Random, rows: usize, cols: usize, dtype: Dtype) -> Matrix {
    let values = floats(dtype, (0..rows * cols).map(|_| random.normal() * 0.03));
    Matrix::dense(rows, cols, dtype, values.into()).expect("a valid matrix")
}

/// Rows of every kind: ordinary, zero, tiny, huge, faulting, damped outliers and, with `edges`, all codes at
/// an edge.
pub(crate) fn activations(random: &mut Random, rows: usize, cols: usize, edges: bool) -> Vec<f32> {
    let kinds = if edges { 12 } else { 11 };
    let mut x: Vec<f32> = (0..rows * cols).map(|_| random.normal()).collect();
    for (row, x) in x.chunks_mut(cols).enumerate() {
        let at = random.below(cols);
        match row % kinds {
            1 => x.fill(-0.0),
            2 => x.iter_mut().for_each(|x| *x *= 2f32.powi(-41)),
            3 => x.iter_mut().for_each(|x| *x *= 2f32.powi(37)),
            4 => x[at] = f32::NAN,
            5 => x[at] = f32::NEG_INFINITY,
            6 => x[at] = 2f32.powi(40),
            7 => x.iter_mut().step_by(37).for_each(|x| *x *= 3000.0),
            8 => x.iter_mut().for_each(|x| *x *= 2f32.powi(-130)),
            9 if edges => x.fill(1f32.next_down()),
            10 if edges => x.fill(-1f32.next_down()),
            _ => {}
        }
    }
    x
}
