//! Fixtures, and what the family's geometry asks of them.
#![allow(dead_code)] // each test binary uses a part

pub(crate) mod damage;

use std::{
    fs,
    path::{Path, PathBuf},
};

use checkpoint::{Expected, Kind, Projection};
use serde_json::Value;

/// Fixtures with goldens.
pub(crate) const FORMATS: [&str; 6] = [
    "mlx-4bit",
    "mlx-mixed-3bit",
    "mlx-other-widths",
    "autoround-w4a16",
    "compressed-tensors-w4a16",
    "compressed-tensors-llmcompressor",
];

/// A folder under `fixtures`.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures")).join(name)
}

/// A folder under `fixtures/formats`.
pub(crate) fn format(name: &str) -> PathBuf {
    fixture("formats").join(name)
}

/// Parses a JSON file.
pub(crate) fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).expect("readable")).expect("JSON")
}

/// A copy of the model files of a folder, to be damaged.
pub(crate) fn copy(source: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    for entry in fs::read_dir(source).expect("readable") {
        let entry = entry.expect("readable");
        if entry.file_type().expect("known").is_file() {
            fs::copy(entry.path(), dir.path().join(entry.file_name())).expect("copied");
        }
    }
    dir
}

/// Header and data of a safetensors file.
pub(crate) fn split(path: &Path) -> (serde_json::Map<String, Value>, Vec<u8>) {
    let bytes = fs::read(path).expect("readable");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let header = serde_json::from_slice(&bytes[8..8 + length]).expect("JSON");
    (header, bytes[8 + length..].to_vec())
}

/// Writes a safetensors file from a header text and data.
pub(crate) fn join(path: &Path, header: &str, data: &[u8]) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    fs::write(path, bytes).expect("written");
}

/// Writes a safetensors file from a header and data.
pub(crate) fn rewrite(path: &Path, header: &serde_json::Map<String, Value>, data: &[u8]) {
    join(path, &serde_json::to_string(header).expect("JSON"), data);
}

/// Everything the text model of `config` reads, and the MTP layer if `mtp`, and the vision tower if `vision`.
pub(crate) fn expected(config: &Value, mtp: bool, vision: bool) -> Vec<Expected> {
    let text = config.get("text_config").unwrap_or(config);
    let size = |key: &str| text[key].as_u64().expect(key) as usize;
    let mut list = Vec::new();
    let hidden = size("hidden_size");
    let base = "model.language_model.";
    matrix(&mut list, &format!("{base}embed_tokens"), size("vocab_size"), hidden, "the embedding");
    if config["tie_word_embeddings"] != true {
        matrix(&mut list, "lm_head", size("vocab_size"), hidden, "the head");
    }
    norm(&mut list, &format!("{base}norm.weight"), hidden, "the final norm");
    for (i, kind) in text["layer_types"].as_array().expect("layer_types").iter().enumerate() {
        let needed_by = format!("layer {i}");
        layer(&mut list, text, &format!("{base}layers.{i}."), kind == "full_attention", &needed_by);
    }
    if mtp {
        matrix(&mut list, "mtp.fc", hidden, 2 * hidden, "the MTP layer");
        for name in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"] {
            norm(&mut list, &format!("mtp.{name}.weight"), hidden, "the MTP layer");
        }
        layer(&mut list, text, "mtp.layers.0.", true, "the MTP layer");
    }
    if vision {
        tower(&mut list, &config["vision_config"]);
    }
    list
}

fn matrix(list: &mut Vec<Expected>, name: &str, rows: usize, cols: usize, needed_by: &str) {
    list.push(Expected::new(name, Kind::Matrix { rows, cols }, needed_by));
}

fn norm(list: &mut Vec<Expected>, name: &str, len: usize, needed_by: &str) {
    list.push(Expected::new(name, Kind::Norm { len }, needed_by));
}

fn vector(list: &mut Vec<Expected>, name: &str, shape: &[usize], needed_by: &str) {
    list.push(Expected::new(name, Kind::Vector { shape: shape.to_vec() }, needed_by));
}

