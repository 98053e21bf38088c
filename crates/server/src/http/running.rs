//! A request on the engine: its prompts and choices read as they come. Every dialect builds a [`Job`] and
//! turns [`Update`]s into its own shapes; dropping a [`Running`] cancels it at any stage.

use std::sync::Arc;

use engine::{Drafting, Event, FinishReason, Mask, Picture, Sampling, Score, Stats, Ticket};
use text::{Note, Piece, Specials};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tracing::info;

use super::app::Context;
use super::asked::Asked;
use super::audit::Audit;
use super::auth::Turn;
use super::error::ApiError;
use super::ids;
use super::limits::beginning;
use super::log::Entry;
use super::metrics::Stage;
use super::receipt::Receipt;
use super::record::Record;
use super::scores::{Scope, ScoreLog};
use super::state::{App, Served, draining};
use super::track::Track;
use crate::{Finish, Outcome, ReaderOptions, ReplyReader};

/// Most bytes of a prompt in the log; the line says how long it is.
const LOGGED_BYTES_MAX: usize = 64 << 10;

/// One prompt of a job.
#[derive(Clone, Debug, Default)]
pub(crate) struct Prompt {
    /// Its ids.
    pub(crate) ids: Vec<u32>,
    /// Lengths at which messages end.
    pub(crate) marks: Vec<usize>,
    /// Its pictures, and where each begins.
    pub(crate) pictures: Vec<(usize, Arc<Picture>)>,
}

/// A request ready for the engine.
pub(crate) struct Job {
    /// One for a chat, several for completions.
    pub(crate) prompts: Vec<Prompt>,
    /// Replies to each prompt.
    pub(crate) choices: u32,
    pub(crate) sampling: Sampling,
    pub(crate) max_tokens: Option<usize>,
    /// Alternatives of each generated token.
    pub(crate) logprobs: Option<u32>,
    /// Alternatives of each prompt token.
    pub(crate) prompt_logprobs: Option<u32>,
    /// Which scores go with which pieces.
    pub(crate) scope: Scope,
    pub(crate) namespace: String,
    pub(crate) cache: bool,
    pub(crate) drafting: Drafting,
    pub(crate) mask: Option<Box<dyn Mask>>,
    /// Tokens of reasoning, which the mask enforces.
    pub(crate) thinking_budget: Option<usize>,
    /// The reply cannot end inside reasoning, which the mask enforces.
    pub(crate) close_reasoning: bool,
    /// How to read each reply.
    pub(crate) reader: ReaderOptions,
    /// What was done on the client's behalf.
    pub(crate) notes: Vec<Note>,
}

/// Something happened to a choice. Choices count through all prompts: `prompt * choices + choice`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Update {
    /// Some choice got the first slot.
    Admitted,
    /// A piece, with the scores of the tokens it is made of where they were asked for.
    Piece(usize, Piece, Vec<Score>),
    /// A choice is over.
    Finished(usize, Arc<Ended>),
}

/// A choice that is over.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ended {
    /// Reply, reason, numbers.
    pub(crate) outcome: Outcome,
    /// Scores of the content's tokens.
    pub(crate) content: Vec<Score>,
    /// Scores of the reasoning's tokens.
    pub(crate) reasoning: Vec<Score>,
}

struct Choice {
    reader: ReplyReader,
    log: ScoreLog,
    ended: Option<Arc<Ended>>,
}

/// A request on the engine.
pub(crate) struct Running {
    app: App,
    served: Arc<Served>,
    context: Context,
    events: UnboundedReceiver<(usize, Event)>,
    /// Of each prompt.
    tickets: Vec<Ticket>,
    per_prompt: usize,
    choices: Vec<Choice>,
    /// Scores of each prompt's tokens but the first.
    prompt_scores: Vec<Vec<Score>>,
    stage: Stage,
    /// Tokens of all prompts, and those of them that came from the cache.
    prompt_tokens: (usize, usize),
    /// Tokens of pictures, in all prompts.
    image_tokens: usize,
    admitted: bool,
    notes: Vec<Note>,
    /// What the reply is made from.
    receipt: Receipt,
    /// Where the request is written when it is over.
    record: Option<Record>,
    /// What is made once more when the request is over.
    audit: Option<Audit>,
    _turn: Turn,
}

