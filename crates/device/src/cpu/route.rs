//! Router picks and the weighted sum of expert outputs.

use super::{
    isa::by_isa,
    math::{exp, sigmoid},
    workers::Workers,
};

/// Picks of `rows_max` rows, `k` each.
pub(crate) struct PickTable {
    pub(crate) k: usize,
    pub(crate) ids: Vec<u32>,
    pub(crate) weights: Vec<f32>,
}

/// A key that orders floats as numbers do, equal zeros included; every NaN comes below every number.
#[inline(always)]
pub(crate) fn order_key(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    let key = if bits >> 31 == 0 { bits | 0x8000_0000 } else { !bits };
    if x.is_nan() { 0 } else { key }
}

/// Orders by value, then by lower id: higher is better. The id comes back by [`key_id`].
#[inline(always)]
pub(crate) fn pick_key(x: f32, id: u32) -> u64 {
    (order_key(x) as u64) << 32 | !id as u64
}

/// The id in a [`pick_key`].
#[inline(always)]
pub(crate) fn key_id(key: u64) -> u32 {
    !(key as u32)
}

/// The k best of one row, best first. A NaN logit anywhere makes all weights NaN; the picks stay k distinct
/// experts.
#[inline(always)]
fn route_row_body(logits: &[f32], keys: &mut [u64], ids: &mut [u32], weights: &mut [f32]) {
    let mut fault = false;
    for (id, (key, &logit)) in keys.iter_mut().zip(logits).enumerate() {
        *key = pick_key(logit, id as u32);
        fault |= logit.is_nan();
    }
    for id in ids.iter_mut() {
        let best = keys.iter().fold(0, |best, &key| if key > best { key } else { best });
        *id = key_id(best);
        // Below every key of an expert not yet picked: those have a nonzero low word.
        keys[*id as usize] = 0;
    }
    let top = logits[ids[0] as usize];
    let mut sum = 0f32;
    for (weight, &id) in weights.iter_mut().zip(ids.iter()) {
        *weight = if fault { f32::NAN } else { exp(logits[id as usize] - top) };
        sum += *weight;
    }
    for weight in weights {
        *weight /= sum;
    }
}
by_isa! {
    fn route_row(logits: &[f32], keys: &mut [u64], ids: &mut [u32], weights: &mut [f32]) = route_row_body
}

/// [`crate::Device::route`] over `[rows, experts]`; `keys` is scratch.
pub(crate) fn route(
    workers: &Workers,
    logits: &[f32],
    experts: usize,
    picks: &mut PickTable,
    keys: &mut Vec<u64>,
) {
    let k = picks.k;
    assert!(0 < k && k <= experts, "{k} picks of {experts} experts");
    keys.resize(experts, 0);
    let rows = picks.ids.chunks_exact_mut(k).zip(picks.weights.chunks_exact_mut(k));
    for (logits, (ids, weights)) in logits.chunks_exact(experts).zip(rows) {
        route_row(workers.isa, logits, keys, ids, weights);
    }
}

/// One row: `out = sum of weight * routed row` in rank order from +0, then the shared expert.
#[inline(always)]
fn combine_row_body(routed: &[f32], weights: &[f32], shared: &[f32], gate: f32, out: &mut [f32]) {
    out.fill(0.0);
    for (routed, weight) in routed.chunks_exact(out.len()).zip(weights) {
        for (y, x) in out.iter_mut().zip(routed) {
            *y = weight.mul_add(*x, *y);
        }
    }
    let gate = sigmoid(gate);
    for (y, x) in out.iter_mut().zip(shared) {
        *y = gate.mul_add(*x, *y);
    }
}
by_isa! {
    fn combine_row(routed: &[f32], weights: &[f32], shared: &[f32], gate: f32, out: &mut [f32])
        = combine_row_body
}

/// [`crate::Device::combine`] over `out` `[rows, width]`.
pub(crate) fn combine(
    workers: &Workers,
    routed: &[f32],
    picks: &PickTable,
    shared: &[f32],
    gate: &[f32],
    width: usize,
    out: &mut [f32],
) {
    let k = picks.k;
    workers.rows(out, width, &|first, out| {
        for (at, out) in out.chunks_exact_mut(width).enumerate() {
            let row = first + at;
            let routed = &routed[row * k * width..][..k * width];
            let weights = &picks.weights[row * k..][..k];
            combine_row(workers.isa, routed, weights, &shared[row * width..][..width], gate[row], out);
        }
    });
}
