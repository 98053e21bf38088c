//! Stages of the CPU device: errors against the float64 device, equal bits in every instruction set, thread
//! count, row count, window and chunk.

mod attention;
mod delta_net;
mod draw;
mod rows;
#[path = "../../../tests/support/steps.rs"]
mod steps;
mod vision;

use self::steps::{Noise, filled, read, step, tree, window};
use super::{Cpu, CpuSettings, Isa};
use crate::{Device, Row, Step, Window, reference::Reference};

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

/// The inputs of a step's rows, each made by `token` from a sequence's seed and a token index.
pub(super) fn rows_of<const N: usize>(
    tokens: &[(u64, usize)],
    token: impl Fn(u64, usize) -> [Vec<f64>; N],
) -> [Vec<f64>; N] {
    let mut inputs = [const { Vec::new() }; N];
    for &(seed, at) in tokens {
        for (all, one) in inputs.iter_mut().zip(token(seed, at)) {
            all.extend(one);
        }
    }
    inputs
}
