//! What a chat reply says (`docs/api.md` 3.7, 3.8), whole or in chunks. Every type is written exactly as it
//! stands.

use std::sync::Arc;

use engine::{DRAFT_MAX, Miss};
use serde::Serialize;
use text::{Note, Tokenizer, call_id};
use utoipa::ToSchema;

use super::super::asked::Asked;
use super::super::auth::Turn;
use super::super::error::ApiError;
use super::super::ids;
use super::super::log::milliseconds;
use super::super::receipt::Receipt;
use super::super::running::{Ended, Job, Running, finish_name};
use super::super::scores::{TokenLogprob, logprobs};
use super::super::settings::ClaryFields;
use super::super::state::now_seconds;
use super::validate::Facts;
use crate::{Outcome, StopReason};

/// `chat.completion`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatReply {
    /// `chatcmpl-…`.
    pub id: String,
    /// `chat.completion`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The served id.
    pub model: String,
    /// Version, backend and build.
    pub system_fingerprint: String,
    /// One for each of `n`.
    pub choices: Vec<ChatChoice>,
    /// Token counts.
    pub usage: ChatUsage,
    /// Log-probabilities of the prompt, the first null; only where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<Option<TokenLogprob>>>,
    /// Only where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clary: Option<Clary>,
}

/// One choice.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatChoice {
    /// Counts from 0.
    pub index: usize,
    /// The reply.
    pub message: ReplyMessage,
    /// Where asked for.
    pub logprobs: Option<Logprobs>,
    /// `stop`, `length` or `tool_calls`.
    pub finish_reason: &'static str,
    /// The stop string or id that ended the reply.
    pub stop_reason: Option<StopWord>,
}

/// The assistant's message.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ReplyMessage {
    /// `assistant`.
    pub role: &'static str,
    /// Null only if there are calls and no text.
    pub content: Option<String>,
    /// Absent with thinking off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same under another name, where the server is set to send it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Complete calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ReplyCall>,
    /// Always null.
    pub refusal: Option<String>,
}

/// A call.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ReplyCall {
    /// `call_…`.
    pub id: String,
    /// `function`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Which function, and how.
    pub function: ReplyFunction,
}

/// The function of a call.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ReplyFunction {
    /// Its name.
    pub name: String,
    /// A JSON object.
    pub arguments: String,
}

/// Log-probabilities of a choice.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Logprobs {
    /// Of the content's tokens.
    pub content: Vec<TokenLogprob>,
    /// Of the reasoning's tokens.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reasoning: Vec<TokenLogprob>,
}

/// A stop string or id.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum StopWord {
    /// A stop string.
    Text(String),
    /// An id of `stop_token_ids`.
    Token(u32),
}

/// Token counts.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub struct ChatUsage {
    /// Of the prompt.
    pub prompt_tokens: usize,
    /// Of all choices.
    pub completion_tokens: usize,
    /// Both.
    pub total_tokens: usize,
    /// Of the prompt.
    pub prompt_tokens_details: PromptDetails,
    /// Of all choices.
    pub completion_tokens_details: CompletionDetails,
}

/// Kinds of prompt tokens.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub struct PromptDetails {
    /// From the prefix cache.
    pub cached_tokens: usize,
    /// Of pictures.
    pub image_tokens: usize,
}

/// Kinds of generated tokens.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub struct CompletionDetails {
    /// Of reasoning.
    pub reasoning_tokens: usize,
}

/// The `clary` object.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Clary {
    /// Version of this object.
    pub version: u32,
    /// The seed used.
    pub seed: u64,
    /// Ids of the exactness contracts that hold.
    pub contracts: Vec<&'static str>,
    /// What was done on the client's behalf.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub notes: Option<Vec<NoteView>>,
    /// Times.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
    /// Drafting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftView>,
    /// The prefix cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheView>,
    /// What the reply was made from, and what it came to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub receipt: Option<Receipt>,
    /// The text of a call that was cut by length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub incomplete_tool_call: Option<String>,
}

/// A note.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct NoteView {
    /// Short code.
    pub code: &'static str,
    /// Path in the request; empty for the whole.
    pub path: String,
}

/// Times of the first choice.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct Timings {
    /// In the queue.
    pub queue_ms: f64,
    /// For pictures.
    pub image_ms: f64,
    /// From the slot to the end of the prompt.
    pub prefill_ms: f64,
    /// Prompt tokens computed.
    pub prefill_tokens: usize,
    /// From the end of the prompt to the end of the reply.
    pub decode_ms: f64,
    /// Tokens generated.
    pub decode_tokens: usize,
    /// Queue and prefill together.
    pub ttft_ms: f64,
    /// Of decode.
    pub tokens_per_s: f64,
}

