//! What an Anthropic request says (`docs/api.md` 5), as a chat request.

use serde_json::{Map, Value, json};
use text::{Content, Message, Note, PARTS_MAX, Part, Role, Tool, ToolCall};
use utoipa::ToSchema;

use super::super::chat::{ChatRequest, Place, Places, ReasoningFormat, ToolChoice, answer_format};
use super::super::constraint::Wish;
use super::super::error::{ApiError, Code};
use super::super::fields::{Fields, unexpected};
use super::super::params::{Params, stop};
use super::super::state::Served;
use super::blocks::{Parts, string};

/// Opens a line that some clients put before the system prompt and change with every request.
const BILLING: &str = "x-anthropic-billing-header:";

/// `POST /v1/messages`.
#[derive(Clone, Debug, ToSchema)]
pub struct MessagesRequest {
    /// Served id or alias.
    pub model: String,
    /// Most tokens of the reply.
    #[schema(minimum = 1)]
    pub max_tokens: usize,
    /// Turns of content blocks.
    #[schema(value_type = Vec<Object>)]
    pub messages: Vec<Message>,
    /// A string or text blocks.
    #[schema(value_type = Object)]
    pub system: Vec<String>,
    /// Functions the model may call.
    #[schema(value_type = Vec<Object>)]
    pub tools: Vec<Tool>,
    /// `auto`, `any`, `tool` or `none`.
    #[schema(value_type = Object)]
    pub tool_choice: ToolChoice,
    /// `enabled` with `budget_tokens`, `adaptive` or `disabled`.
    #[schema(value_type = Object)]
    pub thinking: Option<bool>,
    /// Texts that end the reply.
    pub stop_sequences: Vec<String>,
    /// Sampling and this server's own fields.
    #[serde(flatten)]
    pub params: Params,
}

/// A chat request, and where the client has its parts.
pub(crate) struct Read {
    pub(crate) chat: ChatRequest,
    pub(crate) places: Places,
}

/// Reads a body. `counting` is for the route that only counts, which needs no `max_tokens`.
pub(crate) fn read(map: Map<String, Value>, served: &Served, counting: bool) -> Result<Read, ApiError> {
    let mut fields = Fields::new(map);
    let model = fields.model()?;
    let max_tokens = fields.count("max_tokens", 1, usize::MAX)?;
    if max_tokens.is_none() && !counting {
        return Err(ApiError::at(Code::MissingField, "max_tokens", "this field is needed"));
    }
    let mut reader = Reader::new();
    reader.system(fields.take("system"))?;
    let turns = fields.need("messages")?;
    let turns = turns.as_array().ok_or_else(|| unexpected("messages", "an array", &turns))?;
    for (index, turn) in turns.iter().enumerate() {
        reader.turn(index, turn)?;
    }
    let tools = reader.tools(fields.take("tools"))?;
    let (tool_choice, parallel) = tool_choice(&mut fields, &tools)?;
    let (thinking, budget) = thinking(&mut fields, served.context())?;
    let format = format(&mut fields)?;
    let stop_sequences = stop(&mut fields, "stop_sequences")?;
    let params = Params::read(&mut fields, served)?;
    let params = Params { n: None, best_of: None, stop: stop_sequences, prompt_logprobs: None, ..params };
    let chat = ChatRequest {
        model,
        messages: reader.messages,
        max_completion_tokens: max_tokens,
        logprobs: false,
        top_logprobs: 0,
        tools,
        tool_choice,
        parallel_tool_calls: parallel,
        response_format: format,
        chat_template_kwargs: Map::new(),
        reasoning_effort: thinking,
        thinking_budget: budget,
        reasoning_format: ReasoningFormat::Parsed,
        add_generation_prompt: true,
        continue_final_message: None,
        dry_run: counting,
        params,
        notes: Vec::new(),
    };
    Ok(Read { chat, places: reader.places })
}

/// Turns blocks into messages.
struct Reader {
    messages: Vec<Message>,
    places: Places,
}

impl Reader {
    fn new() -> Self {
        let places = Places { result_id: "tool_use_id", schema: "input_schema", ..Places::default() };
        Self { messages: Vec::new(), places }
    }

    /// Adds a message; `parts` are the paths of its parts, where they are not its content's in order.
    fn push(&mut self, path: &str, parts: Vec<String>, message: Message) {
        self.messages.push(message);
        self.places.messages.push(Place { parts, ..Place::whole(path) });
    }

