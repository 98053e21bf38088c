//! Damaged files and folders: each is refused with words that say what and where (`docs/formats.md`, 8).

mod common;

use std::{fs, path::Path};

use checkpoint::Checkpoint;
use common::{copy, damage::*, expected, fixture, format, join, rewrite, split};
use serde_json::{Map, Value, json};

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

/// Bytes that go after the headers were checked are an error of the tensor that needs them, not of the
/// process.
#[test]
fn files_that_shrink_while_they_are_read() {
    all_indexed(|source, _| {
        let dir = copy(source);
        let checkpoint = Checkpoint::open(dir.path()).expect("whole");
        let length = fs::metadata(dir.path().join(MAIN)).expect("there").len();
        let file = fs::File::options().write(true).open(dir.path().join(MAIN)).expect("ours");
        file.set_len(length / 4).expect("cut");
        let values = checkpoint
            .check_values(&expected(checkpoint.config(), checkpoint.has_mtp(), false), &mut |_, _| {})
            .expect_err("lost")
            .to_string();
        assert!(values.contains(MAIN) && values.contains("cannot be read any more"), "{values}");
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

/// MTP tensors of the main index in MLX layout: widths come from shapes, norms are sums.
#[test]
fn sidecars_in_the_index() {
    for name in ["mlx-4bit", "mlx-mixed-3bit"] {
        let source = format(name);
        let dir = copy(&source);
        let (header, _) = split(&source.join("mtp-4bit.safetensors"));
        edit(&dir.path().join(INDEX), |i| {
            for tensor in header.keys().filter(|k| *k != "__metadata__") {
                i["weight_map"][tensor] = "mtp-4bit.safetensors".into();
            }
        });
        let verified = load(dir.path(), &source).expect("sound");
        assert_eq!(verified.warnings, []);
        let [inside, beside] = [dir.path(), &source].map(|d| Checkpoint::open(d).expect("opens"));
        let norm = "mtp.layers.0.self_attn.q_norm.weight";
        assert_eq!(inside.norm(norm, 64).expect("there"), beside.norm(norm, 64).expect("there"));
        assert!(!inside.report().mtp.expect("there").sidecar);
    }
}

/// Every part of a packed module is needed.
#[test]
fn incomplete_modules() {
    for (name, module, parts) in [
        ("mlx-4bit", "language_model.model.layers.1.mlp.switch_mlp.up_proj", &["scales", "biases"][..]),
        (
            "autoround-w4a16",
            "model.language_model.layers.1.mlp.experts.2.up_proj",
            &["scales", "qzeros", "qweight"],
        ),
        ("compressed-tensors-w4a16", "model.language_model.layers.1.self_attn.k_proj", &["weight_packed"]),
    ] {
        for part in parts {
            refused(
                &format(name),
                part,
                &[module, &std::format!("weight is packed but {part} is missing")],
                |dir| {
                    let tensor = std::format!("{module}.{part}");
                    edit_header(&dir.join(MAIN), |h| {
                        let entry = h.remove(&tensor).expect("there");
                        h.insert("elsewhere".into(), entry);
                    });
                    edit(&dir.join(INDEX), |i| {
                        drop(i["weight_map"].as_object_mut().expect("a map").remove(&tensor));
                    });
                },
            );
        }
    }
}
