//! From a plan to the model's answer: drafts, windows, step, draws.

use std::sync::Arc;
use std::time::Duration;

use model::{DraftAsk, Draw, Drawn, ImageRow, Logits, PAGE_TOKENS, Row, SlotId, WINDOW_ROWS_MAX, Window};

use crate::choose::{Account, OTHERS_MAX, Stream};
use crate::core::Core;
use crate::costs::RoundCost;
use crate::drafting::{RowMask, Tree};
use crate::event::ReplyError;
use crate::plan::{Part, StepLimits, View, Work};
use crate::request::{CHOICES_MAX, DraftPolicy};
use crate::sampling::{draw, score};

/// Rounds after the last drafts of the model during which a stream's MTP layer is kept up where that is dear.
const UNASKED_MAX: u32 = 8;

/// One sequence's share of a step that ran.
pub(crate) struct Share {
    pub(crate) slot: usize,
    pub(crate) kind: Kind,
    /// Its draws in the round's list.
    pub(crate) draws: std::ops::Range<usize>,
}

/// What kind of share.
pub(crate) enum Kind {
    /// Prompt rows `from .. to`; the last draw is the first token where `ends`.
    Chunk { from: usize, to: usize, ends: bool },
    /// A decode window; one draw for each row. `chain` is how many of its drafts form the first chain.
    Decode { tree: Tree, chain: usize },
}

/// A step being put together.
#[derive(Default)]
struct Round {
    shares: Vec<Share>,
    windows: Vec<Window>,
    /// Rows of all windows, and those among them that take image rows.
    rows: usize,
    images: Vec<ImageRow>,
    draws: Vec<Draw>,
    logits: usize,
    cost: RoundCost,
}

impl Core {
    /// What every running sequence could do next.
    /// `stall` is how long the step may keep running streams.
    pub(crate) fn views(&mut self, stall: Duration) -> Vec<View> {
        self.make_wishes(stall);
        let running =
            self.slots.iter().enumerate().filter_map(|(slot, running)| Some((slot, running.as_ref()?)));
        let running = running.filter(|(_, running)| !running.awaits_picture());
        let views = running.map(|(slot, running)| {
            let work = match running.prefills() {
                true => Work::Prefill {
                    from: running.committed,
                    stop: running.chunk_stop(),
                    ends: running.chunk_stop() == running.prompt_length(),
                    scored: running.request.prompt_logprobs.is_some() && running.choice == 0,
                },
                false => Work::Decode { drafts: running.rows_wished() },
            };
            View { slot, order: running.order * u64::from(CHOICES_MAX) + u64::from(running.choice), work }
        });
        views.collect()
    }

    pub(crate) fn step_limits(&self, views: &[View], stall: Duration) -> StepLimits {
        let decode_rows = views.iter().filter_map(|view| match view.work {
            Work::Decode { drafts } => Some(1 + drafts),
            Work::Prefill { .. } => None,
        });
        let (streams, rows) = (decode_rows.clone().count(), decode_rows.sum());
        // Streams wait for the drafts of their neighbours as well.
        let stall = stall.saturating_sub(self.drafting_time(views));
        StepLimits {
            rows: self.spec.rows_max,
            logits: self.spec.logits_rows_max,
            prompt_rows: self.costs.prompt_rows(streams, rows, stall),
            turn: self.counters.steps,
        }
    }

    /// What the model's drafts for these streams are expected to take before the step.
    fn drafting_time(&self, views: &[View]) -> Duration {
        let (mut depth, mut catch_up) = (0, 0.0);
        for view in views {
            let Work::Decode { drafts } = view.work else { continue };
            let running = self.slots[view.slot].as_ref();
            if let Some(running) = running.filter(|running| running.asks_model(drafts, self.spec.has_mtp)) {
                depth = depth.max(running.drafting.depth.min(drafts));
                catch_up += self.costs.upkeep(running.unknown as f64);
            }
        }
        Duration::try_from_secs_f64(self.costs.draft_token.seconds * depth as f64 + catch_up)
            .unwrap_or_default()
    }

