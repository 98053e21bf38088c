//! From the bytes of a file to opaque 8-bit RGB, as a person sees it.

use std::io::{Cursor, ErrorKind};
use std::panic::{AssertUnwindSafe, catch_unwind};

use image::codecs::png::{PngDecoder, PngEncoder};
use image::codecs::{gif::GifDecoder, jpeg::JpegDecoder, webp::WebPDecoder};
use image::error::{ImageError, LimitErrorKind};
use image::metadata::Orientation;
use image::{DynamicImage, ExtendedColorType, ImageDecoder, ImageEncoder, RgbImage};

use crate::flatten::flatten;
use crate::header::{declared, format, guess, plausible};
use crate::{Format, PictureError};

/// Memory a decoder may take beside the pixels: tables, rows, and the profiles it is asked to ignore.
const ASIDE_BYTES: u64 = 16 << 20;

/// What a picture may be (`docs/api.md` section 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of the file.
    pub bytes_max: usize,
    /// Most pixels.
    pub pixels_max: u64,
    /// Most pixels of a side.
    pub side_max: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes_max: 20 << 20, pixels_max: 50_000_000, side_max: 16_384 }
    }
}

/// An opaque picture, `[height, width, 3]` bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rgb {
    /// Pixels of a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// Red, green, blue of each pixel, row by row.
    pub pixels: Vec<u8>,
}

impl Rgb {
    /// The picture as a PNG file.
    pub fn to_png(&self) -> Result<Vec<u8>, PictureError> {
        let mut bytes = Vec::new();
        let encoder = PngEncoder::new(&mut bytes);
        let written = encoder.write_image(&self.pixels, self.width, self.height, ExtendedColorType::Rgb8);
        written.or_else(|error| broken(Format::Png, reason(&error)))?;
        Ok(bytes)
    }
}

/// Width and height that the header of a picture declares, before orientation. Refuses what [`decode`]
/// refuses from headers alone.
pub fn size(bytes: &[u8], limits: &Limits) -> Result<(u32, u32), PictureError> {
    with_decoder(bytes, limits, Measure)
}

/// Decodes a picture: first frame of an animation, EXIF orientation applied, transparency over
/// `background`, 16 bits reduced to 8 by rounding, embedded profiles ignored.
pub fn decode(bytes: &[u8], limits: &Limits, background: [u8; 3]) -> Result<Rgb, PictureError> {
    with_decoder(bytes, limits, Read { background })
}

/// What is done with a decoder whose header is within limits.
trait Task {
    type Out;
    fn run<D: ImageDecoder>(
        self,
        format: Format,
        decoder: D,
        limits: &Limits,
    ) -> Result<Self::Out, PictureError>;
}

fn with_decoder<T: Task>(bytes: &[u8], limits: &Limits, task: T) -> Result<T::Out, PictureError> {
    if bytes.len() > limits.bytes_max {
        return Err(PictureError::Bytes { found: bytes.len(), max: limits.bytes_max });
    }
    let format = format(bytes).ok_or_else(|| PictureError::Unknown { found: guess(bytes) })?;
    if let Some((width, height)) = declared(format, bytes) {
        // Before a decoder takes room for a row.
        check(format, limits, width, height)?;
    }
    // The decoders are written not to panic; a mistake there is a broken picture here and not an outage.
    let done = catch_unwind(AssertUnwindSafe(|| match format {
        Format::Png => {
            // Sides are judged by `check`, which says more.
            let mut decoder_limits = image::Limits::no_limits();
            decoder_limits.max_alloc = Some(ASIDE_BYTES);
            checked(format, bytes, limits, task, PngDecoder::with_limits(Cursor::new(bytes), decoder_limits))
        }
        Format::Jpeg => checked(format, bytes, limits, task, JpegDecoder::new(Cursor::new(bytes))),
        Format::WebP => checked(format, bytes, limits, task, WebPDecoder::new(Cursor::new(bytes))),
        Format::Gif => checked(format, bytes, limits, task, GifDecoder::new(Cursor::new(bytes))),
    }));
    done.unwrap_or_else(|_| broken(format, "its decoder gave up"))
}

