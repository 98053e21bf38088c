//! Files and stdin, read whole within a limit.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::error::{Failure, Result};

/// Stands for stdin where a file may be named.
const STDIN: &str = "-";

/// A file of at most `bytes_max` bytes.
pub(crate) fn file(path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    let file = File::open(path).map_err(|error| Failure::file(path, &error))?;
    whole(file, bytes_max).map_err(|problem| problem.of(path))
}

/// The same, where `-` is stdin.
pub(crate) fn file_or_stdin(path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    match path == Path::new(STDIN) {
        true => whole(io::stdin().lock(), bytes_max).map_err(|problem| problem.of(Path::new("stdin"))),
        false => file(path, bytes_max),
    }
}

/// A file of text.
pub(crate) fn text(path: &Path, bytes_max: u64) -> Result<String> {
    utf8(path, file(path, bytes_max)?)
}

/// The same, where `-` is stdin.
pub(crate) fn text_or_stdin(path: &Path, bytes_max: u64) -> Result<String> {
    let name = if path == Path::new(STDIN) { Path::new("stdin") } else { path };
    utf8(name, file_or_stdin(path, bytes_max)?)
}

/// Why something could not be read whole.
enum Problem {
    Io(io::Error),
    TooLong(u64),
}

impl Problem {
    fn of(self, path: &Path) -> Failure {
        match self {
            Self::Io(error) => Failure::file(path, &error),
            Self::TooLong(max) => Failure::usage(format!("{}: more than {max} bytes", path.display())),
        }
    }
}

fn whole(reader: impl Read, bytes_max: u64) -> std::result::Result<Vec<u8>, Problem> {
    let mut bytes = Vec::new();
    reader.take(bytes_max + 1).read_to_end(&mut bytes).map_err(Problem::Io)?;
    match bytes.len() as u64 > bytes_max {
        true => Err(Problem::TooLong(bytes_max)),
        false => Ok(bytes),
    }
}

fn utf8(path: &Path, bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::usage(format!("{}: byte {at} is not UTF-8", path.display())).hint("convert it to UTF-8")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Exit;

    #[test]
    fn what_is_too_long_or_no_text_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, b"abc\xff").unwrap();
        assert_eq!(file(&path, 4).unwrap(), b"abc\xff");
        for (failure, words) in [
            (file(&path, 3).unwrap_err(), "more than 3 bytes"),
            (text(&path, 4).unwrap_err(), "byte 3 is not UTF-8"),
            (text_or_stdin(dir.path(), 4).unwrap_err(), "directory"),
            (file_or_stdin(&dir.path().join("other"), 4).unwrap_err(), "No such file"),
        ] {
            assert_eq!(failure.exit, Exit::Usage, "{failure:?}");
            assert!(failure.message.contains(words), "{failure:?}");
        }
    }
}