impl Running {
    /// Sends a job to the engine. The request's body is given up: a queue of them would be large.
    pub(crate) fn submit(asked: Arc<Asked>, mut job: Job, turn: Turn) -> Result<Self, ApiError> {
        let (app, served, context) = (&asked.app, &asked.served, &asked.context);
        let receipt = Receipt::open(served, &context.route, &job);
        let record = app.recorder().map(|recorder| {
            let prompts = job.prompts.iter().map(|prompt| prompt.ids.clone()).collect();
            Ok::<_, ApiError>(recorder.begin(&context.request_id, app.id(), asked.object()?, prompts))
        });
        let record = record.transpose()?;
        let percent = app.settings().audit;
        let audit = (percent > 0.0).then(|| Audit::of(&job, &context.request_id, percent, ids::seed()));
        if app.settings().log_prompts {
            log_prompts(served, &context.request_id, &job);
        }
        let (sender, events) = unbounded_channel();
        let prompt_tokens = (job.prompts.iter().map(|prompt| prompt.ids.len()).sum(), 0);
        let mut tickets = Vec::with_capacity(job.prompts.len());
        let mut choices = Vec::with_capacity(job.prompts.len() * job.choices as usize);
        let mut image_tokens = 0;
        for (index, prompt) in job.prompts.iter_mut().enumerate() {
            for _ in 0..job.choices {
                let tokenizer = &served.session.text().tokenizer;
                let reader = ReplyReader::new(tokenizer, job.reader.clone())?;
                choices.push(Choice { reader, log: ScoreLog::new(job.scope, tokenizer), ended: None });
            }
            let place = (index, prompt.ids.len());
            let track = Track::new(app, served, context, place, job.choices, sender.clone());
            let Prompt { ids, marks, pictures } = std::mem::take(prompt);
            let max_tokens = job.max_tokens.unwrap_or(usize::MAX);
            let mut request = served.session.request(ids, max_tokens, pictures);
            image_tokens += request.pictures.iter().map(|span| span.rows).sum::<usize>();
            request.marks = marks;
            request.choices = job.choices;
            request.sampling = job.sampling.clone();
            request.logprobs = job.logprobs;
            request.prompt_logprobs = job.prompt_logprobs;
            request.namespace = job.namespace.clone();
            request.cache = job.cache;
            request.drafting = job.drafting;
            request.mask = job.mask.as_ref().map(|mask| mask.fork());
            tickets.push(served.session.engine().submit(request, Box::new(track))?);
        }
        Ok(Self {
            app: app.clone(),
            served: served.clone(),
            context: context.clone(),
            events,
            per_prompt: job.choices as usize,
            prompt_scores: vec![Vec::new(); tickets.len()],
            tickets,
            choices,
            stage: Stage::Queued,
            prompt_tokens,
            image_tokens,
            admitted: false,
            notes: job.notes,
            receipt,
            record,
            audit: audit.flatten(),
            _turn: turn,
        })
    }

    /// Takes the reply's own id, by which a record of it can be found.
    pub(crate) fn named(&mut self, reply_id: &str) {
        if let Some(record) = &mut self.record {
            record.named(reply_id);
        }
    }

    /// Tokens of pictures, in all prompts.
    pub(crate) fn image_tokens(&self) -> usize {
        self.image_tokens
    }

    /// The model that answers.
    pub(crate) fn served(&self) -> &Arc<Served> {
        &self.served
    }

    /// What the server shares.
    pub(crate) fn app(&self) -> &App {
        &self.app
    }

    /// What is known of the request beside its own words.
    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    /// What the reply was made from and what it came to so far.
    pub(crate) fn receipt(&self) -> Receipt {
        self.receipt.close(self.choices.iter().map(|choice| choice.reader.ids().to_vec()).collect())
    }

    /// Tokens of all prompts, and those of them that came from the cache as far as that is known.
    pub(crate) fn prompt_tokens(&self) -> (usize, usize) {
        self.prompt_tokens
    }

    /// The request's line in the log.
    pub(crate) fn log(&self) -> &Entry {
        &self.context.log
    }

    /// What was done on the client's behalf before the reply began.
    pub(crate) fn notes(&self) -> &[Note] {
        &self.notes
    }

