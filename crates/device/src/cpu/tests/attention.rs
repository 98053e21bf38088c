//! K/V pages and attention over windows of every kind.

use super::*;
use crate::{AttentionShape, KvForm, KvPool, KvShape};

const SHAPES: [AttentionShape; 5] = [
    AttentionShape { heads: 8, kv_heads: 2, head_dim: 32 },
    AttentionShape { heads: 2, kv_heads: 2, head_dim: 72 },
    AttentionShape { heads: 16, kv_heads: 2, head_dim: 256 },
    AttentionShape { heads: 12, kv_heads: 1, head_dim: 16 },
    AttentionShape { heads: 3, kv_heads: 3, head_dim: 7 },
];
const FORMS: [KvForm; 2] = [KvForm::Int8, KvForm::Int16];

/// One layer over one pool.
struct Layer {
    shape: AttentionShape,
    pool: KvPool,
}

impl Layer {
    fn new(device: &mut dyn Device, shape: AttentionShape, form: KvForm) -> Self {
        let kv = KvShape { pages: 48, kv_heads: shape.kv_heads, head_dim: shape.head_dim, form };
        Self { shape, pool: device.kv_pool(kv).expect("valid") }
    }

    /// q, k and v of sequence `seed`'s token `at`.
    fn token(&self, seed: u64, at: usize) -> [Vec<f64>; 3] {
        let mut noise = Noise::new(seed * 1_000_003 + at as u64);
        let AttentionShape { heads, kv_heads, head_dim } = self.shape;
        [heads, kv_heads, kv_heads].map(|heads| noise.values(heads * head_dim))
    }

    fn run(&self, device: &mut dyn Device, windows: Vec<Window>, tokens: &[(u64, usize)]) -> Vec<f32> {
        self.run_inputs(device, windows, &rows_of(tokens, |seed, at| self.token(seed, at)))
    }

    fn run_inputs(&self, device: &mut dyn Device, windows: Vec<Window>, inputs: &[Vec<f64>; 3]) -> Vec<f32> {
        let (width, kv_width) =
            (self.shape.heads * self.shape.head_dim, self.shape.kv_heads * self.shape.head_dim);
        let q = filled(device, width, &inputs[0]);
        let (k, v) = (filled(device, kv_width, &inputs[1]), filled(device, kv_width, &inputs[2]));
        let out = device.buffer(inputs[0].len() / width, width).expect("fits");
        device.begin(&step(windows)).expect("begins");
        device.kv_append(k, v, self.pool).expect("runs");
        device.attention(q, self.shape, self.pool, out).expect("runs");
        read(device, out, inputs[0].len())
    }

    /// Sequence `seed`'s tokens `range` in chunks, from page `page` on.
    fn serial(
        &self,
        device: &mut dyn Device,
        page: u32,
        seed: u64,
        range: std::ops::Range<usize>,
        chunk: usize,
    ) -> Vec<f32> {
        let mut out = Vec::new();
        for start in range.clone().step_by(chunk) {
            let rows: Vec<_> = (start..range.end.min(start + chunk)).map(|at| (seed, at)).collect();
            out.extend(self.run(device, vec![window(0, 0, rows.len(), start, page, true)], &rows));
        }
        out
    }
}

#[test]
fn close_to_float64_and_the_same_in_any_chunk() {
    for shape in SHAPES {
        for (form, bound) in [(KvForm::Int8, 2e-2), (KvForm::Int16, 2e-3)] {
            let run = |device: &mut dyn Device, chunk: usize| {
                Layer::new(device, shape, form).serial(device, 1, 5, 0..150, chunk)
            };
            close_to_reference("attention", bound, |device| run(device, 150));
            let whole = run(&mut plain(), 150);
            for chunk in [1, 7, 64, 65] {
                let found = same_everywhere("attention", |device| run(device, chunk));
                assert_bits(&found, &whole, &format!("{shape:?} {form:?} chunks of {chunk}"));
            }
        }
    }
}

