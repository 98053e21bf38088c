//! Fixtures, goldens and small comparisons for the tests of this crate.

// Every test program compiles this module and uses its own part of it.
#![allow(dead_code)]

use std::{collections::HashMap, fs, path::PathBuf};

use checkpoint::{Checkpoint, parse_header};
use device::cpu::{Cpu, CpuSettings, Isa};
use device::{Buffer, Device, DeviceError, KvForm, Picks, reference::Reference};
use model::qwen3_5::{Probe, Qwen, Settings, open};
use model::{DraftAsk, Draw, Logits, Row, SlotId, Window};
use serde_json::Value;

/// A folder of the fixtures.
pub(crate) fn fixture(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures")).join(name)
}

/// A JSON file of a fixture.
pub(crate) fn json(folder: &str, file: &str) -> Value {
    let path = fixture(folder).join(file);
    serde_json::from_slice(&fs::read(&path).expect("fixtures are there")).expect("fixtures are JSON")
}

/// Sizes that every fixture fits.
pub(crate) fn settings() -> Settings {
    Settings {
        slots: 3,
        snapshots: 2,
        context: 256,
        pages: 16,
        kv: KvForm::Int16,
        rows_max: 128,
        logits_rows_max: 128,
        mtp: true,
        image_tokens: 0,
        card: false,
    }
}

/// The devices every machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    /// float64.
    Reference,
    /// The CPU device.
    Cpu,
}

impl On {
    pub(crate) const ALL: [Self; 2] = [Self::Reference, Self::Cpu];
}

/// A fixture on a device.
pub(crate) fn open_fixture(on: On, name: &str, settings: Settings) -> Qwen {
    let checkpoint = Checkpoint::open(&fixture(name)).expect("fixtures open");
    let device: Box<dyn Device> = match on {
        On::Reference => Box::new(Reference::new(1)),
        On::Cpu => Box::new(Cpu::new(CpuSettings { threads: 1, isa: Isa::detect() })),
    };
    open(&checkpoint, device, settings, &mut |_, _| {}).expect("fixtures load")
}

/// Tensors of a golden file, widened to f64 (all of them are exact in it).
pub(crate) struct Goldens(HashMap<String, Vec<f64>>);

impl Goldens {
    pub(crate) fn read(folder: &str, file: &str) -> Self {
        let bytes = fs::read(fixture(folder).join(file)).expect("goldens are there");
        let entries = parse_header(&bytes).expect("goldens are safetensors");
        let read = |entry: checkpoint::Entry| {
            let bytes = &bytes[entry.range.clone()];
            let values = match entry.dtype.name() {
                "F64" => bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
                "F32" => {
                    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect()
                }
                "I32" => {
                    bytes.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap()).into()).collect()
                }
                "I64" => {
                    bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64).collect()
                }
                other => panic!("{}: {other}", entry.name),
            };
            (entry.name, values)
        };
        Self(entries.into_iter().map(read).collect())
    }

    pub(crate) fn get(&self, name: &str) -> &[f64] {
        self.0.get(name).unwrap_or_else(|| panic!("no golden {name}"))
    }
}

/// Numbers of a JSON list.
pub(crate) fn numbers(value: &Value) -> Vec<u32> {
    let list = value.as_array().expect("a list");
    list.iter().map(|n| n.as_u64().expect("a number") as u32).collect()
}

/// One prompt of a fixture.
pub(crate) struct Prompt {
    pub(crate) name: String,
    pub(crate) ids: Vec<u32>,
    pub(crate) images: Vec<usize>,
    pub(crate) rope_delta: i64,
    pub(crate) hidden_rows: Vec<usize>,
    pub(crate) greedy: Vec<u32>,
    pub(crate) drafts: Vec<u32>,
}

pub(crate) fn prompts(folder: &str) -> Vec<Prompt> {
    let spec = json(folder, "prompts.json");
    let prompt = |value: &Value| Prompt {
        name: value["name"].as_str().expect("a name").into(),
        ids: numbers(&value["input_ids"]),
        images: numbers(&value["images"]).into_iter().map(|n| n as usize).collect(),
        rope_delta: value["rope_delta"].as_i64().expect("a number"),
        hidden_rows: numbers(&value["hidden_rows"]).into_iter().map(|n| n as usize).collect(),
        greedy: numbers(&value["greedy_ids"]),
        drafts: numbers(&value["mtp_draft_ids"]),
    };
    spec["prompts"].as_array().expect("a list").iter().map(prompt).collect()
}

/// What [`Recorder`] saw, row-major.
#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) width: usize,
    pub(crate) vocabulary: usize,
    pub(crate) picks: usize,
    /// Embeddings, then the residual stream after each layer.
    pub(crate) hidden: Vec<Vec<f64>>,
    pub(crate) experts: Vec<(Vec<u32>, Vec<f64>)>,
    pub(crate) last: Vec<f64>,
    pub(crate) logits: Vec<f64>,
    pub(crate) mtp_hidden: Vec<f64>,
    pub(crate) mtp_logits: Vec<f64>,
}

