//! Stages of the vision tower, and the dense matrices it is made of.

use std::time::Instant;

use device::host_math::rotary_table;
use device::{
    Activation, AttentionShape, Between, Buffer, CHANNELS, Device, KvForm, KvShape, MatrixRef, PAGE_TOKENS,
    Pixels, Rotary, Row, Step, VectorRef, Window,
};
use quant::{Dtype, Matrix};

use crate::{KINDS, Kind, Noise, Pair, filled, read};

const EPS: f32 = 1e-6;

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rows_of_a_picture() {
    let mut pair = Pair::new();
    for (kind, width) in KINDS.into_iter().flat_map(|kind| [8, 72, 257, 1152].map(|width| (kind, width))) {
        let rows = [1, 17, 70][width % 3];
        let mut noise = Noise::new(width as u64 + 300);
        let (x, delta) = (kind.values(&mut noise, rows, width), kind.values(&mut noise, rows, width));
        let (weight, bias) = (noise.values(width), noise.values(width));
        pair.same(&format!("rows of a picture, {rows} {kind:?} of {width}"), |device| {
            let [weight, bias] = [&weight, &bias].map(|values| device.vector(values).unwrap());
            let (x, delta) = (filled(device, width, &x), filled(device, width, &delta));
            let out = device.buffer(rows, width).unwrap();
            device.layer_norm(x, rows, weight, bias, EPS, out).unwrap();
            let mut found = read(device, out, rows * width);
            for act in [Activation::None, Activation::GeluTanh, Activation::GeluErf] {
                device.bias(out, rows, bias, act).unwrap();
                found.extend(read(device, out, rows * width));
                device.bias(delta, rows, bias, act).unwrap();
                found.extend(read(device, delta, rows * width));
            }
            device.add_bias(x, delta, rows, bias).unwrap();
            found.extend(read(device, x, rows * width));
            found
        });
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn patches_and_their_places() {
    let mut pair = Pair::new();
    let levels =
        std::array::from_fn(|channel| std::array::from_fn(|byte| (channel * 256 + byte) as f32 / 255.0));
    for (rows, side, frames) in [(1, 1, 1), (17, 3, 2), (300, 16, 2), (4100, 16, 2)] {
        let (area, mut noise) = (side * side, Noise::new(rows as u64 + 40));
        let width = CHANNELS * frames * area;
        let bytes: Vec<u8> = (0..rows * CHANNELS * area).map(|at| ((at * 2654435761) >> 7) as u8).collect();
        let table = noise.values(25 * width);
        let places: Vec<Between> = (0..rows as u32)
            .map(|at| Between {
                rows: [at % 25, (at + 1) % 25, (at + 5) % 25, (at + 6) % 25],
                parts: [f64::from(at % 7) / 6.0, f64::from(at % 11) / 10.0],
            })
            .collect();
        pair.same(&format!("{rows} patches of {side} x {side}, {frames} frames"), |device| {
            let table = device.vector(&table).unwrap();
            let out = device.buffer(rows + 1, width).unwrap();
            let pixels = Pixels { bytes: &bytes, levels: &levels, frames };
            device.patch_rows(pixels, out, 1).unwrap();
            assert!(device.patch_rows(pixels, out, 2).is_err(), "beyond the buffer");
            let mut found = read(device, out, (rows + 1) * width);
            device.between_rows(table, &places, out, 1).unwrap();
            assert!(device.between_rows(table, &places, out, 2).is_err(), "beyond the buffer");
            found.extend(read(device, out, (rows + 1) * width));
            found
        });
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn values_are_copied_across_widths() {
    Pair::new().same("copied values", |device| {
        let x = filled(device, 3, &Noise::new(3).values(24));
        let out = filled(device, 6, &[0.0; 24]);
        device.copy_values(x, 2, 4, out, 1).unwrap();
        assert!(device.copy_values(x, 0, 3, out, 0).is_err(), "half a row");
        read(device, out, 24)
    });
    let mut device = crate::cuda();
    let (x, out) = (device.buffer(8, 3).unwrap(), device.buffer(4, 6).unwrap());
    assert!(device.copy_values(x, 6, 4, out, 0).is_err(), "beyond the source");
    assert!(device.copy_values(x, 0, 4, out, 3).is_err(), "beyond the target");
}

/// Pictures in patches, rows and columns, and what they are attended with.
struct Gallery {
    grids: Vec<[usize; 2]>,
    shape: AttentionShape,
    form: KvForm,
}

impl Gallery {
    fn new(grids: &[[usize; 2]], heads: usize, head_dim: usize, form: KvForm) -> Self {
        Self { grids: grids.to_vec(), shape: AttentionShape { heads, kv_heads: heads, head_dim }, form }
    }

    fn width(&self) -> usize {
        self.shape.heads * self.shape.head_dim
    }

    /// A step with all patches, and the keys of each picture.
    fn step(&self) -> (Step, Vec<usize>) {
        let (mut rows, mut windows, mut keys, mut page) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for (at, [height, columns]) in self.grids.iter().copied().enumerate() {
            let all = height * columns;
            let pages = page..page + all.div_ceil(PAGE_TOKENS) as u32;
            page = pages.end;
            let first = rows.len();
            windows.push(Window {
                place: at as u32,
                first,
                rows: all,
                start: 0,
                pages: pages.rev().collect(),
                parents: None,
                commit: true,
            });
            keys.push(all);
            let position = |i: usize| [0, (i / columns) as u32, (i % columns) as u32];
            rows.extend((0..all).map(|i| Row { token: None, position: position(i) }));
        }
        (Step::new(rows, windows).unwrap(), keys)
    }

    fn pool(&self, device: &mut dyn Device) -> device::KvPool {
        let pages = self.grids.iter().map(|[r, c]| (r * c).div_ceil(PAGE_TOKENS)).sum();
        let AttentionShape { kv_heads, head_dim, .. } = self.shape;
        device.kv_pool(KvShape { pages, kv_heads, head_dim, form: self.form }).unwrap()
    }

    fn rotary(&self, device: &mut dyn Device) -> Rotary {
        let half = self.shape.head_dim / 2;
        let (cos, sin) = rotary_table(64, 1e4, half);
        let twice =
            |table: &[f64]| table.chunks(half / 2).flat_map(|row| [row, row].concat()).collect::<Vec<_>>();
        let axes: Vec<u8> = (0..half).map(|j| if j < half / 2 { 1 } else { 2 }).collect();
        device.rotary(&twice(&cos), &twice(&sin), &axes).unwrap()
    }

    fn attend(&self, device: &mut dyn Device, kind: Kind, scale: f64) -> Vec<f32> {
        let (width, (step, keys)) = (self.width(), self.step());
        let mut noise = Noise::new(width as u64);
        let count = step.rows().len();
        let inputs: Vec<f64> = kind
            .values(&mut noise, count, 3 * width)
            .into_iter()
            .map(|x| (x * scale) as f32 as f64)
            .collect();
        let bias = device.vector(&noise.values(3 * width)).unwrap();
        let (rotary, pool) = (self.rotary(device), self.pool(device));
        device.begin(&step).unwrap();
        let [q, k, v, out] = [0; 4].map(|_| device.buffer(count, width).unwrap());
        let qkv = filled(device, 3 * width, &inputs);
        device.rope_2d(qkv, bias, rotary, self.shape, q, k, v).unwrap();
        device.kv_append(k, v, pool).unwrap();
        device.full_attention(q, self.shape, pool, &keys, out).unwrap();
        [q, k, v, out].into_iter().flat_map(|buffer| read(device, buffer, count * width)).collect()
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn pictures_are_attended_whole() {
    let mut pair = Pair::new();
    let galleries = [
        Gallery::new(&[[4, 6], [12, 14], [2, 2], [16, 18]], 3, 72, KvForm::Int16),
        Gallery::new(&[[8, 8], [2, 10]], 2, 64, KvForm::Int16),
        Gallery::new(&[[6, 12]], 2, 16, KvForm::Int8),
        Gallery::new(&[[10, 14]], 1, 128, KvForm::Int16),
        Gallery::new(&[[2, 4], [8, 10]], 2, 80, KvForm::Int16),
    ];
    for (at, gallery) in galleries.iter().enumerate() {
        for (kind, scale) in
            [(Kind::Random, 1.0), (Kind::Random, 30.0), (KINDS[1 + at], 1.0), (Kind::Faulty, 1.0)]
        {
            let what = format!("picture {at}, {kind:?} times {scale}");
            pair.same(&what, |device| gallery.attend(device, kind, scale));
        }
    }
}

/// More than two spans.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_large_picture_is_attended_whole() {
    let gallery = Gallery::new(&[[36, 32]], 1, 72, KvForm::Int16);
    Pair::new().same("a large picture", |device| gallery.attend(device, Kind::Random, 8.0));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn keys_beyond_the_pages_are_refused() {
    let mut device = crate::cuda();
    let shape = AttentionShape { heads: 1, kv_heads: 1, head_dim: 8 };
    let pool = device.kv_pool(KvShape { pages: 1, kv_heads: 1, head_dim: 8, form: KvForm::Int16 }).unwrap();
    let [q, out] = [0; 2].map(|_| device.buffer(1, 8).unwrap());
    device.begin(&crate::step(vec![crate::window(0, 0, 1, 0, 0, true)])).unwrap();
    for keys in [&[][..], &[0], &[65], &[1, 1]] {
        assert!(device.full_attention(q, shape, pool, keys, out).is_err(), "{keys:?}");
    }
}

fn dense(noise: &mut Noise, rows: usize, cols: usize, dtype: Dtype) -> Matrix {
    let size = if dtype == Dtype::F32 { 4 } else { 2 };
    let mut bytes = Vec::with_capacity(rows * cols * size);
    for _ in 0..rows * cols {
        // Any sign and mantissa, exponents around one.
        let bits = noise.next();
        match dtype {
            Dtype::F32 => bytes.extend((bits & 0x807f_ffff | (120 + bits % 7) << 23).to_le_bytes()),
            Dtype::Bf16 => bytes.extend((bits as u16 & 0x807f | (120 + bits as u16 % 7) << 7).to_le_bytes()),
            Dtype::F16 => bytes.extend((bits as u16 & 0x83ff | (9 + bits as u16 % 7) << 10).to_le_bytes()),
        }
    }
    Matrix::dense(rows, cols, dtype, bytes.into()).unwrap()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn wide_dense_matrices_equal_the_cpu() {
    let mut pair = Pair::new();
    let shapes = [(64, 64, 33), (100, 200, 64), (130, 1, 70), (64, 63, 65), (192, 1152, 130), (66, 1361, 40)];
    for (at, (outputs, cols, rows)) in shapes.into_iter().enumerate() {
        let mut noise = Noise::new(at as u64 + 70);
        let matrices =
            [Dtype::Bf16, Dtype::F16, Dtype::F32].map(|dtype| dense(&mut noise, outputs, cols, dtype));
        for kind in [Kind::Random, KINDS[1 + at]] {
            let x = kind.values(&mut noise, rows, cols);
            pair.same(&format!("dense {outputs} x {cols} of {rows} {kind:?} rows"), |device| {
                let x = filled(device, cols, &x);
                let to = matrices
                    .iter()
                    .map(|matrix| (device.matrix(matrix).unwrap(), device.buffer(rows, outputs).unwrap()))
                    .collect::<Vec<_>>();
                device.linear(x, rows, &to).unwrap();
                to.iter().flat_map(|(_, out)| read(device, *out, rows * outputs)).collect()
            });
        }
    }
}

/// One block of the 35B tower.
struct Block {
    matrices: [MatrixRef; 4],
    biases: [VectorRef; 4],
    norm: [VectorRef; 2],
    /// x, normed, qkv, q, k, v, attended, update, inner.
    buffers: [Buffer; 9],
    gallery: Gallery,
    rotary: Rotary,
    pool: device::KvPool,
}

/// Names of what [`Block::run`] times.
const PARTS: [&str; 9] = ["norms", "qkv", "rope", "append", "attention", "proj", "fc1", "gelu", "fc2"];

impl Block {
    fn new(device: &mut dyn Device, side: usize) -> Self {
        let (w, inner, rows) = (1152, 4304, side * side);
        let gallery = Gallery::new(&[[side, side]], 16, 72, KvForm::Int16);
        let mut noise = Noise::new(1);
        let sizes = [(3 * w, w), (w, w), (inner, w), (w, inner)];
        let matrices = sizes.map(|(outputs, cols)| {
            let matrix = dense(&mut noise, outputs, cols, Dtype::Bf16);
            device.matrix(&matrix).unwrap()
        });
        let biases = sizes.map(|(outputs, _)| device.vector(&noise.values(outputs)).unwrap());
        let norm = [0; 2].map(|_| device.vector(&noise.values(w)).unwrap());
        let buffers = [w, w, 3 * w, w, w, w, w, w, inner].map(|width| device.buffer(rows, width).unwrap());
        device.write(buffers[0], 0, &noise.values(rows * w)).unwrap();
        let (rotary, pool) = (gallery.rotary(device), gallery.pool(device));
        Self { matrices, biases, norm, buffers, gallery, rotary, pool }
    }

    /// Adds seconds of each part; with `apart` the queue is waited for between them.
    fn run(&self, device: &mut dyn Device, keys: &[usize], apart: bool, seconds: &mut [f64; PARTS.len()]) {
        let [x, normed, qkv, q, k, v, attended, update, inner] = self.buffers;
        let (shape, rows) = (self.gallery.shape, keys[0]);
        let mut start = Instant::now();
        let mut done = |device: &mut dyn Device, part: usize| {
            if apart {
                device.read(x, 0, &mut [0.0]).unwrap();
                seconds[part] += start.elapsed().as_secs_f64();
                start = Instant::now();
            }
        };
        device.layer_norm(x, rows, self.norm[0], self.norm[1], EPS, normed).unwrap();
        done(device, 0);
        device.linear(normed, rows, &[(self.matrices[0], qkv)]).unwrap();
        done(device, 1);
        device.rope_2d(qkv, self.biases[0], self.rotary, shape, q, k, v).unwrap();
        done(device, 2);
        device.kv_append(k, v, self.pool).unwrap();
        done(device, 3);
        device.full_attention(q, shape, self.pool, keys, attended).unwrap();
        done(device, 4);
        device.linear(attended, rows, &[(self.matrices[1], update)]).unwrap();
        done(device, 5);
        device.add_bias(normed, update, rows, self.biases[1]).unwrap();
        device.layer_norm(normed, rows, self.norm[0], self.norm[1], EPS, normed).unwrap();
        done(device, 0);
        device.linear(normed, rows, &[(self.matrices[2], inner)]).unwrap();
        done(device, 6);
        device.bias(inner, rows, self.biases[2], Activation::GeluTanh).unwrap();
        done(device, 7);
        device.linear(inner, rows, &[(self.matrices[3], update)]).unwrap();
        done(device, 8);
        device.add_bias(normed, update, rows, self.biases[3]).unwrap();
    }
}

/// Milliseconds of a block of the 35B tower, and of its 27; parts are timed apart, the whole together.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn speed_of_the_tower() {
    let mut device = crate::cuda();
    for side in [16, 32, 64] {
        let block = Block::new(&mut device, side);
        let (step, keys) = block.gallery.step();
        device.begin(&step).unwrap();
        let (mut parts, mut whole) = ([0.0; PARTS.len()], [0.0; PARTS.len()]);
        block.run(&mut device, &keys, true, &mut parts);
        parts = [0.0; PARTS.len()];
        (0..5).for_each(|_| block.run(&mut device, &keys, true, &mut parts));
        let start = Instant::now();
        (0..27).for_each(|_| block.run(&mut device, &keys, false, &mut whole));
        device.read(block.buffers[0], 0, &mut [0.0]).unwrap();
        let total = start.elapsed().as_secs_f64();
        let each: Vec<String> =
            PARTS.iter().zip(parts).map(|(name, s)| format!("{name} {:.0}", s / 5.0 * 1e6)).collect();
        println!("{side} x {side} patches: 27 blocks {:.2} ms; us a block: {}", total * 1e3, each.join(", "));
    }
}
