//! Stages of whole layers in one list: what the device lowers together equals the stages one by one, in every
//! buffer they leave behind.

use device::{AttentionShape, Buffer, Device, ExpertsRef, MatrixRef, Picks, VectorRef};
use quant::{Dtype, Matrix, Scheme, Zero};

use crate::matrices::{Random, dense, grouped};
use crate::{Kind, Noise, Pair, filled, read};

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
    /// How often the stages are queued in one list.
    rounds: usize,
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
        Self { experts, k, width, inner, gate, up, down, others, rounds: 1 }
    }

    /// Routers of 8 bits, and two rounds: rows that nobody reads but as codes.
    fn in_codes(mut self) -> Self {
        let scheme = Scheme { bits: 8, group: 64, zero: Zero::Affine, scales: Dtype::Bf16 };
        let mut random = Random(90);
        self.others[0] = grouped(&mut random, self.experts, self.width, scheme);
        self.others[3] = grouped(&mut random, 1, self.width, scheme);
        Self { rounds: 2, ..self }
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
            for _ in 0..self.rounds {
                queue(device, &planes, routed, rows, (weight, packed, &matrices, picks));
            }
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

/// From the residual and an update of it through the mixture to the next norm. `planes`: residual, update,
/// normed, router, gate, up, scalar gate, inner, shared.
pub(crate) fn queue(
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
    let in_codes = Mixture::new([20, 3, 256, 128], four, 44).in_codes();
    for (rows, kind) in [(65, Kind::Random), (70, Kind::Spread), (130, Kind::Faulty)] {
        in_codes.check(&mut pair, rows, kind);
    }
    // More pairs than one block sorts.
    Mixture::new([70, 9, 128, 64], four, 45).in_codes().check(&mut pair, 240, Kind::Random);
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

/// Rows that matrices read as codes alone, in planes that are used again: norms and gates whose outputs need
/// not be written, rows of more than a slice, and rows whose groups lie too far apart for aligned codes.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rows_read_as_codes_equal_the_cpu() {
    let mut pair = Pair::new();
    let (width, heads, inner) = (1152, 9, 192);
    let of = |bits, group| Scheme { bits, group, zero: Zero::Affine, scales: Dtype::Bf16 };
    let cases = [
        (65, Kind::Random, [of(4, 64); 2]),
        (66, Kind::Spread, [of(4, 64), of(8, 64)]),
        (70, Kind::Faulty, [of(4, 64); 2]),
        (67, Kind::Random, [of(4, 128), of(4, 64)]),
        (131, Kind::Spread, [of(4, 128); 2]),
    ];
    for (rows, kind, [scheme, other]) in cases {
        let (mut random, mut noise) = (Random(rows as u64), Noise::new(rows as u64 + 700));
        let mut matrix = |outputs, cols, scheme| grouped(&mut random, outputs, cols, scheme);
        let into = [matrix(inner, width, scheme), matrix(inner, width, other), matrix(width, width, scheme)];
        let back = [matrix(width, width, scheme), matrix(width, inner, of(4, 64))];
        let [x, update, z] = [0; 3].map(|_| kind.values(&mut noise, rows, width));
        let qg = kind.values(&mut noise, rows, 2 * width);
        let [weight, head] = [width, 128].map(|n| noise.values(n));
        let shape = AttentionShape { heads, kv_heads: 1, head_dim: 128 };
        pair.same(&format!("{rows} {kind:?} rows read as codes, {scheme:?}"), |device| {
            let [weight, head] = [&weight, &head].map(|values| device.vector(values).unwrap());
            let [x, update, z] = [&x, &update, &z].map(|values| filled(device, width, values));
            let qg = filled(device, 2 * width, &qg);
            let [normed, o, gate, up, hidden, shared] =
                [width, width, inner, inner, inner, width].map(|width| device.buffer(rows, width).unwrap());
            let into = into.each_ref().map(|matrix| device.matrix(matrix).unwrap());
            let back = back.each_ref().map(|matrix| device.matrix(matrix).unwrap());
            for _ in 0..2 {
                device.add_norm(x, update, rows, weight, 1e-6, normed).unwrap();
                device.linear(normed, rows, &[(into[0], gate), (into[1], up)]).unwrap();
                device.linear(normed, rows, &[(into[2], o)]).unwrap();
                device.gated_norm(o, z, rows, head, 1e-6).unwrap();
                device.linear(o, rows, &[(back[0], update)]).unwrap();
                device.swiglu(gate, up, rows, hidden).unwrap();
                device.linear(hidden, rows, &[(back[1], shared)]).unwrap();
                device.add_norm(x, shared, rows, weight, 1e-6, normed).unwrap();
                device.linear(normed, rows, &[(into[2], o)]).unwrap();
                device.out_gate(o, qg, rows, shape).unwrap();
                device.linear(o, rows, &[(back[0], update)]).unwrap();
            }
            let mut found = Vec::new();
            for (plane, width) in
                [(x, width), (update, width), (normed, width), (o, width), (hidden, inner), (shared, width)]
            {
                found.extend(read(device, plane, rows * width));
            }
            found
        });
    }
}
