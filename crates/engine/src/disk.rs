//! The cache's disk tier: entries that outlive memory and restarts.
//!
//! A folder of files, each a header, a payload and a checksum: `*.page` one K/V page, named by a hash of
//! everything up to the page's end, so that conversations share them; `*.state` one kept position (its keys,
//! snapshot and open page). A file that is torn, foreign, of another model or version, or whose keys are not
//! the prompt's is as good as absent. Files are written under another name and renamed when whole.
//!
//! A thread of its own reads and writes them ([`crate::disk_files`]). The engine only looks into the index
//! here, hands over bytes, and never waits while it has something to step: what the disk cannot take in time
//! is dropped.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use model::{Model, PAGE_TOKENS, SnapshotId};

use crate::disk_files::{Chain, Entry, Files, Gone, Payload, Wanted};

/// Most reads and writes that wait for the disk.
const WORK_MAX: usize = 64;
/// Most bytes that wait to be written; entries beyond are not kept on disk.
const WRITE_BYTES_MAX: u64 = 512 << 20;

/// Where the tier lives and what it may hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSettings {
    /// Folder; made if need be.
    pub folder: PathBuf,
    /// Most bytes of files; the oldest entries go first.
    pub bytes_max: u64,
    /// Names model, K/V form, arithmetic and version: entries of another digest are not used.
    pub digest: [u8; 32],
}

enum Work {
    Write(Entry),
    Read(Wanted, Sender<Option<Payload>>),
    /// Answers once everything before it is done.
    Flush(Sender<()>),
}

/// The tier, as the engine sees it.
#[derive(Debug)]
pub(crate) struct DiskTier {
    digest: [u8; 32],
    /// Kept positions: how many entries have this many tokens.
    positions: BTreeMap<usize, usize>,
    /// State files by name, those on their way among them: position.
    states: BTreeMap<String, usize>,
    /// Page files, those on their way among them.
    pages: HashSet<String>,
    work: SyncSender<Work>,
    gone: Receiver<Gone>,
    /// Bytes that wait to be written.
    waiting: Arc<AtomicU64>,
}

impl DiskTier {
    /// Opens a folder, lists what it holds and starts the thread, which ends with the tier.
    pub(crate) fn open(settings: DiskSettings) -> std::io::Result<Self> {
        let digest = settings.digest;
        let (mut files, listing) = Files::open(settings)?;
        let (work, received) = sync_channel(WORK_MAX);
        let (report, gone) = channel();
        let waiting = Arc::new(AtomicU64::new(0));
        let written = waiting.clone();
        std::thread::Builder::new().name("disk tier".into()).spawn(move || {
            for work in received {
                match work {
                    Work::Write(entry) => {
                        let bytes = entry.bytes();
                        // Nobody is left to tell where the engine has ended.
                        files.write(entry).into_iter().for_each(|gone| drop(report.send(gone)));
                        written.fetch_sub(bytes, Ordering::AcqRel);
                    }
                    Work::Read(wanted, answer) => {
                        let read = files.read(&wanted).map_err(|gone| {
                            gone.into_iter().for_each(|gone| drop(report.send(gone)));
                        });
                        drop(answer.send(read.ok()));
                    }
                    Work::Flush(done) => drop(done.send(())),
                }
            }
        })?;
        let pages = listing.pages.into_iter().collect();
        let (positions, states) = (BTreeMap::new(), BTreeMap::new());
        let mut tier = Self { digest, positions, states, pages, work, gone, waiting };
        listing.states.into_iter().for_each(|(name, position)| tier.enter(name, position));
        Ok(tier)
    }

    fn state_name(&self, namespace: &str, keys: &[u64]) -> String {
        Chain::new(&self.digest, namespace).extend(keys).name("state")
    }

    fn enter(&mut self, name: String, position: usize) {
        if self.states.insert(name, position).is_none() {
            *self.positions.entry(position).or_default() += 1;
        }
    }

    fn forget(&mut self, name: &str) {
        let Some(position) = self.states.remove(name) else { return };
        let left = self.positions.get_mut(&position).expect("counted when it was entered");
        *left -= 1;
        if *left == 0 {
            self.positions.remove(&position);
        }
    }

