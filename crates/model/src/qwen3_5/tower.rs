//! The vision tower's weights, and what it works in (`docs/model.md` section 9).

use device::{
    AttentionShape, Buffer, Device, DeviceError, KvForm, KvPool, KvShape, MatrixRef, PAGE_TOKENS, Rotary,
    VectorRef, host_math,
};

use super::OpenError;
use super::names::VISION;
use super::vision_config::VisionConfig;
use super::weights::Loader;

/// Fewest patches of a chunk of work, enough to pay for reading the weights, and most.
const CHUNK_MIN: usize = 256;
const CHUNK_MAX: usize = 2048;
/// Most pictures that are encoded together.
pub(super) const PICTURES_MAX: usize = 32;

/// Refuses, by the stage's name, a device without the stages of a vision tower.
pub fn takes_pictures(device: &mut dyn Device) -> Result<(), DeviceError> {
    let (from, to) = (device.buffer(1, 1)?, device.buffer(1, 1)?);
    device.copy_values(from, 0, 1, to, 0)
}

/// LayerNorm's weight and bias.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    pub(super) weight: VectorRef,
    pub(super) bias: VectorRef,
}

/// A linear layer with a bias.
#[derive(Clone, Copy, Debug)]
pub(super) struct Linear {
    pub(super) weight: MatrixRef,
    pub(super) bias: VectorRef,
}

/// One block.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) norm1: Norm,
    /// `[3 W, W]`: q, k, v.
    pub(super) qkv: Linear,
    /// `[W, W]`.
    pub(super) proj: Linear,
    pub(super) norm2: Norm,
    /// `[I, W]`.
    pub(super) fc1: Linear,
    /// `[W, I]`.
    pub(super) fc2: Linear,
}

/// The tower's weights.
#[derive(Debug)]
pub(super) struct TowerWeights {
    /// `[W, patch values]`.
    pub(super) patch: Linear,
    /// The position table `[side, side, W]`.
    pub(super) positions: VectorRef,
    pub(super) blocks: Vec<Block>,
    /// The merger's norm.
    pub(super) norm: Norm,
    /// `[4 W, 4 W]`.
    pub(super) fc1: Linear,
    /// `[H, 4 W]`.
    pub(super) fc2: Linear,
}

impl TowerWeights {
    pub(super) fn load(loader: &mut Loader<'_>, v: &VisionConfig) -> Result<Self, OpenError> {
        let (w, inner) = (v.hidden, v.intermediate);
        let name = |rest: &str| format!("{VISION}{rest}");
        let patch = loader.biased(&name("patch_embed.proj"), w, v.patch_values())?;
        let positions = loader.vector(&name("pos_embed.weight"), &[v.table_side * v.table_side, w], |x| x)?;
        let mut blocks = Vec::with_capacity(v.depth);
        for at in 0..v.depth {
            let name = |rest: &str| format!("{VISION}blocks.{at}.{rest}");
            blocks.push(Block {
                norm1: loader.layer_norm(&name("norm1"), w)?,
                qkv: loader.biased(&name("attn.qkv"), 3 * w, w)?,
                proj: loader.biased(&name("attn.proj"), w, w)?,
                norm2: loader.layer_norm(&name("norm2"), w)?,
                fc1: loader.biased(&name("mlp.linear_fc1"), inner, w)?,
                fc2: loader.biased(&name("mlp.linear_fc2"), w, inner)?,
            });
        }
        Ok(Self {
            patch,
            positions,
            blocks,
            norm: loader.layer_norm(&name("merger.norm"), w)?,
            fc1: loader.biased(&name("merger.linear_fc1"), v.merged(), v.merged())?,
            fc2: loader.biased(&name("merger.linear_fc2"), v.out, v.merged())?,
        })
    }
}

impl Loader<'_> {
    fn biased(&mut self, module: &str, rows: usize, cols: usize) -> Result<Linear, OpenError> {
        let weight = self.matrix(module, rows, cols)?;
        Ok(Linear { weight, bias: self.vector(&format!("{module}.bias"), &[rows], |x| x)? })
    }

    fn layer_norm(&mut self, module: &str, width: usize) -> Result<Norm, OpenError> {
        let weight = self.vector(&format!("{module}.weight"), &[width], |x| x)?;
        Ok(Norm { weight, bias: self.vector(&format!("{module}.bias"), &[width], |x| x)? })
    }
}

/// Activations of the tower: `P` patches of all pictures that are encoded together, `C` of a chunk, `W` the
/// width.
#[derive(Debug)]
pub(super) struct TowerScratch<B = Buffer> {
    /// Residual stream `[P, W]`.
    pub(super) x: B,
    /// Queries of the block `[P, W]`.
    pub(super) q: B,
    /// Patch rows `[C, patch values]`.
    pub(super) patches: B,
    /// Residual stream of the chunk `[C, W]`.
    pub(super) chunk: B,
    /// `[C, W]`.
    pub(super) normed: B,
    /// What attention or MLP add `[C, W]`.
    pub(super) update: B,
    /// `[C, 3 W]`.
    pub(super) qkv: B,
    /// q, k, v and the attended values `[C, W]`.
    pub(super) parts: [B; 4],
    /// `[C, I]`.
    pub(super) inner: B,
    /// `[C / 4, 4 W]`.
    pub(super) merged: [B; 2],
    /// `[C / 4, H]`.
    pub(super) out: B,
}

