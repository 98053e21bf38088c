//! Sums of the matrix instruction against 64-bit integers.

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn half_precision_sums_are_exact_integers() {
    let groups = 1 << 18;
    let wrong = device::cuda::inexact_sums(0, groups, None).unwrap();
    assert_eq!(wrong, 0, "of {groups} groups of 32, 64 and 128");
    println!("{} sums of 32, 64 and 128 products are exact", groups as u64 * 128 * 3);
}
