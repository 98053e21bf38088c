//! `clary eval vision`: questions about pictures, alone and in company, plain and drafted.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use contracts::evaluation::{Check, Item, Marks, read_items};
use engine::{DraftPolicy, Drafting, Engine, Sampling};
use serde_json::{Value, json};
use server::{Conversation, Options, Outcome, Session, Stream, TextSide, Update};
use sha2::{Digest, Sha256};
use text::{Message, Tool};

use crate::args::{Ctx, Draft, VisionEvalArgs};
use crate::error::{Exit, Failure, Result};
use crate::interrupt::Interrupt;
use crate::load::{self, Sizes};
use crate::output::Output;
use crate::table::{Table, hex};
use crate::vision::{self, Switch};
use crate::weights::Weights;

/// Longest wait for a sign of life of a reply.
const WAIT: Duration = Duration::from_millis(200);
/// Tokens of a sequence: the longest question of the set and its reply.
const CONTEXT: usize = 1024;

/// One way of asking, and what came of it.
struct Run {
    streams: usize,
    drafted: bool,
    marks: Marks,
    /// Over the ids of all replies, in the order of the questions.
    hash: String,
    wrong: Vec<String>,
}

/// Asks every question about pictures in each way.
pub(crate) fn vision_eval(args: &VisionEvalArgs, output: &Output) -> Result {
    Interrupt::install()?;
    let weights = Weights::open(&args.model.model)?;
    let text = TextSide::open(&weights.dir)?;
    let folder = args.set.clone().unwrap_or_else(|| weights.dir.join("eval"));
    let items = questions(&folder)?;
    let most = args.streams.iter().copied().max().unwrap_or(1);
    let (session, _) = open(&weights, text, args, most)?;
    let mut runs = Vec::new();
    for &streams in &args.streams {
        for drafted in [false, true] {
            runs.push(run(&session, &items, &folder, streams, drafted, output)?);
        }
    }
    report(&runs, &items, args, output)?;
    verdict(&runs, args.least)
}

/// Questions of the set that show pictures.
fn questions(folder: &Path) -> Result<Vec<Item>> {
    let path = folder.join("items.jsonl");
    let lines = fs::read_to_string(&path).map_err(|error| Failure::file(&path, &error))?;
    let items = read_items(&lines).map_err(|error| {
        Failure::usage(format!("{}: {error}", path.display()))
            .hint("models/demo/eval/README.md of the project says what a line has")
    })?;
    let items: Vec<Item> = items.into_iter().filter(Item::has_pictures).collect();
    match items.is_empty() {
        true => Err(Failure::usage(format!("{}: no question has a picture", path.display()))
            .hint("--set names a folder with items.jsonl; the demo model brings one")),
        false => Ok(items),
    }
}

fn open(weights: &Weights, text: TextSide, args: &VisionEvalArgs, slots: usize) -> Result<(Session, String)> {
    let mut device = load::device(&args.model.machine.device, args.threads.threads)?;
    let Some(vision) = vision::settle(weights, &args.vision, &mut *device)? else {
        return Err(match args.vision.vision {
            Switch::Off => Failure::usage("--vision off leaves no question").hint("leave it out"),
            _ => Failure::new(Exit::Model, "the model or the device takes no pictures")
                .hint("--vision on says which"),
        });
    };
    let ctx = match args.model.ctx {
        Ctx::Auto => Ctx::Tokens(CONTEXT.min(weights.config.positions_max)),
        typed => typed,
    };
    let sizes = Sizes { slots, image_tokens: vision.tokens_max, ..Sizes::chat(ctx, Draft::Auto) };
    let settings = load::settle(weights, &args.model, sizes)?;
    let name = device.name();
    let qwen = model::qwen3_5::open(weights.source(), device, settings, &mut |_, _| {})?;
    let mut settings = engine::Settings::new(text.tokenizer.vocab_size(), text.defaults.stop_ids.clone());
    settings.calibrate = true;
    let engine = Engine::start(Box::new(qwen), settings)?;
    Ok((Session::new(text, engine).with_vision(vision::start(vision)?), name))
}

