//! `clary pull`, `list`, `rm` and a pulled MODEL, against a hub on this machine.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::stub::{Reply, Seen, Stub};
use crate::{Ran, clary, demo};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn files() -> HashMap<String, Vec<u8>> {
    let entries = fs::read_dir(demo()).expect("it is there").flatten();
    let files = entries.filter(|entry| entry.path().is_file());
    files
        .map(|entry| {
            let name = entry.file_name().into_string().expect("a plain name");
            (name, fs::read(entry.path()).expect("readable"))
        })
        .collect()
}

/// What the hub says of the demo model.
fn listing(files: &HashMap<String, Vec<u8>>) -> String {
    let one = |(name, bytes): (&String, &Vec<u8>)| {
        let digest: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        json!({"rfilename": name, "size": bytes.len(), "blobId": "0".repeat(40),
            "lfs": {"sha256": digest, "size": bytes.len()}})
    };
    json!({"sha": COMMIT, "siblings": files.iter().map(one).collect::<Vec<_>>()}).to_string()
}

/// A hub with the demo model; `twist` may answer in its place.
fn hub(twist: impl Fn(&Seen, &[u8]) -> Option<Reply> + Send + Sync + 'static) -> Stub {
    let files = files();
    Stub::start(move |seen| {
        if seen.path == "/api/models/own/demo/revision/main?blobs=true" {
            return Reply::ok(listing(&files));
        }
        let name = seen.path.strip_prefix(&format!("/own/demo/resolve/{COMMIT}/"));
        match name.and_then(|name| files.get(name)) {
            Some(bytes) => twist(seen, bytes).unwrap_or_else(|| Reply::file(seen, bytes, "\"1\"")),
            None => Reply::status(404),
        }
    })
}

fn pull(stub: &Stub, store: &Path, more: &[&str]) -> Ran {
    let store = store.display().to_string();
    clary(&[&["pull", "own/demo", "--hub", &stub.url, "--store", &store], more].concat())
}

