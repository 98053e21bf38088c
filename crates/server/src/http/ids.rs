//! Ids: of requests, replies and draws.

use std::fmt::Write;

use axum::http::HeaderValue;
use sha2::{Digest, Sha256};

use super::limits::REQUEST_ID_MAX;

/// Characters of a made id behind its prefix.
const LETTERS: usize = 24;

/// A new id: the prefix and 24 of `A-Z a-z 0-9`.
pub(crate) fn made(prefix: &str) -> String {
    let letters = Sha256::digest(random());
    let letters = letters.iter().take(LETTERS).map(|byte| letter(*byte));
    prefix.chars().chain(letters).collect()
}

/// An id that follows from another and a place in it, so that a streamed and a whole reply agree.
pub(crate) fn derived(prefix: &str, from: &str, place: &str) -> String {
    let digest = Sha256::new().chain_update(from).chain_update([0]).chain_update(place).finalize();
    prefix.chars().chain(digest.iter().take(LETTERS).map(|byte| letter(*byte))).collect()
}

/// A seed for a request that names none.
pub(crate) fn seed() -> u64 {
    let bytes = random();
    u64::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7]])
}

/// The client's own request id where it is usable.
pub(crate) fn accepted(header: Option<&HeaderValue>) -> Option<String> {
    let text = header?.to_str().ok()?;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    let usable = (1..=REQUEST_ID_MAX).contains(&text.len()) && text.bytes().all(is_plain);
    usable.then(|| text.to_owned())
}

/// Bytes in hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string cannot fail");
        text
    })
}

fn letter(byte: u8) -> char {
    const LETTERS: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    char::from(LETTERS[usize::from(byte % 62)])
}

fn random() -> [u8; 16] {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the system gives random bytes");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_and_fit_the_header() {
        let (a, b) = (made("req_"), made("req_"));
        assert_ne!(a, b);
        assert_eq!(a.len(), 28);
        assert_eq!(accepted(Some(&HeaderValue::from_str(&a).unwrap())), Some(a));
        assert_eq!(derived("rs_", "x", "0"), derived("rs_", "x", "0"));
        for bad in ["", "a b", "é", &"x".repeat(65)] {
            assert_eq!(accepted(HeaderValue::from_bytes(bad.as_bytes()).ok().as_ref()), None, "{bad}");
        }
    }
}