    /// Decides how deep and wide each decoding stream would draft, and from where.
    fn make_wishes(&mut self, stall: Duration) {
        let mut streams: Vec<(usize, Stream)> = Vec::new();
        let mut bystanders: Vec<Account> = Vec::new();
        let (mut others, mut prompts) = (0, false);
        for (slot, running) in self.slots.iter_mut().enumerate() {
            let Some(running) = running else { continue };
            if running.prefills() {
                prompts |= !running.awaits_picture();
                continue;
            }
            match running.wish(self.spec.has_mtp) {
                Some(stream) => {
                    let catch_up = self.costs.upkeep(running.unknown as f64);
                    streams.push((slot, Stream { catch_up, ..stream }));
                }
                None => others += 1,
            }
            if running.request.drafting.policy == DraftPolicy::Off {
                bystanders.push(running.account);
            }
        }
        if streams.is_empty() {
            return;
        }
        let all = streams.len() + others;
        let prompt_rows = match prompts {
            true => self.costs.prompt_rows(all, all, stall).min(self.spec.rows_max),
            false => 0,
        };
        let asked: Vec<Stream> = streams.iter().map(|(_, stream)| *stream).collect();
        let choices = self.costs.choices(&asked, others, &bystanders, prompt_rows);
        for ((slot, stream), choice) in streams.iter().zip(choices) {
            if let Some(running) = &mut self.slots[*slot] {
                running.drafting.depth = choice.depth;
                running.drafting.first = running.drafting.first.max(1 + choice.others);
                let asks = choice.depth > 0 && stream.model_call;
                running.since_asked = if asks { 0 } else { running.since_asked.saturating_add(1) };
            }
            self.keep_up(*slot);
        }
    }

    /// Tells the model whether drafts of a slot are to be expected: where the MTP layer's upkeep is dear,
    /// only while it is asked.
    pub(crate) fn keep_up(&mut self, slot: usize) {
        let Some(running) = &mut self.slots[slot] else { return };
        if !self.spec.has_mtp || self.costs.upkeep_is_small() {
            return;
        }
        let drafting = running.request.drafting;
        let expected = drafting.mtp
            && match drafting.policy {
                DraftPolicy::Off | DraftPolicy::Fixed(0) | DraftPolicy::Auto(0) => false,
                DraftPolicy::Fixed(_) => true,
                // A prompt is much to learn for nothing.
                DraftPolicy::Auto(_) if running.prefills() => self.costs.model_drafts_win(),
                DraftPolicy::Auto(_) => {
                    running.since_asked < UNASKED_MAX && self.costs.model_drafts_could_pay()
                }
            };
        if expected != running.kept_up {
            running.kept_up = expected;
            // A slot that the model does not know fails in the step.
            let _ = self.model.expect_drafts(SlotId(slot as u32), expected);
        }
    }

    /// Runs the parts and settles them.
    pub(crate) fn run(&mut self, parts: Vec<Part>) {
        self.begin_telling(&parts);
        let mut round = Round::default();
        let trees = self.draft(&parts, &mut round.cost);
        for (part, tree) in parts.into_iter().zip(trees) {
            match (part, tree) {
                (Part::Chunk { slot, from, to, logits }, _) => {
                    self.add_chunk(&mut round, slot, from, to, logits)
                }
                (Part::Decode { slot, .. }, Some((tree, chain))) => {
                    self.add_decode(&mut round, slot, tree, chain);
                }
                // The stream ended while its window was made.
                (Part::Decode { .. }, None) => {}
            }
        }
        if round.windows.is_empty() {
            return;
        }
        let before = self.clock.now();
        let drawn = self.step_and_draw(&round);
        self.counters.steps += 1;
        match drawn {
            Ok(drawn) => {
                self.faults_in_row = 0;
                let mut given: Vec<(usize, usize)> = Vec::with_capacity(round.cost.streams);
                for share in round.shares {
                    let drawn = &drawn[share.draws.clone()];
                    let slot = share.slot;
                    given.extend(self.settle(share, drawn).map(|tokens| (slot, tokens)));
                }
                round.cost.tokens = given.iter().map(|(_, tokens)| tokens).sum();
                // Keeping the accepted rows is part of what a round costs.
                round.cost.step = self.clock.now().saturating_sub(before);
                self.book(&round.cost, &given);
            }
            Err(message) => {
                self.faults_in_row += 1;
                // What the failed step did to its slots is unknown; nobody else was in it.
                for share in round.shares {
                    self.fail(share.slot, ReplyError::DeviceFault { message: message.clone() });
                }
            }
        }
    }

    /// Learns from a round that gave these slots so many tokens, and books it with their streams.
    fn book(&mut self, cost: &RoundCost, given: &[(usize, usize)]) {
        let bill = self.costs.record(cost);
        for &(slot, tokens) in given {
            let Some(running) = &mut self.slots[slot] else { continue };
            running.account.book(bill, tokens);
        }
    }

