//! What an engine may ask of a model, once in every form that decides kernels: rows from one to a whole
//! prompt, one window and many, drafts, trees, long sequences, pictures.

use std::sync::Arc;

use device::KvForm;
use model::qwen3_5::{Qwen, Settings};
use model::{DraftAsk, Draw, ImageRow, ImageSpec, Logits, Model, Picture, Row, SlotId, SnapshotId, Window};

use crate::subjects::Result;

/// Slots of the engine.
const SLOTS: usize = 32;
/// Most tokens of a sequence: longer than a list of attention's spans.
const CONTEXT: usize = 20_480;
/// Most rows of a step, as the command line takes them for a large card; a small one has half of them.
const ROWS_MAX: usize = 8192;
/// Pictures in rows and columns of merged blocks, so that patches, four times as many, and image rows are of
/// every class of rows.
const PICTURES: [[usize; 2]; 15] = [
    [1, 1],
    [1, 2],
    [1, 3],
    [2, 2],
    [1, 6],
    [2, 4],
    [2, 5],
    [3, 4],
    [4, 4],
    [4, 6],
    [4, 8],
    [6, 8],
    [8, 8],
    [16, 16],
    [32, 32],
];
/// Most tokens of a picture.
const IMAGE_TOKENS: usize = 1024;

/// Sizes of an engine on a card.
pub(crate) fn settings(kv: KvForm, context_max: usize) -> Settings {
    let context = CONTEXT.min(context_max);
    Settings {
        slots: SLOTS,
        snapshots: 2,
        context,
        pages: SLOTS * context.div_ceil(64),
        kv,
        rows_max: ROWS_MAX,
        logits_rows_max: 1024,
        mtp: true,
        image_tokens: IMAGE_TOKENS,
        card: true,
    }
}

/// Sequences and the model that runs them.
pub(crate) struct Tour<'a> {
    pub(crate) model: &'a mut Qwen,
    context: usize,
    lengths: [usize; SLOTS],
}

impl<'a> Tour<'a> {
    pub(crate) fn new(model: &'a mut Qwen) -> Self {
        let context = model.spec().context_max;
        Self { model, context, lengths: [0; SLOTS] }
    }

    /// Everything.
    pub(crate) fn all(&mut self) -> Result {
        self.prompts()?;
        self.company()?;
        self.drafts()?;
        self.long()?;
        self.states()?;
        self.pictures()
    }

    fn pages(&self, slot: usize) -> Vec<u32> {
        let count = self.context.div_ceil(64) as u32;
        (slot as u32 * count..(slot as u32 + 1) * count).collect()
    }

    pub(crate) fn window(&self, slot: usize, rows: usize) -> Window {
        let start = self.lengths[slot];
        let row = |at: usize| Row { token: Some(0), position: [(start + at) as u32; 3] };
        Window {
            slot: SlotId(slot as u32),
            start,
            rows: (0..rows).map(row).collect(),
            pages: self.pages(slot),
            parents: None,
            commit: true,
            logits: Logits::Last,
        }
    }

    /// Steps windows of committed tokens and draws after each.
    pub(crate) fn step(&mut self, windows: &[Window]) -> Result {
        let rows = self.model.step(windows)?;
        let draws: Vec<Draw> = (0..rows).map(draw).collect();
        self.model.draw(&draws)?;
        for window in windows.iter().filter(|window| window.commit) {
            self.lengths[window.slot.0 as usize] += window.rows.len();
        }
        Ok(())
    }

    pub(crate) fn clear(&mut self, slot: usize) -> Result {
        self.lengths[slot] = 0;
        Ok(self.model.load(SlotId(slot as u32), None)?)
    }

    /// One prompt of every class of lengths, and the rows of it that are scored.
    fn prompts(&mut self) -> Result {
        for rows in
            [1, 2, 4, 5, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 100, 128, 256, 512, 1024, 2048, 4096, ROWS_MAX]
        {
            for logits in [Logits::None, Logits::Last, Logits::All] {
                if rows > self.context || (logits == Logits::All && rows > 1024) {
                    continue;
                }
                self.clear(0)?;
                self.step(&[Window { logits, ..self.window(0, rows) }])?;
            }
        }
        Ok(())
    }

    /// Decoding streams, alone and beside a prompt.
    fn company(&mut self) -> Result {
        for slot in 0..SLOTS {
            self.clear(slot)?;
            self.step(&[self.window(slot, 5)])?;
        }
        for streams in [1, 2, 3, 4, 8, 9, 16, 17, SLOTS] {
            for rows in [1, 2, 4, 8] {
                let windows: Vec<_> = (0..streams).map(|slot| self.window(slot, rows)).collect();
                self.step(&windows)?;
            }
        }
        self.clear(0)?;
        for prompt in [20, 40, 100, 500] {
            let windows: Vec<_> =
                (0..4).map(|slot| self.window(slot, if slot == 0 { prompt } else { 1 })).collect();
            if self.lengths[0] + prompt <= self.context {
                self.step(&windows)?;
            }
        }
        Ok(())
    }

