//! Keywords that need no walk: those that are refused, and values given outright.

use serde_json::{Map, Value};

use super::{NUMBER_MAX, Result, step};
use crate::grammar::error::GrammarError;

/// Keywords of any draft that say which values are valid and are not enforced. Words that no draft defines
/// say nothing about validity and are passed over, as are titles, defaults and the like.
const REFUSED: [&str; 20] = [
    "not",
    "if",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "contains",
    "uniqueItems",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "multipleOf",
    "divisibleBy",
    "additionalItems",
    "$dynamicRef",
    "$recursiveRef",
    "disallow",
    "extends",
];

/// Whether a keyword is enforced, or has a value that changes nothing.
pub(super) fn is_enforced(key: &str, value: &Value, at: &str) -> bool {
    match key {
        "uniqueItems" => value == false,
        "minProperties" => value == 0,
        "unevaluatedItems" | "unevaluatedProperties" | "additionalItems" => value == true,
        // It would change where references inside lead.
        "$id" if !at.is_empty() => false,
        key => !REFUSED.contains(&key),
    }
}

/// Refuses keywords that are not enforced.
pub(super) fn refuse(map: &Map<String, Value>, at: &str) -> Result<()> {
    for (key, value) in map {
        if !is_enforced(key, value, at) {
            let detail = "this keyword is not enforced; leave it out, or say the same with others";
            return Err(GrammarError::unsupported(step(at, key), detail));
        }
    }
    Ok(())
}

/// `const` and `enum`.
pub(super) fn values(map: &Map<String, Value>, form: &mut Map<String, Value>, at: &str) -> Result<()> {
    if let Some(value) = map.get("const") {
        exact(value, &step(at, "const"))?;
        form.insert("const".to_owned(), value.clone());
    }
    if let Some(values) = map.get("enum") {
        let at = step(at, "enum");
        let list = values.as_array().filter(|values| !values.is_empty());
        let Some(list) = list else {
            return Err(GrammarError::invalid(at, "must be an array of at least one value"));
        };
        for (index, value) in list.iter().enumerate() {
            exact(value, &step(&at, index))?;
        }
        form.insert("enum".to_owned(), values.clone());
    }
    Ok(())
}

/// Whether a reply can have exactly this value. Its depth was measured.
fn exact(value: &Value, at: &str) -> Result<()> {
    match value {
        Value::Null | Value::Bool(_) => Ok(()),
        Value::Number(number) => match number.as_f64() {
            Some(number) if number.abs() <= NUMBER_MAX => Ok(()),
            _ => Err(GrammarError::unsupported(at, "numbers must lie within 2^53 of zero")),
        },
        Value::String(text) => writable(text, at),
        Value::Array(items) => {
            items.iter().enumerate().try_for_each(|(index, item)| exact(item, &step(at, index)))
        }
        Value::Object(map) => map.iter().try_for_each(|(name, value)| {
            let at = step(at, name);
            writable(name, &at)?;
            exact(value, &at)
        }),
    }
}

/// Each string has one spelling in a reply, which has no `\u` escapes: else a name could come a second time
/// in another spelling.
pub(super) fn writable(text: &str, at: &str) -> Result<()> {
    let is_plain =
        |c: char| !c.is_control() || matches!(c, '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' | '\u{80}'..);
    if text.chars().all(is_plain) {
        return Ok(());
    }
    Err(GrammarError::unsupported(at, "control characters other than \\b \\f \\n \\r \\t are not supported"))
}
