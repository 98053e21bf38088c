//! Bytes that are no picture for us: each case has its own answer, and nothing panics.

// A call that fails fails its test.
#![allow(clippy::unwrap_used)]

mod support;

use picture::{Format, Limits, PictureError, Preprocessor, decode, prepare};
use support::{Png, file, png_chunk};

fn refuse(bytes: &[u8]) -> PictureError {
    decode(bytes, &Limits::default(), [255; 3]).expect_err("a refusal")
}

fn png(width: u32, height: u32) -> Png {
    Png { width, height, color: 2, depth: 8, interlaced: false, channels: 3 }
}

#[test]
fn each_case_has_its_own_answer() {
    for (bytes, found) in [
        (&b""[..], "there are no bytes"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "the bytes are SVG, XML or HTML"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "the bytes are HEIC"),
        (b"\0\0\0\x18ftypavif\0\0\0\0", "the bytes are AVIF"),
        (b"\0\0\0\x18ftypisom\0\0\0\0", "the bytes are a video"),
        (b"BM\x46\0\0\0", "the bytes are BMP"),
        (b"II*\0\x08\0\0\0", "the bytes are TIFF"),
        (b"%PDF-1.7", "the bytes are PDF"),
        (b"hello", "the bytes are not a picture of a known kind"),
    ] {
        assert_eq!(refuse(bytes), PictureError::Unknown { found });
    }
    let side = |width, height| PictureError::Side { width, height, max: 16_384 };
    assert_eq!(
        refuse(&[png(20_000, 20_000).header(), png_chunk(b"IDAT", &[])].concat()),
        side(20_000, 20_000)
    );
    let pixels = PictureError::Pixels { width: 10_000, height: 10_000, max: 50_000_000 };
    assert_eq!(refuse(&[png(10_000, 10_000).header(), png_chunk(b"IDAT", &[])].concat()), pixels);
    let long = vec![0; (20 << 20) + 1];
    assert_eq!(refuse(&long), PictureError::Bytes { found: long.len(), max: 20 << 20 });
    let too_short = refuse(&[png(7000, 7000).header(), png_chunk(b"IDAT", &[1, 2, 3])].concat());
    assert!(too_short.to_string().contains("too short for its size"), "{too_short}");
    for error in [side(1, 1), pixels, PictureError::Bytes { found: 1, max: 0 }] {
        assert!(error.is_too_large());
    }
    assert!(!too_short.is_too_large() && !PictureError::Unknown { found: "" }.is_too_large());
}

/// A side is judged by itself before a decoder takes room for a row, and in words of this crate.
#[test]
fn declared_sides_are_judged_first() {
    let most = i32::MAX as u32;
    for (width, height) in [(most, most), (u32::MAX, u32::MAX), (most, 1), (1, most), (16_385, 1)] {
        let error = refuse(&[png(width, height).header(), png_chunk(b"IDAT", &[])].concat());
        assert_eq!(error, PictureError::Side { width, height, max: 16_384 });
    }
    for (width, height) in [(0, 10), (10, 0), (0, 0), (0, u32::MAX)] {
        let error = refuse(&[png(width, height).header(), png_chunk(b"IDAT", &[])].concat());
        assert_eq!(error, PictureError::Empty { format: Format::Png, width, height });
    }
}

/// What a decoder of another crate says is about its insides, and not for the people who sent a picture.
#[test]
fn refusals_have_words_of_this_crate() {
    let words = [
        "the file is cut off",
        "the file is damaged or cut off",
        "it takes more memory than its size allows",
        "it is of a rare kind",
        "the file is too short for its size",
        "its pixels do not fit its size",
    ];
    for name in
        ["colour.jpg", "progressive.jpg", "lossless.webp", "lossy.webp", "animated.gif", "lossless.webp.png"]
    {
        let whole = file(name);
        for at in (0..whole.len()).step_by(11) {
            let mut changed = whole.clone();
            changed[at] ^= 0x5a;
            for bytes in [&changed[..], &whole[..at]] {
                if let Err(PictureError::Broken { reason, .. }) = decode(bytes, &Limits::default(), [255; 3])
                {
                    assert!(words.iter().any(|word| reason.starts_with(word)), "{name}, {at}: {reason}");
                }
            }
        }
    }
}

