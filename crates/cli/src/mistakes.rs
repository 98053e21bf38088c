//! Mistakes in settings, of the configuration file and of the environment: all of them at once, each with its
//! place, what was expected and what was found.

use std::error::Error as _;
use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::error::Failure;

/// Likeness from which a name is taken for a misspelling of another, 0 to 1.
const LIKE: f64 = 0.7;
/// Most characters of a value that are shown.
const FOUND_MAX: usize = 60;
/// Beginning of the names of this program's variables.
const PREFIX: &str = "CLARY_";
/// Variables that belong to no option; the last two are the service's and the build's.
const VARIABLES: [&str; 5] =
    ["CLARY_API_KEY", "CLARY_HUB_TOKEN", "CLARY_STORE", "CLARY_MODEL", "CLARY_COMMIT"];
/// What switches take in the environment.
const BOOLISH: [&str; 12] = ["y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0"];

/// One mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mistake {
    /// `FILE:LINE:COLUMN`, or the name of a variable.
    pub(crate) place: String,
    /// What is wrong there.
    pub(crate) what: String,
}

/// All mistakes as one failure; `None` where there is none.
pub(crate) fn failure(mistakes: &[Mistake]) -> Option<Failure> {
    let line = |mistake: &Mistake| format!("{}: {}", mistake.place, mistake.what);
    let message = match mistakes {
        [] => return None,
        [one] => line(one),
        more => {
            let lines: Vec<String> = more.iter().map(|mistake| format!("\n  {}", line(mistake))).collect();
            format!("{} mistakes in the settings{}", more.len(), lines.concat())
        }
    };
    let hint = "`clary help serve` lists the options: each is a key under [serve] of the file, \
        and a variable CLARY_NAME";
    Some(Failure::usage(message).hint(hint))
}

/// `, did you mean X?` where a known name is near.
pub(crate) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    let rated = known.map(|known| (strsim::jaro_winkler(name, known), known));
    let best = rated.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(likeness, _)| *likeness >= LIKE);
    best.map(|(_, known)| format!(", did you mean {known}?")).unwrap_or_default()
}

/// A value as it is shown: one line, not endless.
pub(crate) fn found(text: &str) -> String {
    let line = text.trim().lines().next().unwrap_or_default();
    let short: String = line.chars().take(FOUND_MAX).collect();
    let is_cut = short.len() < text.trim().len();
    if is_cut { format!("{short}...") } else { short }
}

/// The command without its environment and with nothing that must be there: what it says about a value is
/// about that value.
pub(crate) fn bare(command: &Command) -> Command {
    command.clone().mut_args(|option| option.env(None::<&str>).required(false))
}

/// What is wrong with these words of a [`bare`] command.
pub(crate) fn wrong(command: &Command, words: Vec<OsString>, shown: &str) -> Option<String> {
    let words = std::iter::once(OsString::from(command.get_name())).chain(words);
    let error = command.clone().try_get_matches_from(words).err()?;
    match error.kind() {
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => Some(said(&error, shown)),
        ErrorKind::MissingRequiredArgument | ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => None,
        _ => {
            let text = error.render().to_string();
            let line = text.lines().next().unwrap_or_default();
            Some(line.strip_prefix("error: ").unwrap_or(line).to_owned())
        }
    }
}

/// Expected and found.
fn said(error: &clap::Error, shown: &str) -> String {
    if let Some(ContextValue::Strings(known)) = error.get(ContextKind::ValidValue) {
        let value = shown.trim_matches(['"', '\'']);
        let near = nearest(value, known.iter().map(String::as_str));
        return format!("expected one of {}, found {shown}{near}", known.join(", "));
    }
    match error.source() {
        Some(expected) => format!("expected {expected}, found {shown}"),
        None => format!("no such value: {shown}"),
    }
}

