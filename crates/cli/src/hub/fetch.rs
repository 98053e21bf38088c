//! One file from a hub into a folder.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sha1::Sha1;
use sha2::{Digest as _, Sha256};
use ureq::Body;
use ureq::http::header::CONTENT_RANGE;
use ureq::http::{Response, StatusCode};

use super::listing::Digest;
use super::{Hub, Remote, Trouble, broken, nonsense, stopped, tag};
use crate::error::{Exit, Failure, Result};

/// Bytes between two looks at everything else.
const PIECE: usize = 1 << 20;
/// Longest journal, bytes.
const JOURNAL_MAX: u64 = 4 << 10;

/// Where files of a model go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Folder<'a> {
    /// `owner/name`.
    pub(crate) model: &'a str,
    /// 40 hexadecimal digits.
    pub(crate) commit: &'a str,
    /// The folder.
    pub(crate) dir: &'a Path,
}

/// Brings a file. Until it is whole and right it lies beside its name, as `NAME.partial`, with a journal
/// `NAME.partial.etag` that holds the hub's tag of what was begun.
pub(crate) struct Fetch<'a> {
    hub: &'a Hub,
    remote: &'a Remote,
    url: String,
    path: PathBuf,
    partial: PathBuf,
    journal: PathBuf,
    /// Bytes of all files that are there.
    done: &'a AtomicU64,
    stop: &'a AtomicBool,
}

/// The two kinds of digest.
enum Hash {
    Sha256(Sha256),
    Blob(Sha1),
}

impl Hash {
    fn new(remote: &Remote) -> Self {
        match remote.digest {
            Digest::Sha256(_) => Self::Sha256(Sha256::new()),
            Digest::Blob(_) => Self::Blob(Sha1::new().chain_update(format!("blob {}\0", remote.bytes))),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hash) => hash.update(bytes),
            Self::Blob(hash) => hash.update(bytes),
        }
    }

    /// Name of the digest, and its value here and there.
    fn compare(self, digest: &Digest) -> (&'static str, String, &str) {
        match (self, digest) {
            (Self::Sha256(hash), Digest::Sha256(there) | Digest::Blob(there)) => {
                ("SHA-256", crate::table::hex(&hash.finalize()), there)
            }
            (Self::Blob(hash), Digest::Sha256(there) | Digest::Blob(there)) => {
                ("git blob", crate::table::hex(&hash.finalize()), there)
            }
        }
    }
}

/// What is there of a file.
struct Begun {
    file: File,
    length: u64,
    /// The longest it has been.
    furthest: u64,
    hash: Hash,
    tag: Option<String>,
}

impl<'a> Fetch<'a> {
    pub(crate) fn new(
        hub: &'a Hub,
        folder: Folder<'_>,
        remote: &'a Remote,
        done: &'a AtomicU64,
        stop: &'a AtomicBool,
    ) -> Self {
        let beside = |end: &str| folder.dir.join(format!("{}{end}", remote.name));
        Self {
            hub,
            remote,
            url: hub.address(folder.model, folder.commit, &remote.name),
            path: beside(""),
            partial: beside(".partial"),
            journal: beside(".partial.etag"),
            done,
            stop,
        }
    }

    /// Bytes that an earlier run left, or the whole length.
    pub(crate) fn there(&self) -> u64 {
        let length = |path: &Path| fs::metadata(path).ok().map(|meta| meta.len());
        let there = length(&self.path).or_else(|| length(&self.partial)).unwrap_or(0);
        there.min(self.remote.bytes)
    }

    /// Brings the file; returns how many bytes came over the network.
    pub(crate) fn run(&self) -> Result<u64> {
        if self.path.exists() {
            // It got its name when it was whole.
            self.done.fetch_add(self.remote.bytes, Ordering::Relaxed);
            return Ok(0);
        }
        let mut begun = self.begin()?;
        let mut fetched = 0;
        // What an earlier run left may be damaged: one full fetch decides.
        let mut may_restart = true;
        loop {
            if begun.length < self.remote.bytes {
                self.hub.persist(self.stop, &|_| {}, |is_further| {
                    self.more(&mut begun, &mut fetched, is_further)
                })?;
            }
            let hash = std::mem::replace(&mut begun.hash, Hash::new(self.remote));
            let (kind, here, there) = hash.compare(&self.remote.digest);
            if here == there {
                break;
            }
            self.restart(&mut begun)?;
            if !std::mem::take(&mut may_restart) {
                let message = format!("{}: {kind} is {here}, the hub says {there}", self.remote.name);
                return Err(Failure::new(Exit::Network, message)
                    .hint("the hub or something on the way changes the file; the same command tries again"));
            }
        }
        let named = begun.file.sync_all().and_then(|()| fs::rename(&self.partial, &self.path));
        named.map_err(|error| Failure::file(&self.path, &error))?;
        // Nothing depends on a journal that stays.
        let _ = fs::remove_file(&self.journal);
        Ok(fetched)
    }

