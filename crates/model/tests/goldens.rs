//! The forward pass on the float64 device against an independent float64 implementation, layer by layer.
//!
//! Both sides compute in float64 and differ in the order of sums: 1e-13 leaves room for that and for nothing
//! else. Goldens stored in f32 carry its rounding, 6e-8.

// A call that fails fails its test.
#![allow(clippy::unwrap_used)]

mod support;

use device::Row;
use model::qwen3_5::{MixerKind, Qwen, positions, text_rows};
use model::{Logits, Model, SlotId};
use support::*;

const EXACT: f64 = 1e-13;
const F32: f64 = 2e-7;
const ROUNDED: f64 = 5e-3;

/// A prompt's step rows, and the embedding rows of its pictures.
fn spliced(qwen: &Qwen, folder: &str, gold: &Goldens, prompt: &Prompt) -> (Vec<Row>, Vec<(usize, Vec<f64>)>) {
    let config = json(folder, "config.json");
    let image = config["image_token_id"].as_u64().map(|id| id as u32);
    let grid = |image: &usize| {
        let grid = gold.get(&format!("image{image}.grid_thw"));
        [0, 1, 2].map(|axis| grid[axis] as usize)
    };
    let grids: Vec<_> = prompt.images.iter().map(grid).collect();
    let (places, delta) = positions(&prompt.ids, image, &grids, 2).unwrap();
    assert_eq!(delta, prompt.rope_delta);
    let expected = gold.get(&format!("{}.position_ids", prompt.name));
    for axis in 0..3 {
        let found: Vec<f64> = places.iter().map(|place| f64::from(place[axis])).collect();
        assert_eq!(found, expected[axis * found.len()..(axis + 1) * found.len()], "axis {axis}");
    }
    let mut rows: Vec<Row> =
        prompt.ids.iter().zip(&places).map(|(id, p)| Row { token: Some(*id), position: *p }).collect();
    let pictures = prompt
        .images
        .iter()
        .flat_map(|image| gold.get(&format!("image{image}.embeds")).chunks_exact(qwen.config().hidden));
    let holes: Vec<usize> = (0..rows.len()).filter(|row| rows[*row].token == image).collect();
    let embeds: Vec<_> = holes.iter().copied().zip(pictures.map(<[f64]>::to_vec)).collect();
    assert_eq!(embeds.len(), holes.len());
    holes.iter().for_each(|row| rows[*row].token = None);
    (rows, embeds)
}

/// Hidden states, picks, final hidden states, logits and states of the prompt.
fn check_prompt(qwen: &mut Qwen, gold: &Goldens, prompt: &Prompt, seen: &Recorder) {
    let name = |rest: &str| format!("{}.{rest}", prompt.name);
    for (index, hidden) in seen.hidden.iter().enumerate() {
        let found = pick_rows(hidden, seen.width, &prompt.hidden_rows);
        let what = name(&format!("hidden.{index}"));
        close(&what, &found, gold.get(&what), F32);
    }
    for (layer, (ids, weights)) in seen.experts.iter().enumerate() {
        let what = name(&format!("router.{layer}"));
        let ids: Vec<f64> = ids.iter().map(|id| f64::from(*id)).collect();
        assert_eq!(ids, gold.get(&format!("{what}.ids")), "{what}");
        close(&what, weights, gold.get(&format!("{what}.weights")), F32);
    }
    close(&name("final_hidden"), &seen.last, gold.get(&name("final_hidden")), EXACT);
    let last = &seen.logits[seen.logits.len() - seen.vocabulary..];
    close(&name("last_logits"), last, gold.get(&name("last_logits")), EXACT);
    let (ids, best) = top(&seen.logits, seen.vocabulary, 4);
    assert_eq!(ids, gold.get(&name("top.ids")));
    close(&name("top.logits"), &best, gold.get(&name("top.logits")), EXACT);
    check_states(qwen, gold, &name("gdn"));
}

