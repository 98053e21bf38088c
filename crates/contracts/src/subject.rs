//! What contracts are checked on.

use std::path::PathBuf;

use checkpoint::Checkpoint;
use device::cpu::Isa;
use device::{Device, DeviceError, KvForm};
use model::qwen3_5::{OpenError, Settings, open};
use model::{Model, ModelError, PAGE_TOKENS};

use crate::{Outcome, Report, Runner, contracts};

/// Why contracts could not be checked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The subject does not open.
    #[error("{subject}: {source}")]
    Open {
        /// Name of the subject.
        subject: String,
        /// Why.
        source: OpenError,
    },
    /// A call to the model failed where it must not.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The subject is too small for a contract.
    #[error("{what}: {found} found, at least {least} needed")]
    TooSmall {
        /// What is too small.
        what: &'static str,
        /// Its size.
        found: usize,
        /// The least that works.
        least: usize,
    },
}

/// Sizes a subject is opened with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Slots, at least 2.
    pub slots: usize,
    /// Snapshots, at least 2.
    pub snapshots: usize,
    /// Most tokens of a sequence.
    pub context: usize,
    /// Most rows of a step, scored ones too.
    pub rows_max: usize,
}

impl Sizes {
    /// Room for a text of `tokens` tokens in each of 16 slots, in one step for one of them.
    pub fn for_text(tokens: usize) -> Self {
        Self { slots: 16, snapshots: 8, context: tokens + 2 * PAGE_TOKENS, rows_max: 3 * tokens }
    }

    /// Settings of the model: pages for every slot to fill its context.
    pub fn settings(self, kv: KvForm) -> Settings {
        Settings {
            slots: self.slots,
            snapshots: self.snapshots,
            context: self.context,
            pages: self.slots * self.context.div_ceil(PAGE_TOKENS),
            kv,
            rows_max: self.rows_max,
            logits_rows_max: self.rows_max,
            mtp: true,
        }
    }
}

/// Opens fresh models that are all alike.
pub trait Subject {
    /// What people see: checkpoint, device, K/V form.
    fn name(&self) -> String;
    /// A fresh model.
    fn open(&self, sizes: Sizes) -> Result<Box<dyn Model>, Error>;
}

/// A checkpoint folder on a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Folder {
    /// The folder.
    pub path: PathBuf,
    /// Name of the device, as `--device` takes it.
    pub device: String,
    /// Form of the K/V codes.
    pub kv: KvForm,
    /// Threads; `None` leaves it to the device.
    pub threads: Option<usize>,
    /// Instruction set; `None` takes the best one.
    pub isa: Option<Isa>,
}

impl Folder {
    /// A folder on a device, int16 K/V, everything else as the device likes.
    pub fn new(path: impl Into<PathBuf>, device: &str) -> Self {
        Self { path: path.into(), device: device.to_owned(), kv: KvForm::Int16, threads: None, isa: None }
    }

    /// A fresh device.
    pub fn open_device(&self) -> Result<Box<dyn Device>, DeviceError> {
        Ok(Box::new(device::reference::Reference::new(self.threads.unwrap_or(2))))
    }
}

impl Subject for Folder {
    fn name(&self) -> String {
        let folder = self.path.file_name().unwrap_or(self.path.as_os_str()).to_string_lossy();
        let kv = match self.kv {
            KvForm::Int8 => "int8",
            KvForm::Int16 => "int16",
        };
        let mut name = format!("{folder} on {}, --kv {kv}", self.device);
        if let Some(isa) = self.isa {
            name += &format!(", {}", isa.name());
        }
        if let Some(threads) = self.threads {
            name += &format!(", {threads} threads");
        }
        name
    }

    fn open(&self, sizes: Sizes) -> Result<Box<dyn Model>, Error> {
        let open = || -> Result<_, OpenError> {
            let checkpoint = Checkpoint::open(&self.path)?;
            open(&checkpoint, self.open_device()?, sizes.settings(self.kv), &mut |_, _| {})
        };
        match open() {
            Ok(model) => Ok(Box::new(model)),
            Err(source) => Err(Error::Open { subject: self.name(), source }),
        }
    }
}

/// Checks every contract that one model can show, over a text of at least 70 tokens. From 577 tokens on it crosses a
/// span of 512 keys.
pub fn check(subject: &dyn Subject, text: &[u32]) -> Result<Report, Error> {
    let least = 70;
    if text.len() < least {
        return Err(Error::TooSmall { what: "tokens of the text", found: text.len(), least });
    }
    let mut model = subject.open(Sizes::for_text(text.len()))?;
    let mut runner = Runner::new(&mut *model);
    let mut outcomes: Vec<Outcome> = Vec::new();
    for contract in contracts::ALONE {
        outcomes.push(contract(&mut runner, text)?);
    }
    let mut other = subject.open(Sizes::for_text(text.len()))?;
    outcomes.push(contracts::moved(&mut runner, &mut Runner::new(&mut *other), text)?);
    Ok(Report { subject: subject.name(), outcomes })
}
