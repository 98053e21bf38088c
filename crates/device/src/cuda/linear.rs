//! Grouped and dense matrices on CUDA: `kernels/cuda/linear.cu` and, for many rows, `linear_prompt.cu`.

use std::sync::Arc;

use quant::Matrix;

use super::dense::{self, Dense};
use super::driver::{Driver, Result};
use super::launch::{Args, Kernel, Launch};
use super::linear_stream;
use super::lower::{Lowering, PlaneRef};
use super::memory::{Codes, DeviceMemory, Span};
use super::packing::{self, Kind, Place, SLICE, TILE};
use super::warpgroup;
use crate::{Buffer, MatrixRef};

/// Most matrices and kinds of one launch (linear.cu, `MATRICES_MAX`).
pub(super) const MATRICES_MAX: usize = 8;
/// Most warps of a block.
const WARPS_MAX: usize = 8;
/// Warps that a block should have at least.
const WARPS_MIN: usize = 4;
/// Shared memory of a block up to which rows are staged.
const SHARED_MAX: usize = 200 << 10;
/// Most shared memory of a block of 1 to 8 rows; longer rows take the form for more rows.
const FEW_BYTES_MAX: usize = 160 << 10;
/// Places of scales and of exact sums that a block of the streaming form uses in turn (linear.cu).
const STREAM_RING: [usize; 2] = [3, 2];
/// Blocks a multiprocessor up to which all are there at once without it, and wait less.
const STREAM_TURN: usize = 2;
/// Its most blocks a multiprocessor, and what they share there.
const STREAM_BLOCKS_MAX: usize = 4;
const STREAM_BYTES: usize = 224 << 10;
/// Mixed matrices of more tiles than this stream better in whole slices, for up to [`STREAM_ROWS_MAX`] rows.
const STREAM_TILES: usize = 4096;
const STREAM_ROWS_MAX: usize = 4;
/// Up to this many rows a launch has the decode form.
const DECODE_ROWS_MAX: usize = 32;
/// Of matrices of more tiles, more rows than these are done sooner by warpgroups already.
const WARPGROUP_ROWS_MIN: usize = 16;
const WARPGROUP_TILES_MIN: usize = 512;
/// Warps along the rows of a tile of the prompt form.
const TILE_WARPS: usize = 2;
/// Blocks of a repair along the outputs: most have nothing to do.
const REPAIR_BLOCKS: usize = 4;
/// Outputs of a block of the prompt form (linear_prompt.cuh).
pub(super) const TILE_OUTPUTS: usize = 128;
/// Codes of rows are staged in shared memory up to this many bytes; more are read where they are.
const STAGED_MAX: usize = 64 << 10;

/// A weight matrix in the layout of the kernels.
pub(super) struct PackedMatrix {
    rows: usize,
    cols: usize,
    kind: Kind,
    memory: DeviceMemory,
    place: Place,
}

impl PackedMatrix {
    pub(super) fn new(driver: &Arc<dyn Driver>, source: &Matrix) -> Result<Self> {
        let (memory, places) = packing::load(driver, "matrix", &[source])?;
        let kind = Kind::of(source.encoding());
        Ok(Self { rows: source.rows(), cols: source.cols(), kind, memory, place: places[0] })
    }

    /// Group length of the codes that its kernel reads; `None` for dense matrices.
    pub(super) fn group(&self) -> Option<usize> {
        self.kind.group()
    }

    /// Outputs; rows of an embedding table.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// How it is stored.
    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// Inputs.
    pub(super) fn cols(&self) -> usize {
        self.cols
    }

    /// The `Packed` of linear.cuh.
    pub(super) fn packed(&self) -> [u64; 2] {
        [self.memory.ptr() + self.place.codes as u64, self.memory.ptr() + self.place.params as u64]
    }
}

/// Different kinds of some matrices, ascending, so that equal sets share one compilation.
pub(super) fn kinds_of(kinds: impl Iterator<Item = Kind>) -> Vec<Kind> {
    let mut kinds: Vec<Kind> = kinds.collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds
}

