//! Random weights with another model's geometry.

use std::path::{Path, PathBuf};

use checkpoint::{Expected, Kind, Recipe, Synth, parse_config};
use model::qwen3_5::{Config, EXPERTS_MAX, LAYERS_MAX, Parts, inventory};
use serde_json::{Map, Value};

use crate::error::{Exit, Failure, Result};
use crate::input;
use crate::origin::SynthSpec;

/// Largest config.json that is read, bytes.
const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// Files that make text of token ids and back.
const COMPANIONS: [&str; 6] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
];

/// Weights in memory, without a vision tower, which no run of them would use.
pub(crate) fn in_memory(spec: &SynthSpec) -> Result<Synth> {
    source(spec, false)
}

/// Weights for a folder, with all that the config describes.
pub(crate) fn for_folder(spec: &SynthSpec) -> Result<Synth> {
    source(spec, true)
}

fn source(spec: &SynthSpec, vision: bool) -> Result<Synth> {
    let recipe: Recipe = spec.scheme.parse().map_err(|error: String| {
        Failure::usage(format!("scheme: {error}")).hint("--scheme mlx-4bit, or ?scheme=mlx-4bit after synth:")
    })?;
    let mut json = read(&spec.config)?;
    resize(&mut json, spec)?;
    let config = Config::from_json(&json)?;
    let parts = Parts {
        head: !config.tied(false),
        mtp: config.mtp_layers > 0,
        vision: vision && config.vision.is_some(),
    };
    Ok(Synth::new(json, inventory(&config, parts), recipe, spec.seed))
}

fn read(path: &Path) -> Result<Value> {
    let bytes = input::file(path, CONFIG_BYTES_MAX).map_err(|failure| {
        Failure::new(Exit::Model, failure.message).hint("name a config.json of the family; configs/ has some")
    })?;
    parse_config(&bytes)?;
    serde_json::from_slice(&bytes)
        .map_err(|error| Failure::new(Exit::Model, format!("{}: {error}", path.display())))
}

/// Takes out what describes other files' quantization, and sets the wished numbers of layers and experts.
fn resize(json: &mut Value, spec: &SynthSpec) -> Result {
    let Value::Object(top) = json else {
        return Err(Failure::new(Exit::Model, format!("{}: an object is expected", spec.config.display())));
    };
    for key in ["quantization", "quantization_config"] {
        top.remove(key);
    }
    let text = match top.get_mut("text_config") {
        Some(Value::Object(text)) => text,
        _ => top,
    };
    for key in ["quantization", "quantization_config"] {
        text.remove(key);
    }
    if let Some(layers) = spec.layers {
        within("layers", layers, LAYERS_MAX)?;
        resize_layers(text, layers);
    }
    if let Some(experts) = spec.experts {
        within("experts", experts, EXPERTS_MAX)?;
        text.insert("num_experts".into(), experts.into());
        let picks = text.get("num_experts_per_tok").and_then(Value::as_u64);
        if picks.is_some_and(|picks| picks > experts as u64) {
            text.insert("num_experts_per_tok".into(), experts.into());
        }
    }
    Ok(())
}

/// The first `layers` layers; the pattern goes on where more are wished than there are.
fn resize_layers(text: &mut Map<String, Value>, layers: usize) {
    text.insert("num_hidden_layers".into(), layers.into());
    if let Some(Value::Array(types)) = text.get("layer_types").filter(|types| types[0].is_string()) {
        let types: Vec<Value> = types.iter().cycle().take(layers).cloned().collect();
        text.insert("layer_types".into(), types.into());
    }
}

fn within(what: &str, found: usize, most: usize) -> Result {
    if (1..=most).contains(&found) {
        return Ok(());
    }
    Err(Failure::usage(format!("{what} is {found}; 1 to {most} is possible")))
}

/// Files beside the config that `clary synth` copies.
pub(crate) fn companions(config: &Path) -> Vec<PathBuf> {
    let beside = COMPANIONS.iter().map(|name| config.with_file_name(name));
    beside.filter(|path| path.is_file()).collect()
}

/// Bytes of the weights in memory, to a few percent: what the memory plan needs before they exist.
pub(crate) fn bytes(synth: &Synth) -> u64 {
    synth.expected().iter().map(|one| bytes_of(one, synth.recipe())).sum()
}

fn bytes_of(one: &Expected, recipe: Recipe) -> u64 {
    let (values, is_expert) = match &one.kind {
        Kind::Matrix { rows, cols } => ((rows * cols) as u64, false),
        Kind::Experts { experts, rows, cols, .. } => ((experts * rows * cols) as u64, true),
        Kind::Vector { shape } => return shape.iter().product::<usize>() as u64 * 4,
        Kind::Norm { len } => return *len as u64 * 4,
    };
    // Eighths of a bit, scales and biases included.
    let eighths = match recipe {
        Recipe::Bf16 => 128,
        Recipe::Mlx4bit => 36,
        Recipe::Mlx3bitExperts if is_expert => 28,
        Recipe::Mlx3bitExperts => 36,
        Recipe::W4a16 if one.name.ends_with("embed_tokens") || one.name.ends_with("lm_head") => 128,
        Recipe::W4a16 => 33,
    };
    values * eighths / 64
}

#[cfg(test)]
mod tests {
    use checkpoint::Source;

    use super::*;

    fn spec(layers: usize, experts: usize) -> SynthSpec {
        SynthSpec {
            config: concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo/config.json").into(),
            scheme: "mlx-4bit".into(),
            layers: Some(layers),
            experts: Some(experts),
            seed: 1,
        }
    }

    #[test]
    fn geometry_follows_the_wish() {
        for (layers, experts) in [(2, 2), (12, 40)] {
            let synth = in_memory(&spec(layers, experts)).unwrap();
            let config = Config::from_json(synth.config()).unwrap();
            assert_eq!((config.layers.len(), config.experts), (layers, experts));
            assert_eq!(config.picks, experts.min(4));
            assert!(synth.config().get("quantization").is_none());
        }
        assert_eq!(in_memory(&spec(2000, 2)).unwrap_err().exit, Exit::Usage);
    }

    #[test]
    fn wrong_schemes_and_files() {
        let scheme = SynthSpec { scheme: "mlx-5bit".into(), ..spec(2, 2) };
        assert_eq!(in_memory(&scheme).unwrap_err().exit, Exit::Usage);
        let missing = SynthSpec { config: "nowhere/config.json".into(), ..spec(2, 2) };
        assert_eq!(in_memory(&missing).unwrap_err().exit, Exit::Model);
    }
}
