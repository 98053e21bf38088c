//! Prompt forms of Hopper cards: `kernels/cuda/linear_warpgroup.cu`, on rows aligned by `align.cu`.

use std::sync::Arc;

use super::driver::Result;
use super::launch::{Args, Kernel, Launch};
use super::linear::{MATRICES_MAX, PackedMatrix, TILE_OUTPUTS, kernel_of, pair, target_words};
use super::lower::{Lowering, PlaneRef};
use super::memory::Codes;
use super::packing::{Kind, SLICE};

/// Compute capability whose instructions the form is made of.
pub(super) const CAPABILITY: u32 = 90;
/// Stages of the ring, and threads of a block (linear_warpgroup.cuh).
const STAGES: usize = 7;
const THREADS: u32 = 384;
/// Bytes of a block's shared memory beside the ring: alignment, barriers, totals.
const OTHER_BYTES: usize = 1024 + 1024 + (64 << 10);
/// Rows that a tile may have, and about what its time is, in hundredths of the largest.
const TILE_ROWS: [(usize, usize); 4] = [(128, 100), (96, 80), (64, 60), (32, 45)];

/// Has the card a warpgroup form of this kind of matrix?
pub(super) fn has_form(c: &Lowering<'_>, kind: Kind) -> bool {
    let facts = c.facts();
    kind.in_warpgroups() && facts.capability == CAPABILITY && ring_bytes(kind) <= facts.shared_max as usize
}

fn ring_bytes(kind: Kind) -> usize {
    OTHER_BYTES + STAGES * kind.ring_bytes()
}

/// Addresses of aligned rows (linear_warpgroup.cuh, `AlignedRows`) and of their marks (align.cu).
pub(super) struct Aligned {
    pub(super) words: [u64; 3],
    pub(super) wide: u64,
}

/// Aligns rows of codes, into scratch.
pub(super) fn align(c: &mut Lowering<'_>, from: Codes, cols: usize, rows: usize) -> Result<Aligned> {
    let codes = c.scratch("aligned_codes", 2 * rows * cols)?;
    let sums = c.scratch("aligned_sums", 4 * rows * cols / from.group)?;
    let units = c.scratch("aligned_units", 4 * rows * cols.div_ceil(SLICE))?;
    let wide = c.scratch("aligned_wide", 4 * rows)?;
    let words = [from.codes, from.units, from.sums, codes, sums, units, wide, pair(cols, from.group)];
    let kernel = Kernel::new("align.cu", "align_rows");
    c.launch(kernel, [rows, 1, 1], 128, Args::new().words(&words));
    Ok(Aligned { words: [codes, sums, units], wide })
}

/// Rows of a tile for `blocks` blocks of outputs: those that keep all processors busy for the least time.
fn tile_rows(processors: usize, blocks: usize, rows: usize) -> usize {
    let time = |&(tile, time): &(usize, usize)| (blocks * rows.div_ceil(tile)).div_ceil(processors) * time;
    TILE_ROWS.iter().min_by_key(|tile| time(tile)).map_or(128, |&(tile, _)| tile)
}

/// Launches over matrices of one kind. The result: marks of rows that another form has to do again.
pub(super) fn linear(
    c: &mut Lowering<'_>,
    codes: Codes,
    cols: usize,
    rows: usize,
    kind: Kind,
    targets: &[&(Arc<PackedMatrix>, PlaneRef)],
) -> Result<u64> {
    let aligned = align(c, codes, cols, rows)?;
    let processors = c.facts().processors as usize;
    for targets in targets.chunks(MATRICES_MAX) {
        let (target_words, blocks) = target_words(targets);
        let tile_rows = tile_rows(processors, blocks, rows);
        let mut words = aligned.words.to_vec();
        words.extend([pair(rows, cols), pair(targets.len(), tile_rows), pair(blocks, 0)]);
        words.extend(target_words);
        c.push(Launch {
            kernel: kernel_of("linear_warpgroup.cu", "linear_warpgroup", &[kind]).define("STAGES", STAGES),
            grid: [(blocks * rows.div_ceil(tile_rows)).min(processors) as u32, 1, 1],
            block: THREADS,
            shared: ring_bytes(kind) as u32,
            args: Args::new().words(&words),
        });
    }
    Ok(aligned.wide)
}

const _: () = assert!(TILE_OUTPUTS == 128, "outputs of a tile of both prompt forms");
