//! States of delta-net layers on CUDA: storage, snapshots, and the inputs kept of uncommitted windows.
//!
//! A recurrent state is cut into units of [`COLUMNS`] value columns of a head, laid out as a warp holds them
//! while it walks tokens (`kernels/cuda/states.cuh`). A convolution state is `[conv_taps - 1, C]`, oldest row
//! first.

use std::sync::{Arc, Mutex, PoisonError};

use super::driver::{Driver, Result};
use super::launch::{Args, Kernel};
use super::lower::Lowering;
use super::memory::{DeviceMemory, Span};
use crate::{DeltaShape, DeltaState, DeviceError, StatePool, Step, Window};

/// Value columns of a unit.
const COLUMNS: usize = 4;
/// Units of a block of threads, a warp each.
pub(super) const BLOCK_UNITS: usize = 8;
/// Most taps of the convolution, and the widest keys that a warp holds.
const TAPS_MAX: usize = 8;
const KEY_DIM_MAX: usize = 256;
/// Kept inputs are taken in steps of this many rows.
const KEPT_ROWS: usize = 8;
/// Threads that copy or clear a place.
const COPY_BLOCKS: usize = 64;
const BLOCK: u32 = 256;
/// The kernel that keeps rows.
pub(super) const KEEP: &str = "state_keep";
/// Places of layers that one launch keeps rows of (`KeepJobs` of the kernels).
const KEEP_JOBS: usize = 32;

/// States of `places` sequences and snapshots of one layer.
pub(super) struct States {
    pub(super) shape: DeltaShape,
    driver: Arc<dyn Driver>,
    recurrent: DeviceMemory,
    conv: DeviceMemory,
    /// Addresses of kept inputs by place, as kernels read them; 0 where there are none.
    table: DeviceMemory,
    kept: Mutex<Vec<Option<DeviceMemory>>>,
}

fn failed<T>(stage: &'static str, message: String) -> Result<T> {
    Err(DeviceError::Failed { stage, message })
}

/// Sizes of a layer's states.
#[derive(Clone, Copy)]
struct Layout {
    shape: DeltaShape,
}

impl Layout {
    /// Groups of 16 key indices, rounded up to a power of two.
    fn steps(self) -> usize {
        self.shape.key_dim.div_ceil(16).next_power_of_two()
    }

    /// Values of a unit.
    fn unit(self) -> usize {
        (2 * self.steps()).div_ceil(4) * 128
    }

    /// Units of a head.
    fn units(self) -> usize {
        self.shape.value_dim.div_ceil(COLUMNS)
    }

    /// Values of a place.
    fn recurrent(self) -> usize {
        self.shape.value_heads * self.units() * self.unit()
    }

    /// Values kept of one row of an uncommitted window: convolution inputs, keys, values, decays and betas.
    fn kept(self) -> usize {
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = self.shape;
        self.shape.channels() + key_heads * key_dim + value_heads * (value_dim + 2)
    }

    /// Where value `[head, i, j]` lies, counted along `[Hv, Dk, Dv]`.
    fn locate(self, at: usize) -> usize {
        let DeltaShape { key_dim, value_dim, .. } = self.shape;
        let (head, i, j) = (at / (key_dim * value_dim), at / value_dim % key_dim, at % value_dim);
        let unit = head * self.units() + j / COLUMNS;
        // Lane 4 l + j has the key indices l + 8 c + 16 m as its values 2 m + c.
        let (lane, value) = (i % 8 * COLUMNS + j % COLUMNS, i / 16 * 2 + i / 8 % 2);
        unit * self.unit() + (value / 4 * 32 + lane) * 4 + value % 4
    }
}

