//! What the host knows of a slot: its length, the window that waits for [`crate::Model::keep`], and the rows
//! the MTP layer has not seen.
//!
//! With `n` committed tokens the MTP layer can have rows `0 .. n - 2`: row `n - 1` needs the token after it
//! and is *pending*. Rows whose next token became known in a draft window are *queued* and run together with
//! the next MTP forward of the slot, so that a round of drafting costs one forward for them and the pending
//! row together.

use device::Row;

use super::mtp::{Hidden, MtpRow, MtpWindow, Next};

/// The last committed row: its next token is not committed yet.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Pending {
    /// Hidden state after the final norm, `[H]`.
    pub(super) hidden: Vec<f64>,
    /// Its rotary position.
    pub(super) position: [u32; 3],
}

/// A window that was stepped without committing.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Open {
    pub(super) rows: Vec<Row>,
    pub(super) parents: Option<Vec<Option<u32>>>,
    pub(super) pages: Vec<u32>,
    /// Hidden states `[rows, H]`; empty without MTP.
    pub(super) hidden: Vec<f64>,
}

/// The state of a slot on the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Sequence {
    /// Committed tokens.
    pub(super) length: usize,
    pub(super) pending: Option<Pending>,
    /// Rows before the pending one that the MTP layer has not run.
    queue: Vec<MtpRow>,
    pub(super) open: Option<Open>,
    /// Pages at the last commit.
    pub(super) pages: Vec<u32>,
}

impl Sequence {
    /// A sequence of `length` tokens whose K/V the MTP layer has up to the pending row.
    pub(super) fn at(length: usize, pending: Option<Pending>) -> Self {
        Self { length, pending, ..Self::default() }
    }

    /// Queued rows.
    pub(super) fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Index of the first row the MTP layer has not run.
    fn first(&self) -> usize {
        self.length - usize::from(self.pending.is_some()) - self.queue.len()
    }

    /// Queued rows as a window, leaving none; `None` if there are none. The pending row stays.
    pub(super) fn take_queue(&mut self, slot: u32) -> Option<MtpWindow> {
        let start = self.first();
        let rows = std::mem::take(&mut self.queue);
        (!rows.is_empty()).then(|| MtpWindow { slot, start, rows, pages: self.pages.clone() })
    }

    /// Puts the rows of a window back, to run with the next ones. Nothing may have happened since it was
    /// taken.
    pub(super) fn put_back(&mut self, window: MtpWindow) {
        assert!(self.queue.is_empty(), "nothing was queued since");
        self.queue = window.rows;
    }

    /// Queued rows and the pending one, which `token` follows; `None` without a pending row. The queue is
    /// left empty; the pending row stays, for it runs again with the same input once the token is committed.
    pub(super) fn take_draft(&mut self, slot: u32, token: u32, pages: &[u32]) -> Option<MtpWindow> {
        let pending = self.pending.clone()?;
        let start = self.first();
        let mut rows = std::mem::take(&mut self.queue);
        rows.push(pending.followed_by(Next::Token(token)));
        Some(MtpWindow { slot, start, rows, pages: pages.to_vec() })
    }

    /// Commits the rows `path` of the open window, queueing what they settle for the MTP layer.
    pub(super) fn keep(&mut self, open: Open, path: &[usize], width: usize) {
        self.length += path.len();
        self.pages = open.pages;
        if open.hidden.is_empty() {
            return;
        }
        for &at in path {
            let row = open.rows[at];
            let hidden = open.hidden[at * width..(at + 1) * width].to_vec();
            if let (Some(before), Some(token)) =
                (self.pending.replace(Pending { hidden, position: row.position }), row.token)
            {
                self.queue.push(before.followed_by(Next::Token(token)));
            }
        }
    }

