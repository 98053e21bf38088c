//! How deep and how wide the automatic policy drafts: where measured costs and odds say that it pays, and
//! never so that a stream could lose more than its account allows.

use model::DRAFT_MAX;

use crate::costs::{Bill, Costs};

/// Candidates for the first drafted token beside the chain's own whose odds are measured.
pub(crate) const OTHERS_MAX: usize = 2;
/// Weight of a new round in acceptance odds, after the first few; the odds of the unknown count as two
/// rounds.
const ODDS_FRESH: f64 = 0.1;
const ODDS_FIRST_WEIGHT: f64 = 2.0;
/// Odds of a drafter nobody has seen yet, and of its other candidates where the first is wrong.
const ODDS_FIRST: f64 = 0.7;
const ODDS_OTHERS: f64 = 0.1;
/// Judged rounds after which odds are evidence.
const PROVEN_ROUNDS: u64 = 8;
/// Gain below which drafting is not worth its noise.
const GAIN_MIN: f64 = 1.03;
/// Share of a stream's plain decode time that drafts may have lost it.
const LOSS_MAX: f64 = 0.015;
/// Plain steps that drafts of a proven drafter may lose a stream beyond that, so that they can begin at once:
/// with them the loss is at most 3 % of any reply of 67 tokens.
const LOSS_FIRST: f64 = 1.0;
/// Plain steps that a stream's drafts have won it and that they may lose again.
const GAIN_KEPT: f64 = 8.0;
/// Plain rounds that are measured before the first drafts.
const PLAIN_ROUNDS: u64 = 2;
/// Drafted tokens of a trial.
const PROBE_DEPTH: usize = 2;

/// How often a drafter is right.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Odds {
    /// Chance that each token of a chain is accepted if those before it were.
    chain: [f64; DRAFT_MAX],
    /// Chance that each other candidate for the first token is right if the first is wrong.
    others: [f64; OTHERS_MAX],
    /// Judged rounds, and those that reached each place of the chain.
    rounds: u64,
    seen: [u32; DRAFT_MAX],
}

impl Default for Odds {
    fn default() -> Self {
        Self {
            chain: [ODDS_FIRST; DRAFT_MAX],
            others: [ODDS_OTHERS; OTHERS_MAX],
            rounds: 0,
            seen: [0; DRAFT_MAX],
        }
    }
}

impl Odds {
    /// Learns from a chain of which `accepted` leading tokens of `proposed` were right.
    pub(crate) fn observe(&mut self, proposed: usize, accepted: usize) {
        for place in 0..proposed.min(accepted + 1).min(DRAFT_MAX) {
            let hit = f64::from(u8::from(place < accepted));
            let seen = &mut self.seen[place];
            *seen = seen.saturating_add(1);
            let weight = ODDS_FRESH.max(1.0 / (ODDS_FIRST_WEIGHT + f64::from(*seen)));
            self.chain[place] += weight * (hit - self.chain[place]);
        }
        self.rounds += 1;
    }

    /// Learns from the drafter's candidates for a first token, best first, where `right` was drawn.
    pub(crate) fn observe_first(&mut self, candidates: &[u32], right: u32) {
        let Some((first, others)) = candidates.split_first() else { return };
        if *first == right {
            return;
        }
        for (odds, other) in self.others.iter_mut().zip(others) {
            *odds += ODDS_FRESH * (f64::from(u8::from(*other == right)) - *odds);
        }
    }

    /// Expected accepted tokens of a chain.
    pub(crate) fn expected(&self, count: usize) -> f64 {
        let mut survival = 1.0;
        let mut sum = 0.0;
        for odds in &self.chain[..count.min(DRAFT_MAX)] {
            survival *= odds;
            sum += survival;
        }
        sum
    }

    fn perfect() -> Self {
        Self { chain: [1.0; DRAFT_MAX], ..Self::default() }
    }
}

/// What drafts that the engine chose have won or lost a stream. Rounds of its neighbours' drafts count as
/// well: they take its time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Account {
    /// Seconds that plain steps would have taken for its tokens.
    plain: f64,
    /// Seconds beyond these; negative is a gain.
    lost: f64,
}

