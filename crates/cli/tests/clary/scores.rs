//! `logits` and `bench`.

use std::fs;

use crate::{Ran, clary, clary_with, demo, project, tiny};

/// A folder with a file of token ids.
fn ids(text: &str) -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().expect("there is room");
    let path = dir.path().join("ids.json");
    fs::write(&path, text).expect("there is room");
    let path = path.display().to_string();
    (dir, path)
}

/// Token ids below the vocabularies of all small models.
fn text_of(tokens: usize) -> String {
    let ids: Vec<String> = (0..tokens).map(|at| (at * 37 % 1999).to_string()).collect();
    format!("[{}]", ids.join(", "))
}

fn sha(ran: Ran) -> String {
    ran.code(0).json()["sha256"].as_str().expect("a digest").to_owned()
}

#[test]
fn chunks_and_threads_change_no_byte() {
    let (dir, ids) = ids(&text_of(70));
    let out = dir.path().join("a.safetensors").display().to_string();
    let again = dir.path().join("b.safetensors").display().to_string();
    let demo = demo();
    let base = ["logits", &demo, "--ids", &ids, "--json", "--mtp"];
    let first = clary(&[&base[..], &["--out", &out, "--threads", "1"]].concat()).code(0).json();
    assert_eq!((first["rows"].as_u64(), first["vocab"].as_u64()), (Some(70), Some(3072)));
    for args in [&["--chunk", "1"][..], &["--chunk", "33", "--threads", "2"], &["--threads", "3"]] {
        let other = clary(&[&base[..], args, &["--out", &again]].concat()).code(0).json();
        assert_eq!(other["sha256"], first["sha256"], "{args:?}");
        assert_eq!(other["mtp_sha256"], first["mtp_sha256"], "{args:?}");
        assert!(fs::read(&again).unwrap() == fs::read(&out).unwrap(), "{args:?}");
    }
    assert_eq!(sha(clary(&["logits", &demo, "--ids", &ids, "--json"])), first["sha256"]);
    assert!(!dir.path().join("a.safetensors.partial").exists());
    let bytes = fs::read(&out).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    assert_eq!(header["logits"]["shape"], serde_json::json!([70, 3072]));
    assert_eq!(header["mtp_logits"]["shape"], serde_json::json!([69, 3072]));
    assert_eq!(bytes.len(), 8 + length + (70 + 69) * 3072 * 4);
}

/// Logits of a file written by `clary logits`, rows of the vocabulary joined.
fn values(path: &std::path::Path) -> Vec<f32> {
    let bytes = fs::read(path).expect("it was written");
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let value = |word: &[u8]| f32::from_le_bytes(word.try_into().expect("4 bytes"));
    bytes[start..].chunks_exact(4).map(value).collect()
}

#[test]
fn the_reference_device_is_near_but_not_equal() {
    let (dir, ids) = ids(&text_of(12));
    let tiny = tiny();
    let score = |name: &str, device: &str| {
        let out = dir.path().join(name);
        let path = out.display().to_string();
        clary(&["logits", &tiny, "--ids", &ids, "--out", &path, "--device", device]).code(0);
        values(&out)
    };
    let (cpu, reference) = (score("cpu", "cpu"), score("reference", "reference"));
    assert_eq!(cpu.len(), 12 * 2048);
    let (mut error, mut size) = (0.0, 0.0);
    for (a, b) in cpu.iter().zip(&reference) {
        error += f64::from(a - b).powi(2);
        size += f64::from(*b).powi(2);
    }
    let relative = (error / size).sqrt();
    assert!(relative > 0.0 && relative < 0.05, "{relative}");
}

