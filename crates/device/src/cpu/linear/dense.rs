//! Dense matrices as stored: `docs/arithmetic.md`, dense matrix. An f32 dot over 64 lanes, lane = k mod 64,
//! by fma from +0 in ascending order, then the halving tree; missing products are `fma(0, 0, lane)`.
//!
//! [`multiply`] is the entry. The scalar body is the definition; the vector body keeps lanes of several
//! outputs and rows in registers, so that weights and activations are loaded once for all of them.

use std::ops::Range;

use quant::{Dtype, Matrix, read_float_row};

use super::{
    BLOCK_MAX, DENSE_ROWS, Outputs, block_rows,
    kernel::Engine,
    tile::{Floats, tile},
};
use crate::cpu::isa::{Isa, Kind};

/// Lanes of the sum.
pub(super) const LANES: usize = 64;

/// What a body gets; sizes were checked against each other.
pub(super) struct Args<'a> {
    pub(super) dtype: Dtype,
    pub(super) cols: usize,
    /// Outputs worked on.
    pub(super) outputs: Range<usize>,
    /// All weights.
    weights: &'a [u8],
    /// Rows of the call, in blocks of [`block_rows`], and the blocks worked on.
    call_rows: usize,
    pub(super) blocks: Range<usize>,
    /// Activations `[rows, cols]`.
    x: &'a [f32],
    /// The same packed, if the caller has them.
    pub(super) floats: Option<&'a Floats>,
    out: &'a Outputs<'a>,
    /// Row of `out` for row 0 of `x`.
    to: usize,
}

impl Args<'_> {
    #[inline(always)]
    pub(super) fn weights(&self, output: usize) -> &[u8] {
        let bytes = self.cols * self.dtype.size();
        &self.weights[output * bytes..(output + 1) * bytes]
    }

    #[inline(always)]
    fn x(&self, row: usize) -> &[f32] {
        self.rows_of(row..row + 1)
    }

    #[inline(always)]
    pub(super) fn rows_of(&self, rows: Range<usize>) -> &[f32] {
        &self.x[rows.start * self.cols..rows.end * self.cols]
    }

    /// Rows of block `at`.
    #[inline(always)]
    pub(super) fn block(&self, at: usize) -> Range<usize> {
        block_rows(self.call_rows, BLOCK_MAX, at)
    }

    /// Rows worked on.
    #[inline(always)]
    fn rows(&self) -> Range<usize> {
        self.block(self.blocks.start).start..self.block(self.blocks.end - 1).end
    }

    /// The task's outputs of row `row`.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // as `Disjoint::range`
    pub(super) fn out_row(&self, row: usize) -> &mut [f32] {
        // SAFETY: `multiply`'s caller gives each output of each row to one task; it takes a row at a time.
        unsafe { self.out.row(self.to + row, self.outputs.clone()) }
    }

    #[inline(always)]
    fn put(&self, row: usize, output: usize, value: f32) {
        // SAFETY: `multiply`'s caller gives each output of each row to one task.
        unsafe { self.out.row(self.to + row, output..output + 1)[0] = value };
    }
}

/// `out[to + row][output] = weights[output] . x[row]` for the given outputs and blocks of `rows` rows.
///
/// # Safety
/// No other task may write these outputs of these rows at the same time.
pub(super) unsafe fn multiply(
    isa: Isa,
    matrix: &Matrix,
    dtype: Dtype,
    outputs: Range<usize>,
    x: &[f32],
    floats: Option<&Floats>,
    rows: usize,
    blocks: Range<usize>,
    out: &Outputs<'_>,
    to: usize,
) {
    let cols = matrix.cols();
    assert!(outputs.end <= matrix.rows() && rows * cols <= x.len(), "outputs {outputs:?}, {rows} rows");
    let weights = matrix.codes();
    assert_eq!(weights.len(), matrix.rows() * cols * dtype.size(), "dense weights");
    let args = Args { dtype, cols, outputs, weights, call_rows: rows, blocks, x, floats, out, to };
    match isa.kind() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, and the sizes were checked.
        Kind::Avx512 | Kind::Avx512Vnni => unsafe { x86::avx512(&args) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Kind::Avx2 => unsafe { x86::avx2(&args) },
        _ => scalar(&args),
    }
}

/// The definition.
fn scalar(args: &Args<'_>) {
    let mut weights = vec![0f32; args.cols];
    for output in args.outputs.clone() {
        read_float_row(args.dtype, args.weights(output), &mut weights);
        for row in args.rows() {
            let mut lanes = [0f32; LANES];
            for (weights, x) in weights.chunks(LANES).zip(args.x(row).chunks(LANES)) {
                for (lane, sum) in lanes.iter_mut().enumerate() {
                    let (w, x) = if lane < x.len() { (weights[lane], x[lane]) } else { (0.0, 0.0) };
                    *sum = w.mul_add(x, *sum);
                }
            }
            args.put(row, output, tree(&mut lanes));
        }
    }
}