/// Mistakes in the variables of a command's options, where the words say nothing about the option.
pub(crate) fn environment(command: &Command, words: &[OsString]) -> Vec<Mistake> {
    let bare = bare(command);
    let typed = |option: &str| {
        words
            .iter()
            .filter_map(|word| word.to_str())
            .any(|word| word.strip_prefix("--").is_some_and(|word| word.split('=').next() == Some(option)))
    };
    let mistake = |option: &Arg| {
        let (name, variable) = (option.get_long()?, option.get_env()?.to_str()?);
        let value = std::env::var_os(variable).filter(|_| !typed(name))?;
        let Some(text) = value.to_str() else {
            return Some(Mistake {
                place: variable.to_owned(),
                what: "expected text, found other bytes".into(),
            });
        };
        let shown = format!("{:?}", found(text));
        let what = match option.get_action() {
            ArgAction::SetTrue if BOOLISH.contains(&text.to_ascii_lowercase().as_str()) => None,
            ArgAction::SetTrue => Some(format!("expected true or false, found {shown}")),
            _ => wrong(&bare, vec![format!("--{name}={text}").into()], &shown),
        };
        Some(Mistake { place: variable.to_owned(), what: what? })
    };
    command.get_arguments().filter_map(mistake).collect()
}

/// Options of a command that nobody typed, and the variables that set them: what goes wrong with an option is
/// told of where its value stands.
pub(crate) fn from_environment(command: &Command, matches: &ArgMatches) -> Vec<(String, String)> {
    let (mut command, mut matches) = (command, matches);
    while let Some((name, inner)) = matches.subcommand()
        && let Some(found) = command.find_subcommand(name)
    {
        (command, matches) = (found, inner);
    }
    let set = command.get_arguments().filter_map(|option| {
        let (name, variable) = (option.get_long()?, option.get_env()?.to_str()?);
        let is_set = matches.value_source(option.get_id().as_str()) == Some(ValueSource::EnvVariable);
        is_set.then(|| (format!("--{name}"), variable.to_owned()))
    });
    set.collect()
}

/// A message that names other places of options than the command line.
pub(crate) fn placed(message: &str, places: &[(String, String)]) -> String {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let mut placed = String::with_capacity(message.len());
    let mut rest = message;
    while let Some(at) = rest.find("--") {
        let (before, from) = rest.split_at(at);
        let (option, after) = from.split_at(from.find(|c| !is_name(c)).unwrap_or(from.len()));
        let place = places.iter().find(|(name, _)| name == option).map_or(option, |(_, place)| place);
        placed.push_str(before);
        placed.push_str(place);
        rest = after;
    }
    placed + rest
}

/// Variables that look like this program's and are none of them, each with the nearest that is.
pub(crate) fn unknown_variables(root: &Command) -> Vec<String> {
    let mut known: Vec<String> = VARIABLES.map(str::to_owned).to_vec();
    let options = root.get_subcommands().flat_map(Command::get_arguments);
    known.extend(options.filter_map(|option| Some(option.get_env()?.to_str()?.to_owned())));
    let set = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let strange = set.filter(|name| name.starts_with(PREFIX) && !known.contains(name));
    let told = strange.map(|name| {
        let near = nearest(&name, known.iter().map(String::as_str));
        format!("{name}: no such variable{near}")
    });
    told.collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    #[test]
    fn messages_name_the_place_of_an_option() {
        let places = [("--hub".to_owned(), "CLARY_HUB".to_owned())];
        let check = |message: &str, wanted: &str| assert_eq!(placed(message, &places), wanted);
        check("--hub x: no address", "CLARY_HUB x: no address");
        check("a --hub-b, --hub: --to and --hub", "a --hub-b, CLARY_HUB: --to and CLARY_HUB");
        check("nothing -- here", "nothing -- here");
        // Nothing is set here, whatever was typed.
        let words = ["clary", "eval", "exact", "m", "--kv", "int16"];
        let matches = Cli::command().try_get_matches_from(words).unwrap();
        assert_eq!(from_environment(&Cli::command(), &matches), []);
    }
}
