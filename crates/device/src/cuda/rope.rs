//! Norm and rotation of queries and keys on CUDA (`kernels/cuda/rope.cu`).

use std::sync::Arc;

use super::driver::{Driver, Result};
use super::launch::{Args, Kernel};
use super::lower::Lowering;
use super::memory::DeviceMemory;
use crate::{AttentionShape, Buffer, DeviceError, Rotary, VectorRef};

/// Heads of a block of threads, a warp each.
const HEADS: usize = 4;
/// Dims of a group of query codes.
const GROUP: usize = 64;
/// The widest head that a warp holds.
pub(super) const HEAD_DIM_MAX: usize = 256;

/// Rotary tables `[positions, half]` and the axis of each frequency.
pub(super) struct RotaryTable {
    cos: DeviceMemory,
    sin: DeviceMemory,
    axes: DeviceMemory,
    half: usize,
    positions: usize,
}

impl RotaryTable {
    pub(super) fn new(driver: &Arc<dyn Driver>, cos: &[f32], sin: &[f32], axes: &[u8]) -> Result<Self> {
        let half = axes.len();
        Ok(Self {
            cos: DeviceMemory::of_f32(driver, "rotary", cos)?,
            sin: DeviceMemory::of_f32(driver, "rotary", sin)?,
            axes: DeviceMemory::of(driver, "rotary", axes)?,
            half,
            positions: cos.len() / half.max(1),
        })
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.cos.bytes() + self.sin.bytes() + self.axes.bytes()
    }

    /// Refuses a step whose highest position the tables do not have.
    pub(super) fn check(&self, stage: &'static str, highest: Option<u32>) -> Result {
        match highest.filter(|&position| self.half > 0 && position as usize >= self.positions) {
            None => Ok(()),
            Some(position) => Err(DeviceError::Failed {
                stage,
                message: format!("rotary position {position}, the table has {}", self.positions),
            }),
        }
    }

    /// Frequencies.
    pub(super) fn half(&self) -> usize {
        self.half
    }

    /// The kernels' `Rotary`.
    pub(super) fn words(&self) -> [u64; 4] {
        let sizes = self.half as u64 | (self.positions as u64) << 32;
        [self.cos.ptr(), self.sin.ptr(), self.axes.ptr(), sizes]
    }
}

/// Where keys and values go in the same launch: the values, and the kernels' `KvPool`.
pub(super) type Append = (Buffer, [u64; 4]);

/// [`crate::Device::qk_norm_rope`] of the buffers `[qg, k, q]`, with [`crate::Device::kv_append`] in the same
/// launch if asked for.
pub(super) fn lower(
    c: &mut Lowering<'_>,
    [qg, k, q]: [Buffer; 3],
    weights: [VectorRef; 2],
    eps: f32,
    rotary: Rotary,
    shape: AttentionShape,
    append: Option<Append>,
) -> Result {
    let AttentionShape { heads, kv_heads, head_dim } = shape;
    let table = c.rotary(rotary);
    if head_dim > HEAD_DIM_MAX || 2 * table.half > head_dim {
        let message = format!(
            "heads of {head_dim} turned in {} dims; supported: heads up to {HEAD_DIM_MAX}, turned inside",
            2 * table.half
        );
        return Err(DeviceError::Failed { stage: "qk_norm_rope", message });
    }
    let pair = |low: u32, high: u32| low as u64 | (high as u64) << 32;
    let sizes = [pair(heads as u32, kv_heads as u32), pair(head_dim as u32, eps.to_bits())];
    let [q_weight, k_weight] = weights.map(|weight| c.vector(weight).0);
    let (v, pool) = append.map_or((0, [0; 4]), |(v, pool)| (c.plane(v).ptr, pool));
    let (digits, q_buffer) = (digits_room(c, shape)?, q);
    let (qg, k, q) = (c.plane(qg), c.output(k), c.output(q));
    let args = Args::new().step(&c.step()).words(&sizes).words(&table.words()).ptr(qg.ptr).ptr(k.ptr);
    let args = args.ptr(q_weight).ptr(k_weight).ptr(q.ptr).words(&digits).ptr(v).words(&pool);
    let all = heads + kv_heads * if append.is_some() { 2 } else { 1 };
    let grid = [c.shape().rows, all.div_ceil(HEADS), 1];
    c.launch(Kernel::new("rope.cu", "qk_norm_rope"), grid, 32 * HEADS as u32, args);
    c.digits_written(q_buffer);
    Ok(())
}

/// Room for the query digits of a step (the kernels' `Digits` and `Queries`).
fn digits_room(c: &mut Lowering<'_>, shape: AttentionShape) -> Result<[u64; 2]> {
    let groups = c.shape().rows * shape.heads * shape.head_dim.div_ceil(GROUP);
    Ok([c.scratch("query digits", groups * 2 * GROUP)?, c.scratch("query units", groups * 4)?])
}

/// Query digits of a plane, made by a launch of their own unless the plane's writer made them.
pub(super) fn digits(c: &mut Lowering<'_>, q: Buffer, shape: AttentionShape) -> Result<[u64; 2]> {
    let room = digits_room(c, shape)?;
    if !c.has_digits(q) {
        let args = Args::new().ptr(c.plane(q).ptr).size(shape.heads).size(shape.head_dim).words(&room);
        let grid = [c.shape().rows, shape.heads.div_ceil(HEADS), 1];
        c.launch(Kernel::new("rope.cu", "query_digits"), grid, 32 * HEADS as u32, args);
        c.digits_written(q);
    }
    Ok(room)
}
