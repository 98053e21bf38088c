//! Forms of kernels that other cards take: of few multiprocessors, little shared memory, no instructions of
//! Hopper's.

use device::KvForm;
use quant::{Dtype, Scheme, Zero};

use crate::attention::{FAMILY, Layer};
use crate::matrices::{MLX, Random, check_on, grouped, six};
use crate::{Kind, Noise, Pair, cpu, small_card, window};

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn small_cards_attend_alike() {
    let mut pair = Pair { cpu: cpu(), cuda: small_card() };
    for form in [KvForm::Int8, KvForm::Int16] {
        pair.same(&format!("attention of a small card, {form:?}"), |device| {
            let layer = Layer::new(device, FAMILY, form, 24, 140);
            let mut noise = Noise::new(77);
            let (mut found, mut starts) = (Vec::new(), [0, 0]);
            // Long chains, and short ones whose rows share what is loaded.
            for rows in [[100, 40], [16, 16], [15, 16], [17, 1], [1, 1]] {
                let inputs = layer.inputs(&mut noise, Kind::Random, rows[0] + rows[1]);
                let windows = vec![
                    window(0, 0, rows[0], starts[0], 1, true),
                    window(1, rows[0], rows[1], starts[1], 12, true),
                ];
                found.extend(layer.run(device, windows, &inputs));
                starts = [starts[0] + rows[0], starts[1] + rows[1]];
            }
            found
        });
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn small_cards_multiply_alike() {
    let mut random = Random(91);
    let eight = Scheme { bits: 8, group: 32, zero: Zero::Affine, scales: Dtype::F32 };
    let mut wrong = 0;
    // Rows are cut where their units have no room, warps where their slices have none.
    for (cols, scheme) in
        [(4096, Scheme { bits: 8, ..MLX }), (8192, Scheme { bits: 8, ..MLX }), (8192, eight)]
    {
        let matrix = grouped(&mut random, 40, cols, scheme);
        wrong += check_on(small_card(), &[matrix], &[3, 9, 32], 5);
    }
    wrong += check_on(small_card(), &six(&mut random, 24, 2048, &[32, 64], 1), &[4, 30], 6);
    assert_eq!(wrong, 0);
}
