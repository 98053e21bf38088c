//! Where a reply stands in a grammar.

use std::sync::Arc;

/// A compiled constraint. [`Self::matcher`] stands at its beginning.
#[derive(Clone)]
pub struct Grammar {
    start: llguidance::Matcher,
    /// The id that stands for the end, one past the tokenizer's own.
    end: u32,
    end_ids: Arc<[u32]>,
    loosened: Arc<[Loosened]>,
}

/// A condition on a function's arguments that is not enforced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loosened {
    /// Place of the function among those that may be called.
    pub tool: usize,
    /// JSON pointer into its schema; empty if nothing of it is enforced.
    pub pointer: String,
}

impl Grammar {
    pub(super) fn new(start: llguidance::Matcher, end: u32, end_ids: Arc<[u32]>) -> Self {
        Self { start, end, end_ids, loosened: Arc::new([]) }
    }

    pub(super) fn with_loosened(self, loosened: Vec<Loosened>) -> Self {
        Self { loosened: loosened.into(), ..self }
    }

    /// What was left out of the schemas of functions that are not strict.
    pub fn loosened(&self) -> &[Loosened] {
        &self.loosened
    }

    /// A matcher before the first token.
    pub fn matcher(&self) -> Matcher {
        Matcher { at: self.start.deep_clone(), grammar: self.clone(), tokens: Vec::new(), ended: 0 }
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Grammar")
    }
}

/// A token that the grammar does not allow where the matcher stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("token {token} is not allowed after {position} tokens")]
pub struct NotAllowed {
    /// The token.
    pub token: u32,
    /// Tokens before it.
    pub position: usize,
}

/// A place in a grammar: after some tokens, at first after none. Answers depend on those tokens alone. A
/// clone is independent and shares what was worked out so far.
#[derive(Clone)]
pub struct Matcher {
    at: llguidance::Matcher,
    grammar: Grammar,
    /// Tokens so far, without end tokens.
    tokens: Vec<u32>,
    /// End tokens so far.
    ended: usize,
}

impl Matcher {
    /// Sets the bits of the tokens that may follow, one per id, lowest bit first, and says whether there are
    /// any. `bits` comes zeroed; ids beyond it are left out. End ids may follow where the reply may end, and
    /// after one another.
    pub fn allowed(&mut self, bits: &mut [u32]) -> bool {
        let mut may_end = self.ended > 0;
        let mut any = false;
        if !may_end {
            let Ok(set) = self.at.compute_mask_or_eos() else { return false };
            let end = self.grammar.end as usize;
            may_end = set.get(end);
            for (word, (bits, &allowed)) in bits.iter_mut().zip(set.as_slice()).enumerate() {
                let is_last = word == end / 32;
                *bits |= if is_last { allowed & !(1 << (end % 32)) } else { allowed };
                any |= *bits != 0;
            }
        }
        if may_end {
            for &id in self.grammar.end_ids.iter() {
                if let Some(word) = bits.get_mut(id as usize / 32) {
                    *word |= 1 << (id % 32);
                    any = true;
                }
            }
        }
        any
    }

    /// Goes on by a token. If it is not allowed, the matcher stays where it is.
    pub fn advance(&mut self, token: u32) -> Result<(), NotAllowed> {
        let refused = NotAllowed { token, position: self.tokens.len() + self.ended };
        if self.grammar.end_ids.contains(&token) && self.can_end() {
            self.ended += 1;
            return Ok(());
        }
        if self.ended > 0 || token >= self.grammar.end {
            return Err(refused);
        }
        match self.at.try_consume_tokens(&[token]) {
            Ok(1) => {
                self.tokens.push(token);
                Ok(())
            }
            Ok(_) => Err(refused),
            Err(_) => {
                self.restore();
                Err(refused)
            }
        }
    }

    /// Takes back the last `count` tokens; more than there are takes back all.
    pub fn rollback(&mut self, count: usize) {
        let ends = count.min(self.ended);
        self.ended -= ends;
        let count = (count - ends).min(self.tokens.len());
        self.tokens.truncate(self.tokens.len() - count);
        if count > 0 && self.at.rollback(count).is_err() {
            self.restore();
        }
    }

    /// Whether the reply may end here.
    pub fn can_end(&mut self) -> bool {
        self.ended > 0 || self.at.is_accepting().unwrap_or(false)
    }

    /// A matcher that met an error stays there; this one goes to the same place from the beginning.
    fn restore(&mut self) {
        self.at = self.grammar.start.deep_clone();
        for &token in &self.tokens {
            if self.at.consume_token(token).is_err() {
                return;
            }
        }
    }
}
