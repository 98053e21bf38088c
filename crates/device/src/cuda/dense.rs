//! The prompt form of wide dense matrices (`kernels/cuda/dense_prompt.cu`).

use super::driver::Result;
use super::launch::{Args, Kernel, Launch};
use super::lower::{Lowering, PlaneRef};

/// Rows and outputs of a tile.
const SIDE: usize = 64;
/// Passes over the lanes, eight each.
const PASSES: usize = 8;
const BLOCK: u32 = 256;
/// Slabs of a stage and stages, the better first; the second fits every card.
const STAGINGS: [(usize, usize); 2] = [(16, 2), (4, 2)];
const SLAB_BYTES: usize = SIDE * 8 * 4;

/// What the end of a pass, the start of a block and a join cost, in the time of a slab.
const PASS_SLABS: usize = 2;
const BLOCK_SLABS: usize = 12;
const JOIN_SLABS: usize = 8;

/// Fewer outputs than this leave most of a tile empty.
pub(super) const OUTPUTS_MIN: usize = SIDE;

/// Bytes of the kernel's `DenseRoom`: of each operand's stages, one slab more that is read ahead.
fn room((slabs, stages): (usize, usize)) -> usize {
    2 * stages * (slabs + 1) * SLAB_BYTES + 3 * 16 * BLOCK as usize * 4
}

/// A dense matrix: `[outputs, cols]` at `weights`, stored as kernels know `dtype`.
pub(super) struct Dense {
    pub(super) weights: u64,
    pub(super) dtype: u32,
    pub(super) outputs: usize,
    pub(super) cols: usize,
}

impl Dense {
    fn kernel(&self, name: &'static str) -> Kernel {
        Kernel::new("dense_prompt.cu", name).define("DENSE_DTYPE", self.dtype)
    }

    /// Parts that the passes of every tile are shared among: as many as keep all multiprocessors busy to the
    /// end.
    fn parts(&self, rows: usize, processors: usize) -> usize {
        let tiles = rows.div_ceil(SIDE) * self.outputs.div_ceil(SIDE);
        // Rounds of blocks, in slabs: those of the passes, and what filling the stages and ending passes
        // take. Parts also cost a pass over the outputs.
        let steps = self.cols.div_ceil(64);
        let cost = |parts: usize| {
            let passes = PASSES / parts;
            let block = passes * (steps + PASS_SLABS) + BLOCK_SLABS;
            (tiles * parts).div_ceil(processors) * block
                + if parts == 1 { 0 } else { JOIN_SLABS + tiles * parts / 64 }
        };
        [1, 2, 4, PASSES].into_iter().min_by_key(|&parts| cost(parts)).unwrap_or(1)
    }

    /// `out = x W^T` of many rows. `arranged`: `x` in the order of the passes, if it was made before; gives
    /// it.
    pub(super) fn lower(
        &self,
        c: &mut Lowering<'_>,
        x: PlaneRef,
        rows: usize,
        arranged: Option<u64>,
        out: PlaneRef,
    ) -> Result<u64> {
        let facts = c.driver().facts();
        let (processors, shared_max) = (facts.processors as usize, facts.shared_max as usize);
        let staging = if room(STAGINGS[0]) <= shared_max { STAGINGS[0] } else { STAGINGS[1] };
        let (steps, tiles) = (self.cols.div_ceil(64), [self.outputs, rows].map(|n| n.div_ceil(SIDE)));
        let tile_bytes = PASSES * steps * SLAB_BYTES;
        let x = match arranged {
            Some(x) => x,
            None => {
                let to = c.scratch("dense rows", tiles[1] * tile_bytes)?;
                let args = Args::new().ptr(x.ptr).ptr(to).size(rows).size(self.cols);
                c.launch(self.kernel("arrange_rows"), [steps, tiles[1], 1], BLOCK, args);
                to
            }
        };
        let weights = c.scratch("dense outputs", tiles[0] * tile_bytes)?;
        let args = Args::new().ptr(self.weights).ptr(weights).size(self.outputs).size(self.cols);
        c.launch(self.kernel("arrange_outputs"), [steps, tiles[0], 1], BLOCK, args);
        let (parts, values) = (self.parts(rows, processors), rows * self.outputs);
        let sums = if parts == 1 { out.ptr } else { c.scratch("dense sums", 4 * parts * values)? };
        let args = Args::new().ptr(x).ptr(weights).ptr(sums).size(rows).size(self.outputs).size(steps);
        c.push(Launch {
            kernel: self.kernel("dense_prompt").define("STAGE_SLABS", staging.0).define("STAGES", staging.1),
            grid: [tiles[0] as u32, tiles[1] as u32, parts as u32],
            block: BLOCK,
            shared: room(staging) as u32,
            args,
        });
        if parts > 1 {
            let args = Args::new().ptr(sums).ptr(out.ptr).size(parts).u64(values as u64);
            c.launch(self.kernel("join_parts"), [values.div_ceil(BLOCK as usize), 1, 1], BLOCK, args);
        }
        Ok(x)
    }
}
