//! Masks, and going on and back.

use serde_json::json;
use text::Answer;

use crate::support::{Dice, allowed, compile, demo, tiny};

fn answers() -> Vec<Answer> {
    vec![
        Answer::Schema(
            json!({"type": "object", "properties": {"a": {"type": "boolean"}, "é": {"type": "string",
            "maxLength": 3}, "n": {"type": "integer", "minimum": 3, "maximum": 140}},
            "required": ["a", "é"]}),
        ),
        Answer::JsonObject,
        Answer::Regex("(?:true|tr[uvw]+|12*)(?:</|\\n\\n)".into()),
        Answer::Choice(vec!["true".into(), "trust".into(), "12".into()]),
    ]
}

#[test]
fn masks_equal_trying_every_token() {
    let (tokenizer, compiler, end) = tiny();
    for answer in answers() {
        let grammar = compiler.compile(Some(&answer), None).unwrap();
        for seed in 1..6 {
            let mut dice = Dice(seed);
            let mut matcher = grammar.matcher();
            for _ in 0..25 {
                let choices = allowed(&mut matcher, tokenizer.vocab_size());
                let tried =
                    (0..tokenizer.vocab_size() as u32).filter(|&id| matcher.clone().advance(id).is_ok());
                assert_eq!(choices, tried.collect::<Vec<_>>(), "{answer:?}");
                let next: Vec<u32> = choices.into_iter().filter(|id| *id != end).collect();
                if next.is_empty() {
                    break;
                }
                matcher.advance(next[dice.below(next.len())]).unwrap();
            }
        }
    }
}

#[test]
fn control_tokens_are_never_allowed_but_for_the_end() {
    let (tokenizer, _, ends) = demo();
    for answer in answers() {
        let mut matcher = compile(&answer).unwrap().matcher();
        let mut dice = Dice(7);
        for _ in 0..40 {
            let choices = allowed(&mut matcher, tokenizer.vocab_size());
            let may_end = matcher.can_end();
            for id in &choices {
                let is_control = tokenizer.control_content(*id).is_some();
                assert!(!is_control || (may_end && ends.contains(id)), "{id}");
                assert!(tokenizer.token_bytes(*id).is_some());
            }
            assert_eq!(may_end, ends.iter().all(|end| choices.contains(end)));
            let token = choices[dice.below(choices.len())];
            matcher.advance(token).unwrap();
        }
    }
}

#[test]
fn going_back_is_exact() {
    let (tokenizer, _, _) = demo();
    let vocabulary = tokenizer.vocab_size();
    for answer in answers() {
        let grammar = compile(&answer).unwrap();
        let mut dice = Dice(11);
        let mut matcher = grammar.matcher();
        let mut path: Vec<u32> = Vec::new();
        for round in 0..60 {
            let ahead = dice.below(6);
            let mut fork = matcher.clone();
            for _ in 0..ahead {
                let choices = allowed(&mut matcher, vocabulary);
                let token = choices[dice.below(choices.len())];
                matcher.advance(token).unwrap();
                path.push(token);
            }
            if round % 3 == 0 {
                // A refused token changes nothing.
                let refused = tokenizer.control_id("<|im_start|>").unwrap();
                assert!(matcher.advance(refused).is_err());
            }
            let back = dice.below(path.len().min(7) + 1);
            matcher.rollback(back);
            path.truncate(path.len() - back);
            let mut fresh = grammar.matcher();
            path.iter().for_each(|&token| fresh.advance(token).unwrap());
            assert_eq!(allowed(&mut matcher, vocabulary), allowed(&mut fresh, vocabulary), "{answer:?}");
            assert_eq!(matcher.can_end(), fresh.can_end());
            // The fork stands where it was left, whatever the other did since.
            let mut before = grammar.matcher();
            let kept = path.len() + back - ahead;
            if kept <= path.len() {
                path[..kept].iter().for_each(|&token| before.advance(token).unwrap());
                assert_eq!(allowed(&mut fork, vocabulary), allowed(&mut before, vocabulary), "{answer:?}");
            }
        }
    }
}

#[test]
fn an_ended_reply_may_only_end_again() {
    let (tokenizer, _, ends) = demo();
    let mut matcher = compile(&Answer::Choice(vec!["Hello".into(), "Hello there".into()])).unwrap().matcher();
    assert!(matcher.advance(ends[0]).is_err());
    tokenizer.encode_text("Hello").unwrap().into_iter().for_each(|id| matcher.advance(id).unwrap());
    let before = allowed(&mut matcher, tokenizer.vocab_size());
    matcher.advance(ends[1]).unwrap();
    matcher.advance(ends[0]).unwrap();
    let mut sorted = ends.clone();
    sorted.sort_unstable();
    assert_eq!(allowed(&mut matcher, tokenizer.vocab_size()), sorted);
    matcher.rollback(2);
    assert_eq!(allowed(&mut matcher, tokenizer.vocab_size()), before);
    matcher.rollback(100);
    assert!(!matcher.can_end());
}
