//! `POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's dialect.

mod blocks;
mod reply;
mod request;

use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use super::app::json;
use super::asked::{Asked, Incoming};
use super::chat::{Head, Prepared, prepare};
use super::error::ApiError;
use super::flow;

pub use reply::{Block, MessageReply, MessageUsage};
pub use request::MessagesRequest;

/// `POST /v1/messages/count_tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct TokenCount {
    /// Of the prompt.
    pub input_tokens: usize,
}

/// Replies to a chat.
#[utoipa::path(post, path = "/v1/messages", tag = "Anthropic", request_body = MessagesRequest,
    responses((status = 200, body = MessageReply)))]
pub(crate) async fn post(Incoming(asked): Incoming) -> Result<Response, ApiError> {
    let turn = asked.turn()?;
    let Prepared { job, facts } = asked.prepare(|asked| prepared(asked, false)).await?;
    let (running, head) = Head::submit(asked, turn, job, facts, "msg_")?;
    let is_stream = head.facts.params.stream;
    let writer = reply::MessageWriter::new(head, running.context().request_id.clone());
    flow::answer(running, writer, is_stream).await
}

/// Counts the tokens that the same request would read.
#[utoipa::path(post, path = "/v1/messages/count_tokens", tag = "Anthropic", request_body = MessagesRequest,
    responses((status = 200, body = TokenCount)))]
pub(crate) async fn count(Incoming(asked): Incoming) -> Result<Response, ApiError> {
    let prepared = asked.prepare(|asked| prepared(asked, true)).await?;
    Ok(json(&TokenCount { input_tokens: prepared.facts.prompt_ids.len() }))
}

fn prepared(asked: &Asked, counting: bool) -> Result<Prepared, ApiError> {
    let read = request::read(asked.object()?, &asked.served, counting)?;
    read.places.prepared(prepare(asked, read.chat))
}
