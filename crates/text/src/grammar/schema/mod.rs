//! From a JSON Schema to one that holds nothing but what is enforced.
//!
//! The walk refuses every keyword that would change which values are valid and is not enforced, with a
//! pointer to it, and bounds size, depth and references before anything is compiled. What comes out has local
//! definitions under plain names, `oneOf` of disjoint branches as `anyOf`, and formats as expressions.

mod cost;
mod disjoint;
mod facts;
mod finite;
mod keywords;
pub(super) mod loosen;

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::error::GrammarError;
use super::formats;
use super::pattern::{self, Dialect};
use crate::message::SCHEMA_BYTES_MAX;

pub(super) use cost::Budget;
use facts::fragment;
pub(super) use facts::{Facts, Types};

/// Deepest nesting of a schema, counted in objects and arrays.
pub const SCHEMA_DEPTH_MAX: usize = 64;
/// Most schemas inside one another on the way from the root, through references met for the first time.
const WALK_DEPTH_MAX: usize = 512;
/// Largest `minLength` and `maxLength`.
const LENGTH_MAX: u64 = 1 << 20;
/// Largest `minItems` and `maxItems`.
const ITEMS_MAX: u64 = 1 << 16;
/// Most schemas looked at to tell branches apart.
const COMPARISONS_MAX: u32 = 1 << 20;
/// Integers up to here are the same in every reader: 2^53.
const NUMBER_MAX: f64 = 9_007_199_254_740_992.0;

type Result<T> = std::result::Result<T, GrammarError>;

/// Checks size and depth; never recursive, for the depth may be anything.
pub(super) fn measure(schema: &Value) -> Result<()> {
    let mut bytes = 0_usize;
    let mut open = vec![(schema, 1)];
    while let Some((value, depth)) = open.pop() {
        if depth > SCHEMA_DEPTH_MAX {
            let detail = format!("nested deeper than {SCHEMA_DEPTH_MAX} levels; use definitions and $ref");
            return Err(GrammarError::too_complex("", detail));
        }
        bytes += match value {
            Value::String(text) => text.len() + 2,
            Value::Number(number) => number.to_string().len(),
            Value::Array(items) => {
                open.extend(items.iter().map(|item| (item, depth + 1)));
                items.len() + 1
            }
            Value::Object(map) => {
                open.extend(map.values().map(|value| (value, depth + 1)));
                map.keys().map(|key| key.len() + 4).sum::<usize>() + 1
            }
            Value::Null | Value::Bool(_) => 4,
        };
        if bytes > SCHEMA_BYTES_MAX {
            let detail = format!("more than {SCHEMA_BYTES_MAX} bytes of schema");
            return Err(GrammarError::too_complex("", detail));
        }
    }
    Ok(())
}

/// The enforced form of a measured schema.
pub(super) fn enforced(root: &Value) -> Result<Value> {
    enforced_part(root, root, "", &mut Budget::new())
}

/// The enforced form of a part of a measured schema, whose references go into the whole.
pub(super) fn enforced_part(root: &Value, part: &Value, at: &str, budget: &mut Budget) -> Result<Value> {
    let facts = Facts::new(root, COMPARISONS_MAX);
    let mut walk = Walk { root, names: HashMap::new(), definitions: Map::new(), depth: 0, facts };
    let form = walk.schema(part, at)?;
    let mut form = match form {
        Value::Object(map) => map,
        Value::Bool(true) => Map::new(),
        _ => return Err(GrammarError::unsupported(at, "no value is valid against this schema")),
    };
    finite::check(&form, &walk.definitions, at)?;
    cost::check(&form, &walk.definitions, at, budget)?;
    if !walk.definitions.is_empty() {
        form.insert("$defs".to_owned(), Value::Object(walk.definitions));
    }
    Ok(Value::Object(form))
}

/// One step further down a JSON pointer.
pub(super) fn step(at: &str, key: impl std::fmt::Display) -> String {
    let key = key.to_string().replace('~', "~0").replace('/', "~1");
    format!("{at}/{key}")
}

struct Walk<'s> {
    root: &'s Value,
    /// Names of definitions by the pointers that references gave.
    names: HashMap<String, String>,
    definitions: Map<String, Value>,
    depth: usize,
    /// Compares branches of `oneOf`.
    facts: Facts<'s>,
}

