//! What an Ollama request says (`docs/api.md` 7), as the fields of a chat or completions request.

use serde_json::{Map, Value, json};
use text::Note;

use super::super::chat::{Place, Places};
use super::super::error::{ApiError, Code};
use super::super::fields::{Fields, unexpected};
use super::super::state::Served;

/// Options with the same meaning, and their names here.
const OPTIONS: [(&str, &str); 9] = [
    ("temperature", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("seed", "seed"),
    ("stop", "stop"),
    ("presence_penalty", "presence_penalty"),
    ("frequency_penalty", "frequency_penalty"),
    ("repeat_penalty", "repetition_penalty"),
];

/// A request in this server's own words.
#[derive(Debug)]
pub(crate) struct Translated {
    /// Fields of a chat request, or with `is_raw` of a completions request.
    pub(crate) map: Map<String, Value>,
    /// Text that goes to the model without a template.
    pub(crate) is_raw: bool,
    /// Nothing to answer: the client only wants the model loaded.
    pub(crate) is_empty: bool,
    pub(crate) notes: Vec<Note>,
    /// Where the client has what became messages.
    pub(crate) places: Places,
}

/// Reads a body of `/api/chat`.
pub(crate) fn chat(map: Map<String, Value>, served: &Served) -> Result<Translated, ApiError> {
    let mut fields = Fields::new(map);
    let mut request = shared(&mut fields, served)?;
    let messages = fields.take("messages").unwrap_or_default();
    let list = match &messages {
        Value::Null => &Vec::new(),
        Value::Array(list) => list,
        other => return Err(unexpected("messages", "an array", other)),
    };
    request.is_empty = list.is_empty();
    for (index, message) in list.iter().enumerate() {
        let path = format!("messages[{index}]");
        pictures(&message["images"], &format!("{path}.images"))?;
        request.places.messages.push(place(&path, message, &format!("{path}."), "content"));
    }
    request.map.insert("messages".into(), messages_of(list)?);
    if let Some(tools) = fields.take("tools") {
        request.map.insert("tools".into(), tools);
    }
    request.notes.extend(fields.finish());
    Ok(request)
}

/// Reads a body of `/api/generate`.
pub(crate) fn generate(map: Map<String, Value>, served: &Served) -> Result<Translated, ApiError> {
    let mut fields = Fields::new(map);
    let mut request = shared(&mut fields, served)?;
    let detail = "this server uses the model's own template and keeps no conversations; use /api/chat";
    fields.refuse(&["template", "context"], detail)?;
    if fields.string("suffix", usize::MAX)?.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::at(Code::NotImplemented, "suffix", "filling in the middle is not implemented"));
    }
    let prompt = fields.string("prompt", usize::MAX)?.unwrap_or_default();
    let system = fields.string("system", usize::MAX)?.filter(|system| !system.is_empty());
    let images = fields.take("images").unwrap_or_default();
    pictures(&images, "images")?;
    request.is_raw = fields.flag("raw", false)?;
    request.is_empty = prompt.is_empty();
    if request.is_raw && images.as_array().is_some_and(|images| !images.is_empty()) {
        let detail = "a raw prompt has no place for pictures; leave raw out, or use /api/chat";
        return Err(ApiError::unsupported("images", detail));
    }
    if request.is_raw {
        request.map.retain(|name, _| !matches!(name.as_str(), "reasoning_effort" | "response_format"));
        request.map.insert("prompt".into(), prompt.into());
        request.map.entry("max_tokens").or_insert(served.context().into());
    } else {
        let turn = json!({"role": "user", "content": prompt, "images": images});
        let system = system.map(|system| json!({"role": "system", "content": system}));
        request.places.messages.extend(system.iter().map(|_| Place::whole("system")));
        request.places.messages.push(place("prompt", &turn, "", "prompt"));
        let turns: Vec<Value> = system.into_iter().chain([turn]).collect();
        request.map.insert("messages".into(), messages_of(&turns)?);
    }
    request.notes.extend(fields.finish());
    Ok(request)
}

/// Fields of both routes.
fn shared(fields: &mut Fields, served: &Served) -> Result<Translated, ApiError> {
    let mut map = Map::new();
    let model = fields.model()?;
    map.insert("model".into(), model.into());
    map.insert("stream".into(), fields.flag("stream", true)?.into());
    fields.ignore(&["keep_alive"]);
    if let Some(clary) = fields.take("clary") {
        map.insert("clary".into(), clary);
    }
    match fields.take("think") {
        None => {}
        Some(Value::Bool(is_on)) => {
            map.insert("reasoning_effort".into(), if is_on { "medium" } else { "none" }.into());
        }
        Some(effort @ Value::String(_)) => {
            map.insert("reasoning_effort".into(), effort);
        }
        Some(other) => return Err(unexpected("think", "true, false, low, medium or high", &other)),
    }
    match fields.take("format") {
        None => {}
        Some(Value::String(word)) if word.is_empty() => {}
        Some(Value::String(word)) if word == "json" => {
            map.insert("response_format".into(), json!({"type": "json_object"}));
        }
        Some(schema @ Value::Object(_)) => {
            let format = json!({"type": "json_schema", "json_schema": {"schema": schema}});
            map.insert("response_format".into(), format);
        }
        Some(other) => return Err(unexpected("format", "\"json\" or a JSON Schema", &other)),
    }
    let notes = options(fields, served, &mut map)?;
    Ok(Translated { map, is_raw: false, is_empty: false, notes, places: Places::default() })
}

