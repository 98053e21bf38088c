//! The float work of one attention block of 64 keys: scores, weights, values.

use super::{
    attention::KEYS,
    isa::by_isa,
    math::{ROUND, exp2, power_of_two},
    sums::tree,
};
use quant::{ATTENTION_BITS, MAGNITUDE_MAX, MAGNITUDE_MIN};

/// `scores = fma(I, scale * unit, scores)`; `I` is `high`, or `fma(256, high, low)` of two digits.
#[inline(always)]
fn score_group_body(
    high: &[i32; KEYS],
    low: Option<&[i32; KEYS]>,
    scales: &[f32; KEYS],
    unit: f32,
    scores: &mut [f32; KEYS],
) {
    match low {
        None => {
            for key in 0..KEYS {
                scores[key] = (high[key] as f32).mul_add(scales[key] * unit, scores[key]);
            }
        }
        Some(low) => {
            for key in 0..KEYS {
                let dot = 256f32.mul_add(high[key] as f32, low[key] as f32);
                scores[key] = dot.mul_add(scales[key] * unit, scores[key]);
            }
        }
    }
}
by_isa! {
    /// Adds one group of dims to the scores of a block.
    pub(crate) fn score_group(
        high: &[i32; KEYS],
        low: Option<&[i32; KEYS]>,
        scales: &[f32; KEYS],
        unit: f32,
        scores: &mut [f32; KEYS],
    ) = score_group_body
}

/// A block's part of a softmax.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weighed {
    /// `M`: the maximum, rounded up to an integer.
    pub(crate) max: f32,
    /// `l`: sum of `exp2(s - M)`.
    pub(crate) sum: f32,
    /// Unit of the value weights.
    pub(crate) unit: f32,
}

/// Weights of the first `visible` keys; the others weigh 0, whatever their scores and scales hold.
#[inline(always)]
fn weigh_body(
    scores: &[f32; KEYS],
    scale: f32,
    visible: usize,
    value_scales: &[f32; KEYS],
    codes: &mut [i16; KEYS],
) -> Weighed {
    const LANES: usize = 16;
    let mut s = [0f32; KEYS];
    for key in 0..KEYS {
        let scaled = scores[key] * scale;
        s[key] = if key < visible { scaled } else { f32::NEG_INFINITY };
    }
    // Drops NaN: the sum keeps it.
    let mut max = [f32::NEG_INFINITY; LANES];
    for part in s.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            max[lane] = if part[lane] > max[lane] { part[lane] } else { max[lane] };
        }
    }
    let max = max.iter().fold(f32::NEG_INFINITY, |m, &s| if s > m { s } else { m }).ceil();
    let mut weights = [0f32; KEYS];
    let mut sums = [0f32; 8];
    for key in 0..KEYS {
        let p = exp2(s[key] - max);
        s[key] = if key < visible { p } else { 0.0 };
        weights[key] = if key < visible { s[key] * value_scales[key] } else { 0.0 };
    }
    for part in s.as_chunks::<8>().0 {
        for lane in 0..8 {
            sums[lane] += part[lane];
        }
    }
    Weighed { max, sum: tree(sums), unit: quantize(&weights, codes) }
}
by_isa! {
    /// Softmax weights of a block, times the value scales, as codes.
    pub(crate) fn weigh(
        scores: &[f32; KEYS],
        scale: f32,
        visible: usize,
        value_scales: &[f32; KEYS],
        codes: &mut [i16; KEYS],
    ) -> Weighed = weigh_body
}

/// `Q_11` as [`quant::quantize_group`] defines it, in a form that vectorizes: up to 2^11 every code is
/// `rint(t)`.
#[inline(always)]
fn quantize(values: &[f32; KEYS], codes: &mut [i16; KEYS]) -> f32 {
    let mut magnitude = 0u32;
    for value in values {
        magnitude = magnitude.max(value.to_bits() & 0x7fff_ffff);
    }
    if magnitude < MAGNITUDE_MIN.to_bits() || magnitude >= MAGNITUDE_MAX.to_bits() {
        codes.fill(0);
        return if magnitude < MAGNITUDE_MIN.to_bits() { 0.0 } else { f32::NAN };
    }
    let e = (magnitude >> 23) as i32 - 126;
    let to_code = power_of_two(ATTENTION_BITS - e);
    for (code, value) in codes.iter_mut().zip(values) {
        // The low bits of the sum are `rint(t)`.
        *code = (value * to_code + ROUND).to_bits() as i16;
    }
    power_of_two(e - ATTENTION_BITS)
}

