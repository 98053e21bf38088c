//! Routed experts on CUDA: `kernels/cuda/experts.cu`.

use std::sync::Arc;

use quant::Matrix;

use super::driver::{Driver, Result};
use super::launch::{Args, Launch};
use super::linear::{
    Block, Places, TILE_OUTPUTS, block_shape, form_of, groups_of, input_words, kernel_of, kinds_of, pair,
};
use super::lower::{Lowering, PlaneRef};
use super::memory::{Codes, DeviceMemory};
use super::packing::{self, Kind, SLICE, TILE};
use crate::{Buffer, DeviceError, ExpertsRef, Picks};

/// Most kinds of matrix in one layer: what a kernel is compiled for.
const KINDS_MAX: usize = 8;
/// Up to this many pairs the blocks find their pairs themselves (experts.cu, `SHARE_MAX`).
const UNLISTED_MAX: usize = 256;
/// Up to this many rows a launch has the decode form.
const DECODE_ROWS_MAX: usize = 64;
/// Rows of a tile where nobody reads the tiles.
const UNLISTED_TILE: usize = 128;
/// Most warps of a block of `experts_hidden` per matrix.
const WARPS_MAX: usize = 8;

/// All routed experts of a layer.
pub(super) struct PackedExperts {
    count: usize,
    width: usize,
    inner: usize,
    kinds: Vec<Kind>,
    /// Group lengths of gate and up.
    groups: Vec<usize>,
    /// Group lengths of down.
    inner_groups: Vec<usize>,
    memory: DeviceMemory,
    /// `ExpertMatrix` `[gate, up, down][experts]`.
    table: DeviceMemory,
}

impl PackedExperts {
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        gate: &[Matrix],
        up: &[Matrix],
        down: &[Matrix],
    ) -> Result<Self> {
        let all: Vec<&Matrix> = gate.iter().chain(up).chain(down).collect();
        let kind = |matrix: &&Matrix| Kind::of(matrix.encoding());
        let kinds = kinds_of(all.iter().map(kind));
        if kinds.len() > KINDS_MAX {
            let message =
                format!("{} ways of storing in one layer's experts, at most {KINDS_MAX}", kinds.len());
            return Err(DeviceError::Failed { stage: "experts", message });
        }
        let groups = groups_of(&kinds_of(all[..2 * gate.len()].iter().map(kind)));
        let inner_groups = groups_of(&kinds_of(down.iter().map(|matrix| Kind::of(matrix.encoding()))));
        let (width, inner) = (gate[0].cols(), gate[0].rows());
        let (bytes, places) = packing::pack(&all);
        let memory = DeviceMemory::of(driver, "experts", &bytes)?;
        drop(bytes);
        let mut table = Vec::with_capacity(24 * all.len());
        for (matrix, place) in all.iter().zip(places) {
            let kind = kind(matrix);
            let number = kinds.iter().position(|&k| k == kind).unwrap_or(0) as u32;
            table.extend((memory.ptr() + place.codes as u64).to_le_bytes());
            table.extend((memory.ptr() + place.params as u64).to_le_bytes());
            table.extend(number.to_le_bytes());
            table.extend(form_of(&groups, kind).to_le_bytes());
        }
        let table = DeviceMemory::of(driver, "experts", &table)?;
        Ok(Self { count: gate.len(), width, inner, kinds, groups, inner_groups, memory, table })
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.memory.bytes() + self.table.bytes()
    }

    /// The prompt form wants integer codes everywhere, and one length of groups of hidden values.
    fn has_prompt_form(&self) -> bool {
        self.kinds.iter().all(|kind| kind.group().is_some()) && self.inner_groups.len() == 1
    }
}

/// The words of `ExpertArgs` that all kernels of a call share, up to the slices.
struct Call {
    words: Vec<u64>,
    pairs: usize,
    listed: bool,
    /// Pairs that a block takes at a time, and what the kernel is compiled for.
    chunk: usize,
    class: usize,
}

