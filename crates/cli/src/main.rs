//! The binary `clary`: flags, wiring, progress, human errors.

mod args;
mod client;
mod commands;
mod config;
mod error;
mod hub;
mod ids;
mod interrupt;
mod load;
mod memory;
mod numbers;
mod origin;
mod output;
mod progress;
mod reply;
mod scheme;
mod session;
mod settings;
mod store;
mod synth;
mod table;
mod target;
mod transcript;
mod weights;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use args::{Cli, Command};
use error::{Exit, Failure};
use output::Output;

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let cli = match Cli::try_parse_from(&words) {
        Ok(cli) => cli,
        Err(error) => return not_parsed(&error),
    };
    let output = Output::new(&cli.global);
    match complete(cli, &words).and_then(|cli| commands::dispatch(cli, &output)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report(&failure, &output),
    }
}

/// Adds what the configuration file says about the server.
fn complete(cli: Cli, words: &[OsString]) -> error::Result<Cli> {
    match cli.command {
        Command::Serve(_) => config::complete(words, &config::read(cli.global.config.as_deref())?),
        _ => Ok(cli),
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
