//! `clary pull`: a model from a hub into the store.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use crate::args::up_to;
use crate::error::{Exit, Failure, Result};
use crate::hub::{self, CONFIG, Fetch, Folder, Hub, INDEX, Include, Listing, Patience, Remote};
use crate::interrupt::Interrupt;
use crate::output::Output;
use crate::progress::{Progress, Unit};
use crate::store::{self, MANIFEST, Name, Store};
use crate::table;

/// Held while a folder is being filled; holds the commit.
const LOCK: &str = ".lock";
/// Longest config or index, bytes.
const SMALL_MAX: u64 = 256 << 20;
/// Longest name of a commit, bytes.
const COMMIT_MAX: u64 = 64;
/// Bytes that stay free.
const SPARE: u64 = 64 << 20;
/// How often progress is shown.
const SHOW_EVERY: Duration = Duration::from_millis(100);
/// Most files at a time.
const PARALLEL_MAX: usize = 16;

/// `pull`.
#[derive(Clone, Debug, Args)]
pub(crate) struct PullArgs {
    /// owner/name, or owner/name@revision: a branch, tag or commit
    pub(crate) name: String,
    /// Parts that a run can do without and that have files of their own
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_enum, default_value = "mtp,vision")]
    pub(crate) include: Vec<Include>,
    /// A folder outside the store, new or of an earlier pull
    #[arg(long, value_name = "DIR", conflicts_with = "store")]
    pub(crate) to: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) store: StoreArg,
    /// Address of the hub; CLARY_HUB_TOKEN or HF_TOKEN is its token
    #[arg(long, value_name = "URL", default_value = hub::URL, env = "CLARY_HUB")]
    pub(crate) hub: String,
    /// Files at a time
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = up_to::<PARALLEL_MAX>)]
    pub(crate) parallel: usize,
}

/// `--store`.
#[derive(Clone, Debug, Args)]
pub(crate) struct StoreArg {
    /// Folder of the store [default: CLARY_STORE, else clary/models in the user's data folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) store: Option<PathBuf>,
}

/// Fetches a model.
pub(crate) fn pull(args: &PullArgs, output: &Output) -> Result {
    // The address of a model's page is what people copy.
    let page = args.name.strip_prefix(args.hub.trim_end_matches('/')).and_then(|rest| rest.strip_prefix('/'));
    let name = page.unwrap_or(&args.name).trim_end_matches('/');
    let name = Name::parse(name).ok_or_else(|| {
        Failure::usage(format!("{}: no name of a model", args.name))
            .hint("owner/name, or owner/name@revision")
    })?;
    // Ctrl-C ends the process at once: what is on disk is what the next pull goes on from.
    Interrupt::install()?;
    let token = |name: &str| std::env::var(name).ok().filter(|token| !token.is_empty());
    let token = token("CLARY_HUB_TOKEN").or_else(|| token("HF_TOKEN"));
    let hub = Hub::new(&args.hub, token, Patience::default())?;
    let store = Store::new(args.store.store.as_deref())?;
    output.note(&format!("asking {} for {} at {}", hub.host(), name.model(), name.revision()))?;
    // A note that nobody can see is no reason to stop.
    let told = |why: &str| drop(output.note(&format!("no answer: {why}")));
    let listing = hub.listing(&name.model(), name.revision(), &told)?;
    let place = args.to.clone().unwrap_or_else(|| store.place(&name, &listing.commit));
    let job = Job { hub: &hub, name: &name, listing: &listing, place: &place, args };
    let pulled = job.run(output)?;
    if args.to.is_none() {
        store.refer(&name, &listing.commit)?;
    }
    job.report(&pulled, output)
}

struct Job<'a> {
    hub: &'a Hub,
    name: &'a Name,
    listing: &'a Listing,
    place: &'a Path,
    args: &'a PullArgs,
}

/// What a pull did.
struct Pulled {
    files: usize,
    bytes: u64,
    /// Bytes that came over the network; `None` if all was there.
    fetched: Option<u64>,
}

