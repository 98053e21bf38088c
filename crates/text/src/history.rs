//! The rules that turn a request's messages into the turns a template renders (`docs/api.md` 3.2).
//!
//! After this step: at most one system turn and it comes first, roles are the template's four, reasoning
//! stands in its own field, tool results follow the order of their calls.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::{Note, RequestError};
use crate::message::{Content, Image, Message, Part, Role, ToolCall};

/// Opens the text of a system message that stands after the first turns.
pub const LATE_SYSTEM_MARK: &str = "[system] ";

/// Stands where a tool's result has a picture that the model cannot see.
pub const OMITTED_IMAGE: &str = "[picture omitted: this model sees no pictures]";

/// What becomes of a system message that does not lead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LateSystem {
    /// A user turn in its place, beginning with [`LATE_SYSTEM_MARK`].
    #[default]
    #[serde(rename = "user")]
    UserTurn,
    /// Joined to the first system turn.
    Merge,
    /// An error.
    Reject,
}

/// A picture of the chat, in the order the prompt shows them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryImage {
    /// Path of its part in the request.
    pub path: String,
    /// The picture as the client named it.
    pub image: Image,
}

/// Turns ready for a template.
#[derive(Clone, Debug)]
pub struct History {
    pub(crate) turns: Vec<Turn>,
    images: Vec<HistoryImage>,
    notes: Vec<Note>,
}

/// One turn, with the index of the message it came from.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    pub(crate) index: usize,
    pub(crate) message: Message,
}

impl History {
    /// Applies the rules; `messages` must not be empty.
    pub fn new(messages: Vec<Message>, late: LateSystem) -> Result<Self, RequestError> {
        if messages.is_empty() {
            return Err(RequestError::invalid("messages", "at least one message is needed"));
        }
        Message::check_count(messages.len())?;
        let mut turns: Vec<Turn> =
            messages.into_iter().enumerate().map(|(index, message)| Turn { index, message }).collect();
        let mut notes = Vec::new();
        place_systems(&mut turns, late, &mut notes)?;
        order_tool_results(&mut turns, &mut notes)?;
        for turn in &mut turns {
            for (call, _) in turn.message.tool_calls.iter().enumerate().filter(|(_, call)| call.is_text) {
                let path = format!("messages[{}].tool_calls[{call}].function.arguments", turn.index);
                notes.push(Note::new("arguments_kept_as_text", path));
            }
            if turn.message.role == Role::Assistant {
                settle_assistant(&mut turn.message);
            }
        }
        let images = turns.iter().flat_map(images_of).collect();
        Ok(Self { turns, images, notes })
    }

    /// The pictures, in the order of the prompt's picture places.
    pub fn images(&self) -> &[HistoryImage] {
        &self.images
    }

    /// For a model that sees nothing: pictures in results of tools become [`OMITTED_IMAGE`], each with a
    /// note. A program put them there, and it would send them again with every further turn. Those of users
    /// stay.
    pub fn omit_tool_images(&mut self) {
        let results = self.turns.iter_mut().filter(|turn| turn.message.role == Role::Tool);
        for turn in results {
            self.notes
                .extend(images_of(turn).into_iter().map(|image| Note::new("picture_omitted", image.path)));
            if let Content::Parts(parts) = &mut turn.message.content {
                for part in parts.iter_mut().filter(|part| matches!(part, Part::Image(_))) {
                    *part = Part::Text(OMITTED_IMAGE.to_owned());
                }
            }
        }
        self.images = self.turns.iter().flat_map(images_of).collect();
    }

