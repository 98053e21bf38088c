//! Reference dequantization: what a stored row means.

use crate::{Encoding, Matrix, Zero, read_float, read_float_row, unpack_codes};

/// Row `row` in f32, one rounding per value: `fma(scale, code, bias)`, or `scale * (code - center)`.
///
/// # Panics
/// If `row` is outside the matrix or `out.len() != cols`.
pub fn dequantize_row_f32(matrix: &Matrix, row: usize, out: &mut [f32]) {
    check(matrix, row, out.len());
    match matrix.encoding() {
        Encoding::Dense(dtype) => read_float_row(dtype, matrix.row_codes(row), out),
        Encoding::Grouped(_) => {
            grouped(matrix, row, |at, scale, code, bias| {
                out[at] = match bias {
                    Some(bias) => scale.mul_add(code as f32, bias),
                    None => scale * code as f32,
                };
            });
        }
    }
}

/// Row `row` in f64. Exact for symmetric schemes; one f64 rounding for affine ones.
///
/// # Panics
/// If `row` is outside the matrix or `out.len() != cols`.
pub fn dequantize_row_f64(matrix: &Matrix, row: usize, out: &mut [f64]) {
    check(matrix, row, out.len());
    match matrix.encoding() {
        Encoding::Dense(dtype) => {
            let codes = matrix.row_codes(row);
            for (at, value) in out.iter_mut().enumerate() {
                *value = read_float(dtype, codes, at) as f64;
            }
        }
        Encoding::Grouped(_) => {
            grouped(matrix, row, |at, scale, code, bias| {
                out[at] = (scale as f64).mul_add(code as f64, bias.unwrap_or(0.0) as f64);
            });
        }
    }
}

fn check(matrix: &Matrix, row: usize, len: usize) {
    assert!(row < matrix.rows(), "row {row} of {}", matrix.rows());
    assert_eq!(len, matrix.cols(), "output length");
}

/// Calls `value(column, scale, code, bias)` along a grouped row; symmetric codes come centered, without a
/// bias.
fn grouped(matrix: &Matrix, row: usize, mut value: impl FnMut(usize, f32, i32, Option<f32>)) {
    let Encoding::Grouped(scheme) = matrix.encoding() else { unreachable!("grouped rows only") };
    let mut codes = vec![0; matrix.cols()];
    unpack_codes(scheme.bits, matrix.row_codes(row), &mut codes);
    let groups = matrix.cols() / scheme.group;
    for (group, codes) in codes.chunks_exact(scheme.group).enumerate() {
        let at = row * groups + group;
        let scale = read_float(scheme.scales, matrix.scales(), at);
        let (bias, center) = match scheme.zero {
            Zero::Affine => (Some(read_float(scheme.scales, matrix.biases(), at)), 0),
            Zero::Symmetric => (None, scheme.center()),
        };
        for (k, &code) in codes.iter().enumerate() {
            value(group * scheme.group + k, scale, code as i32 - center, bias);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bytes, Dtype, Scheme, pack_codes};

    fn example(zero: Zero) -> Matrix {
        let mut codes: Vec<u8> = (0..32).map(|i| i as u8 % 16).collect();
        codes[0] = 6;
        let mut stream = Vec::new();
        pack_codes(4, &codes, &mut stream);
        let scheme = Scheme { bits: 4, group: 32, zero, scales: Dtype::Bf16 };
        let biases = if zero == Zero::Affine { vec![0x6f, 0xbe] } else { vec![] };
        let scales: Bytes = vec![0xd4, 0x3c].into();
        Matrix::new(1, 32, Encoding::Grouped(scheme), stream.into(), scales, biases.into()).expect("valid")
    }

    #[test]
    fn the_published_affine_example_reads() {
        let (mut single, mut double) = ([0f32; 32], [0f64; 32]);
        dequantize_row_f32(&example(Zero::Affine), 0, &mut single);
        dequantize_row_f64(&example(Zero::Affine), 0, &mut double);
        assert_eq!(single[0], -0.078125);
        assert_eq!(double[0], 6.0 * 0.02587890625 - 0.2333984375);
    }

    #[test]
    fn symmetric_codes_are_centered() {
        let mut single = [0f32; 32];
        dequantize_row_f32(&example(Zero::Symmetric), 0, &mut single);
        let scale = crate::bf16_to_f32(0x3cd4);
        assert_eq!(single[0], -2.0 * scale);
        assert_eq!(single[8], 0.0);
    }
}
