//! Refused configs, and quantization tables that contradict the tensors (`docs/formats.md` section 8).

mod common;

use std::fs;

use common::{copy, damage::*, format, rewrite, split};
use serde_json::{Map, Value, json};

#[test]
fn other_kinds_of_checkpoints() {
    all_indexed(|source, _| {
        refused(source, "other family", &["model_type", "llama", "qwen3_5_moe"], |dir| {
            edit_config(dir, |c| c["model_type"] = "llama".into());
        });
        let cases = [
            (json!({"quant_method": "fp8", "weight_block_size": [128, 128]}), "FP8"),
            (json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}), "NVFP4"),
            (json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": true}), "gptq"),
            (json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}), "NVFP4"),
            (json!({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}), "MXFP"),
            (json!({"quant_method": "compressed-tensors", "format": "float-quantized"}), "FP8"),
            (json!({"quant_method": "compressed-tensors", "format": "int-quantized"}), "int-quantized"),
            (json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}), "config_groups"),
            (json!({"quant_method": "awq"}), "awq"),
            (json!({"quant_method": "bitsandbytes"}), "bitsandbytes"),
            (json!({"quant_method": "mxfp4"}), "MXFP"),
            (json!({"quant_method": 7}), "quant_method is 7; a string"),
            (json!(7), "quantization_config is 7; an object"),
            (json!({}), "bits is absent"),
            (
                json!({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": false,
                    "data_type": "int", "packing_format": "auto_round:auto_awq"}),
                "auto_awq",
            ),
        ];
        for (table, word) in cases {
            refused(source, word, &[word], |dir| {
                edit_config(dir, |c| {
                    c.as_object_mut().expect("an object").remove("quantization");
                    c["quantization_config"] = table;
                });
            });
        }
    });
}

#[test]
fn mlx_tables() {
    for name in ["mlx-4bit", "mlx-mixed-3bit", "mlx-other-widths"] {
        let source = &format(name);
        let set = |case: &str, key: &str, value: Value, words: &[&str]| {
            refused(source, case, words, |dir| {
                edit_config(dir, |c| {
                    for table in ["quantization", "quantization_config"] {
                        c[table][key] = value.clone();
                    }
                });
            });
        };
        set("bits 7", "bits", json!(7), &["7-bit MLX weights are not supported (2, 3, 4, 5, 6 or 8)"]);
        set("bits 1", "bits", json!(1), &["1-bit MLX weights"]);
        set("group 16", "group_size", json!(16), &["group size 16 is not supported (32, 64 or 128)"]);
        set("nvfp4", "mode", json!("nvfp4"), &["MLX mode \"nvfp4\" is not supported: only affine is"]);
        set("disagrees", "bits", json!(6), &["config says 6 bits, group 64; the tensors hold"]);
        set("absurd", "bits", json!(1e300), &["quantization.bits is", "integer"]);
        set("negative", "group_size", json!(-64), &["quantization.group_size is -64"]);
        set("text", "bits", json!("4"), &["quantization.bits is \"4\""]);
        let module = "language_model.model.layers.1.mlp.shared_expert.gate_proj";
        for key in [module, "model.language_model.layers.1.mlp.shared_expert.gate_proj"] {
            let entry = json!({"bits": 2, "group_size": 64});
            set("entry", key, entry, &[module, "config says 2 bits, group 64"]);
        }
        set("entry false", module, json!(false), &[module, "config says unquantized"]);
        set("entry mode", module, json!({"mode": "mxfp4"}), &["mxfp4"]);
        set("entry type", module, json!({"bits": "x"}), &["gate_proj.bits"]);
        refused(source, "spellings", &["lm_head", "two spellings"], |dir| {
            edit_config(dir, |c| {
                for table in ["quantization", "quantization_config"] {
                    c[table]["lm_head"] = json!({"bits": 2});
                    c[table]["language_model.lm_head"] = json!({"bits": 3});
                }
            });
        });
        refused(source, "tables differ", &["quantization and quantization_config differ"], |dir| {
            edit_config(dir, |c| c["quantization"]["bits"] = 3.into());
        });
    }
}

