//! One log line for each request, written when all of it is over: who, what, how it ended, how long each
//! part took. No text of prompts or replies, no key.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine::Stats;
use tracing::{debug, info, warn};

use super::metrics::Stage;

/// Routes that are asked all the time by programs that watch.
const PROBES: [&str; 4] = ["/health", "/ready", "/metrics", "/slots"];

/// What is known of a request so far. Whoever works on the request holds it; the last one to let go writes
/// the line.
#[derive(Debug)]
pub(crate) struct Entry {
    request_id: String,
    method: String,
    start: Instant,
    line: Mutex<Line>,
}

#[derive(Debug, Default)]
struct Line {
    /// The route's pattern, never the path as written.
    route: Option<String>,
    /// `None` where the client left before the answer.
    status: Option<u16>,
    /// Code of the error.
    code: Option<&'static str>,
    reply: Option<Reply>,
}

/// Numbers of a reply, of all its choices together; times are those of the slowest.
#[derive(Debug, Default)]
struct Reply {
    prompt_tokens: usize,
    cached_tokens: usize,
    generated_tokens: usize,
    drafted: u64,
    accepted: u64,
    queued: Duration,
    prefill: Duration,
    decode: Duration,
    first_token: Option<Duration>,
    finish: Option<&'static str>,
}

impl Entry {
    pub(crate) fn new(request_id: &str, method: &str) -> Self {
        let (request_id, method) = (request_id.to_owned(), method.to_owned());
        Self { request_id, method, start: Instant::now(), line: Mutex::default() }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reply(&self, change: impl FnOnce(&mut Reply)) {
        change(self.line().reply.get_or_insert_default());
    }

    /// The request found its route.
    pub(crate) fn route(&self, route: &str) {
        self.line().route = Some(route.to_owned());
    }

    /// The answer began.
    pub(crate) fn answered(&self, status: u16, code: Option<&'static str>) {
        let mut line = self.line();
        line.status = Some(status);
        line.code = line.code.or(code);
    }

    /// An error after the answer began.
    pub(crate) fn failed(&self, code: &'static str) {
        self.line().code = Some(code);
    }

    /// The first token of any choice.
    pub(crate) fn first_token(&self) {
        let time = self.start.elapsed();
        self.reply(|reply| reply.first_token = reply.first_token.or(Some(time)));
    }

    /// A choice is over in the engine.
    pub(crate) fn finished(&self, stats: &Stats) {
        self.reply(|reply| {
            reply.prompt_tokens = reply.prompt_tokens.max(stats.prompt_tokens);
            reply.cached_tokens = reply.cached_tokens.max(stats.cache.hit_tokens);
            reply.generated_tokens += stats.generated_tokens;
            reply.drafted += stats.drafts.proposed;
            reply.accepted += stats.drafts.accepted;
            reply.queued = reply.queued.max(stats.queued);
            reply.prefill = reply.prefill.max(stats.prefill);
            reply.decode = reply.decode.max(stats.decode);
        });
    }

    /// How a choice ended for the client; the first choice's word stays.
    pub(crate) fn ended(&self, finish: &'static str) {
        self.reply(|reply| reply.finish = reply.finish.or(Some(finish)));
    }

    /// The client left, or was given up, in this stage.
    pub(crate) fn left(&self, stage: Stage) {
        let word = match stage {
            Stage::Queued => "left_queued",
            Stage::Prefill => "left_prefill",
            Stage::Decode => "left_decode",
        };
        // Where the server itself ended the reply, the error's code says why.
        if self.line().code.is_none() {
            self.reply(|reply| reply.finish = Some(word));
        }
    }
}

/// Milliseconds, with three digits behind the point.
pub(crate) fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

impl Drop for Entry {
    fn drop(&mut self) {
        let line = std::mem::take(&mut *self.line());
        let route = line.route.as_deref().unwrap_or("none");
        let status = line.status.unwrap_or(499);
        let (reply, total_ms) = (line.reply.as_ref(), milliseconds(self.start.elapsed()));
        // A level is part of a line's place in the program, so there is one for each.
        macro_rules! write {
            ($level:ident) => {
                $level!(
                    request_id = self.request_id.as_str(),
                    method = self.method.as_str(),
                    route,
                    status,
                    code = line.code,
                    total_ms,
                    prompt_tokens = reply.map(|reply| reply.prompt_tokens),
                    cached_tokens = reply.map(|reply| reply.cached_tokens),
                    generated_tokens = reply.map(|reply| reply.generated_tokens),
                    drafted = reply.map(|reply| reply.drafted),
                    accepted = reply.map(|reply| reply.accepted),
                    queue_ms = reply.map(|reply| milliseconds(reply.queued)),
                    prefill_ms = reply.map(|reply| milliseconds(reply.prefill)),
                    decode_ms = reply.map(|reply| milliseconds(reply.decode)),
                    ttft_ms = reply.and_then(|reply| reply.first_token).map(milliseconds),
                    finish = reply.and_then(|reply| reply.finish),
                    "request"
                )
            };
        }
        match status {
            // What a probe says of the server is logged when it changes (`App::tell_readiness`).
            _ if PROBES.contains(&route) && matches!(status, ..500 | 503) => write!(debug),
            500.. => write!(warn),
            _ => write!(info),
        }
    }
}
