//! What a server says of itself when it is ready (`docs/api.md` 8.2).

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use model::qwen3_5::{MemoryPlan, Qwen};
use serde_json::{Value, json};
use server::TextSide;
use server::http::{Bind, ModelInfo, Settings};
use text::LateSystem;

use super::options::{CacheSize, ServeArgs, WorkArgs};
use super::self_test::SelfTest;
use super::sizes::Sizes;
use crate::args::{Draft, ModelArgs};
use crate::commands::again::kv_name;
use crate::commands::version;
use crate::error::Result;
use crate::load;
use crate::memory;
use crate::table::{self, grouped};
use crate::weights::{Stored, Weights};

/// Most lines.
const LINES_MAX: usize = 25;
/// Longest tokenizer_config.json that is looked at, bytes.
const TOKENIZER_CONFIG_MAX: u64 = 16 << 20;
/// The exactness contracts (`docs/api.md` section 1); no option of this server gives one up.
const CONTRACTS: [&str; 9] = ["E1", "E2", "E3", "E4", "E5", "E6", "E7", "E8", "E9"];

/// Facts of a model that clients are shown.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// Its id: its name in the store, else the folder's.
    pub(crate) id: String,
    info: ModelInfo,
}

impl Facts {
    /// What can be known without loading.
    pub(crate) fn of(weights: &Weights, args: &ModelArgs) -> Result<Self> {
        let folder = weights.dir.canonicalize().unwrap_or_else(|_| weights.dir.clone());
        let name = folder.file_name().map(|name| name.to_string_lossy().into_owned());
        let id = match (&weights.name, &weights.stored) {
            (Some(name), _) => name.clone(),
            (None, Stored::Folder(_)) => name.unwrap_or_else(|| args.model.clone()),
            (None, Stored::Synth(_)) => "synth".to_owned(),
        };
        let tokenizer = tokenizer_config(&weights.dir);
        let info = ModelInfo {
            created: modified(&weights.dir.join("config.json")),
            n_ctx_train: weights.config.positions_max,
            n_params: weights.config.parameters(),
            size: weights.bytes,
            build: version::commit().to_owned(),
            digest: weights.digest()?,
            kv: kv_name(args.kv).to_owned(),
            contracts: CONTRACTS.to_vec(),
            tokenizer_class: tokenizer["tokenizer_class"].as_str().unwrap_or_default().to_owned(),
            eos_token: token(&tokenizer["eos_token"]),
            pad_token: token(&tokenizer["pad_token"]),
            ..ModelInfo::default()
        };
        Ok(Self { id, info })
    }

    /// Digest of the model's files.
    pub(crate) fn digest(&self) -> &str {
        &self.info.digest
    }

    /// The same, with the device.
    pub(crate) fn info(&self, report: &Report) -> ModelInfo {
        let plan = report.plan.iter().flat_map(|plan| {
            [("weights", plan.weights), ("kv", plan.kv), ("states", plan.states), ("scratch", plan.scratch)]
        });
        ModelInfo {
            backend: report.backend.clone(),
            device: report.device.clone(),
            memory: plan.collect(),
            ..self.info.clone()
        }
    }
}

/// The file as JSON, or null: what is taken from it is shown and not used.
fn tokenizer_config(dir: &Path) -> Value {
    let mut text = String::new();
    let read = File::open(dir.join("tokenizer_config.json"))
        .and_then(|file| file.take(TOKENIZER_CONFIG_MAX).read_to_string(&mut text));
    read.ok().and_then(|_| serde_json::from_str(&text).ok()).unwrap_or(Value::Null)
}

/// A special token: a string, or an object with one.
fn token(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

fn modified(path: &Path) -> u64 {
    let time = path.metadata().and_then(|data| data.modified()).ok();
    time.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0, |time| time.as_secs())
}

/// The start report.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    model: String,
    template: String,
    sizes: Sizes,
    /// Optional parts among the loaded weights.
    held: String,
    plan: Option<MemoryPlan>,
    free: Option<u64>,
    /// On a card: planned and real bytes.
    taken: Option<String>,
    backend: String,
    device: String,
    drafts: String,
    thinking: bool,
    keys: usize,
    origins: usize,
    dialects: Vec<&'static str>,
    notes: Vec<String>,
    /// Reading and packing the weights, and starting the engine.
    pub(crate) load: Duration,
    /// The self-test.
    pub(crate) self_test: Option<SelfTest>,
}

