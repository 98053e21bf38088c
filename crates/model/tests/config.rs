//! `config.json`: what is read, and every refusal.

// A call that fails fails its test.
#![allow(clippy::unwrap_used)]

mod support;

use checkpoint::Kind;
use model::qwen3_5::{Config, MemoryPlan, MixerKind, Parts, Settings, Tie, inventory};
use serde_json::{Value, json};
use support::*;

fn published() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/qwen3.6-35b-a3b/config.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// `config` with the value at a dotted path replaced; `None` removes it.
fn with(mut config: Value, path: &str, value: Option<Value>) -> Value {
    let (parent, key) = path.rsplit_once('.').unwrap_or(("", path));
    let object =
        parent.split('.').filter(|part| !part.is_empty()).fold(&mut config, |at, part| &mut at[part]);
    let object = object.as_object_mut().unwrap();
    match value {
        Some(value) => object.insert(key.into(), value),
        None => object.remove(key),
    };
    config
}

#[test]
fn the_published_model_is_read() {
    let config = Config::from_json(&published()).unwrap();
    assert_eq!((config.vocabulary, config.hidden, config.layers.len()), (248_320, 2048, 40));
    let attention: Vec<usize> = config.layers_of(MixerKind::Attention).collect();
    assert_eq!(attention, (3..40).step_by(4).collect::<Vec<_>>());
    assert_eq!((config.experts, config.picks, config.rope.dims), (256, 8, 64));
    assert_eq!(config.rope.sections, [11, 11, 10]);
    assert_eq!((config.mtp_layers, config.tie, config.eos.clone()), (1, Tie::Untied, vec![248_044]));
    assert_eq!(config.vision.as_ref().unwrap().table_side, 48);
    assert_eq!(config.image_tokens.image, Some(248_056));
    let billions = config.parameters() as f64 / 1e9;
    assert!((34.5..35.5).contains(&billions), "{billions} billion parameters");
    // The text keys at the top level, layers by interval, no vision.
    let mut text = published()["text_config"].clone();
    text.as_object_mut().unwrap().remove("layer_types");
    let flat = Config::from_json(&text).unwrap();
    assert_eq!(flat.layers, config.layers);
    assert_eq!(flat.vision, None);
}

#[test]
fn defaults_and_old_spellings() {
    let check = |path: &str, value: Option<Value>, read: &dyn Fn(&Config) -> bool| {
        let config = Config::from_json(&with(published(), path, value)).unwrap();
        assert!(read(&config), "{path}");
    };
    let rope = "text_config.rope_parameters";
    check(&format!("{rope}.mrope_section"), None, &|c| c.rope.sections == [11, 11, 10]);
    check(&format!("{rope}.partial_rotary_factor"), None, &|c| c.rope.dims == 64);
    check(&format!("{rope}.type"), Some(json!("default")), &|c| c.rope.theta == 1e7);
    check(rope, Some(json!({"rope_theta": 5e5, "type": "default"})), &|c| c.rope.theta == 5e5);
    check("text_config.rope_theta", Some(json!(123.0)), &|c| c.rope.theta == 1e7);
    check("text_config.mtp_num_hidden_layers", None, &|c| c.mtp_layers == 0);
    check("text_config.eos_token_id", Some(json!([3, 4, 3])), &|c| c.eos == [3, 4]);
    check("eos_token_id", Some(json!(9)), &|c| c.eos == [9, 248_044]);
    check("text_config.attn_output_gate", Some(json!(false)), &|c| c.attention.heads == 16);
    check("vision_config", None, &|c| c.vision.is_none());
    check("image_token_id", Some(Value::Null), &|c| c.image_tokens.image.is_none());
    check("vision_config.rope_parameters", Some(json!({"rope_theta": 7, "rope_type": "axial"})), &|c| {
        c.vision.as_ref().unwrap().rope_theta == 7.0
    });
    let without = with(with(published(), rope, None), "text_config.rope_theta", Some(json!(10)));
    assert_eq!(Config::from_json(&without).unwrap().rope.theta, 10.0);
}

