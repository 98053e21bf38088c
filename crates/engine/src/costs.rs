//! What steps and drafts cost, as measured, and how deep drafting pays.
//!
//! Nothing here can change a token: measured times only choose how many rows run together. Times come from
//! the engine's clock, so runs on a manual clock repeat exactly.

use std::time::Duration;

use crate::request::DRAFT_MAX;

/// Weight of a new measurement.
const FRESH: f64 = 0.2;
/// Weight of a new round in acceptance odds.
const ODDS_FRESH: f64 = 0.1;
/// Odds of a drafter nobody has seen yet.
const ODDS_FIRST: f64 = 0.7;
/// Gain below which drafting is not worth its noise.
const GAIN_MIN: f64 = 1.03;
/// Share of plain decode time that drafting may have lost so far. With the one round that oversteps it, and with
/// the K/V that the MTP layer needs of every token, the loss stays below 3 % of any run of 100 tokens.
const LOSS_MAX: f64 = 0.015;
/// Plain rounds before drafts that do not seem to pay are tried again; doubles each time they do not.
const PROBE_FIRST: u64 = 32;
const PROBE_LAST: u64 = 1024;
/// Drafted tokens of such a trial.
const PROBE_DEPTH: usize = 2;
/// Plain rounds that are measured before the first drafts.
const PLAIN_ROUNDS: u64 = 2;
/// Prompt rows beside running streams before anything is measured.
const CHUNK_FIRST: usize = 64;
/// Fewer prompt rows say too little of the cost of one.
const CHUNK_LEARNT: usize = 32;
/// Prompt rows that always go along, so that no prompt waits for ever.
const CHUNK_MIN: usize = 16;

/// Chance that each drafted token of a chain is accepted if those before it were.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Odds([f64; DRAFT_MAX]);

impl Default for Odds {
    fn default() -> Self {
        Self([ODDS_FIRST; DRAFT_MAX])
    }
}

impl Odds {
    /// Learns from a chain of which `accepted` leading tokens of `proposed` were right.
    pub(crate) fn observe(&mut self, proposed: usize, accepted: usize) {
        for place in 0..proposed.min(accepted + 1).min(DRAFT_MAX) {
            let hit = f64::from(u8::from(place < accepted));
            self.0[place] += ODDS_FRESH * (hit - self.0[place]);
        }
    }

    /// Expected accepted tokens of a chain.
    pub(crate) fn expected(&self, count: usize) -> f64 {
        let mut survival = 1.0;
        let mut sum = 0.0;
        for odds in &self.0[..count.min(DRAFT_MAX)] {
            survival *= odds;
            sum += survival;
        }
        sum
    }
}

/// A stream that could draft.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    /// Most drafted tokens; 0 where it does not draft by this choice.
    pub(crate) depth_max: usize,
    /// Odds of its drafter.
    pub(crate) odds: Odds,
    /// Whether drafts cost a model call.
    pub(crate) model_call: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    seconds: f64,
    count: u64,
}

impl Measured {
    fn add(&mut self, seconds: f64) {
        if self.count == 0 {
            self.seconds = seconds;
        } else {
            // One hiccup of the system is not a new cost.
            let sample = seconds.min(self.seconds * 2.0);
            self.seconds += FRESH * (sample - self.seconds);
        }
        self.count += 1;
    }
}

/// Measured costs and the account of what drafting won or lost.
#[derive(Clone, Debug)]
pub(crate) struct Costs {
    /// Steps without prompt rows, by their rows.
    steps: Vec<Measured>,
    /// Steps of one row for each stream, by streams.
    plain: Vec<Measured>,
    prompt_row: f64,
    /// Most prompt rows of a step so far.
    prompt_rows_seen: usize,
    draft_token: Measured,
    /// Time that drafted rounds took beyond their plain equal; negative is a gain.
    lost: f64,
    plain_time: f64,
    rounds_without: u64,
    probe_after: u64,
}

/// What a round did, for the account.
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
    /// Time of step, draw and keeping.
    pub(crate) step: Duration,
    /// Tokens given out.
    pub(crate) tokens: usize,
    /// Whether drafts, asked for or made, were the engine's own choice.
    pub(crate) chosen: bool,
}

