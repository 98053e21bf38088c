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
mod vision;
mod weights;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Arg, CommandFactory, FromArgMatches};

use args::{Cli, Command};
use error::{Exit, Failure};
use output::Output;

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let parsed = command().try_get_matches_from(&words).and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => return not_parsed(&error, &words),
    };
    let output = Output::new(&cli.global);
    match complete(cli, &words).and_then(|cli| commands::dispatch(cli, &output)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report(&failure, &output),
    }
}

/// The command line. A negative number is a value wherever one is expected: its parser says what is allowed.
fn command() -> clap::Command {
    fn each(command: clap::Command) -> clap::Command {
        let number = |arg: Arg| match arg.get_action().takes_values() && !arg.is_positional() {
            true => arg.allow_negative_numbers(true),
            false => arg,
        };
        command.mut_args(number).mut_subcommands(each)
    }
    each(Cli::command())
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

/// Options that `docs/api.md` names and this version does not have. A similar option would be a wrong tip.
const LATER: [&str; 6] =
    ["--audit", "--cache-device", "--exit-on-stall", "--image-url-allow", "--late-system", "--numa"];

/// Help goes to stdout, mistakes to stderr with a hint.
fn not_parsed(error: &clap::Error, words: &[OsString]) -> ExitCode {
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
    let named = words.iter().skip(1).filter_map(|word| word.to_str()).find(|word| !word.starts_with('-'));
    let help = named.filter(|name| Cli::command().find_subcommand(name).is_some());
    let help = format!("`clary help {}` lists what a command takes", help.unwrap_or("COMMAND"));
    let hint = match error.kind() {
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            let usage = text.strip_prefix("error: ").unwrap_or(text);
            eprint_lossy(&format!("error: a command is needed\n\n{usage}\n"));
            match named {
                None => "`clary run MODEL \"question\"` gives one reply".to_owned(),
                Some(_) => help,
            }
        }
        ErrorKind::UnknownArgument => {
            let is_later = |option: &&&str| text.lines().next().is_some_and(|line| line.contains(**option));
            match LATER.iter().find(is_later) {
                Some(option) => eprint_lossy(&format!("error: this version has no {option}\n")),
                None => eprint_lossy(&format!("{text}\n")),
            }
            help
        }
        _ => {
            eprint_lossy(&format!("{text}\n"));
            help
        }
    };
    eprint_lossy(&format!("hint: {hint}\n"));
    ExitCode::from(Exit::Usage as u8)
}

/// Writes to stderr, which may be closed.
fn eprint_lossy(text: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
}
