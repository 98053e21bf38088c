//! What a Responses request says (`docs/api.md` 6), as a chat request.

use std::collections::HashSet;

use serde_json::{Map, Value, json};
use text::{Content, Message, Note, Role, Tool, ToolCall};
use utoipa::ToSchema;

use super::super::chat::{
    ChatRequest, Place, Places, ReasoningFormat, ToolChoice, answer_format, read_choice,
};
use super::super::error::{ApiError, Code};
use super::super::fields::{EFFORTS, Fields, unexpected};
use super::super::params::Params;
use super::super::state::Served;

/// `POST /v1/responses`.
#[derive(Clone, Debug, ToSchema)]
pub struct ResponsesRequest {
    /// Served id or alias.
    pub model: String,
    /// A string or items.
    #[schema(value_type = Object)]
    pub input: Vec<Message>,
    /// Goes first in the system turn.
    pub instructions: Option<String>,
    /// Most tokens of the reply.
    pub max_output_tokens: Option<usize>,
    /// Functions and custom tools; others are skipped.
    #[schema(value_type = Vec<Object>)]
    pub tools: Vec<Tool>,
    /// `none`, `auto`, `required`, a tool, or allowed tools.
    #[schema(value_type = Object)]
    pub tool_choice: ToolChoice,
    /// Whether a turn may have more than one call.
    pub parallel_tool_calls: bool,
    /// `format` of the answer.
    #[schema(value_type = Object)]
    pub text: Option<Value>,
    /// `effort` and `summary`.
    #[schema(value_type = Object)]
    pub reasoning: Option<Value>,
    /// Sampling and this server's own fields.
    #[serde(flatten)]
    pub params: Params,
}

/// A chat request, and what the response tells of the request.
pub(crate) struct Read {
    pub(crate) chat: ChatRequest,
    /// Where the client has the request's parts.
    pub(crate) places: Places,
    /// Names of tools that take text instead of arguments.
    pub(crate) custom: HashSet<String>,
    /// Settings that are told as they were asked.
    pub(crate) echo: Map<String, Value>,
}

/// Settings that are told as they were asked, with what stands for an absent one.
fn echoed(map: &Map<String, Value>) -> Map<String, Value> {
    let mut echo = Map::new();
    for (name, absent) in [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", json!(true)),
        ("prompt_cache_key", Value::Null),
        ("reasoning", json!({"effort": null, "summary": null})),
        ("safety_identifier", Value::Null),
        ("service_tier", json!("default")),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("user", Value::Null),
    ] {
        let given = map.get(name).filter(|value| !value.is_null()).cloned();
        echo.insert(name.into(), given.unwrap_or(absent));
    }
    echo
}

/// Reads a body.
pub(crate) fn read(map: Map<String, Value>, served: &Served) -> Result<Read, ApiError> {
    let echo = echoed(&map);
    let mut fields = Fields::new(map);
    fields.refuse(&["previous_response_id", "conversation"], "this server keeps no conversations")?;
    if fields.flag("background", false)? {
        return Err(ApiError::unsupported("background", "this server keeps no replies"));
    }
    fields.word("truncation", &[("disabled", ())])?;
    fields.ignore(&["include", "client_metadata"]);
    let model = fields.model()?;
    let mut reader = Reader::new();
    if let Some(instructions) = fields.string("instructions", usize::MAX)? {
        reader.push(Place::whole("instructions"), Message::text(Role::System, instructions));
    }
    match fields.need("input")? {
        Value::String(text) => reader.push(Place::whole("input"), Message::text(Role::User, text)),
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                reader.item(index, item)?;
            }
        }
        other => return Err(unexpected("input", "a string or an array of items", &other)),
    }
    reader.flush();
    let (tools, custom) = reader.tools(fields.take("tools"))?;
    let thinking = reasoning(&mut fields)?;
    let format = match fields.object("text")? {
        Some(mut inner) => {
            inner.ignore(&["verbosity"]);
            answer_format(&mut inner, "format")?
        }
        None => None,
    };
    let chat = ChatRequest {
        model,
        max_completion_tokens: fields.count("max_output_tokens", 0, usize::MAX)?,
        logprobs: false,
        top_logprobs: 0,
        tool_choice: read_choice(&mut fields, &tools)?,
        tools,
        parallel_tool_calls: fields.flag("parallel_tool_calls", true)?,
        response_format: format,
        chat_template_kwargs: Map::new(),
        reasoning_effort: thinking,
        thinking_budget: fields.integer("thinking_budget", -1, served.context() as i64)?,
        reasoning_format: ReasoningFormat::Parsed,
        add_generation_prompt: true,
        continue_final_message: None,
        dry_run: false,
        params: Params {
            n: None,
            best_of: None,
            prompt_logprobs: None,
            ..Params::read(&mut fields, served)?
        },
        messages: reader.messages,
        notes: fields.finish(),
    };
    Ok(Read { chat, places: reader.places, custom, echo })
}

