//! Entries of other formats: as good as absent, and gone after the first look.

use std::sync::{Arc, Mutex};

use model::PAGE_TOKENS;

use super::*;
use crate::clock::ManualClock;
use crate::core::{Core, Settings};
use crate::disk_format::tests::{BEFORE, rewrite};
use crate::event::{Event, Reply};
use crate::fake::{FakeConfig, FakeModel, solo};
use crate::request::Request;

const DIGEST: [u8; 32] = [3; 32];

/// A folder of this test alone.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("engine-disk-{name}-{}", std::process::id()));
    // What an earlier run left; there may be nothing.
    let _ = fs::remove_dir_all(&folder);
    folder
}

fn disk(folder: &Path) -> DiskSettings {
    DiskSettings { folder: folder.to_owned(), bytes_max: 1 << 20, digest: DIGEST }
}

/// All files of a kind.
fn each(folder: &Path, kind: &str) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).expect("it is there").map(|file| file.expect("readable").path());
    files.filter(|path| path.extension().is_some_and(|found| found == kind)).collect()
}

/// An entry of a page and ten tokens; `number` tells it from others, which share the page.
fn entry(number: u64) -> Entry {
    let keys: Vec<u64> = (0..PAGE_TOKENS as u64 + 9).chain([number]).collect();
    let chain = |keys: &[u64]| Chain::new(&DIGEST, "n").extend(keys);
    let (name, page) = (chain(&keys), chain(&keys[..PAGE_TOKENS]));
    let (open, state) = (vec![2], vec![4, 5]);
    Entry { chain: name, namespace: "n".into(), keys, pages: vec![(page, vec![1; 9])], open, state }
}

fn wanted(entry: &Entry) -> Wanted {
    Wanted { chain: entry.chain, namespace: "n".into(), keys: entry.keys.clone(), shared: 0 }
}

/// One entry in a fresh folder.
fn written(name: &str) -> (PathBuf, Wanted, Entry) {
    let folder = folder(name);
    let (mut files, found) = Files::open(disk(&folder)).expect("it can be made");
    assert!(found.is_empty() && fs::read_dir(&folder).expect("made").next().is_none());
    let entry = entry(0);
    assert!(files.write(entry.clone()).is_empty());
    check_read(&mut files, &wanted(&entry));
    (folder, wanted(&entry), entry)
}

fn check_read(files: &mut Files, wanted: &Wanted) {
    let found = files.read(wanted).expect("it was written");
    assert_eq!((found.pages, found.open, found.state), (vec![vec![1; 9]], vec![2], vec![4, 5]));
}

/// What a crash left goes when the folder is opened; what is not the tier's stays and does not count.
#[test]
fn strays_are_removed_and_others_let_alone() {
    let (folder, wanted, entry) = written("strays");
    let (chain, own) = (|kind: &str| format!("{:032x}.{kind}", 7), entry.pages[0].0.name(Kind::Page));
    let others = ["notes.page", "film.partial", "thesis.state"].map(str::to_owned);
    let strays = [chain("page"), chain("state"), chain("partial")];
    let page = fs::read(folder.join(&own)).expect("written");
    others.iter().chain(&strays).for_each(|name| fs::write(folder.join(name), &page).expect("ours"));
    let foreign = format!("{:032x}.page", 8);
    let mut bytes = page.clone();
    bytes[8] ^= 1;
    fs::write(folder.join(&foreign), bytes).expect("ours");
    let (mut files, found) = Files::open(disk(&folder)).expect("a folder");
    assert_eq!(found, [News::StateFound(wanted.chain, PAGE_TOKENS + 10), News::PageFound(entry.pages[0].0)]);
    let is_there = |name: &String| folder.join(name).exists();
    assert!(others.iter().chain([&foreign]).all(is_there) && !strays.iter().any(is_there));
    let counted = [own, wanted.chain.name(Kind::State)]
        .map(|name| fs::metadata(folder.join(name)).expect("there").len());
    assert_eq!(files.bytes, counted.iter().sum::<u64>());
    check_read(&mut files, &wanted);
    fs::remove_dir_all(&folder).expect("ours");
}

