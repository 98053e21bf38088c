//! The vision tower of the 35B model on the CPU device, against the f32 peak of its threads:
//! `cargo run --release -p model --example tower_bench -- [THREADS] [SIDE] [BLOCKS]`
//!
//! Random bf16 weights of the published shapes (1152 wide, 16 heads of 72, MLP 4304) with BLOCKS blocks (2), and one
//! picture of SIDE times SIDE patches (64: 1024 x 1024 pixels). Times are processor time of the process divided by the
//! threads, best of three, so that other load changes them little. Operations are two for each multiply-add of the
//! matrices and of attention's scores and values.

use std::error::Error;
use std::sync::Arc;

use checkpoint::{Expected, Kind, Recipe, Synth};
use device::KvForm;
use device::cpu::probe::{f32_peak, process_time};
use device::cpu::{Cpu, CpuSettings, Isa};
use model::qwen3_5::{Config, Parts, Qwen, Settings, inventory, open};
use model::{Model, Picture};
use serde_json::{Value, json};

/// Geometry of the tower.
const CONFIG: &str = include_str!("../../../configs/qwen3.6-35b-a3b/config.json");
const RUNS: usize = 3;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The published tower with `blocks` blocks, under a text model that is as small as it may be.
fn tower(blocks: usize) -> Result<Synth> {
    let mut json: Value = serde_json::from_str(CONFIG)?;
    json["vision_config"]["depth"] = blocks.into();
    let text = &mut json["text_config"];
    for (key, value) in [
        ("num_hidden_layers", json!(1)),
        ("layer_types", json!(["full_attention"])),
        ("num_experts", json!(2)),
        ("num_experts_per_tok", json!(2)),
        ("vocab_size", json!(1024)),
        ("mtp_num_hidden_layers", json!(0)),
        ("eos_token_id", json!(1)),
    ] {
        text[key] = value;
    }
    for (at, key) in ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"]
        .into_iter()
        .enumerate()
    {
        json[key] = json!(at + 2);
    }
    let config = Config::from_json(&json)?;
    let parts = Parts { head: !config.tied(false), mtp: false, vision: true };
    let mut expected = inventory(&config, parts);
    // Files hold it as a convolution; in memory it is the matrix that it is read as.
    let vision = config.vision.as_ref().ok_or("the configuration has a tower")?;
    expected.push(Expected {
        name: "model.visual.patch_embed.proj".into(),
        kind: Kind::Matrix { rows: vision.hidden, cols: 3 * vision.frames * vision.patch * vision.patch },
        needed_by: "the vision tower".into(),
        optional: false,
    });
    Ok(Synth::new(json, expected, Recipe::Bf16, 1))
}

fn load(source: &Synth, threads: usize, tokens: usize) -> Result<Qwen> {
    let settings = Settings {
        slots: 1,
        snapshots: 0,
        context: 64,
        pages: 1,
        kv: KvForm::Int16,
        rows_max: 64,
        logits_rows_max: 1,
        mtp: false,
        image_tokens: tokens,
        card: false,
    };
    let device = Cpu::new(CpuSettings { threads, isa: Isa::detect() });
    Ok(open(source, Box::new(device), settings, &mut |_, _| {})?)
}

/// Seconds of the passes of one encoding: all, keys of the blocks, the rest of the blocks.
fn run(qwen: &mut Qwen, picture: &Arc<Picture>, blocks: usize, threads: usize) -> Result<[f64; 3]> {
    qwen.encode(std::slice::from_ref(picture))?;
    let mut seconds = Vec::new();
    loop {
        let start = process_time();
        let done = qwen.encode_next(1)?.is_some();
        seconds.push((process_time() - start).as_secs_f64() / threads as f64);
        if done {
            break;
        }
    }
    // One for the patches, two a block, one for the merger; every pass has as many chunks.
    let chunks = seconds.len() / (2 * blocks + 2);
    let passes: Vec<f64> = seconds.chunks(chunks).map(|pass| pass.iter().sum()).collect();
    let of = |first: usize| passes[first..1 + 2 * blocks].iter().step_by(2).sum();
    Ok([passes.iter().sum(), of(1), of(2)])
}

fn main() -> Result<()> {
    let words: Vec<usize> =
        std::env::args().skip(1).map(|word| word.parse()).collect::<std::result::Result<_, _>>()?;
    let word = |at: usize, default: usize| words.get(at).copied().unwrap_or(default);
    let (threads, side, blocks) = (word(0, 1), word(1, 64), word(2, 2));
    let patches = side * side;
    let source = tower(blocks)?;
    let mut qwen = load(&source, threads, patches / 4)?;
    let vision = qwen.config().vision.clone().ok_or("the configuration has a tower")?;
    let levels = std::array::from_fn(|level| level as f32 / 127.5 - 1.0);
    let bytes = patches * 3 * vision.patch * vision.patch;
    let picture = Arc::new(Picture {
        grid: [1, side, side],
        patches: (0..bytes).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect(),
        levels: Box::new([levels; 3]),
        digest: [0; 32],
    });
    let mut best = [f64::INFINITY; 3];
    for _ in 0..RUNS {
        for (best, found) in best.iter_mut().zip(run(&mut qwen, &picture, blocks, threads)?) {
            *best = best.min(found);
        }
    }
    let peak = 2.0 * f32_peak(Isa::detect(), threads);
    let (w, inner, p) = (vision.hidden as f64, vision.intermediate as f64, patches as f64);
    let keys = 2.0 * p * 3.0 * w * w * blocks as f64;
    let attention = 4.0 * p * p * w * blocks as f64;
    let rest = 2.0 * p * (w * w + 2.0 * w * inner) * blocks as f64 + attention;
    let ends = 2.0 * p * w * 3.0 * 2.0 * 256.0 + 2.0 * p / 4.0 * (16.0 * w * w + 4.0 * w * vision.out as f64);
    println!(
        "{threads} threads with {}, {patches} patches, {blocks} blocks, f32 peak {:.0} GFLOP/s",
        Isa::detect().name(),
        peak / 1e9
    );
    println!("| part | GFLOP | s | GFLOP/s | of the f32 peak |\n| --- | --- | --- | --- | --- |");
    let row = |name: &str, operations: f64, seconds: f64| {
        let rate = operations / seconds;
        println!(
            "| {name} | {:.1} | {seconds:.2} | {:.1} | {:.0} % |",
            operations / 1e9,
            rate / 1e9,
            100.0 * rate / peak
        );
    };
    row("q, k, v with norm, rotation and K/V", keys, best[1]);
    row("attention, projection, norm and MLP", rest, best[2]);
    row("all, with patches and merger", keys + rest + ends, best[0]);
    println!("a tower of 27 blocks: {:.1} s", best[0] + (best[1] + best[2]) * (27.0 / blocks as f64 - 1.0));
    Ok(())
}
