//! Files from a hub that misbehaves.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;

use self::stub::{Reply, Seen, Stub};
use super::listing::Digest;
use super::*;

#[path = "../../tests/stub/mod.rs"]
mod stub;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Bytes of the file that is fetched.
fn bytes() -> Vec<u8> {
    (0..100_000u32).flat_map(|number| number.to_le_bytes()).collect()
}

fn digest() -> Digest {
    use sha2::Digest as _;
    Digest::Sha256(crate::table::hex(&sha2::Sha256::digest(bytes())))
}

fn hub(stub: &Stub) -> Hub {
    let patience = Patience { tries: 3, pause: Duration::ZERO, silence: Duration::from_millis(300) };
    Hub::new(&stub.url, Some("secret".into()), patience).unwrap()
}

/// Fetches the file into a folder: bytes that came, and what the file holds then.
fn fetch(stub: &Stub, dir: &Path, digest: Digest) -> Result<(u64, Vec<u8>)> {
    let remote = Remote { name: "a.bin".into(), bytes: bytes().len() as u64, digest };
    let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let folder = Folder { model: "o/n", commit: COMMIT, dir };
    let hub = hub(stub);
    let fetched = Fetch::new(&hub, folder, &remote, &done, &stop).run()?;
    assert_eq!(done.load(Ordering::Relaxed), remote.bytes, "all of it is counted once");
    let mut left: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.retain(|name| name != "a.bin");
    assert!(left.is_empty(), "{left:?}");
    Ok((fetched, fs::read(dir.join("a.bin")).unwrap()))
}

/// Says what to answer.
type Answer = Box<dyn Fn(&Seen) -> Reply + Send + Sync>;

/// A hub whose answers depend on how often it was asked; the last one goes on.
fn script(answers: Vec<Answer>) -> Stub {
    let asked = AtomicUsize::new(0);
    Stub::start(move |seen| answers[asked.fetch_add(1, Ordering::SeqCst).min(answers.len() - 1)](seen))
}

fn good() -> Answer {
    Box::new(|seen| Reply::file(seen, &bytes(), "\"1\""))
}

fn always(reply: Reply) -> Answer {
    Box::new(move |_| reply.clone())
}

/// A hub that misbehaves like this at first must give the file in the end.
#[track_caller]
fn recovers(first: Vec<Answer>) -> (u64, Vec<Seen>) {
    let dir = tempfile::tempdir().unwrap();
    let stub = script(first.into_iter().chain([good()]).collect());
    let (fetched, found) = fetch(&stub, dir.path(), digest()).unwrap();
    assert_eq!(found, bytes());
    (fetched, stub.seen())
}

#[test]
fn a_broken_transfer_goes_on_where_it_ended() {
    let half = bytes().len() / 2;
    let whole = || Reply::ok(bytes()).with("etag", "\"1\"");
    let (fetched, seen) = recovers(vec![always(whole().cut(half))]);
    assert_eq!((fetched, seen[1].start()), (bytes().len() as u64, Some(half)));
    assert_eq!(seen[1].header("if-range"), Some("\"1\""));
    // Nothing comes any more, on an open connection.
    let (_, seen) = recovers(vec![always(whole().cut(half).hang())]);
    assert_eq!(seen[1].start(), Some(half));
    // The range is ignored: what comes is the whole file again.
    let (fetched, _) = recovers(vec![always(whole().cut(half)), always(whole())]);
    assert_eq!(fetched as usize, bytes().len() + half);
}

#[test]
fn another_file_between_two_ranges_is_fetched_anew() {
    let half = bytes().len() / 2;
    let old = || Reply::ok(vec![7; bytes().len()]).with("etag", "\"0\"").cut(half);
    let (_, seen) = recovers(vec![always(old())]);
    assert_eq!(seen[1].header("if-range"), Some("\"0\""));
    // A hub that does not look at If-Range sends the rest of the new file.
    let rest = || {
        let range = format!("bytes {half}-{}/{}", bytes().len() - 1, bytes().len());
        let rest = Reply { body: bytes()[half..].into(), ..Reply::status(206) };
        rest.with("content-range", range)
    };
    recovers(vec![always(old()), always(rest().with("etag", "\"1\""))]);
    // Nor has it tags: the digest tells.
    let untagged = || Reply::ok(vec![7; bytes().len()]).cut(half);
    recovers(vec![always(untagged()), always(rest())]);
    let elsewhere = Reply { body: bytes(), ..Reply::status(206) }.with("content-range", "bytes 0-9/10");
    recovers(vec![always(old()), always(elsewhere)]);
    recovers(vec![always(old()), always(Reply::status(416))]);
}

