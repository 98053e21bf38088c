//! A long mixed load on one engine, and what must stay true meanwhile.
//!
//! Scripts are conversations of one to three turns. Replies of *known* scripts were computed alone, without
//! drafts and cache, before the load began; whatever runs beside them, whoever drafts and wherever they
//! resume, they must come out the same. One of them is the *canary*, which is asked most often and never
//! cancelled. Other scripts are new every time, so that pages and cache entries are always on the move. Some
//! requests are cancelled, in the queue, in prefill or in decode, and most of those come back.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use engine::{
    DraftPolicy, DraftStats, Drafting, Event, FinishReason, Handle, Refusal, Request, Sampling, Stats, Ticket,
};

use crate::lane::Random;

/// Known scripts beside the canary.
const KNOWN: usize = 24;
/// Requests on their way beyond one for each slot: some always wait.
const WAITING: usize = 3;
/// Most turns of a script.
const TURNS_MAX: usize = 3;
/// Most tokens of a reply.
const REPLY_MAX: usize = 48;
/// A tenth of the prompts is up to this long, beside what the context allows.
const LONG: usize = 900;
/// Most tokens of other prompts.
const SHORT: usize = 80;
/// Without any event for this long the engine counts as stuck.
const STUCK: Duration = Duration::from_secs(120);
/// Time between two looks at the memory.
const SAMPLE: Duration = Duration::from_secs(5);
/// Memory may settle for this long before its slope counts.
pub const SETTLING: Duration = Duration::from_secs(300);

/// What to put on the engine.
#[derive(Clone, Debug)]
pub struct Load<'a> {
    /// Texts that prompts are cut from, each of at least one id.
    pub texts: &'a [Vec<u32>],
    /// Slots of the engine.
    pub slots: usize,
    /// How long new requests are sent.
    pub duration: Duration,
    /// Key of every choice made here.
    pub seed: u64,
}

/// What happened so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Soaked {
    /// Time since the load began.
    pub elapsed: Duration,
    /// Requests sent.
    pub requests: u64,
    /// Those that came to their end.
    pub finished: u64,
    /// Those that were cancelled.
    pub cancelled: u64,
    /// Replies, or parts of cancelled ones, that were compared with the ones computed alone.
    pub compared: u64,
    /// Replies that differ, requests that failed or were refused.
    pub failures: u64,
    /// The first failure, in words.
    pub first_failure: Option<String>,
    /// Canaries among the finished.
    pub canaries: u64,
    /// Hash of the last canary's last reply: the same in every report.
    pub canary: u64,
    /// Prompt tokens of all requests that had a slot.
    pub prompt_tokens: u64,
    /// Those of them that came from the cache.
    pub hit_tokens: u64,
    /// Tokens generated.
    pub generated: u64,
    /// Drafting.
    pub drafts: DraftStats,
    /// Bytes of resident memory since the load began.
    pub memory: Vec<(Duration, u64)>,
    /// Slots in use and requests waiting after the last request ended; `None` before that.
    pub busy: Option<usize>,
}

/// Least-squares slope of memory samples (time and bytes) from `from` on, in bytes a minute; `None` where too
/// little is known.
pub fn slope(memory: &[(Duration, u64)], from: Duration) -> Option<f64> {
    let late = memory.iter().filter(|(at, _)| *at >= from);
    let points: Vec<(f64, f64)> = late.map(|(at, bytes)| (at.as_secs_f64() / 60.0, *bytes as f64)).collect();
    let count = points.len() as f64;
    let mean = |value: fn(&(f64, f64)) -> f64| points.iter().map(value).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    let along: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    (spread > 0.0).then(|| along / spread)
}

impl Soaked {
    /// Least-squares slope of the resident memory from `from` on, in bytes a minute; `None` without samples.
    pub fn slope(&self, from: Duration) -> Option<f64> {
        slope(&self.memory, from)
    }

    /// Resident memory of the first sample at or after `at`.
    pub fn memory_at(&self, at: Duration) -> Option<u64> {
        self.memory.iter().find(|(time, _)| *time >= at).map(|(_, bytes)| *bytes)
    }

    fn fail(&mut self, what: String) {
        self.failures += 1;
        self.first_failure.get_or_insert(what);
    }

