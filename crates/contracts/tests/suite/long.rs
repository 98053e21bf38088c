//! T31: sequences past five thousand tokens, on a tiny model whose configuration allows them.

use checkpoint::{Checkpoint, Error, Projection, Source};
use contracts::{Runner, Sizes, random_text};
use device::KvForm;
use device::cpu::{CpuSettings, Isa};
use model::Model;
use model::qwen3_5::open;
use quant::Matrix;
use serde_json::Value;

use crate::support::*;

/// Tokens of the text.
const LONG: usize = 8400;
/// Lengths at which windows are looked at.
const LENGTHS: [usize; 5] = [4900, 5000, 5100, 8000, 8192];

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

fn model(source: &Longer, kv: KvForm) -> impl Model + use<> {
    let sizes = Sizes { slots: 2, snapshots: 2, context: LONG + 64, rows_max: 512 };
    let cpu = CpuSettings { threads: 2, isa: Isa::detect() };
    let device = device::open("cpu", cpu).expect("the CPU is there");
    open(source, device, sizes.settings(kv), &mut |_, _| {}).expect("the tiny model loads")
}

/// Past every length the logits are finite, and chunks, single steps and windows agree on them.
#[test]
fn long_sequences_stay_finite_and_exact() {
    let source = Longer::open("tiny-a");
    for kv in FORMS {
        let mut model = model(&source, kv);
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
