//! The two passes of the delta rule over a strip of state, for each instruction set.
//!
//! A strip is `[Dk]` rows of [`STRIP`] columns. Sums over the key index have [`LANES`] lanes, each a vector
//! over the columns, in registers for a whole pass; the plain functions are the definition.

use super::{
    isa::{Isa, by_isa},
    state::{Lanes, STRIP},
};

/// Lanes of a sum over the key index.
pub(crate) const LANES: usize = 16;

/// `S *= g` and `sum_16 of fma(S, k)` per column.
pub(crate) fn decay_and_recall(isa: Isa, strip: &mut [Lanes], k: &[f32], g: f32) -> Lanes {
    assert_eq!(strip.len(), k.len(), "one key value per row");
    #[cfg(target_arch = "x86_64")]
    {
        use super::isa::Kind;
        match isa.kind() {
            Kind::Scalar => {}
            // SAFETY: an `Isa` of a kind exists only where the processor has its features; lengths are equal.
            Kind::Avx2 => return unsafe { x86::avx2_recall(strip, k, g) },
            // SAFETY: as above.
            Kind::Avx512 | Kind::Avx512Vnni => return unsafe { x86::avx512_recall(strip, k, g) },
        }
    }
    let _ = isa;
    decay_and_recall_plain(strip, k, g)
}

/// `S = fma(k, d, S)` and `sum_16 of fma(S, q)` per column.
pub(crate) fn update_and_read(isa: Isa, strip: &mut [Lanes], k: &[f32], q: &[f32], d: &Lanes) -> Lanes {
    assert_eq!((strip.len(), strip.len()), (k.len(), q.len()), "one key and query value per row");
    #[cfg(target_arch = "x86_64")]
    {
        use super::isa::Kind;
        match isa.kind() {
            Kind::Scalar => {}
            // SAFETY: an `Isa` of a kind exists only where the processor has its features; lengths are equal.
            Kind::Avx2 => return unsafe { x86::avx2_update(strip, k, q, d) },
            // SAFETY: as above.
            Kind::Avx512 | Kind::Avx512Vnni => return unsafe { x86::avx512_update(strip, k, q, d) },
        }
    }
    let _ = isa;
    update_and_read_plain(strip, k, q, d)
}

#[inline(always)]
fn update_body(strip: &mut [Lanes], k: &[f32], d: &Lanes) {
    for (s, k) in strip.iter_mut().zip(k) {
        for c in 0..STRIP {
            s[c] = k.mul_add(d[c], s[c]);
        }
    }
}
by_isa! {
    /// `S = fma(k, d, S)`.
    pub(crate) fn update(strip: &mut [Lanes], k: &[f32], d: &Lanes) = update_body
}

/// `lanes[i] += lanes[i + h]` for h = 8 ... 1, whole vectors at a time.
fn tree(mut lanes: [Lanes; LANES]) -> Lanes {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            for c in 0..STRIP {
                lanes[i][c] += lanes[i + half][c];
            }
        }
        half /= 2;
    }
    lanes[0]
}

/// Adds the +0 products of key indices that do not exist to the lanes from `lane` on.
fn pad(lanes: &mut [Lanes; LANES], lane: usize) {
    for values in &mut lanes[lane..] {
        for value in values {
            *value += 0.0;
        }
    }
}

/// `S *= g` and `sum_16 of fma(S, k)` per column.
fn decay_and_recall_plain(strip: &mut [Lanes], k: &[f32], g: f32) -> Lanes {
    let mut lanes = [[0f32; STRIP]; LANES];
    let (whole, rest) = strip.as_chunks_mut::<LANES>();
    let (k_whole, k_rest) = k.as_chunks::<LANES>();
    for (s, k) in whole.iter_mut().zip(k_whole) {
        for l in 0..LANES {
            for c in 0..STRIP {
                s[l][c] *= g;
                lanes[l][c] = s[l][c].mul_add(k[l], lanes[l][c]);
            }
        }
    }
    for (l, (s, k)) in rest.iter_mut().zip(k_rest).enumerate() {
        for c in 0..STRIP {
            s[c] *= g;
            lanes[l][c] = s[c].mul_add(*k, lanes[l][c]);
        }
    }
    if !rest.is_empty() {
        pad(&mut lanes, rest.len());
    }
    tree(lanes)
}

