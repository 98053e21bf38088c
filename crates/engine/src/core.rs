//! The engine without its thread: state, and one step at a time.
//!
//! [`Core::tick`] is the whole loop body: reap what was cancelled, admit from the queue, plan, run, settle.
//! The thread of [`crate::Engine`] only calls it; tests and the schedule simulation call it themselves.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use model::{Model, PAGE_TOKENS, Spec};

use crate::admit::FromDisk;
use crate::choose::Odds;
use crate::clock::Clock;
use crate::costs::Costs;
use crate::disk::{DiskSettings, DiskTier};
use crate::encoding::Encoder;
use crate::event::{DraftStats, Event, FinishReason, Reply, ReplyError, Stats};
use crate::mask::Mask;
use crate::plan::{Part, plan};
use crate::request::{Checked, Limits, Request};
use crate::running::Running;
use crate::store::{CacheLimits, Store};

/// Settings of an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Token ids that the tokenizer can make; the model's table may be wider.
    pub vocabulary: usize,
    /// End tokens of the model.
    pub eos: Vec<u32>,
    /// Most requests that wait for a slot.
    pub queue_max: usize,
    /// Longest wait for a slot.
    pub queue_timeout: Duration,
    /// Target for the longest time between two steps of a running stream.
    pub max_stall: Duration,
    /// Prefix cache.
    pub cache: CacheLimits,
    /// Disk tier of the prefix cache.
    pub disk: Option<DiskSettings>,
    /// A drafted chain of the automatic policy ends before a token that its drafter finds less likely than
    /// this.
    pub confidence: f32,
    /// Whether the costs of windows are measured at start, on an empty slot.
    pub calibrate: bool,
}

impl Settings {
    /// Defaults for a tokenizer of `vocabulary` ids.
    pub fn new(vocabulary: usize, eos: Vec<u32>) -> Self {
        Self {
            vocabulary,
            eos,
            queue_max: 128,
            queue_timeout: Duration::from_secs(600),
            max_stall: Duration::from_millis(200),
            cache: CacheLimits::default(),
            disk: None,
            confidence: 0.3,
            calibrate: true,
        }
    }
}

/// Why an engine does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The model's limits leave nothing to run.
    #[error("{what}: {found} found, at least {least} needed; raise --memory-limit or lower --slots")]
    TooSmall {
        /// Which limit.
        what: &'static str,
        /// Its value.
        found: usize,
        /// The least that works.
        least: usize,
    },
    /// The folder of the prefix cache may not hold a single state.
    #[error(
        "prefix cache folder {folder}: at most {bytes_max} bytes may be in it, and one state takes {needed}"
    )]
    DiskTooSmall {
        /// The folder.
        folder: String,
        /// Most bytes that may be in it.
        bytes_max: u64,
        /// Bytes of a state.
        needed: u64,
    },
    /// The folder of the disk tier cannot be used.
    #[error("prefix cache folder {folder}: {source}")]
    Disk {
        /// The folder.
        folder: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// The thread could not be made.
    #[error("engine thread: {0}")]
    Thread(std::io::Error),
}

/// A choice that waits for a slot.
pub(crate) struct Job {
    /// Order of arrival of the request; its choices share it.
    pub(crate) order: u64,
    pub(crate) request: Rc<Request>,
    pub(crate) choice: u32,
    pub(crate) mask: Option<Box<dyn Mask>>,
    pub(crate) reply: Reply,
    pub(crate) arrived: Duration,
    /// Keys of the prompt in the prefix cache.
    pub(crate) keys: Rc<[u64]>,
    /// Division of the prefix cache; `None` where it is not used.
    pub(crate) namespace: Option<Rc<str>>,
    /// What it waits for from the cache's disk tier.
    pub(crate) disk: FromDisk,
}

/// Numbers of an engine since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Steps of the model.
    pub steps: u64,
    /// Prompt tokens computed.
    pub prompt_computed: u64,
    /// Prompt tokens taken from the cache.
    pub prompt_cached: u64,
    /// Pictures encoded.
    pub pictures_encoded: u64,
    /// Pictures whose features were still there.
    pub pictures_cached: u64,
    /// Tokens generated.
    pub generated: u64,
    /// Choices that ended.
    pub finished: u64,
    /// Those that were cancelled.
    pub cancelled: u64,
    /// Those that failed.
    pub failed: u64,
    /// Those with a non-finite logit.
    pub numerical_faults: u64,
    /// Drafting.
    pub drafts: DraftStats,
}

