//! The host's half without a card: a stand-in driver keeps memory in vectors and writes down launches.

mod lists;
mod tables;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use super::compile::{Compiled, Kernels};
use super::driver::{Driver, Facts, Function, GraphExec, Pinned, Prepared, Result};
use super::{Cuda, CudaSettings};

/// What the stand-in was asked to do, in order.
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
}

/// A card of nothing but memory.
pub(super) struct Stub {
    facts: Facts,
    state: Mutex<State>,
}

impl Stub {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test panics inside")
    }

    /// Takes the events so far.
    pub(super) fn events(&self) -> Vec<Event> {
        std::mem::take(&mut self.state().events)
    }

    /// Bytes at an address.
    pub(super) fn bytes(&self, address: u64, count: usize) -> Vec<u8> {
        let state = self.state();
        let (base, memory) = state.memory.range(..=address).next_back().expect("an allocation");
        memory[(address - base) as usize..][..count].to_vec()
    }

    fn with(&self, address: u64, work: impl FnOnce(&mut [u8])) {
        let mut state = self.state();
        let (base, memory) = state.memory.range_mut(..=address).next_back().expect("an allocation");
        work(&mut memory[(address - base) as usize..]);
    }
}

impl Driver for Stub {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn alloc(&self, _stage: &'static str, bytes: usize) -> Result<u64> {
        let mut state = self.state();
        state.next += (bytes as u64 + 256).next_multiple_of(256);
        let address = state.next;
        state.next += bytes as u64;
        state.memory.insert(address, vec![0; bytes]);
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
        self.with(to, |memory| memory[..from.len()].copy_from_slice(from));
        Ok(())
    }

    fn download(&self, from: u64, to: &mut [u8]) -> Result {
        to.copy_from_slice(&self.bytes(from, to.len()));
        Ok(())
    }

    fn download_queued(&self, from: u64, to: &mut Pinned, bytes: usize) -> Result {
        let found = self.bytes(from, bytes);
        to.bytes_mut()[..bytes].copy_from_slice(&found);
        Ok(())
    }

    fn fill(&self, to: u64, value: u8, bytes: usize) -> Result {
        self.with(to, |memory| memory[..bytes].fill(value));
        Ok(())
    }

    fn synchronize(&self) -> Result {
        Ok(())
    }

    fn mark(&self, _slot: usize) -> Result {
        Ok(())
    }

    fn wait_mark(&self, _slot: usize) -> Result {
        Ok(())
    }

    fn load(&self, _image: &[u8]) -> Result<usize> {
        Ok(0)
    }

    fn function(&self, _module: usize, name: &str) -> Result<Function> {
        let mut state = self.state();
        state.functions.push(name.into());
        Ok(Function(state.functions.len() - 1))
    }

    fn launch(&self, launches: &[Prepared], _overlap: bool) -> Result {
        let mut state = self.state();
        let names = launches.iter().map(|launch| state.functions[launch.function.0].clone()).collect();
        state.events.push(Event::Launched(names));
        Ok(())
    }

    fn record(&self, _launches: &[Prepared]) -> Result<GraphExec> {
        let mut state = self.state();
        let graph = state.graphs;
        state.graphs += 1;
        state.events.push(Event::Recorded(graph));
        Ok(GraphExec(graph))
    }

    fn launch_graph(&self, graph: GraphExec) -> Result {
        self.state().events.push(Event::Replayed(graph.0));
        Ok(())
    }

    fn free_graph(&self, graph: GraphExec) {
        self.state().events.push(Event::Freed(graph.0));
    }

    fn memory(&self) -> Result<(u64, u64)> {
        Ok((1 << 30, 1 << 30))
    }
}

/// A device over a stand-in.
pub(super) fn device() -> (Cuda, Arc<Stub>) {
    let facts = Facts {
        name: "stand-in".into(),
        capability: 90,
        processors: 132,
        memory: 1 << 30,
        shared_max: 227 << 10,
    };
    let stub = Arc::new(Stub { facts, state: Mutex::default() });
    let driver: Arc<dyn Driver> = stub.clone();
    let settings =
        CudaSettings { ordinal: 0, kernel_cache: None, kernels: None, graphs: true, plain_sums: false };
    let kernels = Kernels::with(driver.clone(), None, |_, _, _| Ok(Compiled::default()));
    (Cuda::on(driver, kernels, settings).expect("opens"), stub)
}