impl Account {
    /// Books a round that gave the stream `tokens` tokens.
    pub(crate) fn book(&mut self, bill: Bill, tokens: usize) {
        let plain = bill.plain * tokens as f64;
        self.plain += plain;
        if bill.chosen {
            self.lost = (self.lost + bill.spent - plain).max(-GAIN_KEPT * bill.plain);
        }
    }
}

/// A stream that could draft.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    /// Most drafted tokens.
    pub(crate) depth_max: usize,
    /// Most candidates for the first of them.
    pub(crate) first_max: usize,
    /// Odds of its drafter.
    pub(crate) odds: Odds,
    /// Whether drafts cost a model call.
    pub(crate) model_call: bool,
    /// Seconds that the MTP layer needs before its first draft, to know what came since it was asked last.
    pub(crate) catch_up: f64,
    /// What drafts have cost it.
    pub(crate) account: Account,
}

/// What a stream is to draft.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Choice {
    /// Tokens of the chain.
    pub(crate) depth: usize,
    /// Candidates for the first token beside the chain's own.
    pub(crate) others: usize,
}

impl Costs {
    /// What each stream should draft, where `others` further streams decode one row each, `bystanders` the
    /// accounts of those among them that asked for no drafts.
    pub(crate) fn choices(
        &self,
        streams: &[Stream],
        others: usize,
        bystanders: &[Account],
        prompt_rows: usize,
    ) -> Vec<Choice> {
        let none = vec![Choice::default(); streams.len()];
        let all = streams.len() + others;
        if self.plain.get(all).is_none_or(|plain| plain.count < PLAIN_ROUNDS) {
            return none;
        }
        let accounts = streams.iter().map(|stream| (stream.account, stream.odds.rounds >= PROVEN_ROUNDS));
        let accounts = accounts.chain(bystanders.iter().map(|account| (*account, true)));
        let allowed = accounts.map(|(account, proven)| {
            let first = if proven { LOSS_FIRST * self.plain[all].seconds } else { 0.0 };
            LOSS_MAX * account.plain + first - account.lost
        });
        let allowed = allowed.fold(f64::INFINITY, f64::min);
        if allowed <= 0.0 {
            return none;
        }
        let best = self.best(streams, all, prompt_rows, allowed);
        if best.iter().any(|choice| choice.depth > 0) {
            return best;
        }
        let trial = |stream: &Stream| Choice { depth: stream.depth_max.min(PROBE_DEPTH), others: 0 };
        let trial: Vec<Choice> = streams.iter().map(trial).collect();
        let due = self.rounds_without >= self.probe_after && prompt_rows == 0;
        let price = self.price(streams, &trial, all) + catch_up(streams, &trial);
        match due && price <= allowed && self.could_pay(streams, all) {
            true => trial,
            false => none,
        }
    }

    /// Whether drafts pay if all are right.
    pub(crate) fn could_pay(&self, streams: &[Stream], all: usize) -> bool {
        let perfect = |stream: &Stream| Stream { odds: Odds::perfect(), first_max: 1, ..*stream };
        let perfect: Vec<Stream> = streams.iter().map(perfect).collect();
        self.best(&perfect, all, 0, f64::INFINITY).iter().any(|choice| choice.depth > 0)
    }

    /// Whether drafts of the model could pay a stream alone.
    pub(crate) fn model_drafts_could_pay(&self) -> bool {
        self.could_pay(&[alone(Odds::perfect())], 1)
    }

    /// What a round with these drafts loses if none is accepted, without catching up.
    fn price(&self, streams: &[Stream], choices: &[Choice], all: usize) -> f64 {
        let calls = streams.iter().zip(choices).filter(|(stream, _)| stream.model_call);
        let calls = calls.map(|(_, choice)| choice.depth).max().unwrap_or(0);
        let rows = all + choices.iter().map(|choice| choice.depth + choice.others).sum::<usize>();
        self.expected(all, rows) - self.expected(all, all) + calls as f64 * self.draft_token.seconds
    }

