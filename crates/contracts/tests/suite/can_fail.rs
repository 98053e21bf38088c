//! Each contract can fail: a model with one fault must be caught by the contract that forbids it.

use crate::support::*;
use crate::wrapped::{Hook, Result, Wrapped};
use std::collections::HashMap;

use checkpoint::Checkpoint;
use contracts::contracts::{
    chunked, company, drafted, moved, resumed, same_bits, scored, seeded, signature, trees, windows,
};
use contracts::{Contract, Error, Outcome, Runner, Sizes, Subject, check_replies};
use device::{Buffer, DeltaState, Device, Draw, Drawn, KvForm, KvPool, MatrixRef, StatePool, Step, Window};
use model::Model;
use quant::Matrix;

/// One fault of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// None: the contract must hold.
    None,
    /// A projection of more than 32 rows rounds its first output otherwise, as another tile shape would.
    Tile,
    /// The same where several windows run together.
    Company,
    /// The attention of a window reads the page before its last one from the wrong place.
    Page,
    /// Keeping leaves K/V where the window had it.
    KvKeep,
    /// Keeping advances states by all rows but the last.
    StateKeep,
    /// Loading a snapshot leaves the convolution state behind.
    Copy,
    /// The same for a state that comes from bytes.
    Write,
    /// The drafter's K/V goes into the model's own pages.
    Draft,
    /// Draws depend on the row of the buffer.
    Draw,
    /// Log-probabilities depend on how many draws are made at once.
    Logprob,
}

struct Broken {
    fault: Fault,
    rows: usize,
    windows: usize,
    pools: Vec<KvPool>,
    /// Outputs of every matrix.
    widths: HashMap<MatrixRef, usize>,
}

/// Another rounding of the first value of a row.
fn nudge(inner: &mut dyn Device, buffer: Buffer, row: usize, width: usize) -> Result {
    let mut values = vec![0.0; width];
    inner.read_exact(buffer, row, &mut values)?;
    values[0] = f64::from((values[0] as f32 * 1.000_01).next_up());
    inner.write(buffer, row, &values)
}

impl Hook for Broken {
    fn matrix(&mut self, inner: &mut dyn Device, source: &Matrix) -> Result<MatrixRef> {
        let handle = inner.matrix(source)?;
        self.widths.insert(handle, source.rows());
        Ok(handle)
    }

    fn begin(&mut self, inner: &mut dyn Device, step: &Step) -> Result {
        self.rows = step.rows().len();
        self.windows = step.windows().len();
        if self.fault != Fault::Page {
            return inner.begin(step);
        }
        let swap = |window: &Window| {
            let mut window = window.clone();
            let used = (window.start + window.rows).div_ceil(64);
            // Only where rows of an earlier step are read back in a window of its own.
            if used >= 3 && window.start > 0 && window.rows > 1 {
                window.pages.swap(0, 1);
            }
            window
        };
        let windows = step.windows().iter().map(swap).collect();
        inner.begin(&Step::new(step.rows().to_vec(), windows).expect("pages stay as many"))
    }

    fn linear(
        &mut self,
        inner: &mut dyn Device,
        x: Buffer,
        rows: usize,
        to: &[(MatrixRef, Buffer)],
    ) -> Result {
        inner.linear(x, rows, to)?;
        let nudged = match self.fault {
            Fault::Tile => rows > 32,
            Fault::Company => self.windows > 1,
            _ => false,
        };
        if let (true, Some((matrix, out))) = (nudged, to.first()) {
            nudge(inner, *out, rows - 1, self.widths[matrix])?;
        }
        Ok(())
    }

    fn kv_append(&mut self, inner: &mut dyn Device, k: Buffer, v: Buffer, pool: KvPool) -> Result {
        if !self.pools.contains(&pool) {
            self.pools.push(pool);
        }
        // The pool of the MTP layer is met last.
        if self.fault == Fault::Draft && self.pools.len() == 3 && pool == self.pools[2] && self.rows < 8 {
            inner.kv_append(k, v, self.pools[0])?;
        }
        inner.kv_append(k, v, pool)
    }

    fn kv_keep(
        &mut self,
        inner: &mut dyn Device,
        pool: KvPool,
        pages: &[u32],
        start: usize,
        rows: &[usize],
    ) -> Result {
        match self.fault {
            Fault::KvKeep => Ok(()),
            _ => inner.kv_keep(pool, pages, start, rows),
        }
    }

    fn state_keep(&mut self, inner: &mut dyn Device, pool: StatePool, place: u32, rows: &[usize]) -> Result {
        match (self.fault, rows) {
            (Fault::StateKeep, [most @ .., _]) if !most.is_empty() => inner.state_keep(pool, place, most),
            _ => inner.state_keep(pool, place, rows),
        }
    }

    fn state_copy(&mut self, inner: &mut dyn Device, pool: StatePool, from: u32, to: u32) -> Result {
        // From a snapshot's place to a slot's.
        if self.fault == Fault::Copy && from > to {
            let old = inner.state_read(pool, to)?;
            let new = inner.state_read(pool, from)?;
            return inner.state_write(pool, to, &DeltaState { conv: old.conv, ..new });
        }
        inner.state_copy(pool, from, to)
    }

    fn state_write(
        &mut self,
        inner: &mut dyn Device,
        pool: StatePool,
        place: u32,
        state: &DeltaState,
    ) -> Result {
        let mut state = state.clone();
        if self.fault == Fault::Write {
            state.recurrent[0] = 0.0;
        }
        inner.state_write(pool, place, &state)
    }

