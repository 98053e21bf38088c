//! The engine's end of a request: counts what passes and hands it on. Runs on the engine thread and never
//! blocks.

use std::sync::Arc;
use std::time::Instant;

use engine::{Event, FinishReason, Sink, Stats};
use tokio::sync::mpsc::UnboundedSender;

use super::app::Context;
use super::log::Entry;
use super::state::{App, Served};

/// A sink for one prompt of a request.
pub(crate) struct Track {
    app: App,
    served: Arc<Served>,
    request_id: String,
    log: Arc<Entry>,
    /// Which prompt of the request.
    prompt: usize,
    prompt_tokens: usize,
    arrived: Instant,
    /// Slot and last token time of each choice.
    choices: Vec<(Option<usize>, Option<Instant>)>,
    events: UnboundedSender<(usize, Event)>,
}

impl Track {
    pub(crate) fn new(
        app: &App,
        served: &Arc<Served>,
        context: &Context,
        (prompt, prompt_tokens): (usize, usize),
        choices: u32,
        events: UnboundedSender<(usize, Event)>,
    ) -> Self {
        Self {
            app: app.clone(),
            served: served.clone(),
            request_id: context.request_id.clone(),
            log: context.log.clone(),
            prompt,
            prompt_tokens,
            arrived: Instant::now(),
            choices: vec![(None, None); choices as usize],
            events,
        }
    }

    fn tokens(&mut self, choice: usize, count: usize) {
        let now = Instant::now();
        let (slot, last) = &mut self.choices[choice];
        if let Some(slot) = slot {
            self.served.board.decoded(*slot, count);
        }
        let metrics = self.app.metrics();
        match last.replace(now) {
            None => {
                metrics.ttft.observe((now - self.arrived).as_secs_f64());
                self.log.first_token();
            }
            Some(before) => {
                let each = (now - before).as_secs_f64() / count.max(1) as f64;
                (0..count).for_each(|_| metrics.inter_token.observe(each));
            }
        }
    }

    fn finished(&mut self, choice: usize, reason: &FinishReason, stats: &Stats) {
        if let (Some(slot), _) = self.choices[choice] {
            let drafts = &stats.drafts;
            let accepted = drafts.accepted as f32 / drafts.proposed.max(1) as f32;
            self.served.board.leave(slot, (drafts.proposed > 0).then_some(accepted));
        }
        self.log.finished(stats);
        let metrics = self.app.metrics();
        if !matches!(reason, FinishReason::Cancelled | FinishReason::Failed(_)) {
            metrics.prefill.observe(stats.prefill.as_secs_f64());
            metrics.request.observe(self.arrived.elapsed().as_secs_f64());
        }
    }
}

impl Sink for Track {
    fn event(&mut self, event: Event) {
        match &event {
            Event::Admitted { choice, slot, cache, queued } => {
                self.app.metrics().queued.observe(queued.as_secs_f64());
                let slot = *slot as usize;
                self.served.board.admit(slot, &self.request_id, self.prompt_tokens, cache.hit_tokens);
                self.choices[*choice as usize].0 = Some(slot);
            }
            Event::Prefilled { choice, .. } => {
                if let (Some(slot), _) = self.choices[*choice as usize] {
                    self.served.board.prefilled(slot);
                }
            }
            Event::Tokens { choice, tokens, .. } => self.tokens(*choice as usize, tokens.len()),
            Event::Finished { choice, reason, stats } => self.finished(*choice as usize, reason, stats),
            Event::PromptScores { .. } => {}
        }
        // A failed send means that the request was dropped, which has cancelled it.
        drop(self.events.send((self.prompt, event)));
    }
}
