//! What one forward computes: rows of several sequences, one window after another.

use crate::{PAGE_TOKENS, WINDOW_ROWS_MAX};

/// One row of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Token to embed; `None` where the caller wrote the embedding row itself (image rows).
    pub token: Option<u32>,
    /// Rotary positions (t, h, w); equal for text (`docs/model.md` section 6).
    pub position: [u32; 3],
}

/// Consecutive rows of a step that belong to one sequence.
///
/// Row `r` of the window has token index `start + depth(r)`, depth counted along its parents. Its K/V is
/// stored at place `start + r` of the sequence's pages, which for a chain is the token index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Place of the sequence in every state pool.
    pub place: u32,
    /// First row in [`Step::rows`].
    pub first: usize,
    /// Rows of this window, at least 1.
    pub rows: usize,
    /// Committed tokens of the sequence before this window.
    pub start: usize,
    /// K/V pages of the sequence in order: page `i` holds places `64 i .. 64 i + 63`. Covers `start + rows`
    /// places.
    pub pages: Vec<u32>,
    /// `None`: a chain, each row follows the one before it. Else the parent of each row inside the window (an
    /// earlier row), or `None` for rows that follow the committed state.
    pub parents: Option<Vec<Option<u32>>>,
    /// True: the states advance past all rows (chains only). False: the states stay, and the window's small
    /// inputs are kept for [`crate::Device::state_keep`]; at most [`WINDOW_ROWS_MAX`] rows.
    pub commit: bool,
}

impl Window {
    /// Parent of row `row` of this window; `None` for the committed state.
    pub fn parent(&self, row: usize) -> Option<usize> {
        match &self.parents {
            None => row.checked_sub(1),
            Some(parents) => parents[row].map(|p| p as usize),
        }
    }

    /// Rows on the way from the committed state to `row`, itself last: its depth is one less than the length.
    pub fn path(&self, row: usize) -> Vec<usize> {
        if self.parents.is_none() {
            return (0..=row).collect();
        }
        let mut path = vec![row];
        while let Some(parent) = self.parent(path[path.len() - 1]) {
            path.push(parent);
        }
        path.reverse();
        path
    }

    /// Token index of row `row`.
    pub fn index(&self, row: usize) -> usize {
        match self.parents {
            None => self.start + row,
            Some(_) => self.start + self.path(row).len() - 1,
        }
    }
}

/// A checked step: every window's rows, pages and parents fit together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    rows: Vec<Row>,
    windows: Vec<Window>,
}

/// Why rows and windows do not make a step; `window` counts from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("window {window}: {reason}")]
pub struct StepError {
    /// Window index.
    pub window: usize,
    /// What does not fit.
    pub reason: String,
}

impl Step {
    /// Checks and joins windows over rows. Windows must cover the rows in order; no two may share a place.
    pub fn new(rows: Vec<Row>, windows: Vec<Window>) -> Result<Self, StepError> {
        let mut next = 0;
        for (at, window) in windows.iter().enumerate() {
            let fail = |reason: String| Err(StepError { window: at, reason });
            if window.first != next || window.rows == 0 {
                return fail(format!(
                    "covers {} rows from {}, expected from {next}",
                    window.rows, window.first
                ));
            }
            next += window.rows;
            if window.pages.len() * PAGE_TOKENS < window.start + window.rows {
                return fail(format!(
                    "{} pages for {} tokens",
                    window.pages.len(),
                    window.start + window.rows
                ));
            }
            if !window.commit && window.rows > WINDOW_ROWS_MAX {
                return fail(format!("{} uncommitted rows, at most {WINDOW_ROWS_MAX}", window.rows));
            }
            if let Some(parents) = &window.parents {
                let ordered = parents.iter().enumerate().all(|(row, p)| p.is_none_or(|p| (p as usize) < row));
                if window.commit || parents.len() != window.rows || !ordered {
                    return fail(
                        "a tree needs one earlier parent per row and is never committed at once".into(),
                    );
                }
            }
            if windows[..at].iter().any(|w| w.place == window.place) {
                return fail(format!("place {} is used twice", window.place));
            }
        }
        if next != rows.len() {
            return Err(StepError {
                window: windows.len(),
                reason: format!("{} rows, {next} covered", rows.len()),
            });
        }
        Ok(Self { rows, windows })
    }

    /// All rows.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// All windows, in row order.
    pub fn windows(&self) -> &[Window] {
        &self.windows
    }
}

/// Refuses a copy of values that fills no whole rows of `width`, or from a buffer to itself.
pub(crate) fn check_copy(
    from: crate::Buffer,
    to: crate::Buffer,
    values: usize,
    width: usize,
) -> Result<(), crate::DeviceError> {
    if from != to && width > 0 && values.is_multiple_of(width) {
        return Ok(());
    }
    let message = format!("{values} values to rows of {width}, between two buffers");
    Err(crate::DeviceError::Failed { stage: "copy_values", message })
}

/// Refuses counts of keys that the windows' pages cannot hold.
pub(crate) fn check_keys(stage: &'static str, step: &Step, keys: &[usize]) -> Result<(), crate::DeviceError> {
    let fits = |(window, keys): (&Window, &usize)| (1..=window.pages.len() * PAGE_TOKENS).contains(keys);
    if keys.len() == step.windows().len() && step.windows().iter().zip(keys).all(fits) {
        return Ok(());
    }
    let message = format!("keys {keys:?} of {} windows; each within its pages", step.windows().len());
    Err(crate::DeviceError::Failed { stage, message })
}