fn reasoning(fields: &mut Fields) -> Result<Option<bool>, ApiError> {
    let Some(mut inner) = fields.object("reasoning")? else { return Ok(None) };
    inner.ignore(&["summary", "generate_summary"]);
    inner.word("effort", &EFFORTS)
}

/// Turns items into messages.
struct Reader {
    messages: Vec<Message>,
    places: Places,
    /// The assistant's turn, which several items make.
    turn: Option<(usize, Message)>,
}

impl Reader {
    fn new() -> Self {
        let places = Places { result_id: "call_id", schema: "parameters", ..Places::default() };
        Self { messages: Vec::new(), places, turn: None }
    }

    fn push(&mut self, place: Place, message: Message) {
        self.flush();
        self.messages.push(message);
        self.places.messages.push(place);
    }

    fn flush(&mut self) {
        let Some((origin, turn)) = self.turn.take() else { return };
        self.messages.push(turn);
        self.places.messages.push(Place::whole(format!("input[{origin}]")));
    }

    fn turn(&mut self, origin: usize) -> &mut Message {
        let absent = || Message { content: Content::Absent, ..Message::text(Role::Assistant, "") };
        &mut self.turn.get_or_insert_with(|| (origin, absent())).1
    }

    fn item(&mut self, index: usize, item: &Value) -> Result<(), ApiError> {
        let path = format!("input[{index}]");
        let object = item.as_object().ok_or_else(|| unexpected(path.clone(), "an object", item))?;
        match object.get("type").and_then(Value::as_str) {
            Some("message") => self.message(index, item, &path),
            None if object.contains_key("role") => self.message(index, item, &path),
            Some("reasoning") => {
                let text = reasoning_text(item);
                self.turn(index).reasoning.get_or_insert_default().push_str(&text);
                Ok(())
            }
            Some("function_call") => self.call(index, item, &path, &item["arguments"]),
            Some("custom_tool_call") => {
                let input = json!({"input": text(item, "input", &path)?});
                self.call(index, item, &path, &input)
            }
            Some("function_call_output" | "custom_tool_call_output") => self.output(item, &path),
            Some("item_reference") => {
                let detail =
                    "this server keeps no items; send the item itself, as clients do with store: false";
                Err(ApiError::unsupported(path, detail))
            }
            kind => {
                let code = if kind.is_some() { "item_skipped" } else { "item_without_type" };
                self.places.notes.push(Note { code, path });
                Ok(())
            }
        }
    }

    fn message(&mut self, index: usize, item: &Value, path: &str) -> Result<(), ApiError> {
        let shown = json!([{"role": item["role"], "content": item["content"]}]);
        let moved = |error: text::RequestError| {
            let path = error.path.replacen("messages[0]", path, 1);
            ApiError::from(text::RequestError { path, ..error })
        };
        let mut messages = Message::parse_all(&shown).map_err(moved)?;
        let Some(message) = messages.pop() else { return Ok(()) };
        if message.role != Role::Assistant {
            self.push(Place::whole(path), message);
            return Ok(());
        }
        let more = plain(&message.content);
        let turn = self.turn(index);
        let text = format!("{}{more}", plain(&turn.content));
        turn.content = Content::Text(text);
        Ok(())
    }

