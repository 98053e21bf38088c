//! Any bytes as a picture: an error, or as many pixels as its size says.
#![no_main]

use libfuzzer_sys::fuzz_target;
use picture::{Limits, decode};

fuzz_target!(|file: &[u8]| {
    let limits = Limits { bytes_max: 1 << 20, pixels_max: 1 << 20, side_max: 4096 };
    if let Ok(seen) = decode(file, &limits, [255; 3]) {
        assert_eq!(seen.pixels.len() as u64, u64::from(seen.width) * u64::from(seen.height) * 3);
        assert!(seen.width.max(seen.height) <= limits.side_max);
    }
});
