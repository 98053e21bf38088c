//! `template` and `config`: commands that load no weights.

use std::fs;

use serde_json::json;

use crate::{clary, clary_with, demo, tiny};

#[test]
fn a_prompt_its_tokens_and_the_built_in_chats() {
    let demo = demo();
    let prompt = clary(&["template", &demo]).code(0).out_has("What is 37 + 58?").err_has("tokens");
    assert!(prompt.out.contains("<|im_start|>assistant\n<think>"), "{prompt:?}");
    let tokens = clary(&["template", &demo, "--tokens"]).code(0).out_has("\"<|im_start|>\"");
    let document = clary(&["template", &demo, "--json"]).code(0).json();
    assert_eq!(document["count"], tokens.out.lines().count());
    assert_eq!(document["thinking"], true);
    let request = json!({"messages": [{"role": "system", "content": "Be terse."},
        {"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "look_up"}}],
        "chat_template_kwargs": {"enable_thinking": false}});
    let ran = clary_with(&["template", &demo, "-"], &request.to_string()).code(0).out_has("Be terse.");
    assert!(ran.out.contains("look_up") && ran.err.contains("no reasoning"), "{ran:?}");
    let late =
        json!([{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be terse."}]).to_string();
    clary_with(&["template", &demo, "-"], &late).code(0).out_has("[system] Be terse.");
    let merged = clary_with(&["template", &demo, "-", "--late-system", "merge"], &late).code(0);
    assert!(merged.out.starts_with("<|im_start|>system\nBe terse."), "{merged:?}");
    merged.err_has("system_merged messages[1]");
    clary_with(&["template", &demo, "-", "--late-system", "reject"], &late)
        .code(2)
        .err_has("messages[1].role");
    clary_with(&["template", &demo, "-"], "{").code(2).err_has("-: ");
    clary_with(&["template", &demo, "-"], "{}").code(2).err_has("messages");
    clary_with(&["template", &demo, "-"], r#"[{"role": "robot"}]"#).code(2).err_has("messages[0].role");
    for model in [demo, tiny()] {
        let ran = clary(&["template", &model, "--lint"]).code(0).out_has("control spellings");
        assert!(!ran.out.contains("fail"), "{ran:?}");
    }
}

#[test]
fn a_template_that_drops_texts_is_told() {
    let dir = tempfile::tempdir().expect("a folder");
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        fs::copy(format!("{}/{name}", demo()), dir.path().join(name)).expect("it is copied");
    }
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>{% endfor %}";
    fs::write(dir.path().join("chat_template.jinja"), template).expect("it is written");
    let ran = clary(&["template", &dir.path().display().to_string(), "--lint"]).code(3);
    assert!(ran.out.contains("is not in the prompt") && ran.err.contains("chats fail"), "{ran:?}");
}

#[test]
fn a_configuration_file_from_nothing_to_serve() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("clary/config.toml").display().to_string();
    let with = |args: &[&str]| clary(&[&["--config", &file], args].concat());
    with(&["config", "path"]).code(0).out_has(&file);
    with(&["config", "check"]).code(2).err_has("config.toml");
    with(&["config", "set", "slots", "2"]).code(0);
    with(&["config", "set", "serve.alias", "[\"small\", \"other\"]"]).code(0);
    with(&["config", "set", "queue_timeout", "5s"]).code(0);
    with(&["config", "set", "slots", "0"]).code(2).err_has("serve").err_has("1 to 64");
    with(&["config", "set", "sluts", "1"]).code(2).err_has("did you mean slots?");
    with(&["config", "set", "slots", "3"]).code(0);
    with(&["config", "check"]).code(0).out_has("3 keys");
    let shown = with(&["config", "show", "--json"]).code(0).json();
    assert_eq!(shown["serve"]["slots"], json!({"value": "3", "from": "file"}));
    assert_eq!(shown["serve"]["alias"], json!({"value": "small,other", "from": "file"}));
    assert_eq!(shown["serve"]["port"], json!({"value": "8080", "from": "default"}));
    with(&["config", "show"]).code(0).out_has("queue-timeout");
    // The file's port has an end only where it is a number: the mistake names file and key.
    fs::write(&file, "[serve]\nport = \"x\"\n").expect("it is written");
    with(&["serve", &demo()])
        .code(2)
        .err_has("config.toml")
        .err_has("port: expected a number from 0 to 65535, found \"x\"");
    fs::write(&file, "[serve]\nport = 1\n[other]\n").expect("it is written");
    with(&["serve", &demo()]).code(2).err_has("other: no such table or key");
}
