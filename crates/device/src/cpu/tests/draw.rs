//! Draws against a plain reading of the text.

use super::*;
use crate::{
    Adjust, Draw, Drawn,
    cpu::{
        math::{log, token_weight},
        philox,
    },
};

fn draw() -> Draw {
    Draw { temperature: 1.0, seed: 7, ..Draw::greedy(0, 0, u32::MAX) }
}

/// Order of numbers: equal zeros.
fn order(a: f32, b: f32) -> std::cmp::Ordering {
    a.partial_cmp(&b).expect("no NaN in these tests")
}

/// What the text says, with everything sorted and 128-bit products.
fn plainly(logits: &[f32], draw: &Draw) -> Drawn {
    let count = logits.len().min(draw.vocabulary as usize);
    let raw = &logits[..count];
    let max = raw.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: u64 = raw.iter().map(|l| token_weight(l - max)).sum();
    let logprob = |id: usize| (raw[id] - max) - log(total as f32 * (-40f32).exp2());
    let mut z = raw.to_vec();
    for a in &draw.adjust {
        let x = &mut z[a.token as usize];
        *x = if *x > 0.0 { *x / a.repetition } else { *x * a.repetition };
        *x = *x - a.frequency - a.presence + a.bias;
    }
    let allowed = |id: &usize| draw.mask.as_ref().is_none_or(|mask| mask[id / 32] >> (id % 32) & 1 == 1);
    let mut kept: Vec<usize> = (0..count).filter(allowed).collect();
    if draw.temperature > 0.0 {
        z.iter_mut().for_each(|z| *z /= draw.temperature);
    }
    kept.sort_by(|a, b| order(z[*b], z[*a]).then(a.cmp(b)));
    let score = |id: usize| {
        if draw.temperature == 0.0 {
            return z[id];
        }
        let bits = philox::Key::new(draw.seed, draw.choice, draw.position).bits(id as u32) >> 9;
        let u = (bits as f32 + 0.5) * (-23f32).exp2();
        z[id] - log(-log(u))
    };
    if draw.temperature > 0.0 {
        cut(&mut kept, &z, draw);
    }
    let better = |a: &usize, b: &usize| order(score(*a), score(*b)).then(b.cmp(a));
    let token = kept.iter().copied().max_by(better).expect("something is kept");
    let mut best: Vec<usize> = (0..count).collect();
    best.sort_by(|a, b| order(raw[*b], raw[*a]).then(a.cmp(b)));
    best.truncate(draw.top_logprobs as usize);
    let top = best.into_iter().map(|id| (id as u32, logprob(id))).collect();
    Drawn { token: Some(token as u32), logprob: logprob(token), top }
}

/// Top-k, top-p, min-p over ids sorted best first.
fn cut(kept: &mut Vec<usize>, z: &[f32], draw: &Draw) {
    let first = z[kept[0]];
    let weight = |id: usize| token_weight(z[id] - first) as u128;
    // share * 2^149 is an integer for every f32 of 2^-126 or more; the tests use shares of 2^-20 or more.
    let share = |share: f32, of: u128| (share as f64 * (1u64 << 44) as f64) as u128 * of;
    if draw.top_k > 0 {
        kept.truncate(draw.top_k as usize);
    }
    if draw.top_p < 1.0 {
        let enough = share(draw.top_p, kept.iter().map(|&id| weight(id)).sum());
        let mut sum = 0;
        let last = kept.iter().position(|&id| {
            sum += weight(id);
            sum << 44 >= enough
        });
        kept.truncate(last.expect("all weigh enough") + 1);
    }
    if draw.min_p > 0.0 {
        let least = share(draw.min_p, weight(kept[0]));
        kept.retain(|&id| weight(id) << 44 >= least);
    }
}

/// Draws on every CPU device, which must agree.
fn drawn(logits: &[f32], draws: &[Draw]) -> Vec<Drawn> {
    let values: Vec<f64> = logits.iter().map(|&x| x as f64).collect();
    let mut expected: Option<Vec<Drawn>> = None;
    for mut cpu in cpus() {
        let buffer = filled(&mut cpu, logits.len(), &values);
        let found = cpu.draw(buffer, draws).expect("drawn");
        match &expected {
            None => expected = Some(found),
            Some(expected) => {
                for (f, e) in found.iter().zip(expected) {
                    assert_eq!((f.token, &f.top), (e.token, &e.top), "{}", cpu.name());
                    assert_bits(&[f.logprob], &[e.logprob], "log-probability");
                }
            }
        }
    }
    expected.expect("a device")
}

