//! Every kernel over few rows and narrow matrices, each test small enough to end under a memory or race
//! checker within a minute (`docs/hardware.md`, memory checks).

use quant::{Dtype, Encoding, Scheme, Zero};

use crate::attention::lives_of_pages;
use crate::delta_net::{Layer as DeltaLayer, SHAPES};
use crate::draw::draws_of;
use crate::matrices::{Layer, MLX, Random, check, check_experts, dense, grouped, six};
use crate::{Kind, Noise, Pair, window};

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sanitized_matrices_of_few_rows() {
    let mut random = Random(51);
    // Rows of one, eight and sixteen; a last tile that is not whole, a row that ends inside a slice.
    assert_eq!(check(&six(&mut random, 24, 1152, &[32, 64, 128], 0), &[1, 5, 12], 3), 0);
    assert_eq!(check(&[grouped(&mut random, 40, 512, MLX)], &[1, 8, 20], 4), 0);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sanitized_matrices_in_turns() {
    // More blocks than a card holds: each takes several.
    let wide = grouped(&mut Random(52), 16 * 8 * 300, 64, MLX);
    assert_eq!(check(&[wide], &[1, 3], 5), 0);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sanitized_matrices_of_prompts() {
    let mut random = Random(53);
    let four = grouped(&mut random, 136, 256, MLX);
    let eight = grouped(&mut random, 136, 256, Scheme { bits: 8, ..MLX });
    let coarse = Scheme { bits: 4, group: 128, zero: Zero::Symmetric, scales: Dtype::F16 };
    let coarse = grouped(&mut random, 136, 256, coarse);
    assert_eq!(check(&[four, eight, coarse], &[33, 70], 6), 0);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sanitized_dense_matrices() {
    let mut random = Random(54);
    let narrow = dense(&mut random, 24, 200, Dtype::Bf16);
    assert_eq!(check(&[narrow], &[1, 9, 40], 7), 0);
    let wide = dense(&mut random, 300, 200, Dtype::F32);
    assert!(matches!(wide.encoding(), Encoding::Dense(_)));
    assert_eq!(check(&[wide], &[40], 8), 0);
}

/// `experts` experts of 128 from 192 inputs.
fn experts(seed: u64, experts: usize) -> Layer {
    let mut random = Random(seed);
    Layer::new(experts, |_, down| {
        let (rows, cols) = if down { (192, 128) } else { (128, 192) };
        grouped(&mut random, rows, cols, MLX)
    })
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sanitized_experts_of_few_rows() {
    assert_eq!(check_experts(&experts(55, 6), 2, &[1, 3, 20], 9), 0);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sanitized_experts_of_prompts() {
    assert_eq!(check_experts(&experts(56, 6), 2, &[40, 70], 10), 0);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sanitized_draws() {
    draws_of(&[64, 4100], 6);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sanitized_lives_of_pages() {
    lives_of_pages(1..4, 2);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sanitized_delta_net() {
    let mut pair = Pair::new();
    for (shape, rows) in [(SHAPES[0], 1), (SHAPES[0], 5), (SHAPES[1], 40), (SHAPES[2], 34)] {
        pair.same(&format!("delta net of {rows} rows, {shape:?}"), |device| {
            let layer = DeltaLayer::new(device, shape, 2, rows).normed();
            let mut noise = Noise::new(rows as u64);
            let inputs = layer.inputs(&mut noise, Kind::Random, rows);
            let mut found = layer.run(device, vec![window(1, 0, rows, 0, 0, true)], &inputs);
            found.extend(layer.states(device, 2));
            found
        });
    }
}
