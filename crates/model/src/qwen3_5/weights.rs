//! The model's weights on a device: typed handles, loaded tensor by tensor.

use checkpoint::{Expected, Kind, Projection, Source};
use device::{Device, ExpertsRef, MatrixRef, VectorRef, host_math};

use super::OpenError;
use super::config::{Config, MixerKind};
use super::inventory::{Parts, inventory};
use super::names::{self, HEAD, MTP, MTP_EMBED, MTP_HEAD, NORM, TABLE};
use super::tower::TowerWeights;

/// All weights of a text model.
#[derive(Debug)]
pub(super) struct Weights {
    /// Token table `[V, H]`.
    pub(super) table: MatrixRef,
    /// Head `[V, H]`; the token table itself where tied.
    pub(super) head: MatrixRef,
    /// Layers, first to last.
    pub(super) layers: Vec<Layer>,
    /// Final norm `[H]`.
    pub(super) norm: VectorRef,
    /// The MTP layer, where it is stored and wanted.
    pub(super) mtp: Option<Mtp>,
    /// The vision tower, where it is stored and wanted.
    pub(super) tower: Option<TowerWeights>,
    /// What the weights weigh.
    pub(super) stored: Stored,
}

/// One layer.
#[derive(Debug)]
pub(super) struct Layer {
    /// Norm before the mixer `[H]`.
    pub(super) input_norm: VectorRef,
    /// What mixes tokens.
    pub(super) mixer: Mixer,
    /// Norm before the experts `[H]`.
    pub(super) post_norm: VectorRef,
    /// Mixture of experts.
    pub(super) moe: Moe,
}

/// What mixes tokens in a layer.
#[derive(Debug)]
pub(super) enum Mixer {
    /// Gated DeltaNet.
    DeltaNet(DeltaNet),
    /// Gated attention.
    Attention(Attention),
}

/// A Gated DeltaNet mixer (`docs/model.md` section 4).
#[derive(Debug)]
pub(super) struct DeltaNet {
    /// Which delta-net layer this is: index of its state pool.
    pub(super) ordinal: usize,
    /// `[C, H]`.
    pub(super) qkv: MatrixRef,
    /// `[Hv Dv, H]`.
    pub(super) z: MatrixRef,
    /// `[Hv, H]`.
    pub(super) a: MatrixRef,
    /// `[Hv, H]`.
    pub(super) b: MatrixRef,
    /// `[C, taps]`.
    pub(super) taps: VectorRef,
    /// `exp(A_log)`, `[Hv]`.
    pub(super) decay: VectorRef,
    /// `[Hv]`.
    pub(super) dt_bias: VectorRef,
    /// Gated norm `[Dv]`.
    pub(super) norm: VectorRef,
    /// `[H, Hv Dv]`.
    pub(super) out: MatrixRef,
}

/// A gated attention mixer (`docs/model.md` section 5).
#[derive(Debug)]
pub(super) struct Attention {
    /// Which attention layer this is: index of its K/V pool.
    pub(super) ordinal: usize,
    /// Queries and gates, head by head, `[2 heads head_dim, H]`.
    pub(super) q: MatrixRef,
    /// `[kv_heads head_dim, H]`.
    pub(super) k: MatrixRef,
    /// `[kv_heads head_dim, H]`.
    pub(super) v: MatrixRef,
    /// `[head_dim]`.
    pub(super) q_norm: VectorRef,
    /// `[head_dim]`.
    pub(super) k_norm: VectorRef,
    /// `[H, heads head_dim]`.
    pub(super) o: MatrixRef,
}

/// A mixture of experts (`docs/model.md` section 7).
#[derive(Debug)]
pub(super) struct Moe {
    /// `[E, H]`.
    pub(super) router: MatrixRef,
    /// Routed experts.
    pub(super) experts: ExpertsRef,
    /// `[I, H]`.
    pub(super) shared_gate: MatrixRef,
    /// `[I, H]`.
    pub(super) shared_up: MatrixRef,
    /// `[H, I]`.
    pub(super) shared_down: MatrixRef,
    /// Gate of the shared expert `[1, H]`.
    pub(super) gate: MatrixRef,
}

