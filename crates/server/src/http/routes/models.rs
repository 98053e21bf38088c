//! The served model.

use axum::extract::{Path, State};
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use super::super::app::json;
use super::super::error::{ApiError, Code, quoted};
use super::super::state::{App, Served};

/// `GET /v1/models`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ModelList {
    /// `list`.
    pub object: &'static str,
    /// One model.
    pub data: [ModelView; 1],
}

/// A model.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ModelView {
    /// The served id.
    pub id: String,
    /// `model`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// `clary`.
    pub owned_by: &'static str,
    /// Tokens that one request can use.
    pub max_model_len: usize,
    /// The same.
    pub context_length: usize,
    /// Sizes.
    pub meta: ModelMeta,
    /// What can be asked of it.
    pub capabilities: Vec<&'static str>,
    /// Further names.
    pub aliases: Vec<String>,
}

/// Sizes of a model.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct ModelMeta {
    /// Tokens that one request can use.
    pub n_ctx: usize,
    /// Positions it was trained for.
    pub n_ctx_train: usize,
    /// Token ids.
    pub n_vocab: usize,
    /// Parameters.
    pub n_params: u64,
    /// Bytes of the weights.
    pub size: u64,
}

/// The served model in a list.
#[utoipa::path(get, path = "/v1/models", tag = "OpenAI", responses((status = 200, body = ModelList)))]
pub(crate) async fn list(State(app): State<App>) -> Result<Response, ApiError> {
    Ok(json(&ModelList { object: "list", data: [view(&app, &*app.loaded()?)] }))
}

/// The served model by its id or an alias.
#[utoipa::path(get, path = "/v1/models/{id}", tag = "OpenAI", params(("id" = String, Path)),
    responses((status = 200, body = ModelView), (status = 404)))]
pub(crate) async fn one(State(app): State<App>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let served = app.loaded()?;
    if id != app.id() && !app.settings().aliases.contains(&id) {
        return Err(ApiError::new(Code::ModelNotFound, format!("no model {}", quoted(&id))));
    }
    Ok(json(&view(&app, &served)))
}

fn view(app: &App, served: &Served) -> ModelView {
    let mut capabilities = vec!["chat", "completion", "tools", "thinking"];
    if served.session.vision().is_some() {
        capabilities.push("vision");
    }
    if served.grammar.is_some() {
        capabilities.push("structured");
    }
    ModelView {
        id: app.id().to_owned(),
        object: "model",
        created: served.info.created,
        owned_by: "clary",
        max_model_len: served.context(),
        context_length: served.context(),
        meta: ModelMeta {
            n_ctx: served.context(),
            n_ctx_train: served.info.n_ctx_train,
            n_vocab: served.vocabulary(),
            n_params: served.info.n_params,
            size: served.info.size,
        },
        capabilities,
        aliases: app.settings().aliases.clone(),
    }
}
