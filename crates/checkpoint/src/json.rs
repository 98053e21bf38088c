//! JSON that refuses repeated keys, which `serde_json` alone would silently overwrite.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Largest `config.json` read, in bytes; real ones with a table entry per module stay under 10 MB.
pub(crate) const CONFIG_BYTES_MAX: u64 = 64 << 20;
/// Largest index read, in bytes; one of 100,000 tensors has 10 MB.
pub(crate) const INDEX_BYTES_MAX: u64 = 256 << 20;

/// Parses a whole document; the error text has line and column.
pub(crate) fn parse(bytes: &[u8]) -> Result<Value, String> {
    serde_json::from_slice::<Unique>(bytes).map(|u| u.0).map_err(|e| e.to_string())
}

/// Shortens a value for a message.
pub(crate) fn brief(value: &Value) -> String {
    const CHARS_MAX: usize = 60;
    let text = match value {
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        other => other.to_string(),
    };
    if text.chars().count() <= CHARS_MAX {
        return text;
    }
    text.chars().take(CHARS_MAX).chain("...".chars()).collect()
}

struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueVisitor).map(Self)
    }
}

struct UniqueVisitor;

impl<'de> Visitor<'de> for UniqueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Unique(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format_args!("key {key:?} is repeated")));
            }
            let Unique(value) = entries.next_value()?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_keys_are_refused_at_any_depth() {
        for text in [r#"{"a":1,"a":1}"#, r#"{"x":[{"b":{"a":1,"c":0,"a":2}}]}"#] {
            let error = parse(text.as_bytes()).expect_err("a key is repeated");
            assert!(error.contains(r#"key "a" is repeated"#), "{error}");
        }
    }

    #[test]
    fn values_equal_those_of_serde_json() {
        let text = r#"{"a":[1,-2,3.5,null,true,"x\u00e9"],"b":{"c":18446744073709551615}}"#;
        assert_eq!(parse(text.as_bytes()), serde_json::from_str(text).map_err(|e| e.to_string()));
    }

    #[test]
    fn deep_nesting_is_an_error() {
        assert!(parse("[".repeat(100_000).as_bytes()).is_err());
    }
}
