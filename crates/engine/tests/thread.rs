//! The thread and its handle.

mod support;

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use engine::fake::{FakeConfig, FakeCost, FakeDrafts, FakeModel, Pace};
use engine::{Engine, Event, FinishReason, Handle, Refusal, ReplyError, Request, Settings, Ticket};
use support::*;

fn submit(handle: &Handle, request: Request) -> Result<(Ticket, Receiver<Event>), Refusal> {
    let (sender, events) = channel();
    // A listener that has left cancels by its ticket; its events may go nowhere.
    let sink = move |event: Event| drop(sender.send(event));
    Ok((handle.submit(request, Box::new(sink))?, events))
}

fn read(events: &Receiver<Event>) -> (Vec<u32>, FinishReason) {
    let mut said = Vec::new();
    loop {
        match events.recv_timeout(Duration::from_secs(60)).expect("an event") {
            Event::Tokens { tokens, .. } => said.extend(tokens),
            Event::Finished { reason, .. } => return (said, reason),
            Event::Admitted { .. } | Event::Prefilled { .. } | Event::PromptScores { .. } => {}
        }
    }
}

fn slow() -> FakeConfig {
    let cost = FakeCost { step: Duration::from_millis(2), ..FakeCost::default() };
    FakeConfig { pace: Pace::Sleep(cost), ..config(FakeDrafts::None) }
}

#[test]
fn many_threads_submit_and_each_hears_its_own_reply() {
    for steps_ahead in [false, true] {
        hears_its_own_reply(FakeConfig { steps_ahead, ..config(FakeDrafts::Sometimes(70)) });
    }
}

fn hears_its_own_reply(config: FakeConfig) {
    let handle = Engine::start(Box::new(FakeModel::new(config.clone())), settings()).expect("starts");
    let callers: Vec<_> = (0..8)
        .map(|caller: u64| {
            let (handle, config) = (handle.clone(), config.clone());
            std::thread::spawn(move || {
                for round in 0..5 {
                    let make = || request(caller * 10 + round, 60, 40);
                    let (_ticket, events) = submit(&handle, make()).expect("fits");
                    let expected = engine::fake::solo(&config, &make(), 0, &[EOS]);
                    assert_eq!(read(&events), (expected.tokens, expected.reason));
                }
            })
        })
        .collect();
    callers.into_iter().for_each(|caller| caller.join().expect("no panic"));
    handle.stop("test over");
    assert_eq!(handle.status().counters.finished, 40);
    assert_eq!(handle.step_age(), None, "idle");
    assert_eq!(handle.stopped().as_deref(), Some("test over"));
}

/// A request that finds the engine at rest does not make it look stalled before its first step has ended.
#[test]
fn a_rest_is_no_stall() {
    let clock = engine::ManualClock::default();
    let handle =
        Engine::start_with(Box::new(FakeModel::new(slow())), settings(), std::sync::Arc::new(clock.clone()))
            .expect("starts");
    for request_id in 0..2 {
        clock.advance(Duration::from_secs(600));
        let (_ticket, events) = submit(&handle, request(request_id, 60, 20)).expect("fits");
        // Time stands still: no age but none is right, whenever this looks.
        while !matches!(events.recv_timeout(Duration::from_secs(60)), Ok(Event::Finished { .. })) {
            let age = handle.step_age();
            assert!(age.is_none_or(|age| age == Duration::ZERO), "{age:?}");
        }
    }
    // Work without a step for long is one.
    let (_ticket, events) = submit(&handle, request(2, 60, 1000)).expect("fits");
    assert!(matches!(events.recv_timeout(Duration::from_secs(60)), Ok(Event::Admitted { .. })));
    clock.advance(Duration::from_secs(5));
    let ages = std::iter::repeat_with(|| handle.step_age()).take(3);
    assert!(ages.flatten().all(|age| age <= Duration::from_secs(5)));
    handle.stop("test over");
}

#[test]
fn dropping_the_ticket_ends_the_reply() {
    let handle = Engine::start(Box::new(FakeModel::new(slow())), settings()).expect("starts");
    let (ticket, events) = submit(&handle, request(1, 10, 1000)).expect("fits");
    assert!(matches!(events.recv_timeout(Duration::from_secs(60)), Ok(Event::Admitted { .. })));
    drop(ticket);
    assert_eq!(read(&events).1, FinishReason::Cancelled);
    handle.stop("test over");
}

