//! Stages of the vision tower.

use std::ops::Range;

use super::*;
use crate::{Activation, AttentionShape, Between, CHANNELS, KvForm, KvShape, PAGE_TOKENS, Pixels};

const ROWS: usize = 70;
const EPS: f32 = 1e-6;

/// Values with tiny, huge and non-finite rows among them.
fn wild(seed: u64, width: usize) -> Vec<f64> {
    let mut values = Noise::new(seed).values(ROWS * width);
    for (row, scale) in [(3, 1e-30), (5, 1e11), (7, 0.0)] {
        values[row * width..(row + 1) * width].iter_mut().for_each(|x| *x = (*x * scale) as f32 as f64);
    }
    values[11 * width] = f64::NAN;
    values
}

/// LayerNorm, the three biases and the residual add of some rows, one after another.
fn row_stages(device: &mut dyn Device, x: &[f64], width: usize, rows: usize) -> Vec<f32> {
    let mut noise = Noise::new(4);
    let [weight, bias] = [0, 1].map(|_| device.vector(&noise.values(width)).expect("fits"));
    let (x, delta) = (filled(device, width, x), filled(device, width, &noise.values(ROWS * width)));
    let out = device.buffer(ROWS, width).expect("fits");
    device.layer_norm(x, rows, weight, bias, EPS, out).expect("runs");
    let mut all = read(device, out, rows * width);
    for act in [Activation::None, Activation::GeluTanh, Activation::GeluErf] {
        device.bias(out, rows, bias, act).expect("runs");
        all.extend(read(device, out, rows * width));
    }
    device.add_bias(x, delta, rows, bias).expect("runs");
    all.extend(read(device, x, rows * width));
    all
}

#[test]
fn rows_are_pure_and_close() {
    for width in [8, 72, 257, 1152] {
        let whole = same_everywhere("rows", |device| row_stages(device, &wild(1, width), width, ROWS));
        for rows in [1, 2, 17] {
            let found = same_everywhere("rows", |device| row_stages(device, &wild(1, width), width, rows));
            for (part, whole) in found.chunks(rows * width).zip(whole.chunks(ROWS * width)) {
                assert_bits(part, &whole[..rows * width], "rows");
            }
        }
        let mild = Noise::new(2).values(ROWS * width);
        close_to_reference("rows", 1e-6, |device| row_stages(device, &mild, width, ROWS));
    }
}

/// Levels of three channels, all different.
fn levels() -> [[f32; 256]; CHANNELS] {
    std::array::from_fn(|channel| std::array::from_fn(|byte| (256 * channel + byte) as f32 / 300.0 - 1.0))
}

#[test]
fn pixels_become_rows_of_frames() {
    const AREA: usize = 5;
    let (levels, bytes) = (levels(), (0..21 * CHANNELS * AREA).map(|at| (at * 37) as u8).collect::<Vec<_>>());
    for frames in [1, 2, 3] {
        let width = CHANNELS * frames * AREA;
        let script = |device: &mut dyn Device| {
            let out = filled(device, width, &vec![0.0; 23 * width]);
            let pixels = Pixels { bytes: &bytes, levels: &levels, frames };
            device.patch_rows(pixels, out, 1).expect("runs");
            assert!(device.patch_rows(pixels, out, 3).is_err(), "beyond the buffer");
            let part = Pixels { bytes: &bytes[1..], levels: &levels, frames };
            assert!(device.patch_rows(part, out, 0).is_err(), "part of a patch");
            read(device, out, 23 * width)
        };
        let found = same_everywhere("pixels", script);
        close_to_reference("pixels", 0.0, script);
        assert!(found[..width].iter().chain(&found[22 * width..]).all(|value| *value == 0.0));
        for (at, value) in found[width..22 * width].iter().enumerate() {
            let (patch, channel, pixel) = (at / width, at % width / (frames * AREA), at % AREA);
            let byte = bytes[(patch * CHANNELS + channel) * AREA + pixel];
            assert_eq!(*value, levels[channel][usize::from(byte)], "{at} of {frames} frames");
        }
    }
}

