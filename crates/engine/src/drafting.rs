//! Drafts of one sequence: copies from its own history, and the window that verifies them.
//!
//! Drafters propose and never decide: the target draws every row of the window with its own key, and a draft
//! is real if and only if it equals that draw.

use std::collections::HashMap;

use crate::mask::{Allowed, Mask};

/// Tokens that must agree before a copy is proposed.
const COPY_CONTEXT: usize = 3;

/// Finds where the last tokens of a sequence occurred before.
#[derive(Clone, Debug, Default)]
pub(crate) struct CopyIndex {
    /// Last [`COPY_CONTEXT`] tokens to the index of the token that followed them last time.
    follows: HashMap<[u32; COPY_CONTEXT], u32>,
    /// Tokens that are in the index.
    indexed: usize,
}

impl CopyIndex {
    /// What followed the sequence's last tokens when they occurred last, at most `count` tokens.
    pub(crate) fn propose<'a>(&mut self, tokens: &'a [u32], count: usize) -> &'a [u32] {
        for at in self.indexed.max(COPY_CONTEXT)..tokens.len() {
            self.follows.insert(context(tokens, at), at as u32);
        }
        self.indexed = tokens.len();
        if tokens.len() < COPY_CONTEXT {
            return &[];
        }
        match self.follows.get(&context(tokens, tokens.len())) {
            None => &[],
            Some(&at) => &tokens[at as usize..tokens.len().min(at as usize + count)],
        }
    }
}

fn context(tokens: &[u32], end: usize) -> [u32; COPY_CONTEXT] {
    tokens[end - COPY_CONTEXT..end].try_into().expect("a slice of that length")
}

/// Tokens allowed after a row.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RowMask {
    All,
    Bits(Vec<u32>),
}

impl RowMask {
    /// What `mask` allows where it stands; `None` where it allows nothing.
    pub(crate) fn of(mask: Option<&mut (dyn Mask + 'static)>, vocabulary: usize) -> Option<Self> {
        let Some(mask) = mask else { return Some(Self::All) };
        let mut bits = vec![0u32; vocabulary.div_ceil(32)];
        let allowed = mask.allowed(&mut bits);
        if let (Some(last), 1..) = (bits.last_mut(), vocabulary % 32) {
            *last &= (1 << (vocabulary % 32)) - 1;
        }
        match allowed {
            Allowed::All => Some(Self::All),
            Allowed::None => None,
            Allowed::Some if bits.iter().all(|&word| word == 0) => None,
            Allowed::Some => Some(Self::Bits(bits)),
        }
    }

    fn allows(&self, token: u32) -> bool {
        match self {
            Self::All => true,
            Self::Bits(bits) => {
                bits.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
            }
        }
    }

    pub(crate) fn bits(self) -> Option<Vec<u32>> {
        match self {
            Self::All => None,
            Self::Bits(bits) => Some(bits),
        }
    }
}

/// The rows of a decode window: the last drawn token, then drafts, each behind its parent. Chains that begin
/// alike share rows.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    tokens: Vec<u32>,
    parents: Vec<Option<usize>>,
    masks: Vec<RowMask>,
    rows_max: usize,
    vocabulary: usize,
}

impl Tree {
    /// A window of the last token alone; `mask` is what may follow it.
    pub(crate) fn new(last: u32, mask: RowMask, rows_max: usize, vocabulary: usize) -> Self {
        Self { tokens: vec![last], parents: vec![None], masks: vec![mask], rows_max, vocabulary }
    }