/// A page that rots does not spoil its place for ever.
#[test]
fn broken_pages_are_removed_and_written_again() {
    let (folder, wanted, entry) = written("broken");
    let page = &each(&folder, "page")[0];
    fs::write(page, b"torn").expect("it is ours");
    let (mut files, found) = Files::open(disk(&folder)).expect("broken files do not matter");
    assert_eq!(found.len(), 2);
    let gone = files.read(&wanted).expect_err("a page is torn");
    assert!(
        gone.contains(&News::StateGone(wanted.chain)) && gone.contains(&News::PageGone(entry.pages[0].0))
    );
    assert!(each(&folder, "state").is_empty() && each(&folder, "page").is_empty());
    assert_eq!(files.bytes, 0);
    assert!(files.write(entry).is_empty());
    check_read(&mut files, &wanted);
    fs::remove_dir_all(&folder).expect("ours");
}

/// Bytes of all files of a folder.
fn bytes_in(folder: &Path) -> u64 {
    let files = fs::read_dir(folder).expect("it is there");
    files.map(|file| file.and_then(|file| file.metadata()).map_or(0, |about| about.len())).sum()
}

/// What could not be written leaves nothing, is told, and can be written later. A full disk takes an older
/// entry's place.
#[test]
fn a_full_disk_loses_the_oldest_and_keeps_nothing_half() {
    let (folder, old, _) = written("full");
    let full = |entry: &Entry| {
        std::os::unix::fs::symlink("/dev/full", folder.join(entry.chain.name(Kind::Partial))).expect("ours");
    };
    let (mut files, _) = Files::open(disk(&folder)).expect("a folder");
    let [second, third] = [1, 2].map(entry);
    full(&second);
    let news = files.write(second.clone());
    assert!(news.contains(&News::StateGone(old.chain)), "{news:?}");
    assert!(!news.iter().any(|new| matches!(new, News::Failed(_))), "{news:?}");
    assert_eq!(each(&folder, "state").len(), 1);
    assert!(each(&folder, "partial").is_empty());
    files.evict();
    files.news.clear();
    full(&third);
    let news = files.write(third.clone());
    assert!(news.contains(&News::Failed(ErrorKind::StorageFull)), "{news:?}");
    assert!(news.contains(&News::StateGone(third.chain)), "{news:?}");
    assert!(news.contains(&News::PageGone(third.pages[0].0)), "{news:?}");
    assert_eq!((bytes_in(&folder), files.bytes), (0, 0));
    assert!(files.write(third.clone()).is_empty());
    check_read(&mut files, &wanted(&third));
    fs::remove_dir_all(&folder).expect("ours");
}

/// A limit that no state fits in would keep nothing, and say that it does.
#[test]
fn a_limit_below_one_state_is_refused() {
    let folder = folder("small");
    let limit = DiskSettings { bytes_max: 1, ..disk(&folder) };
    let settings = Settings { disk: Some(limit), ..Settings::new(64, vec![1]) };
    let model = Box::new(FakeModel::new(FakeConfig::default()));
    let refused = Core::new(model, settings, Arc::new(ManualClock::default())).err();
    assert!(matches!(refused, Some(crate::core::StartError::DiskTooSmall { .. })), "{refused:?}");
    assert!(!folder.exists());
}

/// A folder that takes no files is no place for a cache; one that goes is made again.
#[test]
fn folders_are_tried_and_made_again() {
    assert!(Files::open(disk(Path::new("/proc/self"))).is_err());
    let folder = folder("goes");
    let (mut files, _) = Files::open(disk(&folder)).expect("it can be made");
    fs::remove_dir_all(&folder).expect("ours");
    assert!(files.write(entry(0)).is_empty());
    check_read(&mut files, &wanted(&entry(0)));
    fs::remove_dir_all(&folder).expect("ours");
}

/// To remove one entry no other is read: pages stay that the index says are needed, whatever the files say.
#[test]
fn the_index_says_which_pages_are_needed() {
    let (folder, old, _) = written("index");
    let (mut files, _) = Files::open(disk(&folder)).expect("a folder");
    let second = entry(1);
    assert!(files.write(second.clone()).is_empty());
    let path = folder.join(second.chain.name(Kind::State));
    let whole = fs::read(&path).expect("written");
    fs::write(&path, b"").expect("ours");
    files.evict();
    assert_eq!(std::mem::take(&mut files.news), [News::StateGone(old.chain)]);
    fs::write(&path, whole).expect("ours");
    check_read(&mut files, &wanted(&second));
    fs::remove_dir_all(&folder).expect("ours");
}

