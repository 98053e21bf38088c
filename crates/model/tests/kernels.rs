//! The list of kernels that a release compiles before, against what models ask for.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

// What makes the list is an example; only a part of it is used here.
#[path = "../examples/cuda_variants/blank.rs"]
#[allow(dead_code)]
mod blank;
#[path = "../examples/cuda_variants/subjects.rs"]
#[allow(dead_code)]
mod subjects;
#[path = "../examples/cuda_variants/tour.rs"]
#[allow(dead_code)]
mod tour;

use std::collections::HashSet;

use device::cuda::rehearsal::CARD_KINDS;

use subjects::{MLX_4BIT, folder, published, rehearsed, root};

/// The rest is compared by continuous integration (`cuda_variants --check`).
#[test]
fn what_the_projects_models_ask_of_a_card_is_in_the_list() {
    let list = std::fs::read_to_string(root().join("packaging/kernels.list")).unwrap();
    let mut listed: HashSet<(&str, &str)> = HashSet::new();
    for line in list.lines() {
        let (archs, variant) = line.split_once(' ').unwrap();
        listed.extend(archs.split(',').map(|arch| (arch, variant)));
    }
    for subject in [published(MLX_4BIT), folder("models/demo"), folder("fixtures/tiny-a")] {
        let subject = subject.unwrap();
        for kind in [&CARD_KINDS[0], &CARD_KINDS[CARD_KINDS.len() - 1]] {
            for variant in rehearsed(kind, &subject, false).unwrap() {
                for arch in kind.archs {
                    assert!(
                        listed.contains(&(*arch, &variant)),
                        "{variant} for {arch}, asked for by {}, is not in packaging/kernels.list; write it \
                         anew: cargo run --release -p model --example cuda_variants > packaging/kernels.list",
                        subject.name
                    );
                }
            }
        }
    }
}
