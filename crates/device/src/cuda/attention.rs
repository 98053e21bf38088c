//! The stage `attention` on CUDA (`kernels/cuda/attention.cu`).

use super::driver::Result;
use super::kv::KvPages;
use super::launch::{Args, Kernel, Launch};
use super::lower::Lowering;
use crate::{AttentionShape, Buffer, DeviceError, KvPool, PAGE_TOKENS, WINDOW_ROWS_MAX};

const BLOCK: u32 = 256;
/// `SMALL_ROWS` of the kernels: longer chains are the prompt kernel's.
const SMALL_ROWS: usize = 16;
/// Heads that a warp takes together, and rows of a block of the prompt kernel.
const VECTORS: usize = 8;
const PROMPT_ROWS: usize = 8;
/// `FOLD_SPANS` of the kernels is of no concern here; spans and heads have no bound but memory.
const GROUP: usize = 64;

/// Everything the launches of one call share.
struct Call {
    pages: std::sync::Arc<KvPages>,
    shape: AttentionShape,
    /// The f32 nearest to `log2(e)/sqrt(head_dim)`.
    scale: f32,
    q: u64,
    out: u64,
    /// Tiles of [`VECTORS`] heads of a K/V head, over all K/V heads.
    tiles: usize,
}

impl Call {
    fn kernel(&self, name: &'static str) -> Kernel {
        Kernel::new("attention.cu", name)
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
        let head = || Args::new().step(&c.step()).words(&self.pages.words()).words(&words);
        let (args, fold) =
            (head().ptr(self.q).ptr(self.out).words(&partial), head().ptr(self.out).words(&partial));
        let grid = [shape.spans, self.tiles * rows_max, shape.windows];
        c.launch(self.kernel("attention_spans"), grid, BLOCK, args);
        if shape.spans > 1 {
            let grid = [self.shape.heads, rows_max, shape.windows];
            c.launch(self.kernel("attention_fold"), grid, BLOCK, fold);
        }
        Ok(())
    }

    /// Long chains.
    fn prompt(&self, c: &mut Lowering<'_>) {
        let shape = c.shape();
        let args = Args::new().step(&c.step()).words(&self.pages.words()).words(&self.words(0, 0));
        let staged = self.pages.block_bytes();
        let held = self.pages.groups() * 8 * 2 * 4 * BLOCK as usize;
        let tiles = shape.window_rows.div_ceil(PROMPT_ROWS);
        c.push(Launch {
            kernel: self.kernel("attention_prompt"),
            grid: [tiles as u32, self.tiles as u32, shape.windows as u32],
            block: BLOCK,
            shared: (2 * staged + held) as u32,
            args: args.ptr(self.q).ptr(self.out),
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
    let (q, out) = (c.plane(q).ptr, c.output(out).ptr);
    let call = Call { pages, shape, scale, q, out, tiles };
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
