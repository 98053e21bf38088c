//! A model without weights for tests of the engine and the server.
//!
//! The logits of a position are a hash of *all* history: a recurrent part kept per slot (token after token,
//! like the state of gated delta nets) and an attention part read back from the pages that the window names
//! (like K/V). A wrong page, a stale one, a missed rollback, a wrong rotary position or a swapped snapshot
//! changes the next tokens at once. [`History`] computes the same logits from tokens alone, with no slot or
//! page in sight: it is the definition that engine runs are compared with.

mod draw;
mod faults;
mod oracle;

use std::sync::Arc;
use std::time::Duration;

use model::{Draft, DraftAsk, Draw, Drawn, Features, ImageRow, ImageSpec, Logits, Model, ModelError};
use model::{PAGE_TOKENS, Picture, SlotId, SnapshotId, Spec};
use model::{WINDOW_ROWS_MAX, Window};

use crate::clock::ManualClock;
pub use draw::draw_row;
pub use faults::Faults;
pub use oracle::{Solo, solo};

/// What [`FakeModel::draft`](Model::draft) proposes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FakeDrafts {
    /// Nothing: a model without MTP.
    None,
    /// The target's own next tokens.
    Right,
    /// Never the target's next token.
    Wrong,
    /// Any token, by a hash.
    Random,
    /// Each token right with this many percent.
    Sometimes(u8),
    /// The chain starts wrong; the right token is the second of the alternatives.
    SecondBest,
}

/// What time a call takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FakeCost {
    /// Of any step.
    pub step: Duration,
    /// Of a step, for each row.
    pub row: Duration,
    /// Of a draft call, for each token of the longest chain.
    pub draft: Duration,
    /// Of a slice of encoding, for each row of work.
    pub image: Duration,
    /// Of what the drafter must know of the sequence, for each committed token of a slot that expects drafts:
    /// paid for 64 tokens at a time, or by the next draft.
    pub upkeep: Duration,
}

/// How time passes in calls.
#[derive(Clone, Debug, Default)]
pub enum Pace {
    /// As fast as it goes.
    #[default]
    Free,
    /// Sleeps.
    Sleep(FakeCost),
    /// Moves a clock.
    Clock(ManualClock, FakeCost),
}

/// Settings of a [`FakeModel`].
#[derive(Clone, Debug)]
pub struct FakeConfig {
    /// Sizes. `has_mtp` is overwritten by `drafts`.
    pub spec: Spec,
    /// Behaviour of drafts.
    pub drafts: FakeDrafts,
    /// Time.
    pub pace: Pace,
    /// A token that turns every later logit of its sequence into NaN.
    pub poison: Option<u32>,
    /// What pictures it takes; their features are hashes of their digests.
    pub images: Option<ImageSpec>,
    /// What [`Model::steps_ahead`] says.
    pub steps_ahead: bool,
}

impl Default for FakeConfig {
    fn default() -> Self {
        let spec = Spec {
            vocabulary: 64,
            context_max: 1024,
            slots: 4,
            snapshots: 24,
            pages: 128,
            rows_max: 256,
            logits_rows_max: 128,
            has_mtp: true,
            page_bytes: PAGE_TOKENS * 9,
            snapshot_bytes: SNAPSHOT_BYTES,
        };
        let drafts = FakeDrafts::Right;
        Self { spec, drafts, pace: Pace::Free, poison: None, images: None, steps_ahead: false }
    }
}

/// Bytes of an exported snapshot: position, hash, poison flag.
const SNAPSHOT_BYTES: usize = 17;

/// Everything the logits of a position depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct History {
    recurrent: u64,
    attention: u64,
    length: u64,
    poisoned: bool,
}

impl History {
    /// The history one token later. `rope` is the token's rotary position.
    pub fn push(&mut self, token: u32, rope: [u32; 3], poison: Option<u32>) {
        let key = self.step(token, rope, poison);
        self.attend(key);
    }

