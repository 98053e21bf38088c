//! Numbers for `/metrics` (`docs/api.md` 7.1). No label carries text of users.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

use engine::{Counters, Status};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use super::audit::AuditResult;

type Labels<const N: usize> = [(&'static str, String); N];
type Counts<const N: usize> = Family<Labels<N>, Counter>;
type Level = Gauge<f64, AtomicU64>;

/// Where a reply was when it was cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Queued,
    Prefill,
    Decode,
}

impl Stage {
    /// The stage once the engine has told of `event`.
    pub(crate) fn after(self, event: &engine::Event) -> Self {
        match event {
            engine::Event::Admitted { .. } if self == Self::Queued => Self::Prefill,
            engine::Event::Prefilled { .. } => Self::Decode,
            _ => self,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// All numbers of a server.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    requests: Counts<2>,
    prompt_tokens: Counts<1>,
    prompt_tokens_all: Counter,
    generated_tokens: Counts<1>,
    generated_all: Counter,
    draft_proposed: Counter,
    draft_accepted: Counts<1>,
    cancelled: Counts<1>,
    numerical_faults: Counter,
    images: Counts<1>,
    tool_calls: Counts<1>,
    audits: Counts<1>,
    rejected: Counts<1>,
    slots: Family<Labels<1>, Level>,
    running: Level,
    queue: Level,
    kv_tokens: Level,
    kv_usage: Level,
    cache_bytes: Level,
    cache_limit: Level,
    cache_features: Level,
    disk_failures: Counter,
    step_age: Level,
    memory: Family<Labels<1>, Level>,
    resident: Level,
    build: Family<Labels<3>, Level>,
    pub(crate) ttft: Histogram,
    pub(crate) inter_token: Histogram,
    pub(crate) queued: Histogram,
    pub(crate) prefill: Histogram,
    pub(crate) request: Histogram,
}

/// What a scrape reads off the engine.
pub(crate) struct Reading {
    pub(crate) status: Status,
    pub(crate) queued: usize,
    pub(crate) step_age_seconds: f64,
}

fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 18))
}

