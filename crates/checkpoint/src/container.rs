//! The safetensors container: header checks and bounded reads (`docs/formats.md` section 7).
//!
//! Weights are read, not mapped: a mapped file that another process shortens kills the process that looks at
//! it.

use std::{
    collections::HashSet,
    fmt,
    fs::{self, File},
    io,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use memmap2::{Mmap, MmapMut, UncheckedAdvice};
use quant::{Bytes, Dtype, Storage};
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IgnoredAny, MapAccess, Visitor},
};

use crate::{Error, HeaderProblem};

/// Longest header accepted, in bytes: the limit of the safetensors library.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// A multiple of every page size in use; ranges are given back in units of it.
const PAGE_BYTES_MAX: usize = 64 << 10;
/// Bytes of the start of a file that tell whether it is one of ours, and how long its header is.
const START_BYTES: u64 = 64;
/// Reads of at least this many bytes get pages of their own, which can be given back in parts.
const PAGES_MIN: usize = 4 * PAGE_BYTES_MAX;
/// Bytes that one thread reads of a large tensor.
const SHARE_BYTES_MIN: usize = 4 << 20;
/// Threads that read one tensor.
const READERS_MAX: usize = 8;

/// Element type of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoredDtype {
    name: &'static str,
    size: usize,
}

/// Names and sizes in bytes of the dtypes a safetensors file may hold, those we refuse by name included.
const DTYPES: [StoredDtype; 16] = [
    StoredDtype { name: "BF16", size: 2 },
    StoredDtype { name: "F16", size: 2 },
    StoredDtype { name: "F32", size: 4 },
    StoredDtype { name: "F64", size: 8 },
    StoredDtype { name: "U8", size: 1 },
    StoredDtype { name: "I8", size: 1 },
    StoredDtype { name: "U16", size: 2 },
    StoredDtype { name: "I16", size: 2 },
    StoredDtype { name: "U32", size: 4 },
    StoredDtype { name: "I32", size: 4 },
    StoredDtype { name: "U64", size: 8 },
    StoredDtype { name: "I64", size: 8 },
    StoredDtype { name: "BOOL", size: 1 },
    StoredDtype { name: "F8_E4M3", size: 1 },
    StoredDtype { name: "F8_E5M2", size: 1 },
    StoredDtype { name: "F8_E8M0", size: 1 },
];

impl StoredDtype {
    /// The dtype with this safetensors name.
    pub fn from_name(name: &str) -> Option<Self> {
        DTYPES.into_iter().find(|d| d.name == name)
    }

    /// The safetensors name.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// The float dtype of an unquantized tensor.
    pub fn float(self) -> Option<Dtype> {
        match self.name {
            "BF16" => Some(Dtype::Bf16),
            "F16" => Some(Dtype::F16),
            "F32" => Some(Dtype::F32),
            _ => None,
        }
    }
}

/// One entry of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name as stored.
    pub name: String,
    /// Element type.
    pub dtype: StoredDtype,
    /// Shape, outermost axis first.
    pub shape: Vec<usize>,
    /// Bytes of the file that hold the values.
    pub range: Range<usize>,
}

/// Reads the header at the start of `file`, which must be the whole file, and checks it against the file's
/// length.
///
/// Entries come in the order of the header, which need not be that of their bytes.
pub fn parse_header(file: &[u8]) -> Result<Vec<Entry>, HeaderProblem> {
    parse_start(file, file.len() as u64)
}

/// The same from the first bytes of a file of `has` bytes, its header whole among them if it fits the file.
fn parse_start(file: &[u8], has: u64) -> Result<Vec<Entry>, HeaderProblem> {
    if file.starts_with(b"version https://git-lfs") {
        return Err(HeaderProblem::Pointer);
    }
    let Some((prefix, rest)) = file.split_first_chunk::<8>() else {
        return Err(HeaderProblem::Short(has));
    };
    let length = u64::from_le_bytes(*prefix);
    if !(2..=HEADER_BYTES_MAX).contains(&length) {
        return Err(HeaderProblem::Length(length));
    }
    let truncated = HeaderProblem::Truncated { needs: 8 + length, has };
    let text = rest.get(..length as usize).ok_or(truncated)?;
    let raw: RawHeader = serde_json::from_slice(text).map_err(|e| HeaderProblem::Json(e.to_string()))?;
    let base = 8 + length;
    let entries = raw.0.into_iter().map(|(name, t)| entry(name, t, base)).collect::<Result<Vec<_>, _>>()?;
    check_ranges(&entries, base, has)?;
    Ok(entries)
}

