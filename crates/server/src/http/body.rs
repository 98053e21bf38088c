//! Reads a request's body: declared as JSON, bounded in length and in time.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, ORIGIN};
use axum::http::{HeaderMap, HeaderValue};

use super::error::{ApiError, Code};
use super::limits::Limits;

/// Reads the body. It is not parsed yet.
pub(crate) async fn read(headers: &HeaderMap, body: Body, limits: &Limits) -> Result<Vec<u8>, ApiError> {
    check_type(headers)?;
    let declared = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|length| length > limits.body as u64) {
        return Err(too_large(limits));
    }
    collect(body, limits, limits.body_idle).await
}

/// Headers of one of Ollama's routes, whose clients leave the body's type out: it is JSON then. A web page
/// could make a browser send a body without a type as well, but the browser would name the page's origin.
pub(crate) fn assume_json(mut headers: HeaderMap) -> HeaderMap {
    if !headers.contains_key(CONTENT_TYPE) && !headers.contains_key(ORIGIN) {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    headers
}

fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let refused = |message: &str| Err(ApiError::new(Code::UnsupportedMediaType, message));
    let essence = |value: &HeaderValue| {
        let text = value.to_str().ok()?;
        Some(text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase())
    };
    let is_json = headers.get(CONTENT_TYPE).and_then(essence).is_some_and(|kind| kind == "application/json");
    if !is_json {
        let found = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let found = found.map_or("there is none".to_owned(), |found| {
            format!("it is {:?}", found.chars().take(80).collect::<String>())
        });
        return refused(&format!("Content-Type must be application/json, and {found}"));
    }
    let is_plain = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"identity");
    if headers.get_all(CONTENT_ENCODING).iter().any(|value| !is_plain(value)) {
        return refused("the body must be sent without Content-Encoding");
    }
    Ok(())
}

async fn collect(mut body: Body, limits: &Limits, idle: Duration) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    loop {
        let frame = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context));
        let frame = tokio::time::timeout(idle, frame).await.map_err(|_| {
            let message = format!("no part of the body came for {} s", idle.as_secs());
            ApiError::new(Code::Timeout, message)
        })?;
        let Some(frame) = frame else { return Ok(bytes) };
        // Whoever broke off the body does not read the answer.
        let frame = frame.map_err(|_| ApiError::new(Code::InvalidJson, "the body broke off"))?;
        if let Ok(data) = frame.into_data() {
            if bytes.len() + data.len() > limits.body {
                return Err(too_large(limits));
            }
            bytes.extend_from_slice(&data);
        }
    }
}

/// Whether something of a request's body has not been read. A connection with such a rest cannot be used
/// again: what follows on it would be taken for the rest.
#[derive(Clone, Debug)]
pub(crate) struct Rest(Arc<AtomicBool>);

impl Rest {
    /// The body, watched.
    pub(crate) fn of(body: Body) -> (Body, Self) {
        let rest = Self(Arc::new(AtomicBool::new(!body.is_end_stream())));
        (Body::new(Watched { body, rest: rest.clone() }), rest)
    }

    pub(crate) fn is_left(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

struct Watched {
    body: Body,
    rest: Rest,
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if matches!(frame, Poll::Ready(None)) || self.body.is_end_stream() {
            self.rest.0.store(false, Ordering::Relaxed);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}

fn too_large(limits: &Limits) -> ApiError {
    ApiError::new(Code::BodyTooLarge, format!("the body is longer than {} bytes", limits.body))
}
