//! RMSNorm of whole rows, with and without the residual add before it.

use super::{isa::by_isa, sums::sum_squares, workers::Workers};

/// `1 / sqrt(sum_256(x*x)/n + eps)`.
#[inline(always)]
pub(crate) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_squares::<256>(x) / x.len() as f32 + eps).sqrt()
}

/// `out = (x * r) * weight` for rows as long as `weight`.
#[inline(always)]
fn norm_rows_body(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let n = weight.len();
    for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        let r = inverse_rms(x, eps);
        for ((y, x), w) in out.iter_mut().zip(x).zip(weight) {
            *y = (x * r) * w;
        }
    }
}
by_isa! { fn norm_rows(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = norm_rows_body }

#[inline(always)]
fn add_body(x: &mut [f32], delta: &[f32]) {
    for (x, d) in x.iter_mut().zip(delta) {
        *x += d;
    }
}
by_isa! { fn add(x: &mut [f32], delta: &[f32]) = add_body }

/// [`crate::Device::norm`] over `[rows, weight.len()]`.
pub(crate) fn norm(workers: &Workers, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let n = weight.len();
    workers.rows(out, n, &|first, out| {
        norm_rows(workers.isa, &x[first * n..][..out.len()], weight, eps, out);
    });
}

/// [`crate::Device::add_norm`] over `[rows, weight.len()]`.
pub(crate) fn add_norm(
    workers: &Workers,
    x: &mut [f32],
    delta: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    let n = weight.len();
    workers.rows2(x, n, out, n, &|first, x, out| {
        add(workers.isa, x, &delta[first * n..][..x.len()]);
        norm_rows(workers.isa, x, weight, eps, out);
    });
}
