//! The written form of a tool call:
//! `<tool_call>`, `<function=NAME>`, any number of `<parameter=KEY>` value `</parameter>`, `</function>`,
//! `</tool_call>`, with white space between. It is read as it comes: arguments are JSON as soon as they are
//! certain, texts character by character and everything else value by value.

use std::collections::HashSet;

use sha2::{Digest, Sha256};

use super::{CALL_CLOSE, CALL_OPEN, Call, typing};
use crate::error::Note;
use crate::message::{TOOL_NAME_MAX, Tool, is_tool_name};

const FUNCTION_OPEN: &str = "<function=";
const FUNCTION_CLOSE: &str = "</function>";
const PARAMETER_OPEN: &str = "<parameter=";
const PARAMETER_CLOSE: &str = "</parameter>";

/// How far a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// All is read, and more is needed.
    More,
    /// It is whole, and ends here.
    Whole(usize),
    /// It is none: what follows cannot make it one.
    Broken,
    /// It calls a function that was not offered.
    Unknown,
}

/// What comes next in a call.
#[derive(Clone, Debug)]
enum Stage {
    /// The function's name.
    Name,
    /// A parameter or the function's end.
    Between,
    /// A parameter's value.
    Value(Value),
    /// The end of the call.
    Close,
}

/// A value that is being read. Places count bytes of the block.
#[derive(Clone, Debug)]
struct Value {
    key: String,
    /// Where it begins: behind one line break, once that is known.
    start: usize,
    is_begun: bool,
    /// What has become JSON already.
    given: usize,
    /// Where the search for its end goes on.
    searched: usize,
    /// The schema wants a string and nothing else, so that no end can change what the beginning means.
    is_text: bool,
    /// The key came before: the first value counts.
    is_repeated: bool,
}

/// Reads one call from its opening marker on. What it has come to depends on the text alone.
#[derive(Clone, Debug)]
pub(super) struct CallReader {
    stage: Stage,
    /// Where in the block reading goes on.
    at: usize,
    index: usize,
    tool: usize,
    keys: HashSet<String>,
    name: String,
    arguments: String,
    notes: Vec<Note>,
}

impl CallReader {
    /// A reader behind the opening marker of a call that would be the reply's `index`th.
    pub(super) fn new(index: usize) -> Self {
        Self {
            stage: Stage::Name,
            at: CALL_OPEN.len(),
            index,
            tool: 0,
            keys: HashSet::new(),
            name: String::new(),
            arguments: String::new(),
            notes: Vec::new(),
        }
    }

    /// The function's name; empty while it is not known.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The JSON so far; empty until something is certain, whole behind [`Step::Whole`].
    pub(super) fn arguments(&self) -> &str {
        &self.arguments
    }

    /// The call, once it is whole, and what is to be said of it.
    pub(super) fn into_call(self) -> (Call, Vec<Note>) {
        (Call { index: self.index, name: self.name, arguments: self.arguments }, self.notes)
    }

    /// Reads on. `block` begins with the opening marker and is what it was before, and more.
    pub(super) fn advance(&mut self, block: &str, tools: &[Tool]) -> Step {
        loop {
            let step = match &self.stage {
                Stage::Name => self.function(block, tools),
                Stage::Between => self.between(block, tools),
                Stage::Value(_) => self.value(block, tools),
                Stage::Close => return self.close(block),
            };
            if let Some(step) = step {
                return step;
            }
        }
    }

