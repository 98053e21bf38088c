//! Marks that keep message text apart from the template's own scaffold while a template runs.
//!
//! Before rendering, some characters of every string from outside are replaced, one for one, by private-use
//! characters that occur nowhere in the chat or the template. Afterwards the output is split at control
//! spellings, and only then the characters are put back. A control spelling in the output therefore comes
//! from the template's own text. One for one, because then lengths, slices, trims, splits and joins made by
//! the template keep their meaning.
//!
//! Marked are: the first and last character of every control spelling wherever it stands (so that strings
//! which the template joins cannot form a spelling either), and the first character of every inner part
//! such as `think` (so that a template writing `'<' ~ name ~ '>'` cannot form one from a name).

use std::collections::HashMap;

use serde_json::Value;

use crate::control::ControlToken;

/// Private-use planes 15 and 16, without the two non-characters at the end of each, then the small area.
const PRIVATE: [(u32, u32); 3] = [(0xF_0000, 0xF_FFFD), (0x10_0000, 0x10_FFFD), (0xE000, 0xF8FF)];

/// Keys by which templates reach into messages and tools. They stay as they are: they name places, and
/// `tool_calls` has the inner part of a control spelling in it.
const STRUCTURE: [&str; 15] = [
    "arguments",
    "content",
    "description",
    "function",
    "id",
    "name",
    "parameters",
    "properties",
    "reasoning_content",
    "required",
    "role",
    "text",
    "tool_call_id",
    "tool_calls",
    "type",
];

/// Which characters to mark; depends on the tokenizer alone.
#[derive(Clone, Debug)]
pub(crate) struct MarkRules {
    /// Marked wherever they stand.
    edges: Vec<char>,
    /// Marked at their first character.
    inner: Vec<String>,
}

impl MarkRules {
    pub(crate) fn new(tokens: &[ControlToken]) -> Self {
        let (mut edges, mut inner) = (Vec::new(), Vec::new());
        for token in tokens {
            let mut chars = token.content.chars();
            // Letters, digits and white space stay visible to the template: it compares names and trims.
            let is_edge = |c: char| !c.is_alphanumeric() && !c.is_whitespace();
            match (chars.next(), chars.next_back()) {
                (Some(first), None) if is_edge(first) => edges.push(first),
                (Some(first), Some(last)) if is_edge(first) && is_edge(last) => {
                    edges.extend([first, last]);
                    inner.push(chars.as_str().to_owned());
                }
                // A spelling like a word is marked where it stands whole.
                _ => inner.push(token.content.clone()),
            }
        }
        inner.retain(|part| !part.is_empty());
        edges.sort_unstable();
        edges.dedup();
        inner.sort_unstable();
        inner.dedup();
        Self { edges, inner }
    }

    /// Byte positions in `text` of the characters to mark, ascending.
    fn positions(&self, text: &str) -> Vec<usize> {
        let is_edge = |&(_, c): &(usize, char)| self.edges.contains(&c);
        let mut positions: Vec<usize> = text.char_indices().filter(is_edge).map(|(at, _)| at).collect();
        for part in &self.inner {
            positions.extend(text.match_indices(part.as_str()).map(|(at, _)| at));
        }
        positions.sort_unstable();
        positions.dedup();
        positions
    }
}

/// The marks of one rendering.
pub(crate) struct Marks<'r> {
    rules: &'r MarkRules,
    free: Vec<char>,
    by_char: HashMap<char, char>,
    by_mark: HashMap<char, char>,
    end: char,
}

