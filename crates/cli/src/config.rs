//! The configuration file (`docs/api.md` 8.1): options of `serve` by name under `[serve]`.
//!
//! What the file says counts where neither the command line nor the environment does: it is handed to the
//! parser of the command line as options typed last, so that a value means the same in all three places.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches};
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use crate::args::Cli;
use crate::error::{Failure, Result};
use crate::input;
use crate::mistakes::{self, Mistake};

/// Longest configuration file, bytes.
const FILE_MAX: u64 = 1 << 20;
/// The only table.
pub(crate) const TABLE: &str = "serve";

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
    input::text(&path, FILE_MAX).map(Some)
}

/// Reads and checks a configuration file. A usual file that is not there says nothing.
pub(crate) fn read(named: Option<&Path>) -> Result<Config> {
    let (config, mistakes) = read_all(named)?;
    mistakes::failure(&mistakes).map_or(Ok(config), Err)
}

/// The same with all that is wrong in the file.
pub(crate) fn read_all(named: Option<&Path>) -> Result<(Config, Vec<Mistake>)> {
    let Some(text) = text(named)? else { return Ok(Default::default()) };
    Ok(parse(&text, &path(named)?.display().to_string()))
}

/// Reads the text of a configuration file of this name. Every key and every value is checked.
pub(crate) fn parse(text: &str, file: &str) -> (Config, Vec<Mistake>) {
    let (document, errors) = DeTable::parse_recoverable(text);
    let mut reader = Reader { text, file, serve: serve(), config: Config::default(), mistakes: Vec::new() };
    for error in errors {
        let at = error.span().map_or(text.len(), |span| span.start);
        reader.mistake(at, format!("{}; the file is TOML", error.message()));
    }
    for (name, item) in in_order(document.get_ref()) {
        let (at, name) = (name.span().start, name.get_ref().as_ref());
        match item.get_ref() {
            DeValue::Table(table) if name == TABLE => reader.table(table),
            _ if name == TABLE => {
                let found = mistakes::found(&text[item.span()]);
                reader.mistake(at, format!("{name}: expected a table, found {found}"));
            }
            _ => {
                let near = mistakes::nearest(name, [TABLE].into_iter());
                reader.mistake(at, format!("{name}: no such table or key{near}"));
            }
        }
    }
    // Syntax and meaning are looked at one after the other.
    reader.mistakes.sort_by_key(|(at, _)| *at);
    (reader.config, reader.mistakes.into_iter().map(|(_, mistake)| mistake).collect())
}

/// Members of a table as they stand in the file.
fn in_order<'a, 'i>(table: &'a DeTable<'i>) -> Vec<(&'a Spanned<DeString<'i>>, &'a Spanned<DeValue<'i>>)> {
    let mut members: Vec<_> = table.iter().collect();
    members.sort_by_key(|(key, _)| key.span().start);
    members
}

/// Takes a file apart.
struct Reader<'a> {
    text: &'a str,
    file: &'a str,
    serve: Command,
    config: Config,
    /// By where they are in the text.
    mistakes: Vec<(usize, Mistake)>,
}

impl Reader<'_> {
    fn mistake(&mut self, at: usize, what: String) {
        let (line, column) = place(self.text, at);
        let place = format!("{}:{line}:{column}", self.file);
        self.mistakes.push((at, Mistake { place, what }));
    }

    fn table(&mut self, table: &DeTable<'_>) {
        for (key, item) in in_order(table) {
            let line = |at: usize| place(self.text, at).0;
            // What stands in a line that is no TOML is a guess.
            let is_guess = self.mistakes.iter().any(|(at, _)| line(*at) == line(key.span().start));
            if is_guess {
                continue;
            }
            let found = mistakes::found(&self.text[item.span()]);
            match checked(&self.serve, key.get_ref(), values(item.get_ref()), &found) {
                Ok(entry) if self.config.entries.iter().any(|other| other.option == entry.option) => {
                    self.mistake(key.span().start, format!("{}: set twice", entry.option));
                }
                Ok(entry) => self.config.entries.push(entry),
                Err(Wrong::Key(what)) => self.mistake(key.span().start, what),
                Err(Wrong::Value(what)) => self.mistake(item.span().start, what),
            }
        }
    }
}

