//! `clary synth`: a random checkpoint that loads.

use std::time::Instant;

use serde_json::json;

use crate::args::SynthArgs;
use crate::error::{Failure, Result};
use crate::interrupt::Interrupt;
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
    let interrupt = Interrupt::install()?;
    let weights = synth::for_folder(&spec)?;
    let companions = synth::companions(&args.like);
    let mut progress = Progress::new(output, "writing", Unit::Bytes);
    let mut bytes = 0;
    let start = Instant::now();
    let written = checkpoint::write(&args.dir, &weights, &companions, &mut |done, total| {
        if bytes == 0 {
            // Called first when the folder is known to have been empty.
            interrupt.partial(Some(args.dir.clone()));
        }
        bytes = total;
        progress.set(done, total);
    });
    drop(progress);
    interrupt.partial(None);
    written.map_err(|error| match &error {
        checkpoint::Error::Io { path, source } => Failure::file(path, source),
        _ => error.into(),
    })?;
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
