//! Driving a model by hand: sequences with pages of their own, and the bits of the logits they give.

use std::sync::Arc;

use device::Row;
use model::{
    Draw, Drawn, Features, ImageRow, Logits, Model, ModelError, PAGE_TOKENS, SlotId, SnapshotId, Spec, Window,
};

use crate::album::{Album, encode, image_of, row_at};

/// The bits of one row of logits. NaN payloads and signs are not part of them (`docs/arithmetic.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBits {
    /// Hash of the values' bits.
    pub hash: u64,
    /// Whether all of them are finite.
    pub finite: bool,
}

/// The bits of a row.
pub fn row_bits(values: &[f32]) -> RowBits {
    let mut hash = 0u64;
    let mut finite = true;
    for value in values {
        finite &= value.is_finite();
        let bits = if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() };
        hash = (hash.rotate_left(5) ^ u64::from(bits)).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
    RowBits { hash, finite }
}

/// Random ids below `vocabulary`. Some stretches repeat, as they do in text.
pub fn random_text(vocabulary: usize, tokens: usize, seed: u64) -> Vec<u32> {
    let mut random = Random(seed);
    let mut text: Vec<u32> = Vec::with_capacity(tokens);
    while text.len() < tokens {
        match text.len() > 40 && random.below(20) == 0 {
            true => {
                let from = random.below(text.len() - 8);
                text.extend_from_within(from..from + 8);
            }
            false => text.push(random.below(vocabulary) as u32),
        }
    }
    text.truncate(tokens);
    text
}

/// A small generator for cases (splitmix64); its seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// A number below `limit`, which is above 0.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % limit as u64) as usize
    }
}

/// A sequence: its slot, its pages, and how far it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// The slot.
    pub slot: SlotId,
    /// Its pages, in order.
    pub pages: Vec<u32>,
    /// Committed tokens.
    pub length: usize,
}

/// One lane per slot, with pages dealt out one by one in mixed order, so that no sequence has neighbouring
/// pages.
pub fn deal(spec: &Spec) -> Vec<Lane> {
    let each = spec.context_max.div_ceil(PAGE_TOKENS).min(spec.pages / spec.slots);
    let lane = |slot: usize| {
        let page = |at: usize| (at * spec.slots + (slot + 5 * at) % spec.slots) as u32;
        Lane { slot: SlotId(slot as u32), pages: (0..each).map(page).collect(), length: 0 }
    };
    (0..spec.slots).map(lane).collect()
}

/// Rows from token index `start` on.
pub fn rows_at(ids: &[u32], start: usize) -> Vec<Row> {
    ids.iter().zip(start..).map(|(id, at)| row_at(*id, at)).collect()
}

impl Lane {
    /// A committed chain of `ids`.
    pub(crate) fn chunk(&self, ids: &[u32], logits: Logits) -> Window {
        Window {
            slot: self.slot,
            start: self.length,
            rows: rows_at(ids, self.length),
            pages: self.pages.clone(),
            parents: None,
            commit: true,
            logits,
        }
    }

    /// An uncommitted window with every row scored.
    pub(crate) fn window(&self, ids: &[u32], parents: Option<&[Option<u32>]>) -> Window {
        let mut window = Window { commit: false, ..self.chunk(ids, Logits::All) };
        let Some(parents) = parents else { return window };
        let mut depths: Vec<usize> = Vec::with_capacity(ids.len());
        for ((row, id), parent) in window.rows.iter_mut().zip(ids).zip(parents) {
            let depth = parent.map_or(0, |parent| depths[parent as usize] + 1);
            *row = row_at(*id, self.length + depth);
            depths.push(depth);
        }
        window.parents = Some(parents.to_vec());
        window
    }
}

/// A draw of row `row` whose token has absolute position `position`: greedy, or the one of `like`.
pub(crate) fn draw_at(like: &Draw, row: usize, position: usize) -> Draw {
    Draw { row, position: position as u64, ..like.clone() }
}

/// A greedy draw.
pub(crate) fn greedy() -> Draw {
    Draw::greedy(0, 0, u32::MAX)
}

/// A draw of high temperature, so that draws with other keys rarely agree.
pub(crate) fn sampled(seed: u64) -> Draw {
    Draw { temperature: 1.5, top_k: 40, top_p: 0.98, min_p: 0.001, seed, ..greedy() }
}

