//! Many rows of a dense matrix: the same lanes and trees as [`super::dense`], from packed panels.
//!
//! A task widens its weights to f32 once; the inputs of all tasks of a call are copied side by side once
//! ([`Floats`]). Both lie in the order in which the inner loop walks them, which is loads and fmas alone. One
//! vector of the 64 lanes is worked on at a time, so that a block of several rows by several outputs has its
//! sums in registers: for 6 rows and 4 outputs 10 loads feed 24 fmas.

use std::cell::RefCell;

use quant::Dtype;

use super::{
    activations::{BLOCK_MAX, block_rows, blocks},
    dense::{Args, LANES},
    kernel::Engine,
};
use crate::cpu::pool::{Disjoint, Pool};

/// Lanes that lie together: those of the widest vector.
const LINE: usize = 16;
/// Lines of the 64 lanes.
const LINES: usize = LANES / LINE;
/// Groups of outputs that share inputs in the nearest cache.
const GROUPS: usize = 2;
/// Most dots of a group: [`BLOCK_MAX`] rows by 4 outputs.
const DOTS_MAX: usize = BLOCK_MAX * 4;

/// Floats of a vector or two, on the border of a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([f32; LINE]);

/// At least `count` lines; what they held is anything.
fn room(lines: &mut Vec<Line>, count: usize) -> &mut [Line] {
    if lines.len() < count {
        lines.resize(count, Line([0.0; LINE]));
    }
    &mut lines[..count]
}

/// Rows of inputs in the order of the inner loop: per block of rows `[line of lanes][step of 64][row]`, where
/// columns that are not there are 0.
#[derive(Default)]
pub(in crate::cpu) struct Floats {
    steps: usize,
    lines: Vec<Line>,
}

impl Floats {
    /// Takes `x` `[rows, cols]` in blocks of at most [`BLOCK_MAX`] rows.
    pub(super) fn pack(&mut self, pool: &Pool, x: &[f32], rows: usize) {
        let cols = x.len() / rows;
        self.steps = cols.div_ceil(LANES);
        let size = self.steps * LINES;
        let lines = Disjoint::new(room(&mut self.lines, rows * size));
        pool.run(blocks(rows, BLOCK_MAX), &|at| {
            let block = block_rows(rows, BLOCK_MAX, at);
            // SAFETY: each block belongs to one task.
            let lines = unsafe { lines.range(block.start * size..block.end * size) };
            pack_rows(&x[block.start * cols..block.end * cols], block.len(), lines);
        });
    }

    /// The rows from `first` on, where a block starts.
    fn block(&self, first: usize) -> &[Line] {
        &self.lines[first * self.steps * LINES..]
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.lines.capacity() * size_of::<Line>()
    }
}

/// One block of rows of [`Floats`].
fn pack_rows(x: &[f32], rows: usize, lines: &mut [Line]) {
    let cols = x.len() / rows;
    let steps = cols.div_ceil(LANES);
    for (row, x) in x.chunks_exact(cols).enumerate() {
        let (whole, rest) = x.as_chunks::<LANES>();
        let mut put = |step: usize, x: &[f32; LANES]| {
            for (at, line) in x.as_chunks::<LINE>().0.iter().enumerate() {
                lines[(at * steps + step) * rows + row].0 = *line;
            }
        };
        for (step, x) in whole.iter().enumerate() {
            put(step, x);
        }
        if !rest.is_empty() {
            let mut padded = [0f32; LANES];
            padded[..rest.len()].copy_from_slice(rest);
            put(whole.len(), &padded);
        }
    }
}

