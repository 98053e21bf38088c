//! Stop strings over streamed text.
//!
//! The match is the one that starts first in the whole text, and of those the shortest; cutting the text
//! into pieces cannot change it. Only a tail that may still become a stop string is held back.

use crate::error::RequestError;

/// Most stop strings of one request.
pub const STOPS_MAX: usize = 64;
/// Longest stop string, bytes.
pub const STOP_BYTES_MAX: usize = 1024;

/// What a piece of text brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStep {
    /// Text that is now certain to come before any stop string.
    pub text: String,
    /// Index of the stop string that was found; all later text is dropped.
    pub matched: Option<usize>,
}

/// Matcher of one reply.
#[derive(Clone, Debug)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    matched: Option<usize>,
}

impl StopStrings {
    /// Checks the limits: at most [`STOPS_MAX`] strings of 1 to [`STOP_BYTES_MAX`] bytes.
    pub fn new(stops: Vec<String>) -> Result<Self, RequestError> {
        if stops.len() > STOPS_MAX {
            let detail = format!("{} stop strings, at most {STOPS_MAX} are allowed", stops.len());
            return Err(RequestError::invalid("stop", detail));
        }
        for (index, stop) in stops.iter().enumerate() {
            if stop.is_empty() || stop.len() > STOP_BYTES_MAX {
                let detail = format!("{} bytes, must be 1 to {STOP_BYTES_MAX}", stop.len());
                return Err(RequestError::invalid(format!("stop[{index}]"), detail));
            }
        }
        Ok(Self { stops, held: String::new(), matched: None })
    }

    /// Index of the stop string found so far.
    pub fn matched(&self) -> Option<usize> {
        self.matched
    }

    /// The stop string with this index.
    pub fn stop(&self, index: usize) -> &str {
        &self.stops[index]
    }

    /// Takes a piece of text.
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.matched.is_some() {
            return StopStep { text: String::new(), matched: self.matched };
        }
        self.held.push_str(text);
        self.scan(false)
    }

    /// Gives out what was held back, at the end of the text or where text of another kind begins.
    pub fn flush(&mut self) -> StopStep {
        if self.matched.is_some() {
            return StopStep { text: String::new(), matched: self.matched };
        }
        self.scan(true)
    }

    /// Finds the first position where a stop is, or (unless `ended`) may yet be.
    fn scan(&mut self, ended: bool) -> StopStep {
        let held = std::mem::take(&mut self.held);
        for (at, _) in held.char_indices() {
            let rest = &held[at..];
            let found = (0..self.stops.len())
                .filter(|&index| rest.starts_with(&self.stops[index]))
                .min_by_key(|&index| self.stops[index].len());
            if let Some(index) = found {
                self.matched = Some(index);
                return StopStep { text: held[..at].to_owned(), matched: Some(index) };
            }
            let pending = !ended && self.stops.iter().any(|stop| stop.starts_with(rest));
            if pending {
                self.held = rest.to_owned();
                return StopStep { text: held[..at].to_owned(), matched: None };
            }
        }
        StopStep { text: held, matched: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition: earliest start, then shortest.
    fn whole(text: &str, stops: &[String]) -> (String, Option<usize>) {
        let hit = (0..stops.len())
            .filter_map(|index| text.find(&stops[index]).map(|at| (at, stops[index].len(), index)))
            .min();
        match hit {
            Some((at, _, index)) => (text[..at].to_owned(), Some(index)),
            None => (text.to_owned(), None),
        }
    }

    fn streamed(pieces: &[&str], stops: &[String]) -> (String, Option<usize>) {
        let mut matcher = StopStrings::new(stops.to_vec()).unwrap();
        let mut text: String = pieces.iter().map(|piece| matcher.push(piece).text).collect();
        text.push_str(&matcher.flush().text);
        (text, matcher.matched())
    }

    #[test]
    fn every_split_of_the_fox() {
        let text = "the quick brown fox jumps";
        for at in 0..text.len() {
            for end in at..text.len() {
                let got = streamed(&[&text[..at], &text[at..end], &text[end..]], &["own fox".into()]);
                assert_eq!(got, ("the quick br".into(), Some(0)));
            }
        }
    }

    #[test]
    fn holds_back_only_what_may_become_a_stop() {
        let mut matcher = StopStrings::new(vec!["own fox".into()]).unwrap();
        assert_eq!(matcher.push("the br").text, "the br");
        assert_eq!(matcher.push("own f").text, "");
        assert_eq!(matcher.push("ish o").text, "own fish ");
        assert_eq!(matcher.flush(), StopStep { text: "o".into(), matched: None });
    }

    #[test]
    fn a_longer_stop_that_starts_first_wins() {
        let stops = ["abc".to_owned(), "b".to_owned()];
        assert_eq!(streamed(&["a", "b", "c"], &stops), (String::new(), Some(0)));
        assert_eq!(streamed(&["a", "b", "d"], &stops), ("a".into(), Some(1)));
        assert_eq!(streamed(&["a", "b"], &stops), ("a".into(), Some(1)));
    }

    #[test]
    fn limits_are_checked() {
        assert!(StopStrings::new(vec![String::new()]).is_err());
        assert!(StopStrings::new(vec!["x".repeat(STOP_BYTES_MAX + 1)]).is_err());
        let error = StopStrings::new(vec!["x".into(); STOPS_MAX + 1]).unwrap_err();
        assert_eq!(error.path, "stop");
    }

    proptest! {
        #[test]
        fn any_split_equals_the_whole(
            text in "[abé]{0,24}",
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            cuts in prop::collection::vec(0_usize..24, 0..6),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.retain(|&cut| text.is_char_boundary(cut));
            cuts.sort_unstable();
            let mut pieces = Vec::new();
            let mut start = 0;
            for cut in cuts {
                pieces.push(&text[start..cut]);
                start = cut;
            }
            pieces.push(&text[start..]);
            prop_assert_eq!(streamed(&pieces, &stops), whole(&text, &stops));
        }
    }
}
