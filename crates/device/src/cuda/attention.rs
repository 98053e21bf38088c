//! The stage `attention` on CUDA (`kernels/cuda/{attention,attention_few,attention_prompt}.cu`).

use std::sync::Arc;

use super::driver::Result;
use super::kv::KvPages;
use super::launch::{Args, Kernel, Launch};
use super::lower::Lowering;
use super::rope;
use crate::{AttentionShape, Buffer, DeviceError, KvPool, PAGE_TOKENS, WINDOW_ROWS_MAX};

const BLOCK: u32 = 256;
/// `SMALL_ROWS` of the kernels: longer chains are the prompt kernel's.
const SMALL_ROWS: usize = 16;
/// Heads that a warp takes together.
const VECTORS: usize = 8;
/// Rows of a block of the prompt kernel, and blocks of keys that it has room for; the first that the card's
/// shared memory holds.
const PROMPT_FORMS: [(usize, usize); 3] = [(8, 2), (8, 1), (4, 1)];
/// Rows and threads of a block of `attention_warpgroup.cu`, the groups of its heads, and the bytes of its
/// `Room`: query codes, K and V as halves twice, scales twice, ratios of units, what is kept aside of rows,
/// barriers.
const WARPGROUP_ROWS: usize = 16;
const WARPGROUP_BLOCK: u32 = 384;
const WARPGROUP_GROUPS: usize = 4;
const WARPGROUP_ROOM: u32 = 3 * 65_536 + 2 * 5 * 80 * 4 + 2 * 64 * 4 * 4 + 256 * 80 + 11 * 8;
/// Bytes of the kernels' `Stage` and `HalfBlock`: K and V of 64 keys as halves, the latter with scales.
const STAGE_BYTES: usize = 65_536;
const HALF_BLOCK: usize = STAGE_BYTES + 2_048;
/// Tiles of rows from which keys and values become halves once for all of them.
const HALVES_SHARED: usize = 24;
/// Threads of a block of `attention_halves.cu`.
const HALVES_BLOCK: u32 = 128;
/// Rows of a chain that share what is loaded of K and V: as many as the card's shared memory holds.
const SHARED_ROWS: [usize; 2] = [4, 2];
/// Blocks a multiprocessor up to which rows of a chain do not share.
const BLOCKS_APART: usize = 2;
/// Slices of V that are copied ahead for each warp, whatever the number of digits; parts of K and V where a
/// step has one row.
const RING_PARTS: usize = 4;
const FEW_PARTS: usize = 8;
/// Dims of a group.
const GROUP: usize = 64;
/// Blocks of a span.
const SPAN_BLOCKS: usize = 8;
/// Keys of a span: partial results of attention are kept by span.
pub const SPAN_TOKENS: usize = SPAN_BLOCKS * PAGE_TOKENS;
/// Most bytes of partial results: windows and rows that would need more take turns. At 262,144 tokens it is
/// enough for 15 rows of 16 heads of 256. Also most bytes of keys and values as halves, for which the same
/// memory serves: 32,768 tokens of 2 heads.
pub const SPAN_BYTES_MAX: usize = 128 << 20;

/// Bytes of a sequence's keys and values as halves, if it has so many tokens.
pub const fn halves_bytes(tokens: usize, kv_heads: usize) -> usize {
    tokens.div_ceil(SPAN_TOKENS).next_power_of_two() * SPAN_BLOCKS * kv_heads * HALF_BLOCK
}

/// Everything the launches of one call share.
struct Call {
    pages: Arc<KvPages>,
    shape: AttentionShape,
    /// The f32 nearest to `log2(e)/sqrt(head_dim)`.
    scale: f32,
    /// The kernels' `Queries`.
    queries: [u64; 2],
    out: u64,
    /// Tiles of [`VECTORS`] heads of a K/V head, over all K/V heads.
    tiles: usize,
}

/// Rows of windows whose parts are kept together.
#[derive(Clone, Copy)]
struct Turn {
    first_row: usize,
    rows: usize,
    first_window: usize,
    windows: usize,
}

