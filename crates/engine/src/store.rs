//! Pages, snapshots and the prefix cache together: what is kept, what it costs, and what goes when room is
//! needed.

use std::io::ErrorKind;
use std::sync::mpsc::Receiver;

use model::{Model, ModelError, PAGE_TOKENS, SlotId, SnapshotId, Spec};

use crate::disk::DiskTier;
use crate::disk_files::Payload;
use crate::event::Miss;
use crate::pages::PagePool;
use crate::prefix_cache::{EntryId, Found, PrefixCache};

/// Limits of the prefix cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheLimits {
    /// Most bytes of snapshots, pages and bookkeeping; 0 turns the cache off.
    pub bytes_max: u64,
    /// A snapshot after every so many tokens of a prompt; 0 for none.
    pub checkpoint_tokens: usize,
    /// Prompts whose computed part is shorter leave no snapshot at their end: it is cheaper to compute again.
    pub prompt_end_min: usize,
}

impl Default for CacheLimits {
    fn default() -> Self {
        Self { bytes_max: 4 << 30, checkpoint_tokens: 8192, prompt_end_min: 32 }
    }
}

/// Memory of the engine. The model owns the bytes, this owns the map of them.
pub(crate) struct Store {
    pub(crate) pool: PagePool,
    cache: PrefixCache,
    free_snapshots: Vec<SnapshotId>,
    limits: CacheLimits,
    page_bytes: u64,
    snapshot_bytes: u64,
    snapshots: usize,
    disk: Option<DiskTier>,
}

/// An entry that the disk was asked for.
pub(crate) struct Fetch {
    /// Its tokens.
    pub(crate) position: usize,
    /// Leading pages that memory had.
    pub(crate) shared: usize,
    pub(crate) answer: Receiver<Option<Payload>>,
}

/// A slot's start: where it resumes and on which pages.
pub(crate) struct Resumed {
    /// Tokens already there.
    pub(crate) position: usize,
    /// Pages of places `0 .. position`; all but a partly filled last one are shared.
    pub(crate) pages: Vec<u32>,
    /// Pages still promised to the slot.
    pub(crate) reserved: usize,
    /// The entry it came from.
    pub(crate) entry: Option<EntryId>,
}

impl Store {
    pub(crate) fn new(spec: &Spec, limits: CacheLimits, disk: Option<DiskTier>) -> Self {
        Self {
            pool: PagePool::new(spec.pages),
            cache: PrefixCache::default(),
            free_snapshots: (0..spec.snapshots as u32).rev().map(SnapshotId).collect(),
            limits,
            page_bytes: spec.page_bytes as u64,
            snapshot_bytes: spec.snapshot_bytes as u64,
            snapshots: spec.snapshots,
            disk,
        }
    }

    /// Whether anything can be kept.
    pub(crate) fn caches(&self) -> bool {
        self.limits.bytes_max > 0 && self.snapshots > 0
    }

    pub(crate) fn limits(&self) -> &CacheLimits {
        &self.limits
    }

    /// Bytes of the cache: snapshots, pages and bookkeeping.
    pub(crate) fn cache_bytes(&self) -> u64 {
        let snapshots = (self.snapshots - self.free_snapshots.len()) as u64 * self.snapshot_bytes;
        let pages = self.pool.cached_pages() as u64 * self.page_bytes;
        snapshots + pages + self.cache.bytes() as u64
    }

    /// Files that the disk tier could not write, and why it could not write the last.
    pub(crate) fn disk_failures(&self) -> (u64, Option<ErrorKind>) {
        self.disk.as_ref().map(DiskTier::failures).unwrap_or_default()
    }

    /// Entries of the cache.
    pub(crate) fn cache_entries(&self) -> usize {
        self.cache.len()
    }

    /// The longest kept position in memory of a prompt that leaves `keys.len() - most` tokens to compute.
    pub(crate) fn find(&self, namespace: &str, keys: &[u64], most: usize) -> Found {
        self.cache.find(namespace, keys, most)
    }

    /// Asks the disk for a position longer than the one in memory, if it has one and time for it.
    pub(crate) fn fetch(&mut self, namespace: &str, keys: &[u64], most: usize) -> Option<Fetch> {
        let disk = self.disk.as_mut()?;
        let found = self.cache.find(namespace, keys, most);
        let position = disk.find(namespace, keys, most).filter(|&position| position > found.position)?;
        let shared = found.position / PAGE_TOKENS;
        let answer = disk.read(namespace, &keys[..position], shared)?;
        Some(Fetch { position, shared, answer })
    }

