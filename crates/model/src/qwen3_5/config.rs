//! The checked geometry of a model (`docs/model.md` section 1).
//!
//! A [`Config`] that exists is valid: counts are between 1 and the limits named here, heads divide, and no
//! product of sizes overflows. Later code computes with them freely.

use device::{AttentionShape, DeltaShape};
use serde_json::Value;

use super::fields::{ConfigError, Section};
use super::vision_config::VisionConfig;

/// Most layers.
pub const LAYERS_MAX: usize = 1024;
/// Largest width of the residual stream.
pub const HIDDEN_MAX: usize = 1 << 16;
/// Most rows of the token table.
pub const VOCABULARY_MAX: usize = 1 << 22;
/// Most heads of any kind.
pub const HEADS_MAX: usize = 1 << 10;
/// Largest width of a head.
pub const HEAD_DIM_MAX: usize = 1 << 10;
/// Most taps of the convolution.
pub const CONV_TAPS_MAX: usize = 16;
/// Most routed experts of a layer.
pub const EXPERTS_MAX: usize = 1 << 12;
/// Most experts one token goes to.
pub const PICKS_MAX: usize = 64;
/// Largest inner width of an expert.
pub const EXPERT_WIDTH_MAX: usize = 1 << 16;
/// Most positions.
pub const POSITIONS_MAX: usize = 1 << 24;
/// Most MTP layers.
pub const MTP_LAYERS_MAX: usize = 16;
/// Most parameters of the text model.
pub const PARAMETERS_MAX: u64 = 1 << 42;

/// What mixes tokens in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MixerKind {
    /// `linear_attention`: Gated DeltaNet.
    DeltaNet,
    /// `full_attention`: gated attention.
    Attention,
}

/// What `tie_word_embeddings` says (`docs/formats.md` section 2, rule 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tie {
    /// The head is the token table.
    Tied,
    /// The head is `lm_head`.
    Untied,
    /// Top level and `text_config` differ: untied if an `lm_head` is stored.
    Differs,
}

/// Rotary embedding (`docs/model.md` section 6).
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Entries of a head that turn, `R`; even.
    pub dims: usize,
    /// `mrope_section`: frequencies of axes t, h and w.
    pub sections: [usize; 3],
}

/// Ids of the picture tokens, where `config.json` names them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageTokens {
    /// `<|image_pad|>`, the placeholder of image rows.
    pub image: Option<u32>,
    /// `<|video_pad|>`.
    pub video: Option<u32>,
    /// `<|vision_start|>`.
    pub vision_start: Option<u32>,
    /// `<|vision_end|>`.
    pub vision_end: Option<u32>,
}

/// Checked geometry of a model of the family.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Rows of the token table.
    pub vocabulary: usize,
    /// Width of the residual stream, `H`.
    pub hidden: usize,
    /// Layers, first to last.
    pub layers: Vec<MixerKind>,
    /// Heads of the attention layers.
    pub attention: AttentionShape,
    /// Heads of the delta-net layers.
    pub delta: DeltaShape,
    /// Routed experts of a layer, `E`.
    pub experts: usize,
    /// Experts of one token, `k`.
    pub picks: usize,
    /// Inner width of a routed expert.
    pub expert_width: usize,
    /// Inner width of the shared expert.
    pub shared_width: usize,
    /// `rms_norm_eps`.
    pub eps: f32,
    /// `max_position_embeddings`.
    pub positions_max: usize,
    /// Rotary embedding.
    pub rope: Rope,
    /// `mtp_num_hidden_layers`. Conversions that dropped the tensors keep the number; only layer 0 is used.
    pub mtp_layers: usize,
    /// Where the head comes from.
    pub tie: Tie,
    /// `eos_token_id`, top level and `text_config` joined, in this order.
    pub eos: Vec<u32>,
    /// Picture tokens.
    pub image_tokens: ImageTokens,
    /// The vision tower, where `config.json` describes one.
    pub vision: Option<VisionConfig>,
}

