//! The gated delta rule (`docs/arithmetic.md`, Gated DeltaNet step; `docs/model.md` section 4).
//!
//! First every row's keys, queries and gates are prepared once; then each strip of value columns takes all
//! tokens of its window in turn. Sums over the key index have 16 lanes, kept as 16 vectors over the strip's
//! columns, so no sum crosses a vector. Strips, heads and windows are independent.

use super::{
    delta_strip::{LANES, decay_and_recall, update, update_and_read},
    isa::{Isa, by_isa},
    math::{exp, sigmoid, softplus},
    pool::Disjoint,
    state::{Lanes, STRIP, States},
    sums::sum_squares,
    workers::Workers,
};
use crate::{DeltaShape, Step, Window};

/// Epsilon of the L2 norm of keys and queries (`docs/model.md` section 4, step 4).
const L2_EPS: f32 = 1e-6;

/// `out = x / sqrt(sum_16(x*x) + eps) * scale` per head.
#[inline(always)]
fn l2_heads_body(x: &[f32], head_dim: usize, scale: f32, out: &mut [f32]) {
    for (x, out) in x.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)) {
        let r = 1.0 / (sum_squares::<LANES>(x) + L2_EPS).sqrt();
        for (y, x) in out.iter_mut().zip(x) {
            *y = (x * r) * scale;
        }
    }
}
by_isa! { fn l2_heads(x: &[f32], head_dim: usize, scale: f32, out: &mut [f32]) = l2_heads_body }

/// Decays `exp(-(decay * softplus(a + dt_bias)))`, then betas `sigmoid(b)`: `[2, Hv]`.
#[inline(always)]
fn gates_body(a: &[f32], b: &[f32], decay: &[f32], dt_bias: &[f32], out: &mut [f32]) {
    let (g, beta) = out.split_at_mut(a.len());
    for (((g, a), decay), bias) in g.iter_mut().zip(a).zip(decay).zip(dt_bias) {
        *g = exp(-(decay * softplus(a + bias)));
    }
    for (beta, b) in beta.iter_mut().zip(b) {
        *beta = sigmoid(*b);
    }
}
by_isa! { fn gates(a: &[f32], b: &[f32], decay: &[f32], dt_bias: &[f32], out: &mut [f32]) = gates_body }

/// One token on one strip; `v` may be shorter than the strip (its columns beyond are zeros).
fn token(isa: Isa, strip: &mut [Lanes], token: &Token<'_>) -> Lanes {
    let d = token.difference(decay_and_recall(isa, strip, token.k, token.g));
    update_and_read(isa, strip, token.k, token.q, &d)
}

/// The same without reading: what is left of a token that is replayed.
fn replay(isa: Isa, strip: &mut [Lanes], token: &Token<'_>) {
    let d = token.difference(decay_and_recall(isa, strip, token.k, token.g));
    update(isa, strip, token.k, &d);
}

/// What one token brings to one strip.
struct Token<'a> {
    /// Normalized, `[Dk]`.
    k: &'a [f32],
    /// Normalized and scaled, `[Dk]`.
    q: &'a [f32],
    /// The strip's value columns.
    v: &'a [f32],
    g: f32,
    beta: f32,
}

impl Token<'_> {
    /// `d = (v - r) * beta`.
    fn difference(&self, recalled: Lanes) -> Lanes {
        let mut d = [0f32; STRIP];
        d[..self.v.len()].copy_from_slice(self.v);
        for (d, r) in d.iter_mut().zip(recalled) {
            *d = (*d - r) * self.beta;
        }
        d
    }
}

/// Prepared rows of a step.
#[derive(Default)]
pub(crate) struct Front {
    rows: usize,
    /// Queries and keys, normalized: `[Hk, rows, 2, Dk]`, so that a head reads on and on.
    qk: Vec<f32>,
    /// Decays, then betas: `[rows, 2, Hv]`.
    gates: Vec<f32>,
}

/// Inputs of [`delta_rule`] besides the state, as [`crate::Device::delta_rule`] has them.
pub(crate) struct Inputs<'a> {
    pub(crate) mixed: &'a [f32],
    pub(crate) a: &'a [f32],
    pub(crate) b: &'a [f32],
    pub(crate) decay: &'a [f32],
    pub(crate) dt_bias: &'a [f32],
}

