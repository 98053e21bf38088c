//! Norms, gates, joins, gathers, and what is written and read.

use device::{AttentionShape, Device};

use crate::{KINDS, Noise, Pair, ROWS, filled, read, step, window};

/// Widths: of the family, narrow, odd.
const WIDTHS: [usize; 4] = [2048, 256, 96, 33];

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn norms() {
    let mut pair = Pair::new();
    for (kind, rows) in KINDS.into_iter().flat_map(|kind| ROWS.map(|rows| (kind, rows))) {
        let width = WIDTHS[rows % WIDTHS.len()];
        let mut noise = Noise::new(rows as u64);
        let (x, delta) = (kind.values(&mut noise, rows, width), kind.values(&mut noise, rows, width));
        let weight = noise.values(width);
        pair.same(&format!("norms of {rows} {kind:?} rows of {width}"), |device| {
            let weight = device.vector(&weight).unwrap();
            let (x, delta) = (filled(device, width, &x), filled(device, width, &delta));
            let out = device.buffer(rows, width).unwrap();
            device.norm(x, rows, weight, 1e-6, out).unwrap();
            let mut found = read(device, out, rows * width);
            device.add_norm(x, delta, rows, weight, 1e-6, out).unwrap();
            found.extend(read(device, out, rows * width));
            found.extend(read(device, x, rows * width));
            found
        });
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn gates() {
    let mut pair = Pair::new();
    for (kind, rows) in KINDS.into_iter().flat_map(|kind| ROWS.map(|rows| (kind, rows))) {
        let (heads, dim) = [(32, 128), (4, 64), (2, 33)][rows % 3];
        let width = heads * dim;
        let mut noise = Noise::new(rows as u64 + 100);
        let (x, z) = (kind.values(&mut noise, rows, width), kind.values(&mut noise, rows, width));
        let qg = kind.values(&mut noise, rows, 2 * width);
        let weight = noise.values(dim);
        let shape = AttentionShape { heads, kv_heads: 1, head_dim: dim };
        pair.same(&format!("gates of {rows} {kind:?} rows of {heads} x {dim}"), |device| {
            let weight = device.vector(&weight).unwrap();
            let (x, z, qg) =
                (filled(device, width, &x), filled(device, width, &z), filled(device, 2 * width, &qg));
            let out = device.buffer(rows, width).unwrap();
            device.swiglu(x, z, rows, out).unwrap();
            let mut found = read(device, out, rows * width);
            device.gated_norm(x, z, rows, weight, 1e-6).unwrap();
            found.extend(read(device, x, rows * width));
            device.out_gate(out, qg, rows, shape).unwrap();
            found.extend(read(device, out, rows * width));
            found
        });
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn joins_and_gathers() {
    let mut pair = Pair::new();
    for rows in ROWS {
        let (wide, narrow) = [(2048, 256), (64, 64), (5, 3)][rows % 3];
        let mut noise = Noise::new(rows as u64 + 200);
        let (a, b) = (noise.values(rows * wide), noise.values(rows * narrow));
        let from: Vec<usize> = (0..rows).map(|_| noise.below(rows)).collect();
        pair.same(&format!("joins and gathers of {rows} rows of {wide} and {narrow}"), |device| {
            let (a, b) = (filled(device, wide, &a), filled(device, narrow, &b));
            let (joined, picked) =
                (device.buffer(rows, wide + narrow).unwrap(), device.buffer(rows, wide).unwrap());
            device.join(a, b, rows, joined).unwrap();
            device.gather(a, &from, picked).unwrap();
            let mut found = read(device, joined, rows * (wide + narrow));
            found.extend(read(device, picked, rows * wide));
            // A row in the middle, and a long write.
            device.write(a, rows / 2, &vec![0.5; wide]).unwrap();
            found.extend(read(device, a, rows * wide));
            found
        });
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_replayed_list_takes_its_values_from_the_step() {
    let mut pair = Pair::new();
    let width = 64;
    let mut noise = Noise::new(7);
    let values: Vec<Vec<f64>> = (0..5).map(|_| noise.values(4 * width)).collect();
    pair.same("one list, several uploads", |device| {
        let [x, picked, out] = [4, 2, 2].map(|rows| device.buffer(rows, width).unwrap());
        let weight = device.vector(&vec![1.5; width]).unwrap();
        let mut found = Vec::new();
        for (round, values) in values.iter().enumerate() {
            device.begin(&step(vec![window(0, 0, 4, 0, 0, true)])).unwrap();
            device.write(x, 0, values).unwrap();
            device.gather(x, &[round % 4, (round + 1) % 4], picked).unwrap();
            device.norm(picked, 2, weight, 1e-5, out).unwrap();
            found.extend(read(device, out, 2 * width));
        }
        found
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_does_not_fit_is_refused() {
    let mut device = crate::cuda();
    let buffer = device.buffer(2, 8).unwrap();
    assert!(device.write(buffer, 1, &[0.0; 16]).is_err());
    assert!(device.read(buffer, 2, &mut [0.0; 8]).is_err());
    assert!(device.gather(buffer, &[2], buffer).is_err());
    let error = device.buffer(1 << 30, 1 << 20).err().unwrap().to_string();
    assert!(error.contains("could not be allocated"), "{error}");
    // Still usable.
    device.write(buffer, 0, &[1.0; 16]).unwrap();
    assert_eq!(read(&mut device, buffer, 16), [1.0; 16]);
}
