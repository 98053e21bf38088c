//! The network: weights, pools and scratch of one device, as handles. Its methods are the forward pass,
//! written once over `&mut dyn Device`: this file holds the way through the layers, `delta_net.rs`,
//! `attention.rs`, `moe.rs` and `mtp.rs` the parts.

use device::{Buffer, Device, DeviceError, KvPool, KvShape, Picks, Rotary, StatePool, Step};

use super::config::{Config, MixerKind};
use super::plan::Settings;
use super::rotary;
use super::scratch::Scratch;
use super::tower::{self, Tower};
use super::weights::{Mixer, Weights};

pub(super) type Result<T = ()> = std::result::Result<T, DeviceError>;

/// Looks at a forward pass from inside, for tests and comparisons. Every method does nothing by default;
/// reading a buffer waits for the device.
pub trait Probe {
    /// `x` `[rows, H]` holds the embeddings, image rows included.
    fn after_embed(&mut self, _device: &mut dyn Device, _x: Buffer, _rows: usize) -> Result {
        Ok(())
    }
    /// `x` `[rows, H]` is the residual stream after `layer`, whose router picked `picks`.
    fn after_layer(
        &mut self,
        _device: &mut dyn Device,
        _layer: usize,
        _x: Buffer,
        _picks: Picks,
        _rows: usize,
    ) -> Result {
        Ok(())
    }
    /// `hidden` `[rows, H]` is what the final norm gave.
    fn after_norm(&mut self, _device: &mut dyn Device, _hidden: Buffer, _rows: usize) -> Result {
        Ok(())
    }
    /// `logits` `[rows, V]` of the scored rows.
    fn after_head(&mut self, _device: &mut dyn Device, _logits: Buffer, _rows: usize) -> Result {
        Ok(())
    }
    /// `hidden` `[rows, H]` is what the MTP layer gave for the rows whose result was wanted, and `logits`
    /// `[rows, V]` their scores.
    fn after_mtp(
        &mut self,
        _device: &mut dyn Device,
        _hidden: Buffer,
        _logits: Buffer,
        _rows: usize,
    ) -> Result {
        Ok(())
    }
}

/// Looks at nothing.
#[derive(Clone, Copy, Debug)]
pub struct Unprobed;

impl Probe for Unprobed {}

/// Are these all `rows` rows in order, so that nobody need gather them?
pub(super) fn is_all(of: &[usize], rows: usize) -> bool {
    of.len() == rows && of.iter().enumerate().all(|(at, &row)| at == row)
}

/// K/V and state pools of all layers.
#[derive(Debug)]
pub(super) struct Pools {
    /// One per delta-net layer; places are slots, then snapshots.
    pub(super) states: Vec<StatePool>,
    /// One per attention layer, and last that of the MTP layer.
    pub(super) kv: Vec<KvPool>,
}

/// Everything a forward pass reads but the device itself.
#[derive(Debug)]
pub(super) struct Network {
    pub(super) config: Config,
    pub(super) weights: Weights,
    pub(super) pools: Pools,
    pub(super) scratch: Scratch,
    pub(super) picks: Picks,
    pub(super) rotary: Rotary,
    pub(super) rows_max: usize,
    /// What the vision tower works in, where there is one.
    pub(super) tower: Option<Tower>,
}

impl Network {
    /// Allocates pools and scratch beside loaded weights.
    pub(super) fn new(
        config: Config,
        weights: Weights,
        settings: &Settings,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let mtp = weights.mtp.is_some();
        let shape = KvShape {
            pages: settings.pages,
            kv_heads: config.attention.kv_heads,
            head_dim: config.attention.head_dim,
            form: settings.kv,
        };
        let places = settings.slots + settings.snapshots;
        let kv_pools = config.layers_of(MixerKind::Attention).count() + usize::from(mtp);
        let state_pools = config.layers_of(MixerKind::DeltaNet).count();
        let pools = Pools {
            states: (0..state_pools)
                .map(|_| device.state_pool(config.delta, places))
                .collect::<Result<_>>()?,
            kv: (0..kv_pools).map(|_| device.kv_pool(shape)).collect::<Result<_>>()?,
        };
        let scratch = Scratch::build(&config, settings, mtp, |rows, width| device.buffer(rows, width))?;
        let picks = device.picks(settings.rows_max, config.picks)?;
        let rotary = rotary::upload(&config.rope, settings.context, device)?;
        let tower = match config.vision.as_ref().filter(|_| weights.tower.is_some()) {
            Some(vision) => {
                let chunk = tower::chunk_rows(vision, settings.rows_max);
                Some(Tower::new(vision, settings.image_tokens, chunk, device)?)
            }
            None => None,
        };
        Ok(Self { config, weights, pools, scratch, picks, rotary, rows_max: settings.rows_max, tower })
    }

    /// One forward of the main model over `step`. `embeds` are the embedding rows of step rows without a
    /// token; `scored` the step rows that want logits. Leaves hidden states in `scratch.hidden` and logits,
    /// in the order of `scored`, in `scratch.logits`.
    pub(super) fn forward(
        &self,
        device: &mut dyn Device,
        step: &Step,
        embeds: &[(usize, Vec<f64>)],
        scored: &[usize],
        probe: &mut dyn Probe,
    ) -> Result {
        let (weights, s, eps) = (&self.weights, &self.scratch, self.config.eps);
        let rows = step.rows().len();
        device.begin(step)?;
        device.embed(weights.table, s.x)?;
        for (row, values) in embeds {
            device.write(s.x, *row, values)?;
        }
        probe.after_embed(device, s.x, rows)?;

        device.norm(s.x, rows, weights.layers[0].input_norm, eps, s.normed)?;
        for (index, layer) in weights.layers.iter().enumerate() {
            match &layer.mixer {
                Mixer::DeltaNet(mixer) => self.delta_net(device, mixer, rows)?,
                Mixer::Attention(mixer) => {
                    self.attend(device, mixer, rows)?;
                    device.linear(s.attention.attended, rows, &[(mixer.o, s.update)])?;
                }
            }
            device.add_norm(s.x, s.update, rows, layer.post_norm, eps, s.normed)?;
            self.moe(device, &layer.moe, rows)?;
            match weights.layers.get(index + 1) {
                Some(next) => device.add_norm(s.x, s.update, rows, next.input_norm, eps, s.normed)?,
                None => device.add_norm(s.x, s.update, rows, weights.norm, eps, s.hidden)?,
            }
            probe.after_layer(device, index, s.x, self.picks, rows)?;
        }
        probe.after_norm(device, s.hidden, rows)?;
        if !scored.is_empty() {
            let scored_rows = match is_all(scored, rows) {
                true => s.hidden,
                false => {
                    device.gather(s.hidden, scored, s.scored)?;
                    s.scored
                }
            };
            device.linear(scored_rows, scored.len(), &[(weights.head, s.logits)])?;
            probe.after_head(device, s.logits, scored.len())?;
        }
        Ok(())
    }
}
