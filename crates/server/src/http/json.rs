//! Strict JSON: bounded depth and number of values, no key twice in an object.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::error::{ApiError, Code, quoted};
use super::limits::{JSON_DEPTH_MAX, JSON_VALUES_MAX};

/// The value of a body, or what is wrong with it and where.
pub(crate) fn parse(body: &[u8]) -> Result<Value, ApiError> {
    let invalid = |message: String| ApiError::new(Code::InvalidJson, message);
    let text = std::str::from_utf8(body)
        .map_err(|error| invalid(format!("the body is not UTF-8 from byte {} on", error.valid_up_to())))?;
    let values = Cell::new(0);
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = Strict { depth: 0, values: &values }.deserialize(&mut reader);
    value.and_then(|value| reader.end().map(|()| value)).map_err(|error| {
        let place = format!("at line {}, column {}", error.line(), error.column());
        match error.classify() {
            // Only this module's own words arrive as data errors; they end in a place already.
            serde_json::error::Category::Data => invalid(format!("the body is refused: {error}")),
            serde_json::error::Category::Eof => invalid(format!("the body ends inside a value {place}")),
            _ => invalid(format!("the body is not JSON {place}")),
        }
    })
}

/// The object of a body.
pub(crate) fn object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match parse(body)? {
        Value::Object(object) => Ok(object),
        _ => Err(ApiError::new(Code::InvalidValue, "the body must be a JSON object")),
    }
}

#[derive(Clone, Copy)]
struct Strict<'a> {
    depth: usize,
    values: &'a Cell<usize>,
}

impl Strict<'_> {
    fn deeper<E: Error>(self) -> Result<Self, E> {
        if self.depth == JSON_DEPTH_MAX {
            return Err(E::custom(format!("nested deeper than {JSON_DEPTH_MAX}")));
        }
        Ok(Self { depth: self.depth + 1, ..self })
    }
}

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.values.set(self.values.get() + 1);
        if self.values.get() > JSON_VALUES_MAX {
            return Err(D::Error::custom(format!("more than {JSON_VALUES_MAX} values")));
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
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

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("a number is out of range"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let deeper = self.deeper()?;
        let mut array = Vec::new();
        while let Some(item) = items.next_element_seed(deeper)? {
            array.push(item);
        }
        Ok(array.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let deeper = self.deeper()?;
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if object.contains_key(&key) {
                return Err(A::Error::custom(format!(
                    "the key {:?} stands twice in an object",
                    quoted(&key)
                )));
            }
            let value = entries.next_value_seed(deeper)?;
            object.insert(key, value);
        }
        Ok(object.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, wanted: &str) {
        let error = parse(body.as_bytes()).unwrap_err();
        assert_eq!(error.code, Code::InvalidJson);
        assert!(error.message.contains(wanted), "{}", error.message);
    }

    #[test]
    fn what_serde_json_reads_is_read() {
        let text = r#"{"a":[1,-2,0.5,true,null,"x\u00e9",18446744073709551615],"b":{}}"#;
        assert_eq!(parse(text.as_bytes()).unwrap(), serde_json::from_str::<Value>(text).unwrap());
    }

    #[test]
    fn refusals_say_where() {
        check(r#"{"a":1,"a":2}"#, "\"a\" stands twice");
        check(r#"{"a":{"b":1,"b":1}}"#, "stands twice");
        check(&("[".repeat(65) + &"]".repeat(65)), "nested deeper than 64");
        check(&"[".repeat(60_000), "nested deeper than 64");
        check(&r#"{"a":"#.repeat(60_000), "nested deeper than 64");
        check("{", "ends inside a value at line 1, column 1");
        check("", "ends inside");
        check("{} x", "not JSON at line 1, column 4");
        check("nul", "line 1");
        check("1e999", "line 1");
        assert!(parse(b"\"\xff\"").unwrap_err().message.contains("UTF-8 from byte 1"));
        assert!(parse(("[".repeat(64) + &"]".repeat(64)).as_bytes()).is_ok());
    }

    #[test]
    fn the_body_must_be_an_object() {
        assert_eq!(object(b"[]").unwrap_err().code, Code::InvalidValue);
    }
}