#[test]
fn spans_fold_alike_apart_and_in_turn() {
    let shape = AttentionShape { heads: 2, kv_heads: 1, head_dim: 16 };
    for form in FORMS {
        let length = 1300;
        let whole = same_everywhere("long", |device| {
            Layer::new(device, shape, form).serial(device, 0, 5, 0..length, length)
        });
        let width = shape.heads * shape.head_dim;
        let lone = same_everywhere("long", |device| {
            let layer = Layer::new(device, shape, form);
            layer.serial(device, 0, 5, 0..length - 3, 600);
            layer.serial(device, 0, 5, length - 3..length, 1)
        });
        assert_bits(&lone, &whole[(length - 3) * width..], "single rows");
        close_to_reference("long attention", 2e-2, |device| {
            Layer::new(device, shape, form).serial(device, 0, 5, 0..length, length)[(length - 9) * width..]
                .to_vec()
        });
    }
}

#[test]
fn sharp_scores_underflow_alike() {
    // Scores far apart: rescaling passes below 2^-126, in both directions.
    for form in FORMS {
        same_everywhere("sharp", |device| {
            let layer = Layer::new(device, SHAPES[0], form);
            let mut inputs = [Vec::new(), Vec::new(), Vec::new()];
            for at in 0..700 {
                for (all, one) in inputs.iter_mut().zip(layer.token(4, at)) {
                    all.extend(one.iter().map(|x| (x * 60.0) as f32 as f64));
                }
            }
            let whole = layer.run_inputs(device, vec![window(0, 0, 700, 0, 0, true)], &inputs);
            let width = whole.len() / 700;
            let last: [Vec<f64>; 3] =
                std::array::from_fn(|i| inputs[i][inputs[i].len() / 700 * 699..].to_vec());
            let single = layer.run_inputs(device, vec![window(0, 0, 1, 699, 0, true)], &last);
            assert_bits(&single, &whole[699 * width..], "the last row alone");
            assert!(whole.iter().all(|x| x.is_finite()));
            whole
        });
    }
}

#[test]
fn company_changes_nothing() {
    let shape = SHAPES[0];
    let alone = |seed: u64, tokens: usize| {
        let mut cpu = plain();
        Layer::new(&mut cpu, shape, KvForm::Int8).serial(&mut cpu, 9, seed, 0..tokens, tokens)
    };
    let together = same_everywhere("company", |device| {
        let layer = Layer::new(device, shape, KvForm::Int8);
        let rows: Vec<_> = [(7, 0..3), (8, 0..129), (9, 0..1)]
            .into_iter()
            .flat_map(|(seed, range)| range.map(move |at| (seed, at)))
            .collect();
        let windows =
            vec![window(2, 0, 3, 0, 20, true), window(0, 3, 129, 0, 3, true), window(3, 132, 1, 0, 2, false)];
        layer.run(device, windows, &rows)
    });
    assert_bits(&together, &[alone(7, 3), alone(8, 129), alone(9, 1)].concat(), "three windows");
}

#[test]
fn trees_are_the_chains_of_their_paths() {
    let mut noise = Noise::new(3);
    for (round, shape) in SHAPES.into_iter().cycle().take(10).enumerate() {
        let form = FORMS[round % 2];
        let rows = 1 + noise.below(crate::WINDOW_ROWS_MAX);
        let parents = tree(&mut noise, rows);
        let leaf = noise.below(rows);
        let start = [0, 5, 60, 64, 100][round % 5];
        same_everywhere("tree", |device| {
            let layer = Layer::new(device, shape, form);
            layer.serial(device, 0, 5, 0..start, 40);
            layer.serial(device, 10, 5, 0..start, 40);
            let mut of = window(0, 0, rows, start, 0, false);
            of.parents = Some(parents.clone());
            let tokens: Vec<_> = (0..rows).map(|row| (6, row)).collect();
            let out = layer.run(device, vec![of.clone()], &tokens);
            let width = out.len() / rows;
            for row in (0..rows).filter(|row| *row != leaf).chain([leaf]) {
                let path = of.path(row);
                let tokens: Vec<_> = path.iter().map(|&row| (6, row)).collect();
                let chain = layer.run(device, vec![window(0, 0, path.len(), start, 10, true)], &tokens);
                let last = &chain[chain.len() - width..];
                assert_bits(&out[row * width..][..width], last, &format!("row {row} of {parents:?}"));
            }
            device.kv_keep(layer.pool, &of.pages, start, &of.path(leaf)).expect("a path");
            let next = start + of.path(leaf).len();
            let after = |device: &mut dyn Device, page| {
                layer.run(device, vec![window(0, 0, 1, next, page, true)], &[(5, 999)])
            };
            let (kept, stepped) = (after(device, 0), after(device, 10));
            assert_bits(&kept, &stepped, "kept = stepped");
            out
        });
    }
}

