//! The gated delta rule (`docs/arithmetic.md`, Gated DeltaNet step; `docs/model.md` section 4).
//!
//! First every row's keys, queries and gates are prepared once; then each strip of value columns takes all tokens of
//! its window in turn. Sums over the key index have 16 lanes, kept as 16 vectors over the strip's columns, so no sum
//! crosses a vector. Strips, heads and windows are independent.

use super::{
    isa::by_isa,
    math::{exp, sigmoid, softplus},
    pool::Disjoint,
    state::{Lanes, STRIP, States},
    sums::sum_squares,
    workers::Workers,
};
use crate::{DeltaShape, Step, Window};

/// Epsilon of the L2 norm of keys and queries (`docs/model.md` section 4, step 4).
const L2_EPS: f32 = 1e-6;
/// Lanes of a sum over the key index.
const LANES: usize = 16;

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

/// `lanes[i] += lanes[i + h]` for h = 8 ... 1, whole vectors at a time.
#[inline(always)]
fn tree(mut lanes: [Lanes; LANES]) -> Lanes {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            for c in 0..STRIP {
                lanes[i][c] += lanes[i + half][c];
            }
        }
        half /= 2;
    }
    lanes[0]
}

/// Adds the +0 products of key indices that do not exist to the lanes from `lane` on.
#[inline(always)]
fn pad(lanes: &mut [Lanes; LANES], lane: usize) {
    for values in &mut lanes[lane..] {
        for value in values {
            *value += 0.0;
        }
    }
}

/// `S *= g` and `sum_16 of fma(S, k)` per column.
#[inline(always)]
fn decay_and_recall(strip: &mut [Lanes], k: &[f32], g: f32) -> Lanes {
    let mut lanes = [[0f32; STRIP]; LANES];
    let (whole, rest) = strip.as_chunks_mut::<LANES>();
    let (k_whole, k_rest) = k.as_chunks::<LANES>();
    for (s, k) in whole.iter_mut().zip(k_whole) {
        for l in 0..LANES {
            for c in 0..STRIP {
                s[l][c] *= g;
                lanes[l][c] = s[l][c].mul_add(k[l], lanes[l][c]);
            }
        }
    }
    for (l, (s, k)) in rest.iter_mut().zip(k_rest).enumerate() {
        for c in 0..STRIP {
            s[c] *= g;
            lanes[l][c] = s[c].mul_add(*k, lanes[l][c]);
        }
    }
    if !rest.is_empty() {
        pad(&mut lanes, rest.len());
    }
    tree(lanes)
}

/// `S = fma(k, d, S)` and `sum_16 of fma(S, q)` per column.
#[inline(always)]
fn update_and_read(strip: &mut [Lanes], k: &[f32], q: &[f32], d: &Lanes) -> Lanes {
    let mut lanes = [[0f32; STRIP]; LANES];
    let (whole, rest) = strip.as_chunks_mut::<LANES>();
    let (k_whole, k_rest) = k.as_chunks::<LANES>();
    let (q_whole, q_rest) = q.as_chunks::<LANES>();
    for ((s, k), q) in whole.iter_mut().zip(k_whole).zip(q_whole) {
        for l in 0..LANES {
            for c in 0..STRIP {
                s[l][c] = k[l].mul_add(d[c], s[l][c]);
                lanes[l][c] = s[l][c].mul_add(q[l], lanes[l][c]);
            }
        }
    }
    for (l, ((s, k), q)) in rest.iter_mut().zip(k_rest).zip(q_rest).enumerate() {
        for c in 0..STRIP {
            s[c] = k.mul_add(d[c], s[c]);
            lanes[l][c] = s[c].mul_add(*q, lanes[l][c]);
        }
    }
    if !rest.is_empty() {
        pad(&mut lanes, rest.len());
    }
    tree(lanes)
}

/// One token on one strip; `v` may be shorter than the strip (its columns beyond are zeros).
#[inline(always)]
fn token_body(strip: &mut [Lanes], token: &Token<'_>, out: &mut Lanes) {
    let r = decay_and_recall(strip, token.k, token.g);
    let mut d = [0f32; STRIP];
    d[..token.v.len()].copy_from_slice(token.v);
    for c in 0..STRIP {
        d[c] = (d[c] - r[c]) * token.beta;
    }
    *out = update_and_read(strip, token.k, token.q, &d);
}
by_isa! { fn token(strip: &mut [Lanes], token: &Token<'_>, out: &mut Lanes) = token_body }

/// The same without reading: what is left of a token that is replayed.
#[inline(always)]
fn replay_body(strip: &mut [Lanes], token: &Token<'_>) {
    let r = decay_and_recall(strip, token.k, token.g);
    for (s, k) in strip.iter_mut().zip(token.k) {
        for c in 0..token.v.len() {
            s[c] = k.mul_add((token.v[c] - r[c]) * token.beta, s[c]);
        }
    }
}
by_isa! { fn replay(strip: &mut [Lanes], token: &Token<'_>) = replay_body }

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

/// Prepared rows of a step.
#[derive(Default)]
pub(crate) struct Front {
    /// Queries, then keys, normalized: `[rows, 2, Hk Dk]`.
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
        self.qk.resize(rows * 2 * keys, 0.0);
        self.gates.resize(rows * 2 * heads, 0.0);
        let isa = workers.isa;
        workers.rows2(&mut self.qk, 2 * keys, &mut self.gates, 2 * heads, &|first, qk, gate_rows| {
            let rows = qk.chunks_exact_mut(2 * keys).zip(gate_rows.chunks_exact_mut(2 * heads));
            for (at, (qk, out)) in rows.enumerate() {
                let row = first + at;
                let mixed = &inputs.mixed[row * channels..][..2 * keys];
                let (q, k) = qk.split_at_mut(keys);
                l2_heads(isa, &mixed[..keys], shape.key_dim, scale, q);
                l2_heads(isa, &mixed[keys..], shape.key_dim, 1.0, k);
                let of_row = row * heads..(row + 1) * heads;
                gates(isa, &inputs.a[of_row.clone()], &inputs.b[of_row], inputs.decay, inputs.dt_bias, out);
            }
        });
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
        let at = head / (value_heads / key_heads) * key_dim;
        let qk = &self.front.qk[row * 2 * keys..][..2 * keys];
        let columns = strip * STRIP..value_dim.min((strip + 1) * STRIP);
        let v = &self.mixed[row * self.shape.channels() + 2 * keys + head * value_dim..][columns];
        let gates = &self.front.gates[row * 2 * value_heads..];
        Token {
            q: &qk[at..][..key_dim],
            k: &qk[keys + at..][..key_dim],
            v,
            g: gates[head],
            beta: gates[value_heads + head],
        }
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
                let mut o = [0f32; STRIP];
                token(workers.isa, state, &one, &mut o);
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
        kept.k.extend_from_slice(&rows.front.qk[row * 2 * keys + keys..][..keys]);
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
