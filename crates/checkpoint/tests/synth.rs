//! Synthetic checkpoints: what is written reads back as what is in memory, in every recipe.

mod common;

use std::{collections::HashSet, fs, path::PathBuf};

use checkpoint::{Checkpoint, Expected, Format, Kind, Projection, Recipe, Source, Synth, write};
use common::{expected, fixture, format, read_json};
use quant::{Dtype, Encoding, Matrix, Zero, dequantize_row_f32};

/// The geometry of the format fixtures with vision and MTP: every `in` divides by 128 except in the vision
/// tower.
fn synth(recipe: Recipe, seed: u64) -> Synth {
    let mut config = read_json(&format("mlx-4bit").join("config.json"));
    config.as_object_mut().expect("an object").remove("quantization");
    config.as_object_mut().expect("an object").remove("quantization_config");
    let list = expected(&config, true, true);
    Synth::new(config, list, recipe, seed)
}

fn same(a: &Matrix, b: &Matrix) -> bool {
    a.encoding() == b.encoding()
        && (a.rows(), a.cols()) == (b.rows(), b.cols())
        && (a.codes(), a.scales(), a.biases()) == (b.codes(), b.scales(), b.biases())
}

fn check_same(one: &Expected, a: &dyn Source, b: &dyn Source) {
    let name = &one.name;
    match &one.kind {
        Kind::Matrix { rows, cols } => {
            assert!(a.contains(name) && b.contains(name), "{name}");
            let [a, b] = [a, b].map(|s| s.matrix(name, *rows, *cols).expect(name));
            assert!(same(&a, &b), "{name}");
        }
        Kind::Experts { projection, experts, rows, cols } => {
            assert!(
                a.contains(&format!("{name}.experts")) && b.contains(&format!("{name}.experts")),
                "{name}"
            );
            let [a, b] = [a, b].map(|s| s.experts(name, *projection, *experts, *rows, *cols).expect(name));
            assert!(a.iter().zip(&b).all(|(a, b)| same(a, b)) && a.len() == b.len(), "{name}");
        }
        Kind::Vector { shape } => {
            let [a, b] = [a, b].map(|s| s.vector(name, shape).expect(name));
            assert_eq!(a, b, "{name}");
        }
        Kind::Norm { len } => {
            let [a, b] = [a, b].map(|s| s.norm(name, *len).expect(name));
            assert_eq!(a, b, "{name}");
        }
    }
}

#[test]
fn written_equals_generated() {
    for recipe in Recipe::ALL {
        let dir = tempfile::tempdir().expect("a folder");
        let target = dir.path().join("model");
        let synth = synth(recipe, 3);
        let companions: Vec<PathBuf> = vec![fixture("tiny-a").join("tokenizer.json")];
        let mut last = (0, 0);
        write(&target, &synth, &companions, &mut |done, total| last = (done, total)).expect("written");
        assert!(last.0 == last.1 && last.1 > 500_000, "{recipe}: {last:?}");

        let checkpoint = Checkpoint::open(&target).unwrap_or_else(|e| panic!("{recipe}: {e}"));
        let verified = checkpoint.verify(synth.expected()).unwrap_or_else(|e| panic!("{recipe}: {e}"));
        assert_eq!(verified.warnings, [], "{recipe}");
        checkpoint.check_values(synth.expected(), &mut |_, _| {}).expect("finite");
        for one in synth.expected() {
            check_same(one, &checkpoint, &synth);
        }
        assert!(checkpoint.has_mtp() && synth.has_mtp());
        assert_eq!(checkpoint.config()["text_config"], synth.config()["text_config"]);
        let files: HashSet<String> = fs::read_dir(&target)
            .expect("readable")
            .map(|e| e.expect("readable").file_name().into_string().expect("text"))
            .collect();
        assert!(
            files.contains("tokenizer.json") && files.iter().all(|f| !f.ends_with("partial")),
            "{files:?}"
        );
        let mlx = matches!(recipe, Recipe::Mlx4bit | Recipe::Mlx3bitExperts);
        assert_eq!(files.contains("mtp-4bit.safetensors"), mlx, "{recipe}");
    }
}

