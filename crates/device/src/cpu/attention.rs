//! Attention over integer K/V, causal or whole (`docs/arithmetic.md`, scores, blocks and merge).
//!
//! Work is cut into *batches*: up to [`VECTORS`] query vectors (the query heads of one K/V head, of one row
//! or of a few rows of a chain) that share every load of K and V. A batch walks its blocks of 64 keys in
//! order: integer dots, scores, weights, integer dots, merge. Where there are few batches and much context,
//! spans of 512 keys are computed apart and folded afterwards; the folds are the same.
//!
//! Row r of a window sees the keys at token indices up to its own. On a chain a key's place is its index. A
//! tree row sees its ancestors at their own indices: the blocks from the window's start on are gathered for
//! each row.

use super::{
    attention_block::{fold_values, score_group, weigh},
    kv::{Block, KvPages, copy_key},
    panels::{LANES, PANEL_STEP, Panels, VECTORS, panel_dots},
    pool::Disjoint,
    workers::Workers,
};
use crate::{AttentionShape, PAGE_TOKENS, Step, Window};
use quant::{ATTENTION_BITS, ATTENTION_GROUP, quantize_group};

/// Blocks of a span.
const SPAN_BLOCKS: usize = 8;
/// Keys of a block.
pub(crate) const KEYS: usize = PAGE_TOKENS;

/// Query rows as codes, and the batches of the step. Scratch that is kept between calls.
#[derive(Default)]
pub(crate) struct Queries {
    /// `[rows, heads, 2 * pairs]`, the last pair padded with 0.
    codes: Vec<i16>,
    /// `[rows, heads, groups]`.
    units: Vec<f32>,
    batches: Vec<Batch>,
    partial: Vec<f32>,
}

/// Query vectors that walk the keys together.
#[derive(Clone, Copy)]
struct Batch {
    window: usize,
    /// Rows of the window `row..row + rows`; one for trees.
    row: usize,
    rows: usize,
    kv_head: usize,
    /// Query heads `head..head + heads`.
    head: usize,
    heads: usize,
}

impl Batch {
    fn vectors(&self) -> usize {
        self.rows * self.heads
    }
}

/// A running softmax of some vectors: maximum, sum, and values `[vectors, head_dim]`.
struct Fold {
    max: [f32; VECTORS],
    sum: [f32; VECTORS],
    seen: [bool; VECTORS],
    values: Vec<f32>,
}

impl Fold {
    fn new(head_dim: usize) -> Self {
        Self {
            max: [0.0; VECTORS],
            sum: [0.0; VECTORS],
            seen: [false; VECTORS],
            values: vec![0.0; VECTORS * head_dim],
        }
    }

    /// Takes in maximum and sum of a later part of vector `v`; returns the factors of its values and of those
    /// held. `None`: nothing was held, the part's values replace what is there.
    fn admit(&mut self, v: usize, max: f32, sum: f32) -> Option<(f32, f32)> {
        if !self.seen[v] {
            (self.seen[v], self.max[v], self.sum[v]) = (true, max, sum);
            return None;
        }
        // A NaN score leaves a maximum of the others, but its sum is NaN; all NaN leave -inf, and factors 0
        // or NaN.
        let both = if max > self.max[v] { max } else { self.max[v] };
        let (of_part, of_held) = (super::math::exp2(max - both), super::math::exp2(self.max[v] - both));
        self.sum[v] = sum.mul_add(of_part, self.sum[v] * of_held);
        self.max[v] = both;
        Some((of_part, of_held))
    }

    /// Folds vector `v` of a later span.
    fn merge(&mut self, v: usize, max: f32, sum: f32, values: &[f32]) {
        let factors = self.admit(v, max, sum);
        let held = &mut self.values[v * values.len()..][..values.len()];
        match factors {
            None => held.copy_from_slice(values),
            Some((of_part, of_held)) => {
                for (o, part) in held.iter_mut().zip(values) {
                    *o = part.mul_add(of_part, *o * of_held);
                }
            }
        }
    }
}

/// What all batches read.
struct Plan<'a> {
    workers: &'a Workers,
    step: &'a Step,
    shape: AttentionShape,
    pages: &'a KvPages,
    codes: &'a [i16],
    units: &'a [f32],
    /// The f32 nearest to `log2(e)/sqrt(head_dim)`.
    scale: f32,
    /// Keys that every row of each window sees; `None`: those up to its own index.
    keys: Option<&'a [usize]>,
}

impl Plan<'_> {
    /// Index of the last key that row `row` of window `window` sees.
    fn last_key(&self, window: usize, row: usize) -> usize {
        match self.keys {
            Some(keys) => keys[window] - 1,
            None => self.step.windows()[window].index(row),
        }
    }
}

