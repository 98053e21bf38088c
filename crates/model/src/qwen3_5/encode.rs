//! Encoding pictures: the vision tower (`docs/model.md` section 9), a chunk of patches at a time.
//!
//! Patches of all pictures lie one after another. A block takes two passes over them: the first makes q, k
//! and v of every chunk, the second attends and runs the MLP, for attention sees the whole picture. A
//! chunk's results depend on its own pictures only, whatever else is in it.

use std::ops::Range;
use std::sync::Arc;

use device::{Activation, Between, CHANNELS, Device, PAGE_TOKENS, Pixels, Row, Step, Window};

use super::network::Network;
use super::qwen::Qwen;
use super::tower::{Block, Norm, PICTURES_MAX, Tower, TowerWeights, shape};
use super::vision_config::VisionConfig;
use super::windows::limit;
use crate::{Features, ImageSpec, ModelError, Picture};

/// `eps` of every LayerNorm of the tower.
const EPS: f32 = 1e-6;
/// A pass over all patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    /// Patch and position embedding.
    Embed,
    /// q, k and v of a block.
    Keys(usize),
    /// Attention and MLP of a block.
    Mix(usize),
    /// The merger.
    Merge,
}

/// Where a picture's patches are.
#[derive(Debug)]
struct Placed {
    picture: Arc<Picture>,
    /// Its patches among all.
    patches: Range<usize>,
    /// Its K/V pages.
    pages: Vec<u32>,
}

/// Pictures on their way through the tower.
#[derive(Debug)]
pub(super) struct Encoding {
    pictures: Vec<Placed>,
    patches: usize,
    pass: Pass,
    /// Patches of the pass that are done.
    done: usize,
    /// Image rows of all pictures so far.
    values: Vec<f32>,
}

/// Everything a chunk is worked on with.
struct Work<'a> {
    device: &'a mut dyn Device,
    vision: &'a VisionConfig,
    weights: &'a TowerWeights,
    tower: &'a Tower,
}

impl Qwen {
    pub(super) fn images(&self) -> Option<ImageSpec> {
        let (vision, tower) = parts(&self.network).map(|(vision, _, tower)| (vision, tower))?;
        Some(ImageSpec {
            tokens_max: tower.tokens_max,
            pictures_max: PICTURES_MAX,
            patch: vision.patch,
            merge: vision.merge,
            token_bytes: 4 * vision.out,
            patch_work: 2 * vision.depth + 2,
        })
    }

    pub(super) fn encode_start(&mut self, pictures: &[Arc<Picture>]) -> Result<(), ModelError> {
        let Some((vision, _, tower)) = parts(&self.network) else {
            return Err(limit("picture", "one", "a model with a vision tower, loaded with it"));
        };
        self.encoding = None;
        if pictures.is_empty() || pictures.len() > PICTURES_MAX {
            return Err(limit("pictures encoded together", pictures.len(), format!("1 to {PICTURES_MAX}")));
        }
        let patches_max = tower.tokens_max * vision.merge * vision.merge;
        let (mut placed, mut patches, mut pages) = (Vec::new(), 0, 0);
        for picture in pictures {
            check(vision, picture)?;
            let count = picture.count();
            if count > patches_max - patches {
                let found = format!("{} more after {patches}", count);
                return Err(limit("patches encoded together", found, format!("at most {patches_max}")));
            }
            let own = count.div_ceil(PAGE_TOKENS) as u32;
            placed.push(Placed {
                picture: Arc::clone(picture),
                patches: patches..patches + count,
                pages: (pages..pages + own).collect(),
            });
            (patches, pages) = (patches + count, pages + own);
        }
        let (pass, done, values) = (Pass::Embed, 0, Vec::new());
        self.encoding = Some(Encoding { pictures: placed, patches, pass, done, values });
        Ok(())
    }

    pub(super) fn encode_rows(&mut self, rows: usize) -> Result<Option<Vec<Features>>, ModelError> {
        let (Some(mut encoding), Some((vision, weights, tower))) =
            (self.encoding.take(), parts(&self.network))
        else {
            return Err(limit("pictures being encoded", 0, "some, begun before"));
        };
        // Logits are not touched, but a step begun before is over.
        let work = &mut Work { device: &mut *self.device, vision, weights, tower };
        let mut left = rows;
        loop {
            let taken = encoding.chunk(work)?;
            if encoding.done == encoding.patches && !encoding.advance(vision.depth) {
                return Ok(Some(encoding.finish(vision)));
            }
            left = left.saturating_sub(taken);
            if left == 0 {
                self.encoding = Some(encoding);
                return Ok(None);
            }
        }
    }
}

fn parts(network: &Network) -> Option<(&VisionConfig, &TowerWeights, &Tower)> {
    Some((network.config.vision.as_ref()?, network.weights.tower.as_ref()?, network.tower.as_ref()?))
}