#[test]
fn a_full_queue_refuses() {
    let settings = Settings { queue_max: 2, ..settings() };
    let mut config = slow();
    config.spec.slots = 1;
    let handle = Engine::start(Box::new(FakeModel::new(config)), settings).expect("starts");
    let running = submit(&handle, request(1, 10, 1000)).expect("fits");
    assert!(matches!(running.1.recv_timeout(Duration::from_secs(60)), Ok(Event::Admitted { .. })));
    // The place in the queue is free once the turn that admitted it is over.
    let mut waiting = Vec::new();
    let refusal = loop {
        match submit(&handle, request(2, 10, 5)) {
            Ok(taken) => waiting.push(taken),
            Err(refusal) => break refusal,
        }
    };
    assert_eq!(refusal, Refusal::QueueFull { limit: 2 });
    assert!(waiting.len() <= 2);
    handle.stop("shut down");
    for (_, events) in waiting.iter().chain([&running]) {
        let stopped = ReplyError::Stopped { reason: "shut down".into() };
        assert_eq!(read(events).1, FinishReason::Failed(stopped));
    }
    let refusal = submit(&handle, request(3, 10, 5)).map(|_| ()).expect_err("stopped");
    assert_eq!(refusal, Refusal::Stopped { reason: "shut down".into() });
}

#[test]
fn a_panic_fails_every_reply_and_marks_the_engine_dead() {
    let mut config = slow();
    config.spec.slots = 2;
    let model = FakeModel::new(config);
    let faults = model.faults();
    let handle = Engine::start(Box::new(model), settings()).expect("starts");
    let mut many = request(5, 10, 1000);
    many.choices = 2;
    let asked: Vec<_> = (0..4)
        .map(|seed| submit(&handle, request(seed, 10, 1000)).expect("fits"))
        .chain([submit(&handle, many).expect("fits")])
        .collect();
    faults.panic_in(5);
    let mut reasons = Vec::new();
    for (_, events) in &asked {
        reasons.push(read(events).1);
    }
    reasons.push(read(&asked[4].1).1);
    for reason in &reasons {
        let FinishReason::Failed(ReplyError::Stopped { reason }) = reason else { panic!("{reason:?}") };
        assert!(reason.contains("engine thread") && reason.contains("injected panic"), "{reason}");
    }
    assert!(handle.stopped().is_some_and(|reason| reason.contains("injected panic")));
    assert!(matches!(submit(&handle, request(9, 10, 5)), Err(Refusal::Stopped { .. })));
    handle.stop("too late");
}

#[test]
fn a_lost_device_stops_the_engine() {
    let mut config = slow();
    config.spec.slots = 1;
    let model = FakeModel::new(config);
    let faults = model.faults();
    let handle = Engine::start(Box::new(model), settings()).expect("starts");
    faults.lose_in(3);
    let asked: Vec<_> = (0..20).map(|seed| submit(&handle, request(seed, 10, 1000))).collect();
    let reasons: Vec<FinishReason> = asked.iter().flatten().map(|(_, events)| read(events).1).collect();
    let count = |kind: fn(&ReplyError) -> bool| {
        reasons.iter().filter(|reason| matches!(reason, FinishReason::Failed(error) if kind(error))).count()
    };
    assert!(count(|error| matches!(error, ReplyError::DeviceFault { .. })) <= 8);
    assert!(count(|error| matches!(error, ReplyError::Stopped { .. })) > 0);
    assert!(handle.stopped().is_some_and(|reason| reason.contains("device is lost")));
}

#[test]
fn the_cache_can_be_asked_without_running() {
    let handle =
        Engine::start(Box::new(FakeModel::new(config(FakeDrafts::Right))), settings()).expect("starts");
    let look = |request: Request| {
        let (sender, receiver) = channel();
        handle.look_up(request, move |report| sender.send(report).expect("somebody waits")).expect("taken");
        receiver.recv_timeout(Duration::from_secs(60)).expect("answered")
    };
    assert_eq!(look(request(1, 100, 5)).hit_tokens, 0);
    read(&submit(&handle, request(1, 100, 5)).expect("fits").1);
    assert_eq!(look(request(1, 100, 5)).hit_tokens, 99);
    let before = handle.status().counters;
    assert_eq!(look(Request { cache: false, ..request(1, 100, 5) }).hit_tokens, 0);
    assert_eq!(look(Request { namespace: "other".into(), ..request(1, 100, 5) }).hit_tokens, 0);
    assert_eq!(handle.status().counters, before, "nothing ran");
    assert!(handle.look_up(request(1, 5000, 5), |_| ()).is_err(), "longer than the context");
}