/// What an engine is doing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// Choices in prefill.
    pub prefilling: usize,
    /// Slots in prefill that wait for pictures to be encoded.
    pub encoding: Vec<usize>,
    /// Choices in decode.
    pub decoding: usize,
    /// All slots.
    pub slots: usize,
    /// Choices that wait for a slot.
    pub queued: usize,
    /// Tokens in K/V pages of slots.
    pub kv_tokens: usize,
    /// Tokens all pages together could hold.
    pub kv_tokens_max: usize,
    /// Bytes of the prefix cache.
    pub cache_bytes: u64,
    /// Limit of the same.
    pub cache_bytes_max: u64,
    /// Bytes of kept picture features, part of the cache's bytes: memory that is taken as they come.
    pub cache_feature_bytes: u64,
    /// Kept positions.
    pub cache_entries: usize,
    /// Files that the cache's disk tier could not write.
    pub disk_failures: u64,
    /// Why it could not write the last of them.
    pub disk_failure: Option<std::io::ErrorKind>,
    /// Time of the last finished step by the engine's clock.
    pub last_step: Duration,
    /// Numbers since start.
    pub counters: Counters,
}

/// The engine's state. See the module's text.
pub struct Core {
    pub(crate) model: Box<dyn Model>,
    pub(crate) spec: Spec,
    pub(crate) settings: Settings,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) store: Store,
    pub(crate) slots: Vec<Option<Running>>,
    pub(crate) queue: VecDeque<Job>,
    pub(crate) costs: Costs,
    pub(crate) counters: Counters,
    /// What streams start from.
    pub(crate) odds_mtp: Odds,
    pub(crate) odds_copy: Odds,
    pub(crate) last_step: Duration,
    /// Pictures on their way through the model, and those that went.
    pub(crate) encoder: Encoder,
    /// Failed steps since the last good one.
    pub(crate) faults_in_row: u32,
    /// Tokens that are told while the next step runs.
    pub(crate) told: Vec<(Reply, Event)>,
    /// Whether those of the current round are.
    pub(crate) tells_later: bool,
    /// Whether ticks follow one another at once, so that they may be.
    ticks_on: bool,
    arrivals: u64,
}

/// Failed steps in a row after which a device counts as lost.
const FAULTS_MAX: u32 = 8;

impl Core {
    /// An engine over a fresh model.
    pub fn new(model: Box<dyn Model>, settings: Settings, clock: Arc<dyn Clock>) -> Result<Self, StartError> {
        let spec = model.spec().clone();
        let least = |what, found, least| match found >= least {
            true => Ok(()),
            false => Err(StartError::TooSmall { what, found, least }),
        };
        least("slots", spec.slots, 1)?;
        least("pages", spec.pages, 1)?;
        least("rows of a step", spec.rows_max, 2)?;
        least("rows of logits of a step", spec.logits_rows_max, 2)?;
        least("vocabulary", settings.vocabulary.min(spec.vocabulary), 1)?;
        let disk = settings.disk.clone().map(|disk| {
            let folder = disk.folder.display().to_string();
            let (bytes_max, needed) = (disk.bytes_max, spec.snapshot_bytes as u64);
            if bytes_max < needed {
                return Err(StartError::DiskTooSmall { folder, bytes_max, needed });
            }
            DiskTier::open(disk).map_err(|source| StartError::Disk { folder, source })
        });
        let encoder = Encoder::new(model.image_spec(), settings.cache.bytes_max);
        let bytes_max = settings.cache.bytes_max - encoder.bytes_max();
        let cache = CacheLimits { bytes_max, ..settings.cache.clone() };
        let mut core = Self {
            store: Store::new(&spec, cache, disk.transpose()?),
            encoder,
            slots: (0..spec.slots).map(|_| None).collect(),
            queue: VecDeque::new(),
            costs: Costs::new(spec.slots),
            counters: Counters::default(),
            odds_mtp: Odds::default(),
            odds_copy: Odds::default(),
            last_step: clock.now(),
            faults_in_row: 0,
            told: Vec::new(),
            tells_later: false,
            ticks_on: false,
            arrivals: 0,
            model,
            spec,
            settings,
            clock,
        };
        if core.settings.calibrate {
            core.calibrate();
        }
        Ok(core)
    }

