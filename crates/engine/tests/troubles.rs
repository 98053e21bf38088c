//! Rows of `docs/troubles.md` that show in whole replies over the fake model: warm equals cold, hits where
//! hits are due, reasons where not, drafts only where they win.

mod support;

use std::time::Duration;

use engine::fake::{FakeConfig, FakeCost, FakeDrafts, Pace};
use engine::{Clock, DraftPolicy, Drafting, Miss, Request, Settings};
use support::*;

/// Room for long prompts.
fn long(drafts: FakeDrafts) -> FakeConfig {
    let mut config = config(drafts);
    config.spec.context_max = 12_000;
    config.spec.pages = 600;
    config.spec.rows_max = 1024;
    config
}

/// A prompt with one picture of `rows` rows in it, told apart by `picture`.
fn with_picture(mut request: Request, at: usize, rows: usize, picture: u64) -> Request {
    let length = request.prompt.len();
    let side = rows.isqrt() as u32;
    assert_eq!(side * side, rows as u32, "a square picture");
    let place = |index: usize| match index {
        index if index < at => [index as u32; 3],
        index if index < at + rows => {
            let (row, column) = ((index - at) as u32 / side, (index - at) as u32 % side);
            [at as u32, at as u32 + row, at as u32 + column]
        }
        index => [(index - rows) as u32 + side; 3],
    };
    request.prompt[at..at + rows].fill(3);
    request.positions = Some((0..length).map(place).collect());
    request.identity =
        Some((0..length).map(|i| if (at..at + rows).contains(&i) { picture } else { 0 }).collect());
    request.rope_delta = i64::from(side) - rows as i64;
    request
}

#[test]
fn six_warm_turns_equal_cold_ones_on_fresh_engines() {
    // T02.
    for depth in [0, 3] {
        let mut warm = Bench::new(config(FakeDrafts::Sometimes(60)));
        let mut history = prompt(7, 90);
        for turn in 0..6 {
            let make = || fixed(seeded(Request::new(history.clone(), 40), 5), depth, 1, true);
            let mut cold = Bench::new(config(FakeDrafts::Sometimes(60)));
            let (resumed, fresh) = (warm.answer(make()), cold.answer(make()));
            assert_eq!(resumed.tokens, fresh.tokens, "turn {turn}");
            assert_eq!((resumed.hit > Some(0), fresh.hit), (turn > 0, Some(0)), "turn {turn}");
            history.extend(&resumed.tokens);
            history.extend(prompt(100 + turn, 25));
        }
    }
}

#[test]
fn a_long_prompt_asked_again_comes_from_the_cache_with_pictures_and_without() {
    // T03: at least 95 % of 8,000 tokens.
    let text = || request(1, 8000, 10);
    let pictures = |picture: u64| with_picture(request(1, 8000, 10), 3000, 1024, picture);
    let mut bench = Bench::new(long(FakeDrafts::Right));
    for make in [&text as &dyn Fn() -> Request, &|| pictures(77)] {
        let (first, again) = (bench.answer(make()), bench.answer(make()));
        assert_solo(&first, &bench.solo(&make(), 0), "first");
        assert_eq!(first.tokens, again.tokens);
        assert!(again.hit >= Some(7600), "{:?} of 8000 tokens from the cache", again.hit);
    }
    // Another picture in the same place is another prompt from there on.
    let other = bench.answer(pictures(78));
    assert_solo(&other, &bench.solo(&pictures(78), 0), "another picture");
    assert!(other.hit <= Some(3000), "{:?}", other.hit);
}

#[test]
fn five_questions_behind_one_long_system_prompt_have_one_answer() {
    // T04: ten thousand tokens of system prompt and tools, then the same question five times.
    let mut bench = Bench::new(long(FakeDrafts::Sometimes(80)));
    let ask = |seed: u64| {
        let mut request = request(4, 10_000, 60);
        request.marks = vec![10_000];
        request.prompt.extend(prompt(seed, 12));
        request
    };
    let expected = bench.solo(&ask(1), 0);
    for number in 0..5 {
        let heard = bench.answer(ask(1));
        assert_solo(&heard, &expected, &format!("time {number}"));
        assert_eq!(heard.hit >= Some(10_000), number > 0, "time {number}: {:?}", heard.hit);
    }
    let other = bench.answer(ask(2));
    assert_solo(&other, &bench.solo(&ask(2), 0), "another question");
    assert_eq!(other.hit, Some(10_000));
}

