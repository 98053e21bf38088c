//! `POST /v1/chat/completions`.

mod choice;
mod places;
mod reply;
mod request;
mod stream;
mod validate;

use axum::response::Response;
use engine::{CacheReport, Request};
use serde::Serialize;
use tokio::sync::oneshot;
use utoipa::ToSchema;

use super::app::json;
use super::asked::Incoming;
use super::error::ApiError;
use super::flow;
use super::running::Job;
use super::state::Served;

pub use choice::ToolChoice;
pub(crate) use choice::read as read_choice;
pub(crate) use places::{Place, Places};
pub use reply::{
    CacheView, ChatChoice, ChatReply, ChatUsage, Clary, CompletionDetails, DraftView, Logprobs, MissView,
    NoteView, PromptDetails, ReplyCall, ReplyFunction, ReplyMessage, StopWord, Timings,
};
pub(crate) use reply::{Head, notes_view, stop_word, usage};
pub(crate) use request::openai_format as answer_format;
pub use request::{ChatRequest, ReasoningFormat};
pub use stream::{ChatChunk, ChunkChoice, Delta, DeltaCall, DeltaFunction};
pub(crate) use validate::{Facts, Prepared, model_note, prepare, reader};

/// The answer to a dry run.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct DryRun {
    /// `clary.dry_run`.
    pub object: &'static str,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of each picture.
    pub image_tokens: Vec<usize>,
    /// Tokens of the context.
    pub n_ctx: usize,
    /// Whether the prompt leaves room for a reply.
    pub fits: bool,
    /// Prompt tokens that the cache would give now; null where that is not known without running.
    pub cached_tokens_if_now: Option<usize>,
    /// Whether the reply begins with reasoning.
    pub thinking: bool,
    /// What was done on the client's behalf.
    pub notes: Vec<NoteView>,
    /// The prompt, where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// The prompt's ids, where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// Replies to a chat.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "OpenAI", request_body = ChatRequest,
    responses((status = 200, body = ChatReply, description = "Or chunks of `ChatChunk` if streamed")))]
pub(crate) async fn post(Incoming(asked): Incoming) -> Result<Response, ApiError> {
    let turn = asked.turn()?;
    let prepared = asked.prepare(|asked| {
        let request = ChatRequest::read(asked.object()?, &asked.served)?;
        let dry_run = request.dry_run;
        Ok((dry_run, prepare(asked, request)?))
    });
    let (dry_run, Prepared { job, facts }) = prepared.await?;
    if dry_run {
        let (notes, answered) = (job.notes.clone(), ask_cache(&asked.served, job, &facts));
        let cached = match answered {
            Some(answered) => answered.await.ok(),
            None => None,
        };
        return Ok(json(&dry_run_of(&notes, &facts, asked.served.context(), cached)));
    }
    let (mut running, head) = Head::submit(asked, turn, job, facts, "chatcmpl-")?;
    if head.facts.params.stream {
        return flow::respond(running, stream::ChatWriter::new(head)).await;
    }
    running.whole().await?;
    Ok(json(&head.reply(&running)))
}

/// Asks how many prompt tokens the prefix cache would give the job; `None` where the engine would not take
/// it, or where that hangs on pictures, which a dry run does not decode.
fn ask_cache(served: &Served, job: Job, facts: &Facts) -> Option<oneshot::Receiver<usize>> {
    if !facts.image_tokens.is_empty() {
        return None;
    }
    let mut request = Request::new(job.prompts.into_iter().next()?.ids, 1);
    request.namespace = job.namespace;
    request.cache = job.cache;
    request.prompt_logprobs = job.prompt_logprobs;
    let (answer, answered) = oneshot::channel();
    let tell = move |report: CacheReport| {
        // A failed send means that the client has gone.
        let _ = answer.send(report.hit_tokens);
    };
    served.session.engine().look_up(request, tell).ok()?;
    Some(answered)
}

fn dry_run_of(notes: &[text::Note], facts: &Facts, context: usize, cached: Option<usize>) -> DryRun {
    let shows_prompt = facts.params.clary.0.prompt;
    DryRun {
        object: "clary.dry_run",
        prompt_tokens: facts.prompt_ids.len(),
        image_tokens: facts.image_tokens.clone(),
        n_ctx: context,
        fits: facts.prompt_ids.len() < context,
        cached_tokens_if_now: cached,
        thinking: facts.thinking,
        notes: notes_view(notes.iter()),
        prompt: shows_prompt.then(|| facts.prompt_text.to_string()),
        prompt_token_ids: shows_prompt.then(|| facts.prompt_ids.to_vec()),
    }
}
