//! Pictures inside the texts of contracts: ids from [`IMAGE_ID`] on stand for image rows.

use std::sync::Arc;

use device::Row;
use engine::Request;
use model::{Features, ImageSpec, Model, ModelError, Picture};

use crate::Random;

/// The first id that stands for an image row: above every vocabulary.
pub const IMAGE_ID: u32 = 1 << 31;
/// Most tokens of the pictures of an [`Album`].
pub const ALBUM_TOKENS: usize = 25;

/// Sides of the pictures in merged blocks: neighbours, one that crosses the end of a page, a single row.
const SIDES: [[usize; 2]; 4] = [[2, 3], [1, 2], [4, 4], [1, 1]];
/// Where each begins in every [`STRIDE`] tokens of a text.
const STARTS: [usize; 4] = [7, 13, 56, 80];
const STRIDE: usize = 128;
/// Image rows that get one row position.
const ACROSS: u32 = 8;

/// The row of id `id` at token index `at`. An image row's place is told by its positions, as in a prompt:
/// column and row, counted from `at`.
pub(crate) fn row_at(id: u32, at: usize) -> Row {
    let at = at as u32;
    match id.checked_sub(IMAGE_ID) {
        None => Row { token: Some(id), position: [at; 3] },
        Some(image) => Row { token: None, position: [at, at + 1 + image / ACROSS, at + image % ACROSS] },
    }
}

/// Which image row of the album a row without a token is.
pub(crate) fn image_of([t, h, w]: [u32; 3]) -> usize {
    ((h - t - 1) * ACROSS + w - t) as usize
}

/// Pictures of noise. All albums of a geometry are alike.
#[derive(Clone, Debug)]
pub struct Album {
    pictures: Vec<Arc<Picture>>,
    merge: usize,
}

impl Album {
    /// Pictures that a model takes.
    pub fn new(spec: &ImageSpec) -> Self {
        let pictures = SIDES.into_iter().zip(1..).map(|([rows, columns], seed)| {
            let grid = [1, rows * spec.merge, columns * spec.merge];
            let mut random = Random(seed);
            let bytes = grid[1] * grid[2] * 3 * spec.patch * spec.patch;
            Arc::new(Picture {
                grid,
                patches: (0..bytes).map(|_| random.below(256) as u8).collect(),
                levels: Box::new([std::array::from_fn(|level| level as f32 / 127.5 - 1.0); 3]),
                digest: [seed as u8; 32],
            })
        });
        Self { pictures: pictures.collect(), merge: spec.merge }
    }

    /// The pictures.
    pub fn pictures(&self) -> &[Arc<Picture>] {
        &self.pictures
    }

    /// The text with the pictures in place of some of its tokens, again and again.
    pub fn place(&self, text: &[u32]) -> Vec<u32> {
        let mut text = text.to_vec();
        for from in (0..text.len()).step_by(STRIDE) {
            let mut image = IMAGE_ID;
            for (start, [rows, columns]) in STARTS.into_iter().zip(SIDES) {
                let count = rows * columns;
                if let Some(span) = text.get_mut(from + start..from + start + count) {
                    span.iter_mut().zip(image..).for_each(|(id, image)| *id = image);
                }
                image += count as u32;
            }
        }
        text
    }

    /// A request whose prompt shows the pictures that lie whole in `ids`; rows of others become text.
    pub fn request(&self, ids: &[u32], max_tokens: usize) -> Request {
        let mut prompt = ids.to_vec();
        let mut shown = Vec::new();
        let mut image = IMAGE_ID;
        for (picture, [rows, columns]) in self.pictures.iter().zip(SIDES) {
            let span: Vec<u32> = (image..).take(rows * columns).collect();
            for at in (0..ids.len()).filter(|at| ids[*at..].starts_with(&span)) {
                prompt[at..at + span.len()].fill(0);
                shown.push((at, Arc::clone(picture)));
            }
            image += span.len() as u32;
        }
        for id in &mut prompt {
            *id = id.checked_sub(IMAGE_ID).unwrap_or(*id);
        }
        shown.sort_by_key(|(at, _)| *at);
        Request::new(prompt, max_tokens).with_pictures(shown, self.merge)
    }
}

/// Features of pictures encoded together, at most `rows` rows of work a call.
pub(crate) fn encode(
    model: &mut dyn Model,
    pictures: &[Arc<Picture>],
    rows: usize,
) -> Result<Vec<Arc<Features>>, ModelError> {
    model.encode(pictures)?;
    loop {
        if let Some(features) = model.encode_next(rows)? {
            return Ok(features.into_iter().map(Arc::new).collect());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_rows_are_told_by_their_positions() {
        for image in 0..ALBUM_TOKENS {
            let row = row_at(IMAGE_ID + image as u32, 70);
            assert_eq!((row.token, image_of(row.position)), (None, image));
        }
        assert_eq!(row_at(5, 3), Row { token: Some(5), position: [3; 3] });
        let tokens: usize = SIDES.iter().map(|[rows, columns]| rows * columns).sum();
        assert_eq!(tokens, ALBUM_TOKENS);
    }

    #[test]
    fn requests_show_the_pictures_that_are_whole() {
        let spec =
            ImageSpec { tokens_max: 64, pictures_max: 8, patch: 2, merge: 2, token_bytes: 4, patch_work: 1 };
        let album = Album::new(&spec);
        let text = album.place(&[5; 140]);
        let starts = |ids: &[u32]| -> Vec<usize> {
            album.request(ids, 1).pictures.iter().map(|span| span.start).collect()
        };
        assert_eq!(starts(&text), [7, 13, 56, 80]);
        assert_eq!(starts(&text[8..60]), [5]);
        assert!(album.request(&text, 1).prompt.iter().all(|id| *id < 64));
    }
}
