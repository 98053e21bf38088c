//! `POST /v1/responses`: OpenAI's newer dialect, stateless.

mod reply;
mod request;

use axum::extract::Path;
use axum::response::Response;

use super::asked::Incoming;
use super::chat::{Head, Prepared, prepare};
use super::error::{ApiError, Code, quoted};
use super::flow;

pub use request::ResponsesRequest;

/// Replies to items.
#[utoipa::path(post, path = "/v1/responses", tag = "OpenAI", request_body = ResponsesRequest,
    responses((status = 200, body = Object, description = "`response`, or its events if streamed")))]
pub(crate) async fn post(Incoming(asked): Incoming) -> Result<Response, ApiError> {
    let turn = asked.turn()?;
    let prepared = asked.prepare(|asked| {
        let read = request::read(asked.object()?, &asked.served)?;
        let prepared = read.places.prepared(prepare(asked, read.chat))?;
        Ok((prepared, read.custom, read.echo))
    });
    let (Prepared { job, facts }, custom, echo) = prepared.await?;
    let (running, head) = Head::submit(asked, turn, job, facts, "resp_")?;
    let is_stream = head.facts.params.stream;
    let writer = reply::ResponseWriter::new(head, custom, echo);
    flow::answer(running, writer, is_stream).await
}

/// Replies are not kept.
pub(crate) async fn by_id(Path(id): Path<String>) -> ApiError {
    ApiError::new(Code::NotFound, format!("no response {}: this server keeps none", quoted(&id)))
}
