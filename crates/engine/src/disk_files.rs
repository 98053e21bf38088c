//! The files of the disk tier. All of this runs on the tier's thread.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, DirEntry, File, Metadata};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::disk::DiskSettings;
use crate::disk_format::{Chain, Head, Kind, State, file_bytes, is_foreign, named, read_file};

/// The folder is looked over after this part of its limit was written: others may write into it as well.
const LOOK_SHARE: u64 = 16;

/// An entry to write.
#[derive(Clone)]
pub(crate) struct Entry {
    /// Names its state file.
    pub(crate) chain: Chain,
    pub(crate) namespace: String,
    pub(crate) keys: Vec<u64>,
    /// Full pages that the folder does not have.
    pub(crate) pages: Vec<(Chain, Vec<u8>)>,
    /// The partly filled page; empty if there is none.
    pub(crate) open: Vec<u8>,
    /// The snapshot.
    pub(crate) state: Vec<u8>,
}

impl Entry {
    pub(crate) fn bytes(&self) -> u64 {
        let pages: usize = self.pages.iter().map(|(_, page)| page.len()).sum();
        (pages + self.open.len() + self.state.len() + 8 * self.keys.len()) as u64
    }
}

/// An entry to read.
pub(crate) struct Wanted {
    pub(crate) chain: Chain,
    pub(crate) namespace: String,
    pub(crate) keys: Vec<u64>,
    /// Leading pages that nobody needs.
    pub(crate) shared: usize,
}

/// An entry that was read.
#[derive(Debug)]
pub(crate) struct Payload {
    /// Full pages behind the shared ones.
    pub(crate) pages: Vec<Vec<u8>>,
    pub(crate) open: Vec<u8>,
    pub(crate) state: Vec<u8>,
}

/// What the engine's index of the folder must hear.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// A state file is not there any more, or never came.
    StateGone(Chain),
    /// The same of a page.
    PageGone(Chain),
    /// A state of another server was found: its position.
    StateFound(Chain, usize),
    /// A page of another server was found.
    PageFound(Chain),
    /// A file could not be written.
    Failed(ErrorKind),
}

/// A state file.
#[derive(Debug)]
struct Known {
    /// When it was last of use, larger is later.
    age: u64,
    bytes: u64,
    pages: Box<[Chain]>,
}

/// A page file.
#[derive(Debug, Default)]
struct Page {
    /// Bytes of the file; 0: it is not there.
    bytes: u64,
    /// States that need it.
    users: usize,
}

/// A file of the folder.
#[derive(Debug)]
struct Found {
    path: PathBuf,
    chain: Chain,
    kind: Kind,
    about: Metadata,
}

/// The folder.
#[derive(Debug)]
pub(crate) struct Files {
    settings: DiskSettings,
    states: BTreeMap<Chain, Known>,
    pages: BTreeMap<Chain, Page>,
    /// Of all files in the index.
    bytes: u64,
    /// Bytes written since the folder was looked over.
    unseen: u64,
    age: u64,
    /// What is to be told.
    news: Vec<News>,
}

impl Files {
    /// Opens a folder and lists what it holds. Files of its own that are of no use are removed; all others,
    /// those of another digest among them, are let alone and do not count.
    pub(crate) fn open(settings: DiskSettings) -> std::io::Result<(Self, Vec<News>)> {
        make_folder(&settings.folder)?;
        let (states, pages) = (BTreeMap::new(), BTreeMap::new());
        let mut files = Self { settings, states, pages, bytes: 0, unseen: 0, age: 0, news: Vec::new() };
        // A folder that takes no files is found out now, not when the first prompt is lost. One that is full
        // now may have room later.
        match write_new(&files.path(Chain::new(&files.settings.digest, ""), Kind::Partial), &[0]) {
            Err(error) if error.kind() == ErrorKind::StorageFull => {
                files.news.push(News::Failed(error.kind()))
            }
            tried => tried?,
        }
        files.look()?;
        let strays: Vec<Found> = files.found()?.filter(|found| files.is_stray(found)).collect();
        for Found { path, chain, kind, .. } in strays {
            remove(&path);
            if kind == Kind::Page && files.drop_page(chain) {
                files.pages.remove(&chain);
                files.news.retain(|new| *new != News::PageFound(chain));
            }
        }
        let news = std::mem::take(&mut files.news);
        Ok((files, news))
    }

    /// Whether a file is of no use: cut off, or a page that no state needs.
    fn is_stray(&self, found: &Found) -> bool {
        match found.kind {
            Kind::Partial => true,
            Kind::State => !self.states.contains_key(&found.chain),
            Kind::Page => self.pages.get(&found.chain).is_none_or(|page| page.users == 0),
        }
    }