    /// What stands behind white space.
    fn rest<'t>(&mut self, block: &'t str) -> &'t str {
        let rest = block[self.at..].trim_start();
        self.at = block.len() - rest.len();
        rest
    }

    /// Each part returns `None` once it is read.
    fn function(&mut self, block: &str, tools: &[Tool]) -> Option<Step> {
        let rest = self.rest(block);
        let Some(name) = rest.strip_prefix(FUNCTION_OPEN) else {
            return Some(if FUNCTION_OPEN.starts_with(rest) { Step::More } else { Step::Broken });
        };
        let Some((name, _)) = name.split_once('>') else {
            let may_be = name.len() <= TOOL_NAME_MAX && (name.is_empty() || is_tool_name(name));
            return Some(if may_be { Step::More } else { Step::Broken });
        };
        if !is_tool_name(name) {
            return Some(Step::Broken);
        }
        let Some(tool) = tools.iter().position(|tool| tool.name == name) else { return Some(Step::Unknown) };
        self.tool = tool;
        name.clone_into(&mut self.name);
        self.at += FUNCTION_OPEN.len() + name.len() + 1;
        self.stage = Stage::Between;
        None
    }

    fn between(&mut self, block: &str, tools: &[Tool]) -> Option<Step> {
        let rest = self.rest(block);
        if rest.starts_with(FUNCTION_CLOSE) {
            self.at += FUNCTION_CLOSE.len();
            self.stage = Stage::Close;
            return None;
        }
        let Some(key) = rest.strip_prefix(PARAMETER_OPEN) else {
            let may_be = FUNCTION_CLOSE.starts_with(rest) || PARAMETER_OPEN.starts_with(rest);
            return Some(if may_be { Step::More } else { Step::Broken });
        };
        let end = key.find('>');
        let key = &key[..end.unwrap_or(key.len())];
        if key.contains(['\n', '<']) || end == Some(0) {
            return Some(Step::Broken);
        }
        if end.is_none() {
            return Some(Step::More);
        }
        self.at += PARAMETER_OPEN.len() + key.len() + 1;
        self.parameter(key, tools);
        None
    }

    /// A parameter begins.
    fn parameter(&mut self, key: &str, tools: &[Tool]) {
        let is_repeated = !self.keys.insert(key.to_owned());
        let is_text = typing::is_text(&tools[self.tool].parameters, key);
        if is_repeated {
            self.note("argument_repeated", key);
        } else {
            self.arguments.push(if self.arguments.is_empty() { '{' } else { ',' });
            self.arguments.push_str(&typing::quoted(key));
            self.arguments.push_str(if is_text { ":\"" } else { ":" });
        }
        let at = self.at;
        let key = key.to_owned();
        let value = Value { key, start: at, is_begun: false, given: at, searched: at, is_text, is_repeated };
        self.stage = Stage::Value(value);
    }

    fn value(&mut self, block: &str, tools: &[Tool]) -> Option<Step> {
        let Stage::Value(value) = &mut self.stage else { return None };
        let text = &block[value.start..];
        if !value.is_begun {
            if text.is_empty() || text == "\r" {
                return Some(Step::More);
            }
            let inside = text.strip_prefix("\r\n").or_else(|| text.strip_prefix('\n')).unwrap_or(text);
            value.start = block.len() - inside.len();
            (value.given, value.searched, value.is_begun) = (value.start, value.start, true);
        }
        let found = search(block, &mut value.searched);
        if value.is_text && !value.is_repeated {
            // A line break may turn out to stand before the end.
            let certain = &block[value.given..value.searched];
            let certain = without_line_break(certain.strip_suffix('\r').unwrap_or(certain));
            self.arguments.push_str(escaped(&typing::quoted(certain)));
            value.given += certain.len();
        }
        match found {
            Found::Nothing => return Some(Step::More),
            Found::Breaks => return Some(Step::Broken),
            Found::End => {}
        }
        let end = value.searched;
        self.at = end + PARAMETER_CLOSE.len();
        let Stage::Value(value) = std::mem::replace(&mut self.stage, Stage::Between) else { return None };
        if value.is_repeated {
            return None;
        }
        let text = without_line_break(&block[value.start..end]);
        if value.is_text {
            let rest = &text[value.given - value.start..];
            self.arguments.push_str(escaped(&typing::quoted(rest)));
            self.arguments.push('"');
            return None;
        }
        let typed = typing::argument(&tools[self.tool].parameters, &value.key, text);
        self.arguments.push_str(&typed.json);
        if typed.kept_as_text {
            self.note("argument_kept_as_text", &value.key);
        }
        None
    }

    fn close(&mut self, block: &str) -> Step {
        let rest = self.rest(block);
        if rest.starts_with(CALL_CLOSE) {
            self.arguments.push_str(if self.arguments.is_empty() { "{}" } else { "}" });
            return Step::Whole(self.at + CALL_CLOSE.len());
        }
        if CALL_CLOSE.starts_with(rest) { Step::More } else { Step::Broken }
    }

    fn note(&mut self, code: &'static str, key: &str) {
        let path = format!("tool_calls[{}].function.arguments.{key}", self.index);
        self.notes.push(Note::new(code, path));
    }
}

/// What a search in a value met.
enum Found {
    /// No end yet.
    Nothing,
    /// The value's end.
    End,
    /// What cannot stand in a value: a second opening, for then the first was never closed, or the call's
    /// end.
    Breaks,
}

/// Looks for a value's end from `searched` on, and moves that to where it stands: the first closing tag with
/// another parameter or the function's end behind it, for values such as XML files may have that tag inside.
/// Without one, `searched` moves to where one may begin.
fn search(block: &str, searched: &mut usize) -> Found {
    while let Some(at) = block[*searched..].find('<') {
        *searched += at;
        let rest = &block[*searched..];
        if rest.starts_with(CALL_CLOSE) || rest.starts_with(PARAMETER_OPEN) {
            return Found::Breaks;
        }
        if let Some(after) = rest.strip_prefix(PARAMETER_CLOSE) {
            let after = after.trim_start();
            let next = [PARAMETER_OPEN, FUNCTION_CLOSE];
            if next.iter().any(|next| after.starts_with(next)) {
                return Found::End;
            }
            if next.iter().any(|next| next.starts_with(after)) {
                return Found::Nothing;
            }
        } else if [CALL_CLOSE, PARAMETER_OPEN, PARAMETER_CLOSE].iter().any(|mark| mark.starts_with(rest)) {
            return Found::Nothing;
        }
        *searched += 1;
    }
    *searched = block.len();
    Found::Nothing
}

