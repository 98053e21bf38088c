//! The models whose kernels a release has, and what they ask of a card.

use std::collections::BTreeSet;
use std::error::Error;
use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, Source};
use device::KvForm;
use device::cuda::rehearsal::{CardKind, rehearse};
use model::qwen3_5::{Config, open};
use quant::Dtype;
use serde_json::{Value, json};

use crate::blank::{Blank, Form, LEFT};
use crate::tour::{Tour, settings};

pub(crate) type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// Weights with their name in messages, and the forms of K/V in which they are rehearsed.
pub(crate) struct Subject {
    pub(crate) name: String,
    source: Box<dyn Source>,
    kv: &'static [KvForm],
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn config(path: &str) -> Result<Value> {
    Ok(serde_json::from_slice(&std::fs::read(root().join(path))?)?)
}

/// The published geometry with a layer of each kind: more of them ask for nothing else.
pub(crate) fn published(form: Form) -> Result<Subject> {
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
pub(crate) fn folder(path: &str) -> Result<Subject> {
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

/// What most of the published ones are stored in.
pub(crate) const MLX_4BIT: Form = Form::Mlx { bits: 4, expert_bits: 4 };

/// Everything that a release has kernels for.
pub(crate) fn subjects() -> Result<Vec<Subject>> {
    let mlx = |bits| Form::Mlx { bits, expert_bits: bits };
    let packed = |bits, scales, left| Form::Packed { bits, scales, left };
    let forms = [
        Form::Plain,
        MLX_4BIT,
        Form::Mlx { bits: 4, expert_bits: 3 },
        mlx(3),
        mlx(5),
        mlx(6),
        mlx(8),
        packed(4, Dtype::F16, LEFT[0]),
        packed(4, Dtype::F16, LEFT[1]),
        packed(4, Dtype::F16, LEFT[2]),
        packed(4, Dtype::F16, LEFT[3]),
        packed(4, Dtype::Bf16, LEFT[0]),
        packed(4, Dtype::Bf16, LEFT[3]),
        packed(8, Dtype::F16, LEFT[0]),
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

/// Models that a card can run, too, whose half-precision matrix instruction does not sum exactly.
pub(crate) fn summed_plainly() -> Result<Vec<Subject>> {
    let packed = |scales| published(Form::Packed { bits: 4, scales, left: LEFT[0] });
    Ok(vec![published(MLX_4BIT)?, packed(Dtype::F16)?, packed(Dtype::Bf16)?, folder("models/demo")?])
}

/// Variants that a card of this kind is asked for. `plain_sums`: as [`summed_plainly`] has it.
pub(crate) fn rehearsed(kind: &CardKind, subject: &Subject, plain_sums: bool) -> Result<BTreeSet<String>> {
    let mut all = BTreeSet::new();
    let context = Config::from_json(subject.source.config())?.positions_max;
    for &kv in subject.kv {
        let (device, asked) = rehearse(kind, plain_sums)?;
        let opened = open(&*subject.source, device, settings(kv, context), &mut |_, _| {});
        let done = opened.map_err(Into::into).and_then(|mut model| Tour::new(&mut model).all());
        done.map_err(|error| format!("{} on {}: {error}", subject.name, kind.archs.join(", ")))?;
        all.extend(asked.variants());
    }
    Ok(all)
}