    /// Takes what the disk gave into the cache; nothing where there is no room, or where the pages that it
    /// was to share have gone meanwhile.
    pub(crate) fn take_fetched(
        &mut self,
        model: &mut dyn Model,
        namespace: &str,
        keys: &[u64],
        shared: usize,
        payload: Option<Payload>,
    ) {
        match payload {
            Some(payload) => drop(self.bring_back(model, namespace, keys, shared, payload)),
            None => {
                if let Some(disk) = &mut self.disk {
                    disk.lost(namespace, keys);
                }
            }
        }
    }

    /// What a request would find, the disk included as far as that can be told without reading it.
    pub(crate) fn known(&self, namespace: &str, keys: &[u64], most: usize) -> Found {
        let found = self.cache.find(namespace, keys, most);
        match self.disk.as_ref().and_then(|disk| disk.find(namespace, keys, most)) {
            Some(position) if position > found.position => {
                let miss = (position < most).then_some(Miss::Checkpoint { at: position });
                Found { position, known: found.known.max(position), miss, ..found }
            }
            _ => found,
        }
    }

    /// Puts a slot at the found position, or at the empty sequence, with the pages of its worst case
    /// promised. `None`: no room now. What was found is dropped from the answer where only starting afresh
    /// fits.
    pub(crate) fn admit(
        &mut self,
        model: &mut dyn Model,
        slot: SlotId,
        found: &mut Found,
        pages_max: usize,
    ) -> Result<Option<Resumed>, ModelError> {
        if let Some(id) = found.entry {
            match self.resume(model, slot, id, pages_max) {
                Ok(Some(resumed)) => return Ok(Some(resumed)),
                Ok(None) => {}
                Err(_) => self.drop_entry(id),
            }
            *found = Found { entry: None, position: 0, known: found.known, miss: Some(Miss::NoRoom) };
        }
        if self.pool.available() < pages_max {
            return Ok(None);
        }
        model.load(slot, None)?;
        self.pool.reserve(pages_max);
        Ok(Some(Resumed { position: 0, pages: Vec::new(), reserved: pages_max, entry: None }))
    }

    fn resume(
        &mut self,
        model: &mut dyn Model,
        slot: SlotId,
        id: EntryId,
        pages_max: usize,
    ) -> Result<Option<Resumed>, ModelError> {
        let Some(entry) = self.cache.entry(id).cloned() else { return Ok(None) };
        let shared = entry.position / PAGE_TOKENS;
        // The partly filled page is held too while it is copied.
        let taken = self.pool.cached_only_among(&entry.pages);
        if self.pool.available() < taken + pages_max - shared {
            return Ok(None);
        }
        model.load(slot, Some(entry.snapshot))?;
        self.cache.touch(id);
        entry.pages.iter().for_each(|&page| self.pool.hold_slot(page));
        self.pool.reserve(pages_max - shared);
        let mut resumed = Resumed {
            position: entry.position,
            pages: entry.pages[..shared].to_vec(),
            reserved: pages_max - shared,
            entry: Some(id),
        };
        if let Some(&open) = entry.pages.get(shared) {
            let page = self.take_page(model);
            resumed.reserved -= 1;
            resumed.pages.push(page);
            let copied = model.export_page(open).and_then(|bytes| model.import_page(page, &bytes));
            self.pool.release_slot(open);
            if let Err(error) = copied {
                self.give_back(&resumed.pages, resumed.reserved);
                return Err(error);
            }
        }
        Ok(Some(resumed))
    }

    /// A page promised to a slot.
    pub(crate) fn take_page(&mut self, model: &mut dyn Model) -> u32 {
        loop {
            if let Some(page) = self.pool.take_reserved() {
                return page;
            }
            let evicted = self.evict(model);
            assert!(evicted, "a reserved page is neither free nor cached");
        }
    }

    /// A slot is over.
    pub(crate) fn give_back(&mut self, pages: &[u32], reserved: usize) {
        pages.iter().for_each(|&page| self.pool.release_slot(page));
        self.pool.unreserve(reserved);
    }

    /// Keeps the slot's state behind `keys`, the tokens committed so far. `None` where nothing new was kept.
    pub(crate) fn remember(
        &mut self,
        model: &mut dyn Model,
        slot: SlotId,
        namespace: &str,
        keys: &[u64],
        pages: &[u32],
    ) -> Option<EntryId> {
        if !self.caches() || keys.is_empty() || self.cache.at(namespace, keys).is_some() {
            return None;
        }
        let snapshot = self.take_snapshot(model)?;
        if model.save(slot, snapshot).is_err() {
            // Only a later request's time is lost.
            self.free_snapshots.push(snapshot);
            return None;
        }
        let pages = &pages[..keys.len().div_ceil(PAGE_TOKENS)];
        pages.iter().for_each(|&page| self.pool.hold_cached(page));
        let id = self.cache.insert(namespace, keys, pages, snapshot);
        self.keep_limits(model);
        Some(id)
    }

