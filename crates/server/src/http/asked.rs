//! The opening of every route that reads a body: the model, the bytes, the caller's turn.

use std::sync::Arc;

use axum::extract::{FromRequest, Request};
use serde_json::{Map, Value};

use super::app::Context;
use super::auth::Turn;
use super::body;
use super::error::{ApiError, Dialect};
use super::json;
use super::state::{App, Served};

/// A request as it came.
pub(crate) struct Asked {
    pub(crate) app: App,
    pub(crate) served: Arc<Served>,
    pub(crate) context: Context,
    bytes: Vec<u8>,
}

/// A request whose body has been read. Refused before that where there is no model to answer.
pub(crate) struct Incoming(pub(crate) Arc<Asked>);

impl FromRequest<App> for Incoming {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let served = app.served()?;
        let (parts, body) = request.into_parts();
        let context = parts.extensions.get::<Context>().cloned();
        let context = context.expect("the outermost layer gives one to every request");
        let headers = match Dialect::of(parts.uri.path()) {
            Dialect::Ollama => body::assume_json(parts.headers),
            Dialect::OpenAi | Dialect::Anthropic => parts.headers,
        };
        let bytes = body::read(&headers, body, &app.settings().limits).await?;
        Ok(Self(Arc::new(Asked { app: app.clone(), served, context, bytes })))
    }
}

impl Asked {
    /// Takes one of the requests that the caller's key may have running.
    pub(crate) fn turn(&self) -> Result<Turn, ApiError> {
        self.context.caller.turn()
    }

    /// The object in the body.
    pub(crate) fn object(&self) -> Result<Map<String, Value>, ApiError> {
        json::object(&self.bytes)
    }

    /// Runs work on the request beside the async threads.
    pub(crate) async fn prepare<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let asked = self.clone();
        self.app.prepare(move || work(&asked)).await
    }
}
