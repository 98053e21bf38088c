//! Files of pictures that are odd, or lie about their size.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// A file of the picture crate's tests.
pub fn sample(name: &str) -> Vec<u8> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../picture/tests/files");
    std::fs::read(Path::new(path).join(name)).unwrap()
}

/// A data URL whose label says `kind`.
pub fn labelled(kind: &str, bytes: &[u8]) -> String {
    format!("data:image/{kind};base64,{}", STANDARD.encode(bytes))
}

/// A chunk of a PNG file.
pub fn chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let body = [&kind[..], data].concat();
    let mut crc = u32::MAX;
    for byte in &body {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
        }
    }
    [&(data.len() as u32).to_be_bytes()[..], &body, &(!crc).to_be_bytes()].concat()
}

/// A zlib stream of stored blocks.
pub fn stored(raw: &[u8]) -> Vec<u8> {
    let mut out = vec![0x78, 0x01];
    for (at, block) in raw.chunks(65_535).enumerate() {
        let length = block.len() as u16;
        out.push(u8::from((at + 1) * 65_535 >= raw.len()));
        out.extend([length.to_le_bytes(), (!length).to_le_bytes()].concat());
        out.extend(block);
    }
    let (mut a, mut b) = (1u32, 0u32);
    for byte in raw {
        a = (a + u32::from(*byte)) % 65_521;
        b = (b + a) % 65_521;
    }
    out.extend((b << 16 | a).to_be_bytes());
    out
}

/// A PNG header of this size.
pub fn header(width: u32, height: u32) -> Vec<u8> {
    let mut data = [width.to_be_bytes(), height.to_be_bytes()].concat();
    data.extend([8, 2, 0, 0, 0]);
    [&b"\x89PNG\r\n\x1a\n"[..], &chunk(b"IHDR", &data)].concat()
}

/// A PNG file whose pixels inflate to `raw`.
pub fn png(width: u32, height: u32, extra: &[u8], raw: &[u8]) -> Vec<u8> {
    let end = chunk(b"IEND", &[]);
    [header(width, height), extra.to_vec(), chunk(b"IDAT", &stored(raw)), end].concat()
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
