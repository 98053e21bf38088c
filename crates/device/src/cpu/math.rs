//! The transcendental functions of `docs/arithmetic.md` (rule 2) in f32: one polynomial each, branch-free,
//! made of `+ - * /`, fused multiply-add, comparisons with selects and integer operations on bits, so that
//! the same text gives the same bits in Rust, CUDA and OpenCL and vectorizes anywhere.
//!
//! Stated errors are against float64 over every f32 input; the tests walk a strided part of them.

use std::f32::consts::{LN_2, LOG2_E};

/// `1.5 * 2^23`: adding it rounds a small float to an integer (ties to even) in the low bits.
pub(super) const ROUND: f32 = 12_582_912.0;
/// The high 15 bits of `ln 2`: its product with an exponent is exact.
const LN2_HIGH: f32 = 0.693_145_75;
/// `ln 2` less [`LN2_HIGH`].
const LN2_LOW: f32 = 1.428_606_8e-6;
/// Below this `exp` is +0.
const EXP_MIN: f32 = -87.0;
/// Below this `exp2` is +0.
const EXP2_MIN: f32 = -126.0;

/// `2^n` for `n` from -126 to 127; other n give some float without a meaning.
#[inline(always)]
pub(crate) fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `p * 2^n` for `n` from -127 to 129 and p near 1, overflowing to infinity. Two factors, because `2^128` is
/// not a float. A NaN p stays NaN whatever n is.
#[inline(always)]
fn scale(p: f32, n: i32) -> f32 {
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// `e^x` within 1.1 units in the last place; +0 below -87, +inf above 88.73, NaN for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Clamps by selects that keep NaN; the results of clamped inputs are replaced or overflow.
    let c = if x > 89.0 { 89.0 } else { x };
    let c = if c < -88.0 { -88.0 } else { c };
    let shifted = c.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HIGH, c);
    let r = n.mul_add(-LN2_LOW, r);
    let q = 0.001_381_446_7f32;
    let q = q.mul_add(r, 0.008_368_781);
    let q = q.mul_add(r, 0.041_668_393);
    let q = q.mul_add(r, 0.166_665_2);
    let q = q.mul_add(r, 0.499_999_94);
    let p = q.mul_add(r * r, r) + 1.0;
    let result = scale(p, exponent(shifted));
    if x < EXP_MIN { 0.0 } else { result }
}

/// `2^x` within 1 unit in the last place, exact for integers; +0 below -126, +inf from 128 on, NaN for NaN.
#[inline(always)]
pub(crate) fn exp2(x: f32) -> f32 {
    let c = if x > 129.0 { 129.0 } else { x };
    let c = if c < EXP2_MIN { EXP2_MIN } else { c };
    let shifted = c + ROUND;
    let r = c - (shifted - ROUND);
    let q = 0.000_153_533_62f32;
    let q = q.mul_add(r, 0.001_339_887_4);
    let q = q.mul_add(r, 0.009_618_437);
    let q = q.mul_add(r, 0.055_503_324);
    let q = q.mul_add(r, 0.240_226_48);
    let q = q.mul_add(r, LN_2);
    let result = scale(q.mul_add(r, 1.0), exponent(shifted));
    if x < EXP2_MIN { 0.0 } else { result }
}

/// The integer in `shifted = n + ROUND`; anything for NaN.
#[inline(always)]
fn exponent(shifted: f32) -> i32 {
    shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32
}

/// `ln x` within 1 unit in the last place, subnormals included; -inf at 0, NaN below, +inf at +inf.
#[inline(always)]
pub(crate) fn log(x: f32) -> f32 {
    let tiny = x < f32::MIN_POSITIVE;
    let scaled = if tiny { x * 8_388_608.0 } else { x };
    // x = 2^e * m with m from sqrt(1/2) to sqrt(2).
    let bits = scaled.to_bits().wrapping_sub(0x3f35_04f3) as i32;
    let e = bits >> 23;
    let m = f32::from_bits(scaled.to_bits().wrapping_sub((e << 23) as u32));
    let e = (if tiny { e - 23 } else { e }) as f32;
    let f = m - 1.0;
    let z = f * f;
    let p = 0.067_466_006f32;
    let p = p.mul_add(f, -0.116_796_54);
    let p = p.mul_add(f, 0.118_903_235);
    let p = p.mul_add(f, -0.124_051_355);
    let p = p.mul_add(f, 0.142_192_24);
    let p = p.mul_add(f, -0.166_680_07);
    let p = p.mul_add(f, 0.200_021_34);
    let p = p.mul_add(f, -0.250_000_1);
    let p = p.mul_add(f, 0.333_333_13);
    let y = e.mul_add(LN2_LOW, f * z * p);
    let y = z.mul_add(-0.5, y);
    let result = e.mul_add(LN2_HIGH, f + y);
    let result = if x == f32::INFINITY { x } else { result };
    let result = if x == 0.0 { f32::NEG_INFINITY } else { result };
    // Also true for NaN.
    if x >= 0.0 { result } else { f32::NAN }
}

