//! Why a reply could not be started.

use engine::Refusal;
use text::{RequestError, TextError};

/// Why a conversation did not become a running reply.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The chat could not be rendered or encoded.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A field of the request is wrong.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The engine did not take it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The chat has pictures, and this model runs without its vision tower.
    #[error("{path}: pictures are not supported by this model as it is loaded; send text only")]
    NoVision {
        /// Path of the first picture.
        path: String,
    },
}