/// A batch's own view of its queries, and room for one block.
struct Walk<'a> {
    plan: &'a Plan<'a>,
    batch: Batch,
    window: &'a Window,
    /// `[vectors, 2 * pairs]`.
    codes: Vec<i16>,
    /// Index of the last key that each of the batch's rows sees.
    index: [usize; VECTORS],
    /// A gathered block of a tree row.
    gathered: Option<(Vec<i8>, Vec<f32>)>,
    /// Ancestors of a tree row, itself last.
    path: Vec<usize>,
    scores: [[f32; KEYS]; VECTORS],
    weights: [[i16; KEYS]; VECTORS],
    /// Value dots, `[digit, vectors, padded dims]`.
    dots: Vec<i32>,
}

impl<'a> Walk<'a> {
    fn new(plan: &'a Plan<'a>, batch: Batch) -> Self {
        let window = &plan.step.windows()[batch.window];
        let layout = plan.pages.layout;
        let width = 2 * layout.pairs();
        let mut codes = Vec::with_capacity(VECTORS * width);
        let mut index = [0; VECTORS];
        for (at, row) in (batch.row..batch.row + batch.rows).enumerate() {
            let first = ((window.first + row) * plan.shape.heads + batch.head) * width;
            codes.extend_from_slice(&plan.codes[first..][..batch.heads * width]);
            index[at] = plan.last_key(batch.window, row);
        }
        let tree = window.parents.is_some();
        Self {
            plan,
            batch,
            window,
            codes,
            index,
            gathered: tree.then(|| (vec![0; layout.codes()], vec![0.0; layout.scales()])),
            path: if tree { window.path(batch.row) } else { Vec::new() },
            scores: [[0.0; KEYS]; VECTORS],
            weights: [[0; KEYS]; VECTORS],
            dots: vec![0; layout.digits * VECTORS * layout.dim_blocks() * LANES],
        }
    }

    /// Blocks that the batch's last row sees.
    fn blocks(&self) -> usize {
        self.index[self.batch.rows - 1] / KEYS + 1
    }

    /// Keys of block `block` that vector `v` sees, from the first on.
    fn visible(&self, v: usize, block: usize) -> usize {
        (self.index[v / self.batch.heads] + 1).saturating_sub(block * KEYS).min(KEYS)
    }

    /// Puts the keys of a tree row's block, committed ones and ancestors, in the order of their indices.
    fn gather(&mut self, block: usize) {
        let (pages, window) = (self.plan.pages, self.window);
        let visible = self.visible(0, block);
        let Some((codes, scales)) = &mut self.gathered else { return };
        for key in 0..visible {
            let index = block * KEYS + key;
            let place = match index.checked_sub(window.start) {
                None => index,
                Some(depth) => window.start + self.path[depth],
            };
            let from = pages.block(window.pages[place / KEYS], self.batch.kv_head);
            copy_key(pages.layout, from, place % KEYS, codes, scales, key);
        }
    }

    /// Scores of all vectors against a block: groups ascending by `fma(I, s_k * u_q)` from +0.
    fn score(&mut self, block: Block<'_>) {
        let (plan, layout, vectors) = (self.plan, self.plan.pages.layout, self.batch.vectors());
        let mut dots = [[[0i32; KEYS]; VECTORS]; 2];
        for scores in &mut self.scores[..vectors] {
            scores.fill(0.0);
        }
        for group in 0..layout.groups() {
            let first_pair = group * ATTENTION_GROUP / 2;
            for digit in 0..layout.digits {
                let panels = Panels {
                    bytes: &block.codes[digit * layout.k_plane() + first_pair * PANEL_STEP..],
                    steps: (layout.pairs() - first_pair).min(ATTENTION_GROUP / 2),
                    count: KEYS / LANES,
                    stride: layout.pairs() * PANEL_STEP,
                };
                let (x, stride) = (&self.codes[2 * first_pair..], 2 * layout.pairs());
                panel_dots(
                    plan.workers.isa,
                    panels,
                    x,
                    stride,
                    vectors,
                    dots[digit].as_flattened_mut(),
                    KEYS,
                );
            }
            let scales = block.scales[group * KEYS..].first_chunk().expect("a scale per key");
            for v in 0..vectors {
                let row = self.window.first + self.batch.row + v / self.batch.heads;
                let head = self.batch.head + v % self.batch.heads;
                let unit = plan.units[(row * plan.shape.heads + head) * layout.groups() + group];
                let low = (layout.digits == 2).then_some(&dots[1][v]);
                score_group(plan.workers.isa, &dots[0][v], low, scales, unit, &mut self.scores[v]);
            }
        }
    }

