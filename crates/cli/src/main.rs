//! The binary `clary`: flags, wiring, progress, human errors.

mod args;
mod commands;
mod error;
mod ids;
mod interrupt;
mod load;
mod memory;
mod origin;
mod output;
mod progress;
mod reply;
mod scheme;
mod session;
mod settings;
mod synth;
mod table;
mod target;
mod transcript;
mod weights;

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use args::Cli;
use error::{Exit, Failure};
use output::Output;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return not_parsed(&error),
    };
    let output = Output::new(cli.global);
    match commands::dispatch(cli.command, &output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report(&failure, &output),
    }
}

/// Says why a command failed. Nothing can be done where stderr is gone as well.
fn report(failure: &Failure, output: &Output) -> ExitCode {
    if failure.is_broken_pipe {
        return ExitCode::SUCCESS;
    }
    let _ = output.failure(failure);
    ExitCode::from(failure.exit as u8)
}

/// Help goes to stdout, mistakes to stderr with a hint.
fn not_parsed(error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return match error.print() {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                eprint_lossy(&format!("error: output: {error}\nhint: {}\n", Exit::Failure.advice()));
                ExitCode::from(Exit::Failure as u8)
            }
            _ => ExitCode::SUCCESS,
        };
    }
    let text = error.render().to_string();
    let text = text.split("\nFor more information").next().unwrap_or_default().trim_end();
    let hint = match error.kind() {
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            let usage = text.strip_prefix("error: ").unwrap_or(text);
            eprint_lossy(&format!("error: a command is needed\n\n{usage}\n"));
            "`clary run MODEL \"question\"` gives one reply"
        }
        _ => {
            eprint_lossy(&format!("{text}\n"));
            "`clary help COMMAND` lists what a command takes"
        }
    };
    eprint_lossy(&format!("hint: {hint}\n"));
    ExitCode::from(Exit::Usage as u8)
}

/// Writes to stderr, which may be closed.
fn eprint_lossy(text: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
}
