//! Errors of every class of projections against float64, on the demo model's weights and its own activations,
//! beside those that activations in bf16 would have.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use checkpoint::{Checkpoint, Error, Projection, Source};
use contracts::evaluation::Asker;
use contracts::{Lane, Runner, Sizes, deal};
use device::cpu::{CpuSettings, Isa};
use device::{Buffer, Device, ExpertsRef, KvForm, MatrixRef, Picks};
use quant::{Matrix, bf16_from_f32, bf16_to_f32, dequantize_row_f64};
use serde_json::Value;

use crate::demo::questions;
use crate::support::*;
use crate::wrapped::{Hook, Result, Wrapped};

/// Rows of a phase, of one matrix: enough for a column to have a maximum, few enough to be quick.
const ROWS: usize = 64;

/// Prompt rows, or decode rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Phase {
    #[default]
    Prompt,
    Decode,
}

/// A matrix and the activations that met it.
struct Met {
    class: &'static str,
    matrix: Matrix,
    rows: HashMap<Phase, Vec<Vec<f64>>>,
}

/// What the spies saw.
#[derive(Default)]
struct Seen {
    /// Module that is being read.
    module: String,
    phase: Phase,
    matrices: HashMap<MatrixRef, Met>,
    /// Gate, up and down of every expert.
    experts: HashMap<ExpertsRef, Vec<[Met; 3]>>,
}

impl Met {
    fn new(class: &'static str, matrix: &Matrix) -> Self {
        // Bytes of its own: a device that takes a matrix discards those of the file.
        let [codes, scales, biases] =
            [matrix.codes(), matrix.scales(), matrix.biases()].map(|bytes| bytes.to_vec().into());
        let matrix = Matrix::new(matrix.rows(), matrix.cols(), matrix.encoding(), codes, scales, biases);
        Self { class, matrix: matrix.expect("as it was"), rows: HashMap::new() }
    }

    fn add(&mut self, phase: Phase, row: &[f64]) {
        let rows = self.rows.entry(phase).or_default();
        if rows.len() < ROWS {
            rows.push(row.to_vec());
        }
    }
}

/// The class of a module; `None` for the MTP layer.
fn class(module: &str) -> Option<&'static str> {
    let last = module.rsplit('.').next()?;
    let known = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "in_proj_qkv",
        "in_proj_z",
        "in_proj_a",
        "in_proj_b",
        "out_proj",
    ];
    Some(match last {
        _ if module.starts_with("mtp.") => return None,
        _ if module.contains("shared_expert.") => "shared expert",
        "shared_expert_gate" => "shared gate",
        "gate" => "router",
        "lm_head" | "embed_tokens" => "head",
        _ => known.into_iter().find(|name| *name == last)?,
    })
}

/// Notes which module is read.
struct Named<'a>(&'a Checkpoint, Arc<Mutex<Seen>>);

impl Source for Named<'_> {
    fn config(&self) -> &Value {
        self.0.config()
    }
    fn contains(&self, module: &str) -> bool {
        self.0.contains(module)
    }
    fn matrix(&self, module: &str, rows: usize, cols: usize) -> std::result::Result<Matrix, Error> {
        self.1.lock().expect("no panic before").module = module.to_owned();
        self.0.matrix(module, rows, cols)
    }
    fn experts(
        &self,
        prefix: &str,
        projection: Projection,
        experts: usize,
        rows: usize,
        cols: usize,
    ) -> std::result::Result<Vec<Matrix>, Error> {
        self.1.lock().expect("no panic before").module = prefix.to_owned();
        self.0.experts(prefix, projection, experts, rows, cols)
    }
    fn vector(&self, name: &str, shape: &[usize]) -> std::result::Result<Vec<f32>, Error> {
        self.0.vector(name, shape)
    }
    fn norm(&self, name: &str, len: usize) -> std::result::Result<Vec<f64>, Error> {
        self.0.norm(name, len)
    }
    fn has_mtp(&self) -> bool {
        self.0.has_mtp()
    }
}

/// Notes matrices and what they are multiplied with.
struct Spy(Arc<Mutex<Seen>>);

impl Hook for Spy {
    fn matrix(&mut self, inner: &mut dyn Device, source: &Matrix) -> Result<MatrixRef> {
        let handle = inner.matrix(source)?;
        let mut seen = self.0.lock().expect("no panic before");
        if let Some(class) = class(&seen.module) {
            seen.matrices.insert(handle, Met::new(class, source));
        }
        Ok(handle)
    }