impl Front {
    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        4 * (self.qk.capacity() + self.gates.capacity())
    }

    fn prepare(&mut self, workers: &Workers, shape: DeltaShape, rows: usize, inputs: &Inputs<'_>) {
        let (keys, heads, channels) = (shape.key_heads * shape.key_dim, shape.value_heads, shape.channels());
        // The f32 nearest to 1/sqrt(Dk).
        let scale = (1.0 / (shape.key_dim as f64).sqrt()) as f32;
        self.rows = rows;
        self.qk.resize(rows * 2 * keys, 0.0);
        self.gates.resize(rows * 2 * heads, 0.0);
        let (isa, dim) = (workers.isa, shape.key_dim);
        workers.rows(&mut self.gates, 2 * heads, &|first, out| {
            for (row, out) in (first..).zip(out.chunks_exact_mut(2 * heads)) {
                let of_row = row * heads..(row + 1) * heads;
                gates(isa, &inputs.a[of_row.clone()], &inputs.b[of_row], inputs.decay, inputs.dt_bias, out);
            }
        });
        workers.rows(&mut self.qk, 2 * dim, &|first, out| {
            for (at, out) in (first..).zip(out.chunks_exact_mut(2 * dim)) {
                let (head, row) = (at / rows, at % rows);
                let q = &inputs.mixed[row * channels + head * dim..];
                l2_heads(isa, &q[..dim], dim, scale, &mut out[..dim]);
                l2_heads(isa, &q[keys..keys + dim], dim, 1.0, &mut out[dim..]);
            }
        });
    }

    /// Query and key of a key head in a row.
    fn query_and_key(&self, head: usize, row: usize, key_dim: usize) -> (&[f32], &[f32]) {
        self.qk[(head * self.rows + row) * 2 * key_dim..][..2 * key_dim].split_at(key_dim)
    }
}

/// Everything the strips of a step read.
struct Rows<'a> {
    shape: DeltaShape,
    mixed: &'a [f32],
    front: &'a Front,
}

impl Rows<'_> {
    /// Row `row` of the step as strip `strip` of value head `head` sees it.
    fn token(&self, row: usize, head: usize, strip: usize) -> Token<'_> {
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = self.shape;
        let keys = key_heads * key_dim;
        let (q, k) = self.front.query_and_key(head / (value_heads / key_heads), row, key_dim);
        let columns = strip * STRIP..value_dim.min((strip + 1) * STRIP);
        let v = &self.mixed[row * self.shape.channels() + 2 * keys + head * value_dim..][columns];
        let gates = &self.front.gates[row * 2 * value_heads..];
        Token { q, k, v, g: gates[head], beta: gates[value_heads + head] }
    }
}

/// Runs the rows of `window` on one strip and gives each row's output; an uncommitted window works on copies.
fn run_strip(
    window: &Window,
    strip: &mut [Lanes],
    copies: &mut Vec<Lanes>,
    mut step: impl FnMut(usize, &mut [Lanes]),
) {
    let n = strip.len();
    copies.clear();
    if window.commit {
        (0..window.rows).for_each(|row| step(row, strip));
    } else if window.parents.is_none() {
        copies.extend_from_slice(strip);
        (0..window.rows).for_each(|row| step(row, copies));
    } else {
        // One state per row of the tree, each from its parent's.
        for row in 0..window.rows {
            match window.parent(row) {
                None => copies.extend_from_slice(strip),
                Some(parent) => copies.extend_from_within(parent * n..(parent + 1) * n),
            }
            step(row, &mut copies[row * n..]);
        }
    }
}

/// Units of work per task: all of a head where there are tasks enough, else single strips.
fn units_per_task(units: usize, strips: usize, threads: usize) -> usize {
    (units / (8 * threads)).clamp(1, strips)
}

