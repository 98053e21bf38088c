//! Stages that work on each row by itself: embedding, norms, joins; and the small functions they share.

use quant::dequantize_row_f64;

use super::{Reference, Result, below, memory};
use crate::{Buffer, MatrixRef, VectorRef};

pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(super) fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// `log(1 + e^x)` without overflow.
pub(super) fn softplus(x: f64) -> f64 {
    if x > 0.0 { x + (-x).exp().ln_1p() } else { x.exp().ln_1p() }
}

/// The decimal number that an f32 setting was written as: 1e-6, not the f32 nearest to it.
pub(super) fn decimal(setting: f32) -> f64 {
    setting.to_string().parse().unwrap_or(setting as f64)
}

/// `x / rms(x) * weight` in place.
pub(super) fn rms_norm(x: &mut [f64], weight: &[f64], eps: f64) {
    let square: f64 = x.iter().map(|x| x * x).sum();
    let scale = 1.0 / (square / x.len() as f64 + eps).sqrt();
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = *x * scale * weight;
    }
}

pub(super) fn embed(device: &mut Reference, table: MatrixRef, out: Buffer) -> Result {
    let stage = "embed";
    let matrix = memory::matrix(device, stage, table)?;
    let width = matrix.cols();
    let mut values = memory::rows(device, stage, out, device.step.rows().len(), width)?.to_vec();
    for (row, out) in device.step.rows().iter().zip(values.chunks_exact_mut(width)) {
        if let Some(token) = row.token {
            below(stage, "token", token as usize, matrix.rows())?;
            dequantize_row_f64(&matrix.stored, token as usize, out);
        }
    }
    memory::store(device, stage, out, width, &values)
}

pub(super) fn norm(
    device: &mut Reference,
    x: Buffer,
    rows: usize,
    weight: VectorRef,
    eps: f32,
    out: Buffer,
) -> Result {
    let stage = "norm";
    let width = memory::width(device, stage, x)?;
    let mut values = memory::rows(device, stage, x, rows, width)?.to_vec();
    let weight = memory::vector(device, stage, weight, width)?;
    for row in values.chunks_exact_mut(width) {
        rms_norm(row, weight, decimal(eps));
    }
    memory::store(device, stage, out, width, &values)
}

/// `x += delta`.
pub(super) fn add(device: &mut Reference, x: Buffer, delta: Buffer, rows: usize) -> Result {
    let stage = "add_norm";
    let width = memory::width(device, stage, x)?;
    let mut values = memory::rows(device, stage, x, rows, width)?.to_vec();
    for (x, delta) in values.iter_mut().zip(memory::rows(device, stage, delta, rows, width)?) {
        *x += delta;
    }
    memory::store(device, stage, x, width, &values)
}

pub(super) fn join(device: &mut Reference, a: Buffer, b: Buffer, rows: usize, out: Buffer) -> Result {
    let stage = "join";
    let (a_width, b_width) = (memory::width(device, stage, a)?, memory::width(device, stage, b)?);
    let a = memory::rows(device, stage, a, rows, a_width)?;
    let b = memory::rows(device, stage, b, rows, b_width)?;
    let pairs = a.chunks_exact(a_width).zip(b.chunks_exact(b_width));
    let values: Vec<f64> = pairs.flat_map(|(a, b)| a.iter().chain(b).copied()).collect();
    memory::store(device, stage, out, a_width + b_width, &values)
}

pub(super) fn gather(device: &mut Reference, x: Buffer, from: &[usize], out: Buffer) -> Result {
    let stage = "gather";
    let width = memory::width(device, stage, x)?;
    let mut values = Vec::with_capacity(from.len() * width);
    for &row in from {
        values.extend_from_slice(memory::row(device, stage, x, row)?);
    }
    memory::store(device, stage, out, width, &values)
}

pub(super) fn copy_rows(
    device: &mut Reference,
    x: Buffer,
    from: &[usize],
    out: Buffer,
    to: &[usize],
) -> Result {
    let stage = "copy_rows";
    let width = memory::width(device, stage, x)?;
    super::expect(stage, "width of the rows copied", width, memory::width(device, stage, out)?)?;
    super::expect(stage, "number of places", to.len(), from.len())?;
    for (&from, &to) in from.iter().zip(to) {
        let values = memory::row(device, stage, x, from)?.to_vec();
        let range = memory::row_range(device, stage, out, to, width)?;
        device.buffers[out.0 as usize].values[range].copy_from_slice(&values);
    }
    Ok(())
}

pub(super) fn gated_norm(
    device: &mut Reference,
    x: Buffer,
    z: Buffer,
    rows: usize,
    weight: VectorRef,
    eps: f32,
) -> Result {
    let stage = "gated_norm";
    let width = memory::width(device, stage, x)?;
    let mut values = memory::rows(device, stage, x, rows, width)?.to_vec();
    let gates = memory::rows(device, stage, z, rows, width)?;
    let weight = memory::vector_any(device, stage, weight)?;
    super::expect(stage, "rest of a row behind its heads", width % weight.len().max(1), 0)?;
    for (head, gates) in values.chunks_exact_mut(weight.len()).zip(gates.chunks_exact(weight.len())) {
        rms_norm(head, weight, decimal(eps));
        for (x, &z) in head.iter_mut().zip(gates) {
            *x *= silu(z);
        }
    }
    memory::store(device, stage, x, width, &values)
}
