//! `clary bundle`: one recorded request, taken out of the folder of a server.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use server::http::BUNDLE_EXTENSION;

use super::{BundleArgs, files};
use crate::error::{Failure, Result};
use crate::output::Output;
use crate::target::Target;

/// Recorded ids that a message lists, the newest first.
const LISTED: usize = 3;

/// Checks the recorded request of an id and writes it to a file or to stdout.
pub(crate) fn bundle(args: &BundleArgs, output: &Output) -> Result {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if args.request_id.is_empty() || !args.request_id.bytes().all(is_plain) {
        let message = format!("{:?} is no request id", args.request_id);
        let hint = "the reply's id, such as chatcmpl-8fK2..., or its X-Request-Id, such as req_8fK2...";
        return Err(Failure::usage(message).hint(hint));
    }
    let bundle = files::bundle(&find(&args.record, &args.request_id)?)?;
    let text = format!("{:#}\n", serde_json::json!(bundle));
    let Some(out) = &args.out else { return Ok(output.out(&text)?) };
    let mut target = Target::private(out)?;
    target.file.write_all(text.as_bytes()).map_err(|error| target.failed(&error))?;
    target.finish()
}

/// The record of a request, by its own id or by that of its reply.
fn find(folder: &Path, id: &str) -> Result<PathBuf> {
    let path = folder.join(format!("{id}.{BUNDLE_EXTENSION}"));
    if path.is_file() {
        return Ok(path);
    }
    let records = records(folder)?;
    // What cannot be read is not what is looked for.
    let names_reply = |path: &&PathBuf| files::bundle(path).is_ok_and(|bundle| bundle.reply_id == id);
    records.iter().find(names_reply).cloned().ok_or_else(|| missing(folder, id, &records))
}

/// Records of a folder, the newest first.
fn records(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).map_err(|error| {
        Failure::file(folder, &error)
            .hint("--record names the folder that `clary serve --record DIR` writes to")
    })?;
    let suffix = format!(".{BUNDLE_EXTENSION}");
    let mut records: Vec<(SystemTime, PathBuf)> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(&suffix))
        .map(|entry| {
            let changed = entry.metadata().and_then(|meta| meta.modified());
            (changed.unwrap_or(SystemTime::UNIX_EPOCH), entry.path())
        })
        .collect();
    records.sort_by(|a, b| b.cmp(a));
    Ok(records.into_iter().map(|(_, path)| path).collect())
}

fn missing(folder: &Path, id: &str, records: &[PathBuf]) -> Failure {
    let names = records.iter().filter_map(|path| path.file_name()?.to_str()?.strip_suffix(BUNDLE_EXTENSION));
    let newest: Vec<&str> = names.take(LISTED).map(|name| name.trim_end_matches('.')).collect();
    let found = match records.len() {
        0 => "it holds no records".to_owned(),
        1 => format!("it holds one record, {}", newest.join(", ")),
        count => format!("it holds {count} records, the newest {}", newest.join(", ")),
    };
    Failure::usage(format!("{}: no record of {id}: {found}", folder.display())).hint(
        "records are written by `clary serve MODEL --record DIR`, of requests that ran while it was given; \
         the id is the reply's own (chatcmpl-...) or its X-Request-Id (req_...)",
    )
}
