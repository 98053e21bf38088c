//! What the host knows of a slot: its length, the window that waits for [`crate::Model::keep`], and the rows
//! the MTP layer has not seen.
//!
//! With `n` committed tokens the MTP layer can have rows `0 .. n - 2`: row `n - 1` needs the token after it
//! and is *pending*. Rows whose next token became known in a draft window are *queued* and run together with
//! the next MTP forward of the slot, so that a round of drafting costs one forward for them and the pending
//! row together.
//!
//! Their hidden states stay on the device, in a ring of [`KEPT_ROWS`] places per slot: queued rows in order,
//! the pending one, then those of the open window.
//!
//! Where no drafts are expected, queued rows are not run but forgotten, whole pages of them at a time. The
//! MTP layer then knows the sequence from a later page on (`base` pages are skipped), as if it began there
//! with the rotary positions it has: what stands in the skipped pages is never read, and pages shared with
//! others stay theirs.

use device::{PAGE_TOKENS, Row, WINDOW_ROWS_MAX};

use super::mtp::{Hidden, MtpRow, MtpWindow, Next};

/// Queued rows at which a slot's MTP layer is brought up to date even if nobody asks for drafts.
pub(super) const QUEUE_ROWS: usize = 64;

/// Hidden states kept per slot: fewer than [`QUEUE_ROWS`] queued ones, the pending one and an open window.
pub(super) const KEPT_ROWS: usize = QUEUE_ROWS + WINDOW_ROWS_MAX;

/// A window that was stepped without committing.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Open {
    pub(super) rows: Vec<Row>,
    /// What each row embeds.
    pub(super) embeds: Vec<Next>,
    pub(super) parents: Option<Vec<Option<u32>>>,
    pub(super) pages: Vec<u32>,
}

/// The state of a slot on the host.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sequence {
    slot: u32,
    /// Committed tokens.
    pub(super) length: usize,
    /// Rotary position of the last committed row, whose next token is not committed yet.
    pub(super) pending: Option<[u32; 3]>,
    /// Hidden states of committed rows kept so far; the last is that of the pending row.
    kept: usize,
    /// Rows before the pending one that the MTP layer has not run.
    queue: Vec<MtpRow>,
    pub(super) open: Option<Open>,
    /// Pages at the last commit.
    pub(super) pages: Vec<u32>,
    /// Leading pages that the MTP layer does not know.
    pub(super) base: usize,
    /// Whether drafts may be asked for, so that the MTP layer is to know the sequence.
    pub(super) expects_drafts: bool,
}

impl Sequence {
    /// The empty sequence of a slot.
    pub(super) fn new(slot: u32) -> Self {
        Self::at(slot, 0, None, 0)
    }

    /// A sequence of `length` tokens whose K/V the MTP layer has from page `base` on, up to the pending row.
    pub(super) fn at(slot: u32, length: usize, pending: Option<[u32; 3]>, base: usize) -> Self {
        let kept = usize::from(pending.is_some());
        Self {
            slot,
            length,
            pending,
            kept,
            queue: Vec::new(),
            open: None,
            pages: Vec::new(),
            base,
            expects_drafts: true,
        }
    }

    /// Rows from index `start` on as the MTP layer sees them: in the pages it knows.
    pub(super) fn mtp_window(&self, start: usize, rows: Vec<MtpRow>, pages: &[u32]) -> MtpWindow {
        let (start, pages) = (start - self.base * PAGE_TOKENS, pages[self.base..].to_vec());
        MtpWindow { slot: self.slot, start, rows, pages }
    }

    /// Forgets those of `rows` (they end before the pending row) that lie in pages before its own, and all
    /// pages before that one.
    fn forget(&mut self, rows: &mut Vec<MtpRow>) {
        let pending = self.length - usize::from(self.pending.is_some());
        let page = pending / PAGE_TOKENS;
        let first = pending - rows.len();
        if first < page * PAGE_TOKENS {
            rows.drain(..page * PAGE_TOKENS - first);
            self.base = page;
        }
    }

    /// Forgets what [`Self::forget`] does of the queue, where no drafts are expected.
    pub(super) fn forget_queued(&mut self) {
        if !self.expects_drafts {
            let mut queue = std::mem::take(&mut self.queue);
            self.forget(&mut queue);
            self.queue = queue;
        }
    }

    /// Row of `scratch.mtp.kept` for the hidden state of row `at` of the window that comes next or is open;
    /// of a window that commits at once only the last row is kept, as the first.
    pub(super) fn next_place(&self, at: usize) -> usize {
        self.place(self.kept + at)
    }

