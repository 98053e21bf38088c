//! Paged K/V codes on CUDA (`docs/arithmetic.md`, K/V cache; `kernels/cuda/kv.cuh` has the layout).
//!
//! Exported bytes are those of the CPU device, so that a page can move from one device to another.

use std::sync::Arc;

use super::driver::{Driver, Result};
use super::launch::{Args, Kernel, Launch};
use super::lower::Lowering;
use super::memory::{DeviceMemory, Span};
use super::rope::HEAD_DIM_MAX;
use crate::cpu::kv::BlockLayout;
use crate::{Buffer, DeviceError, KvPool, KvShape, PAGE_TOKENS};

/// Dims of a scale group of K.
const GROUP: usize = 64;
const BLOCK: u32 = 256;
/// Windows of so many rows fill whole pages.
const LONG_ROWS: usize = 64;
/// Layers that one launch moves keys of (`KeepJobs` of the kernels).
const KEEP_JOBS: usize = 32;

/// Pages of one layer.
pub(super) struct KvPages {
    pub(super) shape: KvShape,
    codes: DeviceMemory,
    scales: DeviceMemory,
}

/// Byte of K's or V's `dim` of `key` in a digit plane of the kernels.
fn key_at(key: usize, dim: usize) -> usize {
    dim / GROUP * (PAGE_TOKENS * GROUP) + key * GROUP + dim % GROUP
}

fn value_at(key: usize, dim: usize) -> usize {
    dim * PAGE_TOKENS + key % 8 / 2 * 16 + key / 8 * 2 + key % 2
}

impl KvPages {
    /// Zeros.
    pub(super) fn new(driver: &Arc<dyn Driver>, shape: KvShape) -> Result<Self> {
        let stage = "kv_pool";
        if shape.head_dim == 0 || shape.kv_heads == 0 {
            return Err(DeviceError::Failed { stage, message: format!("{shape:?} is not a K/V shape") });
        }
        if shape.head_dim > HEAD_DIM_MAX {
            let message =
                format!("heads of {} have no kernel; supported: up to {HEAD_DIM_MAX}", shape.head_dim);
            return Err(DeviceError::Failed { stage, message });
        }
        let blocks = shape.pages.saturating_mul(shape.kv_heads);
        let sizes = Sizes { shape };
        Ok(Self {
            shape,
            codes: DeviceMemory::zeros(driver, stage, blocks.saturating_mul(sizes.codes()))?,
            scales: DeviceMemory::zeros(driver, stage, blocks.saturating_mul(4 * sizes.scales()))?,
        })
    }

    fn sizes(&self) -> Sizes {
        Sizes { shape: self.shape }
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.codes.bytes() + self.scales.bytes()
    }

    /// Groups of 64 dims, the last one padded.
    pub(super) fn groups(&self) -> usize {
        self.sizes().groups()
    }

    /// Digit planes: 1 or 2.
    pub(super) fn digits(&self) -> usize {
        self.shape.form.bytes()
    }

    /// Bytes of a head's block, codes and scales.
    pub(super) fn block_bytes(&self) -> usize {
        self.sizes().codes() + 4 * self.sizes().scales()
    }

    /// The kernels' `KvPool`.
    pub(super) fn words(&self) -> [u64; 4] {
        let pair = |low: usize, high: usize| low as u64 | (high as u64) << 32;
        let KvShape { kv_heads, head_dim, .. } = self.shape;
        let sizes = [pair(kv_heads, head_dim), pair(self.digits(), self.groups())];
        [self.codes.ptr(), self.scales.ptr(), sizes[0], sizes[1]]
    }

    /// Bytes of one page: codes, then scales little-endian, as the CPU device lays them out.
    pub(super) fn export(&self, page: u32) -> Result<Vec<u8>> {
        let (sizes, heads, page) = (self.sizes(), self.shape.kv_heads, page as usize);
        let mut own = vec![0; heads * sizes.codes()];
        let mut scales = vec![0; heads * 4 * sizes.scales()];
        self.codes.download(page * own.len(), &mut own)?;
        self.scales.download(page * scales.len(), &mut scales)?;
        let each = sizes.exported().codes();
        let mut bytes = vec![0; heads * each];
        for (own, bytes) in own.chunks_exact(sizes.codes()).zip(bytes.chunks_exact_mut(each)) {
            sizes.pairs(|at, exported| bytes[exported] = own[at]);
        }
        bytes.extend(scales);
        Ok(bytes)
    }

