//! Forms of kernels that other cards take: of few multiprocessors, little shared memory, no instructions of Hopper's.

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
            let layer = Layer::new(device, FAMILY, form, 24, 640);
            let mut noise = Noise::new(77);
            let (mut found, mut start) = (Vec::new(), 0);
            // Long chains over the edge of a span, and short ones whose rows share what is loaded.
            for rows in [600, 17, 70, 16, 15, 8, 330, 16, 5, 1] {
                let inputs = layer.inputs(&mut noise, Kind::Random, rows);
                found.extend(layer.run(device, vec![window(0, 0, rows, start, 1, true)], &inputs));
                start += rows;
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
        wrong += check_on(small_card(), &[matrix], &[1, 3, 8, 9, 20, 32], 5);
    }
    wrong += check_on(small_card(), &six(&mut random, 40, 2048, &[32, 64], 1), &[1, 4, 12, 30, 100], 6);
    assert_eq!(wrong, 0);
}
