//! The host's half without a card, on a stand-in that keeps memory and writes down launches.

mod faults;
mod lists;
mod tables;

use std::sync::Arc;

use super::compile::Kernels;
use super::driver::{Driver, Facts};
use super::standin::{StandIn, note_variant};
use super::{Cuda, CudaSettings};

/// A card that keeps what is written.
pub(super) fn stub() -> Arc<StandIn> {
    let facts = Facts {
        name: "stand-in".into(),
        arch: "sm_90a".into(),
        capability: 90,
        processors: 132,
        memory: 1 << 30,
        shared_max: 227 << 10,
    };
    Arc::new(StandIn::new(facts, true))
}

/// A device over it.
pub(super) fn device() -> (Cuda, Arc<StandIn>) {
    let stub = stub();
    let driver: Arc<dyn Driver> = stub.clone();
    let kernels = Kernels::with(driver.clone(), None, note_variant);
    (Cuda::on(driver, kernels, CudaSettings::of(0)).expect("opens"), stub)
}
