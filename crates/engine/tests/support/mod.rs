//! An engine on the fake model, stepped by hand, with everything its requests hear.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use engine::fake::{FakeConfig, FakeCost, FakeDrafts, FakeModel, Faults, Pace, Solo, solo};
use engine::{
    Core, DraftPolicy, Drafting, Event, FinishReason, ImageSpec, ManualClock, Picture, Refusal, Reply,
    Request, Sampling, Score, Settings, Stats, Ticket,
};

pub const EOS: u32 = 1;

/// What one choice of a request heard.
#[derive(Clone, Debug, Default)]
pub struct Heard {
    pub hit: Option<usize>,
    pub slot: Option<u32>,
    pub tokens: Vec<u32>,
    pub scores: Vec<Score>,
    pub prompt_scores: Vec<Score>,
    pub batches: Vec<usize>,
    pub end: Option<(FinishReason, Stats)>,
}

impl Heard {
    pub fn reason(&self) -> &FinishReason {
        &self.end.as_ref().expect("finished").0
    }

    pub fn stats(&self) -> &Stats {
        &self.end.as_ref().expect("finished").1
    }
}

/// A submitted request.
pub struct Asked {
    pub heard: Arc<Mutex<Vec<Heard>>>,
    ticket: Option<Ticket>,
}

impl Asked {
    pub fn choice(&self, choice: usize) -> Heard {
        self.heard.lock().expect("no panic")[choice].clone()
    }

    pub fn cancel(&mut self) {
        self.ticket = None;
    }

    pub fn cancel_choice(&mut self, choice: u32) {
        if let Some(ticket) = &self.ticket {
            ticket.cancel(choice);
        }
    }

    pub fn done(&self) -> bool {
        self.heard.lock().expect("no panic").iter().all(|heard| heard.end.is_some())
    }
}

/// A sink that sorts events by choice and insists on their order.
pub fn listener(choices: u32) -> (Arc<Mutex<Vec<Heard>>>, impl FnMut(Event) + Send) {
    let heard = Arc::new(Mutex::new(vec![Heard::default(); choices as usize]));
    let mine = heard.clone();
    (heard, move |event| hear(&mut mine.lock().expect("no panic"), event))
}

fn hear(heard: &mut [Heard], event: Event) {
    let choice = match &event {
        Event::PromptScores { .. } => 0,
        Event::Admitted { choice, .. }
        | Event::Prefilled { choice, .. }
        | Event::Tokens { choice, .. }
        | Event::Finished { choice, .. } => *choice as usize,
    };
    let heard = &mut heard[choice];
    assert!(heard.end.is_none(), "{event:?} after the end");
    match event {
        Event::Admitted { cache, slot, .. } => {
            assert_eq!(heard.hit, None, "admitted twice");
            heard.hit = Some(cache.hit_tokens);
            heard.slot = Some(slot);
        }
        Event::PromptScores { from, scores } => {
            assert_eq!(from, heard.prompt_scores.len() + 1, "no gap");
            heard.prompt_scores.extend(scores);
        }
        Event::Prefilled { .. } => assert!(heard.tokens.is_empty()),
        Event::Tokens { tokens, scores, .. } => {
            heard.batches.push(tokens.len());
            heard.tokens.extend(tokens);
            heard.scores.extend(scores);
        }
        Event::Finished { reason, stats, .. } => heard.end = Some((reason, *stats)),
    }
}

/// A core, its clock and its faults.
pub struct Bench {
    pub core: Core,
    pub config: FakeConfig,
    pub clock: ManualClock,
    pub faults: Arc<Faults>,
}

pub fn config(drafts: FakeDrafts) -> FakeConfig {
    FakeConfig { drafts, ..FakeConfig::default() }
}

pub fn settings() -> Settings {
    Settings::new(64, vec![EOS])
}

impl Bench {
    pub fn new(config: FakeConfig) -> Self {
        Self::with(config, settings())
    }

    pub fn with(mut config: FakeConfig, settings: Settings) -> Self {
        let clock = ManualClock::default();
        if let Pace::Free = config.pace {
            let micros = Duration::from_micros;
            let cost = FakeCost {
                step: micros(1000),
                row: micros(100),
                draft: micros(50),
                image: micros(20),
                upkeep: micros(1),
            };
            config.pace = Pace::Clock(clock.clone(), cost);
        } else if let Pace::Clock(_, cost) = config.pace {
            config.pace = Pace::Clock(clock.clone(), cost);
        }
        let model = FakeModel::new(config.clone());
        let faults = model.faults();
        let core = Core::new(Box::new(model), settings, Arc::new(clock.clone())).expect("large enough");
        Self { core, config, clock, faults }
    }