/// Drafting of all choices.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct DraftView {
    /// Steps that drew tokens.
    pub steps: u64,
    /// Drafted tokens verified.
    pub proposed: u64,
    /// Those that were right.
    pub accepted: u64,
    /// By place in the draft.
    pub accepted_by_position: [u64; DRAFT_MAX],
    /// Rounds in which some row was not kept.
    pub rollbacks: u64,
    /// What was asked for.
    pub policy: String,
}

/// Use of the prefix cache by the first choice.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct CacheView {
    /// Prompt tokens that were not computed.
    pub hit_tokens: usize,
    /// Position of the last state left in the cache.
    pub checkpoint_tokens: usize,
    /// Why the hit ends where it ends; null if it covers all but the last token.
    pub miss: Option<MissView>,
}

/// Why a hit ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct MissView {
    /// Position in the prompt.
    pub at_token: Option<usize>,
    /// Turn of the rendered prompt in which it lies.
    pub message_index: Option<usize>,
    /// Short code.
    pub reason: &'static str,
}

/// What all chunks and the whole reply have in common.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) fingerprint: String,
    pub(crate) reasoning_both: bool,
    pub(crate) fields: ClaryFields,
    pub(crate) contracts: Vec<&'static str>,
    pub(crate) policy: String,
    pub(crate) facts: Facts,
}

impl Head {
    /// The reply to a chat that is over.
    pub(crate) fn reply(&self, running: &Running) -> ChatReply {
        let tokenizer = &running.served().session.text().tokenizer;
        let choices = running.ended().enumerate();
        ChatReply {
            id: self.id.clone(),
            object: "chat.completion",
            created: self.created,
            model: self.model.clone(),
            system_fingerprint: self.fingerprint.clone(),
            choices: choices.map(|(index, ended)| self.choice(index, ended, tokenizer)).collect(),
            usage: usage(running),
            prompt_logprobs: self.prompt_logprobs(running),
            clary: self.clary(running),
        }
    }

    fn choice(&self, index: usize, ended: &Ended, tokenizer: &Tokenizer) -> ChatChoice {
        let outcome = &ended.outcome;
        let reply = &outcome.reply;
        // A model may open reasoning that the request had turned off; it is not lost then.
        let has_reasoning = self.facts.thinking || !reply.reasoning.is_empty();
        let reasoning = has_reasoning.then(|| reply.reasoning.clone());
        let has_text = !reply.content.is_empty() || reply.calls.is_empty();
        let message = ReplyMessage {
            role: "assistant",
            content: has_text.then(|| reply.content.clone()),
            reasoning: reasoning.clone().filter(|_| self.reasoning_both),
            reasoning_content: reasoning,
            tool_calls: reply.calls.iter().map(|call| self.call(index, call)).collect(),
            refusal: None,
        };
        let logprobs = self.facts.logprobs.then(|| Logprobs {
            content: logprobs(tokenizer, &ended.content),
            reasoning: logprobs(tokenizer, &ended.reasoning),
        });
        let finish_reason = finish_name(&outcome.finish);
        ChatChoice { index, message, logprobs, finish_reason, stop_reason: stop_word(outcome) }
    }

    fn call(&self, choice: usize, call: &text::Call) -> ReplyCall {
        let function = ReplyFunction { name: call.name.clone(), arguments: call.arguments.clone() };
        ReplyCall { id: self.call_id(choice, call.index), kind: "function", function }
    }

    /// Id of a call, the same in a stream and in a whole reply.
    pub(crate) fn call_id(&self, choice: usize, index: usize) -> String {
        call_id(&format!("{}/{choice}", self.id), index)
    }

    pub(crate) fn prompt_logprobs(&self, running: &Running) -> Option<Vec<Option<TokenLogprob>>> {
        self.facts.params.prompt_logprobs?;
        let tokenizer = &running.served().session.text().tokenizer;
        let scores = running.prompt_scores().first().map(|scores| logprobs(tokenizer, scores));
        Some(std::iter::once(None).chain(scores.unwrap_or_default().into_iter().map(Some)).collect())
    }

    /// The `clary` object, if any member of it is wanted or a call was cut.
    pub(crate) fn clary(&self, running: &Running) -> Option<Clary> {
        let first = running.ended().next()?;
        let outcomes = || running.ended().map(|ended| &ended.outcome);
        let cut = outcomes().find_map(|outcome| outcome.reply.incomplete_call.clone());
        // A cut call is nowhere else, so that it is told of unasked.
        if !self.fields.any() && cut.is_none() {
            return None;
        }
        let notes = || {
            let own = outcomes().flat_map(|outcome| &outcome.reply.notes);
            notes_view(running.notes().iter().chain(own))
        };
        Some(Clary {
            version: 1,
            seed: self.facts.seed,
            contracts: self.contracts.clone(),
            notes: self.fields.notes.then(notes),
            timings: self.fields.timings.then(|| timings(&first.outcome)),
            draft: self.fields.draft.then(|| self.draft(running)),
            cache: self.fields.cache.then(|| self.cache(&first.outcome)),
            receipt: self.fields.receipt.then(|| running.receipt()),
            incomplete_tool_call: cut,
        })
    }

