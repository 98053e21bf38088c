//! What any answer to a spoiled request must be: documented, in the dialect's shape, and telling no secrets.

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use serde_json::Value;

use crate::support::Answer;

/// Longest message: a quotation, a path, and words.
const MESSAGE_MAX: usize = 700;
/// What clients write that must not come back at length.
pub(super) const MARK: &str = "Lorem";

/// Words that tell of the machine or of the program's inside.
const SECRETS: [&str; 16] = [
    "/root",
    "/home",
    "/tmp",
    env!("CARGO_MANIFEST_DIR"),
    "/usr",
    "/etc",
    ".rs",
    "src/",
    "crates",
    "panick",
    "unwrap",
    "thread '",
    "127.0.0.1",
    "0x7f",
    "RUST_",
    "stack backtrace",
];

/// Statuses and the codes that go with them (`docs/api.md` 2.3).
fn codes(status: u16) -> &'static [&'static str] {
    match status {
        400 => &[
            "invalid_json",
            "invalid_value",
            "missing_field",
            "unsupported_parameter",
            "unsupported_schema",
            "constraint_too_complex",
            "invalid_image",
            "image_too_large",
            "template_error",
            "context_length_exceeded",
        ],
        401 => &["invalid_api_key"],
        404 => &["model_not_found", "not_found"],
        405 => &["method_not_allowed"],
        413 => &["body_too_large", "image_too_large"],
        415 => &["unsupported_media_type"],
        421 => &["wrong_host"],
        431 => &["headers_too_large"],
        501 => &["not_implemented"],
        _ => &[],
    }
}

fn fail(what: String) -> TestCaseError {
    TestCaseError::fail(what)
}

/// A message says what is wrong without telling secrets or repeating what the client wrote at length.
fn check_message(path: &str, message: &str) -> Result<(), TestCaseError> {
    prop_assert!(!message.is_empty() && message.chars().count() <= MESSAGE_MAX, "{message}");
    prop_assert!(message.matches(MARK).count() <= 80 / MARK.len(), "repeated at length: {message}");
    // What a client wrote may be quoted; its own spelling of a path is no secret.
    let path: String = path.chars().take(80).collect();
    let own =
        [&path, "../../etc/passwd", "file:///etc/passwd", "http://127.0.0.1/", "127.0.0.1.evil.example"];
    let own = own.iter().fold(message.to_owned(), |message, own| message.replace(own, ""));
    let told = SECRETS.iter().find(|secret| own.contains(*secret));
    prop_assert!(told.is_none(), "{told:?} is told: {message}");
    Ok(())
}

/// Any answer to any request: its status is documented, its shape is the dialect's.
pub(super) fn check(path: &str, answer: &Answer) -> Result<(), TestCaseError> {
    let status = answer.status.as_u16();
    prop_assert!(answer.headers.contains_key("x-request-id") && answer.headers.contains_key("clary-version"));
    if matches!(status, 200 | 204) {
        let text = String::from_utf8(answer.body.clone()).map_err(|error| fail(error.to_string()))?;
        prop_assert!(!text.contains("NaN") && !text.contains("Infinity"), "{text}");
        // A stream that fails after its first byte has the error inside.
        prop_assert!(!text.contains("\"internal\""), "{text}");
        return Ok(());
    }
    let allowed = codes(status);
    prop_assert!(!allowed.is_empty(), "status {status}: {}", answer.text());
    if answer.body.is_empty() {
        return Err(fail(format!("status {status} without a word")));
    }
    let body: Value = serde_json::from_slice(&answer.body).map_err(|error| fail(error.to_string()))?;
    let text =
        |value: &Value| value.as_str().map(str::to_owned).ok_or_else(|| fail(format!("no text in {body}")));
    if path.starts_with("/v1/messages") {
        prop_assert_eq!(&body["type"], "error");
        text(&body["error"]["type"])?;
        text(&body["request_id"])?;
        check_message(path, &text(&body["error"]["message"])?)
    } else if path.starts_with("/api/") {
        check_message(path, &text(&body["error"])?)
    } else {
        let code = text(&body["error"]["code"])?;
        prop_assert!(allowed.contains(&code.as_str()), "{status} {code}");
        text(&body["error"]["type"])?;
        let param = &body["error"]["param"];
        prop_assert!(param.is_null() || param.is_string(), "{}", body);
        check_message(path, &text(&body["error"]["message"])?)
    }
}
