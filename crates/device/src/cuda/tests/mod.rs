//! The host's half without a card, on a stand-in that keeps memory and writes down launches.

mod lists;
mod tables;

use std::sync::Arc;

use super::compile::Kernels;
use super::driver::{Driver, Facts};
use super::standin::{StandIn, note_variant};
use super::{Cuda, CudaSettings};

/// A device over a stand-in.
pub(super) fn device() -> (Cuda, Arc<StandIn>) {
    let facts = Facts {
        name: "stand-in".into(),
        arch: "sm_90a".into(),
        capability: 90,
        processors: 132,
        memory: 1 << 30,
        shared_max: 227 << 10,
    };
    let stub = Arc::new(StandIn::new(facts, true));
    let driver: Arc<dyn Driver> = stub.clone();
    let kernels = Kernels::with(driver.clone(), None, note_variant);
    (Cuda::on(driver, kernels, CudaSettings::of(0)).expect("opens"), stub)
}
