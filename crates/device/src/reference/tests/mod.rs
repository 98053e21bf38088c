//! Tests of the reference device: its stages against naive computations, and its contracts of purity and
//! keeping.

mod experts;
mod matrices;
mod sequences;

use super::Reference;
use crate::{Buffer, Device, Row, Step, VectorRef, Window};

/// Deterministic values in [-1, 1).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    fn values(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|_| self.next()).collect()
    }
}

/// A buffer holding `values` in rows of `width`.
fn filled(device: &mut Reference, width: usize, values: &[f64]) -> Buffer {
    let buffer = device.buffer(values.len() / width, width).expect("memory");
    device.write(buffer, 0, values).expect("rows fit");
    buffer
}

fn vector(device: &mut Reference, values: &[f64]) -> VectorRef {
    device.vector(values).expect("memory")
}

/// The leading rows of a buffer.
fn contents(device: &mut Reference, buffer: Buffer, rows: usize, width: usize) -> Vec<f64> {
    let mut out = vec![0.0; rows * width];
    device.read_exact(buffer, 0, &mut out).expect("rows exist");
    out
}

/// A window over all rows of a step, of the sequence at place 0 in pages 2, 0, 1.
fn window(start: usize, rows: usize) -> Window {
    Window { place: 0, first: 0, rows, start, pages: vec![2, 0, 1], parents: None, commit: true }
}

fn begin(device: &mut Reference, windows: Vec<Window>) {
    let count = windows.iter().map(|w| w.rows).sum();
    let rows = vec![Row { token: None, position: [0; 3] }; count];
    device.begin(&Step::new(rows, windows).expect("windows fit")).expect("begins");
}

/// Largest difference over the largest expected magnitude is at most `tolerance`; a NaN fails.
fn check(what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(0.0f64, |max, x| max.max(x.abs()));
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs();
        assert!(
            error <= tolerance * scale,
            "{what}[{at}]: {got:e}, expected {expected:e} of up to {scale:e}"
        );
    }
}

fn same_bits(what: &str, got: &[f64], expected: &[f64]) {
    let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(got), bits(expected), "{what}");
}

#[test]
fn norms_are_those_of_the_model() {
    let mut device = Reference::new(1);
    let mut noise = Noise(1);
    let (x, delta, w) = (noise.values(12), noise.values(12), noise.values(6));
    let (x_rows, delta_rows) = (filled(&mut device, 6, &x), filled(&mut device, 6, &delta));
    let (weight, out) = (vector(&mut device, &w), filled(&mut device, 6, &[0.0; 18]));
    device.add_norm(x_rows, delta_rows, 2, weight, 1e-6, out).expect("fits");
    let sum: Vec<f64> = x.iter().zip(&delta).map(|(x, d)| x + d).collect();
    same_bits("residual", &contents(&mut device, x_rows, 2, 6), &sum);
    let expected: Vec<f64> = (0..12)
        .map(|at| {
            let row = &sum[at / 6 * 6..][..6];
            let mean = row.iter().map(|x| x * x).sum::<f64>() / 6.0;
            sum[at] / (mean + 1e-6).sqrt() * w[at % 6]
        })
        .collect();
    check("norm", &contents(&mut device, out, 2, 6), &expected, 1e-15);
    same_bits("rows that were not asked for", &contents(&mut device, out, 3, 6)[12..], &[0.0; 6]);

    let (z, w) = (noise.values(12), noise.values(3));
    let (z_rows, weight) = (filled(&mut device, 6, &z), vector(&mut device, &w));
    device.gated_norm(x_rows, z_rows, 2, weight, 1e-5).expect("fits");
    let expected: Vec<f64> = (0..12)
        .map(|at| {
            let head = &sum[at / 3 * 3..][..3];
            let mean = head.iter().map(|x| x * x).sum::<f64>() / 3.0;
            sum[at] / (mean + 1e-5).sqrt() * w[at % 3] * (z[at] / (1.0 + (-z[at]).exp()))
        })
        .collect();
    check("gated norm", &contents(&mut device, x_rows, 2, 6), &expected, 1e-15);
}

#[test]
fn joins_and_gathers_move_whole_rows() {
    let mut device = Reference::new(1);
    let a = filled(&mut device, 2, &[1.0, 2.0, 3.0, 4.0]);
    let b = filled(&mut device, 1, &[5.0, 6.0]);
    let out = filled(&mut device, 3, &[0.0; 9]);
    device.join(a, b, 2, out).expect("fits");
    assert_eq!(contents(&mut device, out, 2, 3), [1.0, 2.0, 5.0, 3.0, 4.0, 6.0]);
    device.gather(a, &[1, 1, 0], a).expect_err("three rows into two");
    device.gather(a, &[1, 0], a).expect("fits");
    assert_eq!(contents(&mut device, a, 2, 2), [3.0, 4.0, 1.0, 2.0]);
}

#[test]
fn misfits_are_refused_in_words() {
    let mut device = Reference::new(1);
    let a = filled(&mut device, 2, &[0.0; 4]);
    let weight = vector(&mut device, &[1.0; 3]);
    let message = |result: Result<(), crate::DeviceError>| result.expect_err("refused").to_string();
    assert_eq!(message(device.norm(a, 2, weight, 1e-6, a)), "norm: length of a vector is 3, 2 expected");
    assert_eq!(message(device.write(a, 1, &[0.0; 4])), "write: row 3 does not exist, there are 3");
    assert_eq!(message(device.write(a, 0, &[0.0; 3])), "write: rest of a row is 1, 0 expected");
    let huge = device.buffer(usize::MAX / 8, 8).expect_err("more than there is");
    assert!(matches!(huge, crate::DeviceError::OutOfMemory { .. }), "{huge}");
}
