//! What was typed about replies, and what it means.

use std::hash::{BuildHasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::{Args, ValueEnum};
use engine::{DRAFT_MAX, DraftPolicy, Drafting, Sampling};
use serde_json::{Map, Value};
use server::Options;
use text::{GenerationDefaults, LateSystem};

use crate::args::{Draft, ModelArgs, OnOff, SamplingArgs};
use crate::error::{Failure, Result};

/// Variables that `--template-kwargs` may set (`docs/api.md` 3.1).
const KWARGS: [&str; 3] = ["enable_thinking", "preserve_thinking", "add_vision_id"];

/// `--late-system`.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct LateSystemArg {
    /// A system or developer message that does not lead: user makes it a user turn that begins with
    /// [system], merge joins it to the first system message, reject answers 400
    #[arg(long, value_enum, default_value_t = Late::User, env = "CLARY_LATE_SYSTEM")]
    pub(crate) late_system: Late,
}

/// Values of `--late-system`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Late {
    /// A user turn in its place.
    User,
    /// Joined to the first.
    Merge,
    /// An error.
    Reject,
}

impl LateSystemArg {
    /// The rule it stands for.
    pub(crate) fn rule(self) -> LateSystem {
        match self.late_system {
            Late::User => LateSystem::UserTurn,
            Late::Merge => LateSystem::Merge,
            Late::Reject => LateSystem::Reject,
        }
    }
}

/// How a reply begins: whether it thinks, and the template's variables.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Thinking {
    /// Whether the model thinks.
    pub(crate) enabled: bool,
    /// Whether old reasoning stays in the prompt; `None` leaves it to the template.
    pub(crate) preserve: Option<bool>,
    /// Further variables.
    pub(crate) kwargs: Map<String, Value>,
}

impl Thinking {
    /// Reads `--thinking` and `--template-kwargs`, which must not contradict each other.
    pub(crate) fn new(args: &ModelArgs) -> Result<Self> {
        let mut kwargs = kwargs(args.template_kwargs.as_deref().unwrap_or("{}"))?;
        let in_kwargs = flag(kwargs.remove("enable_thinking"), "enable_thinking")?;
        let preserve = flag(kwargs.remove("preserve_thinking"), "preserve_thinking")?;
        let typed = args.thinking.map(|thinking| thinking == OnOff::On);
        if let (Some(typed), Some(named)) = (typed, in_kwargs)
            && typed != named
        {
            let message = "--thinking and enable_thinking in --template-kwargs contradict each other";
            return Err(Failure::usage(message).hint("give one of the two"));
        }
        Ok(Self { enabled: typed.or(in_kwargs).unwrap_or(true), preserve, kwargs })
    }
}

/// Reads `--template-kwargs`.
pub(crate) fn kwargs(text: &str) -> Result<Map<String, Value>> {
    let wrong = |problem: String| {
        Failure::usage(format!("--template-kwargs: {problem}"))
            .hint("--template-kwargs '{\"enable_thinking\": false}'")
    };
    let map = match serde_json::from_str(text) {
        Ok(Value::Object(map)) => map,
        Ok(other) => return Err(wrong(format!("a JSON object is expected, found {other}"))),
        Err(error) => return Err(wrong(error.to_string())),
    };
    match map.keys().find(|key| !KWARGS.contains(&key.as_str())) {
        Some(key) => Err(wrong(format!("{key:?} is not known: {} are", KWARGS.join(", ")))),
        None => Ok(map),
    }
}

fn flag(value: Option<Value>, key: &str) -> Result<Option<bool>> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(flag)) => Ok(Some(flag)),
        Some(other) => {
            Err(Failure::usage(format!("--template-kwargs: {key} is {other}; true or false is expected")))
        }
    }
}