impl States {
    /// Zeros.
    pub(super) fn new(driver: &Arc<dyn Driver>, shape: DeltaShape, places: usize) -> Result<Self> {
        let stage = "state_pool";
        if shape.conv_taps == 0 || shape.conv_taps > TAPS_MAX {
            let message =
                format!("{} convolution taps have no kernel; supported: 1 to {TAPS_MAX}", shape.conv_taps);
            return failed(stage, message);
        }
        let fits = shape.key_heads > 0 && shape.value_heads.is_multiple_of(shape.key_heads);
        if !fits || shape.key_dim == 0 || shape.value_dim == 0 {
            return failed(stage, format!("{shape:?} is not a delta-net shape"));
        }
        if shape.key_dim > KEY_DIM_MAX {
            let message = format!("keys of {} have no kernel; supported: up to {KEY_DIM_MAX}", shape.key_dim);
            return failed(stage, message);
        }
        let zeros = |values: usize| {
            DeviceMemory::zeros(driver, stage, places.saturating_mul(values).saturating_mul(4))
        };
        Ok(Self {
            shape,
            driver: driver.clone(),
            recurrent: zeros(Layout { shape }.recurrent())?,
            conv: zeros(shape.conv())?,
            table: zeros(2)?,
            kept: Mutex::new((0..places).map(|_| None).collect()),
        })
    }

    fn layout(&self) -> Layout {
        Layout { shape: self.shape }
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = kept.iter().flatten().map(DeviceMemory::bytes).sum::<usize>();
        self.recurrent.bytes() + self.conv.bytes() + self.table.bytes() + kept
    }

    /// Bytes that an uncommitted window keeps.
    fn kept_bytes(&self, window: &Window) -> usize {
        window.rows.next_multiple_of(KEPT_ROWS) * 4 * self.layout().kept()
    }

    /// Is there memory for what the step's uncommitted windows will keep?
    pub(super) fn has_room(&self, step: &Step) -> bool {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |window: &Window| {
            let held = kept[window.place as usize].as_ref();
            window.commit || held.is_some_and(|held| held.bytes() >= self.kept_bytes(window))
        };
        step.windows().iter().all(fits)
    }

    /// Takes memory for what the step's uncommitted windows will keep. What was kept at their places is lost
    /// where that is more than before: nothing that reads it may wait.
    pub(super) fn make_room(&self, step: &Step) -> Result {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        for window in step.windows().iter().filter(|window| !window.commit) {
            let (place, bytes) = (window.place as usize, self.kept_bytes(window));
            if kept[place].as_ref().is_none_or(|held| held.bytes() < bytes) {
                kept[place] = None;
                let memory = DeviceMemory::zeros(&self.driver, "state_pool", bytes)?;
                self.table.upload(8 * place, &memory.ptr().to_le_bytes())?;
                kept[place] = Some(memory);
            }
        }
        Ok(())
    }

    /// The kernels' `DeltaPool`.
    pub(super) fn words(&self) -> [u64; 6] {
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, conv_taps } = self.shape;
        let pair = |low: usize, high: usize| low as u64 | (high as u64) << 32;
        [
            self.recurrent.ptr(),
            self.conv.ptr(),
            self.table.ptr(),
            pair(key_heads, value_heads),
            pair(key_dim, value_dim),
            conv_taps as u64,
        ]
    }

    /// Blocks of [`BLOCK_UNITS`] units over all heads.
    pub(super) fn unit_blocks(&self) -> usize {
        (self.shape.value_heads * self.layout().units()).div_ceil(BLOCK_UNITS)
    }

    /// Bytes of a row of a window in the shared memory of `delta_window`.
    pub(super) fn row_bytes(&self) -> usize {
        4 * (2 * self.spread() + COLUMNS * BLOCK_UNITS + 4)
    }

    /// Blocks of [`BLOCK_UNITS`] units, each of one head.
    pub(super) fn head_blocks(&self) -> usize {
        self.shape.value_heads * self.layout().units().div_ceil(BLOCK_UNITS)
    }

    /// Values of a normalized key or query as delta_scan reads it.
    pub(super) fn spread(&self) -> usize {
        16 * self.layout().steps()
    }

    /// A kernel of a file, compiled for the shape.
    pub(super) fn kernel(&self, file: &'static str, name: &'static str) -> Kernel {
        let steps = self.layout().steps();
        let exact = if self.shape.key_dim == 16 * steps { self.shape.key_dim } else { 0 };
        Kernel::new(file, name).define("DELTA_STEPS", steps as u32).define("DELTA_KEY_DIM", exact as u32)
    }

    /// Reads a place.
    pub(super) fn read(&self, place: u32) -> Result<DeltaState> {
        let (layout, place) = (self.layout(), place as usize);
        let mut recurrent = vec![0f32; layout.recurrent()];
        let mut conv = vec![0f32; self.shape.conv()];
        self.recurrent.download_f32(place * recurrent.len(), &mut recurrent)?;
        self.conv.download_f32(place * conv.len(), &mut conv)?;
        let value = |at: usize| recurrent[layout.locate(at)] as f64;
        Ok(DeltaState {
            recurrent: (0..self.shape.recurrent()).map(value).collect(),
            conv: conv.into_iter().map(f64::from).collect(),
        })
    }

    /// Writes a place, rounding to f32.
    pub(super) fn write(&self, place: u32, state: &DeltaState) -> Result {
        let (layout, place) = (self.layout(), place as usize);
        let (found, expected) =
            ((state.recurrent.len(), state.conv.len()), (self.shape.recurrent(), self.shape.conv()));
        if found != expected {
            let message = format!("recurrent and convolution values: {found:?} found, {expected:?} expected");
            return failed("state_write", message);
        }
        let mut recurrent = vec![0u8; 4 * layout.recurrent()];
        for (at, &value) in state.recurrent.iter().enumerate() {
            recurrent[4 * layout.locate(at)..][..4].copy_from_slice(&(value as f32).to_le_bytes());
        }
        let conv: Vec<u8> = state.conv.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
        self.recurrent.upload(place * recurrent.len(), &recurrent)?;
        self.conv.upload(place * conv.len(), &conv)
    }
}

