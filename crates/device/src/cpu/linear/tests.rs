//! Every body against an implementation straight from the text, and errors against float64.

use quant::{
    ACTIVATION_BITS, BITS_SUPPORTED, Dtype, Encoding, GROUPS_SUPPORTED, Matrix, Scheme, Zero,
    dequantize_row_f32, dequantize_row_f64, pack_codes, quantize_group, read_float, unpack_codes,
};

pub(in crate::cpu) use self::weights::{Random, dense};
use self::weights::{floats, grouped_of, scales};
use super::*;

#[path = "../../../tests/support/weights.rs"]
mod weights;

const DTYPES: [Dtype; 3] = [Dtype::Bf16, Dtype::F16, Dtype::F32];
const ZEROS: [Zero; 2] = [Zero::Affine, Zero::Symmetric];

/// A matrix of `scheme` from codes, one a byte, and scales.
fn grouped_from(rows: usize, cols: usize, scheme: Scheme, codes: &[u8], scales: &[f32]) -> Matrix {
    let mut stream = Vec::new();
    pack_codes(scheme.bits, codes, &mut stream);
    grouped_of(rows, cols, scheme, stream, scales)
}

/// Random codes, and scales of which some are zero or too small to count.
pub(in crate::cpu) fn grouped(random: &mut Random, rows: usize, cols: usize, scheme: Scheme) -> Matrix {
    let codes: Vec<u8> = (0..rows * cols).map(|_| random.below(1 << scheme.bits) as u8).collect();
    let scales = scales(random, rows * cols / scheme.group);
    grouped_from(rows, cols, scheme, &codes, &scales)
}

/// Rows of every kind but those with all codes at an edge, which have a test of their own.
pub(in crate::cpu) fn activations(random: &mut Random, rows: usize, cols: usize) -> Vec<f32> {
    weights::activations(random, rows, cols, false)
}

/// `docs/arithmetic.md`, grouped and dense matrix, word for word: one row of inputs, all outputs.
pub(in crate::cpu) fn naive(matrix: &Matrix, x: &[f32]) -> Vec<f32> {
    let output = |row: usize| match matrix.encoding() {
        Encoding::Dense(dtype) => {
            let mut lanes = vec![0f32; 64];
            for k in 0..matrix.cols().next_multiple_of(64) {
                let (w, x) = if k < x.len() {
                    (read_float(dtype, matrix.row_codes(row), k), x[k])
                } else {
                    (0.0, 0.0)
                };
                lanes[k % 64] = w.mul_add(x, lanes[k % 64]);
            }
            for h in [32, 16, 8, 4, 2, 1] {
                for i in 0..h {
                    lanes[i] += lanes[i + h];
                }
            }
            lanes[0]
        }
        Encoding::Grouped(scheme) => {
            let mut codes = vec![0u8; matrix.cols()];
            unpack_codes(scheme.bits, matrix.row_codes(row), &mut codes);
            let half = 2i32.pow(scheme.bits as u32 - 1);
            let groups = matrix.cols() / scheme.group;
            let mut total = 0f32;
            let mut slice = 0f32;
            for g in 0..groups {
                let range = g * scheme.group..(g + 1) * scheme.group;
                let mut q = vec![0i16; scheme.group];
                let unit = quantize_group(ACTIVATION_BITS, &x[range.clone()], &mut q);
                let i: i64 =
                    codes[range].iter().zip(&q).map(|(&w, &q)| (w as i64 - half as i64) * q as i64).sum();
                let mut s = read_float(scheme.scales, matrix.scales(), row * groups + g);
                if s.abs() < 2f32.powi(-50) {
                    s = 0.0;
                }
                slice = (i as f32).mul_add(s * unit.unit, slice);
                if scheme.zero == Zero::Affine {
                    let b = read_float(scheme.scales, matrix.biases(), row * groups + g);
                    let b = (half as f32).mul_add(s, b);
                    slice = b.mul_add(unit.sum as f32 * unit.unit, slice);
                }
                if (g + 1) * scheme.group % 1024 == 0 || g + 1 == groups {
                    total += slice;
                    slice = 0.0;
                }
            }
            total
        }
    };
    (0..matrix.rows()).map(output).collect()
}

/// Equal bits; any NaN equals any other.
#[track_caller]
pub(in crate::cpu) fn assert_bits(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (f, e)) in found.iter().zip(expected).enumerate() {
        let equal = f.to_bits() == e.to_bits() || f.is_nan() && e.is_nan();
        assert!(equal, "{what}: element {at} is {f:e}, expected {e:e}");
    }
}

fn run(pool: &Pool, isa: Isa, matrix: &PackedMatrix, x: &[f32], rows: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows * matrix.rows()];
    linear(pool, isa, x, rows, &mut [(matrix, &mut out)], &mut Activations::default());
    out
}