/// [`crate::Device::delta_rule`]; `front` is scratch.
pub(crate) fn delta_rule(
    workers: &Workers,
    step: &Step,
    inputs: &Inputs<'_>,
    states: &mut States,
    front: &mut Front,
    out: &mut [f32],
) {
    let shape = states.shape;
    let DeltaShape { value_heads, key_dim, value_dim, .. } = shape;
    front.prepare(workers, shape, step.rows().len(), inputs);
    let rows = Rows { shape, mixed: inputs.mixed, front };
    let (strips, place_len, per_place) = (value_dim.div_ceil(STRIP), states.recurrent_len(), states.strips());
    let recurrent = Disjoint::new(&mut states.recurrent);
    let out = Disjoint::new(out);
    let units = step.windows().len() * per_place;
    let chunk = units_per_task(units, strips, workers.pool.threads());
    workers.pool.run(units.div_ceil(chunk), &|task| {
        let mut copies = Vec::new();
        for unit in task * chunk..units.min((task + 1) * chunk) {
            let window = &step.windows()[unit / per_place];
            let (head, strip) = (unit % per_place / strips, unit % strips);
            let at = window.place as usize * place_len + unit % per_place * key_dim;
            // SAFETY: windows have places of their own (`Step::new`), and each unit a strip of its own.
            let state = unsafe { recurrent.range(at..at + key_dim) };
            run_strip(window, state, &mut copies, |row, state| {
                let one = rows.token(window.first + row, head, strip);
                let o = token(workers.isa, state, &one);
                let at = (window.first + row) * value_heads * value_dim + head * value_dim + strip * STRIP;
                // SAFETY: each unit has columns of its own in the rows of its window.
                unsafe { out.range(at..at + one.v.len()) }.copy_from_slice(&o[..one.v.len()]);
            });
        }
    });
    for window in step.windows() {
        keep_inputs(states, window, &rows);
    }
}

/// Keeps what [`keep`] needs of an uncommitted window.
fn keep_inputs(states: &mut States, window: &Window, rows: &Rows<'_>) {
    let kept = &mut states.kept[window.place as usize];
    kept.rows = 0;
    if window.commit {
        return;
    }
    let shape = rows.shape;
    let (keys, values, channels) =
        (shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim, shape.channels());
    kept.k.clear();
    kept.v.clear();
    kept.gates.clear();
    for row in window.first..window.first + window.rows {
        for head in 0..shape.key_heads {
            kept.k.extend_from_slice(rows.front.query_and_key(head, row, shape.key_dim).1);
        }
        kept.v.extend_from_slice(&rows.mixed[row * channels + 2 * keys..][..values]);
        kept.gates
            .extend_from_slice(&rows.front.gates[row * 2 * shape.value_heads..][..2 * shape.value_heads]);
    }
    kept.rows = window.rows;
}

/// The recurrent half of [`crate::Device::state_keep`]: replays kept rows in order.
pub(crate) fn keep(workers: &Workers, states: &mut States, place: usize, path: &[usize]) {
    let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = states.shape;
    let (strips, units, place_len) = (value_dim.div_ceil(STRIP), states.strips(), states.recurrent_len());
    let kept = &states.kept[place];
    let recurrent = Disjoint::new(&mut states.recurrent[place * place_len..][..place_len]);
    let chunk = units_per_task(units, strips, workers.pool.threads());
    workers.pool.run(units.div_ceil(chunk), &|task| {
        for unit in task * chunk..units.min((task + 1) * chunk) {
            let (head, strip) = (unit / strips, unit % strips);
            // SAFETY: each unit has a strip of its own.
            let state = unsafe { recurrent.range(unit * key_dim..(unit + 1) * key_dim) };
            let key_head = head / (value_heads / key_heads);
            for &row in path {
                let gates = &kept.gates[row * 2 * value_heads..];
                let k = &kept.k[(row * key_heads + key_head) * key_dim..][..key_dim];
                let columns = strip * STRIP..value_dim.min((strip + 1) * STRIP);
                let v = &kept.v[(row * value_heads + head) * value_dim..][columns];
                replay(
                    workers.isa,
                    state,
                    &Token { k, q: &[], v, g: gates[head], beta: gates[value_heads + head] },
                );
            }
        }
    });
}
