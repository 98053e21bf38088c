//! The model family behind one seam.
//!
//! [`Model`] is what the engine asks: forwards over windows of tokens, draws, drafts, and the states of slots
//! and snapshots. It holds no tensors in its signature. [`qwen3_5`] is the family; it is written once over
//! `&mut dyn device::Device`.

mod picture;
pub mod qwen3_5;
mod seam;

pub use device::{Adjust, Draw, Drawn, PAGE_TOKENS, Row, WINDOW_ROWS_MAX};
pub use picture::{Features, ImageRow, ImageSpec, Picture, place_pictures};
pub use seam::{DRAFT_MAX, Draft, DraftAsk, Logits, Model, ModelError, SlotId, SnapshotId, Spec, Window};
