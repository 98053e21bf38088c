//! Stages of the CPU device: errors against the float64 device, equal bits in every instruction set, thread
//! count, row count, window and chunk.

mod attention;
mod delta_net;
mod draw;
mod rows;
mod vision;

use super::{Cpu, CpuSettings, Isa};
use crate::{Buffer, Device, Row, Step, Window, reference::Reference};

/// A small generator of test values; every use names its seed.
pub(super) struct Noise(u64);

impl Noise {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as u32
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// About normal, exact in f32.
    pub(super) fn value(&mut self) -> f64 {
        let sum: f64 = (0..4).map(|_| self.next() as f64 / (1u64 << 31) as f64 - 0.5).sum();
        (sum * 1.7) as f32 as f64
    }

    pub(super) fn values(&mut self, n: usize) -> Vec<f64> {
        (0..n).map(|_| self.value()).collect()
    }
}

/// The plainest CPU device.
pub(super) fn plain() -> Cpu {
    Cpu::new(CpuSettings { threads: 1, isa: Isa::supported()[0] })
}

/// Every instruction set, one and two threads.
pub(super) fn cpus() -> Vec<Cpu> {
    let settings = |isa| [1, 2].map(|threads| CpuSettings { threads, isa });
    Isa::supported().into_iter().flat_map(settings).map(Cpu::new).collect()
}

/// Bits with all NaN alike.
pub(super) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

pub(super) fn assert_bits(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let differs = bits(found).iter().zip(bits(expected)).position(|(f, e)| *f != e);
    if let Some(at) = differs {
        panic!("{what}: value {at} is {:e}, expected {:e}", found[at], expected[at]);
    }
}

/// Runs a script on every CPU device, asks for equal bits and returns them.
pub(super) fn same_everywhere(what: &str, mut script: impl FnMut(&mut dyn Device) -> Vec<f32>) -> Vec<f32> {
    let expected = script(&mut plain());
    for mut cpu in cpus() {
        let found = script(&mut cpu);
        assert_bits(&found, &expected, &format!("{what} on {}", cpu.name()));
    }
    expected
}

/// [`same_everywhere`], and the error against the float64 device at most `bound` of the largest value.
pub(super) fn close_to_reference(
    what: &str,
    bound: f64,
    mut script: impl FnMut(&mut dyn Device) -> Vec<f32>,
) {
    let found = same_everywhere(what, &mut script);
    let exact = script(&mut Reference::new(1));
    let largest = exact.iter().fold(0f64, |m, &x| m.max((x as f64).abs()));
    let error = found.iter().zip(&exact).fold(0f64, |m, (f, e)| m.max((*f as f64 - *e as f64).abs()));
    assert!(largest > 0.0 && largest.is_finite(), "{what}: nothing to compare");
    assert!(error <= bound * largest, "{what}: error {error:e} of {largest:e}, bound {bound:e}");
    println!("{what}: error {:.2e} of the largest, bound {bound:.0e}", error / largest);
}

/// A buffer with these rows.
pub(super) fn filled(device: &mut dyn Device, width: usize, values: &[f64]) -> Buffer {
    let buffer = device.buffer(values.len() / width, width).expect("fits");
    device.write(buffer, 0, values).expect("fits");
    buffer
}

pub(super) fn read(device: &mut dyn Device, buffer: Buffer, n: usize) -> Vec<f32> {
    let mut out = vec![0.0; n];
    device.read(buffer, 0, &mut out).expect("fits");
    out
}

/// A window over its own pages, from `page` on.
pub(super) fn window(place: u32, first: usize, rows: usize, start: usize, page: u32, commit: bool) -> Window {
    let pages = (0..((start + rows).div_ceil(crate::PAGE_TOKENS)) as u32).map(|i| page + i).collect();
    Window { place, first, rows, start, pages, parents: None, commit }
}

/// A step of text rows.
pub(super) fn step(windows: Vec<Window>) -> Step {
    let mut rows = Vec::new();
    for window in &windows {
        rows.extend((0..window.rows).map(|row| Row { token: None, position: [window.index(row) as u32; 3] }));
    }
    Step::new(rows, windows).expect("valid")
}

/// A random tree of `rows` rows, some of them roots.
pub(super) fn tree(noise: &mut Noise, rows: usize) -> Vec<Option<u32>> {
    (0..rows).map(|row| noise.below(row + 1).checked_sub(1).map(|parent| parent as u32)).collect()
}