    fn system(&mut self, system: Option<Value>) -> Result<(), ApiError> {
        let take = |reader: &mut Self, text: &str, path: String| {
            if text.starts_with(BILLING) {
                reader.places.notes.push(Note { code: "billing_header_dropped", path });
            } else if !text.is_empty() {
                reader.push("system", Vec::new(), Message::text(Role::System, text));
            }
        };
        match system {
            None => {}
            Some(Value::String(text)) => take(self, &text, "system".into()),
            Some(Value::Array(blocks)) => {
                for (index, block) in blocks.iter().enumerate() {
                    let path = format!("system[{index}]");
                    if block["type"] != "text" {
                        return Err(unexpected(format!("{path}.type"), "text", &block["type"]));
                    }
                    take(self, &string(block, "text", &path)?, path);
                }
            }
            Some(other) => return Err(unexpected("system", "a string or text blocks", &other)),
        }
        Ok(())
    }

    fn turn(&mut self, index: usize, turn: &Value) -> Result<(), ApiError> {
        let path = format!("messages[{index}]");
        let role = match turn["role"].as_str() {
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            Some("system") => Role::System,
            _ => return Err(unexpected(format!("{path}.role"), "user, assistant or system", &turn["role"])),
        };
        match &turn["content"] {
            Value::String(text) => self.push(&path, Vec::new(), Message::text(role, text.as_str())),
            Value::Array(blocks) if blocks.len() <= PARTS_MAX => match role {
                Role::Assistant => self.assistant(blocks, &path)?,
                role => self.user(role, blocks, &path)?,
            },
            Value::Array(blocks) => {
                let detail = format!("{} blocks, at most {PARTS_MAX} are allowed", blocks.len());
                return Err(ApiError::invalid(format!("{path}.content"), detail));
            }
            other => {
                return Err(unexpected(format!("{path}.content"), "a string or content blocks", other));
            }
        }
        Ok(())
    }

    /// Text and pictures form user messages; each tool result between them is a message of its own.
    fn user(&mut self, role: Role, blocks: &[Value], path: &str) -> Result<(), ApiError> {
        let mut said = Parts::default();
        for (place, block) in blocks.iter().enumerate() {
            let inner = format!("{path}.content[{place}]");
            if block["type"] != "tool_result" {
                said.block(block, &inner, &mut self.places.notes)?;
                continue;
            }
            if !said.parts.is_empty() {
                let Parts { parts, paths } = std::mem::take(&mut said);
                self.push(path, paths, message(role, parts));
            }
            self.tool_result(block, &inner)?;
        }
        if !said.parts.is_empty() {
            self.push(path, said.paths, message(role, said.parts));
        }
        Ok(())
    }

    fn tool_result(&mut self, block: &Value, path: &str) -> Result<(), ApiError> {
        let id = string(block, "tool_use_id", path)?;
        let mut paths = Vec::new();
        let content = match &block["content"] {
            Value::Null => Content::Text(String::new()),
            Value::String(text) => Content::Text(text.clone()),
            Value::Array(blocks) => {
                let mut result = Parts::default();
                for (place, block) in blocks.iter().enumerate() {
                    result.block(
                        block,
                        &format!("{path}.tool_result.content[{place}]"),
                        &mut self.places.notes,
                    )?;
                }
                paths = result.paths;
                Content::Parts(result.parts)
            }
            other => return Err(unexpected(format!("{path}.content"), "a string or content blocks", other)),
        };
        if block["is_error"] == true {
            // Templates of the family have no place for it; what went wrong is said by the content.
            self.places.notes.push(Note { code: "is_error_not_shown", path: format!("{path}.is_error") });
        }
        self.push(path, paths, Message { content, tool_call_id: Some(id), ..Message::text(Role::Tool, "") });
        Ok(())
    }

    fn assistant(&mut self, blocks: &[Value], path: &str) -> Result<(), ApiError> {
        let mut turn = message(Role::Assistant, Vec::new());
        let (mut text, mut reasoning) = (String::new(), String::new());
        for (place, block) in blocks.iter().enumerate() {
            let path = format!("{path}.content[{place}]");
            match block["type"].as_str() {
                Some("text") => text.push_str(&string(block, "text", &path)?),
                Some("thinking") => reasoning.push_str(block["thinking"].as_str().unwrap_or_default()),
                Some(kind) if is_foreign(kind) => {
                    self.places.notes.push(Note { code: "block_skipped", path })
                }
                Some("tool_use") => turn.tool_calls.push(tool_use(block, &path)?),
                _ => {
                    let known = "text, thinking, redacted_thinking, tool_use or a server tool's block";
                    return Err(unexpected(format!("{path}.type"), known, &block["type"]));
                }
            }
        }
        turn.content = if text.is_empty() { Content::Absent } else { Content::Text(text) };
        turn.reasoning = Some(reasoning).filter(|reasoning| !reasoning.is_empty());
        self.push(path, Vec::new(), turn);
        Ok(())
    }

