//! What can be told about a file before it is decoded.

use crate::{Format, PictureError};

/// The format of these bytes, by content.
pub fn format(bytes: &[u8]) -> Option<Format> {
    if bytes.starts_with(b"\x89PNG\r\n\x1a\n") {
        return Some(Format::Png);
    }
    if bytes.starts_with(b"\xff\xd8\xff") {
        return Some(Format::Jpeg);
    }
    if bytes.starts_with(b"GIF87a") || bytes.starts_with(b"GIF89a") {
        return Some(Format::Gif);
    }
    let webp = bytes.len() >= 12 && &bytes[..4] == b"RIFF" && &bytes[8..12] == b"WEBP";
    webp.then_some(Format::WebP)
}

/// What bytes of no such format seem to be.
pub(crate) fn guess(bytes: &[u8]) -> &'static str {
    // Boxes of the ISO base media format begin with a length, and the first one names the brand.
    let brand = bytes.get(4..8).filter(|kind| kind == b"ftyp").and_then(|_| bytes.get(8..12));
    match (bytes, brand) {
        ([], _) => "there are no bytes",
        (_, Some(b"avif" | b"avis")) => "the bytes are AVIF",
        (_, Some(b"heic" | b"heix" | b"hevc" | b"heim" | b"heis" | b"mif1" | b"msf1")) => {
            "the bytes are HEIC"
        }
        (_, Some(_)) => "the bytes are a video",
        ([b'B', b'M', ..], _) => "the bytes are BMP",
        ([b'I', b'I', 42, 0, ..] | [b'M', b'M', 0, 42, ..], _) => "the bytes are TIFF",
        ([0xff, 0x0a, ..] | [0, 0, 0, 12, b'J', b'X', b'L', b' ', ..], _) => "the bytes are JPEG XL",
        ([b'%', b'P', b'D', b'F', ..], _) => "the bytes are PDF",
        ([0, 0, 1, 0, ..], _) => "the bytes are ICO",
        (text, _) if text.trim_ascii_start().starts_with(b"<") => "the bytes are SVG, XML or HTML",
        _ => "the bytes are not a picture of a known kind",
    }
}

/// Width and height, where the format has them in a fixed place; they need not be right.
pub(crate) fn declared(format: Format, bytes: &[u8]) -> Option<(u32, u32)> {
    match format {
        Format::Png if bytes.get(12..16) == Some(b"IHDR") => {
            let side = |at: usize| Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?));
            Some((side(16)?, side(20)?))
        }
        Format::Gif => {
            let side = |at: usize| Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?).into());
            Some((side(6)?, side(8)?))
        }
        _ => None,
    }
}

/// Most bytes that one byte of deflate can stand for.
const DEFLATE_RATIO: u64 = 1032;
/// Most pixels that one byte of a GIF can stand for: a code of LZW stands for at most 4096.
const GIF_RATIO: u64 = 4096;
/// Most pixels that one byte of a JPEG can stand for: a block of 64 takes a bit or more.
const JPEG_RATIO: u64 = 8 * 64;

/// Refuses a file that is far too short for its size, or visibly cut off, before memory is taken for its
/// pixels.
pub(crate) fn plausible(format: Format, bytes: &[u8], width: u32, height: u32) -> Result<(), PictureError> {
    let broken = |reason: &str| Err(PictureError::Broken { format, reason: reason.into() });
    let (width, height, length) = (u64::from(width), u64::from(height), bytes.len() as u64);
    let (size, ratio) = match format {
        Format::Png => ((width * png_bits(bytes)).div_ceil(8) * height, DEFLATE_RATIO),
        Format::Gif => (width * height, GIF_RATIO),
        Format::Jpeg => (width * height, JPEG_RATIO),
        // One color takes no bits at all.
        Format::WebP => return Ok(()),
    };
    if size > length.saturating_mul(ratio) {
        return broken("the file is too short for its size");
    }
    match format {
        // The decoder would fill what is missing with grey.
        Format::Jpeg if !jpeg_ends(bytes) => broken("the file is cut off"),
        _ => Ok(()),
    }
}

/// Bits of a stored pixel: depth and colour type stand behind the size in the first chunk.
fn png_bits(bytes: &[u8]) -> u64 {
    let [depth, color] = [24, 25].map(|at| bytes.get(at).copied().unwrap_or(0));
    let channels = match color {
        2 => 3,
        4 => 2,
        6 => 4,
        _ => 1,
    };
    u64::from(depth) * channels
}

/// Does the end marker follow the first scan? Entropy-coded data holds no markers but restarts.
fn jpeg_ends(bytes: &[u8]) -> bool {
    const SCAN: u8 = 0xda;
    const END: [u8; 2] = [0xff, 0xd9];
    let mut at = 2;
    while let Some(&[mark, kind, high, low]) = bytes.get(at..at + 4).and_then(|four| four.first_chunk()) {
        if mark != 0xff {
            return false;
        }
        if kind == 0xff {
            at += 1; // padding
            continue;
        }
        let length = usize::from(u16::from_be_bytes([high, low]));
        at += 2 + length;
        if kind == SCAN {
            return bytes.get(at..).is_some_and(|rest| rest.windows(2).any(|pair| pair == END));
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_told_by_content() {
        for (bytes, expected) in [
            (&b"\x89PNG\r\n\x1a\n...."[..], Some(Format::Png)),
            (b"\xff\xd8\xff\xe0", Some(Format::Jpeg)),
            (b"RIFF\0\0\0\0WEBPVP8 ", Some(Format::WebP)),
            (b"GIF89a", Some(Format::Gif)),
            (b"RIFF\0\0\0\0WAVE", None),
            (b"BM....", None),
            (b"", None),
            (b"\x89PNG", None),
            (b"RIFF", None),
        ] {
            assert_eq!(format(bytes), expected, "{bytes:?}");
        }
    }

    #[test]
    fn a_jpeg_needs_its_end() {
        let head = [0xff, 0xd8, 0xff, 0xe1, 0, 4, 0xff, 0xd9, 0xff, 0xda, 0, 2, 1, 2, 3];
        assert!(!jpeg_ends(&head));
        assert!(jpeg_ends(&[&head[..], &[0xff, 0xd9]].concat()));
        for cut in 0..head.len() {
            assert!(!jpeg_ends(&head[..cut]));
        }
    }
}
