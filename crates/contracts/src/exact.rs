//! Every contract that shows below the server, on one machine and model: what `clary eval exact` runs.

use engine::Engine;

use crate::contracts;
use crate::{Album, Contract, Error, Outcome, Runner, Sizes, Subject, random_text};

/// Least tokens of the text.
const TOKENS_MIN: usize = 70;

/// What to check, and how far.
pub struct Exact<'a> {
    /// The model.
    pub subject: &'a dyn Subject,
    /// The same weights on other devices, instruction sets and thread counts.
    pub others: &'a [Box<dyn Subject + 'a>],
    /// Ids of the text are below this.
    pub vocabulary: usize,
    /// Tokens of the text, at least 70; from 577 on it crosses a span of 512 keys.
    pub tokens: usize,
    /// Numbers of requests at once.
    pub streams: &'a [usize],
    /// Whether every draft policy and cache hit is tried in replies.
    pub replies: bool,
    /// Whether states move into a second model, which takes memory for both.
    pub moved: bool,
}

impl Exact<'_> {
    /// The largest sizes that the subject is opened with.
    pub fn sizes(&self) -> Sizes {
        Sizes::for_text(self.tokens)
    }

    /// Sizes for replies: a slot for every stream, and room for a prompt, its reply and the next turn.
    fn reply_sizes(&self) -> Sizes {
        let slots = self.streams.iter().copied().max().unwrap_or(1).max(2);
        Sizes { slots, snapshots: 32, context: self.tokens + 256, rows_max: 256 }
    }

    fn parts(&self) -> usize {
        contracts::ALONE.len()
            + 1
            + usize::from(self.moved)
            + 1
            + usize::from(self.replies)
            + self.others.len()
            + 1
    }
}

/// Runs the contracts; `progress` hears how many parts of how many are done.
pub fn exact(exact: &Exact<'_>, progress: &mut dyn FnMut(u64, u64)) -> Result<Vec<Outcome>, Error> {
    if exact.tokens < TOKENS_MIN {
        let what = "tokens of the text";
        return Err(Error::TooSmall { what, found: exact.tokens, least: TOKENS_MIN });
    }
    let text = random_text(exact.vocabulary, exact.tokens, 1);
    let mut done = 0;
    let mut step = || {
        done += 1;
        progress(done, exact.parts() as u64);
    };
    let mut outcomes = rows(exact, &text, &mut step)?;
    outcomes.extend(replies(exact, &text, &mut step)?);
    outcomes.extend(devices(exact, &text, &mut step)?);
    outcomes.sort_by_key(|outcome| outcome.contract);
    Ok(outcomes)
}

/// What shows in rows of logits.
fn rows(exact: &Exact<'_>, text: &[u32], step: &mut dyn FnMut()) -> Result<Vec<Outcome>, Error> {
    let mut model = exact.subject.open(exact.sizes())?;
    let mut runner = Runner::new(&mut *model);
    let mut outcomes = Vec::new();
    for contract in contracts::ALONE {
        outcomes.push(contract(&mut runner, text)?);
        step();
    }
    outcomes.extend(contracts::pictured(&mut Runner::new(runner.model), text)?);
    step();
    if exact.moved {
        let mut other = exact.subject.open(exact.sizes())?;
        outcomes.push(contracts::moved(&mut runner, &mut Runner::new(&mut *other), text)?);
        step();
    }
    Ok(outcomes)
}

/// What shows in replies.
fn replies(exact: &Exact<'_>, text: &[u32], step: &mut dyn FnMut()) -> Result<Vec<Outcome>, Error> {
    let model = exact.subject.open(exact.reply_sizes())?;
    let settings = engine::Settings::new(model.spec().vocabulary, Vec::new());
    let album = model.image_spec().map(|spec| Album::new(&spec));
    let album = album.as_ref();
    let handle = Engine::start(model, settings)?;
    // With a vision tower the texts of streams have pictures in them.
    let shown = album.map_or(text.to_vec(), |album| album.place(text));
    let mut outcomes = vec![contracts::streams(&handle, &shown, album, exact.streams)?];
    step();
    if exact.replies {
        outcomes.extend(contracts::served(&handle, text, None)?);
        if album.is_some() {
            outcomes.extend(contracts::served(&handle, &shown, album)?);
        }
        step();
    }
    handle.stop("all contracts are checked");
    Ok(outcomes)
}

/// The subject against the same weights elsewhere.
fn devices(exact: &Exact<'_>, text: &[u32], step: &mut dyn FnMut()) -> Result<Vec<Outcome>, Error> {
    let sizes = Sizes { slots: 3, snapshots: 2, ..exact.sizes() };
    let mut signatures = Vec::new();
    let mut pictured = Vec::new();
    let others = exact.others.iter().map(|other| &**other);
    for subject in std::iter::once(exact.subject).chain(others) {
        let mut model = subject.open(sizes)?;
        let mut runner = Runner::new(&mut *model);
        signatures.push((subject.name(), contracts::signature(&mut runner, text)?));
        if let Some(signature) = contracts::pictured_signature(&mut runner, text)? {
            pictured.push((subject.name(), signature));
        }
        step();
    }
    let mut outcomes =
        vec![contracts::same_bits(&signatures, Contract::Devices, "devices, instruction sets, threads")];
    if pictured.len() > 1 {
        outcomes.push(contracts::same_bits(&pictured, Contract::Devices, "the same with pictures"));
    }
    Ok(outcomes)
}