/// Line and column of a byte, both from 1; columns are characters.
fn place(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at).unwrap_or(text);
    let line = before.rsplit('\n').next().unwrap_or_default();
    (before.matches('\n').count() + 1, line.chars().count() + 1)
}

/// What is wrong about an entry, in words.
#[derive(Debug)]
enum Wrong {
    Key(String),
    Value(String),
}

/// A value of the file as it would be typed: one, or a list.
enum Given {
    One(String),
    List(Vec<String>),
}

fn values(value: &DeValue<'_>) -> Option<Given> {
    let one = |value: &DeValue<'_>| match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => {
            i128::from_str_radix(number.as_str(), number.radix()).ok().map(|number| number.to_string())
        }
        DeValue::Float(number) => number.as_str().parse::<f64>().ok().map(|number| number.to_string()),
        DeValue::Boolean(flag) => Some(flag.to_string()),
        _ => None,
    };
    match value {
        DeValue::Array(list) => {
            list.iter().map(|value| one(value.get_ref())).collect::<Option<_>>().map(Given::List)
        }
        value => one(value).map(Given::One),
    }
}

/// Makes an entry of a key and a value as one would write it in the file.
pub(crate) fn entry(key: &str, value: &str) -> Result<Entry> {
    let failed = |what: String| Failure::usage(what).hint("`clary help serve` lists the options");
    let (item, errors) = DeValue::parse_recoverable(value);
    // A value that TOML does not know is a string that was typed without quotes.
    let given = if errors.is_empty() { values(item.get_ref()) } else { Some(Given::One(value.to_owned())) };
    checked(&serve(), key, given, value).map_err(|(Wrong::Key(what) | Wrong::Value(what))| failed(what))
}

/// Checks a key and its value, and tries them out.
fn checked(
    serve: &Command,
    key: &str,
    given: Option<Given>,
    found: &str,
) -> std::result::Result<Entry, Wrong> {
    let name = key.replace('_', "-");
    let Some(option) = own(serve).find(|option| option.get_long() == Some(&name)) else {
        let near = mistakes::nearest(&name, own(serve).filter_map(Arg::get_long));
        return Err(Wrong::Key(format!("{key}: no such key{near}")));
    };
    let values = match given {
        Some(Given::List(list)) if repeats(option) => Some(list),
        Some(Given::One(value)) => Some(vec![value]),
        Some(Given::List(_)) | None => None,
    };
    let is_switch = matches!(option.get_action(), ArgAction::SetTrue);
    let expected = match is_switch {
        true => "true or false",
        false if repeats(option) => "a string, or an array of them",
        false => "a string, number or boolean",
    };
    let fits = |values: &Vec<String>| !is_switch || values == &["true"] || values == &["false"];
    let Some(values) = values.filter(fits) else {
        return Err(Wrong::Value(format!("{key}: expected {expected}, found {found}")));
    };
    let entry = Entry { option: name, values, is_switch };
    match mistakes::wrong(serve, entry.words(), found) {
        None => Ok(entry),
        Some(what) => Err(Wrong::Value(format!("{key}: {what}"))),
    }
}

/// `serve` without its environment, which has its say before the file.
fn serve() -> Command {
    mistakes::bare(Cli::command().find_subcommand(TABLE).expect("serve is a command"))
}

fn repeats(option: &Arg) -> bool {
    matches!(option.get_action(), ArgAction::Append) || option.get_value_delimiter().is_some()
}

/// Options of `serve` that a file can set.
pub(crate) fn options() -> Vec<Arg> {
    own(Cli::command().find_subcommand(TABLE).expect("serve is a command")).cloned().collect()
}

fn own(serve: &Command) -> impl Iterator<Item = &Arg> {
    serve.get_arguments().filter(|option| option.get_long().is_some_and(|name| name != "help"))
}

