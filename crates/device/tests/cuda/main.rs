//! Every stage of the CUDA device against the CPU device, bit for bit (`docs/arithmetic.md`, what must be
//! shown).
//!
//! They need a card: `cargo test --release -p device --test cuda -- --ignored --test-threads=1`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod attention;
mod cards;
mod delta_net;
mod draw;
mod exact;
mod forms;
mod layers;
mod matrices;
mod rows;
mod sanitized;
mod steps;
mod streamed;
#[path = "../support/steps.rs"]
mod support;
mod vision;

use std::time::Instant;

use device::cpu::{Cpu, CpuSettings, Isa};
use device::cuda::rehearsal::CARD_KINDS;
use device::cuda::{Cuda, CudaSettings};
use device::{Buffer, Device};

pub(crate) use support::{Noise, filled, read, step, tree, window};

/// Row counts of `docs/arithmetic.md`, what must be shown.
pub(crate) const ROWS: [usize; 19] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 64, 128];

/// The definition.
pub(crate) fn cpu() -> Cpu {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    Cpu::new(CpuSettings { threads, isa: Isa::detect() })
}

/// The first card.
pub(crate) fn cuda() -> Cuda {
    open(false)
}

/// The first card, with or without matrix instructions of half precision.
pub(crate) fn open(plain_sums: bool) -> Cuda {
    open_with(CudaSettings { plain_sums, ..CudaSettings::of(0) })
}

/// The first card, taken for one of the last kind: few multiprocessors, little shared memory.
pub(crate) fn small_card() -> Cuda {
    open_with(CudaSettings { like: CARD_KINDS.last().copied(), ..CudaSettings::of(0) })
}

fn open_with(settings: CudaSettings) -> Cuda {
    let kernel_cache = Some(std::env::temp_dir().join("clary-test-kernels"));
    Cuda::open(CudaSettings { kernel_cache, ..settings }).unwrap()
}

/// Kinds of inputs that every stage meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Random,
    /// Around the least magnitude that quantizes, and subnormals.
    Tiny,
    /// Up to the fault bound and beyond the range of squares.
    Huge,
    /// Few distinct values.
    Tied,
    Zero,
    /// Some infinities and NaN among random values, in some rows only.
    Faulty,
    /// A channel far above the rest.
    Spread,
}

pub(crate) const KINDS: [Kind; 7] =
    [Kind::Random, Kind::Tiny, Kind::Huge, Kind::Tied, Kind::Zero, Kind::Faulty, Kind::Spread];

impl Kind {
    /// `rows * width` values.
    pub(crate) fn values(self, noise: &mut Noise, rows: usize, width: usize) -> Vec<f64> {
        let mut values = noise.values(rows * width);
        for (at, x) in values.iter_mut().enumerate() {
            let row = at / width;
            *x = match self {
                Self::Random => *x,
                Self::Tiny => *x * (-(36.0 + (at * 7 % 110) as f64)).exp2(),
                Self::Huge => *x * ((at * 5 % 60) as f64).exp2(),
                Self::Tied => (*x * 2.0).round() * 0.5,
                Self::Zero => {
                    if at % 2 == 0 {
                        0.0
                    } else {
                        -0.0
                    }
                }
                Self::Faulty if row % 3 == 1 && at % 37 == 5 => {
                    [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1.2e12][at / 37 % 4]
                }
                Self::Faulty => *x,
                Self::Spread => {
                    if at % 61 == 3 {
                        *x * 4096.0
                    } else {
                        *x * 0.01
                    }
                }
            };
            *x = *x as f32 as f64;
        }
        values
    }
}

/// Bits with all NaN alike.
fn bits(x: f32) -> u32 {
    if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
}

pub(crate) fn assert_bits(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let differs = |(f, e): (&f32, &f32)| bits(*f) != bits(*e);
    let count = found.iter().zip(expected).filter(|&pair| differs(pair)).count();
    if let Some(at) = found.iter().zip(expected).position(differs) {
        let total = found.len();
        panic!(
            "{what}: {count} of {total} differ; value {at} is {:e}, expected {:e}",
            found[at], expected[at]
        );
    }
}

/// Devices that keep their matrices and pools between scripts.
pub(crate) struct Pair {
    pub(crate) cpu: Cpu,
    pub(crate) cuda: Cuda,
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self { cpu: cpu(), cuda: cuda() }
    }

    /// Runs a script on both, on CUDA twice, and asks for equal bits. A script makes what it needs at each
    /// run.
    pub(crate) fn same(&mut self, what: &str, mut script: impl FnMut(&mut dyn Device) -> Vec<f32>) {
        let expected = script(&mut self.cpu);
        for run in 1..=2 {
            let found = script(&mut self.cuda);
            assert_bits(&found, &expected, &format!("{what}, run {run}"));
        }
    }
}

/// Seconds of one call, the best of `reps`, each with `calls` of them in a list that is waited for.
pub(crate) fn time(
    device: &mut dyn Device,
    x: Buffer,
    calls: usize,
    mut call: impl FnMut(&mut dyn Device),
) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        let start = Instant::now();
        (0..calls).for_each(|_| call(device));
        device.read(x, 0, &mut [0.0]).unwrap();
        best = best.min(start.elapsed().as_secs_f64() / calls as f64);
    }
    best
}