#[test]
fn long_thin_pictures_are_refused_by_ratio() {
    let made = Preprocessor::default();
    let strip = png(401, 2).write(&[], |_, _, _| 7);
    let error = prepare(&strip, &Limits::default(), [255; 3], &made).err();
    assert_eq!(error, Some(PictureError::Aspect { width: 401, height: 2, max: 200 }));
    let strip = png(400, 2).write(&[], |_, _, _| 7);
    assert!(prepare(&strip, &Limits::default(), [255; 3], &made).is_ok());
}

#[test]
fn files_that_are_cut_off_are_refused() {
    for (name, format) in [
        ("colour.jpg", Format::Jpeg),
        ("progressive.jpg", Format::Jpeg),
        ("lossless.webp", Format::WebP),
        ("lossy.webp", Format::WebP),
        ("animated.gif", Format::Gif),
        ("lossless.webp.png", Format::Png),
    ] {
        let whole = file(name);
        // The first frame of the animation ends long before the file does.
        let most = if format == Format::Gif { whole.len() / 3 } else { whole.len() - 13 };
        for length in (12..most).step_by(7) {
            match refuse(&whole[..length]) {
                PictureError::Broken { format: found, .. } => assert_eq!(found, format),
                other => panic!("{name} cut to {length}: {other}"),
            }
        }
    }
}

/// Headers that declare 20000 x 20000 pixels.
#[test]
fn hostile_headers_are_refused_in_every_format() {
    let side = 20_000u16;
    let mut gif = file("animated.gif");
    gif[6..8].copy_from_slice(&side.to_le_bytes());
    gif[8..10].copy_from_slice(&side.to_le_bytes());
    let mut jpeg = file("colour.jpg");
    let frame = jpeg.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
    jpeg[frame + 5..frame + 7].copy_from_slice(&side.to_be_bytes());
    jpeg[frame + 7..frame + 9].copy_from_slice(&side.to_be_bytes());
    // The canvas of an extended WebP: 24 bits each, minus one.
    let mut webp = file("lossy-alpha.webp");
    assert_eq!(&webp[12..16], b"VP8X");
    let canvas = (u32::from(side) - 1).to_le_bytes();
    webp[24..27].copy_from_slice(&canvas[..3]);
    webp[27..30].copy_from_slice(&canvas[..3]);
    for bytes in [gif, jpeg, webp] {
        let error = refuse(&bytes);
        assert!(error.is_too_large(), "{error}");
    }
}

/// Any change of a few bytes gives a picture or a refusal.
#[test]
fn changed_bytes_never_panic() {
    let names = [
        "colour.jpg",
        "progressive.jpg",
        "cmyk.jpg",
        "lossy-alpha.webp",
        "lossless-alpha.webp",
        "animated.webp",
        "animated.gif",
        "transparent.gif",
        "lossless.webp.png",
    ];
    let limits = Limits { bytes_max: 1 << 20, pixels_max: 1 << 20, side_max: 4096 };
    let mut state = 5u64;
    let mut next = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for name in names {
        let whole = file(name);
        for _ in 0..400 {
            let mut bytes = whole.clone();
            for _ in 0..1 + next(4) {
                let at = next(bytes.len());
                bytes[at] = next(256) as u8;
            }
            bytes.truncate(bytes.len() - next(bytes.len() / 4));
            if let Ok(seen) = decode(&bytes, &limits, [255; 3]) {
                assert_eq!(seen.pixels.len(), (seen.width * seen.height * 3) as usize);
                assert!(seen.width.max(seen.height) <= 4096);
            }
        }
    }
}
