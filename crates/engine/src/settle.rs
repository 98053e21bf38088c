//! What a step means: accepted tokens, kept rows, snapshots, ends.

use model::{Drawn, SlotId};

use crate::core::Core;
use crate::drafting::Tree;
use crate::event::{Event, FinishReason, ReplyError, Score, Stats};
use crate::run::{Kind, Share};
use crate::running::Running;

impl Core {
    /// Settles one sequence's share; returns how many tokens a decode window gave out.
    pub(crate) fn settle(&mut self, share: Share, drawn: &[Drawn]) -> Option<usize> {
        match share.kind {
            Kind::Chunk { from, to, ends } => {
                self.settle_chunk(share.slot, from, to, ends, drawn);
                None
            }
            Kind::Decode { tree, chain } => Some(self.settle_decode(share.slot, &tree, chain, drawn)),
        }
    }

    fn settle_chunk(&mut self, slot: usize, from: usize, to: usize, ends: bool, drawn: &[Drawn]) {
        let now = self.clock.now();
        let Some(running) = &mut self.slots[slot] else { return };
        running.commit(to - from);
        // What of a chunk the drafter is to know it learns at once.
        running.unknown = 0;
        running.drop_features();
        self.counters.prompt_computed += (to - from) as u64;
        let (scores, first) = drawn.split_at(drawn.len() - usize::from(ends));
        if drawn.iter().any(|drawn| drawn.token.is_none()) {
            return self.fail(slot, ReplyError::NumericalFault { position: to });
        }
        if !scores.is_empty() {
            let scores = scores.iter().filter_map(score).collect();
            running.reply.send(Event::PromptScores { from: from + 1, scores });
        }
        let done = to == running.prompt_length();
        if done {
            running.prefilled = now;
            let computed = to - running.cache.hit_tokens;
            running.reply.send(Event::Prefilled { choice: running.choice, computed });
        }
        let due = running.snapshots_at.first() == Some(&to);
        if due {
            running.snapshots_at.remove(0);
            self.remember(slot);
        }
        match first.first() {
            Some(first) => {
                self.give_out(slot, &[first]);
            }
            None if done => self.retire(slot, FinishReason::Length),
            None => {}
        }
    }

    fn settle_decode(&mut self, slot: usize, tree: &Tree, chain: usize, drawn: &[Drawn]) -> usize {
        let Some(running) = &mut self.slots[slot] else { return 0 };
        running.drafts.steps += 1;
        let accepted = accepted(running, tree, drawn, &self.settings.eos);
        let drafted = tree.rows() > 1;
        if drafted {
            running.learn(tree, chain, &accepted);
            if let Err(error) = self.model.keep(SlotId(slot as u32), &accepted.path) {
                self.fail(slot, ReplyError::DeviceFault { message: error.to_string() });
                return 0;
            }
        }
        running.commit(accepted.path.len());
        if let Some(&right) = accepted.ids.first() {
            running.odds_mtp.observe_first(&running.drafting.candidates, right);
            self.odds_mtp.observe_first(&running.drafting.candidates, right);
        }
        if drafted && chain > 0 {
            let hits = accepted.hits(tree, chain);
            let odds = if running.drafting.copies { &mut self.odds_copy } else { &mut self.odds_mtp };
            odds.observe(chain.min(accepted.tokens.len()), hits);
        }
        let tokens: Vec<&Drawn> = accepted.tokens.iter().map(|&row| &drawn[row]).collect();
        let given = self.give_out(slot, &tokens);
        if let (true, Some(running)) = (accepted.fault, &self.slots[slot]) {
            let position = running.tokens.len();
            self.fail(slot, ReplyError::NumericalFault { position });
        }
        given
    }

    /// Sends tokens and appends them; ends the choice where one of them is the last.
    fn give_out(&mut self, slot: usize, drawn: &[&Drawn]) -> usize {
        let Some(running) = &mut self.slots[slot] else { return 0 };
        let tokens: Vec<u32> = drawn.iter().filter_map(|drawn| drawn.token).collect();
        if tokens.is_empty() {
            return 0;
        }
        let scores = match running.request.logprobs {
            Some(_) => drawn.iter().filter_map(|drawn| score(drawn)).collect(),
            None => Vec::new(),
        };
        let mut end = None;
        for &token in &tokens {
            end = running.push(token, &self.settings.eos);
        }
        let given = tokens.len();
        self.counters.generated += given as u64;
        let event = Event::Tokens { choice: running.choice, tokens, scores };
        match self.tells_later {
            true => self.told.push((running.reply.clone(), event)),
            false => running.reply.send(event),
        }
        if let Some(reason) = end {
            self.retire(slot, reason);
        }
        given
    }