impl Recorder {
    pub(crate) fn of(qwen: &Qwen) -> Self {
        let config = qwen.config();
        Self { width: config.hidden, vocabulary: config.vocabulary, picks: config.picks, ..Self::default() }
    }
}

fn read(device: &mut dyn Device, buffer: Buffer, values: usize) -> Result<Vec<f64>, DeviceError> {
    let mut out = vec![0.0; values];
    device.read_exact(buffer, 0, &mut out)?;
    Ok(out)
}

impl Probe for Recorder {
    fn after_embed(&mut self, device: &mut dyn Device, x: Buffer, rows: usize) -> Result<(), DeviceError> {
        self.hidden.push(read(device, x, rows * self.width)?);
        Ok(())
    }

    fn after_layer(
        &mut self,
        device: &mut dyn Device,
        layer: usize,
        x: Buffer,
        picks: Picks,
        rows: usize,
    ) -> Result<(), DeviceError> {
        assert_eq!(self.experts.len(), layer);
        self.hidden.push(read(device, x, rows * self.width)?);
        self.experts.push(device.read_picks(picks, rows)?);
        Ok(())
    }

    fn after_norm(
        &mut self,
        device: &mut dyn Device,
        hidden: Buffer,
        rows: usize,
    ) -> Result<(), DeviceError> {
        self.last = read(device, hidden, rows * self.width)?;
        Ok(())
    }

    fn after_head(
        &mut self,
        device: &mut dyn Device,
        logits: Buffer,
        rows: usize,
    ) -> Result<(), DeviceError> {
        self.logits = read(device, logits, rows * self.vocabulary)?;
        Ok(())
    }

    fn after_mtp(
        &mut self,
        device: &mut dyn Device,
        hidden: Buffer,
        logits: Buffer,
        rows: usize,
    ) -> Result<(), DeviceError> {
        self.mtp_hidden.extend(read(device, hidden, rows * self.width)?);
        self.mtp_logits.extend(read(device, logits, rows * self.vocabulary)?);
        Ok(())
    }
}

/// Relative L2 distance.
pub(crate) fn distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    difference / norm(&mut expected.iter().copied()).max(f64::MIN_POSITIVE)
}

/// Fails, naming `what`, unless both are within `limit` of each other. NaN is never within.
#[track_caller]
pub(crate) fn close(what: &str, found: &[f64], expected: &[f64], limit: f64) {
    let distance = distance(found, expected);
    assert!(distance <= limit, "{what}: relative distance {distance:.3e}, at most {limit:.0e} expected");
}

/// Rows `rows` of a `[_, width]` array.
pub(crate) fn pick_rows(values: &[f64], width: usize, rows: &[usize]) -> Vec<f64> {
    rows.iter().flat_map(|row| values[row * width..(row + 1) * width].iter().copied()).collect()
}

/// The `count` largest values of each row, ids and values, ties to the lower id.
pub(crate) fn top(values: &[f64], width: usize, count: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut ids, mut best) = (Vec::new(), Vec::new());
    for row in values.chunks_exact(width) {
        let mut order: Vec<usize> = (0..width).collect();
        order.sort_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
        for id in &order[..count] {
            ids.push(*id as f64);
            best.push(row[*id]);
        }
    }
    (ids, best)
}

/// A chain window of slot `slot` over its pages.
pub(crate) fn window(slot: u32, start: usize, rows: Vec<Row>, commit: bool, logits: Logits) -> Window {
    Window { slot: SlotId(slot), start, rows, pages: pages(slot), parents: None, commit, logits }
}

/// Five pages for each of three slots, in mixed order.
pub(crate) fn pages(slot: u32) -> Vec<u32> {
    (0..4).map(|page| 3 * page + (slot + page) % 3).collect()
}

/// Text rows from token index `start` on.
pub(crate) fn rows(ids: &[u32], start: usize) -> Vec<Row> {
    let row = |(at, id): (usize, &u32)| Row { token: Some(*id), position: [(start + at) as u32; 3] };
    ids.iter().enumerate().map(row).collect()
}

/// A greedy draw of row `row`.
pub(crate) fn greedy(row: usize, position: usize) -> Draw {
    Draw { seed: 1, ..Draw::greedy(row, position as u64, u32::MAX) }
}

/// An ask for a greedy chain that nothing ends early.
pub(crate) fn ask(slot: u32, start: usize, token: u32, rope_delta: i64, count: usize) -> DraftAsk {
    DraftAsk {
        slot: SlotId(slot),
        token,
        start,
        rope_delta,
        pages: pages(slot),
        count,
        first_max: 3,
        confidence: 0.0,
        draw: greedy(0, start + 1),
    }
}
