//! compressed-tensors pack-quantized: `weight_packed`, `weight_scale` and `weight_shape`, rows along the
//! input (`docs/formats.md` section 6).

use quant::{Encoding, Scheme, Zero};
use serde_json::Value;

use super::{Declared, auto_round::BITS, dense, widths};
use crate::{
    Error, Format, Problem, UnsupportedKind,
    config::{Fields, field},
    folder::{Folder, Tensor},
    locate::{Layout, Module},
};

/// Widths of all config groups. Targets and `ignore` are not needed: the tensors say which modules are
/// packed.
#[derive(Debug)]
pub(crate) struct Table {
    groups: Vec<Declared>,
}

impl Table {
    /// Reads `quantization_config` and refuses what no kernel reads.
    pub(crate) fn parse(fields: &Fields) -> Result<Self, Error> {
        check_format(fields.text("format")?)?;
        fields.refuse_extras()?;
        let Some(list) = fields.object("config_groups")? else {
            return Err(field(fields.key("config_groups"), &Value::Null, "an object"));
        };
        let mut groups = Vec::new();
        for (name, value) in list.map {
            let group = Fields::new(list.key(name), value)?;
            if let Some(format) = group.text("format")? {
                check_format(Some(format))?;
            }
            group.refuse_extras()?;
            if let Some(weights) = group.object("weights")? {
                groups.push(parse_weights(name, &weights)?);
            }
        }
        Ok(Self { groups })
    }

    /// Is this pair declared by some group? Otherwise the pairs that are.
    pub(crate) fn declares(&self, found: Declared) -> Result<(), String> {
        if self.groups.contains(&found) {
            return Ok(());
        }
        let list: Vec<String> = self.groups.iter().take(5).map(Declared::to_string).collect();
        Err(if list.is_empty() { "nothing is quantized".into() } else { list.join(" or ") })
    }

    /// The first group's widths, for counting modules without geometry.
    pub(crate) fn first(&self) -> Option<Declared> {
        self.groups.first().copied()
    }
}

fn check_format(format: Option<&str>) -> Result<(), Error> {
    let kind = match format {
        Some("pack-quantized") => return Ok(()),
        Some(f) if f.starts_with("nvfp4") => UnsupportedKind::Nvfp4,
        Some(f) if f.starts_with("mxfp") => UnsupportedKind::Mxfp,
        Some("float-quantized" | "naive-quantized") => UnsupportedKind::Fp8,
        other => {
            return Err(Error::CompressedFormat(other.unwrap_or("(absent)").chars().take(60).collect()));
        }
    };
    Err(Error::Unsupported { kind, found: format!("format {:?}", format.unwrap_or_default()) })
}

fn parse_weights(name: &str, weights: &Fields) -> Result<Declared, Error> {
    let module = || format!("config group {name:?}");
    let bits = weights.required_integer("num_bits")?;
    match weights.text("type")? {
        None | Some("int") => {}
        Some(kind) => {
            let float = if bits == 4 { UnsupportedKind::Nvfp4 } else { UnsupportedKind::Fp8 };
            return Err(Error::Unsupported { kind: float, found: format!("{}: type {kind:?}", module()) });
        }
    }
    if weights.is_set("actorder") {
        return Err(Problem::ActOrder { module: module() }.into());
    }
    if weights.flag("symmetric")? == Some(false) {
        return Err(Problem::Asymmetric { module: module() }.into());
    }
    let strategy = weights.text("strategy")?.unwrap_or("(absent)");
    if strategy != "group" {
        let strategy = strategy.chars().take(60).collect();
        return Err(Error::Strategy { group: name.to_owned(), strategy });
    }
    let (format, group) = (Format::CompressedTensors, weights.required_integer("group_size")?);
    if !BITS.0.iter().any(|&b| u64::from(b) == bits) {
        return Err(Problem::Bits { module: module(), bits, format, accepted: BITS.1 }.into());
    }
    if !quant::GROUPS_SUPPORTED.iter().any(|&g| g as u64 == group) {
        return Err(Problem::Group { module: module(), group, format }.into());
    }
    Ok(Declared::Grouped { bits, group })
}

/// A module `[rows, cols]`; `packed` is its packed weight.
pub(crate) fn locate(
    folder: &Folder,
    module: &str,
    packed: &Tensor,
    (rows, cols): (usize, usize),
) -> Result<Module, Problem> {
    let part = |lacks| folder.beside(packed, module, lacks);
    let (scale, shape) = (part("weight_scale")?, part("weight_shape")?);
    packed.expect_dtype("I32")?;
    shape.expect_dtype("I64")?;
    shape.expect_shape(&[2])?;
    let last = |t: &Tensor| t.shape.last().copied().unwrap_or(0);
    let (bits, group) =
        widths(Format::CompressedTensors, cols, (packed, last(packed)), (scale, last(scale)), BITS)?;
    packed.expect_shape(&[rows, last(packed)])?;
    scale.expect_shape(&[rows, cols / group])?;
    let scheme = Scheme { bits, group, zero: Zero::Symmetric, scales: dense::float(scale)? };
    folder.table().agrees(module, packed, scheme)?;
    Ok(Module {
        name: packed.module().to_owned(),
        expert: None,
        rows,
        cols,
        encoding: Encoding::Grouped(scheme),
        codes: packed.part(),
        scales: Some(scale.part()),
        biases: None,
        layout: Layout::Shaped { shape: shape.part() },
    })
}
