//! Stages of the vision tower on CUDA (`kernels/cuda/vision_rows.cu`, `vision_attention.cu`).

use super::Cuda;
use super::command::Command;
use super::driver::Result;
use super::kv::KvPages;
use super::launch::{Args, Kernel, Launch};
use super::lower::Lowering;
use super::rope;
use crate::step::{check_copy, check_keys};
use crate::{
    Activation, AttentionShape, Between, Buffer, CHANNELS, DeviceError, KvPool, Pixels, Rotary, VectorRef,
};

const BLOCK: u32 = 256;
/// Values of a block of the elementwise kernels.
const VALUES: usize = 4 * BLOCK as usize;
/// Rows of a block of the norm.
const NORM_ROWS: usize = 8;
/// Warps of a block of attention; a warp has 8 rows.
const WARPS: usize = 8;
/// Widest heads of which registers hold two blocks of a multiprocessor.
const TWO_BLOCKS_DIM: usize = 80;
/// Most bytes of rows that one launch makes out of bytes uploaded with it.
const SPAN_ROWS_BYTES: usize = 2 << 20;
/// Dims of a group, and keys of a block.
const GROUP: usize = 64;

fn kernel(name: &'static str) -> Kernel {
    Kernel::new("vision_rows.cu", name)
}

fn failed<T>(stage: &'static str, message: String) -> Result<T> {
    Err(DeviceError::Failed { stage, message })
}

/// What the host checks before it records a stage.
impl Cuda {
    pub(super) fn record_copy_values(
        &mut self,
        from: Buffer,
        first: usize,
        rows: usize,
        to: Buffer,
        at: usize,
    ) -> Result {
        let stage = "copy_values";
        let (values, width) = (rows * self.width(from), self.width(to));
        check_copy(from, to, values, width)?;
        self.place(stage, from, first, values)?;
        self.place(stage, to, at, values)?;
        self.record(Command::CopyValues { from, first, values, to, at })
    }

    pub(super) fn record_patch_rows(&mut self, pixels: Pixels<'_>, to: Buffer, at: usize) -> Result {
        let (stage, width) = ("patch_rows", self.width(to));
        let [rows, area] = pixels.layout(stage, width)?;
        self.place(stage, to, at, rows * width)?;
        let levels: Vec<u8> = pixels.levels.iter().flatten().flat_map(|level| level.to_le_bytes()).collect();
        let most = SPAN_ROWS_BYTES / (CHANNELS * area);
        if most == 0 {
            return failed(
                stage,
                format!("patches of {area} pixels; at most {SPAN_ROWS_BYTES} bytes a patch"),
            );
        }
        for (part, pixels) in pixels.bytes.chunks(most * CHANNELS * area).enumerate() {
            let (at, rows) = (at + part * most, pixels.len() / (CHANNELS * area));
            let bytes = self.bytes(&[&levels, pixels])?;
            self.record(Command::PatchRows { bytes, rows, area, to, at })?;
        }
        Ok(())
    }

    pub(super) fn record_between_rows(
        &mut self,
        table: VectorRef,
        between: &[Between],
        to: Buffer,
        at: usize,
    ) -> Result {
        let (stage, width) = ("between_rows", self.width(to));
        Between::check(stage, between, self.tables.vectors[table.0 as usize].len, width)?;
        self.place(stage, to, at, between.len() * width)?;
        let most = SPAN_ROWS_BYTES / size_of::<Between>();
        for (part, between) in between.chunks(most).enumerate() {
            let bytes: Vec<u8> = between
                .iter()
                .flat_map(|place| {
                    let rows = place.rows.into_iter().flat_map(u32::to_le_bytes);
                    rows.chain(place.parts.into_iter().flat_map(f64::to_le_bytes))
                })
                .collect();
            let (at, rows) = (at + part * most, between.len());
            let bytes = self.bytes(&[&bytes])?;
            self.record(Command::BetweenRows { table, bytes, rows, to, at })?;
        }
        Ok(())
    }

    /// Refuses a vector of another length than a buffer's rows.
    pub(super) fn check_vector(&self, stage: &'static str, vector: VectorRef, width: usize) -> Result {
        match self.tables.vectors[vector.0 as usize].len {
            len if len == width => Ok(()),
            len => failed(stage, format!("a vector of {len} for rows of {width}")),
        }
    }

