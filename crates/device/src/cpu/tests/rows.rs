//! Stages that work on single rows.

use super::*;
use crate::{AttentionShape, DeviceError, Picks};

const ROW_COUNTS: [usize; 19] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 64, 128];
const ROWS: usize = 128;

/// Rows of ordinary values, then tiny, huge, zero and non-finite ones.
fn rows(seed: u64, width: usize) -> Vec<f64> {
    let mut noise = Noise::new(seed);
    let mut values = noise.values(ROWS * width);
    for (row, scale) in [(3, 1e-30), (5, 1e11), (7, 0.0), (9, 1e30)] {
        values[row * width..(row + 1) * width].iter_mut().for_each(|x| *x = (*x * scale) as f32 as f64);
    }
    values[11 * width] = f64::NAN;
    values[13 * width + width / 2] = f64::INFINITY;
    values
}

/// Ordinary rows only.
fn mild(seed: u64, width: usize) -> Vec<f64> {
    Noise::new(seed).values(ROWS * width)
}

/// Equal bits everywhere and in any company: `script(device, rows)` gives `rows` rows of `width`.
fn pure(what: &str, width: usize, script: impl Fn(&mut dyn Device, usize) -> Vec<f32>) {
    let whole = same_everywhere(what, |device| script(device, ROWS));
    for count in ROW_COUNTS {
        let found = same_everywhere(what, |device| script(device, count));
        assert_bits(&found, &whole[..count * width], &format!("{what}, {count} rows"));
    }
}

fn norm(device: &mut dyn Device, x: &[f64], width: usize, rows: usize) -> Vec<f32> {
    let weight = device.vector(&Noise::new(2).values(width)).expect("fits");
    let (x, delta) = (filled(device, width, x), filled(device, width, &mild(3, width)));
    let (out, second) =
        (device.buffer(ROWS, width).expect("fits"), device.buffer(ROWS, width).expect("fits"));
    device.norm(x, rows, weight, 1e-6, out).expect("runs");
    device.add_norm(x, delta, rows, weight, 1e-6, second).expect("runs");
    let parts = [out, x, second].map(|buffer| read(device, buffer, rows * width));
    interleave(&parts, width)
}

/// Joins several `[rows, width]` outputs row by row.
fn interleave(parts: &[Vec<f32>], width: usize) -> Vec<f32> {
    let rows = parts[0].len() / width;
    (0..rows).flat_map(|r| parts.iter().flat_map(move |part| part[r * width..][..width].to_vec())).collect()
}

#[test]
fn norms() {
    for width in [1, 40, 300, 512, 1000] {
        pure("norm", 3 * width, |device, n| norm(device, &rows(1, width), width, n));
        close_to_reference("norm", 1e-6, |device| norm(device, &mild(1, width), width, ROWS));
    }
}

fn gated(device: &mut dyn Device, x: &[f64], head: usize, heads: usize, rows: usize) -> Vec<f32> {
    let width = head * heads;
    let weight = device.vector(&Noise::new(2).values(head)).expect("fits");
    let (x, z) = (filled(device, width, x), filled(device, width, &mild(3, width)));
    device.gated_norm(x, z, rows, weight, 1e-6).expect("runs");
    read(device, x, rows * width)
}

#[test]
fn gated_norms() {
    for (head, heads) in [(128, 3), (40, 2), (256, 1)] {
        pure("gated_norm", head * heads, |d, n| gated(d, &rows(1, head * heads), head, heads, n));
        close_to_reference("gated_norm", 1e-6, |d| gated(d, &mild(1, head * heads), head, heads, ROWS));
    }
}

fn gates(device: &mut dyn Device, x: &[f64], shape: AttentionShape, rows: usize) -> Vec<f32> {
    let width = shape.heads * shape.head_dim;
    let (x, qg) = (filled(device, width, x), filled(device, 2 * width, &mild(3, 2 * width)));
    let (up, out) = (filled(device, width, &mild(4, width)), device.buffer(ROWS, width).expect("fits"));
    device.swiglu(x, up, rows, out).expect("runs");
    device.out_gate(x, qg, rows, shape).expect("runs");
    let parts = [read(device, out, rows * width), read(device, x, rows * width)];
    interleave(&parts, width)
}