#[test]
fn ties_follow_both_keys_and_the_stored_head() {
    for (outer, inner, stored, expected) in [
        (Some(true), Some(true), true, true),
        (Some(true), None, true, true),
        (None, Some(true), true, true),
        (None, None, false, false),
        (Some(false), Some(false), false, false),
        (Some(true), Some(false), true, false),
        (Some(true), Some(false), false, true),
        (Some(false), Some(true), true, false),
        (Some(false), Some(true), false, true),
    ] {
        let config = with(published(), "tie_word_embeddings", outer.map(Value::Bool));
        let config = with(config, "text_config.tie_word_embeddings", inner.map(Value::Bool));
        let config = Config::from_json(&config).unwrap();
        assert_eq!(config.tied(stored), expected, "{outer:?} {inner:?} {stored}");
        let parts = Parts { head: stored, mtp: false, vision: false };
        let heads = inventory(&config, parts).iter().filter(|e| e.name == "lm_head").count();
        assert_eq!(heads, usize::from(!expected));
    }
}

/// Refuses the published model with one value replaced, in these words.
#[track_caller]
fn check(path: &str, value: Option<Value>, found: &str, expected: &str) {
    let error = Config::from_json(&with(published(), path, value)).expect_err(path);
    assert_eq!(error.to_string(), format!("config.json: {path} is {found}; {expected} is expected"));
}

#[test]
fn counts_out_of_range_are_refused() {
    for (key, max) in [
        ("vocab_size", 1 << 22),
        ("hidden_size", 1 << 16),
        ("num_hidden_layers", 1024),
        ("num_attention_heads", 1024),
        ("num_key_value_heads", 1024),
        ("head_dim", 1024),
        ("linear_num_key_heads", 1024),
        ("linear_num_value_heads", 1024),
        ("linear_key_head_dim", 1024),
        ("linear_value_head_dim", 1024),
        ("linear_conv_kernel_dim", 16),
        ("num_experts", 4096),
        ("num_experts_per_tok", 64),
        ("moe_intermediate_size", 1 << 16),
        ("shared_expert_intermediate_size", 1 << 16),
        ("max_position_embeddings", 1 << 24),
    ] {
        let path = format!("text_config.{key}");
        let range = format!("a whole number from 1 to {max}");
        for (value, found) in [
            (Some(json!(0)), "0"),
            (Some(json!(-1)), "-1"),
            (Some(json!(1u64 << 60)), "1152921504606846976"),
            (Some(json!(2.5)), "2.5"),
            (Some(json!("8")), "\"8\""),
            (None, "absent"),
        ] {
            check(&path, value, found, &range);
        }
    }
}

#[test]
fn every_refusal_names_key_found_and_expected() {
    let text = |key: &str, value: Value, found: &str, expected: &str| {
        check(&format!("text_config.{key}"), Some(value), found, expected);
    };
    text("model_type", json!("llama"), "\"llama\"", "qwen3_5_moe_text or qwen3_5_moe");
    text("hidden_act", json!("gelu"), "\"gelu\"", "silu");
    text("attention_bias", json!(true), "true", "false");
    text("attention_bias", json!(1), "1", "true or false");
    text("mlp_only_layers", json!([3]), "[3]", "an empty list");
    text("num_key_value_heads", json!(3), "3", "a divisor of num_attention_heads (16)");
    text("linear_num_key_heads", json!(5), "5", "a divisor of linear_num_value_heads (32)");
    text("linear_conv_kernel_dim", json!(1), "1", "2 to 16");
    text("num_experts_per_tok", json!(65), "65", "a whole number from 1 to 64");
    text("rms_norm_eps", json!(0), "0", "a number above 0");
    text("rms_norm_eps", json!(1), "1", "a number between 0 and 1");
    text("layer_types", json!(["full_attention"]), "[\"full_attention\"]", "a list of 40 names");
    text("layer_types", json!(vec!["mamba"; 40]), "\"mamba\"", "linear_attention or full_attention");
    text("mtp_num_hidden_layers", json!(17), "17", "a whole number from 0 to 16");
    text("rope_scaling", json!({"type": "yarn"}), "{\"type\":\"yarn\"}", "null");
    text("rope_parameters", json!(3), "3", "an object");
    text("rope_parameters.rope_type", json!("yarn"), "\"yarn\"", "default");
    text("rope_parameters.type", json!("linear"), "\"linear\"", "default");
    text("rope_parameters.rope_theta", json!(0), "0", "a number above 0");
    text("rope_parameters.rope_theta", json!(1), "1", "a number above 1");
    let factor = "a factor of at most 1 that leaves an even count of head_dim 256";
    text("rope_parameters.partial_rotary_factor", json!(0.0118), "0.0118", factor);
    text("rope_parameters.partial_rotary_factor", json!(1.5), "1.5", factor);
    text("rope_parameters.mrope_section", json!([11, 11]), "[11,11]", "three whole numbers up to 32");
    text("rope_parameters.mrope_section", json!([11, 11, 33]), "[11,11,33]", "three whole numbers up to 32");
    text("eos_token_id", json!("x"), "\"x\"", "a token id or a list of them");
    text("tie_word_embeddings", json!(1), "1", "true or false");
    let vision = |key: &str, value: Value, found: &str, expected: &str| {
        check(&format!("vision_config.{key}"), Some(value), found, expected);
    };
    vision("depth", json!(0), "0", "a whole number from 1 to 256");
    vision("hidden_act", json!("relu"), "\"relu\"", "gelu_pytorch_tanh");
    vision("deepstack_visual_indexes", json!([1]), "[1]", "an empty list");
    vision("num_position_embeddings", json!(2300), "2300", "a square number");
    vision("num_heads", json!(7), "7", "a number that cuts hidden_size 1152 in multiples of 4");
    vision("out_hidden_size", json!(4096), "4096", "hidden_size of the text model (2048)");
    check("vision_config", Some(json!([])), "[]", "an object");
    check("image_token_id", Some(json!(-4)), "-4", "a whole number from 0 to 4294967295");
    let error = Config::from_json(&json!([])).unwrap_err().to_string();
    assert_eq!(error, "config.json: the file is []; an object is expected");
}

