//! Mixture of experts (`docs/model.md` section 7): router, routed experts, SwiGLU and their combination.

use std::cmp::Ordering;

use super::{
    Reference, Result, below, expect,
    linear::product,
    memory,
    parallel::{WORK_MIN, parallel},
    rows::{sigmoid, silu},
};
use crate::{Buffer, ExpertsRef, Picks};

pub(super) fn route(device: &mut Reference, logits: Buffer, rows: usize, picks: Picks) -> Result {
    let stage = "route";
    let width = memory::width(device, stage, logits)?;
    let k = memory::picks(device, stage, picks, rows)?.k;
    below(stage, "pick", k, width + 1)?;
    let (mut ids, mut weights) = (Vec::with_capacity(rows * k), Vec::with_capacity(rows * k));
    for logits in memory::rows(device, stage, logits, rows, width)?.chunks_exact(width) {
        let best = best_first(logits, k);
        weights.extend(softmax_of(logits, &best));
        ids.extend(best.iter().map(|&id| id as u32));
    }
    let picks = &mut device.picks[picks.0 as usize];
    picks.ids[..ids.len()].copy_from_slice(&ids);
    picks.weights[..weights.len()].copy_from_slice(&weights);
    Ok(())
}

/// Ids of the `count` highest values, ties to the lower id; NaN counts as lowest, so ids are distinct always.
pub(super) fn best_first(values: &[f64], count: usize) -> Vec<usize> {
    let key = |id: usize| if values[id].is_nan() { f64::NEG_INFINITY } else { values[id] };
    let order =
        |a: &usize, b: &usize| key(*b).partial_cmp(&key(*a)).unwrap_or(Ordering::Equal).then(a.cmp(b));
    let mut ids: Vec<usize> = (0..values.len()).collect();
    if count < ids.len() {
        ids.select_nth_unstable_by(count, order);
        ids.truncate(count);
    }
    ids.sort_unstable_by(order);
    ids
}

/// Softmax over the picked logits; NaN where the row has a logit that is not finite.
fn softmax_of(logits: &[f64], picked: &[usize]) -> Vec<f64> {
    if logits.iter().any(|logit| !logit.is_finite()) {
        return vec![f64::NAN; picked.len()];
    }
    let exps: Vec<f64> = picked.iter().map(|&id| (logits[id] - logits[picked[0]]).exp()).collect();
    let sum: f64 = exps.iter().sum();
    exps.iter().map(|e| e / sum).collect()
}

pub(super) fn routed_experts(
    device: &mut Reference,
    x: Buffer,
    rows: usize,
    picks: Picks,
    experts: ExpertsRef,
    out: Buffer,
) -> Result {
    let stage = "routed_experts";
    let experts = memory::experts(device, stage, experts)?;
    let width = experts.gate[0].cols();
    let x = memory::rows(device, stage, x, rows, width)?;
    let picks = memory::picks(device, stage, picks, rows)?;
    // Rows of `out` by the expert that makes them.
    let mut made = vec![Vec::new(); experts.gate.len()];
    for (pair, &id) in picks.ids[..rows * picks.k].iter().enumerate() {
        below(stage, "expert", id as usize, made.len())?;
        made[id as usize].push(pair);
    }
    let jobs: Vec<_> = made.into_iter().enumerate().filter(|(_, pairs)| !pairs.is_empty()).collect();
    let work = (rows * picks.k + 4 * jobs.len()) * 3 * width * experts.gate[0].rows();
    let threads = if work < WORK_MIN { 1 } else { device.threads };
    let (isa, k) = (device.isa, picks.k);
    let parts = parallel(threads, jobs, |(id, pairs)| {
        let x: Vec<f64> = pairs.iter().flat_map(|pair| &x[pair / k * width..][..width]).copied().collect();
        let gate = product(1, isa, &experts.gate[id], &x);
        let up = product(1, isa, &experts.up[id], &x);
        (pairs, product(1, isa, &experts.down[id], &gated(&gate, &up)))
    });
    let mut values = vec![0.0; rows * k * width];
    for (pairs, rows) in parts {
        for (pair, row) in pairs.into_iter().zip(rows.chunks_exact(width)) {
            values[pair * width..][..width].copy_from_slice(row);
        }
    }
    memory::store(device, stage, out, width, &values)
}

fn gated(gate: &[f64], up: &[f64]) -> Vec<f64> {
    gate.iter().zip(up).map(|(&gate, up)| silu(gate) * up).collect()
}

pub(super) fn swiglu(device: &mut Reference, gate: Buffer, up: Buffer, rows: usize, out: Buffer) -> Result {
    let stage = "swiglu";
    let width = memory::width(device, stage, gate)?;
    let gate = memory::rows(device, stage, gate, rows, width)?;
    let values = gated(gate, memory::rows(device, stage, up, rows, width)?);
    memory::store(device, stage, out, width, &values)
}

pub(super) fn combine(
    device: &mut Reference,
    routed: Buffer,
    picks: Picks,
    shared: Buffer,
    gate: Buffer,
    rows: usize,
    out: Buffer,
) -> Result {
    let stage = "combine";
    let width = memory::width(device, stage, shared)?;
    let picks = memory::picks(device, stage, picks, rows)?;
    expect(stage, "width of the routed rows", memory::width(device, stage, routed)?, width)?;
    let routed = memory::rows(device, stage, routed, rows * picks.k, width)?;
    let shared = memory::rows(device, stage, shared, rows, width)?;
    let gate = memory::rows(device, stage, gate, rows, 1)?;
    let mut values = vec![0.0; rows * width];
    for (row, out) in values.chunks_exact_mut(width).enumerate() {
        let pairs = row * picks.k..(row + 1) * picks.k;
        for (weight, x) in
            picks.weights[pairs.clone()].iter().zip(routed[pairs.start * width..].chunks(width))
        {
            out.iter_mut().zip(x).for_each(|(out, x)| *out += weight * x);
        }
        let weight = sigmoid(gate[row]);
        out.iter_mut().zip(&shared[row * width..]).for_each(|(out, x)| *out += weight * x);
    }
    memory::store(device, stage, out, width, &values)
}