#[test]
fn auto_round_tables() {
    let source = &format("autoround-w4a16");
    let q = "model.language_model.layers.1.self_attn.q_proj";
    let set = |key: &str, value: Value, words: &[&str]| {
        refused(source, key, words, |dir| edit_config(dir, |c| c["quantization_config"][key] = value));
    };
    set("sym", json!(false), &["asymmetric"]);
    set("bits", json!(3), &["3-bit AutoRound weights are not supported (4 or 8)"]);
    set("bits", json!(8), &["config says 8 bits, group 128; the tensors hold 4 bits, group 128"]);
    set("group_size", json!(-1), &["group_size is -1"]);
    set("group_size", json!(64), &["config says 4 bits, group 64"]);
    set("data_type", json!("mx_fp"), &["MXFP"]);
    set("data_type", json!("nv_fp"), &["NVFP4"]);
    set("data_type", json!("int_asym"), &["int_asym"]);
    set("packing_format", json!(null), &["AutoRound packing"]);
    set("packing_format", json!("auto_round"), &["AutoRound packing \"auto_round\""]);
    set("rotation_config", json!({"kind": "hadamard"}), &["rotated weights (rotation_config)"]);
    set("act_bits", json!(8), &["activation-quantized"]);
    set("desc_act", json!(true), &["activation-ordered"]);
    set("extra_config", json!({q: {"bits": 8}}), &[q, "config says 8 bits, group 128"]);
    set("extra_config", json!({q: {"bits": 16}}), &[q, "config says unquantized"]);
    set("extra_config", json!({q: {"sym": false}}), &[q, "asymmetric"]);
    set(
        "extra_config",
        json!({".*self_attn\\.q_.*": {"group_size": 32}}),
        &[q, "config says 4 bits, group 32"],
    );
    set("extra_config", json!({"layers.[1].self_attn.q": {"data_type": "fp"}}), &[q, "unquantized"]);
    set("extra_config", json!({q: 7}), &["q_proj is 7; an object"]);
    let many: Map<String, Value> = (0..5000).map(|i| (format!("a*{i}"), json!({}))).collect();
    set("extra_config", many.into(), &["at most 4096 patterns"]);

    refused(source, "zero points", &["k_proj", "asymmetric"], |dir| {
        let (header, mut data) = split(&dir.join(MAIN));
        let key = header.keys().find(|k| k.ends_with("k_proj.qzeros")).expect("there");
        data[header[key]["data_offsets"][0].as_u64().expect("a number") as usize] = 0x55;
        rewrite(&dir.join(MAIN), &header, &data);
    });
}

/// Names, patterns this engine cannot read and entries for absent modules do not stop a sound folder.
#[test]
fn auto_round_tables_that_are_fine() {
    let source = &format("autoround-w4a16");
    let dir = copy(source);
    edit_config(dir.path(), |c| {
        let extra = &mut c["quantization_config"]["extra_config"];
        extra["model.language_model.layers.0.linear_attn.in_proj_ba"] = json!({"bits": 2});
        extra["(?=self)self_attn"] = json!({"bits": 2});
        extra["in_proj"] = json!({"bits": 2}); // a name, not a pattern
        extra[".*\\.q_proj.*"] = json!({"bits": 4, "group_size": 128});
    });
    let verified = load(dir.path(), source).expect("sound");
    assert_eq!(verified.warnings.len(), 1);
    assert!(verified.warnings[0].to_string().contains("(?=self)self_attn"), "{:?}", verified.warnings);
}