fn check_states(qwen: &mut Qwen, gold: &Goldens, name: &str) {
    let layers: Vec<usize> = qwen.config().layers_of(MixerKind::DeltaNet).collect();
    let (channels, kept) = (qwen.config().delta.channels(), qwen.config().delta.conv_taps - 1);
    assert!(!layers.is_empty());
    for layer in layers {
        let state = qwen.delta_state(SlotId(1), layer).unwrap().expect("a delta-net layer");
        let what = format!("{name}.{layer}.recurrent");
        close(&what, &state.recurrent, gold.get(&what), F32);
        // Goldens have channels first.
        let what = format!("{name}.{layer}.conv");
        let transposed: Vec<f64> =
            (0..channels * kept).map(|at| state.conv[at % kept * channels + at / kept]).collect();
        close(&what, &transposed, gold.get(&what), F32);
    }
}

/// Drafts after the prompt, then the greedy continuation token by token.
fn check_continuation(qwen: &mut Qwen, gold: &Goldens, prompt: &Prompt) {
    let name = |rest: &str| format!("{}.{rest}", prompt.name);
    let length = prompt.ids.len();
    let mut seen = Recorder::of(qwen);
    let asked = ask(1, length, prompt.greedy[0], prompt.rope_delta, prompt.drafts.len());
    let drafts = qwen.draft_with(&[asked], &mut seen).unwrap();
    assert_eq!(drafts[0].tokens, prompt.drafts);
    let (ids, best) = top(&seen.mtp_logits, seen.vocabulary, 4);
    assert_eq!(ids, gold.get(&name("mtp.top.ids")));
    close(&name("mtp.top.logits"), &best, gold.get(&name("mtp.top.logits")), EXACT);

    let mut token = prompt.greedy[0];
    let mut logits = Vec::new();
    for (at, expected) in prompt.greedy.iter().enumerate() {
        assert_eq!(token, *expected, "greedy token {at}");
        let position = [(length as i64 + at as i64 + prompt.rope_delta) as u32; 3];
        let row = Row { token: Some(token), position };
        let mut seen = Recorder::of(qwen);
        let step = window(1, length + at, vec![row], true, Logits::Last);
        qwen.step_with(&[step], &[], &mut seen).unwrap();
        logits.extend(seen.logits);
        token = qwen.draw(&[greedy(0, length + at + 1)]).unwrap()[0].token.expect("finite logits");
    }
    let (ids, best) = top(&logits, qwen.config().vocabulary, 4);
    assert_eq!(ids, gold.get(&name("greedy.top.ids")));
    close(&name("greedy.top.logits"), &best, gold.get(&name("greedy.top.logits")), EXACT);
}

/// MTP hidden states of all rows, in one chunk and in several.
fn check_mtp(qwen: &mut Qwen, gold: &Goldens, prompt: &Prompt, rows: &[Row], embeds: &[(usize, Vec<f64>)]) {
    let mut rows = rows.to_vec();
    let position = [(rows.len() as i64 + prompt.rope_delta) as u32; 3];
    rows.push(Row { token: Some(prompt.greedy[0]), position });
    for chunk in [rows.len(), 7] {
        let mut seen = Recorder::of(qwen);
        let mut next = 0;
        let mut mtp = Vec::new();
        qwen.score(&rows, embeds, chunk, true, &mut Unlayered(&mut seen), &mut |scored| {
            assert_eq!(scored.mtp_first, next);
            next += scored.mtp_logits.len() / 2048;
            mtp.extend_from_slice(scored.mtp_logits);
        })
        .unwrap();
        assert_eq!(next, prompt.ids.len());
        let found = pick_rows(&seen.mtp_hidden, seen.width, &prompt.hidden_rows);
        let what = format!("{}.mtp.hidden", prompt.name);
        close(&what, &found, gold.get(&what), EXACT);
        let rounded: Vec<f32> = seen.mtp_logits.iter().map(|x| *x as f32).collect();
        assert_eq!(mtp, rounded);
    }
}

