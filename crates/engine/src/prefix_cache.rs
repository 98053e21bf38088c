//! The prefix cache's map: a radix tree over token keys for each namespace, with entries at kept positions.
//!
//! An entry is self-contained: a snapshot and the pages of its whole prefix, each page counted in the pool.
//! Entries of one conversation share pages, never each other's fate. What an entry costs is therefore decided
//! by the pool; this file only knows who may be where, who was used when, and who goes first.

use std::collections::{BTreeMap, HashMap};

use model::SnapshotId;

use crate::event::Miss;

/// Name of an entry, never used twice.
pub(crate) type EntryId = u64;

/// A resumable position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) id: EntryId,
    /// Tokens before the position.
    pub(crate) position: usize,
    /// Pages of places `0 .. position`; the last one may be partly filled.
    pub(crate) pages: Vec<u32>,
    /// State at the position.
    pub(crate) snapshot: SnapshotId,
    used: u64,
    hits: u32,
}

impl Entry {
    /// Order of eviction, lowest first: what has served two requests or more (a system prompt, as a rule)
    /// goes after everything else; then the longest unused.
    fn rank(&self) -> (bool, u64) {
        (self.hits >= 2, self.used)
    }
}

#[derive(Debug, Default)]
struct Node {
    parent: Option<usize>,
    /// Keys between the parent and this node.
    edge: Vec<u64>,
    /// By the first key of their edge.
    children: BTreeMap<u64, usize>,
    entry: Option<Entry>,
}

/// What a prompt finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The longest usable entry.
    pub(crate) entry: Option<EntryId>,
    /// Its position, 0 without one.
    pub(crate) position: usize,
    /// Leading keys that the tree knows.
    pub(crate) known: usize,
    /// Why the hit is not longer.
    pub(crate) miss: Option<Miss>,
}

/// The tree. See the module's text.
#[derive(Debug, Default)]
pub(crate) struct PrefixCache {
    nodes: Vec<Node>,
    unused: Vec<usize>,
    roots: HashMap<String, usize>,
    places: HashMap<EntryId, usize>,
    next: EntryId,
    tick: u64,
    keys: usize,
}

impl PrefixCache {
    /// The longest entry at most `most` tokens long that `keys` begins with.
    pub(crate) fn find(&self, namespace: &str, keys: &[u64], most: usize) -> Found {
        let mut found = Found { entry: None, position: 0, known: 0, miss: Some(Miss::Empty) };
        let Some(&root) = self.roots.get(namespace) else { return found };
        let mut node = root;
        let mut leaf_end = false;
        while let Some(&child) = keys.get(found.known).and_then(|key| self.nodes[node].children.get(key)) {
            let edge = &self.nodes[child].edge;
            let common = common_prefix(edge, &keys[found.known..]);
            found.known += common;
            if common < edge.len() {
                leaf_end = false;
                break;
            }
            node = child;
            leaf_end = self.nodes[node].children.is_empty();
            if let Some(entry) = self.nodes[node].entry.as_ref().filter(|entry| entry.position <= most) {
                found.entry = Some(entry.id);
                found.position = entry.position;
            }
        }
        found.miss = match found.known {
            _ if found.position == most => None,
            known if known == keys.len() => Some(Miss::Checkpoint { at: found.position }),
            known if leaf_end => Some(Miss::Ends { at: known }),
            known => Some(Miss::Differs { at: known }),
        };
        found
    }

    /// The entry at exactly this position, if there is one.
    pub(crate) fn at(&self, namespace: &str, keys: &[u64]) -> Option<EntryId> {
        let found = self.find(namespace, keys, keys.len());
        found.entry.filter(|_| found.position == keys.len())
    }

    pub(crate) fn entry(&self, id: EntryId) -> Option<&Entry> {
        self.nodes[*self.places.get(&id)?].entry.as_ref()
    }

    /// Marks an entry as used now.
    pub(crate) fn touch(&mut self, id: EntryId) {
        self.tick += 1;
        let tick = self.tick;
        if let Some(entry) = self.places.get(&id).and_then(|&node| self.nodes[node].entry.as_mut()) {
            entry.used = tick;
            entry.hits = entry.hits.saturating_add(1);
        }
    }

    /// Adds an entry behind all of `keys`; there must be none yet. The caller counts its pages.
    pub(crate) fn insert(
        &mut self,
        namespace: &str,
        keys: &[u64],
        pages: &[u32],
        snapshot: SnapshotId,
    ) -> EntryId {
        let node = self.node_at(namespace, keys);
        assert!(self.nodes[node].entry.is_none(), "two entries at one position");
        self.tick += 1;
        self.next += 1;
        let id = self.next;
        self.places.insert(id, node);
        self.nodes[node].entry = Some(Entry {
            id,
            position: keys.len(),
            pages: pages.to_vec(),
            snapshot,
            used: self.tick,
            hits: 0,
        });
        id
    }

