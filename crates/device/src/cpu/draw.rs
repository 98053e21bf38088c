//! Logits to tokens (`docs/arithmetic.md`, logits to tokens).
//!
//! Order: penalties and bias, mask and vocabulary, temperature, top-k, top-p, min-p, Gumbel argmax. Sums over
//! the vocabulary are exact integers, so their order is free. The raw distribution is that of the ids below
//! [`Draw::vocabulary`], nothing changed or masked.

use super::{
    Cpu,
    isa::by_isa,
    math::{log, token_weight},
    philox,
    pool::Disjoint,
    route::{key_id, pick_key},
};
use crate::{Buffer, DeviceError, Draw, Drawn};

/// Ids whose maximum is kept to skip them at once.
const CHUNK: usize = 64;
/// First distance below the best z at which candidates of top-p are looked for; it doubles until enough are
/// found.
const TOP_P_DISTANCE: f32 = 4.0;
/// Below this distance (in units of z) every weight is 0: 2^-41 rounds to 0, and exp(-28.5) is less.
const WEIGHTLESS_DISTANCE: f32 = 28.5;

impl Cpu {
    /// [`crate::Device::draw`]: draws side by side.
    pub(super) fn draw_rows(&mut self, logits: Buffer, draws: &[Draw]) -> Result<Vec<Drawn>, DeviceError> {
        let (logits, isa) = (self.planes.get(logits), self.workers.isa);
        self.draws.resize_with(self.draws.len().max(draws.len()), Default::default);
        let mut drawn: Vec<Option<Result<Drawn, DeviceError>>> = draws.iter().map(|_| None).collect();
        let (results, scratch) = (Disjoint::new(&mut drawn), Disjoint::new(&mut self.draws));
        self.workers.pool.run(draws.len(), &|task| {
            let row = &logits.values[draws[task].row * logits.width..][..logits.width];
            // SAFETY: each task has a result and a scratch of its own.
            let (result, scratch) =
                unsafe { (&mut results.range(task..task + 1)[0], &mut scratch.range(task..task + 1)[0]) };
            *result = Some(draw(isa, row, &draws[task], scratch));
        });
        drawn.into_iter().map(|result| result.expect("every task ran")).collect()
    }
}

/// The largest value, or NaN if a value is not finite.
#[inline(always)]
fn finite_max_body(values: &[f32]) -> f32 {
    let (mut max, mut bits) = (f32::NEG_INFINITY, 0u32);
    for &x in values {
        max = if x > max { x } else { max };
        bits = bits.max(x.to_bits() & 0x7fff_ffff);
    }
    if bits >= f32::INFINITY.to_bits() { f32::NAN } else { max }
}
by_isa! { fn finite_max(values: &[f32]) -> f32 = finite_max_body }

/// Sum of `rint(exp(z - max) * 2^40)`.
#[inline(always)]
fn weight_sum_body(values: &[f32], max: f32) -> u64 {
    values.iter().fold(0, |sum, z| sum + token_weight(z - max))
}
by_isa! { fn weight_sum(values: &[f32], max: f32) -> u64 = weight_sum_body }

/// Maximum of every [`CHUNK`] values, NaN left out.
#[inline(always)]
fn chunk_maxima_body(values: &[f32], out: &mut [f32]) {
    for (max, values) in out.iter_mut().zip(values.chunks(CHUNK)) {
        *max = values.iter().fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m });
    }
}
by_isa! { fn chunk_maxima(values: &[f32], out: &mut [f32]) = chunk_maxima_body }

#[inline(always)]
fn divide_body(values: &mut [f32], by: f32) {
    for value in values {
        *value /= by;
    }
}
by_isa! { fn divide(values: &mut [f32], by: f32) = divide_body }

/// `z + gumbel` of the tokens from `first` on.
#[inline(always)]
fn perturb_body(z: &[f32], first: u32, key: &philox::Key, out: &mut [f32]) {
    for (at, (y, z)) in out.iter_mut().zip(z).enumerate() {
        *y = z + gumbel(key, first + at as u32);
    }
}
by_isa! { fn perturb(z: &[f32], first: u32, key: &philox::Key, out: &mut [f32]) = perturb_body }

/// `-log(-log(u))` with `u = (bits + 0.5) * 2^-23` of the token's 23 bits. From -2.82 to 16.64, never
/// infinite.
#[inline(always)]
fn gumbel(key: &philox::Key, token: u32) -> f32 {
    const STEP: f32 = 1.0 / 8_388_608.0;
    let bits = key.bits(token) >> 9;
    let u = (bits as f32 + 0.5) * STEP;
    -log(-log(u))
}

