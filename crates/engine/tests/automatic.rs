//! Automatic drafting, by an exact clock: it changes no token, makes no stream slower than plain by more than
//! 3 %, and is faster where drafts pay.

mod support;

use std::time::Duration;

use engine::fake::{FakeConfig, FakeCost, FakeDrafts, Pace};
use engine::{Clock, DraftPolicy, DraftStats, ManualClock};
use support::*;

fn micros(count: u64) -> Duration {
    Duration::from_micros(count)
}

fn paced(drafts: FakeDrafts, slots: usize, cost: FakeCost) -> FakeConfig {
    let mut config = config(drafts);
    config.spec.slots = slots;
    config.spec.pages = slots * 16;
    config.pace = Pace::Clock(ManualClock::default(), cost);
    config
}

/// Steps of a millisecond, with verified rows, drafted tokens and upkeep of these microseconds.
fn cost(row: u64, draft: u64, upkeep: u64) -> FakeCost {
    let step = micros(1000);
    FakeCost { step, row: micros(row), draft: micros(draft), upkeep: micros(upkeep), ..FakeCost::default() }
}

/// Seconds of replies of these lengths, one after the other, and what was drafted.
fn alone(config: &FakeConfig, policy: DraftPolicy, lengths: &[(usize, usize)]) -> (Vec<f64>, DraftStats) {
    let Pace::Clock(_, FakeCost { draft: draft_cost, .. }) = config.pace else { panic!("no clock") };
    let mut bench = Bench::new(config.clone());
    let mut drafts = DraftStats::default();
    let mut times = Vec::new();
    for (seed, &(prompt, tokens)) in lengths.iter().enumerate() {
        let mut request = request(seed as u64, prompt, tokens);
        request.cache = false;
        request.sampling.ignore_eos = true;
        request.drafting.policy = policy;
        // Copies cost no drafting.
        request.drafting.copy = draft_cost < micros(1000);
        let expected = bench.solo(&request, 0);
        let before = bench.clock.now();
        let heard = bench.answer(request);
        assert_solo(&heard, &expected, "auto");
        times.push((bench.clock.now() - before).as_secs_f64());
        drafts.add(&heard.stats().drafts);
    }
    (times, drafts)
}

/// Verified rows from free to as dear as steps, drafters from always wrong to always right, a drafter's
/// upkeep from nothing to an eighth of a step: no reply takes 3 % more than plain ones, to which no upkeep
/// belongs.
#[test]
fn no_stream_is_much_slower_than_plain_and_many_are_faster() {
    let lengths = [(10, 250), (200, 120), (10, 100), (30, 350)];
    for (row, draft) in [(10, 10), (100, 50), (300, 100), (3000, 0), (3000, 1500)] {
        for upkeep in [0, 125] {
            for drafts in [
                FakeDrafts::Wrong,
                FakeDrafts::Random,
                FakeDrafts::Sometimes(30),
                FakeDrafts::Sometimes(60),
                FakeDrafts::SecondBest,
                FakeDrafts::Right,
            ] {
                let what = format!("{drafts:?}, {row} us a row, {draft} a draft, {upkeep} of upkeep");
                let plain = paced(FakeDrafts::None, 1, cost(row, draft, 0));
                let (plain, _) = alone(&plain, DraftPolicy::Off, &lengths);
                let (auto, stats) =
                    alone(&paced(drafts, 1, cost(row, draft, upkeep)), DraftPolicy::Auto(8), &lengths);
                for ((plain, auto), length) in plain.iter().zip(&auto).zip(lengths) {
                    assert!(auto / plain <= 1.03, "{what}: {auto} against {plain} for {length:?}");
                }
                let (plain, auto): (f64, f64) = (plain.iter().sum(), auto.iter().sum());
                if drafts == FakeDrafts::Right && row <= 300 && upkeep == 0 {
                    assert!(auto < plain * 0.6, "{what}: {auto} against {plain}, {stats:?}");
                }
                if draft == 1500 {
                    assert_eq!(stats.rounds, 0, "{what}: what cannot pay is not tried");
                }
            }
        }
    }
}

/// The second candidate is right wherever the first is wrong: a tree pays, a chain never does.
#[test]
fn trees_are_made_where_the_second_candidate_pays() {
    let config = paced(FakeDrafts::SecondBest, 1, cost(50, 20, 0));
    let (plain, _) = alone(&config, DraftPolicy::Off, &[(10, 490); 3]);
    let (auto, stats) = alone(&config, DraftPolicy::Auto(8), &[(10, 490); 3]);
    assert!(auto[2] < plain[2] * 0.75, "{auto:?} against {plain:?}, {stats:?}");
    // Where rows are dear it does not pay, and chains of a good drafter stay chains.
    let dear = paced(FakeDrafts::SecondBest, 1, cost(500, 20, 0));
    let (_, stats) = alone(&dear, DraftPolicy::Auto(8), &[(10, 490); 3]);
    assert!(stats.proposed < 100, "{stats:?}");
    let right = paced(FakeDrafts::Right, 1, cost(50, 20, 0));
    let (_, stats) = alone(&right, DraftPolicy::Auto(8), &[(10, 490); 3]);
    assert!(stats.proposed <= 8 * stats.rounds && stats.accepted * 20 > stats.proposed * 19, "{stats:?}");
}

/// Beside others a stream is not slower either, whether it drafts or its neighbours do.
#[test]
fn no_stream_pays_for_its_neighbours_drafts() {
    for drafts in [FakeDrafts::Wrong, FakeDrafts::Sometimes(50), FakeDrafts::Right] {
        for (row, draft) in [(30, 10), (200, 50), (1000, 0)] {
            let times = |policy: DraftPolicy| {
                let mut bench = Bench::new(paced(drafts, 4, cost(row, draft, 0)));
                let mut asked = Vec::new();
                for seed in 0..4 {
                    let mut request = request(seed, 10, 400);
                    request.cache = false;
                    request.sampling.ignore_eos = true;
                    // One of the four never drafts.
                    request.drafting.policy = if seed == 3 { DraftPolicy::Off } else { policy };
                    asked.push(bench.ask(request));
                }
                bench.finish();
                let took = |asked: &Asked| asked.choice(0).stats().decode.as_secs_f64();
                asked.iter().map(took).collect::<Vec<f64>>()
            };
            let (plain, auto) = (times(DraftPolicy::Off), times(DraftPolicy::Auto(8)));
            for (at, (plain, auto)) in plain.iter().zip(&auto).enumerate() {
                assert!(
                    auto / plain <= 1.03,
                    "{drafts:?}, {row} us a row, stream {at}: {auto} against {plain}"
                );
            }
        }
    }
}