    /// Scores of each prompt's tokens but the first, as far as they are known.
    pub(crate) fn prompt_scores(&self) -> &[Vec<Score>] {
        &self.prompt_scores
    }

    /// Whether a choice is the first of its prompt.
    pub(crate) fn begins_prompt(&self, choice: usize) -> bool {
        choice.is_multiple_of(self.per_prompt)
    }

    /// Choices that are over.
    pub(crate) fn ended(&self) -> impl Iterator<Item = &Arc<Ended>> {
        self.choices.iter().filter_map(|choice| choice.ended.as_ref())
    }

    /// Whether all choices are over.
    pub(crate) fn is_over(&self) -> bool {
        self.choices.iter().all(|choice| choice.ended.is_some())
    }

    /// Waits for news: at least one update, or the error that ends the whole request. Safe to drop while
    /// waiting.
    pub(crate) async fn next(&mut self) -> Result<Vec<Update>, ApiError> {
        let mut updates = Vec::new();
        while updates.is_empty() && !self.is_over() {
            match self.events.recv().await {
                Some((prompt, event)) => self.take(prompt, event, &mut updates)?,
                None => return Err(engine::ReplyError::Stopped { reason: String::new() }.into()),
            }
        }
        Ok(updates)
    }

    /// Waits for all choices.
    pub(crate) async fn whole(&mut self) -> Result<(), ApiError> {
        self.whole_with(|_, _| ()).await
    }

    /// Waits for all choices; updates go to `take` as they come.
    pub(crate) async fn whole_with(&mut self, mut take: impl FnMut(&Self, Update)) -> Result<(), ApiError> {
        let drain = self.app.drain().clone();
        let cut = drain.reached(super::drain::Phase::Cut);
        tokio::pin!(cut);
        while !self.is_over() {
            tokio::select! {
                updates = self.next() => updates?.into_iter().for_each(|update| take(self, update)),
                () = &mut cut => return Err(draining()),
            }
        }
        Ok(())
    }

    fn take(&mut self, prompt: usize, event: Event, updates: &mut Vec<Update>) -> Result<(), ApiError> {
        let at = |choice: u32| prompt * self.per_prompt + choice as usize;
        self.stage = self.stage.after(&event);
        match event {
            Event::Admitted { choice, cache, .. } => {
                if choice == 0 {
                    self.prompt_tokens.1 += cache.hit_tokens;
                }
                if !std::mem::replace(&mut self.admitted, true) {
                    updates.push(Update::Admitted);
                }
            }
            Event::PromptScores { scores, .. } => self.prompt_scores[prompt].extend(scores),
            Event::Prefilled { .. } => {}
            Event::Tokens { choice, tokens, scores } => {
                let index = at(choice);
                self.choices[index].read(index, &tokens, scores, updates);
                // A stop string or a closed call ends a choice that the engine would go on with.
                if self.choices[index].reader.ended() {
                    self.tickets[prompt].cancel(choice);
                }
            }
            Event::Finished { choice, reason, stats } => {
                let index = at(choice);
                if let FinishReason::Failed(error) = reason {
                    let error = self.failed(error);
                    self.recorded(Some(error.code.name()));
                    return Err(error);
                }
                let ended = self.choices[index].end(index, reason, *stats, updates);
                self.count(&ended);
                if self.is_over() {
                    self.recorded(None);
                    self.audited();
                }
                updates.push(Update::Finished(index, ended));
            }
        }
        Ok(())
    }

    fn recorded(&mut self, error: Option<&str>) {
        if let Some(record) = self.record.take()
            && !record.write(self.receipt(), error)
        {
            self.notes.push(Note { code: "not_recorded", path: String::new() });
        }
    }

    /// Hands the first reply over to be made once more, unless somebody cut it.
    fn audited(&mut self) {
        let Some(audit) = self.audit.take() else { return };
        let choice = &self.choices[0];
        let is_whole = choice.ended.as_ref().is_some_and(|ended| ended.outcome.finish != Finish::Cancelled);
        if is_whole && !choice.reader.ids().is_empty() {
            self.app.audit(audit.ended(choice.reader.ids().to_vec()));
        }
    }

    fn failed(&self, error: engine::ReplyError) -> ApiError {
        let is_draining = self.app.drain().phase() > super::drain::Phase::Open;
        let error = match error {
            engine::ReplyError::Stopped { .. } if is_draining => draining(),
            error => error.into(),
        };
        self.context.log.failed(error.code.name());
        error
    }