    pub fn ask(&mut self, request: Request) -> Asked {
        self.try_ask(request).expect("fits")
    }

    pub fn try_ask(&mut self, request: Request) -> Result<Asked, Refusal> {
        let (heard, sink) = listener(request.choices);
        let checked = self.core.limits().check(request)?;
        let (reply, ticket) = Reply::new(Box::new(sink));
        self.core.submit(checked, reply);
        Ok(Asked { heard, ticket: Some(ticket) })
    }

    /// Asks, and leaves from inside the engine's step: when it tells the `events`th event.
    pub fn ask_and_leave(&mut self, request: Request, events: usize) -> Asked {
        let (heard, mut sink) = listener(request.choices);
        let checked = self.core.limits().check(request).expect("fits");
        let kept: Arc<Mutex<Option<Ticket>>> = Arc::default();
        let (mine, mut left) = (kept.clone(), events);
        let (reply, ticket) = Reply::new(Box::new(move |event| {
            sink(event);
            left = left.saturating_sub(1);
            if left == 0 {
                drop(mine.lock().expect("no panic").take());
            }
        }));
        *kept.lock().expect("no panic") = Some(ticket);
        self.core.submit(checked, reply);
        Asked { heard, ticket: None }
    }

    pub fn ticks(&mut self, count: usize) {
        for _ in 0..count {
            self.core.tick();
        }
    }

    /// Ticks until nothing is left to do.
    pub fn finish(&mut self) {
        for _ in 0..100_000 {
            if !self.core.tick() {
                assert!(self.core.idle());
                assert!(self.core.leaks_nothing());
                return;
            }
        }
        panic!("100000 ticks and no end");
    }

    /// Runs one request alone to its end.
    pub fn answer(&mut self, request: Request) -> Heard {
        let asked = self.ask(request);
        self.finish();
        asked.choice(0)
    }

    /// What the definition says.
    pub fn solo(&self, request: &Request, choice: u32) -> Solo {
        solo(&self.config, request, choice, &[EOS])
    }
}

/// Asserts that a choice is what the definition says.
pub fn assert_solo(heard: &Heard, expected: &Solo, what: &str) {
    assert_eq!(heard.tokens, expected.tokens, "{what}");
    assert_eq!(heard.reason(), &expected.reason, "{what}");
    if !heard.scores.is_empty() {
        assert_eq!(heard.scores, expected.scores, "{what}");
    }
}

/// A prompt of `length` tokens that `seed` names.
pub fn prompt(seed: u64, length: usize) -> Vec<u32> {
    let mut dice = Dice(seed);
    (0..length).map(|_| 2 + dice.below(62) as u32).collect()
}

pub fn request(seed: u64, length: usize, max_tokens: usize) -> Request {
    Request::new(prompt(seed, length), max_tokens)
}

pub fn seeded(mut request: Request, seed: u64) -> Request {
    request.sampling =
        Sampling { temperature: 0.8, top_p: 0.95, top_k: 40, min_p: 0.01, seed, ..Sampling::default() };
    request
}

pub fn fixed(mut request: Request, depth: u8, first: u8, copy: bool) -> Request {
    let policy = if depth == 0 { DraftPolicy::Off } else { DraftPolicy::Fixed(depth) };
    request.drafting = Drafting { policy, mtp: true, copy, first };
    request
}

/// Pictures of up to 64 tokens, two of which are encoded together.
pub fn images() -> Option<ImageSpec> {
    Some(ImageSpec { tokens_max: 64, pictures_max: 2, patch: 1, merge: 2, token_bytes: 4, patch_work: 4 })
}

/// A picture of that many patches that `seed` names.
pub fn picture(seed: u64, rows: usize, columns: usize) -> Arc<Picture> {
    let mut digest = [7; 32];
    digest[..8].copy_from_slice(&(seed * 1000 + (rows * 30 + columns) as u64).to_le_bytes());
    let levels = Box::new([[0.0; 256]; 3]);
    Arc::new(Picture { grid: [1, rows, columns], patches: vec![0; rows * columns * 3], levels, digest })
}

/// The request with pictures at these places, whose prompt holds placeholders there.
pub fn pictured(mut request: Request, pictures: Vec<(usize, Arc<Picture>)>) -> Request {
    for (start, picture) in &pictures {
        request.prompt[*start..start + picture.count() / 4].fill(3);
    }
    request.with_pictures(pictures, 2)
}

/// A small generator for tests: splitmix64.
#[derive(Clone, Debug)]
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }
}
