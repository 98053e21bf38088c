//! Why a reply could not be started.

use engine::Refusal;
use text::{RequestError, TextError};

use crate::PictureFault;

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
    /// A picture cannot be shown.
    #[error(transparent)]
    Picture(#[from] PictureFault),
}