/// Different group lengths of some kinds.
pub(super) fn groups_of(kinds: &[Kind]) -> Vec<usize> {
    let mut groups: Vec<usize> = kinds.iter().filter_map(|kind| kind.group()).collect();
    groups.sort_unstable();
    groups.dedup();
    groups
}

/// Place of `kind`'s group length among `groups`; 0 for dense kinds, which do not look.
pub(super) fn form_of(groups: &[usize], kind: Kind) -> u32 {
    groups.iter().position(|&group| kind.group() == Some(group)).unwrap_or(0) as u32
}

/// A kernel compiled for the kinds of a launch.
pub(super) fn kernel_of(file: &'static str, name: &'static str, kinds: &[Kind]) -> Kernel {
    const NAMES: [&str; MATRICES_MAX] =
        ["KIND0", "KIND1", "KIND2", "KIND3", "KIND4", "KIND5", "KIND6", "KIND7"];
    let kernel = Kernel::new(file, name).define("KINDS", kinds.len());
    kinds.iter().zip(NAMES).fold(kernel, |kernel, (kind, name)| kernel.define(name, kind.0))
}

/// The `InputCodes` of linear_decode.cuh, one for each group length, up to three.
pub(super) fn input_words(codes: &[Codes]) -> Vec<u64> {
    let mut words: Vec<u64> = codes.iter().flat_map(|c| [c.codes, c.units, c.sums]).collect();
    words.resize(9, 0);
    words
}

/// Two `uint` fields as one word.
pub(super) fn pair(low: usize, high: usize) -> u64 {
    low as u64 | (high as u64) << 32
}

/// Shared memory of a block of the decode form (linear_decode.cuh, `Places`).
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    warp_bytes: usize,
    rows_at: usize,
    row_stride: usize,
    units_at: usize,
    unit_bytes: usize,
    sums_at: usize,
    /// End of all.
    pub(super) bytes: usize,
}

/// What decides [`Places`].
pub(super) struct Block<'a> {
    pub(super) kinds: &'a [Kind],
    pub(super) warps: usize,
    /// Rows that the kernel is compiled for.
    pub(super) rows: usize,
    /// Rows that a block takes at a time.
    pub(super) rows_staged: usize,
    pub(super) cols: usize,
    /// Slice sums: 16 outputs and one slice each.
    pub(super) sums: usize,
    /// Most bytes.
    pub(super) shared_max: usize,
}

impl Places {
    pub(super) fn of(block: &Block<'_>) -> Self {
        let most = |f: fn(Kind) -> usize| block.kinds.iter().map(|&kind| f(kind)).max().unwrap_or(0);
        let warp_bytes = most(Kind::slice_bytes).next_multiple_of(128);
        let rows_at = block.warps * warp_bytes;
        // Two rows that lanes read together lie in different halves of the banks.
        let row_stride = 2 * block.cols + if (2 * block.cols).is_multiple_of(128) { 64 } else { 0 };
        let row_bytes = row_stride * block.rows_staged;
        let grouped = warp_bytes > 0;
        let others = rows_at + (most(Kind::unit_bytes) * block.warps + block.sums * TILE * 4) * block.rows;
        let room = SHARED_MAX.min(block.shared_max);
        let stage = grouped && row_bytes <= STAGED_MAX && others + row_bytes <= room;
        let (row_stride, row_bytes) = if stage { (row_stride, row_bytes) } else { (0, 0) };
        let units_at = (rows_at + row_bytes).next_multiple_of(16);
        let unit_bytes = most(Kind::unit_bytes) * block.rows;
        let sums_at = units_at + unit_bytes * block.warps;
        let bytes = sums_at + block.sums * block.rows * TILE * 4;
        Self { warp_bytes, rows_at, row_stride, units_at, unit_bytes, sums_at, bytes }
    }

    pub(super) fn words(&self) -> [u64; 3] {
        [
            pair(self.warp_bytes, self.rows_at),
            pair(self.row_stride, self.units_at),
            pair(self.unit_bytes, self.sums_at),
        ]
    }
}