impl Config {
    /// Reads and checks `config.json`. The text keys are in `text_config` or at the top level.
    ///
    /// `attn_output_gate` is not read: the family always gates, and a model that does not has a query
    /// projection of another shape. Keys that change nothing in inference are not read either.
    pub fn from_json(json: &Value) -> Result<Self, ConfigError> {
        let top = Section::new(json, "")?;
        let nested = top.get("text_config");
        let text = match nested {
            Some(value) => Section::new(value, "text_config")?,
            None => top,
        };
        text.only("model_type", &["qwen3_5_moe_text", "qwen3_5_moe"])?;
        text.only("hidden_act", &["silu"])?;
        text.empty_list("mlp_only_layers")?;
        if text.flag("attention_bias")? == Some(true) {
            return Err(text.error("attention_bias", "false"));
        }
        let attention = attention_shape(&text)?;
        let experts = text.count("num_experts", EXPERTS_MAX)?;
        let config = Self {
            vocabulary: text.count("vocab_size", VOCABULARY_MAX)?,
            hidden: text.count("hidden_size", HIDDEN_MAX)?,
            layers: layers(&text)?,
            attention,
            delta: delta_shape(&text)?,
            experts,
            picks: text.count("num_experts_per_tok", experts.min(PICKS_MAX))?,
            expert_width: text.count("moe_intermediate_size", EXPERT_WIDTH_MAX)?,
            shared_width: text.count("shared_expert_intermediate_size", EXPERT_WIDTH_MAX)?,
            eps: eps(&text)?,
            positions_max: text.count("max_position_embeddings", POSITIONS_MAX)?,
            rope: rope(&text, attention.head_dim)?,
            mtp_layers: text.whole("mtp_num_hidden_layers", 0, MTP_LAYERS_MAX)?.unwrap_or(0),
            tie: tie(&top, nested.is_some().then_some(&text))?,
            eos: eos(&top, &text)?,
            image_tokens: ImageTokens {
                image: top.token("image_token_id")?,
                video: top.token("video_token_id")?,
                vision_start: top.token("vision_start_token_id")?,
                vision_end: top.token("vision_end_token_id")?,
            },
            vision: VisionConfig::from_section(&top, text.count("hidden_size", HIDDEN_MAX)?)?,
        };
        let parameters = config.parameters();
        if parameters > PARAMETERS_MAX {
            return Err(ConfigError {
                key: text.key("num_hidden_layers"),
                found: format!("{} with {parameters} parameters in all", config.layers.len()),
                expected: format!("at most {PARAMETERS_MAX} parameters"),
            });
        }
        Ok(config)
    }

    /// Is the head the token table, given whether the checkpoint stores an `lm_head`?
    pub fn tied(&self, stored_head: bool) -> bool {
        match self.tie {
            Tie::Tied => true,
            Tie::Untied => false,
            Tie::Differs => !stored_head,
        }
    }

    /// Indices of the layers of one kind.
    pub fn layers_of(&self, kind: MixerKind) -> impl Iterator<Item = usize> + '_ {
        self.layers.iter().enumerate().filter(move |(_, k)| **k == kind).map(|(layer, _)| layer)
    }

    /// Values of the main model's matrices, token table and head both counted. The named limits keep every
    /// product far below 2^64.
    pub fn parameters(&self) -> u64 {
        let [h, v] = [self.hidden, self.vocabulary].map(|n| n as u64);
        let (a, d) = (self.attention, self.delta);
        let attention = h * (a.head_dim * (3 * a.heads + 2 * a.kv_heads)) as u64;
        let value_width = d.value_heads * d.value_dim;
        let delta = h * (d.channels() + 2 * value_width + 2 * d.value_heads) as u64;
        let expert = 3 * h * self.expert_width as u64;
        let moe = self.experts as u64 * (expert + h) + 3 * h * self.shared_width as u64 + h;
        let mixers = self.layers.iter().map(|kind| match kind {
            MixerKind::DeltaNet => delta,
            MixerKind::Attention => attention,
        });
        mixers.map(|mixer| mixer + moe).sum::<u64>() + 2 * v * h
    }
}

fn attention_shape(text: &Section<'_>) -> Result<AttentionShape, ConfigError> {
    let heads = text.count("num_attention_heads", HEADS_MAX)?;
    let kv_heads = text.count("num_key_value_heads", HEADS_MAX)?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(text.error("num_key_value_heads", format!("a divisor of num_attention_heads ({heads})")));
    }
    Ok(AttentionShape { heads, kv_heads, head_dim: text.count("head_dim", HEAD_DIM_MAX)? })
}

fn delta_shape(text: &Section<'_>) -> Result<DeltaShape, ConfigError> {
    let key_heads = text.count("linear_num_key_heads", HEADS_MAX)?;
    let value_heads = text.count("linear_num_value_heads", HEADS_MAX)?;
    if !value_heads.is_multiple_of(key_heads) {
        return Err(text
            .error("linear_num_key_heads", format!("a divisor of linear_num_value_heads ({value_heads})")));
    }
    let conv_taps = text.count("linear_conv_kernel_dim", CONV_TAPS_MAX)?;
    if conv_taps < 2 {
        return Err(text.error("linear_conv_kernel_dim", format!("2 to {CONV_TAPS_MAX}")));
    }
    Ok(DeltaShape {
        key_heads,
        value_heads,
        key_dim: text.count("linear_key_head_dim", HEAD_DIM_MAX)?,
        value_dim: text.count("linear_value_head_dim", HEAD_DIM_MAX)?,
        conv_taps,
    })
}

