//! How the modules of a model are stored, by what they are for.

use std::collections::BTreeMap;

use checkpoint::{Checkpoint, Expected, Format, Kind, Projection};
use model::qwen3_5::inventory;

use crate::weights::{Stored, Weights};

/// Numbers of modules by class, then by form of storage. A layer's experts count once.
pub(crate) fn by_class(weights: &Weights) -> BTreeMap<&'static str, BTreeMap<String, usize>> {
    let mut classes: BTreeMap<&'static str, BTreeMap<String, usize>> = BTreeMap::new();
    if let Some(report) = weights.report().filter(|report| report.format == Format::AutoRound) {
        // Looking at one of its modules means to transpose it: the report's own list has to do.
        let schemes = report.schemes.into_iter().map(|scheme| (scheme.scheme, scheme.modules));
        return BTreeMap::from([("packed", schemes.collect())]);
    }
    for one in inventory(&weights.config, weights.parts).iter().filter(|one| is_matrix(&one.kind)) {
        let form = match &weights.stored {
            Stored::Folder(checkpoint) => form(checkpoint, one),
            Stored::Synth(synth) => Some(format!("{}, made in memory", synth.recipe())),
        };
        if let Some(form) = form {
            *classes.entry(class(one)).or_default().entry(form).or_default() += 1;
        }
    }
    classes
}

/// One of a layer's three projections stands for its experts.
fn is_matrix(kind: &Kind) -> bool {
    matches!(kind, Kind::Matrix { .. } | Kind::Experts { projection: Projection::Gate, .. })
}

/// `None`: not stored (an optional part), or not a matrix.
fn form(checkpoint: &Checkpoint, one: &Expected) -> Option<String> {
    let matrix = match one.kind {
        Kind::Matrix { rows, cols } => checkpoint.matrix(&one.name, rows, cols).ok()?,
        Kind::Experts { projection: Projection::Gate, experts, rows, cols } => {
            let all = checkpoint.experts(&one.name, Projection::Gate, experts, rows, cols).ok()?;
            all.into_iter().next()?
        }
        _ => return None,
    };
    Some(matrix.encoding().to_string())
}

fn class(one: &Expected) -> &'static str {
    let name = one.name.as_str();
    let ends = |end: &str| name.ends_with(end);
    match name {
        _ if name.starts_with("model.visual.") => "vision",
        _ if name.starts_with("mtp.") => "mtp",
        _ if matches!(one.kind, Kind::Experts { .. }) => "experts",
        _ if ends("embed_tokens") => "token table",
        _ if ends("lm_head") => "head",
        _ if ends(".mlp.gate") || ends("shared_expert_gate") => "routers and gates",
        _ if name.contains(".shared_expert.") => "shared experts",
        _ if name.contains(".self_attn.") => "attention",
        _ => "delta nets",
    }
}
