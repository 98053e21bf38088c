//! Reads the fields of a request object: typed, with ranges, every mistake with its path.
//!
//! Null counts as absent, and what nobody asked for is named in the end.

use serde_json::{Map, Value};
use text::Note;

use super::error::{ApiError, Code, quoted};
use super::limits::MODEL_NAME_MAX;

/// Words for how hard to think, and whether that is at all: the family knows no more.
pub(crate) const EFFORTS: [(&str, bool); 7] = [
    ("none", false),
    ("minimal", true),
    ("low", true),
    ("medium", true),
    ("high", true),
    ("xhigh", true),
    ("max", true),
];

/// Most unknown fields that are named.
const UNKNOWN_NOTED_MAX: usize = 32;

/// An object of the request on its way into types.
#[derive(Debug)]
pub(crate) struct Fields {
    map: Map<String, Value>,
    /// Path of the object; empty for the body.
    at: String,
}

impl Fields {
    /// The body's fields.
    pub(crate) fn new(map: Map<String, Value>) -> Self {
        Self::inside(map, String::new())
    }

    fn inside(map: Map<String, Value>, at: String) -> Self {
        Self { map, at }
    }

    /// Path of a field.
    pub(crate) fn path(&self, name: &str) -> String {
        if self.at.is_empty() { name.to_owned() } else { format!("{}.{name}", self.at) }
    }

    /// The field as it is.
    pub(crate) fn take(&mut self, name: &'static str) -> Option<Value> {
        // The order of what remains only matters for notes about it.
        self.map.swap_remove(name).filter(|value| !value.is_null())
    }

    /// The field as it is, or a `missing_field` error.
    pub(crate) fn need(&mut self, name: &'static str) -> Result<Value, ApiError> {
        let path = self.path(name);
        self.take(name).ok_or_else(|| ApiError::at(Code::MissingField, path, "this field is needed"))
    }

    /// The model's name, which all routes that reply need.
    pub(crate) fn model(&mut self) -> Result<String, ApiError> {
        let name = self.string("model", MODEL_NAME_MAX)?;
        name.ok_or_else(|| ApiError::at(Code::MissingField, "model", "this field is needed"))
    }

    /// A boolean.
    pub(crate) fn bool(&mut self, name: &'static str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    /// A boolean with a default.
    pub(crate) fn flag(&mut self, name: &'static str, default: bool) -> Result<bool, ApiError> {
        Ok(self.bool(name)?.unwrap_or(default))
    }

    /// An integer in a range.
    pub(crate) fn integer(
        &mut self,
        name: &'static str,
        low: i64,
        high: i64,
    ) -> Result<Option<i64>, ApiError> {
        let wanted = match high {
            i64::MAX => format!("an integer of at least {low}"),
            _ => format!("an integer from {low} to {high}"),
        };
        self.typed(name, &wanted, |value| whole(value).filter(|number| (low..=high).contains(number)))
    }

    /// A count in a range that starts at 0 or above.
    pub(crate) fn count(
        &mut self,
        name: &'static str,
        low: usize,
        high: usize,
    ) -> Result<Option<usize>, ApiError> {
        let high = i64::try_from(high).unwrap_or(i64::MAX);
        Ok(self.integer(name, low as i64, high)?.map(|number| number as usize))
    }

    /// A number in a range.
    pub(crate) fn number(
        &mut self,
        name: &'static str,
        low: f64,
        high: f64,
    ) -> Result<Option<f32>, ApiError> {
        let wanted = format!("a number from {low} to {high}");
        self.typed(name, &wanted, |value| within(value, low, high))
    }

    /// A number above 0.
    pub(crate) fn positive(&mut self, name: &'static str, high: f64) -> Result<Option<f32>, ApiError> {
        let wanted = format!("a number above 0, at most {high}");
        self.typed(name, &wanted, |value| within(value, 0.0, high).filter(|&number| number > 0.0))
    }

    /// A string of bounded length.
    pub(crate) fn string(
        &mut self,
        name: &'static str,
        bytes_max: usize,
    ) -> Result<Option<String>, ApiError> {
        let wanted = format!("a string of at most {bytes_max} bytes");
        let short = |value: &Value| value.as_str().filter(|text| text.len() <= bytes_max).map(str::to_owned);
        self.typed(name, &wanted, short)
    }

    /// One of some words.
    pub(crate) fn word<T: Copy>(
        &mut self,
        name: &'static str,
        words: &[(&str, T)],
    ) -> Result<Option<T>, ApiError> {
        let names: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        let wanted = format!("one of {}", names.join(", "));
        let known = |value: &Value| {
            let word = value.as_str()?;
            words.iter().find(|(name, _)| *name == word).map(|&(_, meaning)| meaning)
        };
        self.typed(name, &wanted, known)
    }

    /// An array of bounded length.
    pub(crate) fn array(&mut self, name: &'static str, most: usize) -> Result<Option<Vec<Value>>, ApiError> {
        let path = self.path(name);
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) if items.len() <= most => Ok(Some(items)),
            Some(Value::Array(items)) => {
                Err(ApiError::invalid(path, format!("{} entries, at most {most} are allowed", items.len())))
            }
            Some(other) => Err(unexpected(path, "an array", &other)),
        }
    }

    /// An object.
    pub(crate) fn object(&mut self, name: &'static str) -> Result<Option<Self>, ApiError> {
        let path = self.path(name);
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self::inside(map, path))),
            Some(other) => Err(unexpected(path, "an object", &other)),
        }
    }

    /// Fields that have no effect.
    pub(crate) fn ignore(&mut self, names: &[&'static str]) {
        for name in names {
            self.take(name);
        }
    }

    /// Fields that are refused unless null.
    pub(crate) fn refuse(&mut self, names: &[&'static str], detail: &str) -> Result<(), ApiError> {
        for name in names {
            if self.take(name).is_some() {
                return Err(ApiError::unsupported(self.path(name), detail));
            }
        }
        Ok(())
    }

    /// Names what nobody asked for.
    pub(crate) fn finish(self) -> Vec<Note> {
        let names = self.map.keys().take(UNKNOWN_NOTED_MAX);
        names.map(|name| Note { code: "unknown_field", path: quoted(&self.path(name)) }).collect()
    }

    /// Refuses what nobody asked for.
    pub(crate) fn finish_strict(self, detail: &str) -> Result<(), ApiError> {
        match self.map.keys().next() {
            None => Ok(()),
            Some(name) => Err(ApiError::unsupported(quoted(&self.path(name)), detail)),
        }
    }

    fn typed<T>(
        &mut self,
        name: &'static str,
        wanted: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let path = self.path(name);
        match self.take(name) {
            None => Ok(None),
            Some(value) => read(&value).map(Some).ok_or_else(|| unexpected(path, wanted, &value)),
        }
    }
}

/// `expected X, found Y`.
pub(crate) fn unexpected(path: impl Into<String>, wanted: &str, found: &Value) -> ApiError {
    ApiError::invalid(path, format!("must be {wanted}, not {}", shown(found)))
}

/// Longest text of a client that a message repeats as it is, bytes.
const SHOWN_BYTES_MAX: usize = 40;

/// A value in a message: its kind, and where it is short the value itself.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(text) if text.len() <= SHOWN_BYTES_MAX => format!("{text:?}"),
        Value::String(text) => format!("a string of {} bytes", text.len()),
        Value::Array(items) => format!("an array of {}", items.len()),
        Value::Object(_) => "an object".into(),
    }
}

