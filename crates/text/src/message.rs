//! Chat messages and tools in OpenAI's shape (`docs/api.md` 3.2, 3.4), parsed with the path of any mistake.

use serde_json::{Map, Value};

use crate::error::RequestError;

/// Most messages of one request.
pub const MESSAGES_MAX: usize = 4096;
/// Most parts of one message.
pub const PARTS_MAX: usize = 256;
/// Most tools of one request.
pub const TOOLS_MAX: usize = 256;
/// Longest schema of one tool, bytes as compact JSON.
pub const SCHEMA_BYTES_MAX: usize = 256 << 10;
/// Longest definition of all tools together, bytes as compact JSON.
pub const TOOLS_BYTES_MAX: usize = 2 << 20;
/// Longest tool name, bytes.
pub const TOOL_NAME_MAX: usize = 64;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Instructions.
    System,
    /// Instructions as well; rendered as system.
    Developer,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

/// A picture as the client named it. This crate does not look inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// `data:` or `https:` URL.
    pub url: String,
    /// `low`, `high` or `auto`, unchecked.
    pub detail: Option<String>,
}

/// One part of a message's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Text.
    Text(String),
    /// A picture.
    Image(Image),
}

/// Content of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Null or missing.
    Absent,
    /// A string.
    Text(String),
    /// A list of parts.
    Parts(Vec<Part>),
}

/// A call of a tool in an assistant turn of the history.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// What a tool message refers to.
    pub id: Option<String>,
    /// Name of the function.
    pub name: String,
    /// Arguments by name, in the order written.
    pub arguments: Map<String, Value>,
    /// The client had a text that is no object, such as the beginning of one: it is the only argument.
    pub is_text: bool,
}

/// One message.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said.
    pub content: Content,
    /// Reasoning of an assistant turn.
    pub reasoning: Option<String>,
    /// Calls of an assistant turn.
    pub tool_calls: Vec<ToolCall>,
    /// The call a tool message answers.
    pub tool_call_id: Option<String>,
    /// Name of the speaker, if given.
    pub name: Option<String>,
}