#[test]
fn wrong_ids_are_usage_errors_with_a_position() {
    let demo = demo();
    for (text, wanted) in [
        ("[]", "empty"),
        ("[1, 3072]", "[1]: token 3072"),
        ("[1, -1]", "[1]: -1"),
        ("[1.5]", "[0]: 1.5"),
        ("[[1]]", "[0]: an array"),
        ("[1, 2", "line 1"),
        ("{\"ids\": [1]}", "an object"),
        ("nonsense", "line 1"),
    ] {
        let (_dir, ids) = ids(text);
        clary(&["logits", &demo, "--ids", &ids]).code(2).err_has(wanted);
        clary_with(&["logits", &demo, "--ids", "-"], text).code(2).err_has("stdin").err_has(wanted);
    }
    clary(&["logits", &demo, "--ids", "no/such/file"]).code(2).err_has("no/such/file");
    let (dir, long) = ids(&text_of(9));
    clary(&["logits", &demo, "--ids", &long, "--ctx", "8"]).code(2).err_has("9 token ids");
    let folder = dir.path().display().to_string();
    clary(&["logits", &demo, "--ids", &long, "--out", &folder]).code(2).err_has("is a folder");
    let nowhere = dir.path().join("no/file").display().to_string();
    clary(&["logits", &demo, "--ids", &long, "--out", &nowhere]).code(2).err_has("no/file");
}

#[test]
fn too_little_memory_is_said_with_a_budget() {
    let (_dir, ids) = ids("[1]");
    let failed = clary(&["logits", &demo(), "--ids", &ids, "--memory-limit", "1MiB"]).code(4);
    failed.err_has("weights").err_has("would fit: --memory-limit");
    let args = ["run", &demo(), "a", "--ctx", "4096", "--kv", "int16", "--memory-limit", "25MiB"];
    let failed = clary(&args);
    assert!(matches!(failed.code, Some(0 | 4)), "{failed:?}");
}

#[test]
fn models_without_text_files_can_be_scored() {
    let (_dir, ids) = ids("[1, 2, 3]");
    let config = project("configs/synth-small/config.json");
    let model = format!("synth:{config}?layers=1&experts=4");
    let ran = clary(&["run", &model, "a"]).code(3);
    ran.err_has("tokenizer.json");
    assert_eq!(clary(&["logits", &model, "--ids", &ids, "--json"]).code(0).json()["vocab"], 248_320);
}

#[test]
fn bench_hashes_are_equal_for_every_thread_count() {
    let tiny = tiny();
    let args = ["bench", &tiny, "--prompt", "5,70", "--tokens", "4", "--threads", "1,2", "--reps", "2"];
    let json = clary(&[&args[..], &["--json"]].concat()).code(0).json();
    let cases = json["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 4);
    assert_eq!(cases[0]["token_hash"], cases[2]["token_hash"]);
    assert_eq!(cases[1]["token_hash"], cases[3]["token_hash"]);
    assert_ne!(cases[0]["token_hash"], cases[1]["token_hash"]);
    for key in ["min", "median", "max"] {
        assert!(cases[0]["decode_tokens_per_s"][key].as_f64().unwrap() > 0.0);
    }
    assert!(json["machine"][0]["read_bytes_per_s"].as_f64().unwrap() > 0.0);
}

#[test]
fn streams_and_drafts_change_no_token() {
    let demo = demo();
    let base = ["bench", &demo, "--prompt", "20", "--tokens", "12", "--reps", "2", "--streams", "1,3"];
    let json = clary(&[&base[..], &["--json"]].concat()).code(0).json();
    let crowds = json["crowds"].as_array().unwrap();
    for (crowd, (streams, drafts)) in crowds.iter().zip([(1, "on"), (1, "off"), (3, "on"), (3, "off")]) {
        assert!(crowd["streams"] == streams && crowd["drafts"] == drafts, "{crowd}");
    }
    assert_eq!(crowds.len(), 4);
    assert_eq!(crowds[0]["token_hash"], crowds[1]["token_hash"]);
    assert_eq!(crowds[2]["token_hash"], crowds[3]["token_hash"]);
    assert_ne!(crowds[0]["token_hash"], crowds[2]["token_hash"]);
    assert_eq!(crowds[3]["tokens"], 36);
    clary(&["bench", &demo, "--drafts", "on"]).code(2).err_has("--streams");
}