    /// The choices with the most expected tokens a second among those that lose at most `allowed` seconds:
    /// likely rows first, as long as the rate rises.
    fn best(&self, streams: &[Stream], all: usize, prompt_rows: usize, allowed: f64) -> Vec<Choice> {
        let prompt = self.prompt(prompt_rows);
        let mut choices = vec![Choice::default(); streams.len()];
        let mut survival: Vec<f64> = streams.iter().map(|stream| stream.odds.chain[0]).collect();
        let mut tokens = all as f64;
        let plain = self.expected(all, all);
        let mut best = (tokens / (plain + prompt) * GAIN_MIN, choices.clone());
        while let Some((at, other, gain)) = likeliest(streams, &choices, &survival) {
            if other {
                choices[at].others += 1;
            } else {
                choices[at].depth += 1;
                survival[at] *= streams[at].odds.chain.get(choices[at].depth).copied().unwrap_or(0.0);
            }
            tokens += gain;
            let price = self.price(streams, &choices, all);
            if price + catch_up(streams, &choices) > allowed {
                break;
            }
            let model = streams.iter().any(|stream| stream.model_call);
            let upkeep = if model { self.upkeep(tokens) } else { 0.0 };
            let rate = tokens / (plain + prompt + price + upkeep);
            if rate > best.0 {
                best = (rate, choices.clone());
            }
        }
        best.1
    }
}

/// What it takes the MTP layer to know the streams that it drafts for.
fn catch_up(streams: &[Stream], choices: &[Choice]) -> f64 {
    let asked = streams.iter().zip(choices).filter(|(stream, choice)| stream.model_call && choice.depth > 0);
    asked.map(|(stream, _)| stream.catch_up).sum()
}

/// A stream that the model drafts for.
fn alone(odds: Odds) -> Stream {
    let account = Account::default();
    Stream { depth_max: DRAFT_MAX, first_max: 1, odds, model_call: true, catch_up: 0.0, account }
}