#[test]
fn a_broken_prefix_is_reported_where_it_breaks() {
    // T12: turn 2 renders turn 1's reply without its first 15 tokens, as templates do with old reasoning.
    let mut bench = Bench::new(config(FakeDrafts::Right));
    let first = prompt(1, 120);
    let mut request = fixed(Request::new(first.clone(), 60), 0, 1, false);
    request.sampling.ignore_eos = true;
    let reply = bench.answer(request).tokens;
    let turn = |kept: &[u32]| {
        let mut history = first.clone();
        history.extend(kept);
        history.extend(prompt(2, 20));
        Request::new(history, 5)
    };
    let whole = bench.answer(turn(&reply));
    assert_eq!(whole.stats().cache.miss, Some(Miss::Ends { at: 179 }), "goes on where the cache ends");
    assert_eq!(whole.hit, Some(179));
    let cut = bench.answer(turn(&reply[15..]));
    let at = 120 + reply.iter().zip(&reply[15..]).take_while(|(a, b)| a == b).count();
    assert_eq!(cut.stats().cache.miss, Some(Miss::Differs { at }));
    assert_eq!(cut.hit, Some(119), "up to the end of the first prompt");
}

/// Time and tokens of a reply of 600 tokens.
fn timed(drafts: FakeDrafts, cost: FakeCost, policy: DraftPolicy) -> (Duration, Vec<u32>) {
    let config = FakeConfig { pace: Pace::Clock(Default::default(), cost), ..config(drafts) };
    let mut bench = Bench::with(config, Settings { calibrate: true, ..settings() });
    let mut request = request(3, 40, 600);
    request.sampling.ignore_eos = true;
    request.drafting = Drafting { policy, copy: false, ..Drafting::default() };
    let heard = bench.answer(request);
    (heard.stats().decode, heard.tokens)
}

#[test]
fn automatic_drafts_run_only_where_they_win() {
    // T19: what drafts cost and how often they are right decide; the tokens are the same in every case.
    let micros = Duration::from_micros;
    let cheap = FakeCost { step: micros(1000), row: micros(20), draft: micros(50), ..FakeCost::default() };
    let dear = FakeCost { step: micros(1000), row: micros(900), draft: micros(900), ..FakeCost::default() };
    for (drafts, cost, least) in [
        (FakeDrafts::Right, cheap, 3.0),
        (FakeDrafts::Sometimes(70), cheap, 1.3),
        (FakeDrafts::Wrong, cheap, 0.97),
        (FakeDrafts::Right, dear, 0.97),
        (FakeDrafts::Wrong, dear, 0.97),
        (FakeDrafts::Random, dear, 0.97),
    ] {
        let (plain, expected) = timed(drafts, cost, DraftPolicy::Off);
        let (automatic, found) = timed(drafts, cost, DraftPolicy::Auto(8));
        assert_eq!(found, expected, "{drafts:?}");
        let gain = plain.as_secs_f64() / automatic.as_secs_f64();
        assert!(gain >= least, "{drafts:?}, {cost:?}: {gain:.3} times as fast, at least {least} expected");
    }
}

/// The longest time between two steps of a drafting stream while a long prompt comes in, with slices of
/// prompts already known.
fn longest_step(draft: Duration, max_stall: Duration) -> Duration {
    let (step, row) = (Duration::from_millis(1), Duration::from_micros(400));
    let cost = FakeCost { step, row, draft, ..FakeCost::default() };
    let config =
        FakeConfig { pace: Pace::Clock(Default::default(), cost), ..long(FakeDrafts::Sometimes(50)) };
    let mut bench = Bench::with(config, Settings { max_stall, ..settings() });
    let mut stream = fixed(request(1, 20, 4000), 4, 1, false);
    stream.sampling.ignore_eos = true;
    let stream = bench.ask(stream);
    bench.ticks(20);
    let mut longest = Duration::ZERO;
    for (seed, is_known) in [(2, false), (3, true)] {
        let mut prompt = request(seed, 3000, 1);
        prompt.cache = false;
        let prompt = bench.ask(prompt);
        while !prompt.done() {
            let before = bench.clock.now();
            bench.core.tick();
            if is_known {
                longest = longest.max(bench.clock.now() - before);
            }
        }
    }
    assert!(!stream.done(), "the stream runs beside both prompts");
    longest
}

#[test]
fn drafting_counts_towards_the_longest_stall() {
    let max_stall = Duration::from_millis(60);
    for micros in [0, 2000, 5000] {
        let longest = longest_step(Duration::from_micros(micros), max_stall);
        assert!(longest <= max_stall, "{micros} us a drafted token: {longest:?}");
        assert!(longest > max_stall * 3 / 4, "{micros} us a drafted token: only {longest:?} of it is used");
    }
}
