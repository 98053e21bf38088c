//! AutoRound in GPTQ packing: `qweight`, `qzeros` and `scales`, transposed (`docs/formats.md` section 5).

use std::collections::HashMap;

use quant::{Encoding, Scheme, Zero};
use regex::bytes::{Regex, RegexBuilder};
use serde_json::Value;

use super::{Declared, dense, widths};
use crate::{
    Error, Format, Problem, UnsupportedKind, Warning,
    config::{Fields, field},
    folder::{Folder, Tensor},
    locate::{Layout, Module},
    names,
};

/// The widths accepted, and for messages.
pub(crate) const BITS: (&[u8], &str) = (&[4, 8], "4 or 8");
/// Patterns of a table; writers make two per layer.
const PATTERNS_MAX: usize = 4096;
/// Bytes of one compiled pattern.
const PATTERN_BYTES_MAX: usize = 64 << 10;

/// `quantization_config`.
#[derive(Debug)]
pub(crate) struct Table {
    global: Declared,
    /// By canonical module path.
    names: HashMap<String, Entry>,
    /// In file order; the first match counts.
    patterns: Vec<(Regex, Entry)>,
    /// Patterns that could not be compiled.
    pub(crate) warnings: Vec<Warning>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    declared: Declared,
    symmetric: bool,
}

impl Table {
    /// Reads the table and refuses what no kernel reads.
    pub(crate) fn parse(fields: &Fields) -> Result<Self, Error> {
        fields.refuse_extras()?;
        check_data_type(fields.text("data_type")?.unwrap_or("int"))?;
        match fields.text("packing_format")? {
            Some("auto_round:auto_gptq") => {}
            other => return Err(Error::Packing(other.unwrap_or("(absent)").chars().take(60).collect())),
        }
        let module = fields.path.clone();
        if fields.is_set("desc_act") {
            return Err(Problem::ActOrder { module }.into());
        }
        if fields.flag("sym")? == Some(false) {
            return Err(Problem::Asymmetric { module }.into());
        }
        let (bits, group) = (fields.required_integer("bits")?, fields.required_integer("group_size")?);
        if !BITS.0.iter().any(|&b| u64::from(b) == bits) {
            return Err(Problem::Bits { module, bits, format: Format::AutoRound, accepted: BITS.1 }.into());
        }
        if !quant::GROUPS_SUPPORTED.iter().any(|&g| g as u64 == group) {
            return Err(Problem::Group { module, group, format: Format::AutoRound }.into());
        }
        let global = Declared::Grouped { bits, group };
        let mut table = Self { global, names: HashMap::new(), patterns: Vec::new(), warnings: Vec::new() };
        if let Some(extra) = fields.object("extra_config")? {
            for (key, value) in extra.map {
                let entry = entry(&Fields::new(extra.key(key), value)?, bits, group)?;
                table.add(&extra, key, entry)?;
            }
        }
        Ok(table)
    }

    fn add(&mut self, extra: &Fields, key: &str, entry: Entry) -> Result<(), Error> {
        self.names.insert(names::canonical(key), entry);
        // A name is no pattern: its dots would match anything, `mtp.fc` also in the middle of other names.
        if !key.contains(['*', '+', '?', '^', '$', '(', ')', '[', ']', '{', '}', '|', '\\']) {
            return Ok(());
        }
        if self.patterns.len() == PATTERNS_MAX {
            return Err(field(extra.path.clone(), &Value::from(extra.map.len()), "at most 4096 patterns"));
        }
        // The tool searches, so `.*` at either end says nothing; without it the search is a fast literal one.
        let mut inner = key;
        while let Some(rest) = inner.strip_prefix(".*") {
            inner = rest;
        }
        if let Some(rest) = inner.strip_suffix(".*").filter(|rest| !rest.ends_with('\\')) {
            inner = rest;
        }
        let build = |text| RegexBuilder::new(text).unicode(false).size_limit(PATTERN_BYTES_MAX).build();
        match build(inner).or_else(|_| build(key)) {
            Ok(pattern) => self.patterns.push((pattern, entry)),
            Err(_) => self.warnings.push(Warning::Pattern(key.chars().take(120).collect())),
        }
        Ok(())
    }

    fn entry(&self, module: &str) -> Option<Entry> {
        let matching = || self.patterns.iter().find(|(p, _)| p.is_match(module.as_bytes())).map(|&(_, e)| e);
        self.names.get(module).copied().or_else(matching)
    }

    /// What the table says about a canonical module path, and whether it is symmetric.
    pub(crate) fn declared(&self, module: &str) -> (Declared, bool) {
        self.entry(module).map_or((self.global, true), |e| (e.declared, e.symmetric))
    }
}

fn check_data_type(data_type: &str) -> Result<(), Error> {
    let kind = match data_type {
        "int" => return Ok(()),
        t if t.starts_with("mx_fp") => UnsupportedKind::Mxfp,
        t if t.starts_with("nv_fp") => UnsupportedKind::Nvfp4,
        t if t.starts_with("fp8") => UnsupportedKind::Fp8,
        t => return Err(Error::DataType(t.chars().take(60).collect())),
    };
    Err(Error::Unsupported { kind, found: format!("data_type {data_type:?}") })
}

fn entry(fields: &Fields, bits: u64, group: u64) -> Result<Entry, Error> {
    let bits = fields.integer("bits")?.unwrap_or(bits);
    // Group sizes of -1 (a whole row) occur in entries of unquantized modules.
    let group = match fields.get("group_size") {
        Some(value) if value.as_i64() == Some(-1) => 0,
        _ => fields.integer("group_size")?.unwrap_or(group),
    };
    let float = matches!(fields.text("data_type")?, Some("fp" | "float"));
    let declared =
        if float || bits >= 16 { Declared::Unquantized } else { Declared::Grouped { bits, group } };
    Ok(Entry { declared, symmetric: fields.flag("sym")?.unwrap_or(true) })
}

/// A module `[rows, cols]`; `qweight` is its packed weight.
pub(crate) fn locate(
    folder: &Folder,
    module: &str,
    qweight: &Tensor,
    (rows, cols): (usize, usize),
) -> Result<Module, Problem> {
    let part = |lacks| folder.beside(qweight, module, lacks);
    let (qzeros, scales) = (part("qzeros")?, part("scales")?);
    for tensor in [qweight, qzeros] {
        tensor.expect_dtype("I32")?;
    }
    let first = |t: &Tensor| t.shape.first().copied().unwrap_or(0);
    let (bits, group) =
        widths(Format::AutoRound, cols, (qweight, first(qweight)), (scales, first(scales)), BITS)?;
    qweight.expect_shape(&[first(qweight), rows])?;
    scales.expect_shape(&[cols / group, rows])?;
    let zero_bits = rows.checked_mul(bits.into()).filter(|n| n.is_multiple_of(32));
    let Some(zero_bits) = zero_bits else {
        return Err(qweight.shape_problem(format!("output features divisible by {}", 32 / bits)));
    };
    qzeros.expect_shape(&[cols / group, zero_bits / 32])?;
    let scheme = Scheme { bits, group, zero: Zero::Symmetric, scales: dense::float(scales)? };
    folder.table().agrees(module, qweight, scheme)?;
    Ok(Module {
        name: qweight.module().to_owned(),
        expert: None,
        rows,
        cols,
        encoding: Encoding::Grouped(scheme),
        codes: qweight.part(),
        scales: Some(scales.part()),
        biases: None,
        layout: Layout::Transposed { zeros: qzeros.part() },
    })
}
