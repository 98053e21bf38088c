//! Reading a model folder's text files with a bound on their size.

use std::fs::File;
use std::io::{Error, ErrorKind, Read};
use std::path::Path;

use crate::error::TextError;

/// The whole file as bytes, or `None` if there is no such file.
pub(crate) fn read_if_there(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, TextError> {
    let failed = |source| TextError::Read { path: path.to_owned(), source };
    // Asked before opening: a pipe under a file's name would wait for a writer.
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    if !metadata.is_file() {
        return Err(failed(Error::other("not a regular file")));
    }
    let file = File::open(path).map_err(failed)?;
    let bytes = metadata.len();
    if bytes > limit {
        return Err(TextError::FileTooLarge { path: path.to_owned(), bytes, limit });
    }
    let mut data = Vec::with_capacity(bytes as usize);
    // The bound holds for files that grow as well.
    file.take(limit).read_to_end(&mut data).map_err(failed)?;
    Ok(Some(data))
}

/// The whole file as bytes; a missing file is an error.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Vec<u8>, TextError> {
    read_if_there(path, limit)?.ok_or_else(|| TextError::Read {
        path: path.to_owned(),
        source: Error::new(ErrorKind::NotFound, "no such file"),
    })
}

/// Parses JSON, naming the file in the error.
pub(crate) fn json<T: serde::de::DeserializeOwned>(file: &'static str, data: &[u8]) -> Result<T, TextError> {
    serde_json::from_slice(data).map_err(|error| TextError::Json { file, detail: error.to_string() })
}

/// SHA-256 of some bytes in lower-case hexadecimal, 64 characters.
pub(crate) fn sha256_hex(data: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    use std::fmt::Write;
    let mut hex = String::with_capacity(64);
    for byte in Sha256::digest(data) {
        write!(hex, "{byte:02x}").expect("writing to a string cannot fail");
    }
    hex
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let read_dir = read_if_there(dir.path(), 10).unwrap_err().to_string();
        assert!(read_dir.contains("not a regular file"), "{read_dir}");
        #[cfg(unix)]
        {
            let device = read(Path::new("/dev/zero"), 10).unwrap_err().to_string();
            assert!(device.contains("not a regular file"), "{device}");
        }
        let missing = read(&dir.path().join("a"), 10).unwrap_err().to_string();
        assert!(missing.contains("no such file"), "{missing}");
    }
}