/// Checks one entry by itself and moves its offsets to the start of the file.
fn entry(name: String, raw: RawTensor, base: u64) -> Result<Entry, HeaderProblem> {
    let Some(dtype) = StoredDtype::from_name(&raw.dtype) else {
        return Err(HeaderProblem::Dtype { tensor: name, dtype: raw.dtype.chars().take(40).collect() });
    };
    let (begin, end) = raw.data_offsets;
    let bytes = raw.shape.iter().try_fold(dtype.size as u64, |n, &d| n.checked_mul(d));
    let shape = raw.shape.iter().map(|&d| usize::try_from(d).ok()).collect::<Option<Vec<_>>>();
    // Ends beyond the file are found later; here they only must not overflow.
    let range = begin
        .checked_add(base)
        .zip(end.checked_add(base))
        .and_then(|(b, e)| Some(usize::try_from(b).ok()?..usize::try_from(e).ok()?));
    match (shape, range) {
        (Some(shape), Some(range)) if end.checked_sub(begin).is_some_and(|n| Some(n) == bytes) => {
            Ok(Entry { name, dtype, shape, range })
        }
        _ => {
            let shape = raw.shape.into_iter().take(8).collect();
            Err(HeaderProblem::Offsets { tensor: name, begin, end, shape, dtype: dtype.name })
        }
    }
}

/// No overlaps, and the last tensor ends where the file does.
fn check_ranges(entries: &[Entry], base: u64, has: u64) -> Result<(), HeaderProblem> {
    let needs = entries.iter().map(|e| e.range.end as u64).max().unwrap_or(base);
    if needs > has {
        return Err(HeaderProblem::Truncated { needs, has });
    }
    let mut order: Vec<&Entry> = entries.iter().filter(|e| !e.range.is_empty()).collect();
    order.sort_unstable_by_key(|e| e.range.start);
    for pair in order.windows(2) {
        if pair[1].range.start < pair[0].range.end {
            let (first, second) = (pair[0].name.clone(), pair[1].name.clone());
            return Err(HeaderProblem::Overlap { first, second });
        }
    }
    if needs < has {
        return Err(HeaderProblem::Trailing(has - needs));
    }
    Ok(())
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

struct RawHeader(Vec<(String, RawTensor)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(RawHeaderVisitor)
    }
}

struct RawHeaderVisitor;

impl<'de> Visitor<'de> for RawHeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<RawHeader, A::Error> {
        let mut tensors = Vec::new();
        let mut seen = HashSet::new();
        while let Some(name) = entries.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(A::Error::custom(format_args!("key {name:?} is repeated")));
            }
            // Names are shown to people, on terminals as well.
            if name.contains(char::is_control) {
                return Err(A::Error::custom(format_args!("name {name:?} has control characters")));
            }
            if name == "__metadata__" {
                entries.next_value::<IgnoredAny>()?;
            } else {
                tensors.push((name, entries.next_value()?));
            }
        }
        Ok(RawHeader(tensors))
    }
}

/// A safetensors file, open for reading.
#[derive(Debug)]
pub(crate) struct WeightFile {
    /// Plain file name in the model folder.
    pub name: String,
    /// Length when it was opened.
    pub bytes: u64,
    file: File,
}

impl WeightFile {
    /// Opens `dir/name`, which may be a link to a regular file, and checks its header.
    pub(crate) fn open(dir: &Path, name: &str) -> Result<(Self, Vec<Entry>), Error> {
        let path = dir.join(name);
        let file = open_regular(&path)?;
        let read = || -> io::Result<_> {
            let bytes = file.metadata()?.len();
            Ok((bytes, read_start(&file, bytes)?))
        };
        let (bytes, start) = read().map_err(Error::io(path))?;
        let entries =
            parse_start(&start, bytes).map_err(|problem| Error::Header { file: name.to_owned(), problem })?;
        Ok((Self { name: name.to_owned(), bytes, file }, entries))
    }

