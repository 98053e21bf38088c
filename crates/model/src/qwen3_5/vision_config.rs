//! The checked geometry of the vision tower (`docs/model.md` sections 1 and 9).

use super::fields::{ConfigError, Section};

/// Most blocks.
pub const DEPTH_MAX: usize = 256;
/// Largest width of a patch row, an inner layer or the merger.
pub const VISION_WIDTH_MAX: usize = 1 << 16;
/// Most heads.
pub const VISION_HEADS_MAX: usize = 256;
/// Most entries of the position table.
pub const TABLE_MAX: usize = 1 << 20;
/// Largest side of a patch, and most of its channels, frames and merged neighbours along an axis.
pub const PATCH_MAX: usize = 64;

/// Checked geometry of the vision tower.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Blocks.
    pub depth: usize,
    /// Width inside the tower.
    pub hidden: usize,
    /// Attention heads; divide `hidden`, and a head is a multiple of 4 wide (two axes, two halves).
    pub heads: usize,
    /// Inner width of a block's MLP.
    pub intermediate: usize,
    /// Colour channels.
    pub channels: usize,
    /// Side of a patch in pixels.
    pub patch: usize,
    /// Frames of a patch.
    pub frames: usize,
    /// Patches merged to one row along each axis.
    pub merge: usize,
    /// Side of the square position table.
    pub table_side: usize,
    /// Width of the rows that go into the text model.
    pub out: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
}

impl VisionConfig {
    /// Reads `vision_config` of the top level; `None` if there is none. Image rows must be `hidden` wide.
    pub(super) fn from_section(top: &Section<'_>, hidden: usize) -> Result<Option<Self>, ConfigError> {
        let Some(value) = top.get("vision_config") else { return Ok(None) };
        let section = Section::new(value, "vision_config")?;
        section.only("hidden_act", &["gelu_pytorch_tanh"])?;
        section.empty_list("deepstack_visual_indexes")?;
        let table = section.count("num_position_embeddings", TABLE_MAX)?;
        let table_side = table.isqrt();
        if table_side * table_side != table {
            return Err(section.error("num_position_embeddings", "a square number"));
        }
        let config = Self {
            depth: section.count("depth", DEPTH_MAX)?,
            hidden: section.count("hidden_size", VISION_WIDTH_MAX)?,
            heads: section.count("num_heads", VISION_HEADS_MAX)?,
            intermediate: section.count("intermediate_size", VISION_WIDTH_MAX)?,
            channels: section.count("in_channels", PATCH_MAX)?,
            patch: section.count("patch_size", PATCH_MAX)?,
            frames: section.count("temporal_patch_size", PATCH_MAX)?,
            merge: section.count("spatial_merge_size", PATCH_MAX)?,
            table_side,
            out: section.count("out_hidden_size", VISION_WIDTH_MAX)?,
            rope_theta: theta(&section)?,
        };
        if config.channels != 3 {
            return Err(section.error("in_channels", "3 (red, green, blue)"));
        }
        if !config.hidden.is_multiple_of(config.heads) || !(config.hidden / config.heads).is_multiple_of(4) {
            let expected = format!("a number that cuts hidden_size {} in multiples of 4", config.hidden);
            return Err(section.error("num_heads", expected));
        }
        if config.out != hidden {
            return Err(section.error("out_hidden_size", format!("hidden_size of the text model ({hidden})")));
        }
        Ok(Some(config))
    }

    /// Values of a patch row: channels, frames, rows, columns.
    pub fn patch_values(&self) -> usize {
        self.channels * self.frames * self.patch * self.patch
    }

    /// Width of a merged row.
    pub fn merged(&self) -> usize {
        self.hidden * self.merge * self.merge
    }
}

fn theta(section: &Section<'_>) -> Result<f64, ConfigError> {
    let Some(value) = section.get("rope_parameters") else { return Ok(10_000.0) };
    let rope = Section::new(value, "vision_config.rope_parameters")?;
    // transformers 5 writes `axial` for what older files do not name: rows and columns turn half of a head
    // each.
    rope.only("rope_type", &["default", "axial"])?;
    rope.only("type", &["default", "axial"])?;
    Ok(rope.positive("rope_theta")?.unwrap_or(10_000.0))
}