impl Report {
    /// All that is known before the model is loaded.
    pub(crate) fn new(
        args: &ServeArgs,
        weights: &Weights,
        text: &TextSide,
        sizes: &Sizes,
        settings: &Settings,
    ) -> Self {
        let format = weights.report().map_or("synthetic".to_owned(), |report| report.format.to_string());
        let mut dialects = vec!["OpenAI /v1"];
        dialects.extend(settings.anthropic.then_some("Anthropic /v1/messages"));
        dialects.extend(settings.responses.then_some("Responses /v1/responses"));
        dialects.extend(settings.ollama.then_some("Ollama /api"));
        dialects.extend(settings.page.then_some("page /"));
        Self {
            model: format!("{format}, {}", load::summary(weights)),
            template: text.template.digest().to_owned(),
            sizes: sizes.clone(),
            plan: None,
            held: load::held(weights, &sizes.model),
            free: memory::free(),
            taken: None,
            backend: String::new(),
            device: String::new(),
            drafts: drafts(args.draft.draft, weights.parts.mtp),
            thinking: settings.thinking,
            keys: settings.keys.count(),
            origins: args.access.cors_origin.len(),
            dialects,
            notes: notes(args, weights, sizes, settings),
            load: Duration::ZERO,
            self_test: None,
        }
    }

    /// Adds what the loaded model knows.
    pub(crate) fn loaded(&mut self, qwen: &Qwen, device: &str) {
        self.plan = Some(*qwen.memory_plan());
        self.taken = device::card(device).map(|_| memory::held(qwen, device));
        self.device = qwen.device().name();
        let backend = |letter: &char| letter.is_ascii_alphanumeric();
        self.backend = self.device.chars().take_while(backend).collect();
    }

    /// Lines for people.
    pub(crate) fn text(&self, facts: &Facts, address: &str) -> String {
        let free = self.free.map_or(String::new(), |free| format!("   {} free", table::bytes(free)));
        let build = match facts.info.build.as_str() {
            "" => String::new(),
            build => format!("  build {build}"),
        };
        let mut lines = vec![
            format!("clary {}  {}{build}", server::http::VERSION, self.backend),
            format!("model    {}   {}   template sha256:{:.12}…", facts.id, self.model, self.template),
            format!("device   {}{free}", self.device),
            format!("memory   {}", self.memory()),
            format!("slots    {}      {}", self.slots(), self.cache()),
            format!("drafts   {}", self.drafts),
            self.switches(),
            format!("contracts {} to {}", CONTRACTS[0], CONTRACTS[CONTRACTS.len() - 1]),
            format!("load     {:.1} s   {}", self.load.as_secs_f64(), self.tested()),
        ];
        if let Some(taken) = &self.taken {
            lines.insert(4, format!("         {taken}"));
        }
        let room = LINES_MAX - lines.len() - 1;
        let shown = if self.notes.len() > room { room - 1 } else { self.notes.len() };
        lines.extend(self.notes[..shown].iter().map(|note| format!("note     {note}")));
        if shown < self.notes.len() {
            lines.push(format!("note     and {} more; --json lists all", self.notes.len() - shown));
        }
        lines.push(format!("ready    {address}   {}", self.dialects.join("  ")));
        lines.join("\n") + "\n"
    }

    /// The same for programs.
    pub(crate) fn document(&self, facts: &Facts, address: &str) -> Value {
        let sizes = &self.sizes;
        json!({
            "version": server::http::VERSION,
            "build": facts.info.build,
            "model": facts.id,
            "template_sha256": self.template,
            "device": self.device,
            "memory_bytes": self.plan.map(|plan| plan.total()),
            "memory_limit_bytes": sizes.limit,
            "slots": sizes.model.slots,
            "context": sizes.model.context,
            "cache_limit_bytes": sizes.cache.bytes_max,
            "drafts": self.drafts,
            "thinking": self.thinking,
            "keys": self.keys,
            "contracts": CONTRACTS,
            "load_seconds": self.load.as_secs_f64(),
            "self_test_tokens": self.self_test.map(|test| test.tokens),
            "notes": self.notes,
            "address": address,
        })
    }

    fn memory(&self) -> String {
        let plan = self.plan.map_or(String::new(), |plan| load::plan_line(&plan, &self.held));
        let limit = self
            .sizes
            .limit
            .map_or("no limit known".to_owned(), |limit| format!("of {} limit", table::bytes(limit)));
        format!("{plan} {limit}")
    }

    fn slots(&self) -> String {
        let model = &self.sizes.model;
        let kv = format!("{:?}", model.kv).to_lowercase();
        format!("{} × {} tokens, kv {kv}", model.slots, grouped(model.context as u64))
    }

    fn cache(&self) -> String {
        match self.sizes.cache.bytes_max {
            0 => "cache off".to_owned(),
            bytes => {
                let states = self.sizes.model.snapshots;
                let place = if self.sizes.model.card { "on the card" } else { "ram" };
                format!("cache {} {place}, {states} states", table::bytes(bytes))
            }
        }
    }

