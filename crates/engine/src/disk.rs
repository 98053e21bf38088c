//! The cache's disk tier: entries that outlive memory and restarts.
//!
//! A folder of files, each a header, a payload and a checksum: `*.page` one K/V page, named by a hash of
//! everything up to the page's end, so that conversations share them; `*.state` one kept position (its keys,
//! snapshot and open page). A file that is torn, foreign, of another model or version, or whose keys are not
//! the prompt's is as good as absent. Files are written under another name and renamed when whole.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use model::{Model, PAGE_TOKENS, SnapshotId};

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

const MAGIC: &[u8; 8] = b"CLARYKV1";
const HEADER: usize = 8 + 32;
const CHECKSUM: usize = 16;

/// A 128-bit chain over keys: two independent 64-bit chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Chain(u64, u64);

impl Chain {
    fn new(namespace: &str) -> Self {
        let bytes = namespace.bytes().map(u64::from);
        bytes.fold(Self(0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344), Self::push)
    }

    fn push(self, key: u64) -> Self {
        Self(
            scramble(self.0 ^ key),
            scramble(self.1.rotate_left(7) ^ key.wrapping_mul(0xa409_3822_299f_31d1)),
        )
    }

    fn name(self, kind: &str) -> String {
        format!("{:016x}{:016x}.{kind}", self.0, self.1)
    }
}