#[test]
fn recipes_are_what_they_say() {
    let text = |recipe: Recipe, module: &str| {
        let synth = synth(recipe, 1);
        let kind = synth.expected().iter().find(|e| e.name == module).expect(module).kind.clone();
        match kind {
            Kind::Matrix { rows, cols } => {
                synth.matrix(module, rows, cols).expect(module).encoding().to_string()
            }
            Kind::Experts { projection, experts, rows, cols } => {
                synth.experts(module, projection, experts, rows, cols).expect(module)[0]
                    .encoding()
                    .to_string()
            }
            _ => panic!("{module} is no matrix"),
        }
    };
    let layer = "model.language_model.layers.1";
    let check =
        |recipe: Recipe, module: &str, scheme: &str| assert_eq!(text(recipe, module), scheme, "{module}");
    let (three, four, eight) = (
        "3-bit g64 affine (BF16 scales)",
        "4-bit g64 affine (BF16 scales)",
        "8-bit g64 affine (BF16 scales)",
    );
    let symmetric = "4-bit g128 symmetric (F16 scales)";
    for recipe in [Recipe::Mlx4bit, Recipe::Mlx3bitExperts] {
        for module in ["lm_head", "model.language_model.embed_tokens", "mtp.fc", "mtp.layers.0.mlp"] {
            check(recipe, module, four);
        }
        check(recipe, &format!("{layer}.self_attn.q_proj"), four);
        check(recipe, &format!("{layer}.mlp.gate"), eight);
        check(recipe, &format!("{layer}.mlp.shared_expert_gate"), eight);
        check(recipe, "mtp.layers.0.mlp.gate", eight);
        check(recipe, "model.visual.merger.linear_fc1", "BF16");
    }
    check(Recipe::Mlx4bit, &format!("{layer}.mlp"), four);
    check(Recipe::Mlx3bitExperts, &format!("{layer}.mlp"), three);
    check(Recipe::W4a16, &format!("{layer}.mlp"), symmetric);
    check(Recipe::W4a16, &format!("{layer}.self_attn.o_proj"), symmetric);
    for module in ["lm_head", "model.language_model.embed_tokens", "mtp.fc", "mtp.layers.0.mlp.gate"] {
        check(Recipe::W4a16, module, "BF16");
        check(Recipe::Bf16, module, "BF16");
    }
    for recipe in Recipe::ALL {
        assert_eq!(recipe.name().parse(), Ok(recipe));
    }
    assert!("x".parse::<Recipe>().expect_err("no recipe").contains("mlx-4bit"));
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), &synth(Recipe::W4a16, 1), &[], &mut |_, _| {}).expect("written");
    assert_eq!(Checkpoint::open(folder.path()).expect("opens").format(), Format::CompressedTensors);
}

/// A tensor depends on seed and name alone: not on order, not on what else there is.
#[test]
fn streams_are_independent() {
    let (a, b) = (synth(Recipe::Mlx4bit, 1), synth(Recipe::Mlx4bit, 2));
    let name = "model.language_model.layers.0.linear_attn.in_proj_z";
    let kind = Kind::Matrix { rows: 512, cols: 128 };
    let alone = Synth::new(a.config().clone(), vec![Expected::new(name, kind, "it")], Recipe::Mlx4bit, 1);
    let get = |s: &Synth| s.matrix(name, 512, 128).expect("there");
    assert!(same(&get(&a), &get(&alone)) && same(&get(&a), &get(&a)));
    assert_ne!(get(&a).codes(), get(&b).codes());
    let experts = a.experts("model.language_model.layers.0.mlp", Projection::Up, 4, 128, 128).expect("there");
    assert_ne!(experts[0].codes(), experts[1].codes());
    assert!(!alone.contains("lm_head") && !alone.has_mtp());
    alone.matrix("lm_head", 320, 128).expect_err("not asked for");
    alone.matrix(name, 128, 512).expect_err("another shape");
}

/// Random activations through a router reach every expert.
#[test]
fn routers_spread_tokens() {
    let (experts, hidden, tokens) = (64, 512, 512);
    let name = "model.language_model.layers.0.mlp.gate";
    let kind = Kind::Matrix { rows: experts, cols: hidden };
    for recipe in Recipe::ALL {
        let synth =
            Synth::new(serde_json::json!({}), vec![Expected::new(name, kind.clone(), "it")], recipe, 9);
        let gate = synth.matrix(name, experts, hidden).expect("there");
        let (mut row, mut rows) = (vec![0.0; hidden], Vec::new());
        for r in 0..experts {
            dequantize_row_f32(&gate, r, &mut row);
            rows.push(row.clone());
        }
        let mut state = 1u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u32 << 24) as f32
        };
        let mut hits = vec![0; experts];
        for _ in 0..tokens {
            let x: Vec<f32> = (0..hidden).map(|_| (uniform() - 0.5) * 12f32.sqrt()).collect();
            let score = |w: &Vec<f32>| w.iter().zip(&x).map(|(w, x)| w * x).sum::<f32>();
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|&a, &b| score(&rows[b]).total_cmp(&score(&rows[a])));
            order[..8].iter().for_each(|&e| hits[e] += 1);
        }
        let (least, most) = (hits.iter().min().expect("some"), hits.iter().max().expect("some"));
        assert!(*least > 20 && *most < 180, "{recipe}: {least} to {most}"); // 64 each if even
    }
}

#[test]
fn scales_of_both_signs_and_no_extremes() {
    let synth = synth(Recipe::W4a16, 1);
    let matrix = synth.matrix("model.language_model.layers.0.linear_attn.out_proj", 128, 512).expect("there");
    let Encoding::Grouped(scheme) = matrix.encoding() else { panic!("packed") };
    assert_eq!((scheme.zero, scheme.scales), (Zero::Symmetric, Dtype::F16));
    let mut scales = vec![0.0; 128 * 4];
    quant::read_float_row(scheme.scales, matrix.scales(), &mut scales);
    let negative = scales.iter().filter(|s| **s < 0.0).count();
    assert!((150..362).contains(&negative), "{negative} of 512");
    let base = 1.0 / 512f32.sqrt() / 4.6;
    assert!(scales.iter().all(|s| (0.7 * base..1.3 * base).contains(&s.abs())));
}
