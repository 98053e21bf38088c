//! Faults on demand.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use model::ModelError;

/// Switches that make a [`FakeModel`](super::FakeModel) fail. Steps count from 0; `u64::MAX` is never.
#[derive(Debug)]
pub struct Faults {
    steps: AtomicU64,
    error_at: AtomicU64,
    lost_at: AtomicU64,
    panic_at: AtomicU64,
    nan_at: AtomicU64,
    blind: AtomicBool,
}

/// What is wrong with a step that runs.
pub(super) struct StepFault {
    /// The logits of the first window are NaN.
    pub(super) nan: bool,
}

impl Default for Faults {
    fn default() -> Self {
        let never = || AtomicU64::new(u64::MAX);
        Self {
            steps: AtomicU64::new(0),
            error_at: never(),
            lost_at: never(),
            panic_at: never(),
            nan_at: never(),
            blind: AtomicBool::new(false),
        }
    }
}

impl Faults {
    /// Steps so far.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::SeqCst)
    }

    /// The step `after` steps from now fails as a device does.
    pub fn fail_in(&self, after: u64) {
        self.error_at.store(self.steps() + after, Ordering::SeqCst);
    }

    /// Every step from the one `after` steps from now on fails.
    pub fn lose_in(&self, after: u64) {
        self.lost_at.store(self.steps() + after, Ordering::SeqCst);
    }

    /// The step `after` steps from now panics.
    pub fn panic_in(&self, after: u64) {
        self.panic_at.store(self.steps() + after, Ordering::SeqCst);
    }

    /// The first window's logits of the step `after` steps from now are NaN.
    pub fn nan_in(&self, after: u64) {
        self.nan_at.store(self.steps() + after, Ordering::SeqCst);
    }

    /// From now on no picture can be encoded.
    pub fn fail_encoding(&self) {
        self.blind.store(true, Ordering::SeqCst);
    }

    pub(super) fn encode(&self) -> Result<(), ModelError> {
        match self.blind.load(Ordering::SeqCst) {
            true => Err(super::limit("picture", "an injected device fault", "none")),
            false => Ok(()),
        }
    }

    pub(super) fn step(&self) -> Result<StepFault, ModelError> {
        let step = self.steps.fetch_add(1, Ordering::SeqCst);
        assert_ne!(step, self.panic_at.load(Ordering::SeqCst), "injected panic at step {step}");
        if step == self.error_at.load(Ordering::SeqCst) || step >= self.lost_at.load(Ordering::SeqCst) {
            return Err(super::limit("step", "an injected device fault", "none"));
        }
        Ok(StepFault { nan: step == self.nan_at.load(Ordering::SeqCst) })
    }
}
