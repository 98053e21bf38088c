//! Whether pictures are taken, how many tokens they may have, and pictures from files.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::{Args, ValueEnum};
use device::Device;
use model::qwen3_5::takes_pictures;
use picture::{Limits, PictureError, Preprocessor};
use serde_json::Value;
use server::{Vision, VisionSettings};
use text::{Image, Part};

use crate::error::{Exit, Failure, Result};
use crate::input;
use crate::weights::Weights;

/// Most tokens of a picture that are chosen without being asked for: 2048 x 2048 pixels at 32 a token.
const TOKENS_AUTO: usize = 4096;
/// Longest preprocessor file, bytes.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Options of commands that take pictures.
#[derive(Clone, Debug, Args)]
pub(crate) struct VisionArgs {
    /// Whether pictures are taken; auto: if model and device can
    #[arg(long, value_enum, default_value_t = Switch::Auto, env = "CLARY_VISION")]
    pub(crate) vision: Switch,
    /// How they are read.
    #[command(flatten)]
    pub(crate) pictures: PictureArgs,
}

/// How pictures are read.
#[derive(Clone, Debug, Args)]
pub(crate) struct PictureArgs {
    /// Most tokens of a picture, larger ones are scaled down [default: from the model, at most 4096]
    #[arg(long, value_name = "N", value_parser = crate::args::count, env = "CLARY_IMAGE_MAX_TOKENS")]
    pub(crate) image_max_tokens: Option<usize>,
    /// Color behind transparent places, six hexadecimal digits
    #[arg(long, value_name = "RRGGBB", default_value = "ffffff", value_parser = color)]
    #[arg(env = "CLARY_IMAGE_BACKGROUND")]
    pub(crate) image_background: [u8; 3],
}

/// On, off, or as it comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    /// On; a failure where it cannot be.
    On,
    /// Off.
    Off,
    /// On where it can be.
    Auto,
}

fn color(text: &str) -> std::result::Result<[u8; 3], String> {
    let expected = || "six hexadecimal digits, as ffffff for white".to_owned();
    let digits = text.strip_prefix('#').unwrap_or(text);
    let number = u32::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 6).ok_or_else(expected)?;
    let [_, red, green, blue] = number.to_be_bytes();
    Ok([red, green, blue])
}

/// How pictures are read, or `None` where they are not taken.
pub(crate) fn settle(
    weights: &Weights,
    args: &VisionArgs,
    device: &mut dyn Device,
) -> Result<Option<VisionSettings>> {
    if args.vision == Switch::Off {
        return Ok(None);
    }
    let Some(geometry) = weights.config.vision.as_ref().filter(|_| weights.parts.vision) else {
        return match args.vision {
            Switch::On => Err(Failure::new(Exit::Model, "--vision on: the model has no vision tower")
                .hint("leave --vision out, or take a model that was exported with its tower")),
            _ => Ok(None),
        };
    };
    match (takes_pictures(device), args.vision) {
        (Ok(()), _) => {}
        (Err(_), Switch::Auto) => return Ok(None),
        (Err(error), _) => return Err(error.into()),
    }
    let mut settings = settings(Some(&weights.dir), &args.pictures)?;
    let own = &settings.preprocessor;
    let (found, expected) =
        ([own.patch, own.merge, own.frames], [geometry.patch, geometry.merge, geometry.frames]);
    if found != expected {
        let message = format!(
            "preprocessor_config.json: patch, merge and temporal patch sizes are {found:?}, config.json has \
             {expected:?}"
        );
        return Err(Failure::new(Exit::Model, message).hint("copy both files from the same model"));
    }
    settings.tokens_max = settings.tokens_max.min(model::qwen3_5::IMAGE_TOKENS_MAX);
    Ok(Some(settings))
}

/// What the folder's preprocessor says, or the published values, and what was typed.
pub(crate) fn settings(dir: Option<&Path>, args: &PictureArgs) -> Result<VisionSettings> {
    if let Some(dir) = dir.filter(|dir| !dir.is_dir()) {
        let message = format!("{}: no such folder", dir.display());
        return Err(Failure::new(Exit::Model, message).hint("name the folder of a model"));
    }
    let path = dir.map(|dir| dir.join("preprocessor_config.json")).filter(|path| path.exists());
    let json = path.map_or_else(|| Ok(Value::Object(Default::default())), |path| read(&path))?;
    let own = Preprocessor::from_json(&json).map_err(|error| {
        Failure::new(Exit::Model, error.to_string()).hint("--vision off runs the model without pictures")
    })?;
    let tokens = args.image_max_tokens.unwrap_or(TOKENS_AUTO);
    let settings = VisionSettings::new(&json, (own.tokens_max() > tokens).then_some(tokens));
    let settings = settings.map_err(|error| Failure::new(Exit::Model, error.to_string()))?;
    Ok(VisionSettings { background: args.image_background, ..settings })
}

fn read(path: &Path) -> Result<Value> {
    let bytes = input::file(path, CONFIG_BYTES_MAX)?;
    serde_json::from_slice(&bytes).map_err(|error| {
        let message = format!("{}: not JSON: {error}", path.display());
        Failure::new(Exit::Model, message).hint("copy the file from the model again")
    })
}

/// Threads that read pictures.
pub(crate) fn start(settings: VisionSettings) -> Result<Vision> {
    Vision::new(settings).map_err(|error| Failure::new(Exit::Failure, format!("threads: {error}")))
}

/// Bytes of a picture file.
pub(crate) fn file(path: &Path) -> Result<Vec<u8>> {
    let most = Limits::default().bytes_max as u64;
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(most + 1).read_to_end(&mut bytes));
    read.map_err(|error| Failure::file(path, &error))?;
    Ok(bytes)
}

/// A picture that is refused, by the name of its file.
pub(crate) fn refused(path: &Path, error: &PictureError) -> Failure {
    Failure::usage(format!("{}: {error}", path.display()))
        .hint("PNG, JPEG, WebP and GIF up to 20 MiB and 50 million pixels are taken")
}

/// Whether this is a picture that a model could be shown. Before a model is loaded, so with the published
/// sizes.
fn check(bytes: &[u8]) -> std::result::Result<(), PictureError> {
    let picture = picture::decode(bytes, &Limits::default(), [255; 3])?;
    let published = Preprocessor::from_json(&Value::Object(Default::default()));
    published.map_or(Ok(()), |published| published.target(picture.width, picture.height).map(drop))
}

/// A picture file as a part of a message.
pub(crate) fn part(path: &Path) -> Result<Part> {
    let bytes = file(path)?;
    check(&bytes).map_err(|error| refused(path, &error))?;
    let url = format!("data:image/auto;base64,{}", STANDARD.encode(bytes));
    Ok(Part::Image(Image { url, detail: None }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colors() {
        assert_eq!((color("ffffff"), color("#0a0B10")), (Ok([255; 3]), Ok([10, 11, 16])));
        for wrong in ["fff", "white", "-fffff", "0x0000", "1234567"] {
            assert!(color(wrong).is_err(), "{wrong}");
        }
    }
}
