//! Gated DeltaNet (`docs/model.md` section 4): causal convolution, delta rule and the states of both.

use super::{
    Reference, Result, below, expect, failed, memory,
    memory::StatePlace,
    parallel::{WORK_MIN, parallel},
    rows::{sigmoid, silu, softplus},
};
use crate::{
    Buffer, DeltaShape, DeltaState, StatePool, VectorRef, Window,
    cpu::isa::{Isa, by_isa},
};

/// Added to the sum of squares of a q or k head; a constant of the model.
const L2_EPS: f64 = 1e-6;

/// What an uncommitted window leaves behind, to advance the state by some of its rows later.
#[derive(Clone, Default)]
pub(super) struct Kept {
    parents: Vec<Option<usize>>,
    /// Input rows of the convolution, `[rows][C]`.
    conv: Vec<Vec<f64>>,
    delta: Vec<DeltaRow>,
}

impl Kept {
    /// Floats held.
    pub(super) fn values(&self) -> usize {
        let conv: usize = self.conv.iter().map(Vec::len).sum();
        let delta = self.delta.iter().map(|r| r.q.len() + r.k.len() + r.v.len() + 2 * r.decay.len());
        conv + delta.sum::<usize>()
    }
}

/// One row as the recurrence takes it: q and k `[Hk, Dk]` normalized (q scaled), v `[Hv, Dv]`, decay and beta
/// `[Hv]`.
#[derive(Clone)]
struct DeltaRow {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    decay: Vec<f64>,
    beta: Vec<f64>,
}

pub(super) fn conv(
    device: &mut Reference,
    x: Buffer,
    taps: VectorRef,
    pool: StatePool,
    out: Buffer,
) -> Result {
    let stage = "conv";
    let shape = memory::states(device, stage, pool)?.shape;
    let channels = shape.channels();
    let windows = device.step.windows().to_vec();
    let x = memory::rows(device, stage, x, device.step.rows().len(), channels)?.to_vec();
    let taps = memory::vector(device, stage, taps, channels * shape.conv_taps)?.to_vec();
    let mut values = Vec::with_capacity(x.len());
    for window in &windows {
        let place = memory::place_mut(device, stage, pool, window.place)?;
        let rows: Vec<&[f64]> =
            x[window.first * channels..].chunks_exact(channels).take(window.rows).collect();
        for row in 0..window.rows {
            values.extend(convolve(&shape, &taps, &place.conv, &rows, window, row));
        }
        place.kept = Kept::default();
        if window.commit {
            for row in rows {
                push_row(&mut place.conv, row);
            }
        } else {
            place.kept.parents = (0..window.rows).map(|row| window.parent(row)).collect();
            place.kept.conv = rows.into_iter().map(<[f64]>::to_vec).collect();
        }
    }
    memory::store(device, stage, out, channels, &values)
}

/// One output row: taps ascending, the last for the row itself, earlier ones for its ancestors, then the
/// state.
fn convolve(
    shape: &DeltaShape,
    taps: &[f64],
    state: &[f64],
    rows: &[&[f64]],
    window: &Window,
    row: usize,
) -> Vec<f64> {
    let channels = shape.channels();
    let mut sources = Vec::with_capacity(shape.conv_taps);
    let mut node = Some(row);
    let mut past = state.chunks_exact(channels).rev();
    for _ in 0..shape.conv_taps {
        match node {
            Some(row) => {
                sources.push(rows[row]);
                node = window.parent(row);
            }
            None => sources.extend(past.next()),
        }
    }
    let output = |channel: usize| {
        let taps = &taps[channel * shape.conv_taps..][..shape.conv_taps];
        let sum = taps.iter().zip(sources.iter().rev()).fold(0.0, |sum, (tap, x)| sum + tap * x[channel]);
        silu(sum)
    };
    (0..channels).map(output).collect()
}

/// Drops the oldest row of a convolution state and adds one.
fn push_row(state: &mut [f64], row: &[f64]) {
    if !state.is_empty() {
        state.rotate_left(row.len());
        let end = state.len() - row.len();
        state[end..].copy_from_slice(row);
    }
}

