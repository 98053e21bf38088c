//! Damaging copies of fixtures, and what must be said about it.

use std::{fs, path::Path};

use checkpoint::{Checkpoint, Error, Verified};
use serde_json::{Map, Value};

use super::{copy, expected, format, read_json, rewrite, split};

pub(crate) const MAIN: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Every fixture with an index.
pub(crate) const INDEXED: [&str; 5] =
    ["mlx-4bit", "mlx-mixed-3bit", "mlx-other-widths", "autoround-w4a16", "compressed-tensors-w4a16"];

/// Opens, verifies and checks values against the geometry of the undamaged fixture.
pub(crate) fn load(dir: &Path, source: &Path) -> Result<Verified, Error> {
    let checkpoint = Checkpoint::open(dir)?;
    let sound = Checkpoint::open(source).expect("the fixture is sound");
    let list = expected(sound.config(), sound.has_mtp(), sound.has_vision());
    let verified = checkpoint.verify(&list)?;
    checkpoint.check_values(&list, &mut |_, _| {})?;
    Ok(verified)
}

/// Damages a copy of `source` and expects a message with all `words`.
pub(crate) fn refused(source: &Path, case: &str, words: &[&str], damage: impl FnOnce(&Path)) {
    let dir = copy(source);
    damage(dir.path());
    let error = load(dir.path(), source).map(|v| v.warnings).expect_err(case).to_string();
    for word in words {
        assert!(error.contains(word), "{}: {case}: {error:?} lacks {word:?}", source.display());
    }
}

pub(crate) fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = read_json(path);
    change(&mut value);
    fs::write(path, value.to_string()).expect("written");
}

pub(crate) fn edit_config(dir: &Path, change: impl FnOnce(&mut Value)) {
    edit(&dir.join("config.json"), change);
}

pub(crate) fn edit_header(path: &Path, change: impl FnOnce(&mut Map<String, Value>)) {
    let (mut header, data) = split(path);
    change(&mut header);
    rewrite(path, &header, &data);
}

pub(crate) fn edit_bytes(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).expect("readable");
    change(&mut bytes);
    fs::write(path, bytes).expect("written");
}

/// Tensors of a fixture to damage.
pub(crate) struct Names {
    /// The scales of some output projection.
    pub scales: String,
    /// The first norm.
    pub norm: String,
}

pub(crate) fn names(source: &Path) -> Names {
    let index = read_json(&source.join(INDEX));
    let mut all: Vec<&String> = index["weight_map"].as_object().expect("a map").keys().collect();
    all.sort();
    let find = |ends: &[&str]| {
        let found = all.iter().find(|n| ends.iter().any(|e| n.ends_with(e))).expect("it is there");
        found.to_string()
    };
    Names {
        scales: find(&["o_proj.scales", "o_proj.weight_scale"]),
        norm: find(&["layers.0.input_layernorm.weight"]),
    }
}

pub(crate) fn all_indexed(case: impl Fn(&Path, &Names)) {
    for name in INDEXED {
        let source = format(name);
        case(&source, &names(&source));
    }
}

/// A rename in the header alone: fixtures without an index.
pub(crate) fn renamed(source: &Path, case: &str, words: &[&str], change: impl Fn(&mut Map<String, Value>)) {
    refused(source, case, words, |dir| edit_header(&dir.join(MAIN), &change));
}

pub(crate) fn rename(header: &mut Map<String, Value>, from: &str, to: &str) {
    let entry = header.remove(from).unwrap_or_else(|| panic!("{from} is there"));
    header.insert(to.to_owned(), entry);
}
