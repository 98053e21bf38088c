//! The log on stderr: lines with time, level and request id, for people or for programs.

use clap::ValueEnum;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt;

use crate::output::Output;

/// `--log-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// A line of words.
    Text,
    /// A JSON document on each line.
    Json,
}

/// Starts the log of this process. `--quiet` leaves warnings, `-v` adds probes and starts of work.
pub(crate) fn start(format: LogFormat, output: &Output) {
    let level = match (output.quiet, output.verbose) {
        (true, _) => LevelFilter::WARN,
        (false, 0) => LevelFilter::INFO,
        (false, 1) => LevelFilter::DEBUG,
        (false, _) => LevelFilter::TRACE,
    };
    let lines = fmt().with_writer(std::io::stderr).with_max_level(level).with_target(false).with_ansi(false);
    match format {
        LogFormat::Text => lines.init(),
        LogFormat::Json => lines.json().flatten_event(true).with_current_span(false).init(),
    }
}