impl<'s> Walk<'s> {
    fn schema(&mut self, schema: &'s Value, at: &str) -> Result<Value> {
        if self.depth == WALK_DEPTH_MAX {
            let detail = format!("more than {WALK_DEPTH_MAX} schemas and references inside one another");
            return Err(GrammarError::too_complex(at, detail));
        }
        self.depth += 1;
        let form = match schema {
            Value::Bool(_) => schema.clone(),
            Value::Object(map) => self.object(map, at)?,
            _ => return Err(GrammarError::invalid(at, "a schema must be an object, true or false")),
        };
        self.depth -= 1;
        Ok(form)
    }

    /// Keywords of values first, those that combine schemas last: the order in which they are compiled.
    fn object(&mut self, map: &'s Map<String, Value>, at: &str) -> Result<Value> {
        keywords::refuse(map, at)?;
        let mut form = Map::new();
        let mut all = Vec::new();
        if let Some(names) = map.get("type") {
            Types::read(names).map_err(|detail| GrammarError::invalid(step(at, "type"), detail))?;
            form.insert("type".to_owned(), names.clone());
        }
        strings(map, &mut form, &mut all, at)?;
        numbers(map, &mut form, at)?;
        self.arrays(map, &mut form, at)?;
        self.properties(map, &mut form, at)?;
        keywords::values(map, &mut form, at)?;
        for part in self.list(map, "allOf", at)?.unwrap_or_default() {
            all.push(part);
        }
        if !all.is_empty() {
            form.insert("allOf".to_owned(), Value::Array(all));
        }
        let any = self.list(map, "anyOf", at)?;
        let one = self.list(map, "oneOf", at)?;
        if let Some(Value::Array(branches)) = map.get("oneOf") {
            disjoint::check(&mut self.facts, branches, &step(at, "oneOf"))?;
        }
        match (any, one) {
            (Some(any), Some(one)) => {
                form.insert("anyOf".to_owned(), Value::Array(any));
                let one = json!({"anyOf": one});
                match form.entry("allOf").or_insert_with(|| json!([])) {
                    Value::Array(all) => all.push(one),
                    _ => unreachable!("allOf was put in as an array"),
                }
            }
            (Some(branches), None) | (None, Some(branches)) => {
                form.insert("anyOf".to_owned(), Value::Array(branches));
            }
            (None, None) => {}
        }
        if let Some(reference) = map.get("$ref") {
            form.insert("$ref".to_owned(), self.reference(reference, &step(at, "$ref"))?);
        }
        Ok(Value::Object(form))
    }

    fn arrays(&mut self, map: &'s Map<String, Value>, form: &mut Map<String, Value>, at: &str) -> Result<()> {
        for key in ["minItems", "maxItems"] {
            count(map, form, key, ITEMS_MAX, at)?;
        }
        if let Some(items) = self.list(map, "prefixItems", at)? {
            form.insert("prefixItems".to_owned(), Value::Array(items));
        }
        if let Some(items) = map.get("items") {
            let at = step(at, "items");
            if items.is_array() {
                return Err(GrammarError::unsupported(at, "a list of schemas belongs in prefixItems"));
            }
            form.insert("items".to_owned(), self.schema(items, &at)?);
        }
        Ok(())
    }

    fn properties(
        &mut self,
        map: &'s Map<String, Value>,
        form: &mut Map<String, Value>,
        at: &str,
    ) -> Result<()> {
        if let Some(properties) = map.get("properties") {
            let at = step(at, "properties");
            let Value::Object(properties) = properties else {
                return Err(GrammarError::invalid(at, "must be an object of schemas"));
            };
            let mut forms = Map::new();
            for (name, schema) in properties {
                let at = step(&at, name);
                keywords::writable(name, &at)?;
                forms.insert(name.clone(), self.schema(schema, &at)?);
            }
            form.insert("properties".to_owned(), Value::Object(forms));
        }
        if let Some(required) = map.get("required") {
            let at = step(at, "required");
            let names = required.as_array().filter(|names| names.iter().all(Value::is_string));
            let Some(names) = names else {
                return Err(GrammarError::invalid(at, "must be an array of strings"));
            };
            for (index, name) in names.iter().enumerate() {
                keywords::writable(name.as_str().unwrap_or_default(), &step(&at, index))?;
            }
            form.insert("required".to_owned(), required.clone());
        }
        if let Some(schema) = map.get("additionalProperties") {
            let schema = self.schema(schema, &step(at, "additionalProperties"))?;
            form.insert("additionalProperties".to_owned(), schema);
        }
        Ok(())
    }

