//! Sine, cosine, exponential, logarithm and power in float64, and the rotary tables made of them.
//!
//! Made of additions, subtractions, multiplications, divisions and bit operations only: no function of a
//! platform's mathematics library, not even `fma` (a library call where the processor's is not enabled), so
//! every host gives the same bits (`docs/arithmetic.md`, rules 1 and 2). For tables at load, not for inner
//! loops of a step.

use std::f64::consts::{FRAC_2_PI, LN_2, LOG2_E};

/// Largest magnitude [`sin_cos`] reduces.
pub const ANGLE_MAX: f64 = 3.0e6;

// pi/2 in parts of 32, 32 and 53 bits: multiples of the first two up to 2^21 are exact.
const HALF_PI: [f64; 3] = [
    f64::from_bits(0x3ff9_21fb_5440_0000),
    f64::from_bits(0x3dd0_b461_1a60_0000),
    f64::from_bits(0x3ba3_198a_2e03_7073),
];
// ln 2 in parts of 32 and 53 bits: multiples of the first up to 2^21 are exact.
const LN_2_PARTS: [f64; 2] = [f64::from_bits(0x3fe6_2e42_fee0_0000), f64::from_bits(0x3dea_39ef_3579_3c76)];
// What LN_2 leaves of ln 2.
const LN_2_REST: f64 = f64::from_bits(0x3c7a_bc9e_3b39_803f);

/// 1/n! for n up to 18.
const INVERSE_FACTORIAL: [f64; 19] = inverse_factorials();

const fn inverse_factorials() -> [f64; 19] {
    // 18! < 2^53: every factorial is exact and every quotient rounded once.
    let mut out = [1.0; 19];
    let mut factorial = 1u64;
    let mut n = 1;
    while n < 19 {
        factorial *= n as u64;
        out[n] = 1.0 / factorial as f64;
        n += 1;
    }
    out
}

/// A value as an unevaluated sum of two floats, the second below half a step of the first.
#[derive(Clone, Copy)]
struct Double {
    high: f64,
    low: f64,
}

impl Double {
    /// `a + b` exactly.
    #[inline(always)]
    fn sum(a: f64, b: f64) -> Self {
        let high = a + b;
        let shadow = high - a;
        Self { high, low: (a - (high - shadow)) + (b - shadow) }
    }

    /// `a * b` exactly, for magnitudes between about 2^-480 and 2^990: each factor is split into halves of 26
    /// bits.
    #[inline(always)]
    fn product(a: f64, b: f64) -> Self {
        const SPLIT: f64 = 134_217_729.0; // 2^27 + 1
        let halves = |x: f64| {
            let scaled = SPLIT * x;
            let high = scaled - (scaled - x);
            (high, x - high)
        };
        let high = a * b;
        let ((a1, a0), (b1, b0)) = (halves(a), halves(b));
        Self { high, low: a0 * b0 - (((high - a1 * b1) - a0 * b1) - a1 * b0) }
    }

    /// `a / b` to about 2^-104.
    fn quotient(a: Self, b: Self) -> Self {
        let first = a.high / b.high;
        let back = Self::product(first, b.high);
        let rest = (a.high - back.high) - back.low + a.low - first * b.low;
        Self::sum(first, rest / b.high)
    }

    /// `self + other` to about 2^-104 of the larger one.
    fn plus(self, other: Self) -> Self {
        let sum = Self::sum(self.high, other.high);
        Self::sum(sum.high, sum.low + (self.low + other.low))
    }

    /// `self * other` to about 2^-104.
    fn times(self, other: Self) -> Self {
        let product = Self::product(self.high, other.high);
        Self::sum(product.high, product.low + (self.high * other.low + self.low * other.high))
    }
}

/// Nearest integer, ties to even, for magnitudes below 2^51.
#[inline(always)]
fn nearest(x: f64) -> f64 {
    const MAGIC: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52: no fraction bits are left beside it
    (x + MAGIC) - MAGIC
}

