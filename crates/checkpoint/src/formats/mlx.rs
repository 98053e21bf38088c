//! MLX affine: `weight`, `scales` and `biases`, rows along the input (`docs/formats.md` section 4).

use std::collections::HashMap;

use quant::{BITS_SUPPORTED, Encoding, Scheme, Zero};
use serde_json::Value;

use super::{Declared, dense, widths};
use crate::{
    Error, Format, Problem,
    config::Fields,
    folder::{Folder, Tensor},
    locate::{Layout, Module, Part},
    names,
};

/// The widths accepted, for messages.
const BITS: &str = "2, 3, 4, 5, 6 or 8";

/// The `quantization` table.
#[derive(Debug)]
pub(crate) struct Table {
    bits: u64,
    group: u64,
    /// By canonical module path.
    entries: HashMap<String, Declared>,
}

impl Table {
    /// Reads the table; the global widths must have kernels, entries are compared with tensors later.
    pub(crate) fn parse(fields: &Fields) -> Result<Self, Error> {
        check_mode(fields)?;
        let (bits, group) = (fields.required_integer("bits")?, fields.required_integer("group_size")?);
        let module = || fields.path.clone();
        if !BITS_SUPPORTED.iter().any(|&b| u64::from(b) == bits) {
            return Err(Problem::Bits { module: module(), bits, format: Format::Mlx, accepted: BITS }.into());
        }
        if !quant::GROUPS_SUPPORTED.iter().any(|&g| g as u64 == group) {
            return Err(Problem::Group { module: module(), group, format: Format::Mlx }.into());
        }
        let mut entries = HashMap::new();
        for (key, value) in fields.map {
            let declared = match value {
                Value::Bool(false) => Declared::Unquantized,
                Value::Object(_) => {
                    let entry = Fields::new(fields.key(key), value)?;
                    check_mode(&entry)?;
                    Declared::Grouped {
                        bits: entry.integer("bits")?.unwrap_or(bits),
                        group: entry.integer("group_size")?.unwrap_or(group),
                    }
                }
                _ => continue,
            };
            let name = names::canonical(key);
            if entries.insert(name, declared).is_some_and(|other| other != declared) {
                return Err(Problem::Spellings { module: key.clone() }.into());
            }
        }
        Ok(Self { bits, group, entries })
    }

    /// What the table says about a canonical module path. MTP modules may be quantized in their own way, so
    /// the global widths do not speak for them.
    pub(crate) fn declared(&self, module: &str) -> Option<Declared> {
        let global = Declared::Grouped { bits: self.bits, group: self.group };
        match self.entries.get(module) {
            Some(&entry) => Some(entry),
            None => (!module.starts_with(names::MTP)).then_some(global),
        }
    }

    /// The global group length.
    pub(crate) fn group(&self) -> u64 {
        self.group
    }
}

fn check_mode(fields: &Fields) -> Result<(), Error> {
    match fields.text("mode")? {
        None | Some("affine") => Ok(()),
        Some(mode) => Err(Error::MlxMode(mode.chars().take(60).collect())),
    }
}

/// A module `[rows, cols]`, or one per expert of `[experts, rows, cols]`; `weight` is its packed or float
/// weight.
pub(crate) fn locate(
    folder: &Folder,
    module: &str,
    weight: &Tensor,
    experts: Option<usize>,
    (rows, cols): (usize, usize),
) -> Result<Vec<Module>, Problem> {
    if weight.dtype.name() != "U32" {
        return match experts {
            Some(experts) => dense::locate_stacked(weight, [experts, rows, cols], 0, rows),
            None => dense::locate(weight, rows, cols).map(|m| vec![m]),
        };
    }
    let part = |lacks| folder.beside(weight, module, lacks);
    let (scales, biases) = (part("scales")?, part("biases")?);
    let last = |t: &Tensor| t.shape.last().copied().unwrap_or(0);
    let accepted = (&BITS_SUPPORTED[..], BITS);
    let (bits, group) = widths(Format::Mlx, cols, (weight, last(weight)), (scales, last(scales)), accepted)?;
    let shape = |inner| match experts {
        Some(experts) => vec![experts, rows, inner],
        None => vec![rows, inner],
    };
    weight.expect_shape(&shape(last(weight)))?;
    scales.expect_shape(&shape(last(scales)))?;
    biases.expect_shape(&scales.shape)?;
    let dtype = dense::float(scales)?;
    if biases.dtype != scales.dtype {
        let (tensor, found) = (biases.stored.to_string(), biases.dtype.name());
        return Err(Problem::Dtype { tensor, found, expected: dtype.name() });
    }
    let scheme = Scheme { bits, group, zero: Zero::Affine, scales: dtype };
    folder.table().agrees(module, weight, scheme)?;
    let count = experts.unwrap_or(1);
    let cut = |expert: usize| {
        let part = |tensor: &Tensor| {
            let bytes = tensor.range.len() / count;
            let start = tensor.range.start + expert * bytes;
            Part { file: tensor.file, range: start..start + bytes }
        };
        Module {
            name: weight.module().to_owned(),
            expert: experts.map(|_| expert),
            rows,
            cols,
            encoding: Encoding::Grouped(scheme),
            codes: part(weight),
            scales: Some(part(scales)),
            biases: Some(part(biases)),
            layout: Layout::Rows,
        }
    };
    Ok((0..count).map(cut).collect())
}
