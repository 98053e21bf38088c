//! The CPU device: the executable definition of `docs/arithmetic.md`.
//!
//! One file per stage. A body is plain Rust compiled once per instruction set ([`isa`]), so all sets give the
//! same bits; only the integer dots of matrices and attention are written for each set, beside their
//! definition. Work is shared between threads by rows, heads and strips, never by splitting a sum.

mod attention;
mod attention_block;
mod conv;
mod delta_rule;
mod delta_strip;
mod device;
mod draw;
pub(crate) mod experts;
mod gates;
pub(crate) mod isa;
pub(crate) mod kv;
pub(crate) mod linear;
pub(crate) mod math;
mod norm;
mod panels;
mod philox;
mod planes;
pub(crate) mod pool;
pub mod probe;
mod rope;
mod route;
mod state;
mod sums;
#[cfg(test)]
mod tests;
mod vision;
mod workers;

pub use isa::Isa;

use crate::{DeviceError, Step};
use route::PickTable;

/// What a CPU device is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuSettings {
    /// Threads, the caller's counted; at least 1. Bits do not depend on it.
    pub threads: usize,
    /// Instruction set. Bits do not depend on it.
    pub isa: Isa,
}

/// The CPU device.
pub struct Cpu {
    workers: workers::Workers,
    planes: planes::Planes,
    matrices: Vec<linear::PackedMatrix>,
    experts: Vec<experts::PackedExperts>,
    vectors: Vec<Vec<f32>>,
    rotaries: Vec<rope::RotaryTable>,
    picks: Vec<PickTable>,
    kv: Vec<kv::KvPages>,
    states: Vec<state::States>,
    step: Step,
    // Scratch, kept so that stages allocate little once warm.
    activations: linear::Activations,
    expert_scratch: experts::ExpertScratch,
    front: delta_rule::Front,
    queries: attention::Queries,
    angles: Vec<f32>,
    router_keys: Vec<u64>,
    draws: Vec<draw::Scratch>,
    /// Draws whose answers wait, and the tokens of the last of them.
    later: Vec<crate::Drawn>,
    drawn_tokens: Vec<u32>,
}

impl Cpu {
    /// An empty device with threads of its own.
    pub fn new(settings: CpuSettings) -> Self {
        let pool = pool::Pool::new(settings.threads);
        Self {
            workers: workers::Workers { pool, isa: settings.isa },
            planes: planes::Planes::default(),
            matrices: Vec::new(),
            experts: Vec::new(),
            vectors: Vec::new(),
            rotaries: Vec::new(),
            picks: Vec::new(),
            kv: Vec::new(),
            states: Vec::new(),
            step: Step::new(Vec::new(), Vec::new()).expect("an empty step"),
            activations: linear::Activations::default(),
            expert_scratch: experts::ExpertScratch::default(),
            front: delta_rule::Front::default(),
            queries: attention::Queries::default(),
            angles: Vec::new(),
            router_keys: Vec::new(),
            draws: Vec::new(),
            later: Vec::new(),
            drawn_tokens: Vec::new(),
        }
    }
}

/// Zeros, or an error that names the call.
fn zeros<T: Clone + Default>(stage: &'static str, count: usize) -> Result<Vec<T>, DeviceError> {
    let mut values = Vec::new();
    if values.try_reserve_exact(count).is_err() {
        let bytes = count.saturating_mul(size_of::<T>()) as u64;
        return Err(DeviceError::OutOfMemory { stage, bytes, device: "cpu".into() });
    }
    values.resize(count, T::default());
    Ok(values)
}
