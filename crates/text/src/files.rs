//! Reading a model folder's text files with a bound on their size.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::TextError;

/// The whole file as bytes, or `None` if there is no such file.
pub(crate) fn read_if_there(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, TextError> {
    let failed = |source| TextError::Read { path: path.to_owned(), source };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let bytes = file.metadata().map_err(failed)?.len();
    if bytes > limit {
        return Err(TextError::FileTooLarge { path: path.to_owned(), bytes, limit });
    }
    let mut data = Vec::with_capacity(bytes as usize);
    // The bound holds for files that grow, or that are no plain files, as well.
    file.take(limit).read_to_end(&mut data).map_err(failed)?;
    Ok(Some(data))
}

/// The whole file as bytes; a missing file is an error.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Vec<u8>, TextError> {
    read_if_there(path, limit)?.ok_or_else(|| TextError::Read {
        path: path.to_owned(),
        source: std::io::Error::from(std::io::ErrorKind::NotFound),
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
