//! Canonical tensor and module names (`docs/formats.md` section 2).

/// The token table.
pub(super) const TABLE: &str = "model.language_model.embed_tokens";
/// The head, where it is stored.
pub(super) const HEAD: &str = "lm_head";
/// The final norm.
pub(super) const NORM: &str = "model.language_model.norm.weight";
/// Prefix of the MTP layer.
pub(super) const MTP: &str = "mtp.";
/// The MTP layer's own token table, where one is stored.
pub(super) const MTP_EMBED: &str = "mtp.embed_tokens";
/// The MTP layer's own head, where one is stored.
pub(super) const MTP_HEAD: &str = "mtp.lm_head";
/// Prefix of the vision tower.
pub(super) const VISION: &str = "model.visual.";

/// The names of one layer.
pub(super) struct Layer(String);

impl Layer {
    /// Layer `index` of the text model.
    pub(super) fn text(index: usize) -> Self {
        Self(format!("model.language_model.layers.{index}."))
    }

    /// The block of the MTP layer.
    pub(super) fn mtp() -> Self {
        Self(format!("{MTP}layers.0."))
    }

    pub(super) fn input_norm(&self) -> String {
        format!("{}input_layernorm.weight", self.0)
    }

    pub(super) fn post_norm(&self) -> String {
        format!("{}post_attention_layernorm.weight", self.0)
    }

    pub(super) fn delta(&self, rest: &str) -> String {
        format!("{}linear_attn.{rest}", self.0)
    }

    pub(super) fn attention(&self, rest: &str) -> String {
        format!("{}self_attn.{rest}", self.0)
    }

    pub(super) fn mlp(&self, rest: &str) -> String {
        format!("{}mlp.{rest}", self.0)
    }

    /// The path that names the routed experts.
    pub(super) fn mlp_path(&self) -> String {
        format!("{}mlp", self.0)
    }
}