impl Metrics {
    /// Numbers at zero. `model` is the served id, the label of the twins.
    pub(crate) fn new(model: &str) -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            requests: Family::default(),
            prompt_tokens: Family::default(),
            prompt_tokens_all: Counter::default(),
            generated_tokens: Family::default(),
            generated_all: Counter::default(),
            draft_proposed: Counter::default(),
            draft_accepted: Family::default(),
            cancelled: Family::default(),
            numerical_faults: Counter::default(),
            images: Family::default(),
            tool_calls: Family::default(),
            audits: Family::default(),
            rejected: Family::default(),
            slots: Family::default(),
            running: Level::default(),
            queue: Level::default(),
            kv_tokens: Level::default(),
            kv_usage: Level::default(),
            cache_bytes: Level::default(),
            cache_limit: Level::default(),
            cache_features: Level::default(),
            disk_failures: Counter::default(),
            step_age: Level::default(),
            memory: Family::default(),
            resident: Level::default(),
            build: Family::default(),
            ttft: seconds(),
            inter_token: seconds(),
            queued: seconds(),
            prefill: seconds(),
            request: seconds(),
        };
        metrics.register();
        metrics.register_twins(model);
        metrics.zero();
        metrics
    }

    fn register(&mut self) {
        let own = self.registry.sub_registry_with_prefix("clary");
        own.register("requests", "Requests by route and status", self.requests.clone());
        own.register("prompt_tokens", "Prompt tokens by source", self.prompt_tokens.clone());
        own.register("generated_tokens", "Generated tokens by kind", self.generated_tokens.clone());
        own.register("draft_proposed", "Drafted tokens verified", self.draft_proposed.clone());
        own.register("draft_accepted", "Drafted tokens accepted, by place", self.draft_accepted.clone());
        own.register("cancelled", "Replies cancelled, by stage", self.cancelled.clone());
        own.register(
            "numerical_faults",
            "Replies ended by a non-finite logit",
            self.numerical_faults.clone(),
        );
        own.register("images", "Pictures of prompts, by where their features came from", self.images.clone());
        own.register("tool_calls", "Tool calls by result", self.tool_calls.clone());
        own.register("audit", "Replies made once more, by result", self.audits.clone());
        own.register("rejected", "Requests refused, by reason", self.rejected.clone());
        own.register("slots", "Slots by state", self.slots.clone());
        own.register("queue", "Choices that wait for a slot", self.queue.clone());
        own.register("kv_tokens", "Tokens in K/V pages of slots", self.kv_tokens.clone());
        own.register("cache_bytes", "Bytes of the prefix cache", self.cache_bytes.clone());
        own.register("cache_limit_bytes", "Limit of the prefix cache", self.cache_limit.clone());
        let features = self.cache_features.clone();
        own.register("cache_feature_bytes", "Bytes of picture features in the prefix cache", features);
        own.register(
            "cache_disk_failures",
            "Files that the folder of the prefix cache did not take",
            self.disk_failures.clone(),
        );
        own.register("last_step_age_seconds", "Time since the last step while busy", self.step_age.clone());
        own.register("device_memory_bytes", "Memory of the device, by use", self.memory.clone());
        own.register("build_info", "Always 1", self.build.clone());
        own.register("ttft_seconds", "Time to the first token", self.ttft.clone());
        own.register("inter_token_seconds", "Time between tokens", self.inter_token.clone());
        own.register("queue_seconds", "Time in the queue", self.queued.clone());
        own.register("prefill_seconds", "Time from the slot to the end of the prompt", self.prefill.clone());
        own.register("request_seconds", "Time of whole replies", self.request.clone());
    }

    /// Counters whose labels are known are there from the start: a rate over one that appears late is wrong.
    fn zero(&self) {
        let labelled = |family: &Counts<1>, name: &'static str, values: &[&str]| {
            for value in values {
                drop(family.get_or_create(&[(name, (*value).to_owned())]));
            }
        };
        labelled(&self.prompt_tokens, "source", &["computed", "cached"]);
        labelled(&self.generated_tokens, "kind", &["reasoning", "content", "tool"]);
        labelled(&self.cancelled, "stage", &["queued", "prefill", "decode"]);
        labelled(&self.tool_calls, "result", &["ok", "unparsed", "cut"]);
        labelled(&self.images, "result", &["encoded", "cached"]);
        labelled(&self.audits, "result", &AuditResult::ALL.map(AuditResult::name));
    }

    /// The names that gateways and dashboards of vLLM read.
    fn register_twins(&mut self, model: &str) {
        let label = (Cow::Borrowed("model_name"), Cow::Owned(model.to_owned()));
        let twins = self.registry.sub_registry_with_label(label);
        twins.register("vllm:num_requests_running", "Choices in slots", self.running.clone());
        twins.register("vllm:num_requests_waiting", "Choices that wait for a slot", self.queue.clone());
        twins.register("vllm:kv_cache_usage_perc", "Share of K/V pages in use", self.kv_usage.clone());
        twins.register("vllm:gpu_cache_usage_perc", "Share of K/V pages in use", self.kv_usage.clone());
        twins.register("vllm:prompt_tokens", "Prompt tokens", self.prompt_tokens_all.clone());
        twins.register("vllm:generation_tokens", "Generated tokens", self.generated_all.clone());
        twins.register("vllm:time_to_first_token_seconds", "Time to the first token", self.ttft.clone());
        twins.register("vllm:e2e_request_latency_seconds", "Time of whole replies", self.request.clone());
        // The usual name of every exporter, so without a prefix.
        let resident = "Memory of the process, as the system counts it";
        self.registry.register("process_resident_memory_bytes", resident, self.resident.clone());
    }

    pub(crate) fn built(&self, version: &str, backend: &str, device: &str) {
        let labels = [("version", version.into()), ("backend", backend.into()), ("device", device.into())];
        self.build.get_or_create(&labels).set(1.0);
    }

    /// Says what the model takes of its device.
    pub(crate) fn memory(&self, uses: &[(&'static str, u64)]) {
        for (name, bytes) in uses {
            self.memory.get_or_create(&[("use", (*name).to_owned())]).set(*bytes as f64);
        }
    }

    pub(crate) fn answered(&self, route: &str, status: u16) {
        let labels = [("route", route.to_owned()), ("status", status.to_string())];
        self.requests.get_or_create(&labels).inc();
    }

    pub(crate) fn rejected(&self, reason: &'static str) {
        self.rejected.get_or_create(&[("reason", reason.to_owned())]).inc();
    }

    pub(crate) fn audited(&self, result: AuditResult) {
        self.audits.get_or_create(&[("result", result.name().to_owned())]).inc();
    }

    pub(crate) fn cancelled(&self, stage: Stage) {
        self.cancelled.get_or_create(&[("stage", stage.name().to_owned())]).inc();
    }

    pub(crate) fn generated(&self, kind: &'static str, tokens: u64) {
        if tokens > 0 {
            self.generated_tokens.get_or_create(&[("kind", kind.to_owned())]).inc_by(tokens);
        }
    }

    pub(crate) fn tool_calls(&self, result: &'static str, calls: u64) {
        if calls > 0 {
            self.tool_calls.get_or_create(&[("result", result.to_owned())]).inc_by(calls);
        }
    }

    /// The Prometheus text. The engine's own counters are taken over as they are.
    pub(crate) fn text(&self, reading: Option<&Reading>) -> String {
        if let Some(reading) = reading {
            self.take(reading);
        }
        if let Some(bytes) = resident() {
            self.resident.set(bytes as f64);
        }
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("writing to a string cannot fail");
        text
    }

    fn take(&self, reading: &Reading) {
        let status = &reading.status;
        let busy = status.prefilling + status.decoding;
        for (state, count) in [
            ("image", status.encoding.len()),
            ("prefill", status.prefilling.saturating_sub(status.encoding.len())),
            ("decode", status.decoding),
            ("idle", status.slots.saturating_sub(busy)),
        ] {
            self.slots.get_or_create(&[("state", state.to_owned())]).set(count as f64);
        }
        self.running.set(busy as f64);
        self.queue.set(reading.queued as f64);
        self.kv_tokens.set(status.kv_tokens as f64);
        self.kv_usage.set(status.kv_tokens as f64 / status.kv_tokens_max.max(1) as f64);
        self.cache_bytes.set(status.cache_bytes as f64);
        self.cache_limit.set(status.cache_bytes_max as f64);
        self.cache_features.set(status.cache_feature_bytes as f64);
        self.step_age.set(reading.step_age_seconds);
        self.disk_failures.inner().store(status.disk_failures, Ordering::Relaxed);
        self.count(&status.counters);
    }

    fn count(&self, counters: &Counters) {
        let store = |counter: &Counter, value: u64| counter.inner().store(value, Ordering::Relaxed);
        let source = |name: &str| self.prompt_tokens.get_or_create_owned(&[("source", name.to_owned())]);
        store(&source("computed"), counters.prompt_computed);
        store(&source("cached"), counters.prompt_cached);
        store(&self.prompt_tokens_all, counters.prompt_computed + counters.prompt_cached);
        store(&self.generated_all, counters.generated);
        store(&self.draft_proposed, counters.drafts.proposed);
        store(&self.numerical_faults, counters.numerical_faults);
        let images = |result: &str| self.images.get_or_create_owned(&[("result", result.to_owned())]);
        store(&images("encoded"), counters.pictures_encoded);
        store(&images("cached"), counters.pictures_cached);
        for (position, &accepted) in counters.drafts.accepted_by_position.iter().enumerate() {
            let label = [("position", position.to_string())];
            store(&self.draft_accepted.get_or_create_owned(&label), accepted);
        }
    }
}

/// Bytes of memory that this process holds; `None` where the system does not say.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}
