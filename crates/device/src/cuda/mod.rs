//! The CUDA device: the bits of the CPU device (`docs/arithmetic.md`) on NVIDIA cards.
//!
//! Stage calls only record commands ([`command`]). When the host wants to see something, or the next step
//! begins, the list is lowered to launches ([`lower`]), which are kept and replayed as a graph when the same
//! list comes again ([`graph`]). All that varies between two such lists (tokens, positions, places, pages,
//! row lists) lies in one upload at a fixed address ([`memory`]). Kernels are text, compiled at first use
//! ([`compile`]). Each stage has a file of its name, here and in `kernels/cuda`.

mod attention;
mod check;
mod command;
mod compile;
mod conv;
mod delta_rule;
mod delta_step;
mod dense;
mod device;
mod draw;
mod driver;
mod exact;
mod experts;
mod experts_stream;
mod graph;
mod jobs;
mod kv;
mod launch;
mod linear;
mod linear_stream;
mod lower;
mod memory;
mod packing;
pub mod probe;
pub mod rehearsal;
mod rope;
mod route;
mod rows;
mod ship;
mod sources;
mod standin;
mod state;
#[cfg(test)]
mod tests;
mod vision;
mod warpgroup;

pub use attention::{SPAN_BYTES_MAX, SPAN_TOKENS, halves_bytes};
pub use check::{ARCHS, KernelReport, compile_all};
pub use exact::inexact_sums;
pub use ship::ship;

use std::path::PathBuf;
use std::sync::Arc;

use crate::{DeviceError, Step};
use command::Command;
use compile::Kernels;
use driver::{Card, Driver, Pinned, Result};
use graph::{Key, Lists};
use lower::{Lowering, Tables};
use memory::{DeviceMemory, StepReach, StepShape, UPLOAD_BYTES, Upload};
use rehearsal::CardKind;

/// Host copies of uploads in flight: the host may prepare this many flushes ahead.
const UPLOADS: usize = 4;

/// How a CUDA device is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaSettings {
    /// Which card, counted from 0.
    pub ordinal: usize,
    /// Folder for compiled kernels; `None` compiles them in every process.
    pub kernel_cache: Option<PathBuf>,
    /// Folder of kernels that came with the program ([`ship`]); with it NVRTC may be missing.
    pub kernels: Option<PathBuf>,
    /// Replay repeated steps as graphs. Bits do not depend on it.
    pub graphs: bool,
    /// Sum grouped products with plain multiplies and adds, as on a card whose matrix instruction does not
    /// sum integers exactly. Bits do not depend on it; prompts take several times as long.
    pub plain_sums: bool,
    /// Choose forms of kernels as for a card of this kind. Bits do not depend on it; a card takes more time
    /// in forms that are another's.
    pub like: Option<CardKind>,
}

impl CudaSettings {
    /// Card `ordinal` as it is meant to be used, without folders for kernels.
    pub fn of(ordinal: usize) -> Self {
        Self { ordinal, kernel_cache: None, kernels: None, graphs: true, plain_sums: false, like: None }
    }
}

/// The CUDA device.
pub struct Cuda {
    ordinal: usize,
    driver: Arc<dyn Driver>,
    kernels: Kernels,
    tables: Tables,
    lists: Lists,
    commands: Vec<Command>,
    step: Step,
    shape: StepShape,
    reach: StepReach,
    upload: Upload,
    /// Where the upload of the running list lies on the card.
    area: DeviceMemory,
    staging: Vec<Pinned>,
    next_staging: usize,
    draws: draw::Draws,
    /// Per state pool and place: rows of its last uncommitted window.
    kept: Vec<Vec<usize>>,
    /// Pages of each K/V pool.
    pages: Vec<usize>,
    /// Why a list did not run. What memory holds is not known from then on, so nothing runs any more.
    lost: Option<String>,
}

/// Cards that the driver shows to this process, or why there are none.
pub fn cards() -> std::result::Result<usize, String> {
    driver::cards()
}

/// Version of the compiler of kernels (NVRTC), major and minor, or why there is none.
pub fn compiler() -> std::result::Result<(i32, i32), String> {
    compile::nvrtc_version()
}