    /// Reads bytes of the file into memory; an error where the file has lost them since it was opened.
    pub(crate) fn read(&self, range: Range<usize>) -> io::Result<Bytes> {
        let (at, length) = (range.start as u64, range.len());
        if length < PAGES_MIN {
            let mut bytes = vec![0; length];
            self.file.read_exact_at(&mut bytes, at)?;
            return Ok(bytes.into());
        }
        let mut pages = MmapMut::map_anon(length)?;
        let share = length.div_ceil(READERS_MAX).max(SHARE_BYTES_MIN);
        let read = |(part, out): (usize, &mut [u8])| self.file.read_exact_at(out, at + (part * share) as u64);
        if length <= share {
            read((0, &mut pages))?;
        } else {
            thread::scope(|scope| {
                let parts = pages.chunks_mut(share).enumerate();
                let running: Vec<_> = parts.map(|part| scope.spawn(move || read(part))).collect();
                running.into_iter().try_for_each(|reader| reader.join().expect("reading does not panic"))
            })?;
        }
        let pages = Pages(pages.make_read_only()?);
        Ok(Bytes::new(Arc::new(pages), 0..length).expect("as long as it was made"))
    }
}

/// The start of a file of `bytes` bytes: its header whole, if the file says one that fits.
fn read_start(file: &File, bytes: u64) -> io::Result<Vec<u8>> {
    let mut start = vec![0; bytes.min(START_BYTES) as usize];
    file.read_exact_at(&mut start, 0)?;
    let length = start.first_chunk::<8>().map_or(0, |length| u64::from_le_bytes(*length));
    if length <= HEADER_BYTES_MAX && 8 + length <= bytes && 8 + length > start.len() as u64 {
        start.resize((8 + length) as usize, 0);
        file.read_exact_at(&mut start, 0)?;
    }
    Ok(start)
}

/// Bytes in memory pages of their own.
struct Pages(Mmap);

impl Storage for Pages {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn discard(&self, range: Range<usize>) {
        // Inwards to whole pages: neighbours may still be wanted.
        let start = range.start.min(self.0.len()).next_multiple_of(PAGE_BYTES_MAX);
        let end = match range.end >= self.0.len() {
            true => self.0.len(),
            false => range.end / PAGE_BYTES_MAX * PAGE_BYTES_MAX,
        };
        if start < end {
            // SAFETY: the pages belong to this map alone and read as zeros from now on, valid bytes, which by
            // the promise of `discard` nobody looks at. A failure only means that the pages stay.
            let _ = unsafe { self.0.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start) };
        }
    }
}

/// Opens a regular file or a link to one. Anything else is refused before it is opened: a pipe would block.
pub(crate) fn open_regular(path: &Path) -> Result<File, Error> {
    let meta = fs::metadata(path).map_err(Error::io(path))?;
    if !meta.is_file() {
        return Err(Error::NotAFile(PathBuf::from(path)));
    }
    File::open(path).map_err(Error::io(path))
}