/// A model in use.
pub struct Runner<'a> {
    /// The model.
    pub model: &'a mut dyn Model,
    values: Vec<f32>,
    /// Image rows that ids stand for: features of a picture, and a row of them.
    images: Vec<(Arc<Features>, usize)>,
}

type Result<T> = std::result::Result<T, ModelError>;

impl<'a> Runner<'a> {
    /// Takes a model.
    pub fn new(model: &'a mut dyn Model) -> Self {
        let values = vec![0.0; model.spec().vocabulary];
        Self { model, values, images: Vec::new() }
    }

    /// From here on ids from [`crate::IMAGE_ID`] on stand for the rows of these pictures.
    pub fn show(&mut self, album: &Album) -> Result<()> {
        let features = encode(self.model, album.pictures(), usize::MAX)?;
        let rows =
            |features: Arc<Features>| (0..features.rows()).map(move |row| (Arc::clone(&features), row));
        self.images = features.into_iter().flat_map(rows).collect();
        Ok(())
    }

    /// The bits of the image rows shown.
    pub(crate) fn image_bits(&self) -> impl Iterator<Item = RowBits> {
        self.images.iter().map(|(features, row)| row_bits(features.row(*row)))
    }

    fn step(&mut self, windows: &[Window]) -> Result<usize> {
        let rows = windows.iter().flat_map(|window| &window.rows).enumerate();
        let images = rows.filter(|(_, row)| row.token.is_none()).map(|(row, of)| {
            let (features, at) = &self.images[image_of(of.position)];
            ImageRow { row, features: Arc::clone(features), at: *at }
        });
        let images: Vec<ImageRow> = images.collect();
        self.model.step_images(windows, &images)
    }

    /// Sizes and limits.
    pub fn spec(&self) -> Spec {
        self.model.spec().clone()
    }

    /// Fresh lanes over all slots.
    pub fn lanes(&mut self) -> Result<Vec<Lane>> {
        let lanes = deal(self.model.spec());
        for lane in &lanes {
            self.model.load(lane.slot, None)?;
        }
        Ok(lanes)
    }

    /// Empties a lane.
    pub fn clear(&mut self, lane: &mut Lane) -> Result<()> {
        lane.length = 0;
        self.model.load(lane.slot, None)
    }

    /// Runs windows; the bits of every scored row.
    pub fn run(&mut self, windows: &[Window]) -> Result<Vec<RowBits>> {
        let rows = self.step(windows)?;
        (0..rows)
            .map(|row| {
                self.model.read_logits(row, &mut self.values)?;
                Ok(row_bits(&self.values))
            })
            .collect()
    }

    /// Commits `ids` in chunks, the rows of each scored.
    pub fn feed(&mut self, lane: &mut Lane, ids: &[u32], chunk: usize) -> Result<Vec<RowBits>> {
        let mut found = Vec::with_capacity(ids.len());
        for part in ids.chunks(chunk) {
            found.extend(self.run(&[lane.chunk(part, Logits::All)])?);
            lane.length += part.len();
        }
        Ok(found)
    }

    /// Commits `ids` in one step with the last row scored; which row of logits that is.
    pub(crate) fn commit(&mut self, lane: &mut Lane, ids: &[u32]) -> Result<usize> {
        let rows = self.step(&[lane.chunk(ids, Logits::Last)])?;
        lane.length += ids.len();
        Ok(rows - 1)
    }

    /// Draws from rows of the last step.
    pub fn draw(&mut self, draws: &[Draw]) -> Result<Vec<Drawn>> {
        self.model.draw(draws)
    }

    /// Keeps a path of the lane's window.
    pub fn keep(&mut self, lane: &mut Lane, rows: &[usize]) -> Result<()> {
        self.model.keep(lane.slot, rows)?;
        lane.length += rows.len();
        Ok(())
    }

    /// The lane's state as bytes, and the bytes of its full pages. Uses a snapshot. What a page holds of
    /// tokens that are not committed, or whose MTP row waits for the next token, is not part of a state.
    pub fn state(&mut self, lane: &Lane, snapshot: SnapshotId) -> Result<(Vec<u8>, Vec<Vec<u8>>)> {
        self.model.save(lane.slot, snapshot)?;
        let state = self.model.export_snapshot(snapshot)?;
        let full = lane.length.saturating_sub(1) / PAGE_TOKENS;
        let pages =
            lane.pages[..full].iter().map(|page| self.model.export_page(*page)).collect::<Result<_>>()?;
        Ok((state, pages))
    }
}
