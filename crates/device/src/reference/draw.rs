//! Logits to tokens in float64 (`docs/arithmetic.md`, logits to tokens).

use super::{Result, below, failed, moe::best_first};
use crate::{Adjust, Draw, Drawn};

const STAGE: &str = "draw";

/// A token that may still be drawn, with `z = logit / temperature`.
#[derive(Clone, Copy)]
struct Candidate {
    token: u32,
    z: f64,
}

pub(super) fn draw(logits: &[f64], draw: &Draw) -> Result<Drawn> {
    if logits.iter().any(|logit| !logit.is_finite()) {
        return Ok(Drawn { token: None, logprob: f32::NAN, top: Vec::new() });
    }
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let log_sum = logits.iter().map(|logit| (logit - max).exp()).sum::<f64>().ln();
    let logprob = |token: usize| ((logits[token] - max) - log_sum) as f32;
    let reported = match draw.top_logprobs as usize {
        0 => Vec::new(),
        count => best_first(logits, count),
    };
    let candidates = candidates(logits, draw)?;
    let greedy = draw.temperature == 0.0;
    let kept = if greedy { candidates } else { cut(candidates, draw) };
    let score = |c: &Candidate| if greedy { c.z } else { c.z + gumbel(draw, c.token) };
    let Some(best) = argmax(kept.iter().map(|c| (c.token, score(c)))) else {
        return Err(failed(STAGE, "no token may be drawn: the mask is empty"));
    };
    let top = reported.into_iter().map(|token| (token as u32, logprob(token))).collect();
    Ok(Drawn { token: Some(best), logprob: logprob(best as usize), top })
}

/// Highest score, ties to the lower id.
fn argmax(scores: impl Iterator<Item = (u32, f64)>) -> Option<u32> {
    let better = |best: (u32, f64), next: (u32, f64)| {
        if next.1 > best.1 || (next.1 == best.1 && next.0 < best.0) { next } else { best }
    };
    scores.reduce(better).map(|(token, _)| token)
}

/// Penalties and bias, mask and vocabulary limit, temperature.
fn candidates(logits: &[f64], draw: &Draw) -> Result<Vec<Candidate>> {
    let mut logits = logits.to_vec();
    for change in &draw.adjust {
        below(STAGE, "token to adjust", change.token as usize, logits.len())?;
        adjust(&mut logits[change.token as usize], change);
    }
    let temperature = if draw.temperature == 0.0 { 1.0 } else { draw.temperature as f64 };
    logits.truncate(draw.vocabulary as usize);
    let allowed = |token: &usize| match &draw.mask {
        None => true,
        Some(mask) => mask.get(token / 32).is_some_and(|word| word >> (token % 32) & 1 == 1),
    };
    let tokens = (0..logits.len()).filter(allowed);
    Ok(tokens.map(|token| Candidate { token: token as u32, z: logits[token] / temperature }).collect())
}

fn adjust(logit: &mut f64, change: &Adjust) {
    let repetition = change.repetition as f64;
    *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
    *logit -= change.frequency as f64;
    *logit -= change.presence as f64;
    *logit += change.bias as f64;
}

/// Top-k, then top-p, then min-p, best first by (z, lower id).
fn cut(mut kept: Vec<Candidate>, draw: &Draw) -> Vec<Candidate> {
    if draw.top_k == 0 && draw.top_p >= 1.0 && draw.min_p <= 0.0 {
        return kept;
    }
    kept.sort_unstable_by(|a, b| b.z.total_cmp(&a.z).then(a.token.cmp(&b.token)));
    if draw.top_k > 0 {
        kept.truncate(draw.top_k as usize);
    }
    let Some(best) = kept.first().map(|best| best.z) else { return kept };
    let weight = |c: &Candidate| (c.z - best).exp();
    if draw.top_p < 1.0 {
        let enough = draw.top_p as f64 * kept.iter().map(weight).sum::<f64>();
        let mut sum = 0.0;
        let reached = kept.iter().position(|c| {
            sum += weight(c);
            sum >= enough
        });
        kept.truncate(reached.map_or(kept.len(), |last| last + 1));
    }
    kept.retain(|c| weight(c) >= draw.min_p as f64);
    kept
}

/// The keyed noise of one token.
fn gumbel(draw: &Draw, token: u32) -> f64 {
    let (seed, position) = (draw.seed, draw.position);
    let counter = [token, position as u32, (position >> 32) as u32, draw.choice];
    let bits = philox(counter, [seed as u32, (seed >> 32) as u32])[0] >> 9;
    let u = (bits as f64 + 0.5) / (1u32 << 23) as f64;
    -(-u.ln()).ln()
}