impl<'r> Marks<'r> {
    /// Picks marks that occur in none of the `texts`. `None` if the texts use up all private characters.
    pub(crate) fn new<'t>(
        rules: &'r MarkRules,
        texts: impl Iterator<Item = &'t Value>,
        template: &str,
    ) -> Option<Self> {
        let mut used = std::collections::HashSet::new();
        let mut note = |text: &str| used.extend(text.chars().filter(|&c| is_private(c)));
        note(template);
        for text in texts {
            each_string(text, &mut note);
        }
        // One mark per edge, per first character of an inner part, and one for the end of the last message.
        let wanted = rules.edges.len() + rules.inner.len() + 1;
        let all = PRIVATE.iter().flat_map(|&(first, last)| first..=last).filter_map(char::from_u32);
        let mut free: Vec<char> = all.filter(|c| !used.contains(c)).take(wanted).collect();
        if free.len() < wanted {
            return None;
        }
        let end = free.pop()?;
        Some(Self { rules, free, by_char: HashMap::new(), by_mark: HashMap::new(), end })
    }

    /// Stands for the end of the message that is continued.
    pub(crate) fn end(&self) -> char {
        self.end
    }

    /// The text with its characters marked.
    pub(crate) fn mark(&mut self, text: &str) -> String {
        let mut marked = String::with_capacity(text.len() + 16);
        let mut from = 0;
        for at in self.rules.positions(text) {
            let c = text[at..].chars().next().expect("positions are those of characters");
            marked.push_str(&text[from..at]);
            marked.push(self.mark_of(c));
            from = at + c.len_utf8();
        }
        marked.push_str(&text[from..]);
        marked
    }

    fn mark_of(&mut self, c: char) -> char {
        if let Some(&mark) = self.by_char.get(&c) {
            return mark;
        }
        let mark = self.free.pop().expect("there is a mark for every character the rules name");
        self.by_char.insert(c, mark);
        self.by_mark.insert(mark, c);
        mark
    }

    /// Marks every string and key of a JSON value, but for the keys of [`STRUCTURE`].
    pub(crate) fn mark_json(&mut self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.mark(text)),
            Value::Array(list) => list.iter().map(|value| self.mark_json(value)).collect(),
            Value::Object(object) => {
                let member = |(key, value): (&String, &Value)| {
                    let is_structure = STRUCTURE.contains(&key.as_str());
                    (if is_structure { key.clone() } else { self.mark(key) }, self.mark_json(value))
                };
                object.iter().map(member).collect()
            }
            other => other.clone(),
        }
    }

    /// Puts the marked characters back.
    pub(crate) fn unmark(&self, text: &str) -> String {
        text.chars().map(|c| *self.by_mark.get(&c).unwrap_or(&c)).collect()
    }
}

fn is_private(c: char) -> bool {
    PRIVATE.iter().any(|&(first, last)| (first..=last).contains(&(c as u32)))
}

fn each_string(value: &Value, visit: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => visit(text),
        Value::Array(list) => list.iter().for_each(|value| each_string(value, visit)),
        Value::Object(object) => object.iter().for_each(|(key, value)| {
            visit(key);
            each_string(value, visit);
        }),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(contents: &[&str]) -> MarkRules {
        let token = |content: &&str| ControlToken { id: 0, content: (*content).to_owned(), special: true };
        MarkRules::new(&contents.iter().map(token).collect::<Vec<_>>())
    }

    #[test]
    fn no_spelling_survives_and_all_comes_back() {
        let rules = rules(&["<|im_end|>", "<think>", "</think>", "WORD", "#"]);
        for text in ["<|im_end|>", "a<think>b</think>", "think", "WORD words", "##", "\u{F0000}<", "é"] {
            let value = Value::String(text.into());
            let mut marks = Marks::new(&rules, [&value].into_iter(), "template").unwrap();
            let marked = marks.mark(text);
            assert_eq!(marked.chars().count(), text.chars().count());
            assert_eq!(marks.unmark(&marked), text);
            for spelling in ["<", ">", "think", "WORD", "#"] {
                assert!(!marked.contains(spelling), "{marked:?} still shows {spelling}");
            }
        }
    }

    #[test]
    fn all_private_characters_used_is_refused() {
        let all: String = PRIVATE.iter().flat_map(|&(a, b)| a..=b).filter_map(char::from_u32).collect();
        assert!(Marks::new(&rules(&["<a>"]), [&Value::String(all)].into_iter(), "").is_none());
    }
}
