//! What a chat request says (`docs/api.md` 3.1), typed and in range. Nothing here needs the template or the
//! tokenizer.

use engine::LOGPROBS_MAX;
use serde_json::{Map, Value};
use text::{CONSTRAINT_CHOICES_MAX, Message, Note, REGEX_BYTES_MAX, Tool};
use utoipa::ToSchema;

use super::super::constraint::Wish;
use super::super::error::ApiError;
use super::super::fields::{EFFORTS, Fields, unexpected, whole};
use super::super::limits::KWARG_BYTES_MAX;
use super::super::params::Params;
use super::super::state::Served;
use super::choice::{self, ToolChoice};

/// `POST /v1/chat/completions`.
#[derive(Clone, Debug, ToSchema)]
pub struct ChatRequest {
    /// Served id or alias.
    pub model: String,
    /// The chat, oldest message first.
    #[schema(value_type = Vec<Object>)]
    pub messages: Vec<Message>,
    /// Most tokens of the reply; 0 only reads the prompt. Also as `max_tokens`.
    pub max_completion_tokens: Option<usize>,
    /// Log-probabilities of the reply's tokens.
    pub logprobs: bool,
    /// Alternatives of each token.
    #[schema(minimum = 0, maximum = 20)]
    pub top_logprobs: u32,
    /// Functions the model may call.
    #[schema(value_type = Vec<Object>)]
    pub tools: Vec<Tool>,
    /// `none`, `auto`, `required`, a function, or allowed tools.
    #[schema(value_type = Object)]
    pub tool_choice: ToolChoice,
    /// Whether a turn may have more than one call.
    pub parallel_tool_calls: bool,
    /// Form of the answer. Also as `structured_outputs` and `guided_*`.
    #[schema(value_type = Object)]
    pub response_format: Option<(String, Wish)>,
    /// Variables of the template.
    #[schema(value_type = Object)]
    pub chat_template_kwargs: Map<String, Value>,
    /// Thinking on or off, by `reasoning_effort` and `chat_template_kwargs`; absent is the server's default.
    #[schema(value_type = String)]
    pub reasoning_effort: Option<bool>,
    /// Tokens of reasoning; -1 is no limit.
    #[schema(minimum = -1)]
    pub thinking_budget: Option<i64>,
    /// `parsed` or `raw`.
    #[schema(value_type = String)]
    pub reasoning_format: ReasoningFormat,
    /// Whether the model's turn is opened.
    pub add_generation_prompt: bool,
    /// Whether a last assistant message is continued.
    pub continue_final_message: Option<bool>,
    /// No reply; tell what the prompt would cost.
    pub dry_run: bool,
    /// The shared fields.
    #[serde(flatten)]
    pub params: Params,
    /// Notes about the request.
    #[serde(skip)]
    pub notes: Vec<Note>,
}

/// `reasoning_format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// Reasoning in its own field.
    Parsed,
    /// Reasoning and its tags in the content.
    Raw,
}

/// Fields of audio and the web.
const FOREIGN: [&str; 4] = ["modalities", "audio", "prediction", "web_search_options"];
const FOREIGN_DETAIL: &str = "this model reads and writes text; leave the field out";
const OLD_TOOLS_DETAIL: &str = "this old form is not supported; use tools and tool_choice";

impl ChatRequest {
    /// Reads a request's body.
    pub(crate) fn read(map: Map<String, Value>, served: &Served) -> Result<Self, ApiError> {
        Self::from_fields(Fields::new(map), served)
    }

    pub(crate) fn from_fields(mut fields: Fields, served: &Served) -> Result<Self, ApiError> {
        let mut request = Self::read_fields(&mut fields, served)?;
        request.notes.extend(fields.finish());
        Ok(request)
    }

    /// Reads the fields and leaves those that nobody knows.
    pub(crate) fn read_fields(fields: &mut Fields, served: &Served) -> Result<Self, ApiError> {
        fields.refuse(&["functions", "function_call"], OLD_TOOLS_DETAIL)?;
        fields.refuse(&FOREIGN, FOREIGN_DETAIL)?;
        let model = fields.model()?;
        let messages = Message::parse_all(&fields.need("messages")?)?;
        let tools = Tool::parse_all(&fields.take("tools").unwrap_or(Value::Null))?;
        let tool_choice = choice::read(fields, &tools)?;
        let (mut kwargs, by_template) = kwargs(fields, served.context())?;
        let budget = fields.integer("thinking_budget", -1, served.context() as i64)?;
        let budget_in_kwargs = kwargs.shift_remove("thinking_budget").as_ref().and_then(whole);
        let logprobs = fields.flag("logprobs", false)?;
        let top_logprobs = fields.count("top_logprobs", 0, LOGPROBS_MAX as usize)?.unwrap_or(0) as u32;
        if top_logprobs > 0 && !logprobs {
            return Err(ApiError::invalid("top_logprobs", "needs logprobs to be true"));
        }
        Ok(Self {
            model,
            messages,
            max_completion_tokens: max_tokens(fields)?,
            logprobs,
            top_logprobs,
            tools,
            tool_choice,
            parallel_tool_calls: fields.flag("parallel_tool_calls", true)?,
            response_format: response_format(fields)?,
            chat_template_kwargs: kwargs,
            reasoning_effort: thinking(fields, by_template)?,
            thinking_budget: budget.or(budget_in_kwargs),
            reasoning_format: reasoning_format(fields)?,
            add_generation_prompt: fields.flag("add_generation_prompt", true)?,
            continue_final_message: fields.bool("continue_final_message")?,
            dry_run: fields.flag("dry_run", false)?,
            params: Params::read(fields, served)?,
            notes: Vec::new(),
        })
    }
}