    /// One block, folded into `fold`.
    fn block(&mut self, at: usize, fold: &mut Fold) {
        let (plan, batch) = (self.plan, self.batch);
        let (layout, isa) = (plan.pages.layout, plan.workers.isa);
        let gathers = self.gathered.is_some() && (at + 1) * KEYS > self.window.start;
        if gathers {
            self.gather(at);
        }
        // Taken out, so that the block can be read while scores are written.
        let own = self.gathered.take();
        let block = match &own {
            Some((codes, scales)) if gathers => Block { codes, scales },
            _ => plan.pages.block(self.window.pages[at], batch.kv_head),
        };
        self.score(block);
        let scales = block.scales[layout.groups() * KEYS..].first_chunk().expect("a scale per key");
        let mut parts = [None; VECTORS];
        for v in 0..batch.vectors() {
            let visible = self.visible(v, at);
            self.weights[v].fill(0);
            if visible > 0 {
                let weighed = weigh(isa, &self.scores[v], plan.scale, visible, scales, &mut self.weights[v]);
                parts[v] = Some(weighed);
            }
        }
        let width = layout.dim_blocks() * LANES;
        for digit in 0..layout.digits {
            let panels = Panels {
                bytes: &block.codes[layout.digits * layout.k_plane() + digit * layout.v_plane()..],
                steps: KEYS / 2,
                count: layout.dim_blocks(),
                stride: KEYS / 2 * PANEL_STEP,
            };
            let dots = &mut self.dots[digit * VECTORS * width..];
            panel_dots(isa, panels, self.weights.as_flattened(), KEYS, batch.vectors(), dots, width);
        }
        for v in 0..batch.vectors() {
            let Some(part) = parts[v] else { continue };
            let factors = fold.admit(v, part.max, part.sum);
            let dim = layout.head_dim;
            let high = &self.dots[v * width..][..dim];
            let low = if layout.digits == 2 { &self.dots[(VECTORS + v) * width..][..dim] } else { &[] };
            fold_values(isa, high, low, part.unit, factors, &mut fold.values[v * dim..][..dim]);
        }
        self.gathered = own;
    }

    /// The blocks of one span.
    fn span(&mut self, span: usize, fold: &mut Fold) {
        for block in span * SPAN_BLOCKS..self.blocks().min((span + 1) * SPAN_BLOCKS) {
            self.block(block, fold);
        }
    }
}

impl Queries {
    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        let batches = self.batches.capacity() * size_of::<Batch>();
        2 * self.codes.capacity() + 4 * (self.units.capacity() + self.partial.capacity()) + batches
    }

    /// `Q_11` of every query head, in groups of 64.
    fn quantize(&mut self, workers: &Workers, q: &[f32], rows: usize, shape: AttentionShape, pairs: usize) {
        let groups = shape.head_dim.div_ceil(ATTENTION_GROUP);
        self.codes.resize(rows * shape.heads * 2 * pairs, 0);
        self.units.resize(rows * shape.heads * groups, 0.0);
        let (code_width, unit_width) = (shape.heads * 2 * pairs, shape.heads * groups);
        let (codes, units) = (Disjoint::new(&mut self.codes), Disjoint::new(&mut self.units));
        workers.pool.run(rows, &|row| {
            // SAFETY: each task has a row of its own.
            let (codes, units) = unsafe {
                (
                    codes.range(row * code_width..(row + 1) * code_width),
                    units.range(row * unit_width..(row + 1) * unit_width),
                )
            };
            let q = &q[row * shape.heads * shape.head_dim..][..shape.heads * shape.head_dim];
            let heads = codes.chunks_exact_mut(2 * pairs).zip(units.chunks_exact_mut(groups));
            for (q, (codes, units)) in q.chunks_exact(shape.head_dim).zip(heads) {
                codes[shape.head_dim..].fill(0);
                let groups = q.chunks(ATTENTION_GROUP).zip(codes.chunks_mut(ATTENTION_GROUP));
                for ((q, codes), unit) in groups.zip(units) {
                    *unit = quantize_group(ATTENTION_BITS, q, &mut codes[..q.len()]).unit;
                }
            }
        });
    }

    /// Cuts the step's rows and heads into batches.
    fn cut(&mut self, step: &Step, shape: AttentionShape) {
        let group = shape.heads / shape.kv_heads;
        self.batches.clear();
        for (window, of) in step.windows().iter().enumerate() {
            let together = if of.parents.is_some() { 1 } else { (VECTORS / group).max(1) };
            for row in (0..of.rows).step_by(together) {
                let rows = together.min(of.rows - row);
                for kv_head in 0..shape.kv_heads {
                    for head in (0..group).step_by(VECTORS) {
                        let heads = VECTORS.min(group - head);
                        let head = kv_head * group + head;
                        self.batches.push(Batch { window, row, rows, kv_head, head, heads });
                    }
                }
            }
        }
    }
}

