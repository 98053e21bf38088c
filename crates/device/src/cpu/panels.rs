//! The integer dots of attention: signed byte panels times 16-bit codes, one sum per lane.
//!
//! A panel is `[steps][16 lanes][2]` signed bytes; a vector is `[steps][2]` codes of at most 2^11. Every lane
//! adds `panel[s][lane][0] * x[s][0] + panel[s][lane][1] * x[s][1]` over at most 32 steps: below 2^25, exact
//! in any order. Several vectors (query heads that share a K/V head, or rows) share the loads of a panel.

use super::isa::Isa;

/// Lanes of a panel.
pub(crate) const LANES: usize = 16;
/// Bytes of one step of a panel.
pub(crate) const PANEL_STEP: usize = 2 * LANES;
/// Most vectors of one call.
pub(crate) const VECTORS: usize = 8;

/// Panels that are multiplied by the same vectors.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a> {
    /// First panel's first byte.
    pub(crate) bytes: &'a [i8],
    /// Steps of each.
    pub(crate) steps: usize,
    /// How many.
    pub(crate) count: usize,
    /// Bytes from one panel's start to the next.
    pub(crate) stride: usize,
}

/// `out[v * out_stride + p * 16 + lane]` = dot of lane `lane` of panel `p` with the vector at `x[v *
/// x_stride]`, for `vectors` (1 to [`VECTORS`]) vectors.
pub(crate) fn panel_dots(
    isa: Isa,
    panels: Panels<'_>,
    x: &[i16],
    x_stride: usize,
    vectors: usize,
    out: &mut [i32],
    out_stride: usize,
) {
    assert!((1..=VECTORS).contains(&vectors) && panels.count > 0, "vectors and panels");
    assert!(panels.bytes.len() >= (panels.count - 1) * panels.stride + panels.steps * PANEL_STEP, "panels");
    assert!(x.len() >= (vectors - 1) * x_stride + 2 * panels.steps, "vectors");
    assert!(out.len() >= (vectors - 1) * out_stride + panels.count * LANES, "sums");
    #[cfg(target_arch = "x86_64")]
    {
        use super::isa::Kind;
        match isa.kind() {
            Kind::Scalar => {}
            // SAFETY: an `Isa` of a kind exists only where the processor has its features; the sizes were
            // checked.
            Kind::Avx2 => return unsafe { x86::avx2(panels, x, x_stride, vectors, out, out_stride) },
            // SAFETY: as above.
            Kind::Avx512 => return unsafe { x86::avx512(panels, x, x_stride, vectors, out, out_stride) },
            // SAFETY: as above.
            Kind::Avx512Vnni => return unsafe { x86::vnni(panels, x, x_stride, vectors, out, out_stride) },
        }
    }
    let _ = isa;
    scalar(panels, x, x_stride, vectors, out, out_stride);
}

