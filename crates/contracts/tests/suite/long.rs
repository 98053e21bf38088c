//! T31: sequences past five thousand tokens, on a tiny model whose configuration allows them.

use checkpoint::{Checkpoint, Error, Projection, Source};
use contracts::{RowBits, Runner, Sizes, random_text, row_bits};
use device::KvForm;
use device::cpu::{CpuSettings, Isa};
use model::qwen3_5::open;
use model::{Logits, Model, PAGE_TOKENS, Row, SlotId, Window};
use quant::Matrix;
use serde_json::Value;

use crate::support::*;

/// Tokens of the text.
const LONG: usize = 8400;
/// Lengths at which windows are looked at.
const LENGTHS: [usize; 5] = [4900, 5000, 5100, 8000, 8192];

/// The longest length that is looked at.
const LONGEST: usize = 32_768;

/// A checkpoint with room for longer sequences.
struct Longer {
    source: Checkpoint,
    config: Value,
}

impl Longer {
    fn open(name: &str) -> Self {
        let source = Checkpoint::open(&folder(name)).expect("model folders open");
        let mut config = source.config().clone();
        config["text_config"]["max_position_embeddings"] = 40_000.into();
        Self { source, config }
    }
}

impl Source for Longer {
    fn config(&self) -> &Value {
        &self.config
    }

    fn contains(&self, module: &str) -> bool {
        self.source.contains(module)
    }

    fn matrix(&self, module: &str, rows: usize, cols: usize) -> Result<Matrix, Error> {
        self.source.matrix(module, rows, cols)
    }

    fn experts(
        &self,
        prefix: &str,
        projection: Projection,
        experts: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<Matrix>, Error> {
        self.source.experts(prefix, projection, experts, rows, cols)
    }

    fn vector(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
        self.source.vector(name, shape)
    }

    fn norm(&self, name: &str, len: usize) -> Result<Vec<f64>, Error> {
        self.source.norm(name, len)
    }

    fn has_mtp(&self) -> bool {
        self.source.has_mtp()
    }
}

fn model(source: &Longer, kv: KvForm, context: usize) -> impl Model + use<> {
    let sizes = Sizes { slots: 2, snapshots: 2, context, rows_max: 512 };
    let cpu = CpuSettings { threads: 2, isa: Isa::detect() };
    let device = device::open("cpu", cpu).expect("the CPU is there");
    open(source, device, sizes.settings(kv), &mut |_, _| {}).expect("the tiny model loads")
}

/// Past every length the logits are finite, and chunks, single steps and windows agree on them.
#[test]
fn long_sequences_stay_finite_and_exact() {
    let source = Longer::open("tiny-a");
    for kv in FORMS {
        let mut model = model(&source, kv, LONG + 64);
        let text = random_text(model.spec().vocabulary, LONG, 31);
        let mut runner = Runner::new(&mut model);
        let mut lanes = runner.lanes().expect("the slots are empty");
        let whole = runner.feed(&mut lanes[0], &text, 512).expect("it runs");
        assert!(whole.iter().all(|row| row.finite), "a logit is not finite");
        let mut at = 0;
        for length in LENGTHS {
            runner.feed(&mut lanes[1], &text[at..length], 97).expect("it runs");
            let steps = runner.feed(&mut lanes[1], &text[length..length + 3], 1).expect("it runs");
            assert_eq!(steps, whole[length..length + 3], "single steps after {length} tokens");
            at = length + 3;
        }
    }
}

/// Up to 32 Ki tokens the logits are finite, and there a window, its kept rows and single steps agree.
#[test]
fn the_longest_sequence_stays_finite_and_exact() {
    let source = Longer::open("tiny-a");
    let mut model = model(&source, KvForm::Int8, LONGEST + 64);
    let vocabulary = model.spec().vocabulary;
    let text = random_text(vocabulary, LONGEST + 8, 32);
    let pages: Vec<u32> = (0..(LONGEST + 64).div_ceil(PAGE_TOKENS) as u32).collect();
    let mut step = |from: usize, to: usize, commit: bool| -> Vec<RowBits> {
        let row = |at: usize| Row { token: Some(text[at]), position: [at as u32; 3] };
        let window = Window {
            slot: SlotId(0),
            start: from,
            rows: (from..to).map(row).collect(),
            pages: pages.clone(),
            parents: None,
            commit,
            logits: if commit && to - from > 1 { Logits::Last } else { Logits::All },
        };
        let count = model.step(&[window]).expect("it runs");
        let mut values = vec![0.0; vocabulary];
        let mut bits = Vec::new();
        for row in 0..count {
            model.read_logits(row, &mut values).expect("it was scored");
            bits.push(row_bits(&values));
        }
        if !commit {
            model.keep(SlotId(0), &[]).expect("nothing is kept");
        }
        bits
    };
    for from in (0..LONGEST).step_by(512) {
        let last = step(from, from + 512, true);
        assert!(last.iter().all(|row| row.finite), "a logit after {} tokens is not finite", from + 512);
    }
    let window = step(LONGEST, LONGEST + 8, false);
    for at in 0..8 {
        let alone = step(LONGEST + at, LONGEST + at + 1, true);
        assert_eq!(alone, window[at..=at], "single steps after {} tokens", LONGEST + at);
        assert!(alone[0].finite);
    }
}
