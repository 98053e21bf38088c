//! Drafted equals serial (E1), whatever is drafted and however it is drawn.

mod support;

use engine::fake::FakeDrafts;
use engine::{Request, Sampling};
use support::*;

const BEHAVIOURS: [FakeDrafts; 6] = [
    FakeDrafts::None,
    FakeDrafts::Right,
    FakeDrafts::Wrong,
    FakeDrafts::Random,
    FakeDrafts::Sometimes(60),
    FakeDrafts::SecondBest,
];

/// Every depth, chain and tree, with and without copies, against the definition.
fn check(make: impl Fn() -> Request) {
    for drafts in BEHAVIOURS {
        for depth in 0..=8 {
            for (first, copy) in [(1, false), (1, true), (3, false), (3, true)] {
                let mut bench = Bench::new(config(drafts));
                let request = fixed(make(), depth, first, copy);
                let expected = bench.solo(&request, 0);
                let heard = bench.answer(request);
                assert_solo(
                    &heard,
                    &expected,
                    &format!("{drafts:?}, depth {depth}, {first} first, copy {copy}"),
                );
            }
        }
    }
}

#[test]
fn greedy() {
    for seed in 0..4 {
        check(|| request(seed, 20 + 30 * seed as usize, 60));
    }
}

/// T80: the same seed gives the same tokens at any depth.
#[test]
fn seeded_draws() {
    for seed in 0..4 {
        check(|| seeded(request(seed, 15, 60), seed * 1000 + 7));
    }
}

#[test]
fn penalties_count_the_drafts_of_a_rows_own_path() {
    check(|| {
        let mut request = seeded(request(3, 40, 60), 5);
        request.sampling.presence = 0.7;
        request.sampling.frequency = 0.4;
        request.sampling.repetition = 1.3;
        request.sampling.logit_bias = vec![(5, 2.0), (60, -100.0)];
        request.sampling.ignore_eos = true;
        request
    });
    check(|| {
        let mut request = request(9, 10, 50);
        request.sampling = Sampling { repetition: 2.0, frequency: 1.5, ..Sampling::default() };
        request
    });
}

#[test]
fn log_probabilities_are_those_of_serial_steps() {
    check(|| {
        let mut request = seeded(request(4, 12, 30), 2);
        request.logprobs = Some(3);
        request
    });
}

#[test]
fn a_repetitive_prompt_is_copied_and_still_exact() {
    let mut copied = 0;
    for seed in 0..6 {
        let mut request = request(seed, 12, 80);
        request.prompt = request.prompt.repeat(6);
        // A low temperature would loop a real model; here a bias makes the fake repeat itself.
        request.sampling.logit_bias = request.prompt[..4].iter().map(|&token| (token, 6.0)).collect();
        let request = fixed(request, 8, 1, true);
        let mut bench = Bench::new(config(FakeDrafts::None));
        let expected = bench.solo(&request, 0);
        let heard = bench.answer(request);
        assert_solo(&heard, &expected, "copied");
        copied += heard.stats().drafts.accepted;
    }
    assert!(copied > 0, "no copy was ever right");
}

#[test]
fn rejection_at_every_place_of_a_window() {
    // T15: partial accepts at each depth leave the state of serial steps; the fake's hash shows any slip.
    for percent in [10, 30, 50, 70, 90, 97] {
        for seed in 0..5 {
            let request = fixed(request(seed, 5, 200), 8, 1, false);
            let mut bench = Bench::new(config(FakeDrafts::Sometimes(percent)));
            let expected = bench.solo(&request, 0);
            let heard = bench.answer(request);
            assert_solo(&heard, &expected, "partial accepts");
        }
    }
}

#[test]
fn right_drafts_save_steps_and_are_counted() {
    let mut request = fixed(request(1, 10, 91), 8, 1, false);
    request.sampling.ignore_eos = true;
    let mut bench = Bench::new(config(FakeDrafts::Right));
    let heard = bench.answer(request);
    let drafts = &heard.stats().drafts;
    assert_eq!((drafts.rounds, drafts.proposed, drafts.accepted, drafts.rollbacks), (10, 80, 80, 0));
    assert_eq!(drafts.accepted_by_position, [10; 8]);
    assert_eq!(heard.batches, [vec![1], vec![9; 10]].concat());
}

#[test]
fn the_second_candidate_of_a_tree_is_taken() {
    let mut request = fixed(request(1, 10, 60), 2, 3, false);
    request.sampling.ignore_eos = true;
    let mut bench = Bench::new(config(FakeDrafts::SecondBest));
    let heard = bench.answer(request);
    let drafts = &heard.stats().drafts;
    assert_eq!(
        drafts.accepted, drafts.accepted_by_position[0],
        "the chain behind a wrong first token is lost"
    );
    assert!(drafts.accepted >= drafts.rounds - 1, "{drafts:?}");
}

#[test]
fn stop_tokens_end_the_reply_inside_a_window() {
    for seed in 0..30 {
        let mut request = fixed(request(seed, 10, 300), 8, 1, false);
        request.sampling.stop_ids = vec![7, 8, 9];
        let mut bench = Bench::new(config(FakeDrafts::Right));
        let expected = bench.solo(&request, 0);
        let heard = bench.answer(request);
        assert_solo(&heard, &expected, "stop");
        // The kept position is that of a serial run: all but the last token.
        assert_eq!(heard.stats().checkpoint_tokens, 10 + heard.tokens.len() - 1);
    }
}
