//! The end of a server in good order: first nothing new, then nothing at all.

use tokio::sync::watch;

/// How far the end has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Requests are taken.
    Open,
    /// Running replies go on; new requests are refused.
    Draining,
    /// Running replies end with an error.
    Cut,
}

/// The phase, which only goes forward.
#[derive(Clone, Debug)]
pub struct Drain(watch::Sender<Phase>);

impl Default for Drain {
    fn default() -> Self {
        Self(watch::Sender::new(Phase::Open))
    }
}

impl Drain {
    /// Where it stands.
    pub fn phase(&self) -> Phase {
        *self.0.borrow()
    }

    /// Goes on to a later phase.
    pub fn advance(&self, to: Phase) {
        self.0.send_if_modified(|phase| {
            let later = to > *phase;
            *phase = to.max(*phase);
            later
        });
    }

    /// Waits for a phase.
    pub async fn reached(&self, wanted: Phase) {
        let mut phases = self.0.subscribe();
        // The sender lives in `self`, so waiting cannot fail.
        let _ = phases.wait_for(|phase| *phase >= wanted).await;
    }
}
