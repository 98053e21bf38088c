//! The server as a process: start, requests over plain sockets, end.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::{clary, demo, project};

/// Longest wait for bytes: a hang must fail, not hang.
const WAIT: Duration = Duration::from_secs(120);

/// A running server. Killed when dropped.
pub(crate) struct Server {
    child: Child,
    out: BufReader<ChildStdout>,
    /// Lines of the start report.
    pub(crate) report: Vec<String>,
    /// `127.0.0.1:PORT`.
    pub(crate) address: String,
}

impl Server {
    /// Starts the binary on a free port and waits for its report.
    pub(crate) fn start(ctx: &str, options: &[&str]) -> Self {
        Self::start_with(ctx, options, &[])
    }

    /// The same with further variables of the environment.
    pub(crate) fn start_with(ctx: &str, options: &[&str], variables: &[(&str, &str)]) -> Self {
        // A service manager says which process its watchdog means; a shell that becomes the program knows.
        let mut child = Command::new("sh")
            .args(["-c", "export WATCHDOG_PID=$$; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_clary")])
            .args(["serve", &demo(), "--port", "0", "--ctx", ctx, "--cache-ram", "64MiB"])
            .args(options)
            .env("CLARY_QUEUE_TIMEOUT", "5m")
            .env("CLARY_NO_OLLAMA", "1")
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        let mut out = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let mut report: Vec<String> = Vec::new();
        while !report.last().is_some_and(|line| line.starts_with("ready ")) {
            let mut line = String::new();
            if out.read_line(&mut line).expect("stdout is UTF-8") == 0 {
                let mut err = String::new();
                let _ = child.stderr.take().expect("stderr is piped").read_to_string(&mut err);
                panic!("no server: {report:#?}\n{err}");
            }
            report.push(line.trim_end().to_owned());
        }
        let ready = report.last().expect("it has lines");
        let address = ready.split("http://").nth(1).and_then(|rest| rest.split(' ').next());
        let address = address.unwrap_or_default().to_owned();
        Self { child, out, report, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("the port is open");
        stream.set_read_timeout(Some(WAIT)).expect("a timeout can be set");
        stream
    }

    /// Sends a request and returns its socket.
    pub(crate) fn send(&self, method: &str, path: &str, body: Option<&Value>) -> TcpStream {
        let body = body.map(Value::to_string).unwrap_or_default();
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
        let kind = format!("Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}");
        let mut stream = self.connect();
        stream.write_all(format!("{head}{kind}").as_bytes()).expect("it reads");
        stream
    }

    /// Status and body of the answer.
    pub(crate) fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> (u16, String) {
        answer(self.send(method, path, body))
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(sent.expect("kill runs").success());
    }

    /// What it said until its end, and its code.
    fn end(mut self) -> (Option<i32>, String) {
        let mut err = String::new();
        let mut stderr = self.child.stderr.take().expect("stderr is piped");
        stderr.read_to_string(&mut err).expect("stderr is UTF-8");
        let code = self.child.wait().expect("it ends").code();
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).expect("stdout is UTF-8");
        assert_eq!(rest, "", "nothing follows the report");
        (code, err)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn answer(mut stream: TcpStream) -> (u16, String) {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("the answer is UTF-8");
    let (head, body) = text.split_once("\r\n\r\n").expect("headers end");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.expect("a status"), body.to_owned())
}