/// Shared memory of a block of 1 to 8 rows (linear_few.cuh, `FewPlaces`).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FewPlaces {
    unit_groups: usize,
    row_stride: usize,
    params_at: usize,
    param_bytes: usize,
    units_at: usize,
    exact_at: usize,
    exact_bytes: usize,
    sums_at: usize,
    /// End of all.
    pub(super) bytes: usize,
}

impl FewPlaces {
    /// For scales and exact sums of `tiles` tiles of matrices of these kinds, by 1 row or up to 8;
    /// `staged`: room for the rows' codes.
    pub(super) fn of(kinds: &[Kind], rows: usize, tiles: [usize; 2], cols: usize, staged: bool) -> Self {
        let groups = |kind: &Kind| kind.group().map_or(0, |group| cols / group);
        let most_groups = kinds.iter().map(groups).max().unwrap_or(0);
        // Rows that lanes read together lie in different banks.
        let row_stride = if staged { 2 * cols + 64 } else { 0 };
        let params_at = (rows * row_stride).next_multiple_of(16);
        let param_bytes = kinds.iter().map(|kind| groups(kind) * kind.group_bytes()).max().unwrap_or(0);
        let units_at = params_at + tiles[0] * param_bytes;
        // Two inputs at most, each with units and sums.
        let exact_at = (units_at + 2 * rows * most_groups * 8).next_multiple_of(16);
        let exact_bytes = most_groups * 4 * if rows == 1 { 4 * TILE } else { 20 * rows };
        let sums_at = exact_at + tiles[1] * exact_bytes;
        let bytes = sums_at + tiles[1] * cols.div_ceil(SLICE) * rows * TILE * 4;
        let unit_groups = most_groups;
        Self {
            unit_groups,
            row_stride,
            params_at,
            param_bytes,
            units_at,
            exact_at,
            exact_bytes,
            sums_at,
            bytes,
        }
    }

    pub(super) fn words(&self) -> [u64; 4] {
        [
            pair(self.unit_groups, self.row_stride),
            pair(self.params_at, self.param_bytes),
            pair(self.units_at, self.exact_at),
            pair(self.exact_bytes, self.sums_at),
        ]
    }
}

/// Warps and tiles of a block of 1 to 8 rows: a warp does four steps of a tile.
pub(super) fn few_shape(cols: usize) -> (usize, usize) {
    let jobs = cols.div_ceil(256);
    let tiles = (WARPS_MAX / jobs).max(1);
    ((tiles * jobs).min(2 * WARPS_MAX), tiles)
}

/// The streaming form of up to 8 rows: matrices of one kind, a job for every warp.
struct Stream {
    places: FewPlaces,
    /// Blocks a multiprocessor.
    blocks: usize,
}

impl Stream {
    /// `None` where the form is not for these matrices, or takes more than `shared_max` bytes of shared
    /// memory.
    fn of(kinds: &[Kind], class: usize, cols: usize, shared_max: usize) -> Option<Self> {
        let (warps, tiles) = few_shape(cols);
        let &[kind] = kinds else { return None };
        if kind.group().is_none() || class > 8 || tiles * cols.div_ceil(256) != warps {
            return None;
        }
        let places = FewPlaces::of(kinds, class, STREAM_RING.map(|ring| ring * tiles), cols, true);
        if places.bytes > shared_max.min(FEW_BYTES_MAX) {
            return None;
        }
        // Two jobs in registers: 64 are enough for codes of up to 4 bits.
        let registers = if kind.bits() > 4 { 2 } else { 1 } * warps.div_ceil(WARPS_MAX);
        let most = STREAM_BLOCKS_MAX / registers;
        let blocks = most.min(STREAM_BYTES / (places.bytes + 1024)).max(1);
        Some(Self { places, blocks })
    }
}

/// Rows that a decode kernel is compiled for.
fn rows_class(rows: usize) -> usize {
    match rows {
        0 | 1 => 1,
        2..=8 => 8,
        9..=16 => 16,
        _ => 32,
    }
}