#[test]
fn elementwise_gates() {
    let shape = AttentionShape { heads: 3, kv_heads: 1, head_dim: 72 };
    pure("gates", 2 * 216, |device, n| gates(device, &rows(1, 216), shape, n));
    close_to_reference("gates", 1e-6, |device| gates(device, &mild(1, 216), shape, ROWS));
}

fn routed(device: &mut dyn Device, logits: &[f64], k: usize, experts: usize, rows: usize) -> Vec<f32> {
    const WIDTH: usize = 48;
    let picks: Picks = device.picks(ROWS, k).expect("fits");
    let logits = filled(device, experts, logits);
    device.route(logits, rows, picks).expect("runs");
    let (ids, weights) = device.read_picks(picks, rows).expect("fits");
    let (routed, shared) = (filled(device, WIDTH, &Noise::new(5).values(ROWS * k * WIDTH)), mild(6, WIDTH));
    let (shared, gate) = (filled(device, WIDTH, &shared), filled(device, 1, &mild(7, 1)));
    let out = device.buffer(ROWS, WIDTH).expect("fits");
    device.combine(routed, picks, shared, gate, rows, out).expect("runs");
    let out = read(device, out, rows * WIDTH);
    let mut all = Vec::new();
    for row in 0..rows {
        all.extend(ids[row * k..][..k].iter().map(|&id| id as f32));
        all.extend(weights[row * k..][..k].iter().map(|&w| w as f32));
        all.extend_from_slice(&out[row * WIDTH..][..WIDTH]);
    }
    all
}

#[test]
fn routes_and_combinations() {
    for (k, experts) in [(8, 256), (1, 4), (4, 4)] {
        pure("route", 2 * k + 48, |device, n| routed(device, &rows(1, experts), k, experts, n));
        close_to_reference("route", 1e-6, |device| routed(device, &mild(1, experts), k, experts, ROWS));
    }
}

#[test]
fn ties_and_faults_of_the_router_give_distinct_experts() {
    let check = |logits: &[f64], k: usize, ids: &[u32], nan: bool| {
        for mut cpu in cpus() {
            let picks = cpu.picks(1, k).expect("fits");
            let logits = filled(&mut cpu, logits.len(), logits);
            cpu.route(logits, 1, picks).expect("runs");
            let (found, weights) = cpu.read_picks(picks, 1).expect("fits");
            assert_eq!(found, ids);
            assert!(weights.iter().all(|w| w.is_nan() == nan), "{weights:?}");
        }
    };
    check(&[1.0; 5], 3, &[0, 1, 2], false);
    check(&[-0.0, 0.0, -0.0], 2, &[0, 1], false);
    check(&[0.0, 2.0, -1.0, 2.0], 3, &[1, 3, 0], false);
    check(&[f64::NAN; 4], 3, &[0, 1, 2], true);
    check(&[-3.0, f64::NAN, -2.0], 2, &[2, 0], true);
    check(&[-1e30, f64::NAN], 2, &[0, 1], true);
}

fn rope(device: &mut dyn Device, qg: &[f64], shape: AttentionShape, rows: usize, half: usize) -> Vec<f32> {
    let AttentionShape { heads, kv_heads, head_dim } = shape;
    let angles: Vec<f64> =
        (0..200 * half).map(|i| (i / half) as f64 * 0.7f64.powi((i % half) as i32)).collect();
    let cos: Vec<f64> = angles.iter().map(|a| a.cos()).collect();
    let sin: Vec<f64> = angles.iter().map(|a| a.sin()).collect();
    let axes: Vec<u8> = (0..half).map(|j| (j % 3) as u8).collect();
    let rotary = device.rotary(&cos, &sin, &axes).expect("valid");
    let q_weight = device.vector(&Noise::new(2).values(head_dim)).expect("fits");
    let k_weight = device.vector(&Noise::new(3).values(head_dim)).expect("fits");
    let (q_width, k_width) = (heads * head_dim, kv_heads * head_dim);
    let qg = filled(device, 2 * q_width, qg);
    let (k, q) = (filled(device, k_width, &mild(4, k_width)), device.buffer(ROWS, q_width).expect("fits"));
    let rows: Vec<Row> =
        (0..rows as u32).map(|r| Row { token: None, position: [r, (r * 7) % 90, (r * 5) % 80] }).collect();
    let n = rows.len();
    device.begin(&Step::new(rows, vec![window(0, 0, n, 0, 0, true)]).expect("valid")).expect("begins");
    device.qk_norm_rope(qg, k, q_weight, k_weight, 1e-6, rotary, shape, q).expect("runs");
    let (q, k) = (read(device, q, n * q_width), read(device, k, n * k_width));
    (0..n).flat_map(|r| [&q[r * q_width..][..q_width], &k[r * k_width..][..k_width]].concat()).collect()
}

