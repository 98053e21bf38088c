//! What steps and drafts cost, as measured.
//!
//! Nothing here can change a token: measured times only choose how many rows run together. Times come from
//! the engine's clock, so runs on a manual clock repeat exactly.

use std::time::Duration;

use model::DRAFT_MAX;

/// Weight of a new measurement of plain steps.
const FRESH: f64 = 0.2;
/// Weight of a new measurement of what happens seldom: drafted rounds and drafts.
const FRESH_SELDOM: f64 = 0.3;
/// Measurements that one at start stands for: it is a median of so many.
const CALIBRATED: u64 = 3;
/// One hiccup of the system is not a new cost: a measurement counts as at most so many times the known one.
const HICCUP: f64 = 2.0;
/// Nor is it booked against drafts in full.
const BOOKED_MAX: f64 = 4.0;
/// Share of a plain step that nobody minds: a MTP layer that takes less knows every sequence.
const UPKEEP_SMALL: f64 = 0.01;
/// Prompt rows beside running streams before anything is measured.
const CHUNK_FIRST: usize = 64;
/// Fewer prompt rows say too little of the cost of one.
const CHUNK_LEARNT: usize = 32;
/// Prompt rows that always go along, so that no prompt waits for ever.
const CHUNK_MIN: usize = 16;
/// Weight of a new round in what drafts have won, rounds before that counts, and the share of plain time that
/// is worth a prompt's upkeep.
const WON_FRESH: f64 = 0.1;
const WON_ROUNDS: u64 = 8;
const WON_LEAST: f64 = 0.1;
/// Plain rounds before drafts that do not seem to pay are tried again; doubles each time they do not.
const PROBE_FIRST: u64 = 32;
const PROBE_LAST: u64 = 1024;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Measured {
    pub(crate) seconds: f64,
    pub(crate) count: u64,
}

impl Measured {
    fn add(&mut self, seconds: f64, weight: f64) {
        if self.count == 0 {
            self.seconds = seconds;
        } else {
            let sample = seconds.min(self.seconds * HICCUP);
            self.seconds += weight * (sample - self.seconds);
        }
        self.count += 1;
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Won {
    share: f64,
    rounds: u64,
}

/// Measured costs.
#[derive(Clone, Debug)]
pub(crate) struct Costs {
    /// Steps of one row for each stream, with their draws, by streams.
    pub(crate) plain: Vec<Measured>,
    /// Steps that verify drafts, with drawing, keeping and what they do to the step after them, by rows.
    drafted: Vec<Measured>,
    /// A token that the model drafts.
    pub(crate) draft_token: Measured,
    /// What it takes the MTP layer to know one more token, seconds.
    pub(crate) upkeep: f64,
    prompt_row: f64,
    /// Most prompt rows of a step so far.
    prompt_rows_seen: usize,
    /// A drafted round of so many streams, rows and seconds, until the round after it is measured.
    open: Option<(usize, usize, f64)>,
    /// Rounds without drafts since the last with some, and how many there must be before the next trial.
    pub(crate) rounds_without: u64,
    pub(crate) probe_after: u64,
    /// Share of plain time that chosen drafts of the model have won of late, and in how many rounds.
    won: Won,
}

/// What a round did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RoundCost {
    /// Streams that decoded.
    pub(crate) streams: usize,
    /// Their rows.
    pub(crate) rows: usize,
    /// Prompt rows beside them.
    pub(crate) prompt_rows: usize,
    /// Tokens of the longest chain asked of the model.
    pub(crate) draft_tokens: usize,
    /// Time of the draft call.
    pub(crate) draft: Duration,
    /// Seconds of it that went, by what is known, into rows that the MTP layer had not seen.
    pub(crate) catch_up: f64,
    /// Time of step, draw and keeping.
    pub(crate) step: Duration,
    /// Tokens given out.
    pub(crate) tokens: usize,
    /// Whether drafts, asked for or made, were the engine's own choice.
    pub(crate) chosen: bool,
}

/// What a round took for its decode rows, and what plain ones of the same streams take.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Bill {
    /// Seconds.
    pub(crate) spent: f64,
    /// Seconds.
    pub(crate) plain: f64,
    /// Whether the difference comes from drafts that the engine chose.
    pub(crate) chosen: bool,
}

