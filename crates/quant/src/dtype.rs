//! Float dtypes of stored tensors and their exact widening.

/// A float dtype a checkpoint may store (formats.md section 2, rule 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// The safetensors name: `BF16`, `F16` or `F32`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::F32 => "F32",
        }
    }
}

/// Exact widening of a bfloat16.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Nearest bfloat16, ties to even; NaN stays NaN.
pub fn bf16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits as u64 + 0x7fff + ((bits >> 16) & 1) as u64) >> 16) as u16
}

/// Exact widening of an IEEE half, subnormals kept.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = ((bits & 0x8000) as u32) << 16;
    let exponent = ((bits >> 10) & 0x1f) as u32;
    let fraction = (bits & 0x3ff) as u32;
    match exponent {
        0 => {
            let magnitude = fraction as f32 * f32::from_bits(0x3380_0000); // 2^-24
            f32::from_bits(sign | magnitude.to_bits())
        }
        31 => f32::from_bits(sign | 0x7f80_0000 | (fraction << 13)),
        _ => f32::from_bits(sign | ((exponent + 112) << 23) | (fraction << 13)),
    }
}

/// Nearest IEEE half, ties to even, subnormals kept, overflow to infinity; NaN stays NaN.
pub fn f16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00;
    }
    if magnitude >= 0x4780_0000 {
        return sign | 0x7c00; // 65536 and above; 65520..65536 carry over below
    }
    if magnitude < 0x3880_0000 {
        // Below 2^-14: the half step is 2^-24, and adding 0.5 = 2^-1 makes f32 round at 2^-24.
        let rounded = f32::from_bits(magnitude) + 0.5;
        return sign | (rounded.to_bits() - 0.5f32.to_bits()) as u16;
    }
    let rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    sign | ((rounded - 0x3800_0000) >> 13) as u16
}

/// Element `index` of a packed float array, widened exactly.
///
/// # Panics
/// If the element is outside `bytes`.
#[inline]
pub fn read_float(dtype: Dtype, bytes: &[u8], index: usize) -> f32 {
    let at = index * dtype.size();
    match dtype {
        Dtype::Bf16 => bf16_to_f32(u16::from_le_bytes([bytes[at], bytes[at + 1]])),
        Dtype::F16 => f16_to_f32(u16::from_le_bytes([bytes[at], bytes[at + 1]])),
        Dtype::F32 => f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]),
    }
}

/// Widens the first `out.len()` elements of `bytes`.
///
/// # Panics
/// If `bytes` is shorter.
pub fn read_float_row(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    let bytes = &bytes[..out.len() * dtype.size()];
    match dtype {
        Dtype::Bf16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = bf16_to_f32(u16::from_le_bytes([b[0], b[1]]));
            }
        }
        Dtype::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = f16_to_f32(u16::from_le_bytes([b[0], b[1]]));
            }
        }
        Dtype::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_round_trips() {
        for bits in 0..=u16::MAX {
            let wide = f16_to_f32(bits);
            if wide.is_nan() {
                assert!(f16_to_f32(f16_from_f32(wide)).is_nan());
            } else {
                assert_eq!(f16_from_f32(wide), bits, "{wide}");
            }
        }
    }

    #[test]
    fn half_ties_go_to_even() {
        for bits in 0..0x7bffu16 {
            let (low, high) = (f16_to_f32(bits), f16_to_f32(bits + 1));
            let middle = ((low as f64 + high as f64) / 2.0) as f32;
            assert_eq!(f16_from_f32(middle), if bits % 2 == 0 { bits } else { bits + 1 });
            assert_eq!(f16_from_f32(middle.next_down()), bits);
            assert_eq!(f16_from_f32(middle.next_up()), bits + 1);
        }
        assert_eq!(f16_from_f32(65520.0), 0x7c00);
        assert_eq!(f16_from_f32(65519.0), 0x7bff);
    }

    #[test]
    fn every_bf16_round_trips_and_ties_go_to_even() {
        for bits in 0..=u16::MAX {
            let wide = bf16_to_f32(bits);
            if wide.is_nan() {
                assert!(bf16_to_f32(bf16_from_f32(wide)).is_nan());
                continue;
            }
            assert_eq!(bf16_from_f32(wide), bits);
            if wide.is_finite() {
                let middle = f32::from_bits(((bits as u32) << 16) | 0x8000);
                assert_eq!(bf16_from_f32(middle), if bits % 2 == 0 { bits } else { bits + 1 });
            }
        }
    }
}
