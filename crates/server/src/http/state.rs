//! What all requests share.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::Semaphore;
use tracing::{info, warn};

use super::audit::{Audit, AuditResult, Auditor};
use super::board::Board;
use super::constraint::Grammar;
use super::drain::{Drain, Phase};
use super::error::{ApiError, Code};
use super::metrics::{Metrics, Reading};
use super::record::{Recorder, ServerSettings};
use super::settings::{SamplingDefaults, Settings};
use crate::Session;

/// Version of this program.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Facts of a loaded model that the server shows and does not use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelInfo {
    /// Seconds since 1970 of the model's files.
    pub created: u64,
    /// Positions the model was trained for.
    pub n_ctx_train: usize,
    /// Parameters.
    pub n_params: u64,
    /// Bytes of the weights.
    pub size: u64,
    /// `cpu`, `cuda` or `xpu`.
    pub backend: String,
    /// Name of the device.
    pub device: String,
    /// Commit the program was built from.
    pub build: String,
    /// What the model takes of the device's memory: use and bytes.
    pub memory: Vec<(&'static str, u64)>,
    /// Digest of the model's files, as receipts name it.
    pub digest: String,
    /// Form of the K/V cache: `int8` or `int16`.
    pub kv: String,
    /// Ids of the exactness contracts that hold.
    pub contracts: Vec<&'static str>,
    /// `tokenizer_class` of the model's folder.
    pub tokenizer_class: String,
    /// `eos_token` of the same.
    pub eos_token: Option<String>,
    /// `pad_token` of the same.
    pub pad_token: Option<String>,
}

/// A model that can answer.
pub struct Served {
    /// Its text side and engine.
    pub session: Session,
    /// Facts about it.
    pub info: ModelInfo,
    /// Compiles constraints, if this build can.
    pub grammar: Option<Arc<dyn Grammar>>,
    pub(crate) sampling: SamplingDefaults,
    pub(crate) board: Board,
}

impl Served {
    /// Tokens that one request can use.
    pub(crate) fn context(&self) -> usize {
        self.session.engine().limits().context
    }

    pub(crate) fn vocabulary(&self) -> usize {
        self.session.engine().limits().vocabulary
    }
}

/// A server's state. Cheap to clone.
#[derive(Clone)]
pub struct App(pub(super) Arc<Inner>);

/// See [`App`].
pub(super) struct Inner {
    id: String,
    settings: Settings,
    served: OnceLock<Arc<Served>>,
    /// Progress of loading in thousandths.
    progress: AtomicU32,
    drain: Drain,
    metrics: Metrics,
    preparing: Semaphore,
    recorder: Option<Arc<Recorder>>,
    auditor: OnceLock<Auditor>,
    /// Failures of the cache's disk tier, as the log was told last.
    told_failures: AtomicU64,
    /// Why requests cannot be served, as the log was told last.
    told: Mutex<Option<&'static str>>,
}

impl App {
    /// A server whose model, to be known as `id`, is still to come.
    pub fn new(settings: Settings, id: impl Into<String>) -> Self {
        let id = id.into();
        Self(Arc::new(Inner {
            metrics: Metrics::new(&id),
            preparing: Semaphore::new(settings.limits.preparing),
            recorder: settings.record.clone().map(|dir| {
                let (thinking, template_kwargs) = (settings.thinking, settings.template_kwargs.clone());
                let late_system = settings.late_system;
                Arc::new(Recorder::new(dir, ServerSettings { thinking, template_kwargs, late_system }))
            }),
            id,
            settings,
            served: OnceLock::new(),
            progress: AtomicU32::new(0),
            drain: Drain::default(),
            auditor: OnceLock::new(),
            told_failures: AtomicU64::new(0),
            told: Mutex::new(Some("loading")),
        }))
    }

    /// Says how much of the model is loaded, 0 to 1.
    pub fn loading(&self, share: f32) {
        self.0.progress.store((share.clamp(0.0, 1.0) * 1000.0) as u32, Ordering::Relaxed);
    }

    /// Begins to serve. A second model is not taken.
    pub fn serve_model(&self, session: Session, info: ModelInfo, grammar: Option<Arc<dyn Grammar>>) {
        self.0.metrics.built(VERSION, &info.backend, &info.device);
        self.0.metrics.memory(&info.memory);
        let sampling = self.0.settings.sampling.over(&session.text().defaults);
        let board = Board::new(session.engine().limits().slots);
        let served = Served { session, info, grammar, sampling, board };
        self.0.served.get_or_init(|| Arc::new(served));
        if self.0.settings.audit > 0.0
            && let Some(auditor) = Auditor::start(Arc::downgrade(&self.0))
        {
            self.0.auditor.get_or_init(|| auditor);
        }
    }

