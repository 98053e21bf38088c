//! Which tensors a synthetic checkpoint stores, and what `config.json` says about them.

use quant::{Encoding, Zero};
use serde_json::{Map, Value, json};

use super::{Recipe, Synth, expert_module, values};
use crate::{Expected, Kind, Projection, Source, container::StoredDtype, folder::SIDECAR_FILE, names};

/// A tensor to be written.
pub(super) struct Stored {
    /// Name in the file.
    pub name: String,
    pub dtype: StoredDtype,
    pub shape: Vec<usize>,
    /// What its bytes are made of, in order.
    pub pieces: Vec<Piece>,
    /// It goes into the MTP sidecar.
    pub sidecar: bool,
}

impl Stored {
    /// Bytes of the tensor.
    pub(super) fn bytes(&self) -> u64 {
        self.pieces.iter().map(|p| p.bytes() as u64).sum()
    }
}

/// A contiguous part of a tensor.
pub(super) enum Piece {
    /// An array of a matrix, generated in chunks.
    Array { module: String, rows: usize, cols: usize, encoding: Encoding, array: Array },
    /// Bytes that are small enough to hold.
    Bytes(Vec<u8>),
}

/// Which array of a matrix.
#[derive(Clone, Copy)]
pub(super) enum Array {
    Codes,
    Scales,
    Biases,
}

impl Piece {
    /// Bytes of the piece.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Array { rows, cols, encoding, array, .. } => match (encoding, array) {
                (Encoding::Dense(dtype), _) => rows * cols * dtype.size(),
                (Encoding::Grouped(s), Array::Codes) => rows * cols / 8 * s.bits as usize,
                (Encoding::Grouped(s), _) => rows * (cols / s.group) * s.scales.size(),
            },
        }
    }

    /// Writes the bytes from `start` on into `out`.
    pub(super) fn fill(&self, seed: u64, start: usize, out: &mut [u8]) {
        match self {
            Self::Bytes(bytes) => out.copy_from_slice(&bytes[start..start + out.len()]),
            Self::Array { module, cols, encoding, array, .. } => match (*encoding, array) {
                (Encoding::Dense(_), _) => values::fill_dense(seed, module, *cols, start, out),
                (Encoding::Grouped(_), Array::Codes) => values::fill_codes(seed, module, start, out),
                (Encoding::Grouped(s), array) => {
                    let biases = matches!(array, Array::Biases);
                    values::fill_scales(seed, module, (*cols, s), biases, start, out);
                }
            },
        }
    }
}

fn dtype(name: &str) -> StoredDtype {
    StoredDtype::from_name(name).expect("a dtype of the container")
}

/// The spelling of a canonical name in files of the recipe.
fn spelling(recipe: Recipe, name: &str) -> String {
    if !recipe.is_mlx() {
        return name.to_owned();
    }
    for (prefix, replacement) in [
        (names::TEXT, "language_model.model."),
        (names::VISUAL, names::MLX_VISION),
        ("lm_head", "language_model.lm_head"),
    ] {
        if let Some(rest) = name.strip_prefix(prefix) {
            return format!("{replacement}{rest}");
        }
    }
    name.to_owned()
}

/// All tensors of the checkpoint, in the order of what is expected.
pub(super) fn tensors(synth: &Synth) -> Vec<Stored> {
    let mut all = Vec::new();
    for one in synth.expected() {
        match &one.kind {
            Kind::Matrix { rows, cols } => {
                matrix(
                    &mut all,
                    synth.recipe,
                    &one.name,
                    std::slice::from_ref(&one.name),
                    (*rows, *cols),
                    false,
                );
            }
            Kind::Experts { projection, experts, rows, cols } => {
                add_experts(&mut all, synth.recipe, &one.name, *projection, *experts, (*rows, *cols));
            }
            Kind::Vector { shape } => all.push(vector(synth, one, shape)),
            Kind::Norm { len } => {
                // MLX stores sums, Hugging Face offsets: both are exact in BF16.
                let add = if synth.recipe.is_mlx() { 1.0 } else { 0.0 };
                let values = values::norm_offsets(synth.seed, &one.name, *len);
                let values = values.into_iter().map(|w| w + add).collect();
                all.push(floats(synth, &one.name, vec![*len], values));
            }
        }
    }
    all
}

