//! [`Qwen`]: a model of the family on a device, behind the [`Model`] seam.

use std::sync::Arc;

use checkpoint::Source;
use device::{DeltaState, Device, DeviceError, Draw, Drawn, Row, StatePool};

use super::config::{Config, MixerKind};
use super::encode::Encoding;
use super::fields::ConfigError;
use super::inventory::Parts;
use super::mtp::{MtpWindow, Next};
use super::network::{Network, Probe, Unprobed};
use super::plan::{MemoryPlan, Settings, page_bytes, state_bytes};
use super::sequence::{Open, QUEUE_ROWS, Sequence, is_path};
use super::snapshot::{Snapshot, snapshot_bytes};
use super::weights::{Progress, Weights};
use super::windows::{limit, plan};
use crate::{
    Draft, DraftAsk, Features, ImageRow, ImageSpec, Model, ModelError, Picture, SlotId, SnapshotId, Spec,
    Window,
};

/// Why a model cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// `config.json` describes something else.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The weights are not what `config.json` promises.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// The device failed, or has too little memory.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Settings that this model cannot keep.
    #[error(transparent)]
    Settings(#[from] ModelError),
}

/// A model of the family on a device, ready to step.
pub struct Qwen {
    pub(super) network: Network,
    pub(super) device: Box<dyn Device>,
    pub(super) settings: Settings,
    pub(super) sequences: Vec<Sequence>,
    pub(super) snapshots: Vec<Option<Snapshot>>,
    spec: Spec,
    plan: MemoryPlan,
    /// Rows of logits that the last step left, or 0.
    pub(super) logits_rows: usize,
    /// Pictures that are being encoded.
    pub(super) encoding: Option<Encoding>,
}

/// Loads a checkpoint onto a device and allocates everything a run needs.
pub fn open(
    source: &dyn Source,
    mut device: Box<dyn Device>,
    settings: Settings,
    progress: Progress<'_>,
) -> Result<Qwen, OpenError> {
    let config = Config::from_json(source.config())?;
    settings.check(&config)?;
    let found = Parts::of(&config, source);
    let parts =
        Parts { mtp: found.mtp && settings.mtp, vision: found.vision && settings.image_tokens > 0, ..found };
    let weights = Weights::load(&config, parts, source, &mut *device, progress)?;
    let spec = spec(&config, &settings, parts.mtp);
    let network = Network::new(config, weights, &settings, &mut *device)?;
    let plan = MemoryPlan::new(&network.config, &settings, parts.mtp, device.memory().weights);
    Ok(Qwen {
        network,
        device,
        sequences: (0..settings.slots as u32).map(Sequence::new).collect(),
        snapshots: vec![None; settings.snapshots],
        settings,
        spec,
        plan,
        logits_rows: 0,
        encoding: None,
    })
}

fn spec(config: &Config, settings: &Settings, mtp: bool) -> Spec {
    Spec {
        vocabulary: config.vocabulary,
        context_max: settings.context,
        slots: settings.slots,
        snapshots: settings.snapshots,
        pages: settings.pages,
        rows_max: settings.rows_max,
        logits_rows_max: settings.logits_rows_max,
        has_mtp: mtp,
        page_bytes: page_bytes(config, settings.kv, mtp) as usize,
        snapshot_bytes: snapshot_bytes(config, mtp),
    }
}

impl Qwen {
    /// The geometry.
    pub fn config(&self) -> &Config {
        &self.network.config
    }

    /// What was planned, with the device's own count of weight bytes.
    pub fn memory_plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// The device.
    pub fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// Bytes read (and for states also written) to decode one token after `context` others: stored weights,
    /// one table row, the picked share of the experts, states, K/V. Without drafts.
    pub fn bytes_per_token(&self, context: usize) -> u64 {
        let (config, stored) = (&self.network.config, self.network.weights.stored);
        let experts = stored.experts / config.experts as u64 * config.picks as u64;
        let table_row = stored.table / config.vocabulary as u64;
        let kv = page_bytes(config, self.settings.kv, false) / device::PAGE_TOKENS as u64;
        stored.dense + experts + stored.head + table_row + 2 * state_bytes(config) + kv * context as u64
    }

