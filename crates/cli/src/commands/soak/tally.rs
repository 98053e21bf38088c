//! What a soak has counted.

use std::time::Duration;

use serde_json::{Value, json};

use super::load::image_tokens;
use crate::table::{self, Table, grouped};

/// Memory may settle for this long, or for half of a shorter soak, before its slope counts.
const SETTLING: Duration = Duration::from_secs(300);
/// A slope over less time says nothing.
const SLOPE_TIME: Duration = Duration::from_secs(300);
/// Most growth of the server's memory, bytes a minute.
const SLOPE_MAX: f64 = 1e6;
/// Most times kept for the percentiles.
const TIMES_MAX: usize = 1 << 20;

/// Counts of all streams.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    pub(super) elapsed: Duration,
    pub(super) requests: u64,
    pub(super) finished: u64,
    pub(super) left: u64,
    pub(super) refused: u64,
    pub(super) compared: u64,
    pub(super) canaries: u64,
    pub(super) failures: u64,
    pub(super) first_failure: Option<String>,
    /// Pictures of finished requests, and the prompt tokens that stand for them.
    pub(super) pictures: u64,
    pub(super) image_tokens: u64,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) generated: u64,
    /// Seconds to the first line of streams.
    pub(super) first: Vec<f32>,
    /// Seconds to the end of replies.
    pub(super) whole: Vec<f32>,
    /// Bytes of the server's process since the load began, without the picture features it keeps.
    pub(super) memory: Vec<(Duration, u64)>,
    /// Choices in slots and in the queue after the last request; `None` before that.
    pub(super) busy: Option<u64>,
}

impl Tally {
    /// Something that must not be.
    pub(super) fn fail(&mut self, what: String) {
        self.failures += 1;
        self.first_failure.get_or_insert(what);
    }

    /// Tokens of a reply that came to its end.
    pub(super) fn usage(&mut self, usage: &Value) {
        let count = |value: &Value| value.as_u64().unwrap_or(0);
        self.prompt_tokens += count(&usage["prompt_tokens"]);
        self.cached_tokens += count(&usage["prompt_tokens_details"]["cached_tokens"]);
        self.image_tokens += image_tokens(usage);
        self.generated += count(&usage["completion_tokens"]);
    }

    /// Keeps a time for the percentiles.
    pub(super) fn time(times: &mut Vec<f32>, time: Duration) {
        if times.len() < TIMES_MAX {
            times.push(time.as_secs_f32());
        }
    }

    /// Growth of the memory after it has settled, bytes a minute (least squares); `None` where too little is
    /// known.
    fn slope(&self) -> Option<f64> {
        let from = SETTLING.min(self.elapsed / 2);
        contracts::soak::slope(&self.memory, from)
    }

    /// Judges the whole: what is not as it must be becomes a failure.
    pub(super) fn judge(&mut self) {
        if let Some(busy) = self.busy.filter(|busy| *busy > 0) {
            self.fail(format!("{busy} choices are still in slots or in the queue after the last request"));
        }
        if self.canaries == 0 && self.elapsed > Duration::from_secs(30) {
            self.fail("no canary was answered".to_owned());
        }
        let is_judged = self.elapsed >= 2 * SLOPE_TIME;
        if let Some(slope) = self.slope().filter(|slope| is_judged && *slope > SLOPE_MAX) {
            self.fail(format!("the server's memory grows by {:.2} MB a minute", slope / 1e6));
        }
    }

    /// One line on the way.
    pub(super) fn line(&self) -> String {
        let memory = self.memory.last().map_or("-".to_owned(), |(_, bytes)| table::bytes(*bytes));
        format!(
            "{:6.1} min  requests {}  finished {}  pictures {}  left {}  compared {}  failures {}  \
             tokens {}  memory {memory}",
            self.elapsed.as_secs_f64() / 60.0,
            self.requests,
            self.finished,
            self.pictures,
            self.left,
            self.compared,
            self.failures,
            self.generated,
        )
    }

