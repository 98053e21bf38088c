//! Parameter texts to JSON values, by the tool's schema (`docs/api.md` 3.4).
//!
//! The schema decides, never the look of the text. Numbers, objects and arrays keep their digits and escapes:
//! what is valid is passed on as written, without white space, and not read into a float and back.

use serde_json::Value;

/// Most schema nodes looked at for one parameter: references and unions may lead in circles and multiply.
const SCHEMA_NODES_MAX: u32 = 4096;

/// Result of typing one parameter.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Typed {
    /// Compact JSON.
    pub(super) json: String,
    /// The text did not fit the schema's type, so it became a string.
    pub(super) kept_as_text: bool,
}

/// A set of JSON types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Types(u8);

const NAMES: [(&str, Types); 7] = [
    ("string", Types::STRING),
    ("integer", Types(2)),
    ("number", Types(4)),
    ("boolean", Types(8)),
    ("null", Types(16)),
    ("array", Types(32)),
    ("object", Types(64)),
];

impl Types {
    const NONE: Self = Self(0);
    const STRING: Self = Self(1);

    fn has(self, name: &str) -> bool {
        NAMES.iter().any(|&(known, bit)| known == name && self.0 & bit.0 != 0)
    }

    fn named(name: &str) -> Self {
        NAMES.iter().find(|(known, _)| *known == name).map_or(Self::NONE, |&(_, bit)| bit)
    }

    fn of(value: &Value) -> Self {
        Self::named(match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(number) if number.is_f64() => "number",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        })
    }
}

/// The types that the schema of all arguments gives one of them; `None` if it does not say.
fn types_of(root: &Value, key: &str) -> Option<Types> {
    let mut walk = Walk::new(root);
    let property = walk.property(root, key)?;
    walk.types(property)
}

/// Whether a parameter is a string whatever its text is.
pub(super) fn is_text(schema: &Value, key: &str) -> bool {
    types_of(schema, key) == Some(Types::STRING)
}

/// Types one parameter. `schema` is that of all arguments.
pub(super) fn argument(schema: &Value, key: &str, text: &str) -> Typed {
    let types = types_of(schema, key);
    let fits = |json: String| Typed { json, kept_as_text: false };
    let Some(types) = types else {
        // No schema, or one that allows everything.
        return fits(
            container(text, "object").or_else(|| container(text, "array")).unwrap_or_else(|| quoted(text)),
        );
    };
    if types.has("string") {
        return fits(exact(types, text).unwrap_or_else(|| quoted(text)));
    }
    match lenient(types, text) {
        Some(json) => fits(json),
        None => Typed { json: quoted(text), kept_as_text: true },
    }
}

/// A JSON string.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// The text as a value of a type beside string: only if it is exactly one.
fn exact(types: Types, text: &str) -> Option<String> {
    let is_literal = (types.has("null") && text == "null")
        || (types.has("boolean") && matches!(text, "true" | "false"))
        || (types.has("integer") && is_integer(text))
        || (types.has("number") && is_number(text));
    if is_literal {
        return Some(text.to_owned());
    }
    container_of(types, text)
}

/// The text as a value of one of the types, in Python's spelling too.
fn lenient(types: Types, text: &str) -> Option<String> {
    let trimmed = text.trim();
    let literal = match trimmed {
        "null" | "None" if types.has("null") => Some("null"),
        "true" | "True" if types.has("boolean") => Some("true"),
        "false" | "False" if types.has("boolean") => Some("false"),
        number if types.has("number") && is_number(number) => Some(number),
        integer if types.has("integer") && is_integer(integer) => Some(integer),
        _ => None,
    };
    if let Some(literal) = literal {
        return Some(literal.to_owned());
    }
    if types.has("integer") && is_number(trimmed) {
        /// Whole floats up to here are exact: 2^53.
        const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;
        let number: f64 = trimmed.parse().ok()?;
        if number.fract() == 0.0 && number.abs() <= WHOLE_MAX {
            return Some((number as i64).to_string());
        }
    }
    container_of(types, text)
}

fn is_number(text: &str) -> bool {
    let starts = text.starts_with(|c: char| c == '-' || c.is_ascii_digit());
    let ends = text.ends_with(|c: char| c.is_ascii_digit());
    starts && ends && serde_json::from_str::<serde_json::Number>(text).is_ok()
}

