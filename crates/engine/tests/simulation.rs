//! The schedule simulation: a seed makes arrivals, cancels, drafts, budgets, evictions and stalls; every
//! reply must equal the run of its tokens alone. A failing seed is the whole bug report.

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use engine::fake::{FakeConfig, FakeCost, FakeDrafts, Pace};
use engine::{
    Allowed, CacheLimits, DraftPolicy, Drafting, FinishReason, Mask, ReplyError, Request, Settings,
};
use support::*;

const SEEDS: u64 = 10_000;

fn drafts(dice: &mut Dice) -> FakeDrafts {
    match dice.below(6) {
        0 => FakeDrafts::None,
        1 => FakeDrafts::Right,
        2 => FakeDrafts::Wrong,
        3 => FakeDrafts::Random,
        4 => FakeDrafts::SecondBest,
        _ => FakeDrafts::Sometimes(20 + dice.below(75) as u8),
    }
}

/// A model and an engine with limits that pinch.
fn bench(dice: &mut Dice) -> Bench {
    let mut config = FakeConfig { drafts: drafts(dice), ..FakeConfig::default() };
    let spec = &mut config.spec;
    spec.context_max = 100 + dice.below(200) as usize;
    spec.slots = 1 + dice.below(6) as usize;
    spec.snapshots = dice.below(7) as usize;
    spec.pages = spec.context_max.div_ceil(64) + dice.below(12) as usize;
    spec.rows_max = 8 + dice.below(150) as usize;
    spec.logits_rows_max = 2 + dice.below(40).min(spec.rows_max as u64 - 2) as usize;
    let micros = |value| Duration::from_micros(value);
    let cost = FakeCost {
        step: micros(100 + dice.below(2000)),
        row: micros(dice.below(300)),
        draft: micros(dice.below(300)),
        image: micros(dice.below(100)),
        upkeep: micros(dice.below(2) * 20),
    };
    config.images = images();
    config.pace = Pace::Clock(engine::ManualClock::default(), cost);
    config.poison = dice.percent(20).then_some(63);
    let cache = CacheLimits {
        bytes_max: if dice.percent(15) { 0 } else { 1000 + dice.below(20_000) },
        checkpoint_tokens: [0, 16, 64, 100][dice.below(4) as usize],
        prompt_end_min: dice.below(40) as usize,
    };
    let max_stall = micros(500 + dice.below(5000));
    Bench::with(config, Settings { cache, max_stall, calibrate: dice.percent(50), ..settings() })
}

/// Lets every `period`th token be one of few.
#[derive(Clone)]
struct Narrow {
    said: usize,
    period: usize,
}

impl Mask for Narrow {
    fn allowed(&mut self, bits: &mut [u32]) -> Allowed {
        if !self.said.is_multiple_of(self.period) {
            return Allowed::All;
        }
        bits[0] = 0x00f0_f0f0;
        bits[1] = self.said as u32 | 1;
        Allowed::Some
    }

    fn advance(&mut self, _: u32) {
        self.said += 1;
    }

    fn rollback(&mut self, count: usize) {
        self.said -= count;
    }

    fn fork(&self) -> Box<dyn Mask> {
        Box::new(self.clone())
    }
}

/// Everything a request is made of but its prompt, from a number, so that it can be made twice.
fn dress(mut request: Request, number: u64, slots: usize) -> Request {
    let mut dice = Dice(number);
    let sampling = &mut request.sampling;
    if dice.percent(50) {
        sampling.temperature = 0.3 + dice.below(20) as f32 / 10.0;
        sampling.top_k = dice.below(3) as u32 * 10;
        sampling.top_p = [1.0, 0.9][dice.below(2) as usize];
        sampling.min_p = [0.0, 0.05][dice.below(2) as usize];
        sampling.seed = dice.next();
    }
    if dice.percent(25) {
        sampling.presence = dice.below(20) as f32 / 10.0;
        sampling.frequency = dice.below(10) as f32 / 10.0;
        sampling.repetition = 1.0 + dice.below(10) as f32 / 10.0;
    }
    if dice.percent(15) {
        sampling.logit_bias = vec![(dice.below(64) as u32, 5.0), (dice.below(64) as u32, -100.0)];
    }
    if dice.percent(20) {
        sampling.stop_ids = vec![2 + dice.below(62) as u32];
    }
    sampling.ignore_eos = dice.percent(30);
    request.choices = if dice.percent(15) { 1 + dice.below(slots.min(3) as u64) as u32 } else { 1 };
    request.logprobs = dice.percent(20).then(|| dice.below(4) as u32);
    request.prompt_logprobs = dice.percent(8).then(|| dice.below(3) as u32);
    request.cache = dice.percent(85);
    // Neighbours in one conversation may belong to different users.
    request.namespace = ["", "", "", "other", "third"][dice.below(5) as usize].into();
    request.marks =
        (0..dice.below(3)).map(|_| dice.below(1 + request.prompt.len() as u64) as usize).collect();
    let length = request.prompt.len() as u64;
    if length > 30 && dice.percent(30) {
        let picture = picture(dice.below(4), 2 + 2 * dice.below(3) as usize, 2 + 2 * dice.below(5) as usize);
        let start = dice.below(length - picture.count() as u64 / 4) as usize;
        request = pictured(request, vec![(start, picture)]);
    } else if dice.percent(10) {
        let shift = dice.below(request.prompt.len() as u64) as u32;
        request.positions =
            Some((0..request.prompt.len() as u32).map(|at| [at, at / 2, at.min(shift)]).collect());
        request.rope_delta = -i64::from(shift / 2);
    }
    let depth = 1 + dice.below(8) as u8;
    request.drafting = Drafting {
        policy: match dice.below(5) {
            0 => DraftPolicy::Off,
            1 | 2 => DraftPolicy::Auto(depth),
            _ => DraftPolicy::Fixed(depth),
        },
        mtp: dice.percent(85),
        copy: dice.percent(60),
        first: if dice.percent(30) { 1 + dice.below(4) as u8 } else { 1 },
    };
    if dice.percent(15) {
        request.mask = Some(Box::new(Narrow { said: 0, period: 1 + dice.below(4) as usize }));
    }
    request
}

