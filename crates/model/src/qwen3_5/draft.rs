//! Drafts by the MTP layer: the pending row of every asking sequence first, then a chain on the layer's own
//! results.

use device::{Buffer, Draw, Drawn, host_math};

use super::mtp::{Hidden, MtpRow, MtpWindow, Next};
use super::network::Probe;
use super::qwen::Qwen;
use super::sequence::Sequence;
use super::windows::{check_pages, limit};
use crate::{DRAFT_MAX, Draft, DraftAsk, ModelError};

/// Queued rows of all asking sequences beyond which they run on their own, for their K/V alone, before the
/// pending rows; fewer cost less in one forward with these.
const QUEUED_WITH_PENDING: usize = 8;

/// One asking sequence while its chain grows.
struct Chain<'a> {
    ask: &'a DraftAsk,
    /// Which ask this is.
    index: usize,
    /// Longest chain within the context.
    count: usize,
    draft: Draft,
}

impl Qwen {
    /// [`crate::Model::draft`] with a look inside.
    pub fn draft_with(&mut self, asks: &[DraftAsk], probe: &mut dyn Probe) -> Result<Vec<Draft>, ModelError> {
        self.logits_rows = 0;
        let mut drafts = vec![Draft::default(); asks.len()];
        let Some(drafted) = self.network.scratch.mtp.as_ref().map(|mtp| mtp.drafted) else {
            return Ok(drafts);
        };
        let mut chains = self.chains(asks)?;
        self.first_pass(&chains)?;
        // Where no doubt ends a chain early, its rows need not wait until the host has seen tokens.
        if self.device.draws_later() && chains.iter().all(|chain| chain.ask.confidence <= 0.0) {
            self.draft_ahead(&mut chains, drafted, probe)?;
            chains.into_iter().for_each(|chain| drafts[chain.index] = chain.draft);
            return Ok(drafts);
        }
        for position in 0..DRAFT_MAX {
            if chains.is_empty() {
                break;
            }
            probe.after_mtp(&mut *self.device, drafted, self.network.scratch.logits, chains.len())?;
            let draws: Vec<Draw> =
                chains.iter().enumerate().map(|(row, chain)| chain.draw(row, position)).collect();
            let drawn = self.device.draw(self.network.scratch.logits, &draws)?;
            let mut grown = Vec::new();
            let mut windows = Vec::new();
            for (row, (mut chain, drawn)) in chains.into_iter().zip(drawn).enumerate() {
                let accepted = chain.take(position, &drawn);
                if accepted && position + 1 < chain.count {
                    let sequence = &self.sequences[chain.ask.slot.0 as usize];
                    windows.push(chain.window(
                        row,
                        position + 1,
                        Next::Token(chain.draft.tokens[position]),
                        sequence,
                    ));
                    grown.push(chain);
                } else {
                    drafts[chain.index] = chain.draft;
                }
            }
            chains = grown;
            let wanted: Vec<usize> = (0..windows.len()).collect();
            self.network.mtp_forward(&mut *self.device, &windows, drafted, &wanted)?;
        }
        Ok(drafts)
    }

    /// Chains after their first pass, to their full counts: the host sees the tokens at the end.
    fn draft_ahead(
        &mut self,
        chains: &mut [Chain<'_>],
        drafted: Buffer,
        probe: &mut dyn Probe,
    ) -> Result<(), ModelError> {
        let queued = self.queue_ahead(chains, drafted, probe);
        // Answers of a chain that failed on its way are not those of the next one.
        let drawn = self.device.drawn();
        let (places, drawn) = (queued?, drawn?);
        let mut grows = vec![true; chains.len()];
        for ((position, at), drawn) in places.into_iter().zip(&drawn) {
            // What follows a draw that gave no token says nothing.
            grows[at] = grows[at] && chains[at].take(position, drawn);
        }
        Ok(())
    }

    /// Every forward takes the tokens of the draws before it. Gives position and chain of each draw.
    fn queue_ahead(
        &mut self,
        chains: &[Chain<'_>],
        drafted: Buffer,
        probe: &mut dyn Probe,
    ) -> Result<Vec<(usize, usize)>, ModelError> {
        let logits = self.network.scratch.logits;
        let mut places = Vec::new();
        let mut now: Vec<usize> = (0..chains.len()).collect();
        for position in 0..DRAFT_MAX {
            if now.is_empty() {
                break;
            }
            probe.after_mtp(&mut *self.device, drafted, logits, now.len())?;
            let draws: Vec<Draw> =
                now.iter().enumerate().map(|(row, &at)| chains[at].draw(row, position)).collect();
            self.device.draw_later(logits, &draws)?;
            places.extend(now.iter().map(|&at| (position, at)));
            let (mut windows, mut next) = (Vec::new(), Vec::new());
            for (row, &at) in now.iter().enumerate() {
                let chain = &chains[at];
                if position + 1 < chain.count {
                    let sequence = &self.sequences[chain.ask.slot.0 as usize];
                    windows.push(chain.window(row, position + 1, Next::Drawn(row), sequence));
                    next.push(at);
                }
            }
            let wanted: Vec<usize> = (0..windows.len()).collect();
            self.network.mtp_forward(&mut *self.device, &windows, drafted, &wanted)?;
            now = next;
        }
        Ok(places)
    }

    /// The asks that can be answered.
    fn chains<'a>(&mut self, asks: &'a [DraftAsk]) -> Result<Vec<Chain<'a>>, ModelError> {
        let mut chains = Vec::new();
        for (index, ask) in asks.iter().enumerate() {
            let context = self.settings.context;
            if !(1..=DRAFT_MAX).contains(&ask.count) || ask.first_max == 0 {
                let found = format!("{} with {} alternatives", ask.count, ask.first_max);
                return Err(limit("drafts asked for", found, format!("1 to {DRAFT_MAX} with at least 1")));
            }
            if ask.token as usize >= self.network.config.vocabulary {
                let expected = format!("below {}", self.network.config.vocabulary);
                return Err(limit("token", ask.token, expected));
            }
            check_pages(&ask.pages, &self.settings)?;
            if asks[..index].iter().any(|other| other.slot == ask.slot) {
                return Err(limit("slot asking for drafts", ask.slot.0, "each slot once"));
            }
            let sequence = self.sequence(ask.slot)?;
            if ask.start != sequence.length {
                return Err(limit("start of a draft", ask.start, sequence.length));
            }
            // Rows go up to index start + count - 2, and the place of the last drafted token must exist.
            let places = context.min(ask.pages.len() * device::PAGE_TOKENS);
            let count = ask.count.min(places.saturating_sub(ask.start));
            if sequence.pending.is_some() && count > 0 {
                chains.push(Chain { ask, index, count, draft: Draft::default() });
            }
        }
        Ok(chains)
    }