impl Job<'_> {
    fn run(&self, output: &Output) -> Result<Pulled> {
        if let Some(there) = self.there()? {
            return Ok(there);
        }
        let partial = store::partial(self.place);
        fs::create_dir_all(&partial).map_err(|error| Failure::file(&partial, &error))?;
        let lock = lock(&partial)?;
        adopt(&partial, &lock, &self.listing.commit)?;
        let model = self.name.model();
        let folder = Folder { model: &model, commit: &self.listing.commit, dir: &partial };
        let (files, small) = self.choose(folder)?;
        let bytes = files.iter().map(|file| file.bytes).sum();
        let fetched = small + self.fetch(folder, &files, bytes, output)?;
        self.finish(&partial, &files)?;
        drop(lock);
        Ok(Pulled { files: files.len(), bytes, fetched: Some(fetched) })
    }

    /// What is there already. A folder that holds something else is refused.
    fn there(&self) -> Result<Option<Pulled>> {
        let manifest = store::manifest(self.place);
        let (commit, model) = (manifest["commit"].as_str(), manifest["model"].as_str());
        if commit == Some(&self.listing.commit) && model == Some(&self.name.model()) {
            let files = manifest["files"].as_array().map_or(0, Vec::len);
            return Ok(Some(Pulled { files, bytes: store::bytes(self.place), fetched: None }));
        }
        let is_empty = match fs::read_dir(self.place) {
            Ok(mut entries) => entries.next().is_none(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => true,
            Err(error) => return Err(Failure::file(self.place, &error)),
        };
        match is_empty {
            true => Ok(None),
            false => {
                let message = format!("{}: is not empty and not this model", self.place.display());
                Err(Failure::usage(message).hint("--to names a folder that is new or empty"))
            }
        }
    }

    /// Fetches the config and the index, and says which files are needed and how many bytes came.
    fn choose(&self, folder: Folder<'_>) -> Result<(Vec<Remote>, u64)> {
        let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        let mut fetched = 0;
        let mut small = |name: &str| -> Result<Option<Vec<u8>>> {
            let Some(remote) = self.listing.file(name) else { return Ok(None) };
            if remote.bytes > SMALL_MAX {
                let message =
                    format!("{name} has {}; no such file is that large", table::bytes(remote.bytes));
                return Err(Failure::new(Exit::Model, message).hint("is this a model?"));
            }
            fetched += Fetch::new(self.hub, folder, remote, &done, &stop).run()?;
            let path = folder.dir.join(name);
            fs::read(&path).map(Some).map_err(|error| Failure::file(&path, &error))
        };
        // Another family, or a width that nothing runs, is refused before its weights are fetched.
        if let Some(config) = small(CONFIG)? {
            checkpoint::parse_config(&config)?;
        }
        let index = small(INDEX)?;
        Ok((hub::needed(self.listing, index.as_deref(), &self.args.include)?, fetched))
    }

    fn fetch(&self, folder: Folder<'_>, files: &[Remote], bytes: u64, output: &Output) -> Result<u64> {
        let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        let jobs: Vec<Fetch<'_>> =
            files.iter().map(|file| Fetch::new(self.hub, folder, file, &done, &stop)).collect();
        let there: u64 = jobs.iter().map(Fetch::there).sum();
        room(free(folder.dir), bytes - there.min(bytes), folder.dir)?;
        let mut progress = Progress::new(output, "pulling", Unit::Bytes);
        let queue = Mutex::new(jobs.iter().collect::<VecDeque<_>>());
        let (sender, results) = mpsc::channel();
        std::thread::scope(|scope| {
            for _ in 0..self.args.parallel.min(jobs.len()) {
                let (sender, queue) = (sender.clone(), &queue);
                scope.spawn(move || {
                    while let Some(job) = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front() {
                        // The receiver lives until all workers are done.
                        let _ = sender.send(job.run());
                    }
                });
            }
            drop(sender);
            let mut fetched = Ok(0);
            loop {
                match results.recv_timeout(SHOW_EVERY) {
                    Ok(Ok(count)) => fetched = fetched.map(|sum: u64| sum + count),
                    Ok(Err(failure)) => {
                        // The others end soon, with failures that say nothing.
                        stop.store(true, Ordering::Relaxed);
                        queue.lock().unwrap_or_else(PoisonError::into_inner).clear();
                        fetched = fetched.and(Err(failure));
                    }
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    Err(mpsc::RecvTimeoutError::Disconnected) => return fetched,
                }
                progress.set(done.load(Ordering::Relaxed).min(bytes), bytes);
            }
        })
    }

    /// Writes the manifest and gives the folder its name.
    fn finish(&self, partial: &Path, files: &[Remote]) -> Result {
        let list: Vec<Value> =
            files.iter().map(|file| json!({"name": file.name, "bytes": file.bytes})).collect();
        let manifest = json!({"model": self.name.model(), "revision": self.name.revision(),
            "commit": self.listing.commit, "hub": self.args.hub, "files": list});
        let failed = |error: io::Error| Failure::file(partial, &error);
        let written = File::create(partial.join(MANIFEST)).and_then(|mut file| {
            file.write_all(format!("{manifest:#}\n").as_bytes())?;
            file.sync_all()
        });
        written.map_err(failed)?;
        fs::remove_file(partial.join(LOCK)).map_err(failed)?;
        // An empty folder may be in the way, which --to allows.
        let _ = fs::remove_dir(self.place);
        fs::rename(partial, self.place).map_err(failed)
    }

    fn report(&self, pulled: &Pulled, output: &Output) -> Result {
        let (name, commit) = (self.name.model(), &self.listing.commit);
        if output.json {
            let document = json!({"model": name, "revision": self.name.revision(), "commit": commit,
                "dir": self.place.display().to_string(), "files": pulled.files, "bytes": pulled.bytes,
                "fetched_bytes": pulled.fetched.unwrap_or(0)});
            return Ok(output.document(&document)?);
        }
        let size = format!("{} files, {}", pulled.files, table::bytes(pulled.bytes));
        let how = match pulled.fetched {
            None => "is there already".to_owned(),
            Some(fetched) if fetched < pulled.bytes => {
                format!("is whole now, {} of it fetched", table::bytes(fetched))
            }
            Some(_) => "is there".to_owned(),
        };
        let place = self.place.display();
        Ok(output.out(&format!("{name} {how}: {size}\n{:.12}  {place}\n", commit))?)
    }
}