    /// Advances the recurrent part; returns what the pages hold of the token.
    fn step(&mut self, token: u32, rope: [u32; 3], poison: Option<u32>) -> u64 {
        self.recurrent = join(self.recurrent, u64::from(token) + 1);
        self.poisoned |= Some(token) == poison;
        rope.iter().fold(join(self.recurrent, u64::from(token)), |hash, &axis| join(hash, u64::from(axis)))
    }

    /// Adds what a page held at the next index.
    fn attend(&mut self, key: u64) {
        self.attention = self.attention.wrapping_add(join(key, self.length));
        self.length += 1;
    }

    /// Logits of the next token, appended: `[vocabulary]`.
    pub fn logits(&self, vocabulary: usize, out: &mut Vec<f32>) {
        let hash = join(join(self.recurrent, self.attention), self.length);
        out.extend((0..vocabulary).map(|token| {
            if self.poisoned {
                return f32::NAN;
            }
            // 20 bits are exact in f32; a square makes a few tokens stand out, as in text.
            let share = (join(hash, token as u64) >> 44) as f32 / (1u32 << 20) as f32;
            share * share * 9.0 - 4.0
        }));
    }
}

/// Rows of work of the smallest slice of encoding.
const ENCODE_ROWS: usize = 16;

/// What stands for a token in row `row` of a picture: 24 bits of a hash of its digest, exact in f32 and
/// beyond the vocabulary.
pub fn image_token(picture: &Picture, row: usize) -> u32 {
    let words = picture.digest.as_chunks::<8>().0;
    let hash = words.iter().fold(row as u64, |hash, word| join(hash, u64::from_le_bytes(*word)));
    (hash >> 41) as u32 | 1 << 23
}