/// Takes a block's values `I * unit` into `held`: merged with `(factor of the block, factor of held)`, or as
/// they are.
#[inline(always)]
fn fold_values_body(high: &[i32], low: &[i32], unit: f32, factors: Option<(f32, f32)>, held: &mut [f32]) {
    let n = held.len();
    let high = &high[..n];
    let (of_block, of_held, first) = match factors {
        Some((of_block, of_held)) => (of_block, of_held, false),
        None => (0.0, 0.0, true),
    };
    let take = |dot: f32, held: f32| {
        let o = dot * unit;
        if first { o } else { o.mul_add(of_block, held * of_held) }
    };
    if low.is_empty() {
        for i in 0..n {
            held[i] = take(high[i] as f32, held[i]);
        }
    } else {
        let low = &low[..n];
        for i in 0..n {
            held[i] = take(256f32.mul_add(high[i] as f32, low[i] as f32), held[i]);
        }
    }
}
by_isa! {
    /// Merges a block's values.
    pub(crate) fn fold_values(
        high: &[i32],
        low: &[i32],
        unit: f32,
        factors: Option<(f32, f32)>,
        held: &mut [f32],
    ) = fold_values_body
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    #[test]
    fn codes_are_those_of_the_quantizer() {
        let mut state = 3u32;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        for round in 0..5000 {
            let top = ((next() % 90) as f32 - 45.0).exp2();
            let mut values = [0f32; KEYS];
            for value in &mut values {
                *value = top * (next() as f32 / (1 << 24) as f32) * (-((next() % 9) as f32)).exp2();
            }
            match round % 50 {
                0 => values[7] = f32::NAN,
                1 => values[9] = f32::INFINITY,
                2 => values = [top; KEYS],
                3 => values = [0.0; KEYS],
                _ => {}
            }
            let (mut expected, mut found) = ([0; KEYS], [1; KEYS]);
            let group = quant::quantize_group(ATTENTION_BITS, &values, &mut expected);
            let unit = quantize(&values, &mut found);
            assert_eq!((unit.to_bits(), found), (group.unit.to_bits(), expected), "{values:?}");
        }
    }

    #[test]
    fn hidden_keys_weigh_nothing_and_are_not_looked_at() {
        for isa in Isa::supported() {
            for visible in [1, 5, 63] {
                let mut scores = [f32::NAN; KEYS];
                let mut scales = [f32::NAN; KEYS];
                let mut clean = ([-1e30f32; KEYS], [0f32; KEYS]);
                for key in 0..visible {
                    scores[key] = key as f32 * 0.3 - 2.0;
                    scales[key] = 1.0 + key as f32;
                    (clean.0[key], clean.1[key]) = (scores[key], scales[key]);
                }
                let (mut a, mut b) = ([0; KEYS], [0; KEYS]);
                let hidden = weigh(isa, &scores, 0.5, visible, &scales, &mut a);
                let whole = weigh(isa, &clean.0, 0.5, KEYS, &clean.1, &mut b);
                assert_eq!((hidden.max, hidden.sum, hidden.unit, a), (whole.max, whole.sum, whole.unit, b));
            }
        }
    }

    #[test]
    fn a_nan_score_is_not_lost() {
        let (mut scores, mut codes) = ([1f32; KEYS], [0; KEYS]);
        scores[17] = f32::NAN;
        for isa in Isa::supported() {
            let weighed = weigh(isa, &scores, 1.0, KEYS, &[1.0; KEYS], &mut codes);
            assert!(weighed.sum.is_nan() && weighed.unit.is_nan());
        }
    }
}
