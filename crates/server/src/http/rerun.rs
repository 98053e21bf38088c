//! A recorded request once more, in process: what `clary verify` and `clary replay` compare with.

use axum::body::{Body, to_bytes};
use axum::http::Request;
use axum::http::header::{CONTENT_TYPE, HOST};
use serde_json::{Map, Value, json};
use tower::ServiceExt;

use super::receipt::Receipt;
use super::state::App;

/// Routes whose replies have receipts.
const ROUTES: [&str; 6] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/api/chat",
    "/api/generate",
];
/// Longest reply, bytes: far beyond a context full of text.
const REPLY_BYTES_MAX: usize = 1 << 30;

/// Why a request could not be answered again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RerunError {
    /// No such route.
    #[error("route {0:?} gives no receipts")]
    Route(String),
    /// The request is refused, or its reply failed.
    #[error("status {status}: {message}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// Code of the error, where it has one.
        code: String,
        /// What the server says.
        message: String,
    },
    /// The reply could not be read.
    #[error("the reply has no receipt: {0}")]
    NoReceipt(String),
}

/// A request answered again.
#[derive(Clone, Debug)]
pub struct Rerun {
    /// What the reply was made from, and what it came to.
    pub receipt: Receipt,
    /// The whole reply, in the dialect of its route.
    pub reply: Value,
}

/// Answers a request as a whole reply and returns it with its receipt. Drafts that the request asks for are
/// left out, and where it names no seed it gets this one; all else is as the request and the settings of
/// `app` say.
pub async fn rerun(
    app: &App,
    route: &str,
    mut request: Map<String, Value>,
    seed: u64,
) -> Result<Rerun, RerunError> {
    if !ROUTES.contains(&route) {
        return Err(RerunError::Route(route.to_owned()));
    }
    request.shift_remove("speculative");
    request.insert("stream".into(), false.into());
    request.insert("clary".into(), json!({"receipt": true}));
    let fields = match route.starts_with("/api/") {
        // Options that are no object are refused by the route itself.
        true => request.entry("options").or_insert_with(|| json!({})).as_object_mut(),
        false => Some(&mut request),
    };
    if let Some(fields) = fields
        && fields.get("seed").is_none_or(Value::is_null)
    {
        fields.insert("seed".into(), seed.into());
    }
    let body = Value::Object(request).to_string();
    let request = Request::post(route).header(CONTENT_TYPE, "application/json").header(HOST, "localhost");
    let request = request.body(Body::from(body)).expect("the headers are plain");
    let response = super::app(app.clone()).oneshot(request).await.expect("the application answers");
    let status = response.status();
    let bytes = to_bytes(response.into_body(), REPLY_BYTES_MAX)
        .await
        .map_err(|error| RerunError::NoReceipt(error.to_string()))?;
    let reply: Value =
        serde_json::from_slice(&bytes).map_err(|error| RerunError::NoReceipt(error.to_string()))?;
    if !status.is_success() {
        return Err(refused(status.as_u16(), &reply));
    }
    let receipt = serde_json::from_value(reply["clary"]["receipt"].clone())
        .map_err(|error| RerunError::NoReceipt(error.to_string()))?;
    Ok(Rerun { receipt, reply })
}

/// What an error says, in any dialect.
fn refused(status: u16, reply: &Value) -> RerunError {
    let error = &reply["error"];
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let message = text(&error["message"]).or_else(|| text(error)).unwrap_or_default();
    let code = text(&error["code"]).unwrap_or_default();
    RerunError::Refused { status, code, message }
}
