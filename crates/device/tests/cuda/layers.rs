//! Stages of whole layers in one list: what the device lowers together equals the stages one by one, in every buffer
//! they leave behind.

use device::{Buffer, DeltaShape, Device, ExpertsRef, MatrixRef, Picks, VectorRef};
use quant::{Dtype, Matrix, Scheme, Zero};

use crate::matrices::{MLX, Random, dense, grouped, large};
use crate::{Kind, Noise, Pair, read, step, time, window};

/// A mixture of experts: matrices as the host has them.
struct Mixture {
    experts: usize,
    k: usize,
    width: usize,
    inner: usize,
    gate: Vec<Matrix>,
    up: Vec<Matrix>,
    down: Vec<Matrix>,
    /// Router, gate, up, scalar gate, down.
    others: [Matrix; 5],
}

impl Mixture {
    /// `shared`: how the shared expert is stored.
    fn new([experts, k, width, inner]: [usize; 4], shared: Scheme, seed: u64) -> Self {
        let mut random = Random(seed);
        let scheme = Scheme { bits: 4, group: 64, zero: Zero::Affine, scales: Dtype::Bf16 };
        let mut all = |rows, cols| (0..experts).map(|_| grouped(&mut random, rows, cols, scheme)).collect();
        let (gate, up, down) = (all(inner, width), all(inner, width), all(width, inner));
        let others = [
            dense(&mut random, experts, width, Dtype::Bf16),
            grouped(&mut random, inner, width, shared),
            grouped(&mut random, inner, width, shared),
            dense(&mut random, 1, width, Dtype::Bf16),
            grouped(&mut random, width, inner, shared),
        ];
        Self { experts, k, width, inner, gate, up, down, others }
    }

    fn check(&self, pair: &mut Pair, rows: usize, kind: Kind) {
        let what = format!("{rows} {kind:?} rows of {} experts of {}", self.experts, self.inner);
        let Self { experts, k, width, inner, .. } = *self;
        let mut noise = Noise::new(rows as u64 + 900);
        let (x, update) = (kind.values(&mut noise, rows, width), noise.values(rows * width));
        let weight: Vec<f64> = noise.values(width).iter().map(|w| w.abs() + 0.5).collect();
        pair.same(&what, |device| {
            let weight = device.vector(&weight).unwrap();
            let packed = device.experts(&self.gate, &self.up, &self.down).unwrap();
            let matrices = self.others.each_ref().map(|matrix| device.matrix(matrix).unwrap());
            let picks = device.picks(rows, k).unwrap();
            let one = [width, width, width, experts, inner, inner, 1, inner, width]
                .map(|width| (device.buffer(rows, width).unwrap(), rows * width));
            let routed = device.buffer(rows * k, width).unwrap();
            let planes = one.map(|(buffer, _)| buffer);
            device.write(planes[0], 0, &x).unwrap();
            device.write(planes[1], 0, &update).unwrap();
            queue(device, &planes, routed, rows, (weight, packed, &matrices, picks));
            let mut found = read(device, routed, rows * k * width);
            for (buffer, count) in &one {
                found.extend(read(device, *buffer, *count));
            }
            let (ids, weights) = device.read_picks(picks, rows).unwrap();
            found.extend(ids.iter().map(|&id| id as f32));
            found.extend(weights.iter().map(|&w| w as f32));
            found
        });
    }
}

