//! What a caller asks for, and the one place that refuses nonsense.

use std::sync::Arc;

use model::{DRAFT_MAX, ImageSpec, PAGE_TOKENS, Picture, Spec, place_pictures};

use crate::mask::Mask;

/// Most candidates for a first drafted token.
pub const FIRST_MAX: u8 = 4;
/// Most choices of a request.
pub const CHOICES_MAX: u32 = 8;
/// Most entries of a logit bias.
pub const BIAS_MAX: usize = 1024;
/// Most alternatives reported for a token.
pub const LOGPROBS_MAX: u32 = 20;

/// How tokens are drawn (`docs/api.md` 3.1; the order of operations is that of `docs/arithmetic.md`).
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 to 5; 0 is greedy.
    pub temperature: f32,
    /// Keep the best `top_k`; 0 keeps all.
    pub top_k: u32,
    /// Above 0, at most 1.
    pub top_p: f32,
    /// 0 to 1.
    pub min_p: f32,
    /// -2 to 2, once for each token that was generated.
    pub presence: f32,
    /// -2 to 2, for each time a token was generated.
    pub frequency: f32,
    /// Above 0, at most 10; over prompt and generated tokens.
    pub repetition: f32,
    /// Added to logits, -100 to 100.
    pub logit_bias: Vec<(u32, f32)>,
    /// Key of every draw.
    pub seed: u64,
    /// Tokens that end the reply, beside the model's end tokens.
    pub stop_ids: Vec<u32>,
    /// The model's end tokens do not end the reply.
    pub ignore_eos: bool,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence: 0.0,
            frequency: 0.0,
            repetition: 1.0,
            logit_bias: Vec::new(),
            seed: 0,
            stop_ids: Vec::new(),
            ignore_eos: false,
        }
    }
}

/// How deep to draft. No policy changes a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftPolicy {
    /// Never.
    Off,
    /// This many tokens each round, 1 to [`DRAFT_MAX`].
    Fixed(u8),
    /// As measured costs and acceptance suggest, up to this many.
    Auto(u8),
}

/// Drafting of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drafting {
    /// How deep.
    pub policy: DraftPolicy,
    /// The model's own drafts.
    pub mtp: bool,
    /// Copies of what followed the same tokens earlier in the sequence.
    pub copy: bool,
    /// Candidates for the first drafted token, 1 to [`FIRST_MAX`]: more than one make the window a tree.
    pub first: u8,
}

impl Default for Drafting {
    fn default() -> Self {
        Self { policy: DraftPolicy::Auto(DRAFT_MAX as u8), mtp: true, copy: true, first: 1 }
    }
}

/// One request. Tokens in, tokens out.
pub struct Request {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// Rotary positions (t, h, w) of the prompt's rows; `None` counts from 0 (`docs/model.md` section 6).
    pub positions: Option<Vec<[u32; 3]>>,
    /// Rotary position of generated tokens minus their index.
    pub rope_delta: i64,
    /// What a row is beyond its token id (a digest of the picture and its grid for image rows, 0 for text):
    /// part of the prefix cache's key.
    pub identity: Option<Vec<u64>>,
    /// Pictures in the prompt, ascending, apart. Their rows take image rows in place of their tokens'
    /// embeddings.
    pub pictures: Vec<PictureSpan>,
    /// Most tokens to generate; cut at the end of the context. 0 only prefills.
    pub max_tokens: usize,
    /// How to draw.
    pub sampling: Sampling,
    /// Replies to the same prompt, 1 to [`CHOICES_MAX`]; choice `i` draws with generator index `i`.
    pub choices: u32,
    /// `Some(n)`: log-probabilities of generated tokens, with the `n` best alternatives.
    pub logprobs: Option<u32>,
    /// `Some(n)`: log-probabilities of the prompt's tokens, with the `n` best alternatives.
    pub prompt_logprobs: Option<u32>,
    /// Division of the prefix cache: requests share prefixes only inside one.
    pub namespace: String,
    /// Whether the prefix cache is used and filled.
    pub cache: bool,
    /// Prompt lengths worth a snapshot: ends of the system prompt and of messages.
    pub marks: Vec<usize>,
    /// Drafting.
    pub drafting: Drafting,
    /// Constraint on the reply's tokens.
    pub mask: Option<Box<dyn Mask>>,
}

