//! The [`Model`] trait and the types that cross it.

use std::sync::Arc;

use device::{DeviceError, Draw, Drawn, Row, StepError};

use crate::picture::{Features, ImageRow, ImageSpec, Picture};

/// Most drafted tokens of a chain.
pub const DRAFT_MAX: usize = 8;

/// A running sequence: an index below [`Spec::slots`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

/// A saved sequence state: an index below [`Spec::snapshots`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SnapshotId(pub u32);

/// What an engine must know of a model: sizes and limits, fixed at start.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// Width of a logits row (rows of the token table).
    pub vocabulary: usize,
    /// Most tokens of one sequence, prompt and reply together.
    pub context_max: usize,
    /// Slots.
    pub slots: usize,
    /// Snapshots.
    pub snapshots: usize,
    /// K/V pages of [`device::PAGE_TOKENS`] tokens shared by all slots and the prefix cache. Pages are named
    /// by index below this.
    pub pages: usize,
    /// Most rows of one step, over all windows.
    pub rows_max: usize,
    /// Most rows of one step that may ask for logits.
    pub logits_rows_max: usize,
    /// Whether [`Model::draft`] proposes anything.
    pub has_mtp: bool,
    /// Bytes of one page, all layers.
    pub page_bytes: usize,
    /// Bytes of one snapshot.
    pub snapshot_bytes: usize,
}

/// Which rows of a window are scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: a chunk inside a prompt.
    None,
    /// The last row.
    Last,
    /// Every row.
    All,
}

/// One sequence's rows of a step. See [`device::Window`] for places, depth and parents.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// The sequence.
    pub slot: SlotId,
    /// Committed tokens before this window.
    pub start: usize,
    /// The rows.
    pub rows: Vec<Row>,
    /// K/V pages in order, covering at least `start + rows` places.
    pub pages: Vec<u32>,
    /// `None`: a chain. Else each row's earlier parent, or `None` for the committed state.
    pub parents: Option<Vec<Option<u32>>>,
    /// True: the sequence advances past all rows (chains only). False: it stays until [`Model::keep`].
    pub commit: bool,
    /// Rows to score.
    pub logits: Logits,
}

/// A wish for drafts of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftAsk {
    /// The sequence.
    pub slot: SlotId,
    /// The token that follows the committed ones: drawn, not yet stepped.
    pub token: u32,
    /// Committed tokens.
    pub start: usize,
    /// Rotary position of `token` minus `start`.
    pub rope_delta: i64,
    /// K/V pages, covering `start + count` places.
    pub pages: Vec<u32>,
    /// Most tokens of the chain, 1 to [`DRAFT_MAX`].
    pub count: usize,
    /// Most alternatives reported for the first token, at least 1.
    pub first_max: usize,
    /// The chain ends before a token whose probability under the drafter is below this.
    pub confidence: f32,
    /// How the target will draw: drafts use the same keys, temperature and cuts. `row` and `top_logprobs` are
    /// ignored; `position` is that of the first drafted token, later ones count up.
    pub draw: Draw,
}

/// Proposed tokens; they may be wrong.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Draft {
    /// The chain, possibly empty.
    pub tokens: Vec<u32>,
    /// The drafter's probability of each token of the chain.
    pub probabilities: Vec<f32>,
    /// Best alternatives for the first token with their probabilities, the chain's own first token first.
    pub first: Vec<(u32, f32)>,
}

/// What can go wrong below the engine.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A device call failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The windows of a step do not fit together.
    #[error(transparent)]
    Step(#[from] StepError),
    /// A window, slot, page or row does not fit the model's limits.
    #[error("{what}: {found} found, {expected} expected")]
    Limit {
        /// What does not fit.
        what: &'static str,
        /// What was given.
        found: String,
        /// What is possible.
        expected: String,
    },
}

