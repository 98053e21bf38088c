//! What this machine can do at most: memory reads, 16-bit and f32 multiply-adds per second.
//!
//! Benchmarks state their results as shares of these. Times are processor times of the slowest thread, best
//! of several runs, so that a loaded machine changes them little.

use std::{hint::black_box, thread, time::Duration};

use super::{
    isa::{Isa, Kind},
    pool::{allowed_cores, pin},
};

/// Bytes read by the bandwidth probe: far more than any cache.
const READ_BYTES: usize = 1 << 30;
/// Runs of a probe.
const RUNS: usize = 6;
/// Rounds of an arithmetic probe, and independent sums in flight in each: enough to hide every latency.
const ROUNDS: usize = 2_000_000;
const CHAINS: usize = 12;

/// Bytes per second that `threads` threads together read from memory, each its own part in order.
pub fn read_bandwidth(isa: Isa, threads: usize) -> f64 {
    let words = vec![1u64; READ_BYTES / 8];
    let part = words.len() / threads.max(1);
    let seconds = best(threads, |thread| {
        black_box(read(isa, black_box(&words[thread * part..(thread + 1) * part])));
    });
    (part * threads.max(1) * 8) as f64 / seconds
}

/// 16-bit multiply-adds per second of `threads` threads together, operands in registers: `vpdpwssd`, or
/// `vpmaddwd` and an addition.
pub fn dot16_peak(isa: Isa, threads: usize) -> f64 {
    let lanes = match isa.kind() {
        Kind::Scalar => 1,
        Kind::Avx2 => 16,
        Kind::Avx512 | Kind::Avx512Vnni => 32,
    };
    peak(threads, lanes, || match isa.kind() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this kind exists only where the processor has these features.
        Kind::Avx2 => unsafe { x86::dot16_avx2() },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Kind::Avx512 => unsafe { x86::dot16_avx512() },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Kind::Avx512Vnni => unsafe { x86::dot16_vnni() },
        _ => plain(1i32, |sum, x| sum.wrapping_add(x.wrapping_mul(x))),
    })
}

/// Fused f32 multiply-adds per second of `threads` threads together, operands in registers.
pub fn f32_peak(isa: Isa, threads: usize) -> f64 {
    let lanes = match isa.kind() {
        Kind::Scalar => 1,
        Kind::Avx2 => 8,
        Kind::Avx512 | Kind::Avx512Vnni => 16,
    };
    peak(threads, lanes, || match isa.kind() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this kind exists only where the processor has these features.
        Kind::Avx2 => unsafe { x86::fma_avx2() },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Kind::Avx512 | Kind::Avx512Vnni => unsafe { x86::fma_avx512() },
        _ => plain(1f32, |sum, x| x.mul_add(x, sum)),
    })
}

fn peak(threads: usize, lanes: usize, work: impl Fn() + Sync) -> f64 {
    (threads.max(1) * ROUNDS * CHAINS * lanes) as f64 / best(threads, |_| work())
}

/// The shortest of several runs, in seconds: processor time of the slowest of `threads` pinned threads.
fn best(threads: usize, work: impl Fn(usize) + Sync) -> f64 {
    let threads = threads.max(1);
    let cores = allowed_cores();
    let (work, cores) = (&work, &cores);
    let run = || {
        thread::scope(|scope| {
            let start = |thread: usize| {
                scope.spawn(move || {
                    if cores.len() >= threads {
                        pin(cores[thread]);
                    }
                    let begin = thread_time();
                    work(thread);
                    (thread_time() - begin).as_secs_f64()
                })
            };
            let running: Vec<_> = (0..threads).map(start).collect();
            let join = |slowest: f64, thread: thread::ScopedJoinHandle<'_, f64>| {
                slowest.max(thread.join().expect("a probe does not panic"))
            };
            running.into_iter().fold(0.0, join)
        })
    };
    (0..RUNS).map(|_| run()).fold(f64::INFINITY, f64::min).max(1e-9)
}

/// Processor time of this thread; wall time where the system does not tell.
fn thread_time() -> Duration {
    #[cfg(target_os = "linux")]
    if let Some(time) = clock(libc::CLOCK_THREAD_CPUTIME_ID) {
        return time;
    }
    wall_time()
}

/// Processor time of all threads of this process together; wall time where the system does not tell. Its
/// difference over a call, divided by the threads that took part, is what the call takes on a machine without
/// other load.
pub fn process_time() -> Duration {
    #[cfg(target_os = "linux")]
    if let Some(time) = clock(libc::CLOCK_PROCESS_CPUTIME_ID) {
        return time;
    }
    wall_time()
}

#[cfg(target_os = "linux")]
fn clock(id: libc::clockid_t) -> Option<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec.
    let found = unsafe { libc::clock_gettime(id, &mut time) } == 0;
    found.then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

fn wall_time() -> Duration {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default()
}

