//! Two levels of settings: [`Typed`] is what was typed, [`Settings`] what it means. [`Settings::new`] is the
//! only way from one to the other and refuses nonsense.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use engine::Drafting;
use serde_json::{Map, Value};
use text::{GenerationDefaults, LateSystem};

use super::auth::Keys;
use super::host::{Hosts, Origins};
use super::limits::Limits;

/// Options of a server as they were typed; the defaults are those of `docs/api.md` 8.1.
#[derive(Clone, Debug)]
pub struct Typed {
    /// Name or address to listen at.
    pub host: String,
    /// Port to listen at; 0 lets the system choose.
    pub port: u16,
    /// Socket file to listen at instead.
    pub unix: Option<PathBuf>,
    /// Lines of the key file and of the environment.
    pub keys: Vec<String>,
    /// Requests a key may have running.
    pub key_concurrency: Option<usize>,
    /// Serve the outside without keys.
    pub no_auth: bool,
    /// Further names for the `Host` header.
    pub allowed_hosts: Vec<String>,
    /// Origins whose pages may use the server.
    pub cors_origins: Vec<String>,
    /// Further names of the model.
    pub aliases: Vec<String>,
    /// Answer 404 to other names instead of serving them.
    pub reject_unknown_model: bool,
    /// Where sampling defaults come from.
    pub sampling: SamplingSource,
    /// Over those.
    pub temperature: Option<f32>,
    /// Over those.
    pub top_p: Option<f32>,
    /// Over those.
    pub top_k: Option<u32>,
    /// Over those.
    pub min_p: Option<f32>,
    /// Thinking on or off.
    pub thinking: Option<bool>,
    /// Variables for the chat template.
    pub template_kwargs: Map<String, Value>,
    /// Tokens of reasoning; -1 is no limit.
    pub thinking_budget: i64,
    /// Do not let a reply end inside its reasoning.
    pub close_reasoning: bool,
    /// Send reasoning as `reasoning` too.
    pub reasoning_both: bool,
    /// What becomes of a system message that does not lead.
    pub late_system: LateSystem,
    /// Drafting of requests that do not say.
    pub drafting: Drafting,
    /// Time that running replies get after the order to end.
    pub drain_timeout: Duration,
    /// Time without a step after which a busy engine counts as stalled.
    pub stall_after: Duration,
    /// Members of the `clary` object that every reply has.
    pub clary_fields: Vec<String>,
    /// Folder for the bundles of requests, prompts included.
    pub record: Option<PathBuf>,
    /// Percent of greedy replies that are made once more, plainly.
    pub audit: f64,
    /// Whether the log has the prompts.
    pub log_prompts: bool,
    /// Anthropic's routes.
    pub anthropic: bool,
    /// The Responses route.
    pub responses: bool,
    /// Ollama's routes.
    pub ollama: bool,
    /// The built-in page.
    pub page: bool,
    /// Limits.
    pub limits: Limits,
}

impl Default for Typed {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 8080,
            unix: None,
            keys: Vec::new(),
            key_concurrency: None,
            no_auth: false,
            allowed_hosts: Vec::new(),
            cors_origins: Vec::new(),
            aliases: Vec::new(),
            reject_unknown_model: false,
            sampling: SamplingSource::Model,
            temperature: None,
            top_p: None,
            top_k: None,
            min_p: None,
            thinking: None,
            template_kwargs: Map::new(),
            thinking_budget: -1,
            close_reasoning: false,
            reasoning_both: false,
            late_system: LateSystem::default(),
            drafting: Drafting::default(),
            drain_timeout: Duration::from_secs(30),
            stall_after: Duration::from_secs(60),
            clary_fields: Vec::new(),
            record: None,
            audit: 0.0,
            log_prompts: false,
            anthropic: true,
            responses: true,
            ollama: true,
            page: true,
            limits: Limits::default(),
        }
    }
}

/// Where sampling defaults come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SamplingSource {
    /// The model's generation config, then OpenAI's defaults.
    Model,
    /// OpenAI's defaults.
    OpenAi,
}

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bind {
    /// TCP.
    Tcp(SocketAddr),
    /// A socket file.
    Unix(PathBuf),
}

