//! How far the CPU device is from float64: logits of the demo model and of every format.
//!
//! Where two experts are nearly tied a rounding can turn the pick, and that row, and a little every row after
//! it, is then far away on any device that rounds. Medians are over all rows; a largest distance is asked of
//! every row of the formats' golden ids, and of the rows before the first such turn in other texts.

use std::fs;
use std::time::Instant;

use checkpoint::{Checkpoint, parse_header};
use contracts::Sizes;
use contracts::evaluation::Asker;
use contracts::score::{Spread, compare};
use device::{Buffer, Device, DeviceError, KvForm, Picks};
use model::qwen3_5::{Probe, open, text_rows};

use crate::demo::questions;
use crate::support::*;

/// Largest medians and maxima of the relative distance of a row: of int16 K/V, then of int8.
struct Bounds {
    median: [f64; 2],
    max: [f64; 2],
}

/// Float64 runs with only the roundings of `docs/arithmetic.md` put in gave 3.3e-4 and 1.6e-3.
const DEMO: Bounds = Bounds { median: [6e-4, 2.2e-3], max: [f64::INFINITY; 2] };
/// The same runs gave 6e-4 to 7e-4, and 2.6e-3 to 3.6e-3.
const FORMAT: Bounds = Bounds { median: [1e-3, 5e-3], max: [2.5e-3, 1.2e-2] };

/// Logits and picks of every row.
#[derive(Default)]
struct Run {
    vocabulary: usize,
    logits: Vec<f32>,
    /// Per row, the experts of every layer, sorted.
    picks: Vec<Vec<u32>>,
}

/// Adds picks to the rows of a text.
struct Picker<'a>(&'a mut [Vec<u32>]);

impl Probe for Picker<'_> {
    fn after_layer(
        &mut self,
        device: &mut dyn Device,
        _layer: usize,
        _x: Buffer,
        picks: Picks,
        rows: usize,
    ) -> Result<(), DeviceError> {
        let (ids, _) = device.read_picks(picks, rows)?;
        for (row, ids) in self.0.iter_mut().zip(ids.chunks_exact(ids.len() / rows)) {
            let from = row.len();
            row.extend(ids);
            row[from..].sort_unstable();
        }
        Ok(())
    }
}

/// Runs texts one after another.
fn run(name: &str, device: &str, kv: KvForm, texts: &[Vec<u32>]) -> Run {
    let longest = texts.iter().map(Vec::len).max().expect("there are texts");
    let sizes = Sizes { slots: 1, snapshots: 0, context: longest + 1, rows_max: longest };
    let subject = subject(name, device, kv);
    let checkpoint = Checkpoint::open(&subject.path).expect("model folders open");
    let device = subject.open_device().expect("it is there");
    let mut qwen = open(&checkpoint, device, sizes.settings(kv), &mut |_, _| {}).expect("model folders load");
    let mut run = Run { vocabulary: qwen.config().vocabulary, ..Run::default() };
    for text in texts {
        let mut picks = vec![Vec::new(); text.len()];
        qwen.score(&text_rows(text), &[], text.len(), false, &mut Picker(&mut picks), &mut |scored| {
            run.logits.extend(scored.logits);
        })
        .expect("the model answers");
        run.picks.extend(picks);
    }
    run
}

/// Whether each row comes before the first turned pick of its text.
fn unturned(found: &Run, expected: &Run, texts: &[Vec<u32>]) -> Vec<bool> {
    let mut same = found.picks.iter().zip(&expected.picks).map(|(a, b)| a == b);
    let of = |text: &Vec<u32>| {
        let mut before = true;
        let rows: Vec<bool> = same.by_ref().take(text.len()).collect();
        rows.into_iter().map(move |same| {
            before &= same;
            before
        })
    };
    texts.iter().flat_map(of).collect()
}

/// Which rows the largest distance is asked of.
#[derive(Clone, Copy, PartialEq)]
enum Largest {
    /// All of them.
    OfAll,
    /// Those before the first turned pick of their text.
    BeforeTurn,
}

fn check(name: &str, texts: &[Vec<u32>], bounds: &Bounds, largest: Largest) {
    let start = Instant::now();
    let expected = run(name, "reference", KvForm::Int16, texts);
    let seconds = start.elapsed().as_secs_f64();
    println!("{name}: {} rows, float64 in {seconds:.1} s", expected.picks.len());
    for (at, kv) in FORMS.into_iter().enumerate() {
        let found = run(name, "cpu", kv, texts);
        let (distances, divergences) = compare(&found.logits, &expected.logits, found.vocabulary);
        let unturned = unturned(&found, &expected, texts);
        let near = distances.iter().zip(&unturned).filter(|(_, unturned)| **unturned);
        let near = Spread::of(near.map(|(distance, _)| *distance).collect());
        let all = Spread::of(distances);
        println!("  {kv:?}: relative L2 {all}; KL {}", Spread::of(divergences));
        println!("    {} rows before a turned pick: {near}", near.count);
        assert!(all.median <= bounds.median[at], "{name}, {kv:?}: {all}");
        let asked = if largest == Largest::OfAll { &all } else { &near };
        assert!(asked.max <= bounds.max[at], "{name}, {kv:?}: {asked}");
    }
}

#[test]
fn logits_of_the_demo_model_are_near_float64() {
    let asker = Asker::open(&folder("demo")).expect("the demo model has its text files");
    let text = |(item, reply): (_, Vec<u32>)| {
        let (prompt, _) = asker.prompt(&item).expect("every item renders");
        [prompt, reply].concat()
    };
    let texts: Vec<Vec<u32>> = questions().into_iter().step_by(20).map(text).collect();
    check("demo", &texts, &DEMO, Largest::BeforeTurn);
}

/// The ids whose logits come with a format's fixture.
fn golden_ids(name: &str) -> Vec<u32> {
    let bytes = fs::read(folder(name).join("goldens/logits.safetensors")).expect("goldens are there");
    let entries = parse_header(&bytes).expect("goldens are safetensors");
    let ids = entries.into_iter().find(|entry| entry.name == "input_ids").expect("they have ids");
    let ids = bytes[ids.range].chunks_exact(4);
    ids.map(|id| u32::from_le_bytes([id[0], id[1], id[2], id[3]])).collect()
}

#[test]
fn logits_of_every_format_are_near_float64() {
    for format in FORMATS {
        check(format, &[golden_ids(format)], &FORMAT, Largest::OfAll);
        let texts: Vec<Vec<u32>> = text(format, 160).chunks(40).map(<[u32]>::to_vec).collect();
        check(format, &texts, &FORMAT, Largest::BeforeTurn);
    }
}