/// The command line with the file's words where it and the environment say nothing, and the options that
/// the file sets so. `words` is one that was parsed already and is a `serve`.
pub(crate) fn complete(words: &[OsString], config: &Config) -> Result<(Cli, Vec<String>)> {
    let broken = |error: clap::Error| Failure::usage(error.to_string());
    let matches = Cli::command().try_get_matches_from(words).map_err(broken)?;
    let matches = matches.subcommand_matches(TABLE).expect("it is a serve").clone();
    let silent =
        |entry: &&Entry| matches!(source(&matches, &entry.option), None | Some(ValueSource::DefaultValue));
    let set = || config.entries.iter().filter(silent);
    let more: Vec<OsString> = set().flat_map(Entry::words).collect();
    let set = set().map(|entry| entry.option.clone()).collect();
    // What follows two dashes is no option.
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    let words = [&words[..end], &more, &words[end..]].concat();
    let matches = Cli::command().try_get_matches_from(words).map_err(broken)?;
    Ok((Cli::from_arg_matches(&matches).map_err(broken)?, set))
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
    fn refused(text: &str, mistakes: &[&str]) {
        let (_, found) = parse(text, "f");
        let found: Vec<String> = found.iter().map(|one| format!("{}: {}", one.place, one.what)).collect();
        let is_told = found.iter().zip(mistakes).all(|(found, wanted)| found.starts_with(wanted));
        assert!(found.len() == mistakes.len() && is_told, "{found:#?}");
    }

    #[test]
    fn keys_and_values_are_checked() {
        refused("[serve]\nsloots = 2", &["f:2:1: sloots: no such key, did you mean slots?"]);
        refused("[serve]\nzebra = 2", &["f:2:1: zebra: no such key"]);
        refused("[sever]\nslots = 2", &["f:1:2: sever: no such table or key, did you mean serve?"]);
        refused("serve = 1", &["f:1:1: serve: expected a table, found 1"]);
        let slots = "slots: expected auto, or a number from 1 to 64, found 0";
        refused("[serve]\nslots = 0", &[&format!("f:2:9: {slots}")]);
        refused(
            "[serve]\nslots = [1, 2]",
            &["f:2:9: slots: expected a string, number or boolean, found [1, 2]"],
        );
        let flag = "f:2:13: no_ollama: expected true or false, found \"maybe\"";
        refused("[serve]\nno_ollama = \"maybe\"", &[flag]);
        refused("[serve]\nhost = {a = 1}", &["f:2:8: host: expected a string"]);
        refused("[serve]\nport = 70000", &["f:2:8: port: expected a number from 0 to 65535, found 70000"]);
        let kv = "f:2:6: kv: expected one of int8, int16, found \"int61\", did you mean int16?";
        refused("[serve]\nkv = \"int61\"", &[kv]);
        refused("[serve]\nno_ui = true\nno-ui = true", &["f:3:1: no-ui: set twice"]);
        assert_eq!(parse("# nothing", "f"), (Config::default(), Vec::new()));
    }

    #[test]
    fn every_mistake_is_told_at_once() {
        let text = "[serve]\nslots = 0\nkv = \nprot = 1\nport = \"é\"\nctx = 12\nqueue = [\n";
        let (config, found) = parse(text, "f");
        let lines: Vec<&str> = found.iter().filter_map(|one| one.place.split(':').nth(1)).collect();
        assert_eq!(lines[..4], ["2", "3", "4", "5"], "{found:#?}");
        assert!(lines.len() > 4 && lines[4..].iter().all(|line| ["7", "8"].contains(line)), "{found:#?}");
        assert_eq!(config.entries.len(), 1, "{config:?}");
        let failure = mistakes::failure(&found).unwrap();
        assert!(failure.message.contains("mistakes in the settings\n  f:2:9: slots: "), "{failure:?}");
    }

    #[test]
    fn a_file_counts_where_nothing_was_typed() {
        let text = "[serve]\nslots = 2\nport = 81\nno_anthropic = true\nno-responses = false\n\
                    alias = [\"a\", \"b\"]\ntemperature = 0.5\nqueue_timeout = \"2s\"";
        let (config, mistakes) = parse(text, "f");
        assert_eq!(mistakes, []);
        let words: Vec<OsString> = ["clary", "serve", "--port", "82", "--", "m"].map(Into::into).into();
        let (cli, set) = complete(&words, &config).unwrap();
        assert_eq!(set.len(), config.entries.len() - 1, "{set:?}");
        let Command::Serve(args) = cli.command else { panic!("a serve") };
        assert_eq!((args.place.port, args.model.model.as_str()), (82, "m"));
        assert!(args.place.no_anthropic && !args.place.no_responses);
        assert_eq!((args.words.alias, args.words.temperature), (vec!["a".into(), "b".into()], Some(0.5)));
        assert_eq!(args.work.queue_timeout.as_secs(), 2);
        assert_eq!(args.work.slots, crate::commands::serve::Slots::Count(2));
    }
}