    fn count(&mut self, stats: &Stats) {
        self.prompt_tokens += stats.prompt_tokens as u64;
        self.hit_tokens += stats.cache.hit_tokens as u64;
        self.generated += stats.generated_tokens as u64;
        self.drafts.add(&stats.drafts);
    }
}

/// A conversation: what is said is fixed, what is answered is the model's.
#[derive(Clone, Debug)]
struct Script {
    prompt: Vec<u32>,
    /// What follows each reply but the last.
    follow: Vec<Vec<u32>>,
    reply_max: usize,
    sampling: Sampling,
}

/// Which script a request belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Canary,
    Known(usize),
    New,
}

/// A request on its way.
struct Flight {
    kind: Kind,
    script: Script,
    turn: usize,
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    heard: usize,
    /// The ticket is dropped after this many events.
    cancel_after: Option<usize>,
    ticket: Option<Ticket>,
}

type Heard = (u64, Event);

struct Soak<'a> {
    handle: &'a Handle,
    load: &'a Load<'a>,
    random: Random,
    /// Known scripts with their replies, the canary first.
    known: Vec<(Script, Vec<Vec<u32>>)>,
    flights: HashMap<u64, Flight>,
    next: u64,
    sender: Sender<Heard>,
    soaked: Soaked,
}

/// Runs the load. `report` is told once a minute, and a last time after every slot is idle again.
pub fn soak(handle: &Handle, load: &Load<'_>, report: &mut dyn FnMut(&Soaked)) -> Result<Soaked, Refusal> {
    let (sender, receiver) = channel();
    let mut soak = Soak {
        handle,
        load,
        random: Random(load.seed),
        known: Vec::new(),
        flights: HashMap::new(),
        next: 0,
        sender,
        soaked: Soaked::default(),
    };
    soak.learn()?;
    soak.run(&receiver, report);
    let mut soaked = soak.soaked;
    soaked.busy = Some(idle(handle));
    report(&soaked);
    Ok(soaked)
}

