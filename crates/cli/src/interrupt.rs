//! Ctrl-C.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Exit, Failure, Result};

/// What happens when Ctrl-C comes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt {
    /// How often it came since someone looked.
    pending: Arc<AtomicU32>,
    /// Whether someone looks: then only the second one ends the process.
    watched: Arc<Mutex<Watch>>,
}

#[derive(Debug, Default)]
struct Watch {
    is_watched: bool,
    /// A half-written file, or a folder of them.
    partial: Option<PathBuf>,
}

impl Interrupt {
    /// Takes over Ctrl-C of the process. Call once.
    pub(crate) fn install() -> Result<Self> {
        let interrupt = Self::default();
        let inside = interrupt.clone();
        ctrlc::set_handler(move || inside.came())
            .map_err(|error| Failure::new(Exit::Failure, format!("Ctrl-C cannot be watched: {error}")))?;
        Ok(interrupt)
    }

    fn came(&self) {
        let before = self.pending.fetch_add(1, Ordering::Relaxed);
        let watch = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if watch.is_watched && before == 0 {
            return;
        }
        if let Some(partial) = &watch.partial {
            remove(partial);
        }
        std::process::exit(Exit::Interrupted as i32);
    }

    /// From now on someone calls [`Self::take`] often (or no longer does).
    pub(crate) fn watch(&self, is_watched: bool) {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner).is_watched = is_watched;
        self.pending.store(0, Ordering::Relaxed);
    }

    /// Whether Ctrl-C came since the last look.
    pub(crate) fn take(&self) -> bool {
        self.pending.swap(0, Ordering::Relaxed) > 0
    }

    /// A file to remove if the process is interrupted, or a folder of which to remove what ends in
    /// `.partial`; `None` when it is whole.
    pub(crate) fn partial(&self, path: Option<PathBuf>) {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner).partial = path;
    }
}

/// Removes a half-written file, or those in a folder. The process ends: there is nobody to tell of errors.
fn remove(partial: &Path) {
    if let Ok(entries) = fs::read_dir(partial) {
        let files = entries.flatten().map(|entry| entry.path());
        for file in files.filter(|path| path.extension().is_some_and(|end| end == "partial")) {
            let _ = fs::remove_file(file);
        }
    } else {
        let _ = fs::remove_file(partial);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_half_written_files_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let [file, half, whole] = ["a.st.1.partial", "b.partial", "c"].map(|name| dir.path().join(name));
        for path in [&file, &half, &whole] {
            fs::write(path, "").unwrap();
        }
        remove(&file);
        assert_eq!((file.exists(), half.exists()), (false, true));
        remove(dir.path());
        assert_eq!((half.exists(), whole.exists()), (false, true));
    }
}
