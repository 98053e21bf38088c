//! What a completion says, whole or in chunks.

use std::collections::HashSet;

use engine::Score;
use serde::Serialize;
use text::{Detokenizer, Piece, Specials, Tokenizer};
use utoipa::ToSchema;

use super::super::chat::{ChatUsage, Clary, Head, StopWord, stop_word, usage};
use super::super::error::{ApiError, Dialect};
use super::super::flow::{Writer, sse_data};
use super::super::running::{Ended, Running, Update, finish_name};
use super::super::scores::{token_text, written};

/// `text_completion`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Completion {
    /// `cmpl-…`.
    pub id: String,
    /// `text_completion`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The served id.
    pub model: String,
    /// Version, backend and build.
    pub system_fingerprint: String,
    /// Choices in the order of the prompts.
    pub choices: Vec<CompletionChoice>,
    /// Token counts; in a stream only with `include_usage`, null but in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<ChatUsage>>,
    /// Only where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clary: Option<Clary>,
}

/// One choice.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct CompletionChoice {
    /// `prompt * n + choice`.
    pub index: usize,
    /// The text, or what is new of it.
    pub text: String,
    /// Where asked for.
    pub logprobs: Option<CompletionLogprobs>,
    /// `stop` or `length`; null before the end.
    pub finish_reason: Option<&'static str>,
    /// The stop string or id that ended the reply.
    pub stop_reason: Option<StopWord>,
}

/// Log-probabilities in the form of this route.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct CompletionLogprobs {
    /// Text of each token.
    pub tokens: Vec<String>,
    /// Of each token; null for the first of a prompt.
    pub token_logprobs: Vec<Option<f32>>,
    /// The best tokens and the actual one; null for the first of a prompt.
    #[schema(value_type = Vec<Object>)]
    pub top_logprobs: Vec<Option<TopMap>>,
    /// Where each token's text begins, in characters.
    pub text_offset: Vec<usize>,
}

/// Tokens and their log-probabilities, in the order of a list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TopMap(Vec<(String, f32)>);

impl Serialize for TopMap {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

impl TopMap {
    fn new(tokenizer: &Tokenizer, score: &Score) -> Self {
        let mut map = Vec::with_capacity(score.top.len() + 1);
        let mut known = HashSet::new();
        let actual = (score.token, score.logprob);
        let is_listed = score.top.iter().any(|&(id, _)| id == score.token);
        for &(id, logprob) in score.top.iter().chain((!is_listed).then_some(&actual)) {
            let mut text = token_text(tokenizer, id);
            if !known.insert(text.clone()) {
                text.push_str(&format!(" #{id}"));
                known.insert(text.clone());
            }
            map.push((text, written(logprob)));
        }
        Self(map)
    }
}

/// Where the next token's text begins in a choice.
pub(crate) struct Offsets {
    detokenizer: Detokenizer,
    chars: usize,
}

impl Offsets {
    fn new(tokenizer: &Tokenizer, specials: Specials, chars: usize) -> Self {
        Self { detokenizer: Detokenizer::new(tokenizer, specials), chars }
    }

    fn next(&mut self, id: u32) -> usize {
        let at = self.chars;
        self.chars += self.detokenizer.push(id).chars().count();
        at
    }
}

impl CompletionLogprobs {
    fn push(&mut self, tokenizer: &Tokenizer, id: u32, score: Option<&Score>, offsets: &mut Offsets) {
        self.tokens.push(token_text(tokenizer, id));
        self.token_logprobs.push(score.map(|score| written(score.logprob)));
        self.top_logprobs.push(score.map(|score| TopMap::new(tokenizer, score)));
        self.text_offset.push(offsets.next(id));
    }
}

/// Writes completions. A whole one is put together from the same pieces as a stream.
pub(crate) struct CompletionWriter {
    pub(crate) head: Head,
    pub(crate) echo: bool,
    pub(crate) logprobs: bool,
    pub(crate) prompts: Vec<Vec<u32>>,
    pub(crate) choices: usize,
    /// Of each choice that has begun.
    offsets: Vec<Option<Offsets>>,
    ended: usize,
}

impl CompletionWriter {
    pub(crate) fn new(
        head: Head,
        echo: bool,
        logprobs: bool,
        prompts: Vec<Vec<u32>>,
        choices: usize,
    ) -> Self {
        let offsets = (0..prompts.len() * choices).map(|_| None).collect();
        Self { head, echo, logprobs, prompts, choices, offsets, ended: 0 }
    }