impl Request {
    /// A greedy request with defaults everywhere else.
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            prompt,
            positions: None,
            rope_delta: 0,
            identity: None,
            pictures: Vec::new(),
            max_tokens,
            sampling: Sampling::default(),
            choices: 1,
            logprobs: None,
            prompt_logprobs: None,
            namespace: String::new(),
            cache: true,
            marks: Vec::new(),
            drafting: Drafting::default(),
            mask: None,
        }
    }

    /// The same with pictures at these places of the prompt (first placeholder of each), `merge` x `merge`
    /// patches a token: positions and identities follow from them. Where they do not fit the request is
    /// refused later.
    pub fn with_pictures(mut self, pictures: Vec<(usize, Arc<Picture>)>, merge: usize) -> Self {
        let grids: Vec<_> = pictures.iter().map(|(start, picture)| (*start, picture.grid)).collect();
        let length = self.prompt.len();
        if let Some((positions, delta)) = place_pictures(length, &grids, merge) {
            (self.positions, self.rope_delta) = (Some(positions), delta);
        }
        let mut identity = vec![0; length];
        for (start, picture) in pictures {
            let rows = picture.count() / (merge * merge).max(1);
            let end = start.saturating_add(rows).min(length);
            identity[start.min(end)..end].fill(identity_of(&picture));
            self.pictures.push(PictureSpan { start, rows, picture });
        }
        if !self.pictures.is_empty() {
            self.identity = Some(identity);
        }
        self
    }

    /// Rotary position of index `index` of the sequence.
    pub(crate) fn rope(&self, index: usize) -> [u32; 3] {
        match &self.positions {
            Some(positions) if index < positions.len() => positions[index],
            None if index < self.prompt.len() => [index as u32; 3],
            _ => [(index as i64 + self.rope_delta) as u32; 3],
        }
    }

    /// Tokens the sequence can grow to.
    pub(crate) fn length_max(&self, context: usize) -> usize {
        self.prompt.len().saturating_add(self.max_tokens).min(context)
    }
}

/// A picture in a prompt.
#[derive(Clone, Debug)]
pub struct PictureSpan {
    /// Index of its first row in the prompt.
    pub start: usize,
    /// Rows.
    pub rows: usize,
    /// The picture.
    pub picture: Arc<Picture>,
}

impl PictureSpan {
    /// Index behind its last row.
    pub fn end(&self) -> usize {
        self.start + self.rows
    }
}

/// What cache keys hold of a picture: the head of its digest, never 0.
fn identity_of(picture: &Picture) -> u64 {
    let head = picture.digest.first_chunk().expect("32 bytes");
    u64::from_le_bytes(*head) | 1
}

/// What a request must fit: facts of the model and settings of the engine.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Ids below this can be drawn and given.
    pub vocabulary: usize,
    /// Tokens of a sequence.
    pub context: usize,
    /// Slots.
    pub slots: usize,
    /// K/V pages of the whole engine.
    pub pages: usize,
    /// What pictures the model takes.
    pub images: Option<ImageSpec>,
}

impl Limits {
    /// Limits of a model whose tokenizer has `vocabulary` ids.
    pub fn new(spec: &Spec, vocabulary: usize) -> Self {
        Self {
            vocabulary: vocabulary.min(spec.vocabulary),
            context: spec.context_max,
            slots: spec.slots,
            pages: spec.pages,
            images: None,
        }
    }

    /// The same for a model that takes pictures.
    pub fn with_images(self, images: Option<ImageSpec>) -> Self {
        Self { images, ..self }
    }
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// Nothing to continue.
    #[error("prompt: 0 tokens; at least 1 is needed")]
    EmptyPrompt,
    /// Longer than the window.
    #[error("prompt: {tokens} tokens do not leave room in a context of {context}; shorten it")]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens of the context.
        context: usize,
    },
    /// An id the model does not have.
    #[error("{field}[{index}]: token {token} is not below the vocabulary of {vocabulary}")]
    Token {
        /// Field of the request.
        field: &'static str,
        /// Entry of the field.
        index: usize,
        /// The id.
        token: u32,
        /// Ids of the model.
        vocabulary: usize,
    },
    /// A number outside its range.
    #[error("{field}: {value} is out of range; allowed: {allowed}")]
    Value {
        /// Field of the request.
        field: &'static str,
        /// What was given.
        value: String,
        /// What is possible.
        allowed: String,
    },
    /// The waiting queue is full.
    #[error("the queue holds {limit} requests already; try again later")]
    QueueFull {
        /// Most requests that may wait.
        limit: usize,
    },
    /// The worst case does not fit the K/V memory even when nothing else runs.
    #[error("prompt and max_tokens need {needed} pages of memory, {available} exist; ask for fewer tokens")]
    DoesNotFit {
        /// Pages needed.
        needed: usize,
        /// Pages of the engine.
        available: usize,
    },
    /// The engine has stopped.
    #[error("the engine has stopped: {reason}")]
    Stopped {
        /// Why.
        reason: String,
    },
}

/// A request that fits. Only [`Limits::check`] makes one.
pub struct Checked(pub(crate) Request);