impl Message {
    /// A message of text alone.
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        Self {
            role,
            content: Content::Text(text.into()),
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// Refuses more messages than a request may have.
    pub(crate) fn check_count(count: usize) -> Result<(), RequestError> {
        if count <= MESSAGES_MAX {
            return Ok(());
        }
        let detail =
            format!("{count} messages, at most {MESSAGES_MAX} are taken; join old ones or leave them out");
        Err(RequestError::invalid("messages", detail))
    }

    /// Parses a request's `messages`.
    pub fn parse_all(messages: &Value) -> Result<Vec<Self>, RequestError> {
        let list = messages.as_array().ok_or_else(|| expected("messages", "an array", messages))?;
        if list.is_empty() {
            return Err(RequestError::invalid("messages", "at least one message is needed"));
        }
        Self::check_count(list.len())?;
        list.iter()
            .enumerate()
            .map(|(index, value)| Self::parse(value, &format!("messages[{index}]")))
            .collect()
    }

    fn parse(value: &Value, path: &str) -> Result<Self, RequestError> {
        let object = value.as_object().ok_or_else(|| expected(path, "an object", value))?;
        let role = parse_role(object, path)?;
        let content = parse_content(object.get("content"), role, &format!("{path}.content"))?;
        let reasoning = match string(object, "reasoning_content", path)? {
            Some(text) => Some(text),
            None => string(object, "reasoning", path)?,
        };
        let message = Self {
            role,
            content,
            reasoning: reasoning.filter(|text| role == Role::Assistant && !text.is_empty()),
            tool_calls: match object.get("tool_calls") {
                Some(calls) if role == Role::Assistant => parse_calls(calls, &format!("{path}.tool_calls"))?,
                _ => Vec::new(),
            },
            tool_call_id: string(object, "tool_call_id", path)?.filter(|_| role == Role::Tool),
            name: string(object, "name", path)?,
        };
        let may_be_absent =
            role == Role::Assistant && (!message.tool_calls.is_empty() || message.reasoning.is_some());
        if message.content == Content::Absent && !may_be_absent {
            let detail = "needed unless an assistant message has tool_calls or reasoning_content";
            return Err(RequestError::missing(format!("{path}.content"), detail));
        }
        if role == Role::Tool && message.tool_call_id.is_none() {
            let detail = "a tool message must name the call it answers";
            return Err(RequestError::missing(format!("{path}.tool_call_id"), detail));
        }
        Ok(message)
    }
}

fn parse_role(object: &Map<String, Value>, path: &str) -> Result<Role, RequestError> {
    let path = format!("{path}.role");
    let Some(role) = object.get("role") else {
        return Err(RequestError::missing(path, "every message needs a role"));
    };
    Ok(match role.as_str() {
        Some("system") => Role::System,
        Some("developer") => Role::Developer,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("tool") => Role::Tool,
        _ => return Err(expected(path, "system, developer, user, assistant or tool", role)),
    })
}

fn parse_content(content: Option<&Value>, role: Role, path: &str) -> Result<Content, RequestError> {
    match content {
        None | Some(Value::Null) => Ok(Content::Absent),
        Some(Value::String(text)) => Ok(Content::Text(text.clone())),
        Some(Value::Array(parts)) if parts.len() > PARTS_MAX => Err(RequestError::invalid(
            path,
            format!("{} parts, at most {PARTS_MAX} are allowed", parts.len()),
        )),
        Some(Value::Array(parts)) => {
            let parts = parts.iter().enumerate();
            let parts = parts.map(|(index, part)| parse_part(part, role, &format!("{path}[{index}]")));
            Ok(Content::Parts(parts.collect::<Result<_, _>>()?))
        }
        Some(other) => Err(expected(path, "a string, an array of parts or null", other)),
    }
}

fn parse_part(part: &Value, role: Role, path: &str) -> Result<Part, RequestError> {
    let object = part.as_object().ok_or_else(|| expected(path, "an object", part))?;
    let text = |key: &str| match string(object, key, path)? {
        Some(text) => Ok(Part::Text(text)),
        None => Err(RequestError::missing(format!("{path}.{key}"), "a string is needed here")),
    };
    match object.get("type").and_then(Value::as_str) {
        Some("text" | "input_text" | "output_text") => text("text"),
        Some("refusal") => text("refusal"),
        Some("image_url" | "input_image") => {
            if !matches!(role, Role::User | Role::Tool) {
                let detail = "pictures may stand in user and tool messages only";
                return Err(RequestError::invalid(path, detail));
            }
            parse_image(object, path).map(Part::Image)
        }
        Some("file" | "input_file") => {
            let detail = "files are not read; send their text as a text part, or pages as pictures";
            Err(RequestError::unsupported(path, detail))
        }
        Some("input_audio" | "audio_url") => {
            let detail = "this family of models does not hear; send what is said as a text part";
            Err(RequestError::unsupported(path, detail))
        }
        _ => {
            let supported = "text, image_url, input_text, input_image or refusal";
            Err(expected(format!("{path}.type"), supported, object.get("type").unwrap_or(&Value::Null)))
        }
    }
}

/// `{"image_url": {"url", "detail"}}` as in chat, or `{"image_url": "…", "detail"}` as in Responses.
fn parse_image(object: &Map<String, Value>, path: &str) -> Result<Image, RequestError> {
    if object.get("image_url").is_none_or(Value::is_null) && object.contains_key("file_id") {
        let detail =
            "this server keeps no files; send the picture in image_url, as a data:image/...;base64 URL";
        return Err(RequestError::unsupported(format!("{path}.file_id"), detail));
    }
    let path = format!("{path}.image_url");
    match object.get("image_url") {
        Some(Value::String(url)) => Ok(Image { url: url.clone(), detail: string(object, "detail", &path)? }),
        Some(Value::Object(inner)) => match string(inner, "url", &path)? {
            Some(url) => Ok(Image { url, detail: string(inner, "detail", &path)? }),
            None => Err(RequestError::missing(format!("{path}.url"), "a data: URL is needed here")),
        },
        Some(other) => Err(expected(path, "an object with a url", other)),
        None => Err(RequestError::missing(
            path,
            "a data:image/...;base64 URL is needed here, as {\"url\": \"...\"} or alone",
        )),
    }
}

fn parse_calls(calls: &Value, path: &str) -> Result<Vec<ToolCall>, RequestError> {
    let list = match calls {
        Value::Null => return Ok(Vec::new()),
        Value::Array(list) if list.len() <= PARTS_MAX => list,
        other => return Err(expected(path, "an array of at most 256 calls", other)),
    };
    let parse = |(index, call): (usize, &Value)| {
        let path = format!("{path}[{index}]");
        let object = call.as_object().ok_or_else(|| expected(path.clone(), "an object", call))?;
        let function = object.get("function").and_then(Value::as_object);
        let function = function.ok_or_else(|| {
            RequestError::missing(
                format!("{path}.function"),
                "an object with name and arguments is needed here",
            )
        })?;
        let path_in = format!("{path}.function");
        let name = string(function, "name", &path_in)?
            .filter(|name| !name.is_empty())
            .ok_or_else(|| RequestError::missing(format!("{path_in}.name"), "a call needs a name"))?;
        ToolCall::new(string(object, "id", &path)?, name, function.get("arguments"))
            .ok_or_else(|| expected(format!("{path_in}.arguments"), ARGUMENTS, &function["arguments"]))
    };
    list.iter().enumerate().map(parse).collect()
}

/// What arguments may be.
const ARGUMENTS: &str = "a JSON object, a string, or nothing";
/// The argument that holds a text which is no object.
const TEXT_ARGUMENT: &str = "arguments";

impl ToolCall {
    /// A call of the history. Its arguments are an object, an object in a string, or nothing at all (= `{}`).
    /// A string that is no object, as that of a call that was cut, becomes an argument of its own, for else
    /// the conversation could not go on. `None` for anything else.
    pub fn new(id: Option<String>, name: String, arguments: Option<&Value>) -> Option<Self> {
        let mut is_text = false;
        let arguments = match arguments {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(object)) => object.clone(),
            Some(Value::String(text)) if text.trim().is_empty() => Map::new(),
            Some(Value::String(text)) => serde_json::from_str(text).unwrap_or_else(|_| {
                is_text = true;
                Map::from_iter([(TEXT_ARGUMENT.to_owned(), text.as_str().into())])
            }),
            Some(_) => return None,
        };
        Some(Self { id, name, arguments, is_text })
    }
}