/// Slots in use and requests waiting, once the engine had time to publish its last step.
fn idle(handle: &Handle) -> usize {
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        let status = handle.status();
        let busy = status.prefilling + status.decoding + status.queued;
        if busy == 0 || Instant::now() > until {
            return busy;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Bytes of resident memory of this process; 0 where the system does not say.
fn resident() -> u64 {
    // Pages of 4 KiB on every system this file is read on.
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}

fn hash(tokens: &[u32]) -> u64 {
    tokens.iter().fold(0xcbf2_9ce4_8422_2325, |hash, token| {
        (hash ^ u64::from(*token)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

impl Soak<'_> {
    /// Computes the known replies, one request at a time.
    fn learn(&mut self) -> Result<(), Refusal> {
        for _ in 0..=KNOWN {
            let script = self.script();
            let mut prompt = script.prompt.clone();
            let mut replies = Vec::new();
            for turn in 0..=script.follow.len() {
                let request = Request {
                    cache: false,
                    drafting: Drafting { policy: DraftPolicy::Off, ..Drafting::default() },
                    sampling: script.sampling.clone(),
                    ..Request::new(prompt.clone(), script.reply_max)
                };
                let reply = alone(self.handle, request)?;
                prompt.extend(&reply);
                prompt.extend(script.follow.get(turn).into_iter().flatten());
                replies.push(reply);
            }
            self.known.push((script, replies));
        }
        Ok(())
    }

    fn run(&mut self, receiver: &Receiver<Heard>, report: &mut dyn FnMut(&Soaked)) {
        let start = Instant::now();
        let (mut sampled, mut reported) = (None::<Instant>, start);
        loop {
            let open = start.elapsed() < self.load.duration && self.soaked.failures == 0;
            while open && self.flights.len() < self.load.slots + WAITING {
                self.begin();
            }
            if self.flights.is_empty() {
                break;
            }
            match receiver.recv_timeout(STUCK) {
                Ok((id, event)) => self.hear(id, event),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    self.soaked.fail(format!("no event for {STUCK:?}, {} requests open", self.flights.len()));
                    break;
                }
            }
            self.soaked.elapsed = start.elapsed();
            if sampled.is_none_or(|at| at.elapsed() >= SAMPLE) {
                sampled = Some(Instant::now());
                self.soaked.memory.push((start.elapsed(), resident()));
            }
            if reported.elapsed() >= Duration::from_secs(60) {
                reported = Instant::now();
                report(&self.soaked);
            }
        }
        self.soaked.memory.push((start.elapsed(), resident()));
    }

    /// Sends the first turn of some script.
    fn begin(&mut self) {
        let (kind, script) = match self.random.below(10) {
            0 => (Kind::Canary, self.known[0].0.clone()),
            1..=4 => {
                let at = 1 + self.random.below(KNOWN);
                (Kind::Known(at), self.known[at].0.clone())
            }
            _ => (Kind::New, self.script()),
        };
        let prompt = script.prompt.clone();
        let cancelled = kind != Kind::Canary && self.random.below(5) == 0;
        let cancel_after = cancelled.then(|| self.random.below(8));
        self.send(kind, script, 0, prompt, cancel_after);
    }

    fn send(
        &mut self,
        kind: Kind,
        script: Script,
        turn: usize,
        prompt: Vec<u32>,
        cancel_after: Option<usize>,
    ) {
        let id = self.next;
        self.next += 1;
        let request = Request {
            sampling: script.sampling.clone(),
            cache: self.random.below(4) > 0,
            marks: vec![prompt.len() / 2, prompt.len()],
            drafting: self.drafting(),
            ..Request::new(prompt.clone(), script.reply_max)
        };
        let sender = self.sender.clone();
        // Nobody listens any more once the load has ended.
        let sink = Box::new(move |event: Event| drop(sender.send((id, event))));
        self.soaked.requests += 1;
        match self.handle.submit(request, sink) {
            Ok(ticket) => {
                let ticket = (cancel_after != Some(0)).then_some(ticket);
                let (tokens, heard) = (Vec::new(), 0);
                let flight = Flight { kind, script, turn, prompt, tokens, heard, cancel_after, ticket };
                self.flights.insert(id, flight);
            }
            Err(refusal) => self.soaked.fail(format!("request {id} was refused: {refusal}")),
        }
    }

    fn drafting(&mut self) -> Drafting {
        let policy = match self.random.below(4) {
            0 => DraftPolicy::Off,
            1 | 2 => DraftPolicy::Fixed(1 + self.random.below(engine::DRAFT_MAX) as u8),
            _ => DraftPolicy::Auto(engine::DRAFT_MAX as u8),
        };
        let (mtp, copy) = [(true, true), (true, false), (false, true)][self.random.below(3)];
        Drafting { policy, mtp, copy, first: 1 + self.random.below(3) as u8 }
    }

    /// A new script, cut from the texts.
    fn script(&mut self) -> Script {
        let room = self.handle.limits().context / 2;
        let length = match self.random.below(10) {
            0 => SHORT + self.random.below(LONG - SHORT),
            _ => 1 + self.random.below(SHORT),
        };
        let prompt = self.cut(length.min(room));
        let turns = self.random.below(TURNS_MAX);
        let follow = (0..turns)
            .map(|_| {
                let length = 1 + self.random.below(SHORT / 2);
                self.cut(length)
            })
            .collect();
        let seed = self.random.below(1 << 30) as u64;
        let greedy = Sampling { ignore_eos: self.random.below(2) == 0, ..Sampling::default() };
        let sampled = Sampling { temperature: 1.0, top_k: 40, top_p: 0.95, seed, ..greedy.clone() };
        let sampling = match self.random.below(3) {
            0 => greedy,
            1 => sampled,
            _ => Sampling { presence: 0.5, repetition: 1.1, min_p: 0.01, ..sampled },
        };
        Script { prompt, follow, reply_max: 1 + self.random.below(REPLY_MAX), sampling }
    }

    /// The beginnings of texts, joined to `length` ids.
    fn cut(&mut self, length: usize) -> Vec<u32> {
        let mut ids = Vec::new();
        while ids.len() < length {
            let text = &self.load.texts[self.random.below(self.load.texts.len())];
            ids.extend(text.iter().take(length - ids.len()));
        }
        ids
    }

    fn hear(&mut self, id: u64, event: Event) {
        let Some(flight) = self.flights.get_mut(&id) else {
            self.soaked.fail(format!("request {id} was heard of after its end"));
            return;
        };
        flight.heard += 1;
        if flight.cancel_after.is_some_and(|after| flight.heard >= after) {
            flight.ticket = None;
        }
        match event {
            Event::Tokens { tokens, .. } => flight.tokens.extend(tokens),
            Event::Finished { reason, stats, .. } => {
                let flight = self.flights.remove(&id).expect("it was there a moment ago");
                self.soaked.count(&stats);
                self.ended(id, flight, reason);
            }
            Event::Admitted { .. } | Event::Prefilled { .. } | Event::PromptScores { .. } => {}
        }
    }

    /// Compares what was heard; the conversation goes on, or comes back.
    fn ended(&mut self, id: u64, flight: Flight, reason: FinishReason) {
        let cancelled = reason == FinishReason::Cancelled;
        if let FinishReason::Failed(error) = reason {
            self.soaked.fail(format!("request {id} failed: {error}"));
            return;
        }
        let known = match flight.kind {
            Kind::Canary => Some(0),
            Kind::Known(at) => Some(at),
            Kind::New => None,
        };
        if let Some(at) = known {
            let expected = &self.known[at].1[flight.turn];
            self.soaked.compared += 1;
            let same = match cancelled {
                true => expected.starts_with(&flight.tokens),
                false => *expected == flight.tokens,
            };
            if !same {
                let (found, turn) = (&flight.tokens, flight.turn);
                self.soaked.fail(format!(
                    "request {id}, turn {turn} of known script {at}: {found:?}, alone it gave {expected:?}"
                ));
            }
        }
        let Flight { kind, script, turn, mut prompt, tokens, .. } = flight;
        if cancelled {
            self.soaked.cancelled += 1;
            if self.random.below(4) > 0 {
                self.send(kind, script, turn, prompt, None);
            }
            return;
        }
        self.soaked.finished += 1;
        if kind == Kind::Canary && turn == script.follow.len() {
            self.soaked.canaries += 1;
            self.soaked.canary = hash(&tokens);
        }
        if let Some(follow) = script.follow.get(turn) {
            prompt.extend(tokens);
            prompt.extend(follow);
            let cancelled = kind != Kind::Canary && self.random.below(8) == 0;
            let cancel_after = cancelled.then(|| self.random.below(8));
            self.send(kind, script, turn + 1, prompt, cancel_after);
        }
    }
}

/// One reply with nothing beside it.
fn alone(handle: &Handle, request: Request) -> Result<Vec<u32>, Refusal> {
    let (sender, receiver) = channel();
    let _ticket = handle.submit(request, Box::new(move |event: Event| drop(sender.send(event))))?;
    let mut reply = Vec::new();
    for event in receiver {
        match event {
            Event::Tokens { tokens, .. } => reply.extend(tokens),
            Event::Finished { .. } => break,
            _ => {}
        }
    }
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use engine::fake::{FakeConfig, FakeModel};
    use engine::{Engine, Settings};

    use super::*;

    #[test]
    fn slopes_are_those_of_lines() {
        let at = |minute: u64, bytes: u64| (Duration::from_secs(60 * minute), bytes);
        let soaked =
            Soaked { memory: vec![at(0, 900), at(1, 10), at(2, 30), at(3, 50)], ..Soaked::default() };
        assert_eq!(soaked.slope(Duration::from_secs(60)), Some(20.0));
        assert_eq!(soaked.slope(Duration::from_secs(180)), None);
        assert_eq!(soaked.memory_at(Duration::from_secs(61)), Some(30));
    }

    #[test]
    fn a_sound_engine_passes() {
        let mut config = FakeConfig::default();
        config.spec.slots = 4;
        config.spec.context_max = 2048;
        config.spec.pages = 4 * 40;
        let settings = Settings::new(config.spec.vocabulary, vec![1]);
        let texts = [(2..60).collect(), vec![5, 6, 7]];
        let handle = Engine::start(Box::new(FakeModel::new(config)), settings).expect("it starts");
        let load = Load { texts: &texts, slots: 4, duration: Duration::from_secs(1), seed: 3 };
        let mut reports = 0;
        let soaked = soak(&handle, &load, &mut |_| reports += 1).expect("nothing is refused");
        assert_eq!((soaked.failures, &soaked.first_failure, soaked.busy), (0, &None, Some(0)));
        assert!(soaked.canaries > 0 && soaked.cancelled > 0 && soaked.hit_tokens > 0, "{soaked:?}");
        assert_eq!(reports, 1);
    }
}