    /// Functions; the tools that Anthropic's own servers run are skipped.
    fn tools(&mut self, tools: Option<Value>) -> Result<Vec<Tool>, ApiError> {
        let Some(tools) = tools else { return Ok(Vec::new()) };
        let list = tools.as_array().ok_or_else(|| unexpected("tools", "an array", &tools))?;
        let mut functions = Vec::with_capacity(list.len());
        for (index, tool) in list.iter().enumerate() {
            if tool.get("type").is_some_and(|kind| kind != "custom") {
                self.places.notes.push(Note { code: "tool_skipped", path: format!("tools[{index}]") });
                continue;
            }
            let mut function = Map::new();
            for (from, to) in [
                ("name", "name"),
                ("description", "description"),
                ("input_schema", "parameters"),
                ("strict", "strict"),
            ] {
                if let Some(value) = tool.get(from) {
                    function.insert(to.into(), value.clone());
                }
            }
            functions.push(json!({"type": "function", "function": function}));
            self.places.tools.push(index);
        }
        Tool::parse_all(&Value::Array(functions)).map_err(|error| self.places.located(error.into()))
    }
}

/// Whether a block of an assistant's turn is of no use here: reasoning that only its writer can read, and
/// what tools did that Anthropic's servers ran. A conversation that has them can go on.
fn is_foreign(kind: &str) -> bool {
    ["redacted_thinking", "server_tool_use", "mcp_tool_use"].contains(&kind) || kind.ends_with("_tool_result")
}

fn message(role: Role, parts: Vec<Part>) -> Message {
    Message { content: Content::Parts(parts), ..Message::text(role, "") }
}

fn tool_use(block: &Value, path: &str) -> Result<ToolCall, ApiError> {
    let arguments = match &block["input"] {
        Value::Null => Map::new(),
        Value::Object(input) => input.clone(),
        other => return Err(unexpected(format!("{path}.input"), "an object", other)),
    };
    Ok(ToolCall {
        id: Some(string(block, "id", path)?),
        name: string(block, "name", path)?,
        arguments,
        is_text: false,
    })
}

fn tool_choice(fields: &mut Fields, tools: &[Tool]) -> Result<(ToolChoice, bool), ApiError> {
    let Some(mut inner) = fields.object("tool_choice")? else { return Ok((ToolChoice::Auto, true)) };
    let parallel = !inner.flag("disable_parallel_tool_use", false)?;
    let kind = inner.need("type")?;
    let choice = match kind.as_str() {
        Some("auto") => ToolChoice::Auto,
        Some("none") => ToolChoice::None,
        Some("any") => ToolChoice::Required,
        Some("tool") => {
            let name = inner.need("name")?;
            let name = name.as_str().unwrap_or_default().to_owned();
            if !tools.iter().any(|tool| tool.name == name) {
                return Err(ApiError::invalid(
                    "tool_choice.name",
                    "names a function that is not among the tools",
                ));
            }
            ToolChoice::Named(name)
        }
        _ => return Err(unexpected("tool_choice.type", "auto, any, tool or none", &kind)),
    };
    Ok((choice, parallel))
}

/// The form of the answer, where either of the two fields for it asks for one.
fn format(fields: &mut Fields) -> Result<Option<(String, Wish)>, ApiError> {
    let flat = answer_format(fields, "output_format")?;
    let Some(mut inner) = fields.object("output_config")? else { return Ok(flat) };
    match (answer_format(&mut inner, "format")?, flat) {
        (Some(_), Some(_)) => {
            Err(ApiError::invalid("output_config.format", "the form of the answer is asked for twice"))
        }
        (inner, flat) => Ok(inner.or(flat)),
    }
}

/// Thinking on or off, and its budget.
fn thinking(fields: &mut Fields, context: usize) -> Result<(Option<bool>, Option<i64>), ApiError> {
    let Some(mut inner) = fields.object("thinking")? else { return Ok((None, None)) };
    // A budget beyond the context is no limit; clients send one number to all models.
    let budget = inner.integer("budget_tokens", 0, i64::MAX)?.map(|budget| budget.min(context as i64));
    let words = [("enabled", true), ("adaptive", true), ("disabled", false)];
    let is_on = inner.word("type", &words)?;
    is_on.map(|is_on| (Some(is_on), budget)).ok_or_else(|| {
        ApiError::at(Code::MissingField, "thinking.type", "enabled, adaptive or disabled is needed")
    })
}
