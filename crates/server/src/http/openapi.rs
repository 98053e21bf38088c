//! The OpenAPI document, made from the types that are read and written.

use axum::response::Response;
use utoipa::OpenApi;

use super::app::json;
use super::{chat, completions, messages, ollama, responses, routes};

#[derive(OpenApi)]
#[openapi(
    info(title = "Clary", description = "Inference of one model of the Qwen3.5-MoE family."),
    paths(
        chat::post,
        completions::post,
        messages::post,
        messages::count,
        responses::post,
        ollama::chat,
        ollama::generate,
        ollama::version,
        ollama::tags,
        ollama::ps,
        ollama::show,
        routes::models::list,
        routes::models::one,
        routes::tokens::tokenize,
        routes::tokens::detokenize,
        routes::tokens::info,
        routes::tokens::apply_template,
        routes::health::health,
        routes::health::ready,
        routes::metrics::metrics,
        routes::slots::slots,
        routes::props::props,
        routes::props::version,
        document,
    ),
    components(schemas(chat::ChatChunk, chat::DryRun))
)]
struct Document;

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "Operation", responses((status = 200, body = Object)))]
pub(crate) async fn document() -> Response {
    json(&Document::openapi())
}
