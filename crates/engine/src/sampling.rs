//! From a request's sampling to the draws of its rows.
//!
//! The history that penalties count belongs to a row's own path: the tokens of the sequence, then the drafts
//! between the committed state and the row. A drafted row then gets the list that its serial twin would get.

use model::{Adjust, Draw};

use crate::request::{Request, Sampling};

/// What penalties must know of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Seen {
    token: u32,
    /// Occurs in prompt or reply.
    present: bool,
    /// Times generated.
    count: u32,
    bias: f32,
}

/// Counts of a sequence's tokens, kept only where a penalty or a bias asks for them.
#[derive(Clone, Debug)]
pub(crate) struct Penalties {
    repetition: f32,
    frequency: f32,
    presence: f32,
    counts: bool,
    /// By token, ascending.
    seen: Vec<Seen>,
}

impl Penalties {
    pub(crate) fn new(sampling: &Sampling, prompt: &[u32]) -> Self {
        let repeats = sampling.repetition != 1.0;
        let mut seen: Vec<Seen> = Vec::new();
        if repeats {
            let mut tokens = prompt.to_vec();
            tokens.sort_unstable();
            tokens.dedup();
            seen.extend(tokens.into_iter().map(|token| Seen { token, present: true, count: 0, bias: 0.0 }));
        }
        for &(token, bias) in &sampling.logit_bias {
            // The last of several entries for a token counts, as in a JSON object.
            slot_of(&mut seen, token).bias = bias;
        }
        Self {
            repetition: sampling.repetition,
            frequency: sampling.frequency,
            presence: sampling.presence,
            counts: repeats || sampling.frequency != 0.0 || sampling.presence != 0.0,
            seen,
        }
    }

    /// Counts a generated token.
    pub(crate) fn push(&mut self, token: u32) {
        if self.counts {
            count(&mut self.seen, token);
        }
    }

    /// The adjustments of a row whose path adds `drafts` to the sequence.
    pub(crate) fn adjust(&self, drafts: &[u32]) -> Vec<Adjust> {
        if !self.counts || drafts.is_empty() {
            return self.seen.iter().map(|seen| self.adjustment(seen)).collect();
        }
        let mut seen = self.seen.clone();
        for &token in drafts {
            count(&mut seen, token);
        }
        seen.iter().map(|seen| self.adjustment(seen)).collect()
    }

    fn adjustment(&self, seen: &Seen) -> Adjust {
        Adjust {
            token: seen.token,
            repetition: if seen.present { self.repetition } else { 1.0 },
            frequency: self.frequency * seen.count as f32,
            presence: if seen.count > 0 { self.presence } else { 0.0 },
            bias: seen.bias,
        }
    }
}

fn count(seen: &mut Vec<Seen>, token: u32) {
    let entry = slot_of(seen, token);
    entry.present = true;
    entry.count += 1;
}

fn slot_of(seen: &mut Vec<Seen>, token: u32) -> &mut Seen {
    let at = match seen.binary_search_by_key(&token, |entry| entry.token) {
        Ok(at) => at,
        Err(at) => {
            seen.insert(at, Seen { token, present: false, count: 0, bias: 0.0 });
            at
        }
    };
    &mut seen[at]
}

/// The draw of the token at absolute position `position` from logits row `row`.
pub(crate) fn draw(
    request: &Request,
    choice: u32,
    row: usize,
    position: usize,
    vocabulary: usize,
    adjust: Vec<Adjust>,
    mask: Option<Vec<u32>>,
) -> Draw {
    let sampling = &request.sampling;
    Draw {
        row,
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        seed: sampling.seed,
        choice,
        position: position as u64,
        vocabulary: vocabulary as u32,
        adjust,
        mask,
        top_logprobs: request.logprobs.unwrap_or(0),
    }
}

/// A draw that can only give `token`: its log-probability is that of the raw distribution, by the same code
/// that scores generated tokens.
pub(crate) fn score(row: usize, token: u32, top: u32, vocabulary: usize) -> Draw {
    let mut mask = vec![0u32; vocabulary.div_ceil(32)];
    mask[token as usize / 32] = 1 << (token % 32);
    Draw { mask: Some(mask), top_logprobs: top, ..Draw::greedy(row, 0, vocabulary as u32) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(sampling: Sampling, prompt: &[u32], generated: &[u32], drafts: &[u32], expected: &[Adjust]) {
        let mut penalties = Penalties::new(&sampling, prompt);
        generated.iter().for_each(|&token| penalties.push(token));
        assert_eq!(penalties.adjust(drafts), expected);
        let mut serial = penalties.clone();
        drafts.iter().for_each(|&token| serial.push(token));
        assert_eq!(serial.adjust(&[]), expected, "drafted tokens count as generated ones");
    }

    fn adjust(token: u32, repetition: f32, frequency: f32, presence: f32, bias: f32) -> Adjust {
        Adjust { token, repetition, frequency, presence, bias }
    }

    #[test]
    fn nothing_asked_is_nothing_adjusted() {
        check(Sampling::default(), &[1, 2], &[3], &[4], &[]);
    }

    #[test]
    fn presence_and_frequency_count_generated_tokens_only() {
        let sampling = Sampling { presence: 0.5, frequency: 0.25, ..Sampling::default() };
        check(
            sampling,
            &[1, 2],
            &[3, 3],
            &[3, 9],
            &[adjust(3, 1.0, 0.75, 0.5, 0.0), adjust(9, 1.0, 0.25, 0.5, 0.0)],
        );
    }

    #[test]
    fn repetition_counts_the_prompt_and_bias_stands_alone() {
        let sampling =
            Sampling { repetition: 1.5, logit_bias: vec![(8, 3.0), (2, -1.0)], ..Sampling::default() };
        let expected =
            [adjust(2, 1.5, 0.0, 0.0, -1.0), adjust(5, 1.5, 0.0, 0.0, 0.0), adjust(8, 1.0, 0.0, 0.0, 3.0)];
        check(sampling, &[5, 2, 5], &[], &[], &expected);
    }
}
