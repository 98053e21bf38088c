//! Strings and token ids, both ways.
//!
//! Into the model: [`Message`]s and [`Tool`]s of a request become a [`History`] by the API's rules, a
//! [`ChatTemplate`] renders it, and the [`Tokenizer`] makes ids of it ([`Rendered`]). Out of the model: a
//! [`Detokenizer`] turns ids into whole characters, a [`ReplyParser`] splits them into reasoning, content and
//! tool calls, and [`StopStrings`] ends the content. A [`GrammarCompiler`]
//! says which tokens keep a reply in a wanted form. Every step out is incremental, and cutting its input
//! into other pieces never changes the joined result.
//!
//! This crate knows no tensors, no engine and no HTTP. It reads files of a model folder and does no other
//! I/O.

mod control;
mod detokenizer;
mod error;
mod files;
mod generation;
mod grammar;
mod history;
mod marks;
mod message;
mod namespaces;
mod nesting;
mod python;
mod render;
mod reply;
mod stop;
mod template;
mod tokenizer;

pub use control::ControlToken;
pub use detokenizer::{Delta, Detokenizer, HELD_BYTES_MAX};
pub use error::{Fault, Note, RequestError, TextError};
pub use generation::{CONFIG_BYTES_MAX, GenerationDefaults, STOP_IDS_MAX};
pub use grammar::{
    Answer, CONSTRAINT_CHOICES_MAX, Calls, Grammar, GrammarCompiler, GrammarError, GrammarFault, Loosened,
    Matcher, NotAllowed, REGEX_BYTES_MAX, SCHEMA_DEPTH_MAX,
};
pub use history::{History, HistoryImage, LATE_SYSTEM_MARK, LateSystem, OMITTED_IMAGE};
pub use message::{
    Content, Image, MESSAGES_MAX, Message, PARTS_MAX, Part, Role, SCHEMA_BYTES_MAX, TOOL_NAME_MAX,
    TOOLS_BYTES_MAX, TOOLS_MAX, Tool, ToolCall, is_tool_name,
};
pub use render::{IMAGE_PAD, RenderOptions, Rendered, Segment, THINK_CLOSE, THINK_OPEN};
pub use reply::{CALL_BYTES_MAX, Call, End, Piece, Reply, ReplyOptions, ReplyParser, call_id};
pub use stop::{STOP_BYTES_MAX, STOPS_MAX, StopStep, StopStrings};
pub use template::{
    ChatTemplate, RENDER_BYTES_MAX, RENDER_FUEL, RENDER_FUEL_MAX, RENDER_FUEL_PER_VALUE, RENDER_TIME_MAX,
    TEMPLATE_BYTES_MAX,
};
pub use tokenizer::{PromptMax, Specials, TOKEN_IDS_MAX, TOKENIZER_BYTES_MAX, Tokenizer};