fn question(more: Value) -> Value {
    let messages = json!([{"role": "user", "content": "What is 37 + 58?"}]);
    let mut fields = json!({"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 200});
    for (name, value) in more.as_object().expect("an object") {
        fields[name] = value.clone();
    }
    fields
}

/// Joined content of a stream's events.
fn streamed(body: &str) -> String {
    let events = body.lines().filter_map(|line| line.strip_prefix("data: {"));
    let events = events.map(|rest| serde_json::from_str::<Value>(&format!("{{{rest}")).expect("JSON"));
    events.filter_map(|event| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned)).collect()
}

/// What one server has read the next one need not read again.
#[test]
fn the_cache_outlives_the_server() {
    let folder = std::env::temp_dir().join(format!("clary-cache-disk-{}", std::process::id()));
    let disk = folder.display().to_string();
    let words = "The quick brown fox jumps over the lazy dog. ".repeat(12);
    let body = question(json!({"messages": [{"role": "user", "content": words}], "max_tokens": 16}));
    let ask = |options: &[&str]| {
        let server = Server::start("1024", &[&["--cache-disk", &disk], options].concat());
        assert!(server.report.iter().any(|line| line.contains(&disk)), "{:#?}", server.report);
        let (status, reply) = server.ask("POST", "/v1/chat/completions", Some(&body));
        assert_eq!(status, 200, "{reply}");
        server.signal("-TERM");
        assert_eq!(server.end().0, Some(0));
        let reply: Value = serde_json::from_str(&reply).expect("JSON");
        let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        (reply["choices"].clone(), cached.expect("a number"))
    };
    let (first, cached) = ask(&[]);
    assert_eq!(cached, 0);
    let (second, cached) = ask(&[]);
    assert!(cached > 100, "{cached}");
    assert_eq!(first, second);
    // Another form of K/V is another digest.
    assert_eq!(ask(&["--kv", "int16"]).1, 0);
    std::fs::remove_dir_all(&folder).expect("made by the server");
}

#[test]
fn a_server_from_start_to_end() {
    let server = Server::start(
        "1024",
        &["--alias", "other", "--unknown-model", "reject", "--clary-fields", "timings"],
    );
    assert!(server.report.len() <= 25, "{:#?}", server.report);
    let names: Vec<&str> = server.report.iter().filter_map(|line| line.split_whitespace().next()).collect();
    for name in ["clary", "model", "device", "memory", "slots", "drafts", "contracts", "load", "note"] {
        assert!(names.contains(&name), "{name} is missing: {:#?}", server.report);
    }
    assert!(server.report.iter().any(|line| line.contains("drafted equal plain")), "{:#?}", server.report);
    let changed = |line: &String| line.contains("limits: queue-timeout 300 s (usual 600 s)");
    assert!(server.report.iter().any(changed), "{:#?}", server.report);
    assert_eq!(server.ask("GET", "/ready", None).0, 200);
    assert_eq!(server.ask("GET", "/api/version", None).0, 404, "the environment leaves Ollama out");
    let (status, models) = server.ask("GET", "/v1/models", None);
    let models: Value = serde_json::from_str(&models).expect("JSON");
    assert_eq!((status, &models["data"][0]["id"]), (200, &json!("demo")));
    assert_eq!(models["data"][0]["max_model_len"], 1024);

    let (status, whole) = server.ask("POST", "/v1/chat/completions", Some(&question(json!({}))));
    let whole: Value = serde_json::from_str(&whole).expect("JSON");
    assert_eq!(status, 200, "{whole}");
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap_or_default();
    assert_eq!(text, "37 + 58 = 95", "{whole}");
    assert!(whole["clary"]["timings"].is_object(), "{whole}");
    let stream = question(json!({"stream": true, "model": "other"}));
    let (status, body) = server.ask("POST", "/v1/chat/completions", Some(&stream));
    assert_eq!((status, streamed(&body).as_str()), (200, text), "{body}");
    assert!(body.contains("[DONE]"), "{body}");
    let foreign = question(json!({"model": "foreign"}));
    assert_eq!(server.ask("POST", "/v1/chat/completions", Some(&foreign)).0, 404);

    let word = json!({"structured_outputs": {"choice": ["never", "always"]}, "max_tokens": 300});
    let (status, body) = server.ask("POST", "/v1/chat/completions", Some(&question(word)));
    let body: Value = serde_json::from_str(&body).expect("JSON");
    let content = body["choices"][0]["message"]["content"].as_str();
    assert!(status == 200 && matches!(content, Some("never" | "always")), "{body}");

    // A second server on the same port says how to go on.
    let port = server.address.rsplit(':').next().unwrap_or_default().to_owned();
    clary(&["serve", &demo(), "--port", &port, "--ctx", "64"]).code(1).err_has("in use").err_has("--port");

    server.signal("-TERM");
    let (code, err) = server.end();
    assert_eq!(code, Some(0), "{err}");
    assert!(err.contains("ending: "), "{err}");
    assert!(!err.contains("What is"), "no prompt is logged: {err}");
}

/// Reads a stream's first chunk with content: the reply is running then.
fn first(stream: &mut BufReader<TcpStream>) -> String {
    let mut text = String::new();
    while !text.contains("\"delta\"") {
        assert!(stream.read_line(&mut text).expect("it goes on") > 0, "{text}");
    }
    text
}

#[test]
fn sigterm_lets_running_replies_finish() {
    let server = Server::start("1024", &["--slots", "1"]);
    let long = json!({"stream": true, "ignore_eos": true, "max_tokens": 300});
    let mut stream = BufReader::new(server.send("POST", "/v1/chat/completions", Some(&question(long))));
    let mut text = first(&mut stream);
    server.signal("-TERM");
    stream.read_to_string(&mut text).expect("the answer is UTF-8");
    assert!(text.contains("\"finish_reason\":\"length\"") && text.contains("[DONE]"), "{text}");
    assert_eq!(server.end().0, Some(0));
}

/// Every line on stderr is a document with a time and a level; none has a word of a prompt.
#[test]
fn a_log_for_programs() {
    let server = Server::start("1024", &["--log-format", "json", "-v"]);
    assert_eq!(server.ask("POST", "/v1/chat/completions", Some(&question(json!({})))).0, 200);
    assert_eq!(server.ask("GET", "/health", None).0, 200);
    server.signal("-TERM");
    let (code, err) = server.end();
    assert_eq!(code, Some(0), "{err}");
    let lines: Vec<Value> =
        err.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect();
    assert!(lines.iter().all(|line| line["timestamp"].is_string() && line["level"].is_string()), "{err}");
    let of =
        |route: &str| lines.iter().find(|line| line["route"] == route).unwrap_or_else(|| panic!("{err}"));
    let chat = of("/v1/chat/completions");
    assert!(chat["request_id"].is_string() && chat["generated_tokens"].as_u64() > Some(10), "{chat}");
    assert_eq!(of("/health")["level"], "DEBUG");
    let told = |word: &str| {
        lines.iter().any(|line| line["message"].as_str().is_some_and(|text| text.contains(word)))
    };
    assert!(told("loading") && told("ready") && told("ending"), "{err}");
    assert!(!err.contains("What is"), "{err}");
}

/// Nobody reads this server's stderr, and more is said there than any pipe holds.
#[test]
fn a_log_that_nobody_reads_holds_up_nobody() {
    let server = Server::start("512", &["-v"]);
    for _ in 0..1500 {
        assert_eq!(server.ask("GET", "/health", None).0, 200);
    }
    server.signal("-TERM");
    assert_eq!(server.end().0, Some(0));
}

/// A service manager hears of the start and the end, and has a sign of life meanwhile.
#[test]
fn a_service_manager_is_told() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("notify");
    let socket = UnixDatagram::bind(&path).expect("a socket");
    socket.set_read_timeout(Some(WAIT)).expect("a timeout can be set");
    let path = path.display().to_string();
    let server = Server::start_with("512", &[], &[("NOTIFY_SOCKET", &path), ("WATCHDOG_USEC", "300000")]);
    let mut heard = String::new();
    let mut until = |word: &str| {
        let mut bytes = [0; 4096];
        while !heard.contains(word) {
            let count = socket.recv(&mut bytes).unwrap_or_else(|error| panic!("{error}: {heard}"));
            heard.push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
        heard.clone()
    };
    assert!(!until("READY=1").contains("WATCHDOG=1"), "life is watched once there is some");
    until("WATCHDOG=1");
    server.signal("-TERM");
    until("STOPPING=1");
    assert_eq!(server.end().0, Some(0));
}

#[test]
fn a_second_signal_ends_at_once() {
    let server = Server::start("4000", &["--slots", "1"]);
    let long = json!({"stream": true, "ignore_eos": true, "max_tokens": 3900});
    let mut stream = BufReader::new(server.send("POST", "/v1/chat/completions", Some(&question(long))));
    first(&mut stream);
    server.signal("-INT");
    // The port closes when the first signal has been seen.
    while TcpStream::connect(&server.address).is_ok() {
        std::thread::yield_now();
    }
    server.signal("-INT");
    assert_eq!(server.end().0, Some(130));
}

#[test]
fn keys_and_hosts_are_asked_for() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("keys");
    std::fs::write(&file, "# ours\nalice: secret\n").expect("it is written");
    let server = Server::start("1024", &["--api-key-file", &file.display().to_string()]);
    assert!(server.report.iter().any(|line| line.contains("keys 1")), "{:#?}", server.report);
    assert_eq!(server.ask("GET", "/v1/models", None).0, 401);
    assert_eq!(server.ask("GET", "/health", None).0, 200);
    let mut stream = server.connect();
    let request =
        "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Api-Key: secret\r\n\r\n";
    stream.write_all(request.as_bytes()).expect("it reads");
    assert_eq!(answer(stream).0, 200);
    let mut stream = server.connect();
    let request = "GET /health HTTP/1.1\r\nHost: elsewhere.example\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).expect("it reads");
    assert_eq!(answer(stream).0, 421);
}