/// Records only what the MTP layer gives.
struct Unlayered<'a>(&'a mut Recorder);

impl model::qwen3_5::Probe for Unlayered<'_> {
    fn after_mtp(
        &mut self,
        device: &mut dyn device::Device,
        hidden: device::Buffer,
        logits: device::Buffer,
        rows: usize,
    ) -> Result<(), device::DeviceError> {
        self.0.after_mtp(device, hidden, logits, rows)
    }
}

fn check(folder: &str) {
    let mut qwen = open_fixture(On::Reference, folder, settings());
    let gold = Goldens::read(folder, "goldens.safetensors");
    assert!(qwen.spec().has_mtp);
    for prompt in prompts(folder) {
        qwen.load(SlotId(1), None).unwrap();
        let (rows, embeds) = spliced(&qwen, folder, &gold, &prompt);
        let mut seen = Recorder::of(&qwen);
        let step = window(1, 0, rows.clone(), true, Logits::All);
        assert_eq!(qwen.step_with(&[step], &embeds, &mut seen).unwrap(), rows.len());
        check_prompt(&mut qwen, &gold, &prompt, &seen);
        check_continuation(&mut qwen, &gold, &prompt);
        check_mtp(&mut qwen, &gold, &prompt, &rows, &embeds);
    }
}

#[test]
fn tiny_a_matches_its_goldens() {
    check("tiny-a");
}

#[test]
fn tiny_b_matches_its_goldens() {
    check("tiny-b");
}

/// The CPU device rounds activations and K/V: final hidden states are 1e-4 to 1e-3 away from the exact ones.
/// The median row is judged, for where a router of these random models picks another expert a row moves by a
/// third.
fn check_rounded(folder: &str) {
    let mut qwen = open_fixture(On::Cpu, folder, settings());
    let gold = Goldens::read(folder, "goldens.safetensors");
    for prompt in prompts(folder) {
        qwen.load(SlotId(1), None).unwrap();
        let (rows, embeds) = spliced(&qwen, folder, &gold, &prompt);
        let mut seen = Recorder::of(&qwen);
        qwen.step_with(&[window(1, 0, rows, true, Logits::All)], &embeds, &mut seen).unwrap();
        let (w, h) = (seen.width, gold.get(&format!("{}.final_hidden", prompt.name)));
        let mut all: Vec<f64> = seen.last.chunks(w).zip(h.chunks(w)).map(|(a, b)| distance(a, b)).collect();
        all.sort_by(f64::total_cmp);
        assert!(all[all.len() / 2] < ROUNDED, "{}: median {:.2e}", prompt.name, all[all.len() / 2]);
    }
}

#[test]
fn the_cpu_device_is_close() {
    check_rounded("tiny-a");
    check_rounded("tiny-b");
}

/// Every checkpoint format gives the logits its own library gave for the same codes. Those were computed in
/// f32.
#[test]
fn formats_match_their_goldens() {
    for format in [
        "mlx-4bit",
        "mlx-mixed-3bit",
        "mlx-other-widths",
        "autoround-w4a16",
        "compressed-tensors-w4a16",
        "compressed-tensors-llmcompressor",
    ] {
        let folder = format!("formats/{format}");
        let gold = Goldens::read(&folder, "goldens/logits.safetensors");
        let ids: Vec<u32> = gold.get("input_ids").iter().map(|id| *id as u32).collect();
        let mut qwen = open_fixture(On::Reference, &folder, settings());
        assert_eq!(
            qwen.spec().has_mtp,
            !["mlx-other-widths", "compressed-tensors-llmcompressor"].contains(&format)
        );
        let mut seen = Recorder::of(&qwen);
        let mut found = Vec::new();
        qwen.score(&text_rows(&ids), &[], ids.len(), false, &mut seen, &mut |scored| {
            found.extend(scored.logits.iter().map(|x| f64::from(*x)));
        })
        .unwrap();
        close(format, &found, gold.get("logits"), 1e-5);
    }
}