impl Call {
    fn kernel(&self, file: &'static str, name: &'static str) -> Kernel {
        Kernel::new(file, name)
            .define("GROUPS", self.pages.groups() as u32)
            .define("DIGITS", self.pages.digits() as u32)
    }

    /// The `AttentionShape` of long chains.
    fn long_words(&self, spans: usize, rows_max: usize) -> [u64; 4] {
        let [first, second] = self.words(spans, rows_max);
        [first, second, 0, 1]
    }

    /// The first words of the kernels' `AttentionShape`.
    fn words(&self, spans: usize, rows_max: usize) -> [u64; 2] {
        let pair = |low: usize, high: u32| low as u64 | (high as u64) << 32;
        [pair(self.shape.heads, spans as u32), pair(rows_max, self.scale.to_bits())]
    }

    /// Small windows: a block for every span, then the spans of each row and head joined. Windows, and rows
    /// of one, take turns where all their parts would not fit [`SPAN_BYTES_MAX`].
    fn spans(&self, c: &mut Lowering<'_>, rows_max: usize) -> Result {
        let shape = c.shape();
        // A tree's rows see different keys at the same index; and while there is room for a block of each
        // row, they are done sooner apart.
        let blocks = shape.spans * self.tiles * rows_max * shape.windows;
        let apart = rows_max == 1 || shape.tree || blocks <= BLOCKS_APART * c.facts().processors as usize;
        let most = c.facts().shared_max as usize;
        let fits = |rows: &usize| self.room(*rows) <= most;
        let shared = if apart { 1 } else { SHARED_ROWS.into_iter().find(fits).unwrap_or(1) };
        let of_row = self.shape.heads * shape.spans * 4 * (self.pages.groups() * GROUP + 2);
        let together = if shape.spans > 1 { SPAN_BYTES_MAX / of_row } else { usize::MAX };
        let rows = rows_max.min((together / shared * shared).max(shared));
        let windows = (together / rows).clamp(1, shape.windows);
        for first_window in (0..shape.windows).step_by(windows) {
            for first_row in (0..rows_max).step_by(rows) {
                let turn = Turn {
                    first_row,
                    rows: rows.min(rows_max - first_row),
                    first_window,
                    windows: windows.min(shape.windows - first_window),
                };
                self.spans_of(c, turn, shared)?;
            }
        }
        Ok(())
    }

    fn spans_of(&self, c: &mut Lowering<'_>, turn: Turn, shared: usize) -> Result {
        let shape = c.shape();
        let pair = |low: usize, high: usize| low as u64 | (high as u64) << 32;
        let [first, second] = self.words(shape.spans, turn.rows);
        let parts_of_window = self.tiles * turn.rows.div_ceil(shared);
        let words = [first, second, pair(turn.first_row, turn.first_window), 0];
        let parts = turn.windows * turn.rows * self.shape.heads * shape.spans;
        let partial = if shape.spans > 1 { self.partial(c, parts)? } else { [0, 0] };
        let step = c.step();
        let head = || Args::new().step(&step).words(&self.pages.words()).words(&words);
        let args = head().words(&self.queries).ptr(self.out).words(&partial);
        let grid = [shape.spans, parts_of_window, turn.windows];
        let (kernel, room) = match self.few(c).filter(|_| shared == 1 && !shape.tree) {
            Some(form) => form,
            None => {
                (self.kernel("attention.cu", "attention_spans").define("ROWS", shared), self.room(shared))
            }
        };
        c.push(Launch { kernel, grid: grid.map(|n| n as u32), block: BLOCK, shared: room as u32, args });
        if shape.spans > 1 {
            let kernel = self.kernel("attention.cu", "attention_fold").define("ROWS", shared);
            let args = head().ptr(self.out).words(&partial);
            c.launch(kernel, [self.shape.heads, turn.rows, turn.windows], BLOCK, args);
        }
        Ok(())
    }

