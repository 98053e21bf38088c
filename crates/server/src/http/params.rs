//! Fields that every OpenAI-style route shares: sampling, limits of the reply, the cache, drafting, and what
//! the reply shall tell (`docs/api.md` 3.1).

use engine::{BIAS_MAX, DRAFT_MAX, DraftPolicy, Drafting, LOGPROBS_MAX, Sampling};
use serde_json::Value;
use text::{STOP_BYTES_MAX, STOPS_MAX};
use utoipa::ToSchema;

use super::error::ApiError;
use super::fields::{Fields, token, unexpected, whole};
use super::limits::{SALT_BYTES_MAX, STOP_IDS_MAX};
use super::settings::{ClaryFields, SamplingDefaults};
use super::state::Served;

/// Fields that have no effect.
const IGNORED: [&str; 6] =
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_retention"];

/// The shared fields. Absent means the server's default.
#[derive(Clone, Debug, Default, PartialEq, ToSchema)]
pub struct Params {
    /// 0 to 5; 0 is greedy.
    #[schema(minimum = 0, maximum = 5)]
    pub temperature: Option<f32>,
    /// Above 0, at most 1.
    #[schema(maximum = 1)]
    pub top_p: Option<f32>,
    /// 0 is off.
    #[schema(minimum = 0)]
    pub top_k: Option<u32>,
    /// 0 to 1.
    #[schema(minimum = 0, maximum = 1)]
    pub min_p: Option<f32>,
    /// -2 to 2, over generated tokens.
    #[schema(minimum = -2, maximum = 2)]
    pub presence_penalty: Option<f32>,
    /// -2 to 2, over generated tokens.
    #[schema(minimum = -2, maximum = 2)]
    pub frequency_penalty: Option<f32>,
    /// Above 0, at most 10, over prompt and generated tokens.
    #[schema(maximum = 10)]
    pub repetition_penalty: Option<f32>,
    /// Token id to a number from -100 to 100.
    #[schema(value_type = Object)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Key of all draws; a negative number is taken as its 64 bits.
    pub seed: Option<u64>,
    /// Replies to the same prompt.
    #[schema(minimum = 1, maximum = 8)]
    pub n: Option<u32>,
    /// Equal to `n`, or absent.
    pub best_of: Option<u32>,
    /// A string or up to 64 strings that end the reply.
    #[schema(value_type = Vec<String>)]
    pub stop: Vec<String>,
    /// Keep the matched stop string in the text.
    pub include_stop_str_in_output: bool,
    /// Match stop strings in reasoning too.
    pub stop_in_reasoning: bool,
    /// Token ids that end the reply.
    pub stop_token_ids: Vec<u32>,
    /// Do not end at the model's end tokens.
    pub ignore_eos: bool,
    /// Use and fill the prefix cache.
    pub cache_prompt: bool,
    /// Divides the prefix cache.
    pub cache_salt: Option<String>,
    /// Divides the prefix cache.
    pub prompt_cache_key: Option<String>,
    /// Drafting; cannot change the reply.
    #[schema(value_type = Object)]
    pub speculative: Option<Speculative>,
    /// Alternatives of each prompt token.
    #[schema(minimum = 0, maximum = 20)]
    pub prompt_logprobs: Option<u32>,
    /// Send the reply as a stream.
    pub stream: bool,
    /// Usage in the stream.
    #[schema(value_type = Object)]
    pub stream_options: StreamOptions,
    /// Members of the reply's `clary` object.
    #[schema(value_type = Object)]
    pub clary: ClaryWish,
}

/// `speculative`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speculative {
    /// Whether to draft.
    pub enabled: bool,
    /// Most tokens of a draft.
    pub max_draft: Option<u8>,
}

/// `stream_options`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// A last chunk with the usage.
    pub include_usage: bool,
}

/// `clary`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClaryWish(pub ClaryFields);