fn is_integer(text: &str) -> bool {
    is_number(text) && !text.contains(['.', 'e', 'E'])
}

fn container_of(types: Types, text: &str) -> Option<String> {
    ["object", "array"].into_iter().filter(|name| types.has(name)).find_map(|name| container(text, name))
}

/// A JSON object or array, without white space between its parts.
fn container(text: &str, kind: &str) -> Option<String> {
    let text = text.trim();
    let opening = if kind == "object" { '{' } else { '[' };
    if !text.starts_with(opening) || serde_json::from_str::<Value>(text).is_err() {
        return None;
    }
    let mut compact = String::with_capacity(text.len());
    let (mut in_string, mut escaped) = (false, false);
    for c in text.chars() {
        if in_string {
            in_string = escaped || c != '"';
            escaped = !escaped && c == '\\';
        } else if c.is_ascii_whitespace() {
            continue;
        } else {
            in_string = c == '"';
        }
        compact.push(c);
    }
    Some(compact)
}

/// A bounded walk over one tool's schema.
struct Walk<'s> {
    root: &'s Value,
    nodes_left: u32,
    depth: u32,
}

impl<'s> Walk<'s> {
    /// Deepest nesting of references and unions followed.
    const DEPTH_MAX: u32 = 32;

    fn new(root: &'s Value) -> Self {
        Self { root, nodes_left: SCHEMA_NODES_MAX, depth: 0 }
    }

    /// Runs `step` one level down, unless the bounds are reached.
    fn down<T>(&mut self, step: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        if self.depth == Self::DEPTH_MAX || self.nodes_left == 0 {
            return None;
        }
        self.nodes_left -= 1;
        self.depth += 1;
        let result = step(self);
        self.depth -= 1;
        result
    }