#[test]
fn a_busy_hub_is_asked_again() {
    recovers(vec![always(Reply::status(503)), always(Reply::status(500))]);
    recovers(vec![always(Reply::status(429).with("retry-after", "0"))]);
    let dir = tempfile::tempdir().unwrap();
    let fails = |reply: Reply, text: &str, times: usize| {
        let stub = script(vec![always(reply)]);
        let failure = fetch(&stub, dir.path(), digest()).unwrap_err();
        assert_eq!((failure.exit, stub.seen().len()), (Exit::Network, times), "{failure:?}");
        assert!(failure.message.contains(text), "{failure:?}");
    };
    fails(Reply::status(502), "status 502 (3 times)", 3);
    fails(Reply::status(429).with("retry-after", "86400"), "86400 s", 1);
    fails(Reply::status(403), "not allowed", 1);
    fails(Reply::status(404), "no such thing", 1);
    fails(Reply::ok(bytes()).cut(1000), "(3 times)", 3);
    let longer = [bytes(), vec![0]].concat();
    fails(Reply::ok(longer), "longer than", 1);
}

#[test]
fn damaged_bytes_never_get_the_name() {
    let dir = tempfile::tempdir().unwrap();
    let mut wrong = bytes();
    wrong[5] ^= 1;
    // What an earlier run left is damaged: all is fetched anew.
    fs::write(dir.path().join("a.bin.partial"), &wrong[..1000]).unwrap();
    let stub = script(vec![good()]);
    assert_eq!(fetch(&stub, dir.path(), digest()).unwrap().1, bytes());
    assert_eq!(stub.seen().iter().map(Seen::start).collect::<Vec<_>>(), [Some(1000), None]);
    // It is longer than the file.
    fs::rename(dir.path().join("a.bin"), dir.path().join("a.bin.partial")).unwrap();
    let grown = [bytes(), bytes()].concat();
    fs::write(dir.path().join("a.bin.partial"), grown).unwrap();
    assert_eq!(fetch(&stub, dir.path(), digest()).unwrap().1, bytes());
    // It is whole: nothing is fetched.
    fs::rename(dir.path().join("a.bin"), dir.path().join("a.bin.partial")).unwrap();
    assert_eq!(fetch(&stub, dir.path(), digest()).unwrap().0, 0);
    fs::remove_file(dir.path().join("a.bin")).unwrap();

    let stub = script(vec![always(Reply::ok(wrong))]);
    let failure = fetch(&stub, dir.path(), digest()).unwrap_err();
    assert!(failure.exit == Exit::Network && failure.message.contains("SHA-256"), "{failure:?}");
    assert!(!dir.path().join("a.bin").exists());
    assert_eq!(dir.path().join("a.bin.partial").metadata().unwrap().len(), 0, "it is kept, and empty");
}

#[test]
fn small_files_are_checked_as_git_blobs() {
    use sha2::Digest as _;
    let blob = sha1::Sha1::new().chain_update(format!("blob {}\0", bytes().len())).chain_update(bytes());
    let digest = Digest::Blob(crate::table::hex(&blob.finalize()));
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(fetch(&script(vec![good()]), dir.path(), digest).unwrap().1, bytes());
    let other = tempfile::tempdir().unwrap();
    let failure = fetch(&script(vec![good()]), other.path(), Digest::Blob("00".into())).unwrap_err();
    assert!(failure.message.contains("git blob"), "{failure:?}");
}

#[test]
fn the_token_goes_to_the_hub_alone() {
    let other = Stub::start(|seen| Reply::file(seen, &bytes(), "\"1\""));
    let far = format!("{}/far", other.url);
    let stub = script(vec![
        always(Reply::status(307).with("location", "/near")),
        always(Reply::status(302).with("location", far)),
    ]);
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(fetch(&stub, dir.path(), digest()).unwrap().1, bytes());
    let paths: Vec<String> = stub.seen().iter().map(|seen| seen.path.clone()).collect();
    assert_eq!(paths, [format!("/o/n/resolve/{COMMIT}/a.bin"), "/near".into()]);
    assert!(stub.seen().iter().all(|seen| seen.header("authorization") == Some("Bearer secret")));
    assert_eq!((other.seen()[0].header("authorization"), other.seen()[0].path.as_str()), (None, "/far"));
    for wrong in ["http://example.com/a", "ftp://127.0.0.1/a", "//127.0.0.1/a", "nowhere"] {
        let stub = script(vec![always(Reply::status(302).with("location", wrong))]);
        let empty = tempfile::tempdir().unwrap();
        let failure = fetch(&stub, empty.path(), digest()).unwrap_err();
        assert!(failure.exit == Exit::Network && stub.seen().len() == 1, "{wrong}: {failure:?}");
    }
    let circle = script(vec![always(Reply::status(302).with("location", "/again"))]);
    let failure = fetch(&circle, tempfile::tempdir().unwrap().path(), digest()).unwrap_err();
    assert!(failure.message.contains("redirects"), "{failure:?}");
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("a.bin.partial")).unwrap();
    let failure = fetch(&script(vec![good()]), dir.path(), digest()).unwrap_err();
    assert!(failure.exit == Exit::Usage && failure.message.contains("a.bin.partial"), "{failure:?}");
}

