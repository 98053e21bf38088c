//! The vision tower of the 35B model, from prepared pictures to image rows:
//! `cargo run --release -p model --example tower_bench -- [THREADS] [SIDE] [BLOCKS] [--device NAME]`
//!
//! Random bf16 weights of the published shapes (1152 wide, 16 heads of 72, MLP 4304) with BLOCKS blocks (2;
//! 27 are published), and one picture of SIDE times SIDE patches (64: 1024 x 1024 pixels). On the processor
//! (`cpu`, the default) times are processor time of the process divided by the threads, best of three, so
//! that other load changes them little, and rates are told as shares of the f32 peak of the threads. On a
//! card (`cuda:0`; `--kernels DIR` has compiled kernels) times are wall time, best of five: each part's
//! until its calls return, which may be before the card is done with it; the last part waits for the image
//! rows. Operations are two for each multiply-add of the matrices and of attention's scores and values.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use checkpoint::{Expected, Kind, Recipe, Synth};
use device::cpu::probe::{f32_peak, process_time};
use device::cpu::{CpuSettings, Isa};
use device::{KvForm, OpenSettings};
use model::qwen3_5::{Config, Parts, Qwen, Settings, VisionConfig, inventory, open};
use model::{Model, Picture};
use serde_json::{Value, json};

/// Geometry of the tower.
const CONFIG: &str = include_str!("../../../configs/qwen3.6-35b-a3b/config.json");
/// Runs on a processor and on a card.
const RUNS: [usize; 2] = [3, 5];
/// Rows of a step on a processor and on a card, which set the patches of a chunk.
const STEP_ROWS: [usize; 2] = [512, 4096];

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

/// What is typed.
struct Args {
    threads: usize,
    side: usize,
    blocks: usize,
    device: String,
    kernels: Option<PathBuf>,
}

impl Args {
    fn typed() -> Result<Self> {
        let mut args = Self { threads: 1, side: 64, blocks: 2, device: String::from("cpu"), kernels: None };
        let (mut words, mut place) = (std::env::args().skip(1), 0);
        while let Some(word) = words.next() {
            match word.as_str() {
                "--device" => args.device = words.next().ok_or("--device takes a name")?,
                "--kernels" => args.kernels = Some(words.next().ok_or("--kernels takes a folder")?.into()),
                number => {
                    let mut to = [&mut args.threads, &mut args.side, &mut args.blocks];
                    **to.get_mut(place).ok_or("three numbers at most")? = number.parse()?;
                    place += 1;
                }
            }
        }
        Ok(args)
    }

    fn card(&self) -> bool {
        device::card(&self.device).is_some()
    }

    /// Processor time of a thread, or wall time.
    fn clock(&self, start: Instant) -> Duration {
        if self.card() { start.elapsed() } else { process_time() / self.threads as u32 }
    }
}

fn load(source: &Synth, args: &Args) -> Result<Qwen> {
    let card = args.card();
    let settings = Settings {
        slots: 1,
        snapshots: 0,
        context: 64,
        pages: 1,
        kv: KvForm::Int16,
        rows_max: STEP_ROWS[usize::from(card)],
        logits_rows_max: 1,
        mtp: false,
        image_tokens: args.side * args.side / 4,
        card,
    };
    let cpu = CpuSettings { threads: args.threads, isa: Isa::detect() };
    let opening = OpenSettings { kernels: args.kernels.clone(), ..cpu.into() };
    Ok(open(source, device::open(&args.device, opening)?, settings, &mut |_, _| {})?)
}

/// Parts of an encoding, in order; keys and the rest of all blocks together.
const PARTS: [&str; 4] = [
    "patches and positions, with their preparation on the host",
    "q, k, v with norm, rotation and K/V",
    "attention, projection, norm and MLP",
    "merger, image rows to the host",
];

