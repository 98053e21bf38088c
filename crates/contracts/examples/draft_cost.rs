//! What automatic drafting costs a stream, in processor time: `cargo run --release -p contracts --example
//! draft_cost -- [MODEL] [--prompt N,..] [--tokens N] [--reps N] [--copy on|off]`.
//!
//! One device thread runs everything and the engine's clock is that thread's processor time, so that other
//! programs on the machine move the figures less. Each reply is asked for in turn of an engine with
//! `--draft auto`, of the same one without drafts, and of one with `--draft off`, which has no MTP layer; all
//! must be the same.

use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use contracts::{Folder, Sizes, Subject};
use device::KvForm;
use engine::{Clock, Core, DraftPolicy, Drafting, Event, Reply, Request, Settings};
use rustix::time::{ClockId, clock_gettime};

type Failed = Box<dyn std::error::Error>;

/// Processor time of the calling thread.
struct ProcessorTime;

impl Clock for ProcessorTime {
    fn now(&self) -> Duration {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }
}

/// Tokens of a reply and how drafting fared.
#[derive(Default)]
struct Heard {
    tokens: Vec<u32>,
    drafts: engine::DraftStats,
    over: bool,
}

fn ask(core: &mut Core, prompt: &[u32], tokens: usize, drafting: Drafting) -> Result<(f64, Heard), Failed> {
    let heard = Arc::new(Mutex::new(Heard::default()));
    let mine = heard.clone();
    let request = Request { cache: false, drafting, ..Request::new(prompt.to_vec(), tokens) };
    let (reply, ticket) = Reply::new(Box::new(move |event| {
        let mut heard = mine.lock().expect("no panic");
        match event {
            Event::Tokens { tokens, .. } => heard.tokens.extend(tokens),
            Event::Finished { stats, .. } => (heard.drafts, heard.over) = (stats.drafts, true),
            _ => {}
        }
    }));
    let before = ProcessorTime.now();
    core.submit(core.limits().check(request)?, reply);
    while !heard.lock().expect("no panic").over {
        core.tick();
    }
    let took = (ProcessorTime.now() - before).as_secs_f64();
    drop(ticket);
    let heard = std::mem::take(&mut *heard.lock().expect("no panic"));
    Ok((took, heard))
}

/// A prompt of random ids, the ones of `clary bench`.
fn prompt(tokens: usize, vocabulary: usize) -> Vec<u32> {
    let id = |at: usize| (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    (0..tokens).map(|at| (id(at) % vocabulary as u64) as u32).collect()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn run(arguments: &[String]) -> Result<(), Failed> {
    let option = |name: &str, default: &str| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1)).cloned().unwrap_or_else(|| default.to_owned())
    };
    let folder =
        arguments.first().filter(|first| !first.starts_with('-')).map_or("models/demo", String::as_str);
    let prompts: Vec<usize> =
        option("--prompt", "32,128,512").split(',').map(str::parse).collect::<Result<_, _>>()?;
    let (tokens, reps): (usize, usize) =
        (option("--tokens", "1024").parse()?, option("--reps", "5").parse()?);
    let copy = option("--copy", "on") == "on";
    let mut subject = Folder { kv: KvForm::Int8, ..Folder::new(folder, "cpu") };
    subject.cpu.threads = 1;
    let vocabulary = text::Tokenizer::open(Path::new(folder))?.vocab_size();
    println!("{}, {tokens} tokens a reply, {reps} of each kind, copies {copy}\n", subject.name());
    println!("| prompt | off, s | no drafts, s | auto, s | off / auto | rounds | drafted | accepted |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for length in prompts {
        let sizes = Sizes { slots: 1, snapshots: 2, context: length + tokens + 64, rows_max: 512 };
        let start = |mtp: bool| -> Result<Core, Failed> {
            let settings = model::qwen3_5::Settings { mtp, ..sizes.settings(subject.kv) };
            let checkpoint = checkpoint::Checkpoint::open(Path::new(folder))?;
            let qwen = model::qwen3_5::open(&checkpoint, subject.open_device()?, settings, &mut |_, _| {})?;
            Ok(Core::new(Box::new(qwen), Settings::new(vocabulary, Vec::new()), Arc::new(ProcessorTime))?)
        };
        let (mut with, mut without) = (start(true)?, start(false)?);
        let prompt = prompt(length, vocabulary);
        let mut times: [Vec<f64>; 3] = Default::default();
        let mut drafts = engine::DraftStats::default();
        for _ in 0..reps {
            let auto = Drafting { copy, ..Drafting::default() };
            let plain = Drafting { policy: DraftPolicy::Off, ..auto };
            let replies = [
                ask(&mut without, &prompt, tokens, plain)?,
                ask(&mut with, &prompt, tokens, plain)?,
                ask(&mut with, &prompt, tokens, auto)?,
            ];
            drafts.add(&replies[2].1.drafts);
            if replies.iter().any(|reply| reply.1.tokens != replies[0].1.tokens) {
                return Err("drafts changed a reply".into());
            }
            times.iter_mut().zip(replies).for_each(|(times, reply)| times.push(reply.0));
        }
        let [off, plain, auto] = times.map(median);
        let engine::DraftStats { rounds, proposed, accepted, .. } = drafts;
        println!(
            "| {length} | {off:.4} | {plain:.4} | {auto:.4} | {:.3} | {rounds} | {proposed} | {accepted} |",
            off / auto
        );
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