/// Reads a whole regular file of at most `limit` bytes.
pub(crate) fn read_limited(dir: &Path, name: &str, limit: u64) -> Result<Vec<u8>, Error> {
    use std::io::Read;
    let path = dir.join(name);
    let mut bytes = Vec::new();
    open_regular(&path)?.take(limit + 1).read_to_end(&mut bytes).map_err(Error::io(path))?;
    if bytes.len() as u64 > limit {
        return Err(Error::TooLarge { file: name.to_owned(), bytes: bytes.len() as u64, limit });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 7);
        bytes
    }

    fn check(header: &str, data: usize, words: &str) {
        let error = parse_header(&file(header, data)).expect_err(words).to_string();
        assert!(error.contains(words), "{error} lacks {words}");
    }

    #[test]
    fn good_headers_read() {
        let header = r#"{"b":{"dtype":"BF16","shape":[2,2],"data_offsets":[4,12]},
            "__metadata__":{"format":"mlx"},
            "a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},
            "e":{"dtype":"I64","shape":[0],"data_offsets":[12,12]}}  "#;
        let entries = parse_header(&file(header, 12)).expect("valid");
        let base = 8 + header.len();
        let found: Vec<_> =
            entries.iter().map(|e| (e.name.as_str(), e.range.start - base, e.range.len())).collect();
        assert_eq!(found, [("b", 4, 8), ("a", 0, 4), ("e", 12, 0)]);
        assert_eq!(parse_header(&file("{}", 0)), Ok(vec![]));
    }

    #[test]
    fn bad_headers_are_refused() {
        let one = |dtype: &str, shape: &str, offsets: &str| {
            format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        check(r#"{"a\u001b[31m\n":{}}"#, 0, r#"name "a\u{1b}[31m\n" has control characters"#);
        check(&one("F5", "[1]", "[0,4]"), 4, "dtype \"F5\" is unknown");
        check(&one("F32", "[1]", "[4,0]"), 4, "do not fit");
        check(&one("F32", "[2]", "[0,4]"), 4, "do not fit");
        check(&one("F32", "[4611686018427387904,4]", "[0,0]"), 0, "do not fit");
        check(&one("F32", "[1]", "[18446744073709551612,18446744073709551615]"), 0, "do not fit");
        check(&one("U8", "[3]", "[18446744073709551612,18446744073709551615]"), 0, "do not fit");
        check(&one("F32", "[-1]", "[0,4]"), 4, "header");
        check(&one("F32", "[1.5]", "[0,4]"), 4, "header");
        check(&one("F32", "[1]", "[0,4,8]"), 4, "header");
        check(&one("F32", "[1]", "[0,4]"), 5, "1 unknown bytes");
        check(&one("F32", "[1]", "[0,4]"), 3, "truncated");
        check("{}", 4, "4 unknown bytes");
        check("[]", 0, "header");
        check("{} x", 0, "header");
        check(r#"{"t":{},"t":{}}"#, 0, "header");
        check(r#"{"__metadata__":{},"__metadata__":{}}"#, 0, "repeated");
        let two = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
            "b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}}"#;
        check(two, 7, "a and b overlap");
        assert_eq!(parse_header(&[0; 7]), Err(HeaderProblem::Short(7)));
        assert_eq!(parse_header(&[0; 64]), Err(HeaderProblem::Length(0)));
        assert_eq!(parse_header(&[0xff; 64]), Err(HeaderProblem::Length(u64::MAX)));
        assert_eq!(
            parse_header(&[9, 0, 0, 0, 0, 0, 0, 0]),
            Err(HeaderProblem::Truncated { needs: 17, has: 8 })
        );
    }

    /// A file with one tensor of `data` bytes, opened.
    fn opened(dir: &Path, data: usize) -> (WeightFile, Vec<u8>) {
        let header = format!(r#"{{"t":{{"dtype":"U8","shape":[{data}],"data_offsets":[0,{data}]}}}}"#);
        let mut bytes = file(&header, data);
        let start = bytes.len() - data;
        bytes[start..].iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251) as u8);
        fs::write(dir.join("f"), &bytes).expect("written");
        (WeightFile::open(dir, "f").expect("valid").0, bytes)
    }

    #[test]
    fn reads_of_every_length_give_the_files_bytes() {
        let dir = tempfile::tempdir().expect("a folder");
        let length = 3 * SHARE_BYTES_MIN + 12_345;
        let (weights, bytes) = opened(dir.path(), length);
        for range in [0..0, 5..6, 60..PAGES_MIN, 61..61 + PAGES_MIN, 77..SHARE_BYTES_MIN + 99, 1..length] {
            assert!(weights.read(range.clone()).expect("there")[..] == bytes[range.clone()], "{range:?}");
        }
    }

    #[test]
    fn a_file_that_shrinks_is_an_error() {
        let dir = tempfile::tempdir().expect("a folder");
        let (weights, _) = opened(dir.path(), 9 * SHARE_BYTES_MIN);
        File::options().write(true).open(dir.path().join("f")).and_then(|f| f.set_len(5000)).expect("cut");
        for range in [4000..6000, 100..100 + PAGES_MIN, 100..9 * SHARE_BYTES_MIN] {
            let error = weights.read(range.clone()).expect_err("lost bytes");
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{range:?}");
        }
        assert_eq!(weights.read(100..5000).expect("still there").len(), 4900);
    }

    #[test]
    fn discarding_leaves_the_bytes_around() {
        let dir = tempfile::tempdir().expect("a folder");
        let (weights, bytes) = opened(dir.path(), 400_000);
        let bytes = &bytes[..400_000];
        for range in [0..0, 5..70_000, 100_000..300_000, 350_000..usize::MAX, usize::MAX - 9..usize::MAX - 3]
        {
            let read = weights.read(0..400_000).expect("there");
            let part = read.slice(range.start.min(400_000)..range.end.min(400_000)).expect("inside");
            part.discard();
            let (before, after) = (range.start.min(400_000), range.end.min(400_000));
            assert!(read[..before] == bytes[..before] && read[after..] == bytes[after..], "{range:?}");
        }
    }
}
