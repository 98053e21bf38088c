//! The demo model's question set on the CPU device: right answers, and the reference's tokens.

use std::collections::HashMap;
use std::fs;
use std::time::Instant;

use contracts::crowd::{Acceptance, Prompt, ask_all};
use contracts::evaluation::{Asker, Item, Marks, read_items};
use contracts::{Folder, Runner, Sizes, Subject};
use engine::{DraftPolicy, Drafting, Engine, Settings};
use serde_json::Value;

use crate::support::*;

/// The questions without pictures, each with the reference's tokens.
pub(crate) fn questions() -> Vec<(Item, Vec<u32>)> {
    let eval = folder("demo").join("eval");
    let read = |name: &str| fs::read_to_string(eval.join(name)).expect("the question set is there");
    let reference = |line: &str| {
        let line: Value = serde_json::from_str(line).expect("the reference is JSON");
        let tokens = line["tokens"].as_array().expect("tokens").iter();
        let tokens = tokens.map(|token| token.as_u64().expect("an id") as u32).collect();
        (line["id"].as_str().expect("an id").to_owned(), tokens)
    };
    let mut references: HashMap<String, Vec<u32>> = read("reference.jsonl").lines().map(reference).collect();
    let items = read_items(&read("items.jsonl")).expect("the items are valid");
    let items = items.into_iter().filter(|item| !item.has_pictures());
    items
        .map(|item| {
            let tokens = references.remove(&item.id).expect("every item has a reference");
            (item, tokens)
        })
        .collect()
}

#[test]
fn the_demo_model_answers_as_its_reference() {
    let start = Instant::now();
    let asker = Asker::open(&folder("demo")).expect("the demo model has its text files");
    let questions = questions();
    let sizes = Sizes { slots: 2, snapshots: 1, context: 1024, rows_max: 1024 };
    let mut model = Folder::new(folder("demo"), "cpu").open(sizes).expect("the demo model loads");
    let mut runner = Runner::new(&mut *model);
    let (mut marks, mut tokens) = (Marks::default(), 0);
    for (item, reference) in &questions {
        let answer = asker.ask(&mut runner, item).unwrap_or_else(|error| panic!("{}: {error}", item.id));
        marks.add(&item.kind, answer.right, answer.tokens == *reference);
        tokens += answer.tokens.len();
        if !answer.right {
            println!("wrong: {} ({})", item.id, item.kind);
        }
    }
    println!("{marks}{tokens} tokens generated, {:.1} s", start.elapsed().as_secs_f64());
    let [asked, right, equal] = marks.total();
    assert_eq!(asked, 248);
    assert!(right >= 243, "{right} right, at least 243 expected");
    assert!(equal >= 240, "{equal} replies equal the reference, at least 240 expected");
}

#[test]
fn company_and_drafts_change_no_reply_of_the_demo_model() {
    let asker = Asker::open(&folder("demo")).expect("the demo model has its text files");
    let every_tenth = questions().into_iter().step_by(10);
    let prompt = |(item, _): (Item, Vec<u32>)| (asker.prompt(&item).expect("it is valid").0, item.max_tokens);
    let prompts: Vec<Prompt> = every_tenth.map(prompt).collect();
    let sizes = Sizes { slots: 8, snapshots: 8, context: 1088, rows_max: 512 };
    let model = Folder::new(folder("demo"), "cpu").open(sizes).expect("the demo model loads");
    let settings = Settings::new(model.spec().vocabulary, asker.stops().to_vec());
    let handle = Engine::start(model, settings).expect("it starts");
    let ask = |policy: DraftPolicy, at_once: usize| {
        let drafting = Drafting { policy, copy: false, ..Drafting::default() };
        ask_all(&handle, &prompts, drafting, at_once).expect("nothing is refused")
    };
    let expected = ask(DraftPolicy::Off, 1);
    assert!(expected.iter().all(|reply| !reply.tokens.is_empty()));
    let ask_again = |policy: DraftPolicy, at_once: usize| {
        let replies = ask(policy, at_once);
        for (at, (found, expected)) in replies.iter().zip(&expected).enumerate() {
            assert_eq!(found.tokens, expected.tokens, "question {at}, {at_once} at once, {policy:?}");
        }
        replies
    };
    ask_again(DraftPolicy::Off, 8);
    ask_again(DraftPolicy::Fixed(3), 8);
    let acceptance = Acceptance::of(&ask_again(DraftPolicy::Fixed(3), 1), 3);
    println!("{acceptance:?}, {:.2} tokens a round", acceptance.tokens_per_round());
    for (place, least) in [0.97, 0.97, 0.92].into_iter().enumerate() {
        let share = acceptance.share(place);
        assert!(share >= least, "draft {place}: {share:.3} accepted, at least {least} expected");
    }
    assert!(acceptance.tokens_per_round() >= 3.4, "{acceptance:?}");
}
