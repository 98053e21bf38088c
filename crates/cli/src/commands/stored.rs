//! `clary list` and `clary rm`: what is in the store.

use std::io::{BufRead, IsTerminal, stdin};

use clap::Args;
use serde_json::{Value, json};

use super::pull::StoreArg;
use crate::error::{Exit, Failure, Result};
use crate::output::Output;
use crate::store::{self, Entry, Name, Store};
use crate::table::{self, Table};

/// `list`.
#[derive(Clone, Debug, Args)]
pub(crate) struct ListArgs {
    /// Whole commits, and folders
    #[arg(long)]
    pub(crate) long: bool,
    #[command(flatten)]
    pub(crate) store: StoreArg,
}

/// `rm`.
#[derive(Clone, Debug, Args)]
pub(crate) struct RmArgs {
    /// owner/name for all of a model, what a pull has left included, or owner/name@revision
    pub(crate) name: String,
    /// Do not ask
    #[arg(long)]
    pub(crate) yes: bool,
    #[command(flatten)]
    pub(crate) store: StoreArg,
}

/// Lists the store.
pub(crate) fn list(args: &ListArgs, output: &Output) -> Result {
    let store = Store::new(args.store.store.as_deref())?;
    let entries = store.entries()?;
    if output.json {
        let models: Vec<Value> = entries.iter().map(document).collect();
        return Ok(output.document(&json!({"store": store.root.display().to_string(), "models": models}))?);
    }
    if entries.is_empty() {
        return Ok(output.note(&format!("{}: no models; `clary pull owner/name`", store.root.display()))?);
    }
    let mut table = Table::new("<<><<<");
    for entry in &entries {
        let state = if entry.is_whole { "" } else { "not whole; pull it again to go on" };
        let commit = if args.long { entry.commit.clone() } else { format!("{:.12}", entry.commit) };
        let dir = if args.long { entry.dir.display().to_string() } else { String::new() };
        let size = table::bytes(store::bytes(&entry.dir));
        table.row([&entry.model, &entry.revisions.join(","), &size, &commit, state, &dir]);
    }
    Ok(output.out(&table.text())?)
}

fn document(entry: &Entry) -> Value {
    json!({"model": entry.model, "revisions": entry.revisions, "commit": entry.commit,
        "whole": entry.is_whole, "bytes": store::bytes(&entry.dir), "dir": entry.dir.display().to_string()})
}

/// Removes a model.
pub(crate) fn rm(args: &RmArgs, output: &Output) -> Result {
    let name = Name::parse(&args.name).ok_or_else(|| {
        Failure::usage(format!("{}: no name of a model", args.name)).hint("`clary list` shows the names")
    })?;
    let store = Store::new(args.store.store.as_deref())?;
    let is_meant = |entry: &Entry| match &name.typed {
        None => true,
        Some(typed) => entry.revisions.contains(typed) || entry.commit == *typed,
    };
    let meant: Vec<Entry> =
        store.entries()?.into_iter().filter(|entry| entry.model == name.model() && is_meant(entry)).collect();
    if meant.is_empty() {
        let message = format!("{}: not in {}", args.name, store.root.display());
        return Err(Failure::new(Exit::Model, message).hint("`clary list` shows what is there"));
    }
    let bytes: u64 = meant.iter().map(|entry| store::bytes(&entry.dir)).sum();
    if !args.yes {
        confirm(&format!("remove {}, {}? [y/N] ", args.name, table::bytes(bytes)), output)?;
    }
    for entry in &meant {
        store.remove(entry)?;
    }
    if output.json {
        let removed: Vec<String> = meant.iter().map(|entry| entry.commit.clone()).collect();
        return Ok(output.document(&json!({"removed": removed, "bytes": bytes}))?);
    }
    Ok(output.out(&format!("removed {}, {}\n", args.name, table::bytes(bytes)))?)
}

fn confirm(question: &str, output: &Output) -> Result {
    if !stdin().is_terminal() {
        return Err(Failure::usage("nobody can be asked here").hint("--yes removes without asking"));
    }
    output.err(question)?;
    let mut answer = String::new();
    stdin().lock().read_line(&mut answer)?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(Failure::new(Exit::Failure, "nothing was removed").hint("--yes removes without asking")),
    }
}