    /// The schema of a property, also where it stands in a reference or a part of `allOf`, `anyOf`, `oneOf`.
    fn property(&mut self, schema: &'s Value, key: &str) -> Option<&'s Value> {
        if let Some(property) = schema["properties"].as_object().and_then(|properties| properties.get(key)) {
            return Some(property);
        }
        if let Some(target) = referred(self.root, schema) {
            return self.down(|walk| walk.property(target, key));
        }
        let parts =
            ["allOf", "anyOf", "oneOf"].into_iter().filter_map(|list| schema[list].as_array()).flatten();
        parts.into_iter().find_map(|part| self.down(|walk| walk.property(part, key)))
    }

    /// The types a schema allows; `None` if it does not say.
    fn types(&mut self, schema: &'s Value) -> Option<Types> {
        if let Some(target) = referred(self.root, schema) {
            return self.down(|walk| walk.types(target));
        }
        let mut types = match &schema["type"] {
            Value::String(name) => Some(Types::named(name)),
            Value::Array(names) => joined(names.iter().map(|name| Some(Types::named(name.as_str()?)))),
            _ => None,
        };
        for list in ["anyOf", "oneOf"] {
            if let (None, Some(parts)) = (types, schema[list].as_array()) {
                types = joined(parts.iter().map(|part| self.down(|walk| walk.types(part))));
            }
        }
        if let (None, Some(parts)) = (types, schema["allOf"].as_array()) {
            let known = parts.iter().filter_map(|part| self.down(|walk| walk.types(part)));
            types = known.reduce(|both, types| Types(both.0 & types.0));
        }
        if let (None, Some(values)) = (types, schema["enum"].as_array()) {
            types = joined(values.iter().map(|value| Some(Types::of(value))));
        }
        if let (None, Some(value)) = (types, schema.get("const")) {
            types = Some(Types::of(value));
        }
        let null = if schema["nullable"] == true { Types::named("null") } else { Types::NONE };
        // An unknown type name, or a contradiction, says nothing.
        types.filter(|types| *types != Types::NONE).map(|types| Types(types.0 | null.0))
    }
}

/// The union, or `None` if one of them is not known.
fn joined(types: impl Iterator<Item = Option<Types>>) -> Option<Types> {
    let mut types = types;
    types.try_fold(Types::NONE, |all, types| Some(Types(all.0 | types?.0)))
}

/// The target of a local `$ref`.
fn referred<'s>(root: &'s Value, schema: &Value) -> Option<&'s Value> {
    root.pointer(schema["$ref"].as_str()?.strip_prefix('#')?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// `wanted` is JSON; `kept` says that the text did not fit.
    fn check(property: Value, text: &str, wanted: &str, kept: bool) {
        let schema =
            json!({"type": "object", "properties": {"k": property}, "$defs": {"n": {"type": "integer"}}});
        let typed = argument(&schema, "k", text);
        assert_eq!(typed, Typed { json: wanted.to_owned(), kept_as_text: kept }, "{schema} {text:?}");
    }

    #[test]
    fn strings_are_never_touched() {
        for text in ["02134", "true", "1e5", "null", "{\"a\": 1}", "", " x "] {
            check(json!({"type": "string"}), text, &quoted(text), false);
            check(json!({"enum": ["a", "b"]}), text, &quoted(text), false);
        }
    }

    #[test]
    fn the_schema_decides() {
        let integer = json!({"type": "integer"});
        let number = json!({"type": "number"});
        let boolean = json!({"type": "boolean"});
        for (text, wanted, kept) in [
            ("5", "5", false),
            (" 5 ", "5", false),
            ("5.0", "5", false),
            ("1e5", "100000", false),
            ("-0", "-0", false),
            ("123456789012345678901234567890", "123456789012345678901234567890", false),
            ("2026-01-15", "\"2026-01-15\"", true),
            ("5.5", "\"5.5\"", true),
            ("007", "\"007\"", true),
            ("", "\"\"", true),
        ] {
            check(integer.clone(), text, wanted, kept);
        }
        check(number.clone(), "5.0", "5.0", false);
        check(number.clone(), "1e5", "1e5", false);
        check(number, "NaN", "\"NaN\"", true);
        check(boolean.clone(), "True", "true", false);
        check(boolean.clone(), "false", "false", false);
        check(boolean, "yes", "\"yes\"", true);
        check(json!({"type": "null"}), "None", "null", false);
        check(
            json!({"type": "array"}),
            "[1, \"a \\\" b\", {\"k\" : 1.10}]",
            "[1,\"a \\\" b\",{\"k\":1.10}]",
            false,
        );
        check(json!({"type": "object"}), "{\"b\": 1, \"a\": [ ]}", "{\"b\":1,\"a\":[]}", false);
        check(json!({"type": "object"}), "[1]", "\"[1]\"", true);
        check(json!({"type": "object"}), "{\"a\": ", "\"{\\\"a\\\": \"", true);
    }

    #[test]
    fn unions_and_references() {
        let string_or_null = json!({"type": ["string", "null"]});
        check(string_or_null.clone(), "null", "null", false);
        check(string_or_null.clone(), "None", "\"None\"", false);
        check(string_or_null, "5", "\"5\"", false);
        let any_of = json!({"anyOf": [{"type": "string"}, {"type": "integer"}]});
        check(any_of.clone(), "5", "5", false);
        check(any_of.clone(), "05", "\"05\"", false);
        check(any_of, "5.0", "\"5.0\"", false);
        check(json!({"$ref": "#/$defs/n"}), "7", "7", false);
        check(json!({"allOf": [{"type": "integer"}, {"minimum": 1}]}), "7", "7", false);
        check(json!({"type": "integer", "nullable": true}), "null", "null", false);
        check(json!({"enum": [1, 2]}), "1", "1", false);
        check(json!({"$ref": "#/properties/k"}), "[1 ]", "[1]", false);
    }

    #[test]
    fn circles_end() {
        let parts: Vec<Value> = (0..200).map(|_| json!({"$ref": "#/properties/k"})).collect();
        check(json!({"anyOf": parts}), "5", "\"5\"", false);
        let root = json!({"anyOf": (0..200).map(|_| json!({"$ref": "#"})).collect::<Vec<_>>()});
        assert_eq!(argument(&root, "k", "5").json, "\"5\"");
    }

    #[test]
    fn without_a_schema_only_containers_are_parsed() {
        check(json!({}), "5", "\"5\"", false);
        check(json!({}), "[5]", "[5]", false);
        let free = |text| argument(&json!({}), "k", text).json;
        assert_eq!(free("{\"a\": 1}"), "{\"a\":1}");
        assert_eq!(free("true"), "\"true\"");
        let other = json!({"properties": {"z": {"type": "integer"}}});
        assert_eq!(argument(&other, "k", "5").json, "\"5\"");
    }
}
