//! The application as one function: routes, and what stands around all of them.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_REQUEST_HEADERS, CONNECTION, CONTENT_TYPE, VARY,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use serde::Serialize;

use super::auth::Caller;
use super::error::{ApiError, Code, Dialect, written};
use super::flow::Hangup;
use super::limits::Limits;
use super::log::Entry;
use super::routes::{foreign, health, metrics, models, props, slots, tokens};
use super::state::{App, VERSION};
use super::{body, chat, completions, ids, messages, ollama, openapi, page, responses};

/// What a request's handlers know of it beside its own words.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(crate) request_id: String,
    /// Path of the request.
    pub(crate) route: Arc<str>,
    pub(crate) caller: Caller,
    pub(crate) hangup: Hangup,
    /// The request's line in the log.
    pub(crate) log: Arc<Entry>,
}

/// Paths that need no key: probes have none, and neither has a browser that fetches the page.
fn is_open(path: &str, has_page: bool) -> bool {
    matches!(path, "/health" | "/ready") || has_page && page::is_asset(path)
}

/// Routes that other servers have.
const FOREIGN_ROUTES: [&str; 7] = [
    "/v1/embeddings",
    "/v1/rerank",
    "/infill",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/generations",
];

/// The whole application: what a listener serves and what tests call.
pub fn app(state: App) -> Router {
    let mut router = Router::new()
        .route("/v1/chat/completions", post(chat::post))
        .route("/v1/completions", post(completions::post))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/tokenizer_info", get(tokens::info))
        .route("/apply-template", post(tokens::apply_template))
        .route("/health", get(health::health))
        .route("/ready", get(health::ready))
        .route("/metrics", get(metrics::metrics))
        .route("/slots", get(slots::slots))
        .route("/props", get(props::props))
        .route("/version", get(props::version))
        .route("/openapi.json", get(openapi::document));
    if state.settings().anthropic {
        router = router
            .route("/v1/messages", post(messages::post))
            .route("/v1/messages/count_tokens", post(messages::count));
    }
    if state.settings().responses {
        router = router
            .route("/v1/responses", post(responses::post))
            .route("/v1/responses/{id}", get(responses::by_id).delete(responses::by_id));
    }
    if state.settings().ollama {
        router = router
            .route("/api/chat", post(ollama::chat))
            .route("/api/generate", post(ollama::generate))
            .route("/api/version", get(ollama::version))
            .route("/api/tags", get(ollama::tags))
            .route("/api/ps", get(ollama::ps))
            .route("/api/show", post(ollama::show));
        for path in ["/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"] {
            router = router.route(path, any(ollama::not_managed));
        }
    }
    if state.settings().page {
        router = router.merge(page::routes());
    }
    for path in FOREIGN_ROUTES {
        router = router.route(path, any(foreign::not_implemented));
    }
    router
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(state.clone(), counted))
        .layer(from_fn_with_state(state.clone(), admitted))
        .layer(from_fn_with_state(state.clone(), framed))
        .with_state(state)
}