fn broken<T>(format: Format, reason: &str) -> Result<T, PictureError> {
    Err(PictureError::Broken { format, reason: reason.to_owned() })
}

/// A decoder's complaint in words of this crate: its own are about its insides.
fn reason(error: &ImageError) -> &'static str {
    match error {
        ImageError::IoError(error) if error.kind() == ErrorKind::UnexpectedEof => "the file is cut off",
        ImageError::Limits(limit) if matches!(limit.kind(), LimitErrorKind::InsufficientMemory) => {
            "it takes more memory than its size allows"
        }
        ImageError::Unsupported(_) => "it is of a rare kind that is not read; save it in the usual way",
        _ => "the file is damaged or cut off",
    }
}

fn decoder_limits(limits: &Limits, bytes: u64) -> image::Limits {
    let mut decoder = image::Limits::no_limits();
    decoder.max_image_width = Some(limits.side_max);
    decoder.max_image_height = Some(limits.side_max);
    decoder.max_alloc = Some(bytes);
    decoder
}

/// Holds the header against the limits, then runs the task.
fn checked<D: ImageDecoder, T: Task>(
    format: Format,
    bytes: &[u8],
    limits: &Limits,
    task: T,
    decoder: image::ImageResult<D>,
) -> Result<T::Out, PictureError> {
    let decoder = decoder.or_else(|error| broken(format, reason(&error)))?;
    let (width, height) = decoder.dimensions();
    check(format, limits, width, height)?;
    plausible(format, bytes, width, height)?;
    task.run(format, decoder, limits)
}

/// Width and height alone.
struct Measure;

impl Task for Measure {
    type Out = (u32, u32);

    fn run<D: ImageDecoder>(self, _: Format, decoder: D, _: &Limits) -> Result<(u32, u32), PictureError> {
        Ok(decoder.dimensions())
    }
}

/// The pixels, as a person sees them.
struct Read {
    background: [u8; 3],
}

impl Task for Read {
    type Out = Rgb;

    fn run<D: ImageDecoder>(
        self,
        format: Format,
        mut decoder: D,
        limits: &Limits,
    ) -> Result<Rgb, PictureError> {
        let (width, height) = decoder.dimensions();
        let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
        let room = decoder.total_bytes().saturating_mul(2).saturating_add(ASIDE_BYTES);
        decoder.set_limits(decoder_limits(limits, room)).or_else(|error| broken(format, reason(&error)))?;
        let color = decoder.color_type();
        let length = usize::try_from(decoder.total_bytes()).unwrap_or(usize::MAX);
        let mut stored = Vec::new();
        if stored.try_reserve_exact(length).is_err() {
            return broken(format, "there is no memory for it");
        }
        stored.resize(length, 0);
        decoder.read_image(&mut stored).or_else(|error| broken(format, reason(&error)))?;
        let Some(pixels) = flatten(stored, color, self.background) else {
            return broken(format, "its colours are of a kind that is not read");
        };
        let image = RgbImage::from_raw(width, height, pixels);
        let Some(image) = image else { return broken(format, "its pixels do not fit its size") };
        let mut image = DynamicImage::ImageRgb8(image);
        image.apply_orientation(orientation);
        let (width, height) = (image.width(), image.height());
        Ok(Rgb { width, height, pixels: image.into_rgb8().into_raw() })
    }
}

fn check(format: Format, limits: &Limits, width: u32, height: u32) -> Result<(), PictureError> {
    if width == 0 || height == 0 {
        return Err(PictureError::Empty { format, width, height });
    }
    if width.max(height) > limits.side_max {
        return Err(PictureError::Side { width, height, max: limits.side_max });
    }
    if u64::from(width) * u64::from(height) > limits.pixels_max {
        return Err(PictureError::Pixels { width, height, max: limits.pixels_max });
    }
    Ok(())
}
