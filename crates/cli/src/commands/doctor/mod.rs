//! `clary doctor`: whether this machine can run models, and what to mend (`docs/api.md` 8.3).

mod cuda;
mod intel;
mod kernels;
mod place;
mod system;

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};

use crate::error::{Exit, Failure, Result};
use crate::output::Output;
use crate::store::Store;

/// `doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// The store of models, whose disk is looked at [default: CLARY_STORE, else the user's data folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) store: Option<PathBuf>,
    /// Port that `serve` would listen at
    #[arg(long, value_name = "PORT", default_value_t = 8080, env = "CLARY_PORT")]
    pub(crate) port: u16,
}

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ok,
    /// Works, and could work better.
    Warn,
    /// Does not work.
    Fail,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Check {
    name: &'static str,
    state: State,
    /// What was found.
    found: String,
    /// What to do about it.
    fix: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, state: State::Ok, found: found.into(), fix: None }
    }

    fn warn(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, state: State::Warn, found: found.into(), fix: Some(fix.into()) }
    }

    fn fail(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, state: State::Fail, found: found.into(), fix: Some(fix.into()) }
    }
}

/// Looks at everything and says what it found. Only a default device that does not work is a failure of the
/// command.
pub(crate) fn doctor(args: &DoctorArgs, output: &Output) -> Result {
    let root = Path::new("/");
    let mut checks = system::checks(root);
    checks.extend(cuda::checks(root));
    checks.extend(intel::checks(root));
    let store = match &args.store {
        Some(store) => Ok(store.clone()),
        None => Store::new(None).map(|store| place::existing(&store.root)),
    };
    checks.extend(place::checks(store, args.port));
    let devices = kernels::devices(cuda::usable());
    let (tested, works) = kernels::checks(&devices);
    checks.extend(tested);
    match output.json {
        true => output.document(&document(&checks, works))?,
        false => output.out(&text(&checks))?,
    }
    match works {
        true => Ok(()),
        false => Err(Failure::new(Exit::Device, "the default device does not work")
            .hint("the lines that begin with `fail` say what to mend")),
    }
}

fn text(checks: &[Check]) -> String {
    let mut text = String::new();
    for Check { name, state, found, fix } in checks {
        text.push_str(&format!("{:<4}  {name:<12}  {found}\n", state.name()));
        if let Some(fix) = fix {
            text.push_str(&format!("      fix: {fix}\n"));
        }
    }
    text
}

fn document(checks: &[Check], works: bool) -> Value {
    let check = |check: &Check| {
        let state = check.state.name();
        json!({"name": check.name, "state": state, "found": check.found, "fix": check.fix})
    };
    json!({"works": works, "checks": checks.iter().map(check).collect::<Vec<_>>()})
}

/// First line of a file of the system, without white space around it.
fn line(root: &Path, path: &str) -> Option<String> {
    let text = std::fs::read_to_string(root.join(path)).ok()?;
    Some(text.lines().next()?.trim().to_owned())
}
