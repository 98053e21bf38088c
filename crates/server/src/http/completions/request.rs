//! What a completions request says (`docs/api.md` 4).

use engine::LOGPROBS_MAX;
use serde_json::{Map, Value};
use text::{Note, PromptMax, Tokenizer};
use utoipa::ToSchema;

use super::super::error::{ApiError, Code};
use super::super::fields::{Fields, unexpected};
use super::super::limits::PROMPTS_MAX;
use super::super::params::{Params, id_list};
use super::super::state::Served;

/// Tokens of a reply that names no limit.
const MAX_TOKENS: usize = 16;

/// `POST /v1/completions`.
#[derive(Clone, Debug, ToSchema)]
pub struct CompletionRequest {
    /// Served id or alias.
    pub model: String,
    /// A string, strings, ids or arrays of ids.
    #[schema(value_type = Object)]
    pub prompt: Vec<Vec<u32>>,
    /// Most tokens of each reply; 0 only scores the prompt.
    pub max_tokens: usize,
    /// Whether the text begins with the prompt.
    pub echo: bool,
    /// Log-probabilities with this many alternatives.
    #[schema(minimum = 0, maximum = 20)]
    pub logprobs: Option<u32>,
    /// The shared fields.
    #[serde(flatten)]
    pub params: Params,
    /// Notes about the request.
    #[serde(skip)]
    pub notes: Vec<Note>,
}

impl CompletionRequest {
    /// Reads a request's body. Prompts of text are encoded.
    pub(crate) fn read(map: Map<String, Value>, served: &Served) -> Result<Self, ApiError> {
        let mut fields = Fields::new(map);
        let mut request = Self::read_fields(&mut fields, served)?;
        request.notes = fields.finish();
        Ok(request)
    }

    pub(crate) fn read_fields(fields: &mut Fields, served: &Served) -> Result<Self, ApiError> {
        if fields.take("suffix").is_some_and(|suffix| suffix != "") {
            return Err(ApiError::at(
                Code::NotImplemented,
                "suffix",
                "filling in the middle is not implemented",
            ));
        }
        let model = fields.model()?;
        // The family's tokenizers put no tokens around a text, so both answers are the same.
        fields.bool("add_special_tokens")?;
        let parse_special = fields.flag("parse_special", true)?;
        let encoder = Encoder { tokenizer: &served.session.text().tokenizer, parse_special, served };
        Ok(Self {
            model,
            prompt: encoder.prompts(fields.need("prompt")?)?,
            max_tokens: fields.count("max_tokens", 0, usize::MAX)?.unwrap_or(MAX_TOKENS),
            echo: fields.flag("echo", false)?,
            logprobs: fields.count("logprobs", 0, LOGPROBS_MAX as usize)?.map(|count| count as u32),
            params: Params::read(fields, served)?,
            notes: Vec::new(),
        })
    }
}

struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    parse_special: bool,
    served: &'a Served,
}

impl Encoder<'_> {
    fn prompts(&self, prompt: Value) -> Result<Vec<Vec<u32>>, ApiError> {
        match prompt {
            Value::String(text) => Ok(vec![self.text(&text)?]),
            Value::Array(items) if items.first().is_some_and(Value::is_number) => {
                Ok(vec![self.ids(&items, "prompt")?])
            }
            Value::Array(items) if (1..=PROMPTS_MAX).contains(&items.len()) => {
                let one = |(index, item): (usize, &Value)| match item {
                    Value::String(text) => self.text(text),
                    Value::Array(ids) => self.ids(ids, &format!("prompt[{index}]")),
                    other => {
                        Err(unexpected(format!("prompt[{index}]"), "a string or an array of ids", other))
                    }
                };
                items.iter().enumerate().map(one).collect()
            }
            other => {
                let wanted = format!("a string, an array of ids, or an array of 1 to {PROMPTS_MAX} of them");
                Err(unexpected("prompt", &wanted, &other))
            }
        }
    }

    fn text(&self, text: &str) -> Result<Vec<u32>, ApiError> {
        let most = PromptMax { tokens: self.served.context(), counted_bytes: 0 };
        if let Some(tokens) = self.tokenizer.excess(&[text], most)? {
            return Err(ApiError::overflow(tokens, most.tokens));
        }
        Ok(match self.parse_special {
            true => self.tokenizer.encode_raw(text)?,
            false => self.tokenizer.encode_text(text)?,
        })
    }

    fn ids(&self, items: &[Value], path: &str) -> Result<Vec<u32>, ApiError> {
        id_list(items, path, self.served.vocabulary())
    }
}
