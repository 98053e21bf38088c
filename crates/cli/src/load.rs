//! From a checked MODEL to a model on a device.

use std::collections::HashSet;
use std::num::NonZero;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{fs, thread};

use device::cpu::{CpuSettings, Isa};
use device::{Device, KvForm, OpenSettings, WINDOW_ROWS_MAX};
use model::qwen3_5::{MemoryPlan, Qwen, Settings, open};

use crate::args::{Ctx, Draft, Kv, ModelArgs};
use crate::config;
use crate::error::Result;
use crate::memory::{self, Wish};
use crate::output::Output;
use crate::progress::{Progress, Unit};
use crate::table;
use crate::weights::Weights;

/// Rows of a prefill step.
pub(crate) const ROWS_MAX: usize = 512;

/// How many times the rows of a processor's step a card's step has.
const CARD_ROWS: usize = 8;
/// The same on a card of which so many bytes may be used: it is filled still better, and what such a step
/// works in (4 GiB for a model of 35B) is a small part of it.
const LARGE_CARD: (u64, usize) = (64 << 30, 16);
/// Memory beside the weights that a card must have before `auto` takes it, bytes.
const ROOM: u64 = 1 << 30;

/// Saved states of a chat: those that its next turn, a repetition or a step back starts from. The engine
/// leaves a quarter of them at one prompt: its end, the system message's and the last message's.
const CHAT_SNAPSHOTS: usize = 12;

/// A model ready to step, and how it came to be.
pub(crate) struct Loaded {
    /// The model.
    pub(crate) qwen: Qwen,
    /// Reading the weights and packing them for the device.
    pub(crate) time: Duration,
}

/// What a command asks of the model's sizes, before memory has its say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Sequences that run at once.
    pub(crate) slots: usize,
    /// Saved states.
    pub(crate) snapshots: usize,
    /// Most tokens of a sequence.
    pub(crate) ctx: Ctx,
    /// Most rows of a step.
    pub(crate) rows_max: usize,
    /// Most rows of a step that are scored.
    pub(crate) logits_rows_max: usize,
    /// Whether the MTP layer is loaded where it is stored.
    pub(crate) mtp: bool,
    /// Most tokens of a picture; 0 leaves the vision tower out.
    pub(crate) image_tokens: usize,
    /// Whether and how deep replies are drafted.
    pub(crate) draft: Draft,
}

impl Sizes {
    /// Sizes of a single reply.
    pub(crate) fn reply(ctx: Ctx, draft: Draft) -> Self {
        let mtp = draft != Draft::Off;
        Self {
            slots: 1,
            snapshots: 0,
            ctx,
            rows_max: ROWS_MAX,
            logits_rows_max: WINDOW_ROWS_MAX,
            mtp,
            image_tokens: 0,
            draft,
        }
    }

    /// Sizes of a chat: one sequence, and snapshots so that its next turn starts where the last one ended.
    pub(crate) fn chat(ctx: Ctx, draft: Draft) -> Self {
        Self { snapshots: CHAT_SNAPSHOTS, ..Self::reply(ctx, draft) }
    }
}

/// Settles sizes against the geometry and memory.
pub(crate) fn settle(weights: &Weights, args: &ModelArgs, sizes: Sizes) -> Result<Settings> {
    let limit = memory::limit(args.machine.memory_limit, &args.machine.device);
    let settings = Settings {
        slots: sizes.slots,
        snapshots: sizes.snapshots,
        context: 1,
        pages: sizes.slots,
        kv: form(args.kv),
        rows_max: step_rows(&args.machine.device, sizes.rows_max, limit),
        logits_rows_max: sizes.logits_rows_max,
        mtp: sizes.mtp,
        image_tokens: sizes.image_tokens,
        card: device::card(&args.machine.device).is_some(),
    };
    let wish = Wish {
        config: &weights.config,
        mtp: sizes.mtp && weights.parts.mtp,
        weights: weights.bytes,
        limit,
        spare_pages: sizes.snapshots,
    };
    wish.settle(&settings, sizes.ctx)
}

/// K/V form of an option.
pub(crate) fn form(kv: Kv) -> KvForm {
    match kv {
        Kv::Int8 => KvForm::Int8,
        Kv::Int16 => KvForm::Int16,
    }
}

/// The device of that name.
pub(crate) fn device(name: &str, threads: Option<usize>) -> Result<Box<dyn Device>> {
    let cpu = CpuSettings { threads: self::threads(threads), isa: Isa::detect() };
    Ok(device::open(name, opening(cpu))?)
}

/// What devices are opened with. Kernels are compiled once a machine, not once a run.
pub(crate) fn opening(cpu: CpuSettings) -> OpenSettings {
    let kernel_cache = config::cache_folder().map(|folder| folder.join("kernels"));
    OpenSettings { kernel_cache, kernels: kernels(), ..cpu.into() }
}

/// Compiled kernels that came with the program: `kernels` beside it, or `../lib/clary/kernels`.
pub(crate) fn kernels() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let beside = program.parent()?;
    [beside.join("kernels"), beside.join("../lib/clary/kernels")].into_iter().find(|folder| folder.is_dir())
}

