//! `clary completions` and `clary man`.

use std::fs;
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::args::Cli;
use crate::error::{Failure, Result};
use crate::output::Output;

/// Prints a completion script.
pub(crate) fn completions(shell: Shell, output: &Output) -> Result {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "clary", &mut script);
    Ok(output.out(&String::from_utf8_lossy(&script))?)
}

/// Prints the manual page of `clary`, or writes that and one page per command into a folder.
pub(crate) fn manual(dir: Option<&Path>, output: &Output) -> Result {
    let mut command = Cli::command().disable_help_subcommand(true);
    // Gives commands the names of their pages.
    command.build();
    let Some(dir) = dir else {
        return Ok(output.out(&String::from_utf8_lossy(&page(&command)?))?);
    };
    fs::create_dir_all(dir).map_err(|error| Failure::file(dir, &error))?;
    pages(&command, dir)?;
    output.note(&format!("manual pages are in {}", dir.display()))?;
    Ok(())
}

/// Writes the pages of a command and of all below it.
fn pages(command: &Command, dir: &Path) -> Result {
    let path = dir.join(format!("{}.1", name(command)));
    fs::write(&path, page(command)?).map_err(|error| Failure::file(&path, &error))?;
    command.get_subcommands().try_for_each(|command| pages(command, dir))
}

fn page(command: &Command) -> Result<Vec<u8>> {
    let mut page = Vec::new();
    let source = concat!("clary ", env!("CARGO_PKG_VERSION"));
    Man::new(command.clone()).title(name(command)).source(source).manual("Clary manual").render(&mut page)?;
    Ok(page)
}

/// `clary`, `clary-run` and so on.
fn name(command: &Command) -> String {
    command.get_display_name().unwrap_or(command.get_name()).to_owned()
}
