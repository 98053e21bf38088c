//! One file per format: what its table in `config.json` says, and where the parts of a module are.

pub(crate) mod auto_round;
pub(crate) mod compressed_tensors;
pub(crate) mod dense;
pub(crate) mod mlx;

use quant::{GROUPS_SUPPORTED, Scheme};

use crate::{Format, Problem, folder::Tensor};

/// The quantization table of `config.json`.
#[derive(Debug)]
pub(crate) enum Table {
    /// None: plain floats.
    Bf16,
    /// MLX affine.
    Mlx(mlx::Table),
    /// AutoRound.
    AutoRound(auto_round::Table),
    /// compressed-tensors.
    CompressedTensors(compressed_tensors::Table),
}

/// What a table says about one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Declared {
    /// Plain floats.
    Unquantized,
    /// Codes of `bits` in groups of `group`.
    Grouped {
        /// Bits of a code.
        bits: u64,
        /// Columns of a group.
        group: u64,
    },
}

impl std::fmt::Display for Declared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unquantized => f.write_str("unquantized"),
            Self::Grouped { bits, group } => write!(f, "{bits} bits, group {group}"),
        }
    }
}

impl Table {
    /// The format it belongs to.
    pub(crate) fn format(&self) -> Format {
        match self {
            Self::Bf16 => Format::Bf16,
            Self::Mlx(_) => Format::Mlx,
            Self::AutoRound(_) => Format::AutoRound,
            Self::CompressedTensors(_) => Format::CompressedTensors,
        }
    }

    /// Do the widths found in the tensors of `module` agree with the table, where it says something? `tensor`
    /// is one of the packed tensors; a sidecar is not described by `config.json`.
    pub(crate) fn agrees(&self, module: &str, tensor: &Tensor, scheme: Scheme) -> Result<(), Problem> {
        let found = Declared::Grouped { bits: scheme.bits.into(), group: scheme.group as u64 };
        let declared = match self {
            _ if tensor.sidecar => return Ok(()),
            Self::Bf16 => return Ok(()),
            Self::Mlx(table) => table.declared(module),
            Self::AutoRound(table) => {
                let (declared, symmetric) = table.declared(module);
                if !symmetric {
                    return Err(Problem::Asymmetric { module: tensor.module().to_owned() });
                }
                Some(declared)
            }
            Self::CompressedTensors(table) => {
                return table.declares(found).map_err(|config| Problem::Table {
                    module: tensor.module().to_owned(),
                    config,
                    tensors: found.to_string(),
                });
            }
        };
        match declared {
            Some(declared) if declared != found => Err(Problem::Table {
                module: tensor.module().to_owned(),
                config: declared.to_string(),
                tensors: found.to_string(),
            }),
            _ => Ok(()),
        }
    }
}

/// Bits and group from sizes: `code_words` 32-bit words and `scale_cols` scales along `cols` columns, in
/// tensors `codes` and `scales` of `format`. `accepted` widths are listed as `accepted_text`.
pub(crate) fn widths(
    format: Format,
    cols: usize,
    (codes, code_words): (&Tensor, usize),
    (scales, scale_cols): (&Tensor, usize),
    (accepted, accepted_text): (&[u8], &'static str),
) -> Result<(u8, usize), Problem> {
    let shape = |tensor: &Tensor, what: &str| Problem::Shape {
        tensor: tensor.stored.to_string(),
        found: tensor.shape.clone(),
        expected: format!("{what} for {cols} input features"),
    };
    let bits = (code_words as u128 * 32).checked_div(cols as u128).unwrap_or(0);
    if bits == 0 || bits * cols as u128 != code_words as u128 * 32 {
        return Err(shape(codes, "a whole number of bits"));
    }
    let Some(&bits) = accepted.iter().find(|&&b| b as u128 == bits) else {
        let bits = u64::try_from(bits).unwrap_or(u64::MAX);
        let module = codes.module().to_owned();
        return Err(Problem::Bits { module, bits, format, accepted: accepted_text });
    };
    let group = cols.checked_div(scale_cols).unwrap_or(0);
    if group == 0 || group * scale_cols != cols {
        return Err(shape(scales, "a whole number of groups"));
    }
    if !GROUPS_SUPPORTED.contains(&group) {
        let module = codes.module().to_owned();
        return Err(Problem::Group { module, group: group as u64, format });
    }
    Ok((bits, group))
}
