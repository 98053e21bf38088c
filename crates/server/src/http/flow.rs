//! A reply as a stream of bytes: the task that reads the engine's updates, lets a dialect write them, and
//! keeps the connection alive; and the body that hands the bytes to the connection.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use futures_core::Stream;
use serde::Serialize;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep_until};

use super::app::json;
use super::drain::Phase;
use super::error::ApiError;
use super::limits::KEEP_ALIVE;
use super::running::{Running, Update};
use super::state::{App, draining};

/// Writes a reply in one dialect. Bytes are appended to `out`; what is appended in one call is sent at once.
pub(crate) trait Writer: Send + 'static {
    /// `Content-Type` of the stream.
    const CONTENT_TYPE: &'static str;

    /// The stream begins.
    fn begin(&mut self, running: &Running, out: &mut Vec<u8>);
    /// Something happened to a choice.
    fn update(&mut self, running: &Running, update: Update, out: &mut Vec<u8>);
    /// All choices are over.
    fn end(&mut self, running: &Running, out: &mut Vec<u8>);
    /// The reply failed. Nothing follows.
    fn failed(&mut self, running: &Running, error: &ApiError, out: &mut Vec<u8>);
    /// A sign of life.
    fn keep_alive(&mut self, out: &mut Vec<u8>);
}

/// A writer whose updates make a whole reply as well.
pub(crate) trait Whole: Writer {
    /// The reply as JSON.
    type Reply: Serialize;

    /// The whole reply. `running` is over and every update has been taken.
    fn whole(self, running: &Running) -> Self::Reply;
}

/// Asks the connection of a request to close when its response is sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hangup(pub(crate) Arc<Notify>);

/// Appends `data: JSON` and an empty line.
pub(crate) fn sse_data(out: &mut Vec<u8>, json: &impl Serialize) {
    out.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *out, json).expect("own types have a JSON form");
    out.extend_from_slice(b"\n\n");
}

/// Appends `event: NAME`, `data: JSON` and an empty line.
pub(crate) fn sse_event(out: &mut Vec<u8>, name: &str, json: &impl Serialize) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.push(b'\n');
    sse_data(out, json);
}

/// Answers with a reply in the form that its request wants: as a stream, or whole.
pub(crate) async fn answer<W: Whole>(
    mut running: Running,
    mut writer: W,
    is_stream: bool,
) -> Result<Response, ApiError> {
    if is_stream {
        return respond(running, writer).await;
    }
    let mut unsent = Vec::new();
    let take = |running: &Running, update: Update| {
        writer.update(running, update, &mut unsent);
        unsent.clear();
    };
    running.whole_with(take).await?;
    Ok(json(&writer.whole(&running)))
}

/// Waits until the request has a slot (or for the first sign of life) and answers with its stream. What fails
/// before is an error with its own status.
pub(crate) async fn respond<W: Writer>(mut running: Running, mut writer: W) -> Result<Response, ApiError> {
    let (app, hangup) = (running.app().clone(), running.context().hangup.clone());
    let drain = app.drain().clone();
    let first = tokio::select! {
        updates = running.next() => updates?,
        () = tokio::time::sleep(KEEP_ALIVE) => Vec::new(),
        () = drain.reached(Phase::Cut) => return Err(draining()),
    };
    let (sender, receiver) = unbounded_channel();
    let backlog = Arc::new(AtomicUsize::new(0));
    let mut out = Vec::new();
    writer.begin(&running, &mut out);
    if first.is_empty() {
        writer.keep_alive(&mut out);
    }
    let wire = Wire { sender, backlog: backlog.clone(), limit: app.settings().limits.backlog };
    let pump = Pump { app, running, writer, wire, out };
    tokio::spawn(async move {
        if !pump.run(first).await {
            // The client has been told, or is gone; the connection is not used again.
            hangup.0.notify_one();
        }
    });
    let mut response = Response::new(Body::from_stream(Frames { receiver, backlog }));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(W::CONTENT_TYPE));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    Ok(response)
}

/// The writing end of a body.
struct Wire {
    sender: UnboundedSender<Bytes>,
    /// Bytes sent and not yet taken by the connection.
    backlog: Arc<AtomicUsize>,
    limit: usize,
}

impl Wire {
    /// Sends what was written. `false` if the client left, or leaves too much unread.
    fn send(&self, out: &mut Vec<u8>) -> bool {
        if out.is_empty() {
            return true;
        }
        let bytes = Bytes::from(std::mem::take(out));
        let unread = self.backlog.fetch_add(bytes.len(), Ordering::AcqRel) + bytes.len();
        self.sender.send(bytes).is_ok() && unread <= self.limit
    }
}

/// The reading end of a body.
struct Frames {
    receiver: UnboundedReceiver<Bytes>,
    backlog: Arc<AtomicUsize>,
}

impl Stream for Frames {
    type Item = Result<Bytes, std::convert::Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.receiver.poll_recv(context).map(|bytes| {
            let bytes = bytes?;
            self.backlog.fetch_sub(bytes.len(), Ordering::AcqRel);
            Some(Ok(bytes))
        })
    }
}

/// How a wait ended.
enum News {
    Updates(Result<Vec<Update>, ApiError>),
    Silence,
    ClientLeft,
    Cut,
}

struct Pump<W> {
    app: App,
    running: Running,
    writer: W,
    wire: Wire,
    out: Vec<u8>,
}

impl<W: Writer> Pump<W> {
    /// Runs to the end of the reply; `false` if that was not a good end. Dropping `running` on the way out
    /// cancels what is not over.
    async fn run(mut self, first: Vec<Update>) -> bool {
        let mut updates: Result<Vec<Update>, ApiError> = Ok(first);
        let drain = self.app.drain().clone();
        loop {
            match updates {
                Ok(updates) => {
                    for update in updates {
                        self.writer.update(&self.running, update, &mut self.out);
                    }
                }
                Err(error) => {
                    self.running.log().failed(error.code.name());
                    self.writer.failed(&self.running, &error, &mut self.out);
                    self.wire.send(&mut self.out);
                    return false;
                }
            }
            let is_over = self.running.is_over();
            if is_over {
                self.writer.end(&self.running, &mut self.out);
            }
            let is_read = self.wire.send(&mut self.out);
            if !is_read || is_over {
                return is_read;
            }
            updates = loop {
                let silent_at = Instant::now() + KEEP_ALIVE;
                let news = tokio::select! {
                    updates = self.running.next() => News::Updates(updates),
                    () = self.wire.sender.closed() => News::ClientLeft,
                    () = drain.reached(Phase::Cut) => News::Cut,
                    () = sleep_until(silent_at) => News::Silence,
                };
                match news {
                    News::Updates(updates) => break updates,
                    News::ClientLeft => return false,
                    News::Cut => break Err(draining()),
                    News::Silence => self.writer.keep_alive(&mut self.out),
                }
                if !self.wire.send(&mut self.out) {
                    return false;
                }
            };
        }
    }
}
