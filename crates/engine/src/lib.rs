//! Many conversations in one process: tokens in, tokens out.
//!
//! [`Engine::start`] gives a [`model::Model`] to a thread; [`Handle::submit`] takes a [`Request`] and sends
//! [`Event`]s to a [`Sink`]. Each turn of the loop admits, plans, runs and settles ([`Core::tick`]). The
//! engine knows tokens, slots and pages; it knows no text, no JSON and no tensors.
//!
//! What it keeps true whatever the schedule: a token depends on the tokens before it and the request alone.
//! Plans, measured costs, drafts and cache hits change when work runs and what need not run again, never a
//! token.

mod admit;
mod calibrate;
mod choose;
mod clock;
mod core;
mod costs;
mod disk;
mod disk_files;
mod disk_format;
mod drafting;
mod encoding;
mod event;
pub mod fake;
mod mask;
mod pages;
mod plan;
mod prefix_cache;
mod request;
mod run;
mod running;
mod sampling;
mod settle;
mod store;
mod thread;

pub use clock::{Clock, ManualClock, SystemClock};
pub use core::{Core, Counters, Settings, StartError, Status};
pub use disk::DiskSettings;
pub use event::{
    CacheReport, DraftStats, Event, FinishReason, Miss, Reply, ReplyError, Score, Sink, Stats, Ticket,
};
pub use mask::{Allowed, Mask};
pub use model::{DRAFT_MAX, ImageSpec, Picture};
pub use request::{
    BIAS_MAX, CHOICES_MAX, Checked, DraftPolicy, Drafting, FIRST_MAX, LOGPROBS_MAX, Limits, PictureSpan,
    Refusal, Request, Sampling,
};
pub use store::CacheLimits;
pub use thread::{Engine, Handle};
