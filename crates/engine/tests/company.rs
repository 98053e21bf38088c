//! Concurrent equals alone (E2), slots and order are irrelevant, cancels leave no trace, prompts do not stall
//! streams.

mod support;

use std::time::Duration;

use engine::fake::{FakeCost, FakeDrafts, Pace};
use engine::{Event, FinishReason, Request, Settings};
use support::*;

/// A mixed request named by a number.
fn mixed(number: u64) -> Request {
    let mut dice = Dice(number * 7919);
    let length = [1, 7, 63, 64, 65, 130, 200][dice.below(7) as usize];
    let mut request = request(number, length, 5 + dice.below(60) as usize);
    if dice.percent(50) {
        request = seeded(request, number);
    }
    if dice.percent(30) {
        request.sampling.presence = 0.5;
    }
    request.cache = dice.percent(70);
    fixed(request, dice.below(6) as u8, 1 + dice.below(3) as u8, dice.percent(50))
}

fn wide(drafts: FakeDrafts, slots: usize) -> engine::fake::FakeConfig {
    let mut config = config(drafts);
    config.spec.slots = slots;
    config.spec.pages = slots * 8;
    config
}

#[test]
fn one_to_sixteen_streams_equal_solo() {
    for slots in [1, 2, 3, 5, 8, 16] {
        let mut bench = Bench::new(wide(FakeDrafts::Sometimes(70), slots));
        let mut asked = Vec::new();
        for number in 0..3 * slots as u64 {
            asked.push((number, bench.ask(mixed(number))));
            bench.ticks(number as usize % 4);
        }
        bench.finish();
        for (number, asked) in &asked {
            let expected = bench.solo(&mixed(*number), 0);
            assert_solo(&asked.choice(0), &expected, &format!("request {number} of {slots} slots"));
        }
    }
}

#[test]
fn a_survivor_does_not_see_its_neighbours() {
    // T25: one prompt, alone and among 45 others that come, go and are cancelled.
    let survivor = || fixed(request(1, 50, 200), 3, 1, true);
    let mut bench = Bench::new(wide(FakeDrafts::Right, 8));
    let expected = bench.solo(&survivor(), 0);
    let asked = bench.ask(survivor());
    let mut others = Vec::new();
    for number in 0..45 {
        others.push(bench.ask(mixed(100 + number)));
        bench.ticks(1 + number as usize % 3);
        if number % 3 == 0 {
            others[number as usize / 2].cancel();
        }
    }
    bench.finish();
    assert_solo(&asked.choice(0), &expected, "survivor");
    assert!(others.iter().all(Asked::done));
}

#[test]
fn prompts_of_all_lengths_together_equal_alone() {
    // T24.
    let lengths = [1, 7, 63, 64, 65, 500, 4097, 9000];
    let mut config = wide(FakeDrafts::Right, 8);
    config.spec.context_max = 9100;
    config.spec.pages = 400;
    config.spec.rows_max = 1024;
    let mut bench = Bench::new(config);
    let make = |at: usize| fixed(request(at as u64, lengths[at], 40), 2, 1, false);
    let asked: Vec<Asked> = (0..8).map(|at| bench.ask(make(at))).collect();
    bench.finish();
    for (at, asked) in asked.iter().enumerate() {
        assert_solo(&asked.choice(0), &bench.solo(&make(at), 0), &format!("{} tokens", lengths[at]));
    }
}

#[test]
fn cancels_free_the_slot_within_a_step_and_leave_no_trace() {
    // T66: queued, in prefill, in decode.
    for drafts in [FakeDrafts::Right, FakeDrafts::Wrong] {
        for ticks in 0..12 {
            let mut bench = Bench::new(wide(drafts, 1));
            bench.config.spec.rows_max = 32;
            let mut first = bench.ask(fixed(request(5, 300, 100), 4, 1, false));
            let mut queued = bench.ask(request(6, 10, 10));
            bench.ticks(ticks);
            queued.cancel();
            first.cancel();
            bench.core.tick();
            assert_eq!(first.choice(0).reason(), &FinishReason::Cancelled);
            assert_eq!(queued.choice(0).reason(), &FinishReason::Cancelled);
            assert!(bench.core.idle() && bench.core.leaks_nothing());
            let again = fixed(request(5, 300, 100), 4, 1, false);
            let expected = bench.solo(&again, 0);
            assert_solo(&bench.answer(again), &expected, "after a cancel");
        }
    }
}

#[test]
fn slots_are_given_first_come_first_served() {
    let mut bench = Bench::new(wide(FakeDrafts::None, 1));
    let order: Vec<Asked> = (0..4).map(|number| bench.ask(request(number, 10, 5))).collect();
    for at in 0..4 {
        while !order[at].done() {
            bench.core.tick();
        }
        assert!(order[at + 1..].iter().all(|later| later.choice(0).end.is_none()));
    }
}

#[test]
fn a_request_that_does_not_fit_now_waits_and_holds_its_place() {
    let mut config = wide(FakeDrafts::None, 3);
    config.spec.pages = 6;
    let mut bench = Bench::new(config);
    let running = bench.ask(request(1, 64, 192));
    let large = bench.ask(request(2, 64, 192));
    let small = bench.ask(request(3, 10, 5));
    bench.ticks(3);
    assert_eq!((running.choice(0).hit, large.choice(0).hit, small.choice(0).hit), (Some(0), None, None));
    bench.finish();
    for (seed, asked, length, tokens) in [(1, running, 64, 192), (2, large, 64, 192), (3, small, 10, 5)] {
        assert_solo(&asked.choice(0), &bench.solo(&request(seed, length, tokens), 0), "memory");
    }
}