/// Sine and cosine of `x` radians, absolute error below 2^-53. NaN for NaN, infinities and beyond
/// [`ANGLE_MAX`].
#[inline]
pub fn sin_cos(x: f64) -> (f64, f64) {
    if x.is_nan() || x.abs() > ANGLE_MAX {
        return (f64::NAN, f64::NAN);
    }
    // x - n pi/2 = r.high + r.low. The first difference is exact (n <= 1909860 < 2^21, and x and n pi/2 lie
    // within a factor of two), the second as a pair; the third part's rounding is below 2^-95.
    let n = nearest(x * FRAC_2_PI);
    let r = Double::sum(x - n * HALF_PI[0], -(n * HALF_PI[1]));
    let r = Double::sum(r.high, r.low - n * HALF_PI[2]);
    let (sin, cos) = sin_cos_reduced(r);
    match n as i64 & 3 {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

/// Taylor series for |r| <= pi/4, up to r^17 and r^18: the rest is below 2^-62 and 2^-68.
#[inline(always)]
fn sin_cos_reduced(r: Double) -> (f64, f64) {
    let f = &INVERSE_FACTORIAL;
    let z = r.high * r.high;
    let odd = f[13] + z * (-f[15] + z * f[17]);
    let odd = -f[3] + z * (f[5] + z * (-f[7] + z * (f[9] + z * (-f[11] + z * odd))));
    let sin = r.high + (r.low * (1.0 - 0.5 * z) + r.high * z * odd);
    let even = f[12] + z * (-f[14] + z * (f[16] - z * f[18]));
    let even = f[4] + z * (-f[6] + z * (f[8] + z * (-f[10] + z * even)));
    let half = 0.5 * z;
    let near = 1.0 - half;
    let cos = near + (((1.0 - near) - half) + (z * z * even - r.high * r.low));
    (sin, cos)
}

/// `e^x`, error below 0.8 units in the last place (1.3 where the result is subnormal).
pub fn exp(x: f64) -> f64 {
    exp_double(Double { high: x, low: 0.0 })
}

fn exp_double(x: Double) -> f64 {
    if x.high.is_nan() {
        return f64::NAN;
    }
    if x.high > 710.0 {
        return f64::INFINITY;
    }
    if x.high < -746.0 {
        return 0.0;
    }
    let k = nearest(x.high * LOG2_E);
    let r = Double::sum(x.high - k * LN_2_PARTS[0], -(k * LN_2_PARTS[1]));
    let low = r.low + x.low;
    let r = r.high;
    // |r| <= 0.347: r^14 / 14! is below 2^-57.
    let mut tail = INVERSE_FACTORIAL[13];
    for n in (2..13).rev() {
        tail = tail * r + INVERSE_FACTORIAL[n];
    }
    let sum = Double::sum(1.0, r);
    let curve = r * r * tail;
    let value = sum.high + (sum.low + (curve + low * (sum.high + curve)));
    // Two factors: 2^k itself may be out of range where the result is not; only the second product rounds.
    let half = (k as i64) >> 1;
    value * power_of_two(half) * power_of_two(k as i64 - half)
}

/// 2^k for -1022 <= k <= 1023.
#[inline(always)]
fn power_of_two(k: i64) -> f64 {
    f64::from_bits(((k + 1023) as u64) << 52)
}

/// Natural logarithm, error below 0.6 units in the last place. `-inf` for 0, NaN for negative values and NaN.
pub fn log(x: f64) -> f64 {
    if x == 0.0 {
        return f64::NEG_INFINITY;
    }
    if x.is_nan() || x < 0.0 {
        return f64::NAN;
    }
    if x == f64::INFINITY {
        return x;
    }
    let log = log_double(x);
    log.high + log.low
}

/// The logarithm of a positive finite number to about 2^-70 of it.
fn log_double(x: f64) -> Double {
    // x = m 2^k with m in [0.707, 1.415).
    let (x, shift) = if x < f64::MIN_POSITIVE { (x * power_of_two(54), 54) } else { (x, 0) };
    let bits = x.to_bits();
    let mut k = (bits >> 52) as i64 - 1023 - shift;
    let mut m = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        k += 1;
    }
    // log m = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.172: 2 s (1 + z/3 + z^2/5 + ...), z = s^2. Terms
    // from z^5 on are below 2^-28 of the sum and taken in float64; the first one left out is below 2^-77.
    let s = Double::quotient(Double { high: m - 1.0, low: 0.0 }, Double::sum(m, 1.0));
    let z = s.times(s);
    let mut tail = 1.0 / 29.0;
    for n in (5..14).rev() {
        tail = tail * z.high + 1.0 / (2 * n + 1) as f64;
    }
    let mut series = Double { high: tail, low: 0.0 };
    for n in (0..5).rev() {
        let one = Double { high: 1.0, low: 0.0 };
        let coefficient = Double::quotient(one, Double { high: (2 * n + 1) as f64, low: 0.0 });
        series = series.times(z).plus(coefficient);
    }
    let log = s.times(series);
    let log = Double { high: 2.0 * log.high, low: 2.0 * log.low };
    let k = k as f64;
    let octaves = Double::product(k, LN_2);
    Double::sum(octaves.high, octaves.low + k * LN_2_REST).plus(log)
}

/// `base^y` for a positive finite base, error below 0.8 units in the last place. NaN for other bases and for
/// NaN.
pub fn pow(base: f64, y: f64) -> f64 {
    if y.is_nan() || !(base > 0.0 && base < f64::INFINITY) {
        return f64::NAN;
    }
    let log = log_double(base);
    let exponent = y * log.high;
    if log.high == 0.0 || exponent.abs() < 1e-20 {
        return 1.0;
    }
    if exponent.abs() > 800.0 {
        return if exponent > 0.0 { f64::INFINITY } else { 0.0 };
    }
    let product = Double::product(y, log.high);
    exp_double(Double::sum(product.high, product.low + y * log.low))
}

/// Rotary cosines and sines `[positions, rotary_dims / 2]` of the angles `position * theta^(-2 j /
/// rotary_dims)`, each angle one float64 product (`docs/model.md` section 6). `theta` is positive,
/// `rotary_dims` even.
pub fn rotary_table(positions: usize, theta: f64, rotary_dims: usize) -> (Vec<f64>, Vec<f64>) {
    let half = rotary_dims / 2;
    let frequencies: Vec<f64> = (0..half).map(|j| pow(theta, -2.0 * j as f64 / rotary_dims as f64)).collect();
    let (mut cos, mut sin) = (Vec::with_capacity(positions * half), Vec::with_capacity(positions * half));
    for position in 0..positions {
        for &frequency in &frequencies {
            let (s, c) = sin_cos(position as f64 * frequency);
            cos.push(c);
            sin.push(s);
        }
    }
    (cos, sin)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A deterministic sweep: `count` values of a 64-bit counter hash in [0, 1).
    fn sweep(count: u64) -> impl Iterator<Item = f64> {
        (1..=count).map(|i| {
            let mut h = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            h = (h ^ (h >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            h = (h ^ (h >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((h ^ (h >> 31)) >> 11) as f64 / (1u64 << 53) as f64
        })
    }

    /// Distance in steps of the expected value, which is itself within one step of the truth.
    fn check(name: &str, x: f64, got: f64, expected: f64) {
        let steps = (got.to_bits() as i64 - expected.to_bits() as i64).abs();
        assert!(steps <= 1, "{name}({x:e}) = {got:e}, expected {expected:e}: {steps} steps");
    }

    #[test]
    fn sine_and_cosine_agree_with_the_library() {
        for scale in [1e-8, 0.8, 10.0, 1e3, 262144.0, ANGLE_MAX] {
            for unit in sweep(40_000) {
                let x = (2.0 * unit - 1.0) * scale;
                let (sin, cos) = sin_cos(x);
                assert!((sin - x.sin()).abs() < 2.3e-16, "sin({x:e}) = {sin:e}, {:e}", x.sin());
                assert!((cos - x.cos()).abs() < 2.3e-16, "cos({x:e}) = {cos:e}, {:e}", x.cos());
            }
        }
    }

    #[test]
    fn angles_next_to_multiples_of_a_quarter_turn_are_reduced() {
        // Near a multiple of pi the sine is the reduced angle itself: relative precision shows every lost
        // bit.
        for n in (1..1_909_859u64).step_by(997) {
            let x = n as f64 * std::f64::consts::FRAC_PI_2;
            let (sin, cos) = sin_cos(x);
            let (got, expected) = if n % 2 == 0 { (sin, x.sin()) } else { (cos, x.cos()) };
            check("quarter turns", x, got, expected);
        }
    }

    #[test]
    fn exponential_agrees_with_the_library() {
        for (low, high) in [(-746.0, 710.0), (-1.0, 1.0), (-1e-9, 1e-9), (-50.0, 5.0)] {
            for unit in sweep(100_000) {
                let x = low + (high - low) * unit;
                check("exp", x, exp(x), x.exp());
            }
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f64::INFINITY), f64::INFINITY);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
        assert_eq!(exp(709.9), f64::INFINITY);
        assert!(exp(f64::NAN).is_nan());
    }

    #[test]
    fn logarithm_agrees_with_the_library() {
        for unit in sweep(200_000) {
            let around = 0.5 + 1.5 * unit;
            check("log", around, log(around), around.ln());
            let wide = f64::from_bits((unit * (f64::MAX.to_bits() as f64)) as u64);
            check("log", wide, log(wide), wide.ln());
        }
        assert_eq!(log(1.0), 0.0);
        assert_eq!(log(0.0), f64::NEG_INFINITY);
        assert_eq!(log(f64::INFINITY), f64::INFINITY);
        assert!(log(-1.0).is_nan());
        assert!(log(f64::NAN).is_nan());
    }

    #[test]
    fn powers_agree_with_the_library() {
        for theta in [1e4, 1e6, 1e7, 2.5] {
            for unit in sweep(40_000) {
                check("pow", -unit, pow(theta, -unit), theta.powf(-unit));
                let y = 40.0 * unit;
                check("pow", y, pow(theta, y), theta.powf(y));
            }
        }
        assert_eq!(pow(1e7, 0.0), 1.0);
        assert_eq!(pow(1.0, f64::MAX), 1.0);
        assert_eq!(pow(2.0, 5000.0), f64::INFINITY);
        assert_eq!(pow(2.0, -5000.0), 0.0);
        assert!(pow(-2.0, 2.0).is_nan());
    }

    #[test]
    fn what_cannot_be_reduced_is_nan() {
        for x in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, ANGLE_MAX.next_up()] {
            let (sin, cos) = sin_cos(x);
            assert!(sin.is_nan());
            assert!(cos.is_nan());
        }
    }

    #[test]
    fn tables_are_laid_out_by_position() {
        let (cos, sin) = rotary_table(5, 10_000.0, 8);
        assert_eq!(cos.len(), 20);
        for (at, (c, s)) in cos.iter().zip(&sin).enumerate() {
            let angle = (at / 4) as f64 * 10_000f64.powf(-((at % 4) as f64) / 4.0);
            assert!((c - angle.cos()).abs() < 1e-15);
            assert!((s - angle.sin()).abs() < 1e-15);
        }
    }

    #[test]
    fn bits_are_the_same_on_every_host() {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        let mut take = |x: f64| hash = (hash ^ x.to_bits()).wrapping_mul(0x0100_0000_01b3).rotate_left(17);
        for unit in sweep(20_000) {
            let (sin, cos) = sin_cos((2.0 * unit - 1.0) * ANGLE_MAX);
            let log = log(1e6 * unit);
            for x in [sin, cos, log, exp(log), pow(1e7, -unit), exp(-740.0 * unit)] {
                take(x);
            }
        }
        assert_eq!(hash, 0x26e2_5dc3_ad7b_885b);
    }
}
