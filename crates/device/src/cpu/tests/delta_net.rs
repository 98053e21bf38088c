//! Convolution and delta rule over windows of every kind.

use super::*;
use crate::{DeltaShape, DeltaState, DeviceError, StatePool, VectorRef};

const SHAPES: [DeltaShape; 3] = [
    DeltaShape { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 16, conv_taps: 4 },
    DeltaShape { key_heads: 1, value_heads: 2, key_dim: 128, value_dim: 128, conv_taps: 4 },
    DeltaShape { key_heads: 1, value_heads: 3, key_dim: 21, value_dim: 40, conv_taps: 3 },
];

/// One layer's constants and pool.
struct Layer {
    shape: DeltaShape,
    pool: StatePool,
    taps: VectorRef,
    decay: VectorRef,
    dt_bias: VectorRef,
}

impl Layer {
    fn new(device: &mut dyn Device, shape: DeltaShape) -> Self {
        let mut noise = Noise::new(11);
        let taps = device.vector(&noise.values(shape.channels() * shape.conv_taps)).expect("fits");
        let decay: Vec<f64> = noise.values(shape.value_heads).iter().map(|x| x.abs() + 0.05).collect();
        let decay = device.vector(&decay).expect("fits");
        let dt_bias = device.vector(&noise.values(shape.value_heads)).expect("fits");
        Self { shape, pool: device.state_pool(shape, 4).expect("valid"), taps, decay, dt_bias }
    }

    /// Inputs of sequence `seed`'s token `at`: qkv, a, b.
    fn token(&self, seed: u64, at: usize) -> [Vec<f64>; 3] {
        let mut noise = Noise::new(seed * 1_000_003 + at as u64);
        let heads = self.shape.value_heads;
        [noise.values(self.shape.channels()), noise.values(heads), noise.values(heads)]
    }

    /// Runs windows; `tokens` gives (sequence, token) of every row. Returns the rows' outputs.
    fn run(&self, device: &mut dyn Device, windows: Vec<Window>, tokens: &[(u64, usize)]) -> Vec<f32> {
        self.run_inputs(device, windows, &rows_of(tokens, |seed, at| self.token(seed, at)))
    }

    fn run_inputs(&self, device: &mut dyn Device, windows: Vec<Window>, inputs: &[Vec<f64>; 3]) -> Vec<f32> {
        let (c, heads) = (self.shape.channels(), self.shape.value_heads);
        let rows = inputs[1].len() / heads;
        let x = filled(device, c, &inputs[0]);
        let (a, b) = (filled(device, heads, &inputs[1]), filled(device, heads, &inputs[2]));
        let mixed = device.buffer(rows, c).expect("fits");
        let width = heads * self.shape.value_dim;
        let out = device.buffer(rows, width).expect("fits");
        device.begin(&step(windows)).expect("begins");
        device.conv(x, self.taps, self.pool, mixed).expect("runs");
        device.delta_rule(mixed, a, b, self.decay, self.dt_bias, self.pool, out).expect("runs");
        read(device, out, rows * width)
    }

    /// Steps sequence `seed` in committed chunks; gives all outputs.
    fn serial(
        &self,
        device: &mut dyn Device,
        place: u32,
        seed: u64,
        tokens: &[usize],
        chunk: usize,
    ) -> Vec<f32> {
        let mut out = Vec::new();
        for part in tokens.chunks(chunk) {
            let rows: Vec<_> = part.iter().map(|&at| (seed, at)).collect();
            out.extend(self.run(device, vec![window(place, 0, rows.len(), 0, 0, true)], &rows));
        }
        out
    }
}

fn state_values(state: &DeltaState) -> Vec<f32> {
    state.recurrent.iter().chain(&state.conv).map(|&x| x as f32).collect()
}

fn state(device: &mut dyn Device, layer: &Layer, place: u32) -> Vec<f32> {
    state_values(&device.state_read(layer.pool, place).expect("inside"))
}

#[test]
fn close_to_float64_and_the_same_in_any_chunk() {
    let tokens: Vec<usize> = (0..70).collect();
    for shape in SHAPES {
        let run = |device: &mut dyn Device, chunk: usize| {
            let layer = Layer::new(device, shape);
            let mut values = layer.serial(device, 1, 5, &tokens, chunk);
            values.extend(state(device, &layer, 1));
            values
        };
        close_to_reference("delta net", 3e-6, |device| run(device, 70));
        let whole = run(&mut plain(), 70);
        for chunk in [1, 2, 3, 7, 64] {
            let found = same_everywhere("delta net", |device| run(device, chunk));
            assert_bits(&found, &whole, &format!("chunks of {chunk}"));
        }
    }
}

#[test]
fn company_changes_nothing() {
    for shape in SHAPES {
        let tokens: Vec<usize> = (0..9).collect();
        let alone = |seed: u64| {
            let mut cpu = plain();
            let layer = Layer::new(&mut cpu, shape);
            layer.serial(&mut cpu, 0, seed, &tokens, 9)
        };
        let together = same_everywhere("company", |device| {
            let layer = Layer::new(device, shape);
            let rows: Vec<_> = [(7, 0..3), (8, 0..9), (9, 0..1)]
                .into_iter()
                .flat_map(|(seed, range)| range.map(move |at| (seed, at)))
                .collect();
            let windows =
                vec![window(2, 0, 3, 0, 0, true), window(0, 3, 9, 0, 1, true), window(3, 12, 1, 0, 2, false)];
            layer.run(device, windows, &rows)
        });
        let width = shape.value_heads * shape.value_dim;
        let expected = [&alone(7)[..3 * width], &alone(8), &alone(9)[..width]].concat();
        assert_bits(&together, &expected, "three windows");
    }
}

