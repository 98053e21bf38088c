//! `--record DIR`: each request that ran, with what it was made from and what came of it, as a file that
//! `clary replay` runs again. These are the only files that hold prompts; without the option there are none.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use text::LateSystem;

use super::receipt::Receipt;
use super::state::now_seconds;

/// Most bytes that one server records; requests after that are answered and not recorded.
pub const RECORD_BYTES_MAX: u64 = 16 << 30;
/// Version of the bundles.
pub const BUNDLE_VERSION: u32 = 1;
/// Extension of the bundles' names.
pub const BUNDLE_EXTENSION: &str = "bundle.json";

/// A recorded request: all that running it again needs beside the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bundle {
    /// [`BUNDLE_VERSION`].
    pub bundle: u32,
    /// The request's id.
    pub request_id: String,
    /// The reply's own id, such as `chatcmpl-…`; empty where the reply has none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reply_id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Name of the served model.
    pub model: String,
    /// Options of the server that decide what a request means.
    pub server: ServerSettings,
    /// The request's body.
    pub request: Map<String, Value>,
    /// The ids of each prompt.
    pub prompt_ids: Vec<Vec<u32>>,
    /// What was made from it, as far as it came.
    pub receipt: Receipt,
    /// Code of the error that ended the reply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Options of the server that decide what a request means. Sampling is resolved in the receipt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ServerSettings {
    /// Whether requests that do not say think.
    pub thinking: bool,
    /// Variables for the chat template.
    pub template_kwargs: Map<String, Value>,
    /// What becomes of a system message that does not lead.
    #[serde(default)]
    pub late_system: LateSystem,
}

/// Writes bundles into a folder.
#[derive(Debug)]
pub(crate) struct Recorder {
    dir: PathBuf,
    settings: ServerSettings,
    /// Bytes written by this server.
    written: AtomicU64,
}

/// A request that will be recorded when it is over.
#[derive(Debug)]
pub(crate) struct Record {
    recorder: Arc<Recorder>,
    bundle: Bundle,
}

impl Recorder {
    pub(crate) fn new(dir: PathBuf, settings: ServerSettings) -> Self {
        Self { dir, settings, written: AtomicU64::new(0) }
    }

    /// Begins the record of a request.
    pub(crate) fn begin(
        self: &Arc<Self>,
        request_id: &str,
        model: &str,
        request: Map<String, Value>,
        prompt_ids: Vec<Vec<u32>>,
    ) -> Record {
        let bundle = Bundle {
            bundle: BUNDLE_VERSION,
            request_id: request_id.to_owned(),
            reply_id: String::new(),
            created: now_seconds(),
            model: model.to_owned(),
            server: self.settings.clone(),
            request,
            prompt_ids,
            receipt: Receipt::default(),
            error: None,
        };
        Record { recorder: self.clone(), bundle }
    }
}

impl Record {
    /// Takes the id that the reply's reader sees.
    pub(crate) fn named(&mut self, reply_id: &str) {
        self.bundle.reply_id = reply_id.to_owned();
    }

    /// Writes the record; `false` if that was not possible. The reply waits for it, so that a reply that was
    /// seen is recorded.
    pub(crate) fn write(mut self, receipt: Receipt, error: Option<&str>) -> bool {
        self.bundle.receipt = receipt;
        self.bundle.error = error.map(str::to_owned);
        let bytes = serde_json::to_vec(&self.bundle).expect("own types have a JSON form");
        let length = bytes.len() as u64;
        let before = self.recorder.written.fetch_add(length, Ordering::Relaxed);
        if before + length > RECORD_BYTES_MAX {
            self.recorder.written.fetch_sub(length, Ordering::Relaxed);
            return false;
        }
        let name = format!("{}.{BUNDLE_EXTENSION}", self.bundle.request_id);
        whole(&self.recorder.dir, &name, before, &bytes).is_ok()
    }
}

/// Writes a file for its owner alone, which gets its name when it is whole. Request ids are plain letters
/// (see [`super::ids::accepted`]), so the name stays inside the folder.
fn whole(dir: &Path, name: &str, place: u64, bytes: &[u8]) -> io::Result<()> {
    // Clients may give one id to several requests at once.
    let partial = dir.join(format!("{name}.{place}.partial"));
    let mut file: File =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
    let written = file.write_all(bytes).and_then(|()| fs::rename(&partial, dir.join(name)));
    if written.is_err() {
        // The error that is returned says more than a failed removal could.
        let _ = fs::remove_file(&partial);
    }
    written
}
