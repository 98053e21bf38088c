//! Fixtures and reports for the tests of this crate.

use std::path::{Path, PathBuf};
use std::time::Instant;

use checkpoint::Checkpoint;
use contracts::{Error, Folder, Report, Subject, random_text};
use device::KvForm;
use model::qwen3_5::Config;

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

/// Random ids for a model folder.
pub(crate) fn text(name: &str, tokens: usize) -> Vec<u32> {
    let checkpoint = Checkpoint::open(&folder(name)).expect("model folders open");
    let config = Config::from_json(checkpoint.config()).expect("their configuration is valid");
    random_text(config.vocabulary, tokens, 1)
}

/// Runs contracts over a subject, prints the report and fails on a difference.
#[track_caller]
pub(crate) fn assert_held(
    check: impl Fn(&dyn Subject, &[u32]) -> Result<Report, Error>,
    subject: &dyn Subject,
    text: &[u32],
) {
    let start = Instant::now();
    let report = check(subject, text).unwrap_or_else(|error| panic!("{}: {error}", subject.name()));
    println!("{report}  {} tokens, {:.1} s", text.len(), start.elapsed().as_secs_f64());
    assert!(report.held(), "{report}");
}
