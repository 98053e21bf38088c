//! What a person sees of a reply, in every dialect, whole or streamed: its texts by place.

use serde_json::Value;

/// Most characters of a text that are shown where two part.
const SHOWN: usize = 24;

/// Texts of a reply. A stream of `/v1/responses` tells everything several times; each telling is a copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    texts: Vec<Text>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Text {
    /// Which telling.
    copy: &'static str,
    /// Path of the member in a whole reply.
    place: String,
    text: String,
}

/// The telling of a whole reply, and of the pieces of a stream.
const WHOLE: &str = "";
/// The finished items of a stream of `/v1/responses`.
const ITEMS: &str = " (response.output_item.done)";
/// The last event of such a stream.
const LAST: &str = " (last event)";

/// Where two texts part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Parting {
    /// Path of the member in a whole reply.
    pub(crate) place: String,
    /// Character of the text, from 0.
    pub(crate) character: usize,
    /// In words.
    pub(crate) message: String,
}

impl Seen {
    /// The texts of a whole reply, or of the events of a stream.
    pub(crate) fn of<'a>(documents: impl IntoIterator<Item = &'a Value>) -> Self {
        let mut seen = Self::default();
        for document in documents {
            seen.document(document);
        }
        // Arguments are compared as what they mean: a dialect may send them as text or as an object.
        for text in seen.texts.iter_mut().filter(|text| is_json(&text.place)) {
            if let Ok(value) = serde_json::from_str::<Value>(&text.text) {
                text.text = value.to_string();
            }
        }
        seen.texts.retain(|text| !text.text.is_empty());
        seen
    }

    /// Characters of all texts, told once.
    pub(crate) fn characters(&self) -> usize {
        let copy = self.texts.first().map(|text| text.copy);
        let told = self.texts.iter().filter(|text| Some(text.copy) == copy && !is_end(&text.place));
        told.map(|text| text.text.chars().count()).sum()
    }

    /// The first place where this reply is not that one, which is whole.
    pub(crate) fn parting(&self, now: &Self) -> Option<Parting> {
        let other = |place: &str| now.texts.iter().find(|text| text.place == place);
        let changed = self.texts.iter().find_map(|then| {
            // The same text under a second name, where the server was set to send it.
            let twin = then.place.strip_suffix(".reasoning").map(|rest| format!("{rest}.reasoning_content"));
            let now = other(&then.place).or_else(|| other(&twin?)).map_or("", |text| &text.text);
            parting(&format!("{}{}", then.place, then.copy), &then.text, now)
        });
        let mut copies: Vec<&str> = self.texts.iter().map(|text| text.copy).collect();
        copies.dedup();
        let left_out = |now: &&Text| {
            copies.iter().any(|copy| {
                let is_told = |then: &Text| then.copy == *copy && then.place == now.place;
                (*copy != ITEMS || !is_end(&now.place)) && !self.texts.iter().any(is_told)
            })
        };
        changed.or_else(|| {
            let now = now.texts.iter().find(left_out)?;
            parting(&now.place, "", &now.text)
        })
    }

    /// Adds to the text of a place.
    fn add(&mut self, copy: &'static str, place: String, value: &Value) {
        let more = match value {
            Value::Null => return,
            Value::String(text) => text.clone(),
            value => value.to_string(),
        };
        match self.texts.iter_mut().find(|text| text.copy == copy && text.place == place) {
            Some(text) => text.text.push_str(&more),
            None => self.texts.push(Text { copy, place, text: more }),
        }
    }

    fn document(&mut self, document: &Value) {
        for (place, choice) in listed(&document["choices"]).enumerate() {
            let place = choice["index"].as_u64().unwrap_or(place as u64);
            self.choice(&format!("choices[{place}]"), choice);
        }
        let kind = document["type"].as_str().unwrap_or_default();
        match kind {
            "message" => self.message(document),
            _ if kind.starts_with("response.") => self.response_event(kind, document),
            _ if document["object"] == "response" => self.response(WHOLE, document),
            _ => self.message_event(document),
        }
        self.ollama(document);
    }

    /// A choice of `/v1/chat/completions` or `/v1/completions`, or a piece of one.
    fn choice(&mut self, place: &str, choice: &Value) {
        self.add(WHOLE, format!("{place}.text"), &choice["text"]);
        self.add(WHOLE, format!("{place}.finish_reason"), &choice["finish_reason"]);
        for said in [&choice["message"], &choice["delta"]] {
            for name in ["reasoning_content", "reasoning", "content", "refusal"] {
                self.add(WHOLE, format!("{place}.message.{name}"), &said[name]);
            }
            self.calls(&format!("{place}.message"), &said["tool_calls"]);
        }
    }

    fn calls(&mut self, place: &str, calls: &Value) {
        for (index, call) in listed(calls).enumerate() {
            let function = &call["function"];
            let index = call["index"].as_u64().or(function["index"].as_u64()).unwrap_or(index as u64);
            for name in ["name", "arguments"] {
                self.add(WHOLE, format!("{place}.tool_calls[{index}].{name}"), &function[name]);
            }
        }
    }

    /// A whole reply of `/v1/messages`.
    fn message(&mut self, document: &Value) {
        for (index, block) in listed(&document["content"]).enumerate() {
            self.block(index as u64, block, true);
        }
        self.add(WHOLE, "stop_reason".into(), &document["stop_reason"]);
    }

    fn block(&mut self, index: u64, block: &Value, is_whole: bool) {
        for name in ["thinking", "text", "name"] {
            self.add(WHOLE, format!("content[{index}].{name}"), &block[name]);
        }
        // A block that begins has an empty object where the pieces of its text will be.
        if is_whole {
            self.add(WHOLE, format!("content[{index}].input"), &block["input"]);
        }
    }

    /// An event of a stream of `/v1/messages`.
    fn message_event(&mut self, event: &Value) {
        let delta = &event["delta"];
        self.add(WHOLE, "stop_reason".into(), &delta["stop_reason"]);
        if let Some(index) = event["index"].as_u64() {
            self.block(index, &event["content_block"], false);
            self.block(index, delta, false);
            self.add(WHOLE, format!("content[{index}].input"), &delta["partial_json"]);
        }
    }

    /// A whole reply of `/v1/responses`.
    fn response(&mut self, copy: &'static str, response: &Value) {
        for (index, item) in listed(&response["output"]).enumerate() {
            self.item(copy, index as u64, item);
        }
        self.add(copy, "status".into(), &response["status"]);
    }

    fn item(&mut self, copy: &'static str, index: u64, item: &Value) {
        for part in listed(&item["content"]) {
            self.add(copy, format!("output[{index}].text"), &part["text"]);
        }
        for name in ["name", "arguments", "input"] {
            self.add(copy, format!("output[{index}].{name}"), &item[name]);
        }
    }

    /// An event of a stream of `/v1/responses`.
    fn response_event(&mut self, kind: &str, event: &Value) {
        if matches!(kind, "response.completed" | "response.incomplete" | "response.failed") {
            self.add(WHOLE, "status".into(), &event["response"]["status"]);
            return self.response(LAST, &event["response"]);
        }
        let Some(index) = event["output_index"].as_u64() else { return };
        let name = match kind {
            "response.output_item.added" => return self.item(WHOLE, index, &event["item"]),
            "response.output_item.done" => return self.item(ITEMS, index, &event["item"]),
            "response.output_text.delta" | "response.reasoning_text.delta" => "text",
            "response.function_call_arguments.delta" => "arguments",
            "response.custom_tool_call_input.delta" => "input",
            _ => return,
        };
        self.add(WHOLE, format!("output[{index}].{name}"), &event["delta"]);
    }

    /// A reply of `/api/chat` or `/api/generate`, or a line of one.
    fn ollama(&mut self, line: &Value) {
        if !line["done"].is_boolean() {
            return;
        }
        for (place, said) in [("", line), ("message.", &line["message"])] {
            for name in ["response", "thinking", "content"] {
                self.add(WHOLE, format!("{place}{name}"), &said[name]);
            }
        }
        self.calls("message", &line["message"]["tool_calls"]);
        self.add(WHOLE, "done_reason".into(), &line["done_reason"]);
    }
}

