//! A chat to the prompt's text and token ids.
//!
//! Text from outside is encoded as plain text and the template's scaffold with its control tokens; see
//! [`crate::marks`] for how the two are told apart.

use std::borrow::Cow;
use std::ops::Range;

use serde_json::{Map, Value};

use crate::control::Stretch;
use crate::error::{Note, RequestError, TextError};
use crate::history::History;
use crate::marks::{MarkRules, Marks};
use crate::message::{Content, Tool};
use crate::template::ChatTemplate;
use crate::tokenizer::{PromptMax, Tokenizer};

/// The place of one picture in a rendered prompt.
pub const IMAGE_PAD: &str = "<|image_pad|>";
/// Opens reasoning.
pub const THINK_OPEN: &str = "<think>";
/// Closes reasoning.
pub const THINK_CLOSE: &str = "</think>";

/// How to render a chat.
#[derive(Clone, Debug)]
pub struct RenderOptions {
    /// Functions the model may call.
    pub tools: Vec<Tool>,
    /// Thinking on or off; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// Whether old reasoning stays in the prompt; `None` leaves it to the template.
    pub preserve_thinking: Option<bool>,
    /// Whether the model's turn is opened at the end.
    pub add_generation_prompt: bool,
    /// Whether a last assistant message is continued; `None` does so if the model's turn is to be opened.
    pub continue_final_message: Option<bool>,
    /// Further variables for the template; their strings count as text from outside.
    pub template_kwargs: Map<String, Value>,
    /// Seconds since 1970 (UTC), for templates that tell the date.
    pub now_seconds: i64,
    /// Chats that are far longer are refused ([`TextError::PromptTooLong`]) before all of them is encoded;
    /// `None`: however long.
    pub prompt_max: Option<PromptMax>,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self {
            tools: Vec::new(),
            enable_thinking: None,
            preserve_thinking: None,
            add_generation_prompt: true,
            continue_final_message: None,
            template_kwargs: Map::new(),
            now_seconds: 0,
            prompt_max: None,
        }
    }
}

/// A stretch of the prompt: one control token, or text between two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The control token's id, or `None` for text.
    pub control: Option<u32>,
    /// Bytes in [`Rendered::text`].
    pub text: Range<usize>,
    /// Positions in [`Rendered::ids`].
    pub ids: Range<usize>,
}

/// A rendered prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// The prompt as text.
    pub text: String,
    /// The prompt as token ids.
    pub ids: Vec<u32>,
    /// The stretches of text and ids, in order, without gaps.
    pub segments: Vec<Segment>,
    /// Positions in `ids` of the picture places, one per picture of the chat and in its order. Each stands
    /// for all tokens of its picture.
    pub image_positions: Vec<usize>,
    /// Whether generation starts inside reasoning.
    pub in_reasoning: bool,
    /// What was done on the client's behalf, those of the history included.
    pub notes: Vec<Note>,
}

impl Rendered {
    /// Repeats each picture place so that it covers its picture: `tokens[i]` ids for picture `i`. Places
    /// and segments move along; `text` keeps one place a picture.
    ///
    /// # Panics
    /// If there are not as many numbers as pictures, or one of them is 0.
    pub fn expand_images(&mut self, tokens: &[usize]) {
        assert_eq!(tokens.len(), self.image_positions.len(), "one number for each picture");
        assert!(tokens.iter().all(|count| *count > 0), "pictures have tokens");
        let places = std::mem::take(&mut self.image_positions);
        let moved = |at: usize| {
            let before = places.iter().zip(tokens).take_while(|(place, _)| **place < at);
            at + before.map(|(_, count)| count - 1).sum::<usize>()
        };
        let more: usize = tokens.iter().map(|count| count - 1).sum();
        let mut ids = Vec::with_capacity(self.ids.len() + more);
        let mut rest = 0;
        for (place, count) in places.iter().zip(tokens) {
            ids.extend_from_slice(&self.ids[rest..*place]);
            ids.extend(std::iter::repeat_n(self.ids[*place], *count));
            rest = place + 1;
        }
        ids.extend_from_slice(&self.ids[rest..]);
        self.ids = ids;
        self.image_positions = places.iter().map(|place| moved(*place)).collect();
        for segment in &mut self.segments {
            segment.ids = moved(segment.ids.start)..moved(segment.ids.end);
        }
    }
}