fn layers(text: &Section<'_>) -> Result<Vec<MixerKind>, ConfigError> {
    let count = text.count("num_hidden_layers", LAYERS_MAX)?;
    let Some(types) = text.get("layer_types") else {
        let every = text.count("full_attention_interval", LAYERS_MAX)?;
        let kind = |layer: usize| {
            if (layer + 1).is_multiple_of(every) { MixerKind::Attention } else { MixerKind::DeltaNet }
        };
        return Ok((0..count).map(kind).collect());
    };
    let types = types.as_array().filter(|types| types.len() == count);
    let types = types.ok_or_else(|| text.error("layer_types", format!("a list of {count} names")))?;
    let kind = |value: &Value| match value.as_str() {
        Some("linear_attention") => Ok(MixerKind::DeltaNet),
        Some("full_attention") => Ok(MixerKind::Attention),
        _ => Err(ConfigError {
            key: text.key("layer_types"),
            found: value.to_string(),
            expected: "linear_attention or full_attention".into(),
        }),
    };
    types.iter().map(kind).collect()
}

fn eps(text: &Section<'_>) -> Result<f32, ConfigError> {
    let eps = text.positive("rms_norm_eps")?.filter(|eps| *eps < 1.0 && *eps as f32 > 0.0);
    eps.map(|eps| eps as f32).ok_or_else(|| text.error("rms_norm_eps", "a number between 0 and 1"))
}

fn rope(text: &Section<'_>, head_dim: usize) -> Result<Rope, ConfigError> {
    let path = text.key("rope_parameters");
    let inner = match text.get("rope_parameters") {
        Some(value) => Some(Section::new(value, &path)?),
        None => None,
    };
    // Older files keep these beside `rope_parameters`, or have no `rope_parameters` at all.
    let rope = inner.unwrap_or(*text);
    if inner.is_some() {
        rope.only("rope_type", &["default"])?;
        rope.only("type", &["default"])?;
    }
    if text.get("rope_scaling").is_some() {
        return Err(text.error("rope_scaling", "null"));
    }
    let place = |key: &str| if rope.get(key).is_some() { rope } else { *text };
    let theta = place("rope_theta").positive("rope_theta")?;
    let theta =
        theta.filter(|theta| *theta > 1.0).ok_or_else(|| rope.error("rope_theta", "a number above 1"))?;
    let part = place("partial_rotary_factor");
    let factor = part.positive("partial_rotary_factor")?.unwrap_or(0.25);
    let dims = (head_dim as f64 * factor) as usize;
    if factor > 1.0 || dims < 2 || !dims.is_multiple_of(2) {
        return Err(part.error(
            "partial_rotary_factor",
            format!("a factor of at most 1 that leaves an even count of head_dim {head_dim}"),
        ));
    }
    Ok(Rope { theta, dims, sections: sections(&rope, dims)? })
}

fn sections(rope: &Section<'_>, dims: usize) -> Result<[usize; 3], ConfigError> {
    let Some(value) = rope.get("mrope_section") else { return Ok([11, 11, 10]) };
    let number = |value: &Value| value.as_u64().filter(|n| *n <= dims as u64 / 2).map(|n| n as usize);
    let numbers: Option<Vec<usize>> = value.as_array().and_then(|list| list.iter().map(number).collect());
    numbers
        .and_then(|numbers| numbers.try_into().ok())
        .ok_or_else(|| rope.error("mrope_section", format!("three whole numbers up to {}", dims / 2)))
}

fn tie(top: &Section<'_>, nested: Option<&Section<'_>>) -> Result<Tie, ConfigError> {
    let outer = top.flag("tie_word_embeddings")?;
    let inner = match nested {
        Some(text) => text.flag("tie_word_embeddings")?,
        None => None,
    };
    Ok(match (outer, inner) {
        (Some(a), Some(b)) if a != b => Tie::Differs,
        (outer, inner) if outer.or(inner) == Some(true) => Tie::Tied,
        _ => Tie::Untied,
    })
}

fn eos(top: &Section<'_>, text: &Section<'_>) -> Result<Vec<u32>, ConfigError> {
    let mut ids = Vec::new();
    for section in [top, text] {
        let error = || section.error("eos_token_id", "a token id or a list of them");
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(error);
        match section.get("eos_token_id") {
            None => {}
            Some(Value::Array(list)) => {
                for value in list {
                    ids.push(id(value)?);
                }
            }
            Some(value) => ids.push(id(value)?),
        }
    }
    let mut seen = std::collections::HashSet::new();
    ids.retain(|id| seen.insert(*id));
    Ok(ids)
}
