//! Drawing from a row of logits in the fake: the rules of `docs/arithmetic.md` (logits to tokens) in plain
//! f64.

use model::{Draw, Drawn};

use super::join;

/// Draws from `logits`, `[vocabulary]`.
pub fn draw_row(logits: &[f32], draw: &Draw) -> Drawn {
    if logits.iter().any(|logit| !logit.is_finite()) {
        return Drawn { token: None, logprob: f32::NAN, top: Vec::new() };
    }
    let token = pick(logits, draw);
    let raw = log_softmax(logits);
    let mut best: Vec<u32> = Vec::new();
    if draw.top_logprobs > 0 {
        best = ranked(&raw);
        best.truncate(draw.top_logprobs as usize);
    }
    let top = best.into_iter().map(|id| (id, raw[id as usize] as f32)).collect();
    Drawn { token: Some(token), logprob: raw[token as usize] as f32, top }
}

fn pick(logits: &[f32], draw: &Draw) -> u32 {
    let mut scores: Vec<f32> = logits.to_vec();
    for adjust in &draw.adjust {
        let logit = &mut scores[adjust.token as usize];
        *logit = if *logit > 0.0 { *logit / adjust.repetition } else { *logit * adjust.repetition };
        *logit = *logit - adjust.frequency - adjust.presence + adjust.bias;
    }
    let allowed = |id: u32| {
        let bit = |mask: &Vec<u32>| mask[id as usize / 32] >> (id % 32) & 1 == 1;
        id < draw.vocabulary && draw.mask.as_ref().is_none_or(bit)
    };
    let order: Vec<u32> = (0..scores.len() as u32).filter(|&id| allowed(id)).collect();
    let value = |id: u32| f64::from(scores[id as usize]);
    if draw.temperature == 0.0 {
        return best(&order, value);
    }
    let heat = |id: u32| value(id) / f64::from(draw.temperature);
    let kept = cut(order, &heat, draw);
    best(&kept, |id| heat(id) + gumbel(draw, id))
}

/// The id of the highest score, ties to the lower id.
fn best(ids: &[u32], score: impl Fn(u32) -> f64) -> u32 {
    let first = *ids.first().expect("a mask allows at least one token");
    ids.iter().fold(first, |best, &id| if score(id) > score(best) { id } else { best })
}

/// Top-k, then top-p, then min-p.
fn cut(mut order: Vec<u32>, heat: &impl Fn(u32) -> f64, draw: &Draw) -> Vec<u32> {
    if draw.top_k == 0 && draw.top_p >= 1.0 && draw.min_p <= 0.0 {
        return order;
    }
    order.sort_by(|&a, &b| heat(b).total_cmp(&heat(a)).then(a.cmp(&b)));
    if draw.top_k > 0 {
        order.truncate(draw.top_k as usize);
    }
    let weight = |id: u32| (heat(id) - heat(order[0])).exp();
    let total: f64 = order.iter().map(|&id| weight(id)).sum();
    let mut sum = 0.0;
    let mut kept = 0;
    while kept < order.len() && (kept == 0 || sum < f64::from(draw.top_p) * total) {
        sum += weight(order[kept]);
        kept += 1;
    }
    let kept = order[..kept].iter().take_while(|&&id| weight(id) >= f64::from(draw.min_p));
    kept.copied().collect()
}

/// Keyed noise of one token: (seed, choice, position, token).
fn gumbel(draw: &Draw, token: u32) -> f64 {
    let key = join(join(draw.seed, u64::from(draw.choice)), draw.position);
    let bits = join(key, u64::from(token)) >> 41;
    -(-((bits as f64 + 0.5) / (1u64 << 23) as f64).ln()).ln()
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - top).exp()).sum();
    logits.iter().map(|&logit| f64::from(logit - top) - sum.ln()).collect()
}

fn ranked(scores: &[f64]) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..scores.len() as u32).collect();
    ids.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]).then(a.cmp(&b)));
    ids
}
