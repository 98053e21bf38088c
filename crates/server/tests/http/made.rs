//! Files of pictures that are odd, or lie about their size.

#[path = "../../../picture/tests/support/png.rs"]
mod png_pieces;

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

pub(crate) use png_pieces::{png_chunk, stored};

/// A file of the picture crate's tests.
pub fn sample(name: &str) -> Vec<u8> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../picture/tests/files");
    std::fs::read(Path::new(path).join(name)).unwrap()
}

/// A data URL whose label says `kind`.
pub fn labelled(kind: &str, bytes: &[u8]) -> String {
    format!("data:image/{kind};base64,{}", STANDARD.encode(bytes))
}

/// A PNG header of this size.
pub fn header(width: u32, height: u32) -> Vec<u8> {
    let mut data = [width.to_be_bytes(), height.to_be_bytes()].concat();
    data.extend([8, 2, 0, 0, 0]);
    [&b"\x89PNG\r\n\x1a\n"[..], &png_chunk(b"IHDR", &data)].concat()
}

/// A PNG file whose pixels inflate to `raw`.
pub fn png(width: u32, height: u32, extra: &[u8], raw: &[u8]) -> Vec<u8> {
    let end = png_chunk(b"IEND", &[]);
    [header(width, height), extra.to_vec(), png_chunk(b"IDAT", &stored(raw)), end].concat()
}

/// `colour.jpg` with another size in its frame.
pub fn jpeg(width: u16, height: u16) -> Vec<u8> {
    let mut jpeg = sample("colour.jpg");
    let frame = jpeg.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
    jpeg[frame + 5..frame + 7].copy_from_slice(&height.to_be_bytes());
    jpeg[frame + 7..frame + 9].copy_from_slice(&width.to_be_bytes());
    jpeg
}

/// `colour.jpg` with an EXIF block behind its start.
pub fn with_exif(block: &[u8]) -> Vec<u8> {
    let jpeg = sample("colour.jpg");
    let block = [&b"Exif\0\0"[..], block].concat();
    let length = (block.len() as u16 + 2).to_be_bytes();
    [&jpeg[..2], &[0xff, 0xe1], &length, &block, &jpeg[2..]].concat()
}

/// `animated.gif` with another size of its screen.
pub fn gif(width: u16, height: u16) -> Vec<u8> {
    let mut gif = sample("animated.gif");
    gif[6..8].copy_from_slice(&width.to_le_bytes());
    gif[8..10].copy_from_slice(&height.to_le_bytes());
    gif
}

/// `lossy-alpha.webp` with another size of its canvas.
pub fn webp(width: u32, height: u32) -> Vec<u8> {
    let mut webp = sample("lossy-alpha.webp");
    assert_eq!(&webp[12..16], b"VP8X");
    webp[24..27].copy_from_slice(&(width - 1).to_le_bytes()[..3]);
    webp[27..30].copy_from_slice(&(height - 1).to_le_bytes()[..3]);
    webp
}