    /// Takes back what [`Self::export`] of any device gave.
    pub(super) fn import(&self, page: u32, bytes: &[u8]) -> Result {
        let (sizes, heads, page) = (self.sizes(), self.shape.kv_heads, page as usize);
        let each = sizes.exported().codes();
        let expected = heads * (each + 4 * sizes.scales());
        if bytes.len() != expected {
            let message = format!("{} bytes for a page, {expected} expected", bytes.len());
            return Err(DeviceError::Failed { stage: "kv_import", message });
        }
        let (codes, scales) = bytes.split_at(heads * each);
        let mut own = vec![0; heads * sizes.codes()];
        for (own, bytes) in own.chunks_exact_mut(sizes.codes()).zip(codes.chunks_exact(each)) {
            sizes.pairs(|at, exported| own[at] = bytes[exported]);
        }
        self.codes.upload(page * own.len(), &own)?;
        self.scales.upload(page * scales.len(), scales)
    }
}

/// Sizes of one head's block in a page.
#[derive(Clone, Copy)]
struct Sizes {
    shape: KvShape,
}

impl Sizes {
    fn groups(self) -> usize {
        self.shape.head_dim.div_ceil(GROUP)
    }

    /// Bytes of a digit plane of K or of V.
    fn plane(self) -> usize {
        self.groups() * GROUP * PAGE_TOKENS
    }

    fn codes(self) -> usize {
        2 * self.shape.form.bytes() * self.plane()
    }

    /// The same in exported bytes as here.
    fn scales(self) -> usize {
        (self.groups() + 1) * PAGE_TOKENS
    }

    /// The layout of exported bytes.
    fn exported(self) -> BlockLayout {
        BlockLayout { head_dim: self.shape.head_dim, digits: self.shape.form.bytes() }
    }

    /// Gives every code's place in a block here and in an exported one.
    fn pairs(self, mut each: impl FnMut(usize, usize)) {
        let (exported, digits, plane) = (self.exported(), self.shape.form.bytes(), self.plane());
        for digit in 0..digits {
            for key in 0..PAGE_TOKENS {
                for dim in 0..self.shape.head_dim {
                    each(digit * plane + key_at(key, dim), exported.k_at(digit, key, dim));
                    each((digits + digit) * plane + value_at(key, dim), exported.v_at(digit, key, dim));
                }
            }
        }
    }
}

fn kernel(name: &'static str) -> Kernel {
    Kernel::new("kv.cu", name)
}

/// [`crate::Device::kv_keep`] of several layers. Words of each: count, then `WINDOW_ROWS_MAX` pairs (from,
/// to) of keys `page * 64 + slot`, moved in order (u32 each).
pub(super) fn lower_keep(c: &mut Lowering<'_>, keeps: &[(KvPool, Span)]) -> Result {
    for run in keeps.chunks(KEEP_JOBS) {
        let (mut jobs, mut heads) = (Vec::new(), 0);
        for &(pool, words) in run {
            let pages = c.kv(pool);
            jobs.extend(pages.words());
            jobs.push(c.span(words));
            heads = heads.max(pages.shape.kv_heads);
        }
        jobs.resize(KEEP_JOBS * 5, 0);
        c.launch(kernel("kv_keep"), [heads, run.len(), 1], BLOCK, Args::new().words(&jobs));
    }
    Ok(())
}

/// [`crate::Device::kv_append`].
pub(super) fn lower_append(c: &mut Lowering<'_>, k: Buffer, v: Buffer, pool: KvPool) -> Result {
    let pages = c.kv(pool);
    let (k, v) = (c.plane(k).ptr, c.plane(v).ptr);
    let args = Args::new().step(&c.step()).words(&pages.words()).ptr(k).ptr(v);
    let step = c.shape();
    if step.window_rows >= LONG_ROWS {
        let tiles = step.window_rows.div_ceil(PAGE_TOKENS) + 1;
        let sizes = pages.sizes();
        c.push(Launch {
            kernel: Kernel::new("kv_pages.cu", "kv_append_pages"),
            grid: [tiles, 2 * pages.shape.kv_heads, step.windows].map(|n| n as u32),
            block: BLOCK,
            shared: (pages.digits() * sizes.plane() + 4 * pages.groups() * PAGE_TOKENS) as u32,
            args,
        });
        return Ok(());
    }
    let block = (2 * pages.shape.kv_heads as u32 * 32).min(BLOCK);
    c.launch(kernel("kv_append"), [c.shape().rows, 1, 1], block, args);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KvForm;

    #[test]
    fn every_code_has_a_place_here_and_in_exported_bytes() {
        for (head_dim, form) in [(256, KvForm::Int8), (72, KvForm::Int16), (7, KvForm::Int16)] {
            let sizes = Sizes { shape: KvShape { pages: 1, kv_heads: 1, head_dim, form } };
            let (mut own, mut exported) = (Vec::new(), Vec::new());
            sizes.pairs(|at, out| {
                own.push(at);
                exported.push(out);
            });
            for (places, bytes) in [(&mut own, sizes.codes()), (&mut exported, sizes.exported().codes())] {
                let count = places.len();
                assert_eq!(count, 2 * form.bytes() * PAGE_TOKENS * head_dim);
                places.sort_unstable();
                places.dedup();
                assert!(places.len() == count && places.last().is_some_and(|&last| last < bytes));
            }
        }
    }
}