fn max_tokens(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let new = fields.count("max_completion_tokens", 0, usize::MAX)?;
    let old = fields.count("max_tokens", 0, usize::MAX)?;
    match (new, old) {
        (Some(new), Some(old)) if new != old => {
            Err(ApiError::invalid("max_tokens", format!("{old} differs from max_completion_tokens, {new}")))
        }
        _ => Ok(new.or(old)),
    }
}

fn reasoning_format(fields: &mut Fields) -> Result<ReasoningFormat, ApiError> {
    let words = [("parsed", ReasoningFormat::Parsed), ("raw", ReasoningFormat::Raw)];
    Ok(fields.word("reasoning_format", &words)?.unwrap_or(ReasoningFormat::Parsed))
}

/// Effort `none`, then the template's own switch, then any other effort.
fn thinking(fields: &mut Fields, by_template: Option<bool>) -> Result<Option<bool>, ApiError> {
    Ok(match fields.word("reasoning_effort", &EFFORTS)? {
        Some(false) => Some(false),
        effort => by_template.or(effort),
    })
}

/// The template's variables, and `enable_thinking` among them.
fn kwargs(fields: &mut Fields, context: usize) -> Result<(Map<String, Value>, Option<bool>), ApiError> {
    let Some(mut inner) = fields.object("chat_template_kwargs")? else { return Ok((Map::new(), None)) };
    let mut kwargs = Map::new();
    let enable_thinking = inner.bool("enable_thinking")?;
    if let Some(preserve) = inner.bool("preserve_thinking")? {
        kwargs.insert("preserve_thinking".into(), preserve.into());
    }
    if let Some(budget) = inner.integer("thinking_budget", -1, context as i64)? {
        kwargs.insert("thinking_budget".into(), budget.into());
    }
    let path = inner.path("add_vision_id");
    match inner.take("add_vision_id") {
        None => {}
        Some(value) if is_plain(&value) => {
            kwargs.insert("add_vision_id".into(), value);
        }
        Some(value) => return Err(unexpected(path, "a boolean, an integer or a short string", &value)),
    }
    inner.finish_strict("known are enable_thinking, preserve_thinking, add_vision_id and thinking_budget")?;
    Ok((kwargs, enable_thinking))
}

fn is_plain(value: &Value) -> bool {
    match value {
        Value::Bool(_) => true,
        Value::Number(_) => whole(value).is_some(),
        Value::String(text) => text.len() <= KWARG_BYTES_MAX,
        _ => false,
    }
}

/// The form of the answer from any of the fields that may ask for it; at most one may.
fn response_format(fields: &mut Fields) -> Result<Option<(String, Wish)>, ApiError> {
    let mut found = openai_format(fields, "response_format")?;
    let mut take = |fields: &mut Fields, name: &'static str, key: &'static str| {
        let path = fields.path(name);
        let Some(value) = fields.take(name) else { return Ok(()) };
        let wish = structured(key, value, &path)?;
        if found.replace((path.clone(), wish)).is_some() {
            return Err(ApiError::invalid(path, "the form of the answer is asked for twice"));
        }
        Ok(())
    };
    if let Some(mut inner) = fields.object("structured_outputs")? {
        for key in ["json", "regex", "choice"] {
            take(&mut inner, key, key)?;
        }
        inner.finish_strict("known are json, regex and choice")?;
    }
    for (name, key) in [("guided_json", "json"), ("guided_regex", "regex"), ("guided_choice", "choice")] {
        take(fields, name, key)?;
    }
    Ok(found)
}

/// `{"type", "json_schema": {"schema"}}`, or flat as in Responses: `{"type", "schema"}`.
pub(crate) fn openai_format(
    fields: &mut Fields,
    name: &'static str,
) -> Result<Option<(String, Wish)>, ApiError> {
    let Some(mut inner) = fields.object(name)? else { return Ok(None) };
    let kind = inner.need("type")?;
    match kind.as_str() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some((inner.path("type"), Wish::JsonObject))),
        Some("json_schema") => {
            let mut holder = inner.object("json_schema")?.unwrap_or(inner);
            let path = holder.path("schema");
            Ok(Some((path, Wish::Schema(holder.need("schema")?))))
        }
        _ => Err(unexpected(inner.path("type"), "text, json_object or json_schema", &kind)),
    }
}

fn structured(key: &str, value: Value, path: &str) -> Result<Wish, ApiError> {
    match (key, value) {
        // vLLM takes a schema as text as well.
        ("json", Value::String(text)) => match super::super::json::parse(text.as_bytes()) {
            Ok(schema) => Ok(Wish::Schema(schema)),
            Err(error) => Err(ApiError::invalid(path, error.message)),
        },
        ("json", schema @ (Value::Object(_) | Value::Bool(_))) => Ok(Wish::Schema(schema)),
        ("regex", Value::String(text)) if text.len() <= REGEX_BYTES_MAX => Ok(Wish::Regex(text)),
        ("choice", Value::Array(items)) if (1..=CONSTRAINT_CHOICES_MAX).contains(&items.len()) => {
            let texts = items.iter().map(|item| item.as_str().map(str::to_owned));
            let texts: Option<Vec<String>> = texts.collect();
            texts.map(Wish::Choice).ok_or_else(|| ApiError::invalid(path, "every choice must be a string"))
        }
        ("json", other) => Err(unexpected(path, "a JSON Schema", &other)),
        ("regex", other) => {
            Err(unexpected(path, &format!("a string of at most {REGEX_BYTES_MAX} bytes"), &other))
        }
        (_, other) => {
            Err(unexpected(path, &format!("an array of 1 to {CONSTRAINT_CHOICES_MAX} strings"), &other))
        }
    }
}