/// `S = fma(k, d, S)` and `sum_16 of fma(S, q)` per column.
fn update_and_read_plain(strip: &mut [Lanes], k: &[f32], q: &[f32], d: &Lanes) -> Lanes {
    let mut lanes = [[0f32; STRIP]; LANES];
    let (whole, rest) = strip.as_chunks_mut::<LANES>();
    let (k_whole, k_rest) = k.as_chunks::<LANES>();
    let (q_whole, q_rest) = q.as_chunks::<LANES>();
    for ((s, k), q) in whole.iter_mut().zip(k_whole).zip(q_whole) {
        for l in 0..LANES {
            for c in 0..STRIP {
                s[l][c] = k[l].mul_add(d[c], s[l][c]);
                lanes[l][c] = s[l][c].mul_add(q[l], lanes[l][c]);
            }
        }
    }
    for (l, ((s, k), q)) in rest.iter_mut().zip(k_rest).zip(q_rest).enumerate() {
        for c in 0..STRIP {
            s[c] = k.mul_add(d[c], s[c]);
            lanes[l][c] = s[c].mul_add(*q, lanes[l][c]);
        }
    }
    if !rest.is_empty() {
        pad(&mut lanes, rest.len());
    }
    tree(lanes)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{LANES, Lanes, STRIP};
    use std::arch::x86_64::*;

    /// Defines both passes for vectors of `$width` columns and `$batch` lanes at a time: as many as the
    /// registers hold. Lanes of a batch take the rows of their residues in ascending order, so every row is
    /// met once.
    macro_rules! passes {
        ($recall:ident, $update:ident, $features:literal, $vector:ty, $width:literal, $batch:literal,
         $zero:ident, $set:ident, $load:ident, $store:ident, $mul:ident, $add:ident, $fma:ident) => {
            /// Calls `$row(lane, row)` in order for the rows of the lanes `first..first + $batch`, and
            /// `$missing(lane)` for the rows that a last, partial round lacks.
            macro_rules! walk {
                ($first:expr, $rows:expr, $row:expr, $missing:expr) => {{
                    let mut at = 0;
                    while at + LANES <= $rows {
                        for l in 0..$batch {
                            $row(l, at + $first + l);
                        }
                        at += LANES;
                    }
                    if at < $rows {
                        for l in 0..$batch {
                            if at + $first + l < $rows {
                                $row(l, at + $first + l);
                            } else {
                                $missing(l);
                            }
                        }
                    }
                }};
            }

            /// # Safety
            /// The features; one key value per row.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $recall(strip: &mut [Lanes], k: &[f32], g: f32) -> Lanes {
                let mut out = [0f32; STRIP];
                let (rows, g) = (strip.len(), $set(g));
                let (state, k) = (strip.as_mut_ptr().cast::<f32>(), k.as_ptr());
                for column in (0..STRIP).step_by($width) {
                    let mut lanes = [$zero(); LANES];
                    for first in (0..LANES).step_by($batch) {
                        let mut sums = [$zero(); $batch];
                        walk!(
                            first,
                            rows,
                            |l: usize, row: usize| {
                                // SAFETY: `row` is below `rows`, `column + width` within the strip.
                                let (at, k) = unsafe { (state.add(row * STRIP + column), *k.add(row)) };
                                // SAFETY: as above.
                                let s = $mul(unsafe { $load(at) }, g);
                                // SAFETY: as above.
                                unsafe { $store(at, s) };
                                sums[l] = $fma(s, $set(k), sums[l]);
                            },
                            |l: usize| sums[l] = $add(sums[l], $zero())
                        );
                        lanes[first..first + $batch].copy_from_slice(&sums);
                    }
                    // SAFETY: `column + width` within the strip.
                    unsafe { $store(out.as_mut_ptr().add(column), tree(lanes, |a, b| $add(a, b))) };
                }
                out
            }

            /// # Safety
            /// The features; one key and query value per row.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $update(strip: &mut [Lanes], k: &[f32], q: &[f32], d: &Lanes) -> Lanes {
                let mut out = [0f32; STRIP];
                let rows = strip.len();
                let (state, k, q) = (strip.as_mut_ptr().cast::<f32>(), k.as_ptr(), q.as_ptr());
                for column in (0..STRIP).step_by($width) {
                    // SAFETY: `column + width` within the strip.
                    let d = unsafe { $load(d.as_ptr().add(column)) };
                    let mut lanes = [$zero(); LANES];
                    for first in (0..LANES).step_by($batch) {
                        let mut sums = [$zero(); $batch];
                        walk!(
                            first,
                            rows,
                            |l: usize, row: usize| {
                                // SAFETY: `row` is below `rows`, `column + width` within the strip.
                                let (at, k, q) =
                                    unsafe { (state.add(row * STRIP + column), *k.add(row), *q.add(row)) };
                                // SAFETY: as above.
                                let s = $fma($set(k), d, unsafe { $load(at) });
                                // SAFETY: as above.
                                unsafe { $store(at, s) };
                                sums[l] = $fma(s, $set(q), sums[l]);
                            },
                            |l: usize| sums[l] = $add(sums[l], $zero())
                        );
                        lanes[first..first + $batch].copy_from_slice(&sums);
                    }
                    // SAFETY: `column + width` within the strip.
                    unsafe { $store(out.as_mut_ptr().add(column), tree(lanes, |a, b| $add(a, b))) };
                }
                out
            }
        };
    }

    /// `lanes[i] += lanes[i + h]` for h = 8 ... 1.
    #[inline(always)]
    fn tree<V: Copy>(mut lanes: [V; LANES], add: impl Fn(V, V) -> V) -> V {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] = add(lanes[i], lanes[i + half]);
            }
        }
        lanes[0]
    }

    passes!(
        avx2_recall,
        avx2_update,
        "avx2,fma",
        __m256,
        8,
        8,
        _mm256_setzero_ps,
        _mm256_set1_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_mul_ps,
        _mm256_add_ps,
        _mm256_fmadd_ps
    );
    passes!(
        avx512_recall,
        avx512_update,
        "avx512f",
        __m512,
        16,
        16,
        _mm512_setzero_ps,
        _mm512_set1_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_mul_ps,
        _mm512_add_ps,
        _mm512_fmadd_ps
    );
}
