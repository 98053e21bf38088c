//! Numbers of a server's `/metrics`.

use std::collections::HashMap;

/// The samples of one scrape: name and labels as written, and the value.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Numbers(HashMap<String, f64>);

impl Numbers {
    /// Reads Prometheus or OpenMetrics text. Lines that are no sample are skipped.
    pub(crate) fn read(text: &str) -> Self {
        let sample = |line: &str| {
            // Labels may hold spaces; the value never does.
            let end = line.rfind('}').map_or_else(|| line.find(' '), |brace| Some(brace + 1))?;
            let (name, value) = line.split_at(end);
            let value = value.split_whitespace().next()?.parse().ok()?;
            Some((name.to_owned(), value))
        };
        Self(text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect())
    }

    /// Sum over all labels; `None` where there is no such sample.
    pub(crate) fn sum(&self, name: &str) -> Option<f64> {
        let mut found = self.0.iter().filter(|(key, _)| key.split('{').next() == Some(name)).peekable();
        found.peek()?;
        Some(found.map(|(_, value)| value).sum())
    }

    /// Sum over all samples but those with one of these values of a label; `None` where there is no such
    /// sample.
    pub(crate) fn sum_but(&self, name: &str, label: &str, left_out: &[&str]) -> Option<f64> {
        let out: f64 = left_out
            .iter()
            .map(|value| format!("{label}=\"{value}\""))
            .flat_map(|label| self.0.iter().filter(move |(key, _)| key.contains(&label)))
            .filter(|(key, _)| key.split('{').next() == Some(name))
            .map(|(_, value)| value)
            .sum();
        Some(self.sum(name)? - out)
    }

    /// Value of a sample with this label.
    pub(crate) fn labelled(&self, name: &str, label: &str, wanted: &str) -> Option<f64> {
        let label = format!("{label}=\"{wanted}\"");
        let fits = |key: &str| key.split('{').next() == Some(name) && key.contains(&label);
        self.0.iter().find(|(key, _)| fits(key)).map(|(_, value)| *value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_with_and_without_labels() {
        let text = "# HELP a b\na_total 3\nb{x=\"p q\",y=\"1\"} 2.5\nb{x=\"r\"} 1\nc NaN 17\nbroken\n# EOF\n";
        let numbers = Numbers::read(text);
        assert_eq!(numbers.sum("a_total"), Some(3.0));
        assert_eq!(numbers.sum("b"), Some(3.5));
        assert_eq!(numbers.labelled("b", "x", "r"), Some(1.0));
        assert_eq!((numbers.sum_but("b", "x", &["r"]), numbers.sum_but("d", "x", &[])), (Some(2.5), None));
        assert_eq!((numbers.sum("d"), numbers.labelled("b", "x", "z")), (None, None));
        assert!(numbers.sum("c").is_some_and(f64::is_nan));
    }
}
