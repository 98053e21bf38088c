//! Grouped matrices over few rows, streamed: `kernels/cuda/linear_stream.cu`.

use std::sync::Arc;

use super::driver::Result;
use super::launch::{Args, Launch};
use super::linear::{MATRICES_MAX, PackedMatrix, kernel_of, kinds_of, pair};
use super::lower::{Lowering, PlaneRef};
use super::packing::{Kind, SLICE, TILE};
use crate::Buffer;

/// Rows of a launch.
const ROWS_MIN: usize = 2;
const ROWS_MAX: usize = 32;
/// Up to this many rows, matrices of fewer than [`TILES_MIN`] tiles a multiprocessor are done sooner in small
/// jobs.
const FEW_ROWS: usize = 8;
const TILES_MIN: usize = 3;
/// Rows that the kernel is compiled for.
const CLASSES: [usize; 3] = [8, 16, 32];
/// Matrices of at most a tile a multiprocessor over more rows than this are done by more blocks, of fewer
/// rows each.
const ROWS_APART: usize = 8;
/// Warps of a block, stages of each one's ring, and places for the sums of a team: the first that there is
/// room for.
const SHAPES: [(usize, usize, usize); 7] =
    [(16, 4, 2), (16, 3, 2), (16, 3, 1), (16, 2, 1), (8, 4, 2), (8, 3, 2), (8, 2, 2)];
/// Steps of a stage, and the inputs that they are.
const STAGE_STEPS: usize = 4;
const COLS_STEP: usize = 256;

/// A launch of this form.
struct Form {
    kinds: Vec<Kind>,
    group: usize,
    /// Rows that the kernel is compiled for.
    class: usize,
    cols: usize,
    warps: usize,
    ring: usize,
    places_of_sums: usize,
}

/// Offsets into a block's shared memory.
struct Places {
    x_at: usize,
    units_at: usize,
    parts_at: usize,
    row_stride: usize,
    bytes: usize,
}

impl Form {
    /// `None` where the form is not for these matrices and rows.
    fn of(c: &Lowering<'_>, rows: usize, cols: usize, matrices: &[&PackedMatrix]) -> Option<Self> {
        let kinds = kinds_of(matrices.iter().map(|matrix| matrix.kind()));
        let group = kinds.first()?.group()?;
        let alike = kinds.iter().all(|kind| kind.group() == Some(group));
        let tiles: usize = matrices.iter().map(|matrix| matrix.rows().div_ceil(TILE)).sum();
        let many = rows > FEW_ROWS || kinds.len() == 1 && tiles >= TILES_MIN * c.facts().processors as usize;
        if !alike || !many || !(ROWS_MIN..=ROWS_MAX).contains(&rows) || !cols.is_multiple_of(COLS_STEP) {
            return None;
        }
        let apart = rows > ROWS_APART && tiles <= c.facts().processors as usize;
        let classes = CLASSES.iter().skip_while(|&&class| class < rows && class < ROWS_MAX && !apart);
        // Sixteen warps with one place are for blocks that have work for more than eight.
        let many_tiles = tiles > c.facts().processors as usize * (8 / cols.div_ceil(SLICE)).max(1);
        // All rows together, or else as many as there is room for.
        let fewer = CLASSES.iter().rev();
        classes.take(1).chain(fewer).find_map(|&class| {
            SHAPES.iter().filter(|shape| many_tiles || shape.2 > 1).find_map(
                |&(warps, ring, places_of_sums)| {
                    let form = Self { kinds: kinds.clone(), group, class, cols, warps, ring, places_of_sums };
                    (form.teams() > 0 && form.places().bytes <= c.facts().shared_max as usize).then_some(form)
                },
            )
        })
    }

    fn slices(&self) -> usize {
        self.cols.div_ceil(SLICE)
    }

    /// Teams of a block, a warp for each slice.
    fn teams(&self) -> usize {
        self.warps / self.slices()
    }

