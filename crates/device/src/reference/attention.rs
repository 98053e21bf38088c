//! Gated attention (`docs/model.md` sections 5 and 6): q/k norms and rotation, K/V pages, softmax, output
//! gate.

use super::{
    Reference, Result, below, expect, failed,
    linear::is_fault,
    memory,
    memory::{KvPages, RotaryTable},
    parallel::{WORK_MIN, parallel},
    rows::{decimal, rms_norm, sigmoid},
};
use crate::{
    AttentionShape, Buffer, KvPool, PAGE_TOKENS, Rotary, Row, VectorRef, Window,
    cpu::isa::{Isa, by_isa},
};

pub(super) fn qk_norm_rope(
    device: &mut Reference,
    qg: Buffer,
    k: Buffer,
    q_weight: VectorRef,
    k_weight: VectorRef,
    eps: f32,
    rotary: Rotary,
    shape: AttentionShape,
    q: Buffer,
) -> Result {
    let stage = "qk_norm_rope";
    let (dim, eps) = (shape.head_dim, decimal(eps));
    check_shape(stage, shape)?;
    let rows = device.step.rows();
    let (q_width, k_width) = (shape.heads * dim, shape.kv_heads * dim);
    let queries = memory::rows(device, stage, qg, rows.len(), 2 * q_width)?;
    let mut queries: Vec<f64> =
        queries.chunks_exact(2 * dim).flat_map(|head| &head[..dim]).copied().collect();
    let mut keys = memory::rows(device, stage, k, rows.len(), k_width)?.to_vec();
    let q_weight = memory::vector(device, stage, q_weight, dim)?;
    let k_weight = memory::vector(device, stage, k_weight, dim)?;
    let table = memory::rotary(device, stage, rotary)?;
    below(stage, "rotary dimension", 2 * table.axes.len(), dim + 1)?;
    let each = queries.chunks_exact_mut(q_width).zip(keys.chunks_exact_mut(k_width));
    for (row, (queries, keys)) in rows.iter().zip(each) {
        let turns = turns(stage, table, row)?;
        for (heads, weight) in [(queries, q_weight), (keys, k_weight)] {
            for head in heads.chunks_exact_mut(dim) {
                rms_norm(head, weight, eps);
                rotate(head, &turns);
            }
        }
    }
    memory::store(device, stage, q, q_width, &queries)?;
    memory::store(device, stage, k, k_width, &keys)
}

/// Cosine and sine of each frequency at the row's position on that frequency's axis.
pub(super) fn turns(stage: &'static str, table: &RotaryTable, row: &Row) -> Result<Vec<(f64, f64)>> {
    let half = table.axes.len();
    let turn = |(j, &axis): (usize, &u8)| {
        let position = row.position[axis as usize] as usize;
        below(stage, "rotary position", position, table.cos.len() / half)?;
        Ok((table.cos[position * half + j], table.sin[position * half + j]))
    };
    table.axes.iter().enumerate().map(turn).collect()
}

/// Turns entry `j` with entry `j + half` of a head.
pub(super) fn rotate(head: &mut [f64], turns: &[(f64, f64)]) {
    for (j, &(cos, sin)) in turns.iter().enumerate() {
        let (a, b) = (head[j], head[j + turns.len()]);
        head[j] = a * cos - b * sin;
        head[j + turns.len()] = b * cos + a * sin;
    }
}

pub(super) fn check_shape(stage: &'static str, shape: AttentionShape) -> Result {
    if shape.kv_heads == 0 || shape.head_dim == 0 || !shape.heads.is_multiple_of(shape.kv_heads) {
        return Err(failed(stage, format!("{shape:?} is not a shape")));
    }
    Ok(())
}

pub(super) fn kv_append(device: &mut Reference, k: Buffer, v: Buffer, pool: KvPool) -> Result {
    let stage = "kv_append";
    let count = device.step.rows().len();
    let token = memory::kv(device, stage, pool)?.token();
    let keys = faults_as_nan(memory::rows(device, stage, k, count, token)?);
    let values = faults_as_nan(memory::rows(device, stage, v, count, token)?);
    let windows = device.step.windows().to_vec();
    let pool = memory::kv_mut(device, stage, pool)?;
    for window in windows {
        for row in 0..window.rows {
            let at = (window.first + row) * token;
            let kv = [&keys[at..at + token], &values[at..at + token]];
            pool.set(stage, &window.pages, window.start + row, kv)?;
        }
    }
    Ok(())
}

pub(super) fn faults_as_nan(values: &[f64]) -> Vec<f64> {
    values.iter().map(|&x| if is_fault(x) { f64::NAN } else { x }).collect()
}

pub(super) fn attention(
    device: &mut Reference,
    q: Buffer,
    shape: AttentionShape,
    pool: KvPool,
    out: Buffer,
) -> Result {
    let stage = "attention";
    check_shape(stage, shape)?;
    let width = shape.heads * shape.head_dim;
    let queries = memory::rows(device, stage, q, device.step.rows().len(), width)?;
    let pages = memory::kv(device, stage, pool)?;
    expect(stage, "number of K/V heads", pages.shape.kv_heads, shape.kv_heads)?;
    expect(stage, "width of a K/V head", pages.shape.head_dim, shape.head_dim)?;
    let windows = device.step.windows();
    let rows: Vec<(&Window, usize)> = windows.iter().flat_map(|w| (0..w.rows).map(move |r| (w, r))).collect();
    let work: usize = rows.iter().map(|(window, row)| (window.start + row + 1) * width).sum();
    let threads = if work < WORK_MIN { 1 } else { device.threads };
    let isa = device.isa;
    let parts = parallel(threads, rows, |(window, row)| {
        let query = &queries[(window.first + row) * width..][..width];
        attend_row(stage, isa, shape, pages, window, row, query)
    });
    let values = parts.into_iter().collect::<Result<Vec<_>>>()?.concat();
    memory::store(device, stage, out, width, &values)
}

