//! Resumed equals fresh (E3), and the cache holds what it promises.

mod support;

use std::time::Duration;

use engine::fake::FakeDrafts;
use engine::{CacheLimits, CacheReport, DiskSettings, Miss, Request, Settings};
use support::*;

/// A conversation: each turn's prompt is the last prompt, its reply, and new tokens.
fn converse(bench: &mut Bench, turns: usize, depth: u8, mut each: impl FnMut(&Heard, usize)) {
    let mut history = prompt(42, 100);
    for turn in 0..turns {
        let make = || fixed(Request::new(history.clone(), 30), depth, 1, true);
        let expected = bench.solo(&make(), 0);
        let heard = bench.answer(make());
        assert_solo(&heard, &expected, &format!("turn {turn}"));
        each(&heard, history.len());
        history.extend(&heard.tokens);
        history.extend(prompt(turn as u64, 20 + turn * 7));
    }
}

#[test]
fn turns_resume_where_the_last_reply_ended() {
    // T01, T02.
    for depth in [0, 1, 3, 8] {
        for drafts in [FakeDrafts::Right, FakeDrafts::Wrong, FakeDrafts::Sometimes(50)] {
            let mut bench = Bench::new(config(drafts));
            let mut ended = 0;
            converse(&mut bench, 6, depth, |heard, length| {
                assert_eq!(heard.hit, Some(ended), "all but the last token of the turn before");
                ended = length + heard.tokens.len() - 1;
            });
        }
    }
}

#[test]
fn every_kept_position_resumes_exactly() {
    let length = 200;
    for cut in 1..length {
        let mut bench = Bench::new(config(FakeDrafts::Right));
        let mut first = request(1, length, 0);
        first.marks = vec![cut];
        bench.answer(first);
        // The same beginning, then something else: only the marked position fits.
        let mut second = request(1, length, 12);
        second.prompt.truncate(cut);
        second.prompt.push(63 - second.prompt[cut - 1]);
        let expected = bench.solo(&second, 0);
        let heard = bench.answer(second);
        assert_solo(&heard, &expected, &format!("resumed at {cut}"));
        assert_eq!(heard.hit, Some(cut), "marked positions are kept");
    }
}

#[test]
fn the_same_chat_again_gives_the_same_reply() {
    // T05, T08: twice in one process, warm the second time.
    let mut bench = Bench::new(config(FakeDrafts::Right));
    for pass in 0..2 {
        for seed in 0..10 {
            let make = || request(seed, 40 + seed as usize * 5, 25);
            let expected = bench.solo(&make(), 0);
            assert_solo(&bench.answer(make()), &expected, &format!("pass {pass}, question {seed}"));
        }
    }
    assert!(bench.core.status().counters.prompt_cached > 0);
}

#[test]
fn a_then_b_then_a() {
    // T13: with drafts of each depth, cache on.
    for depth in 1..=3 {
        let mut bench = Bench::new(config(FakeDrafts::Right));
        let make = |seed, length| fixed(request(seed, length, 40), depth, 1, true);
        let first = bench.answer(make(1, 300));
        bench.answer(make(2, 500));
        let again = bench.answer(make(1, 300));
        assert_eq!(first.tokens, again.tokens);
        assert_eq!(again.hit, Some(299));
    }
}

#[test]
fn a_cancelled_reply_keeps_its_state() {
    // T09: cut after some tokens, come back with the history and new text.
    let mut bench = Bench::new(config(FakeDrafts::Right));
    let mut long = fixed(request(1, 100, 200), 0, 1, false);
    long.sampling.ignore_eos = true;
    let mut asked = bench.ask(long);
    bench.ticks(50);
    let heard = asked.choice(0);
    assert!(heard.tokens.len() >= 40);
    asked.cancel();
    bench.core.tick();
    let mut history = prompt(1, 100);
    history.extend(&heard.tokens);
    history.extend(prompt(2, 30));
    let next = Request::new(history, 20);
    let expected = bench.solo(&next, 0);
    let resumed = bench.answer(next);
    assert_solo(&resumed, &expected, "after a cancel");
    assert_eq!(resumed.hit, Some(100 + heard.tokens.len() - 1));
}

