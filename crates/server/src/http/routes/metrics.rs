//! Numbers for Prometheus.

use axum::extract::State;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

use super::super::state::App;

const TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All numbers.
#[utoipa::path(get, path = "/metrics", tag = "Operation",
    responses((status = 200, body = String, content_type = "application/openmetrics-text")))]
pub(crate) async fn metrics(State(app): State<App>) -> Response {
    let mut response = app.metrics().text(app.reading().as_ref()).into_response();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(TYPE));
    response
}
