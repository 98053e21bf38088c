//! Elementwise gates: gated norm, output gate, SwiGLU.

use super::{
    isa::by_isa,
    math::{sigmoid, silu},
    norm::inverse_rms,
    workers::Workers,
};

/// `x = ((x * r) * weight) * silu(z)` per head as long as `weight`.
#[inline(always)]
fn gated_norm_body(x: &mut [f32], z: &[f32], weight: &[f32], eps: f32) {
    let n = weight.len();
    for (x, z) in x.chunks_exact_mut(n).zip(z.chunks_exact(n)) {
        let r = inverse_rms(x, eps);
        for ((x, z), w) in x.iter_mut().zip(z).zip(weight) {
            *x = ((*x * r) * w) * silu(*z);
        }
    }
}
by_isa! { fn gated_norm_rows(x: &mut [f32], z: &[f32], weight: &[f32], eps: f32) = gated_norm_body }

/// `x *= sigmoid(gate)` for rows of heads; a head of `qg` is `[query, gate]`.
#[inline(always)]
fn out_gate_body(x: &mut [f32], qg: &[f32], head_dim: usize) {
    for (x, qg) in x.chunks_exact_mut(head_dim).zip(qg.chunks_exact(2 * head_dim)) {
        for (x, gate) in x.iter_mut().zip(&qg[head_dim..]) {
            *x *= sigmoid(*gate);
        }
    }
}
by_isa! { fn out_gate_rows(x: &mut [f32], qg: &[f32], head_dim: usize) = out_gate_body }

#[inline(always)]
fn swiglu_body(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((y, g), u) in out.iter_mut().zip(gate).zip(up) {
        *y = silu(*g) * u;
    }
}
by_isa! {
    /// `out = silu(gate) * up`.
    pub(crate) fn swiglu_values(gate: &[f32], up: &[f32], out: &mut [f32]) = swiglu_body
}

/// [`crate::Device::gated_norm`]: `x` and `z` `[rows, width]`, width a multiple of `weight.len()`.
pub(crate) fn gated_norm(
    workers: &Workers,
    x: &mut [f32],
    width: usize,
    z: &[f32],
    weight: &[f32],
    eps: f32,
) {
    assert!(width.is_multiple_of(weight.len()), "rows of whole heads");
    workers.rows(x, width, &|first, x| {
        gated_norm_rows(workers.isa, x, &z[first * width..][..x.len()], weight, eps);
    });
}

/// [`crate::Device::out_gate`]: `x` `[rows, width]` of heads, `qg` twice as wide.
pub(crate) fn out_gate(workers: &Workers, x: &mut [f32], width: usize, qg: &[f32], head_dim: usize) {
    workers.rows(x, width, &|first, x| {
        out_gate_rows(workers.isa, x, &qg[first * 2 * width..][..2 * x.len()], head_dim);
    });
}

/// [`crate::Device::swiglu`] over `[rows, width]`.
pub(crate) fn swiglu(workers: &Workers, gate: &[f32], up: &[f32], width: usize, out: &mut [f32]) {
    workers.rows(out, width, &|first, out| {
        let range = first * width..first * width + out.len();
        swiglu_values(workers.isa, &gate[range.clone()], &up[range], out);
    });
}