/// The MTP layer (`docs/model.md` section 8).
#[derive(Debug)]
pub(super) struct Mtp {
    /// Its token table: its own copy, or the model's.
    pub(super) table: MatrixRef,
    /// Its head: its own copy, or the model's.
    pub(super) head: MatrixRef,
    /// Norm of the next token's embedding `[H]`.
    pub(super) embedding_norm: VectorRef,
    /// Norm of the hidden state `[H]`.
    pub(super) hidden_norm: VectorRef,
    /// `[H, 2H]`, embedding half first.
    pub(super) fc: MatrixRef,
    /// Norm before attention `[H]`.
    pub(super) input_norm: VectorRef,
    /// Its attention; the ordinal is that of the last K/V pool.
    pub(super) attention: Attention,
    /// Norm before the experts `[H]`.
    pub(super) post_norm: VectorRef,
    /// Its experts.
    pub(super) moe: Moe,
    /// Norm of the result `[H]`.
    pub(super) norm: VectorRef,
}

/// Stored bytes of the main model's weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// The token table.
    pub table: u64,
    /// The head, which is the table where tied.
    pub head: u64,
    /// Matrices of the layers that every token reads.
    pub dense: u64,
    /// Routed experts of all layers.
    pub experts: u64,
    /// The MTP layer.
    pub mtp: u64,
    /// Matrices of the vision tower.
    pub vision: u64,
}

/// Told after each tensor: parameters loaded, and all there are.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

impl Weights {
    /// Loads everything. Each matrix is handed to the device, which discards what it has copied.
    pub(super) fn load(
        config: &Config,
        parts: Parts,
        source: &dyn Source,
        device: &mut dyn Device,
        progress: Progress<'_>,
    ) -> Result<Self, OpenError> {
        let total = inventory(config, parts).iter().map(parameters).sum();
        let mut loader = Loader { config, source, device, progress, done: 0, total, bytes: 0 };
        let mut stored = Stored::default();
        let (rows, h) = (config.vocabulary, config.hidden);
        let table = loader.matrix(TABLE, rows, h)?;
        stored.table = loader.take_bytes();
        stored.head = stored.table;
        let mut head = table;
        if !config.tied(parts.head) {
            head = loader.matrix(HEAD, rows, h)?;
            stored.head = loader.take_bytes();
        }
        let mut layers = Vec::with_capacity(config.layers.len());
        let mut ordinals = [0, 0];
        for (index, kind) in config.layers.iter().enumerate() {
            let ordinal = &mut ordinals[usize::from(*kind == MixerKind::Attention)];
            layers.push(loader.layer(&names::Layer::text(index), *kind, *ordinal, &mut stored)?);
            *ordinal += 1;
        }
        let norm = loader.norm(NORM, h)?;
        let mtp = match parts.mtp {
            true => Some(loader.mtp(table, head, ordinals[1], &mut stored)?),
            false => None,
        };
        let tower = match config.vision.as_ref().filter(|_| parts.vision) {
            Some(vision) => Some(TowerWeights::load(&mut loader, vision)?),
            None => None,
        };
        stored.vision = loader.take_bytes();
        Ok(Self { table, head, layers, norm, mtp, tower, stored })
    }
}

/// Values of one expected thing.
fn parameters(expected: &Expected) -> u64 {
    match &expected.kind {
        // Optional copies are rare and would only make the bar stop short.
        _ if expected.optional => 0,
        Kind::Matrix { rows, cols } => *rows as u64 * *cols as u64,
        Kind::Experts { experts, rows, cols, .. } => *experts as u64 * *rows as u64 * *cols as u64,
        Kind::Vector { shape } => shape.iter().product::<usize>() as u64,
        Kind::Norm { len } => *len as u64,
    }
}

