//! `Q`: a group of activations as integer codes times one power of two (`docs/arithmetic.md`, building
//! blocks).

/// `G` of matrix inputs: codes reach `2^14`.
pub const ACTIVATION_BITS: i32 = 14;
/// `G` of q rows and probability rows: codes reach `2^11`.
pub const ATTENTION_BITS: i32 = 11;
/// Group length of q rows and probability rows.
pub const ATTENTION_GROUP: usize = 64;
/// A group whose largest magnitude is below this has only zero codes: `2^-40`.
pub const MAGNITUDE_MIN: f32 = f32::from_bits((127 - 40) << 23);
/// A group whose largest magnitude reaches this (or is NaN or infinite) faults its request: `2^40`.
pub const MAGNITUDE_MAX: f32 = f32::from_bits((127 + 40) << 23);

/// What `Q` says about one group besides its codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantizedGroup {
    /// `u = 2^(e-G)`: value = code * unit. NaN for a group that faults its request (a NaN, an infinity or a
    /// magnitude of `2^40` or more; its codes are zeros): every result made from it is then NaN.
    pub unit: f32,
    /// Sum of the codes.
    pub sum: i32,
}

/// Quantizes one group: the definition. `bits` is `G`; `codes[i] * unit` is `values[i]` rounded to 11
/// significant bits and to multiples of `unit`.
///
/// # Panics
/// If the lengths differ.
pub fn quantize_group(bits: i32, values: &[f32], codes: &mut [i16]) -> QuantizedGroup {
    assert_eq!(values.len(), codes.len(), "one code per value");
    // Maximum on the bits of |x|, so that NaN and infinity win.
    let magnitude = values.iter().fold(0u32, |m, x| m.max(x.to_bits() & 0x7fff_ffff));
    if magnitude < MAGNITUDE_MIN.to_bits() || magnitude >= MAGNITUDE_MAX.to_bits() {
        codes.fill(0);
        let unit = if magnitude < MAGNITUDE_MIN.to_bits() { 0.0 } else { f32::NAN };
        return QuantizedGroup { unit, sum: 0 };
    }
    // 2^(e-1) <= m < 2^e; m is normal here.
    let e = (magnitude >> 23) as i32 - 126;
    let to_code = power_of_two(bits - e);
    let mut sum = 0;
    for (code, &x) in codes.iter_mut().zip(values) {
        let t = x * to_code;
        // |t| <= 2^14: rounding to 11 significant bits is rounding to a multiple of 1, 2, 4 or 8.
        let step_exponent = ((t.to_bits() >> 23) & 0xff).max(127 + 10) as i32 - 127 - 10;
        let rounded = (t * power_of_two(-step_exponent)).round_ties_even() * power_of_two(step_exponent);
        *code = rounded as i16;
        sum += *code as i32;
    }
    QuantizedGroup { unit: power_of_two(e - bits), sum }
}

#[inline(always)]
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{f16_from_f32, f16_to_f32};

    /// The second form of the text: `half(x * 2^(G-24-e)) * 2^24`.
    fn by_half(bits: i32, x: f32, e: i32) -> f32 {
        f16_to_f32(f16_from_f32((x as f64 * ((bits - 24 - e) as f64).exp2()) as f32)) * 16_777_216.0
    }

    #[test]
    fn codes_equal_the_half_form() {
        let mut state = 1u64;
        let mut next = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u32
        };
        for round in 0..20_000 {
            let scale = ((next() % 60) as f32 - 30.0).exp2();
            let spread = next() % 12;
            let values: Vec<f32> = (0..64)
                .map(|_| {
                    let sign = if next() % 2 == 0 { 1.0 } else { -1.0 };
                    let small = (-((next() % (spread + 1)) as f32)).exp2();
                    sign * scale * small * (next() as f32 / (1u32 << 31) as f32)
                })
                .collect();
            let bits = if round % 2 == 0 { ACTIVATION_BITS } else { ATTENTION_BITS };
            let mut codes = [0i16; 64];
            let group = quantize_group(bits, &values, &mut codes);
            let m = values.iter().fold(0f32, |m, x| m.max(x.abs()));
            if m < MAGNITUDE_MIN {
                continue;
            }
            let e = (m.to_bits() >> 23) as i32 - 126;
            assert_eq!(group.unit as f64, ((e - bits) as f64).exp2());
            assert_eq!(group.sum, codes.iter().map(|&c| c as i32).sum::<i32>());
            for (x, code) in values.iter().zip(codes) {
                assert!(code.unsigned_abs() <= 1 << bits);
                if bits == ACTIVATION_BITS {
                    assert_eq!(code as f32, by_half(bits, *x, e), "{x} in a group of {m}");
                } else {
                    assert_eq!(code as f64, (*x as f64 / group.unit as f64).round_ties_even());
                }
            }
        }
    }

    #[test]
    fn edges() {
        let check = |values: &[f32], unit: f32, sum: i32| {
            let mut codes = vec![1; values.len()];
            let group = quantize_group(14, values, &mut codes);
            assert_eq!((group.unit.to_bits(), group.sum), (unit.to_bits(), sum), "{values:?}");
            codes
        };
        check(&[0.0, -0.0], 0.0, 0);
        check(&[MAGNITUDE_MIN.next_down(), 0.0], 0.0, 0);
        check(&[MAGNITUDE_MIN, 0.0], (-53f32).exp2(), 8192);
        check(&[MAGNITUDE_MAX, 0.0], f32::NAN, 0);
        check(&[f32::NAN, 1.0], f32::NAN, 0);
        check(&[f32::NEG_INFINITY, 1.0], f32::NAN, 0);
        // Just below a power of two rounds up to the full 2^14.
        assert_eq!(check(&[1f32.next_down(), -1f32.next_down()], (-14f32).exp2(), 0), [16384, -16384]);
        // Ties at 11 bits go to even: 2049 is between 2048 and 2050.
        assert_eq!(
            check(&[0.75, 2049.0 / 16384.0, 2051.0 / 16384.0], (-14f32).exp2(), 12288 + 2048 + 2052)[1],
            2048
        );
    }
}
