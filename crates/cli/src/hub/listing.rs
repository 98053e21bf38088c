//! What a model consists of on a hub, and what of it a run needs.

use std::collections::HashSet;
use std::sync::atomic::AtomicBool;

use clap::ValueEnum;
use serde_json::Value;

use super::{Hub, Trouble, broken, nonsense};
use crate::error::{Exit, Failure, Result};

/// Longest listing, bytes.
const LISTING_MAX: u64 = 64 << 20;
/// Longest file of a model, bytes. Sums of as many as a listing can name fit 64 bits.
const FILE_BYTES_MAX: u64 = 1 << 40;
/// Names the shards.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Describes the model.
pub(crate) const CONFIG: &str = "config.json";
/// The weights of a model that has no shards.
const SINGLE: &str = "model.safetensors";
/// Small files that a run reads where they are there.
const TEXT: [&str; 5] =
    [CONFIG, "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"];
/// What says how pictures are prepared.
const VISION: [&str; 3] =
    ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"];

/// Parts of a model that a run can do without, where they have files of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Include {
    /// A file with the MTP layer, which drafts.
    Mtp,
    /// How pictures are prepared.
    Vision,
    /// Neither.
    None,
}

/// A model at one commit.
#[derive(Clone, Debug)]
pub(crate) struct Listing {
    /// 40 hexadecimal digits.
    pub(crate) commit: String,
    /// Its files.
    pub(crate) files: Vec<Remote>,
}

/// A file on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Remote {
    /// Its name, which is plain: see [`plain`].
    pub(crate) name: String,
    /// Its length.
    pub(crate) bytes: u64,
    /// What it must hash to.
    pub(crate) digest: Digest,
}

/// Digest of a file as the hub keeps it, lower-case hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Digest {
    /// Of large files: SHA-256 of the bytes.
    Sha256(String),
    /// Of small files: SHA-1 of git's blob, which is a header and the bytes.
    Blob(String),
}

/// A name that stays in its folder on every system.
pub(crate) fn plain(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    !name.is_empty() && !name.starts_with('.') && name.bytes().all(is_plain)
}

impl Hub {
    /// Asks what a model consists of. `told` hears of every try that failed.
    pub(crate) fn listing(&self, model: &str, revision: &str, told: &dyn Fn(&str)) -> Result<Listing> {
        let url = format!("{}/api/models/{model}/revision/{revision}?blobs=true", self.base);
        let text = self.persist(&AtomicBool::new(false), told, |_| {
            let mut response = self.get(&url, None)?;
            let body = response.body_mut().with_config().limit(LISTING_MAX).read_to_string();
            body.map_err(|error| match error {
                ureq::Error::BodyExceedsLimit(_) => {
                    Trouble::Fatal(nonsense(format!("{url}: more than {LISTING_MAX} bytes")))
                }
                error => broken(self.host(), error),
            })
        })?;
        let value: Value =
            serde_json::from_str(&text).map_err(|error| nonsense(format!("{url}: not JSON: {error}")))?;
        let hex = |text: &str, length: usize| {
            let is_hex = |byte: u8| byte.is_ascii_digit() || matches!(byte, b'a'..=b'f');
            text.len() == length && text.bytes().all(is_hex)
        };
        let commit = value["sha"].as_str().filter(|sha| hex(sha, 40));
        let commit = commit.ok_or_else(|| nonsense(format!("{url}: no commit")))?.to_owned();
        let siblings = value["siblings"].as_array().ok_or_else(|| nonsense(format!("{url}: no files")))?;
        // Entries in subfolders, and those whose names lead elsewhere, are nothing a run needs.
        let named = siblings.iter().filter(|file| file["rfilename"].as_str().is_some_and(plain));
        let files = named.map(|file| {
            let name = file["rfilename"].as_str().unwrap_or_default().to_owned();
            let large = file["lfs"]["sha256"].as_str().filter(|digest| hex(digest, 64));
            let small = file["blobId"].as_str().filter(|digest| hex(digest, 40));
            let digest = large.map(|digest| Digest::Sha256(digest.to_owned()));
            let digest = digest.or(small.map(|digest| Digest::Blob(digest.to_owned())));
            let bytes = file["size"].as_u64().or(file["lfs"]["size"].as_u64());
            match (bytes, digest) {
                (Some(bytes), Some(_)) if bytes > FILE_BYTES_MAX => Err(nonsense(format!(
                    "{url}: {name} has {bytes} bytes; files of at most {FILE_BYTES_MAX} are fetched"
                ))),
                (Some(bytes), Some(digest)) => Ok(Remote { name, bytes, digest }),
                _ => Err(nonsense(format!("{url}: {name} has no length or digest"))),
            }
        });
        Ok(Listing { commit, files: files.collect::<Result<_>>()? })
    }

    /// Address of a file at a commit.
    pub(super) fn address(&self, model: &str, commit: &str, name: &str) -> String {
        format!("{}/{model}/resolve/{commit}/{name}", self.base)
    }
}

impl Listing {
    /// A file by its name.
    pub(crate) fn file(&self, name: &str) -> Option<&Remote> {
        self.files.iter().find(|file| file.name == name)
    }
}

/// The files that a run needs, given the index where the model has one.
pub(crate) fn needed(listing: &Listing, index: Option<&[u8]>, include: &[Include]) -> Result<Vec<Remote>> {
    let refused = |message: String| Failure::new(Exit::Model, message);
    let mut wanted: Vec<String> = TEXT.map(str::to_owned).into();
    if include.contains(&Include::Vision) {
        wanted.extend(VISION.map(str::to_owned));
    }
    let mut shards = HashSet::new();
    match index {
        Some(index) => {
            let index = checkpoint::parse_index(index)?;
            wanted.push(INDEX.to_owned());
            for file in index.files {
                if !plain(&file) || listing.file(&file).is_none() {
                    let message = format!("{INDEX} names {file:?}, which the hub does not have");
                    return Err(refused(message).hint("this model was not uploaded whole"));
                }
                shards.insert(file.clone());
                wanted.push(file);
            }
        }
        None if listing.file(SINGLE).is_some() => wanted.push(SINGLE.to_owned()),
        None => {
            let other = listing.files.iter().find(|file| file.name.ends_with(".gguf"));
            let found = other.map_or(String::new(), |file| format!(", but {}", file.name));
            let message = format!("the model has no {INDEX} and no {SINGLE}{found}");
            return Err(refused(message).hint("name a repository with safetensors weights"));
        }
    }
    if include.contains(&Include::Mtp) {
        let is_sidecar =
            |name: &str| name.starts_with("mtp") && name.ends_with(".safetensors") && !shards.contains(name);
        wanted.extend(listing.files.iter().map(|file| file.name.clone()).filter(|name| is_sidecar(name)));
    }
    for name in [CONFIG, "tokenizer.json"] {
        if listing.file(name).is_none() {
            let message = format!("the model has no {name}");
            return Err(refused(message).hint("name a repository of a whole model"));
        }
    }
    Ok(wanted.iter().filter_map(|name| listing.file(name).cloned()).collect())
}
