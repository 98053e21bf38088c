//! Prompts with pictures: concurrent, cached, drafted and cancelled equal alone, and streams do not stall.

mod support;

use std::time::Duration;

use engine::fake::{FakeConfig, FakeCost, FakeDrafts, Pace};
use engine::{CacheLimits, Clock, FinishReason, Refusal, Request, Settings};
use support::*;

fn seeing(drafts: FakeDrafts) -> FakeConfig {
    FakeConfig { images: images(), ..config(drafts) }
}

/// A prompt of 150 tokens with three pictures, two of them side by side.
fn album(seed: u64) -> Request {
    let pictures = vec![(5, picture(seed, 4, 6)), (60, picture(9, 10, 12)), (90, picture(seed, 2, 8))];
    seeded(pictured(request(seed, 150, 40), pictures), seed)
}

#[test]
fn replies_to_pictures_equal_solo_in_any_company() {
    for drafts in [FakeDrafts::None, FakeDrafts::Right, FakeDrafts::Sometimes(60)] {
        let mut bench = Bench::new(seeing(drafts));
        let mut asked = Vec::new();
        for number in 0..12 {
            let make = || if number % 3 == 0 { request(number, 70, 30) } else { album(number) };
            asked.push((bench.solo(&make(), 0), bench.ask(make())));
            bench.ticks(number as usize % 5);
        }
        bench.finish();
        for (expected, asked) in &asked {
            assert_solo(&asked.choice(0), expected, &format!("{drafts:?}"));
        }
        let counters = bench.core.status().counters;
        // Eight albums of three pictures, one of which all share.
        assert_eq!(counters.pictures_encoded, 17);
    }
}

#[test]
fn a_picture_is_part_of_the_prefix() {
    let mut bench = Bench::new(seeing(FakeDrafts::Right));
    let first = bench.answer(album(1));
    assert_eq!(first.hit, Some(0));
    let again = bench.answer(album(1));
    assert!(again.hit > Some(140), "{:?}", again.hit);
    assert_eq!(again.tokens, first.tokens);
    // The same token ids over another picture.
    let other = |seed| {
        let pictures = vec![(5, picture(seed, 4, 6)), (60, picture(9, 10, 12)), (90, picture(1, 2, 8))];
        seeded(pictured(request(1, 150, 40), pictures), 1)
    };
    assert_eq!(other(2).prompt, album(1).prompt);
    let different = bench.answer(other(2));
    assert!(different.hit <= Some(5), "{:?}", different.hit);
    assert_solo(&different, &bench.solo(&other(2), 0), "another picture");
    assert_ne!(different.tokens, first.tokens);
    // Text alone still hits.
    bench.answer(request(3, 100, 5));
    assert!(bench.answer(request(3, 100, 5)).hit > Some(95));
}

#[test]
fn a_prompt_resumes_inside_a_picture() {
    let cache = CacheLimits { checkpoint_tokens: 70, prompt_end_min: 1000, ..CacheLimits::default() };
    let mut bench = Bench::with(seeing(FakeDrafts::Right), Settings { cache, ..settings() });
    let make = |tail: u64| {
        let mut request = pictured(request(4, 150, 20), vec![(60, picture(9, 10, 12))]);
        request.prompt[149] = 2 + tail as u32;
        request
    };
    bench.answer(make(1));
    let second = bench.answer(make(2));
    assert_eq!(second.hit, Some(140));
    let mut third = bench.ask(make(3));
    bench.finish();
    assert_solo(&third.choice(0), &bench.solo(&make(3), 0), "resumed");
    third.cancel();
    // 70 lies in the picture: rows 60 to 89.
    let cut = |length: usize| {
        let mut request = pictured(request(4, 150, 20), vec![(60, picture(9, 10, 12))]);
        request.prompt[length] = 2;
        request.prompt[length + 1] = 2;
        request
    };
    let inside = bench.answer(cut(95));
    assert_eq!(inside.hit, Some(70));
    assert_solo(&inside, &bench.solo(&cut(95), 0), "inside a picture");
}

