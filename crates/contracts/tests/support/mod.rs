//! Fixtures and reports for the tests of this crate.

// Every test program compiles this module and uses its own part of it.
#![allow(dead_code)]

pub(crate) mod wrapped;

use std::path::{Path, PathBuf};
use std::time::Instant;

use contracts::{Folder, Report, Subject, check, random_text};
use device::KvForm;

/// Both K/V forms.
pub(crate) const FORMS: [KvForm; 2] = [KvForm::Int16, KvForm::Int8];

/// Complete small models of every format.
pub(crate) const FORMATS: [&str; 6] = [
    "mlx-4bit",
    "mlx-mixed-3bit",
    "mlx-other-widths",
    "autoround-w4a16",
    "compressed-tensors-w4a16",
    "compressed-tensors-llmcompressor",
];

/// A folder of the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)
}

/// A model folder by a short name: `demo`, `tiny-a`, `tiny-b` or a format.
pub(crate) fn folder(name: &str) -> PathBuf {
    match name {
        "demo" => repository("models/demo"),
        "tiny-a" | "tiny-b" => repository("fixtures").join(name),
        _ => repository("fixtures/formats").join(name),
    }
}

/// A model folder on a device with a K/V form.
pub(crate) fn subject(name: &str, device: &str, kv: KvForm) -> Folder {
    Folder { kv, ..Folder::new(folder(name), device) }
}

/// The vocabulary rows of a model folder.
pub(crate) fn vocabulary(name: &str) -> usize {
    if name == "demo" { 3072 } else { 2048 }
}

/// A text for a model folder.
pub(crate) fn text(name: &str, tokens: usize) -> Vec<u32> {
    random_text(vocabulary(name), tokens, 1)
}

/// Runs every contract over a subject, prints the report and fails on a difference.
#[track_caller]
pub(crate) fn assert_held(subject: &dyn Subject, text: &[u32]) -> Report {
    let start = Instant::now();
    let report = check(subject, text).unwrap_or_else(|error| panic!("{}: {error}", subject.name()));
    println!("{report}  {} tokens, {:.1} s", text.len(), start.elapsed().as_secs_f64());
    assert!(report.held(), "{report}");
    report
}