impl Params {
    /// Reads the shared fields.
    pub(crate) fn read(fields: &mut Fields, served: &Served) -> Result<Self, ApiError> {
        let vocabulary = served.vocabulary();
        let slots = served.session.engine().limits().slots;
        let choices_max = slots.min(engine::CHOICES_MAX as usize);
        let n = fields.count("n", 1, choices_max)?.map(|n| n as u32);
        let best_of = fields.count("best_of", 1, choices_max)?.map(|n| n as u32);
        if best_of.is_some_and(|best_of| best_of != n.unwrap_or(1)) {
            return Err(ApiError::invalid("best_of", "must equal n"));
        }
        fields.ignore(&IGNORED);
        Ok(Self {
            temperature: fields.number("temperature", 0.0, 5.0)?,
            top_p: fields.positive("top_p", 1.0)?,
            top_k: fields.count("top_k", 0, vocabulary)?.map(|k| k as u32),
            min_p: fields.number("min_p", 0.0, 1.0)?,
            presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?,
            frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?,
            repetition_penalty: fields.positive("repetition_penalty", 10.0)?,
            logit_bias: logit_bias(fields, vocabulary)?,
            seed: seed(fields)?,
            n,
            best_of,
            stop: stop(fields, "stop")?,
            include_stop_str_in_output: fields.flag("include_stop_str_in_output", false)?,
            stop_in_reasoning: fields.flag("stop_in_reasoning", false)?,
            stop_token_ids: ids(fields, "stop_token_ids", STOP_IDS_MAX, vocabulary)?,
            ignore_eos: fields.flag("ignore_eos", false)?,
            cache_prompt: fields.flag("cache_prompt", true)?,
            cache_salt: fields.string("cache_salt", SALT_BYTES_MAX)?,
            prompt_cache_key: fields.string("prompt_cache_key", SALT_BYTES_MAX)?,
            speculative: speculative(fields)?,
            prompt_logprobs: fields.count("prompt_logprobs", 0, LOGPROBS_MAX as usize)?.map(|n| n as u32),
            stream: fields.flag("stream", false)?,
            stream_options: stream_options(fields)?,
            clary: ClaryWish(clary(fields)?),
        })
    }

    /// How to draw.
    pub(crate) fn sampling(&self, defaults: &SamplingDefaults, seed: u64) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            presence: self.presence_penalty.unwrap_or(0.0),
            frequency: self.frequency_penalty.unwrap_or(0.0),
            repetition: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            logit_bias: self.logit_bias.clone(),
            seed,
            stop_ids: self.stop_token_ids.clone(),
            ignore_eos: self.ignore_eos,
        }
    }

    /// What divides the prefix cache beside the key.
    pub(crate) fn salt(&self) -> Option<&str> {
        self.cache_salt.as_deref().or(self.prompt_cache_key.as_deref())
    }

    /// How to draft.
    pub(crate) fn drafting(&self, default: Drafting) -> Drafting {
        let policy = match self.speculative {
            None => default.policy,
            Some(Speculative { enabled: false, .. } | Speculative { max_draft: Some(0), .. }) => {
                DraftPolicy::Off
            }
            Some(Speculative { max_draft: Some(most), .. }) => DraftPolicy::Auto(most),
            Some(Speculative { max_draft: None, .. }) if default.policy == DraftPolicy::Off => {
                DraftPolicy::Auto(DRAFT_MAX as u8)
            }
            Some(Speculative { max_draft: None, .. }) => default.policy,
        };
        Drafting { policy, ..default }
    }
}

/// A string, or an array of them.
pub(crate) fn stop(fields: &mut Fields, name: &'static str) -> Result<Vec<String>, ApiError> {
    let path = fields.path(name);
    let items = match fields.take(name) {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items,
        Some(text @ Value::String(_)) => vec![text],
        Some(other) => return Err(unexpected(path, "a string or an array of strings", &other)),
    };
    if items.len() > STOPS_MAX {
        let detail = format!("{} strings, at most {STOPS_MAX} are allowed", items.len());
        return Err(ApiError::invalid(path, detail));
    }
    let one = |(index, item): (usize, Value)| match item {
        Value::String(text) if (1..=STOP_BYTES_MAX).contains(&text.len()) => Ok(text),
        other => {
            let wanted = format!("a string of 1 to {STOP_BYTES_MAX} bytes");
            Err(unexpected(format!("{path}[{index}]"), &wanted, &other))
        }
    };
    items.into_iter().enumerate().map(one).collect()
}

