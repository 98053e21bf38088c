//! The files of the disk tier. All of this runs on the tier's thread.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, DirBuilder, File};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use model::PAGE_TOKENS;

use crate::disk::DiskSettings;

const MAGIC: &[u8; 8] = b"CLARYKV1";
const HEADER: usize = 8 + 32;
const CHECKSUM: usize = 16;
/// Hexadecimal digits of a chain in a file's name.
const NAME_LENGTH: usize = 32;
/// Kind of a file that is not whole yet.
const PARTIAL: &str = "partial";

/// A 128-bit chain over keys: two independent 64-bit chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Chain(u64, u64);

impl Chain {
    const START: Self = Self(0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344);

    /// The chain before the first key of a namespace, under a tier's digest.
    pub(crate) fn new(digest: &[u8; 32], namespace: &str) -> Self {
        digest.iter().copied().chain(namespace.bytes()).map(u64::from).fold(Self::START, Self::push)
    }

    fn push(self, key: u64) -> Self {
        Self(
            scramble(self.0 ^ key),
            scramble(self.1.rotate_left(7) ^ key.wrapping_mul(0xa409_3822_299f_31d1)),
        )
    }

    /// The chain behind these keys.
    pub(crate) fn extend(self, keys: &[u64]) -> Self {
        keys.iter().fold(self, |chain, &key| chain.push(key))
    }

    pub(crate) fn name(self, kind: &str) -> String {
        format!("{:016x}{:016x}.{kind}", self.0, self.1)
    }
}

