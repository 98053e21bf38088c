//! Values of a call's parameters that are written without JSON around them.

use serde_json::{Map, Value};

use super::error::GrammarError;
use super::formats;
use super::pattern::{self, Dialect};
use super::schema::{Facts, Types};

type Result<T> = std::result::Result<T, GrammarError>;

/// Longest chain of references and combinations.
const DEPTH_MAX: usize = 16;
/// Most schemas read in all tools together.
const SCHEMAS_MAX: usize = 20_000;
/// Keywords without a word on validity, as far as this goes; others that no draft defines are not looked for.
const NOTES: [&str; 7] =
    ["title", "description", "default", "examples", "$comment", "deprecated", "nullable"];
/// Texts of types beside string.
const NUMBER: &str = r"/-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?/";
const INTEGER: &str = "/-?(?:0|[1-9][0-9]*)/";

/// Makes terminals for parameters whose schema allows strings.
#[derive(Clone, Copy)]
pub(super) struct Plain {
    left: usize,
}

impl Plain {
    pub(super) fn new() -> Self {
        Self { left: SCHEMAS_MAX }
    }

    /// A terminal for the texts that the reader of the call makes a valid value of: strings, and where other
    /// types are allowed as well, plain values of those. `None` if there is none.
    pub(super) fn text<'s>(
        &mut self,
        facts: &mut Facts<'s>,
        schema: &'s Value,
        types: Types,
        at: &str,
    ) -> Result<Option<String>> {
        if types == Types::ALL {
            return match is_open(schema) {
                true => Ok(Some("FREE".to_owned())),
                false => Err(GrammarError::unsupported(at, "say the type of this parameter")),
            };
        }
        let is_nullable = schema.get("nullable") == Some(&Value::Bool(true));
        if types == Types::STRING && !is_nullable {
            return self.strings(facts, schema, at, 0).map(Some);
        }
        let mut ways = Vec::new();
        self.ways(facts, schema, types, at, 0, &mut ways)?;
        Ok((!ways.is_empty()).then(|| ways.join(" | ")))
    }

    /// Adds the plain values of a schema, one of those that make up a parameter of these types.
    fn ways<'s>(
        &mut self,
        facts: &mut Facts<'s>,
        schema: &'s Value,
        all: Types,
        at: &str,
        depth: usize,
        ways: &mut Vec<String>,
    ) -> Result<()> {
        self.count(at, depth)?;
        let Value::Object(map) = schema else {
            return match schema == false {
                true => Ok(()),
                false => Err(GrammarError::unsupported(at, "say the type of this parameter")),
            };
        };
        let only =
            |keys: &[&str]| map.keys().all(|key| keys.contains(&key.as_str()) || NOTES.contains(&&**key));
        for key in ["anyOf", "oneOf"] {
            if let Some(Value::Array(parts)) = map.get(key).filter(|_| only(&[key])) {
                return parts.iter().try_for_each(|part| self.ways(facts, part, all, at, depth + 1, ways));
            }
        }
        if let Some(target) = facts.target(map).filter(|_| only(&["$ref"])) {
            return self.ways(facts, target, all, at, depth + 1, ways);
        }
        let own = facts.types(schema);
        if let Some(values) = listed(map).filter(|_| only(&["type", "enum", "const"])) {
            let fitting = values.iter().filter(|value| own.has(Types::of(value)));
            ways.extend(fitting.filter_map(|value| written(value, all)));
            return Ok(());
        }
        if own.has(Types::STRING) {
            let strings = self.strings(facts, schema, at, depth)?;
            ways.push(format!("(({strings}) & ~TYPED)"));
        }
        let combined = ["enum", "const", "allOf", "anyOf", "oneOf", "$ref"];
        let bounds = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];
        let has_any = |keys: &[&str]| keys.iter().any(|key| map.contains_key(*key));
        let plain = own.and(Types::NULL.or(Types::BOOLEAN).or(Types::NUMBER));
        if plain != Types::NONE && (has_any(&combined) || (own.has(Types::NUMBER) && has_any(&bounds))) {
            let detail = "beside strings, values of other types cannot have conditions in a parameter";
            return Err(GrammarError::unsupported(at, detail));
        }
        let texts =
            [(Types::NULL, "\"null\""), (Types::BOOLEAN, "/true|false/"), (Types::NUMBER, number(map))];
        ways.extend(texts.iter().filter(|(kind, _)| plain.has(*kind)).map(|(_, text)| (*text).to_owned()));
        Ok(())
    }

    /// The strings a schema allows, as a terminal.
    fn strings<'s>(
        &mut self,
        facts: &Facts<'s>,
        schema: &'s Value,
        at: &str,
        depth: usize,
    ) -> Result<String> {
        self.count(at, depth)?;
        let Value::Object(map) = schema else {
            return Ok(if schema == false { "~FREE".to_owned() } else { "FREE".to_owned() });
        };
        let names = map.get("type").map(Types::read);
        if names.is_some_and(|types| types.is_ok_and(|types| !types.has(Types::STRING))) {
            return Ok("~FREE".to_owned());
        }
        let mut all = conditions(map, at)?;
        if let Some(Value::Array(parts)) = map.get("allOf") {
            for part in parts {
                all.push(self.strings(facts, part, at, depth + 1)?);
            }
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(Value::Array(parts)) = map.get(key) {
                let parts = parts.iter().map(|part| self.strings(facts, part, at, depth + 1));
                all.push(joined(&parts.collect::<Result<Vec<_>>>()?, " | "));
            }
        }
        if let Some(target) = facts.target(map) {
            all.push(self.strings(facts, target, at, depth + 1)?);
        }
        Ok(if all.is_empty() { "FREE".to_owned() } else { joined(&all, " & ") })
    }

    fn count(&mut self, at: &str, depth: usize) -> Result<()> {
        if depth == DEPTH_MAX || self.left == 0 {
            let detail = "too many references and combinations for a parameter";
            return Err(GrammarError::too_complex(at, detail));
        }
        self.left -= 1;
        Ok(())
    }
}