impl Limits {
    /// Refuses what can never run; everything behind this call may trust the request.
    pub fn check(&self, request: Request) -> Result<Checked, Refusal> {
        let length = request.prompt.len();
        if length == 0 {
            return Err(Refusal::EmptyPrompt);
        }
        if length >= self.context {
            return Err(Refusal::PromptTooLong { tokens: length, context: self.context });
        }
        self.tokens("prompt", &request.prompt)?;
        self.shape(&request)?;
        self.pictures(&request)?;
        self.sampling(&request.sampling)?;
        let needed = request.length_max(self.context).div_ceil(PAGE_TOKENS);
        if needed > self.pages {
            return Err(Refusal::DoesNotFit { needed, available: self.pages });
        }
        Ok(Checked(request))
    }

    fn tokens(&self, field: &'static str, tokens: &[u32]) -> Result<(), Refusal> {
        match tokens.iter().position(|&token| token as usize >= self.vocabulary) {
            None => Ok(()),
            Some(index) => {
                Err(Refusal::Token { field, index, token: tokens[index], vocabulary: self.vocabulary })
            }
        }
    }

    fn shape(&self, request: &Request) -> Result<(), Refusal> {
        let length = request.prompt.len();
        if let Some(positions) = &request.positions {
            within("positions", positions.len(), length, length)?;
            let last = positions.iter().flatten().copied().max().unwrap_or(0);
            within("positions", last as usize, 0, self.context - 1)?;
        }
        if let Some(identity) = &request.identity {
            within("identity", identity.len(), length, length)?;
        }
        // Pictures take fewer positions than rows, never more.
        within("rope_delta", request.rope_delta, -(length as i64), 0)?;
        within("choices", request.choices as usize, 1, self.slots.min(CHOICES_MAX as usize))?;
        within("logprobs", request.logprobs.unwrap_or(0), 0, LOGPROBS_MAX)?;
        within("prompt_logprobs", request.prompt_logprobs.unwrap_or(0), 0, LOGPROBS_MAX)?;
        if let Some(&mark) = request.marks.iter().find(|&&mark| mark > length) {
            within("marks", mark, 0, length)?;
        }
        within("drafting.first", request.drafting.first, 1, FIRST_MAX)?;
        match request.drafting.policy {
            DraftPolicy::Off => Ok(()),
            DraftPolicy::Fixed(count) | DraftPolicy::Auto(count) => {
                within("drafting.policy", count, 1, DRAFT_MAX as u8)
            }
        }
    }

    fn pictures(&self, request: &Request) -> Result<(), Refusal> {
        let field = "pictures";
        let (Some(images), Some(last)) = (self.images, request.pictures.last()) else {
            return within(field, request.pictures.len(), 0, 0);
        };
        within(field, last.start.saturating_add(last.rows), 1, request.prompt.len())?;
        let mut free = 0;
        for span in &request.pictures {
            within(field, span.start, free, request.prompt.len())?;
            within(field, span.rows, 1, images.tokens_max)?;
            within(
                field,
                span.rows * images.merge * images.merge,
                span.picture.count(),
                span.picture.count(),
            )?;
            free = span.end();
        }
        let known = request.positions.is_some() && request.identity.is_some();
        within("positions", usize::from(known), 1, 1)
    }

    fn sampling(&self, sampling: &Sampling) -> Result<(), Refusal> {
        within("temperature", sampling.temperature, 0.0, 5.0)?;
        within("top_k", sampling.top_k as usize, 0, self.vocabulary)?;
        above_zero("top_p", sampling.top_p, 1.0)?;
        within("min_p", sampling.min_p, 0.0, 1.0)?;
        within("presence_penalty", sampling.presence, -2.0, 2.0)?;
        within("frequency_penalty", sampling.frequency, -2.0, 2.0)?;
        above_zero("repetition_penalty", sampling.repetition, 10.0)?;
        within("logit_bias", sampling.logit_bias.len(), 0, BIAS_MAX)?;
        let biased: Vec<u32> = sampling.logit_bias.iter().map(|&(token, _)| token).collect();
        self.tokens("logit_bias", &biased)?;
        for &(_, bias) in &sampling.logit_bias {
            within("logit_bias", bias, -100.0, 100.0)?;
        }
        self.tokens("stop_token_ids", &sampling.stop_ids)
    }
}

/// NaN is outside every range.
fn within<T: PartialOrd + std::fmt::Display>(
    field: &'static str,
    value: T,
    least: T,
    most: T,
) -> Result<(), Refusal> {
    if value >= least && value <= most {
        return Ok(());
    }
    Err(Refusal::Value { field, value: value.to_string(), allowed: format!("{least} to {most}") })
}

fn above_zero(field: &'static str, value: f32, most: f32) -> Result<(), Refusal> {
    if value > 0.0 && value <= most {
        return Ok(());
    }
    Err(Refusal::Value { field, value: value.to_string(), allowed: format!("above 0, at most {most}") })
}