    fn draw(&mut self, inner: &mut dyn Device, logits: Buffer, draws: &[Draw]) -> Result<Vec<Drawn>> {
        let mut draws = draws.to_vec();
        let count = draws.len();
        if self.fault == Fault::Draw {
            draws.iter_mut().for_each(|draw| draw.seed += draw.row as u64);
        }
        let mut drawn = inner.draw(logits, &draws)?;
        if self.fault == Fault::Logprob && count > 8 {
            drawn.iter_mut().for_each(|drawn| drawn.logprob = drawn.logprob.next_down());
        }
        Ok(drawn)
    }
}

/// tiny-b on the float64 device with a fault.
fn open(fault: Fault, tokens: usize) -> Box<dyn Model> {
    open_on("reference", fault, Sizes { slots: 5, snapshots: 3, ..Sizes::for_text(tokens) })
}

fn open_on(device: &str, fault: Fault, sizes: Sizes) -> Box<dyn Model> {
    let subject = subject("tiny-b", device, KvForm::Int16);
    let checkpoint = Checkpoint::open(&subject.path).expect("fixtures open");
    let inner = subject.open_device().expect("the reference device is always there");
    let hook = Broken { fault, rows: 0, windows: 0, pools: Vec::new(), widths: HashMap::new() };
    let device = Box::new(Wrapped { inner, hook });
    let settings = sizes.settings(KvForm::Int16);
    Box::new(model::qwen3_5::open(&checkpoint, device, settings, &mut |_, _| {}).expect("fixtures load"))
}

/// The contract must hold without a fault, and must not hold with any of these.
#[track_caller]
fn catches(contract: &dyn Fn(Fault, &[u32]) -> Outcome, faults: &[Fault], tokens: usize) {
    let text = text("tiny-b", tokens);
    let outcome = contract(Fault::None, &text);
    assert!(outcome.held(), "{outcome:?}");
    for fault in faults {
        let outcome = contract(*fault, &text);
        let difference = outcome.difference.unwrap_or_else(|| panic!("{fault:?} was not caught"));
        println!("{:8} {fault:?}: {difference}", outcome.contract.id());
    }
}

fn alone(contract: contracts::contracts::Check) -> impl Fn(Fault, &[u32]) -> Outcome {
    move |fault, text| {
        let mut model = open(fault, text.len());
        contract(&mut Runner::new(&mut *model), text).expect("the model answers")
    }
}

#[test]
fn drafted_equals_plain() {
    catches(&alone(drafted), &[Fault::StateKeep, Fault::KvKeep, Fault::Draft, Fault::Draw], 70);
}

#[test]
fn concurrent_equals_alone() {
    catches(&alone(company), &[Fault::Company], 90);
}

#[test]
fn resumed_equals_fresh() {
    catches(&alone(resumed), &[Fault::Copy, Fault::Page], 140);
    let moved = |fault: Fault, text: &[u32]| {
        let (mut from, mut to) = (open(fault, text.len()), open(fault, text.len()));
        moved(&mut Runner::new(&mut *from), &mut Runner::new(&mut *to), text).expect("the models answer")
    };
    catches(&moved, &[Fault::Copy, Fault::Write], 70);
}

#[test]
fn scored_equals_decoded() {
    catches(&alone(scored), &[Fault::Tile, Fault::Logprob], 70);
}

#[test]
fn seeded_equals_seeded() {
    catches(&alone(seeded), &[Fault::Draw, Fault::Company], 70);
}

#[test]
fn windows_and_trees_equal_steps() {
    catches(&alone(windows), &[Fault::StateKeep, Fault::Page], 200);
    catches(&alone(trees), &[Fault::StateKeep, Fault::KvKeep], 130);
}

#[test]
fn chunked_equals_whole() {
    catches(&alone(chunked), &[Fault::Tile, Fault::Page], 200);
}

#[test]
fn every_device_gives_the_same_bits() {
    let both = |fault: Fault, text: &[u32]| {
        let of = |fault: Fault| {
            let mut model = open(fault, text.len());
            let signature = signature(&mut Runner::new(&mut *model), text).expect("the model answers");
            (format!("{fault:?}"), signature)
        };
        same_bits(&[of(Fault::None), of(fault)], Contract::Devices, "a sound and a broken device")
    };
    catches(&both, &[Fault::Tile, Fault::StateKeep, Fault::Draw], 90);
}

/// tiny-b on a CPU device with a fault, behind the engine.
struct Faulty(Fault);

impl Subject for Faulty {
    fn name(&self) -> String {
        format!("tiny-b with {:?}", self.0)
    }

    fn open(&self, sizes: Sizes) -> std::result::Result<Box<dyn Model>, Error> {
        Ok(open_on("cpu", self.0, sizes))
    }
}

#[test]
fn replies_show_every_fault() {
    let text = text("tiny-b", 72);
    for (fault, contract) in [
        (Fault::StateKeep, Contract::Drafted),
        (Fault::Company, Contract::Concurrent),
        (Fault::Copy, Contract::Resumed),
        (Fault::Logprob, Contract::Scored),
        (Fault::Draw, Contract::Seeded),
    ] {
        let report = check_replies(&Faulty(fault), &text).expect("the engine answers");
        let outcome = report.outcomes.iter().find(|outcome| outcome.contract == contract);
        let outcome = outcome.expect("the contract was checked");
        assert!(!outcome.held(), "{fault:?} was not caught: {report}");
        println!("{:8} {fault:?}: {}", contract.id(), outcome.difference.as_deref().unwrap_or_default());
    }
}