#[test]
fn compressed_tensors_tables() {
    for name in ["compressed-tensors-w4a16", "compressed-tensors-llmcompressor"] {
        let source = &format(name);
        let weights = |key: &str, value: Value, words: &[&str]| {
            refused(source, key, words, |dir| {
                edit_config(dir, |c| {
                    c["quantization_config"]["config_groups"]["group_0"]["weights"][key] = value;
                });
            });
        };
        weights("actorder", json!("group"), &["activation-ordered"]);
        weights("symmetric", json!(false), &["asymmetric"]);
        weights("strategy", json!("channel"), &["config group \"group_0\": strategy \"channel\""]);
        weights("strategy", json!(null), &["strategy"]);
        weights("num_bits", json!(3), &["3-bit compressed-tensors weights are not supported (4 or 8)"]);
        weights("num_bits", json!(8), &["config says 8 bits, group 128; the tensors hold 4 bits, group 128"]);
        weights("group_size", json!(16), &["group size 16"]);
        weights("group_size", json!(null), &["group_size is absent"]);
        weights("type", json!("float"), &["NVFP4"]);
        let set = |key: &str, value: Value, words: &[&str]| {
            refused(source, key, words, |dir| edit_config(dir, |c| c["quantization_config"][key] = value));
        };
        set("transform_config", json!({"r1": {}}), &["rotated weights (transform_config) are not supported"]);
        set("sparsity_config", json!({"format": "sparse-24"}), &["sparse checkpoints are not supported"]);
        set("kv_cache_scheme", json!({"num_bits": 8}), &["activation-quantized"]);
        set("config_groups", json!({}), &["config says nothing is quantized"]);
        set("config_groups", json!([]), &["config_groups is a list"]);
        refused(source, "activations", &["activation-quantized"], |dir| {
            edit_config(dir, |c| {
                c["quantization_config"]["config_groups"]["group_0"]["input_activations"] =
                    json!({"num_bits": 8});
            });
        });
        refused(
            source,
            "weight_shape",
            &["o_proj: weight_shape holds [128, 129], [128, 128] expected"],
            |dir| {
                let (header, mut data) = split(&dir.join(MAIN));
                let key =
                    header.keys().find(|k| k.ends_with("self_attn.o_proj.weight_shape")).expect("there");
                data[header[key]["data_offsets"][0].as_u64().expect("a number") as usize + 8] = 129;
                rewrite(&dir.join(MAIN), &header, &data);
            },
        );
    }
}

#[test]
fn configs() {
    let source = &format("mlx-4bit");
    let text = |case: &str, text: &str, words: &[&str]| {
        refused(source, case, words, |dir| fs::write(dir.join("config.json"), text).expect("written"));
    };
    text(
        "repeated",
        r#"{"model_type":"qwen3_5_moe","model_type":"qwen3_5_moe"}"#,
        &["config.json", "repeated"],
    );
    text("empty", "", &["config.json", "EOF"]);
    text("a list", "[]", &["config.json", "an object is expected"]);
    text("cut", r#"{"model_type":"#, &["config.json"]);
    text("deep", &"[".repeat(10_000), &["config.json", "recursion"]);
    text("not text", "\u{0}\u{1}", &["config.json"]);
    text("no text model", r#"{"model_type":"qwen3_5_moe"}"#, &["text_config is absent"]);
    text("wrong type", r#"{"model_type":[1]}"#, &["model_type is a list; a string"]);
    text("no family", "{}", &["model_type \"(absent)\""]);
    refused(source, "text family", &["text_config.model_type \"qwen3_next\""], |dir| {
        edit_config(dir, |c| c["text_config"]["model_type"] = "qwen3_next".into());
    });
    refused(source, "vision family", &["vision_config.model_type \"other\""], |dir| {
        edit_config(dir, |c| c["vision_config"]["model_type"] = "other".into());
    });
    refused(source, "no config", &["holds no config.json: not a model folder"], |dir| {
        fs::remove_file(dir.join("config.json")).expect("removed");
    });
    refused(source, "a folder", &["config.json is not a regular file"], |dir| {
        fs::remove_file(dir.join("config.json")).expect("removed");
        fs::create_dir(dir.join("config.json")).expect("created");
    });
}