    /// What requests must fit.
    pub fn limits(&self) -> Limits {
        Limits::new(&self.spec, self.settings.vocabulary).with_images(self.model.image_spec())
    }

    /// Queues a request. Its events go to `reply` from later ticks.
    pub fn submit(&mut self, checked: Checked, reply: Reply) {
        let Checked(mut request) = checked;
        self.arrivals += 1;
        let order = self.arrivals;
        let mask = request.mask.take();
        let keys: Rc<[u64]> = crate::running::prompt_keys(&request).into();
        // Choices of a request that stays out of the cache still share their prompt, under a name of their
        // own.
        let namespace = match (self.store.caches(), request.cache, request.choices > 1) {
            (false, ..) | (true, false, false) => None,
            (true, true, _) => Some(shared_namespace(&request.namespace).into()),
            (true, false, true) => Some(private_namespace(order).into()),
        };
        let request = Rc::new(request);
        for choice in 0..request.choices {
            self.queue.push_back(Job {
                order,
                request: request.clone(),
                choice,
                mask: mask.as_ref().map(|mask| mask.fork()),
                reply: reply.clone(),
                arrived: self.clock.now(),
                keys: keys.clone(),
                namespace: namespace.clone(),
                disk: FromDisk::Unasked,
            });
        }
    }

    /// Gives free slots to those who wait, without a step: what is told before a long step is then true.
    pub fn welcome(&mut self) {
        self.reap();
        self.admit();
    }

    /// From now on [`Self::tick`] is called again as soon as it has returned true: tokens of a step may then
    /// be told while the next one runs.
    pub(crate) fn tick_on(&mut self) {
        self.ticks_on = true;
    }

    /// Tells what waits to be told.
    pub(crate) fn tell(&mut self) {
        self.told.drain(..).for_each(|(reply, event)| reply.send(event));
    }

    /// Decides whether the tokens of a round of these parts are told while the next step runs. What takes
    /// long before a step runs keeps nobody waiting.
    pub(crate) fn begin_telling(&mut self, parts: &[Part]) {
        let decodes = parts.iter().all(|part| matches!(part, Part::Decode { .. }));
        self.tells_later = self.ticks_on && decodes && self.model.steps_ahead();
        if !decodes {
            self.tell();
        }
    }

    /// One turn of the loop. False: nothing to do until the next request.
    pub fn tick(&mut self) -> bool {
        if !self.queue.is_empty() || self.encoder.busy() {
            self.tell();
        }
        self.welcome();
        let encoded = self.encode();
        let stall = self.settings.max_stall.saturating_sub(encoded);
        let views = self.views(stall);
        if !views.is_empty() {
            let parts = plan(&views, self.step_limits(&views, stall));
            self.run(parts);
        } else {
            self.tell();
            if encoded.is_zero() && !self.encoder.busy() {
                self.wait_for_disk();
                return !self.queue.is_empty();
            }
        }
        self.last_step = self.clock.now();
        true
    }

    /// Whether nothing runs or waits.
    pub fn idle(&self) -> bool {
        self.queue.is_empty() && self.slots.iter().all(Option::is_none)
    }

    /// Whether so many steps failed in a row that the device is lost; the engine is then to be stopped.
    pub fn device_lost(&self) -> bool {
        self.faults_in_row >= FAULTS_MAX
    }

    /// Requests of which no choice has a slot yet.
    pub fn waiting(&self) -> usize {
        let waits = |job: &&Job| job.choice == 0;
        self.queue.iter().filter(waits).count()
    }

    /// What the engine is doing.
    pub fn status(&self) -> Status {
        let running = self.slots.iter().flatten();
        let awaits = |slot: &usize| self.slots[*slot].as_ref().is_some_and(Running::awaits_picture);
        let prefilling = running.clone().filter(|running| running.prefills()).count();
        let (disk_failures, disk_failure) = self.store.disk_failures();
        Status {
            prefilling,
            encoding: (0..self.slots.len()).filter(awaits).collect(),
            decoding: running.clone().count() - prefilling,
            slots: self.slots.len(),
            queued: self.queue.len(),
            kv_tokens: running.map(|running| running.committed).sum(),
            kv_tokens_max: self.spec.pages * PAGE_TOKENS,
            cache_bytes: self.store.cache_bytes() + self.encoder.bytes(),
            cache_bytes_max: self.settings.cache.bytes_max,
            cache_feature_bytes: self.encoder.bytes(),
            cache_entries: self.store.cache_entries(),
            disk_failures,
            disk_failure,
            last_step: self.last_step,
            counters: self.counters.clone(),
        }
    }