/// An array of token ids.
pub(crate) fn ids(
    fields: &mut Fields,
    name: &'static str,
    most: usize,
    vocabulary: usize,
) -> Result<Vec<u32>, ApiError> {
    let path = fields.path(name);
    id_list(&fields.array(name, most)?.unwrap_or_default(), &path, vocabulary)
}

/// Token ids of an array at a path.
pub(crate) fn id_list(items: &[Value], path: &str, vocabulary: usize) -> Result<Vec<u32>, ApiError> {
    let one = |(index, item): (usize, &Value)| token(item, || format!("{path}[{index}]"), vocabulary);
    items.iter().enumerate().map(one).collect()
}

fn logit_bias(fields: &mut Fields, vocabulary: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let map = match fields.take("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) if map.len() <= BIAS_MAX => map,
        Some(Value::Object(map)) => {
            let detail = format!("{} entries, at most {BIAS_MAX} are allowed", map.len());
            return Err(ApiError::invalid("logit_bias", detail));
        }
        Some(other) => return Err(unexpected("logit_bias", "an object", &other)),
    };
    let one = |(name, value): (&String, &Value)| {
        let path = || format!("logit_bias.{}", super::error::quoted(name));
        let id = name.parse::<u32>().ok().filter(|&id| (id as usize) < vocabulary).ok_or_else(|| {
            ApiError::invalid(path(), format!("the key must be a token id below {vocabulary}"))
        })?;
        let bias = value.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        let bias = bias.ok_or_else(|| unexpected(path(), "a number from -100 to 100", value))?;
        Ok((id, bias as f32))
    };
    let mut bias: Vec<(u32, f32)> = map.iter().map(one).collect::<Result<_, ApiError>>()?;
    bias.sort_by_key(|&(id, _)| id);
    // "7" and "07" are one token.
    if let Some(pair) = bias.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(ApiError::invalid("logit_bias", format!("token {} stands twice", pair[0].0)));
    }
    Ok(bias)
}

fn seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.take("seed") else { return Ok(None) };
    let seed = value.as_u64().or_else(|| whole(&value).map(|seed| seed as u64));
    seed.map(Some).ok_or_else(|| unexpected("seed", "an integer of 64 bits", &value))
}

fn speculative(fields: &mut Fields) -> Result<Option<Speculative>, ApiError> {
    let Some(mut inner) = fields.object("speculative")? else { return Ok(None) };
    let enabled = inner.flag("enabled", true)?;
    let max_draft = inner.count("max_draft", 0, DRAFT_MAX)?.map(|most| most as u8);
    inner.finish_strict("known are enabled and max_draft")?;
    Ok(Some(Speculative { enabled, max_draft }))
}

fn stream_options(fields: &mut Fields) -> Result<StreamOptions, ApiError> {
    let Some(mut inner) = fields.object("stream_options")? else { return Ok(StreamOptions::default()) };
    Ok(StreamOptions { include_usage: inner.flag("include_usage", false)? })
}

fn clary(fields: &mut Fields) -> Result<ClaryFields, ApiError> {
    let Some(mut inner) = fields.object("clary")? else { return Ok(ClaryFields::default()) };
    let all = inner.flag("all", false)?;
    let asked = ClaryFields {
        notes: inner.flag("notes", false)?,
        timings: inner.flag("timings", false)?,
        draft: inner.flag("draft", false)?,
        cache: inner.flag("cache", false)?,
        receipt: inner.flag("receipt", false)?,
        prompt: inner.flag("prompt", false)?,
    };
    inner.finish_strict("known are all, notes, timings, draft, cache, prompt and receipt")?;
    Ok(if all { asked.or(ClaryFields::ALL) } else { asked })
}
