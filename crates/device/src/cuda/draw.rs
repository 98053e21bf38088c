//! Logits to tokens on CUDA (`docs/arithmetic.md`, logits to tokens; `kernels/cuda/draw.cu`).

use super::Cuda;
use super::command::Command;
use super::driver::{Pinned, Result};
use super::launch::{Args, Kernel, Launch};
use super::lower::Lowering;
use super::memory::{ADJUST_WORDS, DeviceMemory, RECORD_MASK, RECORD_WORDS};
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
const NO_MASK: u32 = u32::MAX;
/// Bytes of results that wait: any batch fits.
const RESULT_BYTES: usize = 1 << 20;
const _: () = assert!(RESULT_BYTES >= 4 * DRAWS_MAX * (4 + 2 * TOP_MAX as usize));
/// Adjustments and masks of more bytes than this do not go with the upload of a list.
const TAIL_BYTES_MAX: usize = 1 << 20;

/// Memory of draws, made at the first.
#[derive(Default)]
pub(super) struct Draws {
    /// Adjustments and masks of a batch that has many.
    tail: Option<DeviceMemory>,
    /// Kernels write results here.
    results: Option<Pinned>,
    /// Bytes of it that waiting batches have.
    used: usize,
    /// Batches whose results were not asked for yet.
    waiting: Vec<Batch>,
    /// Results from before those.
    taken: Vec<Drawn>,
    /// Draws of the last call.
    last: usize,
}

/// Draws whose results come into pinned memory.
struct Batch {
    /// First byte.
    at: usize,
    /// Words of a draw's result.
    stride: usize,
    /// Per draw: its vocabulary, and whether mask or vocabulary leave no token.
    draws: Vec<(u32, bool)>,
}

/// Draws as words.
struct Params {
    records: Vec<u32>,
    adjusts: Vec<u32>,
    masks: Vec<u32>,
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
        Self { records, adjusts, masks, empty }
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
    /// [`crate::Device::draw_later`].
    pub(super) fn queue_draws(&mut self, logits: Buffer, draws: &[Draw]) -> Result {
        let rows = self.tables.planes[logits.0 as usize].rows_max;
        let failed = |message: String| Err(DeviceError::Failed { stage: "draw", message });
        if let Some(draw) = draws.iter().find(|draw| draw.row >= rows) {
            return failed(format!("row {} of a buffer of {rows}", draw.row));
        }
        if let Some(draw) = draws.iter().find(|draw| draw.top_logprobs > TOP_MAX) {
            return failed(format!("{} best tokens asked for, at most {TOP_MAX}", draw.top_logprobs));
        }
        self.make_tokens(draws.len().max(rows))?;
        self.draws.last = draws.len();
        for (at, batch) in draws.chunks(DRAWS_MAX).enumerate() {
            self.queue_batch(logits, batch, DRAWS_MAX * at)?;
        }
        Ok(())
    }

    /// Room for the tokens of so many draws. Where it moves, no list names it any more.
    fn make_tokens(&mut self, draws: usize) -> Result {
        if self.tables.drawn.as_ref().is_some_and(|held| held.bytes() >= 4 * draws) {
            return Ok(());
        }
        self.flush()?;
        self.driver.synchronize()?;
        self.lists.clear();
        self.tables.drawn = Some(DeviceMemory::zeros(&self.driver, "draw", 4 * draws)?);
        Ok(())
    }

    /// Draws of the last call.
    pub(super) fn drawn_count(&self) -> usize {
        self.draws.last
    }

    /// Forgets results that wait.
    pub(super) fn forget_draws(&mut self) {
        self.draws.waiting.clear();
        self.draws.taken.clear();
        self.draws.used = 0;
    }

    /// Address of a place for so many bytes of results, and where it lies.
    fn result_place(&mut self, bytes: usize) -> Result<(u64, usize)> {
        if self.draws.used + bytes > RESULT_BYTES {
            let taken = self.wait_drawn()?;
            self.forget_draws();
            self.draws.taken = taken;
        }
        let at = self.draws.used;
        self.draws.used += bytes;
        if self.draws.results.is_none() {
            self.draws.results = Some(self.driver.pinned(RESULT_BYTES)?);
        }
        Ok((self.draws.results.as_ref().map_or(0, Pinned::address) + at as u64, at))
    }