#[test]
fn a_model_too_large_for_any_machine_is_refused() {
    let large = with(published(), "text_config.num_experts", Some(json!(4096)));
    let large = with(large, "text_config.moe_intermediate_size", Some(json!(65_536)));
    let error = Config::from_json(&large).unwrap_err().to_string();
    assert!(error.contains("parameters in all; at most 4398046511104 parameters is expected"), "{error}");
}

#[test]
fn the_inventory_is_what_fixtures_hold() {
    for folder in ["tiny-a", "tiny-b", "formats/mlx-4bit", "formats/autoround-w4a16"] {
        let checkpoint = checkpoint::Checkpoint::open(&fixture(folder)).unwrap();
        let config = Config::from_json(checkpoint.config()).unwrap();
        let parts = Parts::of(&config, &checkpoint);
        assert_eq!((parts.mtp, parts.vision, parts.head), (true, true, folder != "tiny-b"), "{folder}");
        let verified = checkpoint.verify(&inventory(&config, parts)).unwrap();
        assert_eq!(verified.warnings, [], "{folder}");
    }
}

fn plan_settings() -> Settings {
    Settings {
        slots: 4,
        snapshots: 8,
        context: 32_768,
        pages: 2048,
        rows_max: 512,
        logits_rows_max: 64,
        ..settings()
    }
}

#[test]
fn the_plan_counts_the_published_sizes() {
    let config = Config::from_json(&published()).unwrap();
    let plan = MemoryPlan::new(&config, &plan_settings(), false, 1000);
    // 10 layers, k and v, 2 heads of 256 in 16 bits: 20 KiB a token, and 5 scales a head.
    assert_eq!(plan.page, 64 * (20_480 + 10 * 2 * 5 * 4));
    // 2 MiB of recurrent state and 3 rows of 8192 inputs in each of 30 layers.
    assert_eq!(plan.state, 30 * ((2 << 20) + 3 * 8192 * 4));
    assert_eq!(plan.kv, 2048 * plan.page);
    assert_eq!(plan.total(), 1000 + plan.kv + plan.states + plan.scratch);
    let with_mtp = MemoryPlan::new(&config, &plan_settings(), true, 1000);
    assert_eq!(with_mtp.page, plan.page / 10 * 11);
}

