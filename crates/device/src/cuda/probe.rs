//! What a card can do, measured: the bounds that benchmarks are held against.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use super::compile::Kernels;
use super::driver::{Card, Driver, Result};
use super::launch::{Args, Kernel, Launch};
use super::memory::DeviceMemory;

/// Bytes of each side of the copy: many times any cache.
const COPY_BYTES: usize = 1 << 30;
/// Turns of the arithmetic probes: some milliseconds.
const TURNS: u32 = 4096;
/// Times that each is run; the best counts.
const REPEATS: usize = 5;

/// Limits of a card.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CardLimits {
    /// Bytes per second of a copy inside device memory, read and written ones both counted.
    pub copy: f64,
    /// Multiply-adds per second of half-precision matrix instructions (`mma.sync`) summed in f32.
    pub half: f64,
    /// f32 fma per second.
    pub f32: f64,
}

/// Measures card `ordinal` with kernels of these folders ([`super::CudaSettings`]); takes a second and 2 GiB.
pub fn limits(ordinal: usize, kernel_cache: Option<PathBuf>, kernels: Option<PathBuf>) -> Result<CardLimits> {
    let driver: Arc<dyn Driver> = Card::open(ordinal)?;
    let mut kernels = Kernels::new(driver.clone(), kernel_cache).shipped(kernels);
    measure(&driver, &mut kernels)
}

/// The measurement.
pub(super) fn measure(driver: &Arc<dyn Driver>, kernels: &mut Kernels) -> Result<CardLimits> {
    let (from, to) = (
        DeviceMemory::zeros(driver, "probe", COPY_BYTES)?,
        DeviceMemory::zeros(driver, "probe", COPY_BYTES)?,
    );
    let blocks = 8 * driver.facts().processors;
    let mut seconds = |name, block: u32, args: Args| {
        let kernel = Kernel::new("probe.cu", name);
        let launch = kernels.prepare(Launch { kernel, grid: [blocks, 1, 1], block, shared: 0, args })?;
        let mut best = f64::INFINITY;
        for _ in 0..REPEATS {
            driver.synchronize()?;
            let start = Instant::now();
            driver.launch(std::slice::from_ref(&launch), false)?;
            driver.synchronize()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(best)
    };
    let groups = COPY_BYTES as u64 / 16;
    let copy = seconds("probe_copy", 512, Args::new().ptr(to.ptr()).ptr(from.ptr()).u64(groups))?;
    let arithmetic = || Args::new().ptr(to.ptr()).u32(TURNS);
    let (half, f32) = (seconds("probe_half", 256, arithmetic())?, seconds("probe_f32", 256, arithmetic())?);
    let (warps, threads) = (blocks as f64 * 8.0, blocks as f64 * 256.0);
    Ok(CardLimits {
        copy: 2.0 * COPY_BYTES as f64 / copy,
        half: warps * TURNS as f64 * 8.0 * (16 * 8 * 16) as f64 / half,
        f32: threads * TURNS as f64 * 16.0 / f32,
    })
}