fn kernel(name: &'static str) -> Kernel {
    Kernel::new("state.cu", name)
}

/// [`crate::Device::state_clear`].
pub(super) fn lower_clear(c: &mut Lowering<'_>, pool: StatePool, place: u32) -> Result {
    let args = Args::new().words(&c.states(pool).words()).u32(place);
    c.launch(kernel("state_clear"), [COPY_BLOCKS, 1, 1], BLOCK, args);
    Ok(())
}

/// [`crate::Device::state_copy`].
pub(super) fn lower_copy(c: &mut Lowering<'_>, pool: StatePool, from: u32, to: u32) -> Result {
    let args = Args::new().words(&c.states(pool).words()).u32(from).u32(to);
    c.launch(kernel("state_copy"), [COPY_BLOCKS, 1, 1], BLOCK, args);
    Ok(())
}

/// [`crate::Device::state_keep`] of several places. Words of each: place, count, then `WINDOW_ROWS_MAX` rows
/// of which `count` are meant (u32 each).
pub(super) fn lower_keep(c: &mut Lowering<'_>, keeps: &[(StatePool, Span)]) -> Result {
    let alike = |a: &(StatePool, Span), b: &(StatePool, Span)| c.states(a.0).shape == c.states(b.0).shape;
    let runs: Vec<_> = keeps.chunk_by(alike).flat_map(|run| run.chunks(KEEP_JOBS)).collect();
    for run in runs {
        let states = c.states(run[0].0);
        let mut jobs = Vec::new();
        for &(pool, words) in run {
            jobs.extend(c.states(pool).words());
            jobs.push(c.span(words));
        }
        jobs.resize(KEEP_JOBS * 7, 0);
        let blocks = states.unit_blocks() + states.shape.channels().div_ceil(BLOCK as usize);
        c.launch(
            states.kernel("delta_rule.cu", KEEP),
            [blocks, run.len(), 1],
            BLOCK,
            Args::new().words(&jobs),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_has_a_place_of_its_own() {
        for (value_heads, key_dim, value_dim) in [(2, 128, 128), (3, 21, 40), (2, 16, 7), (1, 40, 5)] {
            let shape = DeltaShape { key_heads: 1, value_heads, key_dim, value_dim, conv_taps: 4 };
            let layout = Layout { shape };
            let mut places: Vec<usize> = (0..shape.recurrent()).map(|at| layout.locate(at)).collect();
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), shape.recurrent());
            assert!(places.last().is_some_and(|&last| last < layout.recurrent()));
        }
    }
}