    /// The whole reply.
    pub(crate) fn whole(&mut self, running: &Running) -> Completion {
        let ended: Vec<_> = running.ended().cloned().collect();
        let choices = ended.iter().enumerate().map(|(index, ended)| {
            let (mut text, mut logprobs) = self.echoed(running, index);
            text.push_str(&ended.outcome.reply.content);
            self.append(running, index, &ended.content, logprobs.as_mut());
            let mut choice = choice(index, text, logprobs);
            choice.finish_reason = Some(finish_name(&ended.outcome.finish));
            choice.stop_reason = stop_word(&ended.outcome);
            choice
        });
        let choices = choices.collect();
        let mut reply = self.chunk(choices);
        reply.usage = Some(Some(usage(running)));
        reply.clary = self.head.clary(running);
        reply
    }

    /// What stands before the reply's own text: the prompt, if it is to be echoed.
    fn echoed(&mut self, running: &Running, index: usize) -> (String, Option<CompletionLogprobs>) {
        let tokenizer = &running.served().session.text().tokenizer;
        let mut logprobs = self.logprobs.then(CompletionLogprobs::default);
        let ids: &[u32] = if self.echo { &self.prompts[index / self.choices] } else { &[] };
        let text = tokenizer.decode(ids, Specials::Keep);
        if let Some(logprobs) = &mut logprobs {
            let mut offsets = Offsets::new(tokenizer, Specials::Keep, 0);
            let scores = &running.prompt_scores()[index / self.choices];
            for (place, &id) in ids.iter().enumerate() {
                let score = place.checked_sub(1).and_then(|place| scores.get(place));
                logprobs.push(tokenizer, id, score, &mut offsets);
            }
        }
        self.offsets[index] = Some(Offsets::new(tokenizer, Specials::Skip, text.chars().count()));
        (text, logprobs)
    }

    fn append(
        &mut self,
        running: &Running,
        index: usize,
        scores: &[Score],
        logprobs: Option<&mut CompletionLogprobs>,
    ) {
        let tokenizer = &running.served().session.text().tokenizer;
        if let (Some(logprobs), Some(offsets)) = (logprobs, &mut self.offsets[index]) {
            for score in scores {
                logprobs.push(tokenizer, score.token, Some(score), offsets);
            }
        }
    }

    fn chunk(&self, choices: Vec<CompletionChoice>) -> Completion {
        Completion {
            id: self.head.id.clone(),
            object: "text_completion",
            created: self.head.created,
            model: self.head.model.clone(),
            system_fingerprint: self.head.fingerprint.clone(),
            choices,
            usage: self.has_usage().then_some(None),
            clary: None,
        }
    }

    fn has_usage(&self) -> bool {
        self.head.facts.params.stream_options.include_usage
    }

    /// The prompt, once, before anything else of a choice.
    fn open(&mut self, running: &Running, index: usize, out: &mut Vec<u8>) {
        if self.offsets[index].is_none() {
            let (text, logprobs) = self.echoed(running, index);
            if self.echo {
                sse_data(out, &self.chunk(vec![choice(index, text, logprobs)]));
            }
        }
    }

    fn finish(&mut self, running: &Running, index: usize, ended: &Ended, out: &mut Vec<u8>) {
        self.ended += 1;
        let mut last = choice(index, String::new(), None);
        last.finish_reason = Some(finish_name(&ended.outcome.finish));
        last.stop_reason = stop_word(&ended.outcome);
        let mut chunk = self.chunk(vec![last]);
        if self.ended == self.offsets.len() && !self.has_usage() {
            chunk.clary = self.head.clary(running);
        }
        sse_data(out, &chunk);
    }
}

fn choice(index: usize, text: String, logprobs: Option<CompletionLogprobs>) -> CompletionChoice {
    CompletionChoice { index, text, logprobs, finish_reason: None, stop_reason: None }
}

impl Writer for CompletionWriter {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn begin(&mut self, _: &Running, _: &mut Vec<u8>) {}

    fn update(&mut self, running: &Running, update: Update, out: &mut Vec<u8>) {
        match update {
            Update::Admitted => {}
            Update::Piece(index, Piece::Content(text), scores) => {
                self.open(running, index, out);
                let mut logprobs = self.logprobs.then(CompletionLogprobs::default);
                self.append(running, index, &scores, logprobs.as_mut());
                if !text.is_empty() || !scores.is_empty() {
                    sse_data(out, &self.chunk(vec![choice(index, text, logprobs)]));
                }
            }
            Update::Piece(..) => {}
            Update::Finished(index, ended) => {
                self.open(running, index, out);
                self.finish(running, index, &ended, out);
            }
        }
    }

    fn end(&mut self, running: &Running, out: &mut Vec<u8>) {
        if self.has_usage() {
            let mut chunk = self.chunk(Vec::new());
            chunk.usage = Some(Some(usage(running)));
            chunk.clary = self.head.clary(running);
            sse_data(out, &chunk);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn failed(&mut self, _: &Running, error: &ApiError, out: &mut Vec<u8>) {
        sse_data(out, &error.body(Dialect::OpenAi, ""));
    }

    fn keep_alive(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(b": keep-alive\n\n");
    }
}
