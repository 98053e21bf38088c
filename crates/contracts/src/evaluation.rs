//! Question sets with keys (`models/demo/eval/README.md`): reading items, asking them greedily, judging
//! replies.

use std::fmt;
use std::path::Path;

use model::{ModelError, PAGE_TOKENS};
use serde_json::Value;
use text::{
    ChatTemplate, End, GenerationDefaults, History, LateSystem, Message, RenderOptions, Rendered, Reply,
    ReplyOptions, RequestError, Specials, THINK_CLOSE, TextError, Tokenizer, Tool,
};

use crate::lane::{draw_at, greedy};
use crate::{Lane, Runner};

/// Why a question set cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// A file of the set or the model folder cannot be read.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A question is not a valid request.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// A line is not an item.
    #[error("line {line}: {what}")]
    Item {
        /// Line, from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// The model failed.
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// When a reply is right.
#[derive(Clone, Debug, PartialEq)]
pub enum Check {
    /// The text, stripped, equals this.
    Exact(String),
    /// The text contains this, not followed by a digit.
    Contains(String),
    /// The text parses to this.
    Json(Value),
    /// The reply is one call of this function with exactly these arguments.
    ToolCall {
        /// The function.
        name: String,
        /// The arguments.
        arguments: Value,
    },
}

/// One question.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// Key.
    pub id: String,
    /// Form of the question.
    pub kind: String,
    /// Whether the model thinks first.
    pub thinking: bool,
    /// Most tokens of the reply.
    pub max_tokens: usize,
    /// The conversation.
    pub messages: Value,
    /// Functions, or null.
    pub tools: Value,
    /// The key.
    pub check: Check,
}

/// Reads items, one JSON object a line.
pub fn read_items(lines: &str) -> Result<Vec<Item>, EvalError> {
    let parse = |(at, line): (usize, &str)| {
        let bad = |what: String| EvalError::Item { line: at + 1, what };
        let value: Value = serde_json::from_str(line).map_err(|error| bad(error.to_string()))?;
        let text = |value: &Value, key: &str| {
            value[key].as_str().map(str::to_owned).ok_or_else(|| bad(format!("{key}: text expected")))
        };
        let check = &value["check"];
        let check = match check["type"].as_str() {
            Some("exact") => Check::Exact(text(check, "expected")?),
            Some("contains") => Check::Contains(text(check, "expected")?),
            Some("json") => Check::Json(check["expected"].clone()),
            Some("tool_call") => {
                let call = &check["expected"];
                Check::ToolCall { name: text(call, "name")?, arguments: call["arguments"].clone() }
            }
            Some(other) => {
                return Err(bad(format!(
                    "check.type: exact, contains, json or tool_call expected, not {other:?}"
                )));
            }
            None => return Err(bad("check.type: exact, contains, json or tool_call expected".to_owned())),
        };
        let most = value["max_tokens"].as_u64().and_then(|most| usize::try_from(most).ok());
        let max_tokens = most.filter(|&most| most > 0).ok_or_else(|| {
            bad(format!("max_tokens: a number from 1 expected, not {}", value["max_tokens"]))
        })?;
        Ok(Item {
            id: text(&value, "id")?,
            kind: text(&value, "kind")?,
            thinking: value["enable_thinking"] == true,
            max_tokens,
            messages: value["messages"].clone(),
            tools: value["tools"].clone(),
            check,
        })
    };
    lines.lines().enumerate().map(parse).collect()
}

impl Item {
    /// Whether a picture is part of the question.
    pub fn has_pictures(&self) -> bool {
        let parts = |message: &Value| {
            let list = message["content"].as_array();
            list.is_some_and(|parts| parts.iter().any(|part| part["type"] == "image_url"))
        };
        self.messages.as_array().is_some_and(|messages| messages.iter().any(parts))
    }

    /// Files of the question's pictures, in order.
    pub fn pictures(&self) -> Vec<&str> {
        let messages = self.messages.as_array().into_iter().flatten();
        let parts = messages.flat_map(|message| message["content"].as_array().into_iter().flatten());
        parts.filter_map(|part| part["image_url"]["url"].as_str()).collect()
    }

