//! Which values synthetic tensors hold: codes and scales of matrices, and floats by what they are for.
//!
//! Only additions, multiplications, divisions and square roots are used, which round alike everywhere, so a
//! seed gives the same bytes on every machine.

use quant::{Dtype, Encoding, Scheme, Zero, bf16_from_f32, bf16_to_f32, f16_from_f32};

use super::stream::Stream;

/// Bytes given out at a time; a multiple of everything that must not be cut.
pub(crate) const CHUNK_BYTES: usize = 4 << 20;
/// Different scales of a matrix: a random byte picks one.
const SCALES: usize = 256;
/// Sums of four random bytes.
const SUMS: usize = 4 * 255 + 1;

/// Standard deviation of the values of a matrix with `cols` inputs, `1/sqrt(in)` times a gain.
fn deviation(module: &str, cols: usize) -> f32 {
    let root = (cols as f32).sqrt();
    if module.ends_with("embed_tokens") {
        1.0 // rows of about unit size, which layers add to without drowning them
    } else if module.ends_with(".mlp.gate") {
        2.0 / root // logits far enough apart that experts differ from token to token
    } else {
        1.0 / root
    }
}

/// Codes of a grouped matrix: every bit is even and independent, so every code is as likely as any other.
pub(crate) fn fill_codes(seed: u64, module: &str, start: usize, out: &mut [u8]) {
    debug_assert!(start.is_multiple_of(8), "chunks start at words");
    Stream::new(seed, module, "codes").fill(start as u64 / 8, out);
}

/// Floats of a dense matrix: close to normal, from sums of four bytes.
pub(crate) fn fill_dense(seed: u64, module: &str, cols: usize, start: usize, out: &mut [u8]) {
    debug_assert!(start.is_multiple_of(4), "two values a word");
    let deviation = deviation(module, cols);
    fill_sums(Stream::new(seed, module, "codes"), deviation, start, out);
}

/// BF16 values of standard deviation `deviation` from byte `start` on.
fn fill_sums(stream: Stream, deviation: f32, start: usize, out: &mut [u8]) {
    // Four bytes have variance 4 * (2^16 - 1) / 12.
    let unit = deviation / 21845f32.sqrt();
    let table: Vec<[u8; 2]> =
        (0..SUMS).map(|sum| bf16_from_f32((sum as f32 - 510.0) * unit).to_le_bytes()).collect();
    let value = |index: u64| {
        let word = stream.word(index);
        let pairs = (word & 0x00ff_00ff_00ff_00ff) + ((word >> 8) & 0x00ff_00ff_00ff_00ff);
        let sums = (pairs & 0x0000_ffff_0000_ffff) + ((pairs >> 16) & 0x0000_ffff_0000_ffff);
        let (low, high) = (table[sums as u32 as usize], table[(sums >> 32) as usize]);
        [low[0], low[1], high[0], high[1]]
    };
    let (words, rest) = out.as_chunks_mut::<4>();
    let count = words.len() as u64;
    let first = start as u64 / 4;
    for (index, two) in (first..).zip(words) {
        *two = value(index);
    }
    rest.copy_from_slice(&value(first + count)[..rest.len()]);
}