/// Every instruction set, pools of 1 and 2 threads and every row count of `counts` against the text.
fn check(matrix: &Matrix, x: &[f32], counts: &[usize]) {
    let cols = matrix.cols();
    let expected: Vec<f32> = x.chunks(cols).flat_map(|x| naive(matrix, x)).collect();
    let pools = [Pool::new(1), Pool::new(2)];
    for isa in Isa::supported() {
        let packed = PackedMatrix::new(&pools[1], isa, matrix);
        for &rows in counts {
            let out = run(&pools[rows % 2], isa, &packed, &x[..rows * cols], rows);
            let what = format!("{} {} {rows} rows", isa.name(), matrix.encoding());
            assert_bits(&out, &expected[..rows * matrix.rows()], &what);
        }
    }
}

fn schemes() -> Vec<Scheme> {
    let mut schemes = Vec::new();
    for bits in BITS_SUPPORTED {
        for group in GROUPS_SUPPORTED {
            for zero in ZEROS {
                schemes.extend(DTYPES.map(|scales| Scheme { bits, group, zero, scales }));
            }
        }
    }
    schemes
}

#[test]
fn every_scheme_equals_the_text() {
    let mut random = Random(1);
    let counts: Vec<usize> = (1..=17).collect();
    for (at, scheme) in schemes().into_iter().enumerate() {
        // One group; a part of a slice; one slice and a bit. Odd output counts around tiles and panels.
        let cols = [scheme.group, 384, 1152][at % 3];
        let rows = [1, 15, 33, 50][at % 4];
        let matrix = grouped(&mut random, rows, cols, scheme);
        let x = activations(&mut random, 17, cols);
        check(&matrix, &x, &counts);
    }
}

#[test]
fn many_rows_equal_the_text() {
    let mut random = Random(2);
    for bits in BITS_SUPPORTED {
        let scheme = Scheme { bits, group: 64, zero: Zero::Affine, scales: Dtype::Bf16 };
        let matrix = grouped(&mut random, 40, 1088, scheme);
        let x = activations(&mut random, 128, 1088);
        check(&matrix, &x, &[64, 127, 128]);
    }
}

#[test]
fn worst_groups_are_exact() {
    let mut random = Random(3);
    for scheme in schemes().into_iter().filter(|s| s.scales == Dtype::F32) {
        let cols = 1024 + scheme.group;
        let edge = (1u16 << scheme.bits) - 1;
        // All codes at the low edge, at the high edge, and at either.
        let codes: Vec<u8> = (0..4 * cols)
            .map(|k| match k / cols {
                0 => 0,
                1 => edge as u8,
                _ => (edge * random.below(2) as u16) as u8,
            })
            .collect();
        let scales: Vec<f32> = (0..4 * cols / scheme.group).map(|_| random.signed()).collect();
        let matrix = grouped_from(4, cols, scheme, &codes, &scales);
        // Just below 1, these round to 2^14 units.
        let full = 1f32.next_down();
        let mut x = vec![full; 4 * cols];
        x[cols..2 * cols].fill(-full);
        x[2 * cols..].iter_mut().for_each(|x| *x *= if random.below(2) == 0 { 1.0 } else { -1.0 });
        check(&matrix, &x, &[1, 4]);
    }
}

#[test]
fn dense_equals_the_text() {
    let mut random = Random(4);
    let counts: Vec<usize> = (1..=17).chain([64, 128]).collect();
    for dtype in DTYPES {
        for (rows, cols) in [(1, 64), (33, 200), (150, 70), (5, 31), (18, 1000), (17, 1024)] {
            let matrix = dense(&mut random, rows, cols, dtype);
            let x = activations(&mut random, 128, cols);
            check(&matrix, &x, &counts);
        }
    }
}

#[test]
fn tiny_dense_products_keep_their_zeros() {
    // Products that round to -0 or are subnormal, beside missing elements of the last lanes.
    let tiny = floats(Dtype::F32, [-2f32.powi(-100), 2f32.powi(-140), -2f32.powi(-126)]);
    let matrix = Matrix::dense(1, 3, Dtype::F32, tiny.into()).expect("valid");
    check(&matrix, &[2f32.powi(-100), 0.0, 0.0, 0.0, 2f32.powi(-8), 0.0, 0.0, 0.0, 0.5], &[1, 2, 3]);
}

