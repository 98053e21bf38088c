//! A MODEL opened: geometry known, shapes checked, nothing read yet.

use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, Report, Source, Synth, Warning};
use model::qwen3_5::{Config, Parts, inventory};
use sha2::{Digest, Sha256};

use crate::error::Result;
use crate::origin::{Origin, SynthSpec};
use crate::synth;
use crate::table;

/// Where the numbers are.
pub(crate) enum Stored {
    /// In a folder.
    Folder(Checkpoint),
    /// Made on demand.
    Synth(Synth),
}

/// A checked MODEL.
pub(crate) struct Weights {
    /// The geometry.
    pub(crate) config: Config,
    /// Which optional parts are there.
    pub(crate) parts: Parts,
    /// Bytes of all that is stored: at least what a run loads.
    pub(crate) bytes: u64,
    /// The name it was found by in the store.
    pub(crate) name: Option<String>,
    /// The folder with the tokenizer's files.
    pub(crate) dir: PathBuf,
    /// What is worth saying.
    pub(crate) warnings: Vec<Warning>,
    /// The numbers.
    pub(crate) stored: Stored,
    /// What random numbers are made from, beside the config.
    recipe: Option<(String, u64)>,
}

impl Weights {
    /// Opens a MODEL and compares all headers with its config.
    pub(crate) fn open(model: &str) -> Result<Self> {
        match Origin::parse(model)? {
            Origin::Folder(dir) => Self::folder(&dir),
            Origin::Stored(dir, name) => Ok(Self { name: Some(name), ..Self::folder(&dir)? }),
            Origin::Synth(spec) => Self::synth(&spec),
        }
    }

    fn folder(dir: &Path) -> Result<Self> {
        let checkpoint = Checkpoint::open(dir)?;
        let config = Config::from_json(checkpoint.config())?;
        let parts = Parts::of(&config, &checkpoint);
        let verified = checkpoint.verify(&inventory(&config, parts))?;
        let report = checkpoint.report();
        let mut warnings = report.warnings.clone();
        warnings.extend(verified.warnings);
        Ok(Self {
            bytes: report.bytes,
            config,
            parts,
            dir: dir.to_owned(),
            warnings,
            stored: Stored::Folder(checkpoint),
            recipe: None,
            name: None,
        })
    }

    fn synth(spec: &SynthSpec) -> Result<Self> {
        let synth = synth::in_memory(spec)?;
        let config = Config::from_json(synth.config())?;
        let parts = Parts::of(&config, &synth);
        let dir = spec.config.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Ok(Self {
            bytes: synth::bytes(&synth),
            config,
            parts,
            dir: dir.to_owned(),
            warnings: Vec::new(),
            stored: Stored::Synth(synth),
            name: None,
            recipe: Some((spec.scheme.clone(), spec.seed)),
        })
    }

    /// What the model reads from.
    pub(crate) fn source(&self) -> &dyn Source {
        match &self.stored {
            Stored::Folder(checkpoint) => checkpoint,
            Stored::Synth(synth) => synth,
        }
    }

    /// `sha256:` and a digest that names the model in receipts: [`Checkpoint::fingerprint`], or for random
    /// weights that of what they are made from.
    pub(crate) fn digest(&self) -> Result<String> {
        let digest = match &self.stored {
            Stored::Folder(checkpoint) => checkpoint.fingerprint()?,
            Stored::Synth(synth) => Sha256::digest(format!("{:?}\n{}", self.recipe, synth.config())).into(),
        };
        Ok(format!("sha256:{}", table::hex(&digest)))
    }

    /// What the folder holds; `None` for synthetic weights.
    pub(crate) fn report(&self) -> Option<Report> {
        match &self.stored {
            Stored::Folder(checkpoint) => Some(checkpoint.report()),
            Stored::Synth(_) => None,
        }
    }
}
