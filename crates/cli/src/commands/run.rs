//! `clary run`: one reply.

use std::io::{IsTerminal, stdin};
use std::path::Path;

use serde_json::Value;
use server::{Conversation, Finish, Options, TextSide};
use text::{Answer, Content, Grammar, GrammarCompiler, Message, Part, Role};

use crate::args::RunArgs;
use crate::error::{Failure, Result};
use crate::interrupt::Interrupt;
use crate::load::Sizes;
use crate::output::Output;
use crate::session;
use crate::settings::{self, Thinking, Wish};
use crate::{input, reply, table, vision};

/// Longest prompt read from stdin, bytes.
const PROMPT_BYTES_MAX: u64 = 64 << 20;
/// Longest schema file, bytes: written out with white space, it may be longer than the schema is.
const SCHEMA_BYTES_MAX: u64 = 4 << 20;

/// Answers one question.
pub(crate) fn run(args: &RunArgs, output: &Output) -> Result {
    let how = &args.reply;
    let thinking = Thinking::new(&how.model)?;
    let prompt = prompt(args.prompt.as_deref())?;
    let pictures = args.image.iter().map(|path| vision::part(path)).collect::<Result<Vec<_>>>()?;
    let interrupt = Interrupt::install()?;
    let draft = how.draft.draft;
    let sizes = Sizes::reply(how.model.ctx, draft);
    let answer = match args.json_schema.as_deref() {
        Some(path) => Some((path, schema(path)?)),
        None => None,
    };
    let constrain = |text: &TextSide| answer.map(|(path, schema)| grammar(text, path, schema)).transpose();
    let (running, grammar) = session::start_with(how, sizes, output, constrain)?;
    let sampling = settings::sampling(&how.sampling, &running.session.text().defaults);
    let seed = sampling.seed;
    if output.verbose > 0 {
        output.note(&format!("seed     {seed}"))?;
    }
    let wish = Wish { thinking: &thinking, sampling, max_tokens: how.sampling.max_tokens, draft };
    let options = Options { grammar, ..settings::options(wish) };
    let mut messages = Vec::new();
    messages.extend(how.system.as_deref().map(|system| Message::text(Role::System, system)));
    messages.push(question(prompt, pictures));
    let stream = running.session.start(Conversation { messages, tools: Vec::new() }, &options)?;
    let outcome = reply::show(stream, output, &interrupt)?;
    if output.json {
        output.document(&reply::document(&outcome, seed, running.load))?;
    }
    let load = running.load.as_secs_f64();
    output.note(&output.dim(&format!("{} | load {load:.2} s", reply::statistics(&outcome))))?;
    if output.verbose > 1 {
        output.note(&format!(
            "peak     {}",
            crate::memory::peak().map_or("unavailable".into(), table::bytes)
        ))?;
    }
    match outcome.finish {
        Finish::Cancelled => Err(Failure::interrupted()),
        _ => Ok(()),
    }
}

/// The question, behind its pictures.
fn question(prompt: String, mut parts: Vec<Part>) -> Message {
    if parts.is_empty() {
        return Message::text(Role::User, prompt);
    }
    parts.push(Part::Text(prompt));
    Message { content: Content::Parts(parts), ..Message::text(Role::User, "") }
}

/// A schema from a file.
fn schema(path: &Path) -> Result<Value> {
    let read = input::file(path, SCHEMA_BYTES_MAX);
    let bytes = read.map_err(|failure| failure.or_hint("a JSON Schema may have 256 KiB"))?;
    serde_json::from_slice(&bytes).map_err(|error| {
        Failure::usage(format!("{}: not JSON: {error}", path.display())).hint("a JSON Schema is expected")
    })
}

/// The constraint of a schema. A refusal points into the file.
fn grammar(text: &TextSide, path: &Path, schema: Value) -> Result<Grammar> {
    let compiler = GrammarCompiler::new(&text.tokenizer, &text.defaults.stop_ids)?;
    compiler.compile(Some(&Answer::Schema(schema)), None).map_err(|error| {
        let message = format!("{}: {error}", path.display());
        Failure::usage(message).hint("docs/api.md section 3.5 lists the keywords that are enforced")
    })
}

/// The question: as typed, or from stdin.
fn prompt(typed: Option<&str>) -> Result<String> {
    let prompt = match typed {
        Some("-") => read()?,
        Some(text) => text.to_owned(),
        None if stdin().is_terminal() => {
            return Err(Failure::usage("no prompt").hint("clary run MODEL \"question\", or - to read stdin"));
        }
        None => read()?,
    };
    if prompt.trim().is_empty() {
        return Err(
            Failure::usage("the prompt is empty").hint("clary run MODEL \"question\", or - to read stdin")
        );
    }
    Ok(prompt)
}

fn read() -> Result<String> {
    let read = input::text_or_stdin(Path::new("-"), PROMPT_BYTES_MAX);
    read.map_err(|failure| failure.or_hint("send a shorter prompt"))
}
