//! A plain PNG writer for every colour type, and EXIF blocks.

// Every test program compiles this module and uses its own part of it.
#![allow(dead_code)]

mod png;

use std::{fs, path::PathBuf};

pub(crate) use png::{png_chunk, stored};

/// A file of `tests/files`.
pub(crate) fn file(name: &str) -> Vec<u8> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/files")).join(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// What a PNG is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Png {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) color: u8,
    pub(crate) depth: u8,
    pub(crate) interlaced: bool,
    pub(crate) channels: usize,
}

/// Start and step of the passes of Adam7: x, y, step x, step y.
const PASSES: [[u32; 4]; 7] =
    [[0, 0, 8, 8], [4, 0, 8, 8], [0, 4, 4, 8], [2, 0, 4, 4], [0, 2, 2, 4], [1, 0, 2, 2], [0, 1, 1, 2]];

impl Png {
    /// The header chunk.
    pub(crate) fn header(&self) -> Vec<u8> {
        let mut data = [self.width.to_be_bytes(), self.height.to_be_bytes()].concat();
        data.extend([self.depth, self.color, 0, 0, u8::from(self.interlaced)]);
        [&b"\x89PNG\r\n\x1a\n"[..], &png_chunk(b"IHDR", &data)].concat()
    }

    /// The file with `extra` chunks before the pixels, whose samples are `sample(x, y, channel)`.
    pub(crate) fn write(&self, extra: &[u8], sample: impl Fn(u32, u32, usize) -> u16) -> Vec<u8> {
        let passes: &[[u32; 4]] = if self.interlaced { &PASSES } else { &[[0, 0, 1, 1]] };
        let mut raw = Vec::new();
        for &[x0, y0, dx, dy] in passes {
            if x0 >= self.width {
                continue;
            }
            for y in (y0..self.height).step_by(dy as usize) {
                raw.push(0);
                let mut bits = Vec::new();
                for x in (x0..self.width).step_by(dx as usize) {
                    for channel in 0..self.channels {
                        let value = sample(x, y, channel);
                        bits.extend((0..self.depth).rev().map(|bit| (value >> bit & 1) as u8));
                    }
                }
                let byte =
                    |bits: &[u8]| bits.iter().enumerate().fold(0, |byte, (i, bit)| byte | bit << (7 - i));
                raw.extend(bits.chunks(8).map(byte));
            }
        }
        let end = png_chunk(b"IEND", &[]);
        [self.header(), extra.to_vec(), png_chunk(b"IDAT", &stored(&raw)), end].concat()
    }
}

/// A TIFF block that holds an orientation alone.
pub(crate) fn exif(orientation: u16) -> Vec<u8> {
    let mut block = b"MM\0\x2a\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01".to_vec();
    block.extend(orientation.to_be_bytes());
    block.extend([0; 6]);
    block
}

/// A JPEG with an EXIF segment put behind its start.
pub(crate) fn jpeg_with_exif(jpeg: &[u8], orientation: u16) -> Vec<u8> {
    let block = [&b"Exif\0\0"[..], &exif(orientation)].concat();
    let length = (block.len() as u16 + 2).to_be_bytes();
    [&jpeg[..2], &[0xff, 0xe1], &length, &block, &jpeg[2..]].concat()
}
