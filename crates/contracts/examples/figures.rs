//! Figures of `docs/benchmarks.md` that come from the demo model's question set:
//! `cargo run --release -p contracts --example figures -- [MODEL]`.
//!
//! The questions are asked one and eight at a time, with and without drafts: every reply must have the same
//! tokens, else the status is 1. Then a long prompt is taken up from the cache and compared with a fresh
//! start.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use contracts::crowd::{Acceptance, Asked, Prompt, ask_all};
use contracts::evaluation::{Asker, read_items};
use contracts::{Folder, Sizes, Subject, random_text};
use device::KvForm;
use engine::{DraftPolicy, Drafting, Engine, Event, Handle, Request, Settings};
use text::GenerationDefaults;

type Failed = Box<dyn std::error::Error>;

/// Requests at once.
const CROWD: usize = 8;
/// Tokens of the prompt that is resumed.
const LONG: usize = 4000;

fn start(model: &Path, sizes: Sizes) -> Result<Handle, Failed> {
    let subject = Folder { kv: KvForm::Int8, ..Folder::new(model, "cpu") };
    println!("{}, {} slots of {} tokens", subject.name(), sizes.slots, sizes.context);
    let settings = Settings::new(vocabulary(model)?, GenerationDefaults::open(model)?.stop_ids);
    Ok(Engine::start(subject.open(sizes)?, settings)?)
}

fn vocabulary(model: &Path) -> Result<usize, Failed> {
    Ok(text::Tokenizer::open(model)?.vocab_size())
}

fn questions(model: &Path) -> Result<Vec<Prompt>, Failed> {
    let asker = Asker::open(model)?;
    let items = read_items(&std::fs::read_to_string(model.join("eval/items.jsonl"))?)?;
    let items = items.iter().filter(|item| !item.has_pictures());
    items.map(|item| Ok((asker.prompt(item)?.0, item.max_tokens))).collect()
}

fn drafting(policy: DraftPolicy) -> Drafting {
    Drafting { policy, mtp: true, copy: matches!(policy, DraftPolicy::Auto(_)), first: 1 }
}

/// The whole question set under several policies; whether all replies were the same.
fn question_set(model: &Path) -> Result<bool, Failed> {
    let prompts = questions(model)?;
    let sizes = Sizes { slots: CROWD, snapshots: 2 * CROWD, context: 1088, rows_max: 512 };
    let handle = start(model, sizes)?;
    let policies = [
        ("off", DraftPolicy::Off),
        ("1", DraftPolicy::Fixed(1)),
        ("2", DraftPolicy::Fixed(2)),
        ("3", DraftPolicy::Fixed(3)),
        ("auto", DraftPolicy::Auto(8)),
    ];
    println!("{} questions\n", prompts.len());
    println!("| at once | drafts | tokens | s | tokens/s | accepted 1st, 2nd, 3rd | tokens a round | same |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    let mut expected: Option<Vec<Vec<u32>>> = None;
    let mut all_same = true;
    for at_once in [1, CROWD] {
        for (name, policy) in policies {
            let begun = Instant::now();
            let replies = ask_all(&handle, &prompts, drafting(policy), at_once)?;
            let seconds = begun.elapsed().as_secs_f64();
            let tokens: Vec<Vec<u32>> = replies.iter().map(|reply| reply.tokens.clone()).collect();
            let same = *expected.get_or_insert_with(|| tokens.clone()) == tokens;
            all_same &= same;
            row(at_once, name, policy, &replies, seconds, same);
        }
    }
    handle.stop("all questions are asked");
    Ok(all_same)
}

fn row(at_once: usize, name: &str, policy: DraftPolicy, replies: &[Asked], seconds: f64, same: bool) {
    let depth = if let DraftPolicy::Fixed(depth) = policy { usize::from(depth) } else { 0 };
    let acceptance = Acceptance::of(replies, depth);
    let shares: Vec<String> = (0..depth).map(|place| format!("{:.3}", acceptance.share(place))).collect();
    let tokens: usize = replies.iter().map(|reply| reply.tokens.len()).sum();
    println!(
        "| {at_once} | {name} | {tokens} | {seconds:.1} | {:.0} | {} | {:.3} | {} |",
        tokens as f64 / seconds,
        shares.join(", "),
        acceptance.tokens_per_round(),
        if same { "yes" } else { "NO" },
    );
}

/// Time from the request to its first token, and the tokens that came from the cache.
fn first_token(handle: &Handle, prompt: &[u32], cache: bool) -> Result<(Duration, usize), Failed> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let request = Request { cache, marks: vec![prompt.len()], ..Request::new(prompt.to_vec(), 1) };
    let begun = Instant::now();
    let _ticket = handle.submit(request, Box::new(move |event: Event| drop(sender.send(event))))?;
    let mut took = Duration::ZERO;
    for event in receiver {
        match event {
            Event::Tokens { .. } => took = begun.elapsed(),
            Event::Finished { stats, .. } => return Ok((took, stats.cache.hit_tokens)),
            _ => {}
        }
    }
    Err("the engine ended before the reply".into())
}

/// A long prompt, fresh and resumed.
fn resume(model: &Path) -> Result<(), Failed> {
    let sizes = Sizes { slots: 2, snapshots: 8, context: 4096, rows_max: 512 };
    let handle = start(model, sizes)?;
    let text = random_text(vocabulary(model)?, LONG + 20, 9);
    println!("\n| prompt | from cache | ms to the first token |\n| --- | --- | --- |");
    let line = |name: &str, (took, hit): (Duration, usize)| {
        println!("| {name} | {hit} | {:.1} |", took.as_secs_f64() * 1e3);
        took.as_secs_f64()
    };
    first_token(&handle, &text[..100], false)?;
    let fresh = line("4,000 tokens, fresh", first_token(&handle, &text[..LONG], true)?);
    let again = line("the same again", first_token(&handle, &text[..LONG], true)?);
    let longer = line("20 tokens more", first_token(&handle, &text, true)?);
    println!("\nfresh / again {:.0}, fresh / 20 tokens more {:.0}", fresh / again, fresh / longer);
    handle.stop("it has been measured");
    Ok(())
}

fn run() -> Result<bool, Failed> {
    let model = PathBuf::from(std::env::args().nth(1).unwrap_or("models/demo".into()));
    let same = question_set(&model)?;
    resume(&model)?;
    Ok(same)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
