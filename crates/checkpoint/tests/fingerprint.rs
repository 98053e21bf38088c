//! A model's name changes with its config, its headers and its numbers, and with nothing else.
#![allow(clippy::unwrap_used)] // a failure here is a failure of the test

mod common;

use std::fs;

use checkpoint::Checkpoint;
use common::{copy, format, join, split};

#[test]
fn the_fingerprint_follows_the_files() {
    let source = format("mlx-4bit");
    let of = |dir: &std::path::Path| Checkpoint::open(dir).unwrap().fingerprint().unwrap();
    let known = of(&source);
    let same = copy(&source);
    fs::write(same.path().join("README.md"), "words").unwrap();
    assert_eq!(of(same.path()), known);

    let number = copy(&source);
    let path = number.path().join("model.safetensors");
    let path = if path.exists() { path } else { number.path().join("model-00001-of-00002.safetensors") };
    let (header, mut data) = split(&path);
    data[0] ^= 1;
    join(&path, &serde_json::to_string(&header).unwrap(), &data);
    let changed = of(number.path());
    assert_ne!(changed, known);

    let config = copy(&source);
    let path = config.path().join("config.json");
    let mut json = common::read_json(&path);
    json["text_config"]["rms_norm_eps"] = 1e-5.into();
    fs::write(&path, json.to_string()).unwrap();
    let other = of(config.path());
    assert!(other != known && other != changed);
}
