//! Memory planned before anything is allocated.

use std::convert::Infallible;

use device::{KvForm, PAGE_TOKENS, WINDOW_ROWS_MAX};

use super::config::{Config, MixerKind};
use super::scratch::Scratch;
use super::tower::{self, TowerScratch};
use crate::ModelError;

/// Most slots.
pub const SLOTS_MAX: usize = 1 << 10;
/// Most snapshots.
pub const SNAPSHOTS_MAX: usize = 1 << 20;
/// Most K/V pages.
pub const PAGES_MAX: usize = 1 << 24;
/// Most rows of a step.
pub const ROWS_MAX: usize = 1 << 16;

/// Most tokens of a picture.
pub const IMAGE_TOKENS_MAX: usize = 1 << 18;

/// Sizes chosen at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Sequences that can run at once.
    pub slots: usize,
    /// Saved states.
    pub snapshots: usize,
    /// Most tokens of a sequence.
    pub context: usize,
    /// K/V pages of [`PAGE_TOKENS`] tokens, shared by all sequences.
    pub pages: usize,
    /// Form of K/V codes.
    pub kv: KvForm,
    /// Most rows of a step; at least `slots`.
    pub rows_max: usize,
    /// Most rows of a step that are scored.
    pub logits_rows_max: usize,
    /// Load the MTP layer where one is stored.
    pub mtp: bool,
    /// Most tokens of a picture. 0 leaves the vision tower out.
    pub image_tokens: usize,
    /// Whether a graphics card computes: it keeps codes beside activations, partial results, and its own
    /// code.
    pub card: bool,
}

impl Settings {
    /// The same with another context, and pages for every slot to fill it.
    pub fn with_context(&self, context: usize) -> Self {
        let pages = self.slots.saturating_mul(context.div_ceil(PAGE_TOKENS));
        Self { context, pages, ..self.clone() }
    }

    /// Refuses sizes that cannot work with this model.
    pub fn check(&self, config: &Config) -> Result<(), ModelError> {
        let within = |what, found: usize, min: usize, max: usize| match (min..=max).contains(&found) {
            true => Ok(()),
            false => {
                Err(ModelError::Limit { what, found: found.to_string(), expected: format!("{min} to {max}") })
            }
        };
        within("slots", self.slots, 1, SLOTS_MAX)?;
        within("snapshots", self.snapshots, 0, SNAPSHOTS_MAX)?;
        within("context", self.context, 1, config.positions_max)?;
        within("pages", self.pages, self.context.div_ceil(PAGE_TOKENS), PAGES_MAX)?;
        within("rows of a step", self.rows_max, self.slots, ROWS_MAX)?;
        within("scored rows of a step", self.logits_rows_max, 1, self.rows_max)?;
        within("tokens of a picture", self.image_tokens, 0, IMAGE_TOKENS_MAX)
    }
}

/// Bytes a model needs on a computing device, by purpose. Allocators round up; devices add their own code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Weights, as given.
    pub weights: u64,
    /// All K/V pages.
    pub kv: u64,
    /// One K/V page, all layers.
    pub page: u64,
    /// States of all slots and snapshots, with the kept inputs of a draft window per slot.
    pub states: u64,
    /// The state of one slot or snapshot.
    pub state: u64,
    /// Activations, logits and rotary tables; K/V and activations of pictures.
    pub scratch: u64,
}

impl MemoryPlan {
    /// What `settings` cost for this geometry; `mtp` says whether an MTP layer will be there.
    pub fn new(config: &Config, settings: &Settings, mtp: bool, weights: u64) -> Self {
        let page = page_bytes(config, settings.kv, mtp);
        let state = state_bytes(config);
        let places = (settings.slots + settings.snapshots) as u64;
        let states = places * state + settings.slots as u64 * kept_bytes(config, settings.card);
        let rotary = settings.context as u64 * config.rope.dims as u64 * 4;
        let card = if settings.card { card_bytes(config, settings) } else { 0 };
        let scratch = rotary + scratch_bytes(config, settings, mtp) + tower_bytes(config, settings) + card;
        Self { weights, kv: settings.pages as u64 * page, page, states, state, scratch }
    }

    /// Everything.
    pub fn total(&self) -> u64 {
        [self.weights, self.kv, self.states, self.scratch].iter().fold(0, |sum, n| sum.saturating_add(*n))
    }

    /// The largest context, a multiple of a page up to the model's own limit, that fits `budget` bytes with
    /// pages for every slot to fill it ([`Settings::with_context`]). `None`: not even one page each.
    pub fn context_that_fits(
        config: &Config,
        settings: &Settings,
        mtp: bool,
        weights: u64,
        budget: u64,
    ) -> Option<usize> {
        let fits = |pages: usize| {
            let context = (pages * PAGE_TOKENS).min(config.positions_max);
            let settings = settings.with_context(context);
            settings.pages <= PAGES_MAX && Self::new(config, &settings, mtp, weights).total() <= budget
        };
        largest(config.positions_max.div_ceil(PAGE_TOKENS), fits)
            .map(|pages| (pages * PAGE_TOKENS).min(config.positions_max))
    }
}