/// A function the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Name of the function.
    pub name: String,
    /// JSON Schema of its arguments.
    pub parameters: Value,
    /// Whether the arguments must follow the schema.
    pub strict: bool,
    /// `{"type": "function", "function": {…}}` as the template sees it.
    pub definition: Value,
}

impl Tool {
    /// Parses a request's `tools`; null gives none.
    pub fn parse_all(tools: &Value) -> Result<Vec<Self>, RequestError> {
        let list = match tools {
            Value::Null => return Ok(Vec::new()),
            Value::Array(list) => list,
            other => return Err(expected("tools", "an array", other)),
        };
        if list.len() > TOOLS_MAX {
            let detail = format!("{} tools, at most {TOOLS_MAX} are allowed", list.len());
            return Err(RequestError::invalid("tools", detail));
        }
        let parsed =
            list.iter().enumerate().map(|(index, tool)| Self::parse(tool, &format!("tools[{index}]")));
        let parsed: Vec<Self> = parsed.collect::<Result<_, _>>()?;
        let bytes: usize = parsed.iter().map(|tool| tool.definition.to_string().len()).sum();
        if bytes > TOOLS_BYTES_MAX {
            let detail = format!("{bytes} bytes of tools, at most {TOOLS_BYTES_MAX} are allowed");
            return Err(RequestError::invalid("tools", detail));
        }
        Ok(parsed)
    }