fn check(vision: &VisionConfig, picture: &Picture) -> Result<(), ModelError> {
    let [frames, rows, columns] = picture.grid;
    let whole = |side: usize| side > 0 && side.is_multiple_of(vision.merge);
    if frames != 1 || !whole(rows) || !whole(columns) {
        let expected = format!("one frame of whole {0} x {0} blocks", vision.merge);
        return Err(limit("grid of a picture", format!("{:?}", picture.grid), expected));
    }
    let expected = picture.count() * CHANNELS * vision.patch * vision.patch;
    match picture.patches.len() == expected {
        true => Ok(()),
        false => Err(limit("bytes of a picture", picture.patches.len(), expected)),
    }
}

impl Encoding {
    /// Works on the next chunk of the pass. Gives its patches.
    fn chunk(&mut self, work: &mut Work<'_>) -> Result<usize, ModelError> {
        let rows = self.done..self.patches.min(self.done + work.tower.chunk);
        match self.pass {
            Pass::Embed => self.embed(work, &rows)?,
            Pass::Keys(block) => self.keys(work, &work.weights.blocks[block], &rows)?,
            Pass::Mix(block) => self.mix(work, &work.weights.blocks[block], &rows)?,
            Pass::Merge => self.merge(work, &rows)?,
        }
        self.done = rows.end;
        Ok(rows.len())
    }

    /// To the next pass; false behind the last one.
    fn advance(&mut self, depth: usize) -> bool {
        self.done = 0;
        self.pass = match self.pass {
            Pass::Keys(block) => Pass::Mix(block),
            Pass::Merge => return false,
            Pass::Embed if depth > 0 => Pass::Keys(0),
            Pass::Mix(block) if block + 1 < depth => Pass::Keys(block + 1),
            Pass::Embed | Pass::Mix(_) => Pass::Merge,
        };
        true
    }

    fn finish(self, vision: &VisionConfig) -> Vec<Features> {
        let mut rest = &self.values[..];
        let area = vision.merge * vision.merge;
        let take = |placed: &Placed| {
            let (own, others) = rest.split_at(placed.patches.len() / area * vision.out);
            rest = others;
            Features { width: vision.out, values: own.to_vec() }
        };
        self.pictures.iter().map(take).collect()
    }

