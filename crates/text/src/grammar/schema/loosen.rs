//! Schemas of functions that are not strict: what cannot be enforced is left out, so that the rest can be.
//!
//! Every change allows all that was allowed before. What is left out is named by a JSON pointer.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::facts::{Facts, Types};
use super::{formats, keywords, step};
use crate::grammar::error::GrammarFault;
use crate::grammar::pattern::{self, Dialect};

/// Most schemas looked at for the types of one that is given up.
const LOOKS_MAX: u32 = 1 << 12;

/// Leaves out the keywords that are never enforced, in a measured schema and all schemas inside.
pub(in crate::grammar) fn keywords(schema: &mut Value, at: &str, dropped: &mut Vec<String>) {
    let Value::Object(map) = schema else { return };
    // Where references inside lead is not known then.
    if !at.is_empty() && map.contains_key("$id") {
        dropped.push(step(at, "$id"));
        *schema = json!({});
        return;
    }
    let is_gone = |(key, value): &(&String, &Value)| match (key.as_str(), value) {
        ("format", Value::String(name)) => formats::expression(name).is_none(),
        ("pattern", Value::String(text)) => {
            pattern::whole(text, Dialect::Schema, "").is_err_and(|error| error.fault != GrammarFault::Invalid)
        }
        (key, value) => !keywords::is_enforced(key, value, at),
    };
    let gone: Vec<String> = map.iter().filter(is_gone).map(|(key, _)| key.clone()).collect();
    for key in gone {
        remove(map, &key);
        dropped.push(step(at, key));
    }
    for (key, value) in map {
        let at = step(at, key);
        match (kind(key), value) {
            (Kind::Named, Value::Object(schemas)) => {
                schemas.iter_mut().for_each(|(name, schema)| keywords(schema, &step(&at, name), dropped));
            }
            (Kind::Listed, Value::Array(schemas)) => {
                let schemas = schemas.iter_mut().enumerate();
                schemas.for_each(|(index, schema)| keywords(schema, &step(&at, index), dropped));
            }
            (Kind::One, schema) => keywords(schema, &at, dropped),
            _ => {}
        }
    }
}

/// A root that is but a reference becomes what it leads to.
pub(in crate::grammar) fn resolve(root: &mut Value) {
    let target = root["$ref"].as_str().and_then(super::fragment).and_then(|to| root.pointer(&to)).cloned();
    if let (Value::Object(map), Some(Value::Object(target))) = (root, target)
        && !map.contains_key("properties")
        && !target.contains_key("$ref")
    {
        map.shift_remove("$ref");
        for (key, value) in target {
            map.entry(key).or_insert(value);
        }
    }
}

/// Leaves out required parameters that the root does not have: a call has no place for them.
pub(in crate::grammar) fn required(root: &mut Value, dropped: &mut Vec<String>) {
    let properties = root.get("properties").and_then(Value::as_object).into_iter().flatten();
    let known: HashSet<String> = properties.map(|(name, _)| name.clone()).collect();
    let Some(Value::Array(names)) = root.get_mut("required") else { return };
    let mut index = 0;
    names.retain(|name| {
        let stays = name.as_str().is_none_or(|name| known.contains(name));
        if !stays {
            dropped.push(format!("/required/{index}"));
        }
        index += 1;
        stays
    });
}

/// Takes the obstacle at `pointer` away; `false` if nothing more can be done there.
pub(in crate::grammar) fn repair(root: &mut Value, pointer: &str) -> bool {
    if pointer.is_empty() {
        return false;
    }
    let types = root.pointer(pointer).map(|schema| Facts::new(root, LOOKS_MAX).types(schema));
    let unescape = |token: &str| token.replace("~1", "/").replace("~0", "~");
    let tokens: Vec<String> = pointer.split('/').skip(1).map(unescape).collect();
    at(root, &tokens, types.unwrap_or(Types::ALL))
}

fn at(schema: &mut Value, tokens: &[String], types: Types) -> bool {
    let Value::Object(map) = schema else { return false };
    let Some((key, rest)) = tokens.split_first() else { return reduce(schema, types) };
    match (kind(key), rest) {
        (Kind::Named, [name]) => {
            let Some(Value::Object(schemas)) = map.get_mut(key) else { return false };
            let Some(schema) = schemas.get_mut(name) else { return false };
            if reduce(schema, types) {
                return true;
            }
            // The name itself cannot be written: nobody can give it.
            schemas.shift_remove(name);
            if let Some(Value::Array(required)) = map.get_mut("required").filter(|_| key == "properties") {
                required.retain(|other| other != name);
            }
            true
        }
        (Kind::Named, [name, rest @ ..]) => {
            map[key].get_mut(name).is_some_and(|schema| at(schema, rest, types))
        }
        (Kind::Listed, [index, rest @ ..]) if key != "oneOf" || !rest.is_empty() => {
            let index = index.parse::<usize>().unwrap_or(usize::MAX);
            map[key].get_mut(index).is_some_and(|schema| at(schema, rest, types))
        }
        (Kind::One, rest) if !rest.is_empty() => at(&mut map[key], rest, types),
        // Values that fit two branches cannot be kept out.
        (Kind::Listed, _) if key == "oneOf" => {
            let branches = map.shift_remove(key).unwrap_or_default();
            any_of(map, branches);
            true
        }
        (_, [index]) if key == "required" => match (map.get_mut(key), index.parse::<usize>()) {
            (Some(Value::Array(names)), Ok(index)) if index < names.len() => {
                names.remove(index);
                true
            }
            _ => false,
        },
        _ => remove(map, key),
    }
}

