//! From a file to patch rows.

use sha2::{Digest, Sha256};

use crate::resize::resize;
use crate::{Limits, PictureError, Preprocessor, Rgb, Target, decode};

/// A picture as the vision tower takes it, still in bytes: one frame, which all frames of a patch repeat.
#[derive(Clone, PartialEq)]
pub struct Prepared {
    /// Size of the file's picture as a person sees it, in pixels.
    pub source: Target,
    /// Size after resizing, in pixels.
    pub size: Target,
    /// Grid (frames, rows, columns) in patches.
    pub grid: [usize; 3],
    /// Rows the tower makes of it.
    pub tokens: usize,
    /// `[patches, 3, patch, patch]`, patches in blocks of merged neighbours (`docs/model.md` section 9,
    /// step 2).
    pub patches: Vec<u8>,
    /// Value of each level per channel.
    pub levels: [[f32; 256]; 3],
    /// SHA-256 of everything the tower sees: equal pictures have equal digests.
    pub digest: [u8; 32],
}

/// Decodes, resizes and cuts a picture.
pub fn prepare(
    bytes: &[u8],
    limits: &Limits,
    background: [u8; 3],
    preprocessor: &Preprocessor,
) -> Result<Prepared, PictureError> {
    let picture = decode(bytes, limits, background)?;
    let source = Target { width: picture.width, height: picture.height };
    let size = preprocessor.target(picture.width, picture.height)?;
    Ok(cut(&resize(picture, size.width, size.height), source, preprocessor))
}

fn cut(picture: &Rgb, source: Target, preprocessor: &Preprocessor) -> Prepared {
    let (patch, merge) = (preprocessor.patch, preprocessor.merge);
    let size = Target { width: picture.width, height: picture.height };
    let grid = preprocessor.grid(size);
    let [_, rows, columns] = grid;
    let stride = picture.width as usize * 3;
    let mut patches = Vec::with_capacity(picture.pixels.len());
    for at in 0..rows * columns {
        let [row, column] = place(at, columns, merge);
        for channel in 0..3 {
            for y in row * patch..(row + 1) * patch {
                let line = &picture.pixels[y * stride + column * patch * 3..][..patch * 3];
                patches.extend(line.iter().skip(channel).step_by(3));
            }
        }
    }
    let levels = preprocessor.levels();
    let mut hash = Sha256::new();
    for size in [grid[0], grid[1], grid[2], patch, merge, preprocessor.frames] {
        hash.update((size as u64).to_le_bytes());
    }
    levels.iter().flatten().for_each(|value| hash.update(value.to_le_bytes()));
    hash.update(&patches);
    let tokens = grid.iter().product::<usize>() / (merge * merge);
    Prepared { source, size, grid, tokens, patches, levels, digest: hash.finalize().into() }
}

/// Row and column of patch `at` of a frame: blocks of `merge` x `merge` in row-major order, and so inside a
/// block.
fn place(at: usize, columns: usize, merge: usize) -> [usize; 2] {
    let (block, inside) = (at / (merge * merge), at % (merge * merge));
    let across = columns / merge;
    [block / across * merge + inside / merge, block % across * merge + inside % merge]
}

impl Prepared {
    /// What the model sees, as a picture again.
    pub fn seen(&self, preprocessor: &Preprocessor) -> Rgb {
        let (patch, columns) = (preprocessor.patch, self.grid[2]);
        let stride = self.size.width as usize * 3;
        let mut pixels = vec![0; self.patches.len()];
        for (at, bytes) in self.patches.chunks_exact(3 * patch * patch).enumerate() {
            let [row, column] = place(at, columns, preprocessor.merge);
            for (i, byte) in bytes.iter().enumerate() {
                let (channel, y, x) = (i / (patch * patch), i / patch % patch, i % patch);
                pixels[(row * patch + y) * stride + (column * patch + x) * 3 + channel] = *byte;
            }
        }
        Rgb { width: self.size.width, height: self.size.height, pixels }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_come_in_blocks_and_go_back() {
        let made = Preprocessor { patch: 2, merge: 2, area_min: 1, ..Preprocessor::default() };
        let pixels: Vec<u8> = (0..8 * 12 * 3).map(|i| (i % 251) as u8).collect();
        let picture = Rgb { width: 12, height: 8, pixels };
        let size = Target { width: 12, height: 8 };
        let prepared = cut(&picture, size, &made);
        assert_eq!((prepared.grid, prepared.tokens), ([1, 4, 6], 6));
        let places: Vec<_> = (0..8).map(|at| place(at, 6, 2)).collect();
        assert_eq!(places, [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]);
        assert_eq!(prepared.seen(&made), picture);
        let red = &prepared.patches[..4];
        assert_eq!(red, [0, 3, 36, 39]);
    }
}
