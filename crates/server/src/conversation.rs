//! What is asked: messages and how to answer them.

use engine::{Drafting, Sampling};
use serde_json::{Map, Value};
use text::{Grammar, LateSystem, Message, Tool};

/// A chat.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    /// The messages so far, oldest first; at least one.
    pub messages: Vec<Message>,
    /// Functions the model may call.
    pub tools: Vec<Tool>,
}

/// How to render the chat, draw the tokens and read the reply.
#[derive(Clone, Debug)]
pub struct Options {
    /// What becomes of a system message that does not lead.
    pub late_system: LateSystem,
    /// Thinking on or off; `None` leaves it to the template.
    pub thinking: Option<bool>,
    /// Whether old reasoning stays in the prompt; `None` leaves it to the template.
    pub preserve_thinking: Option<bool>,
    /// Further variables for the template.
    pub template_kwargs: Map<String, Value>,
    /// Seconds since 1970 (UTC), for templates that tell the date.
    pub now_seconds: i64,
    /// How to draw.
    pub sampling: Sampling,
    /// Most tokens of the reply; `None` is the rest of the context.
    pub max_tokens: Option<usize>,
    /// Texts that end the content.
    pub stop: Vec<String>,
    /// Whether the matched stop string stays in the content.
    pub include_stop: bool,
    /// Leave reasoning and its tags in the content.
    pub raw_reasoning: bool,
    /// Whether a reply may have more than one tool call; if not, the first complete call ends it.
    pub parallel_tool_calls: bool,
    /// Drafting.
    pub drafting: Drafting,
    /// What must follow the reasoning.
    pub grammar: Option<Grammar>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            late_system: LateSystem::default(),
            thinking: None,
            preserve_thinking: None,
            template_kwargs: Map::new(),
            now_seconds: 0,
            sampling: Sampling::default(),
            max_tokens: None,
            stop: Vec::new(),
            include_stop: false,
            raw_reasoning: false,
            parallel_tool_calls: true,
            drafting: Drafting::default(),
            grammar: None,
        }
    }
}
