//! Files that get their name when they are whole.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process;

use crate::error::{Failure, Result};

/// A file being written beside its final place; what was there stays until the new one is whole. Removed
/// when dropped before [`Self::finish`].
#[derive(Debug)]
pub(crate) struct Target {
    /// Where to write.
    pub(crate) file: File,
    /// The file's name until it is whole.
    pub(crate) partial: PathBuf,
    /// The name it gets.
    path: PathBuf,
    is_whole: bool,
}

impl Target {
    /// Begins to write `path`. A link is followed. Folders, pipes and devices are refused: a file that takes
    /// their name would replace them.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        Self::open(path, OpenOptions::new().write(true).create(true).truncate(true))
    }

    /// [`Self::create`] for what only its owner may read, such as prompts.
    pub(crate) fn private(path: &Path) -> Result<Self> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        Self::open(path, &options)
    }

    fn open(path: &Path, options: &OpenOptions) -> Result<Self> {
        let failed = |error: io::Error| Failure::file(path, &error);
        let path = match fs::canonicalize(path) {
            Ok(there) if there.is_file() => there,
            Ok(there) => {
                let kind = if there.is_dir() { "a folder" } else { "no regular file" };
                return Err(Failure::usage(format!("{}: is {kind}; name a file", path.display()))
                    .hint("a file of this name is written, or replaced where there is one"));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => path.to_owned(),
            Err(error) => return Err(failed(error)),
        };
        let Some(name) = path.file_name() else {
            return Err(Failure::usage(format!("{}: is no file name", path.display()))
                .hint("a file of this name is written, or replaced where there is one"));
        };
        let mut partial_name = name.to_owned();
        // Two processes that write the same file must not write into each other's.
        partial_name.push(format!(".{}.partial", process::id()));
        let partial = path.with_file_name(partial_name);
        let file = options.open(&partial).map_err(failed)?;
        Ok(Self { file, partial, path, is_whole: false })
    }

    /// What went wrong while writing, by the file's final name.
    pub(crate) fn failed(&self, error: &io::Error) -> Failure {
        Failure::file(&self.path, error)
    }

    /// Gives the file its name.
    pub(crate) fn finish(mut self) -> Result {
        let finished = self.file.sync_all().and_then(|()| fs::rename(&self.partial, &self.path));
        finished.map_err(|error| self.failed(&error))?;
        self.is_whole = true;
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if !self.is_whole {
            // Already on the way out with an error that says more than a failed removal could.
            let _ = fs::remove_file(&self.partial);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::error::Exit;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_when_the_new_one_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, "old").unwrap();
        let mut dropped = Target::create(&path).unwrap();
        dropped.file.write_all(b"half").unwrap();
        drop(dropped);
        assert_eq!((names(dir.path()), fs::read_to_string(&path).unwrap()), (vec!["a".into()], "old".into()));
        let mut target = Target::create(&path).unwrap();
        target.file.write_all(b"new").unwrap();
        target.finish().unwrap();
        assert_eq!((names(dir.path()), fs::read_to_string(&path).unwrap()), (vec!["a".into()], "new".into()));
    }

    #[test]
    fn what_is_no_file_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        for path in [dir.path().to_owned(), dir.path().join(".."), "/".into(), dir.path().join("no/such/a")] {
            assert_eq!(Target::create(&path).unwrap_err().exit, Exit::Usage, "{path:?}");
        }
        assert!(names(dir.path()).is_empty());
    }

    #[cfg(unix)]
    #[test]
    fn what_is_private_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        Target::create(&path).unwrap().finish().unwrap();
        Target::private(&path).unwrap().finish().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_and_devices_refused() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let [real, link, pipe] = ["real", "link", "pipe"].map(|name| dir.path().join(name));
        fs::write(&real, "old").unwrap();
        symlink(&real, &link).unwrap();
        Target::create(&link).unwrap().finish().unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&real).unwrap(), b"");
        let _socket = std::os::unix::net::UnixListener::bind(&pipe).unwrap();
        let failure = Target::create(&pipe).unwrap_err();
        assert_eq!(failure.exit, Exit::Usage);
        assert!(failure.message.contains("no regular file"), "{failure:?}");
        symlink(dir.path().join("loop"), dir.path().join("loop")).unwrap();
        assert_eq!(Target::create(&dir.path().join("loop")).unwrap_err().exit, Exit::Usage);
    }
}