fn options(
    fields: &mut Fields,
    served: &Served,
    map: &mut Map<String, Value>,
) -> Result<Vec<Note>, ApiError> {
    let Some(mut inner) = fields.object("options")? else { return Ok(Vec::new()) };
    for (from, to) in OPTIONS {
        if let Some(value) = inner.take(from) {
            map.insert(to.into(), value);
        }
    }
    let context = served.context();
    if let Some(wanted) = inner.count("num_ctx", 0, usize::MAX)?.filter(|&wanted| wanted > context) {
        let detail =
            format!("{wanted} tokens wanted, a slot has {context}; start the server with a larger --ctx");
        return Err(ApiError::invalid("options.num_ctx", detail));
    }
    if let Some(most) = inner.integer("num_predict", i64::MIN, i64::MAX)?
        && most >= 0
    {
        map.insert("max_tokens".into(), most.into());
    }
    let ignored = inner.finish().into_iter();
    Ok(ignored.map(|note| Note { code: "option_ignored", ..note }).collect())
}

/// Messages in OpenAI's shape. Calls have no ids here, so they get some: results answer the first open call
/// of their name, or else the first open call.
fn messages_of(list: &[Value]) -> Result<Value, ApiError> {
    let mut open: Vec<(String, Value)> = Vec::new();
    let mut count = 0;
    let one = |(index, message): (usize, &Value)| {
        let path = format!("messages[{index}]");
        let object = message.as_object().ok_or_else(|| unexpected(path, "an object", message))?;
        let mut turn = Map::new();
        turn.insert("role".into(), message["role"].clone());
        turn.insert("content".into(), content(message));
        if let Some(thinking) = object.get("thinking") {
            turn.insert("reasoning_content".into(), thinking.clone());
        }
        if message["role"] == "tool" {
            let name = &message["tool_name"];
            let at = open.iter().position(|(_, open)| open == name).unwrap_or(0);
            let id = if open.is_empty() { String::new() } else { open.remove(at).0 };
            turn.insert("tool_call_id".into(), id.into());
        }
        if let Some(calls) = object.get("tool_calls").and_then(Value::as_array) {
            open.clear();
            let numbered = calls.iter().map(|call| {
                count += 1;
                let id = format!("call_{count}");
                open.push((id.clone(), call["function"]["name"].clone()));
                json!({"id": id, "type": "function", "function": call["function"]})
            });
            turn.insert("tool_calls".into(), numbered.collect());
        }
        Ok(Value::Object(turn))
    };
    let turns: Result<Vec<Value>, ApiError> = list.iter().enumerate().map(one).collect();
    Ok(turns?.into())
}

/// Checks the list of a message's pictures.
fn pictures(images: &Value, path: &str) -> Result<(), ApiError> {
    let expected = "an array of pictures, each a string of base64";
    match images {
        Value::Null => Ok(()),
        Value::Array(images) => match images.iter().position(|image| !image.is_string()) {
            Some(at) => Err(unexpected(format!("{path}[{at}]"), "a string of base64", &images[at])),
            None => Ok(()),
        },
        other => Err(unexpected(path, expected, other)),
    }
}

/// Where the parts of a message come from: its pictures, then its text.
fn place(path: &str, message: &Value, before: &str, text: &str) -> Place {
    let images = message["images"].as_array().map_or(0, Vec::len);
    let pictures = (0..images).map(|at| format!("{before}images[{at}]"));
    let parts = pictures.chain((images > 0).then(|| format!("{before}{text}"))).collect();
    Place { parts, ..Place::whole(path) }
}

fn content(message: &Value) -> Value {
    let images = message["images"].as_array().filter(|images| !images.is_empty());
    let Some(images) = images else { return message["content"].clone() };
    let picture = |data: &Value| {
        let data = data.as_str().unwrap_or_default();
        // Clients of the other dialects bring the URL that they would send there.
        let url = match data.starts_with("data:") {
            true => data.to_owned(),
            false => format!("data:image/png;base64,{data}"),
        };
        json!({"type": "image_url", "image_url": {"url": url}})
    };
    let text = json!({"type": "text", "text": message["content"].as_str().unwrap_or_default()});
    images.iter().map(picture).chain([text]).collect()
}
