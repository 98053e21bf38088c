//! What can be typed after `clary serve`, and what it means.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::BoolishValueParser;
use clap::{Args, ValueEnum};
use engine::Drafting;
use server::http::{SamplingSource, Settings, SettingsError, Typed};

use super::LogFormat;
use crate::args::{self, DraftArg, ModelArgs, OnOff, ThreadsArg};
use crate::error::{Failure, Result};
use crate::input;
use crate::settings::{self, LateSystemArg, Thinking};
use crate::vision::VisionArgs;

/// Longest key file, bytes.
const KEY_FILE_MAX: u64 = 1 << 20;
/// Most slots.
const SLOTS_MAX: usize = 64;

/// `serve`.
#[derive(Clone, Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) draft: DraftArg,
    #[command(flatten)]
    pub(crate) threads: ThreadsArg,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    #[command(flatten)]
    pub(crate) access: AccessArgs,
    #[command(flatten)]
    pub(crate) work: WorkArgs,
    #[command(flatten)]
    pub(crate) words: WordsArgs,
    #[command(flatten)]
    pub(crate) vision: VisionArgs,
}

/// Where to listen.
#[derive(Clone, Debug, Args)]
pub(crate) struct PlaceArgs {
    /// Name or address to listen at
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1", env = "CLARY_HOST")]
    pub(crate) host: String,
    /// Port to listen at; 0 lets the system choose
    #[arg(long, value_name = "PORT", default_value_t = 8080, env = "CLARY_PORT", value_parser = port)]
    pub(crate) port: u16,
    /// Socket file to listen at instead
    #[arg(long, value_name = "PATH", env = "CLARY_UNIX")]
    pub(crate) unix: Option<PathBuf>,
    /// Leave out Ollama's routes
    #[arg(long, value_parser = BoolishValueParser::new(), env = "CLARY_NO_OLLAMA")]
    pub(crate) no_ollama: bool,
    /// Leave out Anthropic's routes
    #[arg(long, value_parser = BoolishValueParser::new(), env = "CLARY_NO_ANTHROPIC")]
    pub(crate) no_anthropic: bool,
    /// Leave out the Responses routes
    #[arg(long, value_parser = BoolishValueParser::new(), env = "CLARY_NO_RESPONSES")]
    pub(crate) no_responses: bool,
    /// Leave out the built-in page at /
    #[arg(long, value_parser = BoolishValueParser::new(), env = "CLARY_NO_UI")]
    pub(crate) no_ui: bool,
}

/// Who may ask.
#[derive(Clone, Debug, Args)]
pub(crate) struct AccessArgs {
    /// Keys, one a line, with # comments and optional `name:` in front; CLARY_API_KEY adds one
    #[arg(long, value_name = "FILE", env = "CLARY_API_KEY_FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Requests that each key may have running [default: no limit]
    #[arg(long, value_name = "N", value_parser = args::count, env = "CLARY_KEY_CONCURRENCY")]
    pub(crate) key_concurrency: Option<usize>,
    /// Further names for the Host header, on loopback
    #[arg(long, value_name = "NAME", value_delimiter = ',', env = "CLARY_ALLOWED_HOST")]
    pub(crate) allowed_host: Vec<String>,
    /// Hosts whose pictures are fetched when a request links to them, over https; none: no link is followed
    #[arg(long, value_name = "HOST,...", value_delimiter = ',', value_parser = link_host)]
    #[arg(env = "CLARY_IMAGE_URL_ALLOW")]
    pub(crate) image_url_allow: Vec<String>,
    /// Origins whose pages may use the server
    #[arg(long, value_name = "ORIGIN", value_delimiter = ',', env = "CLARY_CORS_ORIGIN")]
    pub(crate) cors_origin: Vec<String>,
    /// Let everybody who reaches the address ask
    #[arg(long, value_parser = BoolishValueParser::new(), env = "CLARY_NO_AUTH_I_KNOW")]
    pub(crate) no_auth_i_know: bool,
}