impl<B> TowerScratch<B> {
    /// Makes every buffer with `make(rows, width)`.
    pub(super) fn build<E>(
        v: &VisionConfig,
        tokens: usize,
        chunk: usize,
        mut make: impl FnMut(usize, usize) -> Result<B, E>,
    ) -> Result<Self, E> {
        let (patches, w, area) = (tokens * v.merge * v.merge, v.hidden, v.merge * v.merge);
        Ok(Self {
            x: make(patches, w)?,
            q: make(patches, w)?,
            patches: make(chunk, v.patch_values())?,
            chunk: make(chunk, w)?,
            normed: make(chunk, w)?,
            update: make(chunk, w)?,
            qkv: make(chunk, 3 * w)?,
            parts: [make(chunk, w)?, make(chunk, w)?, make(chunk, w)?, make(chunk, w)?],
            inner: make(chunk, v.intermediate)?,
            merged: [make(chunk / area, v.merged())?, make(chunk / area, v.merged())?],
            out: make(chunk / area, v.out)?,
        })
    }
}

/// Patches of a chunk of work, whole merged blocks: half of a step's rows, so that a chunk is short beside a
/// step.
pub(super) fn chunk_rows(v: &VisionConfig, rows_max: usize) -> usize {
    (rows_max / 2).clamp(CHUNK_MIN, CHUNK_MAX).next_multiple_of(v.merge * v.merge)
}

/// Heads of a block.
pub(super) fn shape(v: &VisionConfig) -> AttentionShape {
    AttentionShape { heads: v.heads, kv_heads: v.heads, head_dim: v.hidden / v.heads }
}

/// K/V pages for `tokens` tokens of several pictures: each may leave its last page partly empty.
fn pages(v: &VisionConfig, tokens: usize) -> usize {
    (tokens * v.merge * v.merge).div_ceil(PAGE_TOKENS) + PICTURES_MAX
}

/// Places of the rotary table: a picture has at least one block of rows, so no more columns than this.
fn places(v: &VisionConfig, tokens: usize) -> usize {
    tokens * v.merge
}

/// Bytes of K/V and rotary tables.
pub(super) fn fixed_bytes(v: &VisionConfig, tokens: usize) -> u64 {
    let dim = v.hidden / v.heads;
    // Heads of 72 are no whole vectors: devices pad values to 16 lanes.
    let head = (dim + dim.next_multiple_of(16)) * KvForm::Int16.bytes() + 4 * (dim.div_ceil(64) + 1);
    (pages(v, tokens) * PAGE_TOKENS * v.heads * head + places(v, tokens) * dim * 4) as u64
}

/// What the tower works in on a device.
#[derive(Debug)]
pub(super) struct Tower {
    pub(super) scratch: TowerScratch,
    /// K/V of one block; blocks follow one another.
    pub(super) kv: KvPool,
    pub(super) rotary: Rotary,
    /// Most tokens that are encoded together.
    pub(super) tokens_max: usize,
    /// Patches of a chunk of work.
    pub(super) chunk: usize,
}

impl Tower {
    pub(super) fn new(
        v: &VisionConfig,
        tokens: usize,
        chunk: usize,
        device: &mut dyn Device,
    ) -> Result<Self, DeviceError> {
        let shape = shape(v);
        let kv = KvShape {
            pages: pages(v, tokens),
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            form: KvForm::Int16,
        };
        Ok(Self {
            scratch: TowerScratch::build(v, tokens, chunk, |rows, width| device.buffer(rows, width))?,
            kv: device.kv_pool(kv)?,
            rotary: rotary(v, places(v, tokens), device)?,
            tokens_max: tokens,
            chunk,
        })
    }
}

/// Both axes turn by the same `head_dim / 4` frequencies: rows the first quarter of a head's entries,
/// columns the next.
fn rotary(v: &VisionConfig, places: usize, device: &mut dyn Device) -> Result<Rotary, DeviceError> {
    let half = v.hidden / v.heads / 2;
    let (cos, sin) = host_math::rotary_table(places, v.rope_theta, half);
    let both = |table: Vec<f64>| -> Vec<f64> {
        table.chunks_exact(half / 2).flat_map(|row| row.iter().chain(row)).copied().collect()
    };
    let axes: Vec<u8> = (0..half).map(|j| if j < half / 2 { 1 } else { 2 }).collect();
    device.rotary(&both(cos), &both(sin), &axes)
}
