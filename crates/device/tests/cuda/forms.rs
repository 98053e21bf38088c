//! Matrix products of all forms of storage, and forms of the CUDA device that other stage tests do not reach.

use quant::{Dtype, Scheme, Zero};

use super::matrices::{Layer, MLX, Random, activations, check, check_expert_rows_on, grouped, six};

/// Lengths of groups.
const GROUPS: [usize; 3] = [32, 64, 128];

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn grouped_matrices_equal_the_cpu() {
    let matrices = six(&mut Random(1), 40, 1664, &GROUPS, 0);
    assert_eq!(check(&matrices, &[1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 64, 130], 7), 0);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn grouped_matrices_in_other_orders_equal_the_cpu() {
    let mut random = Random(18);
    let mut wrong = 0;
    for turn in 1..3 {
        wrong += check(&six(&mut random, 40, 1664, &GROUPS, turn), &[1, 6, 50], 7);
        println!("turn {turn}: {wrong} wrong");
    }
    assert_eq!(wrong, 0);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn grouped_matrices_of_other_widths_equal_the_cpu() {
    let mut random = Random(19);
    let mut wrong = 0;
    // One slice; more slices than warps; several blocks of outputs.
    for (outputs, cols) in [(24, 512), (24, 10 * 1024 + 128), (300, 1024)] {
        wrong += check(&six(&mut random, outputs, cols, &GROUPS, 0), &[1, 4, 11, 40], 8);
        println!("{cols} columns: {wrong} wrong");
    }
    // Half steps.
    wrong += check(&six(&mut random, 24, 96, &[32], 0), &[1, 4, 40], 8);
    assert_eq!(wrong, 0);
}

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
