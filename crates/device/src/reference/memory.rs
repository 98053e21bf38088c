//! What the handles of the reference device stand for, and checked access to it.

use std::ops::Range;

use quant::Matrix;

use super::{Reference, Result, below, delta_rule::Kept, expect, failed, linear::Weights};
use crate::{
    Buffer, DeltaShape, DeviceError, ExpertsRef, KvPool, KvShape, MatrixRef, Memory, PAGE_TOKENS, Picks,
    Rotary, StatePool, VectorRef,
};

/// Activations `[rows_max, width]`.
pub(super) struct ActivationRows {
    pub(super) rows_max: usize,
    pub(super) width: usize,
    pub(super) values: Vec<f64>,
}

/// Picks `[rows_max, k]`.
pub(super) struct PickRows {
    pub(super) rows_max: usize,
    pub(super) k: usize,
    pub(super) ids: Vec<u32>,
    pub(super) weights: Vec<f64>,
}

/// The routed experts of a layer: gate and up `[I, H]`, down `[H, I]`.
pub(super) struct Experts {
    pub(super) gate: Vec<Weights>,
    pub(super) up: Vec<Weights>,
    pub(super) down: Vec<Weights>,
}

/// Cosines and sines `[positions, half]` and the axis of each frequency.
pub(super) struct RotaryTable {
    pub(super) cos: Vec<f64>,
    pub(super) sin: Vec<f64>,
    pub(super) axes: Vec<u8>,
}

/// K/V pages. A page is empty until it is first written, then `[2, PAGE_TOKENS, kv_heads, head_dim]`: keys,
/// values.
pub(super) struct KvPages {
    pub(super) shape: KvShape,
    pub(super) pages: Vec<Vec<f64>>,
}

/// The places of a state pool.
pub(super) struct StatePlaces {
    pub(super) shape: DeltaShape,
    pub(super) places: Vec<StatePlace>,
}

/// One sequence's state, laid out as in [`crate::DeltaState`], and its last uncommitted window.
pub(super) struct StatePlace {
    pub(super) recurrent: Vec<f64>,
    pub(super) conv: Vec<f64>,
    pub(super) kept: Kept,
}

impl ActivationRows {
    pub(super) fn new(rows_max: usize, width: usize) -> Result<Self> {
        below("buffer", "first column", 0, width)?;
        Ok(Self { rows_max, width, values: zeros("buffer", &[rows_max, width])? })
    }
}

impl PickRows {
    pub(super) fn new(rows_max: usize, k: usize) -> Result<Self> {
        let weights = zeros("picks", &[rows_max, k])?;
        Ok(Self { rows_max, k, ids: vec![0; weights.len()], weights })
    }
}

impl Experts {
    pub(super) fn new(
        gate: &[Matrix],
        up: &[Matrix],
        down: &[Matrix],
        wide_bytes: &mut usize,
    ) -> Result<Self> {
        let stage = "experts";
        expect(stage, "number of up matrices", up.len(), gate.len())?;
        expect(stage, "number of down matrices", down.len(), gate.len())?;
        let Some(first) = gate.first() else { return Err(failed(stage, "a layer needs one expert or more")) };
        for (gate, (up, down)) in gate.iter().zip(up.iter().zip(down)) {
            for (what, matrix, rows, cols) in [
                ("gate", gate, first.rows(), first.cols()),
                ("up", up, first.rows(), first.cols()),
                ("down", down, first.cols(), first.rows()),
            ] {
                expect(stage, &format!("rows of a {what} matrix"), matrix.rows(), rows)?;
                expect(stage, &format!("columns of a {what} matrix"), matrix.cols(), cols)?;
            }
        }
        let mut take = |matrices: &[Matrix]| -> Result<Vec<Weights>> {
            matrices.iter().map(|matrix| Weights::new(stage, matrix, wide_bytes)).collect()
        };
        Ok(Self { gate: take(gate)?, up: take(up)?, down: take(down)? })
    }
}

impl RotaryTable {
    pub(super) fn new(cos: &[f64], sin: &[f64], axes: &[u8]) -> Result<Self> {
        let stage = "rotary";
        expect(stage, "length of the sines", sin.len(), cos.len())?;
        if axes.is_empty() || !cos.len().is_multiple_of(axes.len()) {
            return Err(failed(stage, format!("{} cosines for {} frequencies", cos.len(), axes.len())));
        }
        for &axis in axes {
            below(stage, "axis", axis as usize, 3)?;
        }
        Ok(Self { cos: cos.to_vec(), sin: sin.to_vec(), axes: axes.to_vec() })
    }
}

impl KvPages {
    pub(super) fn new(shape: KvShape) -> Self {
        Self { shape, pages: vec![Vec::new(); shape.pages] }
    }

    /// Values of one token's keys (or values).
    pub(super) fn token(&self) -> usize {
        self.shape.kv_heads * self.shape.head_dim
    }

