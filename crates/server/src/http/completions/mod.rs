//! `POST /v1/completions`: text on, without template, reasoning or calls.

mod reply;
mod request;

use std::sync::Arc;

use axum::response::Response;
use text::ReplyOptions;

use super::app::json;
use super::asked::{Asked, Incoming};
use super::chat::{Facts, Head, model_note, reader};
use super::error::ApiError;
use super::running::{Job, Prompt};
use super::scores::Scope;
use super::{flow, ids};

pub use reply::{Completion, CompletionChoice, CompletionLogprobs, TopMap};
pub use request::CompletionRequest;

/// A request ready for the engine.
pub(crate) struct Prepared {
    job: Job,
    facts: Facts,
    echo: bool,
    logprobs: bool,
    prompts: Vec<Vec<u32>>,
}

impl Prepared {
    /// The job without what only this route writes.
    pub(crate) fn job(self) -> (Job, Facts) {
        (self.job, self.facts)
    }
}

/// Goes on with texts.
#[utoipa::path(post, path = "/v1/completions", tag = "OpenAI", request_body = CompletionRequest,
    responses((status = 200, body = Completion)))]
pub(crate) async fn post(Incoming(asked): Incoming) -> Result<Response, ApiError> {
    let turn = asked.turn()?;
    let prepared = asked.prepare(|asked| {
        let request = CompletionRequest::read(asked.object()?, &asked.served)?;
        prepare(asked, request)
    });
    let Prepared { job, facts, echo, logprobs, prompts } = prepared.await?;
    let choices = job.choices as usize;
    let (mut running, head) = Head::submit(asked, turn, job, facts, "cmpl-")?;
    let is_stream = head.facts.params.stream;
    let mut writer = reply::CompletionWriter::new(head, echo, logprobs, prompts, choices);
    if is_stream {
        return flow::respond(running, writer).await;
    }
    running.whole().await?;
    Ok(json(&writer.whole(&running)))
}

/// Checks a request's prompts and makes a job of them.
pub(crate) fn prepare(asked: &Asked, request: CompletionRequest) -> Result<Prepared, ApiError> {
    let Asked { app, served, context, .. } = asked;
    let mut notes = request.notes;
    notes.extend(model_note(app, &request.model)?);
    let context_tokens = served.context();
    if let Some(long) = request.prompt.iter().find(|ids| ids.len() >= context_tokens) {
        return Err(ApiError::overflow(long.len(), context_tokens));
    }
    if let Some(empty) = request.prompt.iter().position(Vec::is_empty) {
        return Err(ApiError::invalid(format!("prompt[{empty}]"), "0 tokens; at least 1 is needed"));
    }
    let params = request.params;
    let seed = params.seed.unwrap_or_else(ids::seed);
    // Scores of the prompt are asked for by echo, which then lists as many alternatives as for the reply.
    let echoed = request.logprobs.filter(|_| request.echo);
    // Raw text: nothing is reasoning and nothing is a call.
    let reply = ReplyOptions { in_reasoning: false, raw_reasoning: true, tools: Arc::default() };
    let prompt = |ids: &Vec<u32>| Prompt { ids: ids.clone(), ..Prompt::default() };
    let job = Job {
        prompts: request.prompt.iter().map(prompt).collect(),
        choices: params.n.unwrap_or(1),
        sampling: params.sampling(&served.sampling, seed),
        max_tokens: Some(request.max_tokens),
        logprobs: request.logprobs,
        prompt_logprobs: echoed.or(params.prompt_logprobs),
        scope: Scope::Raw,
        namespace: context.caller.namespace(params.salt()),
        cache: params.cache_prompt,
        drafting: params.drafting(app.settings().drafting),
        mask: None,
        thinking_budget: None,
        close_reasoning: false,
        reader: reader(served, &params, reply, false),
        notes,
    };
    let facts = Facts {
        image_tokens: Vec::new(),
        thinking: false,
        seed,
        logprobs: request.logprobs.is_some(),
        params,
        marks: Vec::new(),
        prompt_ids: Arc::default(),
        prompt_text: "".into(),
    };
    let logprobs = request.logprobs.is_some();
    Ok(Prepared { job, facts, echo: request.echo, logprobs, prompts: request.prompt })
}
