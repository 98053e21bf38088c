//! Router, routed experts and their combination.

use quant::{Matrix, Zero};

use super::{
    Noise, check, contents, filled,
    matrices::{dense, grouped, naive},
    same_bits,
};
use crate::{Device, Picks, reference::Reference};

fn route(device: &mut Reference, logits: &[f64], width: usize, k: usize) -> (Picks, Vec<u32>, Vec<f64>) {
    let rows = logits.len() / width;
    let picks = device.picks(rows, k).expect("memory");
    let logits = filled(device, width, logits);
    device.route(logits, rows, picks).expect("fits");
    let (ids, weights) = device.read_picks(picks, rows).expect("routed");
    (picks, ids, weights)
}

#[test]
fn routing_takes_the_best_and_the_lower_of_equals() {
    let mut device = Reference::new(1);
    let logits = [0.0, 2.0, 1.0, 2.0, -1.0, 7.0, 7.0, 7.0, 7.0, 7.0];
    let (_, ids, weights) = route(&mut device, &logits, 5, 3);
    assert_eq!(ids, [1, 3, 2, 0, 1, 2]);
    let sum = 2.0 + (-1f64).exp();
    check("weights", &weights[..3], &[1.0 / sum, 1.0 / sum, (-1f64).exp() / sum], 1e-15);
    check("equal weights", &weights[3..], &[1.0 / 3.0; 3], 1e-15);
}

#[test]
fn routing_rows_with_nan_still_picks_distinct_experts() {
    let mut device = Reference::new(1);
    let logits = [f64::NAN, 1.0, f64::NAN, f64::NAN, f64::NAN, f64::NAN];
    let (_, ids, weights) = route(&mut device, &logits, 3, 2);
    assert_eq!(ids, [1, 0, 0, 1]);
    assert!(weights.iter().all(|w| w.is_nan()));
}

#[test]
fn experts_are_weighted_swiglu_blocks() {
    let (rows, k, hidden, inner, count) = (21, 3, 64, 96, 5);
    let mut noise = Noise(5);
    let mut many = |rows, cols, affine: bool| -> Vec<Matrix> {
        let one = |_| {
            if affine { grouped(&mut noise, rows, cols, Zero::Affine) } else { dense(&mut noise, rows, cols) }
        };
        (0..count).map(one).collect()
    };
    let (gate, up) = (many(inner, hidden, true), many(inner, hidden, false));
    let down = many(hidden, inner, true);
    let (x, shared) = (noise.values(rows * hidden), noise.values(rows * hidden));
    let (logits, shared_gate) = (noise.values(rows * count), noise.values(rows));

    let mut results = Vec::new();
    for threads in [1, 3] {
        let mut device = Reference::new(threads);
        let (picks, ids, weights) = route(&mut device, &logits, count, k);
        let experts = device.experts(&gate, &up, &down).expect("shapes agree");
        let x_rows = filled(&mut device, hidden, &x);
        let routed = filled(&mut device, hidden, &vec![0.0; rows * k * hidden]);
        device.routed_experts(x_rows, rows, picks, experts, routed).expect("fits");
        let (shared_rows, gates) =
            (filled(&mut device, hidden, &shared), filled(&mut device, 1, &shared_gate));
        device.combine(routed, picks, shared_rows, gates, rows, x_rows).expect("fits");
        let got = contents(&mut device, x_rows, rows, hidden);

        let mut expected = Vec::new();
        for row in 0..rows {
            let x = &x[row * hidden..][..hidden];
            let sigmoid = 1.0 / (1.0 + (-shared_gate[row]).exp());
            let mut sum: Vec<f64> = shared[row * hidden..][..hidden].iter().map(|s| s * sigmoid).collect();
            for (&id, weight) in ids[row * k..][..k].iter().zip(&weights[row * k..]) {
                let (g, u) = (naive(&gate[id as usize], x), naive(&up[id as usize], x));
                let inner: Vec<f64> = g.iter().zip(u).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                for (sum, y) in sum.iter_mut().zip(naive(&down[id as usize], &inner)) {
                    *sum += weight * y;
                }
            }
            expected.extend(sum);
        }
        check("experts", &got, &expected, 1e-13);
        results.push(got);
    }
    same_bits("threads", &results[1], &results[0]);
    let wrong = Reference::new(1).experts(&gate, &down, &up).expect_err("shapes differ");
    assert_eq!(wrong.to_string(), "experts: rows of a up matrix is 64, 96 expected");
}

#[test]
fn swiglu_is_elementwise() {
    let mut device = Reference::new(1);
    let (gate, up) = (filled(&mut device, 2, &[1.0, -800.0]), filled(&mut device, 2, &[3.0, 1.0]));
    device.swiglu(gate, up, 1, up).expect("fits");
    check("swiglu", &contents(&mut device, up, 1, 2), &[3.0 / (1.0 + (-1f64).exp()), 0.0], 1e-15);
}