/// Scales of a grouped matrix, or its biases: sizes differ by a factor of up to 5/3 and half are negative, as
/// tools write them. A bias puts the middle of the codes at zero.
pub(crate) fn fill_scales(
    seed: u64,
    module: &str,
    (cols, scheme): (usize, Scheme),
    biases: bool,
    start: usize,
    out: &mut [u8],
) {
    let size = scheme.scales.size();
    debug_assert!(start.is_multiple_of(8 * size), "eight scales a word");
    let levels = (1u32 << scheme.bits) as f32;
    let base = deviation(module, cols) / ((levels * levels - 1.0) / 12.0).sqrt();
    let middle = (levels - 1.0) / 2.0;
    let narrow = |value: f32| -> (f32, [u8; 4]) {
        let mut bytes = [0; 4];
        let wide = match scheme.scales {
            Dtype::F32 => value,
            Dtype::Bf16 => bf16_to_f32(bf16_from_f32(value)),
            Dtype::F16 => quant::f16_to_f32(f16_from_f32(value)),
        };
        match scheme.scales {
            Dtype::F32 => bytes = value.to_le_bytes(),
            Dtype::Bf16 => bytes[..2].copy_from_slice(&bf16_from_f32(value).to_le_bytes()),
            Dtype::F16 => bytes[..2].copy_from_slice(&f16_from_f32(value).to_le_bytes()),
        }
        (wide, bytes)
    };
    let table: Vec<[u8; 4]> = (0..SCALES)
        .map(|i| {
            let size = base * (0.75 + (i / 2) as f32 / 254.0);
            let (scale, bytes) = narrow(if i % 2 == 0 { size } else { -size });
            if biases { narrow(-middle * scale).1 } else { bytes }
        })
        .collect();
    let stream = Stream::new(seed, module, "scales");
    for (word, eight) in (start as u64 / size as u64 / 8..).zip(out.chunks_mut(8 * size)) {
        let picks = stream.word(word).to_le_bytes();
        for (pick, scale) in picks.iter().zip(eight.chunks_exact_mut(size)) {
            scale.copy_from_slice(&table[*pick as usize][..size]);
        }
    }
}

/// The three arrays of a matrix, whole.
pub(crate) struct Arrays {
    pub(crate) codes: Vec<u8>,
    pub(crate) scales: Vec<u8>,
    pub(crate) biases: Vec<u8>,
}

impl Arrays {
    /// Zeros of the right sizes. Memory is taken by the thread that keeps it: what short-lived threads take
    /// stays in pools of their own when it is given back.
    pub(crate) fn zeros(rows: usize, cols: usize, encoding: Encoding) -> Self {
        let (codes, scales, biases) = match encoding {
            Encoding::Dense(dtype) => (rows * cols * dtype.size(), 0, 0),
            Encoding::Grouped(scheme) => {
                let floats = rows * (cols / scheme.group) * scheme.scales.size();
                let biases = if scheme.zero == Zero::Affine { floats } else { 0 };
                (rows * cols / 8 * scheme.bits as usize, floats, biases)
            }
        };
        Self { codes: vec![0; codes], scales: vec![0; scales], biases: vec![0; biases] }
    }

    /// Writes the values of `module`, a matrix with `cols` inputs in this encoding.
    pub(crate) fn fill(&mut self, seed: u64, module: &str, cols: usize, encoding: Encoding) {
        match encoding {
            Encoding::Dense(_) => fill_dense(seed, module, cols, 0, &mut self.codes),
            Encoding::Grouped(scheme) => {
                fill_codes(seed, module, 0, &mut self.codes);
                fill_scales(seed, module, (cols, scheme), false, 0, &mut self.scales);
                if scheme.zero == Zero::Affine {
                    fill_scales(seed, module, (cols, scheme), true, 0, &mut self.biases);
                }
            }
        }
    }
}

/// The dtype a vector is stored in.
pub(crate) fn vector_dtype(name: &str) -> Dtype {
    if name.ends_with(".A_log") { Dtype::F32 } else { Dtype::Bf16 }
}

/// Values of a vector, in canonical order; each is exact in [`vector_dtype`].
pub(crate) fn vector(seed: u64, name: &str, shape: &[usize]) -> Vec<f32> {
    let stream = Stream::new(seed, name, "floats");
    let len: usize = shape.iter().product();
    let even = |low: f32, high: f32| -> Vec<f32> {
        (0..len as u64).map(|i| low + (high - low) * stream.unit(i)).collect()
    };
    let narrow = |values: Vec<f32>| values.into_iter().map(|v| bf16_to_f32(bf16_from_f32(v))).collect();
    if name.ends_with(".A_log") {
        return even(-0.7, 2.1); // decay rates of 0.5 to 8
    }
    if name.ends_with(".dt_bias") {
        return narrow(even(-5.0, 0.5)); // steps of 0.007 to 1
    }
    let is_norm = name.contains("norm") && name.ends_with(".weight");
    if is_norm {
        return offsets(stream, len).into_iter().map(|w| 1.0 + w).collect();
    }
    let inner: usize = shape.iter().skip(1).product();
    let deviation = match name {
        _ if name.ends_with(".bias") => 0.02,
        _ if name.ends_with("pos_embed.weight") => 0.1,
        _ => 1.0 / (inner as f32).sqrt(),
    };
    let mut bytes = vec![0; 2 * len];
    fill_sums(stream, deviation, 0, &mut bytes);
    let mut values = vec![0.0; len];
    quant::read_float_row(Dtype::Bf16, &bytes, &mut values);
    values
}