    /// An address of their own for adjustments and masks that are too many for an upload.
    fn tail(&mut self, params: &mut Params) -> Result<Option<u64>> {
        let words = [std::mem::take(&mut params.adjusts), std::mem::take(&mut params.masks)];
        let [adjusts, masks] = &words;
        if 4 * (adjusts.len() + masks.len()) <= TAIL_BYTES_MAX {
            [params.adjusts, params.masks] = words;
            return Ok(None);
        }
        // Lists before may still read what is there.
        self.flush()?;
        for record in params.records.chunks_exact_mut(RECORD_WORDS) {
            record[RECORD_MASK] += adjusts.len() as u32;
        }
        let bytes: Vec<u8> = words.iter().flatten().flat_map(|word| word.to_le_bytes()).collect();
        if self.draws.tail.as_ref().is_none_or(|held| held.bytes() < bytes.len()) {
            self.draws.tail = None;
            let room = bytes.len().next_power_of_two();
            self.draws.tail = Some(DeviceMemory::zeros(&self.driver, "draw", room)?);
        }
        let Some(tail) = &self.draws.tail else { return Ok(None) };
        tail.upload(0, &bytes)?;
        Ok(Some(tail.ptr()))
    }

    fn queue_batch(&mut self, logits: Buffer, draws: &[Draw], first: usize) -> Result {
        let mut params = Params::of(draws, self.width(logits));
        let top = draws.iter().map(|draw| draw.top_logprobs as usize).max().unwrap_or(0);
        let stride = 4 + 2 * top;
        let (results, at) = self.result_place(4 * stride * draws.len())?;
        let tail = self.tail(&mut params)?;
        let Params { records, adjusts, masks, empty } = params;
        self.make_room(4 * (records.len() + adjusts.len() + masks.len()))?;
        let records = self.upload.push_draws(&records, &adjusts, &masks);
        self.record(Command::Draw { logits, draws: draws.len(), records, tail, results, stride, first })?;
        let draws = draws.iter().map(|draw| draw.vocabulary).zip(empty).collect();
        self.draws.waiting.push(Batch { at, stride, draws });
        Ok(())
    }

    /// Waits for the draws that were queued: all their results.
    fn wait_drawn(&mut self) -> Result<Vec<Drawn>> {
        self.flush()?;
        self.driver.synchronize()?;
        let words = self.draws.results.as_ref().map_or(&[][..], Pinned::bytes);
        let mut drawn = std::mem::take(&mut self.draws.taken);
        for batch in &self.draws.waiting {
            drawn.extend(batch.results(words)?);
        }
        Ok(drawn)
    }

    /// [`crate::Device::drawn`].
    pub(super) fn take_drawn(&mut self) -> Result<Vec<Drawn>> {
        let drawn = self.wait_drawn();
        self.forget_draws();
        drawn
    }
}

/// [`Command::Draw`].
pub(super) fn lower(c: &mut Lowering<'_>, command: &Command) -> Result {
    let Command::Draw { logits, draws, records, tail, results, stride, first } = *command else {
        unreachable!("called for this command");
    };
    let plane = c.plane(logits);
    let blocks = plane.width.div_ceil(IDS).max(1);
    // Where it moves all lists are made anew: few moves.
    let (bytes, _) = scratch_words(0, draws.next_power_of_two(), blocks);
    let (_, scratch) = scratch_words(c.scratch("draw", bytes)?, draws, blocks);
    let (base, tail) = (c.span(records), tail.unwrap_or(c.step().pages()));
    let tokens = c.drawn_tokens() + 4 * first as u64;
    let of_rows = || Args::new().ptr(plane.ptr).size(plane.width).ptr(base);
    let grid = [blocks as u32, draws as u32, 1];
    let choose = of_rows().ptr(tail).words(&scratch).ptr(results).size(stride).ptr(tokens);
    let launches = [
        ("draw_scores", grid, 256, 0, of_rows().ptr(tail).ptr(tail).words(&scratch)),
        ("draw_weights", grid, 256, 0, of_rows().words(&scratch)),
        ("draw_choose", [draws as u32, 1, 1], CHOOSE_THREADS, CHOOSE_SHARED, choose),
    ];
    for (name, grid, block, shared, args) in launches {
        c.push(Launch { kernel: Kernel::new("draw.cu", name), grid, block, shared, args });
    }
    Ok(())
}

impl Batch {
    fn results(&self, bytes: &[u8]) -> Result<Vec<Drawn>> {
        let words = bytes[self.at..][..4 * self.stride * self.draws.len()].as_chunks::<4>().0;
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