#[test]
fn uncommitted_chains_leave_the_state_and_replay_exactly() {
    for shape in SHAPES {
        same_everywhere("chain", |device| {
            let layer = Layer::new(device, shape);
            layer.serial(device, 1, 5, &[0, 1], 2);
            let before = state(device, &layer, 1);
            let rows: Vec<_> = (2..8).map(|at| (5, at)).collect();
            let drafted = layer.run(device, vec![window(1, 0, 6, 2, 0, false)], &rows);
            assert_bits(&state(device, &layer, 1), &before, "the state stays");
            for kept in [0, 1, 2, 6] {
                device.state_copy(layer.pool, 1, 0).expect("inside");
                device.state_copy(layer.pool, 1, 2).expect("inside");
                let again = layer.run(device, vec![window(0, 0, 6, 2, 0, false)], &rows);
                assert_bits(&again, &drafted, "the same window");
                let path: Vec<usize> = (0..kept).collect();
                device.state_keep(layer.pool, 0, &path).expect("kept rows");
                let tokens: Vec<usize> = (2..2 + kept).collect();
                let steps = layer.serial(device, 2, 5, &tokens, 1);
                assert_bits(&drafted[..steps.len()], &steps, "rows = steps");
                assert_bits(&state(device, &layer, 0), &state(device, &layer, 2), "kept = stepped");
            }
            drafted
        });
    }
}

#[test]
fn trees_are_the_chains_of_their_paths() {
    let mut noise = Noise::new(3);
    for (round, shape) in SHAPES.into_iter().cycle().take(9).enumerate() {
        let rows = 1 + noise.below(crate::WINDOW_ROWS_MAX);
        let parents = tree(&mut noise, rows);
        let leaf = noise.below(rows);
        same_everywhere("tree", |device| {
            let layer = Layer::new(device, shape);
            layer.serial(device, 0, 5, &[0, 1, 2][..round % 4], 4);
            let before = state(device, &layer, 0);
            let mut of = window(0, 0, rows, 3, 0, false);
            of.parents = Some(parents.clone());
            let tokens: Vec<_> = (0..rows).map(|row| (6, row)).collect();
            let out = layer.run(device, vec![of.clone()], &tokens);
            let width = out.len() / rows;
            assert_bits(&state(device, &layer, 0), &before, "the state stays");
            for row in 0..rows {
                device.state_copy(layer.pool, 0, 1).expect("inside");
                let steps = layer.serial(device, 1, 6, &of.path(row), 1);
                let last = &steps[steps.len() - width..];
                assert_bits(&out[row * width..][..width], last, &format!("row {row} of {parents:?}"));
                if row == leaf {
                    device.state_copy(layer.pool, 1, 2).expect("inside");
                }
            }
            device.state_keep(layer.pool, 0, &of.path(leaf)).expect("a path");
            assert_bits(&state(device, &layer, 0), &state(device, &layer, 2), "kept = stepped");
            out
        });
    }
}

#[test]
fn faults_stay_in_their_sequence() {
    for shape in SHAPES {
        for bad in [f64::NAN, f64::INFINITY, 1e30, 3e38] {
            same_everywhere("fault", |device| {
                let layer = Layer::new(device, shape);
                let mut inputs = [Vec::new(), Vec::new(), Vec::new()];
                for (seed, at) in [(1, 0), (1, 1), (2, 0)] {
                    for (all, one) in inputs.iter_mut().zip(layer.token(seed, at)) {
                        all.extend(one);
                    }
                }
                let clean = layer.run(device, vec![window(3, 0, 1, 0, 0, false)], &[(2, 0)]);
                inputs[0][3] = bad;
                let windows = vec![window(0, 0, 2, 0, 0, true), window(1, 2, 1, 0, 1, true)];
                let out = layer.run_inputs(device, windows, &inputs);
                assert_bits(&out[2 * clean.len()..], &clean, "the neighbour");
                if !bad.is_finite() {
                    assert!(out[..clean.len()].iter().any(|x| x.is_nan()), "{bad} is seen");
                }
                out
            });
        }
    }
}

#[test]
fn states_round_trip_and_refusals() {
    let mut cpu = plain();
    let layer = Layer::new(&mut cpu, SHAPES[2]);
    layer.serial(&mut cpu, 1, 5, &[0, 1, 2], 3);
    let state = cpu.state_read(layer.pool, 1).expect("inside");
    assert!(state.recurrent.iter().any(|&x| x != 0.0) && state.conv.iter().all(|&x| x != 0.0));
    cpu.state_write(layer.pool, 2, &state).expect("fits");
    assert_eq!(cpu.state_read(layer.pool, 2).expect("inside"), state);
    cpu.state_clear(layer.pool, 2).expect("inside");
    assert!(state_values(&cpu.state_read(layer.pool, 2).expect("inside")).iter().all(|x| *x == 0.0));
    let short = DeltaState { recurrent: vec![0.0], conv: state.conv };
    assert!(matches!(cpu.state_write(layer.pool, 2, &short), Err(DeviceError::Failed { .. })));
    assert!(cpu.state_clear(layer.pool, 4).is_err());
    assert!(cpu.state_copy(layer.pool, 0, 4).is_err());
    assert!(cpu.state_keep(layer.pool, 1, &[0]).is_err(), "nothing was kept");
    let taps = DeltaShape { conv_taps: 9, ..SHAPES[0] };
    assert!(cpu.state_pool(taps, 1).is_err());
    assert!(cpu.memory().states > 0);
}