    fn parse(tool: &Value, path: &str) -> Result<Self, RequestError> {
        let object = tool.as_object().ok_or_else(|| expected(path, "an object", tool))?;
        match object.get("type").and_then(Value::as_str) {
            Some("function") => {}
            Some(_) => {
                let detail = "only tools of type function are supported on this route";
                return Err(RequestError::unsupported(format!("{path}.type"), detail));
            }
            None => return Err(RequestError::missing(format!("{path}.type"), "must be \"function\"")),
        }
        let path = format!("{path}.function");
        let function = object.get("function").and_then(Value::as_object);
        let function = function
            .ok_or_else(|| RequestError::missing(path.clone(), "an object with a name is needed here"))?;
        let name = string(function, "name", &path)?
            .ok_or_else(|| RequestError::missing(format!("{path}.name"), "a function needs a name"))?;
        if !is_tool_name(&name) {
            let detail = format!("must be 1 to {TOOL_NAME_MAX} of A-Z a-z 0-9 _ - .");
            return Err(RequestError::invalid(format!("{path}.name"), detail));
        }
        let mut function = function.clone();
        let parameters = match function.get("parameters") {
            None | Some(Value::Null) => serde_json::json!({"type": "object", "properties": {}}),
            Some(Value::Object(schema)) => Value::Object(schema.clone()),
            Some(other) => {
                return Err(expected(format!("{path}.parameters"), "a JSON Schema object", other));
            }
        };
        let bytes = parameters.to_string().len();
        if bytes > SCHEMA_BYTES_MAX {
            let detail = format!("{bytes} bytes, at most {SCHEMA_BYTES_MAX} are allowed");
            return Err(RequestError::invalid(format!("{path}.parameters"), detail));
        }
        function.insert("parameters".to_owned(), parameters.clone());
        let strict = match function.get("strict") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(strict)) => *strict,
            Some(other) => return Err(expected(format!("{path}.strict"), "true, false or null", other)),
        };
        let definition = serde_json::json!({"type": "function", "function": function});
        Ok(Self { name, parameters, strict, definition })
    }
}

/// Whether a tool may have this name.
pub fn is_tool_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    (1..=TOOL_NAME_MAX).contains(&name.len()) && name.bytes().all(allowed)
}

/// An optional string field; null counts as missing.
fn string(object: &Map<String, Value>, key: &str, path: &str) -> Result<Option<String>, RequestError> {
    match object.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => Err(expected(format!("{path}.{key}"), "a string", other)),
    }
}