/// Philox-4x32 with 10 rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3). Written a second
/// time here, apart from the CPU device's, so that each judges the other.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let even = counter[0] as u64 * 0xd251_1f53;
        let odd = counter[2] as u64 * 0xcd9e_8d57;
        counter = [
            (odd >> 32) as u32 ^ counter[1] ^ key[0],
            odd as u32,
            (even >> 32) as u32 ^ counter[3] ^ key[1],
            even as u32,
        ];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> Draw {
        Draw { seed: 7, ..Draw::greedy(0, 3, 6) }
    }

    fn check(logits: &[f64], ask: &Draw) -> Option<u32> {
        draw(logits, ask).expect("a token may be drawn").token
    }

    #[test]
    fn the_generator_gives_its_published_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = u32::MAX;
        assert_eq!(philox([ones; 4], [ones; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let expected = [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1];
        assert_eq!(philox(counter, [0xa409_3822, 0x299f_31d0]), expected);
    }

    #[test]
    fn greedy_takes_the_highest_allowed_and_the_lower_of_equals() {
        let logits = [1.0, 3.0, 3.0, -1.0, 2.5, 2.0, 9.0];
        assert_eq!(check(&logits, &plain()), Some(1));
        assert_eq!(check(&logits, &Draw { mask: Some(vec![0b111_1101]), ..plain() }), Some(2));
        assert_eq!(check(&logits, &Draw { vocabulary: 1, ..plain() }), Some(0));
        assert!(draw(&logits, &Draw { mask: Some(vec![0]), ..plain() }).is_err());
        let change = Adjust { token: 3, repetition: 2.0, frequency: 0.5, presence: 0.25, bias: 6.0 };
        assert_eq!(check(&logits, &Draw { adjust: vec![change], ..plain() }), Some(3));
        let change = Adjust { bias: 5.75, ..change };
        assert_eq!(check(&logits, &Draw { adjust: vec![change], ..plain() }), Some(1));
    }

    #[test]
    fn cuts_keep_the_documented_sets() {
        let logits = [0.5f64, 0.25, 0.125, 0.0625, 0.03125, 0.03125].map(f64::ln);
        let kept = |ask: Draw| {
            let kept = cut(candidates(&logits, &ask).expect("valid"), &ask);
            kept.iter().map(|c| c.token).collect::<Vec<_>>()
        };
        let warm = || Draw { temperature: 1.0, ..plain() };
        assert_eq!(kept(Draw { top_k: 5, ..warm() }), [0, 1, 2, 3, 4]);
        assert_eq!(kept(Draw { top_p: 0.74, ..warm() }), [0, 1]);
        assert_eq!(kept(Draw { top_p: 0.76, ..warm() }), [0, 1, 2]);
        assert_eq!(kept(Draw { top_k: 2, top_p: 0.65, ..warm() }), [0]);
        assert_eq!(kept(Draw { min_p: 0.2, ..warm() }), [0, 1, 2]);
        assert_eq!(kept(warm()), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn draws_follow_the_distribution_and_their_keys() {
        let logits = [0.5f64, 0.25, 0.125, 0.125].map(f64::ln);
        let ask = |position| Draw { temperature: 1.0, vocabulary: 4, position, ..plain() };
        let mut counts = [0usize; 4];
        for position in 0..20_000 {
            counts[check(&logits, &ask(position)).expect("finite") as usize] += 1;
        }
        for (count, expected) in counts.into_iter().zip([10_000.0, 5_000.0, 2_500.0, 2_500.0f64]) {
            assert!((count as f64 - expected).abs() < 5.0 * expected.sqrt(), "{counts:?}");
        }
        let stream = |change: fn(&mut Draw)| {
            let draw_at = |position| {
                let mut ask = ask(position);
                change(&mut ask);
                check(&logits, &ask)
            };
            (0..64).map(draw_at).collect::<Vec<_>>()
        };
        let base = stream(|_| ());
        assert_eq!(base, stream(|_| ()));
        assert_ne!(base, stream(|ask| ask.choice = 1));
        assert_ne!(base, stream(|ask| ask.seed = 8));
        assert_ne!(base, stream(|ask| ask.seed = 7 + (1 << 32)));
        assert_ne!(base, stream(|ask| ask.position += 1 << 32));
    }

    #[test]
    fn log_probabilities_are_of_the_raw_row() {
        let logits = [1.0, 2.0, 2.0, 0.0];
        let ask = Draw { temperature: 0.5, vocabulary: 1, top_logprobs: 3, ..plain() };
        let drawn = draw(&logits, &ask).expect("valid");
        let sum: f64 = logits.iter().map(|x| x.exp()).sum();
        assert_eq!(drawn.token, Some(0));
        assert!((drawn.logprob as f64 - (1.0 - sum.ln())).abs() < 1e-6);
        assert_eq!(drawn.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2, 0]);
        assert_eq!(drawn.top[2].1, drawn.logprob);
    }

    #[test]
    fn rows_that_are_not_finite_give_no_token() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert_eq!(check(&[0.0, bad, 1.0], &plain()), None);
        }
    }
}
