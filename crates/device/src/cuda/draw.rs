//! Logits to tokens on CUDA (`docs/arithmetic.md`, logits to tokens; `kernels/cuda/draw.cu`).

use std::sync::Arc;

use super::Cuda;
use super::driver::{Driver, Pinned, Result};
use super::launch::{Args, Kernel, Launch};
use super::memory::DeviceMemory;
use crate::{Buffer, DeviceError, Draw, Drawn};

/// Draws of one batch of launches; more are taken in turn.
const DRAWS_MAX: usize = 64;
/// Most best tokens of a draw (`TOP_MAX` of the kernel).
const TOP_MAX: u32 = 1024;
/// Ids of a block, and ids that share a maximum.
const IDS: usize = 2048;
const CHUNK: usize = 64;
/// Threads and shared bytes of the last kernel: 6144 candidates.
const CHOOSE_THREADS: u32 = 512;
const CHOOSE_SHARED: u32 = 6144 * 8;
const ADJUST_WORDS: usize = 5;
const NO_MASK: u32 = u32::MAX;

/// Memory of draws, made at the first and grown when more is asked for.
#[derive(Default)]
pub(super) struct Draws {
    params: Option<DeviceMemory>,
    scratch: Option<DeviceMemory>,
    results: Option<DeviceMemory>,
    /// Batches whose results were not asked for yet.
    waiting: Vec<Batch>,
    /// Pinned memory that no batch has.
    hosts: Vec<Pinned>,
    /// Draws of the last call.
    last: usize,
}

/// Draws whose results come into pinned memory.
struct Batch {
    host: Pinned,
    /// Words of a draw's result.
    stride: usize,
    /// Per draw: its vocabulary, and whether mask or vocabulary leave no token.
    draws: Vec<(u32, bool)>,
}

/// At least `bytes` of memory in the slot.
fn room(slot: &mut Option<DeviceMemory>, driver: &Arc<dyn Driver>, bytes: usize) -> Result<u64> {
    let held = slot.as_ref().map_or(0, DeviceMemory::bytes);
    if held < bytes || slot.is_none() {
        *slot = None;
        *slot = Some(DeviceMemory::zeros(driver, "draw", bytes.next_power_of_two())?);
    }
    Ok(slot.as_ref().map_or(0, DeviceMemory::ptr))
}

/// Adjustments and masks behind the records, all as words.
struct Params {
    words: Vec<u32>,
    adjusts_at: usize,
    masks_at: usize,
    /// Draws whose mask or vocabulary leaves no token.
    empty: Vec<bool>,
}

impl Params {
    fn of(draws: &[Draw], width: usize) -> Self {
        let (mut records, mut adjusts, mut masks) = (Vec::new(), Vec::new(), Vec::new());
        let mut empty = Vec::new();
        for draw in draws {
            let length = width.min(draw.vocabulary as usize);
            let mask: &[u32] = draw.mask.as_deref().unwrap_or(&[]);
            let mask = &mask[..mask.len().min(length.div_ceil(32))];
            let words = if draw.mask.is_some() { mask.len() as u32 } else { NO_MASK };
            records.extend([draw.row as u32, draw.temperature.to_bits(), draw.top_k, draw.top_p.to_bits()]);
            records.extend([draw.min_p.to_bits(), draw.seed as u32, (draw.seed >> 32) as u32, draw.choice]);
            records.extend([draw.position as u32, (draw.position >> 32) as u32, length as u32]);
            records.extend([(adjusts.len() / ADJUST_WORDS) as u32, draw.adjust.len() as u32]);
            records.extend([masks.len() as u32, words, draw.top_logprobs]);
            for change in &draw.adjust {
                let floats = [change.repetition, change.frequency, change.presence, change.bias];
                adjusts.push(change.token);
                adjusts.extend(floats.map(f32::to_bits));
            }
            masks.extend_from_slice(mask);
            empty.push(length == 0 || (draw.mask.is_some() && !any_below(mask, length)));
        }
        let adjusts_at = records.len();
        let masks_at = adjusts_at + adjusts.len();
        let words = [records, adjusts, masks].concat();
        Self { words, adjusts_at, masks_at, empty }
    }
}

/// Is a bit below `length` set?
fn any_below(mask: &[u32], length: usize) -> bool {
    let in_word = |word: usize| u32::MAX >> (32 - (length - 32 * word).min(32));
    mask.iter().enumerate().any(|(at, bits)| bits & in_word(at) != 0)
}

/// Where the parts of `Scratch` lie; sizes in bytes per draw, in the order of the struct.
fn scratch_words(base: u64, draws: usize, blocks: usize) -> (usize, [u64; 10]) {
    let chunks = blocks * IDS / CHUNK;
    let (four, eight) = (4 * blocks, 8 * blocks);
    let sizes = [4 * chunks * CHUNK, 4 * chunks, 4 * chunks, four, eight, eight, eight, four, four];
    let (mut words, mut at) = ([0; 10], 0);
    for (word, size) in words.iter_mut().zip(sizes) {
        *word = base + at as u64;
        at += (draws * size).next_multiple_of(256);
    }
    words[9] = chunks as u64 | (blocks as u64) << 32;
    (at, words)
}

