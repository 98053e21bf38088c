//! E8: a prompt in chunks of any sizes gives the bits of the whole.

use model::{ModelError, SnapshotId};

use crate::{Contract, Outcome, Runner, Tally};

/// Chunk sizes: one row, an odd few, one block, and around four blocks.
const CHUNKS: [usize; 6] = [1, 7, 64, 255, 256, 257];

/// Every row's logits, the state and the full pages after the text, for each chunk size and each in another
/// slot.
pub fn chunked(runner: &mut Runner<'_>, text: &[u32]) -> Result<Outcome, ModelError> {
    let mut tally = Tally::default();
    let mut lanes = runner.lanes()?;
    let expected = runner.feed(&mut lanes[0], text, text.len())?;
    let whole = runner.state(&lanes[0], SnapshotId(0))?;
    let slots = lanes.len();
    for (at, chunk) in CHUNKS.into_iter().enumerate().filter(|(_, chunk)| *chunk < text.len()) {
        let lane = &mut lanes[1 + at % (slots - 1)];
        runner.clear(lane)?;
        let found = runner.feed(lane, text, chunk)?;
        tally.rows(&found, &expected, 0, || format!("chunks of {chunk}"));
        let (state, pages) = runner.state(lane, SnapshotId(0))?;
        tally.same(&state, &whole.0, || format!("chunks of {chunk}: the state after the text differs"));
        tally.same(&pages, &whole.1, || format!("chunks of {chunk}: a page differs"));
    }
    Ok(tally.outcome(Contract::Chunked, "chunks of 1, 7, 64, 255, 256, 257"))
}