    fn step_and_draw(&mut self, round: &Round) -> Result<Vec<Drawn>, String> {
        let stepped = match round.images.is_empty() {
            true => self.model.step(&round.windows),
            false => self.model.step_images(&round.windows, &round.images),
        };
        let rows = stepped.map_err(|error| error.to_string())?;
        if rows != round.logits {
            return Err(format!("the model scored {rows} rows, {} were asked for", round.logits));
        }
        if round.draws.is_empty() {
            return Ok(Vec::new());
        }
        let told = &mut self.told;
        let mut tell = || told.drain(..).for_each(|(reply, event)| reply.send(event));
        let drawn = self.model.draw_beside(&round.draws, &mut tell).map_err(|error| error.to_string())?;
        match drawn.len() == round.draws.len() {
            true => Ok(drawn),
            false => Err(format!("{} draws answered of {}", drawn.len(), round.draws.len())),
        }
    }

    /// The decode windows, drafts in: copies at once, the model's for all streams in one call.
    fn draft(&mut self, parts: &[Part], cost: &mut RoundCost) -> Vec<Option<(Tree, usize)>> {
        let allowed: Vec<Option<RowMask>> = parts.iter().map(|part| self.allowed(part)).collect();
        let chains = self.ask_model(parts, &allowed, cost);
        let mut trees = Vec::with_capacity(parts.len());
        for ((part, chains), allowed) in parts.iter().zip(chains).zip(allowed) {
            trees.push(match (part, allowed) {
                (Part::Decode { slot, drafts }, Some(allowed)) => {
                    self.window_of(*slot, *drafts, &chains, allowed)
                }
                _ => None,
            });
        }
        trees
    }

    /// What may follow a stream's last token. `None`: it does not decode, or its constraint has no way on and
    /// it ended.
    fn allowed(&mut self, part: &Part) -> Option<RowMask> {
        let Part::Decode { slot, .. } = *part else { return None };
        let running = self.slots[slot].as_mut()?;
        let allowed = RowMask::of(running.mask.as_deref_mut(), self.settings.vocabulary);
        if allowed.is_none() {
            let position = running.tokens.len();
            self.fail(slot, ReplyError::ConstraintDeadEnd { position });
        }
        allowed
    }

    /// Chains of each part from the model: its best one, then its alternatives for the first token.
    fn ask_model(
        &mut self,
        parts: &[Part],
        allowed: &[Option<RowMask>],
        cost: &mut RoundCost,
    ) -> Vec<Vec<Vec<u32>>> {
        let mut asks: Vec<DraftAsk> = Vec::new();
        let mut asked: Vec<(usize, usize)> = Vec::new();
        for (at, (part, allowed)) in parts.iter().zip(allowed).enumerate() {
            let (Part::Decode { slot, drafts }, Some(allowed)) = (part, allowed) else { continue };
            let (slot, drafts) = (*slot, *drafts);
            let Some(running) = &self.slots[slot] else { continue };
            if running.asks_model(drafts, self.spec.has_mtp) {
                let depth = running.drafting.depth.min(drafts);
                cost.chosen |= running.drafting.chosen;
                cost.catch_up += self.costs.upkeep(running.unknown as f64);
                self.reserve_places(slot, depth);
                asks.extend(self.draft_ask(slot, depth, allowed));
                asked.push((at, slot));
                cost.draft_tokens = cost.draft_tokens.max(depth);
            }
        }
        let mut chains = vec![Vec::new(); parts.len()];
        if asks.is_empty() {
            return chains;
        }
        let before = self.clock.now();
        self.tell();
        // A drafter that fails costs speed; whether the device still lives shows in the step.
        let drafts = self.model.draft(&asks).unwrap_or_default();
        cost.draft = self.clock.now().saturating_sub(before);
        for ((at, slot), draft) in asked.into_iter().zip(drafts) {
            let Some(running) = &mut self.slots[slot] else { continue };
            running.unknown = 0;
            if draft.tokens.is_empty() {
                // A drafter that declines is as good as one that errs: what counts is what asking brings.
                running.odds_mtp.observe(1, 0);
                self.odds_mtp.observe(1, 0);
            }
            let others = draft.first.iter().take(running.drafting.first).skip(1);
            let others = others.map(|&(token, _)| vec![token]);
            chains[at] = std::iter::once(draft.tokens).chain(others).collect();
            running.drafting.candidates = draft.first.into_iter().map(|(token, _)| token).collect();
        }
        chains
    }