fn scramble(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// An entry to write.
#[derive(Clone)]
pub(crate) struct Entry {
    /// Name of its state file.
    pub(crate) name: String,
    pub(crate) namespace: String,
    pub(crate) keys: Vec<u64>,
    /// Full pages that the folder does not have, by file name.
    pub(crate) pages: Vec<(String, Vec<u8>)>,
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
    pub(crate) name: String,
    pub(crate) namespace: String,
    pub(crate) keys: Vec<u64>,
    /// Leading pages that nobody needs.
    pub(crate) shared: usize,
}

/// An entry that was read.
pub(crate) struct Payload {
    /// Full pages behind the shared ones.
    pub(crate) pages: Vec<Vec<u8>>,
    pub(crate) open: Vec<u8>,
    pub(crate) state: Vec<u8>,
}

/// A file that is not there any more, or never came.
pub(crate) enum Gone {
    State(String),
    Page(String),
}

/// What a folder held when it was opened.
pub(crate) struct Listing {
    /// State files with their positions.
    pub(crate) states: Vec<(String, usize)>,
    pub(crate) pages: Vec<String>,
}

/// The folder.
pub(crate) struct Files {
    settings: DiskSettings,
    /// State files by name: position and age.
    states: BTreeMap<String, (usize, u64)>,
    bytes: u64,
    age: u64,
}

impl Files {
    /// Opens a folder and lists what it holds. Files of its own that are of no use are removed; all others,
    /// those of another digest among them, are let alone and do not count.
    pub(crate) fn open(settings: DiskSettings) -> std::io::Result<(Self, Listing)> {
        DirBuilder::new().recursive(true).mode(0o700).create(&settings.folder)?;
        let mut files = Self { settings, states: BTreeMap::new(), bytes: 0, age: 0 };
        let (mut states, mut pages) = (Vec::new(), Vec::new());
        for file in fs::read_dir(&files.settings.folder)? {
            let file = file?;
            let (about, path) = (file.metadata()?, file.path());
            let Some((name, kind)) = named(&path).filter(|_| about.is_file()) else { continue };
            match kind {
                PARTIAL => {
                    fs::remove_file(&path)?;
                    continue;
                }
                _ if is_foreign(&path, &files.settings.digest) => continue,
                "state" => states.push((about.modified()?, name.to_owned())),
                _ => pages.push(name.to_owned()),
            }
            files.bytes += about.len();
        }
        states.sort();
        let mut listing = Listing { states: Vec::new(), pages: Vec::new() };
        let mut needed = HashSet::new();
        for (_, name) in states {
            let Some(state) = files.state(&name) else {
                files.remove(&name);
                continue;
            };
            needed.extend(state.pages(&files.settings.digest));
            files.enter(name.clone(), state.keys.len());
            listing.states.push((name, state.keys.len()));
        }
        for page in pages {
            match needed.contains(&page) {
                true => listing.pages.push(page),
                false => drop(files.remove(&page)),
            }
        }
        Ok((files, listing))
    }

    fn enter(&mut self, name: String, position: usize) {
        self.age += 1;
        self.states.insert(name, (position, self.age));
    }

    /// Writes an entry, then removes what no longer fits. Failures cost later speed only, so they are not
    /// errors.
    pub(crate) fn write(&mut self, entry: Entry) -> Vec<Gone> {
        let Entry { name, namespace, keys, pages, open, state } = entry;
        let mut pages = pages.into_iter();
        for (page, bytes) in pages.by_ref() {
            let path = self.settings.folder.join(&page);
            if !path.exists() && self.write_file(&path, &bytes).is_err() {
                let rest = std::iter::once(page).chain(pages.map(|(page, _)| page)).map(Gone::Page);
                return std::iter::once(Gone::State(name)).chain(rest).collect();
            }
        }
        let position = keys.len();
        let bytes = State { namespace, keys, state, open }.bytes();
        let path = self.settings.folder.join(&name);
        if self.write_file(&path, &bytes).is_err() {
            return vec![Gone::State(name)];
        }
        self.enter(name, position);
        self.keep_limit()
    }

    /// Reads an entry. Where a part of it is not what it should be the entry and that part are removed, so
    /// that they can be written again: those files.
    pub(crate) fn read(&mut self, wanted: &Wanted) -> Result<Payload, Vec<Gone>> {
        match self.read_parts(wanted) {
            Ok(payload) => {
                self.enter(wanted.name.clone(), wanted.keys.len());
                Ok(payload)
            }
            Err(page) => {
                self.forget(&wanted.name);
                let page = page.filter(|page| self.remove(page)).map(Gone::Page);
                Err(std::iter::once(Gone::State(wanted.name.clone())).chain(page).collect())
            }
        }
    }

    /// The parts of an entry; an error names the page that is wrong, or none where the state is.
    fn read_parts(&self, wanted: &Wanted) -> Result<Payload, Option<String>> {
        let state = self.state(&wanted.name).ok_or(None)?;
        if state.namespace != wanted.namespace || state.keys != wanted.keys {
            return Err(None);
        }
        let mut pages = Vec::new();
        for page in state.pages(&self.settings.digest).skip(wanted.shared) {
            let bytes = read_file(&self.settings.folder.join(&page), &self.settings.digest);
            pages.push(bytes.ok_or(Some(page))?);
        }
        Ok(Payload { pages, open: state.open, state: state.state })
    }

    /// What a state file holds, if it is whole and ours.
    fn state(&self, name: &str) -> Option<State> {
        State::parse(&read_file(&self.settings.folder.join(name), &self.settings.digest)?)
    }

    fn forget(&mut self, name: &str) {
        // A file that cannot be removed is out of the index all the same.
        self.remove(name);
        self.states.remove(name);
    }

    /// Removes a file; false if it is still there.
    fn remove(&mut self, name: &str) -> bool {
        let path = self.settings.folder.join(name);
        let bytes = fs::metadata(&path).map_or(0, |about| about.len());
        let is_gone = fs::remove_file(&path).is_ok();
        if is_gone {
            self.bytes = self.bytes.saturating_sub(bytes);
        }
        is_gone
    }

    /// Removes the oldest entries, then the pages that no entry left needs, until the folder fits.
    fn keep_limit(&mut self) -> Vec<Gone> {
        let mut gone = Vec::new();
        while self.bytes > self.settings.bytes_max {
            let oldest = self.states.iter().min_by_key(|(_, (_, age))| *age).map(|(name, _)| name.clone());
            let Some(oldest) = oldest else { return gone };
            let pages = self.pages_of(&oldest);
            self.forget(&oldest);
            gone.push(Gone::State(oldest));
            let kept: Vec<String> = self.states.keys().flat_map(|name| self.pages_of(name)).collect();
            for page in pages.into_iter().filter(|page| !kept.contains(page)) {
                if self.remove(&page) {
                    gone.push(Gone::Page(page));
                }
            }
        }
        gone
    }

    fn pages_of(&self, state: &str) -> Vec<String> {
        self.state(state).map_or_else(Vec::new, |state| state.pages(&self.settings.digest).collect())
    }

    fn write_file(&mut self, path: &Path, payload: &[u8]) -> std::io::Result<()> {
        let mut bytes = Vec::with_capacity(HEADER + payload.len() + CHECKSUM);
        bytes.extend(MAGIC);
        bytes.extend(self.settings.digest);
        bytes.extend(payload);
        let sum = checksum(&bytes);
        bytes.extend(sum);
        let partial = path.with_extension(PARTIAL);
        // Keys are tokens of prompts: for the owner alone.
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
        file.write_all(&bytes)?;
        fs::rename(&partial, path)?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }
}

/// Name and kind of a file whose name this tier could have given it.
fn named(path: &Path) -> Option<(&str, &str)> {
    let (name, kind) = (path.file_name()?.to_str()?, path.extension()?.to_str()?);
    let stem = name.strip_suffix(kind)?.strip_suffix('.')?;
    let is_chain = stem.len() == NAME_LENGTH && stem.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_chain && ["state", "page", PARTIAL].contains(&kind)).then_some((name, kind))
}

