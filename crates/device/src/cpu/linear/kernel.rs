//! The product of one panel of a grouped matrix with one block of rows: the law of `docs/arithmetic.md`,
//! grouped matrix, in one place. [`multiply`] is the entry; which body runs never changes a bit.
//!
//! The scalar body below is the definition. The vector body is written once over [`Engine`], the few
//! operations an instruction set brings; its registers hold one output row per lane, so integer sums, scales
//! and slice sums of different rows never meet. A panel is read once for all rows of a block.

use quant::{Dtype, Scheme, Zero};

use super::{
    activations::{BLOCK_MAX, Block, GroupUnit, Words},
    layout::{PANEL, QUADS, SLICE, TILE, UNIT, VECTOR, group_params, read_quad, tile_unit},
};
use crate::cpu::isa::{Isa, Kind};

/// Results of a panel: `[row of the block][row of the panel]`.
pub(in crate::cpu) type PanelOut = [[f32; PANEL]; BLOCK_MAX];

/// Room for the results of one panel.
pub(in crate::cpu) fn new_panel_out() -> PanelOut {
    [[0.0; PANEL]; BLOCK_MAX]
}

/// One panel of weights.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    pub(super) scheme: Scheme,
    pub(super) codes: &'a [u8],
    pub(super) params: &'a [u8],
}

/// What a body gets; sizes were checked against each other.
#[derive(Clone, Copy)]
struct Args<'a> {
    panel: Panel<'a>,
    block: Block<'a>,
    groups: usize,
}