/// [`crate::Device::attention`], or with `keys` [`crate::Device::full_attention`]: `q` and `out`
/// `[rows, heads, head_dim]`; `queries` is scratch.
pub(crate) fn attention(
    workers: &Workers,
    step: &Step,
    q: &[f32],
    shape: AttentionShape,
    pages: &KvPages,
    keys: Option<&[usize]>,
    queries: &mut Queries,
    out: &mut [f32],
) {
    assert!(shape.heads.is_multiple_of(shape.kv_heads), "whole groups of query heads");
    assert_eq!((pages.shape.kv_heads, pages.shape.head_dim), (shape.kv_heads, shape.head_dim), "K/V shape");
    queries.quantize(workers, q, step.rows().len(), shape, pages.layout.pairs());
    queries.cut(step, shape);
    let Queries { codes, units, batches, partial } = queries;
    let scale = (std::f64::consts::LOG2_E / (shape.head_dim as f64).sqrt()) as f32;
    let plan = Plan { workers, step, shape, pages, codes, units, scale, keys };
    let spans =
        |batch: &Batch| plan.last_key(batch.window, batch.row + batch.rows - 1) / (KEYS * SPAN_BLOCKS) + 1;
    let spans_max = batches.iter().map(spans).max().unwrap_or(0);
    let out = Disjoint::new(out);
    if spans_max > 1 && batches.len() < 4 * workers.pool.threads() {
        spans_apart(&plan, batches, spans_max, partial, &out);
        return;
    }
    workers.pool.run(batches.len(), &|task| {
        let mut walk = Walk::new(&plan, batches[task]);
        let (mut whole, mut part) = (Fold::new(shape.head_dim), Fold::new(shape.head_dim));
        for span in 0..spans(&batches[task]) {
            part.seen = [false; VECTORS];
            walk.span(span, &mut part);
            for v in 0..batches[task].vectors() {
                if part.seen[v] {
                    let values = &part.values[v * shape.head_dim..][..shape.head_dim];
                    whole.merge(v, part.max[v], part.sum[v], values);
                }
            }
        }
        finish(&plan, batches[task], &whole, &out);
    });
}

/// Every span of every batch is a task of its own; then the spans of each batch are folded in order.
/// `partial` holds `[batch, span, vector]` values followed by maximum, sum and 1 if anything was seen.
fn spans_apart(
    plan: &Plan<'_>,
    batches: &[Batch],
    spans: usize,
    partial: &mut Vec<f32>,
    out: &Disjoint<'_, f32>,
) {
    let dim = plan.shape.head_dim;
    let (each, pool) = (dim + 3, &plan.workers.pool);
    let span_len = VECTORS * each;
    partial.resize(batches.len() * spans * span_len, 0.0);
    let parts = Disjoint::new(&mut partial[..]);
    pool.run(batches.len() * spans, &|task| {
        let batch = batches[task / spans];
        let mut fold = Fold::new(dim);
        Walk::new(plan, batch).span(task % spans, &mut fold);
        // SAFETY: each task has a span of its own.
        let part = unsafe { parts.range(task * span_len..(task + 1) * span_len) };
        for (v, part) in part.chunks_exact_mut(each).enumerate() {
            part[..dim].copy_from_slice(&fold.values[v * dim..][..dim]);
            part[dim..].copy_from_slice(&[fold.max[v], fold.sum[v], fold.seen[v] as u32 as f32]);
        }
    });
    pool.run(batches.len(), &|task| {
        let mut whole = Fold::new(dim);
        for part in partial[task * spans * span_len..][..spans * span_len].chunks_exact(span_len) {
            for (v, part) in part.chunks_exact(each).enumerate() {
                if part[dim + 2] != 0.0 {
                    whole.merge(v, part[dim], part[dim + 1], &part[..dim]);
                }
            }
        }
        finish(plan, batches[task], &whole, out);
    });
}

/// Writes `values * (1 / sum)` of a batch.
fn finish(plan: &Plan<'_>, batch: Batch, fold: &Fold, out: &Disjoint<'_, f32>) {
    let AttentionShape { heads, head_dim, .. } = plan.shape;
    let first = plan.step.windows()[batch.window].first + batch.row;
    for v in 0..batch.vectors() {
        let at = ((first + v / batch.heads) * heads + batch.head + v % batch.heads) * head_dim;
        // SAFETY: batches share no head of a row.
        let out = unsafe { out.range(at..at + head_dim) };
        let inverse = 1.0 / fold.sum[v];
        for (y, o) in out.iter_mut().zip(&fold.values[v * head_dim..]) {
            *y = o * inverse;
        }
    }
}