    /// Takes note of files that went.
    fn catch_up(&mut self) {
        while let Ok(gone) = self.gone.try_recv() {
            match gone {
                Gone::State(name) => self.forget(&name),
                Gone::Page(name) => drop(self.pages.remove(&name)),
            }
        }
    }

    /// The longest kept position at most `most` tokens long that seems to be a prefix of `keys`.
    pub(crate) fn find(&self, namespace: &str, keys: &[u64], most: usize) -> Option<usize> {
        let mut chain = Chain::new(&self.digest, namespace);
        let mut at = 0;
        let mut best = None;
        for &position in self.positions.keys().take_while(|&&position| position <= most) {
            chain = chain.extend(&keys[at..position]);
            at = position;
            if self.states.contains_key(&chain.name("state")) {
                best = Some(position);
            }
        }
        best
    }

    /// Hands an entry over to be written, or drops it where too much waits already; `wait` waits instead.
    pub(crate) fn write(
        &mut self,
        model: &mut dyn Model,
        namespace: &str,
        keys: &[u64],
        pages: &[u32],
        snapshot: SnapshotId,
        wait: bool,
    ) {
        self.catch_up();
        let name = self.state_name(namespace, keys);
        if self.states.contains_key(&name) {
            return;
        }
        if self.waiting.load(Ordering::Acquire) >= WRITE_BYTES_MAX {
            match wait {
                true => self.flush(),
                false => return,
            }
        }
        let Some(entry) = self.entry(model, name, namespace, keys, pages, snapshot) else { return };
        let (bytes, name, position) = (entry.bytes(), entry.name.clone(), keys.len());
        let pages: Vec<String> = entry.pages.iter().map(|(page, _)| page.clone()).collect();
        self.waiting.fetch_add(bytes, Ordering::AcqRel);
        let sent = match wait {
            true => self.work.send(Work::Write(entry)).is_ok(),
            false => self.work.try_send(Work::Write(entry)).is_ok(),
        };
        if sent {
            self.enter(name, position);
            self.pages.extend(pages);
        } else {
            self.waiting.fetch_sub(bytes, Ordering::AcqRel);
        }
    }

    /// An entry as bytes, without the pages that the folder has.
    fn entry(
        &self,
        model: &mut dyn Model,
        name: String,
        namespace: &str,
        keys: &[u64],
        pages: &[u32],
        snapshot: SnapshotId,
    ) -> Option<Entry> {
        let mut chain = Chain::new(&self.digest, namespace);
        let mut new = Vec::new();
        for (page, keys) in pages.iter().zip(keys.chunks_exact(PAGE_TOKENS)) {
            chain = chain.extend(keys);
            let name = chain.name("page");
            if !self.pages.contains(&name) {
                new.push((name, model.export_page(*page).ok()?));
            }
        }
        let open = match pages.get(keys.len() / PAGE_TOKENS) {
            Some(&page) => model.export_page(page).ok()?,
            None => Vec::new(),
        };
        let state = model.export_snapshot(snapshot).ok()?;
        Some(Entry { name, namespace: namespace.to_owned(), keys: keys.to_vec(), pages: new, open, state })
    }

    /// Asks for an entry, without its first `shared` pages. `None` where too much waits already. The answer
    /// is `None` where any part of it is not what it should be.
    pub(crate) fn read(
        &mut self,
        namespace: &str,
        keys: &[u64],
        shared: usize,
    ) -> Option<Receiver<Option<Payload>>> {
        self.catch_up();
        let name = self.state_name(namespace, keys);
        let wanted = Wanted { name, namespace: namespace.to_owned(), keys: keys.to_vec(), shared };
        let (answer, answered) = channel();
        self.work.try_send(Work::Read(wanted, answer)).ok()?;
        Some(answered)
    }

    /// An entry could not be read.
    pub(crate) fn lost(&mut self, namespace: &str, keys: &[u64]) {
        self.forget(&self.state_name(namespace, keys));
    }

    /// Waits until everything handed over is on disk.
    pub(crate) fn flush(&mut self) {
        let (done, finished) = channel();
        if self.work.send(Work::Flush(done)).is_ok() {
            // An error means that the thread is gone, and with it all there was to wait for.
            let _ = finished.recv();
        }
        self.catch_up();
    }
}