fn expected(path: impl Into<String>, what: &str, found: &Value) -> RequestError {
    /// Longest piece of a request repeated in an error, characters.
    const QUOTED_MAX: usize = 40;
    let kind = match found {
        Value::Null => "null".to_owned(),
        Value::Bool(_) | Value::Number(_) => found.to_string(),
        Value::String(text) if text.chars().count() <= QUOTED_MAX => format!("{text:?}"),
        Value::String(_) => "a string".to_owned(),
        Value::Array(list) => format!("an array of {}", list.len()),
        Value::Object(_) => "an object".to_owned(),
    };
    RequestError::invalid(path, format!("must be {what}, not {kind}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(messages: Value, path: &str) {
        assert_eq!(Message::parse_all(&messages).unwrap_err().path, path, "{messages}");
    }

    #[test]
    fn mistakes_are_named_by_path() {
        refused(json!([]), "messages");
        refused(json!({}), "messages");
        refused(json!([1]), "messages[0]");
        refused(json!([{"content": "x"}]), "messages[0].role");
        refused(json!([{"role": "robot", "content": "x"}]), "messages[0].role");
        refused(json!([{"role": "user"}]), "messages[0].content");
        refused(json!([{"role": "assistant", "content": null}]), "messages[0].content");
        refused(json!([{"role": "user", "content": 3}]), "messages[0].content");
        refused(json!([{"role": "user", "content": [{"type": "audio"}]}]), "messages[0].content[0].type");
        refused(json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text");
        let image = json!([{"type": "image_url", "image_url": {"url": "data:x"}}]);
        refused(json!([{"role": "system", "content": image}]), "messages[0].content[0]");
        refused(json!([{"role": "tool", "content": "x"}]), "messages[0].tool_call_id");
        refused(
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "messages[0].content[0].image_url.url",
        );
    }

    #[test]
    fn arguments_as_object_string_or_nothing() {
        let parse = |arguments: Value| {
            Message::parse_all(&json!([{"role": "assistant", "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]}]))
        };
        let arguments = |value| Value::Object(parse(value).unwrap()[0].tool_calls[0].arguments.clone());
        assert_eq!(arguments(json!({"a": 1})), json!({"a": 1}));
        assert_eq!(arguments(json!("{\"a\": 1}")), json!({"a": 1}));
        assert_eq!(arguments(json!("")), json!({}));
        assert_eq!(arguments(json!(null)), json!({}));
        for (text, is_text) in [("{\"a\": 1}", false), ("{\"a\": ", true), ("[1]", true), ("", false)] {
            let call = parse(json!(text)).unwrap().remove(0).tool_calls.remove(0);
            assert_eq!(call.is_text, is_text, "{text}");
            assert!(!is_text || call.arguments["arguments"] == text);
        }
        for bad in [json!(7), json!([1])] {
            let error = parse(bad).unwrap_err();
            assert_eq!(error.path, "messages[0].tool_calls[0].function.arguments");
        }
    }

    #[test]
    fn parts_of_both_dialects() {
        let messages = json!([{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "input_text", "text": "b"},
            {"type": "refusal", "refusal": "c"},
            {"type": "image_url", "image_url": {"url": "data:1", "detail": "low"}},
            {"type": "input_image", "image_url": "data:2"}]}]);
        let Content::Parts(parts) = Message::parse_all(&messages).unwrap().remove(0).content else {
            panic!("parts stay parts");
        };
        let image = |url: &str, detail: Option<&str>| {
            Part::Image(Image { url: url.into(), detail: detail.map(str::to_owned) })
        };
        let text = |text: &str| Part::Text(text.into());
        let wanted = [text("a"), text("b"), text("c"), image("data:1", Some("low")), image("data:2", None)];
        assert_eq!(parts, wanted);
    }

    #[test]
    fn tools_are_checked() {
        let tools = Tool::parse_all(&json!([{"type": "function", "function": {"name": "a.b-c_1"}}])).unwrap();
        assert_eq!(tools[0].parameters, json!({"type": "object", "properties": {}}));
        for (tool, path) in [
            (json!({"type": "web_search"}), "tools[0].type"),
            (json!({"type": "function"}), "tools[0].function"),
            (json!({"type": "function", "function": {}}), "tools[0].function.name"),
            (json!({"type": "function", "function": {"name": "a b"}}), "tools[0].function.name"),
            (
                json!({"type": "function", "function": {"name": "f", "parameters": []}}),
                "tools[0].function.parameters",
            ),
        ] {
            assert_eq!(Tool::parse_all(&json!([tool])).unwrap_err().path, path);
        }
        let long = "x".repeat(SCHEMA_BYTES_MAX);
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"a": long}}});
        assert_eq!(Tool::parse_all(&json!([tool])).unwrap_err().path, "tools[0].function.parameters");
    }
}
