//! What a folder holds, for people.

use std::collections::BTreeMap;

use quant::{Dtype, Encoding, Scheme, Zero};

use crate::{
    Format, Warning,
    folder::{Folder, Tensor},
    formats::{Declared, Table},
    locate, names,
};

/// What a checkpoint holds.
#[derive(Clone, Debug)]
pub struct Report {
    /// The format of `config.json`.
    pub format: Format,
    /// Weight files: name, bytes, tensors.
    pub files: Vec<FileReport>,
    /// Tensors and their bytes, by dtype name.
    pub dtypes: Vec<DtypeReport>,
    /// Packed modules by scheme, the rarest last. A stacked tensor of experts counts once.
    pub schemes: Vec<SchemeReport>,
    /// All tensors.
    pub tensors: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Where the MTP layer is, if it is there.
    pub mtp: Option<MtpReport>,
    /// Tensors of the vision tower; 0 if there is none.
    pub vision_tensors: usize,
    /// What opening found worth saying.
    pub warnings: Vec<Warning>,
}

/// One weight file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileReport {
    /// Plain file name.
    pub name: String,
    /// Bytes of the file.
    pub bytes: u64,
    /// Tensors read from it.
    pub tensors: usize,
}

/// Tensors of one dtype.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DtypeReport {
    /// safetensors name.
    pub dtype: &'static str,
    /// How many.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// Packed modules of one scheme.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchemeReport {
    /// The scheme, in words.
    pub scheme: String,
    /// How many modules.
    pub modules: usize,
}

/// The form of an MTP layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MtpReport {
    /// Files it is in.
    pub files: Vec<String>,
    /// Whether the file stands beside the index.
    pub sidecar: bool,
    /// Its tensors.
    pub tensors: usize,
    /// How its experts are stored: `switch_mlp`, `stacked`, `per expert` or `none`.
    pub experts: &'static str,
}

/// Gathers the report.
pub(crate) fn report(folder: &Folder) -> Report {
    let mut files: Vec<FileReport> = (folder.files.iter())
        .map(|f| FileReport { name: f.name.clone(), bytes: f.bytes, tensors: 0 })
        .collect();
    let mut dtypes: BTreeMap<&'static str, (usize, u64)> = BTreeMap::new();
    let mut schemes: BTreeMap<String, usize> = BTreeMap::new();
    let (mut bytes, mut vision_tensors) = (0, 0);
    for (name, tensor) in &folder.tensors {
        files[tensor.file].tensors += 1;
        let size = tensor.range.len() as u64;
        bytes += size;
        let entry = dtypes.entry(tensor.dtype.name()).or_default();
        *entry = (entry.0 + 1, entry.1 + size);
        vision_tensors += usize::from(name.starts_with(names::VISUAL));
        if let Some(scheme) = scheme(folder, name, tensor) {
            *schemes.entry(scheme.to_string()).or_default() += 1;
        }
    }
    let dtypes = dtypes.into_iter().map(|(dtype, (tensors, bytes))| DtypeReport { dtype, tensors, bytes });
    let schemes = schemes.into_iter().map(|(scheme, modules)| SchemeReport { scheme, modules });
    let mut schemes: Vec<_> = schemes.collect();
    schemes.sort_by_key(|s| std::cmp::Reverse(s.modules));
    Report {
        format: folder.format(),
        files,
        dtypes: dtypes.collect(),
        schemes,
        tensors: folder.tensors.len(),
        bytes,
        mtp: mtp(folder),
        vision_tensors,
        warnings: folder.warnings.clone(),
    }
}

fn mtp(folder: &Folder) -> Option<MtpReport> {
    let tensors: Vec<_> = folder.tensors.iter().filter(|(name, _)| name.starts_with(names::MTP)).collect();
    let first = tensors.first()?.1;
    let mut files: Vec<String> = tensors.iter().map(|(_, t)| folder.files[t.file].name.clone()).collect();
    files.sort_unstable();
    files.dedup();
    let mlp = format!("{}layers.0.mlp", names::MTP);
    let experts = if locate::is_present(folder, &format!("{mlp}.switch_mlp.gate_proj")) {
        "switch_mlp"
    } else if folder.tensors.contains_key(&format!("{mlp}.experts.gate_up_proj")) {
        "stacked"
    } else if locate::is_present(folder, &format!("{mlp}.experts.0.gate_proj")) {
        "per expert"
    } else {
        "none"
    };
    Some(MtpReport { files, sidecar: first.sidecar, tensors: tensors.len(), experts })
}

/// Scheme of the module whose packed weight is `tensor`. Without geometry, shapes give only `bits * group`;
/// the table or its usual group length settles the rest, and [`crate::Checkpoint::verify`] is what proves it.
fn scheme(folder: &Folder, name: &str, tensor: &Tensor) -> Option<Encoding> {
    let (module, part) = names::split_last(name);
    let get = |part| folder.get(module, part);
    let last = |t: &Tensor| t.shape.last().copied();
    let first = |t: &Tensor| t.shape.first().copied();
    let (scales, words, groups, zero) = match part {
        "weight" if tensor.dtype.name() == "U32" => {
            let scales = get("scales")?;
            (scales, last(tensor)?, last(scales)?, Zero::Affine)
        }
        "qweight" => {
            let scales = get("scales")?;
            (scales, first(tensor)?, first(scales)?, Zero::Symmetric)
        }
        "weight_packed" => {
            let scales = get("weight_scale")?;
            (scales, last(tensor)?, last(scales)?, Zero::Symmetric)
        }
        _ => return None,
    };
    let product = words.checked_mul(32)?.checked_div(groups)? as u64;
    let declared = match folder.table() {
        Table::Bf16 => None,
        Table::Mlx(table) => match table.declared(module) {
            None => Some(Declared::Grouped { bits: 0, group: table.group() }),
            declared => declared,
        },
        Table::AutoRound(table) => Some(table.declared(module).0),
        Table::CompressedTensors(table) => table.first(),
    };
    let group = match declared {
        Some(Declared::Grouped { group, .. }) if group > 0 => group,
        _ => 64,
    };
    let bits = u8::try_from(product / group).ok()?;
    let scales: Dtype = scales.dtype.float()?;
    Some(Encoding::Grouped(Scheme { bits, group: group as usize, zero, scales }))
}
