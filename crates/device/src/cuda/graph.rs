//! Lists of launches, kept by what they were made from and replayed as graphs.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use super::command::Command;
use super::driver::{Driver, GraphExec, Prepared, Result};
use super::memory::{StepPlaces, StepShape};

/// Most lists kept; the one used longest ago goes first.
const LISTS_MAX: usize = 256;
/// Steps of more rows run long enough that launches hide behind them; their lists are not recorded.
const GRAPH_ROWS_MAX: usize = 512;
/// Most graphs of steps with more rows than [`SHORT_ROWS_MAX`]: prompts have many lengths, of which few come
/// again.
const PROMPT_GRAPHS_MAX: usize = 32;
/// Launches of steps up to this many rows overlap: blocks of the next kernel that wait for a long one to end
/// would take its room.
pub(super) const SHORT_ROWS_MAX: usize = 64;

/// Commands under the tables of one step.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Part {
    pub(super) commands: Vec<Command>,
    pub(super) shape: StepShape,
    pub(super) places: StepPlaces,
}

/// What decides a list of launches.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) parts: Vec<Part>,
}

impl Key {
    /// Most rows of a step.
    fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.shape.rows).max().unwrap_or(0)
    }

    fn of_pictures(&self) -> bool {
        self.parts.iter().flat_map(|part| &part.commands).any(Command::of_pictures)
    }

    /// Do the commands after the first run of [`Command::StateKeep`] leave states alone?
    pub(super) fn keeps_beside(&self) -> bool {
        let commands = self.parts.iter().flat_map(|part| &part.commands);
        let mut rest = commands.skip_while(|command| matches!(command, Command::StateKeep { .. }));
        !rest.any(Command::touches_states)
    }
}

/// Launches of a list; the first `beside` of them, if a graph is made of it, run beside the others.
pub(super) struct Launches {
    pub(super) all: Vec<Prepared>,
    pub(super) beside: usize,
}

struct Entry {
    launches: Launches,
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
    pub(super) fn run(&mut self, key: Key, make: impl FnOnce(&Key) -> Result<Launches>) -> Result {
        self.clock += 1;
        let (rows, overlap) = (key.rows(), key.rows() <= SHORT_ROWS_MAX);
        if key.of_pictures() {
            // Not met again soon, and too many to keep beside those of steps.
            return self.driver.launch(&make(&key)?.all, overlap);
        }
        let Some(entry) = self.entries.get_mut(&key) else {
            let launches = make(&key)?;
            self.driver.launch(&launches.all, overlap)?;
            self.make_room();
            self.entries.insert(key, Entry { launches, graph: None, used: self.clock });
            return Ok(());
        };
        entry.used = self.clock;
        if let Some(graph) = entry.graph {
            return self.driver.launch_graph(graph);
        }
        if !self.graphs || rows > GRAPH_ROWS_MAX || entry.launches.all.is_empty() {
            return self.driver.launch(&entry.launches.all, overlap);
        }
        let graph = self.driver.record(&entry.launches.all, overlap, entry.launches.beside)?;
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
        let of_prompts = self.entries.iter_mut().filter(|(key, _)| key.rows() > SHORT_ROWS_MAX);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::memory::Upload;
    use crate::{Buffer, StatePool, Step, VectorRef};

    #[test]
    fn states_are_kept_beside_what_leaves_them_alone() {
        let mut upload = Upload::default();
        let step = Step::new(Vec::new(), Vec::new()).expect("an empty step");
        let places = upload.open(&step).expect("fits");
        let words = upload.push_words(&[0]);
        let part = |commands: Vec<Command>| Part { commands, shape: StepShape::of(&step), places };
        let keep = || Command::StateKeep { pool: StatePool(0), words };
        let norm = || Command::Norm { x: Buffer(0), rows: 1, weight: VectorRef(0), eps: 0, out: Buffer(1) };
        let conv = || Command::Conv { x: Buffer(0), taps: VectorRef(0), pool: StatePool(0), out: Buffer(1) };
        for (parts, expected) in [
            (vec![part(vec![keep(), keep()]), part(vec![norm()])], true),
            (vec![part(vec![keep(), norm()]), part(vec![norm()])], true),
            (vec![part(vec![keep(), keep()]), part(vec![norm(), conv()])], false),
            (vec![part(vec![keep(), norm(), keep()])], false),
        ] {
            let key = Key { parts };
            assert_eq!(key.keeps_beside(), expected, "{key:?}");
        }
    }
}
