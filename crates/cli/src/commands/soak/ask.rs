//! What is asked: prompts short and long, one turn or two, whole or streamed, drawn from a seed.

use contracts::Random;
use serde_json::{Value, json};

/// Requests whose replies are computed alone before the load begins, the canary first.
pub(super) const KNOWN: usize = 9;
/// Most tokens of a reply.
const REPLY_MAX: usize = 64;
/// Words of a short prompt.
const SHORT: usize = 40;
/// Most words of a long prompt, where the context has room.
const LONG: usize = 1500;
/// Tokens of the context for each word of a long prompt: small vocabularies spell words out.
const TOKENS_A_WORD: usize = 8;

const WORDS: [&str; 24] = [
    "river", "seven", "blue", "under", "glass", "and", "winter", "count", "paper", "the", "slow", "green",
    "name", "stone", "after", "small", "light", "open", "house", "word", "left", "is", "morning", "north",
];

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is read to its end.
    Whole,
    /// The connection is closed after this many milliseconds without an answer: in the queue or the prompt.
    LeaveEarly(u64),
    /// The stream is left after this many lines.
    LeaveAfter(usize),
    /// It is wrong, and must be refused.
    Wrong,
}

/// One request.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    /// Its number among the known ones.
    pub(super) known: Option<usize>,
    /// The body of a chat completion.
    pub(super) body: Value,
    /// What becomes of it.
    pub(super) fate: Fate,
}

/// Draws requests.
#[derive(Clone, Debug)]
pub(super) struct Asks {
    random: Random,
    model: String,
    /// Words of the longest prompt.
    long: usize,
}

impl Asks {
    /// Requests for a model whose context has so many tokens.
    pub(super) fn new(seed: u64, model: &str, context: usize) -> Self {
        Self { random: Random(seed), model: model.to_owned(), long: LONG.min(context / TOKENS_A_WORD).max(1) }
    }

    /// The same with another seed.
    pub(super) fn reseeded(&self, seed: u64) -> Self {
        Self { random: Random(seed), ..self.clone() }
    }

    /// A known request: the same at every call with the same number and seed of the soak.
    pub(super) fn known(&self, number: usize, seed: u64) -> Ask {
        let mut asks = Self { random: Random(seed ^ ((number as u64 + 1) << 32)), ..self.clone() };
        let body = asks.body();
        Ask { known: Some(number), body, fate: Fate::Whole }
    }

    /// The next request: every fourth is a known one, every sixth is left, some are wrong.
    pub(super) fn next(&mut self, seed: u64) -> Ask {
        let mut ask = match self.random.below(4) {
            0 => self.known(self.random.clone().below(KNOWN), seed),
            _ => Ask { known: None, body: self.body(), fate: Fate::Whole },
        };
        let streams = self.random.below(2) == 0;
        ask.fate = match self.random.below(60) {
            0..5 => Fate::LeaveEarly(self.random.below(40) as u64 + 1),
            5..10 => Fate::LeaveAfter(self.random.below(40)),
            10 => Fate::Wrong,
            _ => Fate::Whole,
        };
        match ask.fate {
            Fate::LeaveAfter(_) => streamed(&mut ask.body),
            Fate::Wrong => ask.body["temperature"] = json!(-1),
            _ if streams => streamed(&mut ask.body),
            _ => {}
        }
        ask
    }

    fn words(&mut self, count: usize) -> String {
        let words: Vec<&str> = (0..count).map(|_| WORDS[self.random.below(WORDS.len())]).collect();
        words.join(" ")
    }

    fn question(&mut self) -> String {
        format!("What is {} + {}?", self.random.below(100), self.random.below(100))
    }

    fn body(&mut self) -> Value {
        let mut messages = Vec::new();
        if self.random.below(3) == 0 {
            messages.push(json!({"role": "system", "content": "Answer in a few words."}));
        }
        let count = match self.random.below(10) {
            0 => self.random.below(self.long) + 1,
            1..4 => self.random.below(SHORT.min(self.long)) + 1,
            _ => 0,
        };
        let opening = if count > 0 { self.words(count) } else { self.question() };
        messages.push(json!({"role": "user", "content": opening}));
        if self.random.below(3) == 0 {
            messages.push(json!({"role": "assistant", "content": "95"}));
            let question = self.question();
            messages.push(json!({"role": "user", "content": question}));
        }
        let temperature = if self.random.below(2) == 0 { 0.0 } else { 0.8 };
        let effort = if self.random.below(2) == 0 { "none" } else { "high" };
        json!({
            "model": self.model,
            "messages": messages,
            "temperature": temperature,
            "seed": self.random.below(1 << 30),
            "reasoning_effort": effort,
            "max_tokens": self.random.below(REPLY_MAX) + 1,
        })
    }
}

/// The same request as a stream with its usage.
fn streamed(body: &mut Value) {
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_says_all() {
        let make = |seed| Asks::new(seed, "m", 4096);
        let (mut one, mut other) = (make(5), make(5));
        let mut fates = [0; 4];
        for _ in 0..600 {
            let (one, other) = (one.next(5), other.next(5));
            assert_eq!((&one.body, one.fate, one.known), (&other.body, other.fate, other.known));
            fates[match one.fate {
                Fate::Whole => 0,
                Fate::LeaveEarly(_) => 1,
                Fate::LeaveAfter(_) => 2,
                Fate::Wrong => 3,
            }] += 1;
        }
        assert!(fates.iter().all(|count| *count > 0), "{fates:?}");
        assert_eq!(make(1).known(3, 9).body, make(2).known(3, 9).body);
        assert_ne!(make(1).known(3, 9).body, make(1).known(4, 9).body);
    }
}
