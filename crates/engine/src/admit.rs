//! From the queue to a slot, and out of both when nobody listens any more.

use std::sync::mpsc::TryRecvError;
use std::time::Duration;

use model::{PAGE_TOKENS, SlotId};

use crate::choose::Account;
use crate::core::{Core, Job, shared_namespace};
use crate::disk_files::Payload;
use crate::drafting::CopyIndex;
use crate::event::{CacheReport, Event, FinishReason, Miss, ReplyError};
use crate::prefix_cache::Found;
use crate::request::Checked;
use crate::running::{Running, Wish, prompt_keys, snapshots_at};
use crate::sampling::Penalties;
use crate::store::{Fetch, Resumed};

/// Jobs that may wait for the disk at once.
const DISK_READS_MAX: usize = 4;
/// Longest wait of a job for the disk; then its prompt is computed.
const DISK_WAIT_MAX: Duration = Duration::from_secs(2);
/// How long an engine with nothing to step waits for the disk before it looks around.
const DISK_NAP: Duration = Duration::from_millis(5);

/// What a job has of the cache's disk tier.
pub(crate) enum FromDisk {
    /// Nobody has looked.
    Unasked,
    /// On its way.
    Asked { fetch: Fetch, since: Duration },
    /// In memory, or not to be had.
    Settled,
}

impl Core {
    /// Ends what was cancelled or waited too long.
    pub(crate) fn reap(&mut self) {
        for slot in 0..self.slots.len() {
            if self.slots[slot].as_ref().is_some_and(|running| running.reply.cancelled(running.choice)) {
                self.retire(slot, FinishReason::Cancelled);
            }
        }
        let now = self.clock.now();
        let mut at = 0;
        while at < self.queue.len() {
            let job = &self.queue[at];
            let waited = now.saturating_sub(job.arrived);
            let reason = match () {
                () if job.reply.cancelled(job.choice) => FinishReason::Cancelled,
                () if waited > self.settings.queue_timeout => {
                    FinishReason::Failed(ReplyError::QueueTimeout { waited })
                }
                () => {
                    at += 1;
                    continue;
                }
            };
            if let Some(job) = self.queue.remove(at) {
                self.refuse(job, reason);
            }
        }
    }

    /// Gives free slots to waiting jobs, first come first served: a job that does not fit holds back those
    /// behind.
    pub(crate) fn admit(&mut self) {
        while let Some(slot) = self.slots.iter().position(Option::is_none) {
            let Some(at) = (0..self.queue.len()).find(|&at| self.ready(at) && self.disk_settled(at)) else {
                return;
            };
            let Some(job) = self.queue.remove(at) else { return };
            if let Err(job) = self.place(slot, job) {
                self.queue.insert(at, *job);
                return;
            }
        }
    }

    /// A choice waits for the prompt of the choice before it, which it then shares.
    fn ready(&self, at: usize) -> bool {
        let job = &self.queue[at];
        let earlier = self.queue.iter().take(at).any(|other| other.order == job.order);
        let prefills = |running: &Running| running.order == job.order && running.prefills();
        !earlier && !self.slots.iter().flatten().any(prefills)
    }

    /// Whether a job needs nothing from disk any more; asks for what it needs.
    fn disk_settled(&mut self, at: usize) -> bool {
        let now = self.clock.now();
        let asked = |job: &Job| matches!(job.disk, FromDisk::Asked { .. });
        let reads = self.queue.iter().filter(|job| asked(job)).count();
        let job = &mut self.queue[at];
        match &job.disk {
            FromDisk::Settled => true,
            FromDisk::Unasked if reads >= DISK_READS_MAX => false,
            FromDisk::Unasked => {
                let scored = job.request.prompt_logprobs.is_some() && job.choice == 0;
                let namespace = job.namespace.as_deref().filter(|_| !scored);
                let fetch = namespace.and_then(|name| self.store.fetch(name, &job.keys, job.keys.len() - 1));
                job.disk = fetch.map_or(FromDisk::Settled, |fetch| FromDisk::Asked { fetch, since: now });
                matches!(job.disk, FromDisk::Settled)
            }
            FromDisk::Asked { fetch, since } => match fetch.answer.try_recv() {
                Ok(payload) => {
                    self.take_from_disk(at, payload);
                    true
                }
                Err(TryRecvError::Empty) if now.saturating_sub(*since) <= DISK_WAIT_MAX => false,
                // Too slow, or its thread is gone: computing is always possible.
                Err(_) => {
                    job.disk = FromDisk::Settled;
                    true
                }
            },
        }
    }