    /// Takes an entry out, and the nodes that only led to it. The caller releases its pages and snapshot.
    pub(crate) fn remove(&mut self, id: EntryId) -> Option<Entry> {
        let node = self.places.remove(&id)?;
        let entry = self.nodes[node].entry.take();
        self.prune(node);
        entry
    }

    /// The entry to evict next.
    pub(crate) fn victim(&self) -> Option<EntryId> {
        let entries = self.places.values().filter_map(|&node| self.nodes[node].entry.as_ref());
        entries.min_by_key(|entry| entry.rank()).map(|entry| entry.id)
    }

    /// All entries of a namespace.
    pub(crate) fn entries_of(&self, namespace: &str) -> Vec<EntryId> {
        let Some(&root) = self.roots.get(namespace) else { return Vec::new() };
        let mut found = Vec::new();
        let mut open = vec![root];
        while let Some(node) = open.pop() {
            found.extend(self.nodes[node].entry.as_ref().map(|entry| entry.id));
            open.extend(self.nodes[node].children.values());
        }
        found
    }

    /// All entries, least worth keeping first.
    pub(crate) fn entries(&self) -> Vec<EntryId> {
        let mut all: Vec<&Entry> =
            self.places.values().filter_map(|&node| self.nodes[node].entry.as_ref()).collect();
        all.sort_by_key(|entry| entry.rank());
        all.into_iter().map(|entry| entry.id).collect()
    }

    /// Namespace and keys of an entry.
    pub(crate) fn path(&self, id: EntryId) -> Option<(&str, Vec<u64>)> {
        let mut node = *self.places.get(&id)?;
        let mut edges = Vec::new();
        while let Some(parent) = self.nodes[node].parent {
            edges.push(self.nodes[node].edge.as_slice());
            node = parent;
        }
        edges.reverse();
        let (namespace, _) = self.roots.iter().find(|&(_, &root)| root == node)?;
        Some((namespace, edges.concat()))
    }

