//! Convolution and delta rule over windows of every kind.

use device::{Buffer, DeltaShape, DeltaState, Device, StatePool, VectorRef, WINDOW_ROWS_MAX, Window};

use crate::{KINDS, Kind, Noise, Pair, ROWS, read, step, time, tree, window};

const FAMILY: DeltaShape =
    DeltaShape { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, conv_taps: 4 };
pub(crate) const SHAPES: [DeltaShape; 6] = [
    DeltaShape { key_heads: 1, value_heads: 2, key_dim: 128, value_dim: 128, conv_taps: 4 },
    DeltaShape { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 16, conv_taps: 4 },
    DeltaShape { key_heads: 16, value_heads: 16, key_dim: 16, value_dim: 20, conv_taps: 4 },
    DeltaShape { key_heads: 1, value_heads: 3, key_dim: 21, value_dim: 40, conv_taps: 3 },
    DeltaShape { key_heads: 3, value_heads: 3, key_dim: 70, value_dim: 5, conv_taps: 1 },
    DeltaShape { key_heads: 1, value_heads: 2, key_dim: 256, value_dim: 33, conv_taps: 8 },
];

/// One layer's constants, pool and buffers.
#[derive(Clone, Copy)]
pub(crate) struct Layer {
    shape: DeltaShape,
    pool: StatePool,
    taps: VectorRef,
    decay: VectorRef,
    dt_bias: VectorRef,
    norm: VectorRef,
    /// x, mixed, a, b, out, z.
    buffers: [Buffer; 6],
    /// Whether a gated norm follows.
    normed: bool,
}

impl Layer {
    pub(crate) fn new(device: &mut dyn Device, shape: DeltaShape, places: usize, rows_max: usize) -> Self {
        let mut noise = Noise::new(11);
        let (c, heads) = (shape.channels(), shape.value_heads);
        let taps = device.vector(&noise.values(c * shape.conv_taps)).unwrap();
        let decay: Vec<f64> = noise.values(heads).iter().map(|x| x.abs() + 0.05).collect();
        let decay = device.vector(&decay).unwrap();
        let dt_bias = device.vector(&noise.values(heads)).unwrap();
        let pool = device.state_pool(shape, places).unwrap();
        let norm = device.vector(&noise.values(shape.value_dim)).unwrap();
        let values = heads * shape.value_dim;
        let buffers =
            [c, c, heads, heads, values, values].map(|width| device.buffer(rows_max, width).unwrap());
        Self { shape, pool, taps, decay, dt_bias, norm, buffers, normed: false }
    }

    /// With the gated norm, which short windows do in the same launch.
    pub(crate) fn normed(self) -> Self {
        Self { normed: true, ..self }
    }

    /// Inputs of `rows` rows: x, a, b, z.
    pub(crate) fn inputs(&self, noise: &mut Noise, kind: Kind, rows: usize) -> [Vec<f64>; 4] {
        let heads = self.shape.value_heads;
        [self.shape.channels(), heads, heads, heads * self.shape.value_dim]
            .map(|width| kind.values(noise, rows, width))
    }

    fn queue(&self, device: &mut dyn Device, rows: usize) {
        let [x, mixed, a, b, out, z] = self.buffers;
        device.conv(x, self.taps, self.pool, mixed).unwrap();
        device.delta_rule(mixed, a, b, self.decay, self.dt_bias, self.pool, out).unwrap();
        if self.normed {
            device.gated_norm(out, z, rows, self.norm, 1e-6).unwrap();
        }
    }

    pub(crate) fn run(
        &self,
        device: &mut dyn Device,
        windows: Vec<Window>,
        inputs: &[Vec<f64>; 4],
    ) -> Vec<f32> {
        let [x, mixed, a, b, out, z] = self.buffers;
        let rows = inputs[1].len() / self.shape.value_heads;
        device.begin(&step(windows)).unwrap();
        for (buffer, values) in [x, a, b, z].into_iter().zip(inputs) {
            device.write(buffer, 0, values).unwrap();
        }
        self.queue(device, rows);
        let mut found = read(device, mixed, rows * self.shape.channels());
        found.extend(read(device, out, rows * self.shape.value_heads * self.shape.value_dim));
        found
    }