impl Costs {
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            plain: vec![Measured::default(); slots + 1],
            drafted: vec![Measured::default(); slots * (DRAFT_MAX + 1) + 1],
            draft_token: Measured::default(),
            upkeep: 0.0,
            prompt_row: 0.0,
            prompt_rows_seen: 0,
            open: None,
            rounds_without: 0,
            probe_after: PROBE_FIRST,
            won: Won::default(),
        }
    }

    /// Sets what a step of `rows` rows of one stream takes, as measured at start.
    pub(crate) fn set_step(&mut self, rows: usize, seconds: f64) {
        let known = if rows == 1 { &mut self.plain } else { &mut self.drafted };
        if let Some(known) = known.get_mut(rows) {
            *known = Measured { seconds, count: CALIBRATED };
        }
    }

    /// Sets what a drafted token takes, and the MTP layer's knowledge of one, as measured at start.
    pub(crate) fn set_drafts(&mut self, token: f64, upkeep: f64) {
        self.draft_token = Measured { seconds: token, count: CALIBRATED };
        self.upkeep = upkeep;
    }

    /// Learns from a round.
    pub(crate) fn record(&mut self, round: &RoundCost) -> Bill {
        let seconds = round.step.as_secs_f64();
        if round.draft_tokens > 0 {
            let drafting = (round.draft.as_secs_f64() - round.catch_up).max(0.0);
            self.draft_token.add(drafting / round.draft_tokens as f64, FRESH_SELDOM);
        }
        let plain = round.rows == round.streams;
        let before = self.open.take();
        let after_drafts = before.filter(|(streams, ..)| plain && *streams == round.streams);
        if let Some((streams, rows, seconds_before)) = before {
            // Caches that the window has emptied make the next step dearer.
            let known = self.plain[streams].seconds;
            let more = after_drafts.map_or(0.0, |_| (seconds - known).clamp(-known, known));
            self.learn_drafted(rows, seconds_before + if round.prompt_rows > 0 { 0.0 } else { more });
        }
        let mut spent = seconds;
        if round.prompt_rows > 0 {
            // What its decode rows alone would have taken.
            spent = self.expected(round.streams, round.rows);
            self.learn_prompt(round, seconds - spent);
        } else if !plain {
            self.open = Some((round.streams, round.rows, seconds));
        } else if after_drafts.is_none() && round.streams > 0 {
            self.plain[round.streams].add(seconds, FRESH);
        }
        let chosen = round.chosen || after_drafts.is_some();
        let bill = self.bill(round, spent, chosen);
        self.count(round, bill);
        bill
    }

    fn bill(&self, round: &RoundCost, spent: f64, chosen: bool) -> Bill {
        let most = BOOKED_MAX * self.expected(round.streams, round.rows);
        let plain = self.plain.get(round.streams).map_or(0.0, |plain| plain.seconds);
        Bill { spent: spent.min(most) + round.draft.as_secs_f64(), plain, chosen }
    }

    /// Counts rounds for the trials.
    fn count(&mut self, round: &RoundCost, bill: Bill) {
        if round.chosen && round.streams > 0 {
            let plain = bill.plain * round.tokens as f64 / round.streams as f64;
            self.rounds_without = 0;
            if round.draft_tokens > 0 && plain > 0.0 {
                self.won.rounds += 1;
                self.won.share += WON_FRESH * (1.0 - bill.spent / plain - self.won.share);
            }
            self.probe_after = match bill.spent <= plain {
                true => PROBE_FIRST,
                false => (self.probe_after * 2).min(PROBE_LAST),
            };
        } else if round.rows == round.streams && round.streams > 0 && round.prompt_rows == 0 {
            self.rounds_without += 1;
        }
    }

    /// Learns what a drafted step of `rows` rows takes. What is learnt of one number of rows is half believed
    /// of the others: the machine has changed, or it was misjudged at start.
    fn learn_drafted(&mut self, rows: usize, seconds: f64) {
        let known = self.drafted_rows(rows);
        if known > 0.0 {
            let change = (seconds.min(known * HICCUP) / known - 1.0) * FRESH_SELDOM / 2.0;
            for (_, other) in self.drafted.iter_mut().enumerate().filter(|(at, _)| *at != rows) {
                other.seconds *= 1.0 + change;
            }
        }
        if let Some(measured) = self.drafted.get_mut(rows) {
            measured.add(seconds, FRESH_SELDOM);
        }
    }

    fn learn_prompt(&mut self, round: &RoundCost, seconds: f64) {
        if round.prompt_rows < CHUNK_LEARNT {
            return;
        }
        self.prompt_rows_seen = self.prompt_rows_seen.max(round.prompt_rows);
        let sample = seconds.max(0.0) / round.prompt_rows as f64;
        // Rises at once, so that a stall happens once; falls slowly.
        let falling = self.prompt_row + FRESH * (sample - self.prompt_row);
        self.prompt_row = sample.max(falling);
    }

    /// Expected seconds of a step of `rows` rows for `streams` streams.
    pub(crate) fn expected(&self, streams: usize, rows: usize) -> f64 {
        let plain = between(&self.plain, streams.max(1));
        if rows <= streams { plain } else { plain.max(self.drafted_rows(rows)) }
    }

    fn drafted_rows(&self, rows: usize) -> f64 {
        between(&self.drafted, rows)
    }

    /// What the MTP layer's knowledge of `tokens` more tokens takes, where that matters.
    pub(crate) fn upkeep(&self, tokens: f64) -> f64 {
        if self.upkeep_is_small() { 0.0 } else { self.upkeep * tokens }
    }

    /// Whether the MTP layer may well know every sequence.
    pub(crate) fn upkeep_is_small(&self) -> bool {
        self.upkeep <= UPKEEP_SMALL * self.expected(1, 1)
    }

    /// Whether drafts of the model have lately won more than its knowledge of the tokens can cost.
    pub(crate) fn model_drafts_win(&self) -> bool {
        self.won.rounds >= WON_ROUNDS && self.won.share > WON_LEAST
    }

    /// Seconds of that many prompt rows in a step.
    pub(crate) fn prompt(&self, rows: usize) -> f64 {
        self.prompt_row * rows as f64
    }

    /// Prompt rows that fit beside `rows` rows of `streams` streams in a step of at most `stall`; at most
    /// twice what was ever tried.
    pub(crate) fn prompt_rows(&self, streams: usize, rows: usize, stall: Duration) -> usize {
        if self.prompt_row <= 0.0 {
            return CHUNK_FIRST;
        }
        let left = (stall.as_secs_f64() - self.expected(streams, rows)).max(0.0);
        ((left / self.prompt_row) as usize).min(self.prompt_rows_seen * 2).max(CHUNK_MIN)
    }
}