    pub(super) fn record_rope_2d(
        &mut self,
        qkv: Buffer,
        bias: VectorRef,
        rotary: Rotary,
        shape: AttentionShape,
        parts: [Buffer; 3],
    ) -> Result {
        let (stage, rows) = ("rope_2d", self.shape.rows);
        let (table, width) = (&self.tables.rotaries[rotary.0 as usize], shape.heads * shape.head_dim);
        table.check(stage, self.reach.position)?;
        if 2 * table.half() != shape.head_dim || shape.kv_heads != shape.heads {
            let message =
                format!("{shape:?} turned in {} dims: whole heads, q, k and v alike", 2 * table.half());
            return failed(stage, message);
        }
        self.check_vector(stage, bias, 3 * width)?;
        self.check_width(stage, qkv, 3 * width)?;
        parts.into_iter().try_for_each(|part| self.check_width(stage, part, width))?;
        self.check_rows(stage, rows, &[qkv])?;
        self.check_rows(stage, rows, &parts)?;
        self.record(Command::Rope2d { qkv, bias, rotary, shape, parts })
    }

    pub(super) fn record_full_attention(
        &mut self,
        q: Buffer,
        shape: AttentionShape,
        pool: KvPool,
        keys: &[usize],
        out: Buffer,
    ) -> Result {
        let stage = "full_attention";
        self.check_step_pages(stage, pool)?;
        check_keys(stage, &self.step, keys)?;
        self.check_rows(stage, self.shape.rows, &[q, out])?;
        let width = shape.heads * shape.head_dim;
        self.check_width(stage, q, width)?;
        self.check_width(stage, out, width)?;
        if self.shape.tree {
            return failed(stage, "a window is a tree".into());
        }
        // Words of each window: its keys, and where its pages begin; then all pages.
        let windows = self.step.windows();
        let (mut words, mut pages) = (Vec::new(), Vec::new());
        for (window, &keys) in windows.iter().zip(keys) {
            words.extend([keys as u32, (2 * windows.len() + pages.len()) as u32]);
            pages.extend_from_slice(&window.pages[..keys.div_ceil(GROUP)]);
        }
        words.extend(pages);
        let words = self.words(&words)?;
        self.record(Command::FullAttention { q, shape, pool, words, out })
    }
}

/// A launch over `rows` rows of `width` values.
fn elementwise(c: &mut Lowering<'_>, name: &'static str, args: Args, rows: usize, width: usize) {
    c.launch(kernel(name), [width.div_ceil(VALUES), rows, 1], BLOCK, args.size(width));
}

/// Lowers a command of this file.
pub(super) fn lower(c: &mut Lowering<'_>, command: &Command) -> Result {
    use Command as C;
    match *command {
        C::PatchRows { bytes, rows, area, to, at } => {
            let (levels, to) = (c.span(bytes), c.output(to));
            let pixels = levels + 4 * 256 * CHANNELS as u64;
            let args = Args::new().ptr(pixels).ptr(levels).ptr(to.ptr + 4 * (at * to.width) as u64);
            c.launch(kernel("patch_rows"), [rows, 1, 1], BLOCK, args.size(area).size(to.width));
        }
        C::BetweenRows { table, bytes, rows, to, at } => {
            let (table, between, to) = (c.vector(table).0, c.span(bytes), c.output(to));
            let args = Args::new().ptr(table).ptr(between).ptr(to.ptr + 4 * (at * to.width) as u64);
            c.launch(kernel("between_rows"), [rows, 1, 1], BLOCK, args.size(to.width));
        }
        C::CopyValues { from, first, values, to, at } => {
            let (from, to) = (c.plane(from), c.output(to));
            let place = |ptr: u64, row: usize, width: usize| ptr + 4 * (row * width) as u64;
            let args = Args::new().ptr(place(from.ptr, first, from.width)).ptr(place(to.ptr, at, to.width));
            let blocks = values.div_ceil(VALUES).max(1);
            c.launch(kernel("copy_span"), [blocks, 1, 1], BLOCK, args.u64(values as u64));
        }
        C::LayerNorm { x, rows, weight, bias, eps, out } => {
            let ((weight, width), (bias, _)) = (c.vector(weight), c.vector(bias));
            let args = Args::new().ptr(c.plane(x).ptr).ptr(weight).ptr(bias).size(rows).size(width);
            let args = args.f32(f32::from_bits(eps)).ptr(c.output(out).ptr);
            c.launch(kernel("layer_norm"), [rows.div_ceil(NORM_ROWS), 1, 1], BLOCK, args);
        }
        C::Bias { x, rows, bias, act } => {
            let name = match act {
                Activation::None => "bias",
                Activation::GeluTanh => "bias_gelu_tanh",
                Activation::GeluErf => "bias_gelu_erf",
            };
            let (bias, width) = c.vector(bias);
            let args = Args::new().ptr(c.output(x).ptr).ptr(bias);
            elementwise(c, name, args, rows, width);
        }
        C::AddBias { x, delta, rows, bias } => {
            let (bias, width) = c.vector(bias);
            let args = Args::new().ptr(c.output(x).ptr).ptr(c.plane(delta).ptr).ptr(bias);
            elementwise(c, "add_bias", args, rows, width);
        }
        C::Rope2d { qkv, bias, rotary, shape, parts } => {
            let (table, bias) = (c.rotary(rotary).words(), c.vector(bias).0);
            let args = Args::new().step(&c.step()).words(&table).ptr(c.plane(qkv).ptr).ptr(bias);
            let [q, k, v] = parts.map(|part| c.output(part).ptr);
            let args = args.size(shape.heads).ptr(q).ptr(k).ptr(v);
            c.launch(kernel("rope_2d"), [c.shape().rows, 3, 1], BLOCK, args);
        }
        C::FullAttention { q, shape, pool, words, out } => {
            return full_attention(c, q, shape, pool, c.span(words), out);
        }
        _ => unreachable!("only stages of this file are lowered here"),
    }
    Ok(())
}

