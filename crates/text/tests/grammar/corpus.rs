//! Every keyword: what is drawn from a schema's grammar is valid against it.

use regex::Regex;
use serde_json::{Value, json};
use text::Answer;

use crate::support::{compile, draw};
use crate::validity;

const DRAWS: u64 = 12;

/// One schema a line; every keyword that is enforced stands in one.
fn corpus() -> Vec<Value> {
    serde_json::from_str(include_str!("corpus.json")).unwrap()
}

#[test]
fn draws_are_valid() {
    let mut drawn = 0;
    for schema in corpus() {
        let grammar = compile(&Answer::Schema(schema.clone())).unwrap_or_else(|e| panic!("{schema}: {e}"));
        let mut ended = 0;
        for seed in 1..=DRAWS {
            let Some(text) = draw(&grammar, seed, 5 + 3 * seed as usize) else { continue };
            let value: Value = match serde_json::from_str(&text) {
                Ok(value) => value,
                // A number beyond f64 is JSON all the same.
                Err(error) if error.to_string().contains("out of range") => continue,
                Err(error) => panic!("{schema}: {text}: {error}"),
            };
            assert_eq!(validity::fault(&schema, &schema, &value), None, "{schema}: {text}");
            assert!(!text.contains(['\n', '\t']) && text.trim() == text, "{text:?} has loose white space");
            ended += 1;
        }
        assert!(ended > DRAWS / 3, "{schema}: only {ended} of {DRAWS} draws came to an end");
        drawn += ended;
    }
    assert!(drawn > 200, "{drawn}");
}

#[test]
fn what_a_person_would_write_is_allowed() {
    let (tokenizer, _, _) = crate::support::demo();
    let schema = json!({"type": "object", "properties": {"name": {"type": "string"}, "tags": {"type": "array",
        "items": {"type": "string"}}, "size": {"type": "number"}}, "required": ["name"]});
    let grammar = compile(&Answer::Schema(schema)).unwrap();
    for (text, is_allowed) in [
        (r#"{"name": "Ada \"L\" \n", "tags": ["a", "b"], "size": -1.5e3}"#, true),
        (r#"{"name":"é","tags":[]}"#, true),
        (r#"{"name": "x", "more": {"deep": [1, null]}}"#, true),
        (r#"{ "name": "x"}"#, false),
        (r#"{"tags": [], "name": "x"}"#, false),
        (r#"{"name": "x", "\u006eame": 1}"#, false),
        (r#"{"name": 1}"#, false),
        (r#"{"name": "x",  "size": 1}"#, false),
    ] {
        let mut matcher = grammar.matcher();
        let all = tokenizer.encode_text(text).unwrap().into_iter().all(|id| matcher.advance(id).is_ok());
        assert_eq!(all && matcher.can_end(), is_allowed, "{text}");
    }
}

#[test]
fn property_order_is_the_schemas() {
    let properties = json!({"z": {"const": 1}, "a": {"const": 2}, "m": {"const": 3}});
    let schema = json!({"type": "object", "properties": properties, "required": ["m", "z", "a"],
        "additionalProperties": false});
    let grammar = compile(&Answer::Schema(schema)).unwrap();
    let text = draw(&grammar, 3, 0).unwrap().replace(' ', "");
    assert_eq!(text, r#"{"z":1,"a":2,"m":3}"#);
}

#[test]
fn regular_expressions_and_choices() {
    for expression in [
        "[a-c]{2,5}",
        "^(yes|no), [0-9]+!$",
        "a+/b*",
        "(?i)hello|(?:wor)+ld",
        "[0-9]{3}-\\p{Lu}",
        "x|yy|^zzz$",
    ] {
        let grammar =
            compile(&Answer::Regex(expression.into())).unwrap_or_else(|e| panic!("{expression}: {e}"));
        let judge = Regex::new(&format!("^(?:{})$", expression.replace("\\p{Lu}", "."))).unwrap();
        for seed in 1..20 {
            let Some(text) = draw(&grammar, seed, 8) else { continue };
            let ascii: String = text.chars().map(|c| if c.is_ascii() { c } else { 'U' }).collect();
            assert!(judge.is_match(&text) || judge.is_match(&ascii), "{expression}: {text:?}");
        }
    }
    let choices: Vec<String> = ["yes", "yes and no", "a.b", "\"q\"", "né"].map(String::from).into();
    let grammar = compile(&Answer::Choice(choices.clone())).unwrap();
    let drawn: Vec<String> = (1..60).filter_map(|seed| draw(&grammar, seed, 30)).collect();
    assert!(drawn.iter().all(|text| choices.contains(text)), "{drawn:?}");
    assert!(choices.iter().all(|choice| drawn.contains(choice)), "{drawn:?}");
}

#[test]
fn any_object_is_an_object() {
    let grammar = compile(&Answer::JsonObject).unwrap();
    for seed in 1..20 {
        let Some(text) = draw(&grammar, seed, 20) else { continue };
        match serde_json::from_str::<Value>(&text) {
            Ok(value) => assert!(value.is_object(), "{text}"),
            Err(error) => assert!(error.to_string().contains("out of range"), "{text}: {error}"),
        }
    }
}
