//! Causal depthwise convolution and silu.
//!
//! Row r takes its taps from its ancestors in the window, then from the place's state: the last `conv_taps -
//! 1` input rows, oldest first. Per channel `acc = fma(tap, input, acc)` from +0, oldest first, then silu.

use super::{
    isa::by_isa,
    math::silu,
    pool::Disjoint,
    state::{States, TAPS_MAX},
    workers::Workers,
};
use crate::{Step, VectorRef, Window};

/// Channels of one task: its inputs, taps and outputs stay in the nearest caches.
const CHANNELS: usize = 1024;

/// `out[c] = silu(sum over i of taps[i * stride + c] * inputs[i][c])`.
#[inline(always)]
fn channels_body(inputs: &[&[f32]], taps: &[f32], stride: usize, out: &mut [f32]) {
    out.fill(0.0);
    for (i, input) in inputs.iter().enumerate() {
        for ((y, x), w) in out.iter_mut().zip(*input).zip(&taps[i * stride..]) {
            *y = w.mul_add(*x, *y);
        }
    }
    for y in out {
        *y = silu(*y);
    }
}
by_isa! { fn channels(inputs: &[&[f32]], taps: &[f32], stride: usize, out: &mut [f32]) = channels_body }

/// The inputs under the taps of row `row`, oldest first; `x` are the window's rows.
fn sources<'a>(window: &Window, row: usize, x: &'a [f32], state: &'a [f32], c: usize, out: &mut [&'a [f32]]) {
    let last = out.len() - 1;
    let mut at = Some(row);
    // `missing`: how many rows of the state are already used, newest first.
    let mut missing = 0;
    for back in 0..=last {
        out[last - back] = match at {
            Some(row) => {
                at = window.parent(row);
                &x[row * c..][..c]
            }
            None => {
                missing += 1;
                &state[(last - missing) * c..][..c]
            }
        };
    }
}

/// Shifts the state by rows given oldest first.
fn advance<'a>(state: &mut [f32], c: usize, rows: impl Iterator<Item = &'a [f32]>) {
    let Some(newest) = state.len().checked_sub(c) else { return };
    for row in rows {
        state.copy_within(c.., 0);
        state[newest..].copy_from_slice(row);
    }
}

/// [`crate::Device::conv`] over `[rows, C]`; `taps` is `[C, conv_taps]` of the vector `taps_ref`.
pub(crate) fn conv(
    workers: &Workers,
    step: &Step,
    x: &[f32],
    taps_ref: VectorRef,
    taps: &[f32],
    states: &mut States,
    out: &mut [f32],
) {
    let (c, count) = (states.shape.channels(), states.shape.conv_taps);
    if states.taps.as_ref().is_none_or(|(of, _)| *of != taps_ref) {
        assert_eq!(taps.len(), c * count, "taps are [C, conv_taps]");
        let transposed = (0..c * count).map(|at| taps[at % c * count + at / c]).collect();
        states.taps = Some((taps_ref, transposed));
    }
    let taps = states.taps.as_ref().map(|(_, taps)| &taps[..]).expect("made above");
    let state_len = states.shape.conv();
    let blocks = c.div_ceil(CHANNELS);
    let parts = Disjoint::new(out);
    for window in step.windows() {
        let rows = &x[window.first * c..][..window.rows * c];
        let state = &states.conv[window.place as usize * state_len..][..state_len];
        workers.pool.run(window.rows * blocks, &|task| {
            let (row, first) = (task / blocks, task % blocks * CHANNELS);
            let end = c.min(first + CHANNELS);
            let mut inputs = [&[][..]; TAPS_MAX];
            sources(window, row, rows, state, c, &mut inputs[..count]);
            for input in &mut inputs[..count] {
                *input = &input[first..end];
            }
            let at = (window.first + row) * c;
            // SAFETY: each task has a row and a channel range of its own.
            let out = unsafe { parts.range(at + first..at + end) };
            channels(workers.isa, &inputs[..count], &taps[first..], c, out);
        });
    }
    for window in step.windows() {
        let rows = &x[window.first * c..][..window.rows * c];
        let kept = &mut states.kept[window.place as usize];
        kept.conv.clear();
        if window.commit {
            kept.rows = 0;
            let state = &mut states.conv[window.place as usize * state_len..][..state_len];
            let skip = window.rows.saturating_sub(count);
            advance(state, c, rows.chunks_exact(c).skip(skip));
        } else {
            kept.conv.extend_from_slice(rows);
        }
    }
}

/// The convolution's half of [`crate::Device::state_keep`].
pub(crate) fn keep(states: &mut States, place: usize, rows: &[usize]) {
    let c = states.shape.channels();
    let len = states.shape.conv();
    let inputs = &states.kept[place].conv;
    let state = &mut states.conv[place * len..][..len];
    advance(state, c, rows.iter().map(|&row| &inputs[row * c..][..c]));
}
