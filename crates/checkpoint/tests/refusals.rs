//! Damaged copies of the fixtures: each is refused with words that say what and where (`docs/formats.md` section 8).

mod common;

use std::{fs, path::Path};

use checkpoint::{Checkpoint, Error, Verified};
use common::{copy, expected, fixture, format, join, read_json, rewrite, split};
use serde_json::{Map, Value, json};

const MAIN: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Every fixture with an index.
const INDEXED: [&str; 5] =
    ["mlx-4bit", "mlx-mixed-3bit", "mlx-other-widths", "autoround-w4a16", "compressed-tensors-w4a16"];

/// Opens, verifies and checks values against the geometry of the undamaged fixture.
fn load(dir: &Path, source: &Path) -> Result<Verified, Error> {
    let checkpoint = Checkpoint::open(dir)?;
    let sound = Checkpoint::open(source).expect("the fixture is sound");
    let list = expected(sound.config(), sound.has_mtp(), sound.has_vision());
    let verified = checkpoint.verify(&list)?;
    checkpoint.check_values(&list, &mut |_, _| {})?;
    Ok(verified)
}

/// Damages a copy of `source` and expects a message with all `words`.
fn refused(source: &Path, case: &str, words: &[&str], damage: impl FnOnce(&Path)) {
    let dir = copy(source);
    damage(dir.path());
    let error = load(dir.path(), source).map(|v| v.warnings).expect_err(case).to_string();
    for word in words {
        assert!(error.contains(word), "{}: {case}: {error:?} lacks {word:?}", source.display());
    }
}

fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = read_json(path);
    change(&mut value);
    fs::write(path, value.to_string()).expect("written");
}

fn edit_config(dir: &Path, change: impl FnOnce(&mut Value)) {
    edit(&dir.join("config.json"), change);
}

fn edit_header(path: &Path, change: impl FnOnce(&mut Map<String, Value>)) {
    let (mut header, data) = split(path);
    change(&mut header);
    rewrite(path, &header, &data);
}

fn edit_bytes(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).expect("readable");
    change(&mut bytes);
    fs::write(path, bytes).expect("written");
}

struct Names {
    scales: String,
    norm: String,
}

fn names(source: &Path) -> Names {
    let index = read_json(&source.join(INDEX));
    let mut all: Vec<&String> = index["weight_map"].as_object().expect("a map").keys().collect();
    all.sort();
    let find = |ends: &[&str]| {
        let found = all.iter().find(|n| ends.iter().any(|e| n.ends_with(e))).expect("it is there");
        found.to_string()
    };
    Names {
        scales: find(&["o_proj.scales", "o_proj.weight_scale"]),
        norm: find(&["layers.0.input_layernorm.weight"]),
    }
}

fn all_indexed(case: impl Fn(&Path, &Names)) {
    for name in INDEXED {
        let source = format(name);
        case(&source, &names(&source));
    }
}

#[test]
fn damaged_containers() {
    all_indexed(|source, _| {
        refused(source, "truncated", &[MAIN, "truncated"], |dir| {
            edit_bytes(&dir.join(MAIN), |b| b.truncate(b.len() - 1000));
        });
        refused(source, "truncated header", &[MAIN, "truncated"], |dir| {
            edit_bytes(&dir.join(MAIN), |b| b.truncate(100));
        });
        refused(source, "trailing bytes", &[MAIN, "5 unknown bytes"], |dir| {
            edit_bytes(&dir.join(MAIN), |b| b.extend_from_slice(b"extra"));
        });
        refused(source, "huge header", &[MAIN, "not a safetensors file"], |dir| {
            edit_bytes(&dir.join(MAIN), |b| b[..8].copy_from_slice(&(1u64 << 62).to_le_bytes()));
        });
        refused(source, "empty file", &[MAIN, "0 bytes"], |dir| {
            edit_bytes(&dir.join(MAIN), Vec::clear);
        });
        refused(source, "pointer file", &[MAIN, "Git LFS pointer"], |dir| {
            let text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n";
            fs::write(dir.join(MAIN), text).expect("written");
        });
        refused(source, "missing shard", &[MAIN, "incomplete download"], |dir| {
            fs::remove_file(dir.join(MAIN)).expect("removed");
        });
        refused(source, "folder as shard", &[MAIN, "not a regular file"], |dir| {
            fs::remove_file(dir.join(MAIN)).expect("removed");
            fs::create_dir(dir.join(MAIN)).expect("created");
        });
    });
}

