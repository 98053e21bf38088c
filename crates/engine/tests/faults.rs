//! Limits, refusals and faults: each hits those it concerns, and the engine goes on.

mod support;

use engine::fake::{FakeConfig, FakeDrafts};
use engine::{Allowed, FinishReason, Mask, Refusal, ReplyError, Request};
use support::*;

fn check_refused(change: impl Fn(&mut Request), expected: &str) {
    let mut bench = Bench::new(FakeConfig::default());
    let mut bad = request(1, 10, 5);
    change(&mut bad);
    let refusal = bench.try_ask(bad).map(|_| ()).expect_err(expected);
    assert!(refusal.to_string().contains(expected), "{refusal}");
    assert!(bench.core.idle());
}

#[test]
fn refusals_name_field_value_and_range() {
    check_refused(|r| r.prompt.clear(), "prompt: 0 tokens");
    check_refused(|r| r.prompt = vec![2; 1024], "1024 tokens do not leave room in a context of 1024");
    check_refused(|r| r.prompt[3] = 64, "prompt[3]: token 64 is not below the vocabulary of 64");
    check_refused(|r| r.sampling.temperature = 5.1, "temperature: 5.1 is out of range; allowed: 0 to 5");
    check_refused(|r| r.sampling.temperature = f32::NAN, "temperature: NaN");
    check_refused(|r| r.sampling.top_p = 0.0, "top_p: 0 is out of range; allowed: above 0, at most 1");
    check_refused(|r| r.sampling.top_k = 65, "top_k: 65");
    check_refused(|r| r.sampling.min_p = -0.1, "min_p: -0.1");
    check_refused(|r| r.sampling.presence = 2.5, "presence_penalty: 2.5");
    check_refused(|r| r.sampling.frequency = -3.0, "frequency_penalty: -3");
    check_refused(|r| r.sampling.repetition = 0.0, "repetition_penalty: 0");
    check_refused(|r| r.sampling.logit_bias = vec![(64, 1.0)], "logit_bias[0]: token 64");
    check_refused(|r| r.sampling.logit_bias = vec![(1, f32::INFINITY)], "logit_bias: inf");
    check_refused(|r| r.sampling.logit_bias = vec![(1, 1.0); 1025], "logit_bias: 1025");
    check_refused(|r| r.sampling.stop_ids = vec![99], "stop_token_ids[0]: token 99");
    check_refused(|r| r.choices = 0, "choices: 0 is out of range; allowed: 1 to 4");
    check_refused(|r| r.choices = 5, "choices: 5");
    check_refused(|r| r.logprobs = Some(21), "logprobs: 21");
    check_refused(|r| r.prompt_logprobs = Some(21), "prompt_logprobs: 21");
    check_refused(|r| r.marks = vec![11], "marks: 11");
    check_refused(|r| r.positions = Some(vec![[0; 3]; 9]), "positions: 9");
    check_refused(|r| r.identity = Some(vec![0; 11]), "identity: 11");
    check_refused(|r| r.rope_delta = -11, "rope_delta: -11");
    check_refused(
        |r| r.positions = Some(vec![[0, 1024, 0]; 10]),
        "positions: 1024 is out of range; allowed: 0 to 1023",
    );
    check_refused(|r| *r = fixed(request(1, 10, 5), 9, 1, false), "drafting.policy: 9");
    check_refused(|r| r.drafting.first = 0, "drafting.first: 0");
}

#[test]
fn what_can_never_fit_is_refused_and_what_just_fits_runs() {
    let mut config = FakeConfig::default();
    config.spec.pages = 3;
    let mut bench = Bench::new(config);
    let refusal = bench.try_ask(request(1, 100, 93)).map(|_| ()).expect_err("193 tokens");
    assert_eq!(refusal, Refusal::DoesNotFit { needed: 4, available: 3 });
    let make = || fixed(request(1, 100, 92), 8, 4, true);
    let expected = bench.solo(&make(), 0);
    assert_solo(&bench.answer(make()), &expected, "192 tokens in 3 pages");
}

#[test]
fn replies_end_at_the_context() {
    let mut config = config(FakeDrafts::Right);
    config.spec.context_max = 100;
    let mut bench = Bench::new(config);
    let mut long = fixed(request(1, 99, usize::MAX), 8, 2, false);
    long.sampling.ignore_eos = true;
    let heard = bench.answer(long);
    assert_eq!((heard.tokens.len(), heard.reason()), (1, &FinishReason::Length));
    let mut long = fixed(request(2, 50, usize::MAX), 8, 2, false);
    long.sampling.ignore_eos = true;
    let expected = bench.solo(&long, 0);
    let heard = bench.answer(long);
    assert_solo(&heard, &expected, "context");
    assert_eq!(heard.tokens.len(), 50);
}

