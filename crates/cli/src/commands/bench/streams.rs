//! `clary bench --streams`: several replies at once through the engine, drafted and plain.

use std::time::{Duration, Instant};

use contracts::crowd::{Asked, Prompt, Together, ask_all};
use engine::{DRAFT_MAX, DraftPolicy, DraftStats, Drafting, Engine, Handle, Settings};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{context, measure};
use crate::args::{BenchArgs, Draft, OnOff};
use crate::error::{Exit, Failure, Result};
use crate::load::{self, ROWS_MAX, Sizes};
use crate::output::Output;
use crate::progress::{Progress, Unit};
use crate::settings;
use crate::table::{self, Table};
use crate::weights::Weights;

/// A number of streams, drafted or plain, and what its repetitions gave.
struct Crowd {
    streams: usize,
    drafts: OnOff,
    prompt: usize,
    /// Tokens of all replies, the same in every repetition.
    tokens: usize,
    /// From the first request to the end of the last reply, for each repetition, sorted.
    times: Vec<Duration>,
    /// Longest time to a first token, for each repetition, sorted.
    first: Vec<Duration>,
    /// While all streams were decoding, for each repetition in which they were, the fastest first.
    together: Vec<Together>,
    stats: DraftStats,
    hash: String,
}

/// Measures every number of streams with every prompt, and prints a table.
pub(super) fn bench(weights: &Weights, args: &BenchArgs, output: &Output) -> Result {
    let longest = args.prompt.iter().max().copied().unwrap_or(1);
    let slots = args.streams.iter().max().copied().unwrap_or(1);
    let is_drafted = args.drafts.contains(&OnOff::On);
    let policy = settings::policy(args.draft);
    let sizes = Sizes {
        slots,
        snapshots: 0,
        ctx: context(args.model.ctx, longest + args.tokens, weights.config.positions_max)?,
        rows_max: ROWS_MAX.max(slots * (DRAFT_MAX + 1)),
        logits_rows_max: slots * (DRAFT_MAX + 1),
        mtp: is_drafted,
        image_tokens: 0,
        draft: if is_drafted { args.draft } else { Draft::Off },
    };
    let threads = load::threads(args.threads.first().copied());
    let loaded = load::load(weights, &args.model, Some(threads), sizes, output)?;
    let device = loaded.qwen.device().name();
    let vocabulary = weights.config.vocabulary;
    let engine = Engine::start(Box::new(loaded.qwen), Settings::new(vocabulary, Vec::new()))?;
    let mut progress = Progress::new(output, "measuring", Unit::Count);
    let total = (args.prompt.len() * args.streams.len() * args.drafts.len()) as u64;
    let mut crowds: Vec<Crowd> = Vec::new();
    for &prompt in &args.prompt {
        let prompts: Vec<Prompt> =
            (0..slots).map(|at| (measure::prompt(prompt, at, vocabulary), args.tokens)).collect();
        let mut known = vec![None; slots];
        for &streams in &args.streams {
            for &drafts in &args.drafts {
                crowds.push(crowd(&engine, &prompts[..streams], (drafts, policy), args.reps, &mut known)?);
                progress.set(crowds.len() as u64, total);
            }
        }
    }
    drop(progress);
    engine.stop("everything is measured");
    print(&crowds, &device, args, output)
}

/// Runs one case; its replies must be the known ones.
fn crowd(
    engine: &Handle,
    prompts: &[Prompt],
    (drafts, drafted): (OnOff, DraftPolicy),
    reps: usize,
    known: &mut [Option<Vec<u32>>],
) -> Result<Crowd> {
    let policy = match drafts {
        OnOff::On => drafted,
        OnOff::Off => DraftPolicy::Off,
    };
    let drafting = Drafting { policy, ..Drafting::default() };
    let streams = prompts.len();
    let mut crowd = Crowd {
        streams,
        drafts,
        prompt: prompts[0].0.len(),
        tokens: 0,
        times: Vec::new(),
        first: Vec::new(),
        together: Vec::new(),
        stats: DraftStats::default(),
        hash: String::new(),
    };
    for _ in 0..reps {
        let start = Instant::now();
        let replies = ask_all(engine, prompts, drafting, streams)?;
        crowd.times.push(start.elapsed());
        let first = replies.iter().map(|reply| reply.stats.queued + reply.stats.prefill).max();
        crowd.first.push(first.unwrap_or_default());
        crowd.together.extend(Together::of(&replies));
        crowd.tokens = replies.iter().map(|reply| reply.tokens.len()).sum();
        replies.iter().for_each(|reply| crowd.stats.add(&reply.stats.drafts));
        equal(&replies, prompts, drafts, known)?;
        let mut digest = Sha256::new();
        replies.iter().flat_map(|reply| &reply.tokens).for_each(|token| digest.update(token.to_le_bytes()));
        crowd.hash = table::hex(&digest.finalize());
    }
    crowd.times.sort();
    crowd.first.sort();
    crowd.together.sort_by(|a, b| b.rate().total_cmp(&a.rate()));
    Ok(crowd)
}

