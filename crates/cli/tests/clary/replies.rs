//! `run` and `chat`.

use std::fs;

use crate::{clary, clary_with, demo};

const QUESTION: &str = "What is 37 + 58?";

#[test]
fn run_answers_the_question() {
    let ran = clary(&["run", &demo(), QUESTION, "--temperature", "0"]).code(0).out_has("95").err_has("tok/s");
    assert!(!ran.out.contains("<think>"), "{ran:?}");
    let typed = clary_with(&["run", &demo(), "-", "--temperature", "0", "--quiet"], QUESTION).code(0);
    assert_eq!((typed.out.as_str(), typed.err.as_str()), (ran.out.as_str(), ""));
}

#[test]
fn thinking_can_be_turned_off() {
    let on = clary(&["run", &demo(), QUESTION, "--temperature", "0", "--json"]).code(0).json();
    let off = ["run", &demo(), QUESTION, "--temperature", "0", "--json", "--thinking", "off"];
    let off = clary(&off).code(0).json();
    assert_ne!(on["reasoning_content"], "");
    assert_eq!(off["reasoning_content"], "");
    assert_eq!(on["finish_reason"], "stop");
    assert!(off["content"].as_str().unwrap().contains("95"), "{off}");
    assert!(on["usage"]["reasoning_tokens"].as_u64().unwrap() > 0);
}

#[test]
fn replies_depend_on_the_seed_and_on_nothing_else() {
    let reply = |args: &[&str]| {
        let base =
            ["run", &demo(), "Tell me something.", "--temperature", "1", "--top-p", "1", "--top-k", "0"];
        let base = [&base[..], &["--max-tokens", "40", "--json"]].concat();
        clary(&[&base[..], args].concat()).code(0).json()["token_ids"].clone()
    };
    let first = reply(&["--seed", "7"]);
    assert_eq!(first, reply(&["--seed", "7", "--threads", "1"]));
    assert_eq!(first, reply(&["--seed", "7", "--draft", "off"]));
    assert_eq!(first, reply(&["--seed", "7", "--draft", "3", "--ctx", "256"]));
    assert_ne!(first, reply(&["--seed", "8"]));
}

#[test]
fn length_limits_end_a_reply() {
    let ran = clary(&["run", &demo(), QUESTION, "--max-tokens", "3", "--json"]).code(0).json();
    assert_eq!(
        (ran["finish_reason"].as_str(), ran["usage"]["completion_tokens"].as_u64()),
        (Some("length"), Some(3))
    );
    let nothing = clary(&["run", &demo(), QUESTION, "--max-tokens", "0"]).code(0);
    assert_eq!(nothing.out, "");
    let long = "word ".repeat(300);
    clary(&["run", &demo(), &long, "--ctx", "64"]).code(2).err_has("context of 64").err_has("hint: ");
}

#[test]
fn the_reference_device_answers_too() {
    let args = ["run", &demo(), QUESTION, "--temperature", "0", "--thinking", "off", "--device", "reference"];
    clary(&args).code(0).out_has("95");
}

#[test]
fn a_template_that_refuses_is_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    for name in fs::read_dir(demo()).unwrap() {
        let path = name.unwrap().path();
        if path.is_file() {
            fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    let template = dir.path().join("chat_template.jinja");
    let folder = dir.path().display().to_string();
    fs::write(&template, "{{ raise_exception('no chats today') }}").unwrap();
    clary(&["run", &folder, QUESTION]).code(1).err_has("no chats today").err_has("hint: ");
    fs::write(&template, "{% if %}").unwrap();
    clary(&["run", &folder, QUESTION]).code(3).err_has("chat template, line 1");
    fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    clary(&["run", &folder, QUESTION]).code(3).err_has("tokenizer.json");
}

#[test]
fn a_chat_over_a_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat.json").display().to_string();
    let script = format!(
        "/think off\n{QUESTION}\n/stats\n/save {file}\n/retry\n/undo\n/load {file}\n/system Be brief.\n\
         /help\nWhat is 2 + 3?\n/quit\nnever read\n"
    );
    let demo = demo();
    let chat = clary_with(&["chat", &demo, "--temperature", "0"], &script).code(0);
    let answers: Vec<&str> = chat.out.lines().filter(|line| line.contains("95")).collect();
    assert_eq!(answers.len(), 2, "the answer and its repetition: {chat:#?}");
    assert!(chat.out.contains('5') && !chat.out.contains("> "), "{chat:#?}");
    assert!(chat.err.contains("2 messages saved") && chat.err.contains("2 messages loaded"), "{chat:#?}");
    assert!(chat.err.contains("/undo"), "{chat:#?}");
    let saved: serde_json::Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(saved["messages"][0]["content"], QUESTION);
    assert!(saved["messages"][1]["content"].as_str().unwrap().contains("95"));
}