#[test]
fn faults_stay_in_their_sequence() {
    let shape = SHAPES[0];
    for form in FORMS {
        for (part, bad) in
            [(0, f64::NAN), (1, f64::NAN), (2, f64::INFINITY), (1, 2e12), (2, 2e12), (0, -2e12)]
        {
            same_everywhere("fault", |device| {
                let layer = Layer::new(device, shape, form);
                let mut inputs = [Vec::new(), Vec::new(), Vec::new()];
                for (seed, at) in (0..70).map(|at| (1, at)).chain([(2, 0)]) {
                    for (all, one) in inputs.iter_mut().zip(layer.token(seed, at)) {
                        all.extend(one);
                    }
                }
                let clean = layer.serial(device, 8, 2, 0..1, 1);
                // The first head of token 65.
                let at = inputs[part].len() / 71 * 65;
                inputs[part][at] = bad;
                let windows = vec![window(0, 0, 70, 0, 0, true), window(1, 70, 1, 0, 2, true)];
                let out = layer.run_inputs(device, windows, &inputs);
                let width = clean.len();
                assert_bits(&out[70 * width..], &clean, "the neighbour");
                let nan = |row: usize| out[row * width..][..width].iter().any(|x| x.is_nan());
                let seen: Vec<usize> = (0..70).filter(|&row| nan(row)).collect();
                let expected = if part == 0 { vec![65] } else { (65..70).collect() };
                assert_eq!(seen, expected, "{bad} in input {part}");
                out
            });
        }
    }
}

#[test]
fn zeros_tiny_and_tied_values() {
    for form in FORMS {
        for scale in [0.0, 1e-14, 1e-30, 1e11] {
            let out = same_everywhere("scales", |device| {
                let layer = Layer::new(device, SHAPES[0], form);
                let inputs = [0, 1, 2].map(|part| {
                    (0..100)
                        .flat_map(|_| layer.token(3, 0)[part].clone())
                        .map(|x| (x * scale) as f32 as f64)
                        .collect()
                });
                layer.run_inputs(device, vec![window(0, 0, 100, 0, 0, true)], &inputs)
            });
            assert!(out.iter().all(|x| x.is_finite()), "{scale}");
        }
    }
}

#[test]
fn pages_move_as_bytes_and_refusals() {
    for form in FORMS {
        let mut cpu = plain();
        let layer = Layer::new(&mut cpu, SHAPES[1], form);
        layer.serial(&mut cpu, 0, 5, 0..70, 70);
        for page in 0..2 {
            let bytes = cpu.kv_export(layer.pool, page).expect("inside");
            cpu.kv_import(layer.pool, 20 + page, &bytes).expect("whole");
        }
        let next = |cpu: &mut Cpu, page| layer.run(cpu, vec![window(0, 0, 1, 70, page, true)], &[(5, 70)]);
        let (original, copy) = (next(&mut cpu, 0), next(&mut cpu, 20));
        assert_bits(&copy, &original, "imported pages");
        assert!(cpu.kv_export(layer.pool, 48).is_err());
        assert!(cpu.kv_import(layer.pool, 0, &[0; 3]).is_err());
        assert!(cpu.kv_keep(layer.pool, &[0], 60, &[3, 2]).is_err(), "rows ascend");
        assert!(cpu.kv_keep(layer.pool, &[0], 60, &[4]).is_err(), "outside the pages");
        cpu.begin(&step(vec![window(0, 0, 1, 0, 48, true)])).expect("begins");
        let k = cpu.buffer(1, 144).expect("fits");
        assert!(cpu.kv_append(k, k, layer.pool).is_err());
        assert!(cpu.memory().kv > 0);
    }
}
