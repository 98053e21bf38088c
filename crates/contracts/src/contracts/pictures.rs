//! The contracts over texts with pictures in them, and the pictures' own: their features in any company and
//! slice.

use std::sync::Arc;

use model::{Features, ModelError, Picture};

use super::{Check, chunked, company, drafted, resumed, trees, windows};
use crate::album::encode;
use crate::lane::row_bits;
use crate::{Album, Contract, Outcome, RowBits, Runner, Tally};

/// Contracts that hold for any rows, and their cases over texts with pictures.
const WITH_PICTURES: [(Check, &str); 6] = [
    (drafted, "replies to pictures, drafted"),
    (company, "windows with pictures together"),
    (resumed, "resumed before, inside, after pictures"),
    (windows, "chains next to and inside pictures"),
    (trees, "trees next to and inside pictures"),
    (chunked, "chunks that cut pictures"),
];

/// Every contract of a model with a vision tower over the text with pictures; nothing without one.
pub fn pictured(runner: &mut Runner<'_>, text: &[u32]) -> Result<Vec<Outcome>, ModelError> {
    let Some(spec) = runner.model.image_spec() else { return Ok(Vec::new()) };
    let album = Album::new(&spec);
    let text = album.place(text);
    let mut outcomes = encoded(runner, &album)?;
    runner.show(&album)?;
    for (contract, case) in WITH_PICTURES {
        outcomes.push(Outcome { case, ..contract(runner, &text)? });
    }
    Ok(outcomes)
}

fn bits(features: &[Arc<Features>]) -> Vec<Vec<RowBits>> {
    let rows = |features: &Arc<Features>| {
        (0..features.rows()).map(|row| row_bits(features.row(row))).collect::<Vec<_>>()
    };
    features.iter().map(rows).collect()
}

/// Features of pictures alone, together, in another order, and in slices of work.
fn encoded(runner: &mut Runner<'_>, album: &Album) -> Result<Vec<Outcome>, ModelError> {
    const WHOLE: usize = 1 << 20;
    let mut together = Tally::default();
    let mut sliced = Tally::default();
    let mut alone = Vec::new();
    for picture in album.pictures() {
        alone.extend(bits(&encode(runner.model, std::slice::from_ref(picture), WHOLE)?));
    }
    let mut compare =
        |pictures: &[Arc<Picture>], expected: &[Vec<RowBits>], rows: usize, tally: &mut Tally| {
            let found = bits(&encode(runner.model, pictures, rows)?);
            tally.same(&found.len(), &expected.len(), || "a picture has no features".into());
            for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
                tally.rows(found, expected, 0, || {
                    format!("picture {at} of {}, {rows} rows a call", pictures.len())
                });
            }
            Ok::<_, ModelError>(())
        };
    compare(album.pictures(), &alone, WHOLE, &mut together)?;
    let turned: Vec<_> = album.pictures().iter().rev().cloned().collect();
    let expected: Vec<_> = alone.iter().rev().cloned().collect();
    compare(&turned, &expected, WHOLE, &mut together)?;
    for rows in [1, 300] {
        compare(album.pictures(), &alone, rows, &mut sliced)?;
    }
    Ok(vec![
        together.outcome(Contract::Concurrent, "pictures encoded together"),
        sliced.outcome(Contract::Chunked, "pictures encoded in slices"),
    ])
}
