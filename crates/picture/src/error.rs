//! Why a picture is refused.

use std::fmt;

/// The file formats that are read, told by content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Portable Network Graphics.
    Png,
    /// JPEG.
    Jpeg,
    /// WebP, lossy or lossless.
    WebP,
    /// Graphics Interchange Format.
    Gif,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::WebP => "WebP",
            Self::Gif => "GIF",
        })
    }
}

/// Why a picture cannot be shown to the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PictureError {
    /// The file is too long.
    #[error("the picture has {found} bytes; at most {max} are taken: save it smaller")]
    Bytes {
        /// Bytes of the file.
        found: usize,
        /// Most bytes.
        max: usize,
    },
    /// One side is too long.
    #[error("the picture is {width} x {height}; a side may have at most {max} pixels: scale it down")]
    Side {
        /// Pixels of a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Most pixels of a side.
        max: u32,
    },
    /// Too many pixels.
    #[error("the picture is {width} x {height}; at most {max} pixels are taken: scale it down")]
    Pixels {
        /// Pixels of a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Most pixels.
        max: u64,
    },
    /// Not a picture, or one of another kind.
    #[error("{found}; PNG, JPEG, WebP and GIF are read, told by content")]
    Unknown {
        /// What the bytes seem to be.
        found: &'static str,
    },
    /// A side of length 0.
    #[error("the {format} picture is {width} x {height}: there is nothing to see")]
    Empty {
        /// File format.
        format: Format,
        /// Pixels of a row.
        width: u32,
        /// Rows.
        height: u32,
    },
    /// Cut off or damaged.
    #[error("the {format} picture cannot be decoded: {reason}")]
    Broken {
        /// File format.
        format: Format,
        /// What is wrong with it.
        reason: String,
    },
    /// Too long and thin for the model.
    #[error("the picture is {width} x {height}; one side may be at most {max} times the other: crop it")]
    Aspect {
        /// Pixels of a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Largest ratio.
        max: u32,
    },
}

impl PictureError {
    /// Is the picture too large, rather than wrong?
    pub fn is_too_large(&self) -> bool {
        matches!(self, Self::Bytes { .. } | Self::Side { .. } | Self::Pixels { .. })
    }
}