    /// A page for writing, taking its memory if this is the first time.
    pub(super) fn page_mut(&mut self, stage: &'static str, page: u32) -> Result<&mut Vec<f64>> {
        below(stage, "page", page as usize, self.pages.len())?;
        let lengths = [2, PAGE_TOKENS, self.token()];
        let page = &mut self.pages[page as usize];
        if page.is_empty() {
            *page = zeros(stage, &lengths)?;
        }
        Ok(page)
    }

    /// Keys and values `[kv_heads, head_dim]` of a token; `place` counts along `pages`.
    pub(super) fn get(&self, stage: &'static str, pages: &[u32], place: usize) -> Result<[&[f64]; 2]> {
        let (page, slot) = (place / PAGE_TOKENS, place % PAGE_TOKENS);
        below(stage, "page of the sequence", page, pages.len())?;
        below(stage, "page", pages[page] as usize, self.pages.len())?;
        let values = &self.pages[pages[page] as usize];
        if values.is_empty() {
            return Err(failed(stage, format!("page {} was never written", pages[page])));
        }
        let token = self.token();
        Ok([0, PAGE_TOKENS].map(|half| &values[(half + slot) * token..][..token]))
    }

    /// Sets keys and values of a token.
    pub(super) fn set(
        &mut self,
        stage: &'static str,
        pages: &[u32],
        place: usize,
        kv: [&[f64]; 2],
    ) -> Result {
        let (page, slot) = (place / PAGE_TOKENS, place % PAGE_TOKENS);
        below(stage, "page of the sequence", page, pages.len())?;
        let token = self.token();
        let values = self.page_mut(stage, pages[page])?;
        for (half, from) in [0, PAGE_TOKENS].into_iter().zip(kv) {
            values[(half + slot) * token..][..token].copy_from_slice(from);
        }
        Ok(())
    }
}

impl StatePlaces {
    pub(super) fn new(shape: DeltaShape, places: usize) -> Result<Self> {
        let stage = "state_pool";
        if shape.key_heads == 0 || !shape.value_heads.is_multiple_of(shape.key_heads) || shape.conv_taps == 0
        {
            return Err(failed(stage, format!("{shape:?} is not a shape")));
        }
        let place = || {
            Ok(StatePlace {
                recurrent: zeros(stage, &[shape.recurrent()])?,
                conv: zeros(stage, &[shape.conv()])?,
                kept: Kept::default(),
            })
        };
        Ok(Self { shape, places: (0..places).map(|_| place()).collect::<Result<_>>()? })
    }
}

/// Zeros for an array of these lengths, or an error instead of an abort.
pub(super) fn zeros(stage: &'static str, lengths: &[usize]) -> Result<Vec<f64>> {
    let count = lengths.iter().try_fold(1usize, |n, &length| n.checked_mul(length));
    let mut values = Vec::new();
    match count.map(|n| values.try_reserve_exact(n).map(|()| n)) {
        Some(Ok(n)) => {
            values.resize(n, 0.0);
            Ok(values)
        }
        _ => Err(DeviceError::OutOfMemory {
            stage,
            bytes: count.map_or(u64::MAX, |n| n as u64 * 8),
            device: "reference".into(),
        }),
    }
}

/// Handle of the entry just pushed.
pub(super) fn last<T>(entries: &[T]) -> u32 {
    entries.len() as u32 - 1
}

fn entry<'a, T>(stage: &'static str, what: &str, entries: &'a [T], index: u32) -> Result<&'a T> {
    below(stage, what, index as usize, entries.len())?;
    Ok(&entries[index as usize])
}

pub(super) fn matrix<'a>(
    device: &'a Reference,
    stage: &'static str,
    handle: MatrixRef,
) -> Result<&'a Weights> {
    entry(stage, "matrix", &device.matrices, handle.0)
}

pub(super) fn experts<'a>(
    device: &'a Reference,
    stage: &'static str,
    handle: ExpertsRef,
) -> Result<&'a Experts> {
    entry(stage, "experts", &device.experts, handle.0)
}

pub(super) fn rotary<'a>(
    device: &'a Reference,
    stage: &'static str,
    handle: Rotary,
) -> Result<&'a RotaryTable> {
    entry(stage, "rotary table", &device.rotaries, handle.0)
}

/// A vector of `length` values.
pub(super) fn vector<'a>(
    device: &'a Reference,
    stage: &'static str,
    handle: VectorRef,
    length: usize,
) -> Result<&'a [f64]> {
    let values = vector_any(device, stage, handle)?;
    expect(stage, "length of a vector", values.len(), length)?;
    Ok(values)
}

/// A vector of one value or more.
pub(super) fn vector_any<'a>(
    device: &'a Reference,
    stage: &'static str,
    handle: VectorRef,
) -> Result<&'a [f64]> {
    let values = entry(stage, "vector", &device.vectors, handle.0)?;
    below(stage, "first value", 0, values.len())?;
    Ok(values)
}