#[test]
fn rows_between_rows_of_a_table() {
    for width in [1, 7, 72, 1152] {
        let table = Noise::new(12).values(9 * width);
        let mut places = vec![
            Between { rows: [4; 4], parts: [0.0, 0.0] },
            Between { rows: [0, 1, 3, 4], parts: [1.0, 0.0] },
        ];
        places.extend((0..40).map(|at| {
            let parts = [at as f64 / 39.0, (at * 7 % 40) as f64 / 39.0];
            Between { rows: [at % 9, (at + 1) % 9, (at + 3) % 9, (at + 4) % 9], parts }
        }));
        let script = |device: &mut dyn Device| {
            let vector = device.vector(&table).expect("fits");
            let out = filled(device, width, &vec![0.0; 44 * width]);
            device.between_rows(vector, &places, out, 2).expect("runs");
            assert!(device.between_rows(vector, &places, out, 3).is_err(), "beyond the buffer");
            let outside = Between { rows: [0, 0, 9, 0], parts: [0.0, 0.0] };
            assert!(device.between_rows(vector, &[outside], out, 0).is_err(), "beyond the table");
            read(device, out, 44 * width)
        };
        let found = same_everywhere("between", script);
        close_to_reference("between", 1e-7, script);
        let row = |n: usize| table[n * width..(n + 1) * width].iter().map(|x| *x as f32).collect::<Vec<_>>();
        assert_eq!(found[2 * width..3 * width], row(4), "a row itself");
        assert_eq!(found[3 * width..4 * width], row(3), "all the way down");
    }
}

#[test]
fn values_are_copied_across_widths() {
    let script = |device: &mut dyn Device| {
        let x = filled(device, 3, &Noise::new(3).values(24));
        let out = filled(device, 6, &[0.0; 24]);
        device.copy_values(x, 2, 4, out, 1).expect("runs");
        assert!(device.copy_values(x, 0, 3, out, 0).is_err(), "half a row");
        read(device, out, 24)
    };
    let found = same_everywhere("copy", script);
    let source: Vec<f32> = Noise::new(3).values(24).iter().map(|x| *x as f32).collect();
    assert_eq!(found[6..18], source[6..18]);
    assert_eq!((&found[..6], &found[18..]), (&[0.0; 6][..], &[0.0; 6][..]));
}

/// The pictures of a batch: rows and columns in patches.
type Grids<'a> = &'a [(usize, usize)];

/// Rows `first..first + chunk` of each of some pictures.
#[derive(Default)]
struct Chunk {
    rows: Vec<Row>,
    windows: Vec<Window>,
    /// Keys of each window: the whole picture's.
    keys: Vec<usize>,
    /// Pictures that have such rows, and which.
    held: Vec<(usize, Range<usize>)>,
}

impl Chunk {
    fn new(grids: Grids<'_>, first: usize, chunk: usize) -> Self {
        let (mut made, mut page) = (Self::default(), 0u32);
        for (at, &(height, columns)) in grids.iter().enumerate() {
            let all = height * columns;
            let own = all.div_ceil(PAGE_TOKENS) as u32;
            let part = first.min(all)..(first + chunk).min(all);
            if !part.is_empty() {
                made.windows.push(Window {
                    place: at as u32,
                    first: made.rows.len(),
                    rows: part.len(),
                    start: part.start,
                    pages: (page..page + own).collect(),
                    parents: None,
                    commit: true,
                });
                made.keys.push(all);
                let position = |i: usize| [0, (i / columns) as u32, (i % columns) as u32];
                made.rows.extend(part.clone().map(|i| Row { token: None, position: position(i) }));
                made.held.push((at, part));
            }
            page += own;
        }
        made
    }
}