/// Free and total bytes of a card's memory.
pub fn card_memory(ordinal: usize) -> Result<(u64, u64)> {
    Card::open(ordinal)?.memory()
}

/// The first card with at least `bytes` of free memory; `None` also where there are no kernels and none can
/// be compiled. Asking for nothing finds none: who does not know what is needed runs on the processor.
pub fn card_with_room(bytes: u64, has_kernels: bool) -> Option<usize> {
    let cards = driver::cards().ok().filter(|_| bytes > 0)?;
    if !has_kernels {
        compile::nvrtc_version().ok()?;
    }
    (0..cards).find(|&ordinal| {
        let free = Card::open(ordinal).and_then(|card| card.memory());
        free.is_ok_and(|(free, _)| free >= bytes)
    })
}

impl Cuda {
    /// Opens a card, or says why there is none.
    pub fn open(settings: CudaSettings) -> std::result::Result<Self, DeviceError> {
        let driver: Arc<dyn Driver> = Card::open_like(settings.ordinal, settings.like)?;
        if settings.kernels.is_none() {
            compile::nvrtc_version().map_err(|reason| driver::unavailable(settings.ordinal, reason))?;
        }
        let mut kernels =
            Kernels::new(driver.clone(), settings.kernel_cache.clone()).shipped(settings.kernels.clone());
        let plain_sums = settings.plain_sums || !exact::holds(&driver, &mut kernels)?;
        if plain_sums {
            kernels.sum_plainly();
        }
        Self::on(driver, kernels, CudaSettings { plain_sums, ..settings })
    }

    /// A device over an open driver.
    fn on(driver: Arc<dyn Driver>, kernels: Kernels, settings: CudaSettings) -> Result<Self> {
        let step = Step::new(Vec::new(), Vec::new()).expect("an empty step");
        let upload = Upload::of(&step)?;
        Ok(Self {
            ordinal: settings.ordinal,
            kernels,
            tables: Tables::new(settings.plain_sums),
            lists: Lists::new(driver.clone(), settings.graphs),
            commands: Vec::new(),
            shape: StepShape::of(&step),
            reach: StepReach::of(&step),
            step,
            upload,
            area: DeviceMemory::zeros(&driver, "upload", UPLOAD_BYTES)?,
            staging: (0..UPLOADS).map(|_| driver.pinned(UPLOAD_BYTES)).collect::<Result<_>>()?,
            next_staging: 0,
            draws: draw::Draws::default(),
            kept: Vec::new(),
            pages: Vec::new(),
            lost: None,
            driver,
        })
    }

    /// Runs what was recorded since the last flush.
    fn flush(&mut self) -> Result {
        let commands = std::mem::take(&mut self.commands);
        if let Some(fault) = &self.lost {
            let message = format!("lost after a fault; load the model again. The fault was: {fault}");
            return Err(DeviceError::Failed { stage: "device", message });
        }
        if commands.is_empty() {
            return Ok(());
        }
        let key = Key { commands, shape: self.shape };
        let result = self.send_upload().and_then(|()| self.run(key));
        self.upload.clear();
        // Whoever is told now may be another than those whose rows were in the list.
        self.lost = result.as_ref().err().map(DeviceError::to_string);
        result
    }

    fn send_upload(&mut self) -> Result {
        let slot = self.next_staging;
        self.next_staging = (slot + 1) % UPLOADS;
        self.driver.wait_mark(slot)?;
        let bytes = self.upload.write(self.staging[slot].bytes_mut());
        self.driver.upload_queued(self.area.ptr(), &self.staging[slot], bytes)?;
        self.driver.mark(slot)
    }

    fn run(&mut self, key: Key) -> Result {
        let (driver, tables, kernels) = (&self.driver, &mut self.tables, &mut self.kernels);
        let (shape, base) = (self.shape, self.area.ptr());
        let step = self.upload.addresses(base);
        self.lists.run(key, |key| {
            let mut lowering = Lowering::new(driver, tables, shape, step, base);
            lowering.lower(&key.commands)?;
            lowering.finish().into_iter().map(|launch| kernels.prepare(launch)).collect()
        })?;
        if self.tables.moved() {
            self.driver.synchronize()?;
            self.lists.clear();
            self.tables.forget_moved();
        }
        Ok(())
    }
}