pub(super) fn delta_rule(
    device: &mut Reference,
    mixed: Buffer,
    a: Buffer,
    b: Buffer,
    decay: VectorRef,
    dt_bias: VectorRef,
    pool: StatePool,
    out: Buffer,
) -> Result {
    let stage = "delta_rule";
    let (isa, threads) = (device.isa, device.threads);
    let shape = memory::states(device, stage, pool)?.shape;
    let (heads, width) = (shape.value_heads, shape.value_heads * shape.value_dim);
    let count = device.step.rows().len();
    let a = memory::rows(device, stage, a, count, heads)?;
    let b = memory::rows(device, stage, b, count, heads)?;
    let decay = memory::vector(device, stage, decay, heads)?;
    let dt_bias = memory::vector(device, stage, dt_bias, heads)?;
    let mixed = memory::rows(device, stage, mixed, count, shape.channels())?;
    let gates = a.chunks_exact(heads).zip(b.chunks_exact(heads));
    let mut prepared = mixed
        .chunks_exact(shape.channels())
        .zip(gates)
        .map(|(mixed, (a, b))| prepare(&shape, mixed, a, b, decay, dt_bias))
        .collect::<Vec<_>>()
        .into_iter();
    let mut values = Vec::with_capacity(count * width);
    for window in device.step.windows().to_vec() {
        let rows: Vec<DeltaRow> = prepared.by_ref().take(window.rows).collect();
        let place = memory::place_mut(device, stage, pool, window.place)?;
        let threads = if rows.len() * shape.recurrent() < WORK_MIN { 1 } else { threads };
        let states = place.recurrent.chunks_exact_mut(shape.key_dim * shape.value_dim).enumerate().collect();
        let outputs = parallel(threads, states, |(head, state)| {
            if window.commit {
                run_head(isa, &shape, head, state, &rows)
            } else {
                try_head(isa, &shape, head, state, &rows, &window)
            }
        });
        for row in 0..window.rows {
            let at = row * shape.value_dim;
            values.extend(outputs.iter().flat_map(|head| &head[at..at + shape.value_dim]));
        }
        if !window.commit {
            place.kept.delta = rows;
        }
    }
    memory::store(device, stage, out, width, &values)
}

/// Splits, normalizes and gates one row.
fn prepare(
    shape: &DeltaShape,
    mixed: &[f64],
    a: &[f64],
    b: &[f64],
    decay: &[f64],
    dt_bias: &[f64],
) -> DeltaRow {
    let keys = shape.key_heads * shape.key_dim;
    let normalized = |x: &[f64], scale: f64| {
        let mut out = x.to_vec();
        for head in out.chunks_exact_mut(shape.key_dim) {
            let square: f64 = head.iter().map(|x| x * x).sum();
            let by = scale / (square + L2_EPS).sqrt();
            head.iter_mut().for_each(|x| *x *= by);
        }
        out
    };
    let gates = a.iter().zip(decay.iter().zip(dt_bias));
    DeltaRow {
        q: normalized(&mixed[..keys], 1.0 / (shape.key_dim as f64).sqrt()),
        k: normalized(&mixed[keys..2 * keys], 1.0),
        v: mixed[2 * keys..].to_vec(),
        decay: gates.map(|(a, (decay, bias))| (-(decay * softplus(a + bias))).exp()).collect(),
        beta: b.iter().map(|&b| sigmoid(b)).collect(),
    }
}

/// Advances one head's state by all rows; outputs `[rows, Dv]`.
fn run_head(isa: Isa, shape: &DeltaShape, head: usize, state: &mut [f64], rows: &[DeltaRow]) -> Vec<f64> {
    let mut out = vec![0.0; rows.len() * shape.value_dim];
    for (row, out) in rows.iter().zip(out.chunks_exact_mut(shape.value_dim)) {
        advance_row(isa, shape, head, state, row, out);
    }
    out
}

/// The outputs that rows of a tree (or chain) would give from the state, which stays.
fn try_head(
    isa: Isa,
    shape: &DeltaShape,
    head: usize,
    state: &[f64],
    rows: &[DeltaRow],
    window: &Window,
) -> Vec<f64> {
    let mut out = vec![0.0; rows.len() * shape.value_dim];
    let mut states: Vec<Vec<f64>> = Vec::with_capacity(rows.len());
    for (at, (row, out)) in rows.iter().zip(out.chunks_exact_mut(shape.value_dim)).enumerate() {
        let mut next = window.parent(at).map_or_else(|| state.to_vec(), |parent| states[parent].clone());
        advance_row(isa, shape, head, &mut next, row, out);
        states.push(next);
    }
    out
}

