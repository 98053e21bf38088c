//! Same bits whatever the instruction set, the thread count and the form of storage.

use std::time::Instant;

use crate::support::*;
use checkpoint::Checkpoint;
use contracts::contracts::{Signature, pictured_signature, same_bits, signature};
use contracts::rewrite::{Form, Rewritten};
use contracts::{Contract, Folder, Outcome, Runner, Sizes, Subject};
use device::KvForm;
use device::cpu::{CpuSettings, Isa};
use model::Model;

fn sizes(tokens: usize) -> Sizes {
    Sizes { slots: 3, snapshots: 2, ..Sizes::for_text(tokens) }
}

fn sign(model: &mut dyn Model, text: &[u32]) -> Signature {
    signature(&mut Runner::new(model), text).expect("the model answers")
}

#[track_caller]
fn assert_equal(subject: &str, outcome: &Outcome) {
    println!("{subject}: {} {}: {} compared", outcome.contract.id(), outcome.case, outcome.compared);
    assert!(outcome.held(), "{subject}: {outcome:?}");
}

/// Every instruction set of this processor with one thread, and two and five threads.
fn check_instruction_sets(name: &str, tokens: usize) {
    let start = Instant::now();
    let text = text(name, tokens);
    for kv in FORMS {
        let mut settings: Vec<CpuSettings> =
            Isa::supported().into_iter().map(|isa| CpuSettings { threads: 1, isa }).collect();
        settings.extend([2, 5].map(|threads| CpuSettings { threads, isa: Isa::detect() }));
        let of = |cpu: CpuSettings| {
            let subject = Folder { cpu, ..subject(name, "cpu", kv) };
            let mut model = subject.open(sizes(tokens)).expect("fixtures load");
            let plain = (subject.name(), sign(&mut *model, &text));
            let pictured = pictured_signature(&mut Runner::new(&mut *model), &text);
            (plain, pictured.expect("the model answers").map(|signature| (subject.name(), signature)))
        };
        let (signatures, pictured): (Vec<_>, Vec<_>) = settings.into_iter().map(of).unzip();
        let case = "instruction sets and threads";
        assert_equal(name, &same_bits(&signatures, Contract::Devices, case));
        let pictured: Vec<_> = pictured.into_iter().flatten().collect();
        assert_eq!(pictured.len(), if name == "mlx-mixed-3bit" { 0 } else { signatures.len() });
        if !pictured.is_empty() {
            assert_equal(name, &same_bits(&pictured, Contract::Devices, "the same with pictures"));
        }
    }
    println!("{name}: {:.1} s", start.elapsed().as_secs_f64());
}

#[test]
fn instruction_sets_and_threads_agree_on_tiny_models() {
    check_instruction_sets("tiny-a", 600);
    check_instruction_sets("tiny-b", 150);
}

#[test]
fn instruction_sets_and_threads_agree_on_the_demo_model() {
    check_instruction_sets("demo", 200);
}

#[test]
fn instruction_sets_and_threads_agree_in_every_format() {
    for format in FORMATS {
        check_instruction_sets(format, 100);
    }
}

/// AutoRound and compressed-tensors wrote the same codes and scales of one source: their text models are one.
#[test]
fn formats_with_the_same_codes_give_the_same_bits() {
    for (device, tokens) in [("cpu", 200), ("reference", 20)] {
        let of = |name: &str| {
            let subject = subject(name, device, KvForm::Int16);
            let settings = model::qwen3_5::Settings { mtp: false, ..sizes(tokens).settings(subject.kv) };
            let checkpoint = Checkpoint::open(&subject.path).expect("fixtures open");
            let device = subject.open_device().expect("it is there");
            let mut model =
                model::qwen3_5::open(&checkpoint, device, settings, &mut |_, _| {}).expect("loads");
            (name.to_owned(), sign(&mut model, &text(name, tokens)))
        };
        let signatures = ["autoround-w4a16", "compressed-tensors-w4a16"].map(of);
        assert_equal(device, &same_bits(&signatures, Contract::Formats, "AutoRound, compressed-tensors"));
        let other = of("compressed-tensors-llmcompressor");
        assert_ne!(other.1.rows, signatures[0].1.rows, "its scales are rounded, so its bits must differ");
    }
}

/// A model whose grouped matrices are stored otherwise.
fn rewritten(name: &str, form: Form, text: &[u32]) -> (Signature, usize) {
    let subject = subject(name, "cpu", KvForm::Int16);
    let checkpoint = Checkpoint::open(&subject.path).expect("fixtures open");
    let source = Rewritten::new(&checkpoint, form);
    let device = subject.open_device().expect("it is there");
    let settings = sizes(text.len()).settings(subject.kv);
    let mut model = model::qwen3_5::open(&source, device, settings, &mut |_, _| {}).expect("it loads");
    (sign(&mut model, text), source.changed())
}

fn check_rewritten(name: &str, form: Form, least: usize) {
    let text = text(name, 150);
    let subject = subject(name, "cpu", KvForm::Int16);
    let plain = sign(&mut *subject.open(sizes(text.len())).expect("fixtures load"), &text);
    let (signature, changed) = rewritten(name, form, &text);
    println!("{name}: {changed} matrices rewritten as {form:?}");
    assert!(changed >= least, "{name}: {changed} matrices rewritten, {least} expected");
    let signatures = [("stored".to_owned(), plain), (format!("{form:?}"), signature)];
    assert_equal(name, &same_bits(&signatures, Contract::Formats, "stored and rewritten"));
}

/// 2-, 3-, 4-, 5- and 6-bit codes as 3-, 4-, 5-, 6- and 8-bit ones.
#[test]
fn widened_codes_give_the_same_bits() {
    for (name, least) in [
        ("mlx-mixed-3bit", 40),
        ("mlx-other-widths", 10),
        ("mlx-4bit", 40),
        ("autoround-w4a16", 40),
        ("compressed-tensors-llmcompressor", 30),
        ("demo", 300),
    ] {
        check_rewritten(name, Form::Wider, least);
    }
}

#[test]
fn symmetric_codes_as_affine_ones_give_the_same_bits() {
    for name in ["autoround-w4a16", "compressed-tensors-w4a16", "compressed-tensors-llmcompressor"] {
        check_rewritten(name, Form::Affine, 30);
    }
}
