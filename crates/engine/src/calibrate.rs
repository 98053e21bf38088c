//! Measuring at start what windows, drafts and the MTP layer cost, on an empty slot, which leaves no trace.

use std::time::Duration;

use model::{DRAFT_MAX, DraftAsk, Draw, Logits, ModelError, Row, SlotId, Window};

use crate::core::Core;
use crate::request::Request;
use crate::sampling::draw;

/// Rows of the windows that are measured; what lies between is taken from their line.
const ROWS: [usize; 4] = [2, 3, 5, DRAFT_MAX + 1];
/// Measurements of each, of which the median counts: the first finds cold caches.
const TIMES: usize = 3;
/// Drafted tokens of a measured chain.
const CHAIN: usize = 4;
/// Windows whose rows the MTP layer learns at once when its upkeep is measured.
const KEPT_WINDOWS: usize = 3;

/// The empty slot and its page.
struct Bench<'a> {
    core: &'a mut Core,
    page: u32,
    length: usize,
}

impl Core {
    /// Measures what one stream's steps and drafts cost. Errors show again, with someone to tell, in the
    /// first request.
    pub(crate) fn calibrate(&mut self) {
        self.store.pool.reserve(1);
        let page = self.store.take_page(&mut *self.model);
        let mut bench = Bench { core: self, page, length: 0 };
        let _ = bench.steps().and_then(|()| bench.drafts());
        let _ = self.model.load(SlotId(0), None);
        self.store.give_back(&[page], 0);
    }
}

impl Bench<'_> {
    fn steps(&mut self) -> Result<(), ModelError> {
        let rows_max = self.core.spec.rows_max.min(self.core.spec.logits_rows_max);
        self.restart()?;
        let mut plain = Vec::with_capacity(TIMES + 1);
        for _ in 0..=TIMES {
            plain.push(self.step(1)?);
        }
        let plain = median(plain);
        self.core.costs.set_step(1, plain);
        for rows in ROWS.into_iter().filter(|&rows| rows <= rows_max) {
            let mut took = Vec::with_capacity(TIMES);
            for _ in 0..TIMES {
                self.restart()?;
                let window = self.step(rows)?;
                // What the window did to caches is paid by the step after it.
                took.push(window + (self.step(1)? - plain).max(0.0));
            }
            self.core.costs.set_step(rows, median(took));
        }
        Ok(())
    }

    fn drafts(&mut self) -> Result<(), ModelError> {
        if !self.core.spec.has_mtp {
            return Ok(());
        }
        let rows = (DRAFT_MAX + 1).min(self.core.spec.rows_max).min(self.core.spec.logits_rows_max);
        let (mut chains, mut upkeep) = (Vec::new(), Vec::new());
        for _ in 0..TIMES {
            self.restart()?;
            chains.push(self.draft(CHAIN)? / CHAIN as f64);
            for _ in 0..KEPT_WINDOWS {
                self.step(rows)?;
            }
            // The first one runs the rows of the windows, the second has none left.
            let (learning, knowing) = (self.draft(1)?, self.draft(1)?);
            upkeep.push((learning - knowing).max(0.0) / (KEPT_WINDOWS * rows) as f64);
        }
        self.core.costs.set_drafts(median(chains), median(upkeep));
        Ok(())
    }

    /// The empty sequence, and one token.
    fn restart(&mut self) -> Result<(), ModelError> {
        self.core.model.load(SlotId(0), None)?;
        self.length = 0;
        self.step(1).map(|_| ())
    }

    /// Seconds of a step of so many rows as a stream makes it: with draws, and all rows kept.
    fn step(&mut self, rows: usize) -> Result<f64, ModelError> {
        let start = self.length;
        let row = |at: usize| Row { token: Some(0), position: [(start + at) as u32; 3] };
        let window = Window {
            slot: SlotId(0),
            start,
            rows: (0..rows).map(row).collect(),
            pages: vec![self.page],
            parents: None,
            commit: rows == 1,
            logits: if rows == 1 { Logits::Last } else { Logits::All },
        };
        let draws: Vec<Draw> = (0..rows).map(|row| self.draw(row)).collect();
        let all: Vec<usize> = (0..rows).collect();
        let before = self.core.clock.now();
        self.core.model.step(&[window])?;
        self.core.model.draw(&draws)?;
        if rows > 1 {
            self.core.model.keep(SlotId(0), &all)?;
        }
        self.length += rows;
        Ok(self.since(before))
    }

    /// Seconds of a draft of so many tokens.
    fn draft(&mut self, count: usize) -> Result<f64, ModelError> {
        let ask = DraftAsk {
            slot: SlotId(0),
            token: 0,
            start: self.length,
            rope_delta: 0,
            pages: vec![self.page],
            count,
            first_max: 1,
            confidence: 0.0,
            draw: self.draw(0),
        };
        let before = self.core.clock.now();
        self.core.model.draft(&[ask])?;
        Ok(self.since(before))
    }

    fn draw(&self, row: usize) -> Draw {
        let request = Request::new(vec![0], 1);
        draw(&request, 0, row, self.length + row + 1, self.core.settings.vocabulary, Vec::new(), None)
    }

    fn since(&self, before: Duration) -> f64 {
        self.core.clock.now().saturating_sub(before).as_secs_f64()
    }
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