/// The row that most likely gives a token: the stream, whether it is another first candidate, and its chance.
fn likeliest(streams: &[Stream], choices: &[Choice], survival: &[f64]) -> Option<(usize, bool, f64)> {
    let mut best: Option<(usize, bool, f64)> = None;
    for (at, (stream, choice)) in streams.iter().zip(choices).enumerate() {
        let deeper = (choice.depth < stream.depth_max).then_some((at, false, survival[at]));
        let wider = choice.depth > 0 && choice.others + 1 < stream.first_max;
        let chance = || (1.0 - stream.odds.chain[0]) * stream.odds.others[choice.others];
        let wider = wider.then(|| (at, true, chance()));
        for row in deeper.into_iter().chain(wider) {
            if best.is_none_or(|best| row.2 > best.2) {
                best = Some(row);
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Costs of one stream whose steps take `10 + extra * (rows - 1)` ms, and of model drafts.
    fn costs(extra: f64, draft_ms: f64) -> Costs {
        let mut costs = Costs::new(2);
        (1..=9).for_each(|rows| costs.set_step(rows, 0.010 + 0.001 * extra * (rows as f64 - 1.0)));
        costs.draft_token.seconds = draft_ms / 1000.0;
        costs
    }

    /// A stream with a long past without drafts.
    fn stream(odds: f64, model_call: bool) -> Stream {
        let odds = Odds { chain: [odds; DRAFT_MAX], rounds: 100, ..Odds::default() };
        let account = Account { plain: 100.0, lost: 0.0 };
        Stream { depth_max: 8, first_max: 1, odds, model_call, catch_up: 0.0, account }
    }

    fn depth(costs: &Costs, stream: Stream) -> usize {
        costs.choices(&[stream], 0, &[], 0)[0].depth
    }

    #[test]
    fn depth_follows_cost_and_odds() {
        for (extra, odds, draft_ms, expected) in [
            (0.0, 0.9, 0.0, 8),
            (10.0, 0.9, 0.0, 0),
            (2.0, 0.1, 0.0, 0),
            (0.0, 0.9, 10.0, 0),
            (1.0, 0.8, 1.0, 4),
        ] {
            let found = depth(&costs(extra, draft_ms), stream(odds, draft_ms > 0.0));
            assert_eq!(found, expected, "{extra} ms a row, odds {odds}, {draft_ms} ms a draft");
        }
    }

    #[test]
    fn nothing_is_drafted_before_plain_steps_are_known() {
        assert_eq!(depth(&Costs::new(1), stream(0.7, false)), 0);
    }

    #[test]
    fn other_first_candidates_pay_where_they_are_often_right() {
        let mut stream = Stream { first_max: 3, ..stream(0.1, false) };
        stream.odds.others = [0.9, 0.0];
        let costs = costs(1.0, 0.0);
        assert_eq!(costs.choices(&[stream], 0, &[], 0), [Choice { depth: 1, others: 1 }]);
        stream.first_max = 1;
        assert_eq!(costs.choices(&[stream], 0, &[], 0), [Choice::default()]);
    }

    #[test]
    fn candidates_are_learnt_from_wrong_first_tokens() {
        let mut odds = Odds::default();
        odds.observe_first(&[1, 2, 3], 1);
        assert_eq!(odds, Odds::default());
        odds.observe_first(&[1, 2, 3], 3);
        assert!(odds.others[0] < ODDS_OTHERS && odds.others[1] > ODDS_OTHERS, "{odds:?}");
        odds.observe_first(&[], 3);
    }

    /// Everybody in a step must be able to bear what it may lose.
    #[test]
    fn the_poorest_account_decides() {
        let mut costs = costs(1.0, 0.0);
        costs.plain = vec![costs.plain[1]; 3];
        let rich = stream(0.9, false);
        let poor = Account { plain: 1.0, lost: 0.0199 };
        assert!(depth(&costs, rich) > 4);
        assert!(costs.choices(&[rich], 1, &[Account::default()], 0)[0].depth > 4);
        assert_eq!(costs.choices(&[rich], 1, &[Account { lost: 0.03, ..poor }], 0)[0].depth, 0);
        // 15 ms of its second and a step of 10, less what it lost: 5 ms and a little, and six rows take 15.
        assert_eq!(costs.choices(&[rich], 1, &[poor], 0)[0].depth, 4);
        let fresh = Stream { account: Account::default(), ..stream(0.9, false) };
        assert_eq!(depth(&costs, Stream { odds: Odds { rounds: 0, ..fresh.odds }, ..fresh }), 0);
        assert!(depth(&costs, fresh) > 4, "a proven drafter may begin at once");
        costs.plain[1].count = 0;
        assert_eq!(depth(&costs, rich), 0);
    }

    #[test]
    fn gains_pay_for_losses_up_to_a_point() {
        let mut account = Account::default();
        let bill = |spent: f64| Bill { spent, plain: 0.010, chosen: true };
        (0..100).for_each(|_| account.book(bill(0.010), 5));
        assert!((account.lost + GAIN_KEPT * 0.010).abs() < 1e-9, "{account:?}");
        account.book(bill(0.030), 1);
        assert!((account.lost + GAIN_KEPT * 0.010 - 0.020).abs() < 1e-9, "{account:?}");
        account.book(Bill { chosen: false, ..bill(5.0) }, 1);
        assert!(account.lost < 0.0 && account.plain > 5.0, "plain rounds lose nothing: {account:?}");
    }

    #[test]
    fn trials_wait_for_rounds_and_for_what_they_may_lose() {
        let mut costs = costs(2.0, 2.0);
        costs.rounds_without = costs.probe_after;
        let doubtful = stream(0.1, true);
        // Two drafts and two rows, 2 ms each, from an account without a past.
        let with = |plain: f64| Stream { account: Account { plain, lost: 0.010 }, ..doubtful };
        assert_eq!(depth(&costs, with(0.0079 / LOSS_MAX)), 0);
        assert_eq!(depth(&costs, with(0.0081 / LOSS_MAX)), PROBE_DEPTH);
        let behind = Stream { catch_up: 0.001, ..with(0.0081 / LOSS_MAX) };
        assert_eq!(depth(&costs, behind), 0);
        costs.rounds_without -= 1;
        assert_eq!(depth(&costs, doubtful), 0);
        costs.rounds_without += 1;
        // What cannot pay even if all is right is not tried.
        costs.draft_token.seconds = 0.010;
        assert_eq!(depth(&costs, doubtful), 0);
        assert!(!costs.model_drafts_could_pay());
    }
}
