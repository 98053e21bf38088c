//! What contracts are checked on.

use std::path::PathBuf;

use checkpoint::Checkpoint;
use device::cpu::{CpuSettings, Isa};
use device::{Device, DeviceError, KvForm};
use engine::{Engine, Refusal, StartError};
use model::qwen3_5::{OpenError, Settings, open, takes_pictures};
use model::{Model, ModelError, PAGE_TOKENS};

use crate::{ALBUM_TOKENS, Album, Outcome, Report, Runner, contracts};

/// Why contracts could not be checked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The subject does not open.
    #[error("{subject}: {source}")]
    Open {
        /// Name of the subject.
        subject: String,
        /// Why.
        source: Box<OpenError>,
    },
    /// The engine does not start over the subject.
    #[error(transparent)]
    Engine(#[from] StartError),
    /// The engine does not take a request.
    #[error(transparent)]
    Refused(#[from] Refusal),
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

    /// The same with room for the pictures of an [`Album`](crate::Album), where the device can encode them.
    pub fn settings_with_pictures(self, kv: KvForm, device: &mut dyn Device) -> Settings {
        let image_tokens = if takes_pictures(device).is_ok() { ALBUM_TOKENS } else { 0 };
        Settings { image_tokens, ..self.settings(kv) }
    }

    /// Settings of the model without pictures: pages for every slot to fill its context.
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
            image_tokens: 0,
            card: false,
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
    /// Threads and instruction set.
    pub cpu: CpuSettings,
}

impl Folder {
    /// A folder on a device: int16 K/V, two threads, the best instruction set.
    pub fn new(path: impl Into<PathBuf>, device: &str) -> Self {
        let cpu = CpuSettings { threads: 2, isa: Isa::detect() };
        Self { path: path.into(), device: device.to_owned(), kv: KvForm::Int16, cpu }
    }

    /// A fresh device.
    pub fn open_device(&self) -> Result<Box<dyn Device>, DeviceError> {
        device::open(&self.device, self.cpu)
    }
}

impl Subject for Folder {
    fn name(&self) -> String {
        let folder = self.path.file_name().unwrap_or(self.path.as_os_str()).to_string_lossy();
        let kv = match self.kv {
            KvForm::Int8 => "int8",
            KvForm::Int16 => "int16",
        };
        let CpuSettings { threads, isa } = self.cpu;
        format!("{folder} on {} ({}, {threads} threads), --kv {kv}", self.device, isa.name())
    }

    fn open(&self, sizes: Sizes) -> Result<Box<dyn Model>, Error> {
        let open = || -> Result<_, OpenError> {
            let checkpoint = Checkpoint::open(&self.path)?;
            let mut device = self.open_device()?;
            let settings = sizes.settings_with_pictures(self.kv, &mut *device);
            open(&checkpoint, device, settings, &mut |_, _| {})
        };
        match open() {
            Ok(model) => Ok(Box::new(model)),
            Err(source) => Err(Error::Open { subject: self.name(), source: Box::new(source) }),
        }
    }
}

/// Checks every contract that models alone can show, over a text of at least 70 tokens; with a vision tower
/// over the text with pictures in it too. From 577 tokens on it crosses a span of 512 keys.
pub fn check(subject: &dyn Subject, text: &[u32]) -> Result<Report, Error> {
    long_enough(text)?;
    let mut model = subject.open(Sizes::for_text(text.len()))?;
    let mut runner = Runner::new(&mut *model);
    let mut outcomes: Vec<Outcome> = Vec::new();
    for contract in contracts::ALONE {
        outcomes.push(contract(&mut runner, text)?);
    }
    let mut other = subject.open(Sizes::for_text(text.len()))?;
    outcomes.push(contracts::moved(&mut runner, &mut Runner::new(&mut *other), text)?);
    outcomes.extend(contracts::pictured(&mut runner, text)?);
    Ok(Report { subject: subject.name(), outcomes })
}

/// Checks the contracts that show in replies, with the engine over the subject and a text of at least 70
/// tokens.
pub fn check_replies(subject: &dyn Subject, text: &[u32]) -> Result<Report, Error> {
    long_enough(text)?;
    // Room for a prompt, its reply and the next turn; fewer slots than requests, more snapshots than slots.
    let sizes = Sizes { slots: 6, snapshots: 32, context: text.len() + 256, rows_max: 256 };
    let model = subject.open(sizes)?;
    let settings = engine::Settings::new(model.spec().vocabulary, Vec::new());
    let album = model.image_spec().map(|spec| Album::new(&spec));
    let handle = Engine::start(model, settings)?;
    let mut outcomes = contracts::served(&handle, text, None)?;
    if let Some(album) = album {
        outcomes.extend(contracts::served(&handle, &album.place(text), Some(&album))?);
    }
    handle.stop("all contracts are checked");
    Ok(Report { subject: format!("{}, replies", subject.name()), outcomes })
}

fn long_enough(text: &[u32]) -> Result<(), Error> {
    let least = 70;
    match text.len() {
        found if found < least => Err(Error::TooSmall { what: "tokens of the text", found, least }),
        _ => Ok(()),
    }
}