/// Company and drafts must not change a reply.
fn equal(replies: &[Asked], prompts: &[Prompt], drafts: OnOff, known: &mut [Option<Vec<u32>>]) -> Result {
    for (at, (reply, known)) in replies.iter().zip(known).enumerate() {
        if reply.tokens.len() != prompts[at].1 {
            let message = format!("stream {at} ended after {} tokens", reply.tokens.len());
            return Err(Failure::new(Exit::Failure, message)
                .hint("`clary check MODEL` looks for values that cause this"));
        }
        let known = known.get_or_insert_with(|| reply.tokens.clone());
        if let Some(token) = (0..known.len()).find(|token| known[*token] != reply.tokens[*token]) {
            let message = format!(
                "prompt of {} tokens, {} streams, drafts {}: token {token} of stream {at} is not the one of \
                 the first run",
                prompts[at].0.len(),
                replies.len(),
                word(drafts),
            );
            return Err(Failure::new(Exit::Mismatch, message)
                .hint("this is a fault of the program or of the machine; please report it"));
        }
    }
    Ok(())
}

fn word(drafts: OnOff) -> &'static str {
    match drafts {
        OnOff::On => "on",
        OnOff::Off => "off",
    }
}

impl Crowd {
    /// Tokens per second of all streams together, prompts included: least, median, most.
    fn rates(&self) -> [f64; 3] {
        let last = self.times.len() - 1;
        [last, last / 2, 0].map(|at| self.tokens as f64 / self.times[at].as_secs_f64().max(1e-9))
    }

    fn first_ms(&self) -> f64 {
        self.first[self.first.len() / 2].as_secs_f64() * 1e3
    }

    /// The median repetition while all streams were decoding, if they ever were.
    fn together(&self) -> Option<&Together> {
        self.together.get(self.together.len() / 2)
    }

    /// Share of accepted drafts; `None` where nothing was drafted.
    fn accepted(&self) -> Option<f64> {
        (self.stats.proposed > 0).then(|| self.stats.accepted as f64 / self.stats.proposed as f64)
    }
}

fn print(crowds: &[Crowd], device: &str, args: &BenchArgs, output: &Output) -> Result {
    if output.json {
        let case = |crowd: &Crowd| -> Value {
            let [min, median, max] = crowd.rates();
            json!({
                "prompt": crowd.prompt,
                "streams": crowd.streams,
                "drafts": word(crowd.drafts),
                "tokens": crowd.tokens,
                "tokens_per_s": {"min": min, "median": median, "max": max},
                "decode_tokens_per_s": crowd.together().map(Together::rate),
                "round_ms": crowd.together().map(|together| together.round_ms(crowd.streams)),
                "first_token_ms": crowd.first_ms(),
                "drafts_proposed": crowd.stats.proposed,
                "drafts_accepted": crowd.stats.accepted,
                "token_hash": crowd.hash,
            })
        };
        let cases: Vec<Value> = crowds.iter().map(case).collect();
        let document =
            json!({"model": args.model.model, "device": device, "reps": args.reps, "crowds": cases});
        return Ok(output.document(&document)?);
    }
    let mut table = Table::new(">><>>>>>>><");
    table.row([
        "prompt",
        "streams",
        "drafts",
        "min",
        "median",
        "max",
        "decode",
        "round ms",
        "first ms",
        "accepted",
        "token hash",
    ]);
    for crowd in crowds {
        let [min, median, max] = crowd.rates().map(|rate| format!("{rate:.1}"));
        let accepted = crowd.accepted().map_or("-".into(), |share| format!("{:.1} %", share * 100.0));
        let (prompt, streams) = (crowd.prompt.to_string(), crowd.streams.to_string());
        let first = format!("{:.1}", crowd.first_ms());
        let (drafts, hash) = (word(crowd.drafts), &crowd.hash[..12]);
        let number = |of: &dyn Fn(&Together) -> f64, digits: usize| {
            crowd.together().map_or("-".into(), |together| format!("{:.digits$}", of(together)))
        };
        let decode = number(&Together::rate, 1);
        let round = number(&|together| together.round_ms(crowd.streams), 2);
        table.row([&prompt, &streams, drafts, &min, &median, &max, &decode, &round, &first, &accepted, hash]);
    }
    let head = format!("{}\n{device}, {} repetitions\n\n", args.model.model, args.reps);
    let title = output.bold("tokens per second of all streams together, prompts included\n");
    let foot = "\ndecode: tokens per second while every stream was decoding; round: a step of them all\n";
    Ok(output.out(&(head + &title + &table.text() + foot))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_that_differ_end_with_code_7() {
        let prompts: [Prompt; 2] = [(vec![1, 2], 3), (vec![3], 3)];
        let replies = |last: u32| {
            let asked = |tokens| Asked { tokens, rounds: vec![1, 1, 1], ..Asked::default() };
            [asked(vec![5, 6, 7]), asked(vec![8, 9, last])]
        };
        let mut known = vec![None; 2];
        for drafts in [OnOff::Off, OnOff::On] {
            equal(&replies(4), &prompts, drafts, &mut known).expect("the first run, and the same again");
        }
        let failure = equal(&replies(5), &prompts, OnOff::On, &mut known).expect_err("a token differs");
        assert_eq!(failure.exit as u8, 7);
        assert!(failure.message.contains("token 2 of stream 1"), "{}", failure.message);
        let mut short = replies(4);
        short[0].tokens.pop();
        let failure = equal(&short, &prompts, OnOff::On, &mut known).expect_err("a stream is cut");
        assert_eq!(failure.exit, Exit::Failure);
    }
}