    /// A keyword whose value is an array of schemas.
    fn list(&mut self, map: &'s Map<String, Value>, key: &str, at: &str) -> Result<Option<Vec<Value>>> {
        let Some(list) = map.get(key) else { return Ok(None) };
        let at = step(at, key);
        let schemas = list.as_array().filter(|schemas| !schemas.is_empty());
        let Some(schemas) = schemas else {
            return Err(GrammarError::invalid(at, "must be an array of at least one schema"));
        };
        let forms = schemas.iter().enumerate().map(|(index, schema)| self.schema(schema, &step(&at, index)));
        forms.collect::<Result<_>>().map(Some)
    }

    /// The definition a reference leads to, under a plain name.
    fn reference(&mut self, reference: &Value, at: &str) -> Result<Value> {
        let Some(text) = reference.as_str() else {
            return Err(GrammarError::invalid(at, "must be a string"));
        };
        let Some(pointer) = fragment(text) else {
            let detail = "only references into the same schema (#/…) are followed";
            return Err(GrammarError::unsupported(at, detail));
        };
        if let Some(name) = self.names.get(&pointer) {
            return Ok(json!(format!("#/$defs/{name}")));
        }
        let Some(target) = self.root.pointer(&pointer) else {
            return Err(GrammarError::invalid(at, "leads to nothing"));
        };
        let name = format!("d{}", self.names.len());
        self.names.insert(pointer.clone(), name.clone());
        let form = self.schema(target, &pointer)?;
        self.definitions.insert(name.clone(), form);
        Ok(json!(format!("#/$defs/{name}")))
    }
}

fn strings(
    map: &Map<String, Value>,
    form: &mut Map<String, Value>,
    all: &mut Vec<Value>,
    at: &str,
) -> Result<()> {
    for key in ["minLength", "maxLength"] {
        count(map, form, key, LENGTH_MAX, at)?;
    }
    if let Some(pattern) = map.get("pattern") {
        let at = step(at, "pattern");
        let Some(text) = pattern.as_str() else {
            return Err(GrammarError::invalid(at, "must be a string"));
        };
        let whole = pattern::whole(text, Dialect::Schema, &at)?;
        form.insert("pattern".to_owned(), json!(format!("^{whole}$")));
    }
    if let Some(format) = map.get("format") {
        let at = step(at, "format");
        let Some(name) = format.as_str() else {
            return Err(GrammarError::invalid(at, "must be a string"));
        };
        let Some(expression) = formats::expression(name) else {
            let detail = format!("this format is not enforced; those that are: {}", formats::NAMES);
            return Err(GrammarError::unsupported(at, detail));
        };
        all.push(json!({"pattern": format!("^(?:{expression})$")}));
    }
    Ok(())
}

fn numbers(map: &Map<String, Value>, form: &mut Map<String, Value>, at: &str) -> Result<()> {
    for key in ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"] {
        let Some(bound) = map.get(key) else { continue };
        let at = step(at, key);
        // The fourth draft says with it how the other bound is meant.
        let plain = map.get(if key == "exclusiveMinimum" { "minimum" } else { "maximum" });
        let bound = match (bound, plain) {
            (Value::Bool(false), _) => continue,
            (Value::Bool(true), Some(plain)) if key.starts_with("exclusive") => plain,
            _ => bound,
        };
        let Some(number) = bound.as_f64() else {
            return Err(GrammarError::invalid(at, "must be a number"));
        };
        if number.abs() > NUMBER_MAX {
            return Err(GrammarError::unsupported(at, "bounds must lie within 2^53 of zero"));
        }
        form.insert(key.to_owned(), bound.clone());
    }
    Ok(())
}

fn count(
    map: &Map<String, Value>,
    form: &mut Map<String, Value>,
    key: &str,
    most: u64,
    at: &str,
) -> Result<()> {
    let Some(value) = map.get(key) else { return Ok(()) };
    let at = step(at, key);
    match value.as_u64() {
        Some(number) if number <= most => {
            form.insert(key.to_owned(), value.clone());
            Ok(())
        }
        Some(_) => Err(GrammarError::unsupported(at, format!("at most {most} is supported"))),
        None => Err(GrammarError::invalid(at, "must be a whole number, 0 or more")),
    }
}
