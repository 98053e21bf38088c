//! Who sits in which slot: what `/slots` shows. Written on the engine thread from its own events, so that it
//! never lags behind the engine.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use utoipa::ToSchema;

/// What a slot is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SlotState {
    /// Nothing.
    Idle,
    /// Waiting for a picture to be encoded.
    Image,
    /// Reading a prompt.
    Prefill,
    /// Writing a reply.
    Decode,
}

/// One slot.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct SlotView {
    /// Place in the list.
    pub id: usize,
    /// What it is doing.
    pub state: SlotState,
    /// Tokens of its context.
    pub n_ctx: usize,
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// Prompt tokens from the cache.
    pub n_cached: usize,
    /// Tokens generated.
    pub n_decoded: usize,
    /// Share of drafts that were right, of the reply that ended here last; null before.
    pub draft_accept: Option<f32>,
    /// Whose request it is.
    pub request_id: Option<String>,
    /// Age of the request since it has the slot.
    pub age_ms: u64,
}

#[derive(Clone, Debug, Default)]
struct Row {
    request: Option<Taken>,
    draft_accept: Option<f32>,
}

#[derive(Clone, Debug)]
struct Taken {
    id: String,
    since: Instant,
    decoding: bool,
    prompt: usize,
    cached: usize,
    decoded: usize,
}

#[derive(Debug)]
struct Rows {
    rows: Vec<Row>,
    last_token: Instant,
}

/// The slots of an engine.
#[derive(Debug)]
pub(crate) struct Board(Mutex<Rows>);

impl Board {
    pub(crate) fn new(slots: usize) -> Self {
        Self(Mutex::new(Rows { rows: vec![Row::default(); slots], last_token: Instant::now() }))
    }

    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A choice of a request got this slot of the engine.
    pub(crate) fn admit(&self, slot: usize, request: &str, prompt: usize, cached: usize) {
        let (id, since) = (request.to_owned(), Instant::now());
        let taken = Taken { id, since, decoding: false, prompt, cached, decoded: 0 };
        self.rows().rows[slot].request = Some(taken);
    }

    /// Its prompt is read.
    pub(crate) fn prefilled(&self, slot: usize) {
        if let Some(taken) = &mut self.rows().rows[slot].request {
            taken.decoding = true;
        }
    }

    /// It wrote some tokens.
    pub(crate) fn decoded(&self, slot: usize, tokens: usize) {
        let mut rows = self.rows();
        rows.last_token = Instant::now();
        if let Some(taken) = &mut rows.rows[slot].request {
            taken.decoded += tokens;
        }
    }

    /// It is over.
    pub(crate) fn leave(&self, slot: usize, draft_accept: Option<f32>) {
        self.rows().rows[slot] = Row { request: None, draft_accept };
    }

    /// Time since any slot wrote a token.
    pub(crate) fn token_age(&self) -> Duration {
        self.rows().last_token.elapsed()
    }

    /// All slots. Those in `encoding` wait for pictures.
    pub(crate) fn view(&self, context: usize, encoding: &[usize]) -> Vec<SlotView> {
        let rows = self.rows();
        let view = |(id, row): (usize, &Row)| {
            let request = row.request.as_ref();
            SlotView {
                id,
                state: match request {
                    None => SlotState::Idle,
                    Some(taken) if taken.decoding => SlotState::Decode,
                    Some(_) if encoding.contains(&id) => SlotState::Image,
                    Some(_) => SlotState::Prefill,
                },
                n_ctx: context,
                n_prompt: request.map_or(0, |taken| taken.prompt),
                n_cached: request.map_or(0, |taken| taken.cached),
                n_decoded: request.map_or(0, |taken| taken.decoded),
                draft_accept: row.draft_accept,
                request_id: request.map(|taken| taken.id.clone()),
                age_ms: request.map_or(0, |taken| taken.since.elapsed().as_millis() as u64),
            }
        };
        rows.rows.iter().enumerate().map(view).collect()
    }
}
