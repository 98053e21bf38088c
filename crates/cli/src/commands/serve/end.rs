//! Orders to end: SIGTERM and SIGINT.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{Receiver, channel};
use tracing::info;

use super::watch;
use crate::error::{Exit, Failure, Result};

/// How many orders came.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orders(Arc<AtomicUsize>);

impl Orders {
    /// Takes over both signals. Needs a runtime.
    pub(crate) fn watch(drain: Duration) -> Result<(Self, Receiver<()>)> {
        let failed =
            |error: io::Error| Failure::new(Exit::Failure, format!("signals cannot be watched: {error}"));
        let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
        let (sender, receiver) = channel(2);
        let orders = Self::default();
        let count = orders.0.clone();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                if count.fetch_add(1, Ordering::AcqRel) == 0 {
                    let time = drain.as_secs_f64();
                    info!("ending: running replies get {time} s; a second signal ends at once");
                    watch::tell(&[NotifyState::Stopping]);
                }
                // Two orders are all that is listened to.
                let _ = sender.try_send(());
            }
        });
        Ok((orders, receiver))
    }

    /// How many came.
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}
