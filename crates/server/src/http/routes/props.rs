//! Facts of the server and its version.

use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use super::super::app::json;
use super::super::error::ApiError;
use super::super::state::{App, VERSION};

/// `GET /props`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Props {
    /// Slots.
    pub total_slots: usize,
    /// Defaults of requests.
    pub default_generation_settings: GenerationSettings,
    /// The template's text.
    pub chat_template: String,
    /// What can be read.
    pub modalities: Modalities,
    /// Version and build.
    pub build_info: String,
    /// The served id.
    pub model_alias: String,
    /// Ids of the exactness contracts that hold.
    pub contracts: Vec<&'static str>,
}

/// Defaults of requests.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct GenerationSettings {
    /// Tokens that one request can use.
    pub n_ctx: usize,
    /// Sampling.
    pub params: SamplingView,
}

/// Sampling of requests that do not say.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct SamplingView {
    /// 0 is greedy.
    pub temperature: f32,
    /// Share of probability kept.
    pub top_p: f32,
    /// Tokens kept; 0 is all.
    pub top_k: u32,
    /// Least share of the best probability kept.
    pub min_p: f32,
    /// Over prompt and generated tokens.
    pub repetition_penalty: f32,
}

/// What can be read.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct Modalities {
    /// Pictures.
    pub vision: bool,
}

/// `GET /version`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct VersionView {
    /// Of the program.
    pub version: &'static str,
    /// Commit it was built from.
    pub build: String,
    /// `cpu`, `cuda` or `xpu`.
    pub backend: String,
}

/// Facts of the server.
#[utoipa::path(get, path = "/props", tag = "Operation", responses((status = 200, body = Props)))]
pub(crate) async fn props(State(app): State<App>) -> Result<Response, ApiError> {
    let served = app.loaded()?;
    let sampling = served.sampling;
    Ok(json(&Props {
        total_slots: served.session.engine().limits().slots,
        default_generation_settings: GenerationSettings {
            n_ctx: served.context(),
            params: SamplingView {
                temperature: sampling.temperature,
                top_p: sampling.top_p,
                top_k: sampling.top_k,
                min_p: sampling.min_p,
                repetition_penalty: sampling.repetition_penalty,
            },
        },
        chat_template: served.session.text().template.source().to_owned(),
        modalities: Modalities { vision: served.session.vision().is_some() },
        build_info: format!("{VERSION} {}", served.info.build).trim_end().to_owned(),
        model_alias: app.id().to_owned(),
        contracts: served.info.contracts.clone(),
    }))
}

/// The program's version.
#[utoipa::path(get, path = "/version", tag = "Operation", responses((status = 200, body = VersionView)))]
pub(crate) async fn version(State(app): State<App>) -> Result<Response, ApiError> {
    let info = app.loaded()?.info.clone();
    Ok(json(&VersionView { version: VERSION, build: info.build, backend: info.backend }))
}