    /// Whether a reply is right. `closed` says whether a thinking block that was opened has ended.
    pub fn is_right(&self, reply: &Reply, closed: bool) -> bool {
        if self.thinking && (!closed || reply.reasoning.trim().is_empty()) {
            return false;
        }
        let content = reply.content.trim();
        match &self.check {
            Check::Exact(expected) => content == expected,
            Check::Contains(expected) => content.match_indices(expected.as_str()).any(|(at, found)| {
                !content[at + found.len()..].starts_with(|next: char| next.is_ascii_digit())
            }),
            Check::Json(expected) => {
                serde_json::from_str::<Value>(content).is_ok_and(|found| same_json(&found, expected))
            }
            Check::ToolCall { name, arguments } => match &reply.calls[..] {
                [call] if content.is_empty() && call.name == *name => {
                    serde_json::from_str::<Value>(&call.arguments)
                        .is_ok_and(|found| same_json(&found, arguments))
                }
                _ => false,
            },
        }
    }
}

/// Equal values; numbers by value, objects whatever the order of their keys.
fn same_json(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a == b || a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_json(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| same_json(a, b)))
        }
        _ => a == b,
    }
}

/// What turns questions into tokens and tokens into replies.
pub struct Asker {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    stops: Vec<u32>,
}

/// The answer to one question.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Generated ids, the stop token included.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Whether it is right.
    pub right: bool,
}

impl Asker {
    /// Reads tokenizer, template and end tokens of a model folder.
    pub fn open(folder: &Path) -> Result<Self, EvalError> {
        Ok(Self {
            tokenizer: Tokenizer::open(folder)?,
            template: ChatTemplate::open(folder)?,
            stops: GenerationDefaults::open(folder)?.stop_ids,
        })
    }

    /// Tokens that end a reply.
    pub fn stops(&self) -> &[u32] {
        &self.stops
    }

    /// Ids of a question's prompt, and whether the reply begins inside thinking.
    pub fn prompt(&self, item: &Item) -> Result<(Vec<u32>, bool), EvalError> {
        let rendered = self.render(item)?;
        Ok((rendered.ids, rendered.in_reasoning))
    }

    /// A question's prompt, one place for each of its pictures.
    pub fn render(&self, item: &Item) -> Result<Rendered, EvalError> {
        let history = History::new(Message::parse_all(&item.messages)?, LateSystem::default())?;
        let options = RenderOptions {
            tools: Tool::parse_all(&item.tools)?,
            enable_thinking: Some(item.thinking),
            ..RenderOptions::default()
        };
        Ok(self.template.render(&self.tokenizer, &history, &options)?)
    }

    /// Asks one question, greedily.
    pub fn ask(&self, runner: &mut Runner<'_>, item: &Item) -> Result<Answer, EvalError> {
        let (prompt, in_reasoning) = self.prompt(item)?;
        let mut lane = runner.lanes()?.swap_remove(0);
        let tokens = self.generate(runner, &mut lane, &prompt, item.max_tokens)?;
        Ok(Answer { right: self.judge(item, in_reasoning, &tokens)?, prompt_tokens: prompt.len(), tokens })
    }

    /// Whether generated tokens are a right answer.
    pub fn judge(&self, item: &Item, in_reasoning: bool, tokens: &[u32]) -> Result<bool, EvalError> {
        let stopped = tokens.last().is_some_and(|token| self.stops.contains(token));
        let body = &tokens[..tokens.len() - usize::from(stopped)];
        let text = self.tokenizer.decode(body, Specials::Skip);
        let options = ReplyOptions {
            in_reasoning,
            tools: Tool::parse_all(&item.tools)?.into(),
            ..ReplyOptions::default()
        };
        let reply = Reply::read(options, &text, if stopped { End::Stop } else { End::Length });
        Ok(item.is_right(&reply, text.contains(THINK_CLOSE)))
    }

    fn generate(
        &self,
        runner: &mut Runner<'_>,
        lane: &mut Lane,
        prompt: &[u32],
        max_tokens: usize,
    ) -> Result<Vec<u32>, ModelError> {
        let like = device::Draw { vocabulary: self.tokenizer.vocab_size() as u32, ..greedy() };
        let spec = runner.spec();
        let room = spec.context_max.min(lane.pages.len() * PAGE_TOKENS);
        let mut tokens = Vec::new();
        let mut next = prompt;
        let mut last;
        let mut row = 0;
        while lane.length < room && tokens.len() < max_tokens {
            for part in next.chunks(spec.rows_max) {
                row = runner.commit(lane, part)?;
            }
            let drawn = runner.draw(&[draw_at(&like, row, lane.length)])?;
            let Some(token) = drawn[0].token else { break };
            tokens.push(token);
            if self.stops.contains(&token) {
                break;
            }
            last = [token];
            next = &last;
        }
        Ok(tokens)
    }
}

/// Right and asked, and equal to a reference, by kind of question in order of appearance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks(Vec<(String, [usize; 3])>);