/// Offsets `w` of a norm: multiples of 2^-7 up to 1/8, so that `w` and `1 + w` are both exact in BF16.
pub(crate) fn norm_offsets(seed: u64, name: &str, len: usize) -> Vec<f32> {
    offsets(Stream::new(seed, name, "floats"), len)
}

fn offsets(stream: Stream, len: usize) -> Vec<f32> {
    let step = |i: u64| (stream.word(i) % 33) as f32 - 16.0;
    (0..len as u64).map(|i| step(i) / 128.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use quant::{Matrix, dequantize_row_f32};

    const SYMMETRIC: Scheme = Scheme { bits: 4, group: 128, zero: Zero::Symmetric, scales: Dtype::F16 };

    fn affine(bits: u8) -> Scheme {
        Scheme { bits, group: 64, zero: Zero::Affine, scales: Dtype::Bf16 }
    }

    fn moments(module: &str, encoding: Encoding) -> (f64, f64) {
        let (rows, cols) = (64, 2048);
        let mut arrays = Arrays::zeros(rows, cols, encoding);
        arrays.fill(5, module, cols, encoding);
        let Arrays { codes, scales, biases } = arrays;
        let matrix =
            Matrix::new(rows, cols, encoding, codes.into(), scales.into(), biases.into()).expect("valid");
        let mut row = vec![0.0; cols];
        let (mut sum, mut squares) = (0.0, 0.0);
        for r in 0..rows {
            dequantize_row_f32(&matrix, r, &mut row);
            for &v in &row {
                sum += f64::from(v);
                squares += f64::from(v) * f64::from(v);
            }
        }
        let n = (rows * cols) as f64;
        (sum / n, (squares / n).sqrt() * (cols as f64).sqrt())
    }

    #[test]
    fn matrices_have_the_spread_they_should() {
        let q = "model.language_model.layers.0.self_attn.q_proj";
        let encodings = [3, 4, 8].map(|b| Encoding::Grouped(affine(b)));
        let others = [Encoding::Dense(Dtype::Bf16), Encoding::Grouped(SYMMETRIC)];
        for encoding in encodings.into_iter().chain(others) {
            let (mean, spread) = moments(q, encoding);
            assert!(mean.abs() < 0.002 && (spread - 1.0).abs() < 0.1, "{encoding}: {mean} {spread}");
        }
        let gate = moments("model.language_model.layers.0.mlp.gate", Encoding::Dense(Dtype::Bf16)).1;
        assert!((gate - 2.0).abs() < 0.1, "{gate}");
    }

    #[test]
    fn chunks_join() {
        let whole = |fill: &dyn Fn(usize, &mut [u8])| {
            let mut one = vec![0; 4096];
            fill(0, &mut one);
            let mut two = vec![0; 4096];
            for start in (0..4096).step_by(512) {
                fill(start, &mut two[start..start + 512]);
            }
            assert_eq!(one, two);
        };
        whole(&|start, out| fill_codes(1, "m", start, out));
        whole(&|start, out| fill_dense(1, "m", 64, start, out));
        for scheme in [affine(4), SYMMETRIC] {
            whole(&|start, out| fill_scales(1, "m", (128, scheme), false, start, out));
            whole(&|start, out| fill_scales(1, "m", (128, scheme), true, start, out));
        }
    }

    #[test]
    fn norms_are_exact_in_bf16_both_ways() {
        for w in norm_offsets(1, "x.norm.weight", 1000) {
            for value in [w, 1.0 + w] {
                assert_eq!(bf16_to_f32(bf16_from_f32(value)), value);
            }
        }
    }
}
