//! Hostile headers cost no memory. Alone in its program, so that nothing else grows it.
#![cfg(target_os = "linux")]
// A call that fails fails its test.
#![allow(clippy::unwrap_used)]

mod support;

use picture::{Limits, decode};
use support::{Png, file, png_chunk};

/// Most the resident memory may grow over all refusals.
const GROWTH_MAX: usize = 64 << 20;

fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// Largest the resident memory ever was, since this was set back.
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// A picture is decoded into the bytes that its decoder gives, and made 8-bit RGB in place.
fn check_in_place() {
    let side = 3_000;
    let png = Png { width: side, height: side, color: 6, depth: 16, interlaced: false, channels: 4 };
    let rows = vec![0; (side * 8 + 1) as usize * side as usize];
    let bytes = [png.header(), png_chunk(b"IDAT", &support::stored(&rows)), png_chunk(b"IEND", b"")].concat();
    drop(rows);
    let limits = Limits { bytes_max: usize::MAX, ..Limits::default() };
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = peak();
    let seen = decode(&bytes, &limits, [255; 3]).unwrap();
    assert_eq!(seen.pixels.len(), 3 * (side * side) as usize);
    let stored = 8 * (side * side) as usize;
    let growth = peak() - before;
    assert!(growth < stored + stored / 8 + (16 << 20), "{growth} bytes for {stored}");
}

#[test]
fn refusals_of_two_hundred_megapixels_take_no_memory() {
    let limits = Limits::default();
    // 14,143 squared is 200 million; 7,071 squared is inside the limit, but these files hold nothing of it.
    let mut files = Vec::new();
    for side in [14_143u32, 7_071, 20_000] {
        for depth in [8, 16] {
            let png = Png { width: side, height: side, color: 6, depth, interlaced: true, channels: 4 };
            files.push([png.header(), png_chunk(b"IDAT", &support::stored(&[0; 4000]))].concat());
        }
        let mut gif = file("animated.gif");
        gif[6..8].copy_from_slice(&(side as u16).to_le_bytes());
        gif[8..10].copy_from_slice(&(side as u16).to_le_bytes());
        files.push(gif);
        let mut jpeg = file("colour.jpg");
        let frame = jpeg.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
        jpeg[frame + 5..frame + 7].copy_from_slice(&(side as u16).to_be_bytes());
        jpeg[frame + 7..frame + 9].copy_from_slice(&(side as u16).to_be_bytes());
        files.push(jpeg);
    }
    // A profile that inflates without end.
    let png = Png { width: 8, height: 8, color: 2, depth: 8, interlaced: false, channels: 3 };
    let profile = [&b"p\0\0"[..], &support::stored(&vec![0; 40 << 20])].concat();
    files.push(png.write(&png_chunk(b"iCCP", &profile), |_, _, _| 0));
    let before = resident();
    for _ in 0..4 {
        for bytes in &files {
            // The profile is ignored where it fits and refused where it does not; both are fine here.
            let seen = decode(bytes, &limits, [255; 3]);
            assert!(seen.is_err() || seen.is_ok_and(|seen| seen.width == 8));
        }
    }
    let growth = resident().saturating_sub(before);
    check_in_place();
    println!("grew by {} KiB", growth >> 10);
    assert!(growth < GROWTH_MAX, "{growth} bytes");
}