/// Seconds of each part of one encoding.
fn run(qwen: &mut Qwen, picture: &Arc<Picture>, args: &Args) -> Result<[f64; 4]> {
    let begun = Instant::now();
    let mut before = args.clock(begun);
    qwen.encode(std::slice::from_ref(picture))?;
    let mut seconds = Vec::new();
    loop {
        let done = qwen.encode_next(1)?.is_some();
        let now = args.clock(begun);
        seconds.push((now - before).as_secs_f64());
        before = now;
        if done {
            break;
        }
    }
    // One pass for the patches, two a block, one for the merger; every pass has as many chunks.
    let passes = 2 * args.blocks + 2;
    let mut parts = [0.0; 4];
    for (at, pass) in seconds.chunks(seconds.len() / passes).enumerate() {
        let part = match at {
            0 => 0,
            at if at == passes - 1 => 3,
            at => 2 - at % 2,
        };
        parts[part] += pass.iter().sum::<f64>();
    }
    Ok(parts)
}

/// Operations of each part, in units of 10^9.
fn operations(vision: &VisionConfig, patches: usize, blocks: usize) -> [f64; 4] {
    let (w, inner, p, n) = (vision.hidden as f64, vision.intermediate as f64, patches as f64, blocks as f64);
    let values = (3 * vision.frames * vision.patch * vision.patch) as f64;
    let merged = (vision.merge * vision.merge) as f64;
    let rest = 2.0 * p * (w * w + 2.0 * w * inner) + 4.0 * p * p * w;
    let merger = 2.0 * p / merged * (merged * w * merged * w + merged * w * vision.out as f64);
    [2.0 * p * w * values, 6.0 * p * w * w * n, rest * n, merger].map(|operations| operations / 1e9)
}

fn main() -> Result<()> {
    let args = Args::typed()?;
    let patches = args.side * args.side;
    let source = tower(args.blocks)?;
    let mut qwen = load(&source, &args)?;
    let vision = qwen.config().vision.clone().ok_or("the configuration has a tower")?;
    let levels = std::array::from_fn(|level| level as f32 / 127.5 - 1.0);
    let bytes = patches * 3 * vision.patch * vision.patch;
    let picture = Arc::new(Picture {
        grid: [1, args.side, args.side],
        patches: (0..bytes).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect(),
        levels: Box::new([levels; 3]),
        digest: [0; 32],
    });
    let mut best = [f64::INFINITY; 4];
    for _ in 0..RUNS[usize::from(args.card())] {
        let found = run(&mut qwen, &picture, &args)?;
        // Parts of one run, for on a card one part's work may end in the next.
        if found.iter().sum::<f64>() < best.iter().sum() {
            best = found;
        }
    }
    print(&args, operations(&vision, patches, args.blocks), best);
    Ok(())
}

fn print(args: &Args, operations: [f64; 4], seconds: [f64; 4]) {
    let (threads, blocks) = (args.threads, args.blocks);
    let peak = (!args.card()).then(|| 2e-9 * f32_peak(Isa::detect(), threads));
    let on = match peak {
        Some(peak) => format!("{threads} threads with {}, f32 peak {peak:.0} GFLOP/s", Isa::detect().name()),
        None => args.device.clone(),
    };
    println!("{on}, {} patches, {blocks} blocks", args.side * args.side);
    println!("| part | GFLOP | s | GFLOP/s | of the f32 peak |\n| --- | --- | --- | --- | --- |");
    let row = |name: &str, operations: f64, seconds: f64| {
        let rate = operations / seconds;
        let share = peak.map_or(String::new(), |peak| format!("{:.0} %", 100.0 * rate / peak));
        println!("| {name} | {operations:.1} | {seconds:.4} | {rate:.1} | {share} |");
    };
    for (name, (operations, seconds)) in PARTS.into_iter().zip(operations.into_iter().zip(seconds)) {
        row(name, operations, seconds);
    }
    row("all", operations.iter().sum(), seconds.iter().sum());
    if blocks != 27 {
        let per_block = (seconds[1] + seconds[2]) / blocks as f64;
        println!("a tower of 27 blocks: {:.2} s", seconds[0] + 27.0 * per_block + seconds[3]);
    }
}