    /// The table at the end.
    pub(super) fn table(&self) -> String {
        let mut table = Table::new("<<");
        let seconds = self.elapsed.as_secs_f64().max(1e-3);
        let minutes = format!("{:.1}", seconds / 60.0);
        table.row(["minutes", &minutes]);
        let requests = format!(
            "{}: {} finished, {} left, {} refused as they must be",
            grouped(self.requests),
            grouped(self.finished),
            grouped(self.left),
            self.refused
        );
        table.row(["requests", &requests]);
        let compared =
            format!("{} replies equal to the same ones alone, {} canaries", self.compared, self.canaries);
        table.row(["compared", &compared]);
        let prompt = format!(
            "{}, {} from the cache, {} of {} pictures",
            grouped(self.prompt_tokens),
            grouped(self.cached_tokens),
            grouped(self.image_tokens),
            grouped(self.pictures)
        );
        table.row(["prompt tokens", &prompt]);
        let generated =
            format!("{}, {:.1} a second", grouped(self.generated), self.generated as f64 / seconds);
        table.row(["tokens generated", &generated]);
        table.row(["first line of streams", &percentiles(&self.first)]);
        table.row(["whole replies", &percentiles(&self.whole)]);
        let at = |sample: Option<&(Duration, u64)>| {
            sample.map_or("-".to_owned(), |(_, bytes)| table::bytes(*bytes))
        };
        let slope = self.slope().map_or("-".to_owned(), |slope| format!("{:.2} MB a minute", slope / 1e6));
        let memory = format!(
            "{} at first, {} at last, slope {slope}",
            at(self.memory.first()),
            at(self.memory.last())
        );
        table.row(["server's memory", &memory]);
        table.row(["busy at the end", &self.busy.map_or("-".to_owned(), |busy| busy.to_string())]);
        table.row(["failures", &self.failures.to_string()]);
        if let Some(failure) = &self.first_failure {
            table.row(["first failure", failure]);
        }
        table.text()
    }

    /// The same for programs.
    pub(super) fn document(&self) -> Value {
        json!({
            "seconds": self.elapsed.as_secs_f64(),
            "requests": self.requests,
            "finished": self.finished,
            "left": self.left,
            "refused": self.refused,
            "compared": self.compared,
            "canaries": self.canaries,
            "pictures": self.pictures,
            "image_tokens": self.image_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated,
            "first_line_s": quantiles(&self.first),
            "whole_reply_s": quantiles(&self.whole),
            "memory_bytes": self.memory.last().map(|(_, bytes)| bytes),
            "memory_slope_bytes_per_minute": self.slope(),
            "busy_at_end": self.busy,
            "failures": self.failures,
            "first_failure": self.first_failure,
        })
    }
}

/// Median, 95 % and 99 %; `None` without times.
fn quantiles(times: &[f32]) -> Option<[f32; 3]> {
    let mut sorted = times.to_vec();
    sorted.sort_by(f32::total_cmp);
    let at = |percent: usize| sorted[(sorted.len() * percent / 100).min(sorted.len() - 1)];
    (!sorted.is_empty()).then(|| [at(50), at(95), at(99)])
}

fn percentiles(times: &[f32]) -> String {
    quantiles(times).map_or("-".to_owned(), |[half, most, last]| {
        let ms = |seconds: f32| f64::from(seconds) * 1e3;
        format!("median {:.0} ms, 95 % {:.0} ms, 99 % {:.0} ms", ms(half), ms(most), ms(last))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(growth: u64, minutes: u64) -> Tally {
        let at = |minute: u64| (Duration::from_secs(60 * minute), 100_000_000 + minute * growth);
        let memory = (0..=minutes).map(at).collect();
        Tally {
            elapsed: Duration::from_secs(60 * minutes),
            memory,
            canaries: 1,
            busy: Some(0),
            ..Tally::default()
        }
    }

    #[test]
    fn what_is_not_as_it_must_be_fails() {
        let check = |mut tally: Tally, failures: u64| {
            tally.judge();
            assert_eq!(tally.failures, failures, "{:?}", tally.first_failure);
        };
        check(tally(900_000, 30), 0);
        check(tally(1_100_000, 30), 1);
        // Too short to tell a leak from settling.
        check(tally(5_000_000, 2), 0);
        check(Tally { busy: Some(1), ..tally(0, 30) }, 1);
        check(Tally { canaries: 0, ..tally(0, 30) }, 1);
        let slope = tally(900_000, 30).slope().unwrap();
        assert!((slope - 900_000.0).abs() < 1.0, "{slope}");
        assert!(tally(0, 30).table().contains("slope 0.00 MB"));
    }
}
