//! Norm and rotation, K/V pages, attention and routing over windows of every kind.

use device::{AttentionShape, Buffer, Device, KvForm, KvPool, KvShape, PAGE_TOKENS, WINDOW_ROWS_MAX, Window};

use crate::{KINDS, Kind, Noise, Pair, ROWS, filled, read, step, time, tree, window};

pub(crate) const FAMILY: AttentionShape = AttentionShape { heads: 16, kv_heads: 2, head_dim: 256 };
const SHAPES: [AttentionShape; 6] = [
    FAMILY,
    AttentionShape { heads: 8, kv_heads: 2, head_dim: 32 },
    AttentionShape { heads: 2, kv_heads: 2, head_dim: 72 },
    AttentionShape { heads: 12, kv_heads: 1, head_dim: 16 },
    AttentionShape { heads: 3, kv_heads: 3, head_dim: 7 },
    AttentionShape { heads: 8, kv_heads: 4, head_dim: 150 },
];
const FORMS: [KvForm; 2] = [KvForm::Int8, KvForm::Int16];

/// One layer over one pool.
pub(crate) struct Layer {
    shape: AttentionShape,
    pool: KvPool,
    /// q, k, v, out.
    buffers: [Buffer; 4],
}

impl Layer {
    pub(crate) fn new(
        device: &mut dyn Device,
        shape: AttentionShape,
        form: KvForm,
        pages: usize,
        rows_max: usize,
    ) -> Self {
        let kv = KvShape { pages, kv_heads: shape.kv_heads, head_dim: shape.head_dim, form };
        let pool = device.kv_pool(kv).unwrap();
        let buffers = [shape.heads, shape.kv_heads, shape.kv_heads, shape.heads]
            .map(|heads| device.buffer(rows_max, heads * shape.head_dim).unwrap());
        Self { shape, pool, buffers }
    }

    /// q, k and v of `rows` rows.
    pub(crate) fn inputs(&self, noise: &mut Noise, kind: Kind, rows: usize) -> [Vec<f64>; 3] {
        let AttentionShape { heads, kv_heads, head_dim } = self.shape;
        [heads, kv_heads, kv_heads].map(|heads| kind.values(noise, rows, heads * head_dim))
    }

    pub(crate) fn run(
        &self,
        device: &mut dyn Device,
        windows: Vec<Window>,
        inputs: &[Vec<f64>; 3],
    ) -> Vec<f32> {
        let [q, k, v, out] = self.buffers;
        device.begin(&step(windows)).unwrap();
        for (buffer, values) in [q, k, v].into_iter().zip(inputs) {
            device.write(buffer, 0, values).unwrap();
        }
        device.kv_append(k, v, self.pool).unwrap();
        device.attention(q, self.shape, self.pool, out).unwrap();
        read(device, out, inputs[0].len())
    }