fn vector(synth: &Synth, one: &Expected, shape: &[usize]) -> Stored {
    let values = values::vector(synth.seed, &one.name, shape);
    match *shape {
        [channels, 1, taps] if synth.recipe.is_mlx() && one.name.ends_with("conv1d.weight") => {
            floats(synth, &one.name, vec![channels, taps, 1], values)
        }
        [o, c, t, h, w] if synth.recipe.is_mlx() && one.name.ends_with("patch_embed.proj.weight") => {
            let inner = t * h * w;
            let source = |at: usize| {
                let (outer, rest) = (at / (c * inner), at % (c * inner));
                outer * c * inner + (rest % c) * inner + rest / c
            };
            let moved = (0..values.len()).map(|at| values[source(at)]).collect();
            floats(synth, &one.name, vec![o, t, h, w, c], moved)
        }
        _ => floats(synth, &one.name, shape.to_vec(), values),
    }
}

fn floats(synth: &Synth, name: &str, shape: Vec<usize>, values: Vec<f32>) -> Stored {
    let kind = values::vector_dtype(name);
    let bytes = match kind {
        quant::Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        _ => values.iter().flat_map(|&v| quant::bf16_from_f32(v).to_le_bytes()).collect(),
    };
    let recipe = synth.recipe;
    Stored {
        name: spelling(recipe, name),
        dtype: dtype(kind.name()),
        shape,
        pieces: vec![Piece::Bytes(bytes)],
        sidecar: recipe.is_mlx() && name.starts_with(names::MTP),
    }
}

/// The tensors of one module, stacked over `modules` if there are several.
fn matrix(
    all: &mut Vec<Stored>,
    recipe: Recipe,
    name: &str,
    modules: &[String],
    (rows, cols): (usize, usize),
    expert: bool,
) {
    let encoding = recipe.encoding(&modules[0], expert, cols);
    let mut push = |part: &str, kind: &str, inner: usize, array: Array| {
        let piece = |m: &String| Piece::Array { module: m.clone(), rows, cols, encoding, array };
        let mut shape = vec![rows, inner];
        if name.contains(".switch_mlp.") {
            shape.insert(0, modules.len());
        }
        all.push(Stored {
            name: format!("{}.{part}", spelling(recipe, name)),
            dtype: dtype(kind),
            shape,
            pieces: modules.iter().map(piece).collect(),
            sidecar: recipe.is_mlx() && name.starts_with(names::MTP),
        });
    };
    match encoding {
        Encoding::Dense(kind) => push("weight", kind.name(), cols, Array::Codes),
        Encoding::Grouped(s) => {
            let (words, groups) = (cols * s.bits as usize / 32, cols / s.group);
            if s.zero == Zero::Affine {
                push("weight", "U32", words, Array::Codes);
                push("scales", s.scales.name(), groups, Array::Scales);
                push("biases", s.scales.name(), groups, Array::Biases);
                return;
            }
            push("weight_packed", "I32", words, Array::Codes);
            push("weight_scale", s.scales.name(), groups, Array::Scales);
            let numbers = [rows as i64, cols as i64].iter().flat_map(|n| n.to_le_bytes()).collect();
            all.push(Stored {
                name: format!("{}.weight_shape", spelling(recipe, name)),
                dtype: dtype("I64"),
                shape: vec![2],
                pieces: vec![Piece::Bytes(numbers)],
                sidecar: false,
            });
        }
    }
}

