//! What the machine can do.

use device::cpu::{Isa, probe};

/// Limits of the processor with some threads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    /// Threads.
    pub(super) threads: usize,
    /// Bytes read from memory per second.
    pub(super) read: f64,
    /// 16-bit multiply-adds per second.
    pub(super) dot16: f64,
    /// f32 multiply-adds per second.
    pub(super) f32: f64,
}

impl Machine {
    /// Takes a few seconds and 1 GiB.
    pub(super) fn measure(threads: usize) -> Self {
        let isa = Isa::detect();
        Self {
            threads,
            read: probe::read_bandwidth(isa, threads),
            dot16: probe::dot16_peak(isa, threads),
            f32: probe::f32_peak(isa, threads),
        }
    }
}