#[test]
fn damaged_indexes() {
    all_indexed(|source, names| {
        for file in ["../model.safetensors", "/model.safetensors", "sub/model.safetensors"] {
            refused(source, file, &["index", "outside", file, &names.norm], |dir| {
                edit(&dir.join(INDEX), |i| i["weight_map"][&names.norm] = file.into());
            });
        }
        for value in [json!(1e99), json!(18_446_744_073_709_551_615u64), json!(-1), json!([]), json!(null)] {
            refused(source, "not a name", &[INDEX], |dir| {
                edit(&dir.join(INDEX), |i| i["weight_map"][&names.norm] = value.clone());
            });
        }
        refused(source, "not in its file", &[&names.norm, MAIN], |dir| {
            edit_header(&dir.join(MAIN), |h| drop(h.remove(&names.norm)));
        });
        refused(source, "duplicate", &["model-copy.safetensors", MAIN], |dir| {
            fs::copy(dir.join(MAIN), dir.join("model-copy.safetensors")).expect("copied");
            edit(&dir.join(INDEX), |i| i["weight_map"][&names.scales] = "model-copy.safetensors".into());
        });
        refused(source, "index is a folder", &[INDEX, "not a regular file"], |dir| {
            fs::remove_file(dir.join(INDEX)).expect("removed");
            fs::create_dir(dir.join(INDEX)).expect("created");
        });
    });
}

#[test]
fn damaged_headers() {
    all_indexed(|source, names| {
        refused(source, "repeated key", &[MAIN, &names.norm, "repeated"], |dir| {
            let (header, data) = split(&dir.join(MAIN));
            let text = serde_json::to_string(&header).expect("JSON");
            let again = format!(",{}:{}}}", json!(names.norm), header[&names.norm]);
            join(&dir.join(MAIN), &(text[..text.len() - 1].to_owned() + &again), &data);
        });
        refused(source, "overlap", &[MAIN, "overlap"], |dir| {
            edit_header(&dir.join(MAIN), |h| {
                let other = h.keys().find(|k| k.contains("post_attention")).expect("there").clone();
                h[&names.norm]["data_offsets"] = h[&other]["data_offsets"].clone();
            });
        });
        refused(source, "shape", &[&names.norm, "[2, 64] found, [128] expected"], |dir| {
            edit_header(&dir.join(MAIN), |h| h[&names.norm]["shape"] = json!([2, 64]));
        });
        let module = names.scales.rsplit_once('.').expect("a module").0;
        refused(source, "scales missing", &[module, "weight is packed but", "is missing"], |dir| {
            edit_header(&dir.join(MAIN), |h| {
                let scales = h.remove(&names.scales).expect("there");
                h.insert(format!("{}.old", names.scales), scales);
            });
            edit(&dir.join(INDEX), |i| {
                i["weight_map"].as_object_mut().expect("a map").remove(&names.scales);
            });
        });
    });
}

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

/// A rename in the header alone: fixtures without an index.
fn renamed(source: &Path, case: &str, words: &[&str], change: impl Fn(&mut Map<String, Value>)) {
    refused(source, case, words, |dir| edit_header(&dir.join(MAIN), &change));
}

fn rename(header: &mut Map<String, Value>, from: &str, to: &str) {
    let entry = header.remove(from).unwrap_or_else(|| panic!("{from} is there"));
    header.insert(to.to_owned(), entry);
}

#[test]
fn tensors_give_other_kinds_away() {
    let source = &format("compressed-tensors-llmcompressor");
    let q = "model.language_model.layers.1.self_attn.q_proj";
    let shape = format!("{q}.weight_shape");
    let to = |part: &'static str| {
        let (shape, q) = (shape.clone(), q.to_owned());
        move |h: &mut Map<String, Value>| rename(h, &shape, &format!("{q}.{part}"))
    };
    renamed(source, "nvfp4", &["NVFP4", q], to("weight_global_scale"));
    renamed(source, "nvfp4", &["NVFP4", q], to("weight_scale_2"));
    renamed(source, "fp8", &["FP8", q], to("weight_scale_inv"));
    renamed(source, "g_idx", &[q, "activation-ordered weights (g_idx)"], to("weight_g_idx"));
    renamed(source, "zero point", &[q, "asymmetric"], to("weight_zero_point"));
    renamed(source, "no shape", &[q, "weight is packed but weight_shape is missing"], to("other"));
    renamed(source, "fp8 dtype", &["FP8", q], |h| {
        let packed = &mut h[&format!("{q}.weight_packed")];
        let rows = packed["shape"][0].as_u64().expect("rows");
        *packed = json!({"dtype": "F8_E4M3", "shape": [rows, 64], "data_offsets": packed["data_offsets"]});
    });
    renamed(source, "both", &[q, "both a float and a packed weight are present"], |h| {
        rename(h, "lm_head.weight", &format!("{q}.weight"));
    });
    renamed(source, "other packing", &[q, "packed as AutoRound"], |h| {
        rename(h, &format!("{q}.weight_packed"), &format!("{q}.qweight"));
        h.remove(&format!("{q}.weight_scale"));
        h.remove(&shape);
    });
    renamed(source, "dtype", &[q, "dtype U32 found, I32 expected"], |h| {
        h[&format!("{q}.weight_packed")]["dtype"] = "U32".into();
    });
    renamed(source, "two spellings", &["lm_head", "both"], |h| {
        let norm = "model.language_model.layers.1.post_attention_layernorm.weight";
        rename(h, norm, "language_model.lm_head.weight");
    });
}