    /// The files that a tier of this digest could have written.
    fn found(&self) -> std::io::Result<impl Iterator<Item = Found> + use<>> {
        let digest = self.settings.digest;
        let one = move |file: std::io::Result<DirEntry>| {
            // One that went meanwhile is not there.
            let file = file.ok()?;
            let (about, path) = (file.metadata().ok()?, file.path());
            let (chain, kind) = named(&path).filter(|_| about.is_file())?;
            let is_own = kind == Kind::Partial || !is_foreign(&path, &digest);
            is_own.then_some(Found { path, chain, kind, about })
        };
        Ok(fs::read_dir(&self.settings.folder)?.filter_map(one))
    }

    /// Looks the folder over: takes in what others wrote, and lets go of what they removed.
    fn look(&mut self) -> std::io::Result<()> {
        let (mut states, mut pages) = (Vec::new(), BTreeMap::new());
        for Found { path, chain, kind, about } in self.found()? {
            match kind {
                Kind::State => states.push((about.modified()?, chain, path, about.len())),
                Kind::Page => drop(pages.insert(chain, about.len())),
                Kind::Partial => {}
            }
        }
        states.sort();
        let there: BTreeSet<Chain> = states.iter().map(|(_, chain, ..)| *chain).collect();
        for (_, chain, path, bytes) in states {
            let digest = &self.settings.digest;
            if self.states.contains_key(&chain) {
                continue;
            }
            if let Some(head) = Head::read(&path, digest, bytes).filter(|head| head.chain(digest) == chain) {
                let needed = head.pages(digest).collect();
                self.enter(chain, bytes, needed);
                self.news.push(News::StateFound(chain, head.keys.len()));
            }
        }
        self.look_at_pages(pages);
        // Last, so that no page goes that a new state needs.
        let gone: Vec<Chain> = self.states.keys().filter(|chain| !there.contains(chain)).copied().collect();
        gone.into_iter().for_each(|chain| self.forget(chain));
        self.unseen = 0;
        Ok(())
    }

    /// Compares the index with the pages that are there, and their bytes.
    fn look_at_pages(&mut self, mut found: BTreeMap<Chain, u64>) {
        for (&chain, page) in &mut self.pages {
            let bytes = found.remove(&chain).unwrap_or(0);
            match (page.bytes, bytes) {
                (0, 1..) => self.news.push(News::PageFound(chain)),
                (1.., 0) => self.news.push(News::PageGone(chain)),
                _ => {}
            }
            self.bytes = self.bytes - page.bytes + bytes;
            page.bytes = bytes;
        }
        for (chain, bytes) in found {
            self.pages.insert(chain, Page { bytes, users: 0 });
            self.bytes += bytes;
            self.news.push(News::PageFound(chain));
        }
        self.pages.retain(|_, page| page.bytes > 0 || page.users > 0);
    }

    fn enter(&mut self, chain: Chain, bytes: u64, pages: Box<[Chain]>) {
        self.age += 1;
        pages.iter().for_each(|page| self.pages.entry(*page).or_default().users += 1);
        self.bytes += bytes;
        if let Some(before) = self.states.insert(chain, Known { age: self.age, bytes, pages }) {
            self.bytes -= before.bytes;
            self.release(&before.pages);
        }
    }

    /// Writes an entry, then removes what no longer fits. Failures cost later speed only, so they are not
    /// errors.
    pub(crate) fn write(&mut self, entry: Entry) -> Vec<News> {
        let Entry { chain, namespace, keys, pages, open, state } = entry;
        let written =
            pages.iter().try_for_each(|(page, bytes)| self.write_page(*page, bytes)).and_then(|()| {
                let head = Head { namespace, keys };
                let needed = head.pages(&self.settings.digest).collect();
                let payload = State { head, state, open }.bytes();
                let bytes = self.write_file(chain, Kind::State, &payload)?;
                self.enter(chain, bytes, needed);
                Ok(())
            });
        if let Err(error) = written {
            for (page, _) in pages {
                self.pages.entry(page).or_default().users += 1;
                self.release(&[page]);
            }
            self.news.extend([News::Failed(error.kind()), News::StateGone(chain)]);
        }
        self.keep_limit();
        std::mem::take(&mut self.news)
    }

    fn write_page(&mut self, chain: Chain, payload: &[u8]) -> std::io::Result<()> {
        if self.pages.get(&chain).is_some_and(|page| page.bytes > 0) {
            return Ok(());
        }
        // Another server may have written it.
        let bytes = match fs::metadata(self.path(chain, Kind::Page)) {
            Ok(about) => about.len(),
            Err(_) => self.write_file(chain, Kind::Page, payload)?,
        };
        self.pages.entry(chain).or_default().bytes = bytes;
        self.bytes += bytes;
        Ok(())
    }