    /// Row of `scratch.mtp.kept` with the pending row's hidden state.
    pub(super) fn pending_place(&self) -> Option<usize> {
        self.pending.map(|_| self.place(self.kept - 1))
    }

    fn place(&self, kept: usize) -> usize {
        self.slot as usize * KEPT_ROWS + kept % KEPT_ROWS
    }

    /// The pending row with the token after it, no longer pending.
    fn settle(&mut self, next: Next) -> Option<MtpRow> {
        let hidden = Hidden::Kept(self.pending_place()?);
        self.pending.take().map(|position| MtpRow { next, hidden, position })
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
    pub(super) fn take_queue(&mut self) -> Option<MtpWindow> {
        let start = self.first();
        let rows = std::mem::take(&mut self.queue);
        (!rows.is_empty()).then(|| self.mtp_window(start, rows, &self.pages))
    }

    /// Puts the rows of a window back, to run with the next ones. Nothing may have happened since it was
    /// taken.
    pub(super) fn put_back(&mut self, window: MtpWindow) {
        assert!(self.queue.is_empty(), "nothing was queued since");
        self.queue = window.rows;
    }

    /// Queued rows and the pending one, which `token` follows; `None` without a pending row. The queue is
    /// left empty; the pending row stays, for it runs again with the same input once the token is committed.
    pub(super) fn take_draft(&mut self, token: u32, pages: &[u32]) -> Option<MtpWindow> {
        let (position, hidden) = (self.pending?, Hidden::Kept(self.pending_place()?));
        let start = self.first();
        let mut rows = std::mem::take(&mut self.queue);
        rows.push(MtpRow { next: Next::Token(token), hidden, position });
        Some(self.mtp_window(start, rows, pages))
    }

    /// Commits the rows `path` of the open window, whose kept hidden states stand at its first places,
    /// queueing what they settle for the MTP layer if there is one.
    pub(super) fn keep(&mut self, open: Open, path: &[usize], mtp: bool) {
        self.length += path.len();
        self.pages = open.pages;
        if !mtp {
            return;
        }
        for &at in path {
            let settled = self.settle(open.embeds[at].clone());
            self.queue.extend(settled);
            self.pending = Some(open.rows[at].position);
            self.kept += 1;
        }
    }

    /// Commits a whole window that was stepped as rows `first ..` of a forward: the MTP rows this settles and
    /// that are not forgotten, queued and pending ones first. `next(row)` is what row `row` of the window
    /// embeds; its last row becomes pending.
    pub(super) fn advance(
        &mut self,
        first: usize,
        rows: &[Row],
        pages: &[u32],
        next: impl Fn(usize) -> Next,
    ) -> MtpWindow {
        let mut settled = std::mem::take(&mut self.queue);
        settled.extend(self.settle(next(0)));
        let inner = rows.iter().enumerate().skip(1).map(|(at, _)| MtpRow {
            next: next(at),
            hidden: Hidden::Given(first + at - 1),
            position: rows[at - 1].position,
        });
        settled.extend(inner);
        self.pending = rows.last().map(|row| row.position);
        self.kept += 1;
        self.length += rows.len();
        self.pages = pages.to_vec();
        if !self.expects_drafts {
            self.forget(&mut settled);
        }
        let start = self.length - 1 - settled.len();
        self.mtp_window(start, settled, pages)
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
        let embeds = tokens.iter().map(|t| Next::Token(*t)).collect();
        Open { rows: tokens.iter().map(|t| row(*t)).collect(), embeds, parents: None, pages: vec![7] }
    }

    /// Start, and per row the hidden state's position and the token after it.
    fn shape(window: &MtpWindow) -> (usize, Vec<(u32, u32)>) {
        let of = |row: &MtpRow| match row.next {
            Next::Token(token) => (row.position[0], token),
            Next::Image(_) | Next::Drawn(_) => panic!("tokens alone here"),
        };
        (window.start, window.rows.iter().map(of).collect())
    }

    #[test]
    fn every_row_meets_the_token_after_it_once() {
        let mut sequence = Sequence::new(0);
        let prompt = [row(10), row(11)];
        let window = sequence.advance(0, &prompt, &[7], |at| Next::Token(10 + at as u32));
        assert_eq!(shape(&window), (0, vec![(10, 11)]));
        sequence.keep(open(&[12, 13, 14]), &[0, 1], true);
        sequence.keep(open(&[15]), &[], true);
        sequence.keep(open(&[14, 20]), &[0], true);
        assert_eq!((sequence.length, sequence.queued()), (5, 3));
        let draft = sequence.take_draft(30, &[7]).unwrap();
        assert_eq!(shape(&draft), (1, vec![(11, 12), (12, 13), (13, 14), (14, 30)]));
        sequence.keep(open(&[30]), &[0], true);
        let queue = sequence.take_queue().unwrap();
        assert_eq!(shape(&queue), (4, vec![(14, 30)]));
        assert_eq!(sequence.take_queue(), None);
        let window = sequence.advance(0, &[row(31)], &[7], |_| Next::Token(31));
        assert_eq!(shape(&window), (5, vec![(30, 31)]));
        assert_eq!(sequence.length, 7);
    }

    /// Rows of whole pages are forgotten, the rest waits, and drafts see pages from there on.
    #[test]
    fn rows_nobody_expects_drafts_of_are_forgotten_by_pages() {
        let mut sequence = Sequence::new(0);
        sequence.expects_drafts = false;
        let pages = [5, 6, 7];
        let prompt: Vec<Row> = (0..70).map(row).collect();
        // Row 69 is pending: of the others, 64 to 68 share its page.
        let window = sequence.advance(0, &prompt, &pages, |at| Next::Token(at as u32));
        assert_eq!(shape(&window), (0, (64..69).map(|at| (at, at + 1)).collect()));
        assert_eq!((window.pages.as_slice(), sequence.base), (&[6, 7][..], 1));
        for token in 70..140 {
            let window = sequence.advance(0, &[row(token)], &pages, |_| Next::Token(token));
            assert!(window.rows.len() < QUEUE_ROWS, "{} rows wait", window.rows.len());
            sequence.put_back(window);
        }
        assert_eq!((sequence.base, sequence.queued()), (2, 11));
        let draft = sequence.take_draft(140, &pages).unwrap();
        assert_eq!(shape(&draft), (0, (128..140).map(|at| (at, at + 1)).collect()));
        assert_eq!(draft.pages, [7]);
        sequence.keep(Open { pages: pages.to_vec(), ..open(&[140, 141]) }, &[0, 1], true);
        sequence.forget_queued();
        assert_eq!((sequence.base, sequence.queued()), (2, 2), "rows of the pending one's page stay");
        sequence.expects_drafts = true;
        let window = sequence.advance(0, &[row(142)], &pages, |_| Next::Token(142));
        assert_eq!(shape(&window), (11, vec![(139, 140), (140, 141), (141, 142)]));
    }

    /// An image row in an uncommitted window settles the row before it like any other.
    #[test]
    fn image_rows_of_a_kept_window_are_not_passed_over() {
        let mut sequence = Sequence::new(0);
        sequence.advance(0, &[row(10)], &[7], |_| Next::Token(10));
        let mut open = open(&[11, 12, 13]);
        open.rows[1].token = None;
        open.embeds[1] = Next::Image(vec![0.5]);
        sequence.keep(open, &[0, 1, 2], true);
        let queue = sequence.take_queue().unwrap();
        let nexts: Vec<Next> = queue.rows.into_iter().map(|row| row.next).collect();
        assert_eq!(queue.start, 0);
        assert_eq!(nexts, [Next::Token(11), Next::Image(vec![0.5]), Next::Token(13)]);
    }

    /// No hidden state that is still wanted shares its place with another, however the ring has turned.
    #[test]
    fn kept_hidden_states_stand_apart() {
        let mut sequence = Sequence::new(3);
        let tokens: Vec<u32> = (0..WINDOW_ROWS_MAX as u32).collect();
        for round in 0..40 {
            let window = sequence.advance(0, &[row(1)], &[7], |_| Next::Token(1));
            sequence.put_back(window);
            let queued = sequence.queue.iter().map(|row| match row.hidden {
                Hidden::Kept(place) => place,
                Hidden::Given(row) => panic!("row {row} of a window of one"),
            });
            let mut places: Vec<usize> = queued.collect();
            places.extend(sequence.pending_place());
            places.extend((0..tokens.len()).map(|at| sequence.next_place(at)));
            assert!(places.iter().all(|place| place / KEPT_ROWS == 3), "round {round}: {places:?}");
            let count = places.len();
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), count, "round {round}");
            let path: Vec<usize> = (0..1 + round % tokens.len()).collect();
            sequence.keep(open(&tokens), &path, true);
            if sequence.queued() >= QUEUE_ROWS {
                sequence.take_queue();
            }
        }
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