fn scramble(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The tier.
#[derive(Debug)]
pub(crate) struct DiskTier {
    settings: DiskSettings,
    /// Kept positions: how many entries have this many tokens.
    positions: BTreeMap<usize, usize>,
    /// State files by name: position and age.
    states: BTreeMap<String, (usize, u64)>,
    bytes: u64,
    age: u64,
}

impl DiskTier {
    /// Opens a folder and lists what it holds.
    pub(crate) fn open(settings: DiskSettings) -> std::io::Result<Self> {
        fs::create_dir_all(&settings.folder)?;
        let mut tier =
            Self { settings, positions: BTreeMap::new(), states: BTreeMap::new(), bytes: 0, age: 0 };
        let mut files: Vec<(std::time::SystemTime, PathBuf)> = Vec::new();
        for file in fs::read_dir(&tier.settings.folder)? {
            let file = file?;
            let about = file.metadata()?;
            let path = file.path();
            if path.extension().is_some_and(|kind| kind == "partial") {
                fs::remove_file(&path)?;
            } else if about.is_file() {
                tier.bytes += about.len();
                files.push((about.modified()?, path));
            }
        }
        files.sort();
        for (_, path) in files.iter().filter(|(_, path)| path.extension().is_some_and(|kind| kind == "state"))
        {
            tier.list(path);
        }
        Ok(tier)
    }

    /// Enters a state file into the index, if it is one of ours.
    fn list(&mut self, path: &Path) {
        let name = path.file_name().and_then(|name| name.to_str());
        let keys = read_file(path, &self.settings.digest).and_then(|payload| State::parse(&payload));
        if let (Some(name), Some(state)) = (name, keys) {
            self.enter(name.to_owned(), state.keys.len());
        }
    }

    fn enter(&mut self, name: String, position: usize) {
        self.age += 1;
        if self.states.insert(name, (position, self.age)).is_none() {
            *self.positions.entry(position).or_default() += 1;
        }
    }

    /// The longest kept position at most `most` tokens long that seems to be a prefix of `keys`.
    pub(crate) fn find(&self, namespace: &str, keys: &[u64], most: usize) -> Option<usize> {
        let mut chain = Chain::new(namespace);
        let mut at = 0;
        let mut best = None;
        for &position in self.positions.keys().take_while(|&&position| position <= most) {
            chain = keys[at..position].iter().fold(chain, |chain, &key| chain.push(key));
            at = position;
            if self.states.contains_key(&chain.name("state")) {
                best = Some(position);
            }
        }
        best
    }

    /// Writes an entry. Failures cost later speed only, so they are not reported.
    pub(crate) fn write(
        &mut self,
        model: &mut dyn Model,
        namespace: &str,
        keys: &[u64],
        pages: &[u32],
        snapshot: SnapshotId,
    ) {
        let name = keys.iter().fold(Chain::new(namespace), |chain, &key| chain.push(key)).name("state");
        if self.states.contains_key(&name) {
            return;
        }
        let mut chain = Chain::new(namespace);
        for (page, keys) in pages.iter().zip(keys.chunks_exact(PAGE_TOKENS)) {
            chain = keys.iter().fold(chain, |chain, &key| chain.push(key));
            let path = self.settings.folder.join(chain.name("page"));
            if !path.exists() {
                let Ok(bytes) = model.export_page(*page) else { return };
                if self.write_file(&path, &bytes).is_err() {
                    return;
                }
            }
        }
        let open = pages.get(keys.len() / PAGE_TOKENS);
        let open = open.map_or(Ok(Vec::new()), |&page| model.export_page(page));
        let (Ok(open), Ok(state)) = (open, model.export_snapshot(snapshot)) else { return };
        let state = State { namespace: namespace.to_owned(), keys: keys.to_vec(), state, open };
        let path = self.settings.folder.join(&name);
        if self.write_file(&path, &state.bytes()).is_ok() {
            self.enter(name, keys.len());
            self.keep_limit();
        }
    }

    /// Reads an entry into a snapshot and pages, where the first `shared` pages are there already. False if
    /// any part of it is not what it should be.
    pub(crate) fn read(
        &mut self,
        model: &mut dyn Model,
        namespace: &str,
        keys: &[u64],
        pages: &[u32],
        shared: usize,
        snapshot: SnapshotId,
    ) -> bool {
        let name = keys.iter().fold(Chain::new(namespace), |chain, &key| chain.push(key)).name("state");
        let read = self.read_parts(model, namespace, keys, pages, shared, snapshot, &name);
        match read {
            Some(()) => self.enter(name, keys.len()),
            None => self.forget(&name),
        }
        read.is_some()
    }

    fn read_parts(
        &self,
        model: &mut dyn Model,
        namespace: &str,
        keys: &[u64],
        pages: &[u32],
        shared: usize,
        snapshot: SnapshotId,
        name: &str,
    ) -> Option<()> {
        let digest = &self.settings.digest;
        let state = State::parse(&read_file(&self.settings.folder.join(name), digest)?)?;
        if state.namespace != namespace || state.keys != keys {
            return None;
        }
        let mut chain = Chain::new(namespace);
        let mut targets = pages.iter();
        for (index, keys) in keys.chunks_exact(PAGE_TOKENS).enumerate() {
            chain = keys.iter().fold(chain, |chain, &key| chain.push(key));
            if index >= shared {
                let bytes = read_file(&self.settings.folder.join(chain.name("page")), digest)?;
                model.import_page(*targets.next()?, &bytes).ok()?;
            }
        }
        if let Some(&page) = targets.next() {
            model.import_page(page, &state.open).ok()?;
        }
        model.import_snapshot(snapshot, &state.state).ok()
    }

    fn forget(&mut self, name: &str) {
        let path = self.settings.folder.join(name);
        self.bytes = self.bytes.saturating_sub(fs::metadata(&path).map_or(0, |about| about.len()));
        // A file that cannot be removed is out of the index all the same.
        let _ = fs::remove_file(path);
        if let Some((position, _)) = self.states.remove(name) {
            let left = self.positions.get_mut(&position).expect("counted when it was entered");
            *left -= 1;
            if *left == 0 {
                self.positions.remove(&position);
            }
        }
    }

    /// Removes the oldest entries, then the pages that no entry left needs, until the folder fits.
    fn keep_limit(&mut self) {
        while self.bytes > self.settings.bytes_max {
            let oldest = self.states.iter().min_by_key(|(_, (_, age))| *age).map(|(name, _)| name.clone());
            let Some(oldest) = oldest else { return };
            let pages = self.pages_of(&oldest);
            self.forget(&oldest);
            let kept: Vec<String> = self.states.keys().flat_map(|name| self.pages_of(name)).collect();
            for page in pages.iter().filter(|page| !kept.contains(page)) {
                let path = self.settings.folder.join(page);
                let bytes = fs::metadata(&path).map_or(0, |about| about.len());
                if fs::remove_file(&path).is_ok() {
                    self.bytes = self.bytes.saturating_sub(bytes);
                }
            }
        }
    }

    fn pages_of(&self, state: &str) -> Vec<String> {
        let payload = read_file(&self.settings.folder.join(state), &self.settings.digest);
        let Some(state) = payload.and_then(|payload| State::parse(&payload)) else { return Vec::new() };
        let mut chain = Chain::new(&state.namespace);
        let pages = state.keys.chunks_exact(PAGE_TOKENS).map(|keys| {
            chain = keys.iter().fold(chain, |chain, &key| chain.push(key));
            chain.name("page")
        });
        pages.collect()
    }

    fn write_file(&mut self, path: &Path, payload: &[u8]) -> std::io::Result<()> {
        let mut bytes = Vec::with_capacity(HEADER + payload.len() + CHECKSUM);
        bytes.extend(MAGIC);
        bytes.extend(self.settings.digest);
        bytes.extend(payload);
        let sum = checksum(&bytes);
        bytes.extend(sum);
        let partial = path.with_extension("partial");
        fs::write(&partial, &bytes)?;
        fs::rename(&partial, path)?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }
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
    let chain = words.fold(Chain::new("checksum").push(bytes.len() as u64), Chain::push);
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
