//! The MTP layer (`docs/model.md` section 8): one forward over rows of several sequences.
//!
//! Row `i` of a sequence joins the model's hidden state of position `i` with the embedding of token `i + 1`;
//! its K/V goes to place `i` of the same pages that the main model uses. The last row of a shared page
//! therefore depends on the token after the page: sequences that share it overwrite each other's, which only
//! drafts can notice.

use device::{Buffer, Device, Row, Step, Window};

use super::network::{Network, Result, is_all};
use super::scratch::MtpScratch;
use super::weights::Mtp;
use crate::ModelError;

/// The token after a row.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Next {
    /// A token of the table.
    Token(u32),
    /// An image row, as its embedding.
    Image(Vec<f64>),
    /// What a draw of the last [`Device::draw_later`] gave. All rows of a forward have one, or none has.
    Drawn(usize),
}

/// The hidden state of a row.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Hidden {
    /// A row of `scratch.mtp.kept`.
    Kept(usize),
    /// A row of the buffer given to the forward.
    Given(usize),
}

/// One row of an MTP forward.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MtpRow {
    pub(super) next: Next,
    pub(super) hidden: Hidden,
    /// Rotary position of the hidden state.
    pub(super) position: [u32; 3],
}

/// Consecutive rows of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MtpWindow {
    pub(super) slot: u32,
    /// Index of the first row.
    pub(super) start: usize,
    pub(super) rows: Vec<MtpRow>,
    pub(super) pages: Vec<u32>,
}

impl MtpWindow {
    /// Are all hidden states kept, so that the rows can run later?
    pub(super) fn can_wait(&self) -> bool {
        self.rows.iter().all(|row| matches!(row.hidden, Hidden::Kept(_)))
    }
}

impl Network {
    /// Runs the windows' rows only for their K/V, in as many forwards as `rows_max` asks for.
    pub(super) fn mtp_fill(
        &self,
        device: &mut dyn Device,
        windows: Vec<MtpWindow>,
        hidden: Buffer,
    ) -> std::result::Result<(), ModelError> {
        for batch in batches(windows, self.rows_max) {
            self.mtp_forward(device, &batch, hidden, &[])?;
        }
        Ok(())
    }

    /// One forward. Hidden states that are not kept are rows of `hidden`. The results of the rows `wanted` go
    /// to `scratch.mtp.drafted`, in that order, and their logits to `scratch.logits`.
    pub(super) fn mtp_forward(
        &self,
        device: &mut dyn Device,
        windows: &[MtpWindow],
        hidden: Buffer,
        wanted: &[usize],
    ) -> std::result::Result<(), ModelError> {
        let (Some(mtp), Some(scratch)) = (&self.weights.mtp, &self.scratch.mtp) else { return Ok(()) };
        if windows.is_empty() {
            return Ok(());
        }
        let step = step(windows)?;
        device.begin(&step)?;
        self.mtp_join(device, mtp, scratch, windows, hidden)?;
        let (s, eps, rows) = (&self.scratch, self.config.eps, step.rows().len());
        device.norm(s.x, rows, mtp.input_norm, eps, s.normed)?;
        if wanted.is_empty() {
            return Ok(self.append_only(device, &mtp.attention, rows)?);
        }
        self.attend(device, &mtp.attention, rows)?;
        // Beyond the K/V, only the wanted rows are worth work. `q` is free again and as wide as the heads.
        let count = wanted.len();
        let (heads, residual) = match is_all(wanted, rows) {
            true => (s.attention.attended, s.x),
            false => {
                device.gather(s.attention.attended, wanted, s.attention.q)?;
                device.gather(s.x, wanted, scratch.residual)?;
                (s.attention.q, scratch.residual)
            }
        };
        device.linear(heads, count, &[(mtp.attention.o, s.update)])?;
        device.add_norm(residual, s.update, count, mtp.post_norm, eps, s.normed)?;
        self.moe(device, &mtp.moe, count)?;
        device.add_norm(residual, s.update, count, mtp.norm, eps, scratch.drafted)?;
        device.linear(scratch.drafted, count, &[(mtp.head, s.logits)])?;
        Ok(())
    }

