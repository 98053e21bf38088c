//! Routes of other servers that this one does not have.

use super::super::error::{ApiError, Code};

/// Says so, with a status that clients tell from a mistyped path.
pub(crate) async fn not_implemented() -> ApiError {
    ApiError::new(Code::NotImplemented, "this server generates text; this route is not implemented")
}
