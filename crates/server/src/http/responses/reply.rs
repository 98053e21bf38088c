//! What a response says, whole or as events. Both are made of the same items.

use std::collections::HashSet;

use serde_json::{Map, Value, json};
use text::Piece;

use super::super::chat::{Head, usage};
use super::super::error::{ApiError, Dialect};
use super::super::flow::{Whole, Writer, sse_event};
use super::super::ids::derived;
use super::super::running::{Running, Update};
use crate::Finish;

/// One item of the output.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Item {
    Reasoning(String),
    Message(String),
    Function {
        name: String,
        arguments: String,
        call_id: String,
    },
    /// `json` is what is read of the arguments so far: `input` is one of them.
    Custom {
        name: String,
        input: String,
        call_id: String,
        json: String,
    },
}

impl Item {
    fn prefix(&self) -> &'static str {
        match self {
            Self::Reasoning(_) => "rs_",
            Self::Message(_) => "msg_",
            Self::Function { .. } => "fc_",
            Self::Custom { .. } => "ctc_",
        }
    }

    /// The same without its text: how it is added.
    fn empty(&self) -> Self {
        let mut empty = self.clone();
        match &mut empty {
            Self::Reasoning(text) | Self::Message(text) => text.clear(),
            Self::Function { arguments, .. } => arguments.clear(),
            Self::Custom { input, .. } => input.clear(),
        }
        empty
    }

    fn json(&self, id: &str, status: &str) -> Value {
        match self {
            Self::Reasoning(text) => {
                let content = if text.is_empty() { json!([]) } else { json!([reasoning_part(text)]) };
                json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content})
            }
            Self::Message(text) => {
                let content = if text.is_empty() { json!([]) } else { json!([text_part(text)]) };
                json!({"id": id, "type": "message", "status": status, "role": "assistant",
                    "content": content})
            }
            Self::Function { name, arguments, call_id } => {
                json!({"id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
                    "arguments": arguments})
            }
            Self::Custom { name, input, call_id, .. } => {
                json!({"id": id, "type": "custom_tool_call", "status": status, "call_id": call_id,
                    "name": name, "input": input})
            }
        }
    }
}

/// The number a person typed: an f32 widened by its bits would show digits that nobody wrote.
fn decimal(value: f32) -> Value {
    serde_json::from_str(&value.to_string()).unwrap_or_default()
}

