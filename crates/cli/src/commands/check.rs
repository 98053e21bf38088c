//! `clary check`: every shape, offset and width, and the values a refusal rests on.

use checkpoint::{Checkpoint, Expected};
use model::qwen3_5::inventory;
use serde_json::json;

use crate::args::CheckArgs;
use crate::error::{Failure, Result};
use crate::output::Output;
use crate::progress::{Progress, Unit};
use crate::table;
use crate::weights::{Stored, Weights};

/// Checks a folder and prints one line.
pub(crate) fn check(args: &CheckArgs, output: &Output) -> Result {
    let weights = Weights::open(&args.model)?;
    let expected = inventory(&weights.config, weights.parts);
    match &weights.stored {
        Stored::Folder(checkpoint) => values(checkpoint, &expected, output)?,
        Stored::Synth(_) => {
            return Err(Failure::usage("synthetic weights have no files to check")
                .hint("`clary synth` writes them to a folder"));
        }
    }
    let report = weights.report().expect("a folder has a report");
    let warnings: Vec<String> = weights.warnings.iter().map(ToString::to_string).collect();
    if output.json {
        return Ok(output.document(&json!({
            "ok": true,
            "format": report.format.to_string(),
            "tensors": report.tensors,
            "bytes": report.bytes,
            "files": report.files.len(),
            "expected": expected.len(),
            "mtp": weights.parts.mtp,
            "vision": weights.parts.vision,
            "warnings": warnings,
        }))?);
    }
    let with =
        |there: bool, name: &str| if there { format!(", with {name}") } else { format!(", no {name}") };
    output.out(&format!(
        "ok: {}, {} tensors in {} file{}, {}{}{}, {} warning{}\n",
        report.format,
        table::grouped(report.tensors as u64),
        report.files.len(),
        plural(report.files.len()),
        table::bytes(report.bytes),
        with(weights.parts.mtp, "MTP"),
        with(weights.parts.vision, "vision"),
        warnings.len(),
        plural(warnings.len()),
    ))?;
    for warning in warnings {
        output.out(&format!("warning: {warning}\n"))?;
    }
    Ok(())
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

fn values(checkpoint: &Checkpoint, expected: &[Expected], output: &Output) -> Result {
    let mut progress = Progress::new(output, "checking", Unit::Bytes);
    Ok(checkpoint.check_values(expected, &mut |done, total| progress.set(done, total))?)
}