fn listing(files: serde_json::Value) -> Result<Listing> {
    let body = json!({"sha": COMMIT, "siblings": files}).to_string();
    hub(&Stub::start(move |_| Reply::ok(body.clone()))).listing("o/n", "main", &|_| {})
}

#[test]
fn only_what_a_run_needs_and_nothing_outside() {
    let file = |name: &str| json!({"rfilename": name, "size": 3, "blobId": "a".repeat(40)});
    let names = [
        "config.json",
        "tokenizer.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "README.md",
        "original/w.pt",
        "../../.ssh/mtp.safetensors",
        "mtp/../x.safetensors",
        "mtp-4bit.safetensors",
        "preprocessor_config.json",
        "unused.safetensors",
        "model.safetensors.index.json",
        ".hidden.json",
    ];
    let found = listing(names.iter().map(|name| file(name)).collect()).unwrap();
    assert_eq!(found.commit, COMMIT);
    let index = |shard: &str| json!({"weight_map": {"a": "model-1.safetensors", "b": shard}}).to_string();
    let chosen = |shard: &str, include: &[Include]| -> Result<Vec<String>> {
        let files = needed(&found, Some(index(shard).as_bytes()), include)?;
        Ok(files.into_iter().map(|file| file.name).collect())
    };
    let base = [
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "model-1.safetensors",
        "model-2.safetensors",
    ];
    assert_eq!(chosen("model-2.safetensors", &[Include::None]).unwrap(), base);
    let all = chosen("model-2.safetensors", &[Include::Mtp, Include::Vision]).unwrap();
    assert!(all.contains(&"mtp-4bit.safetensors".into()) && all.contains(&"preprocessor_config.json".into()));
    assert_eq!(all.len(), base.len() + 2);
    for outside in ["../../etc/passwd", "/etc/passwd", "a\\b", "missing.safetensors", "c:x"] {
        assert_eq!(chosen(outside, &[]).unwrap_err().exit, Exit::Model, "{outside}");
    }
    assert_eq!(needed(&found, None, &[]).unwrap_err().exit, Exit::Model, "it has no weights");
}

#[test]
fn listings_that_make_no_sense() {
    for files in [
        json!(null),
        json!([{"rfilename": "a"}]),
        json!([{"rfilename": "a", "size": -1, "blobId": "a".repeat(40)}]),
        json!([{"rfilename": "a", "size": u64::MAX, "blobId": "a".repeat(40)}]),
        json!([{"rfilename": "a", "size": 1, "lfs": {"sha256": "../x"}}]),
    ] {
        assert_eq!(listing(files.clone()).unwrap_err().exit, Exit::Network, "{files}");
    }
    for body in ["", "[]", "{\"sha\": \"../../x\", \"siblings\": []}"] {
        let stub = Stub::start(move |_| Reply::ok(body));
        assert_eq!(hub(&stub).listing("o/n", "main", &|_| {}).unwrap_err().exit, Exit::Network, "{body}");
    }
    for wrong in ["http://example.com", "ftp://127.0.0.1", "example.com", ""] {
        assert_eq!(Hub::new(wrong, None, Patience::default()).unwrap_err().exit, Exit::Usage, "{wrong}");
    }
}

#[test]
fn a_hub_that_is_not_there_is_named_and_every_try_told() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    let patience = Patience { tries: 3, pause: Duration::ZERO, silence: Duration::from_millis(300) };
    let hub = Hub::new(&format!("http://{address}"), None, patience).unwrap();
    let tries = AtomicUsize::new(0);
    let told = |why: &str| {
        assert!(why.starts_with(&format!("{address}: ")) && why.contains(" of 3 in "), "{why}");
        tries.fetch_add(1, Ordering::Relaxed);
    };
    let failure = hub.listing("o/n", "main", &told).unwrap_err();
    assert_eq!((failure.exit, tries.into_inner()), (Exit::Network, 2));
    assert!(failure.message.starts_with(&address) && failure.message.ends_with("(3 times)"), "{failure:?}");
    let hint = failure.advice().unwrap();
    assert!(hint.contains(&address) && hint.contains("CLARY_HUB"), "{hint}");
}

/// Another try would end in the same way.
#[test]
fn a_certificate_that_is_not_trusted_is_told_at_once() {
    let io = |text: &str| ureq::Error::Io(std::io::Error::new(std::io::ErrorKind::InvalidData, text));
    let Trouble::Fatal(failure) = broken("h", io("invalid peer certificate: UnknownIssuer")) else {
        panic!("it is tried again")
    };
    assert!(
        failure.exit == Exit::Network && failure.advice().unwrap().contains("not trusted"),
        "{failure:?}"
    );
    assert!(matches!(broken("h", io("a broken record")), Trouble::Again { .. }));
}
