//! `--audit PERCENT`: greedy replies once more, plainly, while nobody asks for anything. No drafts, no cache,
//! nobody beside: the ids must be the same (contracts E1 to E3 of `docs/api.md`).

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel};
use std::sync::{Arc, Weak};
use std::thread::{Builder, sleep};
use std::time::Duration;

use engine::{DraftPolicy, Drafting, Event, FinishReason, Mask, Picture, Request, Sampling};
use tracing::{error, info, warn};

use super::running::Job;
use super::state::{App, Inner, Served};

/// Replies that wait for an idle moment; what ends while so many wait is not audited.
const WAITING_MAX: usize = 16;
/// Time between looks at the engine.
const LOOK: Duration = Duration::from_millis(50);
/// Prompts and replies for `--audit` are drawn by the hundredth of a percent.
const PARTS: f64 = 10_000.0;

/// What came of one audit, as the metric names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AuditResult {
    /// The same ids.
    Equal,
    /// Other ids.
    Different,
    /// It could not be run.
    Failed,
    /// Too many waited already.
    Skipped,
}

impl AuditResult {
    pub(crate) const ALL: [Self; 4] = [Self::Equal, Self::Different, Self::Failed, Self::Skipped];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Equal => "equal",
            Self::Different => "different",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        }
    }
}

/// A reply that is to be made once more when it is over.
pub(crate) struct Audit {
    request_id: String,
    ids: Vec<u32>,
    pictures: Vec<(usize, Arc<Picture>)>,
    sampling: Sampling,
    mask: Option<Box<dyn Mask>>,
    /// What it came to.
    reply: Vec<u32>,
}

impl Audit {
    /// The first reply to the job's first prompt, if it is greedy and the draw takes it.
    pub(crate) fn of(job: &Job, request_id: &str, percent: f64, draw: u64) -> Option<Self> {
        let is_drawn = ((draw % PARTS as u64) as f64) < percent / 100.0 * PARTS;
        let prompt = job.prompts.first().filter(|_| is_drawn && job.sampling.temperature == 0.0)?;
        Some(Self {
            request_id: request_id.to_owned(),
            ids: prompt.ids.clone(),
            pictures: prompt.pictures.clone(),
            sampling: job.sampling.clone(),
            mask: job.mask.as_ref().map(|mask| mask.fork()),
            reply: Vec::new(),
        })
    }

    /// The same with what the reply came to.
    pub(crate) fn ended(self, reply: Vec<u32>) -> Self {
        Self { reply, ..self }
    }

    /// The request that makes it plainly.
    fn request(&self, served: &Served) -> Request {
        let mut request = served.session.request(self.ids.clone(), self.reply.len(), self.pictures.clone());
        request.sampling = self.sampling.clone();
        request.mask = self.mask.as_ref().map(|mask| mask.fork());
        request.cache = false;
        request.drafting = Drafting { policy: DraftPolicy::Off, mtp: false, copy: false, first: 1 };
        request
    }

    /// Compares, and says loudly what differs.
    fn judge(&self, found: &[u32]) -> AuditResult {
        if found == self.reply {
            info!(request_id = self.request_id.as_str(), tokens = found.len(), "audit: equal");
            return AuditResult::Equal;
        }
        let at = self.reply.iter().zip(found).take_while(|(a, b)| a == b).count();
        error!(
            request_id = self.request_id.as_str(),
            token = at,
            served = self.reply.get(at),
            plain = found.get(at),
            "AUDIT: a reply differs from the same one made plainly; please report it with \
             `clary bundle` of a recorded request"
        );
        AuditResult::Different
    }
}

/// The way to the thread that audits.
pub(crate) struct Auditor(SyncSender<Audit>);

impl Auditor {
    /// Starts the thread; it ends with the server.
    pub(crate) fn start(inner: Weak<Inner>) -> Option<Self> {
        let (sender, receiver) = sync_channel(WAITING_MAX);
        let thread = Builder::new().name("audit".to_owned()).spawn(move || work(&inner, &receiver));
        if let Err(problem) = &thread {
            warn!("no replies are audited: {problem}");
        }
        thread.is_ok().then_some(Self(sender))
    }

    /// Takes a reply; false if too many wait.
    pub(crate) fn take(&self, audit: Audit) -> bool {
        self.0.try_send(audit).is_ok()
    }
}

fn work(inner: &Weak<Inner>, audits: &Receiver<Audit>) {
    while let Ok(audit) = audits.recv() {
        loop {
            let Some(app) = inner.upgrade().map(App) else { return };
            let Some(served) = app.model().cloned() else { break };
            if is_idle(&served)
                && let Some(result) = run(&served, &audit)
            {
                app.metrics().audited(result);
                break;
            }
            drop((app, served));
            sleep(LOOK);
        }
    }
}

fn is_idle(served: &Served) -> bool {
    let status = served.session.engine().status();
    status.prefilling + status.decoding + status.queued == 0
}

/// Makes the reply once more. `None`: others came and go first.
fn run(served: &Served, audit: &Audit) -> Option<AuditResult> {
    let (sender, events) = channel();
    let sink = Box::new(move |event: Event| drop(sender.send(event)));
    let engine = served.session.engine();
    let failed = |what: &str| {
        warn!(request_id = audit.request_id.as_str(), "audit: {what}");
        Some(AuditResult::Failed)
    };
    let ticket = match engine.submit(audit.request(served), sink) {
        Ok(ticket) => ticket,
        Err(refusal) => return failed(&refusal.to_string()),
    };
    let mut found = Vec::new();
    loop {
        match events.recv_timeout(LOOK) {
            Ok(Event::Tokens { tokens, .. }) => found.extend(tokens),
            Ok(Event::Finished { reason: FinishReason::Failed(error), .. }) => {
                return failed(&error.to_string());
            }
            Ok(Event::Finished { .. }) => return Some(audit.judge(&found)),
            Ok(_) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return failed("the engine has stopped"),
        }
        let status = engine.status();
        if status.queued > 0 || status.prefilling + status.decoding > 1 {
            // It would hold up those who wait for an answer.
            drop(ticket);
            return None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_told_apart() {
        let audit = Audit {
            request_id: "r".to_owned(),
            ids: vec![1],
            pictures: Vec::new(),
            sampling: Sampling::default(),
            mask: None,
            reply: vec![1, 2, 3],
        };
        assert_eq!(audit.judge(&[1, 2, 3]), AuditResult::Equal);
        for found in [&[1, 2][..], &[1, 2, 4], &[1, 2, 3, 4]] {
            assert_eq!(audit.judge(found), AuditResult::Different);
        }
    }
}