/// The definition.
fn scalar(p: Panels<'_>, x: &[i16], x_stride: usize, vectors: usize, out: &mut [i32], out_stride: usize) {
    for vector in 0..vectors {
        let x = &x[vector * x_stride..][..2 * p.steps];
        for panel in 0..p.count {
            let mut sums = [0i32; LANES];
            let bytes = &p.bytes[panel * p.stride..][..p.steps * PANEL_STEP];
            for (bytes, x) in bytes.as_chunks::<PANEL_STEP>().0.iter().zip(x.as_chunks::<2>().0) {
                for lane in 0..LANES {
                    sums[lane] +=
                        bytes[2 * lane] as i32 * x[0] as i32 + bytes[2 * lane + 1] as i32 * x[1] as i32;
                }
            }
            out[vector * out_stride + panel * LANES..][..LANES].copy_from_slice(&sums);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{LANES, PANEL_STEP, Panels};
    use std::arch::x86_64::*;

    /// The two codes of step `step`, in every lane's place.
    ///
    /// # Safety
    /// `x` must have two codes at `2 * step`.
    #[inline(always)]
    unsafe fn pair(x: *const i16, step: usize) -> i32 {
        // SAFETY: the caller's promise; the read may be unaligned.
        unsafe { x.add(2 * step).cast::<i32>().read_unaligned() }
    }

    /// Defines a function that picks `$kernel::<N>` for the number of vectors, `$at_most` at a time.
    macro_rules! by_vectors {
        ($name:ident, $kernel:ident, $features:literal, $at_most:literal, [$($n:literal),*]) => {
            /// # Safety
            /// The processor has the features, and the sizes are those `panel_dots` checks.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name(
                p: Panels<'_>,
                x: &[i16],
                x_stride: usize,
                vectors: usize,
                out: &mut [i32],
                out_stride: usize,
            ) {
                let mut first = 0;
                while first < vectors {
                    let n = (vectors - first).min($at_most);
                    for panel in 0..p.count {
                        // SAFETY: inside the checked sizes.
                        unsafe {
                            let bytes = p.bytes.as_ptr().add(panel * p.stride);
                            let x = x.as_ptr().add(first * x_stride);
                            let out = out.as_mut_ptr().add(first * out_stride + panel * LANES);
                            match n {
                                $($n => $kernel::<$n>(bytes, p.steps, x, x_stride, out, out_stride),)*
                                _ => unreachable!("at most {} vectors", $at_most),
                            }
                        }
                    }
                    first += n;
                }
            }
        };
    }

    by_vectors!(avx2, avx2_panel, "avx2", 4, [1, 2, 3, 4]);
    by_vectors!(avx512, avx512_panel, "avx512f,avx512bw", 8, [1, 2, 3, 4, 5, 6, 7, 8]);
    by_vectors!(vnni, vnni_panel, "avx512f,avx512bw,avx512vnni", 8, [1, 2, 3, 4, 5, 6, 7, 8]);

    /// # Safety
    /// AVX2; `bytes` has the steps, `x` and `out` N vectors of their strides.
    #[target_feature(enable = "avx2")]
    unsafe fn avx2_panel<const N: usize>(
        bytes: *const i8,
        steps: usize,
        x: *const i16,
        x_stride: usize,
        out: *mut i32,
        out_stride: usize,
    ) {
        let mut sums = [[_mm256_setzero_si256(); 2]; N];
        for step in 0..steps {
            // SAFETY: the caller's promise.
            unsafe {
                let at = bytes.add(step * PANEL_STEP).cast::<__m128i>();
                let low = _mm256_cvtepi8_epi16(_mm_loadu_si128(at));
                let high = _mm256_cvtepi8_epi16(_mm_loadu_si128(at.add(1)));
                for (v, sums) in sums.iter_mut().enumerate() {
                    let codes = _mm256_set1_epi32(pair(x.add(v * x_stride), step));
                    sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(low, codes));
                    sums[1] = _mm256_add_epi32(sums[1], _mm256_madd_epi16(high, codes));
                }
            }
        }
        for (v, sums) in sums.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                let at = out.add(v * out_stride).cast::<__m256i>();
                _mm256_storeu_si256(at, sums[0]);
                _mm256_storeu_si256(at.add(1), sums[1]);
            }
        }
    }

    /// Defines a kernel over whole 512-bit registers; `$dot` adds the products of pairs.
    macro_rules! wide_panel {
        ($name:ident, $features:literal, $dot:expr) => {
            /// # Safety
            /// The features; `bytes` has the steps, `x` and `out` N vectors of their strides.
            #[target_feature(enable = $features)]
            unsafe fn $name<const N: usize>(
                bytes: *const i8,
                steps: usize,
                x: *const i16,
                x_stride: usize,
                out: *mut i32,
                out_stride: usize,
            ) {
                let mut sums = [_mm512_setzero_si512(); N];
                for step in 0..steps {
                    // SAFETY: the caller's promise.
                    unsafe {
                        let at = bytes.add(step * PANEL_STEP).cast::<__m256i>();
                        let wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(at));
                        for (v, sum) in sums.iter_mut().enumerate() {
                            let codes = _mm512_set1_epi32(pair(x.add(v * x_stride), step));
                            *sum = $dot(*sum, wide, codes);
                        }
                    }
                }
                for (v, sum) in sums.iter().enumerate() {
                    // SAFETY: the caller's promise.
                    unsafe { _mm512_storeu_si512(out.add(v * out_stride).cast(), *sum) };
                }
            }
        };
    }

    wide_panel!(avx512_panel, "avx512f,avx512bw", |sum, wide, codes| {
        _mm512_add_epi32(sum, _mm512_madd_epi16(wide, codes))
    });
    wide_panel!(vnni_panel, "avx512f,avx512bw,avx512vnni", |sum, wide, codes| {
        _mm512_dpwssd_epi32(sum, wide, codes)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_gives_the_definition() {
        let mut state = 7u32;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 16
        };
        for (steps, count, gap) in [(32, 4, 3), (4, 5, 0), (1, 1, 0), (16, 2, 1)] {
            let stride = (steps + gap) * PANEL_STEP;
            let mut bytes: Vec<i8> = (0..count * stride).map(|_| next() as i8).collect();
            bytes[..steps * PANEL_STEP].fill(-128);
            let mut x: Vec<i16> = (0..VECTORS * 70).map(|_| (next() % 4097) as i16 - 2048).collect();
            x[..2 * steps].fill(2048);
            let panels = Panels { bytes: &bytes, steps, count, stride };
            for vectors in 1..=VECTORS {
                let mut expected = vec![0; VECTORS * 100];
                scalar(panels, &x, 70, vectors, &mut expected, 100);
                assert_eq!(expected[0], -(steps as i32) * (1 << 19));
                for isa in Isa::supported() {
                    let mut found = vec![0; VECTORS * 100];
                    panel_dots(isa, panels, &x, 70, vectors, &mut found, 100);
                    assert_eq!(found, expected, "{} {vectors} vectors", isa.name());
                }
            }
        }
    }
}