    /// `x = W_fc [N(e); N(h)]` of all rows.
    fn mtp_join(
        &self,
        device: &mut dyn Device,
        mtp: &Mtp,
        scratch: &MtpScratch,
        windows: &[MtpWindow],
        hidden: Buffer,
    ) -> Result {
        let rows: Vec<&MtpRow> = windows.iter().flat_map(|window| &window.rows).collect();
        let (s, eps, count) = (&self.scratch, self.config.eps, rows.len());
        let draw = |row: &&MtpRow| if let Next::Drawn(draw) = row.next { Some(draw) } else { None };
        let drawn: Vec<usize> = rows.iter().filter_map(draw).collect();
        match drawn.is_empty() {
            true => device.embed(mtp.table, scratch.embedding)?,
            false => device.embed_drawn(mtp.table, &drawn, scratch.embedding)?,
        }
        let (mut kept, mut given) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
        for (at, row) in rows.iter().enumerate() {
            if let Next::Image(values) = &row.next {
                device.write(scratch.embedding, at, values)?;
            }
            let (rows, from) = match row.hidden {
                Hidden::Kept(from) => (&mut kept, from),
                Hidden::Given(from) => (&mut given, from),
            };
            rows.0.push(from);
            rows.1.push(at);
        }
        for (source, (from, to)) in [(scratch.kept, kept), (hidden, given)] {
            if !from.is_empty() {
                device.copy_rows(source, &from, scratch.hidden, &to)?;
            }
        }
        device.norm(scratch.embedding, count, mtp.embedding_norm, eps, s.normed)?;
        device.norm(scratch.hidden, count, mtp.hidden_norm, eps, s.update)?;
        device.join(s.normed, s.update, count, scratch.joined)?;
        device.linear(scratch.joined, count, &[(mtp.fc, s.x)])
    }
}

/// The device's view of the windows. They commit: no layer of this forward has states to hold back.
fn step(windows: &[MtpWindow]) -> std::result::Result<Step, ModelError> {
    let (mut rows, mut list) = (Vec::new(), Vec::new());
    for window in windows {
        let first = rows.len();
        rows.extend(window.rows.iter().map(|row| Row {
            token: match row.next {
                Next::Token(id) => Some(id),
                Next::Image(_) | Next::Drawn(_) => None,
            },
            position: row.position,
        }));
        list.push(Window {
            place: window.slot,
            first,
            rows: window.rows.len(),
            start: window.start,
            pages: window.pages.clone(),
            parents: None,
            commit: true,
        });
    }
    Ok(Step::new(rows, list)?)
}

/// Packs windows into forwards of at most `rows_max` rows, cutting those that do not fit.
fn batches(windows: Vec<MtpWindow>, rows_max: usize) -> Vec<Vec<MtpWindow>> {
    let mut batches = Vec::new();
    let (mut batch, mut room): (Vec<MtpWindow>, usize) = (Vec::new(), rows_max);
    for mut window in windows {
        while !window.rows.is_empty() {
            let rest = window.rows.split_off(window.rows.len().min(room));
            let (start, rows) = (window.start, std::mem::replace(&mut window.rows, rest));
            window.start += rows.len();
            room -= rows.len();
            batch.push(MtpWindow { slot: window.slot, start, rows, pages: window.pages.clone() });
            if room == 0 {
                batches.push(std::mem::take(&mut batch));
                room = rows_max;
            }
        }
    }
    if !batch.is_empty() {
        batches.push(batch);
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(slot: u32, start: usize, rows: usize) -> MtpWindow {
        let row = |i: usize| MtpRow {
            next: Next::Token(i as u32),
            hidden: Hidden::Given(i),
            position: [(start + i) as u32; 3],
        };
        MtpWindow { slot, start, rows: (0..rows).map(row).collect(), pages: vec![0] }
    }

    #[test]
    fn windows_are_cut_at_the_row_limit() {
        let packed = batches(vec![window(0, 0, 3), window(1, 5, 7), window(2, 9, 0)], 4);
        let shape: Vec<Vec<_>> = packed
            .iter()
            .map(|batch| batch.iter().map(|w| (w.slot, w.start, w.rows.len())).collect())
            .collect();
        assert_eq!(shape, [vec![(0, 0, 3), (1, 5, 1)], vec![(1, 6, 4)], vec![(1, 10, 2)]]);
        assert_eq!(packed[2][0].rows[0].position, [10; 3]);
    }
}