    fn draft_ask(&self, slot: usize, count: usize, allowed: &RowMask) -> Option<DraftAsk> {
        let running = self.slots[slot].as_ref()?;
        let start = running.committed;
        let position = start + 1;
        let vocabulary = self.settings.vocabulary;
        let adjust = running.penalties.adjust(&[]);
        Some(DraftAsk {
            slot: SlotId(slot as u32),
            token: running.tokens[start],
            start,
            rope_delta: running.request.rope_delta,
            pages: running.pages.clone(),
            count,
            first_max: running.drafting.first.max(if running.drafting.chosen { 1 + OTHERS_MAX } else { 1 }),
            confidence: if running.drafting.chosen { self.settings.confidence } else { 0.0 },
            draw: draw(
                &running.request,
                running.choice,
                0,
                position,
                vocabulary,
                adjust,
                allowed.clone().bits(),
            ),
        })
    }

    /// The window of a stream with at most `drafts` drafted rows, and the length of its first chain.
    fn window_of(
        &mut self,
        slot: usize,
        drafts: usize,
        chains: &[Vec<u32>],
        allowed: RowMask,
    ) -> Option<(Tree, usize)> {
        let vocabulary = self.settings.vocabulary;
        let running = self.slots[slot].as_mut()?;
        let last = running.tokens[running.committed];
        let mut tree = Tree::new(last, allowed, drafts + 1, vocabulary);
        let depth = running.drafting.depth.min(drafts);
        let copy = std::mem::take(&mut running.drafting.copy);
        let copy = &copy[..copy.len().min(depth)];
        if running.drafting.copies {
            tree.add(copy, running.mask.as_deref_mut());
        }
        let mut chain = tree.rows() - 1;
        for (at, tokens) in chains.iter().enumerate() {
            tree.add(&tokens[..tokens.len().min(depth)], running.mask.as_deref_mut());
            if at == 0 && !running.drafting.copies {
                chain = tree.rows() - 1;
            }
        }
        Some((tree, chain))
    }

    fn add_chunk(&mut self, round: &mut Round, slot: usize, from: usize, to: usize, logits: Logits) {
        let vocabulary = self.settings.vocabulary;
        self.reserve_places(slot, 0);
        let Some(running) = self.slots[slot].as_mut() else { return };
        let first = round.draws.len();
        let request = &running.request;
        if let (Logits::All, Some(top)) = (&logits, request.prompt_logprobs) {
            let scored = (from..to.min(running.prompt_length() - 1)).enumerate();
            let scores =
                scored.map(|(row, at)| score(round.logits + row, request.prompt[at + 1], top, vocabulary));
            round.draws.extend(scores);
        }
        let scored = match logits {
            Logits::None => 0,
            Logits::Last => 1,
            Logits::All => to - from,
        };
        let ends = to == running.prompt_length() && running.remaining() > 0;
        if ends {
            let Some(allowed) = RowMask::of(running.mask.as_deref_mut(), vocabulary) else {
                round.draws.truncate(first);
                return self.fail(slot, ReplyError::ConstraintDeadEnd { position: to });
            };
            let adjust = running.penalties.adjust(&[]);
            let row = round.logits + scored - 1;
            round.draws.push(draw(request, running.choice, row, to, vocabulary, adjust, allowed.bits()));
        }
        let image = |at: usize| running.image_row(at);
        let rows = (from..to).map(|at| {
            let token = if image(at).is_none() { Some(running.tokens[at]) } else { None };
            Row { token, position: request.rope(at) }
        });
        round.images.extend((from..to).filter_map(|at| {
            let (features, row) = image(at)?;
            Some(ImageRow { row: round.rows + at - from, features: Arc::clone(features), at: row })
        }));
        round.rows += to - from;
        round.windows.push(Window {
            slot: SlotId(slot as u32),
            start: from,
            rows: rows.collect(),
            pages: running.pages.clone(),
            parents: None,
            commit: true,
            logits,
        });
        round.logits += scored;
        round.cost.prompt_rows += to - from;
        let kind = Kind::Chunk { from, to, ends };
        round.shares.push(Share { slot, kind, draws: first..round.draws.len() });
    }