#[test]
fn a_device_fault_ends_the_step_it_hit_and_no_other() {
    for drafts in [FakeDrafts::None, FakeDrafts::Right] {
        for after in 0..8 {
            let mut bench = Bench::new(config(drafts));
            let long = |seed| {
                let mut request = fixed(request(seed, 100, 100), 2, 1, false);
                request.sampling.ignore_eos = true;
                request
            };
            let hit: Vec<Asked> = (0..2).map(|seed| bench.ask(long(seed))).collect();
            bench.faults.fail_in(after);
            while !hit.iter().any(Asked::done) {
                bench.core.tick();
            }
            for asked in hit.iter().filter(|asked| asked.done()) {
                let reason = asked.choice(0).reason().clone();
                assert!(matches!(reason, FinishReason::Failed(ReplyError::DeviceFault { .. })), "{reason:?}");
            }
            for seed in 0..3 {
                let make = || request(seed, 100, 40);
                let expected = bench.solo(&make(), 0);
                assert_solo(&bench.answer(make()), &expected, "after a fault");
            }
        }
    }
}

#[test]
fn not_a_number_ends_one_request_and_is_never_drawn() {
    // T29, T27: the fault of one sequence is not the fault of its neighbours.
    let mut config = config(FakeDrafts::Sometimes(50));
    config.poison = Some(33);
    for scored in [false, true] {
        let mut bench = Bench::new(config.clone());
        let make = |seed| {
            let mut request = fixed(request(seed, 40, 60), 3, 1, true);
            request.prompt.iter_mut().for_each(|token| *token = if *token == 33 { 34 } else { *token });
            request.logprobs = scored.then_some(2);
            request
        };
        let asked: Vec<Asked> = (0..12).map(|seed| bench.ask(make(seed))).collect();
        bench.finish();
        let mut faults = 0;
        for (seed, asked) in asked.iter().enumerate() {
            let expected = bench.solo(&make(seed as u64), 0);
            faults += usize::from(matches!(expected.reason, FinishReason::Failed(_)));
            assert_solo(&asked.choice(0), &expected, "poison");
        }
        assert!(faults > 0 && faults < 12, "{faults} of 12");
        assert_eq!(bench.core.status().counters.numerical_faults, faults as u64);
    }
}

#[test]
fn a_passing_numerical_fault_does_not_stay_in_the_cache() {
    let mut bench = Bench::new(config(FakeDrafts::None));
    bench.answer(request(1, 100, 5));
    let mut longer = request(1, 100, 50);
    longer.marks = vec![50];
    bench.faults.nan_in(0);
    let heard = bench.answer(longer);
    assert!(matches!(heard.reason(), FinishReason::Failed(ReplyError::NumericalFault { .. })));
    let heard = bench.answer(request(1, 100, 50));
    assert_eq!(heard.hit, Some(0), "what led to the fault is forgotten");
    assert_eq!(heard.tokens, bench.solo(&request(1, 100, 50), 0).tokens);
}

/// Only tokens whose remainder by 3 is the number of tokens so far, by 3; after `end` tokens nothing.
struct Cycle {
    said: Vec<u32>,
    end: usize,
    free: usize,
}

impl Mask for Cycle {
    fn allowed(&mut self, bits: &mut [u32]) -> Allowed {
        if self.said.len() >= self.end {
            return Allowed::None;
        }
        if self.said.len() < self.free {
            return Allowed::All;
        }
        for token in (0..64u32).filter(|token| *token as usize % 3 == self.said.len() % 3 && *token != EOS) {
            bits[token as usize / 32] |= 1 << (token % 32);
        }
        Allowed::Some
    }

    fn advance(&mut self, token: u32) {
        let free = self.said.len() < self.free;
        assert!(free || token as usize % 3 == self.said.len() % 3, "{token} was not allowed");
        self.said.push(token);
    }

    fn rollback(&mut self, count: usize) {
        assert!(count <= self.said.len());
        self.said.truncate(self.said.len() - count);
    }

    fn fork(&self) -> Box<dyn Mask> {
        Box::new(Self { said: self.said.clone(), ..*self })
    }
}

#[test]
fn constraints_hold_with_drafts_as_without() {
    for drafts in [FakeDrafts::Right, FakeDrafts::Wrong, FakeDrafts::Sometimes(60), FakeDrafts::SecondBest] {
        for depth in [0, 1, 4, 8] {
            for (end, free) in [(usize::MAX, 0), (25, 0), (25, 7), (0, 0)] {
                let make = || {
                    let mut request = seeded(fixed(request(3, 30, 40), depth, 1 + depth % 4, true), 9);
                    request.prompt = request.prompt.repeat(3);
                    request.choices = 2;
                    request.mask = Some(Box::new(Cycle { said: Vec::new(), end, free }));
                    request
                };
                let mut bench = Bench::new(config(drafts));
                let asked = bench.ask(make());
                bench.finish();
                for choice in 0..2 {
                    let expected = bench.solo(&make(), choice as u32);
                    assert_solo(&asked.choice(choice), &expected, &format!("depth {depth}, end {end}"));
                }
            }
        }
    }
}

#[test]
fn too_small_models_do_not_start() {
    let mut config = FakeConfig::default();
    config.spec.logits_rows_max = 1;
    let model = Box::new(engine::fake::FakeModel::new(config));
    let clock = std::sync::Arc::new(engine::ManualClock::default());
    let error = engine::Core::new(model, settings(), clock).map(|_| ()).expect_err("too small");
    assert!(error.to_string().contains("rows of logits of a step: 1 found, at least 2 needed"), "{error}");
}