    /// What was changed on the client's behalf.
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }

    /// Texts that every template shows: contents and the arguments of calls; with `reasoning` also that,
    /// which a template may leave out.
    pub(crate) fn texts(&self, reasoning: bool) -> Vec<Cow<'_, str>> {
        let mut texts = Vec::new();
        for Turn { message, .. } in &self.turns {
            match &message.content {
                Content::Absent => {}
                Content::Text(text) => texts.push(text.into()),
                Content::Parts(parts) => texts.extend(parts.iter().filter_map(|part| match part {
                    Part::Text(text) => Some(Cow::from(text)),
                    Part::Image(_) => None,
                })),
            }
            texts.extend(message.reasoning.as_ref().filter(|_| reasoning).map(Cow::from));
            for (name, value) in message.tool_calls.iter().flat_map(|call| &call.arguments) {
                texts.push(name.into());
                texts.push(value.as_str().map_or_else(|| value.to_string().into(), Cow::from));
            }
        }
        texts
    }

    /// Whether the last turn is the assistant's, so that by default its text is continued.
    pub fn ends_with_assistant(&self) -> bool {
        self.turns.last().is_some_and(|turn| turn.message.role == Role::Assistant)
    }
}

/// Joins leading system messages into one turn and places later ones by the rule.
fn place_systems(turns: &mut Vec<Turn>, late: LateSystem, notes: &mut Vec<Note>) -> Result<(), RequestError> {
    let is_system = |turn: &Turn| matches!(turn.message.role, Role::System | Role::Developer);
    let leading = turns.iter().take_while(|turn| is_system(turn)).count();
    let mut first: Vec<String> = Vec::new();
    let mut index = 0;
    let mut rest = Vec::with_capacity(turns.len());
    for (place, mut turn) in turns.drain(..).enumerate() {
        if !is_system(&turn) {
            rest.push(turn);
            continue;
        }
        let path = format!("messages[{}]", turn.index);
        let text = joined_text(&turn.message.content);
        if place < leading {
            first.push(text);
            continue;
        }
        match late {
            LateSystem::Merge => {
                notes.push(Note::new("system_merged", path));
                index = if first.is_empty() { turn.index } else { index };
                first.push(text);
            }
            LateSystem::UserTurn => {
                notes.push(Note::new("system_as_user", path));
                turn.message.role = Role::User;
                turn.message.content = Content::Text(format!("{LATE_SYSTEM_MARK}{text}"));
                rest.push(turn);
            }
            LateSystem::Reject => {
                let detail = "a system or developer message must come before all others";
                return Err(RequestError::invalid(format!("{path}.role"), detail));
            }
        }
    }
    if !first.is_empty() {
        turns.push(Turn { index, message: Message::text(Role::System, first.join("\n\n")) });
    }
    turns.append(&mut rest);
    Ok(())
}

/// Matches tool messages with the calls of the assistant turn before them and puts each run of them in the
/// order of the calls: templates show no ids, so the order is all the model has to tell results apart.
fn order_tool_results(turns: &mut [Turn], notes: &mut Vec<Note>) -> Result<(), RequestError> {
    /// A call's id and whether it has its result.
    type Open = Vec<(Option<String>, bool)>;
    let mut calls: Open = Vec::new();
    let mut places: Vec<usize> = vec![0; turns.len()];
    for (turn, place) in turns.iter().zip(&mut places) {
        match turn.message.role {
            Role::Assistant => {
                calls = turn.message.tool_calls.iter().map(|call| (call.id.clone(), false)).collect();
            }
            Role::Tool => {
                let id = &turn.message.tool_call_id;
                let open = calls.iter().position(|(call, done)| !done && call == id);
                let Some(call) = open else {
                    let known = calls.iter().any(|(call, _)| call == id);
                    let detail = if known {
                        "this call already has its result"
                    } else {
                        "no call of the assistant turn before it has this id"
                    };
                    return Err(RequestError::invalid(
                        format!("messages[{}].tool_call_id", turn.index),
                        detail,
                    ));
                };
                calls[call].1 = true;
                *place = call;
            }
            _ => {}
        }
    }
    let mut start = 0;
    while start < turns.len() {
        let run = turns[start..].iter().take_while(|turn| turn.message.role == Role::Tool).count();
        if !places[start..start + run].is_sorted() {
            notes.push(Note::new("tool_results_reordered", format!("messages[{}]", turns[start].index)));
            // Places are distinct within a run, so this order is total.
            let mut order: Vec<usize> = (start..start + run).collect();
            order.sort_by_key(|&at| places[at]);
            let sorted: Vec<Turn> = order.into_iter().map(|at| turns[at].clone()).collect();
            turns[start..start + run].clone_from_slice(&sorted);
        }
        start += run.max(1);
    }
    Ok(())
}

