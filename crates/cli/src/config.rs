//! The configuration file (`docs/api.md` 8.1): options of `serve` by name under `[serve]`.
//!
//! What the file says counts where neither the command line nor the environment does: it is handed to the
//! parser of the command line as options typed last, so that a value means the same in all three places.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, CommandFactory, FromArgMatches};
use toml_edit::{DocumentMut, Item, Value};

use crate::args::Cli;
use crate::error::{Failure, Result};

/// Longest configuration file, bytes.
const FILE_MAX: u64 = 1 << 20;
/// The only table.
pub(crate) const TABLE: &str = "serve";
/// Likeness from which a name is taken for a misspelling of another, 0 to 1.
const LIKE: f64 = 0.7;

/// A configuration file that was read and holds no mistake.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Config {
    /// Options and their values as they would be typed, in the file's order.
    pub(crate) entries: Vec<Entry>,
}

/// An option that the file sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Long name of the option, without dashes in front.
    pub(crate) option: String,
    /// One value, or several of an option that repeats.
    pub(crate) values: Vec<String>,
    /// Whether the option takes no value on the command line.
    is_switch: bool,
}

impl Entry {
    /// The words that say the same on a command line.
    fn words(&self) -> Vec<OsString> {
        let option = &self.option;
        match self.is_switch {
            true if self.values == ["true"] => vec![format!("--{option}").into()],
            true => Vec::new(),
            false => self.values.iter().map(|value| format!("--{option}={value}").into()).collect(),
        }
    }
}

/// An absolute path of the environment.
fn env_folder(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// The folder of what can be made again; `None` where the user has none.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    let folder = env_folder("XDG_CACHE_HOME").or_else(|| Some(env_folder("HOME")?.join(".cache")))?;
    Some(folder.join("clary"))
}

/// The file in the user's configuration folder; `None` where the user has none.
pub(crate) fn usual_path() -> Option<PathBuf> {
    let folder = env_folder("XDG_CONFIG_HOME").or_else(|| Some(env_folder("HOME")?.join(".config")))?;
    Some(folder.join("clary/config.toml"))
}

/// The file that counts: the one that was named, else the usual one.
pub(crate) fn path(named: Option<&Path>) -> Result<PathBuf> {
    let path = named.map(Path::to_owned).or_else(usual_path);
    path.ok_or_else(|| {
        Failure::usage("there is no configuration folder: neither HOME nor XDG_CONFIG_HOME is set")
            .hint("--config FILE names a file")
    })
}

/// Text of a configuration file; `None` where the usual one is not there.
pub(crate) fn text(named: Option<&Path>) -> Result<Option<String>> {
    let path = match named {
        Some(path) => path.to_owned(),
        None => match usual_path().filter(|path| path.exists()) {
            Some(path) => path,
            None => return Ok(None),
        },
    };
    let mut text = String::new();
    File::open(&path)
        .and_then(|file| file.take(FILE_MAX + 1).read_to_string(&mut text))
        .map_err(|error| Failure::file(&path, &error))?;
    if text.len() as u64 > FILE_MAX {
        return Err(Failure::usage(format!("{}: more than {FILE_MAX} bytes", path.display())));
    }
    Ok(Some(text))
}

/// Reads and checks a configuration file. A usual file that is not there says nothing.
pub(crate) fn read(named: Option<&Path>) -> Result<Config> {
    match text(named)? {
        Some(text) => parse(&text).map_err(|failure| {
            let place = path(named).map(|path| path.display().to_string()).unwrap_or_default();
            failure.context(&place)
        }),
        None => Ok(Config::default()),
    }
}

/// Reads the text of a configuration file. Every key and every value is checked.
pub(crate) fn parse(text: &str) -> Result<Config> {
    let document: DocumentMut = text.parse().map_err(|error: toml_edit::TomlError| {
        Failure::usage(error.to_string().trim_end().to_owned()).hint("the file is TOML; https://toml.io")
    })?;
    let mut config = Config::default();
    for (name, item) in document.iter() {
        let table = match item.as_table_like() {
            Some(table) if name == TABLE => table,
            _ if name == TABLE => return Err(Failure::usage(format!("{name}: a table is expected"))),
            _ => return Err(unknown(name, &[TABLE.to_owned()])),
        };
        for (key, item) in table.iter() {
            config.entries.push(entry(key, item)?);
        }
    }
    Ok(config)
}

/// Makes an entry of a key and its value, and tries it out.
pub(crate) fn entry(key: &str, item: &Item) -> Result<Entry> {
    let options = options();
    let name = key.replace('_', "-");
    let Some(option) = options.iter().find(|option| option.get_long() == Some(&name)) else {
        let names: Vec<String> =
            options.iter().filter_map(|option| Some(option.get_long()?.into())).collect();
        return Err(unknown(key, &names));
    };
    let one = |value: &Value| match value {
        Value::String(text) => Some(text.value().clone()),
        Value::Integer(number) => Some(number.value().to_string()),
        Value::Float(number) => Some(number.value().to_string()),
        Value::Boolean(flag) => Some(flag.value().to_string()),
        _ => None,
    };
    let values = match item.as_value() {
        Some(Value::Array(list)) if repeats(option) => list.iter().map(one).collect(),
        Some(value) => one(value).map(|value| vec![value]),
        None => None,
    };
    let is_switch = matches!(option.get_action(), ArgAction::SetTrue);
    let expected = match is_switch {
        true => "true or false",
        false if repeats(option) => "a string, or an array of them",
        false => "a string, number or boolean",
    };
    let fits = |values: &Vec<String>| !is_switch || values == &["true"] || values == &["false"];
    let values = values.filter(fits).ok_or_else(|| {
        Failure::usage(format!("{TABLE}.{key}: {expected} is expected, found {}", item.to_string().trim()))
    })?;
    let entry = Entry { option: name, values, is_switch };
    let words = ["clary".into(), TABLE.into(), "MODEL".into()].into_iter().chain(entry.words());
    // The environment has its say before the file, so what is wrong here is the entry.
    match Cli::command().mut_subcommand(TABLE, no_environment).try_get_matches_from(words) {
        Ok(_) => Ok(entry),
        Err(error) => {
            let text = error.render().to_string();
            let line = text.lines().next().unwrap_or_default();
            let line = line.strip_prefix("error: ").unwrap_or(line);
            Err(Failure::usage(format!("{TABLE}.{key}: {line}")))
        }
    }
}

