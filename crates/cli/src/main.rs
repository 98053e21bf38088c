//! The binary `clary`: flags, wiring, progress, human errors.

mod args;
mod client;
mod commands;
mod config;
mod error;
mod hub;
mod ids;
mod input;
mod interrupt;
mod load;
mod memory;
mod mistakes;
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
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, CommandFactory, FromArgMatches};

use args::{Cli, Command};
use commands::serve::LogFormat;
use error::{Exit, Failure};
use output::Output;

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let command = command();
    let parsed = command.clone().try_get_matches_from(&words).and_then(|matches| {
        let cli = Cli::from_arg_matches(&matches)?;
        Ok((cli, mistakes::from_environment(&command, &matches)))
    });
    let (cli, mut places) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return not_parsed(&error, &command, &words),
    };
    let output = Output::new(&cli.global);
    match complete(cli, &words, &mut places).and_then(|cli| commands::dispatch(cli, &output)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let message = mistakes::placed(&failure.message, &places);
            report(&Failure { message, ..failure }, &output)
        }
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

/// Adds what the configuration file says about the server; `places` gets the options that it sets.
fn complete(cli: Cli, words: &[OsString], places: &mut Vec<(String, String)>) -> error::Result<Cli> {
    match cli.command {
        Command::Serve(_) => {
            let file = cli.global.config;
            let (cli, set) = config::complete(words, &config::read(file.as_deref())?)?;
            if !set.is_empty() {
                let path = config::path(file.as_deref())?;
                let place = |option| (format!("--{option}"), format!("{}: {option}", path.display()));
                places.extend(set.into_iter().map(place));
            }
            // Where every line is a document, notes have no place among them.
            if let Command::Serve(args) = &cli.command
                && args.work.log_format == LogFormat::Text
            {
                for told in mistakes::unknown_variables(&Cli::command()) {
                    eprint_lossy(&format!("note: environment: {told}\n"));
                }
            }
            Ok(cli)
        }
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

/// Commands and evaluations that `docs/api.md` names and this version does not have. A similar one would be a
/// wrong tip.
const LATER_COMMANDS: [&str; 8] = ["quantize", "kl", "ppl", "tools", "struct", "if", "math", "speed"];

/// Help goes to stdout, mistakes to stderr with a hint.
fn not_parsed(error: &clap::Error, command: &clap::Command, words: &[OsString]) -> ExitCode {
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
    let typed = || words.iter().skip(1).filter_map(|word| word.to_str());
    let named = typed().find(|word| command.find_subcommand(word).is_some());
    let named = named.or_else(|| typed().find(|word| !word.starts_with('-')));
    if let Some(failure) =
        named.and_then(|name| settings_mistakes(error, innermost(command, name, typed())?, words))
    {
        eprint_lossy(&format!(
            "error: {}\nhint: {}\n",
            failure.message,
            failure.advice().unwrap_or_default()
        ));
        return ExitCode::from(Exit::Usage as u8);
    }
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
        ErrorKind::InvalidSubcommand => {
            let name = match error.get(ContextKind::InvalidSubcommand) {
                Some(ContextValue::String(name)) => name.as_str(),
                _ => "",
            };
            match LATER_COMMANDS.contains(&name) {
                true => eprint_lossy(&format!("error: this version has no {name}\n")),
                false => eprint_lossy(&format!("{text}\n")),
            }
            if help.contains("COMMAND") { "`clary help` lists the commands".to_owned() } else { help }
        }
        _ => {
            eprint_lossy(&format!("{text}\n"));
            help
        }
    };
    eprint_lossy(&format!("hint: {hint}\n"));
    ExitCode::from(Exit::Usage as u8)
}

/// The command of this name, or the one inside that was typed.
fn innermost<'c, 'w>(
    command: &'c clap::Command,
    name: &str,
    typed: impl Iterator<Item = &'w str>,
) -> Option<&'c clap::Command> {
    let found = command.find_subcommand(name)?;
    let inner = |command: &'c clap::Command, word| command.find_subcommand(word).unwrap_or(command);
    Some(typed.skip_while(|word| *word != name).skip(1).fold(found, inner))
}

/// Where a value of the environment is refused: all that is wrong there, and for `serve` in the file.
fn settings_mistakes(error: &clap::Error, command: &clap::Command, words: &[OsString]) -> Option<Failure> {
    if !matches!(error.kind(), ErrorKind::InvalidValue | ErrorKind::ValueValidation) {
        return None;
    }
    let mut found = mistakes::environment(command, words);
    if !found.is_empty() && command.get_name() == config::TABLE {
        let named = |pair: &[OsString]| (pair[0] == "--config").then(|| PathBuf::from(&pair[1]));
        let file = words.windows(2).find_map(named);
        // A file that cannot be read is told of when the variables are right.
        found.extend(config::read_all(file.as_deref()).map(|(_, mistakes)| mistakes).unwrap_or_default());
    }
    mistakes::failure(&found)
}

/// Writes to stderr, which may be closed.
fn eprint_lossy(text: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
}