    fn switches(&self) -> String {
        let on = |on: bool| if on { "on" } else { "off" };
        let origins = if self.origins > 0 { self.origins.to_string() } else { "off".to_owned() };
        format!(
            "thinking {}   vision {}   tools on   structure on   keys {}   cors {origins}",
            on(self.thinking),
            on(self.sizes.model.image_tokens > 0),
            self.keys
        )
    }

    fn tested(&self) -> String {
        self.self_test.map_or(String::new(), |test| {
            let how = if test.is_drafted { "drafted equal plain" } else { "the same twice" };
            format!("self-test {:.1} s: {} tokens, {how}", test.time.as_secs_f64(), test.tokens)
        })
    }
}

fn drafts(draft: Draft, mtp: bool) -> String {
    let by = if mtp { "mtp and copies" } else { "copies" };
    match draft {
        Draft::Off => "off".to_owned(),
        Draft::Auto => format!("{by}, as deep as pays (auto: costs measured at start)"),
        Draft::Depth(depth) => format!("{by}, {depth} deep"),
    }
}

/// Limits that are not the usual ones.
fn limits(work: &WorkArgs) -> Option<String> {
    let seconds = |time: Duration| format!("{} s", time.as_secs_f64());
    let changed = [
        ("queue", work.queue.to_string(), "128"),
        ("queue-timeout", seconds(work.queue_timeout), "600 s"),
        ("drain-timeout", seconds(work.drain_timeout), "30 s"),
        ("stall-after", seconds(work.stall_after), "60 s"),
        ("max-stall", seconds(work.max_stall), "0.2 s"),
    ];
    let changed = changed.iter().filter(|(_, found, usual)| found != usual);
    let changed: Vec<String> =
        changed.map(|(name, found, usual)| format!("{name} {found} (usual {usual})")).collect();
    (!changed.is_empty()).then(|| format!("limits: {}", changed.join(", ")))
}

/// Anything off, missing or unusual.
fn notes(args: &ServeArgs, weights: &Weights, sizes: &Sizes, settings: &Settings) -> Vec<String> {
    let mut notes = Vec::new();
    let is_outside = matches!(settings.bind, Bind::Tcp(address) if !address.ip().is_loopback());
    if is_outside && settings.keys.count() == 0 {
        notes.push("no keys: everybody who reaches this address may ask".to_owned());
    }
    if weights.parts.vision && sizes.model.image_tokens == 0 {
        notes.push("vision: off, pictures of users are refused".to_owned());
    }
    if args.draft.draft != Draft::Off && !weights.parts.mtp {
        notes.push("drafts: the model has no MTP layer".to_owned());
    }
    if matches!(weights.stored, Stored::Synth(_)) {
        notes.push("model: the weights are random numbers".to_owned());
    }
    let (context, trained) = (sizes.model.context, weights.config.positions_max);
    if context < trained {
        let (context, trained) = (grouped(context as u64), grouped(trained as u64));
        notes.push(format!("context: {context} of the {trained} tokens the model was trained for"));
    }
    match settings.late_system {
        LateSystem::UserTurn => {}
        LateSystem::Merge => notes.push("chats: late system messages are joined to the first".to_owned()),
        LateSystem::Reject => notes.push("chats: late system messages are refused".to_owned()),
    }
    if settings.log_prompts {
        notes.push("log: prompts are written to it".to_owned());
    }
    if settings.audit > 0.0 {
        notes.push(format!("audit: {} % of greedy replies are made once more when idle", settings.audit));
    }
    if let Some(dir) = &settings.record {
        notes.push(format!("record: requests with their prompts are written to {}", dir.display()));
    }
    if sizes.cache.bytes_max == 0 {
        notes.push("cache: off, every turn computes its whole prompt".to_owned());
    }
    if let Some(dir) = &args.work.cache_disk {
        notes.push(match sizes.cache.bytes_max {
            0 => "--cache-disk: not used, the cache is off".to_owned(),
            _ => {
                let most = table::bytes(args.work.cache_disk_max);
                format!("cache: states of prompts are kept in {}, at most {most}", dir.display())
            }
        });
    }
    match (sizes.model.card, args.work.cache_ram, args.work.cache_device) {
        (true, CacheSize::Bytes(_), _) => {
            notes.push("--cache-ram: not used, the cache lies on the card: --cache-device".to_owned());
        }
        (false, _, CacheSize::Bytes(_)) => {
            notes.push("--cache-device: not used, there is no card: --cache-ram".to_owned());
        }
        _ => {}
    }
    notes.extend(limits(&args.work));
    if sizes.limit.is_none() {
        notes.push("memory: the system does not say what is free".to_owned());
    }
    notes.extend(weights.warnings.iter().map(|warning| format!("model: {warning}")));
    notes
}