fn add_experts(
    all: &mut Vec<Stored>,
    recipe: Recipe,
    prefix: &str,
    projection: Projection,
    experts: usize,
    (rows, cols): (usize, usize),
) {
    let modules = |p| (0..experts).map(|e| expert_module(prefix, p, e)).collect::<Vec<_>>();
    if recipe.is_mlx() {
        let name = format!("{prefix}.switch_mlp.{}", projection.name());
        return matrix(all, recipe, &name, &modules(projection), (rows, cols), true);
    }
    if recipe == Recipe::W4a16 {
        for module in modules(projection) {
            matrix(all, recipe, &module, std::slice::from_ref(&module), (rows, cols), true);
        }
        return;
    }
    // Stacked: gate and up share a tensor, expert by expert.
    let (last, parts, factor) = match projection {
        Projection::Gate => ("gate_up_proj", &[Projection::Gate, Projection::Up][..], 2),
        Projection::Up => return,
        Projection::Down => ("down_proj", &[Projection::Down][..], 1),
    };
    let encoding = recipe.encoding(prefix, true, cols);
    let mut pieces = Vec::new();
    for expert in 0..experts {
        for &part in parts {
            let module = expert_module(prefix, part, expert);
            pieces.push(Piece::Array { module, rows, cols, encoding, array: Array::Codes });
        }
    }
    let name = format!("{prefix}.experts.{last}");
    let shape = vec![experts, factor * rows, cols];
    all.push(Stored { name, dtype: dtype("BF16"), shape, pieces, sidecar: false });
}

/// Name of the file beside the index.
pub(super) const SIDECAR: &str = SIDECAR_FILE;

/// `config.json` with the table the weights need.
pub(super) fn config(synth: &Synth) -> Value {
    let mut config = synth.config().clone();
    if let Some(map) = config.as_object_mut() {
        map.remove("quantization");
        map.remove("quantization_config");
    }
    if synth.recipe.is_mlx() {
        let table = mlx_table(synth);
        config["quantization"] = table.clone();
        config["quantization_config"] = table;
    } else if synth.recipe == Recipe::W4a16 {
        config["quantization_config"] = compressed_table(synth);
    }
    config
}

/// Every module of the checkpoint with its encoding; `switch_mlp` stands for all experts of a projection.
fn modules(synth: &Synth) -> impl Iterator<Item = (String, Encoding)> + '_ {
    synth.expected().iter().filter_map(|one| match one.kind {
        Kind::Matrix { cols, .. } => Some((one.name.clone(), synth.recipe.encoding(&one.name, false, cols))),
        Kind::Experts { projection, cols, .. } => {
            let name = format!("{}.switch_mlp.{}", one.name, projection.name());
            Some((name, synth.recipe.encoding(&one.name, true, cols)))
        }
        Kind::Vector { .. } | Kind::Norm { .. } => None,
    })
}

fn mlx_table(synth: &Synth) -> Value {
    let mut table = Map::new();
    table.insert("group_size".into(), 64.into());
    table.insert("bits".into(), 4.into());
    table.insert("mode".into(), "affine".into());
    for (name, encoding) in modules(synth) {
        let in_table = !name.starts_with(names::MTP) && !name.starts_with(names::VISUAL);
        let entry = match encoding {
            Encoding::Grouped(s) if s.bits != 4 => json!({"group_size": s.group, "bits": s.bits}),
            Encoding::Dense(_) => Value::Bool(false),
            Encoding::Grouped(_) => continue,
        };
        if in_table {
            table.insert(spelling(synth.recipe, &name), entry);
        }
    }
    Value::Object(table)
}

fn compressed_table(synth: &Synth) -> Value {
    let ignore: Vec<String> = modules(synth)
        .filter(|(name, encoding)| matches!(encoding, Encoding::Dense(_)) && !name.contains(".switch_mlp."))
        .map(|(name, _)| name)
        .collect();
    json!({
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {
            "targets": ["Linear"], "format": "pack-quantized",
            "input_activations": null, "output_activations": null,
            "weights": {"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group",
                "group_size": 128, "actorder": null, "dynamic": false},
        }},
        "ignore": ignore,
        "kv_cache_scheme": null,
        "quantization_status": "compressed",
    })
}
