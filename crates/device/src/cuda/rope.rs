//! Norm and rotation of queries and keys on CUDA (`kernels/cuda/rope.cu`).

use std::sync::Arc;

use super::driver::{Driver, Result};
use super::launch::{Args, Kernel};
use super::lower::Lowering;
use super::memory::DeviceMemory;
use crate::{AttentionShape, Buffer, DeviceError, Rotary, Step, VectorRef};

/// Heads of a block of threads, a warp each.
const HEADS: usize = 4;
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

    /// Refuses a step with positions that the tables do not have.
    pub(super) fn check(&self, step: &Step) -> Result {
        let beyond = |position: &u32| self.half > 0 && *position as usize >= self.positions;
        match step.rows().iter().flat_map(|row| row.position).find(beyond) {
            None => Ok(()),
            Some(position) => Err(DeviceError::Failed {
                stage: "qk_norm_rope",
                message: format!("rotary position {position}, the table has {}", self.positions),
            }),
        }
    }

    /// The kernels' `Rotary`.
    fn words(&self) -> [u64; 4] {
        let sizes = self.half as u64 | (self.positions as u64) << 32;
        [self.cos.ptr(), self.sin.ptr(), self.axes.ptr(), sizes]
    }
}

/// Where keys and values go in the same launch: the values, and the kernels' `KvPool`.
pub(super) type Append = (Buffer, [u64; 4]);

/// [`crate::Device::qk_norm_rope`].
pub(super) fn lower(
    c: &mut Lowering<'_>,
    qg: Buffer,
    k: Buffer,
    q_weight: VectorRef,
    k_weight: VectorRef,
    eps: f32,
    rotary: Rotary,
    shape: AttentionShape,
    q: Buffer,
) -> Result {
    lower_with(c, [qg, k, q], [q_weight, k_weight], eps, rotary, shape, None)
}

/// [`lower`] of the buffers `[qg, k, q]`, and [`crate::Device::kv_append`] in the same launch.
pub(super) fn lower_with(
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
    let (qg, k, q) = (c.plane(qg), c.output(k), c.output(q));
    let args = Args::new().step(&c.step()).words(&sizes).words(&table.words()).ptr(qg.ptr).ptr(k.ptr);
    let args = args.ptr(q_weight).ptr(k_weight).ptr(q.ptr).ptr(v).words(&pool);
    let all = heads + kv_heads * if append.is_some() { 2 } else { 1 };
    let grid = [c.shape().rows, all.div_ceil(HEADS), 1];
    c.launch(Kernel::new("rope.cu", "qk_norm_rope"), grid, 32 * HEADS as u32, args);
    Ok(())
}