    /// The recurrent and convolution state of a delta-net layer in a slot; `None` for attention layers.
    pub fn delta_state(&mut self, slot: SlotId, layer: usize) -> Result<Option<DeltaState>, ModelError> {
        self.sequence(slot)?;
        let ordinal = self.network.config.layers_of(MixerKind::DeltaNet).position(|index| index == layer);
        match ordinal {
            Some(ordinal) => {
                let pool = self.network.pools.states[ordinal];
                Ok(Some(self.device.state_read(pool, slot.0)?))
            }
            None => Ok(None),
        }
    }

    /// [`Model::step`] with embeddings for step rows that have no token (image rows): row of the step and
    /// `[hidden]` values, and with a look inside.
    pub fn step_with(
        &mut self,
        windows: &[Window],
        embeds: &[(usize, Vec<f64>)],
        probe: &mut dyn Probe,
    ) -> Result<usize, ModelError> {
        let settled = self.run(windows, embeds, probe)?;
        let mut now = Vec::new();
        for window in settled {
            // Decoded tokens settle one row each: they wait for the next draft and run together with it.
            if window.can_wait() && window.rows.len() < QUEUE_ROWS {
                self.sequences[window.slot as usize].put_back(window);
            } else {
                now.push(window);
            }
        }
        self.network.mtp_fill(&mut *self.device, now, self.network.scratch.hidden)?;
        Ok(self.logits_rows)
    }

    /// The main forward. Gives the rows it settles for the MTP layer, whose hidden states are in
    /// `scratch.hidden`, per committed window; none without MTP.
    pub(super) fn run(
        &mut self,
        windows: &[Window],
        embeds: &[(usize, Vec<f64>)],
        probe: &mut dyn Probe,
    ) -> Result<Vec<MtpWindow>, ModelError> {
        let (config, settings) = (&self.network.config, &self.settings);
        self.logits_rows = 0;
        let planned = plan(windows, &self.sequences, settings, config.vocabulary, embeds, config.hidden)?;
        self.network.forward(&mut *self.device, &planned.step, embeds, &planned.scored, probe)?;
        let settled = self.settle(windows, embeds)?;
        self.logits_rows = planned.scored.len();
        Ok(settled)
    }

    /// After a forward: committed windows advance their sequences, the others wait for [`Model::keep`].
    fn settle(
        &mut self,
        windows: &[Window],
        embeds: &[(usize, Vec<f64>)],
    ) -> Result<Vec<MtpWindow>, ModelError> {
        let mtp = self.spec.has_mtp;
        let mut settled = Vec::new();
        // Hidden states whose next token is open are kept: the last of a committed window, all of a draft
        // window.
        let (mut from, mut to) = (Vec::new(), Vec::new());
        let mut first = 0;
        for window in windows {
            let count = window.rows.len();
            let kept = if window.commit { 1 } else { count };
            from.extend(first + count - kept..first + count);
            let sequence = &mut self.sequences[window.slot.0 as usize];
            to.extend((0..kept).map(|at| sequence.next_place(at)));
            sequence.open = None;
            if !window.commit {
                sequence.open = Some(Open {
                    rows: window.rows.clone(),
                    embeds: (0..count).map(|at| next(&window.rows[at], first + at, embeds)).collect(),
                    parents: window.parents.clone(),
                    pages: window.pages.clone(),
                });
            } else if mtp {
                let next = |at: usize| next(&window.rows[at], first + at, embeds);
                settled.push(sequence.advance(first, &window.rows, &window.pages, next));
            } else {
                sequence.length += count;
            }
            first += count;
        }
        if let Some(scratch) = &self.network.scratch.mtp {
            self.device.copy_rows(self.network.scratch.hidden, &from, scratch.kept, &to)?;
        }
        Ok(settled)
    }

    pub(super) fn sequence(&mut self, slot: SlotId) -> Result<&mut Sequence, ModelError> {
        let slots = self.sequences.len();
        let sequence = self.sequences.get_mut(slot.0 as usize);
        sequence.ok_or_else(|| limit("slot", slot.0, format!("below {slots}")))
    }

