//! The engines of x86-64: AVX2, AVX-512 without and with VNNI.
//!
//! VNNI multiplies unsigned bytes of weights with signed bytes of activations: two dots per quad, for the
//! high and the low digit of the codes, `I = 256 * high + low`. The other two widen the even and the odd
//! bytes of a quad to 16 bits and multiply pairs: as many multiplies, more unpacking.

use std::arch::x86_64::*;

use quant::Dtype;

use super::{
    activations::Words,
    kernel::Engine,
    layout::{VECTOR, plane_mask, planes},
};

/// AVX-512 with VNNI.
pub(super) struct Avx512Vnni;
/// AVX-512 F, BW, DQ, VL.
pub(super) struct Avx512;
/// AVX2, FMA and F16C.
pub(super) struct Avx2;

/// Field of width `W` (a plane's) at vector `first`, put at bit `to` of each byte: 16 lanes.
#[inline(always)]
unsafe fn field512<const W: usize, const Q: usize>(unit: *const u8, first: usize, to: usize) -> __m512i {
    let fields = 8 / W;
    let shift = W * (Q % fields);
    // SAFETY: the caller's promise for the whole unit.
    unsafe {
        let word = _mm512_loadu_si512(unit.add((first + Q / fields) * VECTOR).cast());
        let count = _mm_cvtsi32_si128(shift.abs_diff(to) as i32);
        let word = if shift >= to { _mm512_srl_epi32(word, count) } else { _mm512_sll_epi32(word, count) };
        if W == 8 { word } else { _mm512_and_si512(word, _mm512_set1_epi32((plane_mask(W) << to) as i32)) }
    }
}

/// The four codes of each of 16 lanes as bytes.
#[inline(always)]
unsafe fn quad512<const BITS: usize, const Q: usize>(unit: *const u8) -> __m512i {
    let (low, high) = planes(BITS);
    // SAFETY: as above.
    unsafe {
        let word = match low {
            2 => field512::<2, Q>(unit, 0, 0),
            4 => field512::<4, Q>(unit, 0, 0),
            _ => field512::<8, Q>(unit, 0, 0),
        };
        match high {
            1 => _mm512_or_si512(word, field512::<1, Q>(unit, low, low)),
            2 => _mm512_or_si512(word, field512::<2, Q>(unit, low, low)),
            _ => word,
        }
    }
}

/// The float half of an AVX-512 engine.
macro_rules! floats512 {
    () => {
        const LANES: usize = 16;
        type Floats = __m512;

        #[inline(always)]
        unsafe fn splat(value: f32) -> __m512 {
            unsafe { _mm512_set1_ps(value) }
        }
        #[inline(always)]
        unsafe fn multiply(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn add(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn load(dtype: Dtype, from: *const u8) -> __m512 {
            unsafe {
                match dtype {
                    Dtype::F32 => _mm512_loadu_ps(from.cast()),
                    Dtype::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())),
                    Dtype::Bf16 => {
                        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
                    }
                }
            }
        }
        #[inline(always)]
        unsafe fn store(values: __m512, to: *mut f32) {
            unsafe { _mm512_storeu_ps(to, values) }
        }
        #[inline(always)]
        unsafe fn trees(rows: &[__m512; 16]) -> __m512 {
            unsafe { trees512(rows) }
        }
        #[inline(always)]
        unsafe fn prefetch(at: *const u8) {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
        }
    };
}

/// Sixteen trees at once. Each level adds halves of two vectors and leaves the sums of both in one; rows are
/// paired so that the last vector has them in order.
#[inline(always)]
unsafe fn trees512(rows: &[__m512; 16]) -> __m512 {
    // SAFETY: a row is a vector.
    unsafe {
        // Quarters of rows (0, 0, 4, 4) and (8, 8, 12, 12) and the next, then (0, 4, 8, 12) and the next.
        let mut halves = [_mm512_setzero_ps(); 8];
        for at in 0..8 {
            let row = at % 4 + at / 4 * 8;
            let (a, b) = (rows[row], rows[row + 4]);
            halves[at] =
                _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
        }
        let mut quarters = [_mm512_setzero_ps(); 4];
        for at in 0..4 {
            let (a, b) = (halves[at], halves[at + 4]);
            quarters[at] =
                _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
        }
        let a0 = _mm512_shuffle_ps::<0x44>(quarters[0], quarters[1]);
        let a1 = _mm512_shuffle_ps::<0xee>(quarters[0], quarters[1]);
        let b0 = _mm512_shuffle_ps::<0x44>(quarters[2], quarters[3]);
        let b1 = _mm512_shuffle_ps::<0xee>(quarters[2], quarters[3]);
        let (a, b) = (_mm512_add_ps(a0, a1), _mm512_add_ps(b0, b1));
        _mm512_add_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b))
    }
}

/// Eight trees at once, as [`trees512`].
#[inline(always)]
unsafe fn trees256(rows: &[__m256; 16]) -> __m256 {
    // SAFETY: eight floats are a vector.
    unsafe {
        let mut halves = [_mm256_setzero_ps(); 4];
        for row in 0..4 {
            let (a, b) = (rows[row], rows[row + 4]);
            halves[row] =
                _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
        }
        let a0 = _mm256_shuffle_ps::<0x44>(halves[0], halves[1]);
        let a1 = _mm256_shuffle_ps::<0xee>(halves[0], halves[1]);
        let b0 = _mm256_shuffle_ps::<0x44>(halves[2], halves[3]);
        let b1 = _mm256_shuffle_ps::<0xee>(halves[2], halves[3]);
        let (a, b) = (_mm256_add_ps(a0, a1), _mm256_add_ps(b0, b1));
        _mm256_add_ps(_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xdd>(a, b))
    }
}

