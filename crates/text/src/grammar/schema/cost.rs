//! What a schema grows to when its combinations are multiplied out, known before it is done.
//!
//! Keywords beside `anyOf` go into each of its branches, and the parts of an `allOf` into one another, each
//! with its alternatives. Costs are in schemas: one takes some 200 bytes and a few microseconds.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::Result;
use crate::grammar::error::GrammarError;

/// What is left of the schemas that one constraint may have after multiplication.
#[derive(Clone, Copy)]
pub(in crate::grammar) struct Budget(u64);

impl Budget {
    /// Enough for what people write, and below a second and 64 MiB.
    pub(in crate::grammar) fn new() -> Self {
        Self(300_000)
    }
}

/// Schemas as costly as the square of an object's number of properties, divided by this.
const SQUARE: u64 = 10;

/// A schema multiplied out.
#[derive(Clone, Copy, Debug)]
struct Cost {
    /// Branches.
    branches: u64,
    /// Schemas in all of them together.
    schemas: u64,
}

impl Cost {
    const ONE: Self = Self { branches: 1, schemas: 1 };

    fn times(self, other: Self) -> Self {
        let left = self.schemas.saturating_mul(other.branches);
        Self {
            branches: self.branches.saturating_mul(other.branches),
            schemas: left.saturating_add(other.schemas.saturating_mul(self.branches)),
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            branches: self.branches.saturating_add(other.branches),
            schemas: self.schemas.saturating_add(other.schemas),
        }
    }
}

/// Refuses an enforced schema that grows larger than the budget, and takes it off.
pub(super) fn check(
    form: &Map<String, Value>,
    definitions: &Map<String, Value>,
    at: &str,
    budget: &mut Budget,
) -> Result<()> {
    let mut known = HashMap::new();
    let mut all = 0_u64;
    for (name, definition) in definitions {
        let cost = of(definition, &known);
        known.insert(name.as_str(), cost);
        all = all.saturating_add(cost.schemas);
    }
    match budget.0.checked_sub(all.saturating_add(of_map(form, &known).schemas)) {
        Some(left) => {
            budget.0 = left;
            Ok(())
        }
        None => {
            let detail = "too many combinations and properties; give alternatives fewer keywords in common";
            Err(GrammarError::too_complex(at, detail))
        }
    }
}

/// References that lead in circles are not followed: they are not multiplied out, either.
fn of(schema: &Value, known: &HashMap<&str, Cost>) -> Cost {
    schema.as_object().map_or(Cost::ONE, |map| of_map(map, known))
}

/// A schema that stands alone; a reference stays one.
fn alone(schema: &Value, known: &HashMap<&str, Cost>) -> u64 {
    match schema {
        Value::Object(map) if map.len() == 1 && map.contains_key("$ref") => 1,
        schema => of(schema, known).schemas,
    }
}

fn of_map(map: &Map<String, Value>, known: &HashMap<&str, Cost>) -> Cost {
    const COMBINE: [&str; 5] = ["const", "enum", "allOf", "anyOf", "$ref"];
    let own = map.keys().any(|key| !COMBINE.contains(&key.as_str())).then(|| own(map, known));
    let mut factors: Vec<Cost> = own.into_iter().collect();
    factors.extend(map.get("const").map(|value| Cost { branches: 1, schemas: size(value) }));
    if let Some(Value::Array(values)) = map.get("enum") {
        let schemas = values.iter().map(size).sum();
        factors.push(Cost { branches: values.len() as u64, schemas });
    }
    if let Some(Value::Array(parts)) = map.get("allOf") {
        factors.extend(parts.iter().map(|part| of(part, known)));
    }
    if let Some(Value::Array(branches)) = map.get("anyOf") {
        let nothing = Cost { branches: 0, schemas: 0 };
        let stands_alone = factors.is_empty() && !map.contains_key("$ref");
        factors.push(branches.iter().fold(nothing, |all, branch| {
            let cost = of(branch, known);
            all.plus(if stands_alone { Cost { schemas: alone(branch, known), ..cost } } else { cost })
        }));
    }
    if let Some(reference) = map.get("$ref").and_then(Value::as_str) {
        let name = reference.strip_prefix("#/$defs/").unwrap_or_default();
        factors.push(known.get(name).copied().unwrap_or(Cost::ONE));
    }
    factors.into_iter().reduce(Cost::times).unwrap_or(Cost::ONE)
}

/// Keywords about values, one branch for each type.
fn own(map: &Map<String, Value>, known: &HashMap<&str, Cost>) -> Cost {
    let branches = match map.get("type") {
        Some(Value::Array(names)) => names.len() as u64,
        Some(_) => 1,
        None => 6,
    };
    let mut schemas = branches;
    for key in ["items", "additionalProperties"] {
        schemas = schemas.saturating_add(map.get(key).map_or(0, |schema| alone(schema, known)));
    }
    for schema in map.get("prefixItems").and_then(Value::as_array).into_iter().flatten() {
        schemas = schemas.saturating_add(alone(schema, known));
    }
    if let Some(properties) = map.get("properties").and_then(Value::as_object) {
        let count = properties.len() as u64;
        let inside = properties.values().fold(0, |all: u64, schema| all.saturating_add(alone(schema, known)));
        schemas = schemas.saturating_add(inside).saturating_add(count * count / SQUARE);
    }
    Cost { branches, schemas }
}

/// Values inside a value, itself included.
fn size(value: &Value) -> u64 {
    1 + match value {
        Value::Array(items) => items.iter().map(size).sum(),
        Value::Object(map) => map.values().map(size).sum(),
        _ => 0,
    }
}