#[test]
fn every_setting_draws_what_the_text_says() {
    let mut noise = Noise::new(1);
    for round in 0..300 {
        let n = [5, 64, 65, 1000, 3000][round % 5];
        let spread = [0.1, 3.0, 12.0][round / 5 % 3];
        let mut logits: Vec<f32> = (0..n).map(|_| (noise.value() * spread) as f32).collect();
        if round % 4 == 0 {
            // Many ties.
            logits.iter_mut().for_each(|x| *x = x.round());
        }
        let mut draws = Vec::new();
        for position in 0..12 {
            let mut one = Draw {
                temperature: [0.0, 0.3, 1.0, 1.7][noise.below(4)],
                top_k: [0, 0, 1, 5, 40, 2999][noise.below(6)],
                top_p: [1.0, 0.95, 0.5, 0.1, 0.999][noise.below(5)],
                min_p: [0.0, 0.0, 0.05, 0.5, 1.0][noise.below(5)],
                seed: noise.next() as u64 | (noise.next() as u64) << 32,
                choice: noise.below(3) as u32,
                position,
                top_logprobs: noise.below(8) as u32,
                vocabulary: (n - noise.below(3)) as u32,
                ..draw()
            };
            if noise.below(2) == 0 {
                one.mask = Some((0..n.div_ceil(32)).map(|_| noise.next() | 1).collect());
            }
            if noise.below(2) == 0 {
                let tokens = (0..one.vocabulary).filter(|_| {
                    noise.0 >> 40 & 3 == 0 || {
                        noise.next();
                        false
                    }
                });
                one.adjust = tokens
                    .map(|token| Adjust { token, repetition: 1.3, frequency: 0.2, presence: -0.4, bias: 0.1 })
                    .collect();
            }
            draws.push(one);
        }
        for (one, found) in draws.iter().zip(drawn(&logits, &draws)) {
            assert_eq!(found, plainly(&logits, one), "{one:?}");
        }
    }
}

#[test]
fn ties_faults_and_masks() {
    let check = |logits: &[f32], one: Draw, token: Option<u32>| {
        assert_eq!(drawn(logits, &[one])[0].token, token, "{logits:?}");
    };
    let greedy = || Draw { temperature: 0.0, ..draw() };
    check(&[1.0, 3.0, 3.0], greedy(), Some(1));
    check(&[-0.0, 0.0], greedy(), Some(0));
    check(&[1.0, 3.0, 4.0], Draw { vocabulary: 2, ..greedy() }, Some(1));
    check(&[1.0, 3.0, f32::NAN], Draw { vocabulary: 2, ..greedy() }, Some(1));
    check(&[1.0, 3.0, 4.0], Draw { mask: Some(vec![0b101]), ..greedy() }, Some(2));
    check(&[1.0, f32::NAN], greedy(), None);
    check(&[1.0, f32::INFINITY], draw(), None);
    check(&[1.0, f32::NEG_INFINITY], draw(), None);
    // A masked fault is a fault all the same: the row is not to be trusted.
    check(&[1.0, f32::NAN], Draw { mask: Some(vec![1]), ..greedy() }, None);
    let pushed = |bias| vec![Adjust { token: 0, repetition: 1.0, frequency: 0.0, presence: 0.0, bias }];
    check(&[1.0, 3.0], Draw { adjust: pushed(100.0), ..greedy() }, Some(0));
    check(&[1.0, 3.0], Draw { adjust: pushed(f32::NAN), ..draw() }, Some(1));
    // Temperatures that overflow z still give an allowed token.
    check(&[-2.0, -3.0], Draw { temperature: 1e-39, mask: Some(vec![0b10]), ..draw() }, Some(1));
    check(
        &[2.0, 3.0],
        Draw { temperature: 1e-39, top_p: 0.5, min_p: 0.5, mask: Some(vec![0b10]), ..draw() },
        Some(1),
    );
    let mut cpu = plain();
    let buffer = filled(&mut cpu, 2, &[0.0, 1.0]);
    assert!(cpu.draw(buffer, &[Draw { mask: Some(vec![0b100]), ..draw() }]).is_err());
}

#[test]
fn draws_follow_the_distribution() {
    let logits: Vec<f32> = [0.5f32, 0.25, 0.125, 0.0625, 0.0625].iter().map(|p| p.ln()).collect();
    let draws: Vec<Draw> = (0..20_000).map(|position| Draw { position, ..draw() }).collect();
    let mut cpu = plain();
    let values: Vec<f64> = logits.iter().map(|&x| x as f64).collect();
    let buffer = filled(&mut cpu, 5, &values);
    let mut counts = [0f64; 5];
    for found in cpu.draw(buffer, &draws).expect("drawn") {
        let token = found.token.expect("finite") as usize;
        counts[token] += 1.0;
        assert!((found.logprob - logits[token]).abs() < 1e-6);
    }
    let chi: f64 = [0.5, 0.25, 0.125, 0.0625, 0.0625]
        .iter()
        .zip(counts)
        .map(|(p, count)| (count - p * 20_000.0).powi(2) / (p * 20_000.0))
        .sum();
    assert!(chi < 18.5, "chi-squared {chi} with 4 degrees of freedom: {counts:?}"); // p = 0.001
}