/// A buffer's width.
pub(super) fn width(device: &Reference, stage: &'static str, handle: Buffer) -> Result<usize> {
    Ok(entry(stage, "buffer", &device.buffers, handle.0)?.width)
}

/// The leading `rows` rows of a buffer of that width.
pub(super) fn rows<'a>(
    device: &'a Reference,
    stage: &'static str,
    handle: Buffer,
    rows: usize,
    width: usize,
) -> Result<&'a [f64]> {
    let buffer = entry(stage, "buffer", &device.buffers, handle.0)?;
    expect(stage, "width of a buffer", buffer.width, width)?;
    below(stage, "row count", rows, buffer.rows_max + 1)?;
    Ok(&buffer.values[..rows * width])
}

/// One row of a buffer.
pub(super) fn row<'a>(
    device: &'a Reference,
    stage: &'static str,
    handle: Buffer,
    row: usize,
) -> Result<&'a [f64]> {
    let buffer = entry(stage, "buffer", &device.buffers, handle.0)?;
    below(stage, "row", row, buffer.rows_max)?;
    Ok(&buffer.values[row * buffer.width..][..buffer.width])
}

/// Writes a stage's result to the leading rows of a buffer of that width.
pub(super) fn store(
    device: &mut Reference,
    stage: &'static str,
    handle: Buffer,
    width: usize,
    values: &[f64],
) -> Result {
    rows(device, stage, handle, values.len() / width, width)?;
    device.buffers[handle.0 as usize].values[..values.len()].copy_from_slice(values);
    Ok(())
}

/// The value range of `length` values from row `row` on: whole rows inside the buffer.
pub(super) fn row_range(
    device: &Reference,
    stage: &'static str,
    handle: Buffer,
    row: usize,
    length: usize,
) -> Result<Range<usize>> {
    let buffer = entry(stage, "buffer", &device.buffers, handle.0)?;
    let width = buffer.width;
    expect(stage, "rest of a row", length % width, 0)?;
    let rows = length / width;
    below(stage, "row", row.saturating_add(rows), buffer.rows_max + 1)?;
    Ok(row * width..(row + rows) * width)
}

/// Picks with room for `rows` rows.
pub(super) fn picks<'a>(
    device: &'a Reference,
    stage: &'static str,
    handle: Picks,
    rows: usize,
) -> Result<&'a PickRows> {
    let picks = entry(stage, "picks", &device.picks, handle.0)?;
    below(stage, "row count", rows, picks.rows_max + 1)?;
    Ok(picks)
}

pub(super) fn kv<'a>(device: &'a Reference, stage: &'static str, handle: KvPool) -> Result<&'a KvPages> {
    entry(stage, "K/V pool", &device.kv, handle.0)
}

pub(super) fn kv_mut<'a>(
    device: &'a mut Reference,
    stage: &'static str,
    handle: KvPool,
) -> Result<&'a mut KvPages> {
    below(stage, "K/V pool", handle.0 as usize, device.kv.len())?;
    Ok(&mut device.kv[handle.0 as usize])
}

pub(super) fn states<'a>(
    device: &'a Reference,
    stage: &'static str,
    handle: StatePool,
) -> Result<&'a StatePlaces> {
    entry(stage, "state pool", &device.states, handle.0)
}

pub(super) fn place<'a>(
    device: &'a Reference,
    stage: &'static str,
    pool: StatePool,
    place: u32,
) -> Result<&'a StatePlace> {
    entry(stage, "place", &states(device, stage, pool)?.places, place)
}

pub(super) fn place_mut<'a>(
    device: &'a mut Reference,
    stage: &'static str,
    pool: StatePool,
    at: u32,
) -> Result<&'a mut StatePlace> {
    place(device, stage, pool, at)?;
    Ok(&mut device.states[pool.0 as usize].places[at as usize])
}

/// Bytes held, by purpose.
pub(super) fn held(device: &Reference) -> Memory {
    let floats = |count: usize| count as u64 * 8;
    let matrices = device.experts.iter().flat_map(|e| e.gate.iter().chain(&e.up).chain(&e.down));
    let stored: usize = matrices.chain(&device.matrices).map(Weights::bytes).sum();
    let vectors: usize = device.vectors.iter().map(Vec::len).sum();
    let tables: usize = device.rotaries.iter().map(|r| r.cos.len() + r.sin.len()).sum();
    let pages: usize = device.kv.iter().flat_map(|pool| &pool.pages).map(Vec::len).sum();
    let places = device.states.iter().flat_map(|pool| &pool.places);
    let states: usize = places.map(|p| p.recurrent.len() + p.conv.len() + p.kept.values()).sum();
    let activations: usize = device.buffers.iter().map(|b| b.values.len()).sum();
    let picks: u64 = device.picks.iter().map(|p| p.ids.len() as u64 * 12).sum();
    Memory {
        weights: stored as u64 + floats(vectors),
        kv: floats(pages),
        states: floats(states),
        scratch: floats(activations + tables) + picks,
    }
}