/// Warps of a block and tiles it has, for a row of `cols` inputs.
pub(super) fn block_shape(cols: usize) -> (usize, usize) {
    let slices = cols.div_ceil(SLICE).min(WARPS_MAX);
    let tiles = (WARPS_MIN / slices).max(1);
    (slices * tiles, tiles)
}

/// A block of the form of whole slices.
struct Whole {
    /// Rows it is compiled for.
    class: usize,
    warps: usize,
    tiles: usize,
    places: Places,
}

impl Whole {
    /// For up to `class` of `rows` rows; fewer rows and warps where a card has not the shared memory for all.
    fn of(kinds: &[Kind], mut class: usize, rows: usize, cols: usize, shared_max: usize) -> Self {
        let (slices, (mut warps, _)) = (cols.div_ceil(SLICE), block_shape(cols));
        loop {
            let tiles = warps / slices.min(warps);
            let rows_staged = rows.min(class);
            let sums = tiles * slices;
            let places =
                Places::of(&Block { kinds, warps, rows: class, rows_staged, cols, sums, shared_max });
            match (places.bytes > shared_max, class > 16, warps > 1) {
                (true, true, _) => class = 16,
                (true, false, true) => warps /= 2,
                _ => return Self { class, warps, tiles, places },
            }
        }
    }
}

/// `out = x W^T` of several matrices.
pub(super) fn lower(c: &mut Lowering<'_>, x: Buffer, rows: usize, to: &[(MatrixRef, Buffer)]) -> Result {
    if rows == 0 {
        return Ok(());
    }
    let input = c.plane(x);
    let targets: Vec<(Arc<PackedMatrix>, PlaneRef)> =
        to.iter().map(|&(matrix, out)| (c.matrix(matrix), c.output(out))).collect();
    let (grouped, dense): (Vec<_>, Vec<_>) =
        targets.iter().cloned().partition(|(matrix, _)| matrix.kind.group().is_some());
    if linear_stream::lower(c, x, input, rows, &grouped)? {
        return dense.chunks(MATRICES_MAX).try_for_each(|dense| decode(c, x, input, rows, dense));
    }
    let tiles: usize = targets.iter().map(|(matrix, _)| matrix.rows.div_ceil(TILE)).sum();
    let wide = |(matrix, _): &(Arc<PackedMatrix>, PlaneRef)| {
        matrix.kind == targets[0].0.kind && matrix.place.tame && warpgroup::has_form(c, matrix.kind)
    };
    let early = rows > WARPGROUP_ROWS_MIN && tiles > WARPGROUP_TILES_MIN && targets.iter().all(wide);
    if rows <= DECODE_ROWS_MAX && !early {
        return targets.chunks(MATRICES_MAX).try_for_each(|targets| decode(c, x, input, rows, targets));
    }
    for kind in kinds_of(targets.iter().map(|(matrix, _)| matrix.kind)) {
        let targets: Vec<_> = targets.iter().filter(|(matrix, _)| matrix.kind == kind).collect();
        match kind.group() {
            Some(group) => {
                let tame = targets.iter().all(|(matrix, _)| matrix.place.tame);
                let (codes, wide) = match tame && warpgroup::has_form(c, kind) {
                    true => {
                        let (codes, wide) = warpgroup::linear(c, x, rows, (kind, group), &targets)?;
                        (codes, Some(wide))
                    }
                    false => (c.codes(x, rows, group)?, None),
                };
                targets
                    .chunks(MATRICES_MAX)
                    .for_each(|targets| prompt(c, codes, input.width, rows, kind, targets, wide));
            }
            None => {
                let mut arranged = None;
                for (matrix, out) in targets {
                    if matrix.rows < dense::OUTPUTS_MIN {
                        prompt_dense(c, input, rows, matrix, *out);
                        continue;
                    }
                    let dense = Dense {
                        weights: matrix.packed()[1],
                        dtype: kind.dtype(),
                        outputs: matrix.rows,
                        cols: matrix.cols,
                    };
                    arranged = Some(dense.lower(c, input, rows, arranged, *out)?);
                }
            }
        }
    }
    Ok(())
}