#[test]
fn a_socket_file_that_is_a_file_is_left_alone() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("precious");
    std::fs::write(&file, "text").expect("it is written");
    let path = file.display().to_string();
    clary(&["serve", &demo(), "--unix", &path, "--ctx", "64"]).code(2).err_has("no socket");
    assert_eq!(std::fs::read_to_string(&file).expect("it is there"), "text");
}

#[test]
fn nonsense_is_refused_before_loading() {
    let demo = demo();
    for (options, text) in [
        (&["--host", "0.0.0.0"][..], "--no-auth-i-know"),
        (&["--device", "reference"], "not served"),
        (&["--slots", "0"], "1 to 64"),
        (&["--temperature", "9"], "0 to 5"),
        (&["--clary-fields", "all,nothing"], "nothing"),
        (&["--queue-timeout", "1.5s"], "whole number"),
        (&["--thinking-budget", "-2"], "--thinking-budget"),
        (&["--template-kwargs", "{\"tools\": 1}"], "not known"),
        (&["--api-key-file", "no/such/file"], "no/such/file"),
        (&["--ctx", "99999999"], "trained"),
        (&["--audit", "101"], "--audit"),
        (&["--cache-device", "2GB"], "--cache-device"),
        (&["--top-k", "-1"], "invalid value '-1'"),
    ] {
        let args = [&["serve", &demo, "--port", "0"], options].concat();
        clary(&args).code(2).err_has(text).err_has("hint: ");
    }
    clary(&["serve", &demo, "--device", "cuda:0"]).code(5).err_has("hint: ");
    clary(&["serve", &project("docs")]).code(3);
    let small = ["serve", &demo, "--memory-limit", "70MiB", "--slots", "4", "--ctx", "4096", "--kv", "int16"];
    clary(&small).code(4).err_has("weights").err_has("--ctx").err_has("--slots 1").err_has("--kv int8");
}

#[test]
fn a_busy_port_is_a_failure() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("it has an address").port().to_string();
    clary(&["serve", &demo(), "--port", &port, "--ctx", "64"]).code(1).err_has("in use").err_has("--port N");
}