fn listed(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Whether the text of a place is JSON.
fn is_json(place: &str) -> bool {
    [".arguments", ".input"].iter().any(|end| place.ends_with(end))
}

/// Whether a place says how the reply ended.
fn is_end(place: &str) -> bool {
    ["finish_reason", "stop_reason", "done_reason", "status"].iter().any(|end| place.ends_with(end))
}

fn parting(place: &str, then: &str, now: &str) -> Option<Parting> {
    if then == now {
        return None;
    }
    let character = then.chars().zip(now.chars()).take_while(|(then, now)| then == now).count();
    let rest = |text: &str| match text.chars().skip(character).take(SHOWN).collect::<String>() {
        rest if rest.is_empty() => "the end".to_owned(),
        rest => format!("{rest:?}"),
    };
    let message = format!("{place}, character {character}: {} in the reply, {} here", rest(then), rest(now));
    Some(Parting { place: place.to_owned(), character, message })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn parts(then: &[Value], now: &Value, message: &str) {
        let parting = Seen::of(then).parting(&Seen::of([now])).expect("they differ");
        assert!(parting.message.starts_with(message), "{parting:?}");
    }

    #[track_caller]
    fn equal(then: &[Value], now: &Value) {
        assert_eq!(Seen::of(then).parting(&Seen::of([now])), None);
    }

    #[test]
    fn chats_whole_and_streamed() {
        let call = |index: Option<u8>, name: Value, arguments: &str| {
            let function = json!({"name": name, "arguments": arguments});
            json!({"index": index, "id": "x", "function": function})
        };
        let whole = |content: &str, arguments: &str| {
            json!({"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant",
                "content": content, "reasoning_content": "hm", "refusal": null,
                "tool_calls": [call(None, json!("f"), arguments)]}}]})
        };
        let delta = |delta: Value| json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]});
        let stream = [
            delta(json!({"role": "assistant", "content": ""})),
            delta(json!({"reasoning_content": "hm", "reasoning": "hm"})),
            delta(json!({"content": "9"})),
            delta(json!({"content": "5 é"})),
            delta(json!({"tool_calls": [call(Some(0), json!("f"), "")]})),
            delta(json!({"tool_calls": [call(Some(0), json!(null), "{\"a\": 1}")]})),
            json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
        ];
        let now = whole("95 é", "{\"a\":1}");
        equal(std::slice::from_ref(&now), &now);
        equal(&stream, &now);
        parts(
            &stream[1..],
            &whole("95 è", "{}"),
            "choices[0].message.content, character 3: \"é\" in the reply",
        );
        parts(
            &stream,
            &whole("95 é", "{\"a\":2}"),
            "choices[0].message.tool_calls[0].arguments, character 5",
        );
        parts(
            &stream[..6],
            &now,
            "choices[0].finish_reason, character 0: the end in the reply, \"stop\" here",
        );
        parts(&[stream[6].clone()], &now, "choices[0].message.reasoning_content, character 0: the end");
        assert_eq!(Seen::of(&stream).characters(), "hmhm95 éf{\"a\":1}".chars().count());
        assert_eq!(Seen::of([&json!({"receipt": {}})]), Seen::default());
    }

    #[test]
    fn messages_whole_and_streamed() {
        let whole = json!({"type": "message", "stop_reason": "tool_use", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "yes"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"b": 1, "a": 2}}]});
        let start = "content_block_start";
        let block = |index: u8, block: Value| json!({"type": start, "index": index, "content_block": block});
        let delta = |index: u8, delta: Value| json!({"index": index, "delta": delta});
        let mut stream = vec![
            json!({"type": "message_start", "message": {"type": "message", "content": []}}),
            block(0, json!({"type": "thinking", "thinking": ""})),
            delta(0, json!({"thinking": "hm"})),
            block(1, json!({"type": "text", "text": ""})),
            delta(1, json!({"text": "ye"})),
            delta(1, json!({"text": "s"})),
            block(2, json!({"type": "tool_use", "name": "f", "input": {}})),
            delta(2, json!({"partial_json": "{\"b\": 1, \"a\": 2}"})),
            json!({"type": "message_delta", "delta": {"stop_reason": "tool_use"}}),
        ];
        equal(std::slice::from_ref(&whole), &whole);
        equal(&stream, &whole);
        stream[5]["delta"]["text"] = "t".into();
        parts(&stream, &whole, "content[1].text, character 2: \"t\" in the reply, \"s\" here");
    }

    #[test]
    fn responses_whole_and_streamed() {
        let items = json!([{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "content": [{"type": "output_text", "text": "yes"}]},
            {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}]);
        let whole = json!({"object": "response", "status": "completed", "output": items});
        let event = |kind: &str, index: usize, more: Value| {
            let mut event = json!({"type": format!("response.{kind}"), "output_index": index});
            event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            event
        };
        let mut stream = vec![
            event("reasoning_text.delta", 0, json!({"delta": "hm"})),
            event("output_item.done", 0, json!({"item": items[0]})),
            event("output_text.delta", 1, json!({"delta": "yes"})),
            event("output_text.done", 1, json!({"text": "yes"})),
            event("output_item.done", 1, json!({"item": items[1]})),
            event("output_item.added", 2, json!({"item": {"name": "f", "arguments": ""}})),
            event("function_call_arguments.delta", 2, json!({"delta": "{}"})),
            event("output_item.done", 2, json!({"item": items[2]})),
            json!({"type": "response.completed", "response": whole}),
        ];
        equal(std::slice::from_ref(&whole), &whole);
        equal(&stream, &whole);
        stream[8]["response"]["output"][1]["content"][0]["text"] = "no".into();
        parts(&stream, &whole, "output[1].text (last event), character 0: \"no\" in the reply");
        stream[2]["delta"] = "yet".into();
        parts(&stream, &whole, "output[1].text, character 2: \"t\" in the reply");
    }

    #[test]
    fn lines_of_the_ollama_dialect() {
        let line = |content: &str| json!({"message": {"content": content}, "done": false});
        let call = json!({"function": {"index": 0, "name": "f", "arguments": {"a": 1}}});
        let last = json!({"message": {"content": "", "tool_calls": [call]}, "done": true,
            "done_reason": "stop"});
        let whole = |content: &str| {
            json!({"message": {"content": content, "tool_calls": [call]}, "done": true,
            "done_reason": "stop"})
        };
        equal(&[line("9"), line("5"), last.clone()], &whole("95"));
        parts(
            &[line("9"), line("6"), last],
            &whole("95"),
            "message.content, character 1: \"6\" in the reply",
        );
        let generated = |text: &str| json!({"response": text, "done": true, "done_reason": "stop"});
        parts(&[generated("a")], &generated("b"), "response, character 0");
    }
}
