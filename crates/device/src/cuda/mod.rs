//! The CUDA device: the bits of the CPU device (`docs/arithmetic.md`) on NVIDIA cards.
//!
//! Stage calls only record commands ([`command`]). When the host wants to see something, or a step begins
//! that does not take up what is drawn or kept before it, the list is lowered to launches ([`lower`]), which
//! are kept and replayed as a graph when the same list comes again ([`graph`]). All that varies between two
//! such lists (tokens, positions, places, pages, row lists) lies in one upload at a fixed address
//! ([`memory`]). Kernels are text, compiled at first use ([`compile`]). Each stage has a file of its name,
//! here and in `kernels/cuda`.

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

use crate::{DeviceError, StatePool, Step};
use command::Command;
use compile::Kernels;
use driver::{Card, Driver, Pinned, Result};
use graph::{Key, Launches, Lists, Part, SHORT_ROWS_MAX};
use lower::{Lowering, Tables};
use memory::{DeviceMemory, StepReach, StepShape, UPLOAD_BYTES, Upload};
use rehearsal::CardKind;

/// Host copies of uploads in flight: the host may prepare this many flushes ahead.
const UPLOADS: usize = 4;
/// Most steps of a list.
const PARTS_MAX: usize = 16;

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
    /// What was recorded since the last flush.
    parts: Vec<Part>,
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
        Ok(Self {
            ordinal: settings.ordinal,
            kernels,
            tables: Tables::new(settings.plain_sums),
            lists: Lists::new(driver.clone(), settings.graphs),
            parts: Vec::new(),
            shape: StepShape::of(&step),
            reach: StepReach::of(&step),
            step,
            upload: Upload::default(),
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
        if let Some(fault) = &self.lost {
            self.parts.clear();
            self.upload.clear();
            let message = format!("lost after a fault; load the model again. The fault was: {fault}");
            return Err(DeviceError::Failed { stage: "device", message });
        }
        if !self.has_commands() {
            return Ok(());
        }
        let key = Key { parts: std::mem::take(&mut self.parts) };
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
        let (upload, base) = (&self.upload, self.area.ptr());
        self.lists.run(key, |key| {
            let mut launches = Vec::new();
            for Part { commands, shape, places } in &key.parts {
                let step = upload.addresses(*places, base);
                let mut lowering = Lowering::new(driver, tables, *shape, step, base);
                lowering.lower(commands)?;
                launches.extend(lowering.finish());
            }
            let keeps = launches.iter().take_while(|launch| launch.kernel.name == state::KEEP).count();
            let beside = if key.keeps_beside() && keeps < launches.len() { keeps } else { 0 };
            let all = launches.into_iter().map(|launch| kernels.prepare(launch)).collect::<Result<_>>()?;
            Ok(Launches { all, beside })
        })?;
        if self.tables.moved() {
            self.driver.synchronize()?;
            self.lists.clear();
            self.tables.forget_moved();
        }
        Ok(())
    }

    /// Takes memory for what the step's windows will keep in a pool.
    fn make_kept_room(&mut self, pool: StatePool) -> Result {
        if !self.shape.some_open || self.tables.states[pool.0 as usize].has_room(&self.step) {
            return Ok(());
        }
        // What is kept of the windows before may still wait to be taken over.
        self.flush()?;
        self.tables.states[pool.0 as usize].make_room(&self.step)
    }

    fn has_commands(&self) -> bool {
        self.parts.iter().any(|part| !part.commands.is_empty())
    }

    /// Opens the current step's tables, if they are not open.
    fn open_step(&mut self) -> Result<&mut Part> {
        if self.parts.is_empty() {
            let places = self.upload.open(&self.step)?;
            self.parts.push(Part { commands: Vec::new(), shape: self.shape, places });
        }
        Ok(self.parts.last_mut().expect("opened above"))
    }

    /// Begins a step: with what waits where the host has nothing to see in between (rows that are kept, draws
    /// whose tokens the step takes), else after it ran.
    fn begin_step(&mut self, step: &Step) -> Result {
        let shape = StepShape::of(step);
        let mut waiting = self.parts.iter().flat_map(|part| &part.commands);
        let short = self.parts.iter().all(|part| part.shape.rows <= SHORT_ROWS_MAX)
            && shape.rows <= SHORT_ROWS_MAX
            && self.parts.len() < PARTS_MAX
            && self.upload.len() < UPLOAD_BYTES / 2;
        let drawn = matches!(waiting.clone().last(), Some(Command::Draw { .. }));
        if !self.has_commands() || !short || !(drawn || waiting.all(Command::keeps)) {
            self.flush()?;
        }
        if !self.has_commands() {
            self.parts.clear();
            self.upload.clear();
        }
        let places = self.upload.open(step)?;
        self.parts.push(Part { commands: Vec::new(), shape, places });
        self.shape = shape;
        self.reach = StepReach::of(step);
        self.step.clone_from(step);
        Ok(())
    }
}