/// Two servers keep one limit together, take over each other's entries and do not empty the folder.
#[test]
fn two_servers_share_a_folder() {
    let folder = folder("shared");
    let settings = DiskSettings { bytes_max: 20_000, ..disk(&folder) };
    let open = || Files::open(settings.clone()).expect("it can be made").0;
    let mut both = [open(), open()];
    for number in 0..400 {
        both[number % 2].write(entry(number as u64));
        assert!(bytes_in(&folder) <= 20_000 + 2 * 20_000 / LOOK_SHARE + 2_000, "{}", bytes_in(&folder));
    }
    let last = (390..400).map(entry).collect::<Vec<_>>();
    let there = |entry: &&Entry| folder.join(entry.chain.name(Kind::State)).exists();
    assert_eq!(last.iter().filter(there).count(), 10);
    assert!(each(&folder, "state").len() > 15);
    for files in &mut both {
        files.news.clear();
        files.look().expect("it is there");
        last.iter().for_each(|entry| check_read(files, &wanted(entry)));
        assert_eq!(files.bytes, bytes_in(&folder));
    }
    fs::remove_dir_all(&folder).expect("ours");
}

#[test]
fn files_of_an_older_format_are_misses() {
    let older = |bytes: &mut Vec<u8>| bytes[..8].copy_from_slice(b"CLARYKV0");
    for kind in ["state", "page"] {
        let (folder, wanted, _) = written(&format!("older-{kind}"));
        each(&folder, kind).iter().for_each(|path| rewrite(path, older));
        let (mut files, found) = Files::open(disk(&folder)).expect("foreign files do not matter");
        assert_eq!(found.len(), 2 * usize::from(kind == "page"), "{kind}");
        assert!(files.read(&wanted).is_err(), "{kind}");
        assert!(each(&folder, "state").is_empty(), "{kind}: it is not looked at again");
        fs::remove_dir_all(&folder).expect("ours");
    }
}

/// Answers a request; its tokens and what came from the cache.
fn answer(core: &mut Core, request: Request) -> (Vec<u32>, usize) {
    let heard = Arc::new(Mutex::new((Vec::new(), 0)));
    let mine = heard.clone();
    let sink = move |event: Event| {
        let mut heard = mine.lock().expect("no panic");
        match event {
            Event::Tokens { tokens, .. } => heard.0.extend(tokens),
            Event::Admitted { cache, .. } => heard.1 = cache.hit_tokens,
            _ => {}
        }
    };
    let (reply, _ticket) = Reply::new(Box::new(sink));
    core.submit(core.limits().check(request).expect("it fits"), reply);
    while core.tick() {}
    heard.lock().expect("no panic").clone()
}

/// A snapshot whose own form is an older one, in a file of today's: the model refuses it, all is computed.
#[test]
fn snapshots_of_an_older_format_are_misses() {
    let folder = folder("older-snapshot");
    let config = FakeConfig::default();
    let start = || {
        let settings = Settings { disk: Some(disk(&folder)), ..Settings::new(64, vec![1]) };
        let model = Box::new(FakeModel::new(config.clone()));
        Core::new(model, settings, Arc::new(ManualClock::default())).expect("large enough")
    };
    let request = || Request::new((0..150).map(|at| 2 + at % 50).collect(), 12);
    let expected = solo(&config, &request(), 0, &[1]).tokens;
    let mut core = start();
    assert_eq!(answer(&mut core, request()), (expected.clone(), 0));
    core.persist();
    assert_eq!(answer(&mut start(), request()), (expected.clone(), 149), "from disk");
    for path in each(&folder, "state") {
        rewrite(&path, |bytes| {
            let mut state = State::parse(&bytes[BEFORE..]).expect("whole");
            state.state.pop();
            bytes.truncate(BEFORE);
            bytes.extend(state.bytes());
        });
    }
    assert_eq!(answer(&mut start(), request()), (expected, 0), "computed");
    fs::remove_dir_all(&folder).expect("ours");
}
