//! Every keyword: what is drawn from a schema's grammar is valid against it.

use regex::Regex;
use serde_json::{Value, json};
use text::Answer;

use crate::support::{compile, draw};
use crate::validity;

const DRAWS: u64 = 12;

fn corpus() -> Vec<Value> {
    let person = json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 130}}, "required": ["name", "age"],
        "additionalProperties": false});
    let tree = json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
        "value": {"type": "boolean"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
        "required": ["value"], "additionalProperties": false}}});
    let kinds = json!({"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "discriminator": {"propertyName": "kind"},
        "$defs": {"cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
            "required": ["kind"], "additionalProperties": false},
        "dog": {"type": "object", "properties": {"kind": {"const": "dog"}, "tricks": {"type": "array",
            "items": {"enum": ["sit", "roll"]}}}, "required": ["kind", "tricks"], "additionalProperties": false}}});
    vec![
        person.clone(),
        tree,
        kinds,
        json!({"type": ["string", "null", "boolean"], "minLength": 2, "maxLength": 6}),
        json!({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5}),
        json!({"type": "array", "prefixItems": [{"type": "string"}, {"type": "boolean"}], "items": false, "minItems": 1}),
        json!({"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"}, "maxItems": 3}),
        json!({"enum": ["a", 1, null, true, {"x": [1, "y"]}, [], -2.5]}),
        json!({"const": {"k": [1, {"deep": "q\"uote\n"}]}}),
        json!({"type": "string", "pattern": "^[A-Z]{2}\\d{2,4}$"}),
        json!({"type": "string", "pattern": "b.d|^x", "maxLength": 12}),
        json!({"type": "string", "pattern": "^\\w+([.-]\\w+)*$", "minLength": 3, "maxLength": 8}),
        json!({"type": "string", "format": "date"}),
        json!({"type": "string", "format": "time"}),
        json!({"type": "string", "format": "date-time"}),
        json!({"type": "string", "format": "uuid"}),
        json!({"type": "string", "format": "email"}),
        json!({"type": "string", "format": "ipv4"}),
        json!({"type": "string", "format": "ipv6"}),
        json!({"type": "integer", "minimum": -7, "exclusiveMaximum": 12}),
        json!({"type": "integer", "exclusiveMinimum": 998, "maximum": 100_000}),
        json!({"type": "number", "minimum": -1.5, "maximum": 2.25}),
        json!({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
        json!({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}}),
        json!({"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}, "required": ["c", "a"],
            "additionalProperties": {"type": "string"}}),
        json!({"anyOf": [{"type": "integer"}, person.clone(), {"type": "array", "items": {"type": "null"}}]}),
        json!({"oneOf": [{"type": "integer", "minimum": 10}, {"type": "integer", "maximum": 5}, {"type": "string"}]}),
        json!({"allOf": [person, {"properties": {"name": {"minLength": 2}, "age": {"maximum": 40}}}]}),
        json!({"type": "object", "properties": {"x": {"$ref": "#/definitions/a~1b"}, "y": {"$ref": "#/properties/x"}},
            "required": ["x", "y"], "additionalProperties": false,
            "definitions": {"a/b": {"type": "string", "enum": ["p", "q/r"]}}}),
        json!({"type": "object", "properties": {"maybe": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "M",
            "default": null}}, "required": ["maybe"], "additionalProperties": false,
            "$schema": "http://json-schema.org/draft-07/schema#", "title": "T", "x-unknown": 1}),
        json!({"type": "string", "format": "date", "pattern": "^20"}),
        json!({"type": "object", "properties": {"é\"\\": {"const": "ü\t"}}, "required": ["é\"\\"],
            "additionalProperties": false}),
        json!({"type": "object"}),
        json!({}),
        json!(true),
    ]
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
    let schema = json!({"type": "object", "properties": {"z": {"const": 1}, "a": {"const": 2}, "m": {"const": 3}},
        "required": ["m", "z", "a"], "additionalProperties": false});
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
