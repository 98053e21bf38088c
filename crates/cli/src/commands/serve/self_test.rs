//! A short run before the server says that it is ready.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use engine::{DraftPolicy, Drafting, Event, FinishReason, Request};
use server::Session;

use crate::error::{Exit, Failure, Result};

/// What is continued.
const PROMPT: &str = "Hello! One, two, three, four, one, two, three,";
/// Tokens of each run.
const TOKENS: usize = 16;

/// How it went.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SelfTest {
    /// Tokens compared.
    pub(crate) tokens: usize,
    /// Both runs.
    pub(crate) time: Duration,
    /// Whether the second run was drafted.
    pub(crate) is_drafted: bool,
}

/// Continues a text plainly and as replies will be made, and compares.
pub(crate) fn self_test(session: &Session, drafting: Drafting) -> Result<SelfTest> {
    let start = Instant::now();
    let plain = run(session, Drafting { policy: DraftPolicy::Off, ..drafting })?;
    let other = run(session, drafting)?;
    if plain != other {
        let at = plain.iter().zip(&other).take_while(|(a, b)| a == b).count();
        let message = format!("self-test: the same text went on differently at token {at}");
        return Err(Failure::new(Exit::Mismatch, message).hint("`clary eval exact MODEL` says more"));
    }
    let is_drafted = drafting.policy != DraftPolicy::Off;
    Ok(SelfTest { tokens: plain.len(), time: start.elapsed(), is_drafted })
}

fn run(session: &Session, drafting: Drafting) -> Result<Vec<u32>> {
    let mut prompt = session.text().tokenizer.encode_raw(PROMPT)?;
    // A context of a few tokens is served as well.
    prompt.truncate(session.engine().limits().context.saturating_sub(TOKENS).max(1));
    let mut request = Request::new(prompt, TOKENS);
    request.cache = false;
    request.sampling.ignore_eos = true;
    request.drafting = drafting;
    let (sender, events) = channel();
    // The receiver lives until the last event.
    let sink = Box::new(move |event| drop(sender.send(event)));
    let _ticket = session.engine().submit(request, sink)?;
    let mut ids = Vec::new();
    for event in events {
        match event {
            Event::Tokens { tokens, .. } => ids.extend(tokens),
            Event::Finished { reason: FinishReason::Failed(error), .. } => {
                return Err(Failure::from(error).context("self-test"));
            }
            Event::Finished { .. } => break,
            _ => {}
        }
    }
    Ok(ids)
}