/// How the work is arranged.
#[derive(Clone, Debug, Args)]
pub(crate) struct WorkArgs {
    /// Sequences that run at once, or auto: up to 4, as many as fit
    #[arg(long, value_name = "N|auto", default_value = "auto", value_parser = slots, env = "CLARY_SLOTS")]
    pub(crate) slots: Slots,
    /// Memory of the prompt cache on the cpu device, or auto: 4 GiB, a fifth of what is free, half of what
    /// weights leave
    #[arg(long, value_name = "BYTES|auto", default_value = "auto", value_parser = cache)]
    #[arg(env = "CLARY_CACHE_RAM")]
    pub(crate) cache_ram: CacheSize,
    /// Memory of the prompt cache on a card, where it lies on the card itself, or auto: 4 GiB, half of what
    /// weights leave there
    #[arg(long, value_name = "BYTES|auto", default_value = "auto", value_parser = cache)]
    #[arg(env = "CLARY_CACHE_DEVICE")]
    pub(crate) cache_device: CacheSize,
    /// Folder that keeps the prompt cache over restarts, and what memory has no room for; it holds the
    /// prompts' tokens, for its owner alone
    #[arg(long, value_name = "DIR", env = "CLARY_CACHE_DISK")]
    pub(crate) cache_disk: Option<PathBuf>,
    /// Most bytes of the files in that folder; the oldest go first
    #[arg(long, value_name = "BYTES", default_value = "16GiB", value_parser = disk_bytes)]
    #[arg(env = "CLARY_CACHE_DISK_MAX")]
    pub(crate) cache_disk_max: u64,
    /// Saved states inside long prompts, every so many tokens; 0 for none
    #[arg(long, value_name = "TOKENS", default_value_t = 8192, value_parser = checkpoint_every)]
    #[arg(env = "CLARY_CHECKPOINT_EVERY")]
    pub(crate) checkpoint_every: usize,
    /// Requests that may wait for a slot
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = args::count, env = "CLARY_QUEUE")]
    pub(crate) queue: usize,
    /// Longest wait for a slot (200ms, 30s, 10m)
    #[arg(long, value_name = "TIME", default_value = "600s", value_parser = time)]
    #[arg(env = "CLARY_QUEUE_TIMEOUT")]
    pub(crate) queue_timeout: Duration,
    /// Time that running replies get after SIGTERM or Ctrl-C
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time)]
    #[arg(env = "CLARY_DRAIN_TIMEOUT")]
    pub(crate) drain_timeout: Duration,
    /// Time without a step after which a busy server is not ready
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    #[arg(env = "CLARY_STALL_AFTER")]
    pub(crate) stall_after: Duration,
    /// End with exit code 5 when the server stalls, so that a service manager starts it anew
    #[arg(long, value_parser = BoolishValueParser::new(), env = "CLARY_EXIT_ON_STALL")]
    pub(crate) exit_on_stall: bool,
    /// Target for the longest time between two steps of a running reply
    #[arg(long, value_name = "TIME", default_value = "200ms", value_parser = time)]
    #[arg(env = "CLARY_MAX_STALL")]
    pub(crate) max_stall: Duration,
    /// Percent of greedy replies that are made once more, plainly, when the server is idle: a difference is
    /// logged and counted
    #[arg(long, value_name = "PERCENT", default_value_t = 0.0, value_parser = percent, env = "CLARY_AUDIT")]
    pub(crate) audit: f64,
    /// Form of the log on stderr; --quiet leaves warnings, -v adds probes
    #[arg(long, value_enum, default_value_t = LogFormat::Text, env = "CLARY_LOG_FORMAT")]
    pub(crate) log_format: LogFormat,
    /// Write the prompts to the log
    #[arg(long, value_parser = BoolishValueParser::new(), env = "CLARY_LOG_PROMPTS")]
    pub(crate) log_prompts: bool,
}

