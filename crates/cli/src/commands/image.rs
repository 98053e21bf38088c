//! `clary image`: what the model sees of a picture.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use picture::{Limits, prepare};
use serde_json::json;

use crate::error::{Exit, Failure, Result};
use crate::output::Output;
use crate::target::Target;
use crate::vision::{self, PictureArgs};

/// `image`.
#[derive(Clone, Debug, Args)]
pub(crate) struct ImageArgs {
    /// PNG, JPEG, WebP or GIF
    pub(crate) file: PathBuf,
    /// Folder of the model whose sizes count [default: those of the published models]
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Where to write what the model sees
    #[arg(long, value_name = "PNG")]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) pictures: PictureArgs,
}

/// Prepares a picture and says what became of it.
pub(crate) fn image(args: &ImageArgs, output: &Output) -> Result {
    let settings = vision::settings(args.model.as_deref(), &args.pictures)?;
    let bytes = vision::file(&args.file)?;
    let prepared = prepare(&bytes, &Limits::default(), settings.background, &settings.preprocessor)
        .map_err(|error| vision::refused(&args.file, &error))?;
    if let Some(out) = &args.out {
        let seen = prepared.seen(&settings.preprocessor);
        let png = seen.to_png().map_err(|error| Failure::new(Exit::Failure, error.to_string()))?;
        let mut target = Target::create(out)?;
        let written = target.file.write_all(&png);
        written.map_err(|error| target.failed(&error))?;
        target.finish()?;
    }
    let [_, rows, columns] = prepared.grid;
    let (source, size) = (prepared.source, prepared.size);
    if output.json {
        return Ok(output.document(&json!({
            "file": args.file.display().to_string(),
            "width": source.width,
            "height": source.height,
            "seen_width": size.width,
            "seen_height": size.height,
            "grid": prepared.grid,
            "tokens": prepared.tokens,
            "sha256": crate::table::hex(&prepared.digest),
        }))?);
    }
    let text = format!(
        "picture  {} x {}\nseen     {} x {}\ngrid     {rows} x {columns} patches\ntokens   {}\nsha256   {}\n",
        source.width,
        source.height,
        size.width,
        size.height,
        prepared.tokens,
        crate::table::hex(&prepared.digest),
    );
    Ok(output.out(&text)?)
}
