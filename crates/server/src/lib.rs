//! Joins the engine and text: a conversation in, a parsed reply out.
//!
//! A [`Session`] holds a model folder's tokenizer, template and defaults ([`TextSide`]) and a running engine.
//! [`Session::start`] renders a [`Conversation`], submits it and returns a [`Stream`]: pieces of reasoning,
//! content and tool calls as they come, then one [`Outcome`]. The way back is a [`ReplyReader`], a plain
//! function of the token ids, so that a streamed reply equals a whole one however its tokens were grouped.

mod constraint;
mod conversation;
mod error;
pub mod http;
mod links;
mod outcome;
mod pictures;
mod reader;
mod session;
mod stream;

pub use conversation::{Conversation, Options};
pub use error::ServeError;
pub use links::LinkError;
pub use outcome::{Finish, Outcome, StopReason, Usage};
pub use pictures::{
    LOW_DETAIL_TOKENS, Measured, PICTURES_MAX, PIXELS_MAX, PictureFault, PictureProblem, Vision,
    VisionSettings,
};
pub use reader::{ReaderOptions, ReplyReader};
pub use session::{Session, TextSide};
pub use stream::{Stream, Update};
