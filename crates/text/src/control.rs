//! Control tokens: the added tokens of a tokenizer, whose spelling stands for one id.
//!
//! Everything the tokenizer file lists under `added_tokens` counts, whether marked special or not:
//! `<think>` and `<tool_call>` steer the model as much as `<|im_start|>` does.

/// One control token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlToken {
    /// Its id.
    pub id: u32,
    /// Its spelling.
    pub content: String,
    /// Marked special in the tokenizer file: never part of a reply's text.
    pub special: bool,
}

/// A stretch of text with control spellings told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stretch<'a> {
    /// Text without any control spelling.
    Plain(&'a str),
    /// One control token: its id and spelling.
    Control(u32, &'a str),
}

/// All control tokens of a tokenizer, with a matcher for their spellings.
#[derive(Clone, Debug)]
pub(crate) struct ControlTokens {
    /// Longest first, so that the first hit at a position is the longest.
    tokens: Vec<ControlToken>,
    /// Whether some spelling begins with this byte.
    begins: [bool; 256],
}

impl ControlTokens {
    pub(crate) fn new(mut tokens: Vec<ControlToken>) -> Self {
        tokens.retain(|token| !token.content.is_empty());
        tokens.sort_by(|a, b| b.content.len().cmp(&a.content.len()).then(a.id.cmp(&b.id)));
        let mut begins = [false; 256];
        for token in &tokens {
            begins[usize::from(token.content.as_bytes()[0])] = true;
        }
        Self { tokens, begins }
    }

    pub(crate) fn all(&self) -> &[ControlToken] {
        &self.tokens
    }

    pub(crate) fn by_content(&self, content: &str) -> Option<&ControlToken> {
        self.tokens.iter().find(|token| token.content == content)
    }

    /// Splits at control spellings, leftmost first and longest at a position.
    pub(crate) fn split<'a>(&self, text: &'a str) -> Vec<Stretch<'a>> {
        let bytes = text.as_bytes();
        let mut stretches = Vec::new();
        let (mut start, mut at) = (0, 0);
        while at < bytes.len() {
            let hit = if self.begins[usize::from(bytes[at])] {
                self.tokens.iter().find(|token| bytes[at..].starts_with(token.content.as_bytes()))
            } else {
                None
            };
            let Some(token) = hit else {
                at += 1;
                continue;
            };
            if start < at {
                stretches.push(Stretch::Plain(&text[start..at]));
            }
            let end = at + token.content.len();
            stretches.push(Stretch::Control(token.id, &text[at..end]));
            (start, at) = (end, end);
        }
        if start < bytes.len() {
            stretches.push(Stretch::Plain(&text[start..]));
        }
        stretches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftmost_then_longest() {
        let token = |id, content: &str| ControlToken { id, content: content.into(), special: false };
        let tokens = ControlTokens::new(vec![token(1, "<a>"), token(2, "<a>b"), token(3, "b<")]);
        let split = tokens.split("x<a>b<a><a");
        assert_eq!(
            split,
            [
                Stretch::Plain("x"),
                Stretch::Control(2, "<a>b"),
                Stretch::Control(1, "<a>"),
                Stretch::Plain("<a")
            ]
        );
        assert!(tokens.split("").is_empty());
        assert_eq!(tokens.split("é日"), [Stretch::Plain("é日")]);
    }
}
