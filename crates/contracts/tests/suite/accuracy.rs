//! How far the CPU device is from float64: logits of the demo model and of every format.

use std::time::Instant;

use contracts::evaluation::Asker;
use contracts::score::{Spread, compare, logits};
use contracts::{Runner, Sizes, Subject};
use device::KvForm;

use crate::demo::questions;
use crate::support::*;

/// Largest medians and maxima of the relative distance of a row: of int16 K/V, then of int8.
struct Bounds {
    median: [f64; 2],
    max: [f64; 2],
}

/// The float64 runs with only the roundings of `docs/arithmetic.md` put in gave 3.3e-4 and 1.6e-3.
const DEMO: Bounds = Bounds { median: [6e-4, 2.2e-3], max: [f64::INFINITY; 2] };
/// The same runs gave 6e-4 to 7e-4, and 2.6e-3 to 3.6e-3.
const FORMAT: Bounds = Bounds { median: [1e-3, 5e-3], max: [2.5e-3, 1.2e-2] };

/// Logits of some texts, one after another.
fn run(name: &str, device: &str, kv: KvForm, texts: &[Vec<u32>]) -> (Vec<f32>, usize) {
    let longest = texts.iter().map(Vec::len).max().expect("there are texts");
    let sizes = Sizes { slots: 2, snapshots: 1, context: longest + 1, rows_max: longest };
    let mut model = subject(name, device, kv).open(sizes).expect("model folders load");
    let mut runner = Runner::new(&mut *model);
    let mut all = Vec::new();
    for text in texts {
        all.extend(logits(&mut runner, text).expect("the model answers"));
    }
    (all, runner.spec().vocabulary)
}

fn check(name: &str, texts: &[Vec<u32>], bounds: &Bounds) {
    let start = Instant::now();
    let (expected, vocabulary) = run(name, "reference", KvForm::Int16, texts);
    let seconds = start.elapsed().as_secs_f64();
    println!("{name}: {} rows, float64 in {seconds:.1} s", expected.len() / vocabulary);
    for (at, kv) in FORMS.into_iter().enumerate() {
        let (found, _) = run(name, "cpu", kv, texts);
        let (distances, divergences) = compare(&found, &expected, vocabulary);
        let distance = Spread::of(distances);
        println!("  {kv:?}: relative L2 {distance}; KL {}", Spread::of(divergences));
        assert!(distance.median <= bounds.median[at], "{name}, {kv:?}: {distance}");
        assert!(distance.max <= bounds.max[at], "{name}, {kv:?}: {distance}");
    }
}

#[test]
fn logits_of_the_demo_model_are_near_float64() {
    let asker = Asker::open(&folder("demo")).expect("the demo model has its text files");
    let text = |(item, reply): (_, Vec<u32>)| {
        let (prompt, _) = asker.prompt(&item).expect("every item renders");
        [prompt, reply].concat()
    };
    let texts: Vec<Vec<u32>> = questions().into_iter().step_by(12).map(text).collect();
    check("demo", &texts, &DEMO);
}

#[test]
fn logits_of_every_format_are_near_float64() {
    for format in FORMATS {
        check(format, &[text(format, 150)], &FORMAT);
    }
}
