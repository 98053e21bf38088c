//! Compares a folder with what the model needs: shapes and presence from headers, values on request.

use std::collections::HashSet;

use quant::{Dtype, Encoding};

use crate::{
    Error, Expected, Kind, Problem, Warning,
    folder::Folder,
    locate::{Locator, Module, Part},
    names, read,
};

/// Bytes of a tensor that are looked at together; a multiple of every float's size.
const PIECE_BYTES: usize = 16 << 20;

/// Proof that everything expected is there with the right shapes.
#[derive(Clone, Debug, Default)]
pub struct Verified {
    /// What should be said all the same.
    pub warnings: Vec<Warning>,
}

/// Checks every expected thing from headers alone; reports all problems of the first kind together.
pub(crate) fn verify(folder: &Folder, expected: &[Expected]) -> Result<Verified, Error> {
    let mut locator = Locator { folder, used: Some(HashSet::new()) };
    let mut problems = Vec::new();
    for one in expected {
        match locate(&mut locator, one) {
            Ok(Some(_)) => {}
            Ok(None) if one.optional => {}
            Ok(None) => problems.push(missing(one)),
            Err(found) => problems.extend(found),
        }
    }
    if let Some(error) = Error::first_kind(problems) {
        return Err(error);
    }
    let used = locator.used.unwrap_or_default();
    let mut warnings = folder.warnings.clone();
    // The vision tower is read only when images are served; everything else left over is worth a word.
    let left =
        folder.tensors.iter().filter(|(name, _)| !used.contains(*name) && !name.starts_with(names::VISUAL));
    let mut left: Vec<String> = left.map(|(_, tensor)| tensor.stored.to_string()).collect();
    if !left.is_empty() {
        left.sort_unstable();
        warnings.push(Warning::unused(left));
    }
    Ok(Verified { warnings })
}

/// What one expected thing is made of.
enum Found {
    Modules(Vec<Module>),
    Floats(crate::locate::Floats),
}

fn locate(locator: &mut Locator, one: &Expected) -> Result<Option<Found>, Vec<Problem>> {
    match &one.kind {
        Kind::Matrix { rows, cols } => {
            let module = locator.module(&one.name, *rows, *cols).map_err(|p| vec![p])?;
            Ok(module.map(|m| Found::Modules(vec![m])))
        }
        Kind::Experts { projection, experts, rows, cols } => locator
            .experts(&one.name, *projection, *experts, (*rows, *cols), &one.needed_by)
            .map(|m| m.map(Found::Modules)),
        Kind::Vector { shape } => floats(locator, &one.name, shape),
        Kind::Norm { len } => floats(locator, &one.name, &[*len]),
    }
}

fn floats(locator: &mut Locator, name: &str, shape: &[usize]) -> Result<Option<Found>, Vec<Problem>> {
    locator.floats(name, shape).map(|f| f.map(Found::Floats)).map_err(|p| vec![p])
}

/// The message about an absent thing names a tensor as the format at hand would.
pub(crate) fn missing(one: &Expected) -> Problem {
    let tensor = match &one.kind {
        Kind::Matrix { .. } => format!("{}.weight", one.name),
        Kind::Experts { projection, .. } => format!("{}.experts.*.{}", one.name, projection.name()),
        Kind::Vector { .. } | Kind::Norm { .. } => one.name.clone(),
    };
    Problem::Missing { tensor, needed_by: one.needed_by.clone() }
}

/// Reads every scale, bias, zero point and float and refuses those that are not finite or not in the middle.
/// `progress` gets bytes done and bytes in all.
pub(crate) fn check_values(
    folder: &Folder,
    expected: &[Expected],
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), Error> {
    let mut locator = Locator::new(folder);
    let (mut scans, mut problems) = (Vec::new(), Vec::new());
    for one in expected {
        match locate(&mut locator, one) {
            Ok(Some(Found::Modules(modules))) => scans.extend(modules.into_iter().map(Scan::Module)),
            Ok(Some(Found::Floats(floats))) => {
                scans.push(Scan::Floats { name: floats.name, dtype: floats.dtype, part: floats.part });
            }
            Ok(None) if one.optional => {}
            Ok(None) => problems.push(missing(one)),
            Err(found) => problems.extend(found),
        }
    }
    if let Some(error) = Error::first_kind(problems) {
        return Err(error);
    }
    let (mut done, total) = (0, scans.iter().map(Scan::bytes).sum());
    progress(done, total);
    let mut problems = Vec::new();
    for scan in &scans {
        problems.extend(scan.check(folder).err());
        done += scan.bytes();
        progress(done, total);
    }
    Error::first_kind(problems).map_or(Ok(()), Err)
}

enum Scan {
    Module(Module),
    Floats { name: String, dtype: Dtype, part: Part },
}

impl Scan {
    /// Bytes that are looked at.
    fn bytes(&self) -> u64 {
        match self {
            Self::Floats { part, .. } => part.range.len() as u64,
            Self::Module(m) => match m.encoding {
                Encoding::Dense(_) => m.codes.range.len() as u64,
                Encoding::Grouped(_) => {
                    [&m.scales, &m.biases].into_iter().flatten().map(|p| p.range.len() as u64).sum()
                }
            },
        }
    }

    fn check(&self, folder: &Folder) -> Result<(), Problem> {
        match self {
            Self::Floats { name, dtype, part } => finite(folder, name, "value", *dtype, part, |at| vec![at]),
            Self::Module(m) => {
                read::check_zeros(folder, m)?;
                read::check_shape(folder, m)?;
                let name = m.label();
                let scheme = match m.encoding {
                    Encoding::Dense(dtype) => {
                        let place = |at| vec![at / m.cols, at % m.cols];
                        return finite(folder, &name, "value", dtype, &m.codes, place);
                    }
                    Encoding::Grouped(scheme) => scheme,
                };
                let groups = m.cols / scheme.group;
                let transposed = matches!(m.layout, crate::locate::Layout::Transposed { .. });
                let place = |at: usize| {
                    if transposed { vec![at % m.rows, at / m.rows] } else { vec![at / groups, at % groups] }
                };
                for (what, part) in [("scale", &m.scales), ("bias", &m.biases)] {
                    if let Some(part) = part {
                        finite(folder, &name, what, scheme.scales, part, place)?;
                    }
                }
                Ok(())
            }
        }
    }
}

/// Is every float of `part` finite? `place` turns an index into coordinates for the message.
fn finite(
    folder: &Folder,
    module: &str,
    part: &'static str,
    dtype: Dtype,
    stored: &Part,
    place: impl Fn(usize) -> Vec<usize>,
) -> Result<(), Problem> {
    // A float is not finite when all exponent bits are set; they are in its upper half.
    let (size, mask) = match dtype {
        Dtype::Bf16 | Dtype::F32 => (dtype.size(), 0x7f80),
        Dtype::F16 => (2, 0x7c00),
    };
    let Part { file, range } = stored.clone();
    for start in range.clone().step_by(PIECE_BYTES) {
        let piece = Part { file, range: start..range.end.min(start + PIECE_BYTES) };
        let bad = folder.bytes(&piece)?.chunks_exact(size).position(|b| {
            let upper = u16::from_le_bytes([b[size - 2], b[size - 1]]);
            upper & mask == mask
        });
        if let Some(at) = bad {
            let at = place((start - range.start) / size + at);
            return Err(Problem::NonFinite { module: module.to_owned(), part, at });
        }
    }
    Ok(())
}
