//! How far logits are from others: distances of a row, and what a list of them looks like.

use std::fmt;

use model::ModelError;

use crate::Runner;

/// Relative L2 distance of a row from the expected one. NaN if either holds one.
pub fn relative_l2(found: &[f32], expected: &[f32]) -> f64 {
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&found, &expected) in found.iter().zip(expected) {
        let (found, expected) = (f64::from(found), f64::from(expected));
        difference += (found - expected) * (found - expected);
        norm += expected * expected;
    }
    (difference / f64::max(norm, f64::MIN_POSITIVE)).sqrt()
}

/// Kullback-Leibler divergence of the distribution of `found` logits from that of `expected` ones, in nats.
pub fn divergence(found: &[f32], expected: &[f32]) -> f64 {
    let log_sum = |row: &[f32]| {
        let top = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        top + row.iter().map(|x| (f64::from(*x) - top).exp()).sum::<f64>().ln()
    };
    let (found_sum, expected_sum) = (log_sum(found), log_sum(expected));
    let term = |(&found, &expected): (&f32, &f32)| {
        let expected = f64::from(expected) - expected_sum;
        expected.exp() * (expected - (f64::from(found) - found_sum))
    };
    found.iter().zip(expected).map(term).sum()
}

/// Median, mean and maximum of some numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// How many.
    pub count: usize,
    /// The middle one.
    pub median: f64,
    /// Their mean.
    pub mean: f64,
    /// The largest, or NaN if any is.
    pub max: f64,
}

impl Spread {
    /// Of a list; all NaN if it is empty.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let count = values.len();
        let nan = values.iter().any(|value| value.is_nan());
        let at = |index: Option<usize>| index.filter(|_| !nan).map_or(f64::NAN, |index| values[index]);
        Self {
            count,
            median: at((count > 0).then_some(count / 2)),
            mean: values.iter().sum::<f64>() / count as f64,
            max: at(count.checked_sub(1)),
        }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "median {:.2e}, mean {:.2e}, largest {:.2e}", self.median, self.mean, self.max)
    }
}

/// Logits of every row of a text, `[rows, vocabulary]`.
pub fn logits(runner: &mut Runner<'_>, text: &[u32]) -> Result<Vec<f32>, ModelError> {
    let spec = runner.spec();
    let mut lane = runner.lanes()?.swap_remove(0);
    let mut all = vec![0.0; text.len() * spec.vocabulary];
    let chunk = spec.rows_max.min(spec.logits_rows_max);
    for (part, out) in text.chunks(chunk).zip(all.chunks_mut(chunk * spec.vocabulary)) {
        runner.feed(&mut lane, part, chunk)?;
        for (row, out) in out.chunks_exact_mut(spec.vocabulary).enumerate() {
            runner.model.read_logits(row, out)?;
        }
    }
    Ok(all)
}

/// Distance of each row, and divergence of each row.
pub fn compare(found: &[f32], expected: &[f32], vocabulary: usize) -> (Vec<f64>, Vec<f64>) {
    let rows = || found.chunks_exact(vocabulary).zip(expected.chunks_exact(vocabulary));
    (rows().map(|(a, b)| relative_l2(a, b)).collect(), rows().map(|(a, b)| divergence(a, b)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_of_known_rows() {
        assert_eq!(relative_l2(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert_eq!(relative_l2(&[0.0, 0.0], &[3.0, 4.0]), 1.0);
        assert!(relative_l2(&[f32::NAN, 0.0], &[3.0, 4.0]).is_nan());
        // Two to one against one to one: 0.5 ln(0.5 / (2/3)) + 0.5 ln(0.5 / (1/3)).
        let expected = 0.5 * (0.75f64.ln() + 1.5f64.ln());
        assert!((divergence(&[2f32.ln(), 0.0], &[5.0, 5.0]) - expected).abs() < 1e-7);
    }

    #[test]
    fn spreads_do_not_hide_nan() {
        let spread = Spread::of(vec![3.0, 1.0, 2.0, 10.0]);
        assert_eq!((spread.count, spread.median, spread.mean, spread.max), (4, 3.0, 4.0, 10.0));
        assert!(Spread::of(vec![1.0, f64::NAN]).max.is_nan());
        assert!(Spread::of(vec![]).median.is_nan());
    }
}
