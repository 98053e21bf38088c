//! Any bytes as an index: an error, or plain file names.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    if let Ok(index) = checkpoint::parse_index(text) {
        assert!(index.tensors.values().all(|&file| file < index.files.len()));
        for file in &index.files {
            assert_eq!(std::path::Path::new(file).components().count(), 1);
        }
    }
});