    /// Reads an entry. Where a part of it is not what it should be the entry and that part are removed, so
    /// that they can be written again: those files.
    pub(crate) fn read(&mut self, wanted: &Wanted) -> Result<Payload, Vec<News>> {
        match self.read_parts(wanted) {
            Ok(payload) => {
                self.age += 1;
                if let Some(known) = self.states.get_mut(&wanted.chain) {
                    known.age = self.age;
                }
                Ok(payload)
            }
            Err(page) => {
                self.news.push(News::StateGone(wanted.chain));
                let page = page.filter(|page| self.drop_page(*page));
                self.news.extend(page.map(News::PageGone));
                remove(&self.path(wanted.chain, Kind::State));
                self.forget(wanted.chain);
                Err(std::mem::take(&mut self.news))
            }
        }
    }

    /// The parts of an entry; an error names the page that is wrong, or none where the state is.
    fn read_parts(&self, wanted: &Wanted) -> Result<Payload, Option<Chain>> {
        let digest = &self.settings.digest;
        let bytes = read_file(&self.path(wanted.chain, Kind::State), digest).ok_or(None)?;
        let State { head, state, open } = State::parse(&bytes).ok_or(None)?;
        if head.namespace != wanted.namespace || head.keys != wanted.keys {
            return Err(None);
        }
        let mut pages = Vec::new();
        for page in head.pages(digest).skip(wanted.shared) {
            pages.push(read_file(&self.path(page, Kind::Page), digest).ok_or(Some(page))?);
        }
        Ok(Payload { pages, open, state })
    }

    fn path(&self, chain: Chain, kind: Kind) -> PathBuf {
        self.settings.folder.join(chain.name(kind))
    }

    /// Takes a state out of the index, and removes the pages that no other needs.
    fn forget(&mut self, chain: Chain) {
        let Some(known) = self.states.remove(&chain) else { return };
        self.bytes -= known.bytes;
        self.news.push(News::StateGone(chain));
        self.release(&known.pages);
    }

    fn release(&mut self, pages: &[Chain]) {
        for &chain in pages {
            let Some(page) = self.pages.get_mut(&chain) else { continue };
            page.users -= 1;
            if page.users > 0 {
                continue;
            }
            if self.drop_page(chain) {
                self.news.push(News::PageGone(chain));
                self.pages.remove(&chain);
            }
        }
    }

    /// Removes a page's file; false if it is still there.
    fn drop_page(&mut self, chain: Chain) -> bool {
        let is_gone = remove(&self.path(chain, Kind::Page));
        if let Some(page) = self.pages.get_mut(&chain).filter(|_| is_gone) {
            self.bytes -= page.bytes;
            page.bytes = 0;
        }
        is_gone
    }

    /// Removes the oldest entry, and the pages that no entry left needs. False: there is none.
    fn evict(&mut self) -> bool {
        let oldest = self.states.iter().min_by_key(|(_, known)| known.age).map(|(chain, _)| *chain);
        let Some(oldest) = oldest else { return false };
        remove(&self.path(oldest, Kind::State));
        self.forget(oldest);
        true
    }

    fn keep_limit(&mut self) {
        if self.unseen > self.settings.bytes_max / LOOK_SHARE
            && let Err(error) = self.look()
        {
            self.news.push(News::Failed(error.kind()));
        }
        while self.bytes > self.settings.bytes_max && self.evict() {}
    }

    /// Writes a file under another name and renames it when it is whole: its bytes. Nothing is left of one
    /// that could not be written. Where the disk is full older entries make room.
    fn write_file(&mut self, chain: Chain, kind: Kind, payload: &[u8]) -> std::io::Result<u64> {
        let bytes = file_bytes(&self.settings.digest, payload);
        let (partial, path) = (self.path(chain, Kind::Partial), self.path(chain, kind));
        let write = || write_new(&partial, &bytes).and_then(|()| fs::rename(&partial, &path));
        let mut written = write();
        if matches!(&written, Err(error) if error.kind() == ErrorKind::NotFound) {
            // The folder went, or another server that started took the partial file for a stray.
            written = make_folder(&self.settings.folder).and_then(|()| write());
        }
        while matches!(&written, Err(error) if error.kind() == ErrorKind::StorageFull) {
            remove(&partial);
            if !self.evict() {
                break;
            }
            written = write();
        }
        if let Err(error) = written {
            remove(&partial);
            return Err(error);
        }
        self.unseen += bytes.len() as u64;
        Ok(bytes.len() as u64)
    }
}

/// Makes a folder for its owner alone, if it is not there.
fn make_folder(folder: &Path) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Writes a file; keys are tokens of prompts: for the owner alone.
fn write_new(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)
}

/// Removes a file; false if it is still there.
fn remove(path: &Path) -> bool {
    fs::remove_file(path).map_or_else(|error| error.kind() == ErrorKind::NotFound, |()| true)
}

#[cfg(test)]
mod tests;
