//! Chats as files: `{"messages": [...], "tools": [...]}` in OpenAI's shape.

use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};
use server::Conversation;
use text::{Content, Message, Part, Role, Tool, ToolCall};

use crate::error::{Failure, Result};
use crate::input;
use crate::target::Target;

/// Largest file of a chat, bytes.
const CHAT_BYTES_MAX: u64 = 64 << 20;

/// Reads a chat: an object with `messages` and perhaps `tools`, or the array of messages alone.
pub(crate) fn load(path: &Path) -> Result<Conversation> {
    let json: Value = serde_json::from_slice(&input::file(path, CHAT_BYTES_MAX)?)
        .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
    let (messages, tools) = match &json {
        Value::Object(object) => (&json["messages"], object.get("tools").unwrap_or(&Value::Null)),
        other => (other, &Value::Null),
    };
    let named = |error| Failure::from(error).context(&path.display().to_string());
    Ok(Conversation {
        messages: Message::parse_all(messages).map_err(named)?,
        tools: Tool::parse_all(tools).map_err(named)?,
    })
}

/// Writes a chat so that [`load`] gives it back.
pub(crate) fn save(path: &Path, conversation: &Conversation) -> Result {
    let mut document = json!({"messages": conversation.messages.iter().map(message).collect::<Vec<_>>()});
    if !conversation.tools.is_empty() {
        document["tools"] = conversation.tools.iter().map(|tool| tool.definition.clone()).collect();
    }
    let mut target = Target::create(path)?;
    let written = target.file.write_all(format!("{document:#}\n").as_bytes());
    written.map_err(|error| target.failed(&error))?;
    target.finish()
}

fn message(message: &Message) -> Value {
    let role = match message.role {
        Role::System => "system",
        Role::Developer => "developer",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "tool",
    };
    let mut json = json!({"role": role, "content": content(&message.content)});
    if let Some(reasoning) = &message.reasoning {
        json["reasoning_content"] = reasoning.as_str().into();
    }
    if !message.tool_calls.is_empty() {
        json["tool_calls"] = message.tool_calls.iter().map(call).collect();
    }
    for (key, value) in [("tool_call_id", &message.tool_call_id), ("name", &message.name)] {
        if let Some(value) = value {
            json[key] = value.as_str().into();
        }
    }
    json
}

fn content(content: &Content) -> Value {
    match content {
        Content::Absent => Value::Null,
        Content::Text(text) => text.as_str().into(),
        Content::Parts(parts) => parts.iter().map(part).collect(),
    }
}

fn part(part: &Part) -> Value {
    match part {
        Part::Text(text) => json!({"type": "text", "text": text}),
        Part::Image(image) => {
            let mut json = json!({"type": "image_url", "image_url": {"url": image.url}});
            if let Some(detail) = &image.detail {
                json["image_url"]["detail"] = detail.as_str().into();
            }
            json
        }
    }
}

fn call(call: &ToolCall) -> Value {
    let arguments = Value::Object(call.arguments.clone()).to_string();
    let mut json = json!({"type": "function", "function": {"name": call.name, "arguments": arguments}});
    if let Some(id) = &call.id {
        json["id"] = id.as_str().into();
    }
    json
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_is_saved_loads_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chat.json");
        let messages = json!([
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "u"},
                {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}]},
            {"role": "assistant", "content": null, "reasoning_content": "r",
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{\"b\":1,\"a\":\"x\"}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
            {"role": "assistant", "content": "a"},
        ]);
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        fs::write(&path, json!({"messages": messages, "tools": tools}).to_string()).unwrap();
        let first = load(&path).unwrap();
        save(&path, &first).unwrap();
        let again = load(&path).unwrap();
        assert_eq!((&again.messages, &again.tools), (&first.messages, &first.tools));
        assert_eq!((again.messages.len(), again.tools.len()), (5, 1));
        fs::write(&path, messages.to_string()).unwrap();
        assert_eq!(load(&path).unwrap().messages, first.messages);
    }

    #[test]
    fn mistakes_name_the_file_and_the_field() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chat.json");
        for (text, wanted) in
            [("{", "line 1"), ("{}", "messages"), ("[{\"role\": \"x\"}]", "messages[0].role")]
        {
            fs::write(&path, text).unwrap();
            let failure = load(&path).unwrap_err();
            assert!(failure.message.contains("chat.json") && failure.message.contains(wanted), "{failure:?}");
        }
    }
}