/// Sampling of requests that do not say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// 0 to 5.
    pub temperature: f32,
    /// Above 0, at most 1.
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 0 to 1.
    pub min_p: f32,
    /// Above 0, at most 10.
    pub repetition_penalty: f32,
}

/// Members of the `clary` object that are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClaryFields {
    /// What was done on the client's behalf.
    pub notes: bool,
    /// Times.
    pub timings: bool,
    /// Drafting.
    pub draft: bool,
    /// The prefix cache.
    pub cache: bool,
    /// What makes the reply checkable.
    pub receipt: bool,
    /// The prompt, in a dry run.
    pub prompt: bool,
}

impl ClaryFields {
    /// Every member of a reply.
    pub const ALL: Self =
        Self { notes: true, timings: true, draft: true, cache: true, receipt: true, prompt: false };

    /// Whether the reply has a `clary` object.
    pub fn any(self) -> bool {
        self.notes || self.timings || self.draft || self.cache || self.receipt
    }

    /// Both.
    pub fn or(self, other: Self) -> Self {
        Self {
            notes: self.notes || other.notes,
            timings: self.timings || other.timings,
            draft: self.draft || other.draft,
            cache: self.cache || other.cache,
            receipt: self.receipt || other.receipt,
            prompt: self.prompt || other.prompt,
        }
    }
}

/// What the options mean.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where to listen.
    pub bind: Bind,
    /// Who may ask.
    pub keys: Keys,
    /// The `Host` rule.
    pub hosts: Hosts,
    /// Origins whose pages may use the server.
    pub origins: Origins,
    /// Further names of the model.
    pub aliases: Vec<String>,
    /// Answer 404 to other names.
    pub reject_unknown_model: bool,
    /// Where sampling defaults come from, and what was typed over them.
    pub(crate) sampling: TypedSampling,
    /// Thinking of requests that do not say.
    pub thinking: bool,
    /// Variables for the chat template; `enable_thinking` is not among them.
    pub template_kwargs: Map<String, Value>,
    /// Tokens of reasoning.
    pub thinking_budget: Option<usize>,
    /// Do not let a reply end inside its reasoning.
    pub close_reasoning: bool,
    /// Send reasoning as `reasoning` too.
    pub reasoning_both: bool,
    /// What becomes of a system message that does not lead.
    pub late_system: LateSystem,
    /// Drafting of requests that do not say.
    pub drafting: Drafting,
    /// Time that running replies get after the order to end.
    pub drain_timeout: Duration,
    /// Time without a step after which a busy engine counts as stalled.
    pub stall_after: Duration,
    /// Members of the `clary` object that every reply has.
    pub clary_fields: ClaryFields,
    /// Folder for the bundles of requests, prompts included.
    pub record: Option<PathBuf>,
    /// Percent of greedy replies that are made once more, plainly; 0 for none.
    pub audit: f64,
    /// Whether the log has the prompts.
    pub log_prompts: bool,
    /// Anthropic's routes.
    pub anthropic: bool,
    /// The Responses route.
    pub responses: bool,
    /// Ollama's routes.
    pub ollama: bool,
    /// The built-in page.
    pub page: bool,
    /// Limits.
    pub limits: Limits,
}

/// Sampling options before the model's own are known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TypedSampling {
    source: SamplingSource,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
}

/// Why options make no sense. All are mistakes of usage.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SettingsError {
    /// Open to the network without keys.
    #[error(
        "--host {host} is reachable from outside and no key is set; give --api-key-file, or --no-auth-i-know"
    )]
    OpenWithoutKeys {
        /// The host as typed.
        host: String,
    },
    /// Keys were meant to be set, and there is none.
    #[error("the key file and CLARY_API_KEY hold no key; write one key a line, or leave both out")]
    NoKeys,
    /// The host has no address.
    #[error("--host {host}: no such address")]
    NoAddress {
        /// The host as typed.
        host: String,
    },
    /// `*` would let every page use a key that a browser holds.
    #[error("--cors-origin * cannot be used together with keys; list the origins")]
    AnyOriginWithKeys,
    /// Two options contradict each other.
    #[error("--thinking and enable_thinking in --template-kwargs differ; give one of them")]
    ThinkingTwice,
    /// A value out of range.
    #[error("{option}: {found} found, {allowed} allowed")]
    Range {
        /// The option.
        option: &'static str,
        /// Its value.
        found: String,
        /// What is possible.
        allowed: &'static str,
    },
}

