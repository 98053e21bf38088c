//! Whether the process lives, and whether it can answer now.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use super::super::app::json;
use super::super::drain::Phase;
use super::super::state::App;

/// `GET /health`.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct Health {
    /// `ok` or `loading`.
    pub status: &'static str,
    /// Share of the model that is loaded, while it is loading.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<f32>,
}

/// `GET /ready`.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct Ready {
    /// Why not; absent if requests can be served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
    /// Age of the last step while there is work; 0 without.
    pub last_step_age_ms: u64,
    /// Age of the last token while there is work; 0 without.
    pub last_token_age_ms: u64,
    /// Choices in slots.
    pub running: usize,
    /// Choices that wait.
    pub queued: usize,
}

/// Whether the process lives.
#[utoipa::path(get, path = "/health", tag = "Operation",
    responses((status = 200, body = Health), (status = 503, body = Health, description = "Loading")))]
pub(crate) async fn health(State(app): State<App>) -> Response {
    if app.model().is_some() {
        return json(&Health { status: "ok", progress: None });
    }
    unavailable(json(&Health { status: "loading", progress: Some(app.progress()) }))
}

/// Whether a request would be answered now.
#[utoipa::path(get, path = "/ready", tag = "Operation",
    responses((status = 200, body = Ready), (status = 503, body = Ready)))]
pub(crate) async fn ready(State(app): State<App>) -> Response {
    let engine = app.model().map(|served| served.session.engine());
    let reason = match engine {
        _ if app.drain().phase() > Phase::Open => Some("draining"),
        None => Some("loading"),
        Some(engine) if engine.stopped().is_some() => Some("faulted"),
        Some(_) => app.stalled().map(|_| "stalled"),
    };
    app.tell_readiness(reason);
    let status = engine.map(|engine| engine.status()).unwrap_or_default();
    let step_age = engine.and_then(|engine| engine.step_age());
    let token_age = app.model().filter(|_| step_age.is_some()).map(|served| served.board.token_age());
    let response = json(&Ready {
        reason,
        last_step_age_ms: step_age.unwrap_or_default().as_millis() as u64,
        last_token_age_ms: token_age.unwrap_or_default().as_millis() as u64,
        running: status.prefilling + status.decoding,
        queued: status.queued,
    });
    if reason.is_some() { unavailable(response) } else { response }
}

fn unavailable(mut response: Response) -> Response {
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response
}
