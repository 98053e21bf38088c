//! E7: rows that run together, committed or not, in chains or trees, equal one-row steps.

use model::{ModelError, SnapshotId};

use crate::lane::Random;
use crate::{Contract, Outcome, Runner, Tally};

/// Most rows of a window here.
const ROWS_MAX: usize = 17;
/// State comparisons use this snapshot, trees go back to the other.
const SCRATCH: SnapshotId = SnapshotId(0);
const FORK: SnapshotId = SnapshotId(1);

/// Uncommitted chains of 1 to 17 rows, wrong from some row on, of which all, some or none are kept.
pub fn windows(runner: &mut Runner<'_>, text: &[u32]) -> Result<Outcome, ModelError> {
    let mut tally = Tally::default();
    let vocabulary = runner.spec().vocabulary;
    let mut lanes = runner.lanes()?;
    let expected = runner.feed(&mut lanes[0], text, 1)?;
    let plain = runner.state(&lanes[0], SCRATCH)?;
    let lane = &mut lanes[1];
    let mut random = Random(7);
    for round in 0.. {
        let start = lane.length;
        let rows = (1 + round % ROWS_MAX).min(text.len() - start);
        if rows == 0 {
            break;
        }
        let right = if random.below(3) == 0 { rows } else { random.below(rows + 1) };
        let mut ids = text[start..start + rows].to_vec();
        for id in &mut ids[right..] {
            *id = ((*id as usize + 1 + random.below(vocabulary - 1)) % vocabulary) as u32;
        }
        let found = runner.run(&[lane.window(&ids, None)])?;
        let what = || format!("window of {rows} rows at {start}");
        tally.rows(&found[..right], &expected[start..start + right], start, what);
        let kept = if random.below(2) == 0 { right } else { random.below(right + 1) };
        runner.keep(lane, &(0..kept).collect::<Vec<_>>())?;
    }
    let (state, pages) = runner.state(lane, SCRATCH)?;
    tally.same(&state, &plain.0, || "the state after all windows differs".into());
    tally.same(&pages, &plain.1, || "a page differs after all windows".into());
    Ok(tally.outcome(Contract::Windows, "chains of 1 to 17, parts kept"))
}

/// A random tree over random tokens, one of its paths being the text's own tokens.
struct Tree {
    ids: Vec<u32>,
    parents: Vec<Option<u32>>,
    /// The path that holds the text's tokens.
    right: Vec<usize>,
}

impl Tree {
    fn new(random: &mut Random, text: &[u32], vocabulary: usize) -> Self {
        let rows = 2 + random.below(ROWS_MAX - 1);
        let parent = |row: usize, random: &mut Random| match random.below(6) {
            _ if row == 0 => None,
            0 => None,
            1 | 2 => Some(random.below(row) as u32),
            _ => Some(row as u32 - 1),
        };
        let parents: Vec<_> = (0..rows).map(|row| parent(row, random)).collect();
        let mut ids: Vec<u32> = (0..rows).map(|_| random.below(vocabulary) as u32).collect();
        let mut right = path(&parents, random.below(rows));
        right.truncate(text.len());
        for (&row, &id) in right.iter().zip(text) {
            ids[row] = id;
        }
        Self { ids, parents, right }
    }

    /// Rows without children.
    fn leaves(&self) -> impl Iterator<Item = usize> {
        (0..self.ids.len()).filter(|row| !self.parents.contains(&Some(*row as u32)))
    }
}

/// Rows from the root to `row`.
fn path(parents: &[Option<u32>], row: usize) -> Vec<usize> {
    let mut path: Vec<usize> =
        std::iter::successors(Some(row), |row| parents[*row].map(|parent| parent as usize)).collect();
    path.reverse();
    path
}

/// Random trees of 2 to 17 rows along the text: every row equals one-row steps along its path, and so does
/// everything after a path is kept.
pub fn trees(runner: &mut Runner<'_>, text: &[u32]) -> Result<Outcome, ModelError> {
    let mut tally = Tally::default();
    let vocabulary = runner.spec().vocabulary;
    let mut lanes = runner.lanes()?;
    let (plain, rest) = lanes.split_at_mut(1);
    let (plain, lane) = (&mut plain[0], &mut rest[0]);
    let mut random = Random(11);
    loop {
        let start = lane.length;
        if start == text.len() {
            break;
        }
        let tree = Tree::new(&mut random, &text[start..], vocabulary);
        let found = runner.run(&[lane.window(&tree.ids, Some(&tree.parents))])?;
        runner.model.save(plain.slot, FORK)?;
        for leaf in tree.leaves() {
            let path = path(&tree.parents, leaf);
            let ids: Vec<u32> = path.iter().map(|row| tree.ids[*row]).collect();
            let expected = runner.feed(plain, &ids, 1)?;
            let rows: Vec<_> = path.iter().map(|row| found[*row]).collect();
            tally.rows(&rows, &expected, start, || {
                format!("tree of {} rows at {start}, path {path:?}", found.len())
            });
            runner.model.load(plain.slot, Some(FORK))?;
            plain.length = start;
        }
        let kept = &tree.right[..random.below(tree.right.len() + 1)];
        runner.keep(lane, kept)?;
        runner.feed(plain, &text[start..start + kept.len()], 1)?;
        // The way to the next tree, long enough to see every block and the end of a span within a few dozen
        // trees.
        let chunk = 1 + random.below(24);
        let next = &text[lane.length..text.len().min(lane.length + chunk)];
        let expected = runner.feed(plain, next, 1)?;
        let found = runner.feed(lane, next, chunk)?;
        tally.rows(&found, &expected, start + kept.len(), || {
            format!("after keeping {kept:?} of the tree at {start}")
        });
    }
    let (state, pages) = runner.state(lane, SCRATCH)?;
    let expected = runner.state(plain, SCRATCH)?;
    tally.same(&state, &expected.0, || "the state after all trees differs".into());
    tally.same(&pages, &expected.1, || "a page differs after all trees".into());
    Ok(tally.outcome(Contract::Windows, "random trees of 2 to 17"))
}
