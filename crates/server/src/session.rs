//! A model folder's text side and a running engine, joined.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use engine::{Handle, Mask, Request};
use text::{ChatTemplate, GenerationDefaults, History, RenderOptions, Rendered, ReplyOptions};
use text::{Segment, TextError, Tokenizer, Tool};

use crate::constraint::{GrammarMask, Reasoning};
use crate::stream::Stream;
use crate::{Conversation, Options, ReaderOptions, ReplyReader, ServeError};

/// What a model folder says about text.
#[derive(Clone, Debug)]
pub struct TextSide {
    /// Strings to ids and back.
    pub tokenizer: Tokenizer,
    /// Chats to prompts.
    pub template: ChatTemplate,
    /// Sampling for requests that do not say, and the end tokens.
    pub defaults: GenerationDefaults,
}

impl TextSide {
    /// Reads the tokenizer, template and generation files of a model folder.
    pub fn open(dir: &Path) -> Result<Self, TextError> {
        Ok(Self {
            tokenizer: Tokenizer::open(dir)?,
            template: ChatTemplate::open(dir)?,
            defaults: GenerationDefaults::open(dir)?,
        })
    }

    /// Renders a chat and encodes it.
    pub fn render(&self, conversation: Conversation, options: &Options) -> Result<Rendered, ServeError> {
        let history = History::new(conversation.messages, options.late_system)?;
        if let Some(image) = history.images().first() {
            return Err(ServeError::NoVision { path: image.path.clone() });
        }
        let render = RenderOptions {
            tools: conversation.tools,
            enable_thinking: options.thinking,
            preserve_thinking: options.preserve_thinking,
            template_kwargs: options.template_kwargs.clone(),
            now_seconds: options.now_seconds,
            ..RenderOptions::default()
        };
        Ok(self.template.render(&self.tokenizer, &history, &render)?)
    }

    /// A reader of the reply to a rendered chat.
    fn reader(
        &self,
        rendered: &Rendered,
        tools: Arc<[Tool]>,
        options: &Options,
    ) -> Result<ReplyReader, ServeError> {
        let stop_ids: BTreeSet<u32> = options.sampling.stop_ids.iter().copied().collect();
        let mut end_ids = stop_ids.clone();
        if !options.sampling.ignore_eos {
            end_ids.extend(&self.defaults.stop_ids);
        }
        let reply =
            ReplyOptions { in_reasoning: rendered.in_reasoning, raw_reasoning: options.raw_reasoning, tools };
        let reader = ReaderOptions {
            reply,
            end_ids,
            stop_ids,
            stop: options.stop.clone(),
            include_stop: options.include_stop,
            single_call: !options.parallel_tool_calls,
            stop_in_reasoning: false,
        };
        Ok(ReplyReader::new(&self.tokenizer, reader)?)
    }
}

/// A running model that speaks text. Cheap to clone.
#[derive(Clone)]
pub struct Session {
    text: TextSide,
    engine: Handle,
    reasoning: Reasoning,
}

impl Session {
    /// Joins a folder's text side with an engine that runs its model.
    pub fn new(text: TextSide, engine: Handle) -> Self {
        Self { text, engine, reasoning: Reasoning::default() }
    }

    /// The text side.
    pub fn text(&self) -> &TextSide {
        &self.text
    }

    /// The engine.
    pub fn engine(&self) -> &Handle {
        &self.engine
    }

    /// The mask of a reply: see [`Reasoning::mask`].
    pub(crate) fn after_reasoning(
        &self,
        in_reasoning: bool,
        budget: Option<usize>,
        close: bool,
        inner: Option<Box<dyn Mask>>,
    ) -> Result<Option<Box<dyn Mask>>, TextError> {
        self.reasoning.mask(&self.text, in_reasoning, budget, close, inner)
    }

    /// Renders the chat and starts a reply. Its pieces come from the returned stream; dropping that cancels it.
    pub fn start(&self, conversation: Conversation, options: &Options) -> Result<Stream, ServeError> {
        let tools: Arc<[Tool]> = conversation.tools.as_slice().into();
        let rendered = self.text.render(conversation, options)?;
        let reader = self.text.reader(&rendered, tools, options)?;
        let marks = message_ends(&rendered);
        let grammar = options.grammar.as_ref();
        let grammar = grammar.map(|grammar| Box::new(GrammarMask::new(grammar)) as Box<dyn Mask>);
        let mask = self.after_reasoning(rendered.in_reasoning, None, false, grammar)?;
        let mut request = Request::new(rendered.ids, options.max_tokens.unwrap_or(usize::MAX));
        request.sampling = options.sampling.clone();
        request.drafting = options.drafting;
        request.marks = marks;
        request.mask = mask;
        let (sink, events) = Stream::channel();
        let ticket = self.engine.submit(request, sink)?;
        Ok(Stream::new(reader, events, ticket, rendered.notes))
    }
}

/// Closes every message in the family's templates.
const MESSAGE_END: &str = "<|im_end|>";

/// Prompt lengths at which a message ends: later prompts are likely to share all up to there.
pub(crate) fn message_ends(rendered: &Rendered) -> Vec<usize> {
    let is_end =
        |segment: &&Segment| segment.control.is_some() && &rendered.text[segment.text.clone()] == MESSAGE_END;
    rendered.segments.iter().filter(is_end).map(|segment| segment.ids.end).collect()
}
