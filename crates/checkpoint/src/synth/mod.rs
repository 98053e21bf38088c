//! Synthetic weights: random canonical tensors of any geometry, in memory or as a checkpoint folder.
//!
//! Every tensor has its own counter-based stream, keyed by seed and name, so what one holds depends neither
//! on the order of reading nor on which others exist, and a folder written by [`write`] holds what [`Synth`]
//! gives.

mod layout;
mod stream;
mod values;
mod write;

use std::{collections::HashMap, fmt, str::FromStr, thread};

use quant::{Dtype, Encoding, Matrix, Scheme, Zero};
use serde_json::Value;

use self::values::Arrays;
use crate::{Error, Expected, Kind, Problem, Projection, Source, checkpoint::lacks, names};

pub use write::write;

/// Threads that make the experts of a layer.
const THREADS_MAX: usize = 16;

/// How synthetic weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Recipe {
    /// Plain BF16 in Hugging Face layout, experts stacked.
    Bf16,
    /// MLX affine: 4 bits in groups of 64, routers and shared-expert gates 8 bits.
    Mlx4bit,
    /// The same with routed experts in 3 bits.
    Mlx3bitExperts,
    /// compressed-tensors: 4 bits in groups of 128 with F16 scales; embedding, head and gates in BF16.
    W4a16,
}

impl Recipe {
    /// All recipes.
    pub const ALL: [Self; 4] = [Self::Bf16, Self::Mlx4bit, Self::Mlx3bitExperts, Self::W4a16];

    /// The name on a command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Mlx4bit => "mlx-4bit",
            Self::Mlx3bitExperts => "mlx-3bit-experts",
            Self::W4a16 => "w4a16",
        }
    }

    /// Is this one of the recipes in MLX layout?
    pub(crate) const fn is_mlx(self) -> bool {
        matches!(self, Self::Mlx4bit | Self::Mlx3bitExperts)
    }

    /// How a matrix is stored. `expert`: it belongs to a routed expert.
    pub(crate) fn encoding(self, module: &str, expert: bool, cols: usize) -> Encoding {
        let dense = Encoding::Dense(Dtype::Bf16);
        let is_gate = module.ends_with(".mlp.gate") || module.ends_with(".shared_expert_gate");
        if module.starts_with(names::VISUAL) {
            return dense;
        }
        let (bits, group, zero, scales) = match self {
            Self::Bf16 => return dense,
            Self::Mlx4bit | Self::Mlx3bitExperts => {
                // An MTP sidecar has 4-bit experts whatever the main model has.
                let narrow = self == Self::Mlx3bitExperts && expert && !module.starts_with(names::MTP);
                let bits = if is_gate { 8 } else { 4 - u8::from(narrow) };
                (bits, 64, Zero::Affine, Dtype::Bf16)
            }
            Self::W4a16 => {
                let plain = ["embed_tokens", "lm_head", "mtp.fc"].iter().any(|end| module.ends_with(end));
                if is_gate || plain {
                    return dense;
                }
                (4, 128, Zero::Symmetric, Dtype::F16)
            }
        };
        if !cols.is_multiple_of(group) {
            return dense;
        }
        Encoding::Grouped(Scheme { bits, group, zero, scales })
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Recipe {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|r| r.name() == text)
            .ok_or_else(|| format!("{text:?} is no recipe: {} are", Self::ALL.map(Self::name).join(", ")))
    }
}

/// Random weights in memory.
#[derive(Clone, Debug)]
pub struct Synth {
    config: Value,
    expected: Vec<Expected>,
    kinds: HashMap<String, Vec<Kind>>,
    recipe: Recipe,
    seed: u64,
}

impl Synth {
    /// Weights for everything in `expected`, stored as `recipe` says. `config` is a `config.json` without
    /// quantization.
    pub fn new(config: Value, expected: Vec<Expected>, recipe: Recipe, seed: u64) -> Self {
        let mut kinds: HashMap<String, Vec<Kind>> = HashMap::new();
        for one in &expected {
            kinds.entry(one.name.clone()).or_default().push(one.kind.clone());
        }
        Self { config, expected, kinds, recipe, seed }
    }

    /// What the weights are made for.
    pub fn expected(&self) -> &[Expected] {
        &self.expected
    }