#[test]
fn absences() {
    let source = &format("compressed-tensors-llmcompressor");
    let expert = |h: &mut Map<String, Value>, layer: usize, e: usize, p: &str| {
        for part in ["weight_packed", "weight_scale", "weight_shape"] {
            let name = format!("model.language_model.layers.{layer}.mlp.experts.{e}.{p}.{part}");
            h.remove(&name).expect("there");
        }
    };
    renamed(source, "one expert", &["layer 1: expert 3 of 4 has no up_proj"], |h| expert(h, 1, 3, "up_proj"));
    renamed(source, "more", &["layer 0: expert 0 of 4 has no gate_proj", "and 3 more"], |h| {
        (0..2).for_each(|l| (0..4).for_each(|e| expert(h, l, e, "gate_proj")));
    });
    renamed(
        source,
        "a norm",
        &["missing tensor model.language_model.norm.weight (needed by the final norm)"],
        |h| {
            h.remove("model.language_model.norm.weight");
        },
    );

    // Dense experts, one tensor each.
    let mtp = "model_extra_tensors.safetensors";
    refused(
        &format("compressed-tensors-w4a16"),
        "float expert",
        &["expert 2 of 4 has no down_proj"],
        |dir| {
            let name = "mtp.layers.0.mlp.experts.2.down_proj.weight";
            edit_header(&dir.join(mtp), |h| drop(h.remove(name)));
            edit(&dir.join(INDEX), |i| drop(i["weight_map"].as_object_mut().expect("a map").remove(name)));
        },
    );
    // Stacked.
    let prefix = "model.language_model.layers.2.mlp.experts";
    refused(&fixture("tiny-a"), "stacked", &["missing tensor", "layers.2.mlp.experts.down_proj"], |dir| {
        edit_header(&dir.join(MAIN), |h| drop(h.remove(&format!("{prefix}.down_proj"))));
    });
    refused(&fixture("tiny-a"), "two layouts", &["both stacked experts and one tensor per expert"], |dir| {
        let name = format!("{prefix}.0.gate_proj.weight");
        edit_header(&dir.join(MAIN), |h| rename(h, "lm_head.weight", &name));
    });
    let mlx = &format("mlx-4bit");
    let q = "language_model.model.layers.1.self_attn.q_proj";
    refused(mlx, "no packed weight", &[q, "weight is packed but weight is missing"], |dir| {
        let name = format!("{q}.weight");
        edit_header(&dir.join(MAIN), |h| drop(h.remove(&name)));
        edit(&dir.join(INDEX), |i| drop(i["weight_map"].as_object_mut().expect("a map").remove(&name)));
    });
}

