//! The demo model's questions about pictures, from the files to the logits, against an independent float64
//! implementation over the same quantized weights (`tools/oracle/picture_questions.py`).

use std::collections::HashMap;
use std::fs;
use std::sync::Arc;

use contracts::evaluation::{Asker, Item, read_items};
use contracts::{Folder, Sizes};
use device::KvForm;
use model::qwen3_5::Qwen;
use model::{ImageRow, Logits, Model, Picture, Row, SlotId, Window, place_pictures};
use picture::{Limits, Prepared, Preprocessor, prepare};
use serde_json::Value;

use crate::support::*;

/// Margins of the float64 device and of the implementation that shares no code with it: logits cross the seam
/// in f32.
const EXACT: f64 = 1e-5;
/// Margins that stay margins under every rounding of the CPU device.
const CLEAR: f64 = 0.3;
/// Whether two pictures are alike: the original bf16 weights too have a margin of 0.014 to 0.065 here, and
/// these weights are near enough to them to hesitate as well (`margins.jsonl`: +0.0500, +0.0563, +0.0304 and
/// -0.0048). The CPU device may still be held to their signs, for here it is asked to be within `NEAR`.
const CLOSE: [&str; 4] = ["dev-301", "dev-302", "dev-303", "dev-304"];
/// Farthest that the CPU device may be from the margins of `CLOSE`: below the smallest of them.
const NEAR: f64 = 0.002;

/// What the oracle says to a question: the smallest margin along the reference's reply.
struct Golden {
    item: Item,
    reply: Vec<u32>,
    margin: f64,
}

fn lines(name: &str) -> HashMap<String, Value> {
    let text = fs::read_to_string(folder("demo").join("eval").join(name)).expect("the question set is there");
    let line = |line: &str| {
        let value: Value = serde_json::from_str(line).expect("it is JSON");
        (value["id"].as_str().expect("an id").to_owned(), value)
    };
    text.lines().map(line).collect()
}

fn goldens() -> Vec<Golden> {
    let items = fs::read_to_string(folder("demo").join("eval/items.jsonl")).expect("the questions are there");
    let items = read_items(&items).expect("the questions are valid");
    let (replies, margins) = (lines("reference.jsonl"), lines("margins.jsonl"));
    let golden = |item: Item| {
        let reply = replies[&item.id]["tokens"].as_array().expect("tokens").iter();
        let reply = reply.map(|token| token.as_u64().expect("an id") as u32).collect();
        Golden { reply, margin: margins[&item.id]["margin"].as_f64().expect("a margin"), item }
    };
    items.into_iter().filter(Item::has_pictures).map(golden).collect()
}

fn open(device: &str, kv: KvForm) -> Qwen {
    let subject = Folder { kv, ..Folder::new(folder("demo"), device) };
    let sizes = Sizes { slots: 1, snapshots: 0, context: 256, rows_max: 256 };
    let settings = model::qwen3_5::Settings { image_tokens: 64, mtp: false, ..sizes.settings(kv) };
    let checkpoint = checkpoint::Checkpoint::open(&subject.path).expect("the demo model opens");
    let device = subject.open_device().expect("it is there");
    model::qwen3_5::open(&checkpoint, device, settings, &mut |_, _| {}).expect("the demo model loads")
}

/// Pictures of a question, as the server prepares them.
fn pictures(item: &Item, preprocessor: &Preprocessor) -> Vec<Arc<Picture>> {
    let show = |name: &str| {
        let bytes = fs::read(folder("demo").join("eval").join(name)).expect("its pictures are there");
        let prepared =
            prepare(&bytes, &Limits::default(), [255; 3], preprocessor).expect("they are pictures");
        let Prepared { grid, patches, levels, digest, .. } = prepared;
        Arc::new(Picture { grid, patches, levels: Box::new(levels), digest })
    };
    item.pictures().into_iter().map(show).collect()
}