    /// Has a reply made once more when nobody asks for anything.
    pub(crate) fn audit(&self, audit: Audit) {
        if self.0.auditor.get().is_none_or(|auditor| !auditor.take(audit)) {
            self.0.metrics.audited(AuditResult::Skipped);
        }
    }

    /// Logs a change of whether requests can be served, once.
    pub(crate) fn tell_readiness(&self, reason: Option<&'static str>) {
        let mut told = self.0.told.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *told, reason) == reason {
            return;
        }
        match reason {
            None => info!("requests are served"),
            Some(reason @ ("stalled" | "faulted")) => warn!(reason, "requests are not served"),
            Some(reason) => info!(reason, "requests are not served"),
        }
    }

    /// Logs that the cache's folder takes no files: at first, and whenever their number has doubled.
    pub(crate) fn tell_failures(&self) {
        let Some(status) = self.model().map(|served| served.session.engine().status()) else { return };
        let (count, told) = (status.disk_failures, self.0.told_failures.load(Ordering::Relaxed));
        let Some(reason) = status.disk_failure.filter(|_| count > 0 && count >= 2 * told) else { return };
        let taken = self.0.told_failures.compare_exchange(told, count, Ordering::Relaxed, Ordering::Relaxed);
        if taken.is_ok() && count > told {
            warn!(failures = count, %reason, "--cache-disk: files cannot be written, states are not kept");
        }
    }

    /// The served model's id.
    pub fn id(&self) -> &str {
        &self.0.id
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.0.settings
    }

    /// The end of the server.
    pub fn drain(&self) -> &Drain {
        &self.0.drain
    }

    /// Where requests are recorded.
    pub(crate) fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.0.recorder.as_ref()
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// Progress of loading, 0 to 1.
    pub(crate) fn progress(&self) -> f32 {
        self.0.progress.load(Ordering::Relaxed) as f32 / 1000.0
    }

    /// The model, if it is there.
    pub(crate) fn model(&self) -> Option<&Arc<Served>> {
        self.0.served.get()
    }

    /// The model, for a route that only looks.
    pub(crate) fn loaded(&self) -> Result<Arc<Served>, ApiError> {
        self.model().cloned().ok_or_else(|| {
            let message = format!("the model is being loaded ({:.0} %)", self.progress() * 100.0);
            ApiError { retry_after: Some(5), ..ApiError::new(Code::Loading, message) }
        })
    }

    /// The model, for a new reply.
    pub(crate) fn served(&self) -> Result<Arc<Served>, ApiError> {
        match self.0.drain.phase() {
            Phase::Open => match self.stalled() {
                Some(age) => Err(stalled(age)),
                None => self.loaded(),
            },
            Phase::Draining | Phase::Cut => Err(draining()),
        }
    }

    /// `clary-VERSION-BACKEND-BUILD`, the last where it is known.
    pub(crate) fn fingerprint(&self, served: &Served) -> String {
        let fingerprint = format!("clary-{VERSION}-{}-{}", served.info.backend, served.info.build);
        fingerprint.trim_end_matches('-').to_owned()
    }

    /// Runs work that takes the processor for a while beside the async threads, a bounded number at a time.
    pub(crate) async fn prepare<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let _permit = self.0.preparing.acquire().await.expect("the semaphore is never closed");
        let fault = |_| ApiError::new(Code::Internal, "a fault while the request was prepared");
        tokio::task::spawn_blocking(work).await.map_err(fault)?
    }

    /// What the engine is doing.
    pub(crate) fn reading(&self) -> Option<Reading> {
        let engine = self.model()?.session.engine();
        let status = engine.status();
        let queued = status.queued;
        Some(Reading {
            status,
            queued,
            step_age_seconds: engine.step_age().unwrap_or_default().as_secs_f64(),
        })
    }

    /// Time without a step while there is work, if it is longer than the settings allow.
    pub fn stalled(&self) -> Option<Duration> {
        let age = self.model()?.session.engine().step_age()?;
        (age > self.0.settings.stall_after).then_some(age)
    }
}

fn stalled(age: Duration) -> ApiError {
    let message =
        format!("no step of the model ended for {} s; the server may need a restart", age.as_secs());
    ApiError { retry_after: Some(30), ..ApiError::new(Code::Stalled, message) }
}

pub(crate) fn draining() -> ApiError {
    let message = "the server is about to end and takes no new requests";
    ApiError { retry_after: Some(10), ..ApiError::new(Code::Draining, message) }
}

/// Seconds since 1970, UTC.
pub(crate) fn now_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
