//! `clary bench`: prefill and decode of one sequence, against what the machine can do, or several at once.

mod machine;
mod measure;
mod report;
mod streams;

use std::time::Duration;

use crate::args::{BenchArgs, Ctx, Draft};
use crate::error::{Exit, Failure, Result};
use crate::load::{self, ROWS_MAX, Sizes};
use crate::memory;
use crate::output::Output;
use crate::progress::{Progress, Unit};
use crate::weights::Weights;

use machine::Machine;
use measure::Case;

/// Everything that was measured.
struct Measured {
    cases: Vec<Case>,
    machines: Vec<Machine>,
    /// Load time for each number of threads.
    loads: Vec<(usize, Duration)>,
    /// Largest memory of the process before the machine was measured; `None` where the system does not say.
    peak: Option<u64>,
    /// Bytes of the weights that were loaded, as stored.
    weights: u64,
    /// Multiply-adds with weight matrices for one prompt token.
    work: u64,
    device: String,
}

/// Measures every case, then the machine, and prints a table.
pub(crate) fn bench(args: &BenchArgs, output: &Output) -> Result {
    super::no_template(&args.model, output)?;
    if args.model.machine.device == "reference" {
        return Err(Failure::usage("the reference device judges errors; its speed means nothing")
            .hint("--device cpu"));
    }
    let weights = Weights::open(&args.model.model)?;
    if !args.streams.is_empty() {
        return streams::bench(&weights, args, output);
    }
    let threads = match args.threads.is_empty() {
        true => vec![load::threads(None)],
        false => args.threads.clone(),
    };
    let longest = args.prompt.iter().max().copied().unwrap_or(1);
    let sizes = Sizes {
        slots: 1,
        snapshots: 0,
        ctx: context(args.model.ctx, longest + args.tokens, weights.config.positions_max)?,
        rows_max: ROWS_MAX.min(longest),
        logits_rows_max: 1,
        mtp: false,
        image_tokens: 0,
        draft: Draft::Off,
    };
    let mut measured = Measured {
        cases: Vec::new(),
        machines: Vec::new(),
        loads: Vec::new(),
        peak: None,
        weights: 0,
        work: measure::work(&weights.config),
        device: String::new(),
    };
    for &threads in &threads {
        let mut loaded = load::load(&weights, &args.model, Some(threads), sizes, output)?;
        measured.loads.push((threads, loaded.time));
        measured.device = loaded.qwen.device().name();
        measured.weights = loaded.qwen.memory_plan().weights;
        let mut progress = Progress::new(output, "measuring", Unit::Count);
        let total = (args.prompt.len() * args.reps) as u64;
        let mut done = 0;
        measure::warm_up(&mut loaded.qwen)?;
        for &prompt in &args.prompt {
            let mut case = Case::new(&loaded.qwen, threads, prompt, args.tokens);
            for _ in 0..args.reps {
                case.run(&mut loaded.qwen)?;
                done += 1;
                progress.set(done, total);
            }
            measured.cases.push(case);
        }
        let device = load::named(&args.model.machine.device, &weights);
        output.note(&format!("memory   {}", memory::held(&loaded.qwen, &device)))?;
    }
    measured.peak = memory::peak();
    let device = load::named(&args.model.machine.device, &weights);
    measured.machines =
        threads.iter().map(|&threads| Machine::measure(&device, threads)).collect::<Result<_>>()?;
    report::print(&measured, args, output)?;
    equal(&measured.cases)
}

fn context(ctx: Ctx, needed: usize, trained: usize) -> Result<Ctx> {
    match ctx {
        _ if needed > trained => {
            let message =
                format!("the longest case needs {needed} tokens; the model was trained for {trained}");
            Err(Failure::usage(message).hint("lower --prompt and --tokens"))
        }
        Ctx::Tokens(tokens) if tokens < needed => {
            Err(Failure::usage(format!("--ctx is {tokens}, but the longest case needs {needed} tokens"))
                .hint("leave --ctx out, or lower --prompt and --tokens"))
        }
        Ctx::Tokens(tokens) => Ok(Ctx::Tokens(tokens)),
        Ctx::Auto => Ok(Ctx::Tokens(needed)),
    }
}

/// Repetitions and thread counts must give the same tokens.
fn equal(cases: &[Case]) -> Result {
    for case in cases {
        let same = cases.iter().filter(|other| other.prompt == case.prompt);
        let mut hashes = same.flat_map(|other| other.hashes.iter().map(move |hash| (other.threads, hash)));
        let first = &case.hashes[0];
        if let Some((threads, hash)) = hashes.find(|(_, hash)| *hash != first) {
            let message = format!(
                "prompt of {} tokens: {} threads give tokens {first}, {threads} threads give {hash}",
                case.prompt, case.threads
            );
            return Err(Failure::new(Exit::Mismatch, message)
                .hint("this is a fault of the program or of the machine; please report it with the table"));
        }
    }
    Ok(())
}
