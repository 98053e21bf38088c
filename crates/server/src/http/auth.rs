//! Keys: who may ask, and how many at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use sha2::{Digest, Sha256};

use super::error::{ApiError, Code};
use super::ids::hex;

/// One key. Only its digest is kept.
#[derive(Debug)]
struct Key {
    digest: [u8; 32],
    running: AtomicUsize,
}

/// The keys of a server; none means that everybody may ask.
#[derive(Clone, Debug, Default)]
pub struct Keys {
    keys: Arc<[Key]>,
    concurrency: Option<usize>,
}

/// A request's key, or the lack of one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Caller {
    keys: Keys,
    index: Option<usize>,
}

/// A running request of a key; counts until dropped.
#[derive(Debug)]
pub(crate) struct Turn(Option<Caller>);

impl Keys {
    /// Keys from the text of a key file: one per line, `#` comments, an optional `name:` before the key.
    pub fn new<'a>(lines: impl IntoIterator<Item = &'a str>, concurrency: Option<usize>) -> Self {
        let lines =
            lines.into_iter().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let key = |line: &str| line.split_once(':').map_or(line, |(_, key)| key.trim()).to_owned();
        let kept = lines.map(key).filter(|key| !key.is_empty());
        let key = |key: String| Key { digest: Sha256::digest(key).into(), running: AtomicUsize::new(0) };
        let keys: Vec<Key> = kept.map(key).collect();
        Self { keys: keys.into(), concurrency }
    }

    /// Number of keys.
    pub fn count(&self) -> usize {
        self.keys.len()
    }

    /// Who asks. Every key is compared in full, by digest, whatever was found before.
    pub(crate) fn caller(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        if self.keys.is_empty() {
            return Ok(Caller::default());
        }
        let digest: [u8; 32] = Sha256::digest(presented(headers).unwrap_or_default()).into();
        let mut found = None;
        for (index, key) in self.keys.iter().enumerate() {
            let difference = key.digest.iter().zip(digest).fold(0, |sum, (a, b)| sum | (a ^ b));
            if difference == 0 {
                found = Some(index);
            }
        }
        match found {
            Some(_) => Ok(Caller { keys: self.clone(), index: found }),
            None => {
                let message = "a valid key is needed: Authorization: Bearer KEY, or x-api-key: KEY";
                Err(ApiError::new(Code::InvalidApiKey, message))
            }
        }
    }
}

impl Caller {
    /// Division of the prefix cache: by key, and further by the request's salt.
    pub(crate) fn namespace(&self, salt: Option<&str>) -> String {
        let mut name = String::new();
        if let Some(index) = self.index {
            name.push_str(&hex(&self.keys.keys[index].digest[..16]));
        }
        if let Some(salt) = salt {
            name.push('\n');
            name.push_str(salt);
        }
        name
    }

    /// Counts a request against the key's limit.
    pub(crate) fn turn(&self) -> Result<Turn, ApiError> {
        let (Some(index), Some(limit)) = (self.index, self.keys.concurrency) else { return Ok(Turn(None)) };
        let running = &self.keys.keys[index].running;
        let count = |running: usize| (running < limit).then_some(running + 1);
        match running.fetch_update(Ordering::AcqRel, Ordering::Acquire, count) {
            Ok(_) => Ok(Turn(Some(self.clone()))),
            Err(_) => {
                let message = format!("this key has {limit} requests running already; try again later");
                Err(ApiError { retry_after: Some(1), ..ApiError::new(Code::KeyLimit, message) })
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(Caller { keys, index: Some(index) }) = &self.0 {
            keys.keys[*index].running.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn presented(headers: &HeaderMap) -> Option<&str> {
    let bearer = || {
        let (scheme, key) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    };
    let plain = || headers.get("x-api-key")?.to_str().ok();
    bearer().or_else(plain)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name.parse().unwrap(), HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn keys_are_read_and_compared() {
        let keys = Keys::new("# ours\nalice: k1\n\n  k2 \nnobody:".lines(), Some(1));
        assert_eq!(keys.count(), 2);
        for (name, value, wanted) in [
            ("authorization", "Bearer k1", true),
            ("authorization", "bearer k2", true),
            ("x-api-key", "k2", true),
            ("authorization", "Bearer k", false),
            ("authorization", "Basic k1", false),
            ("authorization", "k1", false),
            ("x-api-key", "alice", false),
            ("x-api-key", "", false),
            ("accept", "k1", false),
        ] {
            assert_eq!(keys.caller(&headers(name, value)).is_ok(), wanted, "{name}: {value}");
        }
    }

    #[test]
    fn caches_and_limits_are_per_key() {
        let keys = Keys::new(["k1", "k2"], Some(1));
        let caller = |key: &str| keys.caller(&headers("x-api-key", key)).unwrap();
        let names: Vec<String> = ["k1", "k2"].iter().map(|key| caller(key).namespace(None)).collect();
        assert_ne!(names[0], names[1]);
        assert_ne!(caller("k1").namespace(Some("a")), caller("k1").namespace(Some("b")));
        let turn = caller("k1").turn().unwrap();
        assert_eq!(caller("k1").turn().unwrap_err().code, Code::KeyLimit);
        assert!(caller("k2").turn().is_ok());
        drop(turn);
        assert!(caller("k1").turn().is_ok());
    }
}