/// The text of a custom tool in the beginning of its arguments, as far as that goes. No escape is cut.
fn input_so_far(json: &str) -> String {
    let Some(text) = json.strip_prefix("{\"input\":\"") else { return String::new() };
    let mut escaped = false;
    let end = text.find(|c: char| {
        let is_end = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        is_end
    });
    let text = &text[..end.unwrap_or(text.len())];
    serde_json::from_str(&format!("\"{text}\"")).unwrap_or_default()
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn reasoning_part(text: &str) -> Value {
    json!({"type": "reasoning_text", "text": text})
}

/// Writes events and keeps the items, which a whole response consists of.
pub(crate) struct ResponseWriter {
    pub(crate) head: Head,
    custom: HashSet<String>,
    echo: Map<String, Value>,
    items: Vec<Item>,
    /// Whether the last item is still open.
    is_open: bool,
    /// Items of calls that did not become whole.
    broken: Vec<usize>,
    sequence: u64,
}

impl ResponseWriter {
    pub(crate) fn new(head: Head, custom: HashSet<String>, echo: Map<String, Value>) -> Self {
        Self { head, custom, echo, items: Vec::new(), is_open: false, broken: Vec::new(), sequence: 0 }
    }

    fn end_status(&self, running: &Running) -> &'static str {
        match running.ended().next().map(|ended| &ended.outcome.finish) {
            Some(Finish::Stop | Finish::ToolCalls) => "completed",
            _ => "incomplete",
        }
    }

    fn ended(&self, running: &Running) -> Value {
        let status = self.end_status(running);
        let mut response = self.response(running, status, status);
        let counts = usage(running);
        response["usage"] = json!({
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.prompt_tokens_details.cached_tokens},
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.completion_tokens_details.reasoning_tokens},
            "total_tokens": counts.total_tokens,
        });
        if status == "incomplete" {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        if let Some(clary) = self.head.clary(running) {
            response["clary"] = json!(clary);
        }
        response
    }

    /// `last` is the status of the last item.
    fn response(&self, running: &Running, status: &str, last: &str) -> Value {
        let params = &self.head.facts.params;
        let defaults = &running.served().sampling;
        let mut response = json!({
            "id": self.head.id, "object": "response", "created_at": self.head.created, "status": status,
            "background": false, "error": null, "incomplete_details": null, "model": self.head.model,
            "previous_response_id": null, "store": false, "truncation": "disabled",
            "temperature": decimal(params.temperature.unwrap_or(defaults.temperature)),
            "top_p": decimal(params.top_p.unwrap_or(defaults.top_p)), "usage": null,
        });
        let items = self.items.iter().enumerate().map(|(index, item)| {
            let status = match index + 1 == self.items.len() {
                _ if self.broken.contains(&index) => "incomplete",
                true => last,
                false => "completed",
            };
            item.json(&self.id(index), status)
        });
        response["output"] = items.collect();
        for (name, value) in &self.echo {
            response[name] = value.clone();
        }
        response
    }

    fn id(&self, index: usize) -> String {
        derived(self.items[index].prefix(), &self.head.id, &index.to_string())
    }

    fn event(&mut self, name: &str, mut data: Value, out: &mut Vec<u8>) {
        data["type"] = name.into();
        data["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        sse_event(out, name, &data);
    }

    /// An event about the last item.
    fn about(&mut self, name: &str, more: Value, out: &mut Vec<u8>) {
        let index = self.items.len() - 1;
        let mut data = json!({"item_id": self.id(index), "output_index": index});
        if let (Value::Object(data), Value::Object(more)) = (&mut data, more) {
            data.extend(more);
        }
        self.event(name, data, out);
    }

    /// Adds a piece to the items and writes what that means.
    fn piece(&mut self, piece: Piece, out: &mut Vec<u8>) {
        match piece {
            Piece::Reasoning(more) => {
                if !matches!((self.is_open, self.items.last()), (true, Some(Item::Reasoning(_)))) {
                    self.open(Item::Reasoning(String::new()), out);
                }
                self.about("response.reasoning_text.delta", json!({"content_index": 0, "delta": more}), out);
                if let Some(Item::Reasoning(text)) = self.items.last_mut() {
                    text.push_str(&more);
                }
            }
            Piece::Content(more) if more.is_empty() => {}
            Piece::Content(more) => {
                if !matches!((self.is_open, self.items.last()), (true, Some(Item::Message(_)))) {
                    self.open(Item::Message(String::new()), out);
                    let part = json!({"content_index": 0, "part": text_part("")});
                    self.about("response.content_part.added", part, out);
                }
                let delta = json!({"content_index": 0, "delta": more, "logprobs": []});
                self.about("response.output_text.delta", delta, out);
                if let Some(Item::Message(text)) = self.items.last_mut() {
                    text.push_str(&more);
                }
            }
            Piece::CallBegin { index, name } => {
                let call_id = self.head.call_id(0, index);
                let text = String::new;
                self.open(
                    match self.custom.contains(&name) {
                        true => Item::Custom { name, input: text(), call_id, json: text() },
                        false => Item::Function { name, arguments: text(), call_id },
                    },
                    out,
                );
            }
            Piece::CallArguments { json, .. } => self.arguments(&json, out),
            Piece::ToolCall(call) => self.called(&call.arguments, out),
            Piece::CallDropped { .. } | Piece::IncompleteCall(_) => {
                if let Some(Item::Function { .. } | Item::Custom { .. }) = self.items.last() {
                    self.broken.push(self.items.len() - 1);
                    self.close("incomplete", out);
                }
            }
            Piece::Note(_) => {}
        }
    }

    /// More of the last item's arguments.
    fn arguments(&mut self, more: &str, out: &mut Vec<u8>) {
        match self.items.last_mut() {
            Some(Item::Function { arguments, .. }) => {
                arguments.push_str(more);
                self.about("response.function_call_arguments.delta", json!({"delta": more}), out);
            }
            Some(Item::Custom { input, json, .. }) => {
                json.push_str(more);
                let text = input_so_far(json);
                let more = text.get(input.len()..).unwrap_or_default().to_owned();
                input.push_str(&more);
                if !more.is_empty() {
                    self.about("response.custom_tool_call_input.delta", json!({"delta": more}), out);
                }
            }
            _ => {}
        }
    }

    /// The last item's arguments are whole.
    fn called(&mut self, arguments: &str, out: &mut Vec<u8>) {
        if let Some(Item::Custom { input, .. }) = self.items.last_mut()
            && input.is_empty()
        {
            // The model named its text otherwise, or gave none.
            let named: Value = serde_json::from_str(arguments).unwrap_or_default();
            *input = named["input"].as_str().map_or(arguments, |text| text).to_owned();
            let delta = input.clone();
            self.about("response.custom_tool_call_input.delta", json!({"delta": delta}), out);
        }
        self.close("completed", out);
    }

    fn open(&mut self, item: Item, out: &mut Vec<u8>) {
        self.close("completed", out);
        let shown = item.empty();
        self.items.push(item);
        let index = self.items.len() - 1;
        let shown = shown.json(&self.id(index), "in_progress");
        self.event("response.output_item.added", json!({"output_index": index, "item": shown}), out);
        self.is_open = true;
    }

    fn close(&mut self, status: &str, out: &mut Vec<u8>) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        let index = self.items.len() - 1;
        let item = self.items[index].clone();
        match &item {
            Item::Reasoning(text) => {
                self.about("response.reasoning_text.done", json!({"content_index": 0, "text": text}), out);
            }
            Item::Message(text) => {
                let done = json!({"content_index": 0, "text": text, "logprobs": []});
                self.about("response.output_text.done", done, out);
                let part = json!({"content_index": 0, "part": text_part(text)});
                self.about("response.content_part.done", part, out);
            }
            Item::Function { name, arguments, .. } => {
                let done = json!({"name": name, "arguments": arguments});
                self.about("response.function_call_arguments.done", done, out);
            }
            Item::Custom { input, .. } => {
                self.about("response.custom_tool_call_input.done", json!({"input": input}), out);
            }
        }
        let shown = item.json(&self.id(index), status);
        self.event("response.output_item.done", json!({"output_index": index, "item": shown}), out);
    }
}

