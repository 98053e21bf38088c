//! What the machine can do.

use device::cpu::{CpuSettings, Isa, probe};
use device::cuda;

use crate::error::Result;
use crate::load;

/// Limits of the device, with some threads on the host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    /// Threads.
    pub(super) threads: usize,
    /// Bytes read from memory per second; of a card, those that a copy inside its memory reads and writes.
    pub(super) read: f64,
    /// 16-bit multiply-adds per second: integers on the processor, halves on a card.
    pub(super) dot16: f64,
    /// f32 multiply-adds per second.
    pub(super) f32: f64,
}

impl Machine {
    /// Takes a few seconds and 1 GiB, on a card 2 GiB.
    pub(super) fn measure(device: &str, threads: usize) -> Result<Self> {
        let isa = Isa::detect();
        if let Some(ordinal) = device::card(device) {
            let opening = load::opening(CpuSettings { threads, isa });
            let limits = cuda::probe::limits(ordinal, opening.kernel_cache, opening.kernels)?;
            return Ok(Self { threads, read: limits.copy, dot16: limits.half, f32: limits.f32 });
        }
        Ok(Self {
            threads,
            read: probe::read_bandwidth(isa, threads),
            dot16: probe::dot16_peak(isa, threads),
            f32: probe::f32_peak(isa, threads),
        })
    }
}