    pub(crate) fn states(&self, device: &mut dyn Device, places: u32) -> Vec<f32> {
        let all = (0..places).map(|place| device.state_read(self.pool, place).unwrap());
        all.flat_map(|state| values(&state)).collect()
    }
}

fn values(state: &DeltaState) -> Vec<f32> {
    state.recurrent.iter().chain(&state.conv).map(|&x| x as f32).collect()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn delta_net_of_any_rows() {
    let mut pair = Pair::new();
    for (at, rows) in ROWS.into_iter().chain([33, 41]).enumerate() {
        for (shape, kind) in
            SHAPES.into_iter().flat_map(|shape| [(shape, Kind::Random), (shape, KINDS[at % 7])])
        {
            pair.same(&format!("delta net of {rows} {kind:?} rows, {shape:?}"), |device| {
                let layer = Layer::new(device, shape, 2, rows);
                let layer = if at % 2 == 0 { layer.normed() } else { layer };
                let mut noise = Noise::new(rows as u64);
                let mut found = Vec::new();
                for start in [0, rows] {
                    let inputs = layer.inputs(&mut noise, kind, rows);
                    found.extend(layer.run(device, vec![window(1, 0, rows, start, 0, true)], &inputs));
                }
                found.extend(layer.states(device, 2));
                found
            });
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn delta_net_of_the_family() {
    let mut pair = Pair::new();
    for rows in [1, 4, 100] {
        pair.same(&format!("delta net of {rows} rows of the family"), |device| {
            let layer = Layer::new(device, FAMILY, 1, rows).normed();
            let mut noise = Noise::new(rows as u64);
            let mut found = Vec::new();
            for start in [0, rows] {
                let inputs = layer.inputs(&mut noise, Kind::Random, rows);
                found.extend(layer.run(device, vec![window(0, 0, rows, start, 0, true)], &inputs));
            }
            found.extend(layer.states(device, 1));
            found
        });
    }
}

/// Layers one after another in the same planes: of the first one's convolution only the rule sees anything.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn two_layers_in_the_same_planes() {
    let mut pair = Pair::new();
    let shape = DeltaShape { key_heads: 2, value_heads: 4, key_dim: 128, value_dim: 20, conv_taps: 4 };
    for rows in [33, 70] {
        pair.same(&format!("two layers of {rows} rows"), |device| {
            let layer = Layer::new(device, shape, 1, rows).normed();
            let next = Layer { pool: device.state_pool(shape, 1).unwrap(), ..layer };
            let [x, mixed, a, b, out, z] = layer.buffers;
            let inputs = layer.inputs(&mut Noise::new(rows as u64), Kind::Random, rows);
            let mut found = Vec::new();
            for start in [0, rows] {
                device.begin(&step(vec![window(0, 0, rows, start, 0, true)])).unwrap();
                for (buffer, values) in [x, a, b, z].into_iter().zip(&inputs) {
                    device.write(buffer, 0, values).unwrap();
                }
                layer.queue(device, rows);
                next.queue(device, rows);
                found.extend(read(device, mixed, rows * shape.channels()));
                found.extend(read(device, out, rows * shape.value_heads * shape.value_dim));
            }
            found.extend(layer.states(device, 1));
            found.extend(next.states(device, 1));
            found
        });
    }
}

/// Steps of several sequences, drafts kept in part, snapshots: what a server does, at random.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn random_lives_of_states() {
    let mut pair = Pair::new();
    for seed in 0..20 {
        let shape = SHAPES[seed % SHAPES.len()];
        pair.same(&format!("lives {seed} of {shape:?}"), |device| {
            let mut noise = Noise::new(seed as u64 + 50);
            let places = 5;
            let layer = Layer::new(device, shape, places, 4 * 90);
            let layer = if seed % 3 > 0 { layer.normed() } else { layer };
            let longest = [89, 8][seed % 2];
            let mut found = Vec::new();
            for _ in 0..8 {
                let mut windows = Vec::new();
                let mut first = 0;
                for place in 0..places as u32 - 1 {
                    if noise.below(3) == 0 {
                        continue;
                    }
                    let rows =
                        [1, 1, 4, 1 + noise.below(WINDOW_ROWS_MAX), 20 + noise.below(70)][noise.below(5)];
                    let rows = if longest > 8 { rows } else { 1 + rows % 8 };
                    let commit = rows > WINDOW_ROWS_MAX || noise.below(2) == 0;
                    let mut one = window(place, first, rows, 10, 0, commit);
                    if !commit && noise.below(2) == 0 {
                        one.parents = Some(tree(&mut noise, rows));
                    }
                    first += rows;
                    windows.push(one);
                }
                if windows.is_empty() {
                    continue;
                }
                let kind = if noise.below(6) == 0 { Kind::Faulty } else { Kind::Random };
                let inputs = layer.inputs(&mut noise, kind, first);
                found.extend(layer.run(device, windows.clone(), &inputs));
                for of in windows.iter().filter(|of| !of.commit) {
                    if noise.below(4) > 0 {
                        let mut path = of.path(noise.below(of.rows));
                        path.truncate(noise.below(path.len() + 1));
                        device.state_keep(layer.pool, of.place, &path).unwrap();
                    }
                }
                match noise.below(4) {
                    0 => device.state_copy(layer.pool, noise.below(places) as u32, 4).unwrap(),
                    1 => device.state_copy(layer.pool, 4, noise.below(places) as u32).unwrap(),
                    2 => device.state_clear(layer.pool, noise.below(places) as u32).unwrap(),
                    _ => {
                        let state = device.state_read(layer.pool, 2).unwrap();
                        device.state_write(layer.pool, 1, &state).unwrap();
                    }
                }
                found.extend(layer.states(device, places as u32));
            }
            found
        });
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn states_are_refused_alike() {
    let mut pair = Pair::new();
    for device in [&mut pair.cpu as &mut dyn Device, &mut pair.cuda] {
        let layer = Layer::new(device, SHAPES[2], 4, 1);
        assert!(device.state_clear(layer.pool, 4).is_err());
        assert!(device.state_copy(layer.pool, 0, 4).is_err());
        assert!(device.state_keep(layer.pool, 1, &[0]).is_err(), "nothing was kept");
        let short = DeltaState { recurrent: vec![0.0], conv: Vec::new() };
        assert!(device.state_write(layer.pool, 2, &short).is_err());
        assert!(device.state_pool(DeltaShape { conv_taps: 9, ..SHAPES[0] }, 1).is_err());
        assert!(device.memory().states > 0);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn time_of_the_delta_net() {
    let device = &mut crate::cuda();
    let layers: Vec<Layer> = (0..30).map(|_| Layer::new(device, FAMILY, 33, 2048).normed()).collect();
    let inputs = layers[0].inputs(&mut Noise::new(1), Kind::Random, 2048);
    for layer in &layers {
        let [x, _, a, b, _, z] = layer.buffers;
        for (buffer, values) in [x, a, b, z].into_iter().zip(&inputs) {
            device.write(buffer, 0, values).unwrap();
        }
    }
    for (windows, rows, commit) in [
        (1, 1, true),
        (4, 1, true),
        (32, 1, true),
        (1, 4, false),
        (1, 17, true),
        (1, 512, true),
        (1, 2048, true),
    ] {
        let list: Vec<Window> =
            (0..windows).map(|at| window(at as u32, at * rows, rows, 0, 0, commit)).collect();
        let of = step(list);
        let out = layers[0].buffers[4];
        let seconds = time(device, out, 3, |device| {
            device.begin(&of).unwrap();
            layers.iter().for_each(|layer| layer.queue(device, windows * rows));
        });
        println!(
            "delta net, {windows} windows of {rows}: {:.1} us a layer (conv, rule and norm), {:.2} us a row",
            seconds * 1e6 / 30.0,
            seconds * 1e6 / 30.0 / (windows * rows) as f64
        );
    }
}
