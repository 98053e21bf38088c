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
const GRAPH_ROWS_MAX: usize = 512;
/// Most graphs of steps with more rows than [`SHORT_ROWS_MAX`]: prompts have many lengths, of which few come
/// again.
const PROMPT_GRAPHS_MAX: usize = 32;
/// Launches of steps up to this many rows overlap: blocks of the next kernel that wait for a long one to end
/// would take its room.
const SHORT_ROWS_MAX: usize = 64;

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
        let (rows, overlap) = (key.shape.rows, key.shape.rows <= SHORT_ROWS_MAX);
        if key.commands.iter().any(Command::of_pictures) {
            // Not met again soon, and too many to keep beside those of steps.
            return self.driver.launch(&make(&key)?, overlap);
        }
        let Some(entry) = self.entries.get_mut(&key) else {
            let launches = make(&key)?;
            self.driver.launch(&launches, overlap)?;
            self.make_room();
            self.entries.insert(key, Entry { launches, graph: None, used: self.clock });
            return Ok(());
        };
        entry.used = self.clock;
        if let Some(graph) = entry.graph {
            return self.driver.launch_graph(graph);
        }
        if !self.graphs || rows > GRAPH_ROWS_MAX || entry.launches.is_empty() {
            return self.driver.launch(&entry.launches, overlap);
        }
        let graph = self.driver.record(&entry.launches, overlap)?;
        entry.graph = Some(graph);
        self.driver.launch_graph(graph)?;
        if !overlap {
            self.forget_prompts();
        }
        Ok(())
    }

    /// Frees the graphs of prompts beyond [`PROMPT_GRAPHS_MAX`], those used longest ago first. Their lists
    /// stay.
    fn forget_prompts(&mut self) {
        let of_prompts = self.entries.iter_mut().filter(|(key, _)| key.shape.rows > SHORT_ROWS_MAX);
        let mut recorded: Vec<&mut Entry> =
            of_prompts.map(|(_, entry)| entry).filter(|entry| entry.graph.is_some()).collect();
        recorded.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.used));
        for entry in recorded.into_iter().skip(PROMPT_GRAPHS_MAX) {
            entry.graph.take().into_iter().for_each(|graph| self.driver.free_graph(graph));
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
