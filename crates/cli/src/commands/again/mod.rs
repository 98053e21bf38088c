//! `clary verify`, `clary replay` and `clary bundle`: a reply made again, plainly, and compared.

mod bundle;
mod compare;
mod files;
mod plain;
mod seen;

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use server::http::{Receipt, Rerun, RerunError};

pub(crate) use bundle::bundle;
pub(crate) use compare::kv_name;
use compare::{Difference, Place};
use files::Told;
use plain::{Plain, Words};
use seen::Seen;

use crate::args::{Ctx, Kv, MachineArgs, OnOff, ThreadsArg, ctx};
use crate::error::{Exit, Failure, Result};
use crate::interrupt::Interrupt;
use crate::output::Output;
use crate::settings::{LateSystemArg, kwargs};
use crate::vision::VisionArgs;

/// How to run a reply again. What is not given is as the receipt says.
#[derive(Clone, Debug, Args)]
pub(crate) struct AgainArgs {
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
    #[command(flatten)]
    pub(crate) threads: ThreadsArg,
    /// Form of the K/V cache [default: the receipt's]
    #[arg(long, value_enum)]
    pub(crate) kv: Option<Kv>,
    /// Most tokens of a sequence, or auto: what fits [default: the receipt's]
    #[arg(long, value_name = "N|auto", value_parser = ctx)]
    pub(crate) ctx: Option<Ctx>,
    /// As the server was started: pictures are part of what a reply is made from.
    #[command(flatten)]
    pub(crate) vision: VisionArgs,
}

/// `verify`.
#[derive(Clone, Debug, Args)]
pub(crate) struct VerifyArgs {
    /// A receipt, or a reply with one: an object, or the lines of a stream
    pub(crate) receipt: PathBuf,
    /// Folder or name of the model [default: the one of the store that the receipt names]
    pub(crate) model: Option<String>,
    /// The request's body, as it was sent
    #[arg(long, value_name = "FILE")]
    pub(crate) request: PathBuf,
    #[command(flatten)]
    pub(crate) again: AgainArgs,
    /// The server's --thinking, where the request does not say [default: on]
    #[arg(long, value_enum)]
    pub(crate) thinking: Option<OnOff>,
    /// The server's --template-kwargs
    #[arg(long, value_name = "JSON", alias = "default-chat-template-kwargs")]
    pub(crate) template_kwargs: Option<String>,
    #[command(flatten)]
    pub(crate) late_system: LateSystemArg,
}

/// `replay`.
#[derive(Clone, Debug, Args)]
pub(crate) struct ReplayArgs {
    /// A bundle, from `clary bundle` or from the folder of `serve --record`
    pub(crate) bundle: PathBuf,
    /// Folder or name of the model [default: the one of the store that the receipt names]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) again: AgainArgs,
}

