//! A card that is not there: launches run nothing, and memory is what the host writes into it, or nothing at
//! all. Tests of the host's half look at what it was asked to do; rehearsals ([`super::rehearsal`]) at which
//! kernels.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::compile::{Compiled, line};
use super::driver::{Driver, Facts, Function, GraphExec, Pinned, Prepared, Result};
use crate::DeviceError;

/// Most blocks of a grid along its second and third side.
const GRID_SIDE_MAX: u32 = 65_535;

/// What a card that keeps its memory was asked to do, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// Launches by name of their kernels.
    Launched(Vec<String>),
    Recorded(usize),
    Replayed(usize),
    Freed(usize),
}

#[derive(Default)]
struct State {
    next: u64,
    memory: BTreeMap<u64, Vec<u8>>,
    functions: Vec<String>,
    graphs: usize,
    events: Vec<Event>,
    images: BTreeSet<String>,
    /// Calls that are to fail, each once: the stage, and the error.
    faults: Vec<(&'static str, DeviceError)>,
}

/// The card.
pub(super) struct StandIn {
    facts: Facts,
    /// Whether memory keeps what is written, and events are noted; else what is read is zeros.
    keeps: bool,
    state: Mutex<State>,
}

/// A compiler whose images say what was to be compiled: a line of a list of variants.
pub(super) fn note_variant(file: &str, defines: &[(&str, String)], _arch: &str) -> Result<Compiled> {
    Ok(Compiled { image: line(file, defines).into_bytes(), log: String::new() })
}

impl StandIn {
    pub(super) fn new(facts: Facts, keeps: bool) -> Self {
        Self { facts, keeps, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Images loaded so far, as text.
    pub(super) fn images(&self) -> BTreeSet<String> {
        self.state().images.clone()
    }

    /// Takes the events so far.
    #[cfg(test)]
    pub(super) fn events(&self) -> Vec<Event> {
        std::mem::take(&mut self.state().events)
    }

    /// The next call of this stage fails.
    #[cfg(test)]
    pub(super) fn fail(&self, stage: &'static str, error: DeviceError) {
        self.state().faults.push((stage, error));
    }

    /// Allocations that live.
    #[cfg(test)]
    pub(super) fn allocations(&self) -> usize {
        self.state().memory.len()
    }

    /// Bytes at an address.
    pub(super) fn bytes(&self, address: u64, count: usize) -> Vec<u8> {
        if !self.keeps {
            return vec![0; count];
        }
        let state = self.state();
        let (base, memory) = state.memory.range(..=address).next_back().expect("an allocation");
        memory[(address - base) as usize..][..count].to_vec()
    }

    fn with(&self, address: u64, work: impl FnOnce(&mut [u8])) {
        if self.keeps {
            let mut state = self.state();
            let (base, memory) = state.memory.range_mut(..=address).next_back().expect("an allocation");
            work(&mut memory[(address - base) as usize..]);
        }
    }

    fn note(&self, event: impl FnOnce(&State) -> Event) {
        if self.keeps {
            let mut state = self.state();
            let event = event(&state);
            state.events.push(event);
        }
    }

    fn fault(&self, stage: &str) -> Result {
        let mut state = self.state();
        match state.faults.iter().position(|(of, _)| *of == stage) {
            Some(at) => Err(state.faults.remove(at).1),
            None => Ok(()),
        }
    }

    /// Refuses what no card of this kind could launch.
    fn check(&self, launch: &Prepared) -> Result {
        let most = self.facts.shared_max;
        let [_, height, depth] = launch.grid;
        if launch.shared <= most && height.max(depth) <= GRID_SIDE_MAX && launch.block <= 1024 {
            return Ok(());
        }
        let name = self.state().functions[launch.function.0].clone();
        let message = format!(
            "{name}: {} bytes of shared memory of {most}, {} threads, grid {:?}",
            launch.shared, launch.block, launch.grid
        );
        Err(DeviceError::Failed { stage: "launch", message })
    }
}

impl Driver for StandIn {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn keeps(&self) -> bool {
        self.keeps
    }

    fn alloc(&self, _stage: &'static str, bytes: usize) -> Result<u64> {
        self.fault("alloc")?;
        let mut state = self.state();
        state.next += (bytes as u64 + 256).next_multiple_of(256);
        let address = state.next;
        state.next += bytes as u64;
        if self.keeps {
            state.memory.insert(address, vec![0; bytes]);
        }
        Ok(address)
    }

    fn free(&self, address: u64) {
        self.state().memory.remove(&address);
    }

    fn pinned(&self, bytes: usize) -> Result<Pinned> {
        Ok(Pinned::leaked(bytes))
    }

    fn upload_queued(&self, to: u64, from: &Pinned, bytes: usize) -> Result {
        self.upload(to, &from.bytes()[..bytes])
    }

    fn upload(&self, to: u64, from: &[u8]) -> Result {
        self.fault("upload")?;
        self.with(to, |memory| memory[..from.len()].copy_from_slice(from));
        Ok(())
    }

    fn download(&self, from: u64, to: &mut [u8]) -> Result {
        self.fault("download")?;
        to.copy_from_slice(&self.bytes(from, to.len()));
        Ok(())
    }

    fn fill(&self, to: u64, value: u8, bytes: usize) -> Result {
        self.with(to, |memory| memory[..bytes].fill(value));
        Ok(())
    }

    fn synchronize(&self) -> Result {
        self.fault("wait")
    }

    fn mark(&self, _slot: usize) -> Result {
        Ok(())
    }

    fn wait_mark(&self, _slot: usize) -> Result {
        Ok(())
    }

    fn load(&self, image: &[u8]) -> Result<usize> {
        self.fault("load kernels")?;
        self.state().images.insert(String::from_utf8_lossy(image).into_owned());
        Ok(0)
    }

    fn function(&self, _module: usize, name: &str) -> Result<Function> {
        let mut state = self.state();
        state.functions.push(name.into());
        Ok(Function(state.functions.len() - 1))
    }

    fn launch(&self, launches: &[Prepared], _overlap: bool) -> Result {
        self.fault("launch")?;
        launches.iter().try_for_each(|launch| self.check(launch))?;
        self.note(|state| {
            let name = |launch: &Prepared| state.functions[launch.function.0].clone();
            Event::Launched(launches.iter().map(name).collect())
        });
        Ok(())
    }

    fn record(&self, launches: &[Prepared], _overlap: bool, _beside: usize) -> Result<GraphExec> {
        self.fault("graph")?;
        launches.iter().try_for_each(|launch| self.check(launch))?;
        let graph = {
            let mut state = self.state();
            state.graphs += 1;
            state.graphs - 1
        };
        self.note(|_| Event::Recorded(graph));
        Ok(GraphExec(graph))
    }

    fn launch_graph(&self, graph: GraphExec) -> Result {
        self.fault("graph")?;
        self.note(|_| Event::Replayed(graph.0));
        Ok(())
    }

    fn free_graph(&self, graph: GraphExec) {
        self.note(|_| Event::Freed(graph.0));
    }

    fn memory(&self) -> Result<(u64, u64)> {
        Ok((self.facts.memory, self.facts.memory))
    }
}
