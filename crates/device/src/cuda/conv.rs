//! The stage `conv` on CUDA (`kernels/cuda/conv.cu`).

use super::driver::Result;
use super::launch::{Args, Kernel};
use super::lower::Lowering;
use super::state::States;
use crate::{Buffer, DeviceError, StatePool, VectorRef};

/// Channels of a block of threads.
pub(super) const BLOCK: usize = 256;
/// Windows up to this length are one launch: a thread takes all rows of its channel.
const WINDOW_ROWS: usize = 32;
/// Rows that a thread takes of a longer window.
pub(super) const CHUNK: usize = 16;

/// [`crate::Device::conv`].
pub(super) fn lower(
    c: &mut Lowering<'_>,
    x: Buffer,
    taps: VectorRef,
    pool: StatePool,
    out: Buffer,
) -> Result {
    let (states, shape) = (c.states(pool), c.shape());
    let (channels, count) = (states.shape.channels(), states.shape.conv_taps);
    let taps = taps_of(c, taps, &states)?;
    let (x, out) = (c.plane(x), c.output(out));
    let kernel = |name| Kernel::new("conv.cu", name).define("CONV_TAPS", count as u32);
    let head = || Args::new().step(&c.step()).words(&states.words()).ptr(x.ptr);
    let blocks = channels.div_ceil(BLOCK);
    if shape.window_rows <= WINDOW_ROWS {
        let args = head().ptr(taps).ptr(out.ptr);
        c.launch(kernel("conv_window"), [blocks, 1, shape.windows], BLOCK as u32, args);
        return Ok(());
    }
    let args = head().ptr(taps).ptr(out.ptr).size(CHUNK);
    let chunks = shape.window_rows.div_ceil(CHUNK);
    c.launch(kernel("conv_chunk"), [blocks, chunks, shape.windows], BLOCK as u32, args);
    advance(c, &states, x.ptr);
    Ok(())
}

/// Address of the taps, one row a channel.
pub(super) fn taps_of(c: &Lowering<'_>, taps: VectorRef, states: &States) -> Result<u64> {
    let (channels, count) = (states.shape.channels(), states.shape.conv_taps);
    let (taps, found) = c.vector(taps);
    if found != channels * count {
        let message = format!("{found} taps, expected {count} of {channels} channels");
        return Err(DeviceError::Failed { stage: "conv", message });
    }
    Ok(taps)
}

/// Shifts the states by long windows of inputs `x`.
pub(super) fn advance(c: &mut Lowering<'_>, states: &States, x: u64) {
    let kernel = Kernel::new("conv.cu", "conv_advance").define("CONV_TAPS", states.shape.conv_taps as u32);
    let args = Args::new().step(&c.step()).words(&states.words()).ptr(x);
    let blocks = states.shape.channels().div_ceil(BLOCK);
    c.launch(kernel, [blocks, 1, c.shape().windows], BLOCK as u32, args);
}
