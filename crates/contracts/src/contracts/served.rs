//! E1, E2, E3, E5 and E6 through the engine: whole replies, with its scheduling, drafting and prefix cache.

use std::sync::mpsc::{Receiver, channel};

use engine::{DraftPolicy, Drafting, Event, FinishReason, Handle, Refusal, Request, Sampling, Score, Ticket};

use crate::{Album, Contract, Outcome, Tally};

/// Tokens of a reply.
const REPLY: usize = 40;
/// Lengths of cached prompts: around the ends of blocks, and some between.
const CACHED: [usize; 9] = [5, 40, 63, 64, 65, 100, 127, 128, 129];
/// Requests at once: more than there are slots.
const COMPANY: usize = 20;

/// A token, the bits of its log-probability, and the same of the best tokens.
type ScoreBits = (u32, u32, Vec<(u32, u32)>);

/// What was heard of one choice, log-probabilities as bits.
#[derive(Clone, Debug, Default, PartialEq)]
struct Heard {
    tokens: Vec<u32>,
    scores: Vec<ScoreBits>,
    prompt_scores: Vec<ScoreBits>,
    reason: Option<FinishReason>,
    hit_tokens: usize,
}

impl Heard {
    /// What must be equal: everything but the cache.
    fn reply(&self) -> (&[u32], &[ScoreBits], &Option<FinishReason>) {
        (&self.tokens, &self.scores, &self.reason)
    }
}

fn bits(scores: Vec<Score>) -> impl Iterator<Item = ScoreBits> {
    scores.into_iter().map(|score| {
        let top = score.top.into_iter().map(|(token, logprob)| (token, logprob.to_bits())).collect();
        (score.token, score.logprob.to_bits(), top)
    })
}

/// A request on its way.
struct Waiting {
    events: Receiver<Event>,
    ticket: Ticket,
    choices: usize,
}

impl Waiting {
    fn submit(handle: &Handle, request: Request) -> Result<Self, Refusal> {
        let (sender, events) = channel();
        let choices = request.choices as usize;
        // Nobody listens any more once a request was cancelled.
        let sink = Box::new(move |event: Event| drop(sender.send(event)));
        Ok(Self { ticket: handle.submit(request, sink)?, events, choices })
    }

    /// Listens to the end, choice by choice.
    fn hear(self) -> Vec<Heard> {
        let mut all = vec![Heard::default(); self.choices];
        for event in &self.events {
            match event {
                Event::Admitted { choice, cache, .. } => all[choice as usize].hit_tokens = cache.hit_tokens,
                Event::PromptScores { scores, .. } => all[0].prompt_scores.extend(bits(scores)),
                Event::Tokens { choice, tokens, scores } => {
                    all[choice as usize].tokens.extend(tokens);
                    all[choice as usize].scores.extend(bits(scores));
                }
                Event::Finished { choice, reason, .. } => all[choice as usize].reason = Some(reason),
                Event::Prefilled { .. } => {}
            }
            if all.iter().all(|heard| heard.reason.is_some()) {
                break;
            }
        }
        drop(self.ticket);
        all
    }
}

fn ask(handle: &Handle, request: Request) -> Result<Heard, Refusal> {
    Ok(Waiting::submit(handle, request)?.hear().swap_remove(0))
}

/// An engine, and what ids from [`crate::IMAGE_ID`] on stand for.
#[derive(Clone, Copy)]
struct Served<'a> {
    handle: &'a Handle,
    album: Option<&'a Album>,
}

impl Served<'_> {
    /// Plain decode: no drafts, no cache.
    fn plain(&self, prompt: &[u32], sampling: &Sampling) -> Request {
        let request = match self.album {
            Some(album) => album.request(prompt, REPLY),
            None => Request::new(prompt.to_vec(), REPLY),
        };
        Request {
            sampling: sampling.clone(),
            cache: false,
            drafting: Drafting { policy: DraftPolicy::Off, ..Drafting::default() },
            logprobs: Some(3),
            ..request
        }
    }
}

/// Greedy, and sampled with penalties.
fn samplings() -> [Sampling; 2] {
    let greedy = Sampling { ignore_eos: true, ..Sampling::default() };
    let sampled = Sampling {
        temperature: 1.2,
        top_k: 50,
        top_p: 0.95,
        presence: 0.5,
        repetition: 1.1,
        seed: 77,
        ..greedy.clone()
    };
    [greedy, sampled]
}

