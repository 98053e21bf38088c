//! The stage `attention` on CUDA (`kernels/cuda/{attention,attention_prompt}.cu`).

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
/// Heads that a warp takes together, and rows of a block of the prompt kernel.
const VECTORS: usize = 8;
const PROMPT_ROWS: usize = 8;
/// Rows of a chain that share what is loaded of K and V.
const SHARED_ROWS: usize = 4;
/// Blocks a multiprocessor up to which rows of a chain do not share.
const BLOCKS_APART: usize = 2;
/// Dims of a group.
const GROUP: usize = 64;
/// Blocks of a span.
const SPAN_BLOCKS: usize = 8;

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

impl Call {
    fn kernel(&self, file: &'static str, name: &'static str) -> Kernel {
        Kernel::new(file, name)
            .define("GROUPS", self.pages.groups() as u32)
            .define("DIGITS", self.pages.digits() as u32)
    }

    /// The kernels' `AttentionShape`.
    fn words(&self, spans: usize, rows_max: usize) -> [u64; 2] {
        let pair = |low: usize, high: u32| low as u64 | (high as u64) << 32;
        [pair(self.shape.heads, spans as u32), pair(rows_max, self.scale.to_bits())]
    }

    /// Small windows: a block for every span, then the spans of each row and head joined.
    fn spans(&self, c: &mut Lowering<'_>, rows_max: usize) -> Result {
        let shape = c.shape();
        let words = self.words(shape.spans, rows_max);
        let parts = shape.windows * rows_max * self.shape.heads * shape.spans;
        let partial = match shape.spans {
            0 | 1 => [0, 0],
            _ => [
                c.scratch("attention spans", 4 * parts * self.pages.groups() * GROUP)?,
                c.scratch("attention folds", 8 * parts)?,
            ],
        };
        let step = c.step();
        let head = || Args::new().step(&step).words(&self.pages.words()).words(&words);
        // A tree's rows see different keys at the same index; and while there is room for a block of each row, they
        // are done sooner apart.
        let blocks = shape.spans * self.tiles * rows_max * shape.windows;
        let apart = rows_max == 1 || shape.tree || blocks <= BLOCKS_APART * c.processors();
        let rows = if apart { 1 } else { SHARED_ROWS };
        let args = head().words(&self.queries).ptr(self.out).words(&partial);
        c.push(Launch {
            kernel: self.kernel("attention.cu", "attention_spans").define("ROWS", rows),
            grid: [shape.spans, self.tiles * rows_max.div_ceil(rows), shape.windows].map(|n| n as u32),
            block: BLOCK,
            shared: self.room(rows) as u32,
            args,
        });
        if shape.spans > 1 {
            let kernel = self.kernel("attention.cu", "attention_fold").define("ROWS", rows);
            let args = head().ptr(self.out).words(&partial);
            c.launch(kernel, [self.shape.heads, rows_max, shape.windows], BLOCK, args);
        }
        Ok(())
    }

    /// Bytes of the kernel's `SpanRoom`.
    fn room(&self, rows: usize) -> usize {
        let groups = self.pages.groups();
        // Weights as digits, and maximum, sum and unit of 8 vectors.
        let of_rows = rows * SPAN_BLOCKS * (2 * 32 * 16 + VECTORS * 12);
        let places_and_scales = SPAN_BLOCKS * (groups + 2) * PAGE_TOKENS * 4;
        // Four slices of V are copied ahead for each warp, whatever the number of digits.
        of_rows + places_and_scales + SPAN_BLOCKS * 4 * VECTORS * groups * PAGE_TOKENS
    }

    /// Long chains.
    fn prompt(&self, c: &mut Lowering<'_>) {
        let shape = c.shape();
        let args = Args::new().step(&c.step()).words(&self.pages.words()).words(&self.words(0, 0));
        let staged = self.pages.block_bytes();
        let held = self.pages.groups() * 8 * 2 * 4 * BLOCK as usize;
        let tiles = shape.window_rows.div_ceil(PROMPT_ROWS);
        c.push(Launch {
            kernel: self.kernel("attention_prompt.cu", "attention_prompt"),
            grid: [tiles as u32, self.tiles as u32, shape.windows as u32],
            block: BLOCK,
            shared: (2 * staged + held) as u32,
            args: args.words(&self.queries).ptr(self.out),
        });
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
        call.prompt(c);
    }
    Ok(())
}

/// A block of the kernels is a page.
const _: () = assert!(PAGE_TOKENS == 64);
