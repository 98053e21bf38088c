//! The written form of a tool call:
//! `<tool_call>`, `<function=NAME>`, any number of `<parameter=KEY>` value `</parameter>`, `</function>`,
//! `</tool_call>`, with white space between.

use sha2::{Digest, Sha256};

use super::{CALL_CLOSE, CALL_OPEN, Call, typing};
use crate::error::Note;
use crate::message::{Tool, is_tool_name};

const FUNCTION_OPEN: &str = "<function=";
const FUNCTION_CLOSE: &str = "</function>";
const PARAMETER_OPEN: &str = "<parameter=";
const PARAMETER_CLOSE: &str = "</parameter>";

/// A call as written: parameter texts without types.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Written<'t> {
    name: &'t str,
    parameters: Vec<(&'t str, &'t str)>,
}

/// Reads a whole call from its opening to its closing marker; `None` if it has not exactly that form.
pub(super) fn parse(block: &str) -> Option<Written<'_>> {
    let inner = block.strip_prefix(CALL_OPEN)?.strip_suffix(CALL_CLOSE)?.trim();
    let (name, mut rest) = inner.strip_prefix(FUNCTION_OPEN)?.split_once('>')?;
    if !is_tool_name(name) {
        return None;
    }
    let mut parameters = Vec::new();
    loop {
        rest = rest.trim_start();
        if let Some(after) = rest.strip_prefix(FUNCTION_CLOSE) {
            return after.is_empty().then_some(Written { name, parameters });
        }
        let (key, after) = rest.strip_prefix(PARAMETER_OPEN)?.split_once('>')?;
        if key.is_empty() || key.contains(['\n', '<']) {
            return None;
        }
        let end = value_end(after)?;
        let value = &after[..end];
        // A second opening inside means that the first was never closed.
        if value.contains(PARAMETER_OPEN) {
            return None;
        }
        parameters.push((key, without_line_breaks(value)));
        rest = &after[end + PARAMETER_CLOSE.len()..];
    }
}

/// A value ends at the first closing tag with another parameter or the function's end behind it: values such
/// as XML files may have that tag inside.
fn value_end(text: &str) -> Option<usize> {
    let mut ends = text.match_indices(PARAMETER_CLOSE).map(|(at, _)| at);
    ends.find(|at| {
        let after = text[at + PARAMETER_CLOSE.len()..].trim_start();
        after.starts_with(PARAMETER_OPEN) || after.starts_with(FUNCTION_CLOSE)
    })
}

/// The value without one line break at each end.
fn without_line_breaks(value: &str) -> &str {
    let value = value.strip_prefix("\r\n").or_else(|| value.strip_prefix('\n')).unwrap_or(value);
    value.strip_suffix("\r\n").or_else(|| value.strip_suffix('\n')).unwrap_or(value)
}

impl Written<'_> {
    /// Gives the parameters the types of the tool's schema.
    pub(super) fn typed(&self, tools: &[Tool], index: usize) -> (Call, Vec<Note>) {
        let mut notes = Vec::new();
        let path = format!("tool_calls[{index}].function");
        let tool = tools.iter().find(|tool| tool.name == self.name);
        if tool.is_none() {
            notes.push(Note::new("tool_unknown", format!("{path}.name")));
        }
        let mut arguments: Vec<(&str, String)> = Vec::with_capacity(self.parameters.len());
        for &(key, text) in &self.parameters {
            let typed = typing::argument(tool.map(|tool| &tool.parameters), key, text);
            if typed.kept_as_text {
                notes.push(Note::new("argument_kept_as_text", format!("{path}.arguments.{key}")));
            }
            match arguments.iter_mut().find(|(known, _)| *known == key) {
                Some((_, json)) => {
                    notes.push(Note::new("argument_repeated", format!("{path}.arguments.{key}")));
                    *json = typed.json;
                }
                None => arguments.push((key, typed.json)),
            }
        }
        let members: Vec<String> =
            arguments.iter().map(|(key, json)| format!("{}:{json}", typing::quoted(key))).collect();
        let arguments = format!("{{{}}}", members.join(","));
        (Call { index, name: self.name.to_owned(), arguments }, notes)
    }
}

/// Id of a call: `call_` and 24 of `A-Z a-z 0-9`, made from the reply's own id and the call's index, so that
/// it is unique in the reply and the same on every way the reply is sent.
pub fn call_id(reply: &str, index: usize) -> String {
    const LETTERS: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    let digest =
        Sha256::new().chain_update(reply).chain_update([0]).chain_update(index.to_le_bytes()).finalize();
    let letters = digest.iter().take(24).map(|byte| char::from(LETTERS[usize::from(byte % 62)]));
    format!("call_{}", letters.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(inner: &str, wanted: Option<(&str, &[(&str, &str)])>) {
        let block = format!("{CALL_OPEN}{inner}{CALL_CLOSE}");
        let wanted = wanted.map(|(name, parameters)| Written { name, parameters: parameters.to_vec() });
        assert_eq!(parse(&block), wanted, "{inner}");
    }

    #[test]
    fn values_lose_one_line_break_at_each_end() {
        check("\n<function=f>\n</function>\n", Some(("f", &[])));
        check(
            "<function=f><parameter=a>\n\n x \n\n</parameter><parameter=b></parameter></function>",
            Some(("f", &[("a", "\n x \n"), ("b", "")])),
        );
        check("<function=f><parameter=a>\r\nx\r\n</parameter></function>", Some(("f", &[("a", "x")])));
    }

    #[test]
    fn closing_tags_inside_a_value() {
        check(
            "<function=f><parameter=a>\n<p>1</parameter>\n</p>\n</parameter>\n</function>",
            Some(("f", &[("a", "<p>1</parameter>\n</p>")])),
        );
        check("<function=f><parameter=a>\nx\n<parameter=b>\ny\n</parameter>\n</function>", None);
    }

    #[test]
    fn ids_are_distinct_and_repeatable() {
        let id = call_id("chatcmpl-1", 0);
        assert_eq!(id.len(), "call_".len() + 24);
        assert!(id[5..].bytes().all(|byte| byte.is_ascii_alphanumeric()));
        assert_eq!(id, call_id("chatcmpl-1", 0));
        assert_ne!(id, call_id("chatcmpl-1", 1));
        assert_ne!(id, call_id("chatcmpl-2", 0));
    }
}
