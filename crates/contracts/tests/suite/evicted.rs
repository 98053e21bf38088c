//! Conversations through a prefix cache that is too small for them: turns that resume and turns that begin
//! anew have the same replies (E3), and the cache stays within its bytes.

use std::sync::mpsc::channel;

use contracts::{Sizes, Subject};
use device::KvForm;
use engine::{CacheLimits, DraftPolicy, Drafting, Engine, Event, Handle, Request, Settings};

use crate::support::*;

/// Tokens of a reply.
const REPLY: usize = 8;
/// Which conversation has its turn: one that goes on where it was, and one whose states were dropped
/// meanwhile.
const TURNS: [usize; 9] = [0, 0, 1, 1, 0, 1, 1, 0, 0];
/// Snapshots that the cache has room for: not enough for both.
const SNAPSHOTS: usize = 3;

/// A reply: its tokens with the bits of their log-probabilities.
fn ask(handle: &Handle, request: Request) -> (Vec<(u32, u32)>, usize) {
    let (sender, events) = channel();
    let ticket = handle.submit(request, Box::new(move |event: Event| drop(sender.send(event))));
    let _ticket = ticket.expect("the engine takes it");
    let (mut reply, mut hit) = (Vec::new(), 0);
    for event in &events {
        match event {
            Event::Admitted { cache, .. } => hit = cache.hit_tokens,
            Event::Tokens { scores, .. } => {
                reply.extend(scores.iter().map(|score| (score.token, score.logprob.to_bits())));
            }
            Event::Finished { .. } => break,
            Event::Prefilled { .. } | Event::PromptScores { .. } => {}
        }
    }
    assert_eq!(reply.len(), REPLY, "a whole reply");
    (reply, hit)
}

fn conversations(device: &str) {
    let sizes = Sizes { slots: 2, snapshots: SNAPSHOTS, context: 448, rows_max: 128 };
    let model = subject("tiny-a", device, KvForm::Int8).open(sizes).expect("fixtures load");
    let spec = model.spec();
    let bytes_max = (SNAPSHOTS * spec.snapshot_bytes + 8 * spec.page_bytes) as u64;
    let cache = CacheLimits { bytes_max, ..CacheLimits::default() };
    let settings = Settings { cache, calibrate: false, ..Settings::new(spec.vocabulary, Vec::new()) };
    let handle = Engine::start(model, settings).expect("it starts");
    let text = text("tiny-a", 1000);
    let mut talks = [text[..130].to_vec(), text[500..610].to_vec()];
    let mut hits = Vec::new();
    for (turn, talk) in TURNS.into_iter().enumerate() {
        let plain = || Request {
            cache: false,
            drafting: Drafting { policy: DraftPolicy::Off, ..Drafting::default() },
            logprobs: Some(0),
            ..Request::new(talks[talk].clone(), REPLY)
        };
        let (fresh, none) = ask(&handle, plain());
        let resumed = Request { cache: true, drafting: Drafting::default(), ..plain() };
        let (found, hit) = ask(&handle, resumed);
        assert_eq!(none, 0, "a request without the cache");
        assert_eq!(found, fresh, "{device}, turn {turn} of conversation {talk}, {hit} tokens cached");
        let status = handle.status();
        assert!(status.cache_bytes <= bytes_max && status.cache_entries <= SNAPSHOTS, "{status:?}");
        hits.push(hit > 0);
        let next = 200 + 31 * turn;
        talks[talk]
            .extend(found.iter().map(|&(token, _)| token).chain(text[next..next + 21].iter().copied()));
    }
    handle.stop("every turn was had");
    println!("{device}: resumed {hits:?}");
    assert!(hits[1] && hits[3] && hits[6] && hits[8], "a turn right after another resumes: {hits:?}");
    assert!(!hits[4] && !hits[7], "states of a conversation were dropped for those of the other: {hits:?}");
}

#[test]
fn a_cache_that_is_too_small_changes_no_reply() {
    conversations("cpu");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_cards_cache_that_is_too_small_changes_no_reply() {
    conversations("cuda:0");
}
