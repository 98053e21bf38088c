//! What automatic drafting costs a stream, in processor time: `cargo run --release -p contracts --example draft_cost --
//! [MODEL] [--prompt N,..] [--tokens N] [--reps N] [--copy on|off]`.
//!
//! One device thread runs everything and the engine's clock is that thread's processor time, so that other programs on
//! the machine hardly move the figures. Each reply is asked for with and without drafts in turn and must be the same.

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
        let mut heard = mine.lock().unwrap();
        match event {
            Event::Tokens { tokens, .. } => heard.tokens.extend(tokens),
            Event::Finished { stats, .. } => (heard.drafts, heard.over) = (stats.drafts, true),
            _ => {}
        }
    }));
    let before = ProcessorTime.now();
    core.submit(core.limits().check(request)?, reply);
    while !heard.lock().unwrap().over {
        core.tick();
    }
    let took = (ProcessorTime.now() - before).as_secs_f64();
    drop(ticket);
    let heard = std::mem::take(&mut *heard.lock().unwrap());
    Ok((took, heard))
}

/// A prompt of random ids, the ones of `clary bench`.
fn prompt(tokens: usize, vocabulary: usize) -> Vec<u32> {
    let id = |at: usize| (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    (0..tokens).map(|at| (id(at) % vocabulary as u64) as u32).collect()
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn run(arguments: &[String]) -> Result<(), Failed> {
    let option = |name: &str, default: &str| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1)).cloned().unwrap_or_else(|| default.to_owned())
    };
    let model =
        arguments.first().filter(|first| !first.starts_with('-')).map_or("models/demo", String::as_str);
    let prompts: Vec<usize> =
        option("--prompt", "32,128,512").split(',').map(str::parse).collect::<Result<_, _>>()?;
    let (tokens, reps): (usize, usize) =
        (option("--tokens", "1024").parse()?, option("--reps", "5").parse()?);
    let copy = option("--copy", "on") == "on";
    let mut subject = Folder { kv: KvForm::Int8, ..Folder::new(model, "cpu") };
    subject.cpu.threads = 1;
    let vocabulary = text::Tokenizer::open(Path::new(model))?.vocab_size();
    println!("{}, {tokens} tokens a reply, copies {copy}\n", subject.name());
    println!("| prompt | off, median s | on, median s | off / on | rounds | drafted | accepted |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for length in prompts {
        let sizes = Sizes { slots: 1, snapshots: 2, context: length + tokens + 64, rows_max: 512 };
        let settings = Settings::new(vocabulary, Vec::new());
        let mut core = Core::new(subject.open(sizes)?, settings, Arc::new(ProcessorTime))?;
        let prompt = prompt(length, vocabulary);
        let (mut on, mut off, mut drafts) = (Vec::new(), Vec::new(), engine::DraftStats::default());
        for _ in 0..reps {
            let automatic = Drafting { copy, ..Drafting::default() };
            let (took, drafted) = ask(&mut core, &prompt, tokens, automatic)?;
            on.push(took);
            let (took, plain) =
                ask(&mut core, &prompt, tokens, Drafting { policy: DraftPolicy::Off, ..automatic })?;
            off.push(took);
            if drafted.tokens != plain.tokens {
                return Err("drafts changed a reply".into());
            }
            drafts.add(&drafted.drafts);
        }
        let (off, on) = (median(&off), median(&on));
        let (rounds, proposed, accepted) = (drafts.rounds, drafts.proposed, drafts.accepted);
        println!("| {length} | {off:.4} | {on:.4} | {:.3} | {rounds} | {proposed} | {accepted} |", off / on);
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
