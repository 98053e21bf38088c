//! Sums of a written shape (`docs/arithmetic.md`, rule 3): L lanes from +0, then a halving tree.

/// `sum_L(x * x by fma)`.
#[inline(always)]
pub(crate) fn sum_squares<const L: usize>(x: &[f32]) -> f32 {
    let mut lanes = [0f32; L];
    let (whole, rest) = x.as_chunks::<L>();
    for values in whole {
        for l in 0..L {
            lanes[l] = values[l].mul_add(values[l], lanes[l]);
        }
    }
    if !rest.is_empty() {
        let mut values = [0f32; L];
        values[..rest.len()].copy_from_slice(rest);
        for l in 0..L {
            lanes[l] = values[l].mul_add(values[l], lanes[l]);
        }
    }
    tree(lanes)
}

/// `sum_L(x)`.
#[inline(always)]
pub(crate) fn sum<const L: usize>(x: &[f32]) -> f32 {
    let mut lanes = [0f32; L];
    let (whole, rest) = x.as_chunks::<L>();
    for values in whole {
        for l in 0..L {
            lanes[l] += values[l];
        }
    }
    if !rest.is_empty() {
        let mut values = [0f32; L];
        values[..rest.len()].copy_from_slice(rest);
        for l in 0..L {
            lanes[l] += values[l];
        }
    }
    tree(lanes)
}

/// `lane[i] += lane[i + h]` for h = L/2 ... 1.
#[inline(always)]
pub(crate) fn tree<const L: usize>(mut lanes: [f32; L]) -> f32 {
    let mut half = L / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_and_tree_as_written() {
        // Lane 0: 1 + 2^-24 rounds away; lane 1 holds 2^-24 alone; the tree then adds it once more in vain.
        let tiny = (-12f32).exp2();
        assert_eq!(sum_squares::<2>(&[1.0, tiny, tiny]), 1.0);
        assert_eq!(sum_squares::<4>(&[1.0, 2.0, 3.0, 4.0, 5.0]), 55.0);
        // (1 + 0) + (2^-24 + 2^-24) keeps both small ones.
        assert_eq!(sum_squares::<4>(&[1.0, tiny, 0.0, tiny]), 1.0 + (-23f32).exp2());
        assert_eq!(sum::<2>(&[1.0, tiny * tiny, tiny * tiny]), 1.0);
        assert_eq!(sum::<4>(&[1.0, 2.0, 3.0, 4.0, 5.0]), 15.0);
        assert_eq!(sum_squares::<256>(&[]), 0.0);
        assert!(sum_squares::<16>(&[0.0, f32::NAN]).is_nan());
    }
}