    /// Bytes of pages, one float each.
    fn pages(&self, device: &mut dyn Device, pages: std::ops::Range<u32>) -> Vec<f32> {
        let bytes = pages.flat_map(|page| device.kv_export(self.pool, page).unwrap());
        bytes.map(f32::from).collect()
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn attention_of_any_rows() {
    let mut pair = Pair::new();
    for (at, rows) in ROWS.into_iter().enumerate() {
        for (index, shape) in SHAPES.into_iter().enumerate() {
            let form = FORMS[(at + index) % 2];
            for kind in [Kind::Random, KINDS[(at + index) % 7]] {
                pair.same(&format!("attention of {rows} {kind:?} rows, {shape:?} {form:?}"), |device| {
                    let layer = Layer::new(device, shape, form, 8, rows);
                    let mut noise = Noise::new(rows as u64);
                    let mut found = Vec::new();
                    for start in [0, rows] {
                        let inputs = layer.inputs(&mut noise, kind, rows);
                        found.extend(layer.run(device, vec![window(0, 0, rows, start, 1, true)], &inputs));
                    }
                    found.extend(layer.pages(device, 0..4));
                    found
                });
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn attention_over_spans() {
    let mut pair = Pair::new();
    for (index, shape) in [SHAPES[0], SHAPES[3], SHAPES[1]].into_iter().enumerate() {
        for (form, scale) in FORMS.into_iter().flat_map(|form| [(form, 1.0), (form, 60.0)]) {
            pair.same(&format!("long attention of {shape:?} {form:?}, scale {scale}"), |device| {
                let layer = Layer::new(device, shape, form, 64, 1300);
                let mut noise = Noise::new(index as u64 + 9);
                let mut found = Vec::new();
                let mut start = 0;
                // Whole spans, their edges, small windows and long ones.
                for rows in [1300, 1, 3, 211, 16, 10, 16, 17, 5, 510, 7, 12, 1, 1] {
                    let mut inputs = layer.inputs(&mut noise, Kind::Random, rows);
                    // Scores far apart: rescaling passes below 2^-126, in both directions.
                    inputs.iter_mut().flatten().for_each(|x| *x = (*x * scale) as f32 as f64);
                    found.extend(layer.run(device, vec![window(0, 0, rows, start, 3, true)], &inputs));
                    start += rows;
                }
                found
            });
        }
    }
}

/// Windows of few rows behind many tokens of which the keys alone are made: over the edges of blocks and
/// spans, several windows together, inputs of every kind.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn few_rows_behind_many() {
    let mut pair = Pair::new();
    for (at, kind) in KINDS.into_iter().enumerate() {
        let (shape, form) = (SHAPES[[0, 0, 1, 0, 3, 5, 2][at]], FORMS[at % 2]);
        pair.same(&format!("few rows of {kind:?}, {shape:?} {form:?}"), |device| {
            let layer = Layer::new(device, shape, form, 40, 600);
            let mut noise = Noise::new(at as u64 + 71);
            let mut found = Vec::new();
            for (start, rows) in [(0, 4), (61, 4), (150, 1), (510, 3), (575, 2)] {
                let [_, k, v] = layer.inputs(&mut noise, kind, start.max(1));
                let [_, keys, values, _] = layer.buffers;
                device.begin(&step(vec![window(0, 0, start.max(1), 0, 0, true)])).unwrap();
                device.write(keys, 0, &k).unwrap();
                device.write(values, 0, &v).unwrap();
                device.kv_append(keys, values, layer.pool).unwrap();
                let inputs = layer.inputs(&mut noise, kind, rows + 1);
                let windows = vec![window(0, 0, rows, start, 0, rows == 1), window(1, rows, 1, at, 20, true)];
                found.extend(layer.run(device, windows, &inputs));
            }
            found
        });
    }
}

/// Long chains of the family's shape: over the edges of blocks and spans, two windows, inputs of every kind.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn long_chains_of_the_family() {
    let mut pair = Pair::new();
    for (at, kind) in KINDS.into_iter().enumerate() {
        for scale in [1.0, 60.0] {
            pair.same(&format!("long chains of {kind:?} rows, scale {scale}"), |device| {
                let layer = Layer::new(device, FAMILY, KvForm::Int8, 24, 700);
                let mut noise = Noise::new(at as u64 + 31);
                let mut found = Vec::new();
                for (rows, start, other) in [(490 - at, 0, 18), (40, 490 - at, 33), (17, 530 - at, 64)] {
                    let mut inputs = layer.inputs(&mut noise, kind, rows + other);
                    inputs.iter_mut().flatten().for_each(|x| *x = (*x * scale) as f32 as f64);
                    let windows =
                        vec![window(0, 0, rows, start, 0, true), window(1, rows, other, 0, 20, true)];
                    found.extend(layer.run(device, windows, &inputs));
                }
                found
            });
        }
    }
}

/// More spans than attention_fold takes at once.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn attention_over_very_many_spans() {
    let mut pair = Pair::new();
    let shape = AttentionShape { heads: 2, kv_heads: 1, head_dim: 16 };
    let start = 132_300;
    pair.same("attention over 259 spans", |device| {
        let pages = start / PAGE_TOKENS + 1;
        let layer = Layer::new(device, shape, KvForm::Int8, pages, 3);
        let mut noise = Noise::new(8);
        let codes = device.kv_export(layer.pool, 0).unwrap().len() - 2 * 4 * PAGE_TOKENS;
        for page in 0..pages as u32 {
            let mut bytes: Vec<u8> = (0..codes).map(|_| noise.next() as u8).collect();
            // Later keys weigh less, but for some.
            let scale = |key: usize| (1 + key % 7) as f32 * if page % 300 == 299 { 0.02 } else { 0.004 };
            bytes.extend((0..2 * PAGE_TOKENS).flat_map(|key| scale(key).to_le_bytes()));
            device.kv_import(layer.pool, page, &bytes).unwrap();
        }
        let mut found = Vec::new();
        for rows in [1, 3] {
            let inputs = layer.inputs(&mut noise, Kind::Random, rows);
            found.extend(layer.run(device, vec![window(0, 0, rows, start, 0, true)], &inputs));
        }
        assert!(found.iter().all(|x| x.is_finite()));
        found
    });
}

/// Steps of several sequences, drafts kept in part, pages moved as bytes: what a server does, at random.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn random_lives_of_pages() {
    lives_of_pages(0..24, 8);
}

/// A life of each seed, of so many steps.
pub(crate) fn lives_of_pages(seeds: std::ops::Range<usize>, steps: usize) {
    let mut pair = Pair::new();
    for seed in seeds {
        let (shape, form) = (SHAPES[seed % SHAPES.len()], FORMS[seed / 6 % 2]);
        pair.same(&format!("lives {seed} of {shape:?} {form:?}"), |device| {
            let mut noise = Noise::new(seed as u64 + 70);
            let each = 20;
            let layer = Layer::new(device, shape, form, 4 * each, 4 * 120);
            let mut starts = [0, 5, 60, 600];
            // What lies before a start is whatever was imported: the same on both.
            for (place, page) in (0..4 * each as u32).enumerate() {
                let len = device.kv_export(layer.pool, page).unwrap().len();
                let scales = (shape.head_dim.div_ceil(64) + 1) * 64 * 4 * shape.kv_heads;
                // Dims that do not exist are zeros on every device.
                let most = if shape.head_dim % 16 == 0 { 100 } else { 1 };
                let mut bytes: Vec<u8> = (0..len - scales).map(|_| noise.next() as u8 % most).collect();
                bytes.extend((0..scales / 4).flat_map(|i| (0.01 + (i + place) as f32 * 1e-4).to_le_bytes()));
                device.kv_import(layer.pool, page, &bytes).unwrap();
            }
            let mut found = Vec::new();
            for _ in 0..steps {
                let mut windows = Vec::new();
                let mut first = 0;
                for (place, start) in starts.iter().enumerate() {
                    if noise.below(3) == 0 {
                        continue;
                    }
                    let rows =
                        [1, 1, 4, 1 + noise.below(WINDOW_ROWS_MAX), 20 + noise.below(90)][noise.below(5)];
                    let commit = rows > WINDOW_ROWS_MAX || noise.below(2) == 0;
                    let mut one = window(place as u32, first, rows, *start, (place * each) as u32, commit);
                    if !commit && noise.below(2) == 0 {
                        one.parents = Some(tree(&mut noise, rows));
                    }
                    if start + rows <= each * PAGE_TOKENS {
                        first += rows;
                        windows.push(one);
                    }
                }
                if windows.is_empty() {
                    continue;
                }
                let kind = if noise.below(6) == 0 { Kind::Faulty } else { Kind::Random };
                let inputs = layer.inputs(&mut noise, kind, first);
                found.extend(layer.run(device, windows.clone(), &inputs));
                for of in &windows {
                    let mut path = of.path(noise.below(of.rows));
                    if of.commit {
                        path = (0..of.rows).collect();
                    } else {
                        device.kv_keep(layer.pool, &of.pages, of.start, &path).unwrap();
                    }
                    starts[of.place as usize] = of.start + path.len();
                }
                let from = noise.below(4 * each) as u32;
                let bytes = device.kv_export(layer.pool, from).unwrap();
                device.kv_import(layer.pool, (from + 40) % 80, &bytes).unwrap();
            }
            found.extend(layer.pages(device, 0..4 * each as u32));
            found
        });
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn heads_are_normed_and_turned() {
    let mut pair = Pair::new();
    for (index, shape) in SHAPES.into_iter().enumerate() {
        for (kind, rows) in KINDS.into_iter().zip([1, 2, 5, 17, 64, 9, 3]) {
            let AttentionShape { heads, kv_heads, head_dim } = shape;
            pair.same(&format!("qk_norm_rope of {rows} {kind:?} rows, {shape:?}"), |device| {
                let mut noise = Noise::new(index as u64 * 7 + rows as u64);
                let half = [32, head_dim / 2, head_dim / 4][index % 3].min(head_dim / 2);
                let tables = [noise.values(100 * half), noise.values(100 * half)];
                let axes: Vec<u8> = (0..half).map(|j| (j % 3) as u8).collect();
                let rotary = device.rotary(&tables[0], &tables[1], &axes).unwrap();
                let weights =
                    [noise.values(head_dim), noise.values(head_dim)].map(|w| device.vector(&w).unwrap());
                let qg = filled(
                    device,
                    2 * heads * head_dim,
                    &kind.values(&mut noise, rows, 2 * heads * head_dim),
                );
                let k =
                    filled(device, kv_heads * head_dim, &kind.values(&mut noise, rows, kv_heads * head_dim));
                let q = device.buffer(rows, heads * head_dim).unwrap();
                device.begin(&step(vec![window(0, 0, rows, 30, 0, true)])).unwrap();
                device.qk_norm_rope(qg, k, weights[0], weights[1], 1e-6, rotary, shape, q).unwrap();
                let mut found = read(device, q, rows * heads * head_dim);
                found.extend(read(device, k, rows * kv_heads * head_dim));
                // With the stages that follow in a layer, in one list.
                let layer = Layer::new(device, shape, FORMS[rows % 2], 3, rows);
                let k =
                    filled(device, kv_heads * head_dim, &kind.values(&mut noise, rows, kv_heads * head_dim));
                let v =
                    filled(device, kv_heads * head_dim, &kind.values(&mut noise, rows, kv_heads * head_dim));
                device.begin(&step(vec![window(0, 0, rows, 30, 0, true)])).unwrap();
                device.qk_norm_rope(qg, k, weights[0], weights[1], 1e-6, rotary, shape, q).unwrap();
                device.kv_append(k, v, layer.pool).unwrap();
                device.attention(q, shape, layer.pool, layer.buffers[3]).unwrap();
                found.extend(read(device, layer.buffers[3], rows * heads * head_dim));
                found.extend(read(device, k, rows * kv_heads * head_dim));
                found.extend(layer.pages(device, 0..3));
                device.begin(&step(vec![window(0, 0, 1, 100, 0, true)])).unwrap();
                let beyond = device.qk_norm_rope(qg, k, weights[0], weights[1], 1e-6, rotary, shape, q);
                assert!(half == 0 || beyond.is_err(), "position 100 of 100");
                found
            });
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn routers_pick_alike() {
    let mut pair = Pair::new();
    for (kind, rows) in KINDS.into_iter().flat_map(|kind| ROWS.map(|rows| (kind, rows))) {
        let (experts, k) = [(256, 8), (64, 6), (5, 5), (512, 10), (1000, 32), (33, 1)][rows % 6];
        let mut noise = Noise::new(rows as u64);
        let logits = kind.values(&mut noise, rows, experts);
        pair.same(&format!("{k} of {experts} for {rows} {kind:?} rows"), |device| {
            let logits = filled(device, experts, &logits);
            let picks = device.picks(rows, k).unwrap();
            device.route(logits, rows, picks).unwrap();
            let (ids, weights) = device.read_picks(picks, rows).unwrap();
            ids.iter().map(|&id| id as f32).chain(weights.iter().map(|&w| w as f32)).collect()
        });
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn pages_are_refused_alike() {
    let mut pair = Pair::new();
    for device in [&mut pair.cpu as &mut dyn Device, &mut pair.cuda] {
        let layer = Layer::new(device, SHAPES[2], KvForm::Int8, 4, 1);
        assert!(device.kv_export(layer.pool, 4).is_err());
        assert!(device.kv_import(layer.pool, 0, &[0; 3]).is_err());
        assert!(device.kv_keep(layer.pool, &[0], 60, &[3, 2]).is_err(), "rows ascend");
        assert!(device.kv_keep(layer.pool, &[0], 60, &[4]).is_err(), "outside the pages");
        assert!(device.memory().kv > 0);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn time_of_attention() {
    let device = &mut crate::cuda();
    let tokens = 33_000;
    let pages = tokens / PAGE_TOKENS + 1;
    for form in FORMS {
        let layers: Vec<Layer> = (0..10).map(|_| Layer::new(device, FAMILY, form, pages, 2048)).collect();
        let inputs = layers[0].inputs(&mut Noise::new(1), Kind::Random, 2048);
        for layer in &layers {
            for (buffer, values) in layer.buffers.into_iter().zip(&inputs) {
                device.write(buffer, 0, values).unwrap();
            }
            for start in (0..32_768).step_by(2048) {
                device.begin(&step(vec![window(0, 0, 2048, start, 0, true)])).unwrap();
                device.kv_append(layer.buffers[1], layer.buffers[2], layer.pool).unwrap();
            }
        }
        for (rows, start) in [
            (1, 100),
            (1, 1000),
            (1, 8192),
            (1, 32_768),
            (4, 100),
            (4, 8192),
            (4, 32_000),
            (64, 8192),
            (512, 0),
            (2048, 0),
            (2048, 6144),
        ] {
            let of = step(vec![window(0, 0, rows, start, 0, rows != 4)]);
            let out = layers[0].buffers[3];
            let seconds = time(device, out, 3, |device| {
                device.begin(&of).unwrap();
                for layer in &layers {
                    let [q, k, v, out] = layer.buffers;
                    device.kv_append(k, v, layer.pool).unwrap();
                    device.attention(q, FAMILY, layer.pool, out).unwrap();
                }
            });
            println!("attention {form:?}, {rows} rows after {start}: {:.1} us a layer", seconds * 1e5);
        }
    }
}