    /// Windows that wait for what is kept of them, chains and trees, and the drafts that fill them.
    fn drafts(&mut self) -> Result {
        for streams in [1, 4, SLOTS] {
            for (rows, tree) in [(2, false), (4, false), (4, true), (9, false), (17, false), (17, true)] {
                let parents = |at: usize| at.checked_sub(1).map(|before| before as u32 / 2);
                let open = |window: Window| Window {
                    commit: false,
                    parents: tree.then(|| (0..rows).map(parents).collect()),
                    logits: Logits::All,
                    ..window
                };
                let windows: Vec<_> = (0..streams).map(|slot| open(self.window(slot, rows))).collect();
                if streams * rows > 600 {
                    continue;
                }
                self.step(&windows)?;
                for slot in 0..streams {
                    let path: &[usize] = if tree && rows > 2 { &[0, 2] } else { &[0, 1] };
                    self.model.keep(SlotId(slot as u32), path)?;
                    self.lengths[slot] += path.len();
                }
                let asks: Vec<_> = (0..streams).map(|slot| self.ask(slot)).collect();
                self.model.draft(&asks)?;
            }
        }
        Ok(())
    }

    fn ask(&self, slot: usize) -> DraftAsk {
        DraftAsk {
            slot: SlotId(slot as u32),
            token: 0,
            start: self.lengths[slot],
            rope_delta: 0,
            pages: self.pages(slot),
            count: 3,
            first_max: 2,
            confidence: 0.0,
            draw: draw(0),
        }
    }

    /// A sequence as long as can be, in chunks, with rows of every kind at its end.
    fn long(&mut self) -> Result {
        self.clear(0)?;
        let room = 128;
        while self.lengths[0] + room < self.context {
            let rows = ROWS_MAX.min(self.context - room - self.lengths[0]);
            self.step(&[self.window(0, rows)])?;
            for (rows, commit) in [(1, true), (4, true), (4, false), (16, false), (20, true)] {
                if self.lengths[0] + rows < self.context {
                    self.step(&[Window { commit, ..self.window(0, rows) }])?;
                    if !commit {
                        self.model.keep(SlotId(0), &[])?;
                    }
                }
            }
        }
        Ok(())
    }

    /// States and pages to the host and back.
    fn states(&mut self) -> Result {
        self.model.save(SlotId(0), SnapshotId(0))?;
        let bytes = self.model.export_snapshot(SnapshotId(0))?;
        self.model.import_snapshot(SnapshotId(1), &bytes)?;
        let page = self.model.export_page(0)?;
        self.model.import_page(1, &page)?;
        self.model.load(SlotId(1), Some(SnapshotId(1)))?;
        self.lengths[1] = self.lengths[0];
        Ok(())
    }

    /// Pictures, small and large, and a prompt with one.
    fn pictures(&mut self) -> Result {
        let Some(spec) = self.model.image_spec() else { return Ok(()) };
        for blocks in PICTURES {
            let sides = blocks.map(|blocks| blocks * spec.merge);
            self.model.encode(&[Arc::new(picture(&spec, sides))])?;
            let features = loop {
                if let Some(features) = self.model.encode_next(usize::MAX)? {
                    break features;
                }
            };
            self.clear(0)?;
            let features = Arc::new(features.into_iter().next().ok_or("a picture has features")?);
            let mut window = self.window(0, 3);
            window.rows[1].token = None;
            self.model.step_images(&[window], &[ImageRow { row: 1, features, at: 0 }])?;
            self.lengths[0] += 3;
        }
        Ok(())
    }
}

/// A picture of so many rows and columns of patches.
pub(crate) fn picture(spec: &ImageSpec, [rows, columns]: [usize; 2]) -> Picture {
    Picture {
        grid: [1, rows, columns],
        patches: vec![0; rows * columns * 3 * spec.patch * spec.patch],
        levels: Box::new([[0.0; 256]; 3]),
        digest: [0; 32],
    }
}

fn draw(row: usize) -> Draw {
    Draw {
        row,
        temperature: 1.0,
        top_k: 20,
        top_p: 0.9,
        min_p: 0.0,
        seed: 1,
        choice: 0,
        position: 0,
        vocabulary: u32::MAX,
        top_logprobs: 2,
        adjust: Vec::new(),
        mask: None,
    }
}