    fn check_draws(&self, draws: &[Draw]) -> Result<(), ModelError> {
        match draws.iter().find(|draw| draw.row >= self.logits_rows) {
            None => Ok(()),
            Some(draw) => Err(limit("logits row", draw.row, format!("below {}", self.logits_rows))),
        }
    }

    /// Runs the queued MTP rows of these slots.
    pub(super) fn catch_up(&mut self, slots: &[SlotId]) -> Result<(), ModelError> {
        let mut windows = Vec::new();
        for &slot in slots {
            windows.extend(self.sequence(slot)?.take_queue());
        }
        self.network.mtp_fill(&mut *self.device, windows, self.network.scratch.hidden)
    }
}

fn next(row: &Row, at: usize, embeds: &[(usize, Vec<f64>)]) -> Next {
    match row.token {
        Some(token) => Next::Token(token),
        None => {
            let embed = embeds.iter().find(|(row, _)| *row == at);
            Next::Image(embed.expect("the plan checked every row without a token").1.clone())
        }
    }
}

impl Model for Qwen {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn step(&mut self, windows: &[Window]) -> Result<usize, ModelError> {
        self.step_with(windows, &[], &mut Unprobed)
    }

    fn draw(&mut self, draws: &[Draw]) -> Result<Vec<Drawn>, ModelError> {
        self.check_draws(draws)?;
        Ok(self.device.draw(self.network.scratch.logits, draws)?)
    }

    fn steps_ahead(&self) -> bool {
        self.device.draws_later()
    }

    fn draw_beside(&mut self, draws: &[Draw], meanwhile: &mut dyn FnMut()) -> Result<Vec<Drawn>, ModelError> {
        if !self.device.draws_later() {
            meanwhile();
            return self.draw(draws);
        }
        let queued = self.check_draws(draws).and_then(|()| {
            self.device.draw_later(self.network.scratch.logits, draws)?;
            Ok(self.device.start()?)
        });
        meanwhile();
        // What was queued is taken in any case, or the next call would get it.
        let drawn = self.device.drawn();
        queued?;
        Ok(drawn?)
    }

    fn read_logits(&mut self, row: usize, out: &mut [f32]) -> Result<(), ModelError> {
        if row >= self.logits_rows {
            return Err(limit("logits row", row, format!("below {}", self.logits_rows)));
        }
        if out.len() != self.spec.vocabulary {
            return Err(limit("length of a logits row", out.len(), self.spec.vocabulary));
        }
        Ok(self.device.read(self.network.scratch.logits, row, out)?)
    }

    fn keep(&mut self, slot: SlotId, rows: &[usize]) -> Result<(), ModelError> {
        let sequence = self.sequence(slot)?;
        let Some(open) = sequence.open.take() else {
            return Err(limit("rows to keep", "no window", "an uncommitted window of the slot"));
        };
        if !is_path(open.rows.len(), open.parents.as_deref(), rows) {
            let found = format!("{rows:?}");
            return Err(limit("rows to keep", found, "a path of the window from its root"));
        }
        let start = sequence.length;
        let pools = &self.network.pools;
        for &pool in &pools.states {
            self.device.state_keep(pool, slot.0, rows)?;
        }
        // Rows that are where they belong need no move. The MTP layer's K/V is made later.
        if rows.iter().enumerate().any(|(at, row)| at != *row) {
            self.keep_hidden(slot, rows)?;
            let layers = self.network.config.layers_of(MixerKind::Attention).count();
            for &pool in &self.network.pools.kv[..layers] {
                self.device.kv_keep(pool, &open.pages, start, rows)?;
            }
        }
        let mtp = self.spec.has_mtp;
        let sequence = self.sequence(slot)?;
        sequence.keep(open, rows, mtp);
        sequence.forget_queued();
        if sequence.queued() >= QUEUE_ROWS {
            self.catch_up(&[slot])?;
        }
        Ok(())
    }

    fn draft(&mut self, asks: &[DraftAsk]) -> Result<Vec<Draft>, ModelError> {
        self.draft_with(asks, &mut Unprobed)
    }

    fn expect_drafts(&mut self, slot: SlotId, expected: bool) -> Result<(), ModelError> {
        self.sequence(slot)?.expects_drafts = expected;
        Ok(())
    }