fn run(store: &Path, args: &[&str]) -> Ran {
    let output = Command::new(env!("CARGO_BIN_EXE_clary"))
        .args(args)
        .env("CLARY_STORE", store)
        .stdin(Stdio::null())
        .output()
        .expect("it runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

#[test]
fn a_model_is_pulled_run_listed_and_removed() {
    let dir = tempfile::tempdir().expect("a folder");
    let stub = hub(|_, _| None);
    let first = pull(&stub, dir.path(), &[]).code(0).out_has("own/demo is there: ").out_has("0123456789ab");
    let host = stub.url.trim_start_matches("http://");
    assert!(first.err.starts_with(&format!("asking {host} for own/demo at main\n")), "{first:#?}");
    let asked = stub.seen().len();
    assert!(
        stub.seen().iter().all(|seen| !seen.path.contains("README") && !seen.path.contains("vocab.json"))
    );
    let page = format!("{}/own/demo", stub.url);
    let store = dir.path().display().to_string();
    let again = clary(&["pull", &page, "--hub", &stub.url, "--store", &store, "--json"]).code(0);
    again.out_has("\"fetched_bytes\": 0");
    assert_eq!(stub.seen().len(), asked + 1, "only the listing is asked for");

    let answer = ["run", "own/demo", "What is 37 + 58?", "--temperature", "0", "--ctx", "512"];
    run(dir.path(), &answer).code(0).out_has("37 + 58 = 95");
    run(dir.path(), &["info", "own/demo@01234567"]).code(0);
    run(dir.path(), &["info", "own/demo@v9"]).code(3).err_has("clary pull own/demo@v9");
    let list = run(dir.path(), &["list", "--json"]).code(0).json();
    assert_eq!(list["models"][0]["revisions"], json!(["main"]), "{list}");
    run(dir.path(), &["list"]).code(0).out_has("own/demo  main  ");

    receipt_without_model(dir.path());

    run(dir.path(), &["rm", "own/demo"]).code(2).err_has("--yes");
    run(dir.path(), &["rm", "own/other", "--yes"]).code(3);
    run(dir.path(), &["rm", "own/demo", "--yes"]).code(0).out_has("removed own/demo");
    run(dir.path(), &["info", "own/demo"]).code(3).err_has("clary pull own/demo");
    assert_eq!(fs::read_dir(dir.path()).expect("it is there").count(), 0);
}

/// A receipt of the pulled model finds it in the store, and one of another model does not.
fn receipt_without_model(store: &Path) {
    let files = tempfile::tempdir().expect("a folder");
    let path = |name: &str| files.path().join(name).display().to_string();
    let body = json!({"model": "own/demo", "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 12, "clary": {"receipt": true}});
    let server = crate::serve::Server::start("512", &[]);
    let (status, reply) = server.ask("POST", "/v1/chat/completions", Some(&body));
    assert_eq!(status, 200, "{reply}");
    fs::write(path("request"), body.to_string()).expect("written");
    fs::write(path("reply"), &reply).expect("written");
    run(store, &["verify", &path("reply"), "--request", &path("request")]).code(0).out_has("equal: ");
    let mut other: Value = serde_json::from_str(&reply).expect("JSON");
    other["clary"]["receipt"]["model"] = "sha256:00".into();
    fs::write(path("reply"), other.to_string()).expect("written");
    run(store, &["verify", &path("reply"), "--request", &path("request")]).code(3).err_has("no model in");
}

#[test]
fn an_interrupted_pull_goes_on() {
    let dir = tempfile::tempdir().expect("a folder");
    let (sender, came) = channel();
    let sender = Mutex::new(Some(sender));
    let stub = Arc::new(hub(move |seen, bytes| {
        let first =
            seen.path.ends_with("/model.safetensors").then(|| sender.lock().ok()?.take()).flatten()?;
        // The rest never comes; the test interrupts when it has seen this much on disk.
        first.send(()).ok()?;
        Some(Reply::ok(bytes).with("etag", "\"1\"").cut(4 << 20).hang())
    }));
    let store = dir.path().display().to_string();
    let mut child = Command::new(env!("CARGO_BIN_EXE_clary"))
        .args(["pull", "own/demo", "--hub", &stub.url, "--store", &store])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("it runs");
    came.recv().expect("the file is asked for");
    let partial = dir.path().join(format!("own/demo/{COMMIT}.partial/model.safetensors.partial"));
    let length = || fs::metadata(&partial).map_or(0, |meta| meta.len());
    while length() < 4 << 20 {
        assert!(child.try_wait().expect("it runs").is_none(), "it ended by itself");
        std::thread::yield_now();
    }
    pull(&stub, dir.path(), &[]).code(1).err_has("another pull");
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(sent.expect("kill runs").success());
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
    assert!(length() >= 4 << 20, "what was fetched is kept");
    run(dir.path(), &["list"]).code(0).out_has("not whole");
    pull(&stub, dir.path(), &[]).code(0).out_has("is whole now");
    let starts: Vec<Option<usize>> = stub
        .seen()
        .iter()
        .filter(|seen| seen.path.ends_with("/model.safetensors"))
        .map(Seen::start)
        .collect();
    assert_eq!(starts.len(), 2, "{starts:?}");
    assert!(starts[1].is_some_and(|start| start >= 4 << 20), "{starts:?}");
}

#[test]
fn failures_say_what_to_do() {
    let dir = tempfile::tempdir().expect("a folder");
    let store = dir.path().join("store");
    let stub = hub(|seen, bytes| {
        let mut wrong = bytes.to_vec();
        wrong[0] ^= 1;
        seen.path.ends_with("tokenizer.json").then(|| Reply::ok(wrong))
    });
    pull(&stub, &store, &[]).code(6).err_has("tokenizer.json: SHA-256 is ");
    assert!(!store.join(format!("own/demo/{COMMIT}")).exists(), "it has no name until it is whole");
    clary(&["pull", "nothing", "--hub", &stub.url]).code(2);
    clary(&["pull", "own/none", "--hub", &stub.url, "--store", "x"]).code(6).err_has("no such thing");
    clary(&["pull", "own/demo", "--hub", "http://example.com"]).code(2).err_has("https");
    let file = dir.path().join("file");
    fs::write(&file, "").expect("written");
    let good = hub(|_, _| None);
    pull(&good, &file.join("store"), &[]).code(2).err_has("file");
    let to =
        |dir: &Path| clary(&["pull", "own/demo", "--hub", &good.url, "--to", &dir.display().to_string()]);
    to(dir.path()).code(2).err_has("not empty");
    let new = dir.path().join("new");
    to(&new).code(0);
    let manifest: Value =
        serde_json::from_slice(&fs::read(new.join("clary.json")).expect("readable")).expect("JSON");
    assert_eq!((&manifest["commit"], &manifest["model"]), (&json!(COMMIT), &json!("own/demo")));
    to(&new).code(0).out_has("there already");
}

#[test]
fn another_family_is_refused_before_its_weights() {
    let dir = tempfile::tempdir().expect("a folder");
    let body = br#"{"model_type": "other"}"#;
    let digest: String = Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect();
    let listing = json!({"sha": COMMIT, "siblings": [{"rfilename": "config.json", "size": body.len(),
        "lfs": {"sha256": digest}}, {"rfilename": "tokenizer.json", "size": 1, "blobId": "0".repeat(40)},
        {"rfilename": "model.safetensors", "size": 9, "blobId": "0".repeat(40)}]});
    let stub = Stub::start(move |seen| match seen.path.starts_with("/api/") {
        true => Reply::ok(listing.to_string()),
        false => Reply::ok(*body),
    });
    pull(&stub, dir.path(), &[]).code(3).err_has("other");
    assert_eq!(stub.seen().len(), 2, "nothing but the config was fetched");
}
