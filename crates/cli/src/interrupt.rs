//! Ctrl-C.

use std::fs;
use std::path::PathBuf;
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
    /// A half-written file.
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
            let _ = fs::remove_file(partial);
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

    /// A file to remove if the process is interrupted; `None` when it is whole.
    pub(crate) fn partial(&self, path: Option<PathBuf>) {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner).partial = path;
    }
}
