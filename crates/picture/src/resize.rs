//! Antialiased bicubic resizing of bytes, a = -0.5 (`docs/model.md` section 10, step 3).
//!
//! Weights are 16-bit integers as in torchvision's resizing of bytes: the largest precision at which the
//! largest weight stays below 2^15, each rounded half away from zero. Sums are exact integers, so every
//! host gives the same bytes. Columns (the width) first, then rows; each pass rounds and clips to 8 bits.
//! An axis that keeps its length is not touched, which is what its weights would do.

use crate::Rgb;

/// Reach of the kernel on each side of a centre, before stretching.
const SUPPORT: f64 = 2.0;

/// The integer weights of one output sample: `source[first + i]` counts `weights[i]`.
struct Sample {
    first: usize,
    weights: Vec<i32>,
}

/// How one axis is resampled.
struct Axis {
    samples: Vec<Sample>,
    /// Weights are multiplied by `2^precision`.
    precision: u32,
}

fn cubic(x: f64) -> f64 {
    let x = x.abs();
    if x < 1.0 {
        (1.5 * x - 2.5) * x * x + 1.0
    } else if x < 2.0 {
        ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    } else {
        0.0
    }
}

impl Axis {
    fn new(source: usize, target: usize) -> Self {
        let scale = source as f64 / target as f64;
        let stretch = scale.max(1.0);
        let mut largest = 0.0f64;
        let floats: Vec<(usize, Vec<f64>)> = (0..target)
            .map(|at| {
                let centre = (at as f64 + 0.5) * scale;
                // `as` cuts towards zero and clips below it, as the original does.
                let first = (centre - SUPPORT * stretch + 0.5) as usize;
                let end = ((centre + SUPPORT * stretch + 0.5) as usize).min(source);
                let weight = |j: usize| cubic((j as f64 - centre + 0.5) / stretch);
                let mut weights: Vec<f64> = (first..end).map(weight).collect();
                let sum: f64 = weights.iter().sum();
                weights.iter_mut().for_each(|weight| *weight /= sum);
                largest = weights.iter().fold(largest, |most, weight| most.max(*weight));
                (first, weights)
            })
            .collect();
        let fits = |precision: &u32| 0.5 + largest * f64::from(1u32 << (precision + 1)) < 32768.0;
        let precision = (0..22).take_while(fits).count() as u32;
        let unit = f64::from(1u32 << precision);
        let whole = |weight: &f64| (weight * unit + 0.5f64.copysign(*weight)) as i32;
        let samples = floats
            .into_iter()
            .map(|(first, weights)| Sample { first, weights: weights.iter().map(whole).collect() })
            .collect();
        Self { samples, precision }
    }

    /// The sum of weights times bytes as a byte. At most 4 times 16384 bytes of weights below 2^15 whose
    /// sum is about `2^precision`: an `i32` holds it.
    fn round(&self, sum: i32) -> u8 {
        (sum >> self.precision).clamp(0, 255) as u8
    }

    fn half(&self) -> i32 {
        (1 << self.precision) >> 1
    }
}

/// The picture at another size.
pub(crate) fn resize(picture: Rgb, width: u32, height: u32) -> Rgb {
    let wide = if picture.width == width { picture } else { columns(&picture, width) };
    if wide.height == height { wide } else { rows(&wide, height) }
}

fn columns(picture: &Rgb, width: u32) -> Rgb {
    let axis = Axis::new(picture.width as usize, width as usize);
    let mut pixels = Vec::with_capacity(width as usize * picture.height as usize * 3);
    for row in picture.pixels.chunks_exact(picture.width as usize * 3) {
        for sample in &axis.samples {
            let mut sums = [axis.half(); 3];
            let source = row[sample.first * 3..].as_chunks::<3>().0;
            for (pixel, weight) in source.iter().zip(&sample.weights) {
                for c in 0..3 {
                    sums[c] += i32::from(pixel[c]) * weight;
                }
            }
            pixels.extend(sums.map(|sum| axis.round(sum)));
        }
    }
    Rgb { width, height: picture.height, pixels }
}

fn rows(picture: &Rgb, height: u32) -> Rgb {
    let axis = Axis::new(picture.height as usize, height as usize);
    let stride = picture.width as usize * 3;
    let mut pixels = Vec::with_capacity(stride * height as usize);
    let mut sums = vec![0i32; stride];
    for sample in &axis.samples {
        sums.fill(axis.half());
        let source = picture.pixels[sample.first * stride..].chunks_exact(stride);
        for (row, weight) in source.zip(&sample.weights) {
            for (sum, byte) in sums.iter_mut().zip(row) {
                *sum += i32::from(*byte) * weight;
            }
        }
        pixels.extend(sums.iter().map(|sum| axis.round(*sum)));
    }
    Rgb { width: picture.width, height, pixels }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_sum_to_one() {
        for (source, target) in [(42, 48), (34, 32), (24, 16), (52, 64), (1, 32), (8000, 64), (33, 32)] {
            let axis = Axis::new(source, target);
            assert_eq!(axis.samples.len(), target);
            for sample in &axis.samples {
                let sum: i32 = sample.weights.iter().sum();
                let off = (sum - (1 << axis.precision)).unsigned_abs() as usize;
                assert!(off <= sample.weights.len(), "{source} to {target}: {sum}");
                assert!(sample.first + sample.weights.len() <= source);
                assert!(sample.weights.iter().all(|weight| *weight < 1 << 15));
            }
        }
    }

    #[test]
    fn flat_pictures_stay_flat_and_equal_sizes_stay_equal() {
        for level in [0u8, 1, 127, 128, 254, 255] {
            let flat = Rgb { width: 37, height: 5, pixels: vec![level; 37 * 5 * 3] };
            let resized = resize(flat, 64, 32);
            assert!(resized.pixels.iter().all(|byte| *byte == level), "{level}");
        }
        let pixels: Vec<u8> = (0..32 * 32 * 3).map(|i| (i * 7 % 256) as u8).collect();
        let picture = Rgb { width: 32, height: 32, pixels };
        assert_eq!(resize(picture.clone(), 32, 32), picture);
    }
}
