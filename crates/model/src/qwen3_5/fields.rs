//! Reading checked values out of `config.json`, with the key's path in every error.

use serde_json::{Map, Value};

/// A value of `config.json` that this engine cannot run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("config.json: {key} is {found}; {expected} is expected")]
pub struct ConfigError {
    /// Dotted path of the key.
    pub key: String,
    /// The value found, shortened; `absent` if there is none.
    pub found: String,
    /// What is accepted.
    pub expected: String,
}

/// Characters of a found value that a message repeats.
const FOUND_CHARS: usize = 60;

/// One JSON object and where it is. `null` counts as absent everywhere.
#[derive(Clone, Copy)]
pub(super) struct Section<'a> {
    map: &'a Map<String, Value>,
    path: &'a str,
}

impl<'a> Section<'a> {
    /// The object `value`, called `path` in messages (empty: the top level).
    pub(super) fn new(value: &'a Value, path: &'a str) -> Result<Self, ConfigError> {
        match value {
            Value::Object(map) => Ok(Self { map, path }),
            other => Err(ConfigError {
                key: if path.is_empty() { "the file".into() } else { path.into() },
                found: shorten(other),
                expected: "an object".into(),
            }),
        }
    }

    /// The value of `key`.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// An error about `key`.
    pub(super) fn error(&self, key: &str, expected: impl Into<String>) -> ConfigError {
        ConfigError {
            key: self.key(key),
            found: self.get(key).map_or_else(|| "absent".into(), shorten),
            expected: expected.into(),
        }
    }

    /// Dotted path of `key`.
    pub(super) fn key(&self, key: &str) -> String {
        if self.path.is_empty() { key.into() } else { format!("{}.{key}", self.path) }
    }

    /// A whole number from 1 to `max`.
    pub(super) fn count(&self, key: &str, max: usize) -> Result<usize, ConfigError> {
        self.whole(key, 1, max)?.ok_or_else(|| self.error(key, format!("a whole number from 1 to {max}")))
    }

    /// A whole number from `min` to `max`, if there is one.
    pub(super) fn whole(&self, key: &str, min: usize, max: usize) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let fits = |n: u64| usize::try_from(n).ok().filter(|n| (min..=max).contains(n));
        match value.as_u64().and_then(fits) {
            Some(n) => Ok(Some(n)),
            None => Err(self.error(key, format!("a whole number from {min} to {max}"))),
        }
    }

    /// A token id, if there is one.
    pub(super) fn token(&self, key: &str) -> Result<Option<u32>, ConfigError> {
        Ok(self.whole(key, 0, u32::MAX as usize)?.map(|id| id as u32))
    }

    /// A finite number above 0, if there is one.
    pub(super) fn positive(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().filter(|n| n.is_finite() && *n > 0.0) {
            Some(n) => Ok(Some(n)),
            None => Err(self.error(key, "a number above 0")),
        }
    }

    /// True or false, if it is there.
    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.error(key, "true or false"))
    }

    /// Refuses `key` unless it is absent or this text.
    pub(super) fn only(&self, key: &str, accepted: &[&str]) -> Result<(), ConfigError> {
        match self.get(key) {
            None => Ok(()),
            Some(Value::String(text)) if accepted.contains(&text.as_str()) => Ok(()),
            Some(_) => Err(self.error(key, accepted.join(" or "))),
        }
    }

    /// Refuses `key` unless it is absent or an empty list.
    pub(super) fn empty_list(&self, key: &str) -> Result<(), ConfigError> {
        match self.get(key) {
            None => Ok(()),
            Some(Value::Array(items)) if items.is_empty() => Ok(()),
            Some(_) => Err(self.error(key, "an empty list")),
        }
    }
}

fn shorten(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(FOUND_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
