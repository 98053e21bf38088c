//! Device memory: allocations, activations with their code shadows, and the step tables.

use std::sync::Arc;

use super::driver::{Driver, Result};
use crate::{DeviceError, Row, Step, Window};

/// An allocation of a card; freed when dropped.
pub(super) struct DeviceMemory {
    driver: Arc<dyn Driver>,
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// Zeros.
    pub(super) fn zeros(driver: &Arc<dyn Driver>, stage: &'static str, bytes: usize) -> Result<Self> {
        let address = driver.alloc(stage, bytes)?;
        Ok(Self { driver: driver.clone(), address, bytes })
    }

    /// A copy of host bytes.
    pub(super) fn of(driver: &Arc<dyn Driver>, stage: &'static str, bytes: &[u8]) -> Result<Self> {
        let memory = Self::zeros(driver, stage, bytes.len())?;
        memory.upload(0, bytes)?;
        Ok(memory)
    }

    /// A copy of host values.
    pub(super) fn of_f32(driver: &Arc<dyn Driver>, stage: &'static str, values: &[f32]) -> Result<Self> {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self::of(driver, stage, &bytes)
    }

    /// Its first address, aligned to 256 bytes.
    pub(super) fn ptr(&self) -> u64 {
        self.address
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies host bytes to byte `at`.
    pub(super) fn upload(&self, at: usize, from: &[u8]) -> Result {
        assert!(at + from.len() <= self.bytes, "inside the allocation");
        if from.is_empty() { Ok(()) } else { self.driver.upload(self.address + at as u64, from) }
    }

    /// Waits for the queue and copies from byte `at`.
    pub(super) fn download(&self, at: usize, to: &mut [u8]) -> Result {
        assert!(at + to.len() <= self.bytes, "inside the allocation");
        if to.is_empty() { Ok(()) } else { self.driver.download(self.address + at as u64, to) }
    }

    /// [`Self::download`] of f32 values; `at` counts values.
    pub(super) fn download_f32(&self, at: usize, to: &mut [f32]) -> Result {
        let mut bytes = vec![0; 4 * to.len()];
        self.download(4 * at, &mut bytes)?;
        for (to, from) in to.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *to = f32::from_le_bytes(*from);
        }
        Ok(())
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.driver.free(self.address);
    }
}

/// Codes of a plane for one group length (kernels/cuda/quantize.cuh, `Codes`).
pub(super) struct Shadow {
    pub(super) group: usize,
    codes: DeviceMemory,
    units: DeviceMemory,
    sums: DeviceMemory,
}

/// Addresses of a [`Shadow`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Codes {
    /// Halves `[rows_max, width]`, integers up to 2^14.
    pub(super) codes: u64,
    /// f32 `[rows_max, groups]`.
    pub(super) units: u64,
    /// f32 `[rows_max, groups]`, exact integers.
    pub(super) sums: u64,
    /// 32, 64 or 128.
    pub(super) group: usize,
}

impl Codes {
    /// The `Codes` parameter.
    pub(super) fn words(&self) -> [u64; 4] {
        [self.codes, self.units, self.sums, self.group as u64]
    }
}

impl Shadow {
    fn new(driver: &Arc<dyn Driver>, rows: usize, width: usize, group: usize) -> Result<Self> {
        let zeros = |bytes| DeviceMemory::zeros(driver, "codes", bytes);
        let groups = rows * width.div_ceil(group);
        Ok(Self {
            group,
            codes: zeros(2 * rows * width)?,
            units: zeros(4 * groups)?,
            sums: zeros(4 * groups)?,
        })
    }

    fn bytes(&self) -> usize {
        self.codes.bytes() + self.units.bytes() + self.sums.bytes()
    }
}

/// One [`crate::Buffer`]: f32 `[rows_max, width]`, and its codes where a matrix wanted them.
pub(super) struct Plane {
    pub(super) rows_max: usize,
    pub(super) width: usize,
    pub(super) values: DeviceMemory,
    shadows: Vec<Shadow>,
}

impl Plane {
    pub(super) fn new(driver: &Arc<dyn Driver>, rows_max: usize, width: usize) -> Result<Self> {
        let bytes = rows_max.saturating_mul(width).saturating_mul(4);
        let values = DeviceMemory::zeros(driver, "buffer", bytes)?;
        Ok(Self { rows_max, width, values, shadows: Vec::new() })
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.values.bytes() + self.shadows.iter().map(Shadow::bytes).sum::<usize>()
    }

    /// The shadow for groups of `group`, made at first use.
    pub(super) fn codes(&mut self, driver: &Arc<dyn Driver>, group: usize) -> Result<Codes> {
        if !self.shadows.iter().any(|shadow| shadow.group == group) {
            self.shadows.push(Shadow::new(driver, self.rows_max, self.width, group)?);
        }
        let shadow = self.shadows.iter().find(|shadow| shadow.group == group).expect("made above");
        let (codes, units, sums) = (shadow.codes.ptr(), shadow.units.ptr(), shadow.sums.ptr());
        Ok(Codes { codes, units, sums, group })
    }
}