    /// Bytes of the map itself.
    pub(crate) fn bytes(&self) -> usize {
        let pages: usize = self.places.len() * size_of::<Entry>();
        self.keys * size_of::<u64>() + self.nodes.len() * size_of::<Node>() + pages
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// The node behind all of `keys`, made if need be by splitting an edge or adding a leaf.
    fn node_at(&mut self, namespace: &str, keys: &[u64]) -> usize {
        let mut node = match self.roots.get(namespace) {
            Some(&root) => root,
            None => {
                let root = self.add(Node::default());
                self.roots.insert(namespace.to_owned(), root);
                root
            }
        };
        let mut at = 0;
        while at < keys.len() {
            match self.nodes[node].children.get(&keys[at]).copied() {
                None => {
                    let edge = keys[at..].to_vec();
                    at += edge.len();
                    node = self.attach(node, edge);
                }
                Some(child) => {
                    let common = common_prefix(&self.nodes[child].edge, &keys[at..]);
                    at += common;
                    node = self.split(child, common);
                }
            }
        }
        node
    }

    fn attach(&mut self, parent: usize, edge: Vec<u64>) -> usize {
        let key = edge[0];
        self.keys += edge.len();
        let node = self.add(Node { parent: Some(parent), edge, ..Node::default() });
        self.nodes[parent].children.insert(key, node);
        node
    }

    /// The node after the first `length` keys of the child's edge.
    fn split(&mut self, child: usize, length: usize) -> usize {
        if length == self.nodes[child].edge.len() {
            return child;
        }
        let lower = self.nodes[child].edge.split_off(length);
        let upper = std::mem::replace(&mut self.nodes[child].edge, lower);
        let parent = self.nodes[child].parent.expect("an edge has a parent");
        let (first, below) = (upper[0], self.nodes[child].edge[0]);
        let middle = self.add(Node {
            parent: Some(parent),
            edge: upper,
            children: BTreeMap::from([(below, child)]),
            entry: None,
        });
        self.nodes[parent].children.insert(first, middle);
        self.nodes[child].parent = Some(middle);
        middle
    }

    fn add(&mut self, node: Node) -> usize {
        match self.unused.pop() {
            Some(at) => {
                self.nodes[at] = node;
                at
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        }
    }

    /// Removes `node` and its ancestors as long as they lead nowhere; joins the last one kept with an only
    /// child.
    fn prune(&mut self, mut node: usize) {
        while self.nodes[node].entry.is_none() && self.nodes[node].children.is_empty() {
            let gone = std::mem::take(&mut self.nodes[node]);
            self.unused.push(node);
            self.keys -= gone.edge.len();
            let Some(parent) = gone.parent else {
                self.roots.retain(|_, &mut root| root != node);
                return;
            };
            self.nodes[parent].children.remove(&gone.edge[0]);
            node = parent;
        }
        let passes = self.nodes[node].entry.is_none() && self.nodes[node].children.len() == 1;
        if let (true, Some(parent)) = (passes, self.nodes[node].parent) {
            let gone = std::mem::take(&mut self.nodes[node]);
            self.unused.push(node);
            let child = *gone.children.values().next().expect("one child");
            self.nodes[parent].children.insert(gone.edge[0], child);
            self.nodes[child].parent = Some(parent);
            self.nodes[child].edge.splice(0..0, gone.edge);
        }
    }
}

fn common_prefix(a: &[u64], b: &[u64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn insert(cache: &mut PrefixCache, keys: &[u64]) -> EntryId {
        cache.insert("a", keys, &[], SnapshotId(0))
    }

    fn check(cache: &PrefixCache, keys: &[u64], position: usize, known: usize, miss: Option<Miss>) {
        let found = cache.find("a", keys, keys.len() - 1);
        assert_eq!((found.position, found.known, found.miss), (position, known, miss), "{keys:?}");
    }

    #[test]
    fn the_longest_entry_that_leaves_one_token_is_found() {
        let mut cache = PrefixCache::default();
        check(&cache, &[1, 2], 0, 0, Some(Miss::Empty));
        insert(&mut cache, &[1, 2, 3, 4]);
        insert(&mut cache, &[1, 2]);
        insert(&mut cache, &[1, 2, 9, 9]);
        check(&cache, &[1, 2, 3, 4], 2, 4, Some(Miss::Checkpoint { at: 2 }));
        check(&cache, &[1, 2, 3, 4, 5], 4, 4, None);
        check(&cache, &[1, 2, 3, 4, 5, 6], 4, 4, Some(Miss::Ends { at: 4 }));
        check(&cache, &[1, 2, 3, 7, 7], 2, 3, Some(Miss::Differs { at: 3 }));
        check(&cache, &[7, 7], 0, 0, Some(Miss::Differs { at: 0 }));
        assert_eq!(cache.find("b", &[1, 2, 3], 2).position, 0, "another namespace");
    }

    #[test]
    fn removing_everything_leaves_nothing() {
        let mut cache = PrefixCache::default();
        let ids: Vec<EntryId> = [&[1u64, 2, 3, 4][..], &[1, 2], &[1, 2, 9, 9], &[1, 5]]
            .iter()
            .map(|k| insert(&mut cache, k))
            .collect();
        assert_eq!(cache.path(ids[2]), Some(("a", vec![1, 2, 9, 9])));
        cache.remove(ids[1]);
        assert_eq!(cache.path(ids[2]), Some(("a", vec![1, 2, 9, 9])));
        for &id in [ids[2], ids[0], ids[3]].iter() {
            assert!(cache.remove(id).is_some());
            assert!(cache.remove(id).is_none());
        }
        assert_eq!((cache.keys, cache.unused.len()), (0, cache.nodes.len()));
        assert!(cache.roots.is_empty());
    }

    #[test]
    fn shared_entries_are_evicted_last() {
        let mut cache = PrefixCache::default();
        let system = insert(&mut cache, &[1, 2]);
        let old = insert(&mut cache, &[1, 2, 3]);
        let new = insert(&mut cache, &[1, 2, 4]);
        cache.touch(system);
        cache.touch(system);
        cache.touch(old);
        cache.touch(new);
        assert_eq!(cache.entries(), vec![old, new, system]);
        assert_eq!(cache.victim(), Some(old));
    }

    /// Against a list of prefixes: any sequence of inserts and removals finds what a scan finds.
    #[test]
    fn finds_what_a_scan_finds() {
        let mut cache = PrefixCache::default();
        let mut list: Vec<(EntryId, Vec<u64>)> = Vec::new();
        let mut state = 7u64;
        let mut next = |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        for _ in 0..3000 {
            let keys: Vec<u64> = (0..1 + next(6)).map(|_| next(3)).collect();
            match next(3) {
                0 if cache.at("a", &keys).is_none() => list.push((insert(&mut cache, &keys), keys)),
                1 if !list.is_empty() => {
                    let (id, _) = list.swap_remove(next(list.len() as u64) as usize);
                    cache.remove(id);
                }
                _ => {
                    let best = list.iter().filter(|(_, k)| k.len() < keys.len() && keys.starts_with(k));
                    let best = best.max_by_key(|(_, k)| k.len()).map(|(id, _)| *id);
                    assert_eq!(cache.find("a", &keys, keys.len() - 1).entry, best);
                }
            }
        }
    }
}