/// What replies are like where the request does not say.
#[derive(Clone, Debug, Args)]
pub(crate) struct WordsArgs {
    /// Tokens of reasoning, -1 for no limit
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true)]
    #[arg(value_parser = thinking_budget, env = "CLARY_THINKING_BUDGET")]
    pub(crate) thinking_budget: i64,
    #[command(flatten)]
    pub(crate) late_system: LateSystemArg,
    /// Do not let a reply end inside its reasoning: the model must close it first
    #[arg(long, value_parser = BoolishValueParser::new(), env = "CLARY_CLOSE_REASONING")]
    pub(crate) close_reasoning: bool,
    /// Where reasoning goes in OpenAI's replies
    #[arg(long, value_enum, default_value_t = ReasoningField::ReasoningContent)]
    #[arg(env = "CLARY_REASONING_FIELD")]
    pub(crate) reasoning_field: ReasoningField,
    /// Further names of the model
    #[arg(long, value_name = "NAME", value_delimiter = ',', env = "CLARY_ALIAS")]
    pub(crate) alias: Vec<String>,
    /// What becomes of requests for another model
    #[arg(long, value_enum, default_value_t = Unknown::Serve, env = "CLARY_UNKNOWN_MODEL")]
    pub(crate) unknown_model: Unknown,
    /// Where sampling defaults come from
    #[arg(long, value_enum, default_value_t = Defaults::Model, env = "CLARY_SAMPLING_DEFAULTS")]
    pub(crate) sampling_defaults: Defaults,
    /// Over the defaults, 0 to 5
    #[arg(long, value_name = "T", allow_negative_numbers = true, value_parser = args::temperature)]
    #[arg(env = "CLARY_TEMPERATURE")]
    pub(crate) temperature: Option<f32>,
    /// Over the defaults, above 0, up to 1
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = args::top_p)]
    #[arg(env = "CLARY_TOP_P")]
    pub(crate) top_p: Option<f32>,
    /// Over the defaults; 0 for all
    #[arg(long, value_name = "K", value_parser = args::top_k, env = "CLARY_TOP_K")]
    pub(crate) top_k: Option<u32>,
    /// Over the defaults, 0 to 1
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = args::min_p)]
    #[arg(env = "CLARY_MIN_P")]
    pub(crate) min_p: Option<f32>,
    /// Members of the clary object in every reply: notes, timings, draft, cache, receipt, all
    #[arg(long, value_name = "LIST", value_delimiter = ',', env = "CLARY_CLARY_FIELDS")]
    pub(crate) clary_fields: Vec<String>,
    /// Write every request, prompts included, into this folder, for `clary bundle` and `clary replay`
    #[arg(long, value_name = "DIR", env = "CLARY_RECORD")]
    pub(crate) record: Option<PathBuf>,
}

/// `--slots`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slots {
    /// As many as fit, up to 4.
    Auto,
    /// This many.
    Count(usize),
}

/// `--cache-ram` and `--cache-device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheSize {
    /// As memory allows.
    Auto,
    /// This many bytes; 0 is no cache.
    Bytes(u64),
}

/// `--reasoning-field`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum ReasoningField {
    /// `reasoning_content` alone.
    ReasoningContent,
    /// `reasoning` as well.
    Both,
}

/// `--unknown-model`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Unknown {
    /// They are answered by this model.
    Serve,
    /// 404.
    Reject,
}

/// `--sampling-defaults`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Defaults {
    /// The model's generation config.
    Model,
    /// Temperature 1 and nothing else.
    Openai,
}

/// A host's name, as it stands in a link.
fn link_host(text: &str) -> std::result::Result<String, String> {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || ['.', '-'].contains(&letter);
    match !text.is_empty() && text.chars().all(plain) {
        true => Ok(text.to_ascii_lowercase()),
        false => Err("a host's name is expected, as images.example.com: no scheme, port or star".into()),
    }
}

fn slots(text: &str) -> std::result::Result<Slots, String> {
    let count = || text.parse().ok().filter(|count| (1..=SLOTS_MAX).contains(count)).map(Slots::Count);
    let found = if text == "auto" { Some(Slots::Auto) } else { count() };
    found.ok_or(format!("auto, or a number from 1 to {SLOTS_MAX}"))
}

fn port(text: &str) -> std::result::Result<u16, String> {
    text.parse().map_err(|_| "a number from 0 to 65535".to_owned())
}

/// Most tokens that an option counts.
const TOKENS_MAX: usize = 1 << 32;

fn checkpoint_every(text: &str) -> std::result::Result<usize, String> {
    let number = text.parse().ok().filter(|tokens| *tokens <= TOKENS_MAX);
    number.ok_or(format!("a number from 0 to {TOKENS_MAX}"))
}

fn thinking_budget(text: &str) -> std::result::Result<i64, String> {
    let number = text.parse().ok().filter(|tokens| (-1..=TOKENS_MAX as i64).contains(tokens));
    number.ok_or(format!("-1 for no limit, or a number from 0 to {TOKENS_MAX}"))
}

fn cache(text: &str) -> std::result::Result<CacheSize, String> {
    let found = if text == "auto" { Some(CacheSize::Auto) } else { args::bytes(text).map(CacheSize::Bytes) };
    found.ok_or("auto, 0, or bytes (4294967296, 4GiB)".into())
}

fn disk_bytes(text: &str) -> std::result::Result<u64, String> {
    args::bytes(text).ok_or("bytes (17179869184, 16GiB)".into())
}

fn percent(text: &str) -> std::result::Result<f64, String> {
    let value = text.trim_end_matches('%').parse().ok().filter(|value| (0.0..=100.0).contains(value));
    value.ok_or("a number from 0 to 100".into())
}