/// A prompt that often begins like an earlier sequence, and often repeats itself.
fn history(dice: &mut Dice, earlier: &[Vec<u32>], context: usize) -> Vec<u32> {
    let mut history = Vec::new();
    if !earlier.is_empty() && dice.percent(60) {
        let old = &earlier[dice.below(earlier.len() as u64) as usize];
        let kept = if dice.percent(60) { old.len() } else { dice.below(1 + old.len() as u64) as usize };
        history.extend(&old[..kept]);
    }
    let room = context.saturating_sub(history.len() + 2).max(1) as u64;
    let most = 1 + dice.below(room.min(90));
    let fresh = prompt(dice.below(20), 1 + dice.below(most) as usize);
    if dice.percent(20) && fresh.len() > 8 {
        history.extend(&fresh[..8]);
    }
    history.extend(fresh);
    history.truncate(context - 1);
    history
}

struct Sent {
    asked: Asked,
    prompt: Vec<u32>,
    max_tokens: usize,
    number: u64,
    cancelled: bool,
}

impl Sent {
    fn request(&self, slots: usize) -> Request {
        dress(Request::new(self.prompt.clone(), self.max_tokens), self.number, slots)
    }
}

fn simulate(seed: u64) {
    let mut dice = Dice(seed);
    let mut bench = bench(&mut dice);
    let (slots, context) = (bench.config.spec.slots, bench.config.spec.context_max);
    let mut earlier: Vec<Vec<u32>> = Vec::new();
    let mut sent: Vec<Sent> = Vec::new();
    let count = 2 + dice.below(8);
    while sent.len() < count as usize {
        let prompt = history(&mut dice, &earlier, context);
        let max_tokens = dice.below(30) as usize;
        let number = dice.next();
        let request = dress(Request::new(prompt.clone(), max_tokens), number, slots);
        let leaves = dice.percent(12);
        let asked = match leaves {
            true => bench.ask_and_leave(request, 1 + dice.below(8) as usize),
            false => bench.ask(request),
        };
        sent.push(Sent { asked, prompt, max_tokens, number, cancelled: leaves });
        for _ in 0..dice.below(12) {
            bench.core.tick();
            let at = dice.below(sent.len() as u64) as usize;
            if dice.percent(4) {
                sent[at].cancelled = true;
                sent[at].asked.cancel();
            } else if dice.percent(4) {
                sent[at].cancelled = true;
                sent[at].asked.cancel_choice(dice.below(3) as u32);
            } else if dice.percent(4) {
                // Looking changes nothing, least of all what is about to be evicted.
                let request = sent[at].request(slots);
                let checked = bench.core.limits().check(request).expect("it fitted before");
                bench.core.look_up_now(&checked);
            }
            if dice.percent(3) {
                bench.clock.advance(Duration::from_millis(dice.below(50)));
            }
            assert!(bench.core.status().cache_bytes <= bench.core.status().cache_bytes_max);
        }
        for sent in sent.iter().filter(|sent| sent.asked.done()) {
            let whole = [sent.prompt.clone(), sent.asked.choice(0).tokens].concat();
            if !earlier.contains(&whole) && whole.len() + 2 < context {
                earlier.push(whole);
            }
        }
    }
    bench.finish();
    for (at, sent) in sent.iter().enumerate() {
        let request = sent.request(slots);
        for choice in 0..request.choices {
            let heard = sent.asked.choice(choice as usize);
            let expected = bench.solo(&request, choice);
            let what = format!("request {at}, choice {choice}");
            if heard.reason() == &FinishReason::Cancelled {
                assert!(sent.cancelled, "{what}");
                assert_eq!(heard.tokens, expected.tokens[..heard.tokens.len()], "{what}");
            } else if poisoned_scores(&bench, &request) && choice == 0 {
                let reason = heard.reason();
                let fault = matches!(reason, FinishReason::Failed(ReplyError::NumericalFault { .. }));
                assert!(fault, "{what}: {reason:?}");
            } else {
                assert_solo(&heard, &expected, &what);
            }
        }
    }
}

/// A prompt whose own rows are to be scored fails at its poison, before its reply does.
fn poisoned_scores(bench: &Bench, request: &Request) -> bool {
    request.prompt_logprobs.is_some()
        && bench.config.poison.is_some_and(|token| request.prompt.contains(&token))
}

#[test]
fn every_schedule_equals_solo() {
    let next = AtomicU64::new(0);
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= SEEDS {
                return;
            }
            if catch_unwind(AssertUnwindSafe(|| simulate(seed))).is_err() {
                next.store(SEEDS, Ordering::Relaxed);
                panic!("seed {seed} fails: put it into `one_schedule` and run that test");
            }
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            assert!(worker.join().is_ok(), "see the seed above");
        }
    });
}

/// The place for a seed that failed.
#[test]
fn one_schedule() {
    simulate(0);
}
