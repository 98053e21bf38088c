//! The local store of pulled models: `OWNER/NAME/COMMIT` under its root, and in `OWNER/NAME/refs` a file for
//! each revision that was pulled, which names its commit.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Failure, Result};

/// Says where a folder of the store comes from.
pub(crate) const MANIFEST: &str = "clary.json";
/// Holds the revisions.
const REFS: &str = "refs";
/// End of the name of a folder that is being filled.
const PARTIAL: &str = "partial";
/// Longest manifest, bytes.
const MANIFEST_MAX: u64 = 64 << 20;
/// Shortest start of a commit that stands for it.
const COMMIT_SHORT: usize = 7;

/// `owner/name` or `owner/name@revision`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    owner: String,
    name: String,
    /// Branch, tag or commit, as typed.
    pub(crate) typed: Option<String>,
}

impl Name {
    /// Reads a name; `None` if it is none.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (path, revision) = match text.split_once('@') {
            Some((path, revision)) => (path, Some(revision)),
            None => (text, None),
        };
        let (owner, name) = path.split_once('/')?;
        let is_plain = [Some(owner), Some(name), revision].into_iter().flatten().all(crate::hub::plain);
        is_plain.then(|| Self { owner: owner.into(), name: name.into(), typed: revision.map(Into::into) })
    }

    /// `owner/name`.
    pub(crate) fn model(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// The revision that is meant.
    pub(crate) fn revision(&self) -> &str {
        self.typed.as_deref().unwrap_or("main")
    }
}

/// The store.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    /// Its folder, which may not exist yet.
    pub(crate) root: PathBuf,
}

/// A model in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// `owner/name`.
    pub(crate) model: String,
    /// Revisions that lead to it.
    pub(crate) revisions: Vec<String>,
    /// 40 hexadecimal digits.
    pub(crate) commit: String,
    /// Whether all of it is there.
    pub(crate) is_whole: bool,
    /// Its folder.
    pub(crate) dir: PathBuf,
}

impl Store {
    /// The store in a folder, else in that of `CLARY_STORE`, else in the user's data folder.
    pub(crate) fn new(typed: Option<&Path>) -> Result<Self> {
        let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let usual = || {
            let data = folder("XDG_DATA_HOME").or_else(|| Some(folder("HOME")?.join(".local/share")))?;
            Some(data.join("clary/models"))
        };
        let named = || std::env::var_os("CLARY_STORE").filter(|path| !path.is_empty()).map(PathBuf::from);
        let root = typed.map(Path::to_owned).or_else(named).or_else(usual);
        let root = root.ok_or_else(|| {
            Failure::usage("there is no store: neither HOME nor XDG_DATA_HOME is set")
                .hint("--store DIR or CLARY_STORE names a folder")
        })?;
        Ok(Self { root })
    }

    fn home(&self, name: &Name) -> PathBuf {
        self.root.join(&name.owner).join(&name.name)
    }

    /// Folder of a model at a commit.
    pub(crate) fn place(&self, name: &Name, commit: &str) -> PathBuf {
        self.home(name).join(commit)
    }

    /// Folder of a pulled model.
    pub(crate) fn find(&self, name: &Name) -> Option<PathBuf> {
        let home = self.home(name);
        if let Some(commit) = commit_of(&home, name.revision()) {
            let dir = home.join(commit);
            return dir.join(MANIFEST).is_file().then_some(dir);
        }
        let start = name.typed.as_ref().filter(|start| start.len() >= COMMIT_SHORT)?;
        let names = fs::read_dir(&home).ok()?.flatten();
        let mut found = names.map(|entry| entry.path()).filter(|path| {
            let is_start = path
                .file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| name.starts_with(start.as_str()));
            is_start && path.join(MANIFEST).is_file()
        });
        found.next().filter(|_| found.next().is_none())
    }

    /// Notes which commit a revision is.
    pub(crate) fn refer(&self, name: &Name, commit: &str) -> Result {
        let refs = self.home(name).join(REFS);
        let path = refs.join(name.revision());
        let failed = |error: io::Error| Failure::file(&path, &error);
        fs::create_dir_all(&refs).map_err(failed)?;
        let partial = refs.join(format!(".{}.{PARTIAL}", name.revision()));
        let written = fs::File::create(&partial).and_then(|mut file| {
            file.write_all(commit.as_bytes())?;
            file.sync_all()?;
            fs::rename(&partial, &path)
        });
        written.map_err(failed)
    }

    /// All models, by name.
    pub(crate) fn entries(&self) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for owner in folders(&self.root)? {
            for home in folders(&owner)? {
                let model = [&owner, &home].map(|path| text(path.file_name())).join("/");
                let refs = files(&home.join(REFS));
                for dir in folders(&home)? {
                    let folder = text(dir.file_name());
                    let (commit, is_partial) = match folder.strip_suffix(&format!(".{PARTIAL}")) {
                        Some(commit) => (commit.to_owned(), true),
                        None => (folder, false),
                    };
                    let is_whole = !is_partial && dir.join(MANIFEST).is_file();
                    if commit == REFS || !(is_whole || is_partial) {
                        continue;
                    }
                    let leads = |name: &&String| commit_of(&home, name).as_deref() == Some(&commit);
                    let revisions = refs.iter().filter(leads).cloned().collect();
                    entries.push(Entry { model: model.clone(), revisions, commit, is_whole, dir });
                }
            }
        }
        entries.sort_by(|a, b| (&a.model, &a.commit).cmp(&(&b.model, &b.commit)));
        Ok(entries)
    }

    /// Removes a model's folder, and the revisions that lead to it.
    pub(crate) fn remove(&self, entry: &Entry) -> Result {
        let home = entry.dir.parent().unwrap_or(&self.root);
        let failed = |path: &Path, error: io::Error| Failure::file(path, &error);
        if entry.is_whole {
            for revision in &entry.revisions {
                let path = home.join(REFS).join(revision);
                fs::remove_file(&path).map_err(|error| failed(&path, error))?;
            }
        }
        fs::remove_dir_all(&entry.dir).map_err(|error| failed(&entry.dir, error))?;
        // Folders that are empty now; others stay, which is what this call refuses.
        for empty in [home.join(REFS), home.to_owned(), home.parent().unwrap_or(home).to_owned()] {
            let _ = fs::remove_dir(empty);
        }
        Ok(())
    }
}