pub(super) struct Loader<'a> {
    config: &'a Config,
    pub(super) source: &'a dyn Source,
    pub(super) device: &'a mut dyn Device,
    progress: Progress<'a>,
    done: u64,
    total: u64,
    /// Stored bytes of dense matrices since [`Self::take_bytes`].
    bytes: u64,
}

impl Loader<'_> {
    pub(super) fn advance(&mut self, parameters: usize) {
        self.done = (self.done + parameters as u64).min(self.total);
        (self.progress)(self.done, self.total);
    }

    fn take_bytes(&mut self) -> u64 {
        std::mem::take(&mut self.bytes)
    }

    pub(super) fn matrix(&mut self, module: &str, rows: usize, cols: usize) -> Result<MatrixRef, OpenError> {
        let matrix = self.source.matrix(module, rows, cols)?;
        let handle = self.device.matrix(&matrix)?;
        self.bytes += matrix.bytes() as u64;
        self.advance(rows * cols);
        Ok(handle)
    }

    fn norm(&mut self, name: &str, len: usize) -> Result<VectorRef, OpenError> {
        let values = self.source.norm(name, len)?;
        self.advance(len);
        Ok(self.device.vector(&values)?)
    }

    pub(super) fn vector(
        &mut self,
        name: &str,
        shape: &[usize],
        map: impl Fn(f64) -> f64,
    ) -> Result<VectorRef, OpenError> {
        let values = self.source.vector(name, shape)?;
        self.advance(values.len());
        let values: Vec<f64> = values.into_iter().map(|value| map(f64::from(value))).collect();
        Ok(self.device.vector(&values)?)
    }

    fn layer(
        &mut self,
        layer: &names::Layer,
        kind: MixerKind,
        ordinal: usize,
        stored: &mut Stored,
    ) -> Result<Layer, OpenError> {
        let h = self.config.hidden;
        let input_norm = self.norm(&layer.input_norm(), h)?;
        let mixer = match kind {
            MixerKind::DeltaNet => Mixer::DeltaNet(self.delta_net(layer, ordinal)?),
            MixerKind::Attention => Mixer::Attention(self.attention(layer, ordinal)?),
        };
        let post_norm = self.norm(&layer.post_norm(), h)?;
        let (moe, expert_bytes) = self.moe(layer)?;
        stored.experts += expert_bytes;
        stored.dense += self.take_bytes();
        Ok(Layer { input_norm, mixer, post_norm, moe })
    }

    fn delta_net(&mut self, layer: &names::Layer, ordinal: usize) -> Result<DeltaNet, OpenError> {
        let (h, d) = (self.config.hidden, self.config.delta);
        let width = d.value_heads * d.value_dim;
        Ok(DeltaNet {
            ordinal,
            qkv: self.matrix(&layer.delta("in_proj_qkv"), d.channels(), h)?,
            z: self.matrix(&layer.delta("in_proj_z"), width, h)?,
            a: self.matrix(&layer.delta("in_proj_a"), d.value_heads, h)?,
            b: self.matrix(&layer.delta("in_proj_b"), d.value_heads, h)?,
            taps: self.vector(&layer.delta("conv1d.weight"), &[d.channels(), 1, d.conv_taps], |x| x)?,
            decay: self.vector(&layer.delta("A_log"), &[d.value_heads], host_math::exp)?,
            dt_bias: self.vector(&layer.delta("dt_bias"), &[d.value_heads], |x| x)?,
            norm: self.vector(&layer.delta("norm.weight"), &[d.value_dim], |x| x)?,
            out: self.matrix(&layer.delta("out_proj"), h, width)?,
        })
    }

    fn attention(&mut self, layer: &names::Layer, ordinal: usize) -> Result<Attention, OpenError> {
        let (h, a) = (self.config.hidden, self.config.attention);
        let (width, kv_width) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        Ok(Attention {
            ordinal,
            q: self.matrix(&layer.attention("q_proj"), 2 * width, h)?,
            k: self.matrix(&layer.attention("k_proj"), kv_width, h)?,
            v: self.matrix(&layer.attention("v_proj"), kv_width, h)?,
            q_norm: self.norm(&layer.attention("q_norm.weight"), a.head_dim)?,
            k_norm: self.norm(&layer.attention("k_norm.weight"), a.head_dim)?,
            o: self.matrix(&layer.attention("o_proj"), h, width)?,
        })
    }

    /// The experts of a layer, and the stored bytes of the routed ones.
    fn moe(&mut self, layer: &names::Layer) -> Result<(Moe, u64), OpenError> {
        let (h, inner) = (self.config.hidden, self.config.shared_width);
        let router = self.matrix(&layer.mlp("gate"), self.config.experts, h)?;
        let (experts, bytes) = self.experts(&layer.mlp_path())?;
        let moe = Moe {
            router,
            experts,
            shared_gate: self.matrix(&layer.mlp("shared_expert.gate_proj"), inner, h)?,
            shared_up: self.matrix(&layer.mlp("shared_expert.up_proj"), inner, h)?,
            shared_down: self.matrix(&layer.mlp("shared_expert.down_proj"), h, inner)?,
            gate: self.matrix(&layer.mlp("shared_expert_gate"), 1, h)?,
        };
        Ok((moe, bytes))
    }

    fn experts(&mut self, mlp: &str) -> Result<(ExpertsRef, u64), OpenError> {
        let (h, inner, count) = (self.config.hidden, self.config.expert_width, self.config.experts);
        let read = |projection, rows, cols| self.source.experts(mlp, projection, count, rows, cols);
        let gate = read(Projection::Gate, inner, h)?;
        let up = read(Projection::Up, inner, h)?;
        let down = read(Projection::Down, h, inner)?;
        let handle = self.device.experts(&gate, &up, &down)?;
        let all = || gate.iter().chain(&up).chain(&down);
        let bytes = all().map(|matrix| matrix.bytes() as u64).sum();
        self.advance(3 * count * inner * h);
        Ok((handle, bytes))
    }

    fn mtp(
        &mut self,
        table: MatrixRef,
        head: MatrixRef,
        ordinal: usize,
        stored: &mut Stored,
    ) -> Result<Mtp, OpenError> {
        let (h, layer) = (self.config.hidden, names::Layer::mtp());
        let fc = self.matrix(&format!("{MTP}fc"), h, 2 * h)?;
        let embedding_norm = self.norm(&format!("{MTP}pre_fc_norm_embedding.weight"), h)?;
        let hidden_norm = self.norm(&format!("{MTP}pre_fc_norm_hidden.weight"), h)?;
        let norm = self.norm(&format!("{MTP}norm.weight"), h)?;
        let input_norm = self.norm(&layer.input_norm(), h)?;
        let attention = self.attention(&layer, ordinal)?;
        let post_norm = self.norm(&layer.post_norm(), h)?;
        let (moe, expert_bytes) = self.moe(&layer)?;
        let table = self.copy_or(MTP_EMBED, table)?;
        let head = self.copy_or(MTP_HEAD, head)?;
        stored.mtp = self.take_bytes() + expert_bytes;
        Ok(Mtp { table, head, embedding_norm, hidden_norm, fc, input_norm, attention, post_norm, moe, norm })
    }

    /// A copy of the MTP layer's own where one is stored, else the model's.
    fn copy_or(&mut self, module: &str, shared: MatrixRef) -> Result<MatrixRef, OpenError> {
        match self.source.contains(module) {
            true => self.matrix(module, self.config.vocabulary, self.config.hidden),
            false => Ok(shared),
        }
    }
}