#[test]
fn eviction_never_changes_replies_and_limits_hold() {
    // T68: many conversations through a small cache, counted in bytes, nothing grows.
    let mut config = config(FakeDrafts::Sometimes(60));
    config.spec.snapshots = 5;
    config.spec.pages = 24;
    let limit = 6_000;
    let cache = CacheLimits { bytes_max: limit, checkpoint_tokens: 64, prompt_end_min: 8 };
    let mut bench = Bench::with(config, Settings { cache, ..settings() });
    let mut dice = Dice(5);
    for number in 0..1000 {
        let mut request = request(dice.below(12), 30 + dice.below(150) as usize, 1 + dice.below(20) as usize);
        request.marks = vec![dice.below(30) as usize];
        let expected = bench.solo(&request, 0);
        let heard = bench.answer(request);
        assert_solo(&heard, &expected, &format!("request {number}"));
        let status = bench.core.status();
        assert!(status.cache_bytes <= limit, "{} bytes", status.cache_bytes);
        assert!(status.cache_entries <= 5);
    }
    assert!(bench.core.status().counters.prompt_cached > 1000);
}

#[test]
fn a_shared_system_prompt_outlives_single_conversations() {
    let mut config = config(FakeDrafts::Right);
    config.spec.snapshots = 4;
    let mut bench = Bench::new(config);
    let ask = |bench: &mut Bench, seed: u64| {
        let mut request = request(99, 120, 10);
        request.marks = vec![120];
        request.prompt.extend(prompt(seed, 60));
        bench.answer(request).hit
    };
    ask(&mut bench, 0);
    for seed in 1..30 {
        assert_eq!(ask(&mut bench, seed), Some(120), "conversation {seed}");
    }
}

#[test]
fn namespaces_do_not_share() {
    let mut bench = Bench::new(config(FakeDrafts::Right));
    let make = |namespace: &str| {
        let mut request = request(1, 100, 10);
        request.namespace = namespace.into();
        request
    };
    bench.answer(make("a"));
    assert_eq!(bench.answer(make("b")).hit, Some(0));
    assert_eq!(bench.answer(make("a")).hit, Some(99));
    // A name that looks like an internal one is still only a name.
    assert_eq!(bench.answer(make("private 1")).hit, Some(0));
}

#[test]
fn positions_and_pictures_are_part_of_the_key() {
    let mut bench = Bench::new(config(FakeDrafts::Right));
    let plain = || request(1, 100, 10);
    let turned = |picture: u64| {
        let mut request = plain();
        request.positions = Some((0..100).map(|at| if at < 50 { [at; 3] } else { [at - 20; 3] }).collect());
        request.rope_delta = -20;
        request.identity =
            Some((0..100).map(|at| if (30..50).contains(&at) { picture } else { 0 }).collect());
        request
    };
    for (make, hit) in [(0, 0), (7, 0), (8, 0), (7, 99), (0, 99)] {
        let request = || if make == 0 { plain() } else { turned(make) };
        let expected = bench.solo(&request(), 0);
        let heard = bench.answer(request());
        assert_solo(&heard, &expected, "positions");
        assert_eq!(heard.hit, Some(hit), "picture {make}");
    }
}

#[test]
fn misses_are_explained() {
    let mut bench = Bench::new(config(FakeDrafts::Right));
    let mut check = |request: Request, hit_tokens, known_tokens, miss| {
        let found = bench.answer(request).stats().cache;
        assert_eq!(found, CacheReport { hit_tokens, known_tokens, miss });
    };
    let with = |change: fn(&mut Request)| {
        let mut request = request(1, 100, 0);
        change(&mut request);
        request
    };
    check(with(|request| request.cache = false), 0, 0, Some(Miss::Off));
    check(with(|_| {}), 0, 0, Some(Miss::Empty));
    check(with(|_| {}), 99, 100, None);
    check(with(|request| request.prompt[40] ^= 1), 0, 40, Some(Miss::Differs { at: 40 }));
    check(with(|request| request.prompt.truncate(60)), 0, 60, Some(Miss::Checkpoint { at: 0 }));
    check(with(|request| request.prompt.extend([5, 6, 7])), 100, 100, Some(Miss::Ends { at: 100 }));
}

#[test]
fn the_disk_tier_survives_restarts_and_damage() {
    // T10: real reuse and equal tokens, or none.
    let folder = std::env::temp_dir().join(format!("engine-disk-tier-{}", std::process::id()));
    let disk = |digest: u8| DiskSettings { folder: folder.clone(), bytes_max: 1 << 20, digest: [digest; 32] };
    let start = |digest: u8| {
        Bench::with(config(FakeDrafts::Right), Settings { disk: Some(disk(digest)), ..settings() })
    };
    let make = |longer: usize| {
        let mut request = request(1, 150, 20);
        request.prompt.extend(prompt(2, longer));
        request
    };
    let check = |bench: &mut Bench, longer: usize, hit: usize| {
        let expected = bench.solo(&make(longer), 0);
        let heard = bench.answer(make(longer));
        assert_solo(&heard, &expected, "from disk");
        assert_eq!(heard.hit, Some(hit));
    };
    let mut bench = start(1);
    check(&mut bench, 0, 0);
    bench.core.persist();
    let mut bench = start(1);
    check(&mut bench, 0, 149);
    check(&mut bench, 10, 149);
    check(&mut start(2), 0, 0);
    let mut states = 0;
    for file in std::fs::read_dir(&folder).expect("made by the engine") {
        let path = file.expect("readable").path();
        if path.extension().is_some_and(|kind| kind == "state") {
            states += 1;
            let bytes = std::fs::read(&path).expect("readable");
            std::fs::write(&path, &bytes[..bytes.len() / 2]).expect("writable");
        }
    }
    assert!(states >= 2);
    check(&mut start(1), 0, 0);
    std::fs::remove_dir_all(&folder).expect("made by the engine");
}

