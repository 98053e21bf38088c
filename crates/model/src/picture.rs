//! Pictures at the [`crate::Model`] seam: what goes into a vision tower and what comes out.

use std::fmt;
use std::sync::Arc;

/// One picture, prepared (`docs/model.md` section 10): bytes of one frame, which all frames of a patch
/// repeat.
#[derive(Clone, PartialEq)]
pub struct Picture {
    /// Grid (frames, rows, columns) in patches; one frame.
    pub grid: [usize; 3],
    /// `[patches, 3, patch, patch]` levels, patches in blocks of merged neighbours.
    pub patches: Vec<u8>,
    /// Value of each level per channel.
    pub levels: Box<[[f32; 256]; 3]>,
    /// What the picture is: equal digests are equal pictures. Part of cache keys.
    pub digest: [u8; 32],
}

impl Picture {
    /// Patches: four times as many as image rows.
    pub fn count(&self) -> usize {
        self.grid.iter().product()
    }
}

impl fmt::Debug for Picture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Picture({:?})", self.grid)
    }
}

/// What a vision tower makes of a picture: its image rows.
#[derive(Clone, PartialEq)]
pub struct Features {
    /// Values of a row.
    pub width: usize,
    /// `[rows, width]`.
    pub values: Vec<f32>,
}

impl Features {
    /// Image rows: tokens of the picture.
    pub fn rows(&self) -> usize {
        self.values.len() / self.width.max(1)
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.values[..])
    }

    /// Image row `at`, `width` values. Panics where there is none.
    pub fn row(&self, at: usize) -> &[f32] {
        &self.values[at * self.width..(at + 1) * self.width]
    }
}

impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Features({} x {})", self.rows(), self.width)
    }
}

/// An image row of a step.
#[derive(Clone, Debug)]
pub struct ImageRow {
    /// Row of the step, over all windows; it has no token.
    pub row: usize,
    /// The picture's features.
    pub features: Arc<Features>,
    /// Row of the features.
    pub at: usize,
}

/// What pictures a model takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSpec {
    /// Most tokens of one picture, and of pictures that are encoded together.
    pub tokens_max: usize,
    /// Most pictures that are encoded together.
    pub pictures_max: usize,
    /// Side of a patch in pixels.
    pub patch: usize,
    /// Patches merged to one token along each axis.
    pub merge: usize,
    /// Bytes of one token's features.
    pub token_bytes: usize,
    /// Rows of work of one patch, in the measure of [`crate::Model::encode_next`].
    pub patch_work: usize,
}

/// Rotary positions (t, h, w) of `length` tokens in which pictures stand at `spans` (first token, grid in
/// patches; ascending, apart), `merge` x `merge` patches a token; and `rope_delta`: the next text position
/// minus the number of tokens (`docs/model.md` section 6). `None` if the spans do not fit.
pub fn place_pictures(
    length: usize,
    spans: &[(usize, [usize; 3])],
    merge: usize,
) -> Option<(Vec<[u32; 3]>, i64)> {
    let mut out: Vec<[u32; 3]> = Vec::with_capacity(length);
    let mut here = 0u32;
    let text = |out: &mut Vec<[u32; 3]>, here: &mut u32, until: usize| {
        let first = *here;
        let count = until.checked_sub(out.len())? as u32;
        out.extend((first..first + count).map(|p| [p; 3]));
        *here += count;
        Some(())
    };
    for &(start, [frames, rows, columns]) in spans {
        let left = length.checked_sub(start)?;
        text(&mut out, &mut here, start)?;
        let (rows, columns) = (rows.checked_div(merge)?, columns.checked_div(merge)?);
        if frames.checked_mul(rows)?.checked_mul(columns)? > left {
            return None;
        }
        for frame in 0..frames {
            for row in 0..rows {
                let place = |column: usize| [frame, row, column].map(|offset| here + offset as u32);
                out.extend((0..columns).map(place));
            }
        }
        here += rows.max(columns) as u32;
    }
    text(&mut out, &mut here, length)?;
    Some((out, i64::from(here) - length as i64))
}

#[cfg(test)]
mod tests {
    use super::place_pictures;
    use crate::qwen3_5::positions;

    #[test]
    fn spans_and_placeholders_give_the_same_positions() {
        let grids = [[1, 4, 6], [1, 2, 2], [1, 2, 10]];
        for starts in [[2, 9, 11], [0, 6, 7], [3, 12, 14]] {
            let mut ids = vec![5; 22];
            for (start, grid) in starts.iter().zip(grids) {
                ids[*start..start + grid[1] * grid[2] / 4].fill(9);
            }
            let spans: Vec<_> = starts.into_iter().zip(grids).collect();
            let expected = positions(&ids, Some(9), &grids, 2).expect("they agree");
            assert_eq!(place_pictures(22, &spans, 2), Some(expected));
        }
    }

    #[test]
    fn spans_that_overlap_or_leave_the_prompt_do_not_fit() {
        assert_eq!(place_pictures(5, &[(0, [1, 4, 6])], 2), None);
        assert_eq!(place_pictures(20, &[(2, [1, 4, 6]), (7, [1, 2, 2])], 2), None);
        assert_eq!(place_pictures(20, &[(2, [1, 4, 6])], 0), None);
        assert_eq!(place_pictures(20, &[(usize::MAX, [1, 4, 6])], 2), None);
    }
}
