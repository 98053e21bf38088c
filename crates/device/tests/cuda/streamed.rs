//! Forms of few rows whose blocks stay and stream their weights.

use quant::{Dtype, Scheme, Zero};

use crate::matrices::{Layer, MLX, Random, check, check_experts, dense, grouped, six};

/// Matrices whose weights stream through blocks that stay: all widths of one group length together, dense
/// ones beside them, and so many tiles of one kind that few rows stream them too.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn streamed_matrices_equal_the_cpu() {
    let mut random = Random(14);
    let mut wrong = 0;
    for (group, cols) in [(64, 1280), (32, 256), (128, 3328)] {
        let mut matrices = six(&mut random, 40, cols, &[group], group / 32);
        if group == 64 {
            matrices.push(dense(&mut random, 20, cols, Dtype::Bf16));
        }
        wrong += check(&matrices, &[9, 16, 17, 32], 15);
        println!("groups of {group}: {wrong} wrong");
    }
    // Rows that do not fit into a block together.
    wrong += check(&[grouped(&mut random, 70, 4096, MLX)], &[12, 27, 32], 17);
    let matrices = [grouped(&mut random, 6400, 512, MLX), grouped(&mut random, 33, 512, MLX)];
    wrong += check(&matrices, &[2, 5, 8, 12, 30], 16);
    assert_eq!(wrong, 0);
}

/// Layers whose blocks stream their weights: every width and group length, one and several slices, rows that
/// all choose the same experts.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn streamed_experts_equal_the_cpu() {
    let mut random = Random(35);
    let mut wrong = 0;
    let mut layer = |experts, [width, inner]: [usize; 2], bits, group, zero, scales| {
        Layer::new(experts, |_, down| {
            let (rows, cols) = if down { (width, inner) } else { (inner, width) };
            grouped(&mut random, rows, cols, Scheme { bits, group, zero, scales })
        })
    };
    let four = layer(9, [1280, 256], 4, 64, Zero::Affine, Dtype::Bf16);
    wrong += check_experts(&four, 3, &[2, 3, 8, 9, 31, 64], 36);
    let same = layer(3, [256, 256], 4, 64, Zero::Affine, Dtype::Bf16);
    wrong += check_experts(&same, 3, &[2, 17, 40], 37);
    for (bits, group, zero, scales) in [
        (2, 32, Zero::Symmetric, Dtype::Bf16),
        (3, 128, Zero::Affine, Dtype::F16),
        (5, 64, Zero::Symmetric, Dtype::F32),
        (6, 32, Zero::Affine, Dtype::F32),
        (8, 128, Zero::Affine, Dtype::Bf16),
    ] {
        let of = layer(5, [256, 1280], bits, group, zero, scales);
        wrong += check_experts(&of, 2, &[2, 5, 20], 38);
    }
    assert_eq!(wrong, 0);
}