    /// Keeps the slot's state in the prefix cache.
    fn remember(&mut self, slot: usize) {
        let Some(running) = &mut self.slots[slot] else { return };
        let Some(namespace) = &running.namespace else { return };
        let keys = &running.keys[..running.committed];
        let id = SlotId(slot as u32);
        let kept = self.store.remember(&mut *self.model, id, namespace, keys, &running.pages);
        if let Some(entry) = kept {
            running.entries.push(entry);
            running.checkpoint = running.committed;
        }
    }

    /// Ends a choice in good order: its state stays in the cache.
    pub(crate) fn retire(&mut self, slot: usize, reason: FinishReason) {
        self.remember(slot);
        self.end(slot, reason);
    }

    /// Ends a choice with an error. After a numerical fault nothing that it used or left is trusted.
    pub(crate) fn fail(&mut self, slot: usize, error: ReplyError) {
        if let (ReplyError::NumericalFault { .. }, Some(running)) = (&error, &self.slots[slot]) {
            running.entries.iter().for_each(|&entry| self.store.drop_entry(entry));
        }
        self.end(slot, FinishReason::Failed(error));
    }

    fn end(&mut self, slot: usize, reason: FinishReason) {
        let Some(running) = self.slots[slot].take() else { return };
        self.store.give_back(&running.pages, running.reserved);
        self.counters.drafts.add(&running.drafts);
        let now = self.clock.now();
        let prefilled = if running.prefills() { now } else { running.prefilled };
        let stats = Stats {
            prompt_tokens: running.prompt_length(),
            generated_tokens: running.tokens.len() - running.prompt_length(),
            cache: running.cache,
            checkpoint_tokens: running.checkpoint,
            queued: running.admitted.saturating_sub(running.arrived),
            image: running.image,
            prefill: prefilled.saturating_sub(running.admitted),
            decode: now.saturating_sub(prefilled),
            drafts: running.drafts,
        };
        self.finished(&running.reply, running.choice, reason, stats);
        self.drop_private(running.order, running.namespace.as_deref());
    }
}

fn score(drawn: &Drawn) -> Option<Score> {
    Some(Score { token: drawn.token?, logprob: drawn.logprob, top: drawn.top.clone() })
}

/// What a decode window gave.
struct Accepted {
    /// Rows whose draw is a token of the reply, in order.
    tokens: Vec<usize>,
    /// Their ids.
    ids: Vec<u32>,
    /// Rows that become part of the sequence: all of `tokens`, since a drawn row was real.
    path: Vec<usize>,
    /// Whether the next row's logits were not finite.
    fault: bool,
}

impl Accepted {
    /// Leading drafts of the first chain (rows 1 to `chain`) that were right.
    fn hits(&self, tree: &Tree, chain: usize) -> usize {
        (1..=chain).zip(&self.ids).take_while(|&(row, &id)| tree.token(row) == id).count()
    }
}

/// Walks the window from its root as long as drafts equal the target's draws and nothing ends the reply.
fn accepted(running: &Running, tree: &Tree, drawn: &[Drawn], eos: &[u32]) -> Accepted {
    let mut accepted = Accepted { tokens: Vec::new(), ids: Vec::new(), path: Vec::new(), fault: false };
    let mut row = Some(0);
    while let Some(at) = row {
        let Some(token) = drawn[at].token else {
            accepted.fault = true;
            return accepted;
        };
        accepted.tokens.push(at);
        accepted.ids.push(token);
        accepted.path.push(at);
        let over = running.ends(token, eos) || accepted.ids.len() >= running.remaining();
        row = if over { None } else { tree.child(at, token) };
    }
    accepted
}

impl Running {
    fn ends(&self, token: u32, eos: &[u32]) -> bool {
        let sampling = &self.request.sampling;
        (!sampling.ignore_eos && eos.contains(&token)) || sampling.stop_ids.contains(&token)
    }

    /// Counts a drafted round.
    fn learn(&mut self, tree: &Tree, chain: usize, accepted: &Accepted) {
        let drafts = &mut self.drafts;
        let hits = accepted.path.len().saturating_sub(1);
        drafts.rounds += 1;
        drafts.proposed += (tree.rows() - 1) as u64;
        drafts.accepted += hits as u64;
        for count in drafts.accepted_by_position.iter_mut().take(hits) {
            *count += 1;
        }
        drafts.rollbacks += u64::from(accepted.path.len() < tree.rows());
        let odds = if self.drafting.copies { &mut self.odds_copy } else { &mut self.odds_mtp };
        odds.observe(chain.min(accepted.tokens.len()), accepted.hits(tree, chain));
    }
}