fn any_of(map: &mut Map<String, Value>, branches: Value) {
    if !map.contains_key("anyOf") {
        map.insert("anyOf".to_owned(), branches);
        return;
    }
    if let Value::Array(all) = map.entry("allOf").or_insert_with(|| json!([])) {
        all.push(json!({"anyOf": branches}));
    }
}

/// A schema that says no more than its types, or nothing. `false` if it says no more already.
fn reduce(schema: &mut Value, types: Types) -> bool {
    let names = types.names();
    let reduced = match types == Types::ALL || names.is_empty() {
        true => json!({}),
        false => json!({"type": names}),
    };
    let is_new = *schema != reduced && *schema != json!({});
    // Where its types are no help either, it says nothing.
    *schema = if is_new { reduced } else { json!({}) };
    is_new || !names.is_empty() && types != Types::ALL
}

/// Leaves out a keyword, and those that are narrower without it.
fn remove(map: &mut Map<String, Value>, key: &str) -> bool {
    let is_there = map.shift_remove(key).is_some();
    let narrower: &[&str] = match key {
        "patternProperties" => &["additionalProperties", "unevaluatedProperties"],
        "prefixItems" => &["items", "unevaluatedItems"],
        _ => &[],
    };
    for key in narrower {
        map.shift_remove(*key);
    }
    is_there
}

/// What a keyword's value is made of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Schemas by name.
    Named,
    /// A list of schemas.
    Listed,
    /// One schema.
    One,
    /// No schemas.
    Other,
}

fn kind(key: &str) -> Kind {
    match key {
        "properties" | "$defs" | "definitions" => Kind::Named,
        "prefixItems" | "allOf" | "anyOf" | "oneOf" => Kind::Listed,
        "items" | "additionalProperties" => Kind::One,
        _ => Kind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keywords_that_are_not_enforced_are_left_out() {
        let mut schema = json!({"type": "object", "minProperties": 1, "properties": {
            "a": {"type": "string", "format": "uri", "minLength": 2},
            "b": {"type": "string", "format": "date", "pattern": "(?=x)y"},
            "c": {"type": "object", "patternProperties": {"^x": {}}, "additionalProperties": false},
            "d": {"type": "array", "uniqueItems": true, "items": {"not": {"const": 1}}},
            "format": {"enum": ["uri"]}}});
        let mut dropped = Vec::new();
        keywords(&mut schema, "", &mut dropped);
        let wanted = json!({"type": "object", "properties": {
            "a": {"type": "string", "minLength": 2}, "b": {"type": "string", "format": "date"},
            "c": {"type": "object"}, "d": {"type": "array", "items": {}}, "format": {"enum": ["uri"]}}});
        assert_eq!(schema, wanted);
        let pointers = [
            "/minProperties",
            "/properties/a/format",
            "/properties/b/pattern",
            "/properties/c/patternProperties",
            "/properties/d/uniqueItems",
            "/properties/d/items/not",
        ];
        assert_eq!(dropped, pointers);
    }

    #[test]
    fn obstacles_are_taken_away_one_by_one() {
        let check = |schema: Value, pointer: &str, wanted: Value| {
            let mut loose = schema.clone();
            assert!(repair(&mut loose, pointer), "{schema} {pointer}");
            assert_eq!(loose, wanted, "{schema} {pointer}");
        };
        let branches = json!([{"type": "string"}, {"const": "a"}]);
        check(json!({"oneOf": branches}), "/oneOf/1", json!({"anyOf": branches}));
        check(
            json!({"oneOf": branches, "anyOf": [{}]}),
            "/oneOf/1",
            json!({"anyOf": [{}], "allOf": [{"anyOf": branches}]}),
        );
        check(json!({"required": ["a", "b"]}), "/required/0", json!({"required": ["b"]}));
        let limited = json!({"properties": {"a/b": {"type": ["string", "integer"], "minimum": 1}}});
        let types = json!({"properties": {"a/b": {"type": ["number", "string"]}}});
        check(limited, "/properties/a~1b", types.clone());
        check(types, "/properties/a~1b", json!({"properties": {"a/b": {}}}));
        let unnamed = json!({"properties": {"a<b": {}}, "required": ["a<b", "c"]});
        check(unnamed, "/properties/a<b", json!({"properties": {}, "required": ["c"]}));
        check(json!({"items": [{}], "type": "array"}), "/items", json!({"type": "array"}));
        check(json!({"$defs": {"x": {"enum": [1e300]}}}), "/$defs/x/enum/0", json!({"$defs": {"x": {}}}));
        assert!(!repair(&mut json!({"type": "object"}), ""));
        assert!(!repair(&mut json!({"type": "object"}), "/nothing/here"));
    }

    #[test]
    fn a_root_that_refers_is_resolved() {
        let mut root =
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"x": {}}}}});
        resolve(&mut root);
        assert_eq!((&root["properties"], &root["$ref"]), (&json!({"x": {}}), &Value::Null));
    }
}