impl ChatTemplate {
    /// Renders a chat and encodes it.
    pub fn render(
        &self,
        tokenizer: &Tokenizer,
        history: &History,
        options: &RenderOptions,
    ) -> Result<Rendered, TextError> {
        let mut notes = history.notes().to_vec();
        let continued = continues(history, options)?;
        // Templates have limits of their own, so what each of them shows is looked at first.
        check_length(tokenizer, &history.texts(false), options)?;
        let mut enable_thinking = options.enable_thinking;
        let prefilled = history.turns.last().filter(|last| continued && last.message.reasoning.is_none());
        if let (Some(last), None | Some(true)) = (prefilled, enable_thinking) {
            notes.push(Note::new("thinking_off_for_prefill", format!("messages[{}]", last.index)));
            enable_thinking = Some(false);
        }
        if options.preserve_thinking == Some(true) && !self.reads("preserve_thinking") {
            notes.push(Note::new("template_ignores", "chat_template_kwargs.preserve_thinking"));
        }
        let turns: Vec<Value> = history.turns.iter().map(|turn| turn.to_json()).collect();
        let tools: Vec<Value> = options.tools.iter().map(|tool| tool.definition.clone()).collect();
        let rules = MarkRules::new(tokenizer.control_tokens());
        let texts = turns.iter().chain(&tools).chain(options.template_kwargs.values());
        let mut marks = Marks::new(&rules, texts, self.source()).ok_or(TextError::NoFreeMarks)?;

        let mut context = Map::new();
        for (name, value) in &options.template_kwargs {
            context.insert(name.clone(), marks.mark_json(value));
        }
        let mut turns: Vec<Value> = turns.iter().map(|turn| marks.mark_json(turn)).collect();
        if let (true, Some(last)) = (continued, turns.last_mut()) {
            let text = last["content"].as_str().unwrap_or_default();
            last["content"] = format!("{text}{}", marks.end()).into();
        }
        context.insert("messages".into(), Value::Array(turns));
        if !tools.is_empty() {
            context.insert("tools".into(), tools.iter().map(|tool| marks.mark_json(tool)).collect());
        }
        for (name, value) in
            [("enable_thinking", enable_thinking), ("preserve_thinking", options.preserve_thinking)]
        {
            if let Some(value) = value {
                context.insert(name.into(), value.into());
            }
        }
        let opens = options.add_generation_prompt && !continued;
        context.insert("add_generation_prompt".into(), opens.into());

        let marked = self.run(context, options.now_seconds);
        if let Err(TextError::TemplateLimit { .. }) = marked {
            check_length(tokenizer, &history.texts(true), options)?;
        }
        let mut marked = marked?;
        if continued {
            cut_at_end(&mut marked, marks.end(), history)?;
        }
        check_length(tokenizer, &[marked.as_str().into()], options)?;
        let mut rendered = encode(tokenizer, &marks, &marked)?;
        rendered.notes = notes;
        check_images(&rendered, history)?;
        Ok(rendered)
    }
}