impl Settings {
    /// What the options mean.
    pub fn new(typed: Typed) -> Result<Self, SettingsError> {
        let bind = bind(&typed)?;
        let keys = Keys::new(typed.keys.iter().map(String::as_str), typed.key_concurrency);
        if keys.count() == 0 && !typed.keys.is_empty() {
            return Err(SettingsError::NoKeys);
        }
        let hosts = match &bind {
            Bind::Tcp(address) => Hosts::bound_to(address.ip(), &typed.allowed_hosts),
            Bind::Unix(_) => Hosts::Any,
        };
        let is_open = matches!(&bind, Bind::Tcp(address) if !address.ip().is_loopback());
        if is_open && keys.count() == 0 && !typed.no_auth {
            return Err(SettingsError::OpenWithoutKeys { host: typed.host });
        }
        if keys.count() > 0 && typed.cors_origins.iter().any(|origin| origin == "*") {
            return Err(SettingsError::AnyOriginWithKeys);
        }
        let (thinking, template_kwargs) = thinking(&typed)?;
        Ok(Self {
            bind,
            keys,
            hosts,
            origins: Origins(typed.cors_origins.clone()),
            sampling: sampling(&typed)?,
            thinking,
            template_kwargs,
            thinking_budget: match typed.thinking_budget {
                -1 => None,
                budget => Some(usize::try_from(budget).map_err(|_| SettingsError::Range {
                    option: "--thinking-budget",
                    found: budget.to_string(),
                    allowed: "-1 or more",
                })?),
            },
            clary_fields: clary_fields(&typed.clary_fields)?,
            aliases: typed.aliases,
            reject_unknown_model: typed.reject_unknown_model,
            close_reasoning: typed.close_reasoning,
            reasoning_both: typed.reasoning_both,
            late_system: typed.late_system,
            drafting: typed.drafting,
            drain_timeout: typed.drain_timeout,
            stall_after: typed.stall_after,
            record: typed.record,
            audit: typed.audit,
            log_prompts: typed.log_prompts,
            anthropic: typed.anthropic,
            responses: typed.responses,
            ollama: typed.ollama,
            page: typed.page,
            limits: typed.limits,
        })
    }
}

fn bind(typed: &Typed) -> Result<Bind, SettingsError> {
    if let Some(path) = &typed.unix {
        return Ok(Bind::Unix(path.clone()));
    }
    let none = || SettingsError::NoAddress { host: typed.host.clone() };
    let literal = typed.host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    let address = match literal {
        Ok(address) => SocketAddr::new(address, typed.port),
        Err(_) => {
            let mut found = (typed.host.as_str(), typed.port).to_socket_addrs().map_err(|_| none())?;
            found.next().ok_or_else(none)?
        }
    };
    Ok(Bind::Tcp(address))
}

fn thinking(typed: &Typed) -> Result<(bool, Map<String, Value>), SettingsError> {
    let mut kwargs = typed.template_kwargs.clone();
    let in_kwargs = match kwargs.shift_remove("enable_thinking") {
        None => None,
        Some(Value::Bool(on)) => Some(on),
        Some(other) => {
            return Err(SettingsError::Range {
                option: "enable_thinking in --template-kwargs",
                found: other.to_string(),
                allowed: "true or false",
            });
        }
    };
    match (typed.thinking, in_kwargs) {
        (Some(one), Some(other)) if one != other => Err(SettingsError::ThinkingTwice),
        (one, other) => Ok((one.or(other).unwrap_or(true), kwargs)),
    }
}

fn sampling(typed: &Typed) -> Result<TypedSampling, SettingsError> {
    let check = |option, value: Option<f32>, allowed, fits: fn(f32) -> bool| match value {
        Some(value) if !fits(value) => {
            Err(SettingsError::Range { option, found: value.to_string(), allowed })
        }
        _ => Ok(value),
    };
    Ok(TypedSampling {
        source: typed.sampling,
        temperature: check("--temperature", typed.temperature, "0 to 5", |t| (0.0..=5.0).contains(&t))?,
        top_p: check("--top-p", typed.top_p, "above 0, at most 1", |p| p > 0.0 && p <= 1.0)?,
        top_k: typed.top_k,
        min_p: check("--min-p", typed.min_p, "0 to 1", |p| (0.0..=1.0).contains(&p))?,
    })
}

