//! Prepared pictures against the pixel values that transformers' own processor made of the same files.

// A call that fails fails its test.
#![allow(clippy::unwrap_used)]

use std::{fs, path::PathBuf};

use picture::{Limits, Prepared, Preprocessor, prepare};

/// Share of values that may be one level off; none may be further (`docs/model.md` section 10, step 3).
const SHARE_OFF: f64 = 0.005;

fn fixture(folder: &str, file: &str) -> Vec<u8> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures")).join(folder).join(file);
    fs::read(path).unwrap()
}

fn golden(file: &[u8], name: &str) -> Vec<f64> {
    let entries = checkpoint::parse_header(file).unwrap();
    let entry = entries.into_iter().find(|entry| entry.name == name).unwrap();
    let bytes = &file[entry.range.clone()];
    match entry.dtype.name() {
        "F32" => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect(),
        "I64" => bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
        other => panic!("{other}"),
    }
}

/// Levels as the golden file has them: `[patches, 3, frames, patch, patch]`.
fn levels(prepared: &Prepared, made: &Preprocessor) -> Vec<f64> {
    let area = made.patch * made.patch;
    let frames = |plane: &[u8]| (0..made.frames).flat_map(|_| plane.to_vec()).collect::<Vec<u8>>();
    prepared.patches.chunks_exact(area).flat_map(frames).map(f64::from).collect()
}

#[test]
fn pictures_are_those_of_the_published_processor() {
    for folder in ["tiny-a", "tiny-b"] {
        let json = serde_json::from_slice(&fixture(folder, "preprocessor_config.json")).unwrap();
        let made = Preprocessor::from_json(&json).unwrap();
        let goldens = fixture(folder, "goldens.safetensors");
        for image in ["image0", "image1"] {
            let file = fixture(folder, &format!("{image}.png"));
            let prepared = prepare(&file, &Limits::default(), [255; 3], &made).unwrap();
            let grid = golden(&goldens, &format!("{image}.grid_thw"));
            assert_eq!(prepared.grid.map(|n| n as f64), grid[..], "{folder} {image}");
            let values = golden(&goldens, &format!("{image}.pixel_values"));
            let found = levels(&prepared, &made);
            assert_eq!(found.len(), values.len());
            let (mut off, mut worst) = (0, 0.0f64);
            for (found, value) in found.iter().zip(&values) {
                let distance = (found - ((value * made.std[0] + made.mean[0]) * 255.0).round()).abs();
                off += usize::from(distance > 0.0);
                worst = worst.max(distance);
            }
            let share = off as f64 / values.len() as f64;
            println!("{folder} {image}: {off} of {} values off, worst {worst}", values.len());
            assert!(worst <= 1.0 && share <= SHARE_OFF, "{folder} {image}: {share}, worst {worst}");
        }
    }
}

#[test]
fn equal_pictures_have_equal_digests_and_others_do_not() {
    let made = Preprocessor { patch: 8, area_min: 512, area_max: 4096, ..Preprocessor::default() };
    let digest = |file: &str, made: &Preprocessor| {
        prepare(&fixture("tiny-a", file), &Limits::default(), [255; 3], made).unwrap().digest
    };
    assert_eq!(digest("image0.png", &made), digest("image0.png", &made));
    assert_ne!(digest("image0.png", &made), digest("image1.png", &made));
    let other = Preprocessor { mean: [0.4; 3], ..made.clone() };
    assert_ne!(digest("image0.png", &made), digest("image0.png", &other));
}