/// One round of splitmix64 over two words.
pub(crate) fn join(a: u64, b: u64) -> u64 {
    let mut x = a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
    x = (x ^ (x >> 30)).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// What a slot holds outside its pages.
#[derive(Clone, Debug, Default)]
struct FakeSlot {
    /// `attention` is not used here: it is read from the pages.
    state: History,
    /// An uncommitted window that waits for [`Model::keep`].
    pending: Option<Window>,
    /// Tokens the drafter does not know, and whether nobody will ask it: then it forgets those of whole
    /// pages.
    unknown: usize,
    unexpected: bool,
}

/// The fake. See the module's text.
#[derive(Debug)]
pub struct FakeModel {
    config: FakeConfig,
    faults: Arc<Faults>,
    slots: Vec<FakeSlot>,
    snapshots: Vec<Option<History>>,
    /// `[pages][PAGE_TOKENS]`; `None` was never written.
    pages: Vec<Vec<Option<u64>>>,
    logits: Vec<f32>,
    rows: usize,
    /// Pictures being encoded, and the rows of work that are left.
    encoding: Option<(Vec<Arc<Picture>>, usize)>,
}

impl FakeModel {
    /// A fresh model.
    pub fn new(mut config: FakeConfig) -> Self {
        config.spec.has_mtp = config.drafts != FakeDrafts::None;
        Self {
            slots: vec![FakeSlot::default(); config.spec.slots],
            snapshots: vec![None; config.spec.snapshots],
            pages: vec![vec![None; PAGE_TOKENS]; config.spec.pages],
            faults: Arc::default(),
            logits: Vec::new(),
            rows: 0,
            encoding: None,
            config,
        }
    }

    /// Switches for faults, which stay usable when an engine owns the model.
    pub fn faults(&self) -> Arc<Faults> {
        self.faults.clone()
    }

    fn slot(&mut self, slot: SlotId) -> Result<&mut FakeSlot, ModelError> {
        let slots = self.slots.len();
        self.slots.get_mut(slot.0 as usize).ok_or_else(|| limit("slot", slot.0, format!("below {slots}")))
    }

    fn cell(&mut self, pages: &[u32], place: usize) -> Result<&mut Option<u64>, ModelError> {
        let page = *pages
            .get(place / PAGE_TOKENS)
            .ok_or_else(|| limit("place", place, format!("below {}", pages.len() * PAGE_TOKENS)))?;
        let known = self.pages.len();
        let cells =
            self.pages.get_mut(page as usize).ok_or_else(|| limit("page", page, format!("below {known}")))?;
        Ok(&mut cells[place % PAGE_TOKENS])
    }

    /// The slot's history with its attention part read from `pages`.
    fn history(&mut self, slot: SlotId, start: usize, pages: &[u32]) -> Result<History, ModelError> {
        let slot = self.slot(slot)?;
        if slot.state.length != start as u64 {
            return Err(limit("start of a window", start, slot.state.length));
        }
        if slot.pending.is_some() {
            return Err(limit("window", "an uncommitted one before it", "keep first"));
        }
        let mut history = History { attention: 0, length: 0, ..slot.state };
        for place in 0..start {
            let key = self.cell(pages, place)?.unwrap_or(0);
            history.attend(key);
        }
        Ok(history)
    }

    fn window(&mut self, window: &Window, broken: bool, images: &[Option<u32>]) -> Result<(), ModelError> {
        check_window(window)?;
        let (end, context) = (window.start + window.rows.len(), self.config.spec.context_max);
        if end > context {
            return Err(limit("tokens of a sequence", end, context));
        }
        let base = self.history(window.slot, window.start, &window.pages)?;
        let mut after: Vec<History> = Vec::with_capacity(window.rows.len());
        for (row, input) in window.rows.iter().enumerate() {
            let parent = match &window.parents {
                None => row.checked_sub(1),
                Some(parents) => parents[row].map(|p| p as usize),
            };
            let mut history = parent.map_or(base, |p| after[p]);
            let Some(token) = input.token.or(images[row]) else {
                return Err(limit("step row without a token", row, "its image row"));
            };
            let key = history.step(token, input.position, self.config.poison);
            let cell = self.cell(&window.pages, window.start + row)?;
            *cell = Some(key);
            history.attend(key);
            after.push(history);
            let last = row + 1 == window.rows.len();
            if window.logits == Logits::All || (window.logits == Logits::Last && last) {
                let seen = History { poisoned: history.poisoned || broken, ..history };
                seen.logits(self.config.spec.vocabulary, &mut self.logits);
                self.rows += 1;
            }
        }
        let slot = self.slot(window.slot)?;
        match window.commit {
            true => slot.state = after[after.len() - 1],
            false => slot.pending = Some(window.clone()),
        }
        match (window.commit, window.rows.len()) {
            (false, _) => Ok(()),
            (true, 1) => self.commit(window.slot, 1),
            (true, rows) => self.learn_chunk(window.slot, rows),
        }
    }

    fn pass_time(&self, cost: impl Fn(&FakeCost) -> Duration) {
        match &self.config.pace {
            Pace::Free => {}
            Pace::Sleep(costs) => std::thread::sleep(cost(costs)),
            Pace::Clock(clock, costs) => clock.advance(cost(costs)),
        }
    }

    /// Counts tokens of a slot that the drafter is to know.
    fn commit(&mut self, slot: SlotId, tokens: usize) -> Result<(), ModelError> {
        let state = self.slot(slot)?;
        state.unknown += tokens;
        if state.unexpected {
            state.unknown = state.unknown.min(state.state.length as usize % PAGE_TOKENS);
        }
        match state.unknown >= PAGE_TOKENS {
            true => self.learn(slot),
            false => Ok(()),
        }
    }

    /// Rows of a chunk are learnt together, as much cheaper as they are cheaper to step: all of them, or
    /// those of the last page where nobody will ask.
    fn learn_chunk(&mut self, slot: SlotId, rows: usize) -> Result<(), ModelError> {
        let state = self.slot(slot)?;
        let last_page = state.state.length as usize % PAGE_TOKENS;
        let learnt = if state.unexpected { rows.min(last_page) } else { rows };
        state.unknown = 0;
        let share = |cost: &FakeCost| {
            cost.row.as_secs_f64() / (cost.step + cost.row).as_secs_f64().max(f64::MIN_POSITIVE)
        };
        self.pass_time(|cost| (cost.upkeep * learnt as u32).mul_f64(share(cost)));
        Ok(())
    }

    fn learn(&mut self, slot: SlotId) -> Result<(), ModelError> {
        let tokens = std::mem::take(&mut self.slot(slot)?.unknown);
        self.pass_time(|cost| cost.upkeep * tokens as u32);
        Ok(())
    }

    fn propose(&mut self, ask: &DraftAsk) -> Result<Draft, ModelError> {
        let mut history = self.history(ask.slot, ask.start, &ask.pages)?;
        let vocabulary = self.config.spec.vocabulary;
        let mut draft = Draft::default();
        let mut token = ask.token;
        let mut draw = ask.draw.clone();
        for index in 0..ask.count {
            let at = (ask.start + index) as i64 + ask.rope_delta;
            history.push(token, [at as u32; 3], self.config.poison);
            let mut logits = Vec::with_capacity(vocabulary);
            history.logits(vocabulary, &mut logits);
            draw.position = ask.draw.position + index as u64;
            let right = draw_row(&logits, &draw).token.unwrap_or(0);
            let wrong = (right + 1) % vocabulary as u32;
            let chance = join(history.recurrent, 77);
            let (next, probability) = match self.config.drafts {
                FakeDrafts::None => break,
                FakeDrafts::Right => (right, 0.9),
                FakeDrafts::Wrong => (wrong, 0.5),
                FakeDrafts::Random => ((chance % vocabulary as u64) as u32, 0.2),
                FakeDrafts::Sometimes(percent) if chance % 100 < u64::from(percent) => (right, 0.8),
                FakeDrafts::SecondBest if index > 0 => (right, 0.9),
                FakeDrafts::Sometimes(_) | FakeDrafts::SecondBest => (wrong, 0.4),
            };
            if probability < ask.confidence {
                break;
            }
            if index == 0 {
                let others = [right, wrong, (right + 2) % vocabulary as u32, (right + 3) % vocabulary as u32];
                draft.first.push((next, probability));
                let others = others.into_iter().filter(|&other| other != next);
                draft.first.extend(others.map(|other| (other, 0.1)).take(ask.first_max - 1));
            }
            draft.tokens.push(next);
            draft.probabilities.push(probability);
            token = next;
        }
        Ok(draft)
    }
}

fn limit(what: &'static str, found: impl ToString, expected: impl ToString) -> ModelError {
    ModelError::Limit { what, found: found.to_string(), expected: expected.to_string() }
}

fn check_window(window: &Window) -> Result<(), ModelError> {
    let rows = window.rows.len();
    if rows == 0 || (!window.commit && rows > WINDOW_ROWS_MAX) {
        return Err(limit("rows of a window", rows, format!("1 to {WINDOW_ROWS_MAX} uncommitted ones")));
    }
    if let Some(parents) = &window.parents {
        let ordered = parents.iter().enumerate().all(|(row, p)| p.is_none_or(|p| (p as usize) < row));
        if window.commit || parents.len() != rows || !ordered {
            return Err(limit("parents", parents.len(), "an earlier one for each row, uncommitted"));
        }
    }
    Ok(())
}

impl Model for FakeModel {
    fn spec(&self) -> &Spec {
        &self.config.spec
    }

    fn step(&mut self, windows: &[Window]) -> Result<usize, ModelError> {
        self.step_images(windows, &[])
    }

    fn steps_ahead(&self) -> bool {
        self.config.steps_ahead
    }

    fn image_spec(&self) -> Option<ImageSpec> {
        self.config.images
    }

    fn encode(&mut self, pictures: &[Arc<Picture>]) -> Result<(), ModelError> {
        let Some(spec) = self.config.images else { return Err(limit("pictures", pictures.len(), 0)) };
        let patches: usize = pictures.iter().map(|picture| picture.count()).sum();
        let patches_max = spec.tokens_max * spec.merge * spec.merge;
        if pictures.is_empty() || pictures.len() > spec.pictures_max || patches > patches_max {
            return Err(limit("pictures", pictures.len(), spec.pictures_max));
        }
        self.encoding = Some((pictures.to_vec(), patches * spec.patch_work));
        Ok(())
    }

    fn encode_next(&mut self, rows: usize) -> Result<Option<Vec<Features>>, ModelError> {
        self.faults.encode()?;
        let Some((pictures, left)) = self.encoding.take() else { return Err(limit("pictures", 0, "some")) };
        let done = left.min(rows.max(ENCODE_ROWS));
        self.pass_time(|cost| cost.image * done as u32);
        if done < left {
            self.encoding = Some((pictures, left - done));
            return Ok(None);
        }
        let merged = self.config.images.map_or(1, |spec| spec.merge * spec.merge);
        let features = |picture: &Arc<Picture>| {
            let rows = 0..picture.count() / merged;
            Features { width: 1, values: rows.map(|row| image_token(picture, row) as f32).collect() }
        };
        Ok(Some(pictures.iter().map(features).collect()))
    }

    fn step_images(&mut self, windows: &[Window], images: &[ImageRow]) -> Result<usize, ModelError> {
        let fault = self.faults.step()?;
        let rows: usize = windows.iter().map(|w| w.rows.len()).sum();
        self.pass_time(|cost| cost.step + cost.row * rows as u32);
        if rows > self.config.spec.rows_max {
            return Err(limit("rows of a step", rows, self.config.spec.rows_max));
        }
        self.logits.clear();
        self.rows = 0;
        let mut tokens = vec![None; rows];
        for image in images {
            let known = tokens.get_mut(image.row).ok_or_else(|| limit("image row", image.row, rows))?;
            *known = Some(image.features.row(image.at)[0] as u32);
        }
        let mut tokens = &tokens[..];
        for (at, window) in windows.iter().enumerate() {
            let (own, others) = tokens.split_at(window.rows.len());
            tokens = others;
            if windows[..at].iter().any(|other| other.slot == window.slot) {
                return Err(limit("slot", window.slot.0, "one window each"));
            }
            self.window(window, fault.nan && at == 0, own)?;
        }
        if self.rows > self.config.spec.logits_rows_max {
            return Err(limit("rows of logits", self.rows, self.config.spec.logits_rows_max));
        }
        Ok(self.rows)
    }

    fn draw(&mut self, draws: &[Draw]) -> Result<Vec<Drawn>, ModelError> {
        let width = self.config.spec.vocabulary;
        let row = |draw: &Draw| {
            let logits = self.logits.get(draw.row * width..(draw.row + 1) * width);
            logits.map(|logits| draw_row(logits, draw)).ok_or_else(|| limit("row", draw.row, self.rows))
        };
        draws.iter().map(row).collect()
    }

    fn read_logits(&mut self, row: usize, out: &mut [f32]) -> Result<(), ModelError> {
        let width = self.config.spec.vocabulary;
        let logits = self.logits.get(row * width..(row + 1) * width);
        out.copy_from_slice(logits.ok_or_else(|| limit("row", row, self.rows))?);
        Ok(())
    }

    fn keep(&mut self, slot: SlotId, rows: &[usize]) -> Result<(), ModelError> {
        let poison = self.config.poison;
        let window = self.slot(slot)?.pending.take().ok_or_else(|| limit("keep", "no window", "one"))?;
        for (depth, &row) in rows.iter().enumerate() {
            let parent = match &window.parents {
                None => row.checked_sub(1),
                Some(parents) => parents.get(row).copied().flatten().map(|p| p as usize),
            };
            if row >= window.rows.len() || parent != depth.checked_sub(1).map(|d| rows[d]) {
                return Err(limit("kept rows", format!("{rows:?}"), "a path from the root"));
            }
            let input = window.rows[row];
            self.slot(slot)?.state.step(input.token.unwrap_or(u32::MAX), input.position, poison);
            self.slot(slot)?.state.length += 1;
            let key = *self.cell(&window.pages, window.start + row)?;
            *self.cell(&window.pages, window.start + depth)? = key;
        }
        self.commit(slot, rows.len())
    }

    fn draft(&mut self, asks: &[DraftAsk]) -> Result<Vec<Draft>, ModelError> {
        let longest = asks.iter().map(|ask| ask.count).max().unwrap_or(0);
        self.pass_time(|cost| cost.draft * longest as u32);
        asks.iter().try_for_each(|ask| self.learn(ask.slot))?;
        self.logits.clear();
        self.rows = 0;
        asks.iter().map(|ask| self.propose(ask)).collect()
    }

    fn expect_drafts(&mut self, slot: SlotId, expected: bool) -> Result<(), ModelError> {
        self.slot(slot)?.unexpected = !expected;
        Ok(())
    }

    fn save(&mut self, slot: SlotId, into: SnapshotId) -> Result<(), ModelError> {
        let slot = self.slot(slot)?;
        if slot.pending.is_some() {
            return Err(limit("save", "an uncommitted window", "keep first"));
        }
        let state = slot.state;
        *self.snapshot(into)? = Some(state);
        Ok(())
    }

    fn load(&mut self, slot: SlotId, from: Option<SnapshotId>) -> Result<(), ModelError> {
        let state = match from {
            None => History::default(),
            Some(id) => self.snapshot(id)?.ok_or_else(|| limit("snapshot", "never saved", "a saved one"))?,
        };
        *self.slot(slot)? = FakeSlot { state, ..FakeSlot::default() };
        Ok(())
    }

    fn export_snapshot(&mut self, from: SnapshotId) -> Result<Vec<u8>, ModelError> {
        let state = self.snapshot(from)?.ok_or_else(|| limit("snapshot", "never saved", "a saved one"))?;
        let mut bytes = Vec::with_capacity(SNAPSHOT_BYTES);
        bytes.extend(state.length.to_le_bytes());
        bytes.extend(state.recurrent.to_le_bytes());
        bytes.push(u8::from(state.poisoned));
        Ok(bytes)
    }

    fn import_snapshot(&mut self, into: SnapshotId, bytes: &[u8]) -> Result<(), ModelError> {
        let (Some(length), Some(recurrent), SNAPSHOT_BYTES) = (word(bytes, 0), word(bytes, 8), bytes.len())
        else {
            return Err(limit("bytes of a snapshot", bytes.len(), SNAPSHOT_BYTES));
        };
        *self.snapshot(into)? = Some(History { length, recurrent, attention: 0, poisoned: bytes[16] != 0 });
        Ok(())
    }

    fn export_page(&mut self, page: u32) -> Result<Vec<u8>, ModelError> {
        let mut bytes = Vec::with_capacity(PAGE_TOKENS * 9);
        for place in 0..PAGE_TOKENS {
            let cell = *self.cell(&[page], place)?;
            bytes.push(u8::from(cell.is_some()));
            bytes.extend(cell.unwrap_or(0).to_le_bytes());
        }
        Ok(bytes)
    }

    fn import_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), ModelError> {
        if bytes.len() != PAGE_TOKENS * 9 {
            return Err(limit("bytes of a page", bytes.len(), PAGE_TOKENS * 9));
        }
        for place in 0..PAGE_TOKENS {
            let key = word(bytes, place * 9 + 1).filter(|_| bytes[place * 9] != 0);
            *self.cell(&[page], place)? = key;
        }
        Ok(())
    }
}

impl FakeModel {
    fn snapshot(&mut self, id: SnapshotId) -> Result<&mut Option<History>, ModelError> {
        let known = self.snapshots.len();
        self.snapshots.get_mut(id.0 as usize).ok_or_else(|| limit("snapshot", id.0, format!("below {known}")))
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests;