/// Most rows of a step on this device.
pub(super) const STEP_ROWS_MAX: usize = 1 << 14;
/// Bytes of everything a flush uploads: step tables, the commands' own bytes, pages.
pub(super) const UPLOAD_BYTES: usize = 8 << 20;
const ROW_WORDS: usize = 12;
const WINDOW_WORDS: usize = 8;

/// What a list's launches depend on besides its commands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct StepShape {
    pub(super) rows: usize,
    pub(super) windows: usize,
    /// Rows of the longest window.
    pub(super) window_rows: usize,
    /// Spans of 512 keys of the longest sequence, its window included, rounded up to a power of two.
    pub(super) spans: usize,
    /// Is some window a tree?
    pub(super) tree: bool,
    /// Is some window committed at once?
    pub(super) some_commit: bool,
    /// Is some window not committed?
    pub(super) some_open: bool,
}

/// Keys of a span (`docs/arithmetic.md`, merge).
pub(super) const SPAN: usize = 512;

impl StepShape {
    pub(super) fn of(step: &Step) -> Self {
        let windows = step.windows();
        let longest = windows.iter().map(|w| w.start + w.rows).max().unwrap_or(0);
        Self {
            rows: step.rows().len(),
            windows: windows.len(),
            window_rows: windows.iter().map(|w| w.rows).max().unwrap_or(0),
            spans: longest.div_ceil(SPAN).next_power_of_two(),
            tree: windows.iter().any(|w| w.parents.is_some()),
            some_commit: windows.iter().any(|w| w.commit),
            some_open: windows.iter().any(|w| !w.commit),
        }
    }
}

/// The highest numbers that a step names, for the checks of its stages; `None` where it names none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepReach {
    pub(super) place: Option<u32>,
    pub(super) page: Option<u32>,
    pub(super) position: Option<u32>,
}

impl StepReach {
    pub(super) fn of(step: &Step) -> Self {
        let windows = step.windows();
        Self {
            place: windows.iter().map(|window| window.place).max(),
            page: windows.iter().filter_map(|window| window.pages.iter().copied().max()).max(),
            position: step.rows().iter().flat_map(|row| row.position).max(),
        }
    }
}

/// Where the tables of a step lie (kernels/cuda/step.cuh, `StepTables`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepAddresses {
    rows: u64,
    windows: u64,
    pages: u64,
    row_count: u32,
    window_count: u32,
}

impl StepAddresses {
    pub(super) fn words(&self) -> [u64; 4] {
        let counts = self.row_count as u64 | (self.window_count as u64) << 32;
        [self.rows, self.windows, self.pages, counts]
    }

    /// Where what has no place of its own begins: pages, then what draws hold beside their records.
    pub(super) fn pages(&self) -> u64 {
        self.pages
    }
}

/// Where the tables of a step lie in an upload: bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct StepPlaces {
    rows: u32,
    windows: u32,
    row_count: u32,
    window_count: u32,
}

/// The upload of a flush: tables of steps and bytes of commands as they come, each aligned to 16 bytes, then
/// the pages of all steps, then adjustments and masks of draws. All addresses but those behind the first page
/// follow from the steps' shapes and the commands.
#[derive(Default)]
pub(super) struct Upload {
    bytes: Vec<u8>,
    pages: Vec<u32>,
    adjusts: Vec<u32>,
    masks: Vec<u32>,
    /// Where draws' records lie in `bytes`.
    records: Vec<usize>,
}

/// Words of a draw's record, of an adjustment, and where a record says which adjustments and mask are its own
/// (`Draw` of kernels/cuda/draw.cu).
pub(super) const RECORD_WORDS: usize = 16;
pub(super) const ADJUST_WORDS: usize = 5;
pub(super) const RECORD_ADJUSTS: usize = 11;
pub(super) const RECORD_MASK: usize = 13;

/// Bytes of a command inside the upload; the command holds only where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Span {
    at: u32,
    /// Bytes.
    pub(super) bytes: u32,
}

fn align(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(16), 0);
}

impl Upload {
    /// Adds the tables of a step.
    pub(super) fn open(&mut self, step: &Step) -> Result<StepPlaces> {
        let (rows, windows) = (step.rows(), step.windows());
        if rows.len() > STEP_ROWS_MAX {
            let message = format!("{} rows, at most {STEP_ROWS_MAX} on this device", rows.len());
            return Err(DeviceError::Failed { stage: "begin", message });
        }
        let (bytes_before, pages_before) = (self.bytes.len(), self.pages.len());
        let mut words: Vec<u32> = Vec::with_capacity(rows.len() * ROW_WORDS);
        let mut table: Vec<u32> = Vec::with_capacity(windows.len() * WINDOW_WORDS);
        let mut paths = Vec::new();
        for (at, window) in windows.iter().enumerate() {
            row_words(&mut words, at, window, rows, &mut paths);
            let used = (window.start + window.rows).div_ceil(crate::PAGE_TOKENS).min(window.pages.len());
            table.extend([window.place, window.first as u32, window.rows as u32, window.start as u32]);
            table.extend([window.commit as u32, window.parents.is_some() as u32]);
            table.extend([self.pages.len() as u32, used as u32]);
            self.pages.extend_from_slice(&window.pages[..used]);
        }
        let places = StepPlaces {
            rows: self.push_words(&words).at,
            windows: self.push_words(&table).at,
            row_count: rows.len() as u32,
            window_count: windows.len() as u32,
        };
        if !self.has_room(0) {
            self.bytes.truncate(bytes_before);
            self.pages.truncate(pages_before);
            let message = format!("the step's tables take more than {UPLOAD_BYTES} bytes");
            return Err(DeviceError::Failed { stage: "begin", message });
        }
        Ok(places)
    }