type Body = unsafe fn(&Args<'_>, &mut PanelOut);

/// `out[row][lane] = sum over inputs of weight[lane] * x[row]` for the rows of `block`; other rows of `out`
/// are left.
pub(super) fn multiply(isa: Isa, panel: Panel<'_>, block: Block<'_>, out: &mut PanelOut) {
    let Scheme { bits, group, zero, scales } = panel.scheme;
    let groups = block.groups.len() / block.rows;
    let floats = if zero == Zero::Affine { 2 } else { 1 };
    assert!((1..=BLOCK_MAX).contains(&block.rows), "{} rows in a block", block.rows);
    assert_eq!(block.words.len(), groups * group / 4 * block.rows, "activations and groups");
    assert_eq!(panel.codes.len(), groups * group * PANEL / 8 * bits as usize, "codes and activations");
    assert_eq!(panel.params.len(), groups * floats * PANEL * scales.size(), "scales and activations");
    let body = body(isa.kind(), bits, block.rows);
    // SAFETY: the body is for an instruction set this processor has, and the sizes were checked.
    unsafe { body(&Args { panel, block, groups }, out) };
}

/// The definition. Works on codes in plain order ([`super::activations::Order::Plain`]).
fn scalar(args: &Args<'_>, out: &mut PanelOut) {
    let Args { panel, block, groups } = *args;
    let Scheme { bits, group: len, .. } = panel.scheme;
    let center = panel.scheme.center();
    for (row, out) in out.iter_mut().enumerate().take(block.rows) {
        for (lane, out) in out.iter_mut().enumerate() {
            let mut total = 0f32;
            for slice in (0..groups).step_by(SLICE / len) {
                let mut sum = 0f32;
                for group in slice..groups.min(slice + SLICE / len) {
                    let mut exact = 0i32;
                    for unit in group * len / UNIT..(group + 1) * len / UNIT {
                        let codes = tile_unit(bits as usize, panel.codes, unit, lane / TILE);
                        for q in 0..QUADS {
                            let weights = read_quad(bits as usize, codes, lane % TILE, q);
                            let words = block.words[(unit * QUADS + q) * block.rows + row];
                            for (pair, word) in weights.chunks(2).zip(words) {
                                exact += (pair[0] as i32 - center) * (word as i16) as i32;
                                exact += (pair[1] as i32 - center) * (word as i32 >> 16);
                            }
                        }
                    }
                    let x = block.groups[group * block.rows + row];
                    let (scale, bias) = group_params(panel.scheme, panel.params, group, lane);
                    sum = (exact as f32).mul_add(scale * x.unit, sum);
                    if panel.scheme.zero == Zero::Affine {
                        let bias = (center as f32).mul_add(scale, bias);
                        sum = bias.mul_add(x.sum_unit, sum);
                    }
                }
                total += sum;
            }
            *out = total;
        }
    }
}

/// What an instruction set brings: vectors of [`Self::LANES`] 32-bit lanes, one output row each.
///
/// # Safety
/// Every function needs the instruction set, and pointers that may be read for the bytes it names.
pub(super) trait Engine {
    /// Output rows of one vector: 16, or 8 for half a tile.
    const LANES: usize;
    /// Four inputs of every lane, ready to be multiplied.
    type Weights: Copy;
    /// Exact integer sums, in as many parts as the engine likes.
    type Sums: Copy;
    /// Floats.
    type Floats: Copy;

    /// Sums that start at `value`.
    unsafe fn start(value: i32) -> Self::Sums;
    /// Quad `Q` of a unit of `BITS` vectors at `unit`.
    unsafe fn quad<const BITS: usize, const Q: usize>(unit: *const u8) -> Self::Weights;
    /// Adds the products of four inputs; `words` is the quad's two words in the engine's order.
    unsafe fn dot(sums: Self::Sums, weights: Self::Weights, words: *const Words) -> Self::Sums;
    /// The sums, each rounded once.
    unsafe fn finish(sums: Self::Sums) -> Self::Floats;
    /// The same float in every lane.
    unsafe fn splat(value: f32) -> Self::Floats;
    /// `a * b`.
    unsafe fn multiply(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a + b`.
    unsafe fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b + c`, fused.
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// Widens `LANES` stored floats.
    unsafe fn load(dtype: Dtype, from: *const u8) -> Self::Floats;
    /// Stores `LANES` floats.
    unsafe fn store(values: Self::Floats, to: *mut f32);
    /// Halving trees inside the first `LANES` vectors: `lane[i] += lane[i + h]` for h from half the lanes
    /// down to 1; lane n is the result of vector n.
    unsafe fn trees(vectors: &[Self::Floats; 16]) -> Self::Floats;
    /// Asks for the cache line at `at`, which need not exist.
    unsafe fn prefetch(at: *const u8);
}

/// Bytes a kernel of few rows asks for ahead of its reading.
const AHEAD: usize = 2048;
/// Blocks of more rows leave prefetching to the processor: they compute longer than memory takes.
const AHEAD_ROWS: usize = 2;

/// The vector body for blocks of `R` rows, `N` vectors of lanes at a time.
///
/// Here and below, loops count: closures and adapters of iterators are functions of their own, which the
/// compiler may leave outside the instruction set of their caller.
#[inline(always)]
unsafe fn vector<E: Engine, const BITS: usize, const R: usize, const N: usize>(
    args: &Args<'_>,
    out: &mut PanelOut,
) {
    let Args { panel, block, groups } = *args;
    let per_slice = SLICE / panel.scheme.group;
    for first in (0..PANEL).step_by(N * E::LANES) {
        // SAFETY (of all blocks below): the caller has the engine's instructions, and `multiply` checked that
        // codes, parameters, words and group units cover `groups` groups of the panel and of `R` rows.
        let mut totals = unsafe { [[E::splat(0.0); N]; R] };
        for slice in (0..groups).step_by(per_slice) {
            let mut sums = unsafe { [[E::splat(0.0); N]; R] };
            for group in slice..groups.min(slice + per_slice) {
                // Arrays of known length everywhere, so that all sums live in registers.
                let units: &[GroupUnit; R] = block.groups[group * R..][..R].try_into().expect("R rows");
                let exact = unsafe { group_sums::<E, BITS, R, N>(&panel, &block, group, units, first) };
                for n in 0..N {
                    let lane = first + n * E::LANES;
                    unsafe { scale_group::<E, R, N>(&panel, group, lane, units, &exact, n, &mut sums) };
                }
            }
            for row in 0..R {
                for n in 0..N {
                    totals[row][n] = unsafe { E::add(totals[row][n], sums[row][n]) };
                }
            }
        }
        for row in 0..R {
            for n in 0..N {
                let out = &mut out[row][first + n * E::LANES..][..E::LANES];
                unsafe { E::store(totals[row][n], out.as_mut_ptr()) };
            }
        }
    }
}

/// The exact integer sums of one group, less `center * csum`: `sum of (code - center) * code_x`.
#[inline(always)]
unsafe fn group_sums<E: Engine, const BITS: usize, const R: usize, const N: usize>(
    panel: &Panel<'_>,
    block: &Block<'_>,
    group: usize,
    rows: &[GroupUnit; R],
    first: usize,
) -> [[E::Sums; N]; R] {
    let units = panel.scheme.group / UNIT;
    let center_bits = BITS - 1;
    // SAFETY: as in `vector`.
    unsafe {
        let mut sums = [[E::start(0); N]; R];
        for row in 0..R {
            sums[row] = [E::start(-(rows[row].sum << center_bits)); N];
        }
        for unit in group * units..(group + 1) * units {
            let mut weights = [panel.codes.as_ptr(); N];
            for n in 0..N {
                let lane = first + n * E::LANES;
                let vector = (unit * (PANEL / TILE) + lane / TILE) * BITS;
                weights[n] = weights[n].add(vector * VECTOR + lane % TILE * 4);
            }
            let words = block.words.as_ptr().add(unit * QUADS * R);
            if R <= AHEAD_ROWS && first == 0 {
                for vector in 0..BITS * PANEL / TILE {
                    E::prefetch(weights[0].wrapping_add(AHEAD + vector * VECTOR));
                }
            }
            step::<E, BITS, R, N, 0>(&weights, words, &mut sums);
            step::<E, BITS, R, N, 1>(&weights, words, &mut sums);
            step::<E, BITS, R, N, 2>(&weights, words, &mut sums);
            step::<E, BITS, R, N, 3>(&weights, words, &mut sums);
            step::<E, BITS, R, N, 4>(&weights, words, &mut sums);
            step::<E, BITS, R, N, 5>(&weights, words, &mut sums);
            step::<E, BITS, R, N, 6>(&weights, words, &mut sums);
            step::<E, BITS, R, N, 7>(&weights, words, &mut sums);
        }
        sums
    }
}

/// Adds quad `Q` of a unit for all rows.
#[inline(always)]
unsafe fn step<E: Engine, const BITS: usize, const R: usize, const N: usize, const Q: usize>(
    weights: &[*const u8; N],
    words: *const Words,
    sums: &mut [[E::Sums; N]; R],
) {
    // SAFETY: as in `vector`.
    unsafe {
        let mut quads = [E::quad::<BITS, Q>(weights[0]); N];
        for n in 1..N {
            quads[n] = E::quad::<BITS, Q>(weights[n]);
        }
        for row in 0..R {
            for n in 0..N {
                sums[row][n] = E::dot(sums[row][n], quads[n], words.add(Q * R + row));
            }
        }
    }
}

/// `sums = fma(I, s*u, sums)`, then `fma(b', csum*u, sums)` where there is a bias, for the `n`-th vector of
/// lanes.
#[inline(always)]
unsafe fn scale_group<E: Engine, const R: usize, const N: usize>(
    panel: &Panel<'_>,
    group: usize,
    lane: usize,
    units: &[GroupUnit; R],
    exact: &[[E::Sums; N]; R],
    n: usize,
    sums: &mut [[E::Floats; N]; R],
) {
    let Scheme { scales, zero, .. } = panel.scheme;
    let size = scales.size();
    // SAFETY: as in `vector`.
    unsafe {
        let floats = if zero == Zero::Affine { 2 } else { 1 };
        let from = panel.params.as_ptr().add((group * floats * PANEL + lane) * size);
        let scale = E::load(scales, from);
        for row in 0..R {
            let factor = E::multiply(scale, E::splat(units[row].unit));
            sums[row][n] = E::fma(E::finish(exact[row][n]), factor, sums[row][n]);
        }
        if zero == Zero::Affine {
            let bias = E::load(scales, from.add(PANEL * size));
            let bias = E::fma(E::splat(panel.scheme.center() as f32), scale, bias);
            for row in 0..R {
                sums[row][n] = E::fma(bias, E::splat(units[row].sum_unit), sums[row][n]);
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn body(_kind: Kind, _bits: u8, _rows: usize) -> Body {
    scalar
}

#[cfg(target_arch = "x86_64")]
fn body(kind: Kind, bits: u8, rows: usize) -> Body {
    match kind {
        Kind::Scalar => scalar,
        Kind::Avx2 => x86::AVX2[width(bits)][rows - 1],
        Kind::Avx512 => x86::AVX512[width(bits)][rows - 1],
        Kind::Avx512Vnni => x86::AVX512_VNNI[width(bits)][rows - 1],
    }
}

/// Place of a width in the tables of bodies.
#[cfg(target_arch = "x86_64")]
fn width(bits: u8) -> usize {
    quant::BITS_SUPPORTED.iter().position(|&b| b == bits).expect("a matrix has a supported width")
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{super::x86, Args, BLOCK_MAX, Body, PanelOut, vector};

    /// One function per width and row count, compiled for an instruction set: `[width][rows - 1]`.
    macro_rules! bodies {
        ($table:ident, $function:ident, $engine:ty, $features:literal, $few:literal, $many:literal) => {
            #[target_feature(enable = $features)]
            unsafe fn $function<const BITS: usize, const R: usize, const N: usize>(
                args: &Args<'_>,
                out: &mut PanelOut,
            ) {
                // SAFETY: the caller's promise.
                unsafe { vector::<$engine, BITS, R, N>(args, out) }
            }
            pub(super) static $table: [[Body; BLOCK_MAX]; 6] = [
    bodies!(row $function, 2, $few, $many),
    bodies!(row $function, 3, $few, $many),
    bodies!(row $function, 4, $few, $many),
    bodies!(row $function, 5, $few, $many),
    bodies!(row $function, 6, $few, $many),
    bodies!(row $function, 8, $few, $many),
            ];
        };
        (row $function:ident, $bits:literal, $few:literal, $many:literal) => {
            [
                $function::<$bits, 1, $few>,
                $function::<$bits, 2, $few>,
                $function::<$bits, 3, $many>,
                $function::<$bits, 4, $many>,
                $function::<$bits, 5, $many>,
                $function::<$bits, 6, $many>,
            ]
        };
    }

    // A panel is 4 vectors of 8 lanes or 2 of 16; sums of 6 rows by 2 vectors fill 12 or 24 registers.
    bodies!(AVX2, avx2, x86::Avx2, "avx2,fma,f16c,bmi1,bmi2", 4, 1);
    bodies!(AVX512, avx512, x86::Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2", 2, 2);
    bodies!(
        AVX512_VNNI,
        avx512_vnni,
        x86::Avx512Vnni,
        "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi1,bmi2",
        2,
        2
    );
}