/// Smallest margin along the reply: logit of its token over the best other one.
fn margin(qwen: &mut Qwen, asker: &Asker, golden: &Golden, preprocessor: &Preprocessor) -> f64 {
    let merge = preprocessor.merge;
    let pictures = pictures(&golden.item, preprocessor);
    let mut rendered = asker.render(&golden.item).expect("it renders");
    let tokens: Vec<usize> = pictures.iter().map(|one| one.count() / (merge * merge)).collect();
    rendered.expand_images(&tokens);
    let prompt = rendered.ids.len();
    let ids = [&rendered.ids[..], &golden.reply[..golden.reply.len() - 1]].concat();
    let starts = rendered.image_positions.iter().copied();
    let grids: Vec<_> = starts.clone().zip(pictures.iter().map(|one| one.grid)).collect();
    let (positions, _) = place_pictures(ids.len(), &grids, merge).expect("the pictures fit");
    qwen.encode(&pictures).expect("they fit the tower");
    let features = loop {
        if let Some(features) = qwen.encode_next(1000).expect("the tower works") {
            break features;
        }
    };
    let mut rows: Vec<Row> = ids
        .iter()
        .zip(&positions)
        .map(|(id, position)| Row { token: Some(*id), position: *position })
        .collect();
    let mut images = Vec::new();
    for (start, features) in starts.zip(features) {
        let features = Arc::new(features);
        for at in 0..features.rows() {
            rows[start + at].token = None;
            images.push(ImageRow { row: start + at, features: Arc::clone(&features), at });
        }
    }
    let window = Window {
        slot: SlotId(0),
        start: 0,
        rows,
        pages: (0..4).collect(),
        parents: None,
        commit: true,
        logits: Logits::All,
    };
    qwen.load(SlotId(0), None).expect("a slot");
    qwen.step_images(&[window], &images).expect("the model steps");
    let mut logits = vec![0.0f32; qwen.spec().vocabulary];
    let mut smallest = f64::INFINITY;
    for (at, token) in golden.reply.iter().enumerate() {
        qwen.read_logits(prompt - 1 + at, &mut logits).expect("a scored row");
        let right = std::mem::replace(&mut logits[*token as usize], f32::NEG_INFINITY);
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        smallest = smallest.min(f64::from(right) - f64::from(best));
    }
    smallest
}

/// One reply is wrong in float64 too: with the original bf16 weights its margin is 0.014, and quantizing them
/// turns it (`docs/accuracy.md`).
#[test]
fn questions_about_pictures_have_the_margins_of_the_oracle() {
    let asker = Asker::open(&folder("demo")).expect("the demo model has its text files");
    let json = fs::read_to_string(folder("demo").join("preprocessor_config.json")).expect("it is there");
    let json = serde_json::from_str(&json).expect("it is JSON");
    let preprocessor = Preprocessor::from_json(&json).expect("it is valid");
    let goldens = goldens();
    assert_eq!(goldens.len(), 61);
    let wrong: Vec<&str> =
        goldens.iter().filter(|one| one.margin < 0.0).map(|one| one.item.id.as_str()).collect();
    assert_eq!(wrong, ["dev-304"]);
    let mut exact = open("reference", KvForm::Int16);
    let mut cpu = FORMS.map(|kv| open("cpu", kv));
    let mut farthest = [0.0f64; 3];
    for golden in &goldens {
        let mut off = |device: usize, found: f64| {
            farthest[device] = farthest[device].max((found - golden.margin).abs());
            found - golden.margin
        };
        let found = margin(&mut exact, &asker, golden, &preprocessor);
        assert!(off(0, found).abs() <= EXACT, "{}: {found}, {} expected", golden.item.id, golden.margin);
        let rounded: Vec<f64> =
            cpu.iter_mut().map(|cpu| margin(cpu, &asker, golden, &preprocessor)).collect();
        let close = CLOSE.contains(&golden.item.id.as_str());
        for (at, &found) in rounded.iter().enumerate() {
            let off = off(1 + at, found).abs();
            assert_eq!(found > 0.0, golden.margin > 0.0, "{}: {found}", golden.item.id);
            assert!(!close || off <= NEAR, "{}: {found}, {} expected", golden.item.id, golden.margin);
        }
        if golden.margin < 1.0 {
            let id = &golden.item.id;
            println!("| {id} | {:.4} | {found:.4} | {:.4} | {:.4} |", golden.margin, rounded[0], rounded[1]);
        }
        let asked = if close { NEAR } else { CLEAR };
        assert!(golden.margin.abs() > asked, "{}: too close to judge by", golden.item.id);
    }
    println!(
        "farthest from the oracle: float64 {:.1e}, int16 {:.1e}, int8 {:.1e}",
        farthest[0], farthest[1], farthest[2]
    );
}