#[test]
fn a_chat_remembers() {
    // Short prompts are not worth a snapshot.
    let system =
        "Answer every question in one line, with the numbers first and the sum at the end. ".repeat(3);
    let script = format!("{QUESTION}\nWhat is 2 + 3?\n");
    let args = ["chat", &demo(), "--temperature", "0", "--thinking", "off", "--system", &system];
    clary_with(&args, &script).code(0).err_has("from the cache");
}

#[test]
fn mistakes_in_a_chat_over_a_pipe() {
    for (line, wanted) in [
        ("/nonsense", "/nonsense is no command"),
        ("/think maybe", "on or off"),
        ("/save", "needs a file name"),
        ("/save chat.json", "no message yet"),
        ("/load no/such/file", "no/such/file"),
        ("/retry", "no message yet"),
        ("/undo", "no message yet"),
        ("/stats", "no reply yet"),
    ] {
        clary_with(&["chat", &demo()], &format!("{line}\n")).code(2).err_has(wanted);
    }
    // A command that means nothing stops nothing; a chat that was not loaded does.
    let chat = ["chat", &demo(), "--temperature", "0", "--thinking", "off"];
    clary_with(&chat, &format!("/nonsense\n{QUESTION}\n")).code(2).out_has("95").err_has("not obeyed");
    for command in ["/save", "/save no/such/folder/file", "/retry", "/image", "/image no/such/file"] {
        let ran = clary_with(&chat, &format!("{command}\n{QUESTION}\n")).code(2);
        assert!(ran.out.contains("95") && ran.err.contains("error: "), "{command}: {ran:#?}");
    }
    let stopped = clary_with(&chat, &format!("/load no/such/file\n{QUESTION}\n")).code(2);
    assert_eq!(stopped.out, "", "{stopped:#?}");
    clary_with(&["chat", &demo()], "").code(0);
    clary(&["chat", &demo(), "--json"]).code(2);
}

#[test]
fn run_answers_in_a_schema() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let schema = file(
        "schema.json",
        r#"{"type": "object", "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999},
            "sure": {"type": "boolean"}}, "required": ["sum", "sure"], "additionalProperties": false}"#,
    );
    for thinking in ["on", "off"] {
        let question = ["run", &demo(), QUESTION, "--temperature", "0"];
        let args = [&question[..], &["--thinking", thinking, "--json-schema", &schema]].concat();
        let ran = clary(&args).code(0);
        let value: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
        assert!(value["sum"].as_u64().is_some_and(|sum| sum < 1000) && value["sure"].is_boolean(), "{value}");
    }
    for (text, told) in [
        (r#"{"properties": {"a": {"not": {}}}}"#, "bad.json: /properties/a/not: "),
        (r#"{"type": "string", "pattern": "[a"}"#, "bad.json: /pattern: "),
        ("{", "bad.json: not JSON"),
        ("false", "bad.json: no value is valid"),
    ] {
        let bad = file("bad.json", text);
        clary(&["run", &demo(), QUESTION, "--json-schema", &bad]).code(2).err_has(told);
    }
    let missing = dir.path().join("none.json").display().to_string();
    clary(&["run", &demo(), QUESTION, "--json-schema", &missing]).code(2).err_has("none.json");
}
