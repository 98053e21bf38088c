//! A long mixed load on a model through the engine's thread:
//!
//!     cargo run --release -p contracts --example soak -- [MODEL] [--slots N] [--minutes N] [--seed S]
//!
//! Ends with status 1 if a reply differs from the one computed alone, a request fails, a slot stays in use,
//! or memory grows by more than 1 MB a minute after the first five.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use contracts::evaluation::{Asker, read_items};
use contracts::soak::{Load, SETTLING, Soaked, soak};
use contracts::{Folder, Sizes, Subject, random_text};
use device::KvForm;
use engine::{Engine, Settings};
use text::GenerationDefaults;

/// Most growth of resident memory, bytes a minute.
const SLOPE_MAX: f64 = 1e6;
/// Tokens of a sequence.
const CONTEXT: usize = 2048;

struct Args {
    model: PathBuf,
    device: String,
    slots: usize,
    minutes: f64,
    seed: u64,
}

fn args() -> Result<Args, String> {
    let mut args =
        Args { model: "models/demo".into(), device: "cpu".into(), slots: 8, minutes: 30.0, seed: 1 };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        let wrong = |value: &str| format!("{word}: {value} is not a number in range");
        match word.as_str() {
            "--slots" => {
                let value = value()?;
                args.slots = value.parse().ok().filter(|slots| *slots > 1).ok_or(wrong(&value))?;
            }
            "--minutes" => {
                let value = value()?;
                args.minutes = value.parse().ok().filter(|minutes| *minutes > 0.0).ok_or(wrong(&value))?;
            }
            "--seed" => {
                let value = value()?;
                args.seed = value.parse().map_err(|_| wrong(&value))?;
            }
            "--device" => args.device = value()?,
            _ if word.starts_with('-') => return Err(format!("{word} is not known")),
            _ => args.model = word.into(),
        }
    }
    Ok(args)
}

fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

fn print(soaked: &Soaked) {
    let drafts = &soaked.drafts;
    let share = 100.0 * drafts.accepted as f64 / drafts.proposed.max(1) as f64;
    let memory = soaked.memory.last().map_or(0, |(_, bytes)| *bytes);
    println!(
        "{:5.1} min  requests {}  finished {}  cancelled {}  compared {}  failures {}  canary {} x {:016x}  \
         prompt tokens {}  from cache {}  generated {}  drafts accepted {} of {} ({share:.1} %)  \
         RSS {:.1} MB",
        soaked.elapsed.as_secs_f64() / 60.0,
        soaked.requests,
        soaked.finished,
        soaked.cancelled,
        soaked.compared,
        soaked.failures,
        soaked.canaries,
        soaked.canary,
        soaked.prompt_tokens,
        soaked.hit_tokens,
        soaked.generated,
        drafts.accepted,
        drafts.proposed,
        megabytes(memory),
    );
}

/// Prompts of the folder's question set where it has one, else random ids.
fn texts(args: &Args, vocabulary: usize) -> Vec<Vec<u32>> {
    let questions = || {
        let items = std::fs::read_to_string(args.model.join("eval/items.jsonl")).ok()?;
        let asker = Asker::open(&args.model).ok()?;
        let items = read_items(&items).ok()?;
        let items = items.iter().filter(|item| !item.has_pictures());
        items.map(|item| asker.prompt(item).ok().map(|(ids, _)| ids)).collect::<Option<Vec<_>>>()
    };
    questions().unwrap_or_else(|| (0..40).map(|seed| random_text(vocabulary, 200, seed)).collect())
}

/// Whether everything that must hold held; says what did not.
fn verdict(soaked: &Soaked) -> bool {
    let slope = soaked.slope(SETTLING);
    let at =
        |at: Duration| soaked.memory_at(at).map_or("-".into(), |bytes| format!("{:.1}", megabytes(bytes)));
    let end = soaked.memory.last().map_or(0, |(_, bytes)| *bytes);
    println!(
        "memory: start {} MB, after 5 minutes {} MB, end {:.1} MB, slope after 5 minutes {} MB a minute",
        at(Duration::ZERO),
        at(SETTLING),
        megabytes(end),
        slope.map_or("-".into(), |slope| format!("{:.3}", slope / 1e6)),
    );
    println!("slots in use and requests waiting at the end: {}", soaked.busy.unwrap_or(0));
    if let Some(failure) = &soaked.first_failure {
        println!("first failure: {failure}");
    }
    let held = soaked.failures == 0
        && soaked.busy == Some(0)
        && soaked.canaries > 0
        && slope.is_none_or(|slope| slope <= SLOPE_MAX);
    println!("{}", if held { "held" } else { "NOT HELD" });
    held
}

fn run(args: &Args) -> Result<bool, Box<dyn std::error::Error>> {
    let sizes = Sizes { slots: args.slots, snapshots: 4 * args.slots, context: CONTEXT, rows_max: 512 };
    let subject = Folder { kv: KvForm::Int8, ..Folder::new(&args.model, &args.device) };
    let model = subject.open(sizes)?;
    let vocabulary = model.spec().vocabulary;
    let eos = GenerationDefaults::open(&args.model).map(|defaults| defaults.stop_ids).unwrap_or_default();
    let texts = texts(args, vocabulary);
    println!("{}, {} slots, seed {}, {} minutes", subject.name(), args.slots, args.seed, args.minutes);
    let handle = Engine::start(model, Settings::new(vocabulary, eos))?;
    let duration = Duration::from_secs_f64(args.minutes * 60.0);
    let load = Load { texts: &texts, slots: args.slots, duration, seed: args.seed };
    let soaked = soak(&handle, &load, &mut print)?;
    handle.stop("the soak is over");
    Ok(verdict(&soaked))
}

fn main() -> ExitCode {
    let outcome = args().map_err(Into::into).and_then(|args| run(&args));
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