    /// Bytes of everything.
    pub(super) fn len(&self) -> usize {
        self.bytes.len() + 4 * (self.pages.len() + self.adjusts.len() + self.masks.len()) + 4 * ADJUST_WORDS
    }

    /// Does a command with this many bytes still fit?
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.len() + bytes + 32 <= UPLOAD_BYTES
    }

    /// Adds bytes of a command.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Span {
        let at = self.bytes.len() as u32;
        self.bytes.extend_from_slice(bytes);
        align(&mut self.bytes);
        Span { at, bytes: bytes.len() as u32 }
    }

    /// Adds words of a command.
    pub(super) fn push_words(&mut self, words: &[u32]) -> Span {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.push(&bytes)
    }

    /// Adds records of draws, which count their adjustments and masks from the first of these.
    pub(super) fn push_draws(&mut self, records: &[u32], adjusts: &[u32], masks: &[u32]) -> Span {
        let (before_adjusts, before_masks) = (self.adjusts.len() / ADJUST_WORDS, self.masks.len());
        let mut words = records.to_vec();
        for (at, record) in words.chunks_exact_mut(RECORD_WORDS).enumerate() {
            record[RECORD_ADJUSTS] += before_adjusts as u32;
            record[RECORD_MASK] += before_masks as u32;
            self.records.push(self.bytes.len() + 4 * RECORD_WORDS * at);
        }
        self.adjusts.extend_from_slice(adjusts);
        self.masks.extend_from_slice(masks);
        self.push_words(&words)
    }

    /// Drops everything.
    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.pages.clear();
        self.adjusts.clear();
        self.masks.clear();
        self.records.clear();
    }

    /// Bytes of a whole upload, into `to`; says how many.
    pub(super) fn write(&self, to: &mut [u8]) -> usize {
        to[..self.bytes.len()].copy_from_slice(&self.bytes);
        // Draws count words, and whole adjustments, from the first page on.
        let pages = self.pages.len();
        let adjusts_at = if self.adjusts.is_empty() { pages } else { pages.next_multiple_of(ADJUST_WORDS) };
        let masks_at = adjusts_at + self.adjusts.len();
        for record in &self.records {
            for (word, more) in [(RECORD_ADJUSTS, adjusts_at / ADJUST_WORDS), (RECORD_MASK, masks_at)] {
                let at = &mut to[record + 4 * word..][..4];
                let value = u32::from_le_bytes(at.try_into().expect("four bytes")) + more as u32;
                at.copy_from_slice(&value.to_le_bytes());
            }
        }
        for (first, words) in [(0, &self.pages), (adjusts_at, &self.adjusts), (masks_at, &self.masks)] {
            let to = &mut to[self.bytes.len() + 4 * first..][..4 * words.len()];
            for (to, word) in to.as_chunks_mut::<4>().0.iter_mut().zip(words) {
                *to = word.to_le_bytes();
            }
        }
        self.bytes.len() + 4 * (masks_at + self.masks.len())
    }

    /// Addresses of a step's tables where the upload lies at `base`.
    pub(super) fn addresses(&self, of: StepPlaces, base: u64) -> StepAddresses {
        StepAddresses {
            rows: base + of.rows as u64,
            windows: base + of.windows as u64,
            pages: base + self.bytes.len() as u64,
            row_count: of.row_count,
            window_count: of.window_count,
        }
    }
}

/// Adds the table rows of window number `at`. `paths`, of any content, takes ancestors and depth of each.
fn row_words(words: &mut Vec<u32>, at: usize, window: &Window, rows: &[Row], paths: &mut Vec<(u32, u32)>) {
    paths.clear();
    for row in 0..window.rows {
        let parent = window.parent(row);
        // Chains may be longer than a word; nobody reads their bits beyond it.
        let own = 1u32.checked_shl(row as u32).unwrap_or(0);
        let (before, depth) = parent.map_or((0, 0), |parent| (paths[parent].0, paths[parent].1 + 1));
        paths.push((own | before, depth));
        let of = &rows[window.first + row];
        let place = |x: usize| x as u32;
        words.extend([of.token.map_or(u32::MAX, |token| token)]);
        words.extend(of.position);
        words.extend([place(at), place(row), window.start as u32 + depth]);
        words.extend([place(window.start + row), parent.map_or(u32::MAX, place), own | before, 0, 0]);
    }
}

impl Span {
    /// Its address where the upload lies at `base`.
    pub(super) fn address(self, base: u64) -> u64 {
        base + self.at as u64
    }
}
