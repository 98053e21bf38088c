//! What a caller hears: events of each choice, in order, ending with exactly one [`Event::Finished`].

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use model::DRAFT_MAX;

use crate::request::CHOICES_MAX;

/// Receiver of events. Called on the engine thread: it must not block.
pub trait Sink: Send {
    /// Takes the next event.
    fn event(&mut self, event: Event);
}

impl<F: FnMut(Event) + Send> Sink for F {
    fn event(&mut self, event: Event) {
        self(event);
    }
}

/// Something happened to a choice of the request.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The choice has a slot.
    Admitted {
        /// Choice index.
        choice: u32,
        /// Its slot, an index below [`crate::Limits`]' slots.
        slot: u32,
        /// What the prefix cache gave.
        cache: CacheReport,
        /// Time in the queue.
        queued: Duration,
    },
    /// Log-probabilities of prompt tokens `from ..`, in order, without gaps (only of choice 0). The first
    /// token of a prompt has none: `from` starts at 1.
    PromptScores {
        /// Index of the first scored token in the prompt.
        from: usize,
        /// One score for each token.
        scores: Vec<Score>,
    },
    /// The whole prompt has been computed.
    Prefilled {
        /// Choice index.
        choice: u32,
        /// Prompt tokens that were computed, not taken from the cache.
        computed: usize,
    },
    /// New tokens; several at once where drafts were accepted. A stop token is among them.
    Tokens {
        /// Choice index.
        choice: u32,
        /// The ids.
        tokens: Vec<u32>,
        /// Their log-probabilities where asked for, else empty.
        scores: Vec<Score>,
    },
    /// The choice is over. Nothing follows.
    Finished {
        /// Choice index.
        choice: u32,
        /// Why.
        reason: FinishReason,
        /// Numbers.
        stats: Box<Stats>,
    },
}

/// Log-probability of a token in the raw distribution: before temperature, penalties, bias and masks.
#[derive(Clone, Debug, PartialEq)]
pub struct Score {
    /// The token.
    pub token: u32,
    /// Natural logarithm.
    pub logprob: f32,
    /// The best tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// Why a choice ended.
#[derive(Clone, Debug, PartialEq)]
pub enum FinishReason {
    /// One of the model's end tokens.
    Eos(u32),
    /// One of the request's stop tokens.
    Stop(u32),
    /// `max_tokens` or the end of the context.
    Length,
    /// The ticket was dropped, or the choice cancelled by itself.
    Cancelled,
    /// It failed.
    Failed(ReplyError),
}

/// Why a reply failed after it was taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// A logit was not finite.
    #[error("numerical fault: the logits after token {position} are not finite")]
    NumericalFault {
        /// Length of the sequence before the token that could not be drawn.
        position: usize,
    },
    /// A call to the model failed.
    #[error("device fault: {message}")]
    DeviceFault {
        /// What the model says.
        message: String,
    },
    /// No slot in time.
    #[error("waited {waited:?} for a slot; try again later")]
    QueueTimeout {
        /// Time in the queue.
        waited: Duration,
    },
    /// The constraint allows no further token.
    #[error("the constraint allows no token at position {position}")]
    ConstraintDeadEnd {
        /// Length of the sequence.
        position: usize,
    },
    /// The engine stopped, by itself or by order.
    #[error("the engine has stopped: {reason}")]
    Stopped {
        /// Why.
        reason: String,
    },
}

/// What the prefix cache gave, and why not more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheReport {
    /// Prompt tokens that need not be computed.
    pub hit_tokens: usize,
    /// Leading prompt tokens that the cache knows, with or without a snapshot.
    pub known_tokens: usize,
    /// Why the hit ends where it ends; `None` if it covers all but the last token.
    pub miss: Option<Miss>,
}

/// Why a cache hit ends before the prompt does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// The request does not use the cache.
    Off,
    /// Nothing is cached under this namespace.
    Empty,
    /// Everything cached differs from the prompt at this token.
    Differs {
        /// Index in the prompt.
        at: usize,
    },
    /// The cached sequence ends here; the prompt goes on.
    Ends {
        /// Index in the prompt.
        at: usize,
    },
    /// The tokens are known further, but a state was kept only up to here.
    Checkpoint {
        /// Index in the prompt.
        at: usize,
    },
    /// There is memory of the tokens, but not enough room to take it over now.
    NoRoom,
}

/// Numbers of a choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// Cache use.
    pub cache: CacheReport,
    /// Position of the last snapshot that this choice left in the cache, 0 for none.
    pub checkpoint_tokens: usize,
    /// Time in the queue.
    pub queued: Duration,
    /// Time that the prompt waited for its pictures to be encoded.
    pub image: Duration,
    /// Time from the slot to the end of the prompt.
    pub prefill: Duration,
    /// Time from the end of the prompt to the end of the reply.
    pub decode: Duration,
    /// Drafting.
    pub drafts: DraftStats,
}

/// Numbers of drafting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftStats {
    /// Steps that drew tokens of this choice.
    pub steps: u64,
    /// Steps among them that verified drafts.
    pub rounds: u64,
    /// Drafted tokens that were verified.
    pub proposed: u64,
    /// Those that equalled the target's draw.
    pub accepted: u64,
    /// Accepted tokens by their place in the window's path.
    pub accepted_by_position: [u64; DRAFT_MAX],
    /// Rounds in which some row was not kept.
    pub rollbacks: u64,
}

impl DraftStats {
    /// Adds another's numbers.
    pub fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.rounds += other.rounds;
        self.proposed += other.proposed;
        self.accepted += other.accepted;
        for (sum, more) in self.accepted_by_position.iter_mut().zip(other.accepted_by_position) {
            *sum += more;
        }
        self.rollbacks += other.rollbacks;
    }
}

/// Keeps a request alive; dropping it cancels.
#[derive(Debug)]
pub struct Ticket(Arc<Cancelled>);

impl Ticket {
    /// Cancels one choice; the others go on. Nothing where there is no such choice or it has ended.
    pub fn cancel(&self, choice: u32) {
        if choice < CHOICES_MAX {
            self.0.0.fetch_or(1 << choice, Ordering::Release);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.0.store(u32::MAX, Ordering::Release);
    }
}

/// Which choices nobody wants any more, one bit each.
#[derive(Debug, Default)]
struct Cancelled(AtomicU32);

const _: () = assert!(CHOICES_MAX <= u32::BITS, "a bit for every choice");

/// The engine's end of a request: where events go, and whether anyone still wants them.
#[derive(Clone)]
pub struct Reply {
    sink: Arc<Mutex<Box<dyn Sink>>>,
    cancelled: Arc<Cancelled>,
}

impl Reply {
    /// A reply that goes to `sink` until the ticket is dropped.
    pub fn new(sink: Box<dyn Sink>) -> (Self, Ticket) {
        let cancelled = Arc::new(Cancelled::default());
        (Self { sink: Arc::new(Mutex::new(sink)), cancelled: cancelled.clone() }, Ticket(cancelled))
    }

    pub(crate) fn send(&self, event: Event) {
        self.sink.lock().unwrap_or_else(PoisonError::into_inner).event(event);
    }

    pub(crate) fn cancelled(&self, choice: u32) -> bool {
        self.cancelled.0.load(Ordering::Acquire) >> choice & 1 == 1
    }
}
