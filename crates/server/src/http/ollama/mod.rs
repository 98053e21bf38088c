//! `/api/…`: Ollama's dialect.

mod reply;
mod request;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::app::json as json_response;
use super::asked::{Asked, Incoming};
use super::chat::{ChatRequest, Facts, Head, prepare};
use super::completions::{self, CompletionRequest};
use super::error::{ApiError, Code};
use super::running::Job;
use super::state::{App, Served, VERSION, now_seconds};
use super::{body, flow};
use reply::{OllamaWriter, Route, rfc3339};

/// Replies to a chat.
#[utoipa::path(post, path = "/api/chat", tag = "Ollama", request_body = Object,
    responses((status = 200, body = Object, description = "A line for each piece, or one object")))]
pub(crate) async fn chat(Incoming(asked): Incoming) -> Result<Response, ApiError> {
    answer(asked, Route::Chat).await
}

/// Replies to a text.
#[utoipa::path(post, path = "/api/generate", tag = "Ollama", request_body = Object,
    responses((status = 200, body = Object, description = "A line for each piece, or one object")))]
pub(crate) async fn generate(Incoming(asked): Incoming) -> Result<Response, ApiError> {
    answer(asked, Route::Generate).await
}

async fn answer(asked: Arc<Asked>, route: Route) -> Result<Response, ApiError> {
    let turn = asked.turn()?;
    let prepared = asked.prepare(move |asked| prepared(asked, route)).await?;
    let Some((job, facts)) = prepared else { return Ok(json_response(&loaded(&asked.app, route))) };
    let (running, head) = Head::submit(asked, turn, job, facts, "ollama-")?;
    let is_stream = head.facts.params.stream;
    let writer = OllamaWriter::new(head, route);
    flow::answer(running, writer, is_stream).await
}

/// A job, or nothing where the client only wants the model loaded.
fn prepared(asked: &Asked, route: Route) -> Result<Option<(Job, Facts)>, ApiError> {
    let (map, served) = (asked.object()?, &asked.served);
    let translated = match route {
        Route::Chat => request::chat(map, served)?,
        Route::Generate => request::generate(map, served)?,
    };
    if translated.is_empty {
        return Ok(None);
    }
    let (mut job, facts) = if translated.is_raw {
        completions::prepare(asked, CompletionRequest::read(translated.map, served)?)?.job()
    } else {
        let read =
            ChatRequest::read(translated.map, served).map_err(|error| translated.places.located(error))?;
        let prepared = translated.places.prepared(prepare(asked, read))?;
        (prepared.job, prepared.facts)
    };
    job.notes.extend(translated.notes);
    Ok(Some((job, facts)))
}

/// The answer to a client that only wants the model loaded, which it is.
fn loaded(app: &App, route: Route) -> Value {
    let mut line =
        json!({"model": app.id(), "created_at": rfc3339(now_seconds()), "done": true, "done_reason": "load"});
    match route {
        Route::Chat => line["message"] = json!({"role": "assistant", "content": ""}),
        Route::Generate => line["response"] = "".into(),
    }
    line
}

/// Version of this program.
#[utoipa::path(get, path = "/api/version", tag = "Ollama", responses((status = 200, body = Object)))]
pub(crate) async fn version() -> Response {
    json_response(&json!({"version": VERSION}))
}

/// The served model as the only installed one.
#[utoipa::path(get, path = "/api/tags", tag = "Ollama", responses((status = 200, body = Object)))]
pub(crate) async fn tags(State(app): State<App>) -> Result<Response, ApiError> {
    let served = app.loaded()?;
    let mut model = model(&app, &served);
    model["modified_at"] = rfc3339(served.info.created).into();
    Ok(json_response(&json!({"models": [model]})))
}

/// The served model as the only loaded one.
#[utoipa::path(get, path = "/api/ps", tag = "Ollama", responses((status = 200, body = Object)))]
pub(crate) async fn ps(State(app): State<App>) -> Result<Response, ApiError> {
    let served = app.loaded()?;
    let mut model = model(&app, &served);
    model["size_vram"] = if served.info.backend == "cpu" { 0 } else { served.info.size }.into();
    // It is never unloaded; clients expect a date.
    model["expires_at"] = "2318-01-01T00:00:00Z".into();
    model["context_length"] = served.context().into();
    Ok(json_response(&json!({"models": [model]})))
}

/// Facts of the served model, whatever name is asked for.
#[utoipa::path(post, path = "/api/show", tag = "Ollama", request_body = Object,
    responses((status = 200, body = Object)))]
pub(crate) async fn show(
    State(app): State<App>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let served = app.loaded()?;
    let headers = body::assume_json(headers);
    super::json::object(&body::read(&headers, body, &app.settings().limits).await?)?;
    let facts = Map::from_iter([
        ("general.architecture".to_owned(), FAMILY.into()),
        ("general.parameter_count".to_owned(), served.info.n_params.into()),
        (format!("{FAMILY}.context_length"), served.context().into()),
    ]);
    let mut capabilities = vec!["completion", "tools", "thinking"];
    if served.session.vision().is_some() {
        capabilities.push("vision");
    }
    Ok(json_response(&json!({
        "modelfile": "", "parameters": "", "template": served.session.text().template.source(),
        "details": details(), "model_info": facts, "capabilities": capabilities,
        "modified_at": rfc3339(served.info.created),
    })))
}

/// Models are not managed over HTTP.
pub(crate) async fn not_managed() -> ApiError {
    ApiError::new(
        Code::NotImplemented,
        "models are managed on the command line; this route is not implemented",
    )
}

const FAMILY: &str = "qwen3_5_moe";

fn details() -> Value {
    json!({"parent_model": "", "format": "safetensors", "family": FAMILY, "families": [FAMILY],
        "parameter_size": "", "quantization_level": ""})
}

/// The digest is that of the tokenizer, the only one known while serving.
fn model(app: &App, served: &Served) -> Value {
    json!({"name": app.id(), "model": app.id(), "size": served.info.size,
        "digest": served.session.text().tokenizer.digest(), "details": details()})
}