fn layer(list: &mut Vec<Expected>, text: &Value, at: &str, attention: bool, needed_by: &str) {
    let size = |key: &str| text[key].as_u64().expect(key) as usize;
    let hidden = size("hidden_size");
    norm(list, &format!("{at}input_layernorm.weight"), hidden, needed_by);
    norm(list, &format!("{at}post_attention_layernorm.weight"), hidden, needed_by);
    if attention {
        let at = format!("{at}self_attn.");
        let (q, kv, dim) = (size("num_attention_heads"), size("num_key_value_heads"), size("head_dim"));
        matrix(list, &format!("{at}q_proj"), 2 * q * dim, hidden, needed_by);
        matrix(list, &format!("{at}k_proj"), kv * dim, hidden, needed_by);
        matrix(list, &format!("{at}v_proj"), kv * dim, hidden, needed_by);
        matrix(list, &format!("{at}o_proj"), hidden, q * dim, needed_by);
        norm(list, &format!("{at}q_norm.weight"), dim, needed_by);
        norm(list, &format!("{at}k_norm.weight"), dim, needed_by);
    } else {
        let at = format!("{at}linear_attn.");
        let (heads, dim) = (size("linear_num_value_heads"), size("linear_value_head_dim"));
        let keys = size("linear_num_key_heads") * size("linear_key_head_dim");
        let channels = 2 * keys + heads * dim;
        matrix(list, &format!("{at}in_proj_qkv"), channels, hidden, needed_by);
        matrix(list, &format!("{at}in_proj_z"), heads * dim, hidden, needed_by);
        matrix(list, &format!("{at}in_proj_a"), heads, hidden, needed_by);
        matrix(list, &format!("{at}in_proj_b"), heads, hidden, needed_by);
        matrix(list, &format!("{at}out_proj"), hidden, heads * dim, needed_by);
        let taps = size("linear_conv_kernel_dim");
        vector(list, &format!("{at}conv1d.weight"), &[channels, 1, taps], needed_by);
        vector(list, &format!("{at}A_log"), &[heads], needed_by);
        vector(list, &format!("{at}dt_bias"), &[heads], needed_by);
        vector(list, &format!("{at}norm.weight"), &[dim], needed_by);
    }
    let (experts, inner) = (size("num_experts"), size("moe_intermediate_size"));
    matrix(list, &format!("{at}mlp.gate"), experts, hidden, needed_by);
    matrix(list, &format!("{at}mlp.shared_expert_gate"), 1, hidden, needed_by);
    let shared = size("shared_expert_intermediate_size");
    for projection in Projection::ALL {
        let down = projection == Projection::Down;
        let shape = |inner| if down { (hidden, inner) } else { (inner, hidden) };
        let (rows, cols) = shape(shared);
        matrix(list, &format!("{at}mlp.shared_expert.{}", projection.name()), rows, cols, needed_by);
        let (rows, cols) = shape(inner);
        let kind = Kind::Experts { projection, experts, rows, cols };
        list.push(Expected::new(format!("{at}mlp"), kind, needed_by));
    }
}

fn tower(list: &mut Vec<Expected>, vision: &Value) {
    let size = |key: &str| vision[key].as_u64().expect(key) as usize;
    let (hidden, inner, at) = (size("hidden_size"), size("intermediate_size"), "model.visual.");
    let by = "the vision tower";
    let (patch, time) = (size("patch_size"), size("temporal_patch_size"));
    vector(
        list,
        &format!("{at}patch_embed.proj.weight"),
        &[hidden, size("in_channels"), time, patch, patch],
        by,
    );
    vector(list, &format!("{at}patch_embed.proj.bias"), &[hidden], by);
    matrix(list, &format!("{at}pos_embed"), size("num_position_embeddings"), hidden, by);
    let linear = |list: &mut Vec<Expected>, name: String, rows, cols| {
        matrix(list, &name, rows, cols, by);
        vector(list, &format!("{name}.bias"), &[rows], by);
    };
    let layer_norm = |list: &mut Vec<Expected>, name: String| {
        vector(list, &format!("{name}.weight"), &[hidden], by);
        vector(list, &format!("{name}.bias"), &[hidden], by);
    };
    for n in 0..size("depth") {
        let at = format!("{at}blocks.{n}.");
        layer_norm(list, format!("{at}norm1"));
        layer_norm(list, format!("{at}norm2"));
        linear(list, format!("{at}attn.qkv"), 3 * hidden, hidden);
        linear(list, format!("{at}attn.proj"), hidden, hidden);
        linear(list, format!("{at}mlp.linear_fc1"), inner, hidden);
        linear(list, format!("{at}mlp.linear_fc2"), hidden, inner);
    }
    let merged = hidden * size("spatial_merge_size").pow(2);
    layer_norm(list, format!("{at}merger.norm"));
    linear(list, format!("{at}merger.linear_fc1"), merged, merged);
    linear(list, format!("{at}merger.linear_fc2"), size("out_hidden_size"), merged);
}
