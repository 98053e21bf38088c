//! What a request must answer, computed from its tokens alone: no slot, no page, no window, no schedule.

use std::collections::BTreeMap;

use model::{Adjust, Draw};

use super::{FakeConfig, History, draw_row, image_token};
use crate::event::{FinishReason, ReplyError, Score};
use crate::mask::Allowed;
use crate::request::Request;
use crate::sampling;

/// Tokens, their scores and the end of a choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Solo {
    /// The reply's tokens.
    pub tokens: Vec<u32>,
    /// Their log-probabilities, always computed.
    pub scores: Vec<Score>,
    /// Why it ends.
    pub reason: FinishReason,
}

/// The reply of a [`FakeModel`](super::FakeModel) to a choice of a request, one token after another.
pub fn solo(config: &FakeConfig, request: &Request, choice: u32, eos: &[u32]) -> Solo {
    let mut history = History::default();
    let mut tokens: Vec<u32> = Vec::new();
    let mut scores = Vec::new();
    let mut mask = request.mask.as_ref().map(|mask| mask.fork());
    for (index, &token) in request.prompt.iter().enumerate() {
        let within = request.pictures.iter().find(|span| (span.start..span.end()).contains(&index));
        let token = within.map_or(token, |span| image_token(&span.picture, index - span.start));
        history.push(token, request.rope(index), config.poison);
    }
    let vocabulary = config.spec.vocabulary;
    let limit = request.length_max(config.spec.context_max) - request.prompt.len();
    let finish = |tokens, scores, reason| Solo { tokens, scores, reason };
    while tokens.len() < limit {
        let position = request.prompt.len() + tokens.len();
        let mut bits = vec![0; vocabulary.div_ceil(32)];
        let bits = match mask.as_mut().map(|mask| mask.allowed(&mut bits)) {
            None | Some(Allowed::All) => None,
            Some(Allowed::Some) => Some(bits),
            Some(Allowed::None) => {
                return finish(
                    tokens,
                    scores,
                    FinishReason::Failed(ReplyError::ConstraintDeadEnd { position }),
                );
            }
        };
        let mut logits = Vec::new();
        history.logits(vocabulary, &mut logits);
        let drawn = draw_row(&logits, &draw(request, choice, position, vocabulary, &tokens, bits));
        let Some(token) = drawn.token else {
            return finish(tokens, scores, FinishReason::Failed(ReplyError::NumericalFault { position }));
        };
        scores.push(Score { token, logprob: drawn.logprob, top: drawn.top });
        history.push(token, request.rope(position), config.poison);
        tokens.push(token);
        if eos.contains(&token) && !request.sampling.ignore_eos {
            return finish(tokens, scores, FinishReason::Eos(token));
        }
        if request.sampling.stop_ids.contains(&token) {
            return finish(tokens, scores, FinishReason::Stop(token));
        }
        if let Some(mask) = &mut mask {
            mask.advance(token);
        }
    }
    finish(tokens, scores, FinishReason::Length)
}

fn draw(
    request: &Request,
    choice: u32,
    position: usize,
    vocabulary: usize,
    generated: &[u32],
    mask: Option<Vec<u32>>,
) -> Draw {
    let sampling = &request.sampling;
    let mut adjust: BTreeMap<u32, Adjust> = BTreeMap::new();
    let neutral = |token| Adjust { token, repetition: 1.0, frequency: 0.0, presence: 0.0, bias: 0.0 };
    for &token in request.prompt.iter().chain(generated) {
        adjust.entry(token).or_insert(neutral(token)).repetition = sampling.repetition;
    }
    for &token in generated {
        let count = generated.iter().filter(|&&other| other == token).count();
        let entry = adjust.entry(token).or_insert(neutral(token));
        entry.frequency = sampling.frequency * count as f32;
        entry.presence = sampling.presence;
    }
    for &(token, bias) in &sampling.logit_bias {
        adjust.entry(token).or_insert(neutral(token)).bias = bias;
    }
    sampling::draw(request, choice, 0, position, vocabulary, adjust.into_values().collect(), mask)
}
