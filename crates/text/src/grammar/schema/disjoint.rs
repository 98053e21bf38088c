//! `oneOf` is `anyOf` where no value fits two branches.

use serde_json::{Map, Value};

use super::{Facts, Result, Types, step};
use crate::grammar::error::GrammarError;

/// Most branches compared with one another.
const BRANCHES_MAX: usize = 128;

/// Refuses branches that some value might share.
pub(super) fn check<'s>(facts: &mut Facts<'s>, branches: &'s [Value], at: &str) -> Result<()> {
    if branches.len() > BRANCHES_MAX {
        let detail = format!("{} branches, at most {BRANCHES_MAX}; use anyOf", branches.len());
        return Err(GrammarError::too_complex(at, detail));
    }
    for (index, branch) in branches.iter().enumerate() {
        let shared = branches[..index].iter().position(|other| !disjoint(facts, branch, other));
        if let Some(other) = shared {
            let detail = format!(
                "a value may fit this branch and branch {other}; use anyOf, or tell them apart by a required \
                 property with different const values"
            );
            return Err(GrammarError::unsupported(step(at, index), detail));
        }
    }
    Ok(())
}

/// Whether certainly no value is valid against both.
fn disjoint<'s>(facts: &mut Facts<'s>, a: &'s Value, b: &'s Value) -> bool {
    let common = facts.types(a).and(facts.types(b));
    if common == Types::NONE {
        return true;
    }
    let (Value::Object(left), Value::Object(right)) = (a, b) else { return false };
    if let (Some(left), Some(right)) = (values(left), values(right))
        && left.iter().all(|value| !right.iter().any(|other| equal(value, other)))
    {
        return true;
    }
    if common == Types::NUMBER && (above(left, right) || above(right, left)) {
        return true;
    }
    if common == Types::OBJECT && objects(facts, left, right) {
        return true;
    }
    parts(facts, left, b) || parts(facts, right, a)
}

/// Whether some condition of `map`, each of which its values must meet, is disjoint from `other`.
fn parts<'s>(facts: &mut Facts<'s>, map: &'s Map<String, Value>, other: &'s Value) -> bool {
    let mut apart = |part: &'s Value| facts.down(|facts| disjoint(facts, part, other)).unwrap_or(false);
    if let Some(Value::Array(all)) = map.get("allOf")
        && all.iter().any(&mut apart)
    {
        return true;
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(Value::Array(any)) = map.get(key)
            && any.iter().all(&mut apart)
        {
            return true;
        }
    }
    let target = facts.target(map);
    target.is_some_and(|target| facts.down(|facts| disjoint(facts, target, other)).unwrap_or(false))
}

/// Objects differ if one that is required here or there has no common value.
fn objects<'s>(facts: &mut Facts<'s>, a: &'s Map<String, Value>, b: &'s Map<String, Value>) -> bool {
    let required = |map: &'s Map<String, Value>| map.get("required").and_then(Value::as_array);
    let mut names = [required(a), required(b)].into_iter().flatten().flatten().filter_map(Value::as_str);
    names.any(|name| {
        let (left, right) = (property(a, name), property(b, name));
        facts.down(|facts| disjoint(facts, left, right)).unwrap_or(false)
    })
}

fn property<'s>(map: &'s Map<String, Value>, name: &str) -> &'s Value {
    let properties = map.get("properties").and_then(|properties| properties.get(name));
    properties.or_else(|| map.get("additionalProperties")).unwrap_or(&Value::Bool(true))
}

/// The only values a schema allows, if it lists them.
fn values(map: &Map<String, Value>) -> Option<&[Value]> {
    match (map.get("const"), map.get("enum")) {
        (Some(value), _) => Some(std::slice::from_ref(value)),
        (None, Some(Value::Array(values))) => Some(values),
        _ => None,
    }
}

/// Equal as JSON Schema has it: `1` and `1.0` are.
fn equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| equal(a, b)))
        }
        (a, b) => a == b,
    }
}

/// Whether every number of `a` is above all of `b`.
fn above(a: &Map<String, Value>, b: &Map<String, Value>) -> bool {
    let bound = |map: &Map<String, Value>, key: &str| map.get(key).and_then(Value::as_f64);
    let lows = [(bound(a, "minimum"), false), (bound(a, "exclusiveMinimum"), true)];
    let highs = [(bound(b, "maximum"), false), (bound(b, "exclusiveMaximum"), true)];
    lows.iter().any(|&(low, open)| {
        highs.iter().any(|&(high, open_above)| match (low, high) {
            (Some(low), Some(high)) => low > high || (low == high && (open || open_above)),
            _ => false,
        })
    })
}