#[test]
fn several_matrices_of_one_call_equal_single_calls() {
    let mut random = Random(5);
    let of = |bits, group, zero| Scheme { bits, group, zero, scales: Dtype::F16 };
    let matrices = [
        grouped(&mut random, 70, 512, of(4, 64, Zero::Affine)),
        dense(&mut random, 19, 512, Dtype::Bf16),
        grouped(&mut random, 33, 512, of(8, 32, Zero::Symmetric)),
        grouped(&mut random, 1, 512, of(3, 64, Zero::Symmetric)),
    ];
    let x = activations(&mut random, 200, 512);
    let pool = Pool::new(2);
    let isa = Isa::detect();
    let packed = PackedMatrix::pack(&pool, isa, &matrices.each_ref());
    let mut scratch = Activations::default();
    for rows in [1, 5, 200] {
        let x = &x[..rows * 512];
        let mut outs: Vec<Vec<f32>> = packed.iter().map(|m| vec![f32::NAN; rows * m.rows()]).collect();
        let mut to: Vec<(&PackedMatrix, &mut [f32])> =
            packed.iter().zip(outs.iter_mut().map(Vec::as_mut_slice)).collect();
        linear(&pool, isa, x, rows, &mut to, &mut scratch);
        for (matrix, out) in packed.iter().zip(&outs) {
            assert_bits(out, &run(&pool, isa, matrix, x, rows), "one of several");
        }
    }
    assert!(scratch.bytes() > 0);
}

#[test]
fn embedded_rows_are_the_stored_ones() {
    let mut random = Random(6);
    let pool = Pool::new(2);
    let isa = Isa::detect();
    for scheme in schemes() {
        // Rows on both sides of a task's border.
        let matrix = grouped(&mut random, 290, 128, scheme);
        let packed = PackedMatrix::new(&pool, isa, &matrix);
        assert_eq!((packed.rows(), packed.cols()), (290, 128));
        assert!(packed.bytes() >= matrix.bytes());
        let (mut found, mut expected) = (vec![0f32; 128], vec![0f32; 128]);
        for row in (0..290).step_by(17).chain([255, 256, 289]) {
            packed.embed_row(row, &mut found);
            dequantize_row_f32(&matrix, row, &mut expected);
            for (group, values) in expected.chunks_mut(scheme.group).enumerate() {
                // Rule 5 reads tiny scales as 0, so a row is its bias there, or 0.
                let at = row * 128 / scheme.group + group;
                if read_float(scheme.scales, matrix.scales(), at).abs() < 2f32.powi(-50) {
                    let bias = match scheme.zero {
                        Zero::Affine => read_float(scheme.scales, matrix.biases(), at),
                        Zero::Symmetric => 0.0,
                    };
                    values.fill(bias);
                }
            }
            let zeros = |v: &[f32]| v.iter().map(|v| v + 0.0).collect::<Vec<f32>>();
            assert_bits(&zeros(&found), &zeros(&expected), &format!("{scheme:?} row {row}"));
        }
    }
}

/// Relative error of the outputs of `rows` rows against float64, root of the mean squares.
fn error(matrix: &Matrix, x: &[f32]) -> f64 {
    let pool = Pool::new(1);
    let isa = Isa::detect();
    let cols = matrix.cols();
    let rows = x.len() / cols;
    let found = run(&pool, isa, &PackedMatrix::new(&pool, isa, matrix), x, rows);
    let (mut wrong, mut all) = (0.0, 0.0);
    let mut weights = vec![0f64; cols];
    for output in 0..matrix.rows() {
        dequantize_row_f64(matrix, output, &mut weights);
        for (row, x) in x.chunks(cols).enumerate() {
            let exact: f64 = weights.iter().zip(x).map(|(w, &x)| w * x as f64).sum();
            wrong += (found[row * matrix.rows() + output] as f64 - exact).powi(2);
            all += exact * exact;
        }
    }
    (wrong / all).sqrt()
}

#[test]
fn errors_against_float64() {
    let mut random = Random(7);
    let normal: Vec<f32> = (0..8 * 2048).map(|_| random.normal()).collect();
    for bits in BITS_SUPPORTED {
        let scheme = Scheme { bits, group: 64, zero: Zero::Affine, scales: Dtype::Bf16 };
        let matrix = grouped(&mut random, 64, 2048, scheme);
        let error = error(&matrix, &normal);
        println!("{scheme:?}: {error:.2e}");
        assert!(error < 4e-4, "{scheme:?}: {error:e}");
    }
    let matrix = dense(&mut random, 64, 2048, Dtype::Bf16);
    let plain = error(&matrix, &normal);
    println!("dense: {plain:.2e}");
    assert!(plain < 1e-6);
    // 32 columns 100 times the rest that the weights damp by as much: the known weak spot.
    let group = 32;
    let scheme = Scheme { bits: 8, group, zero: Zero::Symmetric, scales: Dtype::F32 };
    let codes: Vec<u8> = (0..64 * 2048)
        .map(|k| match k % 64 {
            0 => 128 + random.below(3) as u8 - 1,
            _ => random.below(255) as u8 + 1,
        })
        .collect();
    let matrix = grouped_from(64, 2048, scheme, &codes, &vec![0.01; 64 * 2048 / group]);
    let damped: Vec<f32> =
        normal.iter().enumerate().map(|(k, x)| if k % 64 == 0 { x * 100.0 } else { *x }).collect();
    let damped = error(&matrix, &damped);
    println!("damped outliers: {damped:.2e}");
    assert!(damped < 5e-3, "{damped:e}");
}
