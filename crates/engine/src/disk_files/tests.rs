//! Entries of other formats: as good as absent, and gone after the first look.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use super::*;
use crate::clock::ManualClock;
use crate::core::{Core, Settings};
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

/// Changes a file and makes its checksum right again, as another version would have written it.
fn rewrite(path: &Path, change: impl Fn(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).expect("it is there");
    bytes.truncate(bytes.len() - CHECKSUM);
    change(&mut bytes);
    let sum = checksum(&bytes);
    bytes.extend(sum);
    fs::write(path, bytes).expect("it is ours");
}

/// All files of a kind.
fn each(folder: &Path, kind: &str) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).expect("it is there").map(|file| file.expect("readable").path());
    files.filter(|path| path.extension().is_some_and(|found| found == kind)).collect()
}

/// One entry of a page and ten tokens, in a fresh folder.
fn written(name: &str) -> (PathBuf, Wanted, Entry) {
    let folder = folder(name);
    let (mut files, listing) = Files::open(disk(&folder)).expect("it can be made");
    assert!(listing.states.is_empty() && listing.pages.is_empty());
    let keys: Vec<u64> = (0..PAGE_TOKENS as u64 + 10).collect();
    let chain = |keys: &[u64]| Chain::new(&DIGEST, "n").extend(keys);
    let wanted =
        Wanted { name: chain(&keys).name("state"), namespace: "n".into(), keys: keys.clone(), shared: 0 };
    let page = chain(&keys[..PAGE_TOKENS]).name("page");
    let (open, state) = (vec![2], vec![4, 5]);
    let name = wanted.name.clone();
    let entry = Entry { name, namespace: "n".into(), keys, pages: vec![(page, vec![1; 9])], open, state };
    assert!(files.write(entry.clone()).is_empty());
    check_read(&mut files, &wanted);
    (folder, wanted, entry)
}

fn check_read(files: &mut Files, wanted: &Wanted) {
    let found = files.read(wanted).ok().expect("it was written");
    assert_eq!((found.pages, found.open, found.state), (vec![vec![1; 9]], vec![2], vec![4, 5]));
}

/// What a crash left goes when the folder is opened; what is not the tier's stays and does not count.
#[test]
fn strays_are_removed_and_others_let_alone() {
    let (folder, wanted, entry) = written("strays");
    let (chain, own) = (|kind: &str| format!("{:032x}.{kind}", 7), entry.pages[0].0.as_str());
    let others = ["notes.page", "film.partial", "thesis.state"].map(str::to_owned);
    let strays = [chain("page"), chain("state"), chain("partial")];
    let page = fs::read(folder.join(own)).expect("written");
    others.iter().chain(&strays).for_each(|name| fs::write(folder.join(name), &page).expect("ours"));
    let foreign = format!("{:032x}.page", 8);
    let mut bytes = page.clone();
    bytes[8] ^= 1;
    fs::write(folder.join(&foreign), bytes).expect("ours");
    let (mut files, listing) = Files::open(disk(&folder)).expect("a folder");
    assert_eq!(
        (&listing.states[..], &listing.pages[..]),
        (&[(wanted.name.clone(), 74)][..], &[own.to_owned()][..])
    );
    let is_there = |name: &String| folder.join(name).exists();
    assert!(others.iter().chain([&foreign]).all(is_there) && !strays.iter().any(is_there));
    let counted = [own, &wanted.name].map(|name| fs::metadata(folder.join(name)).expect("there").len());
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
    let (mut files, listing) = Files::open(disk(&folder)).expect("broken files do not matter");
    assert_eq!((listing.states.len(), listing.pages.len()), (1, 1));
    let gone = files.read(&wanted).err().expect("a page is torn");
    assert!(matches!(&gone[..], [Gone::State(_), Gone::Page(name)] if *name == entry.pages[0].0));
    assert!(each(&folder, "state").is_empty() && each(&folder, "page").is_empty());
    assert_eq!(files.bytes, 0);
    assert!(files.write(entry).is_empty());
    check_read(&mut files, &wanted);
    fs::remove_dir_all(&folder).expect("ours");
}

#[test]
fn files_of_an_older_format_are_misses() {
    let older = |bytes: &mut Vec<u8>| bytes[..8].copy_from_slice(b"CLARYKV0");
    for kind in ["state", "page"] {
        let (folder, wanted, _) = written(&format!("older-{kind}"));
        each(&folder, kind).iter().for_each(|path| rewrite(path, older));
        let (mut files, listing) = Files::open(disk(&folder)).expect("foreign files do not matter");
        assert_eq!(listing.states.len(), usize::from(kind == "page"), "{kind}");
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
            let mut state = State::parse(&bytes[HEADER..]).expect("whole");
            state.state.pop();
            bytes.truncate(HEADER);
            bytes.extend(state.bytes());
        });
    }
    assert_eq!(answer(&mut start(), request()), (expected, 0), "computed");
    fs::remove_dir_all(&folder).expect("ours");
}
