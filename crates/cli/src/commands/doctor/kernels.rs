//! Every device against the CPU device, on a small model of random numbers.

use std::time::Instant;

use checkpoint::{Recipe, Synth};
use contracts::contracts::{Signature, same_bits, signature};
use contracts::{Contract, Runner, Sizes, random_text};
use device::cpu::{CpuSettings, Isa};
use device::{Device, DeviceError, KvForm};
use model::qwen3_5::{Config, Parts, inventory, open};

use super::Check;
use crate::error::{Exit, Failure, Result};
use crate::load;

/// Geometry of the model: small, with every kind of layer.
const CONFIG: &str = include_str!("../../../../../models/demo/config.json");
/// Tokens of the text: more than one attention block, and a rest.
const TOKENS: usize = 96;

/// Names of the accelerators to try.
pub(super) fn devices(cuda: usize) -> Vec<String> {
    (0..cuda).map(|index| format!("cuda:{index}")).collect()
}

/// A check for each device, and whether the one that `auto` takes works.
pub(super) fn checks(accelerators: &[String]) -> (Vec<Check>, bool) {
    let synth = synth();
    let expected = match sign(&synth, "cpu", one_thread(Isa::detect())) {
        Ok(expected) => expected,
        Err(failure) => {
            let fix = "this must not happen: keep these lines for a report";
            return (vec![Check::fail("self-test", format!("cpu: {}", failure.message), fix)], false);
        }
    };
    let mut checks = vec![processor(&synth, &expected)];
    checks.extend(accelerators.iter().map(|name| {
        let cpu = CpuSettings { threads: load::threads(None), isa: Isa::detect() };
        compare(name, &expected, || Ok(vec![(name.clone(), sign(&synth, name, cpu)?)]))
    }));
    let default = load::device("auto", None).map(|device| device.name());
    let works = default.is_ok_and(|default| {
        // The device that auto takes has its check under the name it was opened by.
        let failed = |check: &&Check| check.state == super::State::Fail;
        let tested = |check: &&Check| {
            default.split([' ', ':']).next().is_some_and(|kind| check.found.starts_with(kind))
        };
        !checks.iter().filter(tested).any(|check| failed(&check))
    });
    (checks, works)
}

/// The processor with every instruction set, and with all its threads.
fn processor(synth: &Synth, expected: &Signature) -> Check {
    compare("cpu", expected, || {
        let mut ways: Vec<CpuSettings> = Isa::supported().into_iter().map(one_thread).collect();
        ways.push(CpuSettings { threads: load::threads(None).max(2), isa: Isa::detect() });
        let run = |cpu: CpuSettings| {
            Ok((format!("{}, {} threads", cpu.isa.name(), cpu.threads), sign(synth, "cpu", cpu)?))
        };
        ways.into_iter().map(run).collect()
    })
}

fn one_thread(isa: Isa) -> CpuSettings {
    CpuSettings { threads: 1, isa }
}

/// Compares what ran with what the CPU device gave.
fn compare(
    name: &str,
    expected: &Signature,
    run: impl FnOnce() -> Result<Vec<(String, Signature)>>,
) -> Check {
    let start = Instant::now();
    let mut signatures = vec![("cpu".to_owned(), expected.clone())];
    match run() {
        Ok(found) => signatures.extend(found),
        Err(failure) if failure.exit == Exit::Device => {
            let fix = "run with --device cpu, or a build with this device";
            return Check::warn("self-test", format!("{name}: {}", failure.message), fix);
        }
        Err(failure) => {
            return Check::fail("self-test", format!("{name}: {}", failure.message), failure.exit.advice());
        }
    }
    let outcome = same_bits(&signatures, Contract::Devices, "doctor");
    let (ways, seconds) = (signatures.len() - 1, start.elapsed().as_secs_f64());
    match &outcome.difference {
        None => {
            let found =
                format!("{name}: {} values the same bits, {ways} ways, {seconds:.1} s", outcome.compared);
            Check::ok("self-test", found)
        }
        Some(first) => {
            let fix = "do not use this device; keep these lines for a report";
            Check::fail("self-test", format!("{name}: other bits than the CPU device: {first}"), fix)
        }
    }
}

fn synth() -> Synth {
    let mut json: serde_json::Value =
        serde_json::from_str(CONFIG).expect("the config of the demo model is JSON");
    for key in ["quantization", "quantization_config"] {
        json.as_object_mut().expect("it is an object").remove(key);
    }
    let config = Config::from_json(&json).expect("the config of the demo model is valid");
    let parts = Parts { head: !config.tied(false), mtp: config.mtp_layers > 0, vision: false };
    Synth::new(json, inventory(&config, parts), Recipe::Mlx4bit, 1)
}

fn sign(synth: &Synth, name: &str, cpu: CpuSettings) -> Result<Signature> {
    let device: std::result::Result<Box<dyn Device>, DeviceError> = device::open(name, load::opening(cpu));
    let sizes = Sizes { slots: 3, snapshots: 2, ..Sizes::for_text(TOKENS) };
    let mut model = open(synth, device?, sizes.settings(KvForm::Int8), &mut |_, _| {})?;
    let vocabulary = model::Model::spec(&model).vocabulary;
    let text = random_text(vocabulary, TOKENS, 7);
    signature(&mut Runner::new(&mut model), &text).map_err(Failure::from)
}