/// The cost at `at`: measured, or on the line through its neighbours, or 0 where nothing is known.
fn between(costs: &[Measured], at: usize) -> f64 {
    let known = |at: &usize| costs[*at].count > 0;
    let last = costs.len() - 1;
    let mut below = (0..=at.min(last)).rev().filter(known);
    let low = below.next();
    let high = (at.min(last)..=last).find(known);
    let (from, to) = match (low, high) {
        (Some(low), Some(high)) if low < high => (low, high),
        (Some(known), _) if known == at => return costs[known].seconds,
        // Beyond what is known the last slope goes on.
        (Some(low), _) => match below.next() {
            Some(before) => (before, low),
            None => return costs[low].seconds,
        },
        (None, Some(high)) => return costs[high].seconds,
        (None, None) => return 0.0,
    };
    let slope = (costs[to].seconds - costs[from].seconds) / (to - from) as f64;
    costs[from].seconds + slope.max(0.0) * (at - from) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn round(streams: usize, rows: usize, step: Duration) -> RoundCost {
        RoundCost { streams, rows, step, tokens: 1, ..RoundCost::default() }
    }

    fn near(found: f64, expected: Duration) -> bool {
        (found - expected.as_secs_f64()).abs() < 1e-9
    }

    #[test]
    fn costs_lie_on_lines_through_what_is_known() {
        let mut costs = Costs::new(2);
        assert_eq!(costs.expected(1, 3), 0.0);
        costs.set_step(1, 0.010);
        costs.set_step(3, 0.012);
        costs.set_step(9, 0.018);
        for (streams, rows, ms) in [(1, 1, 10), (1, 3, 12), (1, 5, 14), (1, 9, 18), (2, 13, 22), (2, 2, 10)] {
            assert!(near(costs.expected(streams, rows), MS * ms), "{streams} streams, {rows} rows");
        }
    }

    #[test]
    fn drafts_pay_for_the_step_after_them() {
        let mut costs = Costs::new(1);
        costs.set_step(1, 0.010);
        costs.set_step(3, 0.012);
        let bill = costs.record(&RoundCost { chosen: true, ..round(1, 3, MS * 12) });
        assert!(near(bill.spent, MS * 12) && near(bill.plain, MS * 10) && bill.chosen);
        let bill = costs.record(&round(1, 1, MS * 13));
        assert!(near(bill.spent, MS * 13) && near(bill.plain, MS * 10) && bill.chosen, "{bill:?}");
        assert!(costs.expected(1, 3) > 0.0125, "3 ms more, a third believed: {}", costs.expected(1, 3));
        assert!(near(costs.expected(1, 1), MS * 10), "it is no plain step");
        assert!(!costs.record(&round(1, 1, MS * 10)).chosen);
    }

    #[test]
    fn one_dear_window_makes_the_others_suspect() {
        let mut costs = Costs::new(1);
        [1, 2, 9].into_iter().for_each(|rows| costs.set_step(rows, 0.010));
        costs.record(&round(1, 2, MS * 20));
        costs.record(&round(1, 1, MS * 10));
        assert!(costs.expected(1, 2) > 0.0129 && costs.expected(1, 9) > 0.0114, "{costs:?}");
    }

    #[test]
    fn a_hiccup_is_not_booked_in_full() {
        let mut costs = Costs::new(1);
        [1, 2].into_iter().for_each(|rows| costs.set_step(rows, 0.010));
        let bill = costs.record(&RoundCost { chosen: true, ..round(1, 2, MS * 500) });
        assert!(near(bill.spent, MS * 40), "{bill:?}");
    }

    #[test]
    fn prompt_rows_keep_the_stall() {
        let mut costs = Costs::new(2);
        costs.set_step(1, 0.010);
        assert_eq!(costs.prompt_rows(1, 1, MS * 200), CHUNK_FIRST);
        costs.record(&RoundCost { prompt_rows: 100, ..round(1, 1, MS * 110) });
        assert!((199..=200).contains(&costs.prompt_rows(1, 1, MS * 210)));
        assert_eq!(costs.prompt_rows(1, 1, MS), CHUNK_MIN);
    }
}