impl Cuda {
    /// [`crate::Device::draw_later`] after a flush.
    pub(super) fn queue_draws(&mut self, logits: Buffer, draws: &[Draw]) -> Result {
        let rows = self.tables.planes[logits.0 as usize].rows_max;
        let failed = |message: String| Err(DeviceError::Failed { stage: "draw", message });
        if let Some(draw) = draws.iter().find(|draw| draw.row >= rows) {
            return failed(format!("row {} of a buffer of {rows}", draw.row));
        }
        if let Some(draw) = draws.iter().find(|draw| draw.top_logprobs > TOP_MAX) {
            return failed(format!("{} best tokens asked for, at most {TOP_MAX}", draw.top_logprobs));
        }
        let tokens = self.tokens(draws.len().max(rows))?;
        self.draws.last = draws.len();
        for (at, batch) in draws.chunks(DRAWS_MAX).enumerate() {
            self.queue_batch(logits, batch, tokens + (4 * DRAWS_MAX * at) as u64)?;
        }
        Ok(())
    }

    /// Room for the tokens of so many draws. Where it moves, no recorded list names it any more.
    fn tokens(&mut self, draws: usize) -> Result<u64> {
        if let Some(held) = self.tables.drawn.as_ref().filter(|held| held.bytes() >= 4 * draws) {
            return Ok(held.ptr());
        }
        self.driver.synchronize()?;
        self.lists.clear();
        let made = DeviceMemory::zeros(&self.driver, "draw", 4 * draws)?;
        Ok(self.tables.drawn.insert(made).ptr())
    }

    /// Draws of the last call.
    pub(super) fn drawn_count(&self) -> usize {
        self.draws.last
    }

    /// Forgets results that wait.
    pub(super) fn forget_draws(&mut self) {
        let waiting = self.draws.waiting.drain(..).map(|batch| batch.host);
        self.draws.hosts.extend(waiting);
    }

    fn queue_batch(&mut self, logits: Buffer, draws: &[Draw], tokens: u64) -> Result {
        let plane = &self.tables.planes[logits.0 as usize];
        let (width, values) = (plane.width, plane.values.ptr());
        let params = Params::of(draws, width);
        let bytes: Vec<u8> = params.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let driver = self.driver.clone();
        let base = room(&mut self.draws.params, &driver, bytes.len())?;
        let blocks = width.div_ceil(IDS).max(1);
        let (scratch_bytes, _) = scratch_words(0, draws.len(), blocks);
        let scratch = room(&mut self.draws.scratch, &driver, scratch_bytes)?;
        let (_, scratch) = scratch_words(scratch, draws.len(), blocks);
        let top = draws.iter().map(|draw| draw.top_logprobs as usize).max().unwrap_or(0);
        let stride = 4 + 2 * top;
        let results = room(&mut self.draws.results, &driver, 4 * stride * draws.len())?;
        driver.upload(base, &bytes)?;
        let (adjusts, masks) = (base + 4 * params.adjusts_at as u64, base + 4 * params.masks_at as u64);
        let of_rows = || Args::new().ptr(values).size(width).ptr(base);
        let grid = [blocks as u32, draws.len() as u32, 1];
        let launch = |name, grid, block, shared, args| {
            let kernel = Kernel::new("draw.cu", name);
            Launch { kernel, grid, block, shared, args }
        };
        let scores = of_rows().ptr(adjusts).ptr(masks).words(&scratch);
        let choose = of_rows().ptr(masks).words(&scratch).ptr(results).size(stride).ptr(tokens);
        let launches = [
            launch("draw_scores", grid, 256, 0, scores),
            launch("draw_weights", grid, 256, 0, of_rows().words(&scratch)),
            launch("draw_choose", [draws.len() as u32, 1, 1], CHOOSE_THREADS, CHOOSE_SHARED, choose),
        ];
        let prepared =
            launches.into_iter().map(|launch| self.kernels.prepare(launch)).collect::<Result<Vec<_>>>()?;
        driver.launch(&prepared, true)?;
        let bytes = 4 * stride * draws.len();
        let mut host = match self.draws.hosts.iter().position(|host| host.bytes().len() >= bytes) {
            Some(at) => self.draws.hosts.swap_remove(at),
            None => driver.pinned(bytes.next_power_of_two().max(4096))?,
        };
        driver.download_queued(results, &mut host, bytes)?;
        let draws = draws.iter().map(|draw| draw.vocabulary).zip(params.empty).collect();
        self.draws.waiting.push(Batch { host, stride, draws });
        Ok(())
    }

    /// [`crate::Device::drawn`].
    pub(super) fn take_drawn(&mut self) -> Result<Vec<Drawn>> {
        let waited = self.driver.synchronize();
        let drawn = waited.and_then(|()| {
            let batches = self.draws.waiting.iter().map(Batch::results);
            batches.collect::<Result<Vec<_>>>().map(|drawn| drawn.concat())
        });
        self.forget_draws();
        drawn
    }
}

impl Batch {
    fn results(&self) -> Result<Vec<Drawn>> {
        let words = self.host.bytes()[..4 * self.stride * self.draws.len()].as_chunks::<4>().0;
        let words: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let draws = self.draws.iter().zip(words.chunks_exact(self.stride));
        draws.map(|(&(vocabulary, empty), words)| result(vocabulary, words, empty)).collect()
    }
}

/// One draw's words (kernels/cuda/draw.cu, results).
fn result(vocabulary: u32, words: &[u32], empty: bool) -> Result<Drawn> {
    if words[1] != 0 {
        return Ok(Drawn { token: None, logprob: f32::NAN, top: Vec::new() });
    }
    if empty {
        let message = format!("no token below {vocabulary} may be drawn: the mask is empty");
        return Err(DeviceError::Failed { stage: "draw", message });
    }
    let best = words[4..].as_chunks::<2>().0.iter().take(words[3] as usize);
    let top = best.map(|&[id, logprob]| (id, f32::from_bits(logprob))).collect();
    Ok(Drawn { token: Some(words[0]), logprob: f32::from_bits(words[2]), top })
}