impl Costs {
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            steps: vec![Measured::default(); slots * (DRAFT_MAX + 1) + 1],
            plain: vec![Measured::default(); slots + 1],
            prompt_row: 0.0,
            prompt_rows_seen: 0,
            draft_token: Measured::default(),
            lost: 0.0,
            plain_time: 0.0,
            rounds_without: 0,
            probe_after: PROBE_FIRST,
        }
    }

    /// Learns from a round.
    pub(crate) fn record(&mut self, round: &RoundCost) {
        let seconds = round.step.as_secs_f64();
        if round.draft_tokens > 0 {
            self.record_draft(round.draft_tokens, round.draft);
        }
        if round.prompt_rows > 0 {
            if round.prompt_rows < CHUNK_LEARNT {
                return;
            }
            self.prompt_rows_seen = self.prompt_rows_seen.max(round.prompt_rows);
            let sample = (seconds - self.step(round.rows)).max(0.0) / round.prompt_rows as f64;
            // Rises at once, so that a stall happens once; falls slowly.
            let falling = self.prompt_row + FRESH * (sample - self.prompt_row);
            self.prompt_row = sample.max(falling);
            if round.chosen {
                // What its decode rows alone would have taken.
                self.settle(round, self.step(round.rows) + round.draft.as_secs_f64());
            }
            return;
        }
        if let Some(measured) = self.steps.get_mut(round.rows) {
            measured.add(seconds);
        }
        if round.rows == round.streams {
            self.plain[round.streams].add(seconds);
        }
        if round.chosen {
            self.settle(round, seconds + round.draft.as_secs_f64());
        } else if round.rows == round.streams {
            self.plain_time += seconds;
            self.rounds_without += 1;
        }
    }

    /// Learns from a chain of `tokens` drafts that the model made in `took`.
    pub(crate) fn record_draft(&mut self, tokens: usize, took: Duration) {
        self.draft_token.add(took.as_secs_f64() / tokens as f64);
    }

    /// Books a round whose drafts were the engine's choice, `spent` seconds for its decode rows, against the plain
    /// rounds that would have given its tokens. A round whose drafters all declined has only their cost.
    fn settle(&mut self, round: &RoundCost, spent: f64) {
        if round.streams == 0 {
            return;
        }
        let plain = self.plain[round.streams].seconds * round.tokens as f64 / round.streams as f64;
        self.plain_time += plain;
        // A gain is no licence to waste it later.
        self.lost = (self.lost + spent - plain).max(0.0);
        self.rounds_without = 0;
        self.probe_after = match spent <= plain {
            true => PROBE_FIRST,
            false => (self.probe_after * 2).min(PROBE_LAST),
        };
    }

    /// Expected seconds of a step of `rows` decode rows: measured, or in between, or the nearest known.
    fn step(&self, rows: usize) -> f64 {
        let known = |at: &usize| self.steps[*at].count > 0;
        let last = self.steps.len() - 1;
        let low = (1..=rows.min(last)).rev().find(known);
        let high = (rows..=last).find(known);
        match (low, high) {
            (Some(low), Some(high)) if low < high => {
                let share = (rows - low) as f64 / (high - low) as f64;
                self.steps[low].seconds + share * (self.steps[high].seconds - self.steps[low].seconds)
            }
            (Some(at), _) | (None, Some(at)) => self.steps[at].seconds,
            (None, None) => 0.0,
        }
    }

    /// Prompt rows that fit beside `rows` decode rows in a step of at most `stall`; at most twice what was
    /// ever tried.
    pub(crate) fn prompt_rows(&self, rows: usize, stall: Duration) -> usize {
        if self.prompt_row <= 0.0 {
            return CHUNK_FIRST;
        }
        let left = (stall.as_secs_f64() - self.step(rows)).max(0.0);
        ((left / self.prompt_row) as usize).min(self.prompt_rows_seen * 2).max(CHUNK_MIN)
    }

    /// How many tokens each stream should draft, where `others` further streams decode one row each.
    pub(crate) fn depths(&self, streams: &[Stream], others: usize, prompt_rows: usize) -> Vec<usize> {
        let none = vec![0; streams.len()];
        let all = streams.len() + others;
        let measured = self.plain.get(all).is_some_and(|plain| plain.count >= PLAIN_ROUNDS);
        if !measured || self.lost > LOSS_MAX * self.plain_time {
            return none;
        }
        let best = self.best(streams, all, prompt_rows);
        if best.iter().any(|&depth| depth > 0) {
            return best;
        }
        let trial: Vec<usize> = streams.iter().map(|stream| stream.depth_max.min(PROBE_DEPTH)).collect();
        let due = self.rounds_without >= self.probe_after && prompt_rows == 0;
        match due && self.lost + self.price(streams, &trial, all) <= LOSS_MAX * self.plain_time {
            true => trial,
            false => none,
        }
    }

    /// What a round with these depths loses if no draft is accepted.
    fn price(&self, streams: &[Stream], depths: &[usize], all: usize) -> f64 {
        let calls = streams.iter().zip(depths).filter(|(stream, _)| stream.model_call);
        let calls = calls.map(|(_, &depth)| depth).max().unwrap_or(0);
        let rows = all + depths.iter().sum::<usize>();
        (self.step(rows) - self.step(all)).max(0.0) + calls as f64 * self.draft_token.seconds
    }

    /// The depths with the most expected tokens a second: likely tokens first, as long as the rate rises.
    fn best(&self, streams: &[Stream], all: usize, prompt_rows: usize) -> Vec<usize> {
        let prompt = prompt_rows as f64 * self.prompt_row;
        let mut depths = vec![0; streams.len()];
        let mut survival: Vec<f64> = streams.iter().map(|stream| stream.odds.0[0]).collect();
        let (mut rows, mut tokens, mut calls) = (all, all as f64, 0);
        let plain = tokens / (self.step(all) + prompt);
        let mut best = (plain * GAIN_MIN, depths.clone());
        loop {
            let open = (0..streams.len()).filter(|&at| depths[at] < streams[at].depth_max);
            let Some(at) = open.max_by(|&a, &b| survival[a].total_cmp(&survival[b]).then(b.cmp(&a))) else {
                return best.1;
            };
            depths[at] += 1;
            rows += 1;
            tokens += survival[at];
            if streams[at].model_call {
                calls = calls.max(depths[at]);
            }
            survival[at] *= streams[at].odds.0.get(depths[at]).copied().unwrap_or(0.0);
            let rate = tokens / (self.step(rows) + prompt + calls as f64 * self.draft_token.seconds);
            if rate > best.0 {
                best = (rate, depths.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Costs after plain rounds of one stream, with a step of `1 + extra * (rows - 1)` ms.
    fn costs(extra: u32) -> Costs {
        let mut costs = Costs::new(2);
        for _ in 0..100 {
            costs.record(&RoundCost {
                streams: 1,
                rows: 1,
                step: MS * 10,
                tokens: 1,
                ..RoundCost::default()
            });
        }
        for rows in 2..=9 {
            let step = MS * 10 + MS * extra * (rows as u32 - 1);
            costs.record(&RoundCost { streams: 1, rows, step, tokens: 1, ..RoundCost::default() });
        }
        costs
    }

    fn check(extra: u32, odds: f64, draft_ms: u32, expected: usize) {
        let mut costs = costs(extra);
        costs.draft_token.add((MS * draft_ms).as_secs_f64());
        costs.rounds_without = 0;
        let stream = Stream { depth_max: 8, odds: Odds([odds; DRAFT_MAX]), model_call: draft_ms > 0 };
        assert_eq!(costs.depths(&[stream], 0, 0), [expected], "{extra} ms a row, odds {odds}");
    }

    #[test]
    fn depth_follows_cost_and_odds() {
        check(0, 0.9, 0, 8);
        check(10, 0.9, 0, 0);
        check(2, 0.1, 0, 0);
        check(0, 0.9, 10, 0);
        check(1, 0.8, 1, 4);
    }

    #[test]
    fn nothing_is_drafted_before_plain_steps_are_known() {
        let stream = Stream { depth_max: 8, odds: Odds::default(), model_call: false };
        assert_eq!(Costs::new(1).depths(&[stream], 0, 0), [0]);
    }

    #[test]
    fn losses_close_the_account_until_plain_time_covers_them() {
        let mut costs = costs(0);
        let stream = Stream { depth_max: 8, odds: Odds([1.0; DRAFT_MAX]), model_call: false };
        assert_eq!(costs.depths(&[stream], 0, 0), [8]);
        let bad = RoundCost {
            streams: 1,
            rows: 9,
            step: MS * 100,
            tokens: 1,
            chosen: true,
            ..RoundCost::default()
        };
        costs.record(&bad);
        assert_eq!(costs.depths(&[stream], 0, 0), [0]);
        for _ in 0..500 {
            costs.record(&RoundCost {
                streams: 1,
                rows: 1,
                step: MS * 10,
                tokens: 1,
                ..RoundCost::default()
            });
        }
        assert_ne!(costs.depths(&[stream], 0, 0), [0]);
    }

    #[test]
    fn drafters_that_decline_are_booked() {
        let mut costs = costs(0);
        let declined = RoundCost {
            streams: 1,
            rows: 1,
            step: MS * 10,
            draft_tokens: 2,
            draft: MS * 100,
            tokens: 1,
            chosen: true,
            ..RoundCost::default()
        };
        let before = costs.plain_time;
        costs.record(&declined);
        assert!((costs.lost - 0.1).abs() < 1e-9 && costs.plain_time > before, "{costs:?}");
    }

    #[test]
    fn trials_wait_until_plain_time_covers_what_they_may_lose() {
        let mut costs = costs(10);
        costs.record_draft(1, MS * 10);
        costs.rounds_without = PROBE_FIRST;
        let stream = Stream { depth_max: 8, odds: Odds([0.1; DRAFT_MAX]), model_call: true };
        // Two drafts and two rows, 10 ms each.
        costs.plain_time = 0.039 / LOSS_MAX;
        assert_eq!(costs.depths(&[stream], 0, 0), [0]);
        costs.plain_time = 0.041 / LOSS_MAX;
        assert_eq!(costs.depths(&[stream], 0, 0), [PROBE_DEPTH]);
        costs.lost = 0.01;
        assert_eq!(costs.depths(&[stream], 0, 0), [0]);
    }

    #[test]
    fn prompt_rows_keep_the_stall() {
        let mut costs = costs(0);
        assert_eq!(costs.prompt_rows(1, MS * 200), CHUNK_FIRST);
        let step = MS * 110;
        costs.record(&RoundCost { streams: 1, rows: 1, prompt_rows: 100, step, ..RoundCost::default() });
        assert!((199..=200).contains(&costs.prompt_rows(1, MS * 210)));
        assert_eq!(costs.prompt_rows(1, MS), CHUNK_MIN);
    }
}
