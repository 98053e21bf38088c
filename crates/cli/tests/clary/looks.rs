//! `connect`, `top` and `doctor`: commands that look at a server and at the machine.

use crate::clary;
use crate::serve::Server;

#[test]
fn a_running_server_is_shown_and_connected_to() {
    let server = Server::start_with("1024", &[], &[("CLARY_NO_OLLAMA", "0")]);
    let url = format!("http://{}", server.address);
    for client in ["claude-code", "codex", "curl", "ollama"] {
        let ran = clary(&["connect", client, "--url", &url]).code(0).out_has(&url).err_has("ok: ");
        assert!(!ran.out.contains('{') || client == "curl", "{ran:?}");
    }
    let document = clary(&["connect", "opencode", "--url", &format!("{url}/v1"), "--json"]).code(0).json();
    assert_eq!((&document["test"]["ok"], &document["client"]), (&true.into(), &"opencode".into()));
    let file = clary(&["connect", "opencode", "--url", &url]).code(0).err_has("# ").json();
    assert!(file["provider"].is_object(), "stdout is the file: {file}");
    clary(&["connect", "netscape", "--url", &url]).code(2).err_has("claude-code");
    clary(&["connect"]).code(0).out_has("codex");

    let ran = clary(&["top", "--url", &server.address, "--count", "2", "--every", "0.1"]).code(0);
    let ran = ran.out_has("demo").out_has("requests/s 0.0");
    assert_eq!(ran.out.matches("running 0").count(), 2, "{ran:?}");
    let ran = clary(&["top", "--url", &url, "--count", "1", "--every", "0.1", "--json"]).code(0);
    assert_eq!(ran.json()["slots"][0]["state"], "idle");
}

#[test]
fn no_server_is_a_network_error() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", free.local_addr().expect("an address"));
    drop(free);
    let ran = clary(&["connect", "curl", "--url", &url]).code(6).err_has("clary serve");
    assert!(ran.out.contains(&url), "settings come all the same: {ran:?}");
    assert!(ran.err.starts_with(&format!("# No server answered at {url}: MODEL stands for")), "{ran:?}");
    let ran = clary(&["connect", "curl", "--url", &url, "--check"]).code(6);
    assert_eq!(ran.out, "", "nothing is made up where a check is asked for");
    let assumed = clary(&["connect", "curl", "--url", &url, "--json"]).code(6).json();
    assert_eq!((&assumed["assumed"]["model"], &assumed["test"]["ok"]), (&"MODEL".into(), &false.into()));
    clary(&["top", "--url", &url]).code(6).err_has(&url);
    clary(&["top", "--url", "ftp://a"]).code(2).err_has("http://");
}

#[test]
fn a_doctor_looks_at_everything() {
    let dir = tempfile::tempdir().expect("a folder");
    let store = dir.path().display().to_string();
    let ran = clary(&["doctor", "--store", &store, "--port", "0"]).code(0).out_has("the same bits");
    for name in
        ["processor", "memory", "limits", "huge pages", "cuda", "xpu", "disk space", "disk speed", "port"]
    {
        assert!(ran.out.contains(name), "{name}: {ran:?}");
    }
    let warned = ran.out.lines().filter(|line| !line.starts_with("ok ") && !line.starts_with("      fix: "));
    let fixes = ran.out.lines().filter(|line| line.starts_with("      fix: "));
    assert_eq!(warned.count(), fixes.count(), "every warning has its fix: {ran:?}");
    let document = clary(&["doctor", "--store", &store, "--port", "0", "--json"]).code(0).json();
    assert_eq!(document["works"], true);
}

#[test]
fn a_doctor_needs_no_home() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_clary"))
        .args(["doctor", "--port", "0"])
        .env_remove("HOME")
        .env_remove("XDG_DATA_HOME")
        .env_remove("CLARY_STORE")
        .output()
        .expect("it runs");
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{out}");
    assert!(
        out.contains("warn  disk space    there is no store") && out.contains("fix: --store DIR"),
        "{out}"
    );
}
