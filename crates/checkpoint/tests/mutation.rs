//! Random damage to headers, indexes and configs gives a checkpoint or an error, never a panic.

mod common;

use std::{fs, path::Path};

use checkpoint::{Checkpoint, Expected, Kind, parse_config, parse_header, parse_index};
use common::{copy, expected, fixture, format};

/// A small generator with a fixed start: every run tries the same damage.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % limit.max(1)
    }
}

/// Fragments that are special to JSON, to shapes, or to this format.
const FRAGMENTS: [&str; 22] = [
    "0",
    "-1",
    "18446744073709551615",
    "9223372036854775808",
    "1e308",
    "4294967296",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "\"../x\"",
    "\"BF16\"",
    "\"U32\"",
    "\"I32\"",
    "[0,0]",
    "[18446744073709551615,2]",
    "[1,1,1,1,1,1,1,1,1]",
    ",",
    "}",
    "\\u0000",
    "\"data_offsets\":[0,8],",
];

/// One random edit of a text: a flipped bit, a cut, a replaced number or value, a doubled or dropped piece.
fn damage(random: &mut Random, text: &mut Vec<u8>) {
    if text.is_empty() {
        return;
    }
    let at = random.below(text.len());
    match random.below(6) {
        0 => text[at] ^= 1 << random.below(8),
        1 => text[at] = random.below(256) as u8,
        2 => text.truncate(at),
        3 => {
            // Replace the next value: from after a colon or bracket to the next comma or bracket.
            let start = (at..text.len()).find(|&i| b":[,".contains(&text[i])).map_or(text.len(), |i| i + 1);
            let end = (start..text.len()).find(|&i| b",]}".contains(&text[i])).unwrap_or(text.len());
            text.splice(start..end, FRAGMENTS[random.below(FRAGMENTS.len())].bytes());
        }
        4 => {
            let end = (at + random.below(80)).min(text.len());
            let piece = text[at..end].to_vec();
            text.splice(at..at, piece);
        }
        _ => {
            let end = (at + random.below(80)).min(text.len());
            text.drain(at..end);
        }
    }
}

/// Opens, verifies and reads everything; only panics are failures.
fn try_load(dir: &Path, list: &[Expected]) -> bool {
    let Ok(checkpoint) = Checkpoint::open(dir) else { return false };
    let _ = checkpoint.report();
    let sound = checkpoint.verify(list).is_ok();
    let _ = checkpoint.check_values(list, &mut |_, _| {});
    for one in list {
        match &one.kind {
            Kind::Matrix { rows, cols } => drop(checkpoint.matrix(&one.name, *rows, *cols)),
            Kind::Experts { projection, experts, rows, cols } => {
                drop(checkpoint.experts(&one.name, *projection, *experts, *rows, *cols));
            }
            Kind::Vector { shape } => {
                drop(checkpoint.vector(&one.name, shape));
                drop(checkpoint.tensor_f32(&one.name));
            }
            Kind::Norm { len } => drop(checkpoint.norm(&one.name, *len)),
        }
    }
    sound
}

fn header_length(file: &[u8]) -> usize {
    u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize
}

/// Damages `file` of a copy of `source` again and again, always from the original.
fn hammer(source: &Path, file: &str, rounds: usize) {
    let dir = copy(source);
    let sound = Checkpoint::open(source).expect("the fixture is sound");
    let list = expected(sound.config(), sound.has_mtp(), sound.has_vision());
    let original = fs::read(dir.path().join(file)).expect("readable");
    let mut random = Random(file.len() as u64);
    let mut accepted = 0;
    for _ in 0..rounds {
        let mut bytes = original.clone();
        let edits = 1 + random.below(3);
        if file.ends_with(".json") {
            (0..edits).for_each(|_| damage(&mut random, &mut bytes));
        } else {
            let length = header_length(&bytes);
            let mut header = bytes[8..8 + length].to_vec();
            (0..edits).for_each(|_| damage(&mut random, &mut header));
            // Mostly a length that fits, so that damage reaches the parser.
            let mut stated = header.len() as u64;
            if random.below(20) == 0 {
                stated ^= 1 << random.below(64);
            }
            let data = bytes.split_off(8 + length);
            bytes = [&stated.to_le_bytes()[..], &header, &data].concat();
            if random.below(10) == 0 {
                bytes.truncate(random.below(bytes.len()));
            }
        }
        fs::write(dir.path().join(file), bytes).expect("written");
        accepted += usize::from(try_load(dir.path(), &list));
    }
    assert!(accepted < rounds, "{file}: some damage must be noticed");
}

#[test]
fn damaged_folders_never_panic() {
    for name in ["mlx-4bit", "autoround-w4a16", "compressed-tensors-w4a16"] {
        let source = format(name);
        for file in ["model.safetensors", "model.safetensors.index.json", "config.json"] {
            hammer(&source, file, 100);
        }
    }
    hammer(&format("mlx-mixed-3bit"), "mtp-4bit.safetensors", 100);
    hammer(&fixture("tiny-a"), "model.safetensors", 100);
}

#[test]
fn damaged_texts_never_panic() {
    let dir = format("autoround-w4a16");
    let mut random = Random(7);
    let original = |file: &str| fs::read(dir.join(file)).expect("readable");
    let (config, index) = (original("config.json"), original("model.safetensors.index.json"));
    let file = original("model_extra_tensors.safetensors");
    let header = &file[8..8 + header_length(&file)];
    for _ in 0..4000 {
        let edits = 1 + random.below(4);
        let mut edited = |text: &[u8]| {
            let mut text = text.to_vec();
            (0..edits).for_each(|_| damage(&mut random, &mut text));
            text
        };
        let _ = parse_config(&edited(&config));
        let _ = parse_index(&edited(&index));
        let header = edited(header);
        let _ = parse_header(&[&(header.len() as u64).to_le_bytes()[..], &header, &file[..64]].concat());
    }
}
