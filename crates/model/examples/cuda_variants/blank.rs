//! Weights of zeros in any geometry and form of storage: which kernels run, and what the host spends on them,
//! does not depend on values.

use std::sync::Arc;

use checkpoint::{Error, Projection, Recipe, Source, Synth};
use model::qwen3_5::{Config, Parts, inventory};
use quant::{Bytes, Dtype, Encoding, Matrix, Scheme, Zero};
use serde_json::Value;

use crate::subjects::Result;

/// Forms in which checkpoints are stored (`docs/formats.md`), as they decide kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Form {
    /// Plain BF16.
    Plain,
    /// MLX affine in groups of 64, routers and shared-expert gates 8 bits, an MTP sidecar of 4.
    Mlx { bits: u8, expert_bits: u8 },
    /// AutoRound or compressed-tensors, symmetric in groups of 128; the embedding, gates and `mtp.fc` stay
    /// BF16, and modules whose names have one of these parts.
    Packed { bits: u8, scales: Dtype, left: &'static [&'static str] },
}

/// What packed checkpoints leave in BF16 (`docs/formats.md`, AutoRound; published ones differ module by
/// module).
pub(crate) const LEFT: [&[&str]; 4] = [
    &["lm_head"],
    &["lm_head", "in_proj_a", "in_proj_b"],
    &["lm_head", "in_proj_a", "in_proj_b", "shared_expert"],
    // With its head quantized and the MTP layer as it was.
    &["in_proj_a", "in_proj_b", "shared_expert", "mtp."],
];

impl Form {
    /// How a matrix is stored. `expert`: it belongs to a routed expert.
    fn encoding(self, module: &str, expert: bool, cols: usize) -> Encoding {
        let dense = Encoding::Dense(Dtype::Bf16);
        let is_gate = module.ends_with(".mlp.gate") || module.ends_with(".shared_expert_gate");
        let scheme = match self {
            _ if module.starts_with("model.visual.") => return dense,
            Self::Plain => return dense,
            Self::Mlx { bits, expert_bits } => {
                let bits = match () {
                    () if is_gate => 8,
                    () if module.starts_with("mtp.") => 4,
                    () if expert => expert_bits,
                    () => bits,
                };
                Scheme { bits, group: 64, zero: Zero::Affine, scales: Dtype::Bf16 }
            }
            Self::Packed { bits, scales, left } => {
                let stays = |part: &&str| module.contains(*part);
                if is_gate || ["embed_tokens", "mtp.fc"].iter().chain(left).any(stays) {
                    return dense;
                }
                Scheme { bits, group: 128, zero: Zero::Symmetric, scales }
            }
        };
        if cols.is_multiple_of(scheme.group) { Encoding::Grouped(scheme) } else { dense }
    }
}

/// The weights.
pub(crate) struct Blank {
    /// Knows which tensors there are, and has the small ones.
    like: Synth,
    form: Form,
    zeros: Arc<Vec<u8>>,
}

impl Blank {
    /// Weights for the geometry of a `config.json`.
    pub(crate) fn new(mut json: Value, form: Form) -> Result<Self> {
        if let Some(top) = json.as_object_mut() {
            top.remove("quantization");
            top.remove("quantization_config");
        }
        let config = Config::from_json(&json)?;
        let parts =
            Parts { head: !config.tied(false), mtp: config.mtp_layers > 0, vision: config.vision.is_some() };
        let values = config.vocabulary * config.hidden;
        let like = Synth::new(json, inventory(&config, parts), Recipe::Bf16, 1);
        Ok(Self { like, form, zeros: Arc::new(vec![0; 4 * values]) })
    }

    fn zeros(&self, count: usize) -> Bytes {
        Bytes::new(self.zeros.clone(), 0..count).expect("no matrix is larger than the token table")
    }

    fn blank(&self, rows: usize, cols: usize, encoding: Encoding) -> Matrix {
        let matrix = match encoding {
            Encoding::Dense(dtype) => {
                Matrix::dense(rows, cols, dtype, self.zeros(rows * cols * dtype.size()))
            }
            Encoding::Grouped(scheme) => {
                let floats = rows * cols / scheme.group * scheme.scales.size();
                let biases = if scheme.zero == Zero::Affine { floats } else { 0 };
                let codes = self.zeros(rows * cols / 8 * scheme.bits as usize);
                Matrix::new(rows, cols, encoding, codes, self.zeros(floats), self.zeros(biases))
            }
        };
        matrix.expect("bytes of the shape")
    }
}

impl Source for Blank {
    fn config(&self) -> &Value {
        self.like.config()
    }

    fn contains(&self, module: &str) -> bool {
        self.like.contains(module)
    }

    fn matrix(&self, module: &str, rows: usize, cols: usize) -> std::result::Result<Matrix, Error> {
        Ok(self.blank(rows, cols, self.form.encoding(module, false, cols)))
    }

    fn experts(
        &self,
        prefix: &str,
        _projection: Projection,
        experts: usize,
        rows: usize,
        cols: usize,
    ) -> std::result::Result<Vec<Matrix>, Error> {
        let encoding = self.form.encoding(prefix, true, cols);
        Ok((0..experts).map(|_| self.blank(rows, cols, encoding)).collect())
    }

    fn vector(&self, name: &str, shape: &[usize]) -> std::result::Result<Vec<f32>, Error> {
        self.like.vector(name, shape)
    }

    fn norm(&self, name: &str, len: usize) -> std::result::Result<Vec<f64>, Error> {
        self.like.norm(name, len)
    }

    fn has_mtp(&self) -> bool {
        self.like.has_mtp()
    }
}