/// All heads of one row over the keys it sees: the committed places, then its ancestors and itself.
fn attend_row(
    stage: &'static str,
    isa: Isa,
    shape: AttentionShape,
    pages: &KvPages,
    window: &Window,
    row: usize,
    query: &[f64],
) -> Result<Vec<f64>> {
    let dim = shape.head_dim;
    let path = window.path(row);
    let places = (0..window.start).chain(path.iter().map(|row| window.start + row));
    let seen = places.map(|place| pages.get(stage, &window.pages, place)).collect::<Result<Vec<_>>>()?;
    let mut out = vec![0.0; query.len()];
    let heads = query.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate();
    for (head, (query, out)) in heads {
        let query = faults_as_nan(query);
        let first = head / (shape.heads / shape.kv_heads) * dim;
        let mut weights = vec![0.0; seen.len()];
        for (weight, kv) in weights.iter_mut().zip(&seen) {
            *weight = dot(isa, &query, &kv[0][first..first + dim]) / (dim as f64).sqrt();
        }
        let max = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        weights.iter_mut().for_each(|weight| *weight = (*weight - max).exp());
        let sum: f64 = weights.iter().sum();
        for (weight, kv) in weights.iter().zip(&seen) {
            add_scaled(isa, out, weight / sum, &kv[1][first..first + dim]);
        }
    }
    Ok(out)
}

by_isa! {
    /// Sum of products in 8 lanes, lane = index mod 8.
    pub(super) fn dot(x: &[f64], y: &[f64]) -> f64 = dot_body
}

#[inline(always)]
fn dot_body(x: &[f64], y: &[f64]) -> f64 {
    let mut lanes = [0.0; 8];
    let (x, y) = (x.chunks(8), y.chunks(8));
    for (x, y) in x.zip(y) {
        for ((lane, x), y) in lanes.iter_mut().zip(x).zip(y) {
            *lane += x * y;
        }
    }
    lanes.iter().sum()
}

by_isa! {
    /// `out += by * x`.
    pub(super) fn add_scaled(out: &mut [f64], by: f64, x: &[f64]) = add_scaled_body
}

#[inline(always)]
fn add_scaled_body(out: &mut [f64], by: f64, x: &[f64]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out += by * x;
    }
}

pub(super) fn out_gate(
    device: &mut Reference,
    x: Buffer,
    qg: Buffer,
    rows: usize,
    shape: AttentionShape,
) -> Result {
    let stage = "out_gate";
    check_shape(stage, shape)?;
    let width = shape.heads * shape.head_dim;
    let mut values = memory::rows(device, stage, x, rows, width)?.to_vec();
    let gates = memory::rows(device, stage, qg, rows, 2 * width)?;
    let heads = values.chunks_exact_mut(shape.head_dim).zip(gates.chunks_exact(2 * shape.head_dim));
    for (x, qg) in heads {
        for (x, &gate) in x.iter_mut().zip(&qg[shape.head_dim..]) {
            *x *= sigmoid(gate);
        }
    }
    memory::store(device, stage, x, width, &values)
}

pub(super) fn kv_keep(
    device: &mut Reference,
    pool: KvPool,
    pages: &[u32],
    start: usize,
    rows: &[usize],
) -> Result {
    let stage = "kv_keep";
    if !rows.is_sorted_by(|a, b| a < b) {
        return Err(failed(stage, format!("rows {rows:?} are not a path: they must ascend")));
    }
    let pool = memory::kv_mut(device, stage, pool)?;
    // Rows ascend, so a place is read before anything is written over it.
    for (to, &from) in rows.iter().enumerate() {
        let kv = pool.get(stage, pages, start + from)?.map(<[f64]>::to_vec);
        pool.set(stage, pages, start + to, [&kv[0], &kv[1]])?;
    }
    Ok(())
}

/// Little-endian float64 values of a page, zeros if it was never written.
pub(super) fn kv_export(device: &Reference, pool: KvPool, page: u32) -> Result<Vec<u8>> {
    let stage = "kv_export";
    let pool = memory::kv(device, stage, pool)?;
    below(stage, "page", page as usize, pool.pages.len())?;
    let values = &pool.pages[page as usize];
    if values.is_empty() {
        return Ok(vec![0; 2 * PAGE_TOKENS * pool.token() * 8]);
    }
    Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

pub(super) fn kv_import(device: &mut Reference, pool: KvPool, page: u32, bytes: &[u8]) -> Result {
    let stage = "kv_import";
    let pool = memory::kv_mut(device, stage, pool)?;
    expect(stage, "bytes of a page", bytes.len(), 2 * PAGE_TOKENS * pool.token() * 8)?;
    let values = pool.page_mut(stage, page)?;
    for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(8)) {
        let mut word = [0; 8];
        word.copy_from_slice(bytes);
        *value = f64::from_le_bytes(word);
    }
    Ok(())
}
