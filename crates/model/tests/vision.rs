//! The vision tower against an independent float64 implementation, and its bits in every batch and slice.

// A call that fails fails its test.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use model::qwen3_5::Settings;
use model::{Features, ImageRow, Logits, Model, Picture, Row, SlotId, place_pictures};
use support::*;

/// Goldens are float64; levels and image rows cross the seam in f32, 6e-8.
const EXACT: f64 = 1e-6;
/// Activations of dense towers are not rounded; K/V and queries are.
const ROUNDED: f64 = 1e-3;

/// The published normalization: mean and deviation 0.5.
fn levels() -> Box<[[f32; 256]; 3]> {
    Box::new([std::array::from_fn(|level| ((level as f64 / 255.0 - 0.5) / 0.5) as f32); 3])
}

/// A golden picture: `[patches, 3, frames, patch, patch]` values back to the levels of one frame.
fn golden(gold: &Goldens, image: usize, patch: usize, frames: usize) -> Picture {
    let grid = gold.get(&format!("image{image}.grid_thw"));
    let values = gold.get(&format!("image{image}.pixel_values"));
    let level = |x: &f64| ((x * 0.5 + 0.5) * 255.0).round() as u8;
    let planes = values.chunks_exact(patch * patch).step_by(frames);
    Picture {
        grid: [0, 1, 2].map(|axis| grid[axis] as usize),
        patches: planes.flatten().map(level).collect(),
        levels: levels(),
        digest: [image as u8; 32],
    }
}

/// A picture of noise.
fn noise(rows: usize, columns: usize, patch: usize, seed: u64) -> Picture {
    let mut state = seed;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let patches = (0..rows * columns * 3 * patch * patch).map(|_| next()).collect();
    Picture { grid: [1, rows, columns], patches, levels: levels(), digest: [seed as u8; 32] }
}

fn pictured() -> Settings {
    Settings { image_tokens: 256, ..settings() }
}

/// Features of pictures encoded together, `rows` rows of work a call.
fn encode(model: &mut dyn Model, pictures: &[Picture], rows: usize) -> Vec<Features> {
    let pictures: Vec<Arc<Picture>> = pictures.iter().cloned().map(Arc::new).collect();
    model.encode(&pictures).unwrap();
    loop {
        if let Some(features) = model.encode_next(rows).unwrap() {
            return features;
        }
    }
}

fn wide(features: &Features) -> Vec<f64> {
    features.values.iter().map(|x| f64::from(*x)).collect()
}

#[test]
fn towers_match_their_goldens() {
    for (on, bound) in [(On::Reference, EXACT), (On::Cpu, ROUNDED)] {
        for folder in ["tiny-a", "tiny-b"] {
            let mut qwen = open_fixture(on, folder, pictured());
            let gold = Goldens::read(folder, "goldens.safetensors");
            for image in [0, 1] {
                let picture = golden(&gold, image, 8, 2);
                let features = encode(&mut qwen, &[picture], 1000);
                let expected = gold.get(&format!("image{image}.embeds"));
                assert_eq!(features[0].width, qwen.config().hidden);
                let what = format!("{folder} image{image} on {on:?}");
                println!("{what}: {:.2e}", distance(&wide(&features[0]), expected));
                close(&what, &wide(&features[0]), expected, bound);
            }
        }
    }
}

#[test]
fn company_and_slices_change_no_bit() {
    for on in On::ALL {
        let mut qwen = open_fixture(on, "tiny-b", pictured());
        let pictures = [noise(4, 6, 8, 1), noise(18, 22, 8, 2), noise(2, 2, 8, 3), noise(10, 30, 8, 4)];
        let alone: Vec<Features> =
            pictures.iter().flat_map(|one| encode(&mut qwen, std::slice::from_ref(one), 10_000)).collect();
        for rows in [1, 300, 10_000] {
            assert!(encode(&mut qwen, &pictures, rows) == alone, "together on {on:?}");
        }
        let turned: Vec<Picture> = pictures.iter().rev().cloned().collect();
        let found: Vec<Features> = encode(&mut qwen, &turned, 5).into_iter().rev().collect();
        assert!(found == alone, "another order on {on:?}");
    }
}

#[test]
fn formats_agree_on_their_towers() {
    let mut first = None;
    for format in ["mlx-4bit", "mlx-other-widths", "autoround-w4a16", "compressed-tensors-w4a16"] {
        let mut qwen = open_fixture(On::Cpu, &format!("formats/{format}"), pictured());
        let features = encode(&mut qwen, &[noise(4, 8, 4, 9)], 100);
        assert!(features[0].values.iter().all(|x| x.is_finite()));
        let first = first.get_or_insert_with(|| features.clone());
        assert!(*first == features, "{format}");
    }
    let qwen = open_fixture(On::Cpu, "formats/mlx-mixed-3bit", pictured());
    assert_eq!(qwen.image_spec(), None);
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut qwen = open_fixture(On::Cpu, "tiny-a", pictured());
    let spec = qwen.image_spec().unwrap();
    assert_eq!((spec.tokens_max, spec.patch, spec.merge), (256, 8, 2));
    let check = |qwen: &mut dyn Model, pictures: Vec<Picture>, words: &str| {
        let pictures: Vec<_> = pictures.into_iter().map(Arc::new).collect();
        let error = qwen.encode(&pictures).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert!(qwen.encode_next(1).is_err());
    };
    check(&mut qwen, Vec::new(), "pictures encoded together: 0");
    check(&mut qwen, vec![noise(3, 2, 8, 1)], "grid of a picture");
    check(&mut qwen, vec![Picture { grid: [2, 2, 2], ..noise(4, 2, 8, 1) }], "one frame");
    check(&mut qwen, vec![Picture { grid: [1, 2, 4], ..noise(2, 2, 8, 1) }], "bytes of a picture");
    check(&mut qwen, vec![noise(32, 32, 8, 1), noise(2, 2, 8, 1)], "patches encoded together");
    let mut without = open_fixture(On::Cpu, "tiny-a", settings());
    assert_eq!(without.image_spec(), None);
    check(&mut without, vec![noise(2, 2, 8, 1)], "a model with a vision tower");
}