/// Puts an assistant turn's content in one string and its inline reasoning in the reasoning field, the way
/// the family's templates would: they look for `</think>`, which marked text no longer shows them.
fn settle_assistant(message: &mut Message) {
    let text = joined_text(&message.content);
    let split = message.reasoning.is_none().then(|| text.rsplit_once("</think>")).flatten();
    match split {
        Some((_, after)) => {
            let before = text.split("</think>").next().unwrap_or_default().trim_end_matches('\n');
            let reasoning = before.rsplit("<think>").next().unwrap_or_default().trim_start_matches('\n');
            message.reasoning = Some(reasoning.to_owned());
            message.content = Content::Text(after.trim_start_matches('\n').to_owned());
        }
        None => message.content = Content::Text(text),
    }
}

/// Text parts put together as they are, which is what templates do.
fn joined_text(content: &Content) -> String {
    match content {
        Content::Absent => String::new(),
        Content::Text(text) => text.clone(),
        Content::Parts(parts) => {
            let texts = parts.iter().map(|part| if let Part::Text(text) = part { text.as_str() } else { "" });
            texts.collect()
        }
    }
}

fn images_of(turn: &Turn) -> Vec<HistoryImage> {
    let Content::Parts(parts) = &turn.message.content else { return Vec::new() };
    let path = |part: usize| format!("messages[{}].content[{part}]", turn.index);
    let images = parts.iter().enumerate().filter_map(|(index, part)| match part {
        Part::Image(image) => Some(HistoryImage { path: path(index), image: image.clone() }),
        Part::Text(_) => None,
    });
    images.collect()
}

impl Turn {
    /// The turn as a template sees it.
    pub(crate) fn to_json(&self) -> Value {
        let message = &self.message;
        let role = match message.role {
            Role::System | Role::Developer => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        };
        let mut turn = Map::new();
        turn.insert("role".into(), role.into());
        turn.insert("content".into(), content_json(&message.content));
        if let Some(reasoning) = &message.reasoning {
            turn.insert("reasoning_content".into(), reasoning.as_str().into());
        }
        if !message.tool_calls.is_empty() {
            turn.insert("tool_calls".into(), message.tool_calls.iter().map(call_json).collect());
        }
        if let Some(id) = &message.tool_call_id {
            turn.insert("tool_call_id".into(), id.as_str().into());
        }
        if let Some(name) = &message.name {
            turn.insert("name".into(), name.as_str().into());
        }
        Value::Object(turn)
    }
}

fn content_json(content: &Content) -> Value {
    match content {
        Content::Absent => "".into(),
        Content::Text(text) => text.as_str().into(),
        Content::Parts(parts) => parts.iter().map(part_json).collect(),
    }
}

fn part_json(part: &Part) -> Value {
    match part {
        Part::Text(text) => json!({"type": "text", "text": text}),
        Part::Image(_) => json!({"type": "image"}),
    }
}