/// `lane[i] += lane[i + h]`, h from half the lanes down to 1; a power of two of lanes.
#[inline(always)]
fn tree(lanes: &mut [f32]) -> f32 {
    let mut half = lanes.len() / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// The vector body (loops count, as in `super::kernel`); `V` vectors make 64 lanes. [`DENSE_ROWS`] rows and
/// more go through [`tile`] with `O` outputs at a time, fewer through [`dots`] with `F`, `R` rows at a time.
#[inline(always)]
unsafe fn vector<E: Engine, const V: usize, const O: usize, const R: usize, const F: usize>(args: &Args<'_>) {
    // SAFETY: the caller has the engine's instructions; rows and outputs are inside.
    unsafe {
        let rows = args.rows();
        if rows.len() >= DENSE_ROWS {
            return tile::<E, V, O>(args);
        }
        let several = rows.start..rows.start + rows.len() / R * R;
        for row in several.clone().step_by(R) {
            some_rows::<E, V, R, F>(args, row);
        }
        for row in several.end..rows.end {
            some_rows::<E, V, 1, F>(args, row);
        }
    }
}

/// All outputs of the task for `R` rows.
#[inline(always)]
unsafe fn some_rows<E: Engine, const V: usize, const R: usize, const F: usize>(args: &Args<'_>, row: usize) {
    // SAFETY: as above.
    unsafe {
        let mut output = args.outputs.start;
        while output + F <= args.outputs.end {
            dots::<E, V, R, F>(args, row, output);
            output += F;
        }
        for output in output..args.outputs.end {
            dots::<E, V, R, 1>(args, row, output);
        }
    }
}

/// The dots of `R` rows and `O` outputs.
#[inline(always)]
unsafe fn dots<E: Engine, const V: usize, const R: usize, const O: usize>(
    args: &Args<'_>,
    row: usize,
    output: usize,
) {
    let size = args.dtype.size();
    // SAFETY of all blocks: `Engine`; pointers stay inside the rows, and the last, partial step reads padded
    // copies.
    let mut lanes = unsafe { [[[E::splat(0.0); V]; O]; R] };
    let whole = args.cols / LANES * LANES;
    let mut weights = [args.weights.as_ptr(); O];
    let mut x = [args.x.as_ptr(); R];
    for o in 0..O {
        weights[o] = args.weights(output + o).as_ptr();
    }
    for r in 0..R {
        x[r] = args.x(row + r).as_ptr();
    }
    for _ in 0..whole / LANES {
        unsafe {
            // Once per dtype, so that the choice is outside the loop over lanes.
            match args.dtype {
                Dtype::Bf16 => step::<E, V, R, O>(Dtype::Bf16, &weights, &x, &mut lanes),
                Dtype::F16 => step::<E, V, R, O>(Dtype::F16, &weights, &x, &mut lanes),
                Dtype::F32 => step::<E, V, R, O>(Dtype::F32, &weights, &x, &mut lanes),
            }
            for o in 0..O {
                weights[o] = weights[o].add(LANES * size);
            }
            for r in 0..R {
                x[r] = x[r].add(LANES);
            }
        }
    }
    if whole < args.cols {
        let mut weight_tail = [[0u8; LANES * 4]; O];
        let mut x_tail = [[0f32; LANES]; R];
        for o in 0..O {
            let rest = &args.weights(output + o)[whole * size..];
            weight_tail[o][..rest.len()].copy_from_slice(rest);
        }
        for r in 0..R {
            let rest = &args.x(row + r)[whole..];
            x_tail[r][..rest.len()].copy_from_slice(rest);
        }
        for o in 0..O {
            weights[o] = weight_tail[o].as_ptr();
        }
        for r in 0..R {
            x[r] = x_tail[r].as_ptr();
        }
        unsafe { step::<E, V, R, O>(args.dtype, &weights, &x, &mut lanes) };
    }
    for r in 0..R {
        for o in 0..O {
            args.put(row + r, output + o, unsafe { vector_tree::<E, V>(&mut lanes[r][o]) });
        }
    }
}

/// One fma in each of the 64 lanes of all dots.
#[inline(always)]
unsafe fn step<E: Engine, const V: usize, const R: usize, const O: usize>(
    dtype: Dtype,
    weights: &[*const u8; O],
    x: &[*const f32; R],
    lanes: &mut [[[E::Floats; V]; O]; R],
) {
    for v in 0..V {
        let at = v * E::LANES;
        // SAFETY: the caller's pointers are good for 64 elements.
        unsafe {
            let mut loaded = [E::splat(0.0); O];
            for o in 0..O {
                loaded[o] = E::load(dtype, weights[o].add(at * dtype.size()));
            }
            for r in 0..R {
                let x = E::load(Dtype::F32, x[r].add(at).cast());
                for o in 0..O {
                    lanes[r][o][v] = E::fma(loaded[o], x, lanes[r][o][v]);
                }
            }
        }
    }
}

/// [`tree`] over 64 lanes in `V` vectors: whole vectors first, then inside the last one.
#[inline(always)]
unsafe fn vector_tree<E: Engine, const V: usize>(lanes: &mut [E::Floats; V]) -> f32 {
    let mut half = V / 2;
    // SAFETY: `Engine`; the buffer holds the widest vector.
    unsafe {
        while half > 0 {
            for v in 0..half {
                lanes[v] = E::add(lanes[v], lanes[v + half]);
            }
            half /= 2;
        }
        let mut last = [0f32; 16];
        E::store(lanes[0], last.as_mut_ptr());
        tree(&mut last[..E::LANES])
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{super::x86, Args, vector};

    // Sums of 6 rows by 4 outputs fill 24 of 32 registers, all lanes of 3 rows by 2 outputs as many.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2")]
    pub(super) unsafe fn avx512(args: &Args<'_>) {
        // SAFETY: the caller's promise.
        unsafe { vector::<x86::Avx512, 4, 4, 3, 2>(args) }
    }

    // Sums of 6 rows by 2 outputs fill 12 of 16 registers, all lanes of one dot 8.
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2")]
    pub(super) unsafe fn avx2(args: &Args<'_>) {
        // SAFETY: the caller's promise.
        unsafe { vector::<x86::Avx2, 8, 2, 1, 1>(args) }
    }
}