    /// Queued and pending rows of all chains in one forward; the logits of chain `i` are row `i`.
    fn first_pass(&mut self, chains: &[Chain<'_>]) -> Result<(), ModelError> {
        let queued: usize =
            chains.iter().map(|chain| self.sequences[chain.ask.slot.0 as usize].queued()).sum();
        if queued > QUEUED_WITH_PENDING || queued + chains.len() > self.settings.rows_max {
            let slots: Vec<_> = chains.iter().map(|chain| chain.ask.slot).collect();
            self.catch_up(&slots)?;
        }
        let (mut windows, mut wanted, mut rows) = (Vec::new(), Vec::new(), 0);
        for chain in chains {
            let ask = chain.ask;
            let sequence = &mut self.sequences[ask.slot.0 as usize];
            let window = sequence.take_draft(ask.token, &ask.pages);
            let window = window.expect("chains have a pending row");
            rows += window.rows.len();
            wanted.push(rows - 1);
            windows.push(window);
        }
        let hidden = self.network.scratch.hidden;
        self.network.mtp_forward(&mut *self.device, &windows, hidden, &wanted)
    }
}

impl Chain<'_> {
    /// How the chain's token number `position` is drawn: with the target's own keys. A mask belongs to the
    /// first token only, for what a grammar allows later depends on it.
    fn draw(&self, row: usize, position: usize) -> Draw {
        let first = position == 0;
        Draw {
            row,
            position: self.ask.draw.position + position as u64,
            // The best alone is what the draw gives anyway.
            top_logprobs: if first && self.ask.first_max > 1 { self.ask.first_max as u32 } else { 0 },
            mask: if first { self.ask.draw.mask.clone() } else { None },
            ..self.ask.draw.clone()
        }
    }

    /// Takes the drawn token unless the drafter doubts it or has faulted.
    fn take(&mut self, position: usize, drawn: &Drawn) -> bool {
        let Some(token) = drawn.token else { return false };
        let probability = probability(drawn.logprob);
        if probability < self.ask.confidence {
            return false;
        }
        if position == 0 {
            let others = drawn.top.iter().filter(|(id, _)| *id != token);
            let others = others.map(|(id, logprob)| (*id, self::probability(*logprob)));
            let all = std::iter::once((token, probability)).chain(others);
            self.draft.first = all.take(self.ask.first_max).collect();
        }
        self.draft.tokens.push(token);
        self.draft.probabilities.push(probability);
        true
    }

    /// The next row after `taken` tokens: the last of them, `next`, on the result of row `row`. Chained rows
    /// stand beyond the committed ones and are written again from the model's own hidden states once their
    /// tokens are committed.
    fn window(&self, row: usize, taken: usize, next: Next, sequence: &Sequence) -> MtpWindow {
        let index = self.ask.start + taken - 1;
        let position = (index as i64 + self.ask.rope_delta).max(0) as u32;
        let row = MtpRow { next, hidden: Hidden::Given(row), position: [position; 3] };
        sequence.mtp_window(index, vec![row], &self.ask.pages)
    }
}

fn probability(logprob: f32) -> f32 {
    host_math::exp(f64::from(logprob)) as f32
}