fn advance_row(
    isa: Isa,
    shape: &DeltaShape,
    head: usize,
    state: &mut [f64],
    row: &DeltaRow,
    out: &mut [f64],
) {
    let key = head / (shape.value_heads / shape.key_heads) * shape.key_dim;
    let (q, k) = (&row.q[key..][..shape.key_dim], &row.k[key..][..shape.key_dim]);
    let v = &row.v[head * shape.value_dim..][..shape.value_dim];
    advance(isa, state, q, k, v, row.decay[head], row.beta[head], out);
}

by_isa! {
    /// One token of one head: state `[Dk, Dv]` decays, learns `beta (v - S^T k)` under k, and `out = S^T q`.
    /// Sums over Dk ascend.
    fn advance(
        state: &mut [f64], q: &[f64], k: &[f64], v: &[f64], decay: f64, beta: f64, out: &mut [f64]
    ) = advance_body
}

#[inline(always)]
fn advance_body(state: &mut [f64], q: &[f64], k: &[f64], v: &[f64], decay: f64, beta: f64, out: &mut [f64]) {
    out.fill(0.0);
    for (state, k) in state.chunks_exact_mut(v.len()).zip(k) {
        for (seen, s) in out.iter_mut().zip(state) {
            *s *= decay;
            *seen += *s * k;
        }
    }
    let learn: Vec<f64> = v.iter().zip(&*out).map(|(v, seen)| (v - seen) * beta).collect();
    out.fill(0.0);
    for (state, (q, k)) in state.chunks_exact_mut(v.len()).zip(q.iter().zip(k)) {
        for ((out, s), learn) in out.iter_mut().zip(state).zip(&learn) {
            *s += k * learn;
            *out += *s * q;
        }
    }
}

pub(super) fn state_keep(device: &mut Reference, pool: StatePool, place: u32, rows: &[usize]) -> Result {
    let stage = "state_keep";
    let (isa, shape) = (device.isa, memory::states(device, stage, pool)?.shape);
    let StatePlace { recurrent, conv, kept } = memory::place_mut(device, stage, pool, place)?;
    let kept = std::mem::take(kept);
    let mut last = None;
    for &row in rows {
        below(stage, "row of the window", row, kept.conv.len().min(kept.delta.len()))?;
        if kept.parents[row] != last {
            return Err(failed(stage, format!("row {row} does not follow row {last:?} of the window")));
        }
        last = Some(row);
    }
    let mut out = vec![0.0; shape.value_dim];
    for &row in rows {
        push_row(conv, &kept.conv[row]);
        for (head, state) in recurrent.chunks_exact_mut(shape.key_dim * shape.value_dim).enumerate() {
            advance_row(isa, &shape, head, state, &kept.delta[row], &mut out);
        }
    }
    Ok(())
}

pub(super) fn state_clear(device: &mut Reference, pool: StatePool, place: u32) -> Result {
    let place = memory::place_mut(device, "state_clear", pool, place)?;
    place.recurrent.fill(0.0);
    place.conv.fill(0.0);
    place.kept = Kept::default();
    Ok(())
}

pub(super) fn state_copy(device: &mut Reference, pool: StatePool, from: u32, to: u32) -> Result {
    let stage = "state_copy";
    let from = memory::place(device, stage, pool, from)?;
    let (recurrent, conv) = (from.recurrent.clone(), from.conv.clone());
    state_write(device, pool, to, &DeltaState { recurrent, conv })
}

pub(super) fn state_write(device: &mut Reference, pool: StatePool, place: u32, state: &DeltaState) -> Result {
    let stage = "state_write";
    let place = memory::place_mut(device, stage, pool, place)?;
    expect(stage, "length of the recurrent state", state.recurrent.len(), place.recurrent.len())?;
    expect(stage, "length of the convolution state", state.conv.len(), place.conv.len())?;
    place.recurrent.copy_from_slice(&state.recurrent);
    place.conv.copy_from_slice(&state.conv);
    place.kept = Kept::default();
    Ok(())
}