    fn draft(&self, running: &Running) -> DraftView {
        let mut sum = engine::DraftStats::default();
        running.ended().for_each(|ended| sum.add(&ended.outcome.stats.drafts));
        DraftView {
            steps: sum.steps,
            proposed: sum.proposed,
            accepted: sum.accepted,
            accepted_by_position: sum.accepted_by_position,
            rollbacks: sum.rollbacks,
            policy: self.policy.clone(),
        }
    }

    fn cache(&self, outcome: &Outcome) -> CacheView {
        let miss = outcome.stats.cache.miss.map(|miss| {
            let (reason, at_token) = match miss {
                Miss::Off => ("off", None),
                Miss::Empty => ("empty", None),
                Miss::Differs { at } => ("differs", Some(at)),
                Miss::Ends { at } => ("ends", Some(at)),
                Miss::Checkpoint { at } => ("checkpoint", Some(at)),
                Miss::NoRoom => ("no_room", None),
            };
            let message_index = at_token.map(|at| self.facts.marks.partition_point(|&end| end <= at));
            MissView { at_token, message_index, reason }
        });
        CacheView {
            hit_tokens: outcome.stats.cache.hit_tokens,
            checkpoint_tokens: outcome.stats.checkpoint_tokens,
            miss,
        }
    }

    /// Sends a job to the engine; its reply has an id that begins with `prefix`.
    pub(crate) fn submit(
        asked: Arc<Asked>,
        turn: Turn,
        job: Job,
        facts: Facts,
        prefix: &str,
    ) -> Result<(Running, Self), ApiError> {
        let mut running = Running::submit(asked, job, turn)?;
        let head = Self::new(&mut running, ids::made(prefix), now_seconds(), facts);
        Ok((running, head))
    }

    /// What a reply to this chat begins with.
    fn new(running: &mut Running, id: String, created: u64, facts: Facts) -> Self {
        running.named(&id);
        let app = running.app();
        let drafting = facts.params.drafting(app.settings().drafting);
        Self {
            id,
            created,
            model: app.id().to_owned(),
            fingerprint: app.fingerprint(running.served()),
            reasoning_both: app.settings().reasoning_both,
            fields: app.settings().clary_fields.or(facts.params.clary.0),
            contracts: running.served().info.contracts.clone(),
            policy: match drafting.policy {
                engine::DraftPolicy::Off => "off".to_owned(),
                engine::DraftPolicy::Fixed(count) => format!("fixed {count}"),
                engine::DraftPolicy::Auto(most) => format!("auto {most}"),
            },
            facts,
        }
    }
}

/// Notes as they are written.
pub(crate) fn notes_view<'a>(notes: impl Iterator<Item = &'a Note>) -> Vec<NoteView> {
    notes.map(|note| NoteView { code: note.code, path: note.path.clone() }).collect()
}

/// The stop string or id that ended a reply.
pub(crate) fn stop_word(outcome: &Outcome) -> Option<StopWord> {
    outcome.stop_reason.as_ref().map(|reason| match reason {
        StopReason::Text(text) => StopWord::Text(text.clone()),
        StopReason::Token(id) => StopWord::Token(*id),
    })
}

/// Token counts: each prompt once, the choices together.
pub(crate) fn usage(running: &Running) -> ChatUsage {
    let mut usage = ChatUsage::default();
    for (index, ended) in running.ended().enumerate() {
        let counts = ended.outcome.usage;
        if running.begins_prompt(index) {
            usage.prompt_tokens += counts.prompt_tokens;
            usage.prompt_tokens_details.cached_tokens += counts.cached_tokens;
        }
        usage.completion_tokens += counts.completion_tokens;
        usage.completion_tokens_details.reasoning_tokens += counts.reasoning_tokens;
    }
    usage.prompt_tokens_details.image_tokens = running.image_tokens();
    usage.total_tokens = usage.prompt_tokens + usage.completion_tokens;
    usage
}

fn timings(outcome: &Outcome) -> Timings {
    let stats = &outcome.stats;
    let seconds = stats.decode.as_secs_f64();
    let tokens = stats.generated_tokens;
    Timings {
        queue_ms: milliseconds(stats.queued),
        image_ms: milliseconds(stats.image),
        prefill_ms: milliseconds(stats.prefill),
        prefill_tokens: stats.prompt_tokens - stats.cache.hit_tokens,
        decode_ms: milliseconds(stats.decode),
        decode_tokens: tokens,
        ttft_ms: milliseconds(stats.queued + stats.prefill),
        tokens_per_s: if seconds > 0.0 { (tokens as f64 / seconds * 1e3).round() / 1e3 } else { 0.0 },
    }
}