fn no_environment(command: clap::Command) -> clap::Command {
    command.mut_args(|option| option.env(None::<&str>))
}

fn repeats(option: &Arg) -> bool {
    matches!(option.get_action(), ArgAction::Append) || option.get_value_delimiter().is_some()
}

fn unknown(key: &str, known: &[String]) -> Failure {
    let likeness = |name: &String| strsim::jaro_winkler(&key.replace('_', "-"), name);
    let nearest = known.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    let hint = match nearest.filter(|name| likeness(name) >= LIKE) {
        Some(name) => format!("did you mean {name}?"),
        None => "`clary help serve` lists the options; each is a key of [serve]".to_owned(),
    };
    Failure::usage(format!("{key}: no such key")).hint(hint)
}

/// Options of `serve` that a file can set.
pub(crate) fn options() -> Vec<Arg> {
    let command = Cli::command();
    let serve = command.find_subcommand(TABLE).expect("serve is a command");
    let own = |option: &&Arg| option.get_long().is_some_and(|name| name != "help");
    serve.get_arguments().filter(own).cloned().collect()
}

/// The command line with the file's words where it and the environment say nothing. `words` is one that
/// was parsed already and is a `serve`.
pub(crate) fn complete(words: &[OsString], config: &Config) -> Result<Cli> {
    let broken = |error: clap::Error| Failure::usage(error.to_string());
    let matches = Cli::command().try_get_matches_from(words).map_err(broken)?;
    let matches = matches.subcommand_matches(TABLE).expect("it is a serve").clone();
    let silent =
        |entry: &&Entry| matches!(source(&matches, &entry.option), None | Some(ValueSource::DefaultValue));
    let more: Vec<OsString> = config.entries.iter().filter(silent).flat_map(Entry::words).collect();
    // What follows two dashes is no option.
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    let words = [&words[..end], &more, &words[end..]].concat();
    let matches = Cli::command().try_get_matches_from(words).map_err(broken)?;
    Cli::from_arg_matches(&matches).map_err(broken)
}

/// Where the value of an option comes from, by its long name.
pub(crate) fn source(matches: &ArgMatches, option: &str) -> Option<ValueSource> {
    // An id is the field's name.
    matches.value_source(&option.replace('-', "_"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;

    #[track_caller]
    fn refused(text: &str, message: &str, hint: &str) {
        let failure = parse(text).unwrap_err();
        assert!(failure.message.contains(message), "{failure:?}");
        assert!(failure.advice().unwrap_or_default().contains(hint), "{failure:?}");
    }

    #[test]
    fn keys_and_values_are_checked() {
        refused("[serve]\nsloots = 2", "sloots: no such key", "did you mean slots?");
        refused("[serve]\nzebra = 2", "zebra: no such key", "clary help serve");
        refused("[sever]\nslots = 2", "sever: no such key", "did you mean serve?");
        refused("serve = 1", "a table is expected", "");
        refused("[serve]\nslots = 0", "serve.slots: invalid value '0'", "");
        refused("[serve]\nslots = [1, 2]", "serve.slots: a string, number or boolean", "");
        refused("[serve]\nno_ollama = \"maybe\"", "serve.no_ollama: true or false", "");
        refused("[serve]\nslots = ", "line", "TOML");
        refused("[serve]\nhost = {a = 1}", "serve.host", "");
        assert_eq!(parse("# nothing").unwrap(), Config::default());
    }

    #[test]
    fn a_file_counts_where_nothing_was_typed() {
        let text = "[serve]\nslots = 2\nport = 81\nno_anthropic = true\nno-responses = false\n\
                    alias = [\"a\", \"b\"]\ntemperature = 0.5\nqueue_timeout = \"2s\"";
        let config = parse(text).unwrap();
        let words: Vec<OsString> = ["clary", "serve", "--port", "82", "--", "m"].map(Into::into).into();
        let Command::Serve(args) = complete(&words, &config).unwrap().command else { panic!("a serve") };
        assert_eq!((args.place.port, args.model.model.as_str()), (82, "m"));
        assert!(args.place.no_anthropic && !args.place.no_responses);
        assert_eq!((args.words.alias, args.words.temperature), (vec!["a".into(), "b".into()], Some(0.5)));
        assert_eq!(args.work.queue_timeout.as_secs(), 2);
        assert_eq!(args.work.slots, crate::commands::serve::Slots::Count(2));
    }
}
