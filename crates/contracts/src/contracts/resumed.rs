//! E3: a sequence taken up from a kept state equals one that was never left.

use model::{ModelError, PAGE_TOKENS, SnapshotId};

use crate::{Contract, Lane, Outcome, RowBits, Runner, Tally};

/// Positions up to here are all resumed from, later ones around the ends of blocks only.
const DENSE: usize = 2 * PAGE_TOKENS + 2;

/// Positions to keep of a text: every one at first, then around every end of a block.
fn kept(tokens: usize) -> Vec<usize> {
    let near = |at: &usize| *at <= DENSE || (at + 1) % PAGE_TOKENS <= 2;
    (1..tokens).filter(near).collect()
}

/// Keeps states along a text and takes each up again in another slot, with the full pages shared and a copy
/// of the last one. The first sequence goes on meanwhile: the others leave no trace in it.
pub fn resumed(runner: &mut Runner<'_>, text: &[u32]) -> Result<Outcome, ModelError> {
    let mut tally = Tally::default();
    let snapshots = runner.spec().snapshots;
    let mut lanes = runner.lanes()?;
    let fresh = runner.feed(&mut lanes[0], text, text.len())?;
    let (first, rest) = lanes.split_at_mut(1);
    let (first, second) = (&mut first[0], &mut rest[0]);
    runner.clear(first)?;
    for batch in kept(text.len()).chunks(snapshots) {
        for (at, &position) in batch.iter().enumerate() {
            let start = first.length;
            let found = runner.feed(first, &text[start..position], 5)?;
            tally.rows(&found, &fresh[start..position], start, || "while others are resumed".into());
            runner.model.save(first.slot, SnapshotId(at as u32))?;
        }
        for (at, &position) in batch.iter().enumerate() {
            let from = SnapshotId(at as u32);
            let lane = &mut Lane { length: position, ..second.clone() };
            let full = position / PAGE_TOKENS;
            lane.pages[..full].copy_from_slice(&first.pages[..full]);
            if !position.is_multiple_of(PAGE_TOKENS) {
                let bytes = runner.model.export_page(first.pages[full])?;
                runner.model.import_page(lane.pages[full], &bytes)?;
            }
            runner.model.load(lane.slot, Some(from))?;
            resume(runner, lane, text, &fresh, &mut tally)?;
        }
    }
    Ok(tally.outcome(Contract::Resumed, "every kept position, pages shared"))
}

/// Goes on from a resumed state: a few rows, or some blocks from every 32nd position.
fn resume(
    runner: &mut Runner<'_>,
    lane: &mut Lane,
    text: &[u32],
    fresh: &[RowBits],
    tally: &mut Tally,
) -> Result<(), ModelError> {
    let start = lane.length;
    let rows = if start.is_multiple_of(32) { 2 * PAGE_TOKENS + 3 } else { 3 };
    let end = text.len().min(start + rows);
    let found = runner.feed(lane, &text[start..end], 2 + start % 40)?;
    tally.rows(&found, &fresh[start..end], start, || format!("resumed at {start}"));
    Ok(())
}

/// Takes states and pages out of one model and into another, in other slots, pages and snapshots: what a
/// cache on disk does over a restart.
pub fn moved(runner: &mut Runner<'_>, other: &mut Runner<'_>, text: &[u32]) -> Result<Outcome, ModelError> {
    let mut tally = Tally::default();
    let mut lanes = runner.lanes()?;
    let fresh = runner.feed(&mut lanes[0], text, text.len())?;
    let lane = &mut lanes[1];
    let targets = other.lanes()?;
    for position in [1, 63, 64, 65, text.len() / 2, text.len() - 1] {
        if position < lane.length || position >= text.len() {
            continue;
        }
        let start = lane.length;
        runner.feed(lane, &text[start..position], 100)?;
        runner.model.save(lane.slot, SnapshotId(0))?;
        let state = runner.model.export_snapshot(SnapshotId(0))?;
        let target = &mut Lane { length: position, ..targets[position % targets.len()].clone() };
        other.model.import_snapshot(SnapshotId(1), &state)?;
        let pages = position.div_ceil(PAGE_TOKENS);
        for (from, to) in lane.pages[..pages].iter().zip(&target.pages) {
            let bytes = runner.model.export_page(*from)?;
            other.model.import_page(*to, &bytes)?;
            let back = other.model.export_page(*to)?;
            tally.same(&back, &bytes, || format!("page {to} after its import differs"));
        }
        let back = other.model.export_snapshot(SnapshotId(1))?;
        tally.same(&back, &state, || format!("the state of {position} tokens after its import differs"));
        other.model.load(target.slot, Some(SnapshotId(1)))?;
        resume(other, target, text, &fresh, &mut tally)?;
    }
    Ok(tally.outcome(Contract::Resumed, "in a fresh model, through bytes"))
}