/// T72: every turn of three running streams beside a large picture gives each a token within `max_stall`.
#[test]
fn encoding_does_not_stall_streams_and_ends_with_its_request() {
    let mut config = seeing(FakeDrafts::None);
    let micros = Duration::from_micros;
    // A picture of 240 patches takes 192 ms in slices of 3.2 ms.
    let cost = FakeCost {
        step: micros(1000),
        row: micros(10),
        draft: micros(0),
        image: micros(200),
        ..FakeCost::default()
    };
    config.pace = Pace::Clock(engine::ManualClock::default(), cost);
    let max_stall = Duration::from_millis(20);
    let mut bench = Bench::with(config, Settings { max_stall, ..settings() });
    let long = |seed: u64| {
        let mut long = fixed(request(seed, 10, 900), 0, 1, false);
        long.sampling.ignore_eos = true;
        long
    };
    let streams = [10, 11, 12].map(|seed| bench.ask(long(seed)));
    bench.ticks(9);
    let said = || streams.each_ref().map(|stream| stream.choice(0).tokens.len());
    let big = || pictured(request(2, 100, 10), vec![(20, picture(5, 12, 20))]);
    let mut asked = bench.ask(big());
    let (mut before, mut last, mut slices) = (said(), bench.clock.now(), 0);
    while asked.choice(0).tokens.is_empty() {
        bench.ticks(1);
        let now = said();
        assert!(now.iter().zip(&before).all(|(now, before)| now > before), "a token each turn");
        assert!(bench.clock.now() - last <= max_stall, "{:?}", bench.clock.now() - last);
        slices += usize::from(!bench.core.status().encoding.is_empty());
        (before, last) = (now, bench.clock.now());
    }
    assert!(slices > 5, "{slices}");
    asked.cancel();
    bench.ticks(2);
    // Gone in the middle of its picture: the slot is free at once, and the picture is not finished.
    let encoded = bench.core.status().counters.pictures_encoded;
    let mut gone = bench.ask(pictured(request(3, 100, 10), vec![(20, picture(6, 12, 20))]));
    bench.ticks(3);
    assert_eq!(bench.core.status().encoding.len(), 1);
    gone.cancel();
    bench.ticks(1);
    assert_eq!(gone.choice(0).reason(), &FinishReason::Cancelled);
    bench.finish();
    assert_eq!(bench.core.status().counters.pictures_encoded, encoded);
    let stats = asked.choice(0).stats().clone();
    assert!(stats.image >= Duration::from_millis(150) && stats.image <= stats.prefill, "{stats:?}");
}

#[test]
fn features_are_kept_within_their_bytes() {
    let cache = CacheLimits { bytes_max: 8 * 1500, ..CacheLimits::default() };
    let mut bench = Bench::with(seeing(FakeDrafts::None), Settings { cache, ..settings() });
    for number in 0..40 {
        let pictures = vec![(2, picture(number % 5, 6, 6)), (20, picture(100 + number, 4, 4))];
        let make = || pictured(request(number, 40, 4), pictures.clone());
        let expected = bench.solo(&make(), 0);
        assert_solo(&bench.answer(make()), &expected, "kept or not");
        let status = bench.core.status();
        assert!(status.cache_bytes <= status.cache_bytes_max, "{status:?}");
        assert!(status.cache_feature_bytes > 0, "{status:?}");
        assert!(status.cache_feature_bytes <= status.cache_bytes_max / 8, "{status:?}");
    }
    assert!(bench.core.status().counters.pictures_cached > 5);
}

#[test]
fn a_failing_tower_fails_its_own_requests() {
    let mut bench = Bench::new(seeing(FakeDrafts::None));
    let stream = bench.ask(request(1, 10, 60));
    bench.ticks(3);
    let asked = bench.ask(pictured(request(2, 60, 10), vec![(20, picture(5, 4, 4))]));
    bench.faults.fail_encoding();
    bench.finish();
    assert!(matches!(asked.choice(0).reason(), FinishReason::Failed(_)));
    assert_solo(&stream.choice(0), &bench.solo(&request(1, 10, 60), 0), "the stream beside it");
}

#[test]
fn pictures_that_do_not_fit_are_refused() {
    let mut bench = Bench::new(seeing(FakeDrafts::None));
    let check = |bench: &mut Bench, request: Request, field: &str| match bench.try_ask(request) {
        Err(Refusal::Value { field: found, .. }) => assert_eq!(found, field),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("{field} was taken"),
    };
    let at = |start: usize| request(1, 40, 5).with_pictures(vec![(start, picture(1, 4, 4))], 2);
    check(&mut bench, at(38), "pictures");
    check(&mut bench, request(1, 400, 5).with_pictures(vec![(1, picture(1, 20, 20))], 2), "pictures");
    let twice = vec![(1, picture(1, 4, 4)), (3, picture(1, 4, 4))];
    check(&mut bench, request(1, 40, 5).with_pictures(twice, 2), "pictures");
    check(&mut bench, Request { positions: None, ..at(3) }, "positions");
    let mut blind = Bench::new(config(FakeDrafts::None));
    check(&mut blind, at(3), "pictures");
}
