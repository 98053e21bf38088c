//! Content blocks of a user's turn or a tool's result in Anthropic's dialect, as parts of a message.
//!
//! As in Anthropic's own errors a path names the kinds of the blocks on its way: clients take the picture or
//! the document that such a path names out of the chat, and go on.

use serde_json::Value;
use text::{Image, Note, PARTS_MAX, Part};

use super::super::error::{ApiError, Code};
use super::super::fields::unexpected;

/// What may stand in a user's turn; results of tools are taken out before.
const KNOWN: &str = "text, image, document, search_result or tool_result";

/// Parts of a message, each with the path of the block it came from.
#[derive(Default)]
pub(super) struct Parts {
    pub(super) parts: Vec<Part>,
    pub(super) paths: Vec<String>,
}

impl Parts {
    /// Adds what a block says.
    pub(super) fn block(&mut self, block: &Value, path: &str, notes: &mut Vec<Note>) -> Result<(), ApiError> {
        match block["type"].as_str() {
            Some("text") => self.push(Part::Text(string(block, "text", path)?), path),
            Some("image") => {
                let path = format!("{path}.image");
                self.push(picture(&block["source"], &path)?, &path);
            }
            Some("document") => {
                note_citations(block, path, notes);
                self.document(block, &format!("{path}.document"), notes)?;
            }
            Some("search_result") => {
                note_citations(block, path, notes);
                let path = format!("{path}.search_result");
                let heading = heading(block, &["title", "source"], &path)?;
                self.quoted(heading, &block["content"], &format!("{path}.content"), notes)?;
            }
            // What a client's own search for tools found: all tools are in the prompt anyway.
            Some("tool_reference") => self.push(Part::Text(string(block, "tool_name", path)?), path),
            Some("container_upload") => return Err(ApiError::unsupported(path, NO_FILES)),
            _ => return Err(unexpected(format!("{path}.type"), KNOWN, &block["type"])),
        }
        match self.parts.len() {
            count if count <= PARTS_MAX => Ok(()),
            count => Err(ApiError::invalid(path, format!("{count} parts, at most {PARTS_MAX} are allowed"))),
        }
    }

    fn push(&mut self, part: Part, path: &str) {
        self.parts.push(part);
        self.paths.push(path.to_owned());
    }

    fn document(&mut self, block: &Value, path: &str, notes: &mut Vec<Note>) -> Result<(), ApiError> {
        let source = &block["source"];
        let heading = heading(block, &["title", "context"], path)?;
        let inner = format!("{path}.source");
        match source["type"].as_str() {
            Some("text") => self.quoted(heading, &source["data"], &format!("{inner}.data"), notes),
            Some("content") => self.quoted(heading, &source["content"], &format!("{inner}.content"), notes),
            Some("base64" | "url") => {
                let detail = "PDF documents are not read; send the text of it in a source of type text, or \
                    its pages as image blocks";
                Err(ApiError::unsupported(path, detail))
            }
            Some("file") => Err(ApiError::unsupported(path, NO_FILES)),
            _ => Err(unexpected(format!("{inner}.type"), "text or content", &source["type"])),
        }
    }

    /// A text of its own under a heading: templates join parts as they are, so blank lines set it apart.
    fn quoted(
        &mut self,
        heading: String,
        content: &Value,
        path: &str,
        notes: &mut Vec<Note>,
    ) -> Result<(), ApiError> {
        let before = match self.parts.last() {
            Some(Part::Text(text)) if !text.ends_with('\n') => "\n\n",
            _ => "",
        };
        match content {
            Value::String(text) => self.push(Part::Text(format!("{before}{heading}{text}\n\n")), path),
            Value::Array(blocks) if blocks.len() <= PARTS_MAX => {
                if !before.is_empty() || !heading.is_empty() {
                    self.push(Part::Text(format!("{before}{heading}")), path);
                }
                for (place, block) in blocks.iter().enumerate() {
                    let path = format!("{path}[{place}]");
                    if !matches!(block["type"].as_str(), Some("text" | "image")) {
                        return Err(unexpected(format!("{path}.type"), "text or image", &block["type"]));
                    }
                    self.block(block, &path, notes)?;
                    self.push(Part::Text("\n\n".into()), &path);
                }
            }
            other => return Err(unexpected(path, "a string, or at most 256 text and image blocks", other)),
        }
        Ok(())
    }
}

const NO_FILES: &str = "this server keeps no files; send the content in the request";

/// What stands above a quoted text, with a blank line behind it.
fn heading(block: &Value, names: &[&str], path: &str) -> Result<String, ApiError> {
    let mut lines = String::new();
    for name in names {
        match &block[*name] {
            Value::Null => {}
            Value::String(line) => lines += &format!("{line}\n"),
            other => return Err(unexpected(format!("{path}.{name}"), "a string", other)),
        }
    }
    if !lines.is_empty() {
        lines.push('\n');
    }
    Ok(lines)
}

fn note_citations(block: &Value, path: &str, notes: &mut Vec<Note>) {
    if block["citations"]["enabled"] == true {
        notes.push(Note { code: "citations_not_made", path: format!("{path}.citations") });
    }
}

/// A string that a block must have.
pub(super) fn string(block: &Value, name: &str, path: &str) -> Result<String, ApiError> {
    let missing = || ApiError::at(Code::MissingField, format!("{path}.{name}"), "a string is needed");
    block[name].as_str().map(str::to_owned).ok_or_else(missing)
}

fn picture(source: &Value, path: &str) -> Result<Part, ApiError> {
    let path = format!("{path}.source");
    let url = match source["type"].as_str() {
        Some("base64") => {
            format!("data:{};base64,{}", string(source, "media_type", &path)?, string(source, "data", &path)?)
        }
        Some("url") => string(source, "url", &path)?,
        Some("file") => return Err(ApiError::unsupported(path, NO_FILES)),
        _ => return Err(unexpected(format!("{path}.type"), "base64 or url", &source["type"])),
    };
    Ok(Part::Image(Image { url, detail: None }))
}