/// The name of the device that `--device` means for these weights: what `auto` stands for, or what was typed.
pub(crate) fn named(typed: &str, weights: &Weights) -> String {
    match typed {
        "auto" => device::best(weights.bytes / 4 * 5 + ROOM, kernels().is_some()),
        _ => typed.to_owned(),
    }
}

/// Most rows of a step where the processor would take `rows`: a card is filled by more of them, and answers
/// sooner all the same. `limit`: bytes that may be used of the device's memory.
pub(crate) fn step_rows(device: &str, rows: usize, limit: Option<u64>) -> usize {
    let (large, times) = LARGE_CARD;
    match device::card(device) {
        None => rows,
        Some(_) if limit.is_some_and(|limit| limit >= large) => times * rows,
        Some(_) => CARD_ROWS * rows,
    }
}

/// Threads as typed, else one for each physical core that this process may use.
pub(crate) fn threads(typed: Option<usize>) -> usize {
    let usable = || thread::available_parallelism().map_or(1, NonZero::get);
    typed.unwrap_or_else(|| physical_cores().map_or_else(usable, |cores| cores.min(usable())))
}

/// Cores of the machine, whose hardware threads share one list of siblings.
fn physical_cores() -> Option<usize> {
    let mut cores = HashSet::new();
    for cpu in fs::read_dir("/sys/devices/system/cpu").ok()?.flatten() {
        if let Ok(siblings) = fs::read_to_string(cpu.path().join("topology/thread_siblings_list")) {
            cores.insert(siblings);
        }
    }
    (!cores.is_empty()).then_some(cores.len())
}

/// Loads a MODEL, with progress.
pub(crate) fn load(
    weights: &Weights,
    args: &ModelArgs,
    threads: Option<usize>,
    sizes: Sizes,
    output: &Output,
) -> Result<Loaded> {
    let args = &args.on(named(&args.machine.device, weights));
    load_on(weights, args, device(&args.machine.device, threads)?, sizes, output)
}

/// The same on a device that is there already.
pub(crate) fn load_on(
    weights: &Weights,
    args: &ModelArgs,
    device: Box<dyn Device>,
    sizes: Sizes,
    output: &Output,
) -> Result<Loaded> {
    let settings = settle(weights, args, sizes)?;
    for warning in &weights.warnings {
        output.note(&format!("note: {warning}"))?;
    }
    let start = Instant::now();
    let mut progress = Progress::new(output, "loading", Unit::Count);
    let qwen =
        open(weights.source(), device, settings.clone(), &mut |done, total| progress.set(done, total))?;
    drop(progress);
    let loaded = Loaded { qwen, time: start.elapsed() };
    if output.verbose > 0 {
        report(weights, &loaded, &settings, &args.machine.device, output)?;
    }
    Ok(loaded)
}

/// The start report.
fn report(weights: &Weights, loaded: &Loaded, settings: &Settings, device: &str, output: &Output) -> Result {
    let plan = loaded.qwen.memory_plan();
    let line = |name: &str, text: String| output.note(&format!("{name:<8} {text}"));
    line("model", format!("{}  {}", weights.dir.display(), summary(weights)))?;
    line("device", loaded.qwen.device().name())?;
    line("memory", plan_line(plan, &held(weights, settings)))?;
    line("", memory::held(&loaded.qwen, device))?;
    line(
        "context",
        format!("{} tokens, kv {}", settings.context, format!("{:?}", settings.kv).to_lowercase()),
    )?;
    line("load", format!("{:.2} s", loaded.time.as_secs_f64()))?;
    Ok(())
}

/// Optional parts among the loaded weights: ` (with mtp, vision)`.
pub(crate) fn held(weights: &Weights, settings: &Settings) -> String {
    let mut held = Vec::new();
    held.extend((settings.mtp && weights.parts.mtp).then_some("mtp"));
    held.extend((settings.image_tokens > 0 && weights.parts.vision).then_some("vision"));
    if held.is_empty() { String::new() } else { format!(" (with {})", held.join(", ")) }
}

/// A memory plan in one line; `held` says which optional parts are among the weights.
pub(crate) fn plan_line(plan: &MemoryPlan, held: &str) -> String {
    let parts =
        [("weights", plan.weights), ("kv", plan.kv), ("states", plan.states), ("scratch", plan.scratch)];
    let part = |(name, bytes)| {
        let held = if name == "weights" { held } else { "" };
        format!("{name} {}{held}", table::bytes(bytes))
    };
    let parts: Vec<String> = parts.map(part).into();
    format!("{}  = {}", parts.join("  "), table::bytes(plan.total()))
}

/// `8 layers, 12 experts, hidden 256, 13.0 MiB stored`: with MTP and vision, where they are there.
pub(crate) fn summary(weights: &Weights) -> String {
    let config = &weights.config;
    let (layers, experts, hidden) = (config.layers.len(), config.experts, config.hidden);
    format!("{layers} layers, {experts} experts, hidden {hidden}, {} stored", table::bytes(weights.bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_takes_as_many_rows_as_its_memory_affords() {
        assert_eq!(step_rows("cpu", 512, Some(1 << 40)), 512);
        assert_eq!(step_rows("cuda:0", 512, None), 4096);
        assert_eq!(step_rows("cuda:0", 512, Some(24 << 30)), 4096);
        assert_eq!(step_rows("cuda:1", 512, Some(80 << 30)), 8192);
    }
}
