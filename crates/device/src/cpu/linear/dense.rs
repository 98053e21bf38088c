//! Dense matrices as stored: `docs/arithmetic.md`, dense matrix. An f32 dot over 64 lanes, lane = k mod 64,
//! by fma from +0 in ascending order, then the halving tree; missing products are `fma(0, 0, lane)`.
//!
//! [`multiply`] is the entry. The scalar body is the definition; the vector body keeps lanes of several
//! outputs and rows in registers, so that weights and activations are loaded once for all of them.

use std::ops::Range;

use quant::{Dtype, Matrix, read_float_row};

use super::{DENSE_OUTPUTS, Outputs, kernel::Engine};
use crate::cpu::isa::{Isa, Kind};

/// Lanes of the sum.
const LANES: usize = 64;
/// Columns that [`many`] takes at a time: inputs, weights and lanes of a block stay in the nearest cache.
const COLUMNS: usize = 512;
/// The same in steps of 64.
const STEPS: usize = COLUMNS / LANES;

/// What a body gets; sizes were checked against each other.
struct Args<'a> {
    dtype: Dtype,
    cols: usize,
    /// Outputs worked on.
    outputs: Range<usize>,
    /// All weights.
    weights: &'a [u8],
    rows: Range<usize>,
    /// Activations `[rows, cols]`.
    x: &'a [f32],
    out: &'a Outputs<'a>,
    /// Row of `out` for row 0 of `x`.
    to: usize,
}

impl Args<'_> {
    #[inline(always)]
    fn weights(&self, output: usize) -> &[u8] {
        let bytes = self.cols * self.dtype.size();
        &self.weights[output * bytes..(output + 1) * bytes]
    }

    #[inline(always)]
    fn x(&self, row: usize) -> &[f32] {
        &self.x[row * self.cols..(row + 1) * self.cols]
    }

    #[inline(always)]
    fn put(&self, row: usize, output: usize, value: f32) {
        // SAFETY: `multiply`'s caller gives each output of each row to one task.
        unsafe { self.out.row(self.to + row, output..output + 1)[0] = value };
    }
}

