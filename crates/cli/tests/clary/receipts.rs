//! `clary verify`, `clary bundle` and `clary replay` against replies of a real server.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::serve::Server;
use crate::{Ran, clary, demo};

fn request(more: Value) -> Value {
    let messages = json!([{"role": "user", "content": "What is 37 + 58?"}]);
    let mut body = json!({"model": "demo", "messages": messages, "temperature": 1, "max_tokens": 40,
        "clary": {"receipt": true}});
    for (name, value) in more.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

fn digest(ids: &Value) -> String {
    let mut hash = Sha256::new();
    for id in ids.as_array().expect("choices").iter().flat_map(|choice| choice.as_array().expect("ids")) {
        hash.update((id.as_u64().expect("an id") as u32).to_le_bytes());
    }
    format!("sha256:{}", hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

struct Files {
    dir: tempfile::TempDir,
}

impl Files {
    fn write(&self, name: &str, text: impl ToString) -> String {
        let path = self.dir.path().join(name);
        fs::write(&path, text.to_string()).expect("it is written");
        path.display().to_string()
    }

    fn verify(&self, receipt: impl ToString, request: &Value, more: &[&str]) -> Ran {
        let (receipt, request) = (self.write("receipt", receipt), self.write("request", request));
        let demo = demo();
        clary(&[&["verify", &receipt, &demo, "--request", &request], more].concat())
    }
}

fn ask(server: &Server, body: &Value) -> String {
    let (status, text) = server.ask("POST", "/v1/chat/completions", Some(body));
    assert_eq!(status, 200, "{text}");
    text
}

#[test]
fn receipts_are_verified_and_forgeries_are_named() {
    let files = Files { dir: tempfile::tempdir().expect("a folder") };
    let server = Server::start("1024", &["--temperature", "0.9", "--top-k", "50"]);
    let body = request(json!({"seed": 5, "n": 2}));
    let reply: Value = serde_json::from_str(&ask(&server, &body)).expect("JSON");
    let ran = files.verify(&reply, &body, &[]).code(0).out_has("equal: ").out_has("of 2 replies");
    assert!(ran.out.contains(" characters of text"), "{ran:#?}");
    assert!(!ran.err.contains("differs"), "{ran:#?}");

    // Neither the seed nor the sampling is in this request: the server's come from the receipt.
    let mut open = request(json!({"stream": true, "stream_options": {"include_usage": true}}));
    open.as_object_mut().expect("an object").shift_remove("temperature");
    let stream = ask(&server, &open);
    let verified = files.verify(&stream, &open, &["--json"]).code(0).json();
    assert_eq!((&verified["equal"], &verified["choices"]), (&json!(true), &json!(1)), "{verified}");

    texts_are_compared(&files, &body, &reply, &open, &stream);
    let receipt = &reply["clary"]["receipt"];
    let bare = files.verify(receipt, &body, &[]).code(0);
    assert!(!bare.out.contains("text"), "{bare:#?}");
    files.verify(receipt, &body, &["--kv", "int16"]).code(7).err_has("kv is int8 in the receipt, int16 here");
    let other_seed = request(json!({"seed": 6, "n": 2}));
    files.verify(receipt, &other_seed, &[]).code(7).err_has("seed is 5 in the receipt, 6 here");
    let shorter = request(json!({"seed": 5, "n": 2, "max_tokens": 9}));
    files.verify(receipt, &shorter, &[]).code(7).err_has("max_tokens is 40 in the receipt, 9 here");
    let mut question = body.clone();
    question["messages"][0]["content"] = "What is 37 + 59?".into();
    files.verify(receipt, &question, &[]).code(7).err_has("prompt is ");
    files.verify(receipt, &body, &["--thinking", "off"]).code(7).err_has("prompt is ");

    let mut forged = receipt.clone();
    let id = forged["output_ids"][1][3].as_u64().expect("a token");
    forged["output_ids"][1][3] = (id ^ 1).into();
    files.verify(&forged, &body, &[]).code(7).err_has("contradicts itself: output");
    forged["output"] = digest(&forged["output_ids"]).into();
    let named = files.verify(&forged, &body, &["--json"]).code(7).err_has("reply 1, token 3: ");
    assert_eq!(named.json()["place"], json!({"choice": 1, "token": 3}));
    files.verify("{}", &body, &[]).code(2).err_has("holds no receipt");
    another_model(&files, receipt, &body);
}

/// The ids of a reply say nothing of the text that stands beside them: it is compared too.
fn texts_are_compared(files: &Files, body: &Value, reply: &Value, open: &Value, stream: &str) {
    let mut forged = reply.clone();
    let message = &mut forged["choices"][1]["message"];
    let said = format!("{}!", message["content"].as_str().expect("a text"));
    let end = said.chars().count() - 1;
    message["content"] = said.into();
    let ran = files.verify(&forged, body, &["--json"]).code(7);
    let ran = ran.err_has("differs: choices[1].message.content, character ").err_has("the end here");
    let place = json!({"member": "choices[1].message.content", "character": end});
    assert_eq!((&ran.json()["what"], &ran.json()["place"]), (&json!("text"), &place));
    let mut forged = reply.clone();
    forged["choices"][0]["finish_reason"] = "other".into();
    files.verify(&forged, body, &[]).code(7).err_has("choices[0].finish_reason, character 0: \"other\"");
    let mut forged = reply.clone();
    forged["choices"][0]["message"].as_object_mut().expect("an object").shift_remove("reasoning_content");
    files
        .verify(&forged, body, &[])
        .code(7)
        .err_has("choices[0].message.reasoning_content, character 0: the end");
    let more = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"?\"}}]}\n\ndata: [DONE]";
    let forged = stream.replace("data: [DONE]", more);
    files.verify(&forged, open, &[]).code(7).err_has("\"?\" in the reply, the end here");
}

/// A copy of the model with one word of its config changed is another one, and nothing of it is run.
fn another_model(files: &Files, receipt: &Value, body: &Value) {
    let copy = files.dir.path().join("copy");
    fs::create_dir(&copy).expect("a folder");
    for entry in fs::read_dir(demo()).expect("it is there").flatten().filter(|entry| entry.path().is_file()) {
        fs::copy(entry.path(), copy.join(entry.file_name())).expect("copied");
    }
    let config = copy.join("config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&config).expect("read")).expect("JSON");
    json["another"] = true.into();
    fs::write(&config, json.to_string()).expect("written");
    let (receipt, request) = (files.write("receipt", receipt), files.write("request", body));
    let copy = copy.display().to_string();
    clary(&["verify", &receipt, &copy, "--request", &request]).code(7).err_has("another model: sha256:");
}

#[test]
fn records_are_bundled_and_replayed() {
    let files = Files { dir: tempfile::tempdir().expect("a folder") };
    let record = files.dir.path().join("record").display().to_string();
    // All that decides what a request means goes into the bundle: without it the prompt would be another.
    let options = ["--record", &record, "--thinking", "off", "--late-system", "merge", "--draft", "3"];
    let server = Server::start("1024", &options);
    for note in ["prompts are written", "late system messages are joined"] {
        assert!(server.report.iter().any(|line| line.contains(note)), "{note}: {:#?}", server.report);
    }
    let messages = json!([{"role": "user", "content": "What is 37 + 58?"},
        {"role": "system", "content": "Be brief."}]);
    let body = request(json!({"temperature": 0, "clary": null, "messages": messages}));
    let reply: Value = serde_json::from_str(&ask(&server, &body)).expect("JSON");
    let names: Vec<_> = fs::read_dir(&record).expect("a folder").flatten().collect();
    let name = names[0].file_name().into_string().expect("a name");
    let id = name.strip_suffix(".bundle.json").expect("a bundle");
    let out = files.dir.path().join("one.json").display().to_string();
    clary(&["bundle", id, "--record", &record, "--out", &out]).code(0);
    let text = fs::read_to_string(Path::new(&out)).expect("it is written");
    let mut bundle: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((&bundle["request"], names.len()), (&body, 1));
    clary(&["replay", &out, &demo()]).code(0).out_has("equal: ");
    bundle["request"]["max_tokens"] = 5.into();
    let changed = files.write("changed.json", &bundle);
    clary(&["replay", &changed, &demo()]).code(7).err_has("max_tokens is 40 in the receipt, 5 here");
    let by_reply = clary(&["bundle", reply["id"].as_str().expect("an id"), "--record", &record]).code(0);
    assert_eq!(by_reply.json()["request_id"], id);
    let unknown = clary(&["bundle", "chatcmpl-none", "--record", &record]).code(2);
    unknown
        .err_has(&format!("no record of chatcmpl-none: it holds one record, {id}"))
        .err_has("--record DIR");
    clary(&["bundle", id, "--record", "/nowhere"]).code(2).err_has("/nowhere").err_has("serve --record DIR");
    clary(&["bundle", "../x", "--record", &record]).code(2).err_has("no request id");
    clary(&["replay", &files.write("no.json", "{}"), &demo()]).code(2).err_has("no bundle");
}