/// Scratch of a draw, kept between calls.
#[derive(Default)]
pub(crate) struct Scratch {
    /// `z` of every id: adjusted logits over the temperature; -inf where the id may not be drawn.
    z: Vec<f32>,
    maxima: Vec<f32>,
    keys: Vec<u64>,
}

/// Draws from one row of logits.
pub(crate) fn draw(
    isa: super::Isa,
    logits: &[f32],
    draw: &Draw,
    scratch: &mut Scratch,
) -> Result<Drawn, DeviceError> {
    let logits = &logits[..logits.len().min(draw.vocabulary as usize)];
    let max = finite_max(isa, logits);
    if max.is_nan() {
        return Ok(Drawn { token: None, logprob: f32::NAN, top: Vec::new() });
    }
    adjusted(logits, draw, &mut scratch.z)?;
    let token = match draw.temperature {
        0.0 => best(isa, &scratch.z, &mut scratch.maxima),
        temperature => {
            divide(isa, &mut scratch.z, temperature);
            sample(isa, draw, scratch)
        }
    };
    // Every candidate is -inf (a division or product overflowed): the lowest id that may be drawn.
    let token = token.unwrap_or_else(|| {
        (0..draw.vocabulary).find(|&id| allowed(draw, id)).expect("checked while adjusting")
    });
    // The f32 nearest to the sum, times an exact power of two.
    let total = log(weight_sum(isa, logits, max) as f32 * (1.0 / 1_099_511_627_776.0));
    let logprob = |id: u32| (logits[id as usize] - max) - total;
    top_candidates(isa, logits, draw.top_logprobs as usize, &mut scratch.maxima, &mut scratch.keys);
    let top = scratch.keys.iter().map(|&key| (key_id(key), logprob(key_id(key)))).collect();
    Ok(Drawn { token: Some(token), logprob: logprob(token), top })
}

/// Whether the mask allows an id.
fn allowed(draw: &Draw, id: u32) -> bool {
    draw.mask
        .as_ref()
        .is_none_or(|mask| mask.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1))
}

/// Logits after penalties, bias and mask; -inf where an id may not be drawn or came out as NaN.
fn adjusted(logits: &[f32], draw: &Draw, z: &mut Vec<f32>) -> Result<(), DeviceError> {
    z.clear();
    z.extend_from_slice(logits);
    for change in &draw.adjust {
        let Some(x) = z.get_mut(change.token as usize) else { continue };
        *x = if *x > 0.0 { *x / change.repetition } else { *x * change.repetition };
        *x -= change.frequency;
        *x -= change.presence;
        *x += change.bias;
        if x.is_nan() {
            *x = f32::NEG_INFINITY;
        }
    }
    let mut any = draw.mask.is_none() && !z.is_empty();
    if let Some(mask) = &draw.mask {
        for (word, ids) in z.chunks_mut(32).enumerate() {
            let bits = mask.get(word).copied().unwrap_or(0);
            any |= bits & (u32::MAX >> (32 - ids.len())) != 0;
            if bits == u32::MAX {
                continue;
            }
            for (bit, x) in ids.iter_mut().enumerate() {
                if bits >> bit & 1 == 0 {
                    *x = f32::NEG_INFINITY;
                }
            }
        }
    }
    if any {
        return Ok(());
    }
    let message = format!("no token below {} may be drawn: the mask is empty", draw.vocabulary);
    Err(DeviceError::Failed { stage: "draw", message })
}

/// The lowest id of the largest value; `None` if all are -inf.
fn best(isa: super::Isa, z: &[f32], maxima: &mut Vec<f32>) -> Option<u32> {
    maxima.resize(z.len().div_ceil(CHUNK), 0.0);
    chunk_maxima(isa, z, maxima);
    let max = maxima.iter().fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m });
    if max == f32::NEG_INFINITY {
        return None;
    }
    let chunk = maxima.iter().position(|&m| m == max)?;
    let inside = z[chunk * CHUNK..].iter().position(|&x| x == max)?;
    Some((chunk * CHUNK + inside) as u32)
}

/// The smallest integer that is at least `share * sum`: exact, from the bits of `share` (0 to 1; 0 for NaN).
fn share_of(share: f32, sum: u64) -> u64 {
    if share.is_nan() || share <= 0.0 {
        return 0;
    }
    if share >= 1.0 {
        return sum;
    }
    let exponent = (share.to_bits() >> 23) as i32;
    let fraction = share.to_bits() & 0x7f_ffff;
    // share = mantissa * 2^-shift.
    let (mantissa, shift) =
        if exponent == 0 { (fraction, 149) } else { (fraction | 0x80_0000, 150 - exponent) };
    let product = mantissa as u128 * sum as u128;
    if shift >= 128 {
        return (product > 0) as u64;
    }
    ((product + ((1u128 << shift) - 1)) >> shift) as u64
}

