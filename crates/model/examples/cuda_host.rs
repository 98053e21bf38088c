//! Time that the host spends on a step for a card, of the published model of 35B in 4 bits: lowering,
//! uploads, looking up lists, drawing, on a card that is not there (`device::cuda::rehearsal`).
//!
//! `cargo run --release -p model --example cuda_host`

// One form of storage is measured, and windows of one kind.
#[path = "cuda_variants/blank.rs"]
#[allow(dead_code)]
mod blank;
#[path = "cuda_variants/subjects.rs"]
#[allow(dead_code)]
mod subjects;
#[path = "cuda_variants/tour.rs"]
#[allow(dead_code)]
mod tour;

use std::sync::Arc;
use std::time::{Duration, Instant};

use device::KvForm;
use device::cuda::rehearsal::{CARD_KINDS, rehearse};
use model::qwen3_5::open;
use model::{Model, PAGE_TOKENS};

use blank::Blank;
use subjects::{MLX_4BIT, Result};
use tour::{Tour, picture, settings};

const CONFIG: &str = include_str!("../../../configs/qwen3.6-35b-a3b/config.json");
/// Steps of a measurement.
const STEPS: usize = 2000;

/// Median and 99 % of the times of steps with `streams` windows of `rows` rows.
fn measure(tour: &mut Tour<'_>, streams: usize, rows: usize, steps: usize) -> Result {
    let mut times: Vec<Duration> = Vec::with_capacity(steps);
    for at in 0..steps {
        if at % 100 == 0 {
            (0..streams).try_for_each(|slot| tour.clear(slot))?;
        }
        let mut windows: Vec<_> = (0..streams).map(|slot| tour.window(slot, rows)).collect();
        // As many pages as an engine has given out.
        windows.iter_mut().for_each(|w| w.pages.truncate((w.start + rows).div_ceil(PAGE_TOKENS)));
        let before = Instant::now();
        tour.step(&windows)?;
        times.push(before.elapsed());
    }
    times.sort_unstable();
    let (median, most) = (times[steps / 2], times[steps * 99 / 100]);
    println!("{streams:3} streams of {rows:4} rows: median {median:?}, 99 % {most:?} of {steps} steps");
    Ok(())
}

/// Median times of encoding a picture of `side` x `side` patches: until the calls return, of the embedding,
/// the blocks and the merger.
fn encode(tour: &mut Tour<'_>, side: usize, times: usize) -> Result {
    let spec = tour.model.image_spec().ok_or("a model with a tower")?;
    let picture = Arc::new(picture(&spec, [side; 2]));
    let mut found: Vec<[Duration; 2]> = Vec::with_capacity(times);
    for _ in 0..times {
        let before = Instant::now();
        tour.model.encode(std::slice::from_ref(&picture))?;
        tour.model.encode_next(1)?;
        let embedded = before.elapsed();
        while tour.model.encode_next(usize::MAX)?.is_none() {}
        found.push([embedded, before.elapsed()]);
    }
    found.sort_unstable_by_key(|times| times[1]);
    let [embedded, all] = found[times / 2];
    println!(
        "a picture of {side:2} x {side:2} patches: first chunk {embedded:?}, all {all:?}, medians of {times}"
    );
    Ok(())
}

fn main() -> Result {
    let source = Blank::new(serde_json::from_str(CONFIG)?, MLX_4BIT)?;
    for mtp in [false, true] {
        let (device, _) = rehearse(&CARD_KINDS[0], false)?;
        let settings = model::qwen3_5::Settings { mtp, ..settings(KvForm::Int8, usize::MAX) };
        let mut model = open(&source, device, settings, &mut |_, _| {})?;
        println!("MTP layer {}", if model.spec().has_mtp { "loaded" } else { "left out" });
        let mut tour = Tour::new(&mut model);
        for (streams, rows, steps) in [(1, 1, STEPS), (4, 1, STEPS), (32, 1, STEPS), (1, 128, 100)] {
            measure(&mut tour, streams, rows, steps)?;
        }
        for (side, times) in [(16, 50), (64, 10)] {
            encode(&mut tour, side, times)?;
        }
    }
    Ok(())
}