    fn experts(
        &mut self,
        inner: &mut dyn Device,
        gate: &[Matrix],
        up: &[Matrix],
        down: &[Matrix],
    ) -> Result<ExpertsRef> {
        let handle = inner.experts(gate, up, down)?;
        let mut seen = self.0.lock().expect("no panic before");
        if !seen.module.starts_with("mtp.") {
            let expert = |((gate, up), down): ((&Matrix, &Matrix), &Matrix)| {
                [Met::new("experts, in", gate), Met::new("experts, in", up), Met::new("experts, out", down)]
            };
            seen.experts.insert(handle, gate.iter().zip(up).zip(down).map(expert).collect());
        }
        Ok(handle)
    }

    fn linear(
        &mut self,
        inner: &mut dyn Device,
        x: Buffer,
        rows: usize,
        to: &[(MatrixRef, Buffer)],
    ) -> Result {
        let mut seen = self.0.lock().expect("no panic before");
        let phase = seen.phase;
        for (matrix, _) in to {
            let Some(met) = seen.matrices.get_mut(matrix) else { continue };
            let mut row = vec![0.0; met.matrix.cols()];
            for at in 0..rows.min(ROWS) {
                inner.read_exact(x, at, &mut row)?;
                met.add(phase, &row);
            }
        }
        inner.linear(x, rows, to)
    }

    fn routed_experts(
        &mut self,
        inner: &mut dyn Device,
        x: Buffer,
        rows: usize,
        picks: Picks,
        experts: ExpertsRef,
        out: Buffer,
    ) -> Result {
        let (ids, _) = inner.read_picks(picks, rows)?;
        let mut seen = self.0.lock().expect("no panic before");
        let phase = seen.phase;
        if let Some(experts) = seen.experts.get_mut(&experts) {
            let mut row = vec![0.0; experts[0][0].matrix.cols()];
            for (at, ids) in ids.chunks_exact(ids.len() / rows).enumerate().take(ROWS) {
                inner.read_exact(x, at, &mut row)?;
                for id in ids {
                    let [gate, up, down] = &mut experts[*id as usize];
                    let (a, b) = (product(&gate.matrix, &row), product(&up.matrix, &row));
                    let middle: Vec<f64> = a.iter().zip(b).map(|(a, b)| a / (1.0 + (-a).exp()) * b).collect();
                    gate.add(phase, &row);
                    up.add(phase, &row);
                    down.add(phase, &middle);
                }
            }
        }
        inner.routed_experts(x, rows, picks, experts, out)
    }
}

/// `W x` in float64.
fn product(matrix: &Matrix, x: &[f64]) -> Vec<f64> {
    let mut row = vec![0.0; matrix.cols()];
    let mut dot = |at| {
        dequantize_row_f64(matrix, at, &mut row);
        row.iter().zip(x).map(|(w, x)| w * x).sum()
    };
    (0..matrix.rows()).map(&mut dot).collect()
}

/// Sums of squares and the worst column of a class.
#[derive(Clone, Copy, Default)]
struct Tally {
    difference: f64,
    norm: f64,
    worst: f64,
}

impl Tally {
    /// Adds the results `[rows][columns]` of one matrix.
    fn add(&mut self, found: &[Vec<f64>], exact: &[Vec<f64>]) {
        for column in 0..exact[0].len() {
            let (mut largest, mut furthest) = (0f64, 0f64);
            for (found, exact) in found.iter().zip(exact) {
                let off = found[column] - exact[column];
                self.difference += off * off;
                self.norm += exact[column] * exact[column];
                largest = largest.max(exact[column].abs());
                furthest = furthest.max(off.abs());
            }
            self.worst = self.worst.max(furthest / largest.max(f64::MIN_POSITIVE));
        }
    }

    fn aggregate(&self) -> f64 {
        (self.difference / self.norm).sqrt()
    }
}

