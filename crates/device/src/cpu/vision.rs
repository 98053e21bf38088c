//! Row stages of the vision tower: patches and positions, LayerNorm, biases, GELU, two-dimensional rotation.

use super::{
    isa::by_isa,
    math::{gelu_erf, gelu_tanh},
    planes::Plane,
    pool::Disjoint,
    rope::{RotaryTable, turn},
    sums::{sum, sum_squares},
    workers::Workers,
};
use crate::{Activation, AttentionShape, Between, CHANNELS, DeviceError, Pixels, Row};

/// [`crate::Device::patch_rows`]; `area`: pixels of a channel.
pub(crate) fn patch_rows(workers: &Workers, pixels: Pixels<'_>, area: usize, out: &mut [f32]) {
    let width = CHANNELS * pixels.frames * area;
    workers.rows(out, width, &|first, out| {
        let bytes = &pixels.bytes[first * CHANNELS * area..];
        for (row, bytes) in out.chunks_exact_mut(width).zip(bytes.chunks_exact(CHANNELS * area)) {
            let channels = row.chunks_exact_mut(pixels.frames * area).zip(bytes.chunks_exact(area));
            for ((row, bytes), levels) in channels.zip(pixels.levels) {
                for (value, byte) in row[..area].iter_mut().zip(bytes) {
                    *value = levels[usize::from(*byte)];
                }
                (1..pixels.frames).for_each(|frame| row.copy_within(..area, frame * area));
            }
        }
    });
}

#[inline(always)]
fn between_body(corners: [&[f32]; 4], parts: [f64; 2], out: &mut [f32]) {
    // Slices side by side, which vectorizes.
    let [a, b, c, d] = corners;
    let (top, bottom) = (a.iter().zip(b), c.iter().zip(d));
    for (value, ((a, b), (c, d))) in out.iter_mut().zip(top.zip(bottom)) {
        *value = Between::value(parts, [a, b, c, d].map(|x| f64::from(*x))) as f32;
    }
}
by_isa! { fn between_row(corners: [&[f32]; 4], parts: [f64; 2], out: &mut [f32]) = between_body }

/// [`crate::Device::between_rows`] with a table of rows of `width`.
pub(crate) fn between_rows(
    workers: &Workers,
    table: &[f32],
    between: &[Between],
    width: usize,
    out: &mut [f32],
) {
    workers.rows(out, width, &|first, out| {
        for (row, place) in out.chunks_exact_mut(width).zip(&between[first..]) {
            let corners = place.rows.map(|row| &table[row as usize * width..][..width]);
            between_row(workers.isa, corners, place.parts, row);
        }
    });
}

/// `mean = sum_256(x) / n`, `d = x - mean`, `var = sum_256(d*d by fma) / n`, `fma(d * (1 / sqrt(var +
/// eps)), w, b)` for rows as long as `weight`.
#[inline(always)]
fn layer_norm_body(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    let n = weight.len();
    for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        let mean = sum::<256>(x) / n as f32;
        for (d, x) in out.iter_mut().zip(x) {
            *d = x - mean;
        }
        let r = 1.0 / (sum_squares::<256>(out) / n as f32 + eps).sqrt();
        for ((y, w), b) in out.iter_mut().zip(weight).zip(bias) {
            *y = (*y * r).mul_add(*w, *b);
        }
    }
}
by_isa! {
    fn layer_norm_rows(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) = layer_norm_body
}

/// [`crate::Device::layer_norm`] over `[rows, weight.len()]`.
pub(crate) fn layer_norm(
    workers: &Workers,
    x: &[f32],
    weight: &[f32],
    bias: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    let n = weight.len();
    workers.rows(out, n, &|first, out| {
        layer_norm_rows(workers.isa, &x[first * n..][..out.len()], weight, bias, eps, out);
    });
}

#[inline(always)]
fn bias_body(x: &mut [f32], bias: &[f32], act: Activation) {
    for row in x.chunks_exact_mut(bias.len()) {
        for (x, b) in row.iter_mut().zip(bias) {
            *x += b;
        }
        match act {
            Activation::None => {}
            Activation::GeluTanh => row.iter_mut().for_each(|x| *x = gelu_tanh(*x)),
            Activation::GeluErf => row.iter_mut().for_each(|x| *x = gelu_erf(*x)),
        }
    }
}
by_isa! { fn bias_rows(x: &mut [f32], bias: &[f32], act: Activation) = bias_body }

/// [`crate::Device::bias`] over `[rows, bias.len()]`.
pub(crate) fn bias(workers: &Workers, x: &mut [f32], bias: &[f32], act: Activation) {
    workers.rows(x, bias.len(), &|_, x| bias_rows(workers.isa, x, bias, act));
}

#[inline(always)]
fn add_bias_body(x: &mut [f32], delta: &[f32], bias: &[f32]) {
    let n = bias.len();
    for (x, delta) in x.chunks_exact_mut(n).zip(delta.chunks_exact(n)) {
        for ((x, d), b) in x.iter_mut().zip(delta).zip(bias) {
            *x += d + b;
        }
    }
}
by_isa! { fn add_bias_rows(x: &mut [f32], delta: &[f32], bias: &[f32]) = add_bias_body }

/// [`crate::Device::add_bias`] over `[rows, bias.len()]`.
pub(crate) fn add_bias(workers: &Workers, x: &mut [f32], delta: &[f32], bias: &[f32]) {
    let n = bias.len();
    workers.rows(x, n, &|first, x| add_bias_rows(workers.isa, x, &delta[first * n..][..x.len()], bias));
}

/// `to = from + bias`, then turned by `angles` if there are any.
#[inline(always)]
fn part_body(from: &[f32], bias: &[f32], head_dim: usize, angles: &[f32], to: &mut [f32]) {
    for ((y, x), b) in to.iter_mut().zip(from).zip(bias) {
        *y = x + b;
    }
    if !angles.is_empty() {
        to.chunks_exact_mut(head_dim).for_each(|head| turn(head, angles));
    }
}
by_isa! { fn part(from: &[f32], bias: &[f32], head_dim: usize, angles: &[f32], to: &mut [f32]) = part_body }

/// [`crate::Device::rope_2d`] over the step's rows; `angles` is scratch.
pub(crate) fn rope_2d(
    workers: &Workers,
    rows: &[Row],
    qkv: &[f32],
    bias: &[f32],
    shape: AttentionShape,
    table: &RotaryTable,
    angles: &mut Vec<f32>,
    out: [&mut Plane; 3],
) -> Result<(), DeviceError> {
    let width = shape.heads * shape.head_dim;
    let turns = 2 * table.axes.len();
    assert_eq!(turns, shape.head_dim, "the rotation turns whole heads");
    assert_eq!((bias.len(), shape.kv_heads), (3 * width, shape.heads), "q, k and v of one width");
    table.angles("rope_2d", rows, angles)?;
    let [q, k, v] = out.map(|plane| Disjoint::new(plane.rows_mut(rows.len())));
    workers.pool.run(rows.len(), &|row| {
        let angles = &angles[row * turns..][..turns];
        let qkv = &qkv[row * 3 * width..][..3 * width];
        for (at, (out, angles)) in [(&q, angles), (&k, angles), (&v, &[][..])].into_iter().enumerate() {
            let columns = at * width..(at + 1) * width;
            // SAFETY: each task has a row of its own.
            let out = unsafe { out.range(row * width..(row + 1) * width) };
            part(workers.isa, &qkv[columns.clone()], &bias[columns], shape.head_dim, angles, out);
        }
    });
    Ok(())
}
