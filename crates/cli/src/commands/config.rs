//! `clary config`: what `serve` would run with, and the file that says so.

use std::fs;
use std::io::Write;
use std::path::Path;

use clap::parser::ValueSource;
use clap::{CommandFactory, Subcommand};
use serde_json::{Map, Value, json};
use toml_edit::{DocumentMut, Item, Table as TomlTable, value};

use crate::args::Cli;
use crate::config::{self, Config, TABLE};
use crate::error::{Failure, Result};
use crate::mistakes;
use crate::output::Output;
use crate::table::Table;
use crate::target::Target;

/// `config`.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum ConfigAction {
    /// Every setting, its value and where it comes from: environment, file or default
    Show,
    /// Where the file is, or would be
    Path,
    /// Set a key in the file: `clary config set slots 2`
    Set {
        /// Name of an option of `serve`
        key: String,
        /// Its value
        value: String,
    },
    /// Look for mistakes in the file
    Check,
}

/// Runs `clary config`.
pub(crate) fn config(action: &ConfigAction, named: Option<&Path>, output: &Output) -> Result {
    match action {
        ConfigAction::Show => show(named, output),
        ConfigAction::Path => {
            let path = config::path(named)?;
            match output.json {
                true => Ok(output.document(&json!({"path": path, "exists": path.exists()}))?),
                false => Ok(output.out(&format!("{}\n", path.display()))?),
            }
        }
        ConfigAction::Set { key, value } => set(key, value, named, output),
        ConfigAction::Check => check(named, output),
    }
}

/// An option as it would count.
struct Shown {
    option: String,
    value: Option<String>,
    from: &'static str,
}

fn show(named: Option<&Path>, output: &Output) -> Result {
    let shown = resolved(&config::read(named)?)?;
    if output.json {
        let member =
            |shown: &Shown| (shown.option.clone(), json!({"value": shown.value, "from": shown.from}));
        let members: Map<String, Value> = shown.iter().map(member).collect();
        return Ok(output.document(&json!({"serve": members}))?);
    }
    let mut table = Table::new("<<<");
    for Shown { option, value, from } in &shown {
        table.row([option, value.as_deref().unwrap_or("-"), from]);
    }
    Ok(output.out(&table.text())?)
}

/// Every option of `serve` with its value and where it comes from.
fn resolved(file: &Config) -> Result<Vec<Shown>> {
    let broken = |error: clap::Error| Failure::usage(error.to_string().trim_end().to_owned());
    let matches = Cli::command().try_get_matches_from(["clary", TABLE, "MODEL"]).map_err(broken)?;
    let matches = matches.subcommand_matches(TABLE).expect("it is a serve");
    let mut shown = Vec::new();
    for option in config::options() {
        let name = option.get_long().expect("options have a long name").to_owned();
        // Options of every command are no settings of the server.
        if ["json", "quiet", "verbose", "color", "config"].contains(&name.as_str()) {
            continue;
        }
        let raw = matches.get_raw(option.get_id().as_str());
        let raw =
            raw.map(|values| values.map(|value| value.to_string_lossy().into_owned()).collect::<Vec<_>>());
        let (values, from) = match config::source(matches, &name) {
            Some(ValueSource::EnvVariable) => (raw, "environment"),
            source => match file.entries.iter().find(|entry| entry.option == name) {
                Some(entry) => (Some(entry.values.clone()), "file"),
                None if source.is_some() => (raw, "default"),
                None => (None, "default"),
            },
        };
        shown.push(Shown { option: name, value: values.map(|values| values.join(",")), from });
    }
    let key = std::env::var_os("CLARY_API_KEY").map(|_| "(set)".to_owned());
    let from = if key.is_some() { "environment" } else { "default" };
    shown.push(Shown { option: "CLARY_API_KEY".into(), value: key, from });
    Ok(shown)
}

/// Sets a key in the file, which is made where there is none. The rest of the file stays as it is.
fn set(key: &str, text: &str, named: Option<&Path>, output: &Output) -> Result {
    let path = config::path(named)?;
    let exists = path.exists();
    let before = if exists { config::text(Some(&path))? } else { None }.unwrap_or_default();
    let key = key.strip_prefix("serve.").unwrap_or(key);
    let entry = config::entry(key, text)?;
    // A value that TOML does not know is a string that was typed without quotes.
    let item = text.parse::<toml_edit::Value>().map_or_else(|_| value(text), Item::Value);
    let wrong = |error: toml_edit::TomlError| {
        Failure::usage(error.to_string().trim_end().to_owned()).context(&path.display().to_string())
    };
    let mut document: DocumentMut = before.parse().map_err(wrong)?;
    let table = document.entry(TABLE).or_insert_with(|| Item::Table(TomlTable::new()));
    let table = table.as_table_like_mut();
    let table = table.ok_or_else(|| Failure::usage(format!("{}: {TABLE} is no table", path.display())))?;
    // The same option under its other spelling would stand there twice.
    let other = |name: &&str| name.replace('_', "-") == entry.option;
    let name = table.iter().map(|(name, _)| name.to_owned()).find(|name| other(&name.as_str()));
    table.insert(&name.unwrap_or(entry.option), item);
    let text = document.to_string();
    let (_, mistakes) = config::parse(&text, &path.display().to_string());
    if let Some(failure) = mistakes::failure(&mistakes) {
        return Err(failure);
    }
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::create_dir_all(folder).map_err(|error| Failure::file(folder, &error))?;
    }
    let mut target = Target::create(&path)?;
    target.file.write_all(text.as_bytes()).map_err(|error| target.failed(&error))?;
    target.finish()?;
    Ok(output.note(&format!("{} is written", path.display()))?)
}

fn check(named: Option<&Path>, output: &Output) -> Result {
    let path = config::path(named)?;
    let is_there = named.is_some() || path.exists();
    let (file, mistakes) = config::read_all(named)?;
    if let Some(failure) = mistakes::failure(&mistakes) {
        if output.json {
            let list = mistakes.iter().map(|mistake| json!({"place": mistake.place, "what": mistake.what}));
            let list: Vec<Value> = list.collect();
            output.document(&json!({"path": path, "exists": is_there, "ok": false, "mistakes": list}))?;
        }
        return Err(failure);
    }
    if output.json {
        let keys: Vec<&String> = file.entries.iter().map(|entry| &entry.option).collect();
        return Ok(output.document(&json!({"path": path, "exists": is_there, "ok": true, "keys": keys}))?);
    }
    let count = file.entries.len();
    let text = match is_there {
        true => format!("ok: {}, {count} key{}", path.display(), if count == 1 { "" } else { "s" }),
        false => format!("ok: there is no {}", path.display()),
    };
    Ok(output.out(&format!("{text}\n"))?)
}