    /// The kernel of rows alone and its bytes of shared memory; `None` where these do not fit.
    fn few(&self, c: &Lowering<'_>) -> Option<(Kernel, usize)> {
        let room = |parts: &usize| {
            // Scores of 8 vectors beside what every form holds, pages instead of places.
            let scores_and_pages = SPAN_BLOCKS * (VECTORS * PAGE_TOKENS * 4 + 4 - PAGE_TOKENS * 4);
            self.room(1) + scores_and_pages + (parts - RING_PARTS) * self.part_bytes()
        };
        let most = if c.shape().rows == 1 { FEW_PARTS } else { RING_PARTS };
        let fits = |parts: &usize| room(parts) <= c.facts().shared_max as usize;
        let parts = [most, RING_PARTS].into_iter().find(fits)?;
        let kernel = self.kernel("attention_few.cu", "attention_few");
        Some((kernel.define("PARTS", parts / self.pages.digits()), room(&parts)))
    }

    /// Bytes of a part of every warp: of V for each digit 8 dims of all groups.
    fn part_bytes(&self) -> usize {
        SPAN_BLOCKS * VECTORS * self.pages.groups() * PAGE_TOKENS
    }

    /// Bytes of the kernel's `SpanRoom`.
    fn room(&self, rows: usize) -> usize {
        let groups = self.pages.groups();
        // Weights as digits, and maximum, sum and unit of 8 vectors.
        let of_rows = rows * SPAN_BLOCKS * (2 * 32 * 16 + VECTORS * 12);
        let places_and_scales = SPAN_BLOCKS * (groups + 2) * PAGE_TOKENS * 4;
        of_rows + places_and_scales + RING_PARTS * self.part_bytes()
    }

    /// Do warpgroups take long chains, and with how many spans apart? 0: each block of threads walks all
    /// spans.
    fn warpgroup_spans(&self, c: &Lowering<'_>) -> Option<usize> {
        let (of, shape) = (self.shape, c.shape());
        let has_form = c.facts().capability == 90
            && !c.plain_sums()
            && (self.pages.digits(), of.head_dim) == (1, GROUP * WARPGROUP_GROUPS)
            && (of.heads / of.kv_heads).is_multiple_of(VECTORS);
        let blocks = shape.window_rows.div_ceil(WARPGROUP_ROWS) * self.tiles * shape.windows;
        if !has_form || 4 * blocks > 3 * c.facts().processors as usize {
            return has_form.then_some(0);
        }
        // A few rows of one or two spans are done sooner by 8 rows a block of threads.
        let parts = shape.windows * shape.window_rows * of.heads * shape.spans;
        let bytes = 4 * parts * (self.pages.groups() * GROUP + 2);
        (shape.spans > 2 && bytes <= SPAN_BYTES_MAX).then_some(shape.spans)
    }

    /// Long chains by warpgroups.
    fn warpgroups(&self, c: &mut Lowering<'_>, spans: usize) -> Result {
        let shape = c.shape();
        let (rows, tiles) = (shape.window_rows, shape.window_rows.div_ceil(WARPGROUP_ROWS));
        let partial = match spans {
            0 => [0, 0],
            _ => self.partial(c, shape.windows * rows * self.shape.heads * spans)?,
        };
        let step = c.step();
        let words = self.long_words(spans, rows);
        let head = || Args::new().step(&step).words(&self.pages.words()).words(&words);
        let grid = [tiles, self.tiles * spans.max(1), shape.windows];
        let halves = if spans > 0 { None } else { self.halves(c, tiles)? };
        let args = head().words(&self.queries).ptr(self.out).words(&partial);
        c.push(Launch {
            kernel: self
                .kernel("attention_warpgroup.cu", "attention_warpgroup")
                .define("HALVES", u32::from(halves.is_some())),
            grid: grid.map(|n| n as u32),
            block: WARPGROUP_BLOCK,
            shared: WARPGROUP_ROOM,
            args: args.words(&halves.unwrap_or_default()),
        });
        if spans > 0 {
            let kernel = self.kernel("attention.cu", "attention_fold").define("ROWS", 1);
            let args = head().ptr(self.out).words(&partial);
            c.launch(kernel, [self.shape.heads, rows, shape.windows], BLOCK, args);
        }
        Ok(())
    }

