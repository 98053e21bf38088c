//! The vision tower's stages (`docs/model.md` section 9).

use super::{
    Reference, Result,
    attention::{add_scaled, check_shape, dot, faults_as_nan, rotate, turns},
    expect, memory,
    parallel::{WORK_MIN, parallel},
    rows::decimal,
};
use crate::{
    Activation, AttentionShape, Between, Buffer, CHANNELS, KvPool, Pixels, Rotary, VectorRef,
    step::check_keys,
};

pub(super) fn patch_rows(device: &mut Reference, pixels: Pixels<'_>, to: Buffer, at: usize) -> Result {
    let stage = "patch_rows";
    let width = memory::width(device, stage, to)?;
    let [rows, area] = pixels.layout(stage, width)?;
    let target = memory::row_range(device, stage, to, at, rows * width)?;
    let mut out = device.buffers[to.0 as usize].values[target].iter_mut();
    for patch in pixels.bytes.chunks_exact(CHANNELS * area) {
        for (bytes, levels) in patch.chunks_exact(area).zip(pixels.levels) {
            let film = (0..pixels.frames).flat_map(|_| bytes);
            film.zip(out.by_ref()).for_each(|(byte, value)| *value = f64::from(levels[usize::from(*byte)]));
        }
    }
    Ok(())
}

pub(super) fn between_rows(
    device: &mut Reference,
    table: VectorRef,
    between: &[Between],
    to: Buffer,
    at: usize,
) -> Result {
    let stage = "between_rows";
    let width = memory::width(device, stage, to)?;
    let len = device.vectors.get(table.0 as usize).map_or(0, Vec::len);
    Between::check(stage, between, len, width)?;
    let table = memory::vector(device, stage, table, len)?.to_vec();
    let target = memory::row_range(device, stage, to, at, between.len() * width)?;
    let rows = device.buffers[to.0 as usize].values[target].chunks_exact_mut(width);
    for (row, place) in rows.zip(between) {
        let corners = place.rows.map(|row| &table[row as usize * width..][..width]);
        for (column, value) in row.iter_mut().enumerate() {
            *value = Between::value(place.parts, corners.map(|row| row[column]));
        }
    }
    Ok(())
}

pub(super) fn copy_values(
    device: &mut Reference,
    from: Buffer,
    first: usize,
    rows: usize,
    to: Buffer,
    at: usize,
) -> Result {
    let stage = "copy_values";
    let values = rows * memory::width(device, stage, from)?;
    let source = memory::row_range(device, stage, from, first, values)?;
    let target = memory::row_range(device, stage, to, at, values)?;
    let values = device.buffers[from.0 as usize].values[source].to_vec();
    device.buffers[to.0 as usize].values[target].copy_from_slice(&values);
    Ok(())
}

pub(super) fn layer_norm(
    device: &mut Reference,
    x: Buffer,
    rows: usize,
    weight: VectorRef,
    bias: VectorRef,
    eps: f32,
    out: Buffer,
) -> Result {
    let stage = "layer_norm";
    let width = memory::width(device, stage, x)?;
    let mut values = memory::rows(device, stage, x, rows, width)?.to_vec();
    let weight = memory::vector(device, stage, weight, width)?;
    let bias = memory::vector(device, stage, bias, width)?;
    for row in values.chunks_exact_mut(width) {
        let mean = row.iter().sum::<f64>() / width as f64;
        row.iter_mut().for_each(|x| *x -= mean);
        let variance = row.iter().map(|d| d * d).sum::<f64>() / width as f64;
        let scale = 1.0 / (variance + decimal(eps)).sqrt();
        for ((x, w), b) in row.iter_mut().zip(weight).zip(bias) {
            *x = *x * scale * w + b;
        }
    }
    memory::store(device, stage, out, width, &values)
}