/// What one thread packs into; grows to the largest task and is kept.
#[derive(Default)]
struct Scratch {
    /// `[outputs / O][line of lanes][step][O]`.
    weights: Vec<Line>,
    /// Inputs of a task that came without [`Floats`].
    inputs: Vec<Line>,
    /// Lanes of a block of rows: `[vector of lanes][group][row][O]`, vectors side by side.
    lanes: Vec<Line>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// All rows and outputs of the task; `V` vectors make 64 lanes, [`BLOCK_MAX`] rows by `O` sums at a time fill
/// the registers.
///
/// # Safety
/// The processor has the engine's instructions; rows and outputs are inside.
#[inline(always)]
pub(super) unsafe fn tile<E: Engine, const V: usize, const O: usize>(args: &Args<'_>) {
    let mut scratch = SCRATCH.take();
    let steps = args.cols.div_ceil(LANES);
    let groups = args.outputs.len().div_ceil(O);
    let weights = room(&mut scratch.weights, groups * O * steps * LINES);
    let lanes = room(&mut scratch.lanes, LINES * GROUPS * DOTS_MAX + LINE);
    // SAFETY of all blocks: the caller's promise.
    unsafe { pack_weights::<E, O>(args, steps, weights) };
    let mut own = &mut [][..];
    if args.floats.is_none() {
        own = room(&mut scratch.inputs, BLOCK_MAX * steps * LINES);
    }
    for at in args.blocks.clone() {
        let rows = args.block(at);
        let (first, count) = (rows.start, rows.len());
        let inputs = match args.floats {
            Some(floats) => &floats.block(first)[..count * steps * LINES],
            None => {
                pack_rows(args.rows_of(rows), count, own);
                &own[..count * steps * LINES]
            }
        };
        unsafe {
            match count {
                1 => rows_of::<E, V, 1, O>(args, first, weights, inputs, lanes),
                2 => rows_of::<E, V, 2, O>(args, first, weights, inputs, lanes),
                3 => rows_of::<E, V, 3, O>(args, first, weights, inputs, lanes),
                4 => rows_of::<E, V, 4, O>(args, first, weights, inputs, lanes),
                5 => rows_of::<E, V, 5, O>(args, first, weights, inputs, lanes),
                _ => rows_of::<E, V, BLOCK_MAX, O>(args, first, weights, inputs, lanes),
            }
        }
    }
    SCRATCH.set(scratch);
}

/// Widens the task's weights; outputs and columns that are not there are 0.
#[inline(always)]
unsafe fn pack_weights<E: Engine, const O: usize>(args: &Args<'_>, steps: usize, to: &mut [Line]) {
    // Once per dtype, so that the choice is outside the loops.
    // SAFETY: the caller's promise.
    unsafe {
        match args.dtype {
            Dtype::Bf16 => pack_weights_of::<E, O>(Dtype::Bf16, args, steps, to),
            Dtype::F16 => pack_weights_of::<E, O>(Dtype::F16, args, steps, to),
            Dtype::F32 => pack_weights_of::<E, O>(Dtype::F32, args, steps, to),
        }
    }
}

#[inline(always)]
unsafe fn pack_weights_of<E: Engine, const O: usize>(
    dtype: Dtype,
    args: &Args<'_>,
    steps: usize,
    to: &mut [Line],
) {
    let bytes = LANES * dtype.size();
    for output in 0..to.len() / (steps * LINES) {
        let row: &[u8] =
            if output < args.outputs.len() { args.weights(args.outputs.start + output) } else { &[] };
        for step in 0..steps {
            let mut padded = [0u8; LANES * 4];
            let rest = &row[row.len().min(step * bytes)..];
            let from = if rest.len() < bytes {
                padded[..rest.len()].copy_from_slice(rest);
                &padded[..]
            } else {
                rest
            };
            for lane in (0..LANES).step_by(E::LANES) {
                let line = ((output / O * LINES + lane / LINE) * steps + step) * O + output % O;
                let to = &mut to[line].0[lane % LINE..];
                // SAFETY: `from` has 64 weights, and a line whole vectors.
                unsafe { E::store(E::load(dtype, from[lane * dtype.size()..].as_ptr()), to.as_mut_ptr()) };
            }
        }
    }
}

/// All outputs of the task for `R` rows from row `row` on.
#[inline(always)]
unsafe fn rows_of<E: Engine, const V: usize, const R: usize, const O: usize>(
    args: &Args<'_>,
    row: usize,
    weights: &[Line],
    inputs: &[Line],
    lanes: &mut [Line],
) {
    let steps = inputs.len() / (LINES * R);
    let size = steps * LINES * O;
    let lanes = lanes.as_mut_ptr().cast::<f32>();
    for first in (0..weights.len() / size).step_by(GROUPS) {
        let groups = GROUPS.min(weights.len() / size - first);
        for v in 0..V {
            let (line, lane) = (v * E::LANES / LINE, v * E::LANES % LINE);
            let x = inputs[line * steps * R..][..steps * R].as_ptr().cast::<f32>();
            for group in 0..groups {
                let weights = weights[(first + group) * size + line * steps * O..][..steps * O].as_ptr();
                // SAFETY: both have all steps; there is room for the lanes of all groups.
                unsafe {
                    let lanes = lanes.add((v * GROUPS + group) * R * O * E::LANES);
                    strip::<E, R, O>(steps, weights.cast::<f32>().add(lane), x.add(lane), lanes);
                }
            }
        }
        let mut results = [0f32; GROUPS * DOTS_MAX + LINE];
        for dot in (0..groups * R * O).step_by(E::LANES) {
            // SAFETY: the lanes of all groups are filled, and a vector may end beyond them.
            unsafe { E::store(trees::<E, V>(lanes, GROUPS * R * O, dot), results[dot..].as_mut_ptr()) };
        }
        for r in 0..R {
            let out = &mut args.out_row(row + r)[first * O..];
            for (group, out) in out.chunks_mut(O).take(groups).enumerate() {
                out.copy_from_slice(&results[(group * R + r) * O..][..out.len()]);
            }
        }
    }
}

/// One vector of the lanes of `R` rows by `O` outputs.
#[inline(always)]
unsafe fn strip<E: Engine, const R: usize, const O: usize>(
    steps: usize,
    mut weights: *const f32,
    mut x: *const f32,
    lanes: *mut f32,
) {
    // SAFETY: the caller's pointers are good for all steps and sums.
    unsafe {
        let mut sums = [[E::splat(0.0); O]; R];
        for _ in 0..steps {
            let mut loaded = [E::splat(0.0); O];
            for o in 0..O {
                loaded[o] = E::load(Dtype::F32, weights.add(o * LINE).cast());
            }
            for r in 0..R {
                let x = E::load(Dtype::F32, x.add(r * LINE).cast());
                for o in 0..O {
                    sums[r][o] = E::fma(loaded[o], x, sums[r][o]);
                }
            }
            weights = weights.add(O * LINE);
            x = x.add(R * LINE);
        }
        for r in 0..R {
            for o in 0..O {
                E::store(sums[r][o], lanes.add((r * O + o) * E::LANES));
            }
        }
    }
}

/// The trees of as many dots from `first` on as a vector has lanes: the vectors of a dot first, which are
/// `apart` vectors from each other, then inside the last one.
#[inline(always)]
unsafe fn trees<E: Engine, const V: usize>(lanes: *const f32, apart: usize, first: usize) -> E::Floats {
    // SAFETY: the caller's lanes.
    unsafe {
        let mut sums = [E::splat(0.0); LINE];
        for dot in 0..E::LANES {
            let mut parts = [E::splat(0.0); V];
            for v in 0..V {
                parts[v] = E::load(Dtype::F32, lanes.add((v * apart + first + dot) * E::LANES).cast());
            }
            let mut half = V / 2;
            while half > 0 {
                for v in 0..half {
                    parts[v] = E::add(parts[v], parts[v + half]);
                }
                half /= 2;
            }
            sums[dot] = parts[0];
        }
        E::trees(&sums)
    }
}