fn clary_fields(names: &[String]) -> Result<ClaryFields, SettingsError> {
    let mut fields = ClaryFields::default();
    for name in names {
        match name.as_str() {
            "all" => fields = fields.or(ClaryFields::ALL),
            "notes" => fields.notes = true,
            "timings" => fields.timings = true,
            "draft" => fields.draft = true,
            "cache" => fields.cache = true,
            "receipt" => fields.receipt = true,
            _ => {
                let allowed = "all, notes, timings, draft, cache, receipt";
                return Err(SettingsError::Range { option: "--clary-fields", found: name.clone(), allowed });
            }
        }
    }
    Ok(fields)
}

impl TypedSampling {
    /// Over what the model's folder says.
    pub(crate) fn over(self, model: &GenerationDefaults) -> SamplingDefaults {
        let model = match self.source {
            SamplingSource::Model => model.clone(),
            SamplingSource::OpenAi => GenerationDefaults::default(),
        };
        let or = |typed: Option<f32>, model: Option<f64>, last: f32| {
            typed.or(model.map(|value| value as f32)).unwrap_or(last)
        };
        SamplingDefaults {
            temperature: or(self.temperature, model.temperature, 1.0),
            top_p: or(self.top_p, model.top_p, 1.0),
            top_k: self.top_k.or(model.top_k).unwrap_or(0),
            min_p: or(self.min_p, model.min_p, 0.0),
            repetition_penalty: or(None, model.repetition_penalty, 1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(typed: Typed) -> Result<Settings, SettingsError> {
        Settings::new(typed)
    }

    #[test]
    fn the_outside_needs_keys() {
        let open = |typed: Typed| check(Typed { host: "0.0.0.0".into(), ..typed });
        let host = "0.0.0.0".to_owned();
        assert_eq!(open(Typed::default()).unwrap_err(), SettingsError::OpenWithoutKeys { host });
        assert!(open(Typed { no_auth: true, ..Typed::default() }).is_ok());
        let settings = open(Typed { keys: vec!["k".into()], ..Typed::default() }).unwrap();
        assert_eq!(settings.hosts, Hosts::Any);
        let none = Typed { keys: vec!["# nothing".into()], ..Typed::default() };
        assert_eq!(check(none).unwrap_err(), SettingsError::NoKeys);
        let any = Typed { keys: vec!["k".into()], cors_origins: vec!["*".into()], ..Typed::default() };
        assert_eq!(check(any).unwrap_err(), SettingsError::AnyOriginWithKeys);
        assert!(check(Typed { host: "[::1]".into(), ..Typed::default() }).is_ok());
    }

    #[test]
    fn thinking_is_said_once() {
        let kwargs = |on: Value| json!({"enable_thinking": on}).as_object().unwrap().clone();
        let typed = |thinking, on| Typed { thinking, template_kwargs: kwargs(on), ..Typed::default() };
        assert_eq!(check(typed(Some(true), json!(false))).unwrap_err(), SettingsError::ThinkingTwice);
        assert!(!check(typed(None, json!(false))).unwrap().thinking);
        assert!(check(Typed::default()).unwrap().thinking);
        assert!(matches!(check(typed(None, json!(1))), Err(SettingsError::Range { .. })));
    }

    #[test]
    fn sampling_from_three_places() {
        let model = GenerationDefaults { temperature: Some(0.3), top_k: Some(20), ..Default::default() };
        let over = |typed: Typed| check(typed).unwrap().sampling.over(&model);
        let defaults = over(Typed { top_k: Some(5), ..Typed::default() });
        assert_eq!((defaults.temperature, defaults.top_k, defaults.top_p), (0.3, 5, 1.0));
        let openai = over(Typed { sampling: SamplingSource::OpenAi, ..Typed::default() });
        assert_eq!((openai.temperature, openai.top_k), (1.0, 0));
        assert!(check(Typed { top_p: Some(0.0), ..Typed::default() }).is_err());
    }
}
