//! MODEL on the command line: where weights come from.

use std::path::{Path, PathBuf};

use crate::error::{Exit, Failure, Result};
use crate::store::{Name, Store};

/// A MODEL as typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A folder.
    Folder(PathBuf),
    /// A folder of the store, and the name it was found by, without the revision.
    Stored(PathBuf, String),
    /// Random weights.
    Synth(SynthSpec),
}

/// `synth:CONFIG.json?scheme=S&layers=N&experts=N&seed=S`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SynthSpec {
    /// The config whose geometry is taken.
    pub(crate) config: PathBuf,
    /// Name of the scheme.
    pub(crate) scheme: String,
    /// Other number of layers.
    pub(crate) layers: Option<usize>,
    /// Other number of experts.
    pub(crate) experts: Option<usize>,
    /// Seed of the numbers.
    pub(crate) seed: u64,
}

/// The scheme of `synth:` where none is named.
pub(crate) const SCHEME_DEFAULT: &str = "mlx-4bit";

impl Origin {
    /// Reads a MODEL.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        if let Some(rest) = text.strip_prefix("synth:") {
            return SynthSpec::parse(rest).map(Self::Synth);
        }
        let path = PathBuf::from(text);
        if path.is_dir() {
            return Ok(Self::Folder(path));
        }
        if path.exists() {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            let parent = parent.unwrap_or(Path::new("."));
            return Err(Failure::new(Exit::Model, format!("{text}: is a file; a MODEL is a folder"))
                .hint(format!("try {}", parent.display())));
        }
        let Some(name) = Name::parse(text) else {
            return Err(Failure::new(Exit::Model, format!("{text}: no such folder")).hint(
                "a MODEL is a folder with config.json and safetensors files, a pulled owner/name, or \
                 synth:CONFIG.json?scheme=S",
            ));
        };
        let store = Store::new(None)?;
        match store.find(&name) {
            Some(dir) => Ok(Self::Stored(dir, name.model())),
            None => {
                let message = format!("{text}: no such folder, and not in {}", store.root.display());
                Err(Failure::new(Exit::Model, message).hint(format!("`clary pull {text}` fetches it")))
            }
        }
    }
}

impl SynthSpec {
    fn parse(text: &str) -> Result<Self> {
        let (config, query) = text.split_once('?').unwrap_or((text, ""));
        let mut spec = Self {
            config: config.into(),
            scheme: SCHEME_DEFAULT.into(),
            layers: None,
            experts: None,
            seed: 0,
        };
        if config.is_empty() {
            return Err(Self::usage("no config.json is named".into()));
        }
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(Self::usage(format!("{pair:?} has no value")));
            };
            let number = || {
                let number = value.parse::<u64>().ok().filter(|number| key == "seed" || *number > 0);
                number.ok_or_else(|| Self::usage(format!("{key} is {value:?}; a whole number is expected")))
            };
            match key {
                "scheme" => spec.scheme = value.into(),
                "layers" => spec.layers = Some(number()? as usize),
                "experts" => spec.experts = Some(number()? as usize),
                "seed" => spec.seed = number()?,
                _ => {
                    return Err(Self::usage(format!(
                        "{key:?} is not known: scheme, layers, experts, seed are"
                    )));
                }
            }
        }
        Ok(spec)
    }

    fn usage(problem: String) -> Failure {
        Failure::usage(format!("synth: {problem}"))
            .hint("synth:CONFIG.json?scheme=mlx-4bit&layers=8&experts=64&seed=1")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn synthetic_models() {
        let spec = |text: &str| Origin::parse(text).unwrap();
        let wanted = SynthSpec {
            config: "a/config.json".into(),
            scheme: "bf16".into(),
            layers: Some(2),
            experts: Some(8),
            seed: 7,
        };
        assert_eq!(spec("synth:a/config.json?scheme=bf16&layers=2&experts=8&seed=7"), Origin::Synth(wanted));
        let Origin::Synth(plain) = spec("synth:c.json") else { panic!("synth: is synthetic") };
        assert_eq!((plain.scheme.as_str(), plain.layers, plain.seed), (SCHEME_DEFAULT, None, 0));
        for text in ["synth:", "synth:c?x=1", "synth:c?layers=0", "synth:c?layers=a", "synth:c?scheme"] {
            assert_eq!(Origin::parse(text).unwrap_err().exit, Exit::Usage, "{text}");
        }
    }

    #[test]
    fn a_name_that_was_not_pulled() {
        let failure = Origin::parse("nobody/nothing").unwrap_err();
        assert_eq!(failure.exit, Exit::Model);
        assert!(failure.hint.unwrap().contains("clary pull nobody/nothing"));
    }
}
