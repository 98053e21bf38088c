//! Rotary positions (`docs/model.md` section 6).

use device::{Device, DeviceError, Rotary, host_math};

use super::config::Rope;

/// The axis (0 t, 1 h, 2 w) that turns each of the `R/2` frequencies.
pub fn axes(rope: &Rope) -> Vec<u8> {
    let [_, h, w] = rope.sections;
    let axis = |j: usize| match j % 3 {
        1 if j < 3 * h => 1,
        2 if j < 3 * w => 2,
        _ => 0,
    };
    (0..rope.dims / 2).map(axis).collect()
}

/// Puts the tables for `positions` positions on a device.
pub(super) fn upload(rope: &Rope, positions: usize, device: &mut dyn Device) -> Result<Rotary, DeviceError> {
    let (cos, sin) = host_math::rotary_table(positions, rope.theta, rope.dims);
    device.rotary(&cos, &sin, &axes(rope))
}

/// Why placeholders and pictures do not fit together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PositionsError {
    /// A run of placeholders without a picture.
    #[error("token {index} is an image placeholder, but only {images} images are given")]
    NoImage {
        /// Token index.
        index: usize,
        /// Pictures given.
        images: usize,
    },
    /// A run of another length than the picture's rows.
    #[error("image {image} needs {expected} placeholders from token {index} on, {found} found")]
    Run {
        /// Picture, from 0.
        image: usize,
        /// Token index of the run.
        index: usize,
        /// Rows of the picture.
        expected: usize,
        /// Placeholders found.
        found: usize,
    },
    /// A picture without placeholders.
    #[error("{given} images are given, but the text has placeholders for {used}")]
    Unused {
        /// Pictures given.
        given: usize,
        /// Runs found.
        used: usize,
    },
    /// A grid that does not divide into merged blocks.
    #[error("image {image}: grid {grid:?} is not made of {merge} x {merge} blocks")]
    Grid {
        /// Picture, from 0.
        image: usize,
        /// Its grid (frames, rows, columns) in patches.
        grid: [usize; 3],
        /// Patches merged along each axis.
        merge: usize,
    },
}

/// Positions (t, h, w) of a prompt's tokens, and `rope_delta`: the next text position minus the number of
/// tokens.
///
/// `grids` are the pictures' grids (frames, rows, columns) in patches, in order; a run of `image_token`
/// belongs to the next picture, whose rows are `merge` x `merge` patches each.
pub fn positions(
    ids: &[u32],
    image_token: Option<u32>,
    grids: &[[usize; 3]],
    merge: usize,
) -> Result<(Vec<[u32; 3]>, i64), PositionsError> {
    let mut out: Vec<[u32; 3]> = Vec::with_capacity(ids.len());
    let (mut here, mut image) = (0u32, 0);
    while out.len() < ids.len() {
        let index = out.len();
        if Some(ids[index]) != image_token {
            out.push([here; 3]);
            here += 1;
            continue;
        }
        let grid = *grids.get(image).ok_or(PositionsError::NoImage { index, images: grids.len() })?;
        let [frames, rows, columns] =
            blocks(grid, merge).ok_or(PositionsError::Grid { image, grid, merge })?;
        let expected = frames.saturating_mul(rows).saturating_mul(columns);
        let run = ids[index..].iter().take_while(|id| Some(**id) == image_token).count();
        // Two pictures may touch, so a run may be longer than this picture's.
        if run < expected {
            return Err(PositionsError::Run { image, index, expected, found: run });
        }
        for at in 0..expected {
            let place = [at / (rows * columns), at / columns % rows, at % columns];
            out.push(place.map(|offset| here + offset as u32));
        }
        here += rows.max(columns) as u32;
        image += 1;
    }
    if image < grids.len() {
        return Err(PositionsError::Unused { given: grids.len(), used: image });
    }
    Ok((out, i64::from(here) - ids.len() as i64))
}

fn blocks([frames, rows, columns]: [usize; 3], merge: usize) -> Option<[usize; 3]> {
    let fits = frames > 0
        && rows > 0
        && columns > 0
        && merge > 0
        && rows.is_multiple_of(merge)
        && columns.is_multiple_of(merge);
    fits.then(|| [frames, rows / merge, columns / merge])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_sections_interleave() {
        let rope = Rope { theta: 1e7, dims: 64, sections: [11, 11, 10] };
        let axes = axes(&rope);
        let of = |axis: u8| (0..32).filter(|j| axes[*j] == axis).collect::<Vec<_>>();
        assert_eq!(of(1), (1..32).step_by(3).collect::<Vec<_>>());
        assert_eq!(of(2), (2..30).step_by(3).collect::<Vec<_>>());
        assert_eq!(of(0), (0..31).step_by(3).collect::<Vec<_>>());
    }

    #[test]
    fn text_counts_and_a_picture_spreads() {
        assert_eq!(positions(&[5, 6], Some(9), &[], 2), Ok((vec![[0; 3], [1; 3]], 0)));
        let ids = [5, 9, 9, 9, 9, 9, 9, 6];
        let (got, delta) = positions(&ids, Some(9), &[[1, 4, 6]], 2).unwrap();
        let image = [[1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 2, 1], [1, 2, 2], [1, 2, 3]];
        assert_eq!(got[1..7], image);
        assert_eq!((got[7], delta), ([4; 3], 5 - 8));
    }

    #[test]
    fn pictures_and_placeholders_must_agree() {
        let check = |ids: &[u32], grids: &[[usize; 3]], message: &str| {
            let error = positions(ids, Some(9), grids, 2).unwrap_err().to_string();
            assert_eq!(error, message);
        };
        check(&[1, 9], &[], "token 1 is an image placeholder, but only 0 images are given");
        check(&[9, 9, 1], &[[1, 2, 6]], "image 0 needs 3 placeholders from token 0 on, 2 found");
        check(&[1], &[[1, 2, 2]], "1 images are given, but the text has placeholders for 0");
        check(&[9], &[[1, 3, 2]], "image 0: grid [1, 3, 2] is not made of 2 x 2 blocks");
    }
}