impl Call {
    fn args(
        &self,
        experts: &PackedExperts,
        slices: usize,
        raw_at: usize,
        tiles: usize,
        places: &Places,
    ) -> Args {
        let mut words = self.words.clone();
        words.extend([
            pair(experts.inner, slices),
            pair(self.listed as usize, raw_at),
            pair(self.chunk, tiles),
        ]);
        words.extend(places.words());
        Args::new().words(&words)
    }
}

/// [`crate::Device::routed_experts`].
pub(super) fn lower(
    c: &mut Lowering<'_>,
    x: Buffer,
    rows: usize,
    picks: Picks,
    experts: ExpertsRef,
    out: Buffer,
) -> Result {
    if rows == 0 {
        return Ok(());
    }
    let experts = c.experts(experts);
    let (ids, _, k) = c.picks(picks);
    let pairs = rows * k;
    let codes = experts.groups.iter().map(|&group| c.codes(x, rows, group)).collect::<Result<Vec<_>>>()?;
    if rows > DECODE_ROWS_MAX && experts.has_prompt_form() {
        return prompt(c, &experts, &codes, ids, (rows, k), c.plane(x), out);
    }
    let hidden = c.scratch("experts_hidden", 4 * pairs * experts.inner)?;
    let starts = c.scratch("experts_starts", 4 * (experts.count + 1))?;
    let order = c.scratch("experts_order", 4 * pairs)?;
    let (input, output) = (c.plane(x).ptr, c.output(out).ptr);
    let mut words = vec![experts.table.ptr(), ids, starts, order, input, hidden, output];
    words.extend(input_words(&codes));
    words.extend([pair(pairs, k), pair(experts.count, experts.width)]);
    let class = if rows == 1 { 1 } else { 8 };
    let call = Call { words, pairs, listed: pairs > UNLISTED_MAX, chunk: rows.min(class), class };
    if call.listed {
        let tiles = c.scratch("experts_tiles", tiles_bytes(&experts, pairs, UNLISTED_TILE))?;
        sort(c, &experts, [ids, starts, order, tiles], pairs, UNLISTED_TILE);
    }
    lower_hidden(c, &experts, &call);
    lower_down(c, &experts, &call);
    Ok(())
}

/// Bytes of a list of tiles of `tile_rows` pairs.
fn tiles_bytes(experts: &PackedExperts, pairs: usize, tile_rows: usize) -> usize {
    8 * (1 + pairs / tile_rows + experts.count)
}

/// Lists pairs and tiles by expert. `at`: ids, starts, order, tiles.
fn sort(c: &mut Lowering<'_>, experts: &PackedExperts, at: [u64; 4], pairs: usize, tile_rows: usize) {
    let args = at.into_iter().fold(Args::new(), Args::ptr).size(pairs).size(experts.count).size(tile_rows);
    c.push(Launch {
        kernel: kernel_of("experts.cu", "experts_sort", &experts.kinds).define("ROWS", 8),
        grid: [1; 3],
        block: 1024,
        shared: 4 * experts.count as u32,
        args,
    });
}

fn hidden_block<'a>(experts: &'a PackedExperts, call: &Call, warps: usize, sums: usize) -> Block<'a> {
    Block {
        kinds: &experts.kinds,
        warps,
        rows: call.class,
        rows_staged: call.chunk,
        cols: experts.width,
        sums,
        staged: false,
    }
}

/// `silu(gate x) * up x` of every pair: half the warps of a block work on each of the two matrices.
fn lower_hidden(c: &mut Lowering<'_>, experts: &PackedExperts, call: &Call) {
    let slices = experts.width.div_ceil(SLICE);
    let at_once = slices.min(WARPS_MAX);
    let tiles = if at_once == 1 { 2 } else { 1 };
    let warps = 2 * at_once * tiles;
    let places = Places::of(&hidden_block(experts, call, warps, 2 * tiles * slices));
    c.push(Launch {
        kernel: kernel_of("experts.cu", "experts_hidden", &experts.kinds).define("ROWS", call.class),
        grid: grid(experts, call, experts.inner, tiles),
        block: 32 * warps as u32,
        shared: places.bytes as u32,
        args: call.args(experts, slices, 0, tiles, &places),
    });
}