    /// Pictures that have patches among `rows`, each with its own ones counted from its first.
    fn parts<'a>(&'a self, rows: &'a Range<usize>) -> impl Iterator<Item = (&'a Placed, Range<usize>)> {
        self.pictures.iter().filter_map(|placed| {
            let own = placed.patches.start.max(rows.start)..placed.patches.end.min(rows.end);
            let first = placed.patches.start;
            (!own.is_empty()).then(|| (placed, own.start - first..own.end - first))
        })
    }

    fn embed(&self, work: &mut Work<'_>, rows: &Range<usize>) -> Result<(), ModelError> {
        let (s, v, mut at) = (&work.tower.scratch, work.vision, 0);
        for (placed, own) in self.parts(rows) {
            let (picture, count) = (&placed.picture, own.len());
            let bytes = CHANNELS * v.patch * v.patch;
            let bytes = &picture.patches[own.start * bytes..own.end * bytes];
            let pixels = Pixels { bytes, levels: &picture.levels, frames: v.frames };
            work.device.patch_rows(pixels, s.patches, at)?;
            let places: Vec<_> = own.map(|patch| position(v, picture.grid, patch)).collect();
            work.device.between_rows(work.weights.positions, &places, s.chunk, at)?;
            at += count;
        }
        work.device.linear(s.patches, rows.len(), &[(work.weights.patch.weight, s.update)])?;
        work.device.add_bias(s.chunk, s.update, rows.len(), work.weights.patch.bias)?;
        Ok(work.device.copy_values(s.chunk, 0, rows.len(), s.x, rows.start)?)
    }

    /// Begins a device step over the chunk: one window for each picture in it, and how many keys each has.
    fn begin(&self, work: &mut Work<'_>, rows: &Range<usize>) -> Result<Vec<usize>, ModelError> {
        let (mut list, mut windows, mut keys) = (Vec::new(), Vec::new(), Vec::new());
        for (place, (placed, own)) in self.parts(rows).enumerate() {
            windows.push(Window {
                place: place as u32,
                first: list.len(),
                rows: own.len(),
                start: own.start,
                pages: placed.pages.clone(),
                parents: None,
                commit: true,
            });
            keys.push(placed.patches.len());
            let columns = placed.picture.grid[2];
            list.extend(own.map(|at| {
                let [row, column] = place_of(at, columns, work.vision.merge).map(|n| n as u32);
                Row { token: None, position: [0, row, column] }
            }));
        }
        work.device.begin(&Step::new(list, windows)?)?;
        Ok(keys)
    }

    fn keys(&self, work: &mut Work<'_>, block: &Block, rows: &Range<usize>) -> Result<(), ModelError> {
        let (s, count) = (&work.tower.scratch, rows.len());
        let [q, k, v, _] = s.parts;
        work.device.copy_values(s.x, rows.start, count, s.chunk, 0)?;
        norm(work, block.norm1, count)?;
        work.device.linear(s.normed, count, &[(block.qkv.weight, s.qkv)])?;
        self.begin(work, rows)?;
        let (rotary, shape) = (work.tower.rotary, shape(work.vision));
        work.device.rope_2d(s.qkv, block.qkv.bias, rotary, shape, q, k, v)?;
        work.device.kv_append(k, v, work.tower.kv)?;
        Ok(work.device.copy_values(q, 0, count, s.q, rows.start)?)
    }

    fn mix(&self, work: &mut Work<'_>, block: &Block, rows: &Range<usize>) -> Result<(), ModelError> {
        let (s, count) = (&work.tower.scratch, rows.len());
        let [q, _, _, attended] = s.parts;
        work.device.copy_values(s.q, rows.start, count, q, 0)?;
        let keys = self.begin(work, rows)?;
        work.device.full_attention(q, shape(work.vision), work.tower.kv, &keys, attended)?;
        work.device.linear(attended, count, &[(block.proj.weight, s.update)])?;
        work.device.copy_values(s.x, rows.start, count, s.chunk, 0)?;
        work.device.add_bias(s.chunk, s.update, count, block.proj.bias)?;
        norm(work, block.norm2, count)?;
        work.device.linear(s.normed, count, &[(block.fc1.weight, s.inner)])?;
        work.device.bias(s.inner, count, block.fc1.bias, Activation::GeluTanh)?;
        work.device.linear(s.inner, count, &[(block.fc2.weight, s.update)])?;
        work.device.add_bias(s.chunk, s.update, count, block.fc2.bias)?;
        Ok(work.device.copy_values(s.chunk, 0, count, s.x, rows.start)?)
    }

    fn merge(&mut self, work: &mut Work<'_>, rows: &Range<usize>) -> Result<(), ModelError> {
        let (s, w, count) = (&work.tower.scratch, work.weights, rows.len());
        let [joined, inner] = s.merged;
        let merged = count / (work.vision.merge * work.vision.merge);
        work.device.copy_values(s.x, rows.start, count, s.chunk, 0)?;
        norm(work, w.norm, count)?;
        work.device.copy_values(s.normed, 0, count, joined, 0)?;
        work.device.linear(joined, merged, &[(w.fc1.weight, inner)])?;
        work.device.bias(inner, merged, w.fc1.bias, Activation::GeluErf)?;
        work.device.linear(inner, merged, &[(w.fc2.weight, s.out)])?;
        work.device.bias(s.out, merged, w.fc2.bias, Activation::None)?;
        let mut values = vec![0.0; merged * work.vision.out];
        work.device.read(s.out, 0, &mut values)?;
        self.values.append(&mut values);
        Ok(())
    }
}

/// LayerNorm of the chunk into `normed`.
fn norm(work: &mut Work<'_>, norm: Norm, rows: usize) -> Result<(), ModelError> {
    let s = &work.tower.scratch;
    Ok(work.device.layer_norm(s.chunk, rows, norm.weight, norm.bias, EPS, s.normed)?)
}

/// Row and column of patch `at`: blocks of `merge` x `merge` in row-major order, and so inside a block.
fn place_of(at: usize, columns: usize, merge: usize) -> [usize; 2] {
    let (block, inside) = (at / (merge * merge), at % (merge * merge));
    let across = columns / merge;
    [block / across * merge + inside / merge, block % across * merge + inside % merge]
}

/// Where patch `at` lies in the position table, whose corners lie on the picture's (`docs/model.md` section
/// 9, step 3).
fn position(vision: &VisionConfig, grid: [usize; 3], at: usize) -> Between {
    let side = vision.table_side;
    let taps = |index: usize, length: usize| {
        let source = (index * (side - 1)) as f64 / (length - 1).max(1) as f64;
        let low = source as usize;
        (low, (low + 1).min(side - 1), source - low as f64)
    };
    let [row, column] = place_of(at, grid[2], vision.merge);
    let ((top, bottom, down), (left, right, part)) = (taps(row, grid[1]), taps(column, grid[2]));
    let corner = |row: usize, column: usize| (row * side + column) as u32;
    let rows = [corner(top, left), corner(top, right), corner(bottom, left), corner(bottom, right)];
    Between { rows, parts: [down, part] }
}