/// Group length of aligned codes, where [`lower`] reads nothing else of `rows` rows.
pub(super) fn aligned_group(c: &Lowering<'_>, rows: usize, to: &[(MatrixRef, Buffer)]) -> Option<usize> {
    let group = c.matrix(to.first()?.0).group()?;
    let aligned = |&(matrix, _): &(MatrixRef, Buffer)| {
        let matrix = c.matrix(matrix);
        matrix.group() == Some(group) && matrix.place.tame && warpgroup::has_form(c, matrix.kind)
    };
    (rows > DECODE_ROWS_MAX && to.iter().all(aligned)).then_some(group)
}

/// Words of the targets of a prompt kernel, and how many blocks of outputs they have.
pub(super) fn target_words(targets: &[&(Arc<PackedMatrix>, PlaneRef)]) -> (Vec<u64>, usize) {
    let mut words = Vec::with_capacity(4 * MATRICES_MAX);
    let mut blocks = 0;
    for (matrix, out) in targets {
        words.extend(matrix.packed());
        words.extend([out.ptr, pair(matrix.rows, blocks)]);
        blocks += matrix.rows.div_ceil(TILE_OUTPUTS);
    }
    words.resize(4 * MATRICES_MAX, 0);
    (words, blocks)
}

/// A launch of the prompt form: matrices of one kind. `wide`: marks of rows, of which only tiles with such
/// a row are done.
fn prompt(
    c: &mut Lowering<'_>,
    codes: Codes,
    cols: usize,
    rows: usize,
    kind: Kind,
    targets: &[&(Arc<PackedMatrix>, PlaneRef)],
    wide: Option<u64>,
) {
    let (target_words, blocks) = target_words(targets);
    let mut words = vec![codes.codes, codes.units, codes.sums, pair(rows, cols), pair(targets.len(), blocks)];
    words.push(wide.unwrap_or(0));
    words.extend(target_words);
    let columns = if wide.is_some() { blocks.min(REPAIR_BLOCKS) } else { blocks };
    c.push(Launch {
        kernel: kernel_of("linear_prompt.cu", "linear_prompt", &[kind])
            .define("TILE_ROWS", kind.tile_rows())
            .define("ROW_WARPS", TILE_WARPS)
            .define("BLOCKS", 1),
        grid: [columns as u32, rows.div_ceil(kind.tile_rows()) as u32, 1],
        block: 128 * TILE_WARPS as u32,
        shared: kind.tile_bytes(kind.tile_rows()) as u32,
        args: Args::new().words(&words),
    });
}

/// A launch of the prompt form of a narrow dense matrix.
fn prompt_dense(c: &mut Lowering<'_>, input: PlaneRef, rows: usize, matrix: &PackedMatrix, out: PlaneRef) {
    let args = Args::new().ptr(input.ptr).ptr(matrix.packed()[1]).ptr(out.ptr);
    c.push(Launch {
        kernel: kernel_of("linear_dense.cu", "linear_dense", &[matrix.kind])
            .define("DENSE_DTYPE", matrix.kind.dtype()),
        grid: [matrix.rows.div_ceil(32) as u32, rows.div_ceil(16) as u32, 1],
        block: 512,
        shared: 64 << 10,
        args: args.size(rows).size(matrix.cols).size(matrix.rows),
    });
}