/// The text without one line break at its end.
fn without_line_break(text: &str) -> &str {
    text.strip_suffix("\r\n").or_else(|| text.strip_suffix('\n')).unwrap_or(text)
}

/// What stands between the quotes of a JSON string. Characters are escaped one by one, so that the escaped
/// parts of a text join to the escaped text.
fn escaped(quoted: &str) -> &str {
    quoted.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(quoted)
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

    fn tools() -> Vec<Tool> {
        let parameters =
            serde_json::json!({"properties": {"a": {"type": "string"}, "n": {"type": "integer"}}});
        let tool =
            serde_json::json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
        Tool::parse_all(&tool).unwrap()
    }

    /// Reads the text whole and a character at a time: both must come to the same, and what is given out on
    /// the way must be a beginning of it.
    fn read(inner: &str) -> Option<String> {
        let (block, tools) = (format!("{CALL_OPEN}{inner}{CALL_CLOSE}"), tools());
        let mut whole = CallReader::new(0);
        let end = whole.advance(&block, &tools);
        let mut slow = CallReader::new(0);
        let (mut step, mut given) = (Step::More, String::new());
        for (at, _) in block.char_indices().skip(CALL_OPEN.len()) {
            step = slow.advance(&block[..at], &tools);
            assert!(slow.arguments().starts_with(&given), "{inner}");
            given = slow.arguments().to_owned();
            if step != Step::More {
                break;
            }
        }
        if step == Step::More {
            step = slow.advance(&block, &tools);
        }
        assert_eq!((step, slow.arguments()), (end, whole.arguments()), "{inner}");
        match end {
            Step::Whole(end) => {
                assert_eq!(end, block.len());
                Some(whole.into_call().0.arguments)
            }
            _ => None,
        }
    }

    fn check(inner: &str, wanted: Option<&str>) {
        assert_eq!(read(inner).as_deref(), wanted, "{inner}");
    }

    #[test]
    fn values_lose_one_line_break_at_each_end() {
        check("\n<function=f>\n</function>\n", Some("{}"));
        check(
            "<function=f><parameter=a>\n\n x \n\n</parameter><parameter=b></parameter></function>",
            Some(r#"{"a":"\n x \n","b":""}"#),
        );
        check("<function=f><parameter=a>\r\nx\r\n</parameter></function>", Some(r#"{"a":"x"}"#));
        check("<function=f><parameter=a>\r</parameter></function>", Some(r#"{"a":"\r"}"#));
        check("<function=f><parameter=a>\n</parameter></function>", Some(r#"{"a":""}"#));
        check("<function=f><parameter=a>\n\r\r\n</parameter></function>", Some(r#"{"a":"\r"}"#));
    }

    #[test]
    fn closing_tags_inside_a_value() {
        check(
            "<function=f><parameter=a>\n<p>1</parameter>\n</p>\n</parameter>\n</function>",
            Some(r#"{"a":"<p>1</parameter>\n</p>"}"#),
        );
        check("<function=f><parameter=a>\nx\n<parameter=b>\ny\n</parameter>\n</function>", None);
        check("<function=f><parameter=a>\nx </tool_call>\n</parameter>\n</function>", None);
    }

    #[test]
    fn texts_come_as_they_are_written_and_numbers_whole() {
        let mut reader = CallReader::new(0);
        let (mut block, tools) = (CALL_OPEN.to_owned(), tools());
        for (more, wanted) in [
            ("\n<function=f", ""),
            (">\n<parameter=a", ""),
            (">", r#"{"a":""#),
            ("\nso \"much", r#"{"a":"so \"much"#),
            ("\n", r#"{"a":"so \"much"#),
            ("<\u{1f600}", r#"{"a":"so \"much\n<\u{1f600}"#),
            ("</par", "{\"a\":\"so \\\"much\\n<\u{1f600}"),
            ("ameter>\n<parameter=n>4", "{\"a\":\"so \\\"much\\n<\u{1f600}\",\"n\":"),
            ("2</parameter></function>", "{\"a\":\"so \\\"much\\n<\u{1f600}\",\"n\":42"),
        ] {
            block.push_str(more);
            assert_eq!(reader.advance(&block, &tools), Step::More);
            let wanted = wanted.replace("\\u{1f600}", "\u{1f600}");
            assert_eq!(reader.arguments(), wanted);
        }
    }

    #[test]
    fn what_cannot_become_a_call_is_known_at_once() {
        let step = |text: &str| CallReader::new(0).advance(&format!("{CALL_OPEN}{text}"), &tools());
        for broken in ["\n{", "<function>", "<function=a b", "<function=f>\nx", "<function=f></function>x"] {
            assert_eq!(step(broken), Step::Broken, "{broken}");
        }
        assert_eq!(step("<function=g>"), Step::Unknown);
        assert_eq!(step("<function=g"), Step::More);
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
