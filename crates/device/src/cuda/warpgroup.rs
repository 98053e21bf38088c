//! Prompt forms of Hopper cards, on rows aligned by `align.cu`: `kernels/cuda/linear_warpgroup.cu` and
//! `experts_warpgroup.cu`.

use std::sync::Arc;

use super::driver::Result;
use super::launch::{Args, Kernel, Launch};
use super::linear::{MATRICES_MAX, PackedMatrix, TILE_OUTPUTS, kernel_of, pair, target_words};
use super::lower::{AlignedPlane, Lowering, PlaneRef};
use super::memory::Codes;
use super::packing::{Kind, SLICE};
use crate::Buffer;

/// Compute capability whose instructions the form is made of.
pub(super) const CAPABILITY: u32 = 90;
/// Pairs of a block of `experts_inner_aligned`.
const HIDDEN_PAIRS: usize = 8;
/// Bytes of a block's shared memory beside the ring: alignment, barriers, totals.
const OTHER_BYTES: usize = 1024 + 1024 + (64 << 10);
/// Rows that a tile may have, and about what its time is, in hundredths of the largest.
const TILE_ROWS: [(usize, usize); 4] = [(128, 100), (96, 80), (64, 60), (32, 45)];
/// Stages of the ring, and threads of a block (linear_warpgroup.cuh).
const STAGES: usize = 7;
const THREADS: u32 = 384;

/// Has the card a warpgroup form of this kind of matrix?
pub(super) fn has_form(c: &Lowering<'_>, kind: Kind) -> bool {
    let facts = c.facts();
    let fits = facts.capability == CAPABILITY && ring_bytes(kind) <= facts.shared_max as usize;
    kind.in_warpgroups() && fits && !c.plain_sums()
}

fn ring_bytes(kind: Kind) -> usize {
    OTHER_BYTES + STAGES * kind.ring_bytes()
}

fn ring_kernel(kind: Kind, file: &'static str, name: &'static str) -> Kernel {
    kernel_of(file, name, &[kind]).define("STAGES", STAGES)
}

/// Rows whose aligned places are copied at once, at most (linear_warpgroup.cuh, `with_rows`).
const ROWS_COPIED: usize = 32;

/// Aligned rows (aligned.cuh, `AlignedRows`) and their marks (align.cu).
#[derive(Clone, Copy, Debug)]
pub(super) struct Aligned {
    words: [u64; 4],
    pub(super) wide: u64,
}

impl Aligned {
    /// The last words of the kernels' `RowCodes`.
    pub(super) fn row_words(&self) -> [u64; 5] {
        let [codes, sums, units, stride] = self.words;
        [codes, sums, units, stride, self.wide]
    }
}

/// Scratch for aligned rows, of a plane or of pairs: codes, sums, units, marks.
fn room(
    c: &mut Lowering<'_>,
    plane: Option<Buffer>,
    rows: usize,
    cols: usize,
    group: usize,
) -> Result<Aligned> {
    let stride = rows.next_multiple_of(ROWS_COPIED);
    let codes = c.scratch_of(plane, "aligned_codes", 2 * stride * cols)?;
    let sums = c.scratch_of(plane, "aligned_sums", 4 * stride * cols / group)?;
    let units = c.scratch_of(plane, "aligned_units", 4 * stride * cols.div_ceil(SLICE))?;
    let wide = c.scratch_of(plane, "aligned_wide", 4 * rows)?;
    Ok(Aligned { words: [codes, sums, units, stride as u64], wide })
}

/// The place of aligned codes of a plane's first rows, which the caller's launch writes.
pub(super) fn aligned_written(
    c: &mut Lowering<'_>,
    plane: Buffer,
    rows: usize,
    group: usize,
) -> Result<Aligned> {
    let codes = room(c, Some(plane), rows, c.plane(plane).width, group)?;
    c.aligned_written(plane, AlignedPlane { rows, group, codes });
    Ok(codes)
}

/// Codes of a plane's first rows, of marked rows at least, and aligned ones, made by launches of their own
/// unless they are there.
fn aligned(c: &mut Lowering<'_>, plane: Buffer, rows: usize, group: usize) -> Result<(Codes, Aligned)> {
    if let Some(aligned) = c.aligned(plane, rows, group) {
        return Ok((c.codes_place(plane, group)?, aligned));
    }
    let from = c.codes(plane, rows, group)?;
    let aligned = aligned_written(c, plane, rows, group)?;
    let mut words = vec![from.codes, from.units, from.sums];
    words.extend(aligned.row_words());
    words.push(pair(c.plane(plane).width, group));
    c.launch(Kernel::new("align.cu", "align_rows"), [rows, 1, 1], 128, Args::new().words(&words));
    Ok((from, aligned))
}

