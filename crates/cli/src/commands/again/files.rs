//! Receipts, requests and bundles as files.

use std::path::Path;

use serde_json::{Map, Value};
use server::http::{BUNDLE_VERSION, Bundle, Receipt};

use super::seen::Seen;
use crate::error::{Failure, Result};
use crate::input;

/// Longest file: a request of the largest size, written out with white space.
const BYTES_MAX: u64 = 256 << 20;

/// Reads a file whole.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    input::file(path, BYTES_MAX).map_err(|failure| failure.or_hint("is this the right file?"))
}

/// A receipt and the texts that stand beside it, if any.
#[derive(Clone, Debug)]
pub(crate) struct Told {
    pub(crate) receipt: Receipt,
    pub(crate) seen: Seen,
}

/// A receipt: by itself, in a `clary` object, in a reply, or in the lines of a stream, of which the last
/// counts.
pub(crate) fn told(path: &Path) -> Result<Told> {
    let bytes = read(path)?;
    let documents = match serde_json::from_slice::<Value>(&bytes) {
        Ok(whole) => vec![whole],
        Err(_) => {
            let text = String::from_utf8_lossy(&bytes);
            let data = text.lines().map(|line| line.strip_prefix("data:").unwrap_or(line).trim());
            data.filter_map(|data| serde_json::from_str(data).ok()).collect()
        }
    };
    let found = documents.iter().rev().find_map(find).ok_or_else(|| {
        Failure::usage(format!("{}: holds no receipt", path.display()))
            .hint("ask for one with \"clary\": {\"receipt\": true} in the request and keep the reply")
    })?;
    let receipt = serde_json::from_value(found.clone()).map_err(|error| {
        Failure::usage(format!("{}: receipt: {error}", path.display()))
            .hint("was it written by this version of the program?")
    })?;
    Ok(Told { receipt, seen: Seen::of(&documents) })
}

/// Where a receipt lies in an object.
fn find(value: &Value) -> Option<&Value> {
    let places = ["", "/receipt", "/clary/receipt", "/response/clary/receipt"];
    let found = places.iter().filter_map(|place| value.pointer(place));
    found.into_iter().find(|found| found["output"].is_string() && found["params"].is_string())
}

/// A request's body.
pub(crate) fn request(path: &Path) -> Result<Map<String, Value>> {
    serde_json::from_slice(&read(path)?).map_err(|error| {
        Failure::usage(format!("{}: no request: {error}", path.display()))
            .hint("--request FILE holds the JSON object that was sent")
    })
}

/// A bundle.
pub(crate) fn bundle(path: &Path) -> Result<Bundle> {
    let wrong = |problem: String| {
        Failure::usage(format!("{}: no bundle: {problem}", path.display()))
            .hint("`clary bundle REQUEST_ID --record DIR` writes one")
    };
    let bundle: Bundle = serde_json::from_slice(&read(path)?).map_err(|error| wrong(error.to_string()))?;
    match bundle.bundle {
        BUNDLE_VERSION => Ok(bundle),
        other => Err(wrong(format!("version {other} found, {BUNDLE_VERSION} expected"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn receipts_are_found_wherever_they_lie() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        let known = Receipt { output: "sha256:1".into(), seed: u64::MAX, ..Receipt::default() };
        let value = json!(known);
        let check = |text: String| {
            std::fs::write(&path, &text).unwrap();
            assert_eq!(told(&path).unwrap().receipt, known, "{text}");
        };
        check(value.to_string());
        check(json!({"clary": {"receipt": value}, "receipt": null}).to_string());
        check(json!({"receipt": value}).to_string());
        check(format!("data: {{}}\n\ndata: {}\n\ndata: [DONE]\n", json!({"clary": {"receipt": value}})));
        check(format!("event: x\ndata: {}\n", json!({"response": {"clary": {"receipt": value}}})));
        check(format!("{{\"a\": 1}}\n{}\n", json!({"clary": {"receipt": value}})));
        for wrong in ["", "{}", "[1]", "{\"output\": \"a\", \"params\": \"b\"}"] {
            std::fs::write(&path, wrong).unwrap();
            assert_eq!(told(&path).unwrap_err().exit, crate::error::Exit::Usage, "{wrong}");
        }
    }
}
