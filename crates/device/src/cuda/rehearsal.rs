//! Kernels that a model asks for on a card, without the card: what a release compiles before
//! ([`super::ship`]).
//!
//! A rehearsed device loads weights, lowers steps and launches like any other, on a stand-in that keeps
//! nothing; what it reads back is zeros, so that every draw gives token 0. It refuses a launch that the card
//! could not take.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::compile::Kernels;
use super::driver::{Driver, Facts};
use super::standin::{StandIn, note_variant};
use super::{Cuda, CudaSettings, exact, probe};
use crate::{Device, DeviceError};

/// Cards that ask for the same kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardKind {
    /// Architectures, as NVRTC calls them.
    pub archs: &'static [&'static str],
    /// Compute capability, for example 90.
    capability: u32,
    /// Multiprocessors.
    processors: u32,
    /// Most bytes of shared memory of a block.
    shared_max: u32,
}

/// Cards of all supported architectures: forms of kernels depend on the number of multiprocessors, so that
/// there is a small and a large one where both are sold.
pub const CARD_KINDS: [CardKind; 6] = [
    CardKind { archs: &["sm_90a"], capability: 90, processors: 132, shared_max: 227 << 10 },
    CardKind { archs: &["sm_100a"], capability: 100, processors: 148, shared_max: 227 << 10 },
    CardKind { archs: &["sm_80"], capability: 80, processors: 108, shared_max: 163 << 10 },
    CardKind { archs: &["sm_80"], capability: 80, processors: 56, shared_max: 163 << 10 },
    CardKind { archs: &["sm_86", "sm_89", "sm_120a"], capability: 86, processors: 128, shared_max: 99 << 10 },
    CardKind { archs: &["sm_86", "sm_89", "sm_120a"], capability: 86, processors: 28, shared_max: 99 << 10 },
];

impl CardKind {
    /// What is known of a card of this kind.
    pub(super) fn facts(&self) -> Facts {
        Facts {
            name: format!("card of {}", self.archs.join(", ")),
            arch: self.archs[0].into(),
            capability: self.capability,
            processors: self.processors,
            memory: u64::MAX,
            shared_max: self.shared_max,
        }
    }
}

/// What a rehearsed device was asked for.
#[derive(Clone)]
pub struct Rehearsed(Arc<StandIn>);

impl Rehearsed {
    /// Variants so far, a line of `kernels.list` each.
    pub fn variants(&self) -> BTreeSet<String> {
        self.0.images()
    }
}

/// A device for a card of this kind, and what will be asked of it. `plain_sums`: its half-precision matrix
/// instruction does not sum exactly ([`CudaSettings::plain_sums`]).
pub fn rehearse(kind: &CardKind, plain_sums: bool) -> Result<(Box<dyn Device>, Rehearsed), DeviceError> {
    let card = Arc::new(StandIn::new(kind.facts(), false));
    let driver: Arc<dyn Driver> = card.clone();
    let mut kernels = Kernels::with(driver.clone(), None, note_variant);
    exact::holds(&driver, &mut kernels)?;
    probe::measure(&driver, &mut kernels)?;
    if plain_sums {
        kernels.sum_plainly();
    }
    let settings = CudaSettings { plain_sums, ..CudaSettings::of(0) };
    Ok((Box::new(Cuda::on(driver, kernels, settings)?), Rehearsed(card)))
}
