//! Whether a schema has a finite value at all: one that must hold itself has none, and no reply could end.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::Result;
use crate::grammar::error::GrammarError;

/// Most rounds over the definitions. They stand in the order in which they were completed, so that two rounds
/// are the rule.
const ROUNDS_MAX: usize = 64;

/// Refuses an enforced schema without finite values.
pub(super) fn check(form: &Map<String, Value>, definitions: &Map<String, Value>, at: &str) -> Result<()> {
    let mut known = HashSet::new();
    for _ in 0..ROUNDS_MAX {
        let before = known.len();
        for (name, definition) in definitions {
            if !known.contains(name.as_str()) && has_value(definition, &known) {
                known.insert(name.as_str());
            }
        }
        if known.len() == before {
            return match in_object(form, &known) {
                true => Ok(()),
                false => Err(GrammarError::unsupported(at, "no finite value is valid against this schema")),
            };
        }
    }
    Err(GrammarError::too_complex(at, "definitions depend on one another in too many steps"))
}

/// Whether a value is found whose references lead to `known` definitions only.
fn has_value(schema: &Value, known: &HashSet<&str>) -> bool {
    match schema {
        Value::Object(map) => in_object(map, known),
        schema => schema == true,
    }
}

fn in_object(map: &Map<String, Value>, known: &HashSet<&str>) -> bool {
    let list = |key: &str| map.get(key).and_then(Value::as_array);
    let has = |schema: &Value| has_value(schema, known);
    if let Some(reference) = map.get("$ref").and_then(Value::as_str)
        && !reference.strip_prefix("#/$defs/").is_some_and(|name| known.contains(name))
    {
        return false;
    }
    if list("allOf").is_some_and(|parts| !parts.iter().all(has))
        || list("anyOf").is_some_and(|parts| !parts.iter().any(has))
    {
        return false;
    }
    if map.contains_key("const") || map.contains_key("enum") {
        return true;
    }
    let of_type = |name: &str| match name {
        "array" => array(map, known),
        "object" => object(map, known),
        _ => true,
    };
    match map.get("type") {
        Some(Value::String(name)) => of_type(name),
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).any(of_type),
        _ => true,
    }
}

fn array(map: &Map<String, Value>, known: &HashSet<&str>) -> bool {
    let least = map.get("minItems").and_then(Value::as_u64).unwrap_or(0) as usize;
    let prefix = map.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let items = map.get("items").unwrap_or(&Value::Bool(true));
    prefix.iter().take(least).all(|item| has_value(item, known))
        && (least <= prefix.len() || has_value(items, known))
}

fn object(map: &Map<String, Value>, known: &HashSet<&str>) -> bool {
    let required = map.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    required.iter().filter_map(Value::as_str).all(|name| {
        let property = map.get("properties").and_then(|properties| properties.get(name));
        has_value(property.or_else(|| map.get("additionalProperties")).unwrap_or(&Value::Bool(true)), known)
    })
}
