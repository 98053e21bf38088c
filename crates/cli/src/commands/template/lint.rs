//! The built-in chats: every kind of turn that requests can have.

use serde_json::{Value, json};
use server::TextSide;
use text::{IMAGE_PAD, LateSystem, Rendered, Specials};

use super::{failed, render};
use crate::error::Result;
use crate::output::Output;
use crate::table::Table;

const CHATS: &str = include_str!("chats.json");

/// What became of a chat.
struct Row {
    name: String,
    /// Tokens, or what is wrong.
    result: std::result::Result<usize, String>,
}

/// Renders every chat and looks at the result.
pub(super) fn lint(text: &TextSide, output: &Output) -> Result {
    let chats: Vec<Value> = serde_json::from_str(CHATS).expect("the built-in chats are JSON");
    let mut rows = Vec::new();
    // Control tokens of a chat whose texts spell some: as many as its twin has, whose texts spell none.
    let mut spelled = 0;
    for chat in &chats {
        let rendered = render(text, request(chat), chat["thinking"].as_bool(), LateSystem::default());
        let result = rendered.map_err(|failure| failure.message).and_then(|rendered| {
            let found = controls(text, &rendered);
            let before = std::mem::replace(&mut spelled, found);
            if chat["twin"] == true && found != before {
                return Err(format!("texts that spell control tokens make some: {before} for {found}"));
            }
            look(text, chat, &rendered).map(|()| rendered.ids.len())
        });
        rows.push(Row { name: chat["name"].as_str().unwrap_or_default().to_owned(), result });
    }
    print(text, &rows, output)?;
    match rows.iter().filter(|row| row.result.is_err()).count() {
        0 => Ok(()),
        count => Err(failed(count, rows.len())),
    }
}

/// The chat as a request.
fn request(chat: &Value) -> Value {
    let tools: Vec<Value> = chat["tools"].as_array().into_iter().flatten().map(tool).collect();
    json!({"messages": chat["messages"], "tools": tools})
}

fn tool(name: &Value) -> Value {
    json!({"type": "function", "function": {"name": name, "description": "Says what the sky does.",
        "parameters": {"type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}})
}

fn controls(text: &TextSide, rendered: &Rendered) -> usize {
    rendered.ids.iter().filter(|&&id| text.tokenizer.control_content(id).is_some()).count()
}

/// What must hold of every prompt.
fn look(text: &TextSide, chat: &Value, rendered: &Rendered) -> std::result::Result<(), String> {
    let fail = |what: &str| Err(what.to_owned());
    if text.tokenizer.decode(&rendered.ids, Specials::Keep) != rendered.text {
        return fail("its tokens are another text");
    }
    let texts =
        chat["messages"].as_array().into_iter().flatten().filter_map(|message| message["content"].as_str());
    if let Some(lost) = texts.map(str::trim).find(|text| !rendered.text.contains(text)) {
        return Err(format!("the text {lost:?} is not in the prompt"));
    }
    if let Some(tool) = chat["tools"].as_array().into_iter().flatten().find_map(Value::as_str)
        && !rendered.text.contains(tool)
    {
        return fail("the tool is not in the prompt");
    }
    let pictures = chat["pictures"].as_u64().unwrap_or(0) as usize;
    if rendered.image_positions.len() != pictures || rendered.text.matches(IMAGE_PAD).count() != pictures {
        return fail("the picture has no place in the prompt");
    }
    if chat["continues"] == true && !rendered.text.ends_with("One, two,") {
        return fail("the begun answer is not what the prompt ends with");
    }
    if chat["thinking"] == false && rendered.in_reasoning {
        return fail("thinking is off and the reply would begin with reasoning");
    }
    Ok(())
}

fn print(text: &TextSide, rows: &[Row], output: &Output) -> Result {
    if output.json {
        let chats = rows.iter().map(|row| {
            json!({"name": row.name, "ok": row.result.is_ok(), "tokens": row.result.as_ref().ok(),
                "problem": row.result.as_ref().err()})
        });
        let chats: Vec<Value> = chats.collect();
        return Ok(output.document(&json!({"template_sha256": text.template.digest(), "chats": chats}))?);
    }
    let mut table = Table::new("<<<");
    for row in rows {
        match &row.result {
            Ok(tokens) => table.row(["ok", &row.name, &format!("{tokens} tokens")]),
            Err(problem) => table.row(["fail", &row.name, problem]),
        }
    }
    Ok(output.out(&format!("template sha256:{}\n{}", text.template.digest(), table.text()))?)
}
