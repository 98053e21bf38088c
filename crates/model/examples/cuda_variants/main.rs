//! The list of CUDA kernel variants that a release compiles before (`packaging/kernels.list`), made from the code: models
//! are loaded onto cards that are not there, and led through everything an engine asks.
//!
//! `cargo run --release -p model --example cuda_variants > packaging/kernels.list` writes it; with `--check LIST` the
//! example fails where LIST is another. Each line names architectures, a kernel file and its constants.

mod blank;
mod tour;

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use checkpoint::{Checkpoint, Source};
use device::KvForm;
use device::cuda::rehearsal::{CARD_KINDS, CardKind, rehearse};
use model::qwen3_5::{Config, open};
use quant::Dtype;
use serde_json::{Value, json};

use blank::{Blank, Form};
use tour::{Tour, settings};

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// Weights with their name in messages, and the forms of K/V in which they are rehearsed.
struct Subject {
    name: String,
    source: Box<dyn Source>,
    kv: &'static [KvForm],
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn config(path: &str) -> Result<Value> {
    Ok(serde_json::from_slice(&std::fs::read(root().join(path))?)?)
}

/// The published geometry with a layer of each kind: more of them ask for nothing else.
fn published(form: Form) -> Result<Subject> {
    let mut json = config("configs/qwen3.6-35b-a3b/config.json")?;
    json["vision_config"]["depth"] = json!(1);
    json["text_config"]["num_hidden_layers"] = json!(2);
    json["text_config"]["layer_types"] = json!(["linear_attention", "full_attention"]);
    let kv: &[KvForm] = match form {
        Form::Plain => &[KvForm::Int8, KvForm::Int16],
        _ => &[KvForm::Int8],
    };
    Ok(Subject { name: format!("35B, {form:?}"), source: Box::new(Blank::new(json, form)?), kv })
}

/// A folder of the project.
fn folder(path: &str) -> Result<Subject> {
    let source = Checkpoint::open(&root().join(path))?;
    let kv = &[KvForm::Int8, KvForm::Int16];
    Ok(Subject { name: path.into(), source: Box::new(source), kv })
}

/// Another geometry of the project, as `synth:` and the self-test of `clary doctor` have it.
fn geometry(path: &str) -> Result<Subject> {
    let form = Form::Mlx { bits: 4, expert_bits: 4 };
    let source = Box::new(Blank::new(config(path)?, form)?);
    Ok(Subject { name: path.into(), source, kv: &[KvForm::Int8] })
}

const MLX_4BIT: Form = Form::Mlx { bits: 4, expert_bits: 4 };

/// Everything that a release has kernels for.
fn subjects() -> Result<Vec<Subject>> {
    let mlx = |bits| Form::Mlx { bits, expert_bits: bits };
    let packed = |bits, scales| Form::Packed { bits, scales };
    let forms = [
        Form::Plain,
        MLX_4BIT,
        Form::Mlx { bits: 4, expert_bits: 3 },
        mlx(3),
        mlx(5),
        mlx(6),
        mlx(8),
        packed(4, Dtype::F16),
        packed(4, Dtype::Bf16),
        packed(8, Dtype::F16),
    ];
    let mut all = forms.into_iter().map(published).collect::<Result<Vec<_>>>()?;
    for path in ["models/demo", "fixtures/tiny-a", "fixtures/tiny-b"] {
        all.push(folder(path)?);
    }
    for path in ["models/demo/config.json", "configs/synth-small/config.json"] {
        all.push(geometry(path)?);
    }
    Ok(all)
}

/// Variants that a card of this kind is asked for.
fn rehearsed(kind: &CardKind, subject: &Subject) -> Result<BTreeSet<String>> {
    let mut all = BTreeSet::new();
    let context = Config::from_json(subject.source.config())?.positions_max;
    for &kv in subject.kv {
        let (device, asked) = rehearse(kind)?;
        let opened = open(&*subject.source, device, settings(kv, context), &mut |_, _| {});
        let done = opened.map_err(Into::into).and_then(|mut model| Tour::new(&mut model).all());
        done.map_err(|error| format!("{} on {}: {error}", subject.name, kind.archs.join(", ")))?;
        all.extend(asked.variants());
    }
    Ok(all)
}

/// The list: variants with all architectures that want them.
fn list() -> Result<String> {
    let mut archs: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for subject in subjects()? {
        for kind in &CARD_KINDS {
            for variant in rehearsed(kind, &subject)? {
                archs.entry(variant).or_default().extend(kind.archs);
            }
        }
        eprintln!("{}: {} variants so far", subject.name, archs.len());
    }
    let line = |(variant, archs): (&String, &BTreeSet<&str>)| {
        let archs: Vec<&str> = archs.iter().copied().collect();
        format!("{} {variant}\n", archs.join(","))
    };
    Ok(archs.iter().map(line).collect())
}

/// Lines of one text that the other lacks.
fn missing<'a>(of: &'a str, from: &str) -> Vec<&'a str> {
    let there: BTreeSet<&str> = from.lines().collect();
    of.lines().filter(|line| !there.contains(line)).collect()
}

fn check(path: &str, list: &str) -> Result<bool> {
    let committed = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let (new, gone) = (missing(list, &committed), missing(&committed, list));
    new.iter().for_each(|line| eprintln!("{path} lacks: {line}"));
    gone.iter().for_each(|line| eprintln!("nothing asks for: {line}"));
    if !new.is_empty() || !gone.is_empty() {
        eprintln!("write it anew: cargo run --release -p model --example cuda_variants > {path}");
    }
    Ok(new.is_empty() && gone.is_empty())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let done = match &words[..] {
        [] => list().map(|list| {
            print!("{list}");
            true
        }),
        [flag, path] if flag == "--check" => list().and_then(|list| check(path, &list)),
        _ => Err("nothing, or --check LIST".into()),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