/// Bytes of the kernel's `Room`; `last`: dims of the last group.
fn room(pages: &KvPages, last: usize) -> usize {
    let (groups, digits) = (pages.groups(), pages.digits());
    let eights = (groups - 1) * 8 + last / 8;
    let last_bytes = if last <= 16 { 16 } else { GROUP };
    let keys = ((groups - 1) * GROUP + last_bytes) * GROUP;
    let staged = digits * (keys + eights * 8 * GROUP) + 4 * (groups + 1) * GROUP;
    2 * staged + eights * 2 * 32 * WARPS * 4
}

/// [`crate::Device::full_attention`]; `words` are those of [`Cuda::record_full_attention`].
fn full_attention(
    c: &mut Lowering<'_>,
    q: Buffer,
    shape: AttentionShape,
    pool: KvPool,
    words: u64,
    out: Buffer,
) -> Result {
    let pages = c.kv(pool);
    let AttentionShape { heads, kv_heads, head_dim } = shape;
    let fits = kv_heads == pages.shape.kv_heads && head_dim == pages.shape.head_dim;
    if !fits || !heads.is_multiple_of(kv_heads) {
        let message = format!("{shape:?} over pages of {:?}", pages.shape);
        return failed("full_attention", message);
    }
    let scale = (std::f64::consts::LOG2_E / (head_dim as f64).sqrt()) as f32;
    let queries = rope::digits(c, q, shape)?;
    let out = c.output(out).ptr;
    let last = ((head_dim - 1) % GROUP + 1).next_multiple_of(8);
    let shared_max = c.driver().facts().shared_max as usize;
    if room(&pages, last) > shared_max {
        let message =
            format!("heads of {head_dim} of a picture need more shared memory than {shared_max} bytes");
        return failed("full_attention", message);
    }
    let step = c.shape();
    let sizes = [heads as u64, (scale.to_bits() as u64) << 32];
    let args = Args::new().step(&c.step()).words(&pages.words()).words(&sizes).ptr(words);
    c.push(Launch {
        kernel: Kernel::new("vision_attention.cu", "full_attention")
            .define("GROUPS", pages.groups())
            .define("DIGITS", pages.digits())
            .define("LAST", last)
            .define("BLOCKS", 1 + u32::from(head_dim <= TWO_BLOCKS_DIM)),
        grid: [step.window_rows.div_ceil(8 * WARPS), heads, step.windows].map(|n| n as u32),
        block: 32 * WARPS as u32,
        shared: room(&pages, last) as u32,
        args: args.words(&queries).ptr(out),
    });
    Ok(())
}
