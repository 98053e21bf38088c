//! Any bytes as a safetensors file: an error, or entries that lie inside the file.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|file: &[u8]| {
    if let Ok(entries) = checkpoint::parse_header(file) {
        for entry in entries {
            assert!(file.get(entry.range).is_some());
        }
    }
});
