//! From the engine's windows to a checked step.

use device::Step;

use super::plan::Settings;
use super::sequence::Sequence;
use crate::{Logits, ModelError, Window};

/// A step ready to run.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) step: Step,
    /// Step rows to score, in order.
    pub(super) scored: Vec<usize>,
}

/// A limit that something given does not keep.
pub(super) fn limit(what: &'static str, found: impl ToString, expected: impl ToString) -> ModelError {
    ModelError::Limit { what, found: found.to_string(), expected: expected.to_string() }
}

/// Checks windows against slots, sizes and the vocabulary, and joins them. `embeds` are the step rows whose
/// embeddings the caller gives: exactly those without a token.
pub(super) fn plan(
    windows: &[Window],
    sequences: &[Sequence],
    settings: &Settings,
    vocabulary: usize,
    embeds: &[(usize, Vec<f64>)],
    width: usize,
) -> Result<Planned, ModelError> {
    let (mut rows, mut list, mut scored) = (Vec::new(), Vec::new(), Vec::new());
    for window in windows {
        check(window, sequences, settings, vocabulary)?;
        let first = rows.len();
        rows.extend_from_slice(&window.rows);
        match window.logits {
            Logits::None => {}
            Logits::Last => scored.push(rows.len() - 1),
            Logits::All => scored.extend(first..rows.len()),
        }
        list.push(device::Window {
            place: window.slot.0,
            first,
            rows: window.rows.len(),
            start: window.start,
            pages: window.pages.clone(),
            parents: window.parents.clone(),
            commit: window.commit,
        });
    }
    if rows.is_empty() || rows.len() > settings.rows_max {
        return Err(limit("rows of a step", rows.len(), format!("1 to {}", settings.rows_max)));
    }
    if scored.len() > settings.logits_rows_max {
        return Err(limit("scored rows", scored.len(), format!("at most {}", settings.logits_rows_max)));
    }
    let missing = |row: &usize| !embeds.iter().any(|(at, _)| at == row);
    if let Some(row) = (0..rows.len()).filter(|row| rows[*row].token.is_none()).find(missing) {
        return Err(limit("step row without a token", row, "its embedding beside it"));
    }
    let fits = |(at, values): &&(usize, Vec<f64>)| {
        values.len() == width && rows.get(*at).is_some_and(|row| row.token.is_none())
    };
    if let Some((at, values)) = embeds.iter().find(|embed| !fits(embed)) {
        let found = format!("{} values for row {at}", values.len());
        return Err(limit("embedding row", found, format!("{width} values for a row without a token")));
    }
    Ok(Planned { step: Step::new(rows, list)?, scored })
}

fn check(
    window: &Window,
    sequences: &[Sequence],
    settings: &Settings,
    vocabulary: usize,
) -> Result<(), ModelError> {
    let slots = sequences.len();
    let sequence = sequences.get(window.slot.0 as usize);
    let sequence = sequence.ok_or_else(|| limit("slot", window.slot.0, format!("below {slots}")))?;
    if window.start != sequence.length {
        return Err(limit("start of a window", window.start, sequence.length));
    }
    let end = window.start.saturating_add(window.rows.len());
    if end > settings.context {
        return Err(limit("tokens of a sequence", end, format!("at most {}", settings.context)));
    }
    check_pages(&window.pages, settings)?;
    for row in &window.rows {
        if let Some(id) = row.token.filter(|id| *id as usize >= vocabulary) {
            return Err(limit("token", id, format!("below {vocabulary}")));
        }
        if let Some(p) = row.position.iter().find(|p| **p as usize >= settings.context) {
            return Err(limit("rotary position", p, format!("below {}", settings.context)));
        }
    }
    Ok(())
}

/// Every page exists.
pub(super) fn check_pages(pages: &[u32], settings: &Settings) -> Result<(), ModelError> {
    match pages.iter().find(|page| **page as usize >= settings.pages) {
        Some(page) => Err(limit("page", page, format!("below {}", settings.pages))),
        None => Ok(()),
    }
}
