//! Every spelling of a name becomes the Hugging Face one (`docs/formats.md` sections 2 to 4).

/// Prefix of the text model.
pub(crate) const TEXT: &str = "model.language_model.";
/// Prefix of the vision tower.
pub(crate) const VISUAL: &str = "model.visual.";
/// Prefix of the MTP layer.
pub(crate) const MTP: &str = "mtp.";
/// Prefix of the vision tower in MLX files, whose patch embedding has its channels last.
pub(crate) const MLX_VISION: &str = "vision_tower.";

/// Canonical name of a tensor or module of the main files. Expert layouts keep their spelling (`switch_mlp`).
pub(crate) fn canonical(stored: &str) -> String {
    let join = |prefix: &str, rest: &str| format!("{prefix}{rest}");
    if let Some(rest) = stored.strip_prefix("language_model.") {
        return match rest.strip_prefix("model.") {
            Some(rest) => join(TEXT, rest),
            None => rest.to_owned(), // lm_head and mtp
        };
    }
    if let Some(rest) = stored.strip_prefix(MLX_VISION) {
        return join(VISUAL, rest);
    }
    match stored.strip_prefix("model.") {
        Some(rest) if !stored.starts_with(TEXT) && !stored.starts_with(VISUAL) => join(TEXT, rest),
        _ => stored.to_owned(),
    }
}

/// Canonical name of a tensor of an MTP sidecar: everything through `mtp.` is dropped, where it is there.
pub(crate) fn canonical_sidecar(stored: &str) -> String {
    let rest = match stored.find(MTP) {
        Some(at) if at == 0 || stored.as_bytes()[at - 1] == b'.' => &stored[at + MTP.len()..],
        _ => stored,
    };
    format!("{MTP}{rest}")
}

/// The last dotted part of a name, and what is before it.
pub(crate) fn split_last(name: &str) -> (&str, &str) {
    name.rsplit_once('.').unwrap_or(("", name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_meet() {
        let check = |stored: &str, expected: &str| assert_eq!(canonical(stored), expected);
        check(
            "language_model.model.layers.0.mlp.gate.scales",
            "model.language_model.layers.0.mlp.gate.scales",
        );
        check("model.layers.0.mlp.gate.weight", "model.language_model.layers.0.mlp.gate.weight");
        check("model.language_model.norm.weight", "model.language_model.norm.weight");
        check("model.norm.weight", "model.language_model.norm.weight");
        check("language_model.lm_head.weight", "lm_head.weight");
        check("lm_head.weight", "lm_head.weight");
        check("vision_tower.pos_embed.weight", "model.visual.pos_embed.weight");
        check("model.visual.pos_embed.weight", "model.visual.pos_embed.weight");
        check("language_model.mtp.fc.weight", "mtp.fc.weight");
        check("mtp.fc.weight", "mtp.fc.weight");
        check("other", "other");
    }

    #[test]
    fn sidecar_prefixes_are_dropped() {
        for stored in ["mtp.fc.weight", "language_model.mtp.fc.weight", "model.mtp.fc.weight", "fc.weight"] {
            assert_eq!(canonical_sidecar(stored), "mtp.fc.weight");
        }
        assert_eq!(canonical_sidecar("layers.0.xmtp.weight"), "mtp.layers.0.xmtp.weight");
    }
}