/// Rotation, K/V and whole attention of some pictures, in chunks of `chunk` rows of each.
fn attend(device: &mut dyn Device, grids: Grids<'_>, heads: usize, dim: usize, chunk: usize) -> Vec<f32> {
    let shape = AttentionShape { heads, kv_heads: heads, head_dim: dim };
    let width = heads * dim;
    let mut noise = Noise::new(7);
    let bias = device.vector(&noise.values(3 * width)).expect("fits");
    let (cos, sin) = crate::host_math::rotary_table(16, 1e4, dim / 2);
    let twice = |table: &[f64]| table.chunks(dim / 4).flat_map(|row| [row, row].concat()).collect::<Vec<_>>();
    let axes: Vec<u8> = (0..dim / 2).map(|j| if j < dim / 4 { 1 } else { 2 }).collect();
    let rotary = device.rotary(&twice(&cos), &twice(&sin), &axes).expect("fits");
    let pages: usize = grids.iter().map(|(r, c)| (r * c).div_ceil(PAGE_TOKENS)).sum();
    let form = KvForm::Int16;
    let pool = device.kv_pool(KvShape { pages, kv_heads: heads, head_dim: dim, form }).expect("fits");
    let inputs: Vec<Vec<f64>> =
        grids.iter().map(|(r, c)| Noise::new((r * 100 + c) as u64).values(r * c * 3 * width)).collect();
    let longest = grids.iter().map(|(r, c)| r * c).max().expect("pictures");
    let mut queries = inputs.iter().map(|_| Vec::new()).collect::<Vec<Vec<f64>>>();
    let mut out = vec![Vec::new(); grids.len()];
    for second in [false, true] {
        for first in (0..longest).step_by(chunk) {
            let Chunk { rows, windows, keys, held } = Chunk::new(grids, first, chunk);
            let count = rows.len();
            device.begin(&Step::new(rows, windows).expect("valid")).expect("begins");
            let [q, k, v, result] = [0; 4].map(|_| device.buffer(count, width).expect("fits"));
            if second {
                let rows: Vec<f64> = held
                    .iter()
                    .flat_map(|(at, part)| queries[*at][part.start * width..part.end * width].to_vec())
                    .collect();
                device.write(q, 0, &rows).expect("fits");
                device.full_attention(q, shape, pool, &keys, result).expect("runs");
                let values = read(device, result, count * width);
                let mut rest = &values[..];
                for (at, part) in held {
                    let (own, others) = rest.split_at(part.len() * width);
                    out[at].extend_from_slice(own);
                    rest = others;
                }
            } else {
                let rows: Vec<f64> = held
                    .iter()
                    .flat_map(|(at, part)| inputs[*at][part.start * 3 * width..part.end * 3 * width].to_vec())
                    .collect();
                let qkv = filled(device, 3 * width, &rows);
                device.rope_2d(qkv, bias, rotary, shape, q, k, v).expect("runs");
                device.kv_append(k, v, pool).expect("runs");
                let mut values = vec![0.0; count * width];
                device.read_exact(q, 0, &mut values).expect("fits");
                let mut rest = &values[..];
                for (at, part) in held {
                    let (own, others) = rest.split_at(part.len() * width);
                    queries[at].extend_from_slice(own);
                    rest = others;
                }
            }
        }
    }
    out.concat()
}

#[test]
fn pictures_are_whole_in_any_chunk_and_company() {
    for (heads, dim) in [(2, 16), (3, 72)] {
        let grids = [(4, 6), (12, 14), (2, 2), (16, 16)];
        let whole = same_everywhere("attention", |device| attend(device, &grids, heads, dim, 1000));
        for chunk in [7, 64, 100] {
            let found = attend(&mut cpus()[0], &grids, heads, dim, chunk);
            assert_bits(&found, &whole, "chunks");
        }
        let mut alone = Vec::new();
        for grid in grids {
            alone.extend(attend(&mut cpus()[0], &[grid], heads, dim, 50));
        }
        assert_bits(&alone, &whole, "alone");
        // Queries have 11 bits and scores of these inputs reach 15: 2^-12 of them, as in causal attention.
        close_to_reference("attention", 5e-3, |device| attend(device, &grids, heads, dim, 90));
    }
}

#[test]
fn keys_beyond_the_pages_are_refused() {
    for device in [&mut plain() as &mut dyn Device, &mut Reference::new(1)] {
        let shape = AttentionShape { heads: 1, kv_heads: 1, head_dim: 8 };
        let pool = KvShape { pages: 1, kv_heads: 1, head_dim: 8, form: KvForm::Int16 };
        let pool = device.kv_pool(pool).expect("fits");
        let [q, out] = [0; 2].map(|_| device.buffer(1, 8).expect("fits"));
        device.begin(&step(vec![window(0, 0, 1, 0, 0, true)])).expect("begins");
        for keys in [&[][..], &[0], &[65], &[1, 1]] {
            assert!(device.full_attention(q, shape, pool, keys, out).is_err(), "{keys:?}");
        }
    }
}