/// Every contract that shows in replies. The text has at least 70 tokens.
/// With an album it is one that [`Album::place`] made, and the cases say so.
pub fn served(handle: &Handle, text: &[u32], album: Option<&Album>) -> Result<Vec<Outcome>, Refusal> {
    let on = Served { handle, album };
    let outcomes = [
        (drafted(on, text)?, "replies to pictures, every draft policy"),
        (concurrent(on, text)?, "20 requests with pictures at once"),
        (resumed(on, text)?, "replies to pictures after cache hits"),
        (scored(on, text)?, "log-probabilities after pictures"),
        (seeded(on, text)?, "choices after pictures"),
    ];
    let named = |(outcome, case): (Outcome, &'static str)| match album {
        Some(_) => Outcome { case, ..outcome },
        None => outcome,
    };
    Ok(outcomes.into_iter().map(named).collect())
}

/// Fixed and automatic depths, the model's drafts and copies, chains and trees.
fn drafted(on: Served<'_>, text: &[u32]) -> Result<Outcome, Refusal> {
    let mut tally = Tally::default();
    let prompt = &text[..50];
    let policies = [1, 2, 4, 8].map(DraftPolicy::Fixed).into_iter().chain([DraftPolicy::Auto(8)]);
    let draftings: Vec<Drafting> = policies
        .flat_map(|policy| {
            [(true, false, 1), (true, false, 3), (false, true, 1), (true, true, 2)]
                .map(|(mtp, copy, first)| Drafting { policy, mtp, copy, first })
        })
        .collect();
    for sampling in samplings() {
        let expected = ask(on.handle, on.plain(prompt, &sampling))?;
        tally.same(&expected.tokens.len(), &REPLY, || "the plain reply is too short".into());
        for drafting in &draftings {
            let found = ask(on.handle, Request { drafting: *drafting, ..on.plain(prompt, &sampling) })?;
            tally.same(&found.reply(), &expected.reply(), || {
                format!("temperature {}, {drafting:?}: replies differ", sampling.temperature)
            });
        }
    }
    Ok(tally.outcome(Contract::Drafted, "replies of every draft policy"))
}

/// More requests than slots at once, some cancelled on the way.
fn concurrent(on: Served<'_>, text: &[u32]) -> Result<Outcome, Refusal> {
    let mut tally = Tally::default();
    let samplings = samplings();
    let request = |at: usize| {
        let from = at * 3 % (text.len() / 2);
        let length = 1 + at * 29 % (text.len() - from);
        on.plain(&text[from..from + length], &samplings[at % 2])
    };
    let alone: Vec<Heard> = (0..COMPANY).map(|at| ask(on.handle, request(at))).collect::<Result<_, _>>()?;
    let together =
        |at: usize| Request { drafting: Drafting::default(), cache: !at.is_multiple_of(3), ..request(at) };
    let waiting: Vec<Waiting> =
        (0..COMPANY).map(|at| Waiting::submit(on.handle, together(at))).collect::<Result<_, _>>()?;
    for (at, waiting) in waiting.into_iter().enumerate() {
        if at % 7 == 3 {
            drop(waiting);
            continue;
        }
        let found = waiting.hear().swap_remove(0);
        tally.same(&found.reply(), &alone[at].reply(), || format!("request {at} of {COMPANY} differs"));
    }
    Ok(tally.outcome(Contract::Concurrent, "20 requests at once, some cancelled"))
}