    fn save(&mut self, slot: SlotId, into: SnapshotId) -> Result<(), ModelError> {
        self.catch_up(&[slot])?;
        let to = self.snapshot_place(into)?;
        let sequence = self.sequence(slot)?;
        let Sequence { length, pending, base, .. } = *sequence;
        let snapshot = Snapshot { length, pending, base };
        let pending = sequence.pending_place();
        self.copy_states(slot.0, to)?;
        if let (Some(mtp), Some(pending)) = (&self.network.scratch.mtp, pending) {
            self.device.copy_rows(mtp.kept, &[pending], mtp.saved, &[into.0 as usize])?;
        }
        self.snapshots[into.0 as usize] = Some(snapshot);
        Ok(())
    }

    fn load(&mut self, slot: SlotId, from: Option<SnapshotId>) -> Result<(), ModelError> {
        self.sequence(slot)?;
        let sequence = match from {
            None => {
                for &pool in &self.network.pools.states {
                    self.device.state_clear(pool, slot.0)?;
                }
                Sequence::new(slot.0)
            }
            Some(id) => {
                let place = self.snapshot_place(id)?;
                let Snapshot { length, pending, base } = *self.saved(id)?;
                self.copy_states(place, slot.0)?;
                let sequence = Sequence::at(slot.0, length, pending, base);
                if let (Some(mtp), Some(pending)) = (&self.network.scratch.mtp, sequence.pending_place()) {
                    self.device.copy_rows(mtp.saved, &[id.0 as usize], mtp.kept, &[pending])?;
                }
                sequence
            }
        };
        *self.sequence(slot)? = sequence;
        Ok(())
    }

    fn export_snapshot(&mut self, from: SnapshotId) -> Result<Vec<u8>, ModelError> {
        self.write_snapshot(from)
    }

    fn import_snapshot(&mut self, into: SnapshotId, bytes: &[u8]) -> Result<(), ModelError> {
        self.read_snapshot(into, bytes)
    }

    fn export_page(&mut self, page: u32) -> Result<Vec<u8>, ModelError> {
        self.write_page(page)
    }

    fn import_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), ModelError> {
        self.read_page(page, bytes)
    }

    fn image_spec(&self) -> Option<ImageSpec> {
        self.images()
    }

    fn encode(&mut self, pictures: &[Arc<Picture>]) -> Result<(), ModelError> {
        self.encode_start(pictures)
    }

    fn encode_next(&mut self, rows: usize) -> Result<Option<Vec<Features>>, ModelError> {
        self.encode_rows(rows)
    }

    fn step_images(&mut self, windows: &[Window], images: &[ImageRow]) -> Result<usize, ModelError> {
        let wide = |image: &ImageRow| image.features.row(image.at).iter().map(|x| f64::from(*x)).collect();
        if let Some(image) = images.iter().find(|image| image.at >= image.features.rows()) {
            return Err(limit("image row", image.at, format!("below {}", image.features.rows())));
        }
        let embeds: Vec<(usize, Vec<f64>)> = images.iter().map(|image| (image.row, wide(image))).collect();
        self.step_with(windows, &embeds, &mut Unprobed)
    }
}

impl Qwen {
    /// Moves the kept hidden states of a path of the open window to the front of its places.
    fn keep_hidden(&mut self, slot: SlotId, path: &[usize]) -> Result<(), ModelError> {
        let sequence = &self.sequences[slot.0 as usize];
        let Some(mtp) = &self.network.scratch.mtp else { return Ok(()) };
        let from: Vec<usize> = path.iter().map(|&at| sequence.next_place(at)).collect();
        let to: Vec<usize> = (0..path.len()).map(|at| sequence.next_place(at)).collect();
        let rows: Vec<usize> = (0..path.len()).collect();
        // A row may go where a later one comes from: by way of another buffer.
        self.device.gather(mtp.kept, &from, mtp.hidden)?;
        Ok(self.device.copy_rows(mtp.hidden, &rows, mtp.kept, &to)?)
    }

    fn copy_states(&mut self, from: u32, to: u32) -> Result<(), ModelError> {
        let pools: &[StatePool] = &self.network.pools.states;
        for &pool in pools {
            self.device.state_copy(pool, from, to)?;
        }
        Ok(())
    }
}
