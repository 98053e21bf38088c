//! Which norms hold an offset and which the sum `1 + w` (`docs/formats.md` section 2, rule 1).

use crate::{Error, Format, folder::Folder, locate, names};

/// What an RMSNorm weight of the offset kind holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Convention {
    /// `w`: Hugging Face.
    Offset,
    /// `1 + w`: MLX.
    Sum,
}

/// Conventions of the main model and of the MTP layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norms {
    main: Convention,
    mtp: Convention,
}

impl Norms {
    /// The axis order of `conv1d.weight` decides for the main model, the spelling of the experts for MTP.
    pub(crate) fn of(folder: &Folder) -> Result<Self, Error> {
        let (mut offset, mut sum) = (None, None);
        for (name, tensor) in &folder.tensors {
            if !name.starts_with(names::TEXT) || !name.ends_with(".linear_attn.conv1d.weight") {
                continue;
            }
            match tensor.shape[..] {
                [_, 1, taps] if taps != 1 => {
                    offset = offset.min(Some(&*tensor.stored)).or(Some(&*tensor.stored))
                }
                [_, taps, 1] if taps != 1 => sum = sum.min(Some(&*tensor.stored)).or(Some(&*tensor.stored)),
                _ => {}
            }
        }
        let main = match (offset, sum) {
            (Some(first), Some(second)) => {
                return Err(Error::MixedConv { first: first.to_owned(), second: second.to_owned() });
            }
            (Some(_), None) => Convention::Offset,
            (None, Some(_)) => Convention::Sum,
            // No convolution tells: then the tool does.
            (None, None) if folder.format() == Format::Mlx => Convention::Sum,
            (None, None) => Convention::Offset,
        };
        let mlp = format!("{}layers.0.mlp", names::MTP);
        let has = |module: &str| locate::is_present(folder, &format!("{mlp}.{module}"));
        let mtp = if has("switch_mlp.gate_proj") || has("switch_mlp.down_proj") {
            Convention::Sum
        } else if folder
            .tensors
            .keys()
            .any(|k| k.strip_prefix(&mlp).is_some_and(|k| k.starts_with(".experts.")))
        {
            Convention::Offset
        } else {
            main
        };
        Ok(Self { main, mtp })
    }

    /// Turns stored values into the multiplier.
    pub(crate) fn gamma(self, name: &str, stored: Vec<f32>) -> Vec<f64> {
        let convention = if name.starts_with(names::MTP) { self.mtp } else { self.main };
        // The gated norm of a linear layer is a plain multiplier everywhere.
        let is_offset = convention == Convention::Offset && !name.ends_with("linear_attn.norm.weight");
        let add = if is_offset { 1.0 } else { 0.0 };
        stored.into_iter().map(|w| f64::from(w) + add).collect()
    }
}