#[test]
fn running_streams_step_within_the_stall_limit() {
    let mut config = wide(FakeDrafts::None, 4);
    config.spec.context_max = 20_000;
    config.spec.pages = 1000;
    config.spec.rows_max = 8192;
    let millis = Duration::from_millis;
    let cost = FakeCost { step: millis(10), row: Duration::from_micros(300), ..FakeCost::default() };
    config.pace = Pace::Clock(engine::ManualClock::default(), cost);
    let mut bench = Bench::new(config);
    let stream = bench.ask(fixed(request(1, 5, 2000), 0, 1, false));
    bench.ticks(5);
    let long = bench.ask(fixed(request(2, 15_000, 5), 0, 1, false));
    let mut before = (bench.clock_now(), stream.choice(0).tokens.len());
    let mut longest = Duration::ZERO;
    let mut steps = 0;
    while !long.done() {
        bench.core.tick();
        steps += 1;
        let now = (bench.clock_now(), stream.choice(0).tokens.len());
        assert_eq!(now.1, before.1 + 1, "a token in each step");
        longest = longest.max(now.0 - before.0);
        before = now;
    }
    assert!(longest <= millis(205), "{longest:?}");
    assert!(steps < 40, "{steps} steps for 15000 tokens at 600 a step");
}

impl Bench {
    fn clock_now(&self) -> Duration {
        engine::Clock::now(&self.clock)
    }
}

#[test]
fn waiting_too_long_ends_with_an_error() {
    let settings = Settings { queue_timeout: Duration::from_millis(5), ..settings() };
    let mut bench = Bench::with(wide(FakeDrafts::None, 1), settings);
    let _running = bench.ask(fixed(request(1, 10, 200), 0, 1, false));
    let waiting = bench.ask(request(2, 10, 5));
    bench.finish();
    let reason = waiting.choice(0).reason().clone();
    assert!(matches!(reason, FinishReason::Failed(engine::ReplyError::QueueTimeout { .. })), "{reason:?}");
}

#[test]
fn choices_share_their_prompt_and_draw_their_own_tokens() {
    for cache in [true, false] {
        let make = || {
            let mut request = seeded(request(8, 150, 30), 3);
            request.choices = 4;
            request.cache = cache;
            request
        };
        let mut bench = Bench::new(wide(FakeDrafts::Right, 4));
        let asked = bench.ask(make());
        bench.finish();
        for choice in 0..4 {
            let heard = asked.choice(choice);
            assert_solo(&heard, &bench.solo(&make(), choice as u32), "choice");
            assert_eq!(heard.hit, Some(if choice == 0 { 0 } else { 149 }), "cache {cache}");
        }
        let kept = bench.core.status().cache_entries;
        assert_eq!(kept > 0, cache, "a private prompt is forgotten");
    }
}

#[test]
fn schedules_on_a_manual_clock_repeat_exactly() {
    let run = || {
        let mut bench = Bench::new(wide(FakeDrafts::Sometimes(60), 4));
        let asked: Vec<Asked> = (0..8).map(|number| bench.ask(request(number, 40, 60))).collect();
        bench.finish();
        let batches: Vec<Vec<usize>> = asked.iter().map(|asked| asked.choice(0).batches).collect();
        (batches, bench.core.status().counters)
    };
    assert_eq!(run(), run());
}

#[test]
fn events_come_in_order() {
    let (heard, mut sink) = listener(1);
    sink(Event::Tokens { choice: 0, tokens: vec![4], scores: Vec::new() });
    assert_eq!(heard.lock().expect("no panic")[0].tokens, [4]);
    let mut bench = Bench::new(wide(FakeDrafts::Right, 1));
    let heard = bench.answer(request(1, 10, 0));
    assert_eq!((heard.tokens.len(), heard.reason()), (0, &FinishReason::Length), "0 tokens only prefill");
    assert_eq!(heard.stats().checkpoint_tokens, 10);
}

#[test]
fn one_cancelled_choice_leaves_the_others_alone() {
    let mut bench = Bench::new(config(FakeDrafts::Sometimes(60)));
    let make = || {
        let mut request = seeded(request(8, 70, 80), 4);
        request.sampling.ignore_eos = true;
        request.choices = 4;
        request
    };
    let mut asked = bench.ask(make());
    bench.ticks(12);
    asked.cancel_choice(1);
    asked.cancel_choice(99);
    bench.core.tick();
    assert_eq!(asked.choice(1).reason(), &FinishReason::Cancelled);
    assert!(bench.core.status().decoding <= 3, "its slot is free");
    bench.finish();
    for choice in [0, 2, 3] {
        assert_solo(&asked.choice(choice), &bench.solo(&make(), choice as u32), &format!("choice {choice}"));
    }
    // Choices that wait for the prompt of a cancelled one compute it themselves.
    let mut asked = bench.ask(Request { cache: false, ..make() });
    asked.cancel_choice(0);
    bench.finish();
    assert_eq!(asked.choice(0).reason(), &FinishReason::Cancelled);
    assert_solo(&asked.choice(2), &bench.solo(&make(), 2), "behind a cancelled choice");
}

#[test]
fn admitted_choices_name_their_slots() {
    let mut bench = Bench::new(config(FakeDrafts::None));
    let mut many = request(1, 20, 30);
    many.choices = 4;
    let asked = bench.ask(many);
    bench.finish();
    let mut slots: Vec<_> = (0..4).map(|choice| asked.choice(choice).slot.expect("admitted")).collect();
    slots.sort_unstable();
    assert_eq!(slots, [0, 1, 2, 3]);
}
