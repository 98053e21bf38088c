//! `info`, `check` and `synth`.

use std::fs;
use std::path::Path;

use crate::{clary, demo, project, tiny};

#[test]
fn info_tells_what_a_model_is() {
    let info = clary(&["info", &demo()]).code(0);
    for fact in ["qwen3_5_moe", "MLX", "6 gated delta net, 2 attention", "12, 4 per token", "sha256:", "cpu"]
    {
        assert!(info.out.contains(fact), "{fact:?} is not in {}", info.out);
    }
    let json = clary(&["info", &demo(), "--json"]).code(0).json();
    assert_eq!(json["layers"], 8);
    assert_eq!(json["mtp"], true);
    assert_eq!(json["vision"], true);
    assert_eq!(json["devices"][0]["runs"], true);
    assert!(json["memory"]["total"].as_u64().unwrap() > json["memory"]["weights"].as_u64().unwrap());
    for format in fs::read_dir(project("fixtures/formats")).unwrap() {
        let format = format.unwrap().path().display().to_string();
        clary(&["info", &format]).code(0);
    }
    let synth = format!("synth:{}/config.json?scheme=bf16&layers=2&experts=4", tiny());
    assert_eq!(clary(&["info", &synth, "--json"]).code(0).json()["experts"], 4);
}

#[test]
fn check_prints_one_line_for_every_format() {
    for model in ["models/demo", "fixtures/tiny-a", "fixtures/tiny-b", "fixtures/formats/mlx-mixed-3bit"] {
        let check = clary(&["check", &project(model)]).code(0);
        assert!(check.out.starts_with("ok: "), "{check:?}");
    }
    let json = clary(&["check", &project("fixtures/formats/autoround-w4a16"), "--json"]).code(0).json();
    assert_eq!(json["ok"], true);
}

/// A copy of the demo model's weights and config.
fn copy(to: &Path) {
    for name in ["config.json", "model.safetensors", "model.safetensors.index.json", "mtp-4bit.safetensors"] {
        fs::copy(Path::new(&demo()).join(name), to.join(name)).expect("there is room");
    }
}

#[test]
fn a_truncated_file_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    copy(dir.path());
    let weights = dir.path().join("model.safetensors");
    let file = fs::OpenOptions::new().write(true).open(&weights).unwrap();
    file.set_len(fs::metadata(&weights).unwrap().len() - 1).unwrap();
    let folder = dir.path().display().to_string();
    for args in [&["check", &folder][..], &["info", &folder], &["run", &folder, "question"]] {
        clary(args).code(3).err_has("model.safetensors: truncated").err_has("hint: ");
    }
}

#[test]
fn a_value_that_is_not_finite_is_refused_by_tensor() {
    let dir = tempfile::tempdir().unwrap();
    copy(dir.path());
    let path = dir.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let (name, entry) = header
        .as_object()
        .unwrap()
        .iter()
        .find(|(name, _)| name.contains("layers.1.") && name.ends_with("switch_mlp.up_proj.scales"))
        .expect("the demo model has experts");
    let at = 8 + length + entry["data_offsets"][0].as_u64().unwrap() as usize;
    // The first BF16 scale becomes NaN.
    bytes[at..at + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let module = name.trim_end_matches(".scales");
    clary(&["check", &dir.path().display().to_string()]).code(3).err_has(module).err_has("not finite");
}

#[test]
fn synthetic_folders_load_and_equal_synthetic_models() {
    let dir = tempfile::tempdir().unwrap();
    let config = format!("{}/config.json", tiny());
    let ids = dir.path().join("ids.json").display().to_string();
    fs::write(&ids, "[1, 2, 3, 4, 5]").unwrap();
    for scheme in ["bf16", "mlx-4bit", "mlx-3bit-experts", "w4a16"] {
        let folder = dir.path().join(scheme).display().to_string();
        let args = ["--layers", "4", "--experts", "4", "--seed", "3"];
        let args = [&["synth", "--like", &config, &folder, "--scheme", scheme], &args[..]].concat();
        clary(&args).code(0).out_has("GB/s");
        clary(&["check", &folder]).code(0);
        let model = format!("synth:{config}?scheme={scheme}&layers=4&experts=4&seed=3");
        let written = clary(&["logits", &folder, "--ids", &ids]).code(0);
        let made = clary(&["logits", &model, "--ids", &ids]).code(0);
        assert_eq!(written.out, made.out, "{scheme}");
        clary(&args).code(2).err_has("is not empty");
    }
    let folder = dir.path().join("other").display().to_string();
    clary(&["synth", "--like", &config, &folder, "--scheme", "gguf"]).code(2).err_has("w4a16");
}
