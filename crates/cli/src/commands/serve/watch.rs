//! What the service manager is told, and what becomes of a server that makes no progress.

use std::future::pending;
use std::time::Duration;

use sd_notify::NotifyState;
use server::http::App;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{error, warn};

use crate::error::{Exit, Failure};

/// Time between looks at the progress, where the service manager does not ask for more.
const LOOK: Duration = Duration::from_secs(1);

/// Tells the service manager, if there is one. It is no reason to end that it does not listen.
pub(super) fn tell(state: &[NotifyState<'_>]) {
    if let Err(problem) = sd_notify::notify(false, state) {
        warn!("the service manager cannot be told: {problem}");
    }
}

/// Time within which a watchdog of the service manager wants a sign of life.
fn watchdog() -> Option<Duration> {
    let mut microseconds = 0;
    sd_notify::watchdog_enabled(false, &mut microseconds).then(|| Duration::from_micros(microseconds))
}

/// Looks at the engine's progress for as long as it is polled: a sign of life for the watchdog while there is
/// some. Ready only where the server is to end: with `--exit-on-stall`, on a stall.
pub(super) async fn progress(app: &App, exit_on_stall: bool) -> Failure {
    let watchdog = watchdog();
    if watchdog.is_none() && !exit_on_stall {
        return pending().await;
    }
    let mut looks =
        interval(watchdog.map_or(LOOK, |time| (time / 3).min(LOOK).max(Duration::from_millis(1))));
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        match app.stalled() {
            None => tell(&[NotifyState::Watchdog]),
            Some(age) if exit_on_stall => {
                let message = format!("no step of the model ended for {} s", age.as_secs());
                error!("{message}");
                let hint = "the device or its driver hangs; --stall-after says how long to wait";
                return Failure::new(Exit::Device, message).hint(hint);
            }
            Some(_) => {}
        }
    }
}