/// Reads all words; the result only keeps the reads alive.
fn read(isa: Isa, words: &[u64]) -> u64 {
    match isa.kind() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this kind exists only where the processor has these features.
        Kind::Avx2 => unsafe { x86::read_avx2(words) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Kind::Avx512 | Kind::Avx512Vnni => unsafe { x86::read_avx512(words) },
        _ => words.iter().fold(0, |all, word| all ^ word),
    }
}

/// Multiply-adds one at a time.
fn plain<T: Copy>(one: T, step: impl Fn(T, T) -> T) {
    let x = black_box(one);
    let mut sums = [one; CHAINS];
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            *sum = step(*sum, x);
        }
        black_box(&mut sums);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::{asm, x86_64::*};

    use super::{CHAINS, ROUNDS};

    /// A loop of one instruction (or two, with a temporary) on independent sums. Assembly, because the
    /// compiler would fold a loop whose result it can tell.
    macro_rules! chains {
        ($(#[$meta:meta])* $name:ident, $register:ident, $zero:expr, $one:expr, $($line:literal),+) => {
            $(#[$meta])*
            pub(super) unsafe fn $name() {
                let x = $one;
                let mut sums = [$zero; CHAINS];
                for _ in 0..ROUNDS {
                    for sum in &mut sums {
                        let mut temporary = x;
                        // SAFETY: works on registers only.
                        unsafe {
                            asm!(
                                $($line,)+
                                sum = inout($register) *sum,
                                t = inout($register) temporary,
                                x = in($register) x,
                                options(nomem, nostack, preserves_flags)
                            );
                        }
                        let _ = temporary;
                    }
                }
            }
        };
    }

    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn read_avx2(words: &[u64]) -> u64 {
        let mut sums = [_mm256_setzero_si256(); 4];
        for words in words.as_chunks::<16>().0 {
            for (sum, words) in sums.iter_mut().zip(words.as_chunks::<4>().0) {
                // SAFETY: four words are one vector.
                *sum = _mm256_xor_si256(*sum, unsafe { _mm256_loadu_si256(words.as_ptr().cast()) });
            }
        }
        let sum = _mm256_xor_si256(_mm256_xor_si256(sums[0], sums[1]), _mm256_xor_si256(sums[2], sums[3]));
        _mm256_extract_epi64::<0>(sum) as u64
    }

    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn read_avx512(words: &[u64]) -> u64 {
        let mut sums = [_mm512_setzero_si512(); 4];
        for words in words.as_chunks::<32>().0 {
            for (sum, words) in sums.iter_mut().zip(words.as_chunks::<8>().0) {
                // SAFETY: eight words are one vector.
                *sum = _mm512_xor_si512(*sum, unsafe { _mm512_loadu_si512(words.as_ptr().cast()) });
            }
        }
        let sum = _mm512_xor_si512(_mm512_xor_si512(sums[0], sums[1]), _mm512_xor_si512(sums[2], sums[3]));
        _mm512_reduce_add_epi64(sum) as u64
    }

    chains!(
        #[target_feature(enable = "avx2")]
        dot16_avx2,
        ymm_reg,
        _mm256_setzero_si256(),
        _mm256_set1_epi16(1),
        "vpmaddwd {t:y}, {x:y}, {x:y}",
        "vpaddd {sum:y}, {sum:y}, {t:y}"
    );
    chains!(
        #[target_feature(enable = "avx512f,avx512bw")]
        dot16_avx512,
        zmm_reg,
        _mm512_setzero_si512(),
        _mm512_set1_epi16(1),
        "vpmaddwd {t:z}, {x:z}, {x:z}",
        "vpaddd {sum:z}, {sum:z}, {t:z}"
    );
    chains!(
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        dot16_vnni,
        zmm_reg,
        _mm512_setzero_si512(),
        _mm512_set1_epi16(1),
        "vpdpwssd {sum:z}, {x:z}, {x:z} /* {t:z} */"
    );
    chains!(
        #[target_feature(enable = "avx2,fma")]
        fma_avx2,
        ymm_reg,
        _mm256_setzero_ps(),
        _mm256_set1_ps(1.0),
        "vfmadd231ps {sum:y}, {x:y}, {x:y} /* {t:y} */"
    );
    chains!(
        #[target_feature(enable = "avx512f")]
        fma_avx512,
        zmm_reg,
        _mm512_setzero_ps(),
        _mm512_set1_ps(1.0),
        "vfmadd231ps {sum:z}, {x:z}, {x:z} /* {t:z} */"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_are_plausible_and_wider_is_faster() {
        let peaks: Vec<(f64, f64)> =
            Isa::supported().into_iter().map(|isa| (dot16_peak(isa, 1), f32_peak(isa, 1))).collect();
        for (dot16, f32) in &peaks {
            assert!((1e6..1e14).contains(dot16) && (1e6..1e14).contains(f32), "{dot16:e} {f32:e}");
        }
        let (plain, best) = (peaks[0], peaks[peaks.len() - 1]);
        assert!(best.0 >= plain.0 && best.1 >= plain.1, "{peaks:?}");
    }
}
