//! Every module and tensor of every format fixture equals its golden, bit for bit.

mod common;

use std::{collections::HashSet, fs};

use checkpoint::{Checkpoint, Expected, Format, Kind, Projection, parse_header};
use common::{FORMATS, expected, fixture, format, read_json};
use quant::{Encoding, Matrix, bf16_from_f32, dequantize_row_f32, unpack_codes};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn hex(hasher: Sha256) -> String {
    hasher.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(&format(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// The matrices behind one golden record: one, or all experts of a stacked tensor.
fn matrices(checkpoint: &Checkpoint, canonical: &str, shape: &[usize]) -> Vec<Matrix> {
    let module = canonical.strip_suffix(".weight").unwrap_or(canonical);
    match *shape {
        [experts, rows, cols] => {
            let (prefix, last) = module.rsplit_once(".experts.").expect("a stacked tensor");
            let projection = Projection::ALL.into_iter().find(|p| p.name() == last).expect("a projection");
            checkpoint.experts(prefix, projection, experts, rows, cols).expect(module)
        }
        [rows, cols] => vec![checkpoint.matrix(module, rows, cols).expect(module)],
        _ => panic!("{module} has shape {shape:?}"),
    }
}

fn shape(record: &Value) -> Vec<usize> {
    record["shape"].as_array().expect("a list").iter().map(|d| d.as_u64().expect("a size") as usize).collect()
}

fn check_quantized(checkpoint: &Checkpoint, name: &str, record: &Value, sample: Option<&[f32]>) {
    let canonical = record["canonical"].as_str().expect("a name");
    let (mut codes_hash, mut values_hash) = (Sha256::new(), Sha256::new());
    let mut head = Vec::new();
    for matrix in matrices(checkpoint, canonical, &shape(record)) {
        let Encoding::Grouped(scheme) = matrix.encoding() else { panic!("{name} is dense") };
        assert_eq!(u64::from(scheme.bits), record["bits"], "{name}");
        assert_eq!(scheme.group as u64, record["group_size"], "{name}");
        let mut codes = vec![0; matrix.cols()];
        let mut values = vec![0.0; matrix.cols()];
        for row in 0..matrix.rows() {
            unpack_codes(scheme.bits, matrix.row_codes(row), &mut codes);
            codes_hash.update(&codes);
            dequantize_row_f32(&matrix, row, &mut values);
            for value in &mut values {
                *value += 0.0; // -0 becomes 0
                values_hash.update(value.to_le_bytes());
            }
            if head.len() < sample.map_or(0, <[f32]>::len) {
                head.extend_from_slice(&values);
            }
        }
    }
    assert_eq!(hex(codes_hash), record["codes_sha256"].as_str().expect("a hash"), "codes of {name}");
    assert_eq!(hex(values_hash), record["f32_sha256"].as_str().expect("a hash"), "values of {name}");
    if let Some(sample) = sample {
        assert_eq!(head, sample, "sample of {name}");
    }
}

fn check_unquantized(checkpoint: &Checkpoint, name: &str, record: &Value) {
    let canonical = record["canonical"].as_str().expect("a name");
    let (found, values) = checkpoint.tensor_f32(canonical).expect(name);
    assert_eq!(found, shape(record), "{name}");
    let mut hash = Sha256::new();
    match record["dtype"].as_str().expect("a dtype") {
        "bfloat16" => values.iter().for_each(|&v| hash.update(bf16_from_f32(v).to_le_bytes())),
        "float32" => values.iter().for_each(|&v| hash.update(v.to_le_bytes())),
        other => panic!("{name}: {other}"),
    }
    assert_eq!(hex(hash), record["sha256"].as_str().expect("a hash"), "{name}");
}

#[test]
fn every_golden_agrees() {
    for folder in FORMATS {
        let checkpoint = open(folder);
        let goldens = format(folder).join("goldens");
        let golden = read_json(&goldens.join("goldens.json"));
        let file = fs::read(goldens.join("samples.safetensors")).expect("readable");
        let samples = parse_header(&file).expect("a header");
        let sample = |name: &str| -> Option<Vec<f32>> {
            let entry = samples.iter().find(|e| e.name == name)?;
            let bytes = &file[entry.range.clone()];
            Some(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        };
        let quantized = golden["quantized"].as_object().expect("an object");
        let mut sampled = 0;
        for (name, record) in quantized {
            let sample = sample(name);
            sampled += usize::from(sample.is_some());
            check_quantized(&checkpoint, name, record, sample.as_deref());
        }
        assert_eq!(sampled, samples.len(), "{folder}: every sample is of a module");
        let unquantized = golden["unquantized"].as_object().expect("an object");
        for (name, record) in unquantized {
            check_unquantized(&checkpoint, name, record);
        }
        assert!(quantized.len() >= 27 && unquantized.len() >= 11, "{folder}");
    }
}

/// The list of the geometry covers exactly the tensors of the files.
#[test]
fn everything_verifies_and_nothing_is_left_over() {
    let folders = FORMATS.iter().map(|f| format(f)).chain(["tiny-a", "tiny-b"].map(fixture));
    for dir in folders {
        let checkpoint = Checkpoint::open(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        let list = expected(checkpoint.config(), checkpoint.has_mtp(), checkpoint.has_vision());
        let verified = checkpoint.verify(&list).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        assert_eq!(verified.warnings, [], "{}", dir.display());
        let mut calls = Vec::new();
        checkpoint.check_values(&list, &mut |done, total| calls.push((done, total))).expect("finite");
        let (done, total) = *calls.last().expect("progress");
        assert!(done == total && total > 10_000 && calls.is_sorted(), "{}", dir.display());
        read_all(&checkpoint, &list);
    }
}

fn read_all(checkpoint: &Checkpoint, list: &[Expected]) {
    for one in list {
        match &one.kind {
            Kind::Matrix { rows, cols } => {
                assert!(checkpoint.contains(&one.name), "{}", one.name);
                let matrix = checkpoint.matrix(&one.name, *rows, *cols).expect("verified");
                matrix.discard();
                assert_eq!((matrix.rows(), matrix.cols()), (*rows, *cols));
            }
            Kind::Experts { projection, experts, rows, cols } => {
                assert!(checkpoint.contains(&format!("{}.experts", one.name)), "{}", one.name);
                let all =
                    checkpoint.experts(&one.name, *projection, *experts, *rows, *cols).expect("verified");
                assert_eq!(all.len(), *experts);
            }
            Kind::Vector { shape } => {
                let values = checkpoint.vector(&one.name, shape).expect("verified");
                assert_eq!(values.len(), shape.iter().product::<usize>());
            }
            Kind::Norm { len } => {
                assert_eq!(checkpoint.norm(&one.name, *len).expect("verified").len(), *len);
            }
        }
    }
}

/// The same model in every format: sums are the rounded offsets plus one, in the main model and in MTP.
#[test]
fn norm_conventions_meet() {
    let (mlx, hf) = (open("mlx-4bit"), open("autoround-w4a16"));
    let list = expected(hf.config(), true, false);
    let norms = list.iter().filter(|e| matches!(e.kind, Kind::Norm { .. }));
    let mut names = HashSet::new();
    for one in norms {
        let Kind::Norm { len } = one.kind else { unreachable!("filtered") };
        let (sum, offset) =
            (mlx.norm(&one.name, len).expect("there"), hf.norm(&one.name, len).expect("there"));
        let rounded: Vec<f64> =
            offset.iter().map(|&g| f64::from(quant::bf16_to_f32(bf16_from_f32(g as f32)))).collect();
        assert_eq!(sum, rounded, "{}", one.name);
        assert!(sum.iter().all(|g| (0.5..2.0).contains(g)), "{}: {sum:?}", one.name);
        names.insert(&one.name);
    }
    assert_eq!(names.len(), 1 + 2 * 2 + 2 + 3 + 4);
    // The gated norm is a multiplier in both, and not shifted.
    let name = "model.language_model.layers.0.linear_attn.norm.weight";
    assert_eq!(mlx.norm(name, 16).expect("there"), hf.norm(name, 16).expect("there"));
    let plain: Vec<f64> = hf.vector(name, &[16]).expect("there").into_iter().map(f64::from).collect();
    assert_eq!(hf.norm(name, 16).expect("there"), plain);
}

#[test]
fn formats_are_recognised_and_reported() {
    let check = |name: &str, format: Format, mtp: Option<(&str, bool)>, vision: usize, scheme: &str| {
        let checkpoint = open(name);
        let report = checkpoint.report();
        assert_eq!((checkpoint.format(), report.format), (format, format), "{name}");
        let found = report.mtp.as_ref().map(|m| (m.experts, m.sidecar));
        assert_eq!(found, mtp, "{name}");
        assert_eq!(report.vision_tensors, vision, "{name}");
        assert_eq!(checkpoint.has_vision(), vision > 0, "{name}");
        assert_eq!(report.schemes[0].scheme, scheme, "{name}");
        assert_eq!(report.tensors, report.dtypes.iter().map(|d| d.tensors).sum::<usize>(), "{name}");
        assert_eq!(report.bytes, report.dtypes.iter().map(|d| d.bytes).sum::<u64>(), "{name}");
    };
    let sidecar = Some(("switch_mlp", true));
    check("mlx-4bit", Format::Mlx, sidecar, 21, "4-bit g64 affine (BF16 scales)");
    check("mlx-mixed-3bit", Format::Mlx, sidecar, 0, "4-bit g64 affine (BF16 scales)");
    check("mlx-other-widths", Format::Mlx, None, 21, "8-bit g64 affine (BF16 scales)");
    let split = Some(("per expert", false));
    check("autoround-w4a16", Format::AutoRound, split, 21, "4-bit g128 symmetric (F16 scales)");
    let w4a16 = "4-bit g128 symmetric (F16 scales)";
    check("compressed-tensors-w4a16", Format::CompressedTensors, split, 21, w4a16);
    let w4a16 = "4-bit g128 symmetric (BF16 scales)";
    check("compressed-tensors-llmcompressor", Format::CompressedTensors, None, 21, w4a16);
}

#[test]
fn experts_and_single_modules_agree() {
    let checkpoint = open("autoround-w4a16");
    let prefix = "model.language_model.layers.1.mlp";
    let all = checkpoint.experts(prefix, Projection::Up, 4, 128, 128).expect("there");
    for (e, matrix) in all.iter().enumerate() {
        let one = checkpoint.matrix(&format!("{prefix}.experts.{e}.up_proj"), 128, 128).expect("there");
        assert_eq!((one.codes(), one.scales()), (matrix.codes(), matrix.scales()));
    }
    assert_ne!(all[0].codes(), all[1].codes());
}

#[test]
fn stacked_gate_and_up_are_the_halves() {
    let checkpoint = Checkpoint::open(&fixture("tiny-a")).expect("opens");
    let prefix = "model.language_model.layers.2.mlp";
    let whole = checkpoint.vector(&format!("{prefix}.experts.gate_up_proj"), &[8, 32, 64]).expect("there");
    for (half, projection) in [(0, Projection::Gate), (1, Projection::Up)] {
        let all = checkpoint.experts(prefix, projection, 8, 16, 64).expect("there");
        for (e, matrix) in all.iter().enumerate() {
            let mut row = vec![0.0; 64];
            for r in 0..16 {
                dequantize_row_f32(matrix, r, &mut row);
                let at = ((e * 32) + half * 16 + r) * 64;
                assert_eq!(row, whole[at..at + 64]);
            }
        }
    }
}

/// A flattened patch embedding equals the tensor in Hugging Face order, whichever order it is stored in.
#[test]
fn patch_embeddings_meet() {
    let name = "model.visual.patch_embed.proj";
    let (mlx, hf) = (open("mlx-4bit"), open("autoround-w4a16"));
    let expected = hf.vector(&format!("{name}.weight"), &[32, 3, 2, 4, 4]).expect("there");
    for checkpoint in [mlx, hf] {
        let matrix = checkpoint.matrix(name, 32, 96).expect("there");
        let mut values = vec![0.0; 96];
        for row in 0..32 {
            dequantize_row_f32(&matrix, row, &mut values);
            assert_eq!(values, expected[row * 96..(row + 1) * 96], "{checkpoint:?} row {row}");
        }
    }
}
