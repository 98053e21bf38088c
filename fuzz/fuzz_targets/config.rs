//! Any bytes as a config.json: an error, or a document of the family.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    if let Ok(config) = checkpoint::parse_config(text) {
        assert!(config.value()["model_type"].is_string());
    }
});