// SAFETY of the blocks in all engines: `Engine`'s functions are called by code compiled for the engine's
// instruction set, with pointers good for what the function reads or writes.
impl Engine for Avx512Vnni {
    type Weights = __m512i;
    /// High and low digits.
    type Sums = [__m512i; 2];

    floats512!();

    #[inline(always)]
    unsafe fn start(value: i32) -> [__m512i; 2] {
        unsafe { [_mm512_setzero_si512(), _mm512_set1_epi32(value)] }
    }
    #[inline(always)]
    unsafe fn quad<const BITS: usize, const Q: usize>(unit: *const u8) -> __m512i {
        unsafe { quad512::<BITS, Q>(unit) }
    }
    #[inline(always)]
    unsafe fn dot([high, low]: [__m512i; 2], weights: __m512i, words: *const Words) -> [__m512i; 2] {
        unsafe {
            [
                _mm512_dpbusd_epi32(high, weights, _mm512_set1_epi32((*words)[0] as i32)),
                _mm512_dpbusd_epi32(low, weights, _mm512_set1_epi32((*words)[1] as i32)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn finish([high, low]: [__m512i; 2]) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low)) }
    }
}

impl Engine for Avx512 {
    /// Even and odd bytes as 16-bit codes.
    type Weights = [__m512i; 2];
    type Sums = __m512i;

    floats512!();

    #[inline(always)]
    unsafe fn start(value: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(value) }
    }
    #[inline(always)]
    unsafe fn quad<const BITS: usize, const Q: usize>(unit: *const u8) -> [__m512i; 2] {
        unsafe {
            let word = quad512::<BITS, Q>(unit);
            let mask = _mm512_set1_epi32(0x00ff_00ff);
            [_mm512_and_si512(word, mask), _mm512_and_si512(_mm512_srli_epi32::<8>(word), mask)]
        }
    }
    #[inline(always)]
    unsafe fn dot(sums: __m512i, [even, odd]: [__m512i; 2], words: *const Words) -> __m512i {
        unsafe {
            let even = _mm512_madd_epi16(even, _mm512_set1_epi32((*words)[0] as i32));
            let odd = _mm512_madd_epi16(odd, _mm512_set1_epi32((*words)[1] as i32));
            _mm512_add_epi32(_mm512_add_epi32(sums, even), odd)
        }
    }
    #[inline(always)]
    unsafe fn finish(sums: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(sums) }
    }
}

/// As [`field512`], 8 lanes.
#[inline(always)]
unsafe fn field256<const W: usize, const Q: usize>(unit: *const u8, first: usize, to: usize) -> __m256i {
    let fields = 8 / W;
    let shift = W * (Q % fields);
    // SAFETY: the caller's promise for the whole unit.
    unsafe {
        let word = _mm256_loadu_si256(unit.add((first + Q / fields) * VECTOR).cast());
        let count = _mm_cvtsi32_si128(shift.abs_diff(to) as i32);
        let word = if shift >= to { _mm256_srl_epi32(word, count) } else { _mm256_sll_epi32(word, count) };
        if W == 8 { word } else { _mm256_and_si256(word, _mm256_set1_epi32((plane_mask(W) << to) as i32)) }
    }
}

impl Engine for Avx2 {
    const LANES: usize = 8;
    /// Even and odd bytes as 16-bit codes.
    type Weights = [__m256i; 2];
    type Sums = __m256i;
    type Floats = __m256;

    #[inline(always)]
    unsafe fn start(value: i32) -> __m256i {
        unsafe { _mm256_set1_epi32(value) }
    }
    #[inline(always)]
    unsafe fn quad<const BITS: usize, const Q: usize>(unit: *const u8) -> [__m256i; 2] {
        let (low, high) = planes(BITS);
        unsafe {
            let word = match low {
                2 => field256::<2, Q>(unit, 0, 0),
                4 => field256::<4, Q>(unit, 0, 0),
                _ => field256::<8, Q>(unit, 0, 0),
            };
            let word = match high {
                1 => _mm256_or_si256(word, field256::<1, Q>(unit, low, low)),
                2 => _mm256_or_si256(word, field256::<2, Q>(unit, low, low)),
                _ => word,
            };
            let mask = _mm256_set1_epi32(0x00ff_00ff);
            [_mm256_and_si256(word, mask), _mm256_and_si256(_mm256_srli_epi32::<8>(word), mask)]
        }
    }
    #[inline(always)]
    unsafe fn dot(sums: __m256i, [even, odd]: [__m256i; 2], words: *const Words) -> __m256i {
        unsafe {
            let even = _mm256_madd_epi16(even, _mm256_set1_epi32((*words)[0] as i32));
            let odd = _mm256_madd_epi16(odd, _mm256_set1_epi32((*words)[1] as i32));
            _mm256_add_epi32(_mm256_add_epi32(sums, even), odd)
        }
    }
    #[inline(always)]
    unsafe fn finish(sums: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(sums) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> __m256 {
        unsafe { _mm256_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn multiply(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn load(dtype: Dtype, from: *const u8) -> __m256 {
        unsafe {
            match dtype {
                Dtype::F32 => _mm256_loadu_ps(from.cast()),
                Dtype::F16 => _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                Dtype::Bf16 => {
                    let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn store(values: __m256, to: *mut f32) {
        unsafe { _mm256_storeu_ps(to, values) }
    }
    #[inline(always)]
    unsafe fn trees(rows: &[__m256; 16]) -> __m256 {
        unsafe { trees256(rows) }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}