impl Writer for ResponseWriter {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn begin(&mut self, running: &Running, out: &mut Vec<u8>) {
        for name in ["response.created", "response.in_progress"] {
            let response = self.response(running, "in_progress", "in_progress");
            self.event(name, json!({"response": response}), out);
        }
    }

    fn update(&mut self, _: &Running, update: Update, out: &mut Vec<u8>) {
        if let Update::Piece(_, piece, _) = update {
            self.piece(piece, out);
        }
    }

    fn end(&mut self, running: &Running, out: &mut Vec<u8>) {
        let status = self.end_status(running);
        self.close(status, out);
        let response = self.ended(running);
        self.event(&format!("response.{status}"), json!({"response": response}), out);
    }

    fn failed(&mut self, running: &Running, error: &ApiError, out: &mut Vec<u8>) {
        let told = error.body(Dialect::OpenAi, "")["error"].clone();
        let (code, message) = (&told["code"], &told["message"]);
        self.event("error", json!({"code": code, "message": message, "param": told["param"]}), out);
        let mut response = self.response(running, "failed", "incomplete");
        response["error"] = json!({"code": code, "message": message});
        self.event("response.failed", json!({"response": response}), out);
    }

    fn keep_alive(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(b": keep-alive\n\n");
    }
}

impl Whole for ResponseWriter {
    type Reply = Value;

    fn whole(mut self, running: &Running) -> Self::Reply {
        self.close(self.end_status(running), &mut Vec::new());
        self.ended(running)
    }
}