/// From the residual and an update of it through the mixture to the next norm. `planes`: residual, update, normed,
/// router, gate, up, scalar gate, inner, shared.
fn queue(
    device: &mut dyn Device,
    planes: &[Buffer; 9],
    routed: Buffer,
    rows: usize,
    (weight, experts, matrices, picks): (VectorRef, ExpertsRef, &[MatrixRef; 5], Picks),
) {
    let [x, update, normed, router, gate, up, scalar, inner, shared] = *planes;
    device.add_norm(x, update, rows, weight, 1e-6, normed).unwrap();
    let to = [(matrices[0], router), (matrices[1], gate), (matrices[2], up), (matrices[3], scalar)];
    device.linear(normed, rows, &to).unwrap();
    device.route(router, rows, picks).unwrap();
    device.routed_experts(normed, rows, picks, experts, routed).unwrap();
    device.swiglu(gate, up, rows, inner).unwrap();
    device.linear(inner, rows, &[(matrices[4], shared)]).unwrap();
    device.combine(routed, picks, shared, scalar, rows, update).unwrap();
    device.add_norm(x, update, rows, weight, 1e-6, normed).unwrap();
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn mixtures_equal_the_cpu() {
    let mut pair = Pair::new();
    let four = Scheme { bits: 4, group: 64, zero: Zero::Affine, scales: Dtype::Bf16 };
    let mixture = Mixture::new([20, 3, 256, 128], four, 40);
    for (rows, kind) in [
        (1, Kind::Random),
        (1, Kind::Faulty),
        (2, Kind::Tied),
        (4, Kind::Random),
        (5, Kind::Faulty),
        (8, Kind::Random),
        (9, Kind::Random),
        (33, Kind::Random),
        (64, Kind::Spread),
        (70, Kind::Random),
        (130, Kind::Random),
    ] {
        mixture.check(&mut pair, rows, kind);
    }
    let streamed = Mixture::new([20, 3, 512, 256], four, 43);
    for (rows, kind) in
        [(2, Kind::Tied), (5, Kind::Faulty), (8, Kind::Random), (23, Kind::Random), (40, Kind::Spread)]
    {
        streamed.check(&mut pair, rows, kind);
    }
    // Many experts of which one row chooses many; a shared expert that is stored in a way of its own.
    let eight = Scheme { bits: 8, ..four };
    for (rows, kind) in [(1, Kind::Random), (3, Kind::Random), (40, Kind::Random)] {
        Mixture::new([70, 9, 128, 64], four, 41).check(&mut pair, rows, kind);
        Mixture::new([6, 2, 128, 64], eight, 42).check(&mut pair, rows, kind);
    }
}

/// Delta-net layers of the family in one list, 4 bits: what a layer takes of a decode step.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn time_of_layers() {
    let device = &mut crate::cuda();
    let (width, inner, experts, k, most) = (2048, 512, 256, 8, 32);
    let shape = DeltaShape { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, conv_taps: 4 };
    let (channels, values) = (shape.channels(), 4096);
    let mut noise = Noise::new(31);
    let mut vector = |n: usize| noise.values(n).iter().map(|x| x.abs() + 0.1).collect::<Vec<f64>>();
    let widths = [
        width, width, width, channels, values, 32, 32, channels, values, experts, inner, inner, 1, inner,
        width,
    ];
    let [x, update, normed, qkv, z, a, b, mixed, out, router, gate, up, scalar, hidden, shared] =
        widths.map(|width| device.buffer(most, width).unwrap());
    let routed = device.buffer(most * k, width).unwrap();
    let picks = device.picks(most, k).unwrap();
    device.write(x, 0, &Noise::new(3).values(most * width)).unwrap();
    let layers: Vec<_> = (0..3)
        .map(|layer| {
            let of = |device: &mut device::cuda::Cuda, rows, cols| {
                device.matrix(&large(rows, cols, MLX, layer)).unwrap()
            };
            let mixer = [(channels, width), (values, width), (32, width), (32, width), (width, values)]
                .map(|(rows, cols)| of(device, rows, cols));
            let router = device.matrix(&dense(&mut Random(layer + 9), experts, width, Dtype::Bf16)).unwrap();
            let others = [(inner, width), (inner, width), (1, width), (width, inner)]
                .map(|(rows, cols)| of(device, rows, cols));
            let one = vec![large(inner, width, MLX, layer); experts];
            let down = vec![large(width, inner, MLX, layer); experts];
            let packed = device.experts(&one, &one, &down).unwrap();
            let pool = device.state_pool(shape, most).unwrap();
            let [taps, decay, dt_bias, head, norm] =
                [4 * channels, 32, 32, 128, width].map(|n| device.vector(&vector(n)).unwrap());
            (mixer, router, others, packed, pool, [taps, decay, dt_bias, head, norm])
        })
        .collect();
    for (windows, rows) in [(1, 1), (1, 4), (4, 1), (8, 1), (32, 1)] {
        let list = (0..windows).map(|at| window(at as u32, at * rows, rows, 0, 0, rows == 1)).collect();
        let (of, rows) = (step(list), windows * rows);
        let repeats = 10;
        let seconds = time(device, x, 3, |device| {
            device.begin(&of).unwrap();
            for _ in 0..repeats {
                for (mixer, into, others, packed, pool, [taps, decay, dt_bias, head, norm]) in &layers {
                    let to = [(mixer[0], qkv), (mixer[1], z), (mixer[2], a), (mixer[3], b)];
                    device.linear(normed, rows, &to).unwrap();
                    device.conv(qkv, *taps, *pool, mixed).unwrap();
                    device.delta_rule(mixed, a, b, *decay, *dt_bias, *pool, out).unwrap();
                    device.gated_norm(out, z, rows, *head, 1e-6).unwrap();
                    device.linear(out, rows, &[(mixer[4], update)]).unwrap();
                    let planes = [x, update, normed, router, gate, up, scalar, hidden, shared];
                    let matrices = [*into, others[0], others[1], others[2], others[3]];
                    queue(device, &planes, routed, rows, (*norm, *packed, &matrices, picks));
                }
            }
        });
        let layer = seconds * 1e6 / (repeats * layers.len()) as f64;
        println!("layer of {windows} windows, {rows} rows: {layer:.1} us");
    }
}