    /// Adds a chain that follows the last token, as far as rows and constraint allow.
    pub(crate) fn add(&mut self, chain: &[u32], mut mask: Option<&mut (dyn Mask + 'static)>) {
        let mut row = 0;
        let mut steps = 0;
        for &token in chain {
            if !self.masks[row].allows(token) || token as usize >= self.vocabulary {
                break;
            }
            let known = self.child(row, token);
            if known.is_none() && self.tokens.len() >= self.rows_max {
                break;
            }
            if let Some(mask) = mask.as_deref_mut() {
                mask.advance(token);
                steps += 1;
            }
            row = match known {
                Some(child) => child,
                None => {
                    // A row after which nothing may come cannot be drawn from: it is left to the plain step.
                    let Some(allowed) = RowMask::of(mask.as_deref_mut(), self.vocabulary) else { break };
                    self.tokens.push(token);
                    self.parents.push(Some(row));
                    self.masks.push(allowed);
                    self.tokens.len() - 1
                }
            };
        }
        if let Some(mask) = mask {
            mask.rollback(steps);
        }
    }

    pub(crate) fn rows(&self) -> usize {
        self.tokens.len()
    }

    pub(crate) fn token(&self, row: usize) -> u32 {
        self.tokens[row]
    }

    pub(crate) fn take_mask(&mut self, row: usize) -> RowMask {
        std::mem::replace(&mut self.masks[row], RowMask::All)
    }

    /// The row that drafted `token` after `row`.
    pub(crate) fn child(&self, row: usize, token: u32) -> Option<usize> {
        (row + 1..self.rows()).find(|&r| self.parents[r] == Some(row) && self.tokens[r] == token)
    }

    /// Drafted tokens from the root to `row`, the root's own excluded.
    pub(crate) fn drafts_to(&self, row: usize) -> Vec<u32> {
        let mut drafts = Vec::new();
        let mut row = row;
        while let Some(parent) = self.parents[row] {
            drafts.push(self.tokens[row]);
            row = parent;
        }
        drafts.reverse();
        drafts
    }

    /// Parents as a window gives them: `None` for a chain.
    pub(crate) fn window_parents(&self) -> Option<Vec<Option<u32>>> {
        let chain = self.parents.iter().enumerate().all(|(row, &parent)| parent == row.checked_sub(1));
        (!chain).then(|| self.parents.iter().map(|parent| parent.map(|p| p as u32)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_copy(tokens: &[u32], count: usize, expected: &[u32]) {
        assert_eq!(CopyIndex::default().propose(tokens, count), expected, "{tokens:?}");
        let mut grown = CopyIndex::default();
        for end in 0..tokens.len() {
            grown.propose(&tokens[..end], count);
        }
        assert_eq!(grown.propose(tokens, count), expected, "{tokens:?}, token after token");
    }

    #[test]
    fn copies_what_followed_last_time() {
        check_copy(&[1, 2], 4, &[]);
        check_copy(&[1, 2, 3, 4], 4, &[]);
        check_copy(&[1, 2, 3, 4, 5, 1, 2, 3], 2, &[4, 5]);
        check_copy(&[1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 2, &[5, 1]);
        check_copy(&[7, 7, 7, 7], 3, &[7]);
    }

    #[test]
    fn chains_that_begin_alike_share_rows() {
        let mut tree = Tree::new(9, RowMask::All, 6, 100);
        tree.add(&[1, 2, 3], None);
        assert_eq!(tree.window_parents(), None);
        tree.add(&[1, 4], None);
        tree.add(&[5, 6], None);
        assert_eq!(tree.tokens, [9, 1, 2, 3, 4, 5], "cut at six rows");
        assert_eq!(tree.window_parents(), Some(vec![None, Some(0), Some(1), Some(2), Some(1), Some(0)]));
        assert_eq!((tree.child(1, 4), tree.child(0, 4)), (Some(4), None));
        assert_eq!(tree.drafts_to(4), [1, 4]);
    }

    /// Allows `token + 1` after each token, nothing after 5.
    struct Count(Vec<u32>);

    impl Mask for Count {
        fn allowed(&mut self, bits: &mut [u32]) -> Allowed {
            let last = self.0.last().copied().unwrap_or(0);
            if last >= 5 {
                return Allowed::None;
            }
            bits[0] = 1 << (last + 1);
            Allowed::Some
        }

        fn advance(&mut self, token: u32) {
            self.0.push(token);
        }

        fn rollback(&mut self, count: usize) {
            self.0.truncate(self.0.len() - count);
        }

        fn fork(&self) -> Box<dyn Mask> {
            Box::new(Self(self.0.clone()))
        }
    }

    #[test]
    fn drafts_the_constraint_forbids_are_not_verified() {
        let mut mask = Count(vec![1]);
        let allowed = RowMask::of(Some(&mut mask), 32).expect("2 may follow");
        let mut tree = Tree::new(1, allowed, 16, 32);
        tree.add(&[2, 4, 5], Some(&mut mask));
        tree.add(&[2, 3, 4, 5], Some(&mut mask));
        assert_eq!(tree.tokens, [1, 2, 3, 4], "no row for 5: nothing may follow it");
        assert_eq!(mask.0, [1]);
        assert_eq!(tree.take_mask(3).bits(), Some(vec![1 << 5]));
    }
}
