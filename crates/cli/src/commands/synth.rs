//! `clary synth`: a random checkpoint that loads.

use std::time::Instant;

use serde_json::json;

use crate::args::SynthArgs;
use crate::error::Result;
use crate::origin::SynthSpec;
use crate::output::Output;
use crate::progress::{Progress, Unit};
use crate::{synth, table};

/// Writes the folder.
pub(crate) fn synth(args: &SynthArgs, output: &Output) -> Result {
    let spec = SynthSpec {
        config: args.like.clone(),
        scheme: args.scheme.clone(),
        layers: args.layers,
        experts: args.experts,
        seed: args.seed,
    };
    let weights = synth::for_folder(&spec)?;
    let companions = synth::companions(&args.like);
    let mut progress = Progress::new(output, "writing", Unit::Bytes);
    let mut bytes = 0;
    let start = Instant::now();
    checkpoint::write(&args.dir, &weights, &companions, &mut |done, total| {
        bytes = total;
        progress.set(done, total);
    })?;
    drop(progress);
    let seconds = start.elapsed().as_secs_f64();
    if output.json {
        return Ok(output.document(&json!({
            "folder": args.dir.display().to_string(),
            "bytes": bytes,
            "seconds": seconds,
            "copied": companions.len(),
        }))?);
    }
    Ok(output.out(&format!(
        "{}: {} in {seconds:.1} s, {:.2} GB/s\n",
        args.dir.display(),
        table::bytes(bytes),
        bytes as f64 / seconds.max(1e-9) / 1e9
    ))?)
}
