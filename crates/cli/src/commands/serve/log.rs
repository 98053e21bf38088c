//! The log on stderr: lines with time, level and request id, for people or for programs.
//!
//! Lines are written by a thread of their own. Whoever reads stderr may be slow or asleep; the server must
//! not wait for it, so lines that find the queue full are dropped, and their number is told later.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use tracing::warn;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt;
use tracing_subscriber::fmt::MakeWriter;

use crate::output::Output;

/// Lines that wait to be written.
const LINES_MAX: usize = 4096;
/// Time in which the last lines are written at the end.
const END_TIME: Duration = Duration::from_secs(1);

/// `--log-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// A line of words.
    Text,
    /// A JSON document on each line.
    Json,
}

/// What the writing thread is given.
enum Order {
    Line(Vec<u8>),
    End,
}

/// The way to the writing thread.
#[derive(Clone)]
struct Lines {
    orders: SyncSender<Order>,
    dropped: Arc<AtomicU64>,
}

impl Write for Lines {
    /// Takes a whole line, or drops it.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Err(TrySendError::Full(_)) = self.orders.try_send(Order::Line(bytes.to_vec())) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// The log of this process. Dropping it writes what is left, if someone reads.
pub(crate) struct Log {
    orders: SyncSender<Order>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Log {
    fn drop(&mut self) {
        let end = Instant::now() + END_TIME;
        let mut is_sent = false;
        while Instant::now() < end {
            is_sent = is_sent || self.orders.try_send(Order::End).is_ok();
            if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Starts the log of this process. `--quiet` leaves warnings, `-v` adds probes.
pub(crate) fn start(format: LogFormat, output: &Output) -> Log {
    let level = match (output.quiet, output.verbose) {
        (true, _) => LevelFilter::WARN,
        (false, 0) => LevelFilter::INFO,
        (false, 1) => LevelFilter::DEBUG,
        (false, _) => LevelFilter::TRACE,
    };
    let (orders, received) = sync_channel(LINES_MAX);
    let dropped = Arc::new(AtomicU64::new(0));
    let lines = Lines { orders: orders.clone(), dropped: dropped.clone() };
    let builder = fmt().with_writer(lines).with_max_level(level).with_target(false).with_ansi(false);
    match format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().flatten_event(true).with_current_span(false).init(),
    }
    let thread = std::thread::spawn(move || write(&received, &dropped));
    Log { orders, thread: Some(thread) }
}

/// The thread's whole life. A stderr that is gone takes nothing with it.
fn write(received: &Receiver<Order>, dropped: &AtomicU64) {
    while let Ok(Order::Line(line)) = received.recv() {
        let _ = io::stderr().lock().write_all(&line);
        let count = dropped.swap(0, Ordering::Relaxed);
        if count > 0 {
            warn!(count, "lines of the log were dropped: stderr is read too slowly");
        }
    }
}