    /// How they are stored.
    pub fn recipe(&self) -> Recipe {
        self.recipe
    }

    /// Is `kind` what was declared under this name?
    fn check(&self, name: &str, kind: Kind) -> Result<(), Error> {
        let kinds = self.kinds.get(name).map_or(&[][..], Vec::as_slice);
        if kinds.contains(&kind) {
            return Ok(());
        }
        match kinds.first() {
            None => Err(lacks(name, kind)),
            Some(declared) => {
                let expected = format!("{kind:?} asked for, {declared:?}");
                Err(Problem::Shape { tensor: name.to_owned(), found: Vec::new(), expected }.into())
            }
        }
    }

    fn generate(&self, module: &str, rows: usize, cols: usize) -> Result<Matrix, Error> {
        let encoding = self.recipe.encoding(module, false, cols);
        let mut arrays = Arrays::zeros(rows, cols, encoding);
        arrays.fill(self.seed, module, cols, encoding);
        whole(module, rows, cols, encoding, arrays)
    }
}

/// The matrix that these arrays hold.
fn whole(
    module: &str,
    rows: usize,
    cols: usize,
    encoding: Encoding,
    arrays: Arrays,
) -> Result<Matrix, Error> {
    let Arrays { codes, scales, biases } = arrays;
    Matrix::new(rows, cols, encoding, codes.into(), scales.into(), biases.into()).map_err(|_| {
        let expected = "a matrix that is neither empty nor too large".to_owned();
        Problem::Shape { tensor: module.to_owned(), found: vec![rows, cols], expected }.into()
    })
}

/// Path of one projection of one expert.
fn expert_module(prefix: &str, projection: Projection, expert: usize) -> String {
    format!("{prefix}.experts.{expert}.{}", projection.name())
}

impl Source for Synth {
    fn config(&self) -> &Value {
        &self.config
    }

    fn contains(&self, module: &str) -> bool {
        let is_experts = |kinds: &Vec<Kind>| kinds.iter().any(|k| matches!(k, Kind::Experts { .. }));
        self.kinds.get(module).is_some_and(|kinds| kinds.iter().any(|k| !matches!(k, Kind::Experts { .. })))
            || self.kinds.contains_key(&format!("{module}.weight"))
            || module.strip_suffix(".experts").is_some_and(|mlp| self.kinds.get(mlp).is_some_and(is_experts))
    }

    fn matrix(&self, module: &str, rows: usize, cols: usize) -> Result<Matrix, Error> {
        self.check(module, Kind::Matrix { rows, cols })?;
        self.generate(module, rows, cols)
    }

    fn experts(
        &self,
        prefix: &str,
        projection: Projection,
        experts: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<Matrix>, Error> {
        self.check(prefix, Kind::Experts { projection, experts, rows, cols })?;
        let mut all: Vec<(String, Encoding, Arrays)> = (0..experts)
            .map(|expert| {
                let module = expert_module(prefix, projection, expert);
                let encoding = self.recipe.encoding(&module, true, cols);
                (module, encoding, Arrays::zeros(rows, cols, encoding))
            })
            .collect();
        let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
        // Every expert has a stream of its own, so the threads cannot change what it holds.
        thread::scope(|scope| {
            for part in all.chunks_mut(experts.div_ceil(threads).max(1)) {
                scope.spawn(move || {
                    for (module, encoding, arrays) in part {
                        arrays.fill(self.seed, module, cols, *encoding);
                    }
                });
            }
        });
        all.into_iter()
            .map(|(module, encoding, arrays)| whole(&module, rows, cols, encoding, arrays))
            .collect()
    }

    fn vector(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
        self.check(name, Kind::Vector { shape: shape.to_vec() })?;
        Ok(values::vector(self.seed, name, shape))
    }

    fn norm(&self, name: &str, len: usize) -> Result<Vec<f64>, Error> {
        self.check(name, Kind::Norm { len })?;
        Ok(values::norm_offsets(self.seed, name, len).into_iter().map(|w| 1.0 + f64::from(w)).collect())
    }

    fn has_mtp(&self) -> bool {
        self.expected.iter().any(|e| e.name.starts_with(names::MTP))
    }
}
