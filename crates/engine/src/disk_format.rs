//! What the files of the disk tier hold: a header, a payload, a checksum.

use std::fs::{self, File};
use std::io::{BufReader, Read};
use std::path::Path;

use model::PAGE_TOKENS;

const MAGIC: &[u8; 8] = b"CLARYKV1";
const HEADER: usize = 8 + 32;
const CHECKSUM: usize = 16;
/// Hexadecimal digits of a chain in a file's name.
const NAME_LENGTH: usize = 32;

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

    /// Name of the file of this chain.
    pub(crate) fn name(self, kind: Kind) -> String {
        format!("{:016x}{:016x}.{}", self.0, self.1, kind.extension())
    }
}

fn scramble(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One kept position.
    State,
    /// One full K/V page.
    Page,
    /// Not whole yet.
    Partial,
}

impl Kind {
    pub(crate) fn extension(self) -> &'static str {
        match self {
            Self::State => "state",
            Self::Page => "page",
            Self::Partial => "partial",
        }
    }
}

/// Chain and kind of a file whose name this tier could have given it.
pub(crate) fn named(path: &Path) -> Option<(Chain, Kind)> {
    let (name, extension) = (path.file_name()?.to_str()?, path.extension()?.to_str()?);
    let kind =
        [Kind::State, Kind::Page, Kind::Partial].into_iter().find(|kind| kind.extension() == extension)?;
    let stem = name.strip_suffix(extension)?.strip_suffix('.')?;
    if stem.len() != NAME_LENGTH || !stem.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let half = |digits: &str| u64::from_str_radix(digits, 16).ok();
    let chain = Chain(half(&stem[..NAME_LENGTH / 2])?, half(&stem[NAME_LENGTH / 2..])?);
    // Upper-case digits are not this tier's.
    (chain.name(kind) == name).then_some((chain, kind))
}

/// Whether a file is one of a tier of another digest. One that is too short to tell is not.
pub(crate) fn is_foreign(path: &Path, digest: &[u8; 32]) -> bool {
    let mut header = [0; HEADER];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut header));
    read.is_ok() && header[8..] != digest[..]
}

/// A file of this payload.
pub(crate) fn file_bytes(digest: &[u8; 32], payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + payload.len() + CHECKSUM);
    bytes.extend(MAGIC);
    bytes.extend(digest);
    bytes.extend(payload);
    let sum = checksum(&bytes);
    bytes.extend(sum);
    bytes
}

/// The payload of a whole file of this digest.
pub(crate) fn read_file(path: &Path, digest: &[u8; 32]) -> Option<Vec<u8>> {
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

/// What a state file begins with: whose position it is.
pub(crate) struct Head {
    pub(crate) namespace: String,
    pub(crate) keys: Vec<u64>,
}

impl Head {
    /// Reads the beginning of a state file of `length` bytes, which may be large, and not the rest: whether
    /// that is whole is seen when it is read.
    pub(crate) fn read(path: &Path, digest: &[u8; 32], length: u64) -> Option<Self> {
        let mut file = BufReader::new(File::open(path).ok()?);
        let mut header = [0; HEADER];
        file.read_exact(&mut header).ok()?;
        if !header.starts_with(MAGIC) || header[8..] != digest[..] {
            return None;
        }
        let mut part = || {
            let mut size = [0; 8];
            file.read_exact(&mut size).ok()?;
            // A length that is not the file's would take memory for nothing.
            let size = u64::from_le_bytes(size);
            let size = usize::try_from(size).ok().filter(|_| size < length)?;
            let mut bytes = vec![0; size];
            file.read_exact(&mut bytes).ok()?;
            Some(bytes)
        };
        Self::of(part()?, &part()?)
    }

    fn of(namespace: Vec<u8>, keys: &[u8]) -> Option<Self> {
        let namespace = String::from_utf8(namespace).ok()?;
        let keys = keys.chunks_exact(8).map(|key| key.try_into().map(u64::from_le_bytes).ok());
        Some(Self { namespace, keys: keys.collect::<Option<_>>()? })
    }

    /// The chain that names the file.
    pub(crate) fn chain(&self, digest: &[u8; 32]) -> Chain {
        Chain::new(digest, &self.namespace).extend(&self.keys)
    }

    /// Its full pages.
    pub(crate) fn pages(&self, digest: &[u8; 32]) -> impl Iterator<Item = Chain> + '_ {
        let mut chain = Chain::new(digest, &self.namespace);
        self.keys.chunks_exact(PAGE_TOKENS).map(move |keys| {
            chain = chain.extend(keys);
            chain
        })
    }
}

/// Payload of a state file: namespace, keys, snapshot, open page, each behind its length.
pub(crate) struct State {
    pub(crate) head: Head,
    pub(crate) state: Vec<u8>,
    pub(crate) open: Vec<u8>,
}

impl State {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let keys: Vec<u8> = self.head.keys.iter().flat_map(|key| key.to_le_bytes()).collect();
        let mut bytes = Vec::new();
        for part in [self.head.namespace.as_bytes(), &keys, &self.state, &self.open] {
            bytes.extend((part.len() as u64).to_le_bytes());
            bytes.extend(part);
        }
        bytes
    }

    pub(crate) fn parse(mut bytes: &[u8]) -> Option<Self> {
        let mut part = || {
            let (length, rest) = bytes.split_first_chunk::<8>()?;
            let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
            let (part, rest) = rest.split_at_checked(length)?;
            bytes = rest;
            Some(part.to_vec())
        };
        let head = Head::of(part()?, &part()?)?;
        let (state, open) = (part()?, part()?);
        Some(Self { head, state, open })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Bytes of a file before its payload.
    pub(crate) const BEFORE: usize = HEADER;

    /// Changes a file and makes its checksum right again, as another version would have written it.
    pub(crate) fn rewrite(path: &Path, change: impl Fn(&mut Vec<u8>)) {
        let mut bytes = fs::read(path).expect("it is there");
        bytes.truncate(bytes.len() - CHECKSUM);
        change(&mut bytes);
        let sum = checksum(&bytes);
        bytes.extend(sum);
        fs::write(path, bytes).expect("it is ours");
    }

    #[test]
    fn names_are_told_from_others() {
        let chain = Chain::new(&[3; 32], "n").extend(&[1, 2]);
        for kind in [Kind::State, Kind::Page, Kind::Partial] {
            assert_eq!(named(Path::new("a/b").join(chain.name(kind)).as_path()), Some((chain, kind)));
        }
        let name = chain.name(Kind::Page);
        for other in ["notes.page", "", ".page", &name[1..], &name.to_uppercase(), &format!("{name}.gz")] {
            assert_eq!(named(Path::new(other)), None, "{other}");
        }
    }
}