/// What a schema's own keywords say about strings, a terminal each.
fn conditions(map: &Map<String, Value>, at: &str) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for values in [map.get("const").map(std::slice::from_ref), enumerated(map)].into_iter().flatten() {
        let strings = values.iter().filter(|value| value.is_string());
        let texts: Vec<String> = strings.filter_map(|value| written(value, Types::STRING)).collect();
        all.push(if texts.is_empty() { "~FREE".to_owned() } else { texts.join(" | ") });
    }
    if let Some(text) = map.get("pattern").and_then(Value::as_str) {
        all.push(terminal(&pattern::whole(text, Dialect::Schema, at)?));
    }
    if let Some(expression) = map.get("format").and_then(Value::as_str).and_then(formats::expression) {
        all.push(terminal(&expression));
    }
    let length = |key: &str| map.get(key).and_then(Value::as_u64);
    if let (least, most @ Some(_)) | (least @ Some(_), most) = (length("minLength"), length("maxLength")) {
        let most = most.map_or(String::new(), |most| most.to_string());
        all.push(terminal(&format!("(?s:.{{{},{most}}})", least.unwrap_or(0))));
    }
    Ok(all)
}

fn joined(parts: &[String], between: &str) -> String {
    parts.iter().map(|part| format!("({part})")).collect::<Vec<_>>().join(between)
}

fn terminal(expression: &str) -> String {
    format!("/{}/", llguidance::regex_to_lark(expression, ""))
}

/// Whether the schema says nothing about values.
fn is_open(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => map.keys().all(|key| NOTES.contains(&key.as_str()) && key != "nullable"),
        schema => schema == true,
    }
}

fn enumerated(map: &Map<String, Value>) -> Option<&[Value]> {
    map.get("enum").and_then(Value::as_array).map(Vec::as_slice)
}

/// The only values a schema allows, if one keyword lists them.
fn listed(map: &Map<String, Value>) -> Option<&[Value]> {
    match (map.get("const"), enumerated(map)) {
        (Some(value), None) => Some(std::slice::from_ref(value)),
        (None, values) => values,
        (Some(_), Some(_)) => None,
    }
}

/// A listed value as a terminal, if the reader of a call of these types makes the same value of its text.
fn written(value: &Value, types: Types) -> Option<String> {
    let Value::String(text) = value else { return Some(Value::from(value.to_string()).to_string()) };
    let is_typed = (types.has(Types::NULL) && text == "null")
        || (types.has(Types::BOOLEAN) && (text == "true" || text == "false"))
        || (types.has(Types::NUMBER) && text.starts_with(|c: char| c == '-' || c.is_ascii_digit()))
        || (types.has(Types::ARRAY.or(Types::OBJECT)) && text.trim_start().starts_with(['[', '{']));
    (!is_typed && !text.ends_with('\r')).then(|| Value::from(text.as_str()).to_string())
}

/// The terminal of a schema's numbers.
fn number(map: &Map<String, Value>) -> &'static str {
    let takes_all = match map.get("type") {
        Some(Value::String(name)) => name == "number",
        Some(Value::Array(names)) => names.iter().any(|name| name == "number"),
        _ => true,
    };
    if takes_all { NUMBER } else { INTEGER }
}