/// `1 / (1 + e^-x)`: error below 2^-22 of the result, or 2^-126; +0 below -88.73.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x * sigmoid(x)` as `x / (1 + e^-x)`: error below 2^-22 of the result, or 2^-119; NaN at -inf.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))` as `x sigmoid(2 ...)`: error below 2^-22 of `|x|`; NaN
/// at -inf.
#[inline(always)]
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    /// `2 sqrt(2 / pi)`.
    const LINEAR: f32 = 1.595_769_2;
    /// `0.044715` of it.
    const CUBIC: f32 = 0.071_354_816;
    let t = x * (x * x).mul_add(CUBIC, LINEAR);
    x / (1.0 + exp(-t))
}

/// `x / 2 (1 + erf(x / sqrt(2)))`: error below 2^-22 of `|x|`; NaN at -inf.
#[inline(always)]
pub(crate) fn gelu_erf(x: f32) -> f32 {
    (x * 0.5) * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2))
}

/// The error function within 1.6 units in the last place.
#[inline(always)]
fn erf(x: f32) -> f32 {
    /// Below it an odd polynomial, from it on `1 - e^p`.
    const NEAR: f32 = 0.927_734_4;
    let (t, s) = (x.abs(), x * x);
    let r = (-1.728_534_7e-5f32).mul_add(t, 3.831_971_3e-4);
    let u = (-3.883_964_4e-3f32).mul_add(t, 2.425_462_2e-2);
    let r = r.mul_add(s, u);
    let r = r.mul_add(t, -1.067_778_8e-1);
    let r = r.mul_add(t, -6.348_469e-1);
    let r = r.mul_add(t, -1.287_175_1e-1);
    let r = r.mul_add(t, -t);
    let far = (1.0 - exp(r)).copysign(x);
    let r = -5.967_617e-4f32;
    let r = r.mul_add(s, 4.991_194_2e-3);
    let r = r.mul_add(s, -2.676_813_5e-2);
    let r = r.mul_add(s, 1.128_199_3e-1);
    let r = r.mul_add(s, -3.761_253_4e-1);
    let r = r.mul_add(s, 1.283_791_7e-1);
    let near = r.mul_add(x, x);
    if t > NEAR { far } else { near }
}

/// `ln(1 + e^x)` as `max(x, 0) + log1p(e^-|x|)`: relative error below 2^-22 down to -87, +0 below.
#[inline(always)]
pub(crate) fn softplus(x: f32) -> f32 {
    let y = exp(-x.abs());
    // log1p: the rounding error of 1 + y is put back to first order.
    let u = 1.0 + y;
    let log1p = log(u) + (y - (u - 1.0)) / u;
    // A NaN is lost by the select and comes back through y.
    (if x > 0.0 { x } else { 0.0 }) + log1p
}

