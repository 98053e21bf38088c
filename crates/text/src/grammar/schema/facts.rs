//! What a schema says about types and values, through references.

use serde_json::{Map, Value};

/// Deepest chain of references and combinations followed.
const DEPTH_MAX: u32 = 64;

/// A set of JSON types; integers are numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::grammar) struct Types(u8);

impl Types {
    pub(in crate::grammar) const NONE: Self = Self(0);
    pub(in crate::grammar) const NULL: Self = Self(1);
    pub(in crate::grammar) const BOOLEAN: Self = Self(2);
    pub(in crate::grammar) const NUMBER: Self = Self(4);
    pub(in crate::grammar) const STRING: Self = Self(8);
    pub(in crate::grammar) const ARRAY: Self = Self(16);
    pub(in crate::grammar) const OBJECT: Self = Self(32);
    pub(in crate::grammar) const ALL: Self = Self(63);

    /// The value of a `type` keyword.
    pub(in crate::grammar) fn read(names: &Value) -> Result<Self, &'static str> {
        let one = |name: &Value| match name.as_str() {
            Some("null") => Ok(Self::NULL),
            Some("boolean") => Ok(Self::BOOLEAN),
            Some("number" | "integer") => Ok(Self::NUMBER),
            Some("string") => Ok(Self::STRING),
            Some("array") => Ok(Self::ARRAY),
            Some("object") => Ok(Self::OBJECT),
            _ => Err("types are null, boolean, integer, number, string, array and object"),
        };
        match names {
            Value::Array(names) if names.is_empty() => Err("must name at least one type"),
            Value::Array(names) => {
                names.iter().try_fold(Self::NONE, |all, name| Ok(Self(all.0 | one(name)?.0)))
            }
            name => one(name),
        }
    }

    pub(in crate::grammar) fn of(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(_) => Self::NUMBER,
            Value::String(_) => Self::STRING,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }

    /// As a `type` keyword names them.
    pub(in crate::grammar) fn names(self) -> Vec<&'static str> {
        let all = [
            (Self::NULL, "null"),
            (Self::BOOLEAN, "boolean"),
            (Self::NUMBER, "number"),
            (Self::STRING, "string"),
            (Self::ARRAY, "array"),
            (Self::OBJECT, "object"),
        ];
        all.into_iter().filter(|(kind, _)| self.has(*kind)).map(|(_, name)| name).collect()
    }

    pub(in crate::grammar) fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(in crate::grammar) fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(in crate::grammar) fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// A bounded look into a schema. Where it gives up it says less, never anything wrong.
pub(in crate::grammar) struct Facts<'s> {
    root: &'s Value,
    fuel: u32,
    depth: u32,
}

impl<'s> Facts<'s> {
    /// Looks at no more than `fuel` schemas below those it is asked about.
    pub(in crate::grammar) fn new(root: &'s Value, fuel: u32) -> Self {
        Self { root, fuel, depth: 0 }
    }

    /// Runs `look` one level down, or gives up.
    pub(in crate::grammar) fn down<T>(&mut self, look: impl FnOnce(&mut Self) -> T) -> Option<T> {
        if self.depth == DEPTH_MAX || self.fuel == 0 {
            return None;
        }
        self.fuel -= 1;
        self.depth += 1;
        let answer = look(self);
        self.depth -= 1;
        Some(answer)
    }

    /// The target of a `$ref`.
    pub(in crate::grammar) fn target(&self, map: &Map<String, Value>) -> Option<&'s Value> {
        self.root.pointer(&fragment(map.get("$ref")?.as_str()?)?)
    }

    /// Types that valid values may have; at least those.
    pub(in crate::grammar) fn types(&mut self, schema: &'s Value) -> Types {
        let map = match schema {
            Value::Object(map) => map,
            Value::Bool(false) => return Types::NONE,
            _ => return Types::ALL,
        };
        let mut types = map.get("type").and_then(|names| Types::read(names).ok()).unwrap_or(Types::ALL);
        if let Some(value) = map.get("const") {
            types = types.and(Types::of(value));
        }
        if let Some(Value::Array(values)) = map.get("enum") {
            types = types.and(values.iter().fold(Types::NONE, |all, value| all.or(Types::of(value))));
        }
        let mut of = |schema| self.down(|facts| facts.types(schema)).unwrap_or(Types::ALL);
        if let Some(Value::Array(parts)) = map.get("allOf") {
            types = parts.iter().fold(types, |types, part| types.and(of(part)));
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(Value::Array(parts)) = map.get(key) {
                types = types.and(parts.iter().fold(Types::NONE, |all, part| all.or(of(part))));
            }
        }
        match self.target(map) {
            Some(target) => types.and(self.down(|facts| facts.types(target)).unwrap_or(Types::ALL)),
            None => types,
        }
    }
}

/// The JSON pointer of a reference into the same schema.
pub(in crate::grammar) fn fragment(reference: &str) -> Option<String> {
    let fragment = reference.strip_prefix('#')?;
    if !(fragment.is_empty() || fragment.starts_with('/')) {
        return None;
    }
    let mut bytes = Vec::with_capacity(fragment.len());
    let mut rest = fragment.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).ok()
}
