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
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use model::{Model, PAGE_TOKENS, SnapshotId};

use crate::disk_files::{Entry, Files, News, Payload, Wanted};
use crate::disk_format::Chain;

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
    /// State files, those on their way among them: position.
    states: BTreeMap<Chain, usize>,
    /// Page files, those on their way among them.
    pages: HashSet<Chain>,
    /// Files that could not be written, and why the last could not.
    failures: u64,
    failure: Option<ErrorKind>,
    work: SyncSender<Work>,
    news: Receiver<News>,
    /// Bytes that wait to be written.
    waiting: Arc<AtomicU64>,
}

impl DiskTier {
    /// Opens a folder, lists what it holds and starts the thread, which ends with the tier.
    pub(crate) fn open(settings: DiskSettings) -> std::io::Result<Self> {
        let digest = settings.digest;
        let (mut files, found) = Files::open(settings)?;
        let (work, received) = sync_channel(WORK_MAX);
        let (report, news) = channel();
        let waiting = Arc::new(AtomicU64::new(0));
        let written = waiting.clone();
        std::thread::Builder::new().name("disk tier".into()).spawn(move || {
            for work in received {
                match work {
                    Work::Write(entry) => {
                        let bytes = entry.bytes();
                        // Nobody is left to tell where the engine has ended.
                        files.write(entry).into_iter().for_each(|new| drop(report.send(new)));
                        written.fetch_sub(bytes, Ordering::AcqRel);
                    }
                    Work::Read(wanted, answer) => {
                        let read = files.read(&wanted).map_err(|news| {
                            news.into_iter().for_each(|new| drop(report.send(new)));
                        });
                        drop(answer.send(read.ok()));
                    }
                    Work::Flush(done) => drop(done.send(())),
                }
            }
        })?;
        let (positions, states, pages) = (BTreeMap::new(), BTreeMap::new(), HashSet::new());
        let (failures, failure) = (0, None);
        let mut tier = Self { digest, positions, states, pages, failures, failure, work, news, waiting };
        found.into_iter().for_each(|new| tier.hear(new));
        Ok(tier)
    }

    /// Files that could not be written, and why the last could not.
    pub(crate) fn failures(&self) -> (u64, Option<ErrorKind>) {
        (self.failures, self.failure)
    }

    fn chain(&self, namespace: &str, keys: &[u64]) -> Chain {
        Chain::new(&self.digest, namespace).extend(keys)
    }

    fn enter(&mut self, chain: Chain, position: usize) {
        if self.states.insert(chain, position).is_none() {
            *self.positions.entry(position).or_default() += 1;
        }
    }

    fn forget(&mut self, chain: Chain) {
        let Some(position) = self.states.remove(&chain) else { return };
        let left = self.positions.get_mut(&position).expect("counted when it was entered");
        *left -= 1;
        if *left == 0 {
            self.positions.remove(&position);
        }
    }

    fn hear(&mut self, new: News) {
        match new {
            News::StateGone(chain) => self.forget(chain),
            News::PageGone(chain) => drop(self.pages.remove(&chain)),
            News::StateFound(chain, position) => self.enter(chain, position),
            News::PageFound(chain) => drop(self.pages.insert(chain)),
            News::Failed(kind) => {
                self.failures += 1;
                self.failure = Some(kind);
            }
        }
    }

    /// Takes note of what the thread did and found.
    fn catch_up(&mut self) {
        while let Ok(new) = self.news.try_recv() {
            self.hear(new);
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
            if self.states.contains_key(&chain) {
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
        let chain = self.chain(namespace, keys);
        if self.states.contains_key(&chain) {
            return;
        }
        if self.waiting.load(Ordering::Acquire) >= WRITE_BYTES_MAX {
            match wait {
                true => self.flush(),
                false => return,
            }
        }
        let Some(entry) = self.entry(model, namespace, keys, pages, snapshot) else { return };
        let bytes = entry.bytes();
        let pages: Vec<Chain> = entry.pages.iter().map(|(page, _)| *page).collect();
        self.waiting.fetch_add(bytes, Ordering::AcqRel);
        let sent = match wait {
            true => self.work.send(Work::Write(entry)).is_ok(),
            false => self.work.try_send(Work::Write(entry)).is_ok(),
        };
        if sent {
            self.enter(chain, keys.len());
            self.pages.extend(pages);
        } else {
            self.waiting.fetch_sub(bytes, Ordering::AcqRel);
        }
    }

    /// An entry as bytes, without the pages that the folder has.
    fn entry(
        &self,
        model: &mut dyn Model,
        namespace: &str,
        keys: &[u64],
        pages: &[u32],
        snapshot: SnapshotId,
    ) -> Option<Entry> {
        let mut chain = Chain::new(&self.digest, namespace);
        let mut new = Vec::new();
        for (page, keys) in pages.iter().zip(keys.chunks_exact(PAGE_TOKENS)) {
            chain = chain.extend(keys);
            if !self.pages.contains(&chain) {
                new.push((chain, model.export_page(*page).ok()?));
            }
        }
        let open = match pages.get(keys.len() / PAGE_TOKENS) {
            Some(&page) => model.export_page(page).ok()?,
            None => Vec::new(),
        };
        let state = model.export_snapshot(snapshot).ok()?;
        let chain = self.chain(namespace, keys);
        Some(Entry { chain, namespace: namespace.to_owned(), keys: keys.to_vec(), pages: new, open, state })
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
        let chain = self.chain(namespace, keys);
        let wanted = Wanted { chain, namespace: namespace.to_owned(), keys: keys.to_vec(), shared };
        let (answer, answered) = channel();
        self.work.try_send(Work::Read(wanted, answer)).ok()?;
        Some(answered)
    }

    /// An entry could not be read.
    pub(crate) fn lost(&mut self, namespace: &str, keys: &[u64]) {
        self.forget(self.chain(namespace, keys));
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