fn call_json(call: &ToolCall) -> Value {
    let mut value = json!({"type": "function", "function": {"name": call.name, "arguments": call.arguments}});
    if let Some(id) = &call.id {
        value["id"] = id.as_str().into();
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(messages: Value, late: LateSystem) -> Result<History, RequestError> {
        History::new(Message::parse_all(&messages).unwrap(), late)
    }

    fn check(messages: Value, late: LateSystem, wanted: Value) {
        let got: Value = history(messages, late).unwrap().turns.iter().map(Turn::to_json).collect();
        assert_eq!(got, wanted);
    }

    #[test]
    fn system_and_developer_messages() {
        let user = json!({"role": "user", "content": "u"});
        let developer = json!({"role": "developer", "content": "d"});
        let parts = json!({"role": "system", "content": [{"type": "text", "text": "s"},
            {"type": "text", "text": "t"}]});
        let system = |text: &str| json!({"role": "system", "content": text});
        let late = json!({"role": "user", "content": "[system] d"});
        let rule = LateSystem::UserTurn;
        check(json!([developer, user]), rule, json!([system("d"), user]));
        check(json!([developer, parts, user]), rule, json!([system("d\n\nst"), user]));
        check(json!([user, developer, user]), rule, json!([user, late, user]));
        check(json!([parts, user, developer]), LateSystem::Merge, json!([system("st\n\nd"), user]));
        check(json!([user, developer]), LateSystem::Merge, json!([system("d"), user]));
        let error = history(json!([user, developer]), LateSystem::Reject).unwrap_err();
        assert_eq!(error.path, "messages[1].role");
    }

    #[test]
    fn tool_results_must_match_and_follow_the_calls() {
        let call = |id: &str| json!({"id": id, "function": {"name": "f", "arguments": ""}});
        let result = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": id});
        let calls = json!({"role": "assistant", "content": null, "tool_calls": [call("a"), call("b")]});
        let ordered = history(json!([calls, result("b"), result("a")]), LateSystem::UserTurn).unwrap();
        let ids: Vec<_> = ordered.turns.iter().filter_map(|turn| turn.message.tool_call_id.clone()).collect();
        assert_eq!(ids, ["a", "b"]);
        assert_eq!(ordered.notes(), [Note::new("tool_results_reordered", "messages[1]")]);
        for (messages, path) in [
            (json!([calls, result("c")]), "messages[1].tool_call_id"),
            (json!([result("a")]), "messages[0].tool_call_id"),
            (json!([calls, result("a"), result("a")]), "messages[2].tool_call_id"),
            (json!([calls, {"role": "assistant", "content": "x"}, result("a")]), "messages[2].tool_call_id"),
        ] {
            assert_eq!(history(messages, LateSystem::UserTurn).unwrap_err().path, path);
        }
    }

    #[test]
    fn pictures_follow_the_order_of_the_prompt() {
        let call = |id: &str| json!({"id": id, "function": {"name": "f", "arguments": ""}});
        let result = |id: &str| {
            let image = json!({"type": "image_url", "image_url": {"url": format!("data:{id}")}});
            json!({"role": "tool", "tool_call_id": id, "content": [image]})
        };
        let calls = json!({"role": "assistant", "tool_calls": [call("a"), call("b")]});
        let history = history(json!([calls, result("b"), result("a")]), LateSystem::UserTurn).unwrap();
        let paths: Vec<&str> = history.images().iter().map(|image| image.path.as_str()).collect();
        assert_eq!(paths, ["messages[2].content[0]", "messages[1].content[0]"]);
    }

    #[test]
    fn pictures_that_tools_show_to_the_blind_are_told_of() {
        let image = json!({"type": "image_url", "image_url": {"url": "data:"}});
        let text = |text: &str| json!({"type": "text", "text": text});
        let shown = json!({"role": "user", "content": [image]});
        let calls = json!({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]});
        let result = json!({"role": "tool", "tool_call_id": "a", "content": [text("left"), image, image]});
        let mut history = history(json!([shown, calls, result]), LateSystem::UserTurn).unwrap();
        history.omit_tool_images();
        let content = json!([text("left"), text(OMITTED_IMAGE), text(OMITTED_IMAGE)]);
        assert_eq!(history.turns[2].to_json()["content"], content);
        let note = |part: usize| Note::new("picture_omitted", format!("messages[2].content[{part}]"));
        assert_eq!(history.notes(), [note(1), note(2)]);
        let paths: Vec<&str> = history.images().iter().map(|image| image.path.as_str()).collect();
        assert_eq!(paths, ["messages[0].content[0]"]);
    }

    #[test]
    fn inline_reasoning_moves_to_its_field() {
        let check_split = |content: &str, reasoning: Option<&str>, text: &str| {
            let mut wanted = json!({"role": "assistant", "content": text});
            if let Some(reasoning) = reasoning {
                wanted["reasoning_content"] = reasoning.into();
            }
            let given = json!([{"role": "assistant", "content": content}]);
            check(given, LateSystem::UserTurn, json!([wanted]));
        };
        check_split("<think>\na\n</think>\n\nb", Some("a"), "b");
        check_split("a\n</think>b", Some("a"), "b");
        check_split("<think>\na", None, "<think>\na");
        check_split("plain", None, "plain");
    }
}