/// What a device gives for one matrix: prompt rows together, decode rows one by one.
fn on(device: &mut dyn Device, matrix: &Matrix, phase: Phase, rows: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let run = |device: &mut dyn Device| -> Result<Vec<Vec<f64>>> {
        let handle = device.matrix(matrix)?;
        let x = device.buffer(rows.len(), matrix.cols())?;
        let out = device.buffer(rows.len(), matrix.rows())?;
        let mut found = Vec::with_capacity(rows.len());
        for rows in rows.chunks(if phase == Phase::Prompt { rows.len() } else { 1 }) {
            device.write(x, 0, &rows.concat())?;
            device.linear(x, rows.len(), &[(handle, out)])?;
            let mut values = vec![0.0; rows.len() * matrix.rows()];
            device.read_exact(out, 0, &mut values)?;
            found.extend(values.chunks_exact(matrix.rows()).map(<[f64]>::to_vec));
        }
        Ok(found)
    };
    run(device).expect("the device works")
}

/// What exact products of activations rounded to bf16 are.
fn in_bf16(matrix: &Matrix, rows: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let round = |x: &f64| f64::from(bf16_to_f32(bf16_from_f32(*x as f32)));
    rows.iter().map(|row| product(matrix, &row.iter().map(round).collect::<Vec<_>>())).collect()
}

/// Runs a few questions on the float64 device, prompts in one chunk and replies row by row.
fn watch() -> Arc<Mutex<Seen>> {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let subject = subject("demo", "reference", KvForm::Int16);
    let checkpoint = Checkpoint::open(&subject.path).expect("the demo model opens");
    let inner = subject.open_device().expect("it is there");
    let device = Box::new(Wrapped { inner, hook: Spy(seen.clone()) });
    let sizes = Sizes { slots: 2, snapshots: 1, context: 1024, rows_max: 1024 };
    let source = Named(&checkpoint, seen.clone());
    let mut model = model::qwen3_5::open(&source, device, sizes.settings(KvForm::Int16), &mut |_, _| {})
        .expect("the demo model loads");
    let asker = Asker::open(&folder("demo")).expect("the demo model has its text files");
    let mut runner = Runner::new(&mut model);
    for (item, reply) in questions().into_iter().step_by(50) {
        let (prompt, _) = asker.prompt(&item).expect("every item renders");
        let lane: &mut Lane = &mut deal(&runner.spec())[0];
        runner.clear(lane).expect("slots can be emptied");
        for (phase, ids, chunk) in [(Phase::Prompt, &prompt, 1024), (Phase::Decode, &reply, 1)] {
            seen.lock().expect("no panic before").phase = phase;
            runner.feed(lane, ids, chunk).expect("the model answers");
        }
    }
    drop(model);
    seen
}

#[test]
fn projections_are_at_least_as_close_as_bf16_activations() {
    check("cpu");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn projections_of_a_card_are_at_least_as_close_as_bf16_activations() {
    check("cuda:0");
}

/// Prints the errors of a device and asks for those of bf16 activations at most; every device but the
/// processor must have the processor's values.
fn check(name: &str) {
    let open =
        |name| device::open(name, CpuSettings { threads: 1, isa: Isa::detect() }).expect("it is there");
    let (mut device, mut cpu) = (open(name), open("cpu"));
    let seen = watch();
    let seen = seen.lock().expect("no panic before");
    let mut classes: BTreeMap<(&str, Phase), [Tally; 2]> = BTreeMap::new();
    for met in seen.matrices.values().chain(seen.experts.values().flatten().flatten()) {
        for (phase, rows) in &met.rows {
            let exact: Vec<_> = rows.iter().map(|row| product(&met.matrix, row)).collect();
            let [own, bf16] = classes.entry((met.class, *phase)).or_default();
            let found = on(&mut *device, &met.matrix, *phase, rows);
            if name != "cpu" {
                assert_eq!(found, on(&mut *cpu, &met.matrix, *phase, rows), "{}, {phase:?}", met.class);
            }
            own.add(&found, &exact);
            bf16.add(&in_bf16(&met.matrix, rows), &exact);
        }
    }
    println!("| class | rows | aggregate | with bf16 | worst column | with bf16 |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for ((class, phase), [own, bf16]) in &classes {
        println!(
            "| {class} | {phase:?} | {:.1e} | {:.1e} | {:.1e} | {:.1e} |",
            own.aggregate(),
            bf16.aggregate(),
            own.worst,
            bf16.worst
        );
    }
    assert_eq!(classes.len(), 2 * 15, "every class was met in both phases");
    for ((class, phase), [own, bf16]) in &classes {
        assert!(own.aggregate() <= bf16.aggregate(), "{class}, {phase:?}: aggregate");
        assert!(own.worst <= bf16.worst, "{class}, {phase:?}: worst column");
    }
}