    /// Makes halves of the keys and values of long chains where that pays and they fit: the kernels'
    /// `Halves`.
    fn halves(&self, c: &mut Lowering<'_>, tiles: usize) -> Result<Option<[u64; 2]>> {
        let (shape, kv_heads) = (c.shape(), self.shape.kv_heads);
        let blocks = shape.spans * SPAN_BLOCKS;
        let bytes = shape.windows * kv_heads * blocks * HALF_BLOCK;
        if tiles < HALVES_SHARED || bytes > SPAN_BYTES_MAX {
            return Ok(None);
        }
        let halves = [c.scratch("attention spans", bytes)?, blocks as u64];
        c.push(Launch {
            kernel: self.kernel("attention_halves.cu", "attention_halves"),
            grid: [blocks, kv_heads, shape.windows].map(|n| n as u32),
            block: HALVES_BLOCK,
            shared: STAGE_BYTES as u32,
            args: Args::new().step(&c.step()).words(&self.pages.words()).words(&halves),
        });
        Ok(Some(halves))
    }

    /// The kernels' `Partial` for so many spans.
    fn partial(&self, c: &mut Lowering<'_>, parts: usize) -> Result<[u64; 2]> {
        let values = c.scratch("attention spans", 4 * parts * self.pages.groups() * GROUP)?;
        Ok([values, c.scratch("attention folds", 8 * parts)?])
    }

    /// Long chains.
    fn prompt(&self, c: &mut Lowering<'_>) -> Result {
        if let Some(spans) = self.warpgroup_spans(c) {
            return self.warpgroups(c, spans);
        }
        let shape = c.shape();
        let args = Args::new().step(&c.step()).words(&self.pages.words()).words(&self.long_words(0, 0));
        let staged = self.pages.block_bytes();
        let room =
            |&(rows, stages): &(usize, usize)| stages * staged + self.pages.groups() * 8 * 2 * 4 * 32 * rows;
        let most = c.facts().shared_max as usize;
        let form = PROMPT_FORMS.into_iter().find(|form| room(form) <= most);
        let form @ (rows, stages) = form.unwrap_or(PROMPT_FORMS[PROMPT_FORMS.len() - 1]);
        let tiles = shape.window_rows.div_ceil(rows);
        c.push(Launch {
            kernel: self
                .kernel("attention_prompt.cu", "attention_prompt")
                .define("WARPS", rows as u32)
                .define("STAGES", stages as u32),
            grid: [tiles as u32, self.tiles as u32, shape.windows as u32],
            block: 32 * rows as u32,
            shared: room(&form) as u32,
            args: args.words(&self.queries).ptr(self.out),
        });
        Ok(())
    }
}

/// [`crate::Device::attention`].
pub(super) fn lower(
    c: &mut Lowering<'_>,
    q: Buffer,
    shape: AttentionShape,
    pool: KvPool,
    out: Buffer,
) -> Result {
    let pages = c.kv(pool);
    let fits = shape.kv_heads == pages.shape.kv_heads && shape.head_dim == pages.shape.head_dim;
    if !fits || !shape.heads.is_multiple_of(shape.kv_heads) {
        let message = format!("{shape:?} over pages of {:?}", pages.shape);
        return Err(DeviceError::Failed { stage: "attention", message });
    }
    let scale = (std::f64::consts::LOG2_E / (shape.head_dim as f64).sqrt()) as f32;
    let tiles = (shape.heads / shape.kv_heads).div_ceil(VECTORS) * shape.kv_heads;
    let queries = rope::digits(c, q, shape)?;
    let out = c.output(out).ptr;
    let call = Call { pages, shape, scale, queries, out, tiles };
    let step = c.shape();
    let long = step.window_rows > SMALL_ROWS;
    if !long || step.windows > 1 || step.tree {
        let most = if step.tree { WINDOW_ROWS_MAX } else { SMALL_ROWS };
        call.spans(c, step.window_rows.min(most))?;
    }
    if long {
        call.prompt(c)?;
    }
    Ok(())
}

/// A block of the kernels is a page.
const _: () = assert!(PAGE_TOKENS == 64);