    fn take_from_disk(&mut self, at: usize, payload: Option<Payload>) {
        let job = &mut self.queue[at];
        let FromDisk::Asked { fetch, .. } = std::mem::replace(&mut job.disk, FromDisk::Settled) else {
            return;
        };
        if let Some(namespace) = &job.namespace {
            let keys = &job.keys[..fetch.position];
            self.store.take_fetched(&mut *self.model, namespace, keys, fetch.shared, payload);
        }
    }

    /// Where nothing can be stepped, waits a moment for the first answer that a job wants from disk.
    pub(crate) fn wait_for_disk(&mut self) {
        let asked = self.queue.iter().position(|job| matches!(job.disk, FromDisk::Asked { .. }));
        let Some(at) = asked else { return };
        let FromDisk::Asked { fetch, .. } = &self.queue[at].disk else { return };
        if let Ok(payload) = fetch.answer.recv_timeout(DISK_NAP) {
            self.take_from_disk(at, payload);
        }
    }

    /// Starts a job in a slot, or gives it back where memory does not suffice now.
    fn place(&mut self, slot: usize, job: Job) -> Result<(), Box<Job>> {
        let request = &job.request;
        let length_max = request.length_max(self.spec.context_max);
        let mut found = self.look_up(&job);
        let pages_max = length_max.div_ceil(PAGE_TOKENS);
        let id = SlotId(slot as u32);
        match self.store.admit(&mut *self.model, id, &mut found, pages_max) {
            Ok(Some(resumed)) => self.start(slot, job, length_max, &found, resumed),
            Ok(None) => return Err(Box::new(job)),
            Err(error) => {
                let fault = ReplyError::DeviceFault { message: error.to_string() };
                self.refuse(job, FinishReason::Failed(fault));
            }
        }
        Ok(())
    }

    /// What the cache would give a request now. Changes nothing.
    pub fn look_up_now(&self, checked: &Checked) -> CacheReport {
        let request = &checked.0;
        if !request.cache || !self.store.caches() || request.prompt_logprobs.is_some() {
            return CacheReport { hit_tokens: 0, known_tokens: 0, miss: Some(Miss::Off) };
        }
        let keys = prompt_keys(request);
        let found = self.store.known(&shared_namespace(&request.namespace), &keys, keys.len() - 1);
        CacheReport { hit_tokens: found.position, known_tokens: found.known, miss: found.miss }
    }

    fn look_up(&self, job: &Job) -> Found {
        // Rows that are scored must run; one row must run to be drawn from.
        let scored = job.request.prompt_logprobs.is_some() && job.choice == 0;
        match &job.namespace {
            Some(namespace) if !scored => self.store.find(namespace, &job.keys, job.keys.len() - 1),
            _ => Found { entry: None, position: 0, known: 0, miss: Some(Miss::Off) },
        }
    }

    fn start(&mut self, slot: usize, job: Job, length_max: usize, found: &Found, resumed: Resumed) {
        let now = self.clock.now();
        let cache = CacheReport { hit_tokens: resumed.position, known_tokens: found.known, miss: found.miss };
        let queued = now.saturating_sub(job.arrived);
        let event = Event::Admitted { choice: job.choice, slot: slot as u32, cache, queued };
        self.counters.prompt_cached += resumed.position as u64;
        let snapshots_at = match job.namespace {
            Some(_) => snapshots_at(&job.request, resumed.position, self.store.limits(), self.spec.snapshots),
            None => Vec::new(),
        };
        let mut tokens = Vec::with_capacity(length_max);
        tokens.extend(&job.request.prompt);
        let mut keys = Vec::with_capacity(length_max);
        keys.extend(job.keys.iter());
        job.reply.send(event);
        let features = vec![None; job.request.pictures.len()];
        self.slots[slot] = Some(Running {
            features,
            image: Default::default(),
            order: job.order,
            penalties: Penalties::new(&job.request.sampling, &job.request.prompt),
            request: job.request,
            choice: job.choice,
            reply: job.reply,
            namespace: job.namespace,
            tokens,
            keys,
            committed: resumed.position,
            length_max,
            places_max: length_max.next_multiple_of(PAGE_TOKENS).min(self.spec.context_max),
            pages: resumed.pages,
            reserved: resumed.reserved,
            snapshots_at,
            entries: resumed.entry.into_iter().collect(),
            mask: job.mask,
            copies: CopyIndex::default(),
            odds_mtp: self.odds_mtp,
            odds_copy: self.odds_copy,
            drafting: Wish::default(),
            account: Account::default(),
            kept_up: true,
            unknown: 0,
            // A drafter that is not known to pay is not kept up before it is asked.
            since_asked: if self.costs.model_drafts_win() { 0 } else { u32::MAX },
            cache,
            checkpoint: 0,
            drafts: Default::default(),
            arrived: job.arrived,
            admitted: now,
            prefilled: now,
        });
        self.keep_up(slot);
    }
}
