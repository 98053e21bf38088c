//! Teacher-forced logits of a whole text, for evaluation.

use device::{PAGE_TOKENS, Row};

use super::network::Probe;
use super::qwen::Qwen;
use super::windows::limit;
use crate::{Logits, Model, ModelError, SlotId, Window};

/// Logits of consecutive rows of a text.
#[derive(Clone, Copy, Debug)]
pub struct Scored<'a> {
    /// First row.
    pub first: usize,
    /// `[rows, vocabulary]`; row `i` of the text scores token `i + 1`.
    pub logits: &'a [f32],
    /// First row of `mtp_logits`.
    pub mtp_first: usize,
    /// `[rows, vocabulary]` of the MTP layer fed with the text's own tokens; row `i` scores token `i + 2`.
    /// The last row of a text has none. Empty unless asked for.
    pub mtp_logits: &'a [f32],
}

/// Rows of plain text: the three positions count tokens.
pub fn text_rows(ids: &[u32]) -> Vec<Row> {
    let row = |(at, id): (usize, &u32)| Row { token: Some(*id), position: [at as u32; 3] };
    ids.iter().enumerate().map(row).collect()
}

impl Qwen {
    /// Scores every row of a text, `chunk` rows at a time. `embeds` are the embedding rows of image rows,
    /// which have no token. Uses slot 0, which it clears first and leaves with the text in it, and the first
    /// pages: nothing else may be using them.
    pub fn score(
        &mut self,
        rows: &[Row],
        embeds: &[(usize, Vec<f64>)],
        chunk: usize,
        mtp: bool,
        probe: &mut dyn Probe,
        sink: &mut dyn FnMut(Scored<'_>),
    ) -> Result<(), ModelError> {
        let settings = &self.settings;
        let most = settings.logits_rows_max.min(settings.rows_max);
        if !(1..=most).contains(&chunk) {
            return Err(limit("rows of a chunk", chunk, format!("1 to {most}")));
        }
        let slot = SlotId(0);
        self.load(slot, None)?;
        let pages: Vec<u32> = (0..rows.len().div_ceil(PAGE_TOKENS) as u32).collect();
        for (at, part) in rows.chunks(chunk).enumerate() {
            let start = at * chunk;
            let window = Window {
                slot,
                start,
                rows: part.to_vec(),
                pages: pages.clone(),
                parents: None,
                commit: true,
                logits: Logits::All,
            };
            let here = embeds.iter().filter(|(row, _)| (start..start + part.len()).contains(row));
            let here: Vec<_> = here.map(|(row, values)| (row - start, values.clone())).collect();
            self.score_chunk(&window, &here, mtp, probe, sink)?;
        }
        Ok(())
    }

    fn score_chunk(
        &mut self,
        window: &Window,
        embeds: &[(usize, Vec<f64>)],
        mtp: bool,
        probe: &mut dyn Probe,
        sink: &mut dyn FnMut(Scored<'_>),
    ) -> Result<(), ModelError> {
        let settled = self.run(std::slice::from_ref(window), embeds, probe)?;
        let logits = self.read_rows(window.rows.len())?;
        let hidden = self.network.scratch.hidden;
        let (mut mtp_first, mut mtp_logits) = (window.start, Vec::new());
        let drafted = self.network.scratch.mtp.as_ref().map(|scratch| scratch.drafted);
        match (drafted, settled.first().filter(|window| mtp && !window.rows.is_empty())) {
            // Nothing is ever queued here, so all settled rows fit one forward.
            (Some(drafted), Some(rows)) => {
                mtp_first = rows.start;
                let count = rows.rows.len();
                let wanted: Vec<usize> = (0..count).collect();
                self.network.mtp_forward(&mut *self.device, &settled, hidden, &wanted)?;
                probe.after_mtp(&mut *self.device, drafted, self.network.scratch.logits, count)?;
                mtp_logits = self.read_rows(count)?;
                // The logits buffer no longer holds the step's.
                self.logits_rows = 0;
            }
            _ => self.network.mtp_fill(&mut *self.device, settled, hidden)?,
        }
        sink(Scored { first: window.start, logits: &logits, mtp_first, mtp_logits: &mtp_logits });
        Ok(())
    }

    /// The first rows of the logits buffer.
    fn read_rows(&mut self, rows: usize) -> Result<Vec<f32>, ModelError> {
        let mut values = vec![0.0; rows * self.network.config.vocabulary];
        self.device.read(self.network.scratch.logits, 0, &mut values)?;
        Ok(values)
    }
}