/// `bundle`.
#[derive(Clone, Debug, Args)]
pub(crate) struct BundleArgs {
    /// The reply's id (chatcmpl-...) or its X-Request-Id
    pub(crate) request_id: String,
    /// The folder that `serve --record DIR` writes requests to as they run
    #[arg(long, value_name = "DIR", env = "CLARY_RECORD")]
    pub(crate) record: PathBuf,
    /// Where to write the bundle [default: stdout]
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

/// Runs a request again and compares the receipts.
pub(crate) fn verify(args: &VerifyArgs, output: &Output) -> Result {
    Interrupt::install()?;
    let told = files::told(&args.receipt)?;
    let receipt = &told.receipt;
    let request = files::request(&args.request)?;
    let words = Words {
        thinking: args.thinking.map(|thinking| thinking == OnOff::On),
        kwargs: kwargs(args.template_kwargs.as_deref().unwrap_or("{}"))?,
        late_system: args.late_system.rule(),
    };
    if let Some(difference) = compare::before(receipt, args.again.kv) {
        return Err(differs(&difference, receipt, output)?);
    }
    let plain = match Plain::open(receipt, args.model.as_deref(), &args.again, words, output)? {
        Ok(plain) => plain,
        Err(difference) => return Err(differs(&difference, receipt, output)?),
    };
    match plain.run(request)? {
        Ok(now) => settle(&told, &now, &plain, output),
        Err(error) => Err(refused(&error)),
    }
}

/// Runs a recorded request again and compares what came of it.
pub(crate) fn replay(args: &ReplayArgs, output: &Output) -> Result {
    Interrupt::install()?;
    let bundle = files::bundle(&args.bundle)?;
    let receipt = &bundle.receipt;
    let server = bundle.server;
    let words = Words {
        thinking: Some(server.thinking),
        kwargs: server.template_kwargs,
        late_system: server.late_system,
    };
    if let Some(difference) = compare::before(receipt, args.again.kv) {
        return Err(differs(&difference, receipt, output)?);
    }
    let plain = match Plain::open(receipt, args.model.as_deref(), &args.again, words, output)? {
        Ok(plain) => plain,
        Err(difference) => return Err(differs(&difference, receipt, output)?),
    };
    match (plain.run(bundle.request)?, bundle.error) {
        (Ok(now), None) => {
            // A bundle holds no text beside its receipt.
            let told = Told { receipt: bundle.receipt, seen: Seen::default() };
            settle(&told, &now, &plain, output)
        }
        (Err(RerunError::Refused { code, .. }), Some(error)) if code == error => {
            if output.json {
                output.document(&json!({"equal": true, "error": error}))?;
                return Ok(());
            }
            Ok(output.out(&format!("equal: both ended with {error}\n"))?)
        }
        (Ok(now), Some(error)) => {
            let made: usize = now.receipt.output_ids.iter().map(Vec::len).sum();
            let what =
                format!("the recorded reply ended with {error}; now it has {made} tokens and no error");
            Err(differs(&Difference::new("error", what), receipt, output)?)
        }
        (Err(error), _) => Err(refused(&error)),
    }
}

/// Says that both are equal, or where they part.
fn settle(told: &Told, again: &Rerun, plain: &Plain, output: &Output) -> Result {
    let (then, now) = (&told.receipt, &again.receipt);
    if let Some(difference) = compare::after(then, now, plain.tokenizer()) {
        return Err(differs(&difference, then, output)?);
    }
    // A receipt by itself has no text to compare.
    let has_text = told.seen != Seen::default();
    if has_text && let Some(parting) = told.seen.parting(&Seen::of([&again.reply])) {
        return Err(differs(&Difference::text(parting), then, output)?);
    }
    let characters = has_text.then(|| told.seen.characters());
    let notes = compare::notes(then, now);
    let tokens: usize = now.output_ids.iter().map(Vec::len).sum();
    let choices = now.output_ids.len();
    if output.json {
        let document = json!({"equal": true, "tokens": tokens, "choices": choices, "characters": characters,
            "output": now.output, "notes": notes});
        return Ok(output.document(&document)?);
    }
    for note in notes {
        output.note(&format!("note: {note}"))?;
    }
    let replies = if choices == 1 { "1 reply".to_owned() } else { format!("{choices} replies") };
    let text = characters.map(|count| format!(" and {count} characters of text")).unwrap_or_default();
    Ok(output.out(&format!("equal: {tokens} tokens{text} of {replies}, {}\n", now.output))?)
}

/// The failure that names a difference; with `--json` the difference is printed as well.
fn differs(difference: &Difference, receipt: &Receipt, output: &Output) -> Result<Failure> {
    if output.json {
        let place = difference.place.as_ref().map(|place| match place {
            Place::Token(choice, token) => json!({"choice": choice, "token": token}),
            Place::Text(member, character) => json!({"member": member, "character": character}),
        });
        output.document(&json!({"equal": false, "what": difference.what, "place": place,
            "message": difference.message, "output": receipt.output}))?;
    }
    let message = format!("differs: {}", difference.message);
    Ok(Failure::new(Exit::Mismatch, message).hint(difference.hint()))
}

fn refused(error: &RerunError) -> Failure {
    let failure = Failure::new(Exit::Mismatch, format!("the request could not be answered again: {error}"));
    failure.hint("is this the request of the receipt, word for word?")
}
