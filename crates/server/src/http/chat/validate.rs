//! From what a chat request says to a job for the engine: template, tokenizer, constraint, limits.

use std::sync::Arc;

use text::{Note, PromptMax, RenderOptions, Rendered, ReplyOptions, Tool};

use super::super::app::Context;
use super::super::asked::Asked;
use super::super::constraint::{self, Wishes};
use super::super::error::{ApiError, Code};
use super::super::ids;
use super::super::params::Params;
use super::super::running::{Job, Prompt};
use super::super::scores::Scope;
use super::super::state::{App, Served, now_seconds};
use super::request::{ChatRequest, ReasoningFormat};
use crate::session::message_ends;
use crate::{Measured, ReaderOptions};

/// Texts up to here are rendered and counted where only the number is wanted.
const COUNTED_BYTES: usize = 8 << 20;

/// A chat ready for the engine, and what its reply needs to know.
pub(crate) struct Prepared {
    pub(crate) job: Job,
    pub(crate) facts: Facts,
}

/// What a reply tells of its request.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// Whether the reply may have reasoning in its own field.
    pub(crate) thinking: bool,
    pub(crate) seed: u64,
    pub(crate) logprobs: bool,
    pub(crate) params: Params,
    /// Prompt lengths at which messages end.
    pub(crate) marks: Vec<usize>,
    /// Tokens of each picture.
    pub(crate) image_tokens: Vec<usize>,
    pub(crate) prompt_ids: Arc<[u32]>,
    pub(crate) prompt_text: Arc<str>,
}

/// Renders, encodes and checks. Runs beside the async threads: any of it may take a while.
pub(crate) fn prepare(asked: &Asked, mut request: ChatRequest) -> Result<Prepared, ApiError> {
    let Asked { app, served, context: Context { caller, .. }, .. } = asked;
    let mut notes = std::mem::take(&mut request.notes);
    notes.extend(model_note(app, &request.model)?);
    let offered = request.tool_choice.offered(std::mem::take(&mut request.tools));
    let tools: Arc<[Tool]> = offered.into();
    let (rendered, measured) = render(app, served, &mut request, &tools)?;
    notes.extend(rendered.notes.iter().cloned());
    let context = served.context();
    if rendered.ids.len() >= context && !request.dry_run {
        return Err(ApiError::overflow(rendered.ids.len(), context));
    }
    let wishes = Wishes {
        answer: request.response_format.take(),
        call: request.tool_choice.forced(&tools).map(|tools| ("tool_choice".to_owned(), tools)),
        tools: tools.clone(),
        parallel: request.parallel_tool_calls,
    };
    let tokenizer = &served.session.text().tokenizer;
    let compiled = constraint::compile(served.grammar.as_deref(), &wishes, tokenizer)?;
    let mask = compiled.map(|compiled| {
        notes.extend(compiled.notes);
        compiled.mask
    });
    let budget = match request.thinking_budget {
        None => app.settings().thinking_budget,
        Some(budget) => usize::try_from(budget).ok(),
    };
    let close_reasoning = app.settings().close_reasoning;
    let mask = served.session.after_reasoning(rendered.in_reasoning, budget, close_reasoning, mask)?;
    let params = request.params;
    let seed = params.seed.unwrap_or_else(ids::seed);
    let marks = message_ends(&rendered);
    let image_tokens = measured.iter().map(|picture| picture.tokens).collect();
    let pictures = match request.dry_run {
        true => Vec::new(),
        false => served.session.pictures(&rendered, measured)?,
    };
    let is_raw = request.reasoning_format == ReasoningFormat::Raw;
    let facts = Facts {
        thinking: rendered.in_reasoning && !is_raw,
        seed,
        logprobs: request.logprobs,
        marks: marks.clone(),
        image_tokens,
        prompt_ids: rendered.ids.as_slice().into(),
        prompt_text: rendered.text.as_str().into(),
        params: params.clone(),
    };
    let reply = ReplyOptions { in_reasoning: rendered.in_reasoning, raw_reasoning: is_raw, tools };
    let job = Job {
        prompts: vec![Prompt { ids: rendered.ids, marks, pictures }],
        choices: params.n.unwrap_or(1),
        sampling: params.sampling(&served.sampling, seed),
        max_tokens: request.max_completion_tokens,
        logprobs: request.logprobs.then_some(request.top_logprobs),
        prompt_logprobs: params.prompt_logprobs,
        scope: Scope::Parsed,
        namespace: caller.namespace(params.salt()),
        cache: params.cache_prompt,
        drafting: params.drafting(app.settings().drafting),
        mask,
        thinking_budget: budget,
        close_reasoning,
        reader: reader(served, &params, reply, !request.parallel_tool_calls),
        notes,
    };
    Ok(Prepared { job, facts })
}

/// Notes that another model was asked for, or refuses it.
pub(crate) fn model_note(app: &App, asked: &str) -> Result<Option<Note>, ApiError> {
    let settings = app.settings();
    if asked == app.id() || settings.aliases.iter().any(|alias| alias == asked) {
        return Ok(None);
    }
    if settings.reject_unknown_model {
        let detail = format!("no model of this name; this server serves {}", app.id());
        return Err(ApiError::at(Code::ModelNotFound, "model", detail));
    }
    Ok(Some(Note { code: "model_substituted", path: "model".to_owned() }))
}

/// How to read replies.
pub(crate) fn reader(
    served: &Served,
    params: &Params,
    reply: ReplyOptions,
    single_call: bool,
) -> ReaderOptions {
    let defaults = &served.session.text().defaults;
    ReaderOptions {
        stop: params.stop.clone(),
        include_stop: params.include_stop_str_in_output,
        single_call,
        stop_in_reasoning: params.stop_in_reasoning,
        ..ReaderOptions::new(reply, defaults, &params.stop_token_ids, params.ignore_eos)
    }
}

fn render(
    app: &App,
    served: &Served,
    request: &mut ChatRequest,
    tools: &Arc<[Tool]>,
) -> Result<(Rendered, Vec<Measured>), ApiError> {
    let mut kwargs = app.settings().template_kwargs.clone();
    kwargs.extend(std::mem::take(&mut request.chat_template_kwargs));
    let preserve = kwargs.shift_remove("preserve_thinking").and_then(|preserve| preserve.as_bool());
    let options = RenderOptions {
        tools: tools.to_vec(),
        enable_thinking: Some(request.reasoning_effort.unwrap_or(app.settings().thinking)),
        preserve_thinking: preserve,
        add_generation_prompt: request.add_generation_prompt,
        continue_final_message: request.continue_final_message,
        template_kwargs: kwargs,
        now_seconds: now_seconds() as i64,
        prompt_max: Some(PromptMax {
            tokens: served.context(),
            counted_bytes: if request.dry_run { COUNTED_BYTES } else { 0 },
        }),
    };
    let (messages, session) = (std::mem::take(&mut request.messages), &served.session);
    Ok(session.text().rendered(messages, app.settings().late_system, &options, session.vision())?)
}
