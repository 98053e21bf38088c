//! The HTTP side: OpenAI's, Anthropic's and Ollama's words over one [`crate::Session`] (`docs/api.md` 2 to
//! 7).
//!
//! [`Settings::new`] gives options their meaning, [`App`] is what requests share, [`app`] is the application
//! as a function, and [`serve`] puts it on a socket. A request is read strictly ([`ChatRequest`] and its
//! kin), prepared beside the async threads (template, tokenizer, constraint), run as one [`engine::Request`]
//! per prompt, and written whole or as a stream from the same updates. Dropping any of it on the way, which
//! is what happens when a client leaves, cancels the rest.

mod app;
mod asked;
mod audit;
mod auth;
mod board;
mod body;
mod chat;
mod completions;
mod constraint;
mod drain;
mod error;
mod fields;
mod flow;
mod host;
mod ids;
mod json;
mod limits;
mod listen;
mod log;
mod messages;
mod metrics;
mod ollama;
mod openapi;
mod page;
mod params;
mod receipt;
mod record;
mod rerun;
mod responses;
mod routes;
mod running;
mod scores;
mod settings;
mod state;
mod track;

pub use app::app;
pub use auth::Keys;
pub use board::{SlotState, SlotView};
pub use chat::{
    CacheView, ChatChoice, ChatChunk, ChatReply, ChatRequest, ChatUsage, ChunkChoice, Clary,
    CompletionDetails, Delta, DeltaCall, DeltaFunction, DraftView, DryRun, Logprobs, MissView, NoteView,
    PromptDetails, ReasoningFormat, ReplyCall, ReplyFunction, ReplyMessage, StopWord, Timings, ToolChoice,
};
pub use completions::{Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, TopMap};
pub use constraint::{Compiled, Grammar, Wish, Wishes};
pub use drain::{Drain, Phase};
pub use error::{ApiError, Code, Dialect, QUOTE_CHARS_MAX, quoted};
pub use host::{Hosts, Origins};
pub use limits::*;
pub use listen::{Listener, serve};
pub use messages::{Block, MessageReply, MessageUsage, MessagesRequest, TokenCount};
pub use params::{ClaryWish, Params, Speculative, StreamOptions};
pub use receipt::{Receipt, ResolvedSampling, ids_digest};
pub use record::{BUNDLE_EXTENSION, BUNDLE_VERSION, Bundle, RECORD_BYTES_MAX, ServerSettings};
pub use rerun::{Rerun, RerunError, rerun};
pub use responses::ResponsesRequest;
pub use scores::{TokenLogprob, TopLogprob};
pub use settings::{Bind, ClaryFields, SamplingDefaults, SamplingSource, Settings, SettingsError, Typed};
pub use state::{App, ModelInfo, Served, VERSION};
