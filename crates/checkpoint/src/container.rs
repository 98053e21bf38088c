//! The safetensors container: header checks and the mapped file (`docs/formats.md` section 7).

use std::{
    collections::HashSet,
    fmt,
    fs::{self, File},
    ops::Range,
    path::{Path, PathBuf},
};

use memmap2::{Mmap, UncheckedAdvice};
use quant::{Dtype, Storage};
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IgnoredAny, MapAccess, Visitor},
};

use crate::{Error, HeaderProblem};

/// Longest header accepted, in bytes: the limit of the safetensors library.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// A multiple of every page size in use; ranges are given back in units of it.
const PAGE_BYTES_MAX: usize = 64 << 10;

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
    if file.starts_with(b"version https://git-lfs") {
        return Err(HeaderProblem::Pointer);
    }
    let has = file.len() as u64;
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

/// A safetensors file, mapped for reading.
pub(crate) struct MappedFile {
    /// Plain file name in the model folder.
    pub name: String,
    map: Mmap,
}

impl MappedFile {
    /// Opens `dir/name`, which may be a link to a regular file, and checks its header.
    pub(crate) fn open(dir: &Path, name: &str) -> Result<(Self, Vec<Entry>), Error> {
        let path = dir.join(name);
        let file = open_regular(&path)?;
        // SAFETY: the map is read-only. Bytes that another process changes under us would be read as other
        // bytes: every use is of plain integers, for which any bit pattern is valid.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
        let entries =
            parse_header(&map).map_err(|problem| Error::Header { file: name.to_owned(), problem })?;
        Ok((Self { name: name.to_owned(), map }, entries))
    }
}

impl Storage for MappedFile {
    fn bytes(&self) -> &[u8] {
        &self.map
    }

    fn discard(&self, range: Range<usize>) {
        // Outwards to whole pages: many small arrays would otherwise stay between pages. Neighbours that are still
        // in use are read from the file again.
        let start = range.start / PAGE_BYTES_MAX * PAGE_BYTES_MAX;
        let end = range.end.min(self.map.len()).next_multiple_of(PAGE_BYTES_MAX).min(self.map.len());
        if !range.is_empty() && start < end {
            // SAFETY: the map is a read-only view of a file, so dropped pages are read from the file again.
            // A failure only means that the pages stay, which is harmless.
            let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start) };
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

    #[test]
    fn discarded_pages_keep_their_bytes() {
        let dir = tempfile::tempdir().expect("a folder");
        let header = r#"{"t":{"dtype":"U8","shape":[400000],"data_offsets":[0,400000]}}"#;
        let bytes = file(header, 400_000);
        fs::write(dir.path().join("f"), &bytes).expect("written");
        let (mapped, _) = MappedFile::open(dir.path(), "f").expect("valid");
        for range in
            [0..bytes.len(), 0..0, 5..70_000, 100_000..usize::MAX, usize::MAX - 70_000..usize::MAX - 3]
        {
            mapped.discard(range);
        }
        assert_eq!(mapped.bytes(), bytes);
    }
}
