//! What a model asks of its weights: the vocabulary shared by checkpoints, synthetic weights and the model.

use std::fmt;

use quant::Matrix;
use serde_json::Value;

use crate::Error;

/// File formats, by the tool that writes them (`docs/formats.md` section 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Plain floats.
    Bf16,
    /// MLX affine.
    Mlx,
    /// AutoRound in GPTQ packing.
    AutoRound,
    /// compressed-tensors pack-quantized.
    CompressedTensors,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "BF16",
            Self::Mlx => "MLX",
            Self::AutoRound => "AutoRound",
            Self::CompressedTensors => "compressed-tensors",
        })
    }
}

/// One of the three matrices of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Projection {
    /// `gate_proj`, `[intermediate, hidden]`.
    Gate,
    /// `up_proj`, `[intermediate, hidden]`.
    Up,
    /// `down_proj`, `[hidden, intermediate]`.
    Down,
}

impl Projection {
    /// All three, in the order they are stored.
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];

    /// The published name of the module.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gate => "gate_proj",
            Self::Up => "up_proj",
            Self::Down => "down_proj",
        }
    }
}

/// What kind of thing an [`Expected`] name is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A linear layer's weight `[rows, cols]` = `[out, in]`; the name is the module path without `.weight`.
    Matrix {
        /// Output features.
        rows: usize,
        /// Input features.
        cols: usize,
    },
    /// One projection of all routed experts; the name is the path of the layer's `mlp`.
    Experts {
        /// Which of the three.
        projection: Projection,
        /// How many experts.
        experts: usize,
        /// Output features of one expert.
        rows: usize,
        /// Input features of one expert.
        cols: usize,
    },
    /// Floats of this shape, in Hugging Face axis order; the name is the full tensor name.
    Vector {
        /// The shape.
        shape: Vec<usize>,
    },
    /// An RMSNorm weight of the offset kind; the name is the full tensor name.
    Norm {
        /// Length.
        len: usize,
    },
}

/// One thing the model reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Canonical name: see [`Kind`] for what it names.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// The part of the model that reads it, for messages: `layer 3`, `the head`.
    pub needed_by: String,
    /// It may be absent; where it is present it is checked all the same.
    pub optional: bool,
}

impl Expected {
    /// A required thing.
    pub fn new(name: impl Into<String>, kind: Kind, needed_by: impl Into<String>) -> Self {
        Self { name: name.into(), kind, needed_by: needed_by.into(), optional: false }
    }

    /// The same, allowed to be absent.
    pub fn optional(self) -> Self {
        Self { optional: true, ..self }
    }
}

/// Where weights come from: a [`crate::Checkpoint`] on disk, or synthetic ones in memory.
///
/// Names are the canonical Hugging Face ones (`model.language_model.`, `lm_head`, `mtp.`, `model.visual.`),
/// whatever the files say.
pub trait Source {
    /// The parsed `config.json`.
    fn config(&self) -> &Value;
    /// Is this module (path without `.weight`) there, in any form?
    fn contains(&self, module: &str) -> bool;
    /// A linear layer's weight, `[rows, cols]`.
    fn matrix(&self, module: &str, rows: usize, cols: usize) -> Result<Matrix, Error>;
    /// One projection of every routed expert of the layer whose `mlp` is `prefix`, in expert order.
    fn experts(
        &self,
        prefix: &str,
        projection: Projection,
        experts: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<Matrix>, Error>;
    /// Floats of any dtype, widened exactly, in Hugging Face axis order. The name is the full tensor name.
    fn vector(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error>;
    /// An RMSNorm weight of the offset kind as the multiplier `1 + w`, exact in f64.
    fn norm(&self, name: &str, len: usize) -> Result<Vec<f64>, Error>;
    /// Are MTP tensors there?
    fn has_mtp(&self) -> bool;
}