/// Requests at once, for each of `counts`, drafted as the engine likes and then again from the cache: every
/// reply is the one that the request gets alone.
pub fn streams(
    handle: &Handle,
    text: &[u32],
    album: Option<&Album>,
    counts: &[usize],
) -> Result<Outcome, Refusal> {
    let on = Served { handle, album };
    let mut tally = Tally::default();
    let samplings = samplings();
    let request = |at: usize| {
        let from = at * 5 % (text.len() / 2);
        let length = text.len() - from - at * 7 % (text.len() / 4);
        on.plain(&text[from..from + length], &samplings[at % 2])
    };
    let most = counts.iter().copied().max().unwrap_or(0);
    let alone: Vec<Heard> = (0..most).map(|at| ask(on.handle, request(at))).collect::<Result<_, _>>()?;
    for &count in counts {
        for pass in ["first", "second"] {
            let cached = |at: usize| Request {
                drafting: Drafting::default(),
                cache: true,
                namespace: format!("{count} streams"),
                ..request(at)
            };
            let waiting: Vec<Waiting> =
                (0..count).map(|at| Waiting::submit(on.handle, cached(at))).collect::<Result<_, _>>()?;
            for (at, waiting) in waiting.into_iter().enumerate() {
                let found = waiting.hear().swap_remove(0);
                tally.same(&found.reply(), &alone[at].reply(), || {
                    format!(
                        "{count} streams, {pass} time: the reply of stream {at} differs from its own alone"
                    )
                });
            }
        }
    }
    Ok(tally.outcome(Contract::Concurrent, "replies of several streams, twice"))
}

/// Prompts that begin with cached ones, and the next turns of conversations.
fn resumed(on: Served<'_>, text: &[u32]) -> Result<Outcome, Refusal> {
    let mut tally = Tally::default();
    let mut hits = 0;
    for sampling in samplings() {
        for length in CACHED.into_iter().filter(|length| length + 4 <= text.len()) {
            let cached = |prompt: &[u32]| Request {
                cache: true,
                namespace: format!("{} {length}", sampling.temperature),
                marks: vec![length],
                drafting: Drafting::default(),
                ..on.plain(prompt, &sampling)
            };
            let first = ask(on.handle, cached(&text[..length]))?;
            let turn = [&text[..length], &first.tokens, &text[length..length + 3]].concat();
            for prompt in [&text[..length + 1], &text[..text.len().min(length + 30)], &turn, &turn] {
                let found = ask(on.handle, cached(prompt))?;
                let expected = ask(on.handle, on.plain(prompt, &sampling))?;
                hits += found.hit_tokens;
                tally.same(&found.reply(), &expected.reply(), || {
                    let hit = found.hit_tokens;
                    format!("{} tokens, {hit} of them cached: replies differ", prompt.len())
                });
            }
        }
    }
    tally.same(&(hits > 0), &true, || "nothing was ever taken from the cache".into());
    Ok(tally.outcome(Contract::Resumed, "replies after cache hits"))
}

/// Log-probabilities of a reply, and of the same tokens as a prompt.
fn scored(on: Served<'_>, text: &[u32]) -> Result<Outcome, Refusal> {
    let mut tally = Tally::default();
    for sampling in samplings() {
        let prompt = &text[..45];
        let decoded = ask(on.handle, on.plain(prompt, &sampling))?;
        let whole = [prompt, &decoded.tokens].concat();
        let request = Request { prompt_logprobs: Some(3), max_tokens: 0, ..on.plain(&whole, &sampling) };
        let found = ask(on.handle, request)?;
        tally.same(&found.prompt_scores.len(), &(whole.len() - 1), || "a prompt token has no score".into());
        let reply = found.prompt_scores.get(prompt.len() - 1..).unwrap_or_default();
        for (at, (found, expected)) in reply.iter().zip(&decoded.scores).enumerate() {
            tally.same(found, expected, || format!("log-probability of reply token {at} differs"));
        }
    }
    Ok(tally.outcome(Contract::Scored, "prompt and reply log-probabilities"))
}

/// Choices of one request, again among other requests.
fn seeded(on: Served<'_>, text: &[u32]) -> Result<Outcome, Refusal> {
    let mut tally = Tally::default();
    let [_, sampling] = samplings();
    let request = || Request { choices: 2, ..on.plain(&text[..30], &sampling) };
    let expected = Waiting::submit(on.handle, request())?.hear();
    tally.same(&(expected[0].tokens != expected[1].tokens), &true, || "both choices are the same".into());
    let others: Vec<Waiting> = (1..6)
        .map(|at| Waiting::submit(on.handle, on.plain(&text[at..at + 40], &sampling)))
        .collect::<Result<_, _>>()?;
    let again = Waiting::submit(on.handle, request())?.hear();
    others.into_iter().for_each(|other| drop(other.hear()));
    for (choice, (found, expected)) in again.iter().zip(&expected).enumerate() {
        tally.same(&found.reply(), &expected.reply(), || format!("choice {choice} differs"));
    }
    Ok(tally.outcome(Contract::Seeded, "choices alone and in company"))
}