/// JSON of an own type.
pub(crate) fn json(value: &impl Serialize) -> Response {
    let body = serde_json::to_vec(value).expect("own types have a JSON form");
    let mut response = Response::new(Body::from(body));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

async fn not_found(State(app): State<App>, request: Request) -> ApiError {
    page::no_route(request.uri().path(), app.settings().page)
}

async fn wrong_method(request: Request) -> ApiError {
    page::wrong_method(request.uri().path(), request.method())
}

/// Outermost: an id and a version on every response, errors in the dialect of the path.
async fn framed(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let request_id =
        ids::accepted(request.headers().get("x-request-id")).unwrap_or_else(|| ids::made("req_"));
    let dialect = Dialect::of(request.uri().path());
    let hangup = request.extensions().get::<Hangup>().cloned().unwrap_or_default();
    let origin = app.settings().origins.allowed(request.headers());
    let caller = Caller::default();
    let log = Arc::new(Entry::new(&request_id, request.method().as_str()));
    let (route, request_id_) = (request.uri().path().into(), request_id.clone());
    let context = Context { request_id: request_id_, route, caller, hangup, log: log.clone() };
    request.extensions_mut().insert(context);
    let (parts, body) = request.into_parts();
    let (body, rest) = body::Rest::of(body);
    let response = next.run(Request::from_parts(parts, body)).await;
    let code = response.extensions().get::<ApiError>().map(|error| error.code.name());
    if let Some(code) = code {
        app.metrics().rejected(code);
    }
    log.answered(response.status().as_u16(), code);
    let mut response = written(response, dialect, &request_id);
    let headers = response.headers_mut();
    let id = HeaderValue::from_str(&request_id).expect("ids are plain letters");
    if dialect == Dialect::Anthropic {
        headers.insert(HeaderName::from_static("request-id"), id.clone());
    }
    headers.insert(HeaderName::from_static("x-request-id"), id);
    if rest.is_left() {
        // Said, so that clients do not send the next request on a connection that is about to close.
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    headers.insert(HeaderName::from_static("clary-version"), HeaderValue::from_static(VERSION));
    if let Some(origin) = origin {
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(VARY, HeaderValue::from_static("Origin"));
        let told = "x-request-id, request-id, clary-version, retry-after";
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(told));
    }
    response
}

/// Who may come in: header sizes, host, preflights, keys.
async fn admitted(State(app): State<App>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    let settings = app.settings();
    if let Err(error) =
        check_headers(&parts.headers, &settings.limits).and_then(|()| settings.hosts.check(&parts))
    {
        return error.into_response();
    }
    let is_preflight =
        parts.method == Method::OPTIONS && parts.headers.contains_key("access-control-request-method");
    if is_preflight && settings.origins.allowed(&parts.headers).is_some() {
        return preflight(&parts.headers);
    }
    if !is_open(parts.uri.path(), settings.page) {
        match settings.keys.caller(&parts.headers) {
            Ok(caller) => {
                if let Some(context) = parts.extensions.get_mut::<Context>() {
                    context.caller = caller;
                }
            }
            Err(error) => return error.into_response(),
        }
    }
    next.run(Request::from_parts(parts, body)).await
}

fn check_headers(headers: &HeaderMap, limits: &Limits) -> Result<(), ApiError> {
    let lengths = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + ": \r\n".len());
    let (longest, all) = lengths.fold((0, 0), |(longest, all), length| (length.max(longest), all + length));
    if longest > limits.header_line || all > limits.headers {
        let (line, all) = (limits.header_line, limits.headers);
        let message = format!("headers are longer than {line} bytes a line or {all} bytes in all");
        return Err(ApiError::new(Code::HeadersTooLarge, message));
    }
    Ok(())
}

/// A page of an allowed origin may send what it asks to send: clients' own libraries add headers, which mean
/// nothing here and would otherwise keep the browser from asking at all.
fn preflight(asked: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
    let names = "authorization, content-type, x-api-key, x-request-id, anthropic-version, anthropic-beta";
    let wanted = asked.get(ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, wanted.unwrap_or(HeaderValue::from_static(names)));
    response
}

/// Innermost: counts answers by route and status. A request whose client left before the answer counts as
/// 499.
async fn counted(State(app): State<App>, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>();
    let route = path.map_or("none", MatchedPath::as_str).to_owned();
    if let Some(context) = request.extensions().get::<Context>() {
        context.log.route(&route);
    }
    let mut count = Count { app, route, status: 499 };
    let response = next.run(request).await;
    count.status = response.status().as_u16();
    response
}

struct Count {
    app: App,
    route: String,
    status: u16,
}

impl Drop for Count {
    fn drop(&mut self) {
        self.app.metrics().answered(&self.route, self.status);
        self.app.tell_failures();
    }
}
