//! The qwen3_5_moe family (`docs/model.md`): configuration, weights and the forward pass over any device.
//!
//! [`open`] loads a checkpoint onto a device and gives a [`Qwen`], which is the [`crate::Model`] the engine
//! drives.

mod attention;
mod config;
mod delta_net;
mod draft;
mod encode;
mod fields;
mod inventory;
mod moe;
mod mtp;
mod names;
mod network;
mod plan;
mod qwen;
mod rotary;
mod score;
mod scratch;
mod sequence;
mod snapshot;
mod tower;
mod vision_config;
mod weights;
mod windows;

pub use config::{
    CONV_TAPS_MAX, Config, EXPERT_WIDTH_MAX, EXPERTS_MAX, HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, ImageTokens,
    LAYERS_MAX, MTP_LAYERS_MAX, MixerKind, PARAMETERS_MAX, PICKS_MAX, POSITIONS_MAX, Rope, Tie,
    VOCABULARY_MAX,
};
pub use fields::ConfigError;
pub use inventory::{Parts, inventory};
pub use network::{Probe, Unprobed};
pub use plan::{IMAGE_TOKENS_MAX, MemoryPlan, PAGES_MAX, ROWS_MAX, SLOTS_MAX, SNAPSHOTS_MAX, Settings};
pub use qwen::{OpenError, Qwen, open};
pub use rotary::{PositionsError, axes, positions};
pub use score::{Scored, text_rows};
pub use tower::takes_pictures;
pub use vision_config::{DEPTH_MAX, PATCH_MAX, TABLE_MAX, VISION_HEADS_MAX, VISION_WIDTH_MAX, VisionConfig};
pub use weights::{Progress, Stored};