/// Refuses texts that are far longer than a prompt may be.
fn check_length(
    tokenizer: &Tokenizer,
    texts: &[Cow<'_, str>],
    options: &RenderOptions,
) -> Result<(), TextError> {
    let Some(most) = options.prompt_max else { return Ok(()) };
    let texts: Vec<&str> = texts.iter().map(AsRef::as_ref).collect();
    match tokenizer.excess(&texts, most)? {
        Some(tokens) => Err(TextError::PromptTooLong { tokens, most: most.tokens }),
        None => Ok(()),
    }
}

/// Whether the last message is continued.
fn continues(history: &History, options: &RenderOptions) -> Result<bool, RequestError> {
    let last = history.turns.last().filter(|_| history.ends_with_assistant());
    let Some(last) = last else {
        return match options.continue_final_message {
            Some(true) => Err(RequestError::invalid(
                "continue_final_message",
                "the last message is not an assistant message, so there is nothing to continue",
            )),
            _ => Ok(false),
        };
    };
    if !options.continue_final_message.unwrap_or(options.add_generation_prompt) {
        return Ok(false);
    }
    if !last.message.tool_calls.is_empty() {
        return Err(RequestError::invalid(
            format!("messages[{}].tool_calls", last.index),
            "a last assistant message with tool calls cannot be continued; send the results of the calls",
        ));
    }
    debug_assert!(matches!(last.message.content, Content::Text(_)), "assistant turns are settled");
    Ok(true)
}

/// Cuts the prompt where the continued message's text ends.
fn cut_at_end(marked: &mut String, end: char, history: &History) -> Result<(), TextError> {
    let found = marked.matches(end).count();
    match marked.find(end) {
        Some(at) if found == 1 => {
            marked.truncate(at);
            Ok(())
        }
        _ => {
            Err(TextError::NotContinuable { index: history.turns.last().map_or(0, |turn| turn.index), found })
        }
    }
}

/// Splits marked output at control spellings, puts the marked characters back and encodes each stretch.
fn encode(tokenizer: &Tokenizer, marks: &Marks<'_>, marked: &str) -> Result<Rendered, TextError> {
    let mut text = String::with_capacity(marked.len());
    let mut ids = Vec::with_capacity(marked.len() / 3);
    let mut segments = Vec::new();
    let (mut image_positions, mut in_reasoning) = (Vec::new(), false);
    for stretch in tokenizer.controls().split(marked) {
        let (text_start, ids_start) = (text.len(), ids.len());
        let control = match stretch {
            Stretch::Plain(plain) => {
                let plain = marks.unmark(plain);
                tokenizer.encode_plain(&plain, &mut ids)?;
                text.push_str(&plain);
                None
            }
            Stretch::Control(id, content) => {
                match content {
                    IMAGE_PAD => image_positions.push(ids_start),
                    THINK_OPEN => in_reasoning = true,
                    // Reasoning never outlives its turn.
                    THINK_CLOSE | "<|im_end|>" | "<|im_start|>" => in_reasoning = false,
                    _ => {}
                }
                ids.push(id);
                text.push_str(content);
                Some(id)
            }
        };
        segments.push(Segment { control, text: text_start..text.len(), ids: ids_start..ids.len() });
    }
    Ok(Rendered { text, ids, segments, image_positions, in_reasoning, notes: Vec::new() })
}

fn check_images(rendered: &Rendered, history: &History) -> Result<(), TextError> {
    let (expected, found) = (history.images().len(), rendered.image_positions.len());
    if expected == found { Ok(()) } else { Err(TextError::TemplateImages { expected, found }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_repeated_and_segments_follow() {
        let segment = |control: Option<u32>, ids: Range<usize>| Segment { control, text: 0..0, ids };
        let mut rendered = Rendered {
            text: String::new(),
            ids: vec![1, 9, 2, 3, 9, 9, 4],
            segments: vec![
                segment(None, 0..1),
                segment(Some(9), 1..2),
                segment(None, 2..4),
                segment(Some(9), 4..5),
                segment(Some(9), 5..6),
                segment(None, 6..7),
            ],
            image_positions: vec![1, 4, 5],
            in_reasoning: false,
            notes: Vec::new(),
        };
        rendered.expand_images(&[3, 1, 2]);
        assert_eq!(rendered.ids, [1, 9, 9, 9, 2, 3, 9, 9, 9, 4]);
        assert_eq!(rendered.image_positions, [1, 6, 7]);
        let ends: Vec<_> = rendered.segments.iter().map(|segment| segment.ids.clone()).collect();
        assert_eq!(ends, [0..1, 1..4, 4..6, 6..7, 7..9, 9..10]);
    }
}