    /// Opens what is there and hashes it.
    fn begin(&self) -> Result<Begun> {
        let failed = |error: io::Error| Failure::file(&self.partial, &error);
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&self.partial);
        let mut begun = Begun {
            file: open.map_err(failed)?,
            length: 0,
            furthest: 0,
            hash: Hash::new(self.remote),
            tag: journal(&self.journal),
        };
        let mut piece = vec![0; PIECE];
        loop {
            stopped(self.stop)?;
            let count = begun.file.read(&mut piece).map_err(failed)?;
            if count == 0 {
                return Ok(begun);
            }
            if begun.length + count as u64 > self.remote.bytes {
                self.restart(&mut begun)?;
                return Ok(begun);
            }
            begun.length += count as u64;
            begun.hash.update(&piece[..count]);
            self.done.fetch_add(count as u64, Ordering::Relaxed);
        }
    }

    /// Forgets what is there.
    fn restart(&self, begun: &mut Begun) -> Result {
        let failed = |error: io::Error| Failure::file(&self.partial, &error);
        let counted = begun.length.min(self.remote.bytes);
        begun.file.set_len(0).and_then(|()| begun.file.seek(SeekFrom::Start(0))).map_err(failed)?;
        self.done.fetch_sub(counted.min(self.done.load(Ordering::Relaxed)), Ordering::Relaxed);
        (begun.length, begun.hash, begun.tag) = (0, Hash::new(self.remote), None);
        Ok(())
    }

    /// Asks for the rest and takes what comes.
    fn more(
        &self,
        begun: &mut Begun,
        fetched: &mut u64,
        is_further: &mut bool,
    ) -> std::result::Result<(), Trouble> {
        stopped(self.stop)?;
        let from = (begun.length > 0).then_some((begun.length, begun.tag.as_deref()));
        let response = match self.hub.get(&self.url, from) {
            Err(Trouble::Again { why, after }) if why.ends_with("status 416") => {
                self.restart(begun)?;
                return Err(Trouble::Again { why, after });
            }
            other => other?,
        };
        self.place(&response, begun)?;
        let mut reader = response.into_body().into_reader();
        let mut piece = vec![0; PIECE];
        loop {
            stopped(self.stop)?;
            let count = reader.read(&mut piece).map_err(|error| broken(self.hub.host(), error.into()))?;
            if count == 0 {
                break;
            }
            if begun.length + count as u64 > self.remote.bytes {
                let message = format!("{}: longer than the {} bytes it has", self.url, self.remote.bytes);
                self.restart(begun)?;
                return Err(nonsense(message).into());
            }
            begun.file.write_all(&piece[..count]).map_err(|error| self.unwritten(&error))?;
            begun.hash.update(&piece[..count]);
            begun.length += count as u64;
            self.done.fetch_add(count as u64, Ordering::Relaxed);
            *fetched += count as u64;
            // A hub that breaks off at the same place again and again gets no further.
            *is_further |= begun.length > begun.furthest;
            begun.furthest = begun.furthest.max(begun.length);
        }
        match begun.length == self.remote.bytes {
            true => Ok(()),
            false => {
                let why =
                    format!("{}: ended after {} of {} bytes", self.url, begun.length, self.remote.bytes);
                Err(Trouble::Again { why, after: None })
            }
        }
    }

    /// Makes sure that what comes follows what is there: a hub may ignore the range, or have another file by
    /// now, and then all is fetched anew.
    fn place(&self, response: &Response<Body>, begun: &mut Begun) -> std::result::Result<(), Trouble> {
        let tag = tag(response);
        let is_other = begun.tag.is_some() && tag != begun.tag;
        if response.status() == StatusCode::PARTIAL_CONTENT {
            let range = response.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok());
            let wanted = format!("bytes {}-{}/{}", begun.length, self.remote.bytes - 1, self.remote.bytes);
            if is_other || range != Some(&wanted) {
                let range = range.unwrap_or("none").to_owned();
                self.restart(begun)?;
                let why = format!("{}: range {range} for {wanted}, or another file", self.url);
                return Err(Trouble::Again { why, after: None });
            }
        } else if begun.length > 0 {
            self.restart(begun)?;
        }
        if begun.length == 0 {
            begun.tag = tag;
            let written = match &begun.tag {
                Some(tag) => fs::write(&self.journal, tag),
                None => Ok(()),
            };
            written.map_err(|error| self.unwritten(&error))?;
        }
        Ok(())
    }

    fn unwritten(&self, error: &io::Error) -> Failure {
        let failure = Failure::file(&self.partial, error);
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                failure.hint("make room and run the same command: it goes on from here")
            }
            _ => failure,
        }
    }
}

/// The tag in a journal. A journal that cannot be read says nothing.
fn journal(path: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(JOURNAL_MAX).read_to_string(&mut text).ok()?;
    Some(text).filter(|text| !text.is_empty() && text.bytes().all(|byte| (b' '..=b'~').contains(&byte)))
}
