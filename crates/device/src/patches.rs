//! What the first stages of the vision tower read (`docs/model.md` section 9).

use crate::DeviceError;

/// Colour channels of a prepared picture.
pub const CHANNELS: usize = 3;

/// Pixels of consecutive patches.
#[derive(Clone, Copy, Debug)]
pub struct Pixels<'a> {
    /// A byte a pixel, `[patches, CHANNELS, area]`.
    pub bytes: &'a [u8],
    /// The value of each byte, by channel.
    pub levels: &'a [[f32; 256]; CHANNELS],
    /// Times that a channel's pixels stand one after another in a row: a picture is a film that stands still.
    pub frames: usize,
}

impl Pixels<'_> {
    /// Patches, and pixels of a channel of each, for rows of `width` values.
    pub(crate) fn layout(&self, stage: &'static str, width: usize) -> Result<[usize; 2], DeviceError> {
        let (bytes, of_pixel) = (self.bytes.len(), CHANNELS * self.frames);
        if of_pixel > 0 && width > 0 && width.is_multiple_of(of_pixel) {
            let area = width / of_pixel;
            if bytes.is_multiple_of(CHANNELS * area) {
                return Ok([bytes / (CHANNELS * area), area]);
            }
        }
        let frames = self.frames;
        let message =
            format!("{bytes} pixels for rows of {width} values: {CHANNELS} channels, {frames} frames");
        Err(DeviceError::Failed { stage, message })
    }
}

/// A place between four rows of a table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Between {
    /// Rows at the corners: top left, top right, bottom left, bottom right.
    pub rows: [u32; 4],
    /// How far down it lies, and how far to the right, 0 to 1.
    pub parts: [f64; 2],
}

impl Between {
    /// The value between four values, one from each corner: along rows, then down. In f64, nothing fused.
    #[inline(always)]
    pub(crate) fn value(parts: [f64; 2], corners: [f64; 4]) -> f64 {
        let [down, right] = parts;
        let [a, b, c, d] = corners;
        let (top, bottom) = (a * (1.0 - right) + b * right, c * (1.0 - right) + d * right);
        top * (1.0 - down) + bottom * down
    }

    /// Refuses corners outside a table of `len` values in rows of `width`.
    pub(crate) fn check(
        stage: &'static str,
        between: &[Self],
        len: usize,
        width: usize,
    ) -> Result<(), DeviceError> {
        let rows = len.checked_div(width).unwrap_or(0);
        let most = between.iter().flat_map(|place| place.rows).max();
        if rows * width == len && most.is_none_or(|row| (row as usize) < rows) {
            return Ok(());
        }
        let message = format!("row {} of a table of {len} values in rows of {width}", most.unwrap_or(0));
        Err(DeviceError::Failed { stage, message })
    }
}
