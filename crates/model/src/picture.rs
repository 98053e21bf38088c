//! Pictures at the [`crate::Model`] seam: what goes into a vision tower and what comes out.

use std::fmt;
use std::sync::Arc;

/// One picture, prepared (`docs/model.md` section 10): bytes of one frame, which all frames of a patch repeat.
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
    /// Patches.
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

    /// One row.
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