/// The largest number from 1 to `max` that `fits`, which holds up to some point and not after it.
fn largest(max: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    let (mut low, mut high) = (0, max);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    (low > 0).then_some(low)
}

/// Bytes of one K/V page, all layers: codes, K scales per 64 entries of a head, one V scale per head.
pub(super) fn page_bytes(config: &Config, form: KvForm, mtp: bool) -> u64 {
    let layers = config.layers_of(MixerKind::Attention).count() + usize::from(mtp);
    let a = config.attention;
    let head = 2 * a.head_dim * form.bytes() + 4 * (a.head_dim.div_ceil(64) + 1);
    (layers * PAGE_TOKENS * a.kv_heads * head) as u64
}

/// Bytes of the recurrent and convolution states of one place, f32.
pub(super) fn state_bytes(config: &Config) -> u64 {
    let layers = config.layers_of(MixerKind::DeltaNet).count();
    (layers * 4 * (config.delta.recurrent() + config.delta.conv())) as u64
}

/// Bytes of a draft window's kept inputs of one slot: convolution inputs, `a` and `b`, f32; on a card also
/// the normed keys and the values.
fn kept_bytes(config: &Config, card: bool) -> u64 {
    let (layers, d) = (config.layers_of(MixerKind::DeltaNet).count(), config.delta);
    let made = if card { d.key_heads * d.key_dim + d.value_heads * d.value_dim } else { 0 };
    (layers * WINDOW_ROWS_MAX * 4 * (d.channels() + 2 * d.value_heads + made)) as u64
}

/// Bytes of uploads and of the code of a card's kernels, about.
const CARD_FIXED: u64 = 96 << 20;

/// Bytes that a card takes beside the buffers of a step.
fn card_bytes(config: &Config, settings: &Settings) -> u64 {
    let (a, d, rows) = (config.attention, config.delta, settings.rows_max as u64);
    let (heads, values) = ((a.heads * a.head_dim) as u64, (d.value_heads * d.value_dim) as u64);
    // Half codes of what matrices read, and a unit and a sum for each group of 64.
    let codes = (2 * config.hidden + config.shared_width) as u64 + heads + values;
    // Digits of queries; normed queries and keys of the delta rule, and its gates.
    let digits = 2 * heads + 8 * (d.key_heads * d.key_dim + d.value_heads) as u64;
    // Codes of a matrix's rows once more, in one unit.
    let aligned = (config.hidden as u64).max(heads).max(values) * 17 / 8;
    // Of each routed row: gate and up, their product for few rows, its codes, also in one unit.
    let routed = (config.picks * config.expert_width) as u64 * 17;
    let spans = settings.context.div_ceil(device::cuda::SPAN_TOKENS).next_power_of_two() as u64;
    let parts = (settings.slots * WINDOW_ROWS_MAX) as u64 * spans * (heads + 2 * a.heads as u64) * 4;
    let halves = device::cuda::halves_bytes(settings.context, a.kv_heads) as u64;
    let attention = parts.max(halves).min(device::cuda::SPAN_BYTES_MAX as u64);
    CARD_FIXED + rows * (codes * 17 / 8 + aligned + digits + routed) + attention
}

/// Bytes of everything the vision tower needs beside its weights.
fn tower_bytes(config: &Config, settings: &Settings) -> u64 {
    let Some(vision) = config.vision.as_ref().filter(|_| settings.image_tokens > 0) else { return 0 };
    let chunk = tower::chunk_rows(vision, settings.rows_max);
    let mut bytes = tower::fixed_bytes(vision, settings.image_tokens);
    let built: Result<TowerScratch<()>, Infallible> =
        TowerScratch::build(vision, settings.image_tokens, chunk, |rows, width| {
            bytes = bytes.saturating_add((rows as u64).saturating_mul(width as u64 * 4));
            Ok(())
        });
    match built {
        Ok(_) => bytes,
        Err(never) => match never {},
    }
}

fn scratch_bytes(config: &Config, settings: &Settings, mtp: bool) -> u64 {
    let mut bytes = (settings.rows_max * config.picks * 8) as u64;
    let built: Result<Scratch<()>, Infallible> = Scratch::build(config, settings, mtp, |rows, width| {
        bytes = bytes.saturating_add((rows as u64).saturating_mul(width as u64 * 4));
        Ok(())
    });
    match built {
        Ok(_) => bytes,
        Err(never) => match never {},
    }
}