/// The `count` best ids by (value, lower id), best first, as pick keys; -inf and NaN are left out.
fn top_candidates(isa: super::Isa, values: &[f32], count: usize, maxima: &mut Vec<f32>, keys: &mut Vec<u64>) {
    keys.clear();
    if count == 0 {
        return;
    }
    // As many values as chunk maxima reach `bound`: only those above it can be among the best.
    maxima.resize(values.len().div_ceil(CHUNK), 0.0);
    chunk_maxima(isa, values, maxima);
    let bound = if count <= maxima.len() {
        keys.extend(maxima.iter().map(|&m| pick_key(m, 0)));
        let (_, &mut key, _) = keys.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
        maxima.iter().copied().find(|&m| pick_key(m, 0) == key).expect("a key of one of them")
    } else {
        f32::NEG_INFINITY
    };
    collect(values, maxima, bound, keys);
    keys.truncate(count);
}

/// Ids whose value is at least `bound` and above -inf, best first.
fn collect(values: &[f32], maxima: &[f32], bound: f32, keys: &mut Vec<u64>) {
    keys.clear();
    for (chunk, values) in values.chunks(CHUNK).enumerate().filter(|(chunk, _)| maxima[*chunk] >= bound) {
        for (at, &x) in values.iter().enumerate() {
            if x >= bound && x > f32::NEG_INFINITY {
                keys.push(pick_key(x, (chunk * CHUNK + at) as u32));
            }
        }
    }
    keys.sort_unstable_by(|a, b| b.cmp(a));
}

/// The argmax of `z + gumbel` over the kept set; `None` if nothing is above -inf.
fn sample(isa: super::Isa, draw: &Draw, scratch: &mut Scratch) -> Option<u32> {
    let Scratch { z, maxima, keys } = scratch;
    let noise = philox::Key::new(draw.seed, draw.choice, draw.position);
    let (top_k, top_p, min_p) = (draw.top_k as usize, draw.top_p < 1.0, draw.min_p > 0.0);
    let all = top_k == 0 || top_k >= z.len();
    if all && !top_p && !min_p {
        perturb_in_place(isa, z, &noise);
        return best(isa, z, maxima);
    }
    maxima.resize(z.len().div_ceil(CHUNK), 0.0);
    chunk_maxima(isa, z, maxima);
    let z_max = maxima.iter().fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m });
    let weight = |key: u64| token_weight(z[key_id(key) as usize] - z_max);
    if !all {
        top_candidates(isa, z, top_k, maxima, keys);
        if top_p {
            let enough = share_of(draw.top_p, keys.iter().map(|&key| weight(key)).sum());
            keys.truncate(prefix(keys, weight, enough));
        }
    } else if top_p {
        let enough = share_of(draw.top_p, weight_sum(isa, z, z_max));
        let mut distance = TOP_P_DISTANCE;
        loop {
            let last = distance > WEIGHTLESS_DISTANCE;
            collect(z, maxima, if last { f32::NEG_INFINITY } else { z_max - distance }, keys);
            if last || keys.iter().map(|&key| weight(key)).sum::<u64>() >= enough {
                break;
            }
            distance *= 2.0;
        }
        keys.truncate(prefix(keys, weight, enough));
    } else {
        collect(z, maxima, f32::NEG_INFINITY, keys);
    }
    if min_p {
        let least = share_of(draw.min_p, weight(*keys.first()?));
        keys.truncate(keys.partition_point(|&key| weight(key) >= least).max(1));
    }
    let score = |key: u64| z[key_id(key) as usize] + gumbel(&noise, key_id(key));
    keys.iter().map(|&key| pick_key(score(key), key_id(key))).max().map(key_id)
}

/// Perturbs all values where they stand.
fn perturb_in_place(isa: super::Isa, z: &mut [f32], noise: &philox::Key) {
    let mut part = [0f32; CHUNK];
    for (chunk, values) in z.chunks_mut(CHUNK).enumerate() {
        perturb(isa, values, (chunk * CHUNK) as u32, noise, &mut part[..values.len()]);
        values.copy_from_slice(&part[..values.len()]);
    }
}

/// Length of the shortest prefix whose weight reaches `enough`; at least 1.
fn prefix(keys: &[u64], weight: impl Fn(u64) -> u64, enough: u64) -> usize {
    let mut sum = 0;
    let reached = keys.iter().position(|&key| {
        sum += weight(key);
        sum >= enough
    });
    reached.map_or(keys.len(), |last| last + 1)
}
