//! What the slots are doing.

use axum::extract::State;
use axum::response::Response;

use super::super::app::json;
use super::super::board::SlotView;
use super::super::error::ApiError;
use super::super::state::App;

/// All slots. No text of prompts or replies.
#[utoipa::path(get, path = "/slots", tag = "Operation", responses((status = 200, body = Vec<SlotView>)))]
pub(crate) async fn slots(State(app): State<App>) -> Result<Response, ApiError> {
    let served = app.loaded()?;
    let status = served.session.engine().status();
    Ok(json(&served.board.view(served.context(), &status.encoding)))
}