    fn count(&self, ended: &Ended) {
        let (metrics, outcome) = (self.app.metrics(), &ended.outcome);
        self.context.log.ended(finish_name(&outcome.finish));
        let reasoning = outcome.usage.reasoning_tokens as u64;
        let rest = outcome.usage.completion_tokens as u64 - reasoning;
        // Tokens of a call cannot be told from those of the text around it; a reply with calls is mostly
        // calls.
        let kind = if outcome.reply.calls.is_empty() { "content" } else { "tool" };
        metrics.generated("reasoning", reasoning);
        metrics.generated(kind, rest);
        metrics.tool_calls("ok", outcome.reply.calls.len() as u64);
        metrics.tool_calls("cut", u64::from(outcome.reply.incomplete_call.is_some()));
        let unparsed = |note: &&Note| note.code == "tool_call_unparsed";
        metrics.tool_calls("unparsed", outcome.reply.notes.iter().filter(unparsed).count() as u64);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.is_over() {
            // What the engine has told already counts, read or not.
            while let Ok((_, event)) = self.events.try_recv() {
                self.stage = self.stage.after(&event);
            }
            self.app.metrics().cancelled(self.stage);
            self.context.log.left(self.stage);
        }
    }
}

impl Choice {
    fn read(&mut self, index: usize, tokens: &[u32], scores: Vec<Score>, updates: &mut Vec<Update>) {
        let mut scores = scores.into_iter();
        for &token in tokens {
            if self.reader.ended() {
                break;
            }
            let before = self.reader.in_reasoning();
            let pieces = self.reader.push(&[token]);
            let is_end = self.reader.ended() && pieces.is_empty() && self.reader.stop_reason().is_none();
            self.log.push(scores.next(), is_end);
            self.give(index, pieces, updates);
            if before && !self.reader.in_reasoning() {
                self.log.boundary();
            }
        }
    }

    fn end(
        &mut self,
        index: usize,
        reason: FinishReason,
        stats: Stats,
        updates: &mut Vec<Update>,
    ) -> Arc<Ended> {
        let (pieces, outcome) = Outcome::close(&mut self.reader, reason, stats);
        self.give(index, pieces, updates);
        let rest = self.log.rest();
        if !rest.is_empty() {
            updates.push(Update::Piece(index, Piece::Content(String::new()), rest));
        }
        let (content, reasoning) = self.log.take();
        let ended = Arc::new(Ended { outcome, content, reasoning });
        self.ended = Some(ended.clone());
        ended
    }

    /// Adds pieces, joined to the one before where the kind is the same.
    fn give(&mut self, index: usize, pieces: Vec<Piece>, updates: &mut Vec<Update>) {
        for piece in pieces {
            let scores = self.log.release(&piece);
            if let Some(Update::Piece(at, last, before)) = updates.last_mut()
                && *at == index
                && joined(last, &piece)
            {
                before.extend(scores);
                continue;
            }
            updates.push(Update::Piece(index, piece, scores));
        }
    }
}

fn joined(last: &mut Piece, next: &Piece) -> bool {
    match (last, next) {
        (Piece::Content(text), Piece::Content(more)) | (Piece::Reasoning(text), Piece::Reasoning(more)) => {
            text.push_str(more);
            true
        }
        (Piece::CallArguments { index, json }, Piece::CallArguments { index: same, json: more }) => {
            if index == same {
                json.push_str(more);
            }
            index == same
        }
        _ => false,
    }
}

/// Writes the prompts to the log, where the server was asked to.
fn log_prompts(served: &Served, request_id: &str, job: &Job) {
    for prompt in &job.prompts {
        let text = served.session.text().tokenizer.decode(&prompt.ids, Specials::Keep);
        let shown = beginning(&text, LOGGED_BYTES_MAX);
        info!(request_id, bytes = text.len(), prompt = shown, "prompt");
    }
}

/// The finish that a client sees. A reply that someone else cancelled ends like one cut by length.
pub(crate) fn finish_name(finish: &Finish) -> &'static str {
    match finish {
        Finish::Cancelled | Finish::Failed(_) => Finish::Length.name(),
        finish => finish.name(),
    }
}