impl Marks {
    /// Counts one answer.
    pub fn add(&mut self, kind: &str, right: bool, equal: bool) {
        let at = self.0.iter().position(|(known, _)| known == kind).unwrap_or_else(|| {
            self.0.push((kind.to_owned(), [0; 3]));
            self.0.len() - 1
        });
        for (count, one) in self.0[at].1.iter_mut().zip([true, right, equal]) {
            *count += usize::from(one);
        }
    }

    /// Asked, right, and equal to the reference, over all kinds.
    pub fn total(&self) -> [usize; 3] {
        self.0.iter().fold([0; 3], |sum, (_, counts)| [0, 1, 2].map(|at| sum[at] + counts[at]))
    }
}

/// A Markdown table.
impl fmt::Display for Marks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| kind | asked | right | same tokens as the reference |\n| --- | --- | --- | --- |")?;
        for (kind, [asked, right, equal]) in &self.0 {
            writeln!(f, "| {kind} | {asked} | {right} | {equal} |")?;
        }
        let [asked, right, equal] = self.total();
        writeln!(f, "| **all** | **{asked}** | **{right}** | **{equal}** |")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(check: &str, thinking: bool) -> Item {
        let asked = format!(r#""id": "a", "kind": "k", "enable_thinking": {thinking}, "max_tokens": 9"#);
        read_items(&format!(r#"{{{asked}, "messages": [], "check": {check}}}"#)).unwrap().remove(0)
    }

    fn reply(reasoning: &str, content: &str) -> Reply {
        Reply { reasoning: reasoning.into(), content: content.into(), ..Reply::default() }
    }

    #[test]
    fn replies_are_judged_by_their_check() {
        let check = |check: &str, content: &str, expected: bool| {
            assert_eq!(
                item(check, false).is_right(&reply("", content), true),
                expected,
                "{check}, {content:?}"
            );
        };
        let exact = r#"{"type": "exact", "expected": "ab"}"#;
        check(exact, "\nab ", true);
        check(exact, "abc", false);
        let contains = r#"{"type": "contains", "expected": "= 10"}"#;
        check(contains, "5 + 5 = 10.", true);
        check(contains, "50 + 50 = 100", false);
        check(contains, "= 100, = 10", true);
        let json = r#"{"type": "json", "expected": {"a": 1, "b": [true]}}"#;
        check(json, r#"{"b": [true], "a": 1.0}"#, true);
        check(json, r#"{"a": 1}"#, false);
        check(json, "no", false);
    }

    #[test]
    fn thinking_must_be_closed_and_not_empty() {
        let thinking = item(r#"{"type": "exact", "expected": "x"}"#, true);
        assert!(thinking.is_right(&reply("hm", "x"), true));
        assert!(!thinking.is_right(&reply("hm", "x"), false));
        assert!(!thinking.is_right(&reply(" ", "x"), true));
    }

    #[test]
    fn calls_must_be_the_only_one_and_exact() {
        let item = item(r#"{"type": "tool_call", "expected": {"name": "f", "arguments": {"n": 2}}}"#, false);
        let call = |name: &str, arguments: &str| text::Call {
            index: 0,
            name: name.into(),
            arguments: arguments.into(),
        };
        let with = |calls: Vec<text::Call>, content: &str| Reply { calls, ..reply("", content) };
        assert!(item.is_right(&with(vec![call("f", r#"{"n":2}"#)], "\n"), true));
        assert!(!item.is_right(&with(vec![call("g", r#"{"n":2}"#)], ""), true));
        assert!(!item.is_right(&with(vec![call("f", r#"{"n":3}"#)], ""), true));
        assert!(!item.is_right(&with(vec![call("f", r#"{"n":2}"#); 2], ""), true));
        assert!(!item.is_right(&with(vec![call("f", r#"{"n":2}"#)], "x"), true));
    }

    #[test]
    fn lines_that_are_no_items_are_named() {
        let check = r#""check": {"type": "exact", "expected": "x"}"#;
        for (lines, wanted) in [
            ("{}\nx", "line 1: check.type: exact, contains, json or tool_call expected"),
            (r#"{"check": {"type": "regex"}}"#, r#"json or tool_call expected, not "regex""#),
            (&format!("{{{check}}}"), "line 1: max_tokens: a number from 1 expected, not null"),
            (&format!(r#"{{{check}, "max_tokens": -1}}"#), "a number from 1 expected, not -1"),
            (&format!(r#"{{{check}, "max_tokens": 0}}"#), "a number from 1 expected, not 0"),
            (&format!(r#"{{{check}, "max_tokens": 1}}"#), "line 1: id: text expected"),
        ] {
            let error = read_items(lines).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