/// The products with down, of hidden values that each block quantizes itself.
fn lower_down(c: &mut Lowering<'_>, experts: &PackedExperts, call: &Call) {
    let slices = experts.inner.div_ceil(SLICE);
    let (warps, tiles) = block_shape(experts.inner);
    let block =
        Block { cols: experts.inner, staged: true, ..hidden_block(experts, call, warps, tiles * slices) };
    let places = Places::of(&block);
    let raw_at = places.bytes;
    let groups = groups_of(&experts.kinds).first().map_or(0, |&least| experts.inner.div_ceil(least));
    c.push(Launch {
        kernel: kernel_of("experts.cu", "experts_down", &experts.kinds).define("ROWS", call.class),
        grid: grid(experts, call, experts.width, tiles),
        block: 32 * warps as u32,
        shared: (raw_at + 8 * call.class * groups) as u32,
        args: call.args(experts, slices, raw_at, tiles, &places),
    });
}

/// Blocks of outputs by pairs, or by experts where the pairs are listed.
fn grid(experts: &PackedExperts, call: &Call, outputs: usize, tiles: usize) -> [u32; 3] {
    let shares = if call.listed { experts.count } else { call.pairs };
    [outputs.div_ceil(tiles * TILE) as u32, shares as u32, 1]
}

/// All of a long prompt's rows: `kernels/cuda/experts_prompt.cu`.
fn prompt(
    c: &mut Lowering<'_>,
    experts: &PackedExperts,
    codes: &[Codes],
    ids: u64,
    (rows, k): (usize, usize),
    x: PlaneRef,
    out: Buffer,
) -> Result {
    let (pairs, group) = (rows * k, experts.inner_groups[0]);
    let most = |f: fn(Kind) -> usize| experts.kinds.iter().map(|&kind| f(kind)).max().unwrap_or(0);
    let least = |f: fn(Kind) -> usize| experts.kinds.iter().map(|&kind| f(kind)).min().unwrap_or(0);
    let (tile_rows, shared, blocks) =
        (least(Kind::tile_rows), most(Kind::tile_bytes), least(Kind::tile_blocks));
    let starts = c.scratch("experts_starts", 4 * (experts.count + 1))?;
    let order = c.scratch("experts_order", 4 * pairs)?;
    let tiles = c.scratch("experts_tiles", tiles_bytes(experts, pairs, tile_rows))?;
    let gate_up = c.scratch("experts_gate_up", 8 * pairs * experts.inner)?;
    let inner_codes = c.scratch("experts_inner_codes", 2 * pairs * experts.inner)?;
    let units = c.scratch("experts_inner_units", 4 * pairs * experts.inner / group)?;
    let sums = c.scratch("experts_inner_sums", 4 * pairs * experts.inner / group)?;
    sort(c, experts, [ids, starts, order, tiles], pairs, tile_rows);
    let mut words = vec![experts.table.ptr(), starts, order, tiles, gate_up, c.output(out).ptr];
    words.extend(input_words(codes));
    words.extend([inner_codes, units, sums, pair(pairs, k), pair(experts.count, x.width)]);
    words.push(pair(experts.inner, tile_rows));
    let places = (pairs / tile_rows + experts.count).min(pairs);
    let launch = |name, grid: [usize; 3], shared: usize| Launch {
        kernel: kernel_of("experts_prompt.cu", name, &experts.kinds)
            .define("INNER_GROUP", group)
            .define("BLOCKS", blocks),
        grid: grid.map(|n| n as u32),
        block: 256,
        shared: shared as u32,
        args: Args::new().words(&words),
    };
    c.push(launch("experts_gate_up", [2 * experts.inner.div_ceil(TILE_OUTPUTS), places, 1], shared));
    c.push(launch("experts_inner", [pairs, 1, 1], 0));
    c.push(launch("experts_down_prompt", [x.width.div_ceil(TILE_OUTPUTS), places, 1], shared));
    Ok(())
}