/// Whether a file is one of a tier of another digest. One that is too short to tell is not.
fn is_foreign(path: &Path, digest: &[u8; 32]) -> bool {
    let mut header = [0; HEADER];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut header));
    read.is_ok() && header[8..] != digest[..]
}

/// The payload of a whole file of this digest.
fn read_file(path: &Path, digest: &[u8; 32]) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let body = bytes.len().checked_sub(CHECKSUM).filter(|&body| body >= HEADER)?;
    let whole = bytes[body..] == checksum(&bytes[..body]) && bytes.starts_with(MAGIC);
    if !whole || bytes[8..HEADER] != digest[..] {
        return None;
    }
    bytes.truncate(body);
    bytes.drain(..HEADER);
    Some(bytes)
}

fn checksum(bytes: &[u8]) -> [u8; CHECKSUM] {
    let words = bytes.chunks(8).map(|chunk| {
        let mut word = [0u8; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    let chain = words.fold(Chain::START.push(bytes.len() as u64), Chain::push);
    let mut sum = [0u8; CHECKSUM];
    sum[..8].copy_from_slice(&chain.0.to_le_bytes());
    sum[8..].copy_from_slice(&chain.1.to_le_bytes());
    sum
}

/// Payload of a state file: namespace, keys, snapshot, open page, each behind its length.
struct State {
    namespace: String,
    keys: Vec<u64>,
    state: Vec<u8>,
    open: Vec<u8>,
}

impl State {
    /// Names of its full pages.
    fn pages(&self, digest: &[u8; 32]) -> impl Iterator<Item = String> + '_ {
        let mut chain = Chain::new(digest, &self.namespace);
        self.keys.chunks_exact(PAGE_TOKENS).map(move |keys| {
            chain = chain.extend(keys);
            chain.name("page")
        })
    }

    fn bytes(&self) -> Vec<u8> {
        let keys: Vec<u8> = self.keys.iter().flat_map(|key| key.to_le_bytes()).collect();
        let mut bytes = Vec::new();
        for part in [self.namespace.as_bytes(), &keys, &self.state, &self.open] {
            bytes.extend((part.len() as u64).to_le_bytes());
            bytes.extend(part);
        }
        bytes
    }

    fn parse(mut bytes: &[u8]) -> Option<Self> {
        let mut part = || {
            let (length, rest) = bytes.split_first_chunk::<8>()?;
            let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
            let (part, rest) = rest.split_at_checked(length)?;
            bytes = rest;
            Some(part.to_vec())
        };
        let namespace = String::from_utf8(part()?).ok()?;
        let keys = part()?;
        let (state, open) = (part()?, part()?);
        let keys = keys.chunks_exact(8).map(|key| key.try_into().map(u64::from_le_bytes).ok());
        Some(Self { namespace, keys: keys.collect::<Option<_>>()?, state, open })
    }
}

#[cfg(test)]
mod tests;