/// The name of a folder while it is being filled.
pub(crate) fn partial(dir: &Path) -> PathBuf {
    let mut name = dir.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{PARTIAL}"));
    dir.with_file_name(name)
}

/// What a folder says about where it comes from; null if nothing.
pub(crate) fn manifest(dir: &Path) -> Value {
    use std::io::Read;
    let mut text = String::new();
    let read =
        fs::File::open(dir.join(MANIFEST)).and_then(|file| file.take(MANIFEST_MAX).read_to_string(&mut text));
    read.ok().and_then(|_| serde_json::from_str(&text).ok()).unwrap_or(Value::Null)
}

/// Bytes of the files of a folder.
pub(crate) fn bytes(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.metadata().ok())
        .filter(|meta| meta.is_file())
        .map(|meta| meta.len())
        .sum()
}

fn commit_of(home: &Path, revision: &str) -> Option<String> {
    let text = fs::read_to_string(home.join(REFS).join(revision)).ok()?;
    let commit = text.trim();
    crate::hub::plain(commit).then(|| commit.to_owned())
}

fn text(name: Option<&std::ffi::OsStr>) -> String {
    name.unwrap_or_default().to_string_lossy().into_owned()
}

/// Folders in a folder; none if that does not exist.
fn folders(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Failure::file(dir, &error)),
    };
    Ok(entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect())
}

fn files(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| crate::hub::plain(name))
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "1111111111111111111111111111111111111111";
    const TWO: &str = "1111111222222222222222222222222222222222";

    fn name(text: &str) -> Name {
        Name::parse(text).unwrap()
    }

    #[test]
    fn names() {
        assert_eq!(name("a/b").revision(), "main");
        assert_eq!((name("a/b-c.1@v2").model(), name("a/b@v2").revision().len()), ("a/b-c.1".into(), 2));
        for wrong in ["a", "a/b/c", "./b", "../b", "a/..", "a/b@", "a/b@../x", "/b", "a/b c", "a/.b"] {
            assert_eq!(Name::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn models_are_found_listed_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(Some(dir.path())).unwrap();
        assert!(store.entries().unwrap().is_empty() && store.find(&name("a/b")).is_none());
        for (revision, commit) in [("a/b", ONE), ("a/b@v2", TWO)] {
            let place = store.place(&name(revision), commit);
            fs::create_dir_all(&place).unwrap();
            assert_eq!(store.find(&name(revision)), None, "it is not whole");
            fs::write(place.join(MANIFEST), "{}").unwrap();
            store.refer(&name(revision), commit).unwrap();
            assert_eq!(store.find(&name(revision)), Some(place));
        }
        fs::create_dir_all(partial(&store.place(&name("c/d"), ONE))).unwrap();
        assert!(store.find(&name("a/b@11111112")).unwrap().ends_with(TWO));
        assert_eq!(store.find(&name("a/b@1111111")), None, "it could be either");
        assert_eq!(store.find(&name("c/d")), None);
        let entries = store.entries().unwrap();
        let facts: Vec<_> = entries.iter().map(|entry| (entry.model.as_str(), entry.is_whole)).collect();
        assert_eq!(facts, [("a/b", true), ("a/b", true), ("c/d", false)]);
        assert_eq!(entries[1].revisions, ["v2"]);
        store.remove(&entries[1]).unwrap();
        assert_eq!((store.find(&name("a/b@v2")), store.entries().unwrap().len()), (None, 2));
        store.remove(&entries[0]).unwrap();
        store.remove(&entries[2]).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left over");
    }
}