#[test]
fn the_plan_covers_what_the_device_holds() {
    for folder in ["tiny-a", "tiny-b"] {
        let qwen = open_fixture(On::Cpu, folder, pictured());
        let (held, plan) = (qwen.device().memory(), qwen.memory_plan());
        let planned = plan.kv + plan.scratch;
        // Rotary tables count as weights on the device and as scratch in the plan.
        assert!(held.kv + held.scratch <= planned, "{held:?} {plan:?}");
    }
}

/// Logits behind every row of a prompt with pictures, stepped `chunk` rows at a time.
fn step_through(
    model: &mut dyn Model,
    prompt: &Prompt,
    spans: &[(usize, Arc<Features>)],
    positions: &[[u32; 3]],
    chunk: usize,
) -> Vec<f32> {
    model.load(SlotId(1), None).unwrap();
    let within = |at: usize| spans.iter().find(|(start, of)| (*start..start + of.rows()).contains(&at));
    let vocabulary = model.spec().vocabulary;
    let mut logits = Vec::new();
    for start in (0..prompt.ids.len()).step_by(chunk) {
        let end = prompt.ids.len().min(start + chunk);
        let token = |at: usize| if within(at).is_some() { None } else { Some(prompt.ids[at]) };
        let rows = (start..end).map(|at| Row { token: token(at), position: positions[at] }).collect();
        let image = |at: usize| {
            let (first, features) = within(at)?;
            Some(ImageRow { row: at - start, features: Arc::clone(features), at: at - first })
        };
        let images: Vec<ImageRow> = (start..end).filter_map(image).collect();
        model.step_images(&[window(1, start, rows, true, Logits::All)], &images).unwrap();
        for row in 0..end - start {
            let mut values = vec![0.0; vocabulary];
            model.read_logits(row, &mut values).unwrap();
            logits.extend(values);
        }
    }
    logits
}

/// Windows that end before, inside and behind pictures give the bits of one window, on every device.
#[test]
fn windows_next_to_and_inside_pictures_change_no_bit() {
    for on in On::ALL {
        let mut qwen = open_fixture(on, "tiny-a", pictured());
        let gold = Goldens::read("tiny-a", "goldens.safetensors");
        let prompt = prompts("tiny-a").into_iter().find(|prompt| prompt.images.len() == 2).unwrap();
        let pictures: Vec<Picture> = prompt.images.iter().map(|image| golden(&gold, *image, 8, 2)).collect();
        let features = encode(&mut qwen, &pictures, 1);
        let pad = json("tiny-a", "config.json")["image_token_id"].as_u64().unwrap() as u32;
        let is_start = |at: &usize| prompt.ids[*at] == pad && prompt.ids[at - 1] != pad;
        let starts: Vec<usize> = (1..prompt.ids.len()).filter(is_start).collect();
        assert_eq!(starts.len(), 2);
        let grids: Vec<_> = starts.iter().copied().zip(pictures.iter().map(|one| one.grid)).collect();
        let (positions, delta) = place_pictures(prompt.ids.len(), &grids, 2).unwrap();
        assert_eq!(delta, prompt.rope_delta);
        let expected = gold.get(&format!("{}.position_ids", prompt.name));
        for axis in 0..3 {
            let found: Vec<f64> = positions.iter().map(|place| f64::from(place[axis])).collect();
            assert_eq!(found, expected[axis * found.len()..(axis + 1) * found.len()], "axis {axis}");
        }
        let spans: Vec<_> = starts.iter().copied().zip(features.into_iter().map(Arc::new)).collect();
        let whole = step_through(&mut qwen, &prompt, &spans, &positions, prompt.ids.len());
        let last = whole[whole.len() - qwen.spec().vocabulary..].iter().map(|x| f64::from(*x));
        let bound = if on == On::Reference { EXACT } else { 5e-2 };
        close(
            "last logits",
            &last.collect::<Vec<_>>(),
            gold.get(&format!("{}.last_logits", prompt.name)),
            bound,
        );
        for chunk in [1, 2, 7, starts[0], starts[0] + 3, 33] {
            let found = step_through(&mut qwen, &prompt, &spans, &positions, chunk);
            let same = found.iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same && found.len() == whole.len(), "chunks of {chunk} on {on:?}");
        }
    }
}
