//! Every format, colour type, depth and orientation shows what a person sees.

// A call that fails fails its test.
#![allow(clippy::unwrap_used)]

mod support;

use picture::{Limits, Rgb, decode};
use support::{Png, exif, file, jpeg_with_exif, png_chunk};

fn see(bytes: &[u8]) -> Rgb {
    decode(bytes, &Limits::default(), [255; 3]).unwrap()
}

/// Fails unless both have one size and no value differs by more than `most`.
#[track_caller]
fn close(what: &str, found: &Rgb, expected: &Rgb, most: u8) {
    assert_eq!((found.width, found.height), (expected.width, expected.height), "{what}");
    let worst = found.pixels.iter().zip(&expected.pixels).map(|(a, b)| a.abs_diff(*b)).max();
    assert!(worst <= Some(most), "{what}: {worst:?} levels off, at most {most} expected");
}

#[test]
fn files_of_other_writers_are_read() {
    // Another decoder rounds its colour conversion and upsampling elsewhere.
    for (name, most) in [
        ("lossless.webp", 0),
        ("lossless-alpha.webp", 1),
        ("lossy.webp", 4),
        ("lossy-alpha.webp", 4),
        ("animated.webp", 0),
        ("animated.gif", 0),
        ("transparent.gif", 0),
        ("colour.jpg", 3),
        ("subsampled.jpg", 24),
        ("progressive.jpg", 24),
        ("grey.jpg", 1),
        ("cmyk.jpg", 6),
    ] {
        close(name, &see(&file(name)), &see(&file(&format!("{name}.png"))), most);
    }
}

/// What a stored sample of `depth` bits means as 8 bits.
fn level(sample: u16, depth: u8) -> u8 {
    let most = ((1u32 << depth) - 1) as f64;
    (f64::from(sample) * 255.0 / most).round() as u8
}

fn blend(color: u8, alpha: u8) -> u8 {
    let a = f64::from(alpha) / 255.0;
    (f64::from(color) * a + 255.0 * (1.0 - a)).round() as u8
}

#[test]
fn every_png_colour_type_depth_and_interlace() {
    let (width, height) = (13u32, 11u32);
    for (color, channels, depths) in [
        (0u8, 1usize, &[1u8, 2, 4, 8, 16][..]),
        (2, 3, &[8, 16]),
        (3, 1, &[1, 2, 4, 8]),
        (4, 2, &[8, 16]),
        (6, 4, &[8, 16]),
    ] {
        for &depth in depths {
            for interlaced in [false, true] {
                for hidden in [false, true] {
                    check_png(Png { width, height, color, depth, interlaced, channels }, hidden);
                }
            }
        }
    }
}

/// `hidden`: one sample value (or palette entries) is transparent.
fn check_png(png: Png, hidden: bool) {
    let most = (1u32 << png.depth) - 1;
    let sample = |x: u32, y: u32, c: usize| ((x * 31 + y * 17 + c as u32 * 57) * 9973 % (most + 1)) as u16;
    let palette: Vec<[u8; 3]> =
        (0..=most.min(255)).map(|i| [(i * 5) as u8, (255 - i) as u8, (i * i) as u8]).collect();
    let mut extra = Vec::new();
    if png.color == 3 {
        extra.extend(png_chunk(b"PLTE", &palette.concat()));
    }
    let key: Vec<u16> = (0..png.channels).map(|c| sample(3, 2, c)).collect();
    if hidden {
        match png.color {
            0 | 2 => {
                let bytes: Vec<u8> = key.iter().flat_map(|k| k.to_be_bytes()).collect();
                extra.extend(png_chunk(b"tRNS", &bytes));
            }
            3 => extra.extend(png_chunk(b"tRNS", &[0, 128])),
            _ => return,
        }
    }
    let found = see(&png.write(&extra, sample));
    for y in 0..png.height {
        for x in 0..png.width {
            let samples: Vec<u16> = (0..png.channels).map(|c| sample(x, y, c)).collect();
            let levels: Vec<u8> = samples.iter().map(|s| level(*s, png.depth)).collect();
            let (rgb, alpha) = match png.color {
                0 => ([levels[0]; 3], if hidden && samples == key { 0 } else { 255 }),
                2 => ([levels[0], levels[1], levels[2]], if hidden && samples == key { 0 } else { 255 }),
                3 => {
                    let alpha = match samples[0] {
                        0 if hidden => 0,
                        1 if hidden => 128,
                        _ => 255,
                    };
                    (palette[usize::from(samples[0])], alpha)
                }
                4 => ([levels[0]; 3], levels[1]),
                _ => ([levels[0], levels[1], levels[2]], levels[3]),
            };
            let at = ((y * png.width + x) * 3) as usize;
            let expected = rgb.map(|color| blend(color, alpha));
            assert_eq!(found.pixels[at..at + 3], expected, "{png:?} hidden {hidden} at {x}, {y}");
        }
    }
}

/// Pixel of the turned picture at (x, y) by the meaning of each EXIF orientation.
fn turned(upright: &Rgb, orientation: u16, x: u32, y: u32) -> [u8; 3] {
    let (w, h) = (upright.width - 1, upright.height - 1);
    let (x, y) = match orientation {
        1 => (x, y),
        2 => (w - x, y),
        3 => (w - x, h - y),
        4 => (x, h - y),
        5 => (y, x),
        6 => (y, h - x),
        7 => (w - y, h - x),
        _ => (w - y, x),
    };
    let at = ((y * upright.width + x) * 3) as usize;
    upright.pixels[at..at + 3].try_into().unwrap()
}

#[test]
fn exif_orientation_is_applied() {
    let plain = file("colour.jpg");
    let upright = see(&plain);
    let png = Png { width: 13, height: 11, color: 2, depth: 8, interlaced: false, channels: 3 };
    let sample = |x: u32, y: u32, c: usize| ((x * 19 + y * 7 + c as u32 * 3) % 256) as u16;
    let drawn = see(&png.write(&[], sample));
    for orientation in 1..=8 {
        let chunk = png_chunk(b"eXIf", &exif(orientation));
        for (upright, found) in
            [(&upright, see(&jpeg_with_exif(&plain, orientation))), (&drawn, see(&png.write(&chunk, sample)))]
        {
            let swapped = orientation >= 5;
            let size =
                if swapped { (upright.height, upright.width) } else { (upright.width, upright.height) };
            assert_eq!((found.width, found.height), size, "orientation {orientation}");
            for y in 0..found.height {
                for x in 0..found.width {
                    let at = ((y * found.width + x) * 3) as usize;
                    let expected = turned(upright, orientation, x, y);
                    assert_eq!(found.pixels[at..at + 3], expected, "orientation {orientation} at {x}, {y}");
                }
            }
        }
    }
}

#[test]
fn transparency_takes_the_background_asked_for() {
    let png = Png { width: 2, height: 1, color: 6, depth: 8, interlaced: false, channels: 4 };
    let bytes = png.write(&[], |x, _, c| if c == 3 { (255 * x) as u16 } else { 9 });
    let seen = decode(&bytes, &Limits::default(), [10, 20, 30]).unwrap();
    assert_eq!(seen.pixels, [10, 20, 30, 9, 9, 9]);
}