#[test]
fn values_that_are_not_finite() {
    let check = |name: &str, tensor: &str, at: usize, value: [u8; 2], words: &[&str]| {
        refused(&format(name), tensor, words, |dir| {
            let (header, mut data) = split(&dir.join(MAIN));
            let begin = header[tensor]["data_offsets"][0].as_u64().expect("a number") as usize + 2 * at;
            data[begin..begin + 2].copy_from_slice(&value);
            rewrite(&dir.join(MAIN), &header, &data);
        });
    };
    let (nan, infinity, half) = ([0xc0, 0x7f], [0x80, 0xff], [0x00, 0x7c]);
    let q = "language_model.model.layers.1.self_attn.q_proj";
    check("mlx-4bit", &format!("{q}.scales"), 7, nan, &[q, "scale at [3, 1] is not finite"]);
    check("mlx-4bit", &format!("{q}.biases"), 2, infinity, &[q, "bias at [1, 0] is not finite"]);
    let up = "language_model.model.layers.1.mlp.switch_mlp.up_proj";
    check("mlx-4bit", &format!("{up}.scales"), 128 * 2 * 3 + 5, nan, &[up, "expert 3: scale at [2, 1]"]);
    let out = "model.language_model.layers.0.linear_attn.out_proj";
    check("autoround-w4a16", &format!("{out}.scales"), 128 * 3 + 17, half, &[out, "scale at [17, 3]"]);
    check("compressed-tensors-w4a16", &format!("{out}.weight_scale"), 4 * 17 + 3, half, &[out, "[17, 3]"]);
    check("autoround-w4a16", "model.language_model.norm.weight", 9, nan, &["norm.weight: value at [9]"]);
    check("autoround-w4a16", "lm_head.weight", 128 * 2 + 1, nan, &["lm_head: value at [2, 1]"]);
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

#[test]
fn folders() {
    let open = |dir: &Path| Checkpoint::open(dir).expect_err("not a model").to_string();
    let empty = tempfile::tempdir().expect("a folder");
    assert!(open(empty.path()).contains("not a model folder"));
    assert!(open(&empty.path().join("absent")).contains("not a model folder"));
    fs::copy(fixture("tiny-a").join("config.json"), empty.path().join("config.json")).expect("copied");
    assert!(open(empty.path()).contains("holds neither model.safetensors.index.json nor model.safetensors"));
    assert!(!open(&fixture("tiny-a").join("config.json")).is_empty());
}

#[cfg(unix)]
#[test]
fn links_are_followed_to_regular_files_only() {
    use std::os::unix::fs::symlink;
    // A hub cache: every file is a link into a store of blobs.
    let (store, source) = (copy(&format("mlx-4bit")), format("mlx-4bit"));
    let dir = tempfile::tempdir().expect("a folder");
    for entry in fs::read_dir(store.path()).expect("readable") {
        let entry = entry.expect("readable");
        symlink(entry.path(), dir.path().join(entry.file_name())).expect("linked");
    }
    load(dir.path(), &source).expect("links are fine");

    let relink = |target: &Path| {
        fs::remove_file(dir.path().join(MAIN)).expect("removed");
        symlink(target, dir.path().join(MAIN)).expect("linked");
        load(dir.path(), &source).expect_err("not a file").to_string()
    };
    assert!(relink(&store.path().join("gone")).contains("incomplete download"));
    assert!(relink(store.path()).contains("not a regular file"));
    assert!(relink(Path::new("/dev/zero")).contains("not a regular file"));
    // A link to itself: no permission needed to be unreadable.
    assert!(relink(&dir.path().join(MAIN)).contains(MAIN));
}

#[test]
fn sidecars() {
    let source = &format("mlx-4bit");
    let sidecar = "mtp-4bit.safetensors";
    let moved = |case: &str, names: &[&str]| {
        let dir = copy(source);
        for name in names.iter().filter(|n| **n != sidecar) {
            fs::copy(dir.path().join(sidecar), dir.path().join(name)).expect("copied");
        }
        if !names.contains(&sidecar) {
            fs::remove_file(dir.path().join(sidecar)).expect("removed");
        }
        load(dir.path(), source).map_err(|e| format!("{case}: {e}"))
    };
    moved("another name", &["mtp.safetensors"]).expect("one file is no riddle");
    moved("the published name wins", &["mtp-4bit.safetensors", "mtp.safetensors"]).expect("named exactly");
    let error = moved("two", &["mtp-a.safetensors", "mtp-b.safetensors"]).expect_err("which?");
    assert!(error.contains("mtp-a.safetensors, mtp-b.safetensors"), "{error}");
    let error = moved("none", &[]).expect_err("the MTP layer is expected");
    assert!(error.contains("missing tensor mtp.fc.weight"), "{error}");

    for prefix in ["", "language_model.mtp."] {
        let dir = copy(source);
        edit_header(&dir.path().join(sidecar), |h| {
            let names: Vec<String> = h.keys().filter(|k| *k != "__metadata__").cloned().collect();
            for name in names {
                rename(h, &name, &format!("{prefix}{}", name.strip_prefix("mtp.").expect("a prefix")));
            }
        });
        load(dir.path(), source).expect("prefixes do not matter");
    }
}

/// A sidecar that holds `experts` is a raw copy: its norms are offsets, whatever the main model's are.
#[test]
fn raw_sidecars_hold_offsets() {
    let (mlx, raw) = (format("mlx-4bit"), format("compressed-tensors-w4a16"));
    let dir = copy(&mlx);
    fs::copy(raw.join("model_extra_tensors.safetensors"), dir.path().join("mtp-4bit.safetensors"))
        .expect("copied");
    let verified = load(dir.path(), &mlx).expect("a raw copy is fine");
    assert_eq!(verified.warnings, []);
    let [mixed, sums, offsets] = [dir.path(), &mlx, &raw].map(|d| Checkpoint::open(d).expect("opens"));
    let name = "mtp.layers.0.input_layernorm.weight";
    assert_eq!(mixed.norm(name, 128).expect("there"), offsets.norm(name, 128).expect("there"));
    let name = "model.language_model.layers.0.input_layernorm.weight";
    assert_eq!(mixed.norm(name, 128).expect("there"), sums.norm(name, 128).expect("there"));
}

/// MTP tensors in the main index are read; a sidecar takes their place, with a word.
#[test]
fn sidecars_replace_main_tensors() {
    let source = format("autoround-w4a16");
    let dir = copy(&source);
    fs::copy(format("mlx-4bit").join("mtp-4bit.safetensors"), dir.path().join("mtp-4bit.safetensors"))
        .expect("copied");
    let verified = load(dir.path(), &source).expect("MLX beside AutoRound is fine");
    let text = verified.warnings[0].to_string();
    assert!(text.contains("mtp-4bit.safetensors is used in place of 67 tensors"), "{text}");
    let report = Checkpoint::open(dir.path()).expect("opens").report();
    assert!(report.mtp.expect("there").sidecar);
}

#[test]
fn mixed_convolutions_are_ambiguous() {
    refused(&fixture("tiny-a"), "conv", &["layers.1.linear_attn.conv1d.weight", "ambiguous"], |dir| {
        edit_header(&dir.join(MAIN), |h| {
            h["model.language_model.layers.1.linear_attn.conv1d.weight"]["shape"] = json!([128, 4, 1]);
        });
    });
}

#[test]
fn tensors_nobody_reads_are_named() {
    let source = fixture("tiny-a");
    let dir = copy(&source);
    edit_header(&dir.path().join(MAIN), |h| {
        rename(h, "model.visual.pos_embed.weight", "model.language_model.layers.3.extra.weight");
    });
    let checkpoint = Checkpoint::open(dir.path()).expect("opens");
    let verified =
        checkpoint.verify(&expected(checkpoint.config(), true, false)).expect("the text model is whole");
    let warnings: Vec<String> = verified.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(warnings, ["not used: 1 tensor (model.language_model.layers.3.extra.weight)"]);
}

/// Optional parts may be absent, not wrong.
#[test]
fn optional_parts() {
    let checkpoint = Checkpoint::open(&fixture("tiny-b")).expect("opens");
    let shape = |rows| checkpoint::Kind::Matrix { rows, cols: 32 };
    let absent = checkpoint::Expected::new("lm_head", shape(2048), "the head").optional();
    assert!(!checkpoint.contains("lm_head"));
    checkpoint.verify(std::slice::from_ref(&absent)).expect("it may be absent");
    let name = "model.language_model.embed_tokens";
    let wrong = checkpoint::Expected::new(name, shape(2047), "the embedding").optional();
    assert!(
        checkpoint.verify(&[wrong]).expect_err("wrong shape").to_string().contains("[2047, 32] expected")
    );
    let error = checkpoint.matrix("lm_head", 2048, 32).expect_err("absent").to_string();
    assert!(error.contains("missing tensor lm_head.weight"), "{error}");
    for (rows, cols) in [(0, 0), (0, 32), (2048, 0), (usize::MAX, usize::MAX), (usize::MAX, 32)] {
        checkpoint.matrix(name, rows, cols).expect_err("no such shape");
        checkpoint.vector("model.language_model.norm.weight", &[rows, cols]).expect_err("no such shape");
        let prefix = "model.language_model.layers.0.mlp";
        for projection in checkpoint::Projection::ALL {
            checkpoint.experts(prefix, projection, 12, rows, cols).expect_err("no such shape");
        }
    }
}

/// Text-only exports put the text keys at the top level and drop `language_model.` from the names.
#[test]
fn text_only_exports() {
    let source = fixture("tiny-a");
    let dir = copy(&source);
    edit_config(dir.path(), |c| {
        *c = c["text_config"].clone();
        assert_eq!(c["model_type"], "qwen3_5_moe_text");
    });
    edit_header(&dir.path().join(MAIN), |h| {
        let names: Vec<String> =
            h.keys().filter(|k| k.starts_with("model.language_model.")).cloned().collect();
        for name in names {
            rename(h, &name, &name.replacen("language_model.", "", 1));
        }
    });
    let checkpoint = Checkpoint::open(dir.path()).expect("opens");
    checkpoint.verify(&expected(checkpoint.config(), true, false)).expect("whole");
}
