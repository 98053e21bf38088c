//! Weights: dense and grouped products, embeddings, faults.

use quant::{Bytes, Dtype, Encoding, Matrix, Scheme, Zero, bf16_from_f32, dequantize_row_f64, pack_codes};

use super::{Noise, check, contents, filled, same_bits};
use crate::{
    Device, Row, Step, Window,
    reference::{Reference, linear::WIDE_BYTES_MAX},
};

fn bf16(values: impl Iterator<Item = f64>) -> Bytes {
    values.flat_map(|x| bf16_from_f32(x as f32).to_le_bytes()).collect::<Vec<u8>>().into()
}

pub(super) fn dense(noise: &mut Noise, rows: usize, cols: usize) -> Matrix {
    let values = bf16((0..rows * cols).map(|_| noise.next()));
    Matrix::dense(rows, cols, Dtype::Bf16, values).expect("valid")
}

pub(super) fn grouped(noise: &mut Noise, rows: usize, cols: usize, zero: Zero) -> Matrix {
    let codes: Vec<u8> = (0..rows * cols).map(|_| (noise.next() * 8.0 + 8.0) as u8).collect();
    let mut stream = Vec::new();
    pack_codes(4, &codes, &mut stream);
    let scheme = Scheme { bits: 4, group: 32, zero, scales: Dtype::Bf16 };
    let scales = bf16((0..rows * cols / 32).map(|_| 0.02 + 0.01 * noise.next()));
    let biases = match zero {
        Zero::Affine => bf16((0..rows * cols / 32).map(|_| 0.1 * noise.next())),
        Zero::Symmetric => Vec::new().into(),
    };
    Matrix::new(rows, cols, Encoding::Grouped(scheme), stream.into(), scales, biases).expect("valid")
}

/// `x W^T`, term by term.
pub(super) fn naive(matrix: &Matrix, x: &[f64]) -> Vec<f64> {
    let mut out = Vec::new();
    for x in x.chunks_exact(matrix.cols()) {
        for row in 0..matrix.rows() {
            let mut weights = vec![0.0; matrix.cols()];
            dequantize_row_f64(matrix, row, &mut weights);
            out.push((0..matrix.cols()).map(|at| x[at] * weights[at]).sum());
        }
    }
    out
}

fn product(threads: usize, matrix: &Matrix, x: &[f64]) -> Vec<f64> {
    product_on(Reference::new(threads), matrix, x)
}

fn product_on(mut device: Reference, matrix: &Matrix, x: &[f64]) -> Vec<f64> {
    let rows = x.len() / matrix.cols();
    let weights = device.matrix(matrix).expect("memory");
    let x = filled(&mut device, matrix.cols(), x);
    let out = device.buffer(rows, matrix.rows()).expect("memory");
    device.linear(x, rows, &[(weights, out)]).expect("fits");
    contents(&mut device, out, rows, matrix.rows())
}

#[test]
fn products_are_exact_for_every_encoding() {
    let mut noise = Noise(2);
    let x = noise.values(9 * 160);
    for matrix in [
        dense(&mut noise, 401, 160),
        grouped(&mut noise, 401, 160, Zero::Affine),
        grouped(&mut noise, 401, 160, Zero::Symmetric),
    ] {
        let got = product(1, &matrix, &x);
        check("product", &got, &naive(&matrix, &x), 1e-14);
        same_bits("threads", &product(3, &matrix, &x), &got);
        let full = Reference { wide_bytes: WIDE_BYTES_MAX, ..Reference::new(1) };
        same_bits("not widened at load", &product_on(full, &matrix, &x), &got);
        same_bits("a row alone", &product(1, &matrix, &x[160..320]), &got[401..802]);
    }
    let odd = dense(&mut noise, 3, 13);
    let x = noise.values(13);
    check("odd lengths", &product(1, &odd, &x), &naive(&odd, &x), 1e-15);
}

#[test]
fn a_fault_is_nan_for_its_row_alone() {
    let mut noise = Noise(3);
    let matrix = grouped(&mut noise, 5, 64, Zero::Affine);
    let x = noise.values(3 * 64);
    let clean = product(1, &matrix, &x);
    for bad in [f64::NAN, f64::INFINITY, -f64::exp2(40.0)] {
        let mut x = x.clone();
        x[64 + 7] = bad;
        let got = product(1, &matrix, &x);
        assert!(got[5..10].iter().all(|y| y.is_nan()));
        same_bits("row before", &got[..5], &clean[..5]);
        same_bits("row after", &got[10..], &clean[10..]);
    }
}

#[test]
fn embedding_reads_rows_and_leaves_rows_without_a_token() {
    let mut noise = Noise(4);
    let matrix = grouped(&mut noise, 9, 32, Zero::Symmetric);
    let mut device = Reference::new(1);
    let table = device.matrix(&matrix).expect("memory");
    let out = filled(&mut device, 32, &[0.5; 64]);
    let mut step = |tokens: [Option<u32>; 2]| {
        let rows = tokens.map(|token| Row { token, position: [0; 3] }).to_vec();
        let window =
            Window { place: 0, first: 0, rows: 2, start: 0, pages: vec![0], parents: None, commit: true };
        device.begin(&Step::new(rows, vec![window]).expect("fits")).expect("begins");
        device.embed(table, out).map(|()| contents(&mut device, out, 2, 32))
    };
    let got = step([None, Some(8)]).expect("in the table");
    let mut expected = vec![0.0; 32];
    dequantize_row_f64(&matrix, 8, &mut expected);
    assert_eq!(got[..32], [0.5; 32]);
    same_bits("row of the table", &got[32..], &expected);
    let refusal = step([Some(9), None]).expect_err("outside");
    assert_eq!(refusal.to_string(), "embed: token 9 does not exist, there are 9");
}