#[test]
fn norm_and_rotation_of_heads() {
    for (head_dim, half) in [(256, 32), (72, 18), (16, 8), (32, 0)] {
        let shape = AttentionShape { heads: 4, kv_heads: 2, head_dim };
        let width = 6 * head_dim;
        pure("rope", width, |d, n| rope(d, &rows(1, 8 * head_dim), shape, n, half));
        if half > 0 {
            close_to_reference("rope", 1e-6, |d| rope(d, &mild(1, 8 * head_dim), shape, ROWS, half));
        }
    }
}

#[test]
fn positions_beyond_the_table_are_refused() {
    let mut cpu = plain();
    let rotary = cpu.rotary(&[1.0; 8], &[0.0; 8], &[0, 1]).expect("valid");
    let shape = AttentionShape { heads: 1, kv_heads: 1, head_dim: 4 };
    let (w, qg) = (cpu.vector(&[1.0; 4]).expect("fits"), cpu.buffer(1, 8).expect("fits"));
    let (k, q) = (cpu.buffer(1, 4).expect("fits"), cpu.buffer(1, 4).expect("fits"));
    let row = Row { token: None, position: [3, 4, 0] };
    cpu.begin(&Step::new(vec![row], vec![window(0, 0, 1, 0, 0, true)]).expect("valid")).expect("begins");
    let error = cpu.qk_norm_rope(qg, k, w, w, 1e-6, rotary, shape, q).expect_err("position 4 of 4");
    assert!(matches!(error, DeviceError::Failed { stage: "qk_norm_rope", .. }), "{error}");
    assert_eq!(read(&mut cpu, k, 4), [0.0; 4]);
}

#[test]
fn joins_and_gathers() {
    let mut cpu = plain();
    let (a, b) = (filled(&mut cpu, 2, &[1.0, 2.0, 3.0, 4.0]), filled(&mut cpu, 1, &[5.0, 6.0]));
    let (joined, gathered) = (cpu.buffer(2, 3).expect("fits"), cpu.buffer(3, 2).expect("fits"));
    cpu.join(a, b, 2, joined).expect("runs");
    assert_eq!(read(&mut cpu, joined, 6), [1.0, 2.0, 5.0, 3.0, 4.0, 6.0]);
    cpu.gather(a, &[1, 0, 1], gathered).expect("runs");
    assert_eq!(read(&mut cpu, gathered, 6), [3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn copied_rows_go_to_their_places_and_leave_the_others() {
    let check = |device: &mut dyn Device| {
        let from = filled(device, 2, &[1.0, 2.0, 3.0, f64::NAN, 5.0, 6.0]);
        let to = filled(device, 2, &[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0]);
        device.copy_rows(from, &[2, 0, 2], to, &[3, 0, 1]).expect("runs");
        device.copy_rows(from, &[], to, &[]).expect("copies nothing");
        assert_eq!(read(device, to, 8), [1.0, 2.0, 5.0, 6.0, -5.0, -6.0, 5.0, 6.0]);
        device.copy_rows(from, &[1], to, &[2]).expect("runs");
        let found = read(device, to, 6);
        assert!(found[4] == 3.0 && found[5].is_nan(), "{found:?}");
    };
    cpus().into_iter().for_each(|mut cpu| check(&mut cpu));
    check(&mut Reference::new(1));
}
