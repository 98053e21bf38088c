//! The opening of every route that reads a body: the model, the bytes, the caller's turn.

use std::sync::Arc;

use axum::body::Body;
use axum::http::HeaderMap;
use serde_json::{Map, Value};

use super::app::Context;
use super::auth::Turn;
use super::body;
use super::error::ApiError;
use super::json;
use super::state::{App, Served};

/// A request as it came.
pub(crate) struct Asked {
    pub(crate) app: App,
    pub(crate) served: Arc<Served>,
    pub(crate) context: Context,
    bytes: Vec<u8>,
}

impl Asked {
    /// Reads a body. Refused before that where there is no model to answer.
    pub(crate) async fn read(
        app: App,
        context: Context,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<Arc<Self>, ApiError> {
        let served = app.served()?;
        let bytes = body::read(headers, body, &app.settings().limits).await?;
        Ok(Arc::new(Self { app, served, context, bytes }))
    }

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