/// `rint(e^x * 2^40)` for x <= 0: the weight of a token in the exact sums of a draw. NaN gives 0.
#[inline(always)]
pub(crate) fn token_weight(x: f32) -> u64 {
    /// 2^23: from here on an f32 is an integer, and adding it rounds what is below.
    const WHOLE: f32 = 8_388_608.0;
    let scaled = exp(x) * 1_099_511_627_776.0; // exact
    let bits = scaled.to_bits();
    let small = (scaled + WHOLE).to_bits().wrapping_sub(WHOLE.to_bits()) as u64;
    let large = (((bits & 0x7f_ffff) | 0x80_0000) as u64) << ((bits >> 23).wrapping_sub(150) & 31);
    let weight = if scaled < WHOLE { small } else { large };
    if scaled > 0.0 { weight } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A prime, so that all exponents and mantissa ends are met.
    const STRIDE: usize = 193;

    /// Walks f32 inputs; `allowed(exact)` is the absolute error granted.
    fn check(name: &str, ours: fn(f32) -> f32, exact: fn(f64) -> f64, allowed: fn(f64) -> f64) {
        let mut worst = (0f64, 0f32);
        for bits in (0..=u32::MAX).step_by(STRIDE) {
            let x = f32::from_bits(bits);
            if x.is_nan() {
                continue;
            }
            let (got, want) = (ours(x), exact(x as f64));
            if want as f32 == got || (want.is_nan() && got.is_nan()) {
                continue;
            }
            let share = (got as f64 - want).abs() / allowed(want);
            assert!(share <= 1.0, "{name}({x:e}) = {got:e}, expected {want:e}, {share} of the bound");
            worst = if share > worst.0 { (share, x) } else { worst };
        }
        println!("{name}: worst {:.3} of the bound at {:e}", worst.0, worst.1);
    }

    /// One unit in the last place of the f32 nearest to `y`.
    fn unit(y: f64) -> f64 {
        let near = (y as f32).abs();
        (f32::from_bits(near.to_bits() + 1) - near) as f64
    }

    /// 2^-22 of the result, or `2^least`.
    fn relative(y: f64, least: i32) -> f64 {
        (y.abs() * (-22f64).exp2()).max((least as f64).exp2())
    }

    #[test]
    fn exp_is_within_1_1_units() {
        check("exp", exp, |x| if x < -87.0 { 0.0 } else { x.exp() }, |y| 1.1 * unit(y));
    }

    #[test]
    fn exp2_is_within_a_unit() {
        check("exp2", exp2, |x| if x < -126.0 { 0.0 } else { x.exp2() }, unit);
    }

    #[test]
    fn log_is_within_a_unit() {
        check("log", log, f64::ln, unit);
    }

    #[test]
    fn sigmoid_silu_and_softplus_are_close() {
        check("sigmoid", sigmoid, |x| 1.0 / (1.0 + (-x).exp()), |y| relative(y, -126));
        let exact = |x: f64| if x == f64::NEG_INFINITY { f64::NAN } else { x / (1.0 + (-x).exp()) };
        check("silu", silu, exact, |y| relative(y, -119));
        let exact = |x: f64| if x < -87.0 { 0.0 } else { x.max(0.0) + (-x.abs()).exp().ln_1p() };
        check("softplus", softplus, exact, |y| relative(y, -149));
    }

    /// The error function by its series, and by a continued fraction where the series cancels.
    fn erf_exact(x: f64) -> f64 {
        let t = x.abs();
        let value = if t < 3.0 {
            let mut term = t;
            let mut sum = t;
            let mut n = 0.0;
            while term.abs() > 1e-18 * sum && n < 200.0 {
                n += 1.0;
                term *= -t * t / n;
                sum += term / (2.0 * n + 1.0);
            }
            sum * std::f64::consts::FRAC_2_SQRT_PI
        } else {
            let fraction = (1..60).rev().fold(t, |below, k| t + k as f64 / 2.0 / below);
            1.0 - (-t * t).exp() / fraction / std::f64::consts::PI.sqrt()
        };
        value.copysign(x)
    }

    #[test]
    fn the_error_function_and_both_gelus_are_close() {
        check("erf", erf, erf_exact, |y| 1.6 * unit(y));
        let worst = |name: &str, ours: fn(f32) -> f32, exact: &dyn Fn(f64) -> f64| {
            for bits in (0..=u32::MAX).step_by(STRIDE) {
                let x = f32::from_bits(bits);
                if x.is_finite() && x.abs() < 1e30 {
                    let error = (ours(x) as f64 - exact(x as f64)).abs();
                    let allowed = (x.abs() as f64 * (-22f64).exp2()).max((-126f64).exp2());
                    assert!(
                        error <= allowed,
                        "{name}({x:e}) = {:e}, {:e} expected",
                        ours(x),
                        exact(x as f64)
                    );
                }
            }
        };
        worst("gelu_erf", gelu_erf, &|x| x * 0.5 * (1.0 + erf_exact(x * std::f64::consts::FRAC_1_SQRT_2)));
        worst("gelu_tanh", gelu_tanh, &|x| {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            x / (1.0 + (-2.0 * inner).exp())
        });
    }

    #[test]
    fn special_values() {
        for f in [exp, exp2, log, sigmoid, silu, softplus, gelu_tanh, gelu_erf] {
            assert!(f(f32::NAN).is_nan() && f(-f32::NAN).is_nan());
        }
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(EXP_MIN.next_down()).to_bits(), 0);
        assert!(exp(EXP_MIN) >= f32::MIN_POSITIVE);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp2(f32::NEG_INFINITY).to_bits(), 0);
        for n in -126..=127 {
            assert_eq!(exp2(n as f32), power_of_two(n));
        }
        assert_eq!(exp2(128.0), f32::INFINITY);
        assert_eq!(log(1.0).to_bits(), 0);
        assert_eq!(log(-0.0), f32::NEG_INFINITY);
        assert!(log(-1.0).is_nan() && log(f32::NEG_INFINITY).is_nan());
        assert_eq!(log(f32::INFINITY), f32::INFINITY);
        assert_eq!(softplus(f32::INFINITY), f32::INFINITY);
        for x in (0..300_000).map(|i| i as f32 * -1e-4) {
            let exact = (exp(x) as f64 * (40f64).exp2()).round_ties_even();
            assert_eq!(token_weight(x) as f64, exact, "{x}");
        }
        assert_eq!((token_weight(0.0), token_weight(-100.0), token_weight(f32::NAN)), (1 << 40, 0, 0));
    }
}