    fn call(&mut self, index: usize, item: &Value, path: &str, arguments: &Value) -> Result<(), ApiError> {
        let id = Some(text(item, "call_id", path)?);
        let name = text(item, "name", path)?;
        let call = ToolCall::new(id, name, Some(arguments));
        let call = call.ok_or_else(|| unexpected(format!("{path}.arguments"), "a string", arguments))?;
        self.turn(index).tool_calls.push(call);
        Ok(())
    }

    fn output(&mut self, item: &Value, path: &str) -> Result<(), ApiError> {
        let id = text(item, "call_id", path)?;
        let shown = json!([{"role": "tool", "tool_call_id": id, "content": item["output"]}]);
        let moved = |error: text::RequestError| {
            let path = error.path.replacen("messages[0].content", &format!("{path}.output"), 1);
            ApiError::from(text::RequestError { path, ..error })
        };
        for message in Message::parse_all(&shown).map_err(moved)? {
            self.push(Place { content: "output", ..Place::whole(path) }, message);
        }
        Ok(())
    }

    /// The description of a custom tool, with its grammar: the model is told of it and not held to it.
    fn described(&mut self, tool: &Value, index: usize) -> Value {
        let (syntax, grammar) = (&tool["format"]["syntax"], tool["format"]["definition"].as_str());
        let Some(grammar) = grammar else { return tool["description"].clone() };
        self.places
            .notes
            .push(Note { code: "tool_format_not_enforced", path: format!("tools[{index}].format") });
        let description = tool["description"].as_str().unwrap_or_default();
        let syntax = syntax.as_str().unwrap_or_default();
        format!("{description}\n\nThe input must follow this grammar ({syntax}):\n{grammar}").into()
    }

    /// Functions, and custom tools as functions of one text; all others are skipped.
    fn tools(&mut self, tools: Option<Value>) -> Result<(Vec<Tool>, HashSet<String>), ApiError> {
        let Some(tools) = tools else { return Ok(Default::default()) };
        let list = tools.as_array().ok_or_else(|| unexpected("tools", "an array", &tools))?;
        let (mut functions, mut custom) = (Vec::with_capacity(list.len()), HashSet::new());
        for (index, tool) in list.iter().enumerate() {
            let mut function = Map::new();
            match tool["type"].as_str() {
                Some("function") => {
                    for name in ["name", "description", "parameters", "strict"] {
                        if let Some(value) = tool.get(name) {
                            function.insert(name.into(), value.clone());
                        }
                    }
                }
                Some("custom") => {
                    custom.extend(tool["name"].as_str().map(str::to_owned));
                    function.insert("name".into(), tool["name"].clone());
                    function.insert("description".into(), self.described(tool, index));
                    let parameters = json!({"type": "object", "properties": {"input": {"type": "string"}},
                        "required": ["input"]});
                    function.insert("parameters".into(), parameters);
                }
                _ => {
                    self.places.notes.push(Note { code: "tool_skipped", path: format!("tools[{index}]") });
                    continue;
                }
            }
            functions.push(json!({"type": "function", "function": function}));
            self.places.tools.push(index);
        }
        let functions = Tool::parse_all(&Value::Array(functions));
        Ok((functions.map_err(|error| self.places.located(error.into()))?, custom))
    }
}

fn text(item: &Value, name: &str, path: &str) -> Result<String, ApiError> {
    let missing = || ApiError::at(Code::MissingField, format!("{path}.{name}"), "a string is needed");
    item[name].as_str().map(str::to_owned).ok_or_else(missing)
}

/// Text of a reasoning item: its content, or else its summary.
fn reasoning_text(item: &Value) -> String {
    let texts = |name: &str| -> String {
        let parts = item[name].as_array().into_iter().flatten();
        parts.filter_map(|part| part["text"].as_str()).collect()
    };
    let content = texts("content");
    if content.is_empty() { texts("summary") } else { content }
}

fn plain(content: &Content) -> String {
    match content {
        Content::Absent => String::new(),
        Content::Text(text) => text.clone(),
        Content::Parts(parts) => {
            let text = |part: &text::Part| match part {
                text::Part::Text(text) => text.clone(),
                text::Part::Image(_) => String::new(),
            };
            parts.iter().map(text).collect()
        }
    }
}
