//! E9: the same bits on every device, instruction set and thread count.

use model::{Draw, ModelError, SnapshotId};

use crate::lane::{draw_at, sampled};
use crate::{Album, Contract, Outcome, RowBits, Runner, Tally};

/// The bits of a run that must be equal on every device. Page bytes are not among them (each device has its
/// own layout), nor drafts (they may differ, for they never change output).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Logits of the text's rows, then of decoded rows.
    pub rows: Vec<RowBits>,
    /// Drawn tokens, and the bits of their log-probabilities.
    pub drawn: Vec<(Option<u32>, u32)>,
    /// The state after all of it.
    pub state: Vec<u8>,
}

/// Runs a text in a large chunk and small ones, draws from it, and decodes some tokens in a window.
pub fn signature(runner: &mut Runner<'_>, text: &[u32]) -> Result<Signature, ModelError> {
    let mut lanes = runner.lanes()?;
    let lane = &mut lanes[1];
    let large = text.len() * 3 / 4;
    let mut rows = runner.feed(lane, &text[..large], large)?;
    let draws: Vec<Draw> = (0..large).map(|row| draw_at(&sampled(9), row, row + 1)).collect();
    let drawn: Vec<_> =
        runner.draw(&draws)?.iter().map(|drawn| (drawn.token, drawn.logprob.to_bits())).collect();
    rows.extend(runner.feed(lane, &text[large..], 9)?);
    let ids: Vec<u32> = drawn.iter().rev().filter_map(|(token, _)| *token).take(8).collect();
    if !ids.is_empty() {
        rows.extend(runner.run(&[lane.window(&ids, None)])?);
        runner.keep(lane, &(0..ids.len() / 2).collect::<Vec<_>>())?;
        rows.extend(runner.feed(lane, &ids, 1)?);
    }
    let (state, _) = runner.state(lane, SnapshotId(0))?;
    Ok(Signature { rows, drawn, state })
}

/// The same for the text with pictures in it: their features join its rows. `None` without a vision tower.
pub fn pictured_signature(runner: &mut Runner<'_>, text: &[u32]) -> Result<Option<Signature>, ModelError> {
    let Some(spec) = runner.model.image_spec() else { return Ok(None) };
    let album = Album::new(&spec);
    let shown = &mut Runner::new(runner.model);
    shown.show(&album)?;
    let mut signature = signature(shown, &album.place(text))?;
    signature.rows.extend(shown.image_bits());
    Ok(Some(signature))
}

/// Compares signatures, each with the name of where it was made, with the first one.
pub fn same_bits(signatures: &[(String, Signature)], contract: Contract, case: &'static str) -> Outcome {
    let mut tally = Tally::default();
    if let [(_, expected), others @ ..] = signatures {
        for (name, found) in others {
            tally.rows(&found.rows, &expected.rows, 0, || name.clone());
            tally.same(&found.drawn, &expected.drawn, || format!("{name}: draws differ"));
            tally.same(&found.state, &expected.state, || format!("{name}: states differ"));
        }
    }
    tally.outcome(contract, case)
}
