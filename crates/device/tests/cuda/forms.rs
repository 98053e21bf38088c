//! Forms of matrix products of the CUDA device that other stage tests do not reach.

use quant::{Dtype, Scheme, Zero};

use super::matrices::{Layer, MLX, Random, activations, check, check_expert_rows_on, grouped};

/// Few rows of matrices with so many outputs that the form of prompts does them.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn some_rows_of_tall_matrices_equal_the_cpu() {
    let mut random = Random(15);
    let mut wrong = 0;
    for (bits, group, zero) in [(4, 64, Zero::Affine), (3, 128, Zero::Symmetric), (8, 64, Zero::Affine)] {
        let scheme = Scheme { bits, group, zero, scales: Dtype::Bf16 };
        let matrices = [grouped(&mut random, 8200, 384, scheme), grouped(&mut random, 30, 384, scheme)];
        wrong += check(&matrices, &[16, 17, 32], 16);
    }
    wrong += check(&[grouped(&mut random, 8200, 1152, MLX)], &[25], 17);
    assert_eq!(wrong, 0);
}

/// Routed experts of a card whose matrix instruction does not sum exactly, for few rows and for many.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn plain_sums_of_experts_equal_the_cpu() {
    let mut random = Random(14);
    let layer = Layer::new(4, |_, down| {
        let (rows, cols) = if down { (192, 128) } else { (128, 192) };
        grouped(&mut random, rows, cols, MLX)
    });
    let x = activations(&mut Random(35), 80, 192);
    assert_eq!(check_expert_rows_on(crate::open(true), &layer, 2, &[1, 3, 20, 80], 35, x), 0);
}
