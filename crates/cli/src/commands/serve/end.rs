//! Orders to end: SIGTERM and SIGINT.

use std::io;
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{Receiver, channel};
use tokio::sync::watch::{Receiver as Count, channel as counter};
use tracing::info;

use super::watch;
use crate::error::{Exit, Failure, Result};

/// How many orders came.
#[derive(Clone, Debug)]
pub(crate) struct Orders(Count<usize>);

impl Orders {
    /// Takes over both signals. Needs a runtime.
    pub(crate) fn watch(drain: Duration) -> Result<(Self, Receiver<()>)> {
        let failed =
            |error: io::Error| Failure::new(Exit::Failure, format!("signals cannot be watched: {error}"));
        let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
        let (sender, receiver) = channel(2);
        let (count, counted) = counter(0);
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                count.send_modify(|count| *count += 1);
                if *count.borrow() == 1 {
                    let time = drain.as_secs_f64();
                    info!("ending: running replies get {time} s; a second signal ends at once");
                    watch::tell(&[NotifyState::Stopping]);
                }
                // Two orders are all that is listened to.
                let _ = sender.try_send(());
            }
        });
        Ok((Self(counted), receiver))
    }

    /// Waits for the second one.
    pub(crate) async fn second(&mut self) {
        // The sender lives as long as the runtime.
        let _ = self.0.wait_for(|count| *count > 1).await;
    }
}
