//! Token ids to text, one id at a time.
//!
//! A character may be spread over several tokens. Bytes are held back until the character is whole or can
//! no longer become one, so no delta splits a character and the joined deltas equal the one-shot decode.

use crate::tokenizer::{Specials, Tokenizer};

/// Longest run of bytes held back: an unfinished UTF-8 character.
pub const HELD_BYTES_MAX: usize = 3;

/// Incremental decoder of one reply.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    specials: Specials,
    /// Beginning of a character that is not whole yet.
    held: Vec<u8>,
}

/// What one id added to the text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delta {
    /// Whole characters made by ordinary tokens.
    pub text: String,
    /// The spelling of a control token, which comes after `text`.
    pub control: Option<String>,
}

impl Detokenizer {
    /// A decoder at the start of a reply.
    pub fn new(tokenizer: &Tokenizer, specials: Specials) -> Self {
        Self { tokenizer: tokenizer.clone(), specials, held: Vec::new() }
    }

    /// Text completed by this id; empty while a character is unfinished.
    pub fn push(&mut self, id: u32) -> String {
        let Delta { mut text, control } = self.push_apart(id);
        text.push_str(control.as_deref().unwrap_or_default());
        text
    }

    /// As [`Self::push`], with a control token's spelling kept apart from ordinary text.
    pub fn push_apart(&mut self, id: u32) -> Delta {
        if self.specials == Specials::Skip && self.tokenizer.is_special(id) {
            return Delta::default();
        }
        if let Some(content) = self.tokenizer.control_content(id) {
            let control = Some(content.to_owned());
            return Delta { text: self.finish(), control };
        }
        self.held.extend_from_slice(self.tokenizer.token_bytes(id).unwrap_or_default());
        Delta { text: self.take_whole(), control: None }
    }

    /// The rest at the end of the reply: U+FFFD if a character stayed unfinished, else nothing.
    pub fn finish(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        rest
    }

    /// Moves all decided characters out of `held`; bytes that can never be part of one become U+FFFD.
    fn take_whole(&mut self) -> String {
        let mut text = String::with_capacity(self.held.len());
        let mut rest = self.held.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(whole) => {
                    text.push_str(whole);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (whole, after) = rest.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(whole).expect("valid up to here"));
                    rest = after;
                    let Some(bad) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[bad..];
                }
            }
        }
        debug_assert!(rest.len() <= HELD_BYTES_MAX);
        self.held = rest.to_vec();
        text
    }
}