/// A time up to a year: deadlines are sums with the present.
fn time(text: &str) -> std::result::Result<Duration, String> {
    let units = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("", 1000)];
    let (number, unit) = units
        .iter()
        .find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))
        .expect("the empty suffix always matches");
    let millis = number.trim().parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    let year = 365 * 24 * 3_600_000;
    let millis = millis.filter(|millis| *millis <= year);
    millis.map(Duration::from_millis).ok_or("a whole number with ms, s, m or h, at most a year".into())
}

/// The server's settings.
pub(crate) fn settings(args: &ServeArgs) -> Result<Settings> {
    Thinking::new(&args.model)?;
    let (place, access, words) = (&args.place, &args.access, &args.words);
    let typed = Typed {
        host: place.host.clone(),
        port: place.port,
        unix: place.unix.clone(),
        keys: keys(access.api_key_file.as_deref())?,
        key_concurrency: access.key_concurrency,
        no_auth: access.no_auth_i_know,
        allowed_hosts: access.allowed_host.clone(),
        cors_origins: access.cors_origin.clone(),
        aliases: words.alias.clone(),
        reject_unknown_model: words.unknown_model == Unknown::Reject,
        sampling: match words.sampling_defaults {
            Defaults::Model => SamplingSource::Model,
            Defaults::Openai => SamplingSource::OpenAi,
        },
        temperature: words.temperature,
        top_p: words.top_p,
        top_k: words.top_k,
        min_p: words.min_p,
        thinking: args.model.thinking.map(|thinking| thinking == OnOff::On),
        template_kwargs: settings::kwargs(args.model.template_kwargs.as_deref().unwrap_or("{}"))?,
        thinking_budget: words.thinking_budget,
        close_reasoning: words.close_reasoning,
        late_system: words.late_system.rule(),
        reasoning_both: words.reasoning_field == ReasoningField::Both,
        drafting: Drafting { policy: settings::policy(args.draft.draft), ..Drafting::default() },
        drain_timeout: args.work.drain_timeout,
        stall_after: args.work.stall_after,
        clary_fields: words.clary_fields.clone(),
        record: words.record.as_deref().map(record).transpose()?,
        audit: args.work.audit,
        log_prompts: args.work.log_prompts,
        anthropic: !place.no_anthropic,
        responses: !place.no_responses,
        ollama: !place.no_ollama,
        page: !place.no_ui,
        ..Typed::default()
    };
    Settings::new(typed).map_err(nonsense)
}

/// The folder of the record, made if need be.
fn record(dir: &Path) -> Result<PathBuf> {
    std::fs::create_dir_all(dir).map_err(|error| Failure::file(dir, &error).context("--record"))?;
    Ok(dir.to_owned())
}

fn nonsense(error: SettingsError) -> Failure {
    let hint = match &error {
        SettingsError::OpenWithoutKeys { .. } => "a file with one key a line is enough",
        SettingsError::NoKeys => "`openssl rand -hex 32` makes a good key",
        SettingsError::NoAddress { .. } => "--host 127.0.0.1 always works",
        _ => "`clary help serve` lists what each option takes",
    };
    Failure::usage(error.to_string()).hint(hint)
}

/// Lines of the key file, and the key of the environment.
fn keys(file: Option<&Path>) -> Result<Vec<String>> {
    let mut keys = Vec::new();
    if let Some(path) = file {
        let read = input::text(path, KEY_FILE_MAX);
        let text = read.map_err(|failure| failure.or_hint("--api-key-file holds one key a line"))?;
        // A file that was named says that keys are wanted, even if it is empty.
        keys.push("# key file".to_owned());
        keys.extend(text.lines().map(str::to_owned));
    }
    if let Ok(key) = std::env::var("CLARY_API_KEY") {
        keys.push(key);
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        let check = |text: &str, millis: u64| assert_eq!(time(text), Ok(Duration::from_millis(millis)));
        check("200ms", 200);
        check("30", 30_000);
        check("2 s", 2_000);
        check("10m", 600_000);
        check("1h", 3_600_000);
        for wrong in ["", "s", "-1s", "1.5s", "9999999h", "99999999999999999999"] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes() {
        assert_eq!(cache("0"), Ok(CacheSize::Bytes(0)));
        assert_eq!(cache("2GiB"), Ok(CacheSize::Bytes(2 << 30)));
        assert!(cache("2GB").is_err());
        assert_eq!(slots("auto"), Ok(Slots::Auto));
        assert!(slots("0").is_err());
        assert_eq!((percent("0.5"), percent("100%")), (Ok(0.5), Ok(100.0)));
        assert!(percent("101").is_err() && percent("NaN").is_err());
    }
}
