//! From the bytes of a file to opaque 8-bit RGB, as a person sees it.

use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};

use image::codecs::{gif::GifDecoder, jpeg::JpegDecoder, png::PngDecoder, webp::WebPDecoder};
use image::{DynamicImage, ImageDecoder, RgbImage, metadata::Orientation};

use crate::flatten::flatten;
use crate::header::{format, plausible};
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

/// Decodes a picture: first frame of an animation, EXIF orientation applied, transparency over `background`, 16 bits
/// reduced to 8 by rounding, embedded profiles ignored.
pub fn decode(bytes: &[u8], limits: &Limits, background: [u8; 3]) -> Result<Rgb, PictureError> {
    if bytes.len() > limits.bytes_max {
        return Err(PictureError::Bytes { found: bytes.len(), max: limits.bytes_max });
    }
    let format = format(bytes).ok_or(PictureError::Unknown)?;
    // The decoders are written not to panic; a mistake there is a broken picture here and not an outage.
    let decoded = catch_unwind(AssertUnwindSafe(|| match format {
        Format::Png => {
            // Sides are judged by `check`, which says more.
            let mut decoder_limits = image::Limits::no_limits();
            decoder_limits.max_alloc = Some(ASIDE_BYTES);
            read(
                format,
                bytes,
                limits,
                background,
                PngDecoder::with_limits(Cursor::new(bytes), decoder_limits),
            )
        }
        Format::Jpeg => read(format, bytes, limits, background, JpegDecoder::new(Cursor::new(bytes))),
        Format::WebP => read(format, bytes, limits, background, WebPDecoder::new(Cursor::new(bytes))),
        Format::Gif => read(format, bytes, limits, background, GifDecoder::new(Cursor::new(bytes))),
    }));
    decoded.unwrap_or_else(|_| broken(format, "its decoder gave up"))
}

fn broken<T>(format: Format, reason: impl ToString) -> Result<T, PictureError> {
    Err(PictureError::Broken { format, reason: reason.to_string() })
}

fn decoder_limits(limits: &Limits, bytes: u64) -> image::Limits {
    let mut decoder = image::Limits::no_limits();
    decoder.max_image_width = Some(limits.side_max);
    decoder.max_image_height = Some(limits.side_max);
    decoder.max_alloc = Some(bytes);
    decoder
}

fn read<D: ImageDecoder>(
    format: Format,
    bytes: &[u8],
    limits: &Limits,
    background: [u8; 3],
    decoder: image::ImageResult<D>,
) -> Result<Rgb, PictureError> {
    let mut decoder = decoder.or_else(|error| broken(format, error))?;
    let (width, height) = decoder.dimensions();
    check(format, limits, width, height)?;
    plausible(format, bytes, width, height)?;
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let room = decoder.total_bytes().saturating_mul(2).saturating_add(ASIDE_BYTES);
    decoder.set_limits(decoder_limits(limits, room)).or_else(|error| broken(format, error))?;
    let image = DynamicImage::from_decoder(decoder).or_else(|error| broken(format, error))?;
    let pixels = flatten(image, background);
    let image = RgbImage::from_raw(width, height, pixels);
    let Some(image) = image else { return broken(format, "its pixels do not fit its size") };
    let mut image = DynamicImage::ImageRgb8(image);
    image.apply_orientation(orientation);
    let (width, height) = (image.width(), image.height());
    Ok(Rgb { width, height, pixels: image.into_rgb8().into_raw() })
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