/// Stored bytes of text model and MTP layer with every matrix in 4 bits, groups of 64, 16-bit scales and
/// biases.
fn bytes_in_4_bits(config: &Config) -> u64 {
    let parts = Parts { head: true, mtp: true, vision: false };
    let values = |kind: &Kind| match *kind {
        Kind::Matrix { rows, cols } => (rows * cols) as u64,
        Kind::Experts { experts, rows, cols, .. } => (experts * rows * cols) as u64,
        _ => 0,
    };
    let needed = inventory(config, parts).into_iter().filter(|expected| !expected.optional);
    needed.map(|expected| values(&expected.kind)).sum::<u64>() * 9 / 16
}

#[test]
fn eight_long_sequences_with_drafts_fit_beside_the_weights_in_32_gib() {
    let config = Config::from_json(&published()).unwrap();
    let weights = bytes_in_4_bits(&config);
    assert!((19_000_000_000..21_000_000_000).contains(&weights), "{weights}");
    let wish = Settings { slots: 8, snapshots: 8, kv: device::KvForm::Int8, ..plan_settings() };
    let plan = MemoryPlan::new(&config, &wish.with_context(96 << 10), true, weights);
    let limit = (32u64 << 30) / 100 * 95;
    assert!(plan.total() <= limit, "{plan:?}: {} of {limit}", plan.total());
}

#[test]
fn the_largest_fit_is_the_largest() {
    let config = Config::from_json(&published()).unwrap();
    let settings = plan_settings();
    let total = |settings: &Settings| MemoryPlan::new(&config, settings, true, 1 << 30).total();
    let budget = 8 << 30;
    let context = MemoryPlan::context_that_fits(&config, &settings, true, 1 << 30, budget).unwrap();
    assert!(total(&settings.with_context(context)) <= budget);
    assert!(total(&settings.with_context(context + 64)) > budget);
    assert_eq!(MemoryPlan::context_that_fits(&config, &settings, true, 1 << 30, 1 << 20), None);
    let all = MemoryPlan::context_that_fits(&config, &settings, true, 1 << 30, u64::MAX);
    assert_eq!(all, Some(config.positions_max));
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let config = Config::from_json(&published()).unwrap();
    let good = plan_settings();
    good.check(&config).unwrap();
    for (bad, message) in [
        (Settings { slots: 0, ..good.clone() }, "slots: 0 found, 1 to 1024 expected"),
        (Settings { context: 262_145, ..good.clone() }, "context: 262145 found, 1 to 262144 expected"),
        (Settings { pages: 511, ..good.clone() }, "pages: 511 found, 512 to 16777216 expected"),
        (Settings { rows_max: 3, ..good.clone() }, "rows of a step: 3 found, 4 to 65536 expected"),
        (
            Settings { logits_rows_max: 0, ..good.clone() },
            "scored rows of a step: 0 found, 1 to 512 expected",
        ),
        (Settings { snapshots: 1 << 21, ..good.clone() }, "snapshots: 2097152 found, 0 to 1048576 expected"),
    ] {
        assert_eq!(bad.check(&config).unwrap_err().to_string(), message);
    }
}

#[test]
fn progress_ends_at_its_total_and_reads_are_counted() {
    let checkpoint = checkpoint::Checkpoint::open(&fixture("tiny-a")).unwrap();
    let mut seen = Vec::new();
    let device = Box::new(device::reference::Reference::new(1));
    let qwen =
        model::qwen3_5::open(&checkpoint, device, settings(), &mut |done, total| seen.push((done, total)));
    let qwen = qwen.unwrap();
    assert!(seen.is_sorted());
    assert!(seen.iter().all(|(_, total)| *total == seen[0].1));
    assert_eq!(seen.last().map(|(done, total)| done == total), Some(true));
    // Stored bytes: bfloat16 everywhere.
    let (h, v) = (64, 2048);
    let delta = h * (128 + 64 + 4 + 4) + 64 * h;
    let attention = h * (512 + 128 + 128) + 256 * h;
    let moe = 8 * h + h * 3 * 32 + h + 2 * 3 * 16 * h;
    let weights = 2 * (3 * delta + attention + 4 * moe + v * h + h) as u64;
    let states = 2 * 3 * 4 * (4 * 16 * 16 + 3 * 128);
    assert_eq!(qwen.bytes_per_token(0), weights + states);
    let token = 2 * (2 * 64 * 2 + 2 * 4);
    assert_eq!(qwen.bytes_per_token(10) - qwen.bytes_per_token(0), 10 * token);
}