    /// Blocks for each part of the rows. Up to [`FEW_ROWS`] rows leave a quarter of the multiprocessors to
    /// the norms before and the launches after where this takes no more turns: all would wait for a block
    /// that waits for the place of another.
    fn blocks(&self, c: &Lowering<'_>, rows: usize, tiles: usize, parts: usize) -> usize {
        let all = (c.facts().processors as usize / parts).max(1);
        let fewer = (3 * all / 4).max(1);
        let turns = |blocks: usize| tiles.div_ceil(blocks * self.teams());
        if rows <= FEW_ROWS && turns(fewer) == turns(all) { fewer } else { all }
    }

    fn unit_bytes(&self) -> usize {
        if self.kinds.iter().any(|kind| kind.is_wide()) { 16 } else { 8 }
    }

    fn places(&self) -> Places {
        let stage =
            |kind: &Kind| STAGE_STEPS * 128 * kind.bits() + COLS_STEP / self.group * kind.group_bytes();
        let stage = self.kinds.iter().map(stage).max().unwrap_or(0);
        // Rows that lanes read together lie in different banks.
        let row_stride = 2 * self.cols + 64;
        let x_at = self.teams() * self.slices() * self.ring * stage;
        let units_at = x_at + self.class * row_stride;
        let units = self.class * (self.cols / self.group + 1) * self.unit_bytes();
        let parts_at = (units_at + units).next_multiple_of(16);
        let bytes =
            parts_at + self.teams() * self.places_of_sums * (self.slices() - 1) * self.class / 8 * 4 * 128;
        Places { x_at, units_at, parts_at, row_stride, bytes }
    }
}

/// Lowers the product if the form is for it; says whether it did.
pub(super) fn lower(
    c: &mut Lowering<'_>,
    x: Buffer,
    input: PlaneRef,
    rows: usize,
    targets: &[(Arc<PackedMatrix>, PlaneRef)],
) -> Result<bool> {
    let matrices: Vec<&PackedMatrix> = targets.iter().map(|(matrix, _)| &**matrix).collect();
    let Some(form) = Form::of(c, rows, input.width, &matrices) else { return Ok(false) };
    let (codes, places) = (c.codes(x, rows, form.group)?, form.places());
    let mut targets: Vec<_> = targets.iter().collect();
    targets.sort_by_key(|(matrix, _)| matrix.kind());
    for targets in targets.chunks(MATRICES_MAX) {
        let mut words = Vec::with_capacity(5 * MATRICES_MAX);
        let mut tiles = 0;
        for (matrix, out) in targets {
            let kind = form.kinds.iter().position(|&kind| kind == matrix.kind()).unwrap_or(0);
            words.extend(matrix.packed());
            words.extend([out.ptr, pair(matrix.rows(), kind), pair(tiles, 0)]);
            tiles += matrix.rows().div_ceil(TILE);
        }
        words.resize(5 * MATRICES_MAX, 0);
        let parts = rows.div_ceil(form.class);
        let blocks = form.blocks(c, rows, tiles, parts);
        let mut all = vec![codes.codes, codes.units, codes.sums, pair(rows, targets.len())];
        all.extend([pair(tiles, places.row_stride), pair(places.x_at, places.units_at)]);
        all.push(pair(places.parts_at, 0));
        all.extend(words);
        c.push(Launch {
            kernel: kernel_of("linear_stream.cu", "linear_stream", &form.kinds)
                .define("ROWS", form.class)
                .define("COLS", form.cols)
                .define("WARPS", form.warps)
                .define("RING", form.ring)
                .define("PARTS", form.places_of_sums)
                .define("UNIT_BYTES", form.unit_bytes())
                .define("CODE_GROUP", form.group),
            grid: [blocks.min(tiles) as u32, parts as u32, 1],
            block: (32 * form.teams() * form.slices()) as u32,
            shared: places.bytes as u32,
            args: Args::new().words(&all),
        });
    }
    Ok(true)
}
