//! `clary completions` and `clary man`.

use std::fs;
use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

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
    let Some(dir) = dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(Cli::command()).render(&mut page)?;
        return Ok(output.out(&String::from_utf8_lossy(&page))?);
    };
    fs::create_dir_all(dir).map_err(|error| Failure::file(dir, &error))?;
    clap_mangen::generate_to(Cli::command(), dir).map_err(|error| Failure::file(dir, &error))?;
    output.note(&format!("manual pages are in {}", dir.display()))?;
    Ok(())
}
