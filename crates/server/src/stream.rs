//! A running reply as its caller sees it.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use engine::{CacheReport, Event, FinishReason, ReplyError, Sink, Stats, Ticket};
use text::{Note, Piece};

use crate::{Outcome, ReplyReader};

/// What became of a reply since the last look.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// It has a slot and prefill begins.
    Admitted(CacheReport),
    /// A piece of it.
    Piece(Piece),
    /// Nothing yet.
    Idle,
    /// It is over. Nothing follows.
    Finished(Box<Outcome>),
}

/// A running reply. Dropping it cancels the reply.
pub struct Stream {
    reader: ReplyReader,
    events: Receiver<Event>,
    ticket: Option<Ticket>,
    ready: VecDeque<Update>,
    is_over: bool,
}

impl Stream {
    /// A sink for the engine and the other end of it.
    pub(crate) fn channel() -> (Box<dyn Sink>, Receiver<Event>) {
        let (sender, receiver) = channel();
        // A failed send means that the stream was dropped, which has cancelled the reply.
        let sink = move |event: Event| drop(sender.send(event));
        (Box::new(sink), receiver)
    }

    pub(crate) fn new(
        reader: ReplyReader,
        events: Receiver<Event>,
        ticket: Ticket,
        notes: Vec<Note>,
    ) -> Self {
        let ready = notes.into_iter().map(|note| Update::Piece(Piece::Note(note))).collect();
        Self { reader, events, ticket: Some(ticket), ready, is_over: false }
    }

    /// Asks the engine to stop. The outcome still comes, with all that was read before.
    pub fn cancel(&mut self) {
        self.ticket = None;
    }

    /// Waits at most `wait` for something new. After [`Update::Finished`] it is [`Update::Idle`] for ever.
    pub fn next(&mut self, wait: Duration) -> Update {
        loop {
            if let Some(update) = self.ready.pop_front() {
                return update;
            }
            if self.is_over {
                return Update::Idle;
            }
            match self.events.recv_timeout(wait) {
                Ok(event) => self.take(event),
                Err(RecvTimeoutError::Timeout) => return Update::Idle,
                Err(RecvTimeoutError::Disconnected) => {
                    let reason = ReplyError::Stopped { reason: "its thread ended".into() };
                    self.finish(FinishReason::Failed(reason), Stats::default());
                }
            }
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Admitted { cache, .. } => self.ready.push_back(Update::Admitted(cache)),
            Event::Tokens { tokens, .. } => {
                let pieces = self.reader.push(&tokens);
                self.ready.extend(pieces.into_iter().map(Update::Piece));
                if self.reader.ended() {
                    self.cancel();
                }
            }
            Event::Finished { reason, stats, .. } => self.finish(reason, *stats),
            Event::PromptScores { .. } | Event::Prefilled { .. } => {}
        }
    }

    fn finish(&mut self, reason: FinishReason, stats: Stats) {
        let (pieces, outcome) = Outcome::close(&mut self.reader, reason, stats);
        self.ready.extend(pieces.into_iter().map(Update::Piece));
        self.is_over = true;
        self.ready.push_back(Update::Finished(Box::new(outcome)));
    }
}
