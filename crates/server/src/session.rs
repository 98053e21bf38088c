//! A model folder's text side and a running engine, joined.

use std::path::Path;
use std::sync::Arc;

use engine::{Handle, Mask, Picture, Refusal, Request};
use text::{ChatTemplate, GenerationDefaults, History, LateSystem, Message, RenderOptions, Rendered};
use text::{ReplyOptions, Segment, TextError, Tokenizer, Tool};

use crate::constraint::{GrammarMask, Reasoning};
use crate::pictures::expand;
use crate::stream::Stream;
use crate::{Conversation, Measured, Options, PictureFault, PictureProblem, ReaderOptions, ReplyReader};
use crate::{ServeError, Vision};

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

    /// Renders a chat and encodes it, with room for its pictures, whose headers `vision` reads.
    pub fn render(
        &self,
        conversation: Conversation,
        options: &Options,
        vision: Option<&Vision>,
    ) -> Result<(Rendered, Vec<Measured>), ServeError> {
        let render = RenderOptions {
            tools: conversation.tools,
            enable_thinking: options.thinking,
            preserve_thinking: options.preserve_thinking,
            template_kwargs: options.template_kwargs.clone(),
            now_seconds: options.now_seconds,
            ..RenderOptions::default()
        };
        self.rendered(conversation.messages, options.late_system, &render, vision)
    }

    /// The same in the template's own terms.
    pub(crate) fn rendered(
        &self,
        messages: Vec<Message>,
        late_system: LateSystem,
        options: &RenderOptions,
        vision: Option<&Vision>,
    ) -> Result<(Rendered, Vec<Measured>), ServeError> {
        let mut history = History::new(messages, late_system)?;
        let pictures = measure(vision, &mut history)?;
        let mut rendered = self.template.render(&self.tokenizer, &history, options)?;
        expand(&mut rendered, &pictures);
        Ok((rendered, pictures))
    }

    /// A reader of the reply to a rendered chat.
    fn reader(
        &self,
        rendered: &Rendered,
        tools: Arc<[Tool]>,
        options: &Options,
    ) -> Result<ReplyReader, ServeError> {
        let reply =
            ReplyOptions { in_reasoning: rendered.in_reasoning, raw_reasoning: options.raw_reasoning, tools };
        let sampling = &options.sampling;
        let reader = ReaderOptions {
            stop: options.stop.clone(),
            include_stop: options.include_stop,
            single_call: !options.parallel_tool_calls,
            ..ReaderOptions::new(reply, &self.defaults, &sampling.stop_ids, sampling.ignore_eos)
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
    vision: Option<Arc<Vision>>,
}

/// Headers of a chat's pictures. Without vision those of tools are left out with a note, those of users are
/// refused.
fn measure(vision: Option<&Vision>, history: &mut History) -> Result<Vec<Measured>, PictureFault> {
    let Some(vision) = vision else {
        history.omit_tool_images();
        return match history.images().first() {
            None => Ok(Vec::new()),
            Some(image) => Err(PictureFault { path: image.path.clone(), problem: PictureProblem::NoVision }),
        };
    };
    vision.measure(history.images())
}

impl Session {
    /// Joins a folder's text side with an engine that runs its model.
    pub fn new(text: TextSide, engine: Handle) -> Self {
        Self { text, engine, reasoning: Reasoning::default(), vision: None }
    }

    /// The same where the engine's model takes pictures.
    pub fn with_vision(self, vision: Vision) -> Self {
        Self { vision: Some(Arc::new(vision)), ..self }
    }

    /// What reads pictures, if the model takes any.
    pub fn vision(&self) -> Option<&Vision> {
        self.vision.as_deref()
    }

    /// Decodes measured pictures. Gives them with their first places in the prompt.
    pub(crate) fn pictures(
        &self,
        rendered: &Rendered,
        measured: Vec<Measured>,
    ) -> Result<Vec<(usize, Arc<Picture>)>, PictureFault> {
        let Some(vision) = self.vision() else { return Ok(Vec::new()) };
        let pictures = vision.prepare(measured)?;
        Ok(rendered.image_positions.iter().copied().zip(pictures).collect())
    }

    /// A request of these ids, with pictures at their places.
    pub(crate) fn request(
        &self,
        ids: Vec<u32>,
        max_tokens: usize,
        pictures: Vec<(usize, Arc<Picture>)>,
    ) -> Request {
        let merge = self.engine.limits().images.map_or(1, |images| images.merge);
        Request::new(ids, max_tokens).with_pictures(pictures, merge)
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

    /// Renders the chat and starts a reply. Its pieces come from the returned stream; dropping that cancels
    /// it.
    pub fn start(&self, conversation: Conversation, options: &Options) -> Result<Stream, ServeError> {
        let tools: Arc<[Tool]> = conversation.tools.as_slice().into();
        let (rendered, measured) = self.text.render(conversation, options, self.vision())?;
        let context = self.engine.limits().context;
        if rendered.ids.len() >= context {
            // Before pictures are decoded in vain.
            return Err(Refusal::PromptTooLong { tokens: rendered.ids.len(), context }.into());
        }
        let pictures = self.pictures(&rendered, measured)?;
        let reader = self.text.reader(&rendered, tools, options)?;
        let marks = message_ends(&rendered);
        let grammar = options.grammar.as_ref();
        let grammar = grammar.map(|grammar| Box::new(GrammarMask::new(grammar)) as Box<dyn Mask>);
        let mask = self.after_reasoning(rendered.in_reasoning, None, false, grammar)?;
        let mut request = self.request(rendered.ids, options.max_tokens.unwrap_or(usize::MAX), pictures);
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