/// A launch of the decode form.
fn decode(
    c: &mut Lowering<'_>,
    x: Buffer,
    input: PlaneRef,
    rows: usize,
    targets: &[(Arc<PackedMatrix>, PlaneRef)],
) -> Result {
    let kinds = kinds_of(targets.iter().map(|(matrix, _)| matrix.kind));
    let groups = groups_of(&kinds);
    let codes = groups.iter().map(|&group| c.codes(x, rows, group)).collect::<Result<Vec<_>>>()?;
    let cols = input.width;
    let (slices, mut class) = (cols.div_ceil(SLICE), rows_class(rows));
    let (mut warps, mut tiles) = few_shape(cols);
    let (processors, shared_max) = (c.facts().processors as usize, c.facts().shared_max as usize);
    let in_turns = targets.iter().map(|(matrix, _)| matrix.rows.div_ceil(tiles * TILE)).sum::<usize>()
        > STREAM_TURN * processors;
    let stream = Stream::of(&kinds, class, cols, shared_max).filter(|_| in_turns);
    let mut few = stream
        .as_ref()
        .map_or_else(|| FewPlaces::of(&kinds, class, [tiles; 2], cols, false), |stream| stream.places);
    if class > 8 || few.bytes > shared_max.min(FEW_BYTES_MAX) {
        class = class.max(16);
    }
    let all_tiles: usize = targets.iter().map(|(matrix, _)| matrix.rows.div_ceil(TILE)).sum();
    let stream = stream.filter(|_| class <= 8);
    let whole_slices = class > 8 || stream.is_none() && rows <= STREAM_ROWS_MAX && all_tiles > STREAM_TILES;
    let whole = Whole::of(&kinds, class, rows, cols, shared_max);
    if whole_slices {
        few = FewPlaces::default();
        Whole { class, warps, tiles, .. } = whole;
    }
    let places = whole.places;
    let mut words = vec![input.ptr];
    words.extend(input_words(&codes));
    words.extend([pair(rows, cols), pair(targets.len(), slices), 0]);
    let blocks_at = words.len() - 1;
    words.extend(places.words());
    words.extend(few.words());
    let mut blocks = 0;
    for (matrix, out) in targets {
        let kind = kinds.iter().position(|&kind| kind == matrix.kind).unwrap_or(0);
        words.extend(matrix.packed());
        words.extend([out.ptr, pair(matrix.rows, kind)]);
        words.push(pair(blocks, form_of(&groups, matrix.kind) as usize));
        let outputs = if matrix.kind.group().is_some() { tiles * TILE } else { 4 * warps };
        blocks += matrix.rows.div_ceil(outputs);
    }
    words.resize(20 + 5 * MATRICES_MAX, 0);
    words[blocks_at] = blocks as u64;
    let mut kernel = kernel_of("linear.cu", "linear", &kinds)
        .define("ROWS", class)
        .define("WHOLE_SLICES", whole_slices as u32)
        .define("COLS", cols)
        .define("THREADS", 32 * warps)
        .define("TILES", tiles);
    if let Some(stream) = stream {
        kernel = kernel.define("STREAM", 1).define("BLOCKS", stream.blocks);
        // As many turns for each block as the card needs, and no more blocks than that takes.
        blocks = blocks.div_ceil(blocks.div_ceil(processors * stream.blocks));
    }
    c.push(Launch {
        kernel,
        grid: [blocks as u32, rows.div_ceil(class) as u32, 1],
        block: 32 * warps as u32,
        shared: if whole_slices { places.bytes } else { few.bytes } as u32,
        args: Args::new().words(&words),
    });
    Ok(())
}

/// Embedding rows of the step's tokens; rows without a token are left.
pub(super) fn lower_embed(
    c: &mut Lowering<'_>,
    table: MatrixRef,
    drawn: Option<(usize, Span)>,
    out: Buffer,
) -> Result {
    let (rows, drawn) = match drawn {
        Some((rows, draws)) => (rows, [c.drawn_tokens(), c.span(draws)]),
        None => (c.shape().rows, [0; 2]),
    };
    let (table, out, step) = (c.matrix(table), c.output(out), c.step());
    let kernel = kernel_of("embed.cu", "embed", &[table.kind]);
    let args = Args::new().words(&table.packed()).ptr(out.ptr).size(table.cols).size(table.rows).step(&step);
    let args = drawn.into_iter().fold(args, Args::ptr);
    c.launch(kernel, [rows, 1, 1], 256, args);
    Ok(())
}