    /// Commits a whole window that was stepped as rows `first ..` of a forward: the MTP rows this settles,
    /// queued and pending ones first. `next(row)` is what row `row` of the window embeds; `last` becomes
    /// pending.
    pub(super) fn advance(
        &mut self,
        slot: u32,
        first: usize,
        rows: &[Row],
        pages: &[u32],
        next: impl Fn(usize) -> Next,
        last: Vec<f64>,
    ) -> MtpWindow {
        let start = self.first();
        let mut settled = std::mem::take(&mut self.queue);
        settled.extend(self.pending.take().map(|pending| pending.followed_by(next(0))));
        let inner = rows.iter().enumerate().skip(1).map(|(at, _)| MtpRow {
            next: next(at),
            hidden: Hidden::Device(first + at - 1),
            position: rows[at - 1].position,
        });
        settled.extend(inner);
        self.pending = rows.last().map(|row| Pending { hidden: last, position: row.position });
        self.length += rows.len();
        self.pages = pages.to_vec();
        MtpWindow { slot, start, rows: settled, pages: pages.to_vec() }
    }
}

impl Pending {
    fn followed_by(self, next: Next) -> MtpRow {
        MtpRow { next, hidden: Hidden::Host(self.hidden), position: self.position }
    }
}

/// Is `path` a way from the committed state through a window of `rows` rows, each row the child of the one
/// before?
pub(super) fn is_path(rows: usize, parents: Option<&[Option<u32>]>, path: &[usize]) -> bool {
    let parent = |row: usize| match parents {
        None => row.checked_sub(1),
        Some(parents) => parents[row].map(|parent| parent as usize),
    };
    path.iter()
        .enumerate()
        .all(|(at, &row)| row < rows && parent(row) == at.checked_sub(1).map(|before| path[before]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(token: u32) -> Row {
        Row { token: Some(token), position: [token; 3] }
    }

    fn open(tokens: &[u32]) -> Open {
        Open {
            rows: tokens.iter().map(|t| row(*t)).collect(),
            parents: None,
            pages: vec![7],
            hidden: tokens.iter().map(|t| f64::from(*t) / 10.0).collect(),
        }
    }

    /// Start, and per row the hidden state's position and the token after it.
    fn shape(window: &MtpWindow) -> (usize, Vec<(u32, u32)>) {
        let of = |row: &MtpRow| match row.next {
            Next::Token(token) => (row.position[0], token),
            Next::Image(_) => panic!("no images here"),
        };
        (window.start, window.rows.iter().map(of).collect())
    }

    #[test]
    fn every_row_meets_the_token_after_it_once() {
        let mut sequence = Sequence::default();
        let prompt = [row(10), row(11)];
        let window = sequence.advance(0, 0, &prompt, &[7], |at| Next::Token(10 + at as u32), vec![1.1]);
        assert_eq!(shape(&window), (0, vec![(10, 11)]));
        sequence.keep(open(&[12, 13, 14]), &[0, 1], 1);
        sequence.keep(open(&[15]), &[], 1);
        sequence.keep(open(&[14, 20]), &[0], 1);
        assert_eq!((sequence.length, sequence.queued()), (5, 3));
        let draft = sequence.take_draft(0, 30, &[7]).unwrap();
        assert_eq!(shape(&draft), (1, vec![(11, 12), (12, 13), (13, 14), (14, 30)]));
        sequence.keep(open(&[30]), &[0], 1);
        let queue = sequence.take_queue(0).unwrap();
        assert_eq!(shape(&queue), (4, vec![(14, 30)]));
        assert_eq!(sequence.take_queue(0), None);
        let window = sequence.advance(0, 0, &[row(31)], &[7], |_| Next::Token(31), vec![3.1]);
        assert_eq!(shape(&window), (5, vec![(30, 31)]));
        assert_eq!(sequence.length, 7);
    }

    #[test]
    fn paths_follow_parents() {
        let tree = [None, Some(0), Some(0), Some(2)];
        for (path, parents, expected) in [
            (vec![], None, true),
            (vec![0, 1], None, true),
            (vec![1], None, false),
            (vec![0, 1, 2, 3, 4], None, false),
            (vec![0, 2, 3], Some(&tree[..]), true),
            (vec![0, 1, 3], Some(&tree[..]), false),
            (vec![1], Some(&tree[..]), false),
        ] {
            assert_eq!(is_path(4, parents, &path), expected, "{path:?}");
        }
    }
}