    /// Forgets an entry, for instance one that led to a fault.
    pub(crate) fn drop_entry(&mut self, id: EntryId) {
        if let Some(entry) = self.cache.remove(id) {
            entry.pages.iter().for_each(|&page| self.pool.release_cached(page));
            self.free_snapshots.push(entry.snapshot);
        }
    }

    /// Forgets a namespace.
    pub(crate) fn drop_namespace(&mut self, namespace: &str) {
        for id in self.cache.entries_of(namespace) {
            self.drop_entry(id);
        }
    }

    /// Writes all entries to the disk tier, if there is one, and waits until they are there.
    pub(crate) fn persist(&mut self, model: &mut dyn Model) {
        for id in self.cache.entries() {
            self.write_out(model, id, true);
        }
        if let Some(disk) = &mut self.disk {
            disk.flush();
        }
    }

    fn take_snapshot(&mut self, model: &mut dyn Model) -> Option<SnapshotId> {
        loop {
            if let Some(id) = self.free_snapshots.pop() {
                return Some(id);
            }
            if !self.evict(model) {
                return None;
            }
        }
    }

    fn keep_limits(&mut self, model: &mut dyn Model) {
        while self.cache_bytes() > self.limits.bytes_max && self.evict(model) {}
    }

    /// Evicts one entry, to disk if there is one. False: the cache is empty.
    fn evict(&mut self, model: &mut dyn Model) -> bool {
        let Some(id) = self.cache.victim() else { return false };
        self.write_out(model, id, false);
        self.drop_entry(id);
        true
    }

    fn write_out(&mut self, model: &mut dyn Model, id: EntryId, wait: bool) {
        let Some(disk) = &mut self.disk else { return };
        let (Some(entry), Some((namespace, keys))) = (self.cache.entry(id), self.cache.path(id)) else {
            return;
        };
        disk.write(model, namespace, &keys, &entry.pages, entry.snapshot, wait);
    }

    /// Puts an entry from disk into the cache, on the first `shared` pages of one that is there.
    fn bring_back(
        &mut self,
        model: &mut dyn Model,
        namespace: &str,
        keys: &[u64],
        shared: usize,
        payload: Payload,
    ) -> Option<()> {
        let found = self.cache.find(namespace, keys, keys.len());
        if found.position == keys.len() || found.position / PAGE_TOKENS < shared {
            return None;
        }
        let known = found.entry.and_then(|id| self.cache.entry(id));
        let mut pages: Vec<u32> = known.map_or(Vec::new(), |entry| entry.pages.clone());
        pages.truncate(shared);
        let missing = keys.len().div_ceil(PAGE_TOKENS) - shared;
        if self.pool.available() < missing {
            return None;
        }
        // Held first: making room must not take what is being built.
        pages.iter().for_each(|&page| self.pool.hold_cached(page));
        let snapshot = self.take_snapshot(model);
        while snapshot.is_some() && pages.len() < shared + missing {
            match self.pool.take_cached() {
                Some(page) => pages.push(page),
                None if self.evict(model) => {}
                None => break,
            }
        }
        let whole = pages.len() == shared + missing;
        let filled = snapshot.filter(|&id| whole && import(model, &pages[shared..], &payload, id).is_some());
        match filled {
            Some(id) if self.cache.at(namespace, keys).is_none() => {
                self.cache.insert(namespace, keys, &pages, id);
                self.keep_limits(model);
                Some(())
            }
            _ => {
                pages.iter().for_each(|&page| self.pool.release_cached(page));
                self.free_snapshots.extend(snapshot);
                None
            }
        }
    }

    /// Whether no slot holds anything; for tests of leaks.
    pub(crate) fn idle(&self) -> bool {
        self.pool.free() + self.pool.cached_pages() == self.pool.available()
    }
}

/// Writes what the disk gave into pages and a snapshot.
fn import(model: &mut dyn Model, pages: &[u32], payload: &Payload, snapshot: SnapshotId) -> Option<()> {
    let mut targets = pages.iter();
    for bytes in &payload.pages {
        model.import_page(*targets.next()?, bytes).ok()?;
    }
    if let Some(&page) = targets.next() {
        model.import_page(page, &payload.open).ok()?;
    }
    model.import_snapshot(snapshot, &payload.state).ok()
}