/// Takes a folder for this process alone.
fn lock(dir: &Path) -> Result<File> {
    let path = dir.join(LOCK);
    let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    let file = open.map_err(|error| Failure::file(&path, &error))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            let message = format!("{}: another pull is filling it", dir.display());
            Err(Failure::new(Exit::Failure, message).hint("wait for it, or end it and start this again"))
        }
        Err(TryLockError::Error(error)) => Err(Failure::file(&path, &error)),
    }
}

/// Takes over what an earlier pull left. Files of another commit count as begun: their digests decide
/// whether they are what is wanted.
fn adopt(dir: &Path, mut lock: &File, commit: &str) -> Result {
    let failed = |error: io::Error| Failure::file(dir, &error);
    let mut before = String::new();
    lock.take(COMMIT_MAX).read_to_string(&mut before).map_err(failed)?;
    if before == commit {
        return Ok(());
    }
    for entry in fs::read_dir(dir).map_err(failed)?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_begun = name.ends_with(".partial") || name.ends_with(".etag");
        if hub::plain(&name) && !is_begun {
            fs::rename(entry.path(), dir.join(format!("{name}.partial"))).map_err(failed)?;
        }
    }
    let written = lock.set_len(0).and_then(|()| lock.seek(SeekFrom::Start(0)));
    written.and_then(|_| lock.write_all(commit.as_bytes())).map_err(failed)
}

/// Bytes free for this user where a folder lies; `None` if the system does not say.
fn free(dir: &Path) -> Option<u64> {
    rustix::fs::statvfs(dir).ok().map(|stat| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Refuses what does not fit the disk.
fn room(free: Option<u64>, wanted: u64, dir: &Path) -> Result {
    match free {
        Some(free) if wanted > 0 && wanted + SPARE > free => {
            let (wanted, free) = (table::bytes(wanted), table::bytes(free));
            let message = format!("{}: {wanted} are to come, {free} are free", dir.display());
            let hint = "make room (`clary list`, `clary rm NAME`), or --to a folder on another disk";
            Err(Failure::new(Exit::Failure, message).hint(hint))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_before() {
        let check = |free, wanted| room(free, wanted, Path::new("x")).is_ok();
        assert!(check(None, 9) && check(Some(0), 0) && check(Some(SPARE + 5), 5));
        assert!(!check(Some(SPARE + 5), 6));
        let failure = room(Some(0), 1 << 30, Path::new("x")).unwrap_err();
        assert!(failure.message.contains("1.0 GiB are to come"), "{failure:?}");
    }
}