/// The error function: its series, and a continued fraction where the series cancels.
fn erf(x: f64) -> f64 {
    let t = x.abs();
    let value = if t < 3.0 {
        let (mut term, mut sum, mut n) = (t, t, 0.0);
        while term.abs() > 1e-18 * sum {
            n += 1.0;
            term *= -t * t / n;
            sum += term / (2.0 * n + 1.0);
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    } else {
        let fraction = (1..60).rev().fold(t, |below, k| t + f64::from(k) / 2.0 / below);
        1.0 - (-t * t).exp() / fraction / std::f64::consts::PI.sqrt()
    };
    value.copysign(x)
}

fn activate(x: f64, act: Activation) -> f64 {
    match act {
        Activation::None => x,
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::GeluErf => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
    }
}

pub(super) fn bias(
    device: &mut Reference,
    x: Buffer,
    rows: usize,
    bias: VectorRef,
    act: Activation,
) -> Result {
    let stage = "bias";
    let width = memory::width(device, stage, x)?;
    let mut values = memory::rows(device, stage, x, rows, width)?.to_vec();
    let bias = memory::vector(device, stage, bias, width)?;
    for row in values.chunks_exact_mut(width) {
        row.iter_mut().zip(bias).for_each(|(x, b)| *x = activate(*x + b, act));
    }
    memory::store(device, stage, x, width, &values)
}

pub(super) fn add_bias(
    device: &mut Reference,
    x: Buffer,
    delta: Buffer,
    rows: usize,
    bias: VectorRef,
) -> Result {
    let stage = "add_bias";
    let width = memory::width(device, stage, x)?;
    let mut values = memory::rows(device, stage, x, rows, width)?.to_vec();
    let delta = memory::rows(device, stage, delta, rows, width)?;
    let bias = memory::vector(device, stage, bias, width)?;
    for (row, delta) in values.chunks_exact_mut(width).zip(delta.chunks_exact(width)) {
        row.iter_mut().zip(delta).zip(bias).for_each(|((x, d), b)| *x += d + b);
    }
    memory::store(device, stage, x, width, &values)
}

pub(super) fn rope_2d(
    device: &mut Reference,
    qkv: Buffer,
    bias: VectorRef,
    rotary: Rotary,
    shape: AttentionShape,
    out: [Buffer; 3],
) -> Result {
    let stage = "rope_2d";
    check_shape(stage, shape)?;
    let (rows, width) = (device.step.rows(), shape.heads * shape.head_dim);
    let values = memory::rows(device, stage, qkv, rows.len(), 3 * width)?;
    let bias = memory::vector(device, stage, bias, 3 * width)?;
    let table = memory::rotary(device, stage, rotary)?;
    expect(stage, "rotary dimension", 2 * table.axes.len(), shape.head_dim)?;
    let mut parts = [const { Vec::new() }; 3];
    for (row, values) in rows.iter().zip(values.chunks_exact(3 * width)) {
        let turns = turns(stage, table, row)?;
        let mut sums: Vec<f64> = values.iter().zip(bias).map(|(x, b)| x + b).collect();
        sums[..2 * width].chunks_exact_mut(shape.head_dim).for_each(|head| rotate(head, &turns));
        for (part, sums) in parts.iter_mut().zip(sums.chunks_exact(width)) {
            part.extend_from_slice(sums);
        }
    }
    for (part, buffer) in parts.iter().zip(out) {
        memory::store(device, stage, buffer, width, part)?;
    }
    Ok(())
}

pub(super) fn full_attention(
    device: &mut Reference,
    q: Buffer,
    shape: AttentionShape,
    pool: KvPool,
    keys: &[usize],
    out: Buffer,
) -> Result {
    let stage = "full_attention";
    check_shape(stage, shape)?;
    check_keys(stage, &device.step, keys)?;
    let (width, dim) = (shape.heads * shape.head_dim, shape.head_dim);
    let count = device.step.rows().len();
    let queries = memory::rows(device, stage, q, count, width)?;
    let pages = memory::kv(device, stage, pool)?;
    expect(stage, "number of K/V heads", pages.shape.kv_heads, shape.kv_heads)?;
    expect(stage, "width of a K/V head", pages.shape.head_dim, dim)?;
    let mut values = Vec::with_capacity(count * width);
    for (window, keys) in device.step.windows().iter().zip(keys) {
        let seen = (0..*keys).map(|place| pages.get(stage, &window.pages, place));
        let seen = seen.collect::<Result<Vec<_>>>()?;
        let threads = if window.rows * keys * width < WORK_MIN { 1 } else { device.threads };
        let rows: Vec<&[f64]> =
            queries[window.first * width..].chunks_exact(width).take(window.rows).collect();
        let isa = device.isa;
        let parts = parallel(threads, rows, |query| {
            let query = faults_as_nan(query);
            let mut out = vec![0.0; width];
            for (head, out) in out.chunks_exact_mut(dim).enumerate() {
                let of = head / (shape.heads / shape.kv_heads) * dim;
                let query = &query[head * dim..][..dim];
                let mut weights: Vec<f64> = seen
                    .iter()
                    .map(|kv| dot(isa, query, &kv[0][of..of + dim]) / (dim as f64).sqrt())
                    .collect();
                let max = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                weights.iter_mut().for_each(|weight| *weight = (*weight - max).exp());
                let sum: f64 = weights.iter().sum();
                for (weight, kv) in weights.iter().zip(&seen) {
                    add_scaled(isa, out, weight / sum, &kv[1][of..of + dim]);
                }
            }
            out
        });
        values.extend(parts.into_iter().flatten());
    }
    memory::store(device, stage, out, width, &values)
}