    /// Ends everything that runs or waits with one error.
    pub fn fail_all(&mut self, error: &ReplyError) {
        while let Some(job) = self.queue.pop_front() {
            self.refuse(job, FinishReason::Failed(error.clone()));
        }
        for slot in 0..self.slots.len() {
            self.fail(slot, error.clone());
        }
    }

    /// Writes the prefix cache to its disk tier, if there is one.
    pub fn persist(&mut self) {
        self.store.persist(&mut *self.model);
    }

    /// Whether no page is held or promised for a sequence; for tests of leaks.
    pub fn leaks_nothing(&self) -> bool {
        self.store.idle()
    }

    /// Ends a job that never got a slot.
    pub(crate) fn refuse(&mut self, job: Job, reason: FinishReason) {
        let stats = Stats {
            prompt_tokens: job.request.prompt.len(),
            queued: self.clock.now().saturating_sub(job.arrived),
            ..Stats::default()
        };
        self.finished(&job.reply, job.choice, reason, stats);
        self.drop_private(job.order, job.namespace.as_deref());
    }

    /// Counts and tells an end.
    pub(crate) fn finished(&mut self, reply: &Reply, choice: u32, reason: FinishReason, stats: Stats) {
        self.counters.finished += 1;
        match &reason {
            FinishReason::Cancelled => self.counters.cancelled += 1,
            FinishReason::Failed(error) => {
                self.counters.failed += 1;
                let numerical = matches!(error, ReplyError::NumericalFault { .. });
                self.counters.numerical_faults += u64::from(numerical);
            }
            FinishReason::Eos(_) | FinishReason::Stop(_) | FinishReason::Length => {}
        }
        self.tell();
        reply.send(Event::Finished { choice, reason, stats: Box::new(stats) });
    }

    /// Drops the private part of the cache once the last choice of its request is over.
    pub(crate) fn drop_private(&mut self, order: u64, namespace: Option<&str>) {
        let private = private_namespace(order);
        let left = self.queue.iter().any(|job| job.order == order)
            || self.slots.iter().flatten().any(|running| running.order == order);
        if namespace == Some(private.as_str()) && !left {
            self.store.drop_namespace(&private);
        }
    }
}

/// Name of a request's division of the prefix cache.
pub(crate) fn shared_namespace(name: &str) -> String {
    format!("shared {name}")
}

fn private_namespace(order: u64) -> String {
    format!("private {order}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;
    use crate::fake::{FakeConfig, FakeModel};

    /// Tokens heard after each tick of a reply of five, and the reply.
    fn heard(steps_ahead: bool) -> (Vec<usize>, Vec<u32>) {
        let config = FakeConfig { steps_ahead, ..FakeConfig::default() };
        let clock = Arc::new(ManualClock::default());
        let model = Box::new(FakeModel::new(config.clone()));
        let mut core = Core::new(model, Settings::new(64, vec![1]), clock).expect("large enough");
        core.tick_on();
        let (sender, events) = std::sync::mpsc::channel();
        let (reply, _ticket) = Reply::new(Box::new(move |event: Event| drop(sender.send(event))));
        let mut request = Request::new(vec![5, 6, 7], 5);
        request.sampling.ignore_eos = true;
        request.drafting.policy = crate::request::DraftPolicy::Off;
        core.submit(core.limits().check(request).expect("fits"), reply);
        let (mut said, mut counts) = (Vec::new(), Vec::new());
        while !core.idle() {
            core.tick();
            for event in events.try_iter() {
                if let Event::Tokens { tokens, .. } = event {
                    said.extend(tokens);
                }
            }
            counts.push(said.len());
        }
        (counts, said)
    }

    #[test]
    fn tokens_are_told_while_the_next_step_runs() {
        let (at_once, said) = heard(false);
        assert_eq!(at_once, [1, 2, 3, 4, 5]);
        let (later, same) = heard(true);
        // The first comes with the prompt, the last with the end.
        assert_eq!(later, [1, 1, 2, 3, 5]);
        assert_eq!(same, said);
    }
}
