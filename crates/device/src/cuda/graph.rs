//! Lists of launches, kept by what they were made from and replayed as graphs.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use super::command::Command;
use super::driver::{Driver, GraphExec, Prepared, Result};
use super::memory::StepShape;

/// Most lists kept; the one used longest ago goes first.
const LISTS_MAX: usize = 256;
/// Steps of more rows run long enough that launches hide behind them; their lists are not recorded.
const GRAPH_ROWS_MAX: usize = 64;

/// What decides a list of launches.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) commands: Vec<Command>,
    pub(super) shape: StepShape,
}

struct Entry {
    launches: Vec<Prepared>,
    graph: Option<GraphExec>,
    /// Clock of the last run.
    used: u64,
}

/// Hash of a list: one multiply and rotate a word. Collisions only cost a comparison.
#[derive(Default)]
pub(super) struct WordHasher(u64);

impl Hasher for WordHasher {
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 29
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte as u64);
        }
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(word as u64);
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }
}

/// Lists of launches by key.
pub(super) struct Lists {
    driver: Arc<dyn Driver>,
    entries: HashMap<Key, Entry, BuildHasherDefault<WordHasher>>,
    clock: u64,
    /// Whether lists are recorded as graphs at their second run.
    graphs: bool,
}

impl Lists {
    pub(super) fn new(driver: Arc<dyn Driver>, graphs: bool) -> Self {
        Self { driver, entries: HashMap::default(), clock: 0, graphs }
    }

    /// Runs the list of `key`, made by `make` if it is not there.
    pub(super) fn run(&mut self, key: Key, make: impl FnOnce(&Key) -> Result<Vec<Prepared>>) -> Result {
        self.clock += 1;
        // Blocks of the next kernel that wait for a long one to end would take its room: only short ones overlap.
        let is_short = key.shape.rows <= GRAPH_ROWS_MAX;
        if key.commands.iter().any(Command::of_pictures) {
            // Not met again soon, and too many to keep beside those of steps.
            return self.driver.launch(&make(&key)?, is_short);
        }
        if !self.entries.contains_key(&key) {
            let launches = make(&key)?;
            self.make_room();
            let entry = Entry { launches, graph: None, used: 0 };
            let entry = self.entries.entry(key).or_insert(entry);
            return Self::run_entry(&self.driver, entry, self.clock, is_short, false);
        }
        let entry = self.entries.get_mut(&key).expect("looked up above");
        Self::run_entry(&self.driver, entry, self.clock, is_short, self.graphs)
    }

    fn run_entry(
        driver: &Arc<dyn Driver>,
        entry: &mut Entry,
        clock: u64,
        is_short: bool,
        record: bool,
    ) -> Result {
        entry.used = clock;
        if record && is_short && entry.graph.is_none() && !entry.launches.is_empty() {
            entry.graph = Some(driver.record(&entry.launches)?);
        }
        match entry.graph {
            Some(graph) => driver.launch_graph(graph),
            None => driver.launch(&entry.launches, is_short),
        }
    }

    fn make_room(&mut self) {
        while self.entries.len() >= LISTS_MAX {
            let Some(oldest) = self.entries.values().map(|entry| entry.used).min() else { return };
            let driver = &self.driver;
            self.entries.retain(|_, entry| {
                let keep = entry.used != oldest;
                if let Some(graph) = entry.graph.filter(|_| !keep) {
                    driver.free_graph(graph);
                }
                keep
            });
        }
    }

    /// Drops all lists.
    pub(super) fn clear(&mut self) {
        for entry in self.entries.values() {
            if let Some(graph) = entry.graph {
                self.driver.free_graph(graph);
            }
        }
        self.entries.clear();
    }
}

impl Drop for Lists {
    fn drop(&mut self) {
        self.clear();
    }
}