#[test]
fn a_disk_that_hangs_stalls_nobody() {
    let folder = std::env::temp_dir().join(format!("engine-disk-hangs-{}", std::process::id()));
    let disk = DiskSettings { folder: folder.clone(), bytes_max: 1 << 20, digest: [1; 32] };
    let start =
        || Bench::with(config(FakeDrafts::Right), Settings { disk: Some(disk.clone()), ..settings() });
    let make = || request(1, 150, 20);
    let mut bench = start();
    bench.answer(make());
    bench.core.persist();
    let mut bench = start();
    // Opening a pipe that nobody writes to never ends.
    for file in std::fs::read_dir(&folder).expect("made by the engine") {
        let path = file.expect("readable").path();
        std::fs::remove_file(&path).expect("ours");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().expect("coreutils").success());
    }
    let mut busy = fixed(Request { cache: false, ..request(2, 40, 200) }, 0, 1, false);
    busy.sampling.ignore_eos = true;
    let streams = bench.ask(busy);
    bench.ticks(3);
    let waits = bench.ask(make());
    let before = streams.choice(0).tokens.len();
    bench.ticks(50);
    assert_eq!(streams.choice(0).tokens.len(), before + 50, "every tick is a step");
    assert_eq!(waits.choice(0).hit, None, "it waits for the disk");
    bench.clock.advance(Duration::from_secs(3));
    bench.finish();
    assert_eq!(waits.choice(0).hit, Some(0), "in the end it is computed");
    assert_solo(&waits.choice(0), &bench.solo(&make(), 0), "without the disk");
    assert!(streams.done());
    std::fs::remove_dir_all(&folder).expect("made by the engine");
}

#[test]
fn evicted_entries_come_back_from_disk() {
    let folder = std::env::temp_dir().join(format!("engine-disk-evicted-{}", std::process::id()));
    let disk = DiskSettings { folder: folder.clone(), bytes_max: 20_000, digest: [0; 32] };
    let mut config = config(FakeDrafts::Sometimes(70));
    config.spec.snapshots = 3;
    config.spec.pages = 20;
    let mut bench = Bench::with(config, Settings { disk: Some(disk), ..settings() });
    let mut dice = Dice(3);
    for number in 0..200 {
        let request = request(dice.below(6), 100 + dice.below(3) as usize * 40, 10);
        let expected = bench.solo(&request, 0);
        assert_solo(&bench.answer(request), &expected, &format!("request {number}"));
    }
    let cached = bench.core.status().counters.prompt_cached;
    assert!(cached > 10_000, "{cached} tokens from a cache of three snapshots");
    bench.core.persist();
    let bytes: u64 = std::fs::read_dir(&folder)
        .expect("made by the engine")
        .map(|file| file.and_then(|file| file.metadata()).map_or(0, |about| about.len()))
        .sum();
    assert!(bytes <= 20_000, "{bytes} bytes on disk");
    std::fs::remove_dir_all(&folder).expect("made by the engine");
}

#[test]
fn prompt_scores_equal_what_decode_gives() {
    // E5, T78, T79: scores of a prompt, cold, beside drafts, and the scores of the same tokens as a reply.
    let mut first = request(1, 30, 40);
    first.logprobs = Some(2);
    first.sampling.ignore_eos = true;
    let mut bench = Bench::new(config(FakeDrafts::Right));
    let said = bench.answer(first);
    let mut scored = request(1, 30, 1);
    scored.prompt.extend(&said.tokens);
    scored.prompt_logprobs = Some(2);
    let neighbour = bench.ask(fixed(request(7, 20, 200), 8, 1, false));
    bench.ticks(3);
    let asked = bench.ask(scored);
    bench.finish();
    let heard = asked.choice(0);
    assert_eq!(heard.prompt_scores.len(), 69, "all but the first token");
    assert_eq!(heard.prompt_scores[29..], said.scores);
    assert!(neighbour.done());
}
