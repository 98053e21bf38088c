//! E5 and E6: log-probabilities and draws depend on the row and the key alone.

use model::{Draw, Drawn, Logits, ModelError};

use crate::lane::{draw_at, greedy, sampled};
use crate::{Contract, Outcome, Runner, Tally};

/// Rows compared.
const ROWS: usize = 64;

/// A draw that can give `token` only: its log-probability is that of `token`.
fn only(token: u32, vocabulary: usize, row: usize, position: usize) -> Draw {
    let mut mask = vec![0u32; vocabulary.div_ceil(32)];
    mask[token as usize / 32] |= 1 << (token % 32);
    Draw { mask: Some(mask), top_logprobs: 20, ..draw_at(&greedy(), row, position) }
}

/// Tokens and log-probabilities as bits.
fn bits(drawn: &Drawn) -> (Option<u32>, u32, Vec<(u32, u32)>) {
    let top = drawn.top.iter().map(|(token, logprob)| (*token, logprob.to_bits())).collect();
    (drawn.token, drawn.logprob.to_bits(), top)
}

/// The log-probabilities of a text's tokens, scored as a prompt in chunks, are those that decoding token by
/// token gives, digit for digit.
pub fn scored(runner: &mut Runner<'_>, text: &[u32]) -> Result<Outcome, ModelError> {
    let mut tally = Tally::default();
    let vocabulary = runner.spec().vocabulary;
    let mut lanes = runner.lanes()?;
    let tokens = text.len().min(ROWS + 1);
    let mut decoded = Vec::with_capacity(tokens);
    for at in 0..tokens - 1 {
        runner.feed(&mut lanes[0], &text[at..=at], 1)?;
        decoded.push(bits(&runner.draw(&[only(text[at + 1], vocabulary, 0, at + 1)])?[0]));
    }
    for chunk in [tokens - 1, 9] {
        runner.clear(&mut lanes[1])?;
        for (part, expected) in text[..tokens - 1].chunks(chunk).zip(decoded.chunks(chunk)) {
            let start = lanes[1].length;
            runner.feed(&mut lanes[1], part, chunk)?;
            let draws: Vec<Draw> = (0..part.len())
                .map(|row| only(text[start + row + 1], vocabulary, row, start + row + 1))
                .collect();
            for (row, (found, expected)) in runner.draw(&draws)?.iter().zip(expected).enumerate() {
                let what =
                    || format!("chunks of {chunk}: log-probability of token {} differs", start + row + 1);
                tally.same(&bits(found), expected, what);
                tally.same(&found.logprob.is_finite(), &true, || {
                    format!("log-probability of token {} is not finite", start + row + 1)
                });
            }
        }
    }
    Ok(tally.outcome(Contract::Scored, "prompt against one-row steps"))
}

/// The same seed, choice and position draw the same token from a row, in any slot, row and company.
pub fn seeded(runner: &mut Runner<'_>, text: &[u32]) -> Result<Outcome, ModelError> {
    let mut tally = Tally::default();
    let mut lanes = runner.lanes()?;
    let like = |at: usize| Draw { choice: at as u32 % 3, top_logprobs: 3, ..sampled(100 + at as u64 % 2) };
    let rows = text.len().min(ROWS);
    let mut expected = Vec::with_capacity(rows);
    for at in 0..rows {
        runner.feed(&mut lanes[0], &text[at..=at], 1)?;
        expected.push(bits(&runner.draw(&[draw_at(&like(at), 0, at + 1)])?[0]));
    }
    let slots = lanes.len();
    for company in [2, 5].into_iter().filter(|company| *company <= slots) {
        for lane in &mut lanes {
            runner.clear(lane)?;
        }
        // Other sequences before and after the one that is looked at.
        let target = company / 2;
        let parts: Vec<&[u32]> =
            (0..company).map(|at| if at == target { &text[..rows] } else { &text[at..at + 3] }).collect();
        let windows: Vec<_> =
            lanes.iter().rev().zip(&parts).map(|(lane, part)| lane.chunk(part, Logits::All)).collect();
        runner.run(&windows)?;
        let first = 3 * target;
        let draws: Vec<Draw> = (0..rows).rev().map(|at| draw_at(&like(at), first + at, at + 1)).collect();
        let drawn = runner.draw(&draws)?;
        for (at, found) in drawn.iter().rev().enumerate() {
            let what = || format!("draw at {} in company of {company} differs", at + 1);
            tally.same(&bits(found), &expected[at], what);
            tally.same(&found.token.is_some(), &true, || format!("no draw at {}", at + 1));
        }
    }
    Ok(tally.outcome(Contract::Seeded, "draws in other rows, slots, company"))
}