/// Rows of a tile, at most `most`, for `blocks` blocks of outputs: those that keep all processors busy for
/// the least time.
fn tile_rows(processors: usize, blocks: usize, rows: usize, most: usize) -> usize {
    let time = |&(tile, time): &(usize, usize)| (blocks * rows.div_ceil(tile)).div_ceil(processors) * time;
    let tiles = TILE_ROWS.iter().filter(|(tile, _)| *tile <= most);
    tiles.min_by_key(|tile| time(tile)).map_or(most, |&(tile, _)| tile)
}

/// Launches over matrices of one kind in groups of `group`. The result: codes of the rows that another form
/// has to do again, and the marks of these.
pub(super) fn linear(
    c: &mut Lowering<'_>,
    x: Buffer,
    rows: usize,
    (kind, group): (Kind, usize),
    targets: &[&(Arc<PackedMatrix>, PlaneRef)],
) -> Result<(Codes, u64)> {
    let (codes, aligned) = aligned(c, x, rows, group)?;
    let cols = c.plane(x).width;
    let processors = c.facts().processors as usize;
    for targets in targets.chunks(MATRICES_MAX) {
        let (target_words, blocks) = target_words(targets);
        let tile_rows = tile_rows(processors, blocks, rows, kind.ring_rows());
        let mut words = aligned.words.to_vec();
        words.extend([pair(rows, cols), pair(targets.len(), tile_rows), pair(blocks, 0)]);
        words.extend(target_words);
        c.push(Launch {
            kernel: ring_kernel(kind, "linear_warpgroup.cu", "linear_warpgroup"),
            grid: [(blocks * rows.div_ceil(tile_rows)).min(processors) as u32, 1, 1],
            block: THREADS,
            shared: ring_bytes(kind) as u32,
            args: Args::new().words(&words),
        });
    }
    Ok((codes, aligned.wide))
}

/// Sizes of a layer's routed experts and of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertShape {
    pub(super) kind: Kind,
    pub(super) count: usize,
    pub(super) width: usize,
    pub(super) inner: usize,
    pub(super) pairs: usize,
    pub(super) k: usize,
}

/// Launches of routed experts.
pub(super) struct Experts {
    shape: ExpertShape,
    words: Vec<u64>,
    /// Marks of rows, and of pairs.
    pub(super) wide: [u64; 2],
}

impl Experts {
    /// Aligns the rows; codes of those that another form has to do again are the result too. `lists`: the
    /// words of `ExpertArgs` up to `out`; `plain`: where codes, units and sums of wide pairs go.
    pub(super) fn new(
        c: &mut Lowering<'_>,
        shape: ExpertShape,
        x: Buffer,
        rows: usize,
        lists: &[u64],
        plain: [u64; 3],
    ) -> Result<(Self, Codes)> {
        let ExpertShape { kind, count, width, inner, pairs, k } = shape;
        let group = kind.group().unwrap_or(SLICE);
        let (from, aligned) = aligned(c, x, rows, group)?;
        let hidden = room(c, None, pairs, inner, group)?;
        let mut words = lists.to_vec();
        words.extend(aligned.words);
        words.extend(hidden.words);
        words.push(hidden.wide);
        let [codes, plain_units, plain_sums] = plain;
        words.extend([codes, plain_units, plain_sums, pair(pairs, k), pair(count, width), pair(inner, 0)]);
        Ok((Self { shape, words, wide: [aligned.wide, hidden.wide] }, from))
    }

    fn launch(&self, name: &'static str, grid: usize, block: u32, shared: usize) -> Launch {
        Launch {
            kernel: ring_kernel(self.shape.kind, "experts_warpgroup.cu", name)
                .define("INNER", self.shape.inner),
            grid: [grid as u32, 1, 1],
            block,
            shared: shared as u32,
            args: Args::new().words(&self.words),
        }
    }

    /// A launch of products with `matrices` matrices of `outputs` outputs: how many tiles of rows there are,
    /// only the card knows.
    fn products(&self, c: &mut Lowering<'_>, name: &'static str, matrices: usize, outputs: usize) {
        let ExpertShape { pairs, count, kind, .. } = self.shape;
        let tiles = (pairs / kind.ring_rows() + count).min(pairs) * matrices * outputs.div_ceil(TILE_OUTPUTS);
        let grid = tiles.min(c.facts().processors as usize);
        c.push(self.launch(name, grid, THREADS, ring_bytes(kind)));
    }

    /// Products with gate and up.
    pub(super) fn gate_up(&self, c: &mut Lowering<'_>) {
        self.products(c, "experts_gate_up_warpgroup", 2, self.shape.inner);
    }

    /// `silu(gate) * up`, aligned.
    pub(super) fn hidden(&self, c: &mut Lowering<'_>) {
        let blocks = self.shape.pairs.div_ceil(HIDDEN_PAIRS);
        c.push(self.launch("experts_inner_aligned", blocks, 32 * HIDDEN_PAIRS as u32, 0));
    }

    /// Products with down.
    pub(super) fn down(&self, c: &mut Lowering<'_>) {
        self.products(c, "experts_down_warpgroup", 1, self.shape.width);
    }
}

const _: () = assert!(TILE_OUTPUTS == 128, "outputs of a tile of both prompt forms");