/// A model on a device, ready to step.
///
/// Row purity: the logits of a position depend on the tokens up to it and the weights only; not on the window
/// or chunk it came in, other windows, slots, pages, drafts or time.
pub trait Model: Send {
    /// Sizes and limits, the same as long as the model lives.
    fn spec(&self) -> &Spec;
    /// One forward over all windows. Returns how many rows of logits it made, numbered window by window; they
    /// stay readable until the next step or draft.
    fn step(&mut self, windows: &[Window]) -> Result<usize, ModelError>;
    /// Draws from the logits of the last step.
    fn draw(&mut self, draws: &[Draw]) -> Result<Vec<Drawn>, ModelError>;
    /// Whether [`Self::step`] returns before the step is computed, so that [`Self::draw_beside`] has time.
    fn steps_ahead(&self) -> bool {
        false
    }
    /// [`Self::draw`], with something to do once while the device computes; where it does not, that comes
    /// first.
    fn draw_beside(&mut self, draws: &[Draw], meanwhile: &mut dyn FnMut()) -> Result<Vec<Drawn>, ModelError> {
        meanwhile();
        self.draw(draws)
    }
    /// Reads one row of the last step's logits, `[vocabulary]`.
    fn read_logits(&mut self, row: usize, out: &mut [f32]) -> Result<(), ModelError>;
    /// Of the slot's last uncommitted window, these rows (a path from its root; possibly empty) become part
    /// of the sequence: it then has `start + rows.len()` tokens and the bits that stepping them one by one
    /// would have given.
    fn keep(&mut self, slot: SlotId, rows: &[usize]) -> Result<(), ModelError>;
    /// Proposes tokens after `ask.token` for each sequence, all in company. An empty answer where there is no
    /// MTP.
    fn draft(&mut self, asks: &[DraftAsk]) -> Result<Vec<Draft>, ModelError>;
    /// Whether drafts may be asked of a slot from now on; so it is after [`Self::load`]. Where not, a model
    /// may spare itself what only drafts need: it still answers [`Self::draft`], from less of the sequence.
    /// Changes no other bits.
    fn expect_drafts(&mut self, _slot: SlotId, _expected: bool) -> Result<(), ModelError> {
        Ok(())
    }
    /// Saves what the slot's pages do not hold (recurrent, convolution and MTP state) at its current
    /// position.
    fn save(&mut self, slot: SlotId, into: SnapshotId) -> Result<(), ModelError>;
    /// Sets the slot to a saved state, or to the empty sequence. Pages are the caller's business: it passes
    /// the same ones (or copies with equal contents) from then on.
    fn load(&mut self, slot: SlotId, from: Option<SnapshotId>) -> Result<(), ModelError>;
    /// A snapshot as bytes, for keeping outside the device.
    fn export_snapshot(&mut self, from: SnapshotId) -> Result<Vec<u8>, ModelError>;
    /// Takes back what [`Self::export_snapshot`] gave, here or on another model of the same weights; other
    /// bytes are refused.
    fn import_snapshot(&mut self, into: SnapshotId, bytes: &[u8]) -> Result<(), ModelError>;
    /// A page as bytes, all layers, for keeping outside the device.
    fn export_page(&mut self, page: u32) -> Result<Vec<u8>, ModelError>;
    /// Takes back what [`Self::export_page`] gave, here or on another model of the same weights; other
    /// lengths are refused.
    fn import_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), ModelError>;

    /// What pictures the model takes; `None`: none.
    fn image_spec(&self) -> Option<ImageSpec> {
        None
    }
    /// Begins to encode pictures together, in place of what was being encoded. Their features do not depend
    /// on each other.
    fn encode(&mut self, _pictures: &[Arc<Picture>]) -> Result<(), ModelError> {
        Err(no_pictures())
    }
    /// Goes on encoding with at most `rows` rows of work (at least one chunk is done). `Some` once: the
    /// features, in the order of the pictures. Slots are not touched; steps may run in between.
    fn encode_next(&mut self, _rows: usize) -> Result<Option<Vec<Features>>, ModelError> {
        Err(no_pictures())
    }
    /// [`Self::step`] where rows without a token take image rows: exactly these.
    fn step_images(&mut self, windows: &[Window], images: &[ImageRow]) -> Result<usize, ModelError> {
        match images.is_empty() {
            true => self.step(windows),
            false => Err(no_pictures()),
        }
    }
}

fn no_pictures() -> ModelError {
    let expected = "a model with a vision tower, loaded with it".into();
    ModelError::Limit { what: "picture", found: "one".into(), expected }
}