/// Sampling as typed, over what the model's generation config says.
pub(crate) fn sampling(args: &SamplingArgs, defaults: &GenerationDefaults) -> Sampling {
    let or = |typed: Option<f32>, model: Option<f64>, usual: f32| {
        typed.or(model.map(|value| value as f32)).unwrap_or(usual)
    };
    Sampling {
        temperature: or(args.temperature, defaults.temperature, 1.0),
        top_p: or(args.top_p, defaults.top_p, 1.0),
        top_k: args.top_k.or(defaults.top_k).unwrap_or(0),
        min_p: or(args.min_p, defaults.min_p, 0.0),
        repetition: or(None, defaults.repetition_penalty, 1.0),
        seed: args.seed.unwrap_or_else(random),
        ..Sampling::default()
    }
}

/// A number that differs from run to run.
fn random() -> u64 {
    RandomState::new().hash_one(0u8)
}

/// The engine's word for `--draft`.
pub(crate) fn policy(draft: Draft) -> DraftPolicy {
    match draft {
        Draft::Auto => DraftPolicy::Auto(DRAFT_MAX as u8),
        Draft::Off => DraftPolicy::Off,
        Draft::Depth(depth) => DraftPolicy::Fixed(depth),
    }
}

/// What a reply should be like.
#[derive(Clone, Debug)]
pub(crate) struct Wish<'a> {
    /// How it begins.
    pub(crate) thinking: &'a Thinking,
    /// How tokens are drawn.
    pub(crate) sampling: Sampling,
    /// Most tokens.
    pub(crate) max_tokens: Option<usize>,
    /// How deep to draft.
    pub(crate) draft: Draft,
}

/// Options of a reply.
pub(crate) fn options(wish: Wish<'_>) -> Options {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs() as i64);
    Options {
        thinking: Some(wish.thinking.enabled),
        preserve_thinking: wish.thinking.preserve,
        template_kwargs: wish.thinking.kwargs.clone(),
        now_seconds: now,
        sampling: wish.sampling,
        max_tokens: wish.max_tokens,
        drafting: Drafting { policy: policy(wish.draft), ..Drafting::default() },
        ..Options::default()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};
    use crate::error::Exit;

    fn thinking(options: &[&str]) -> Result<Thinking> {
        let line = ["clary", "run", "m", "p"].iter().chain(options);
        let Command::Run(args) = Cli::try_parse_from(line).unwrap().command else { panic!("it is run") };
        Thinking::new(&args.reply.model)
    }

    #[test]
    fn thinking_is_decided_once() {
        let check = |options: &[&str], wanted: bool| assert_eq!(thinking(options).unwrap().enabled, wanted);
        check(&[], true);
        check(&["--thinking", "off"], false);
        check(&["--template-kwargs", "{\"enable_thinking\": false}"], false);
        check(&["--thinking", "on", "--template-kwargs", "{\"enable_thinking\": true}"], true);
        for wrong in [
            &["--thinking", "on", "--template-kwargs", "{\"enable_thinking\": false}"][..],
            &["--template-kwargs", "[]"],
            &["--template-kwargs", "{"],
            &["--template-kwargs", "{\"enable_thinking\": 1}"],
            &["--template-kwargs", "{\"tools\": []}"],
        ] {
            assert_eq!(thinking(wrong).unwrap_err().exit, Exit::Usage, "{wrong:?}");
        }
    }

    #[test]
    fn typed_sampling_goes_over_the_models() {
        let defaults = GenerationDefaults {
            temperature: Some(0.0),
            top_k: Some(20),
            top_p: Some(0.9),
            ..GenerationDefaults::default()
        };
        let typed = SamplingArgs {
            temperature: Some(0.5),
            top_p: None,
            top_k: Some(3),
            min_p: None,
            seed: Some(4),
            max_tokens: None,
        };
        let sampling = sampling(&typed, &defaults);
        assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed), (0.5, 0.9, 3, 4));
        assert_eq!((sampling.min_p, sampling.repetition), (0.0, 1.0));
    }
}