fn run(
    session: &Session,
    items: &[Item],
    folder: &Path,
    streams: usize,
    drafted: bool,
    output: &Output,
) -> Result<Run> {
    let mut marks = Marks::default();
    let (mut hash, mut wrong) = (Sha256::new(), Vec::new());
    for (at, some) in items.chunks(streams).enumerate() {
        let started: Vec<Stream> =
            some.iter().map(|item| ask(session, item, folder, drafted)).collect::<Result<_>>()?;
        for (item, stream) in some.iter().zip(started) {
            let outcome = finish(stream);
            let right = item.is_right(&outcome.reply, true);
            outcome.ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
            marks.add(&item.kind, right, right);
            if !right {
                wrong.push(item.id.clone());
                if output.verbose > 0 {
                    let expected = match &item.check {
                        Check::Exact(text) | Check::Contains(text) => text.clone(),
                        other => format!("{other:?}"),
                    };
                    let said = outcome.reply.content.trim();
                    output.note(&format!("{}: {said:?}, expected {expected:?}", item.id))?;
                }
            }
        }
        if output.verbose > 1 {
            output.note(&format!("{} of {}", (at * streams + some.len()).min(items.len()), items.len()))?;
        }
    }
    Ok(Run { streams, drafted, marks, hash: hex(&hash.finalize()), wrong })
}

fn ask(session: &Session, item: &Item, folder: &Path, drafted: bool) -> Result<Stream> {
    let messages = Message::parse_all(&with_data(&item.messages, folder)?)?;
    let conversation = Conversation { messages, tools: Tool::parse_all(&item.tools)? };
    let policy = if drafted { Drafting::default().policy } else { DraftPolicy::Off };
    let options = Options {
        thinking: Some(item.thinking),
        sampling: Sampling::default(),
        max_tokens: Some(item.max_tokens),
        drafting: Drafting { policy, ..Drafting::default() },
        ..Options::default()
    };
    Ok(session.start(conversation, &options)?)
}

/// The messages with the files that they name put in.
fn with_data(messages: &Value, folder: &Path) -> Result<Value> {
    let mut messages = messages.clone();
    for message in messages.as_array_mut().into_iter().flatten() {
        for part in message["content"].as_array_mut().into_iter().flatten() {
            let Some(name) = part["image_url"]["url"].as_str() else { continue };
            let path = inside(folder, name)?;
            let bytes = vision::file(&path)?;
            part["image_url"]["url"] = format!("data:image/auto;base64,{}", STANDARD.encode(bytes)).into();
        }
    }
    Ok(messages)
}

/// A file of the set: a relative path that does not lead out of its folder.
fn inside(folder: &Path, name: &str) -> Result<PathBuf> {
    if name.starts_with("data:") || name.contains("://") {
        let start: String = name.chars().take(40).collect();
        return Err(Failure::usage(format!("picture {start:?}: a file of the set is expected, not a URL"))
            .hint("items name pictures by a path relative to items.jsonl"));
    }
    let relative = Path::new(name);
    let plain = |part: std::path::Component<'_>| matches!(part, std::path::Component::Normal(_));
    match relative.components().all(plain) {
        true => Ok(folder.join(relative)),
        false => Err(Failure::usage(format!("picture {name:?} does not lie in the set's folder"))
            .hint("items name pictures by a path relative to items.jsonl")),
    }
}

fn finish(mut stream: Stream) -> Outcome {
    loop {
        if let Update::Finished(outcome) = stream.next(WAIT) {
            return *outcome;
        }
    }
}

fn report(runs: &[Run], items: &[Item], args: &VisionEvalArgs, output: &Output) -> Result {
    if output.json {
        let row = |run: &Run| {
            let [asked, right, _] = run.marks.total();
            json!({"streams": run.streams, "drafts": run.drafted, "asked": asked, "right": right,
                "sha256": run.hash, "wrong": run.wrong})
        };
        return Ok(output.document(&json!({
            "model": args.model.model,
            "questions": items.len(),
            "equal": runs.windows(2).all(|two| two[0].hash == two[1].hash),
            "runs": runs.iter().map(row).collect::<Vec<_>>(),
        }))?);
    }
    let mut table = Table::new("><>><");
    table.row(["streams", "drafts", "asked", "right", "sha256 of all replies"]);
    for run in runs {
        let [asked, right, _] = run.marks.total();
        let drafts = if run.drafted { "on" } else { "off" };
        table.row([&run.streams.to_string(), drafts, &asked.to_string(), &right.to_string(), &run.hash]);
    }
    Ok(output.out(&table.text())?)
}

/// Fails where too few replies are right, or where they differ.
fn verdict(runs: &[Run], least: usize) -> Result {
    if let Some(two) = runs.windows(2).find(|two| two[0].hash != two[1].hash) {
        let name =
            |run: &Run| format!("{} streams, drafts {}", run.streams, if run.drafted { "on" } else { "off" });
        let message = format!("{} and {} gave different replies", name(&two[0]), name(&two[1]));
        return Err(Failure::new(Exit::Mismatch, message)
            .hint("this is a fault of the program or of the machine; please report it"));
    }
    match runs.iter().map(|run| run.marks.total()[1]).min() {
        Some(right) if right < least => {
            let message = format!("right replies: {right}, at least {least} expected");
            Err(Failure::new(Exit::Gate, message))
        }
        _ => Ok(()),
    }
}