    fn add_decode(&mut self, round: &mut Round, slot: usize, mut tree: Tree, chain: usize) {
        let vocabulary = self.settings.vocabulary;
        self.reserve_places(slot, tree.rows());
        let Some(running) = self.slots[slot].as_ref() else { return };
        let first = round.draws.len();
        let mut rows = Vec::with_capacity(tree.rows());
        for row in 0..tree.rows() {
            let drafts = tree.drafts_to(row);
            let at = running.committed + drafts.len();
            let mask = tree.take_mask(row).bits();
            let adjust = running.penalties.adjust(&drafts);
            let logits = round.logits + row;
            round.draws.push(draw(
                &running.request,
                running.choice,
                logits,
                at + 1,
                vocabulary,
                adjust,
                mask,
            ));
            rows.push(Row { token: Some(tree.token(row)), position: running.request.rope(at) });
        }
        let plain = tree.rows() == 1;
        round.rows += tree.rows();
        round.windows.push(Window {
            slot: SlotId(slot as u32),
            start: running.committed,
            rows,
            pages: running.pages.clone(),
            parents: tree.window_parents(),
            commit: plain,
            logits: if plain { Logits::Last } else { Logits::All },
        });
        round.logits += tree.rows();
        round.cost.streams += 1;
        round.cost.rows += tree.rows();
        round.cost.chosen |= running.drafting.chosen && !plain;
        let draws = first..round.draws.len();
        round.shares.push(Share { slot, kind: Kind::Decode { tree, chain }, draws });
    }

    /// Gives the slot pages for `rows` places behind the committed ones, or for its whole prompt.
    fn reserve_places(&mut self, slot: usize, rows: usize) {
        let Some(running) = &mut self.slots[slot] else { return };
        let places = (running.committed + rows).max(running.prompt_length());
        while running.pages.len() * PAGE_TOKENS < places {
            let page = self.store.take_page(&mut *self.model);
            running.pages.push(page);
            running.reserved -= 1;
        }
    }
}

impl crate::running::Running {
    /// Sets the wish of the coming step. `Some` where the engine is to choose the depth.
    fn wish(&mut self, has_mtp: bool) -> Option<Stream> {
        let drafting = self.request.drafting;
        let room = self.remaining().saturating_sub(1);
        let depth = match drafting.policy {
            DraftPolicy::Off => 0,
            DraftPolicy::Fixed(depth) | DraftPolicy::Auto(depth) => usize::from(depth).min(room),
        };
        self.drafting.copy.clear();
        let mtp = drafting.mtp && has_mtp;
        if depth > 0 && drafting.copy {
            self.drafting.copy.extend(self.copies.propose(&self.tokens, depth));
        }
        let copied = self.drafting.copy.len();
        let better = self.odds_copy.expected(copied) >= self.odds_mtp.expected(depth);
        self.drafting.copies = copied > 0 && (!mtp || better);
        self.drafting.depth = match (self.drafting.copies, mtp) {
            (true, _) => copied,
            (false, true) => depth,
            (false, false) => 0,
        };
        self.drafting.chosen = matches!(drafting.policy, DraftPolicy::Auto(_));
        self.drafting.first = usize::from(drafting.first).max(1);
        self.drafting.candidates.clear();
        let model_call = !self.drafting.copies;
        let stream = Stream {
            depth_max: self.drafting.depth,
            first_max: if model_call { 1 + OTHERS_MAX } else { 1 },
            odds: if model_call { self.odds_mtp } else { self.odds_copy },
            model_call,
            catch_up: 0.0,
            account: self.account,
        };
        self.drafting.chosen.then_some(stream)
    }

    /// Whether a window of at most `drafts` drafted rows asks the model for some of them.
    fn asks_model(&self, drafts: usize, has_mtp: bool) -> bool {
        let wanted = self.drafting.depth.min(drafts) > 0 && self.request.drafting.mtp && has_mtp;
        wanted && (!self.drafting.copies || self.request.drafting.first > 1)
    }

    /// Drafted rows of the coming window: the chain and what makes it a tree, as far as places go.
    fn rows_wished(&self) -> usize {
        let depth = self.drafting.depth;
        let first = self.drafting.first;
        let rows = match (depth, first) {
            (0, _) => 0,
            (_, 1) => depth,
            // With a copied chain beside the model's own.
            _ => depth + first - 1 + if self.drafting.copies { depth } else { 0 },
        };
        rows.min(WINDOW_ROWS_MAX - 1).min(self.places_max.saturating_sub(self.committed + 1))
    }
}