/// The integer a number is, however it is written.
pub(crate) fn whole(value: &Value) -> Option<i64> {
    let exact = |number: f64| (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64);
    value.as_i64().or_else(|| value.as_u64().map(|_| i64::MAX)).or_else(|| value.as_f64().and_then(exact))
}

fn within(value: &Value, low: f64, high: f64) -> Option<f32> {
    value.as_f64().filter(|number| (low..=high).contains(number)).map(|number| number as f32)
}

/// A token id of a vocabulary.
pub(crate) fn token(
    value: &Value,
    path: impl FnOnce() -> String,
    vocabulary: usize,
) -> Result<u32, ApiError> {
    let id = whole(value).and_then(|id| u32::try_from(id).ok());
    id.filter(|&id| (id as usize) < vocabulary)
        .ok_or_else(|| unexpected(path(), &format!("a token id below {vocabulary}"), value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: Value) -> Fields {
        let Value::Object(map) = value else { panic!("an object") };
        Fields::new(map)
    }

    #[test]
    fn values_in_range_are_taken() {
        let mut read =
            fields(json!({"a": true, "b": 3.0, "c": 0.5, "d": "x", "e": null, "f": {"g": 1}, "h": 2}));
        assert_eq!(read.bool("a").unwrap(), Some(true));
        assert_eq!(read.integer("b", 0, 3).unwrap(), Some(3));
        assert_eq!(read.number("c", 0.0, 1.0).unwrap(), Some(0.5));
        assert_eq!(read.word("d", &[("x", 7)]).unwrap(), Some(7));
        assert_eq!(read.bool("e").unwrap(), None);
        let mut inner = read.object("f").unwrap().unwrap();
        assert_eq!(inner.integer("g", 2, 3).unwrap_err().param.as_deref(), Some("f.g"));
        assert_eq!(read.finish(), [Note { code: "unknown_field", path: "h".into() }]);
    }

    #[test]
    fn values_out_of_range_are_named() {
        let mut read = fields(json!({"a": 1, "b": 3.5, "c": 2, "d": "y", "e": 0, "f": "z".repeat(50)}));
        let message = |result: Result<(), ApiError>| result.unwrap_err().message;
        assert_eq!(message(read.bool("a").map(drop)), "a: must be true or false, not 1");
        assert_eq!(message(read.integer("b", 0, 9).map(drop)), "b: must be an integer from 0 to 9, not 3.5");
        assert_eq!(message(read.number("c", 0.0, 1.0).map(drop)), "c: must be a number from 0 to 1, not 2");
        assert_eq!(message(read.word("d", &[("x", 7)]).map(drop)), "d: must be one of x, not \"y\"");
        assert_eq!(
            message(read.positive("e", 1.0).map(drop)),
            "e: must be a number above 0, at most 1, not 0"
        );
        assert!(message(read.string("f", 9).map(drop)).ends_with("not a string of 50 bytes"));
        assert_eq!(read.need("g").unwrap_err().code, Code::MissingField);
    }
}