/// `out[to + row][output] = weights[output] . x[row]` for the given outputs and rows.
///
/// # Safety
/// No other task may write these outputs of these rows at the same time.
pub(super) unsafe fn multiply(
    isa: Isa,
    matrix: &Matrix,
    dtype: Dtype,
    outputs: Range<usize>,
    x: &[f32],
    rows: Range<usize>,
    out: &Outputs<'_>,
    to: usize,
) {
    let cols = matrix.cols();
    assert!(outputs.len() <= DENSE_OUTPUTS, "outputs {outputs:?} of one task");
    assert!(outputs.end <= matrix.rows() && rows.end * cols <= x.len(), "outputs {outputs:?}, rows {rows:?}");
    let weights = matrix.codes();
    assert_eq!(weights.len(), matrix.rows() * cols * dtype.size(), "dense weights");
    let args = Args { dtype, cols, outputs, weights, rows, x, out, to };
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
        for row in args.rows.clone() {
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

/// The vector body (loops count, as in `super::kernel`); `V` vectors make 64 lanes. `R` rows at a time go
/// through [`many`], with `O` outputs at a time; rows that are left, and the row of a decode step, through
/// [`dots`], with `F`.
#[inline(always)]
unsafe fn vector<E: Engine, const V: usize, const R: usize, const O: usize, const F: usize>(args: &Args<'_>) {
    let mut row = args.rows.start;
    // SAFETY: the caller has the engine's instructions; rows and outputs are inside.
    unsafe {
        while row + R <= args.rows.end {
            many::<E, V, R, O>(args, row);
            row += R;
        }
        for row in row..args.rows.end {
            let mut output = args.outputs.start;
            while output + F <= args.outputs.end {
                dots::<E, V, 1, F>(args, row, output);
                output += F;
            }
            for output in output..args.outputs.end {
                dots::<E, V, 1, 1>(args, row, output);
            }
        }
    }
}

/// All outputs of the task for `R` rows: [`COLUMNS`] columns after another, one vector of lanes at a time.
/// With a part of the lanes a block of `R` by `O` dots fits the registers, and few loads feed many fmas. The
/// inputs are copied side by side first: rows a power of two apart would push each other out of the nearest
/// cache.
#[inline(always)]
unsafe fn many<E: Engine, const V: usize, const R: usize, const O: usize>(args: &Args<'_>, row: usize) {
    let count = args.outputs.len();
    // SAFETY of all blocks: `Engine`; pointers stay inside the rows and the padded copies of their ends.
    let mut lanes = unsafe { [[[E::splat(0.0); V]; R]; DENSE_OUTPUTS] };
    let mut x = unsafe { [[[E::splat(0.0); R]; STEPS]; V] };
    for first in (0..args.cols).step_by(COLUMNS) {
        let steps = (args.cols - first).div_ceil(LANES).min(STEPS);
        unsafe { gather::<E, V, R>(args, row, first, steps, &mut x) };
        let mut o = 0;
        while o < count {
            let several = o + O <= count;
            for v in 0..V {
                unsafe {
                    if several {
                        strip::<E, V, R, O>(args, first, steps, o, v, &x[v], &mut lanes);
                    } else {
                        strip::<E, V, R, 1>(args, first, steps, o, v, &x[v], &mut lanes);
                    }
                }
            }
            o += if several { O } else { 1 };
        }
    }
    for o in 0..count {
        for r in 0..R {
            args.put(row + r, args.outputs.start + o, unsafe { vector_tree::<E, V>(&mut lanes[o][r]) });
        }
    }
}

/// Copies `steps` times 64 columns of `R` rows from column `first` on to `x` `[vector of lanes][step][row]`.
#[inline(always)]
unsafe fn gather<E: Engine, const V: usize, const R: usize>(
    args: &Args<'_>,
    row: usize,
    first: usize,
    steps: usize,
    x: &mut [[[E::Floats; R]; STEPS]; V],
) {
    for step in 0..steps {
        for r in 0..R {
            let from = &args.x(row + r)[first + step * LANES..];
            let mut padded = [0f32; LANES];
            let from = if from.len() < LANES {
                padded[..from.len()].copy_from_slice(from);
                &padded[..]
            } else {
                from
            };
            for v in 0..V {
                // SAFETY: `Engine`; `from` has 64 elements or more.
                x[v][step][r] = unsafe { E::load(Dtype::F32, from[v * E::LANES..].as_ptr().cast()) };
            }
        }
    }
}

/// Goes on with vector `v` of the lanes of `R` rows by `O` outputs from output `o` of the task on, over
/// `steps` times 64 columns from column `first` on.
#[inline(always)]
unsafe fn strip<E: Engine, const V: usize, const R: usize, const O: usize>(
    args: &Args<'_>,
    first: usize,
    steps: usize,
    o: usize,
    v: usize,
    x: &[[E::Floats; R]; STEPS],
    lanes: &mut [[[E::Floats; V]; R]; DENSE_OUTPUTS],
) {
    let size = args.dtype.size();
    let whole = steps.min((args.cols - first) / LANES);
    // SAFETY: `Engine`; weights are read inside their rows, the end of a row from a padded copy.
    unsafe {
        let mut sums = [[E::splat(0.0); O]; R];
        let mut weights = [args.weights.as_ptr(); O];
        for i in 0..O {
            weights[i] = args.weights(args.outputs.start + o + i).as_ptr().add((first + v * E::LANES) * size);
            for r in 0..R {
                sums[r][i] = lanes[o + i][r][v];
            }
        }
        match args.dtype {
            Dtype::Bf16 => strip_steps::<E, R, O>(Dtype::Bf16, &weights, &x[..whole], &mut sums),
            Dtype::F16 => strip_steps::<E, R, O>(Dtype::F16, &weights, &x[..whole], &mut sums),
            Dtype::F32 => strip_steps::<E, R, O>(Dtype::F32, &weights, &x[..whole], &mut sums),
        }
        if whole < steps {
            let mut tails = [[0u8; LANES * 4]; O];
            for i in 0..O {
                let rest = &args.weights(args.outputs.start + o + i)[(first + whole * LANES) * size..];
                tails[i][..rest.len()].copy_from_slice(rest);
                weights[i] = tails[i].as_ptr().add(v * E::LANES * size);
            }
            strip_steps::<E, R, O>(args.dtype, &weights, &x[whole..steps], &mut sums);
        }
        for i in 0..O {
            for r in 0..R {
                lanes[o + i][r][v] = sums[r][i];
            }
        }
    }
}

/// One fma in every dot of a strip for each step of `x`, 64 columns apart.
#[inline(always)]
unsafe fn strip_steps<E: Engine, const R: usize, const O: usize>(
    dtype: Dtype,
    weights: &[*const u8; O],
    x: &[[E::Floats; R]],
    sums: &mut [[E::Floats; O]; R],
) {
    let mut kept = *sums;
    for step in 0..x.len() {
        // SAFETY: `Engine`; the caller's weights are good for all steps.
        unsafe {
            let mut loaded = [E::splat(0.0); O];
            for o in 0..O {
                loaded[o] = E::load(dtype, weights[o].add(step * LANES * dtype.size()));
            }
            for r in 0..R {
                for o in 0..O {
                    kept[r][o] = E::fma(loaded[o], x[step][r], kept[r][o]);
                }
            }
        }
    }
    *sums = kept;
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

    // Sums of 6 rows by 4 outputs fill 24 of 32 registers; two dots of a row 8.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2")]
    pub(super) unsafe fn avx512(args: &Args<'_>) {
        // SAFETY: the caller's promise.
        unsafe { vector::<x86::Avx512, 4, 6, 4, 2>(args) }
    }

    // Sums of 4 rows by 3 outputs fill 12 of 16 registers, one dot of a row 8.
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2")]
    pub(super) unsafe fn avx2(args: &Args<'_>) {
        // SAFETY: the caller's promise.
        unsafe { vector::<x86::Avx2, 8, 4, 3, 1>(args) }
    }
}
