//! What is refused before anything is loaded, and the commands that load nothing.

use crate::{clary, clary_env, clary_with, demo, project, tiny};

#[test]
fn mistakes_on_the_command_line_are_usage_errors() {
    let demo = demo();
    for args in [
        &[][..],
        &["nonsense"],
        &["run"],
        &["run", &demo, "a", "--temperature", "9"],
        &["run", &demo, "a", "--temperature", "nan"],
        &["run", &demo, "a", "--temperature", "-1"],
        &["run", &demo, "a", "--top-p", "0"],
        &["run", &demo, "a", "--min-p", "2"],
        &["run", &demo, "a", "--seed", "-1"],
        &["run", &demo, "a", "--kv", "int4"],
        &["run", &demo, "a", "--threads", "0"],
        &["run", &demo, "a", "--ctx", "0"],
        &["run", &demo, "a", "--draft", "9"],
        &["run", &demo, "a", "--memory-limit", "12GB"],
        &["run", &demo, "a", "--template-kwargs", "{"],
        &["run", &demo, "a", "--template-kwargs", "{\"tools\": []}"],
        &["run", &demo, "a", "--thinking", "on", "--template-kwargs", "{\"enable_thinking\": false}"],
        &["run", &demo, "a", "--quiet", "-v"],
        &["logits", &demo],
        &["bench", &demo, "--reps", "0"],
        &["bench", &demo, "--prompt", "1,x"],
        &["bench", &demo, "--prompt", "4096"],
        &["completions", "cmd"],
        &["info", "synth:x.json?colour=red"],
    ] {
        clary(args).code(2).err_has("hint: ");
    }
}

#[test]
fn empty_prompts_are_usage_errors() {
    let demo = demo();
    for (args, input) in [
        (&["run", &demo, ""][..], ""),
        (&["run", &demo, " \n "], ""),
        (&["run", &demo, "-"], ""),
        (&["run", &demo], "\n"),
    ] {
        clary_with(args, input).code(2).err_has("the prompt is empty").err_has("hint: ");
    }
}

#[test]
fn missing_models_are_refused() {
    for command in ["info", "check", "run", "chat", "bench"] {
        let prompt = if command == "run" { &["question"][..] } else { &[] };
        let args = [&[command, "no/such/folder/anywhere"], prompt].concat();
        clary(&args).code(3).err_has("no/such/folder/anywhere: no such folder").err_has("hint: ");
    }
    clary(&["info", "owner/name"]).code(3).err_has("clary pull");
    clary(&["info", &project("models/demo/config.json")]).code(3).err_has("is a file");
    clary(&["info", &project("docs")]).code(3).err_has("config.json");
    clary(&["info", "synth:no/config.json"]).code(3).err_has("no/config.json");
    clary(&["info", &format!("synth:{}/config.json?scheme=x", tiny())]).code(2).err_has("mlx-4bit");
}

#[test]
fn devices_that_are_not_here_are_refused() {
    for device in ["cuda:0", "abacus"] {
        clary(&["run", &demo(), "a", "--device", device]).code(5).err_has(device).err_has("hint: ");
    }
}

#[test]
fn help_version_manual_and_completions() {
    clary(&["--help"]).code(0).out_has("bench");
    clary(&["run", "--help"]).code(0).out_has("--memory-limit");
    let version = clary(&["version"]).code(0).out_has(concat!("clary ", env!("CARGO_PKG_VERSION")));
    assert!(version.out.contains("isa ") && !version.out.contains("unknown"), "{version:?}");
    assert_eq!(clary(&["version", "--json"]).code(0).json()["version"], env!("CARGO_PKG_VERSION"));
    for shell in ["bash", "zsh", "fish", "powershell"] {
        clary(&["completions", shell]).code(0).out_has("clary");
    }
    clary(&["man"]).code(0).out_has(".TH clary 1");
    let dir = tempfile::tempdir().unwrap();
    clary(&["man", &dir.path().display().to_string()]).code(0);
    let page = std::fs::read_to_string(dir.path().join("clary-run.1")).unwrap();
    assert!(page.contains(concat!("clary ", env!("CARGO_PKG_VERSION"))), "{page}");
    clary(&["chat", "--help"]).code(0).out_has("/undo");
}

#[test]
fn hints_are_about_the_command() {
    clary(&["eval"]).code(2).err_has("`clary help eval`");
    clary(&["serve", "m", "--numa", "off"])
        .code(2)
        .err_has("unexpected argument '--numa'")
        .err_has("`clary help serve`");
    clary(&["bench", "m", "--tokens", "-1"])
        .code(2)
        .err_has("invalid value '-1'")
        .err_has("`clary help bench`");
    clary(&["run", "m", "--seed", "-1"]).code(2).err_has("invalid value '-1'");
}

#[test]
fn planned_commands_are_no_misspellings() {
    clary(&["quantize", "a", "b"]).code(2).err_has("this version has no quantize");
    clary(&["eval", "kl", "m"]).code(2).err_has("this version has no kl").err_has("`clary help eval`");
}

/// Of the environment and of the file, all at once, each where it is.
#[test]
fn every_mistake_of_the_settings_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("clary.toml");
    std::fs::write(&file, "[serve]\nsloots = 2\nport = 70000\nno-ollama = 3\n").unwrap();
    let config = file.display().to_string();
    let serve = ["--config", &config, "serve", "no/such/folder/anywhere"];
    let told = [
        format!("{config}:2:1: sloots: no such key, did you mean slots?"),
        format!("{config}:3:8: port: expected a number from 0 to 65535, found 70000"),
        format!("{config}:4:13: no-ollama: expected true or false, found 3"),
    ];
    let ran = clary(&serve).code(2).err_has("3 mistakes in the settings");
    assert!(told.iter().all(|line| ran.err.contains(line)), "{ran:#?}");
    let ran = clary_env(&serve, &[("CLARY_SLOTS", "0"), ("CLARY_KV", "int9"), ("CLARY_NO_UI", "perhaps")]);
    let ran = ran.code(2).err_has("6 mistakes in the settings");
    let ran = ran.err_has("CLARY_SLOTS: expected auto, or a number from 1 to 64, found \"0\"");
    let ran = ran.err_has("CLARY_KV: expected one of int8, int16, found \"int9\", did you mean int8?");
    let ran = ran.err_has("CLARY_NO_UI: expected true or false, found \"perhaps\"");
    assert!(told.iter().all(|line| ran.err.contains(line)), "{ran:#?}");
    let check = clary(&["--config", &config, "--json", "config", "check"]).code(2);
    assert_eq!(check.json()["mistakes"].as_array().map(Vec::len), Some(3));
    let near = clary_env(&["serve", "no/such/folder/anywhere"], &[("CLARY_SLOT", "2")]);
    near.code(3).err_has("CLARY_SLOT: no such variable, did you mean CLARY_SLOTS?");
    clary_env(&["run", "m", "p"], &[("CLARY_CTX", "x")]).code(2).err_has("CLARY_CTX: expected a number");
    clary_env(&["eval", "exact", "m"], &[("CLARY_KV", "x")]).code(2).err_has("CLARY_KV: expected one of");
}

/// Also where more than the parser has to look at a value.
#[test]
fn a_wrong_value_is_named_where_it_stands() {
    clary_env(&["pull", "a/b"], &[("CLARY_HUB", "x")]).code(2).err_has("error: CLARY_HUB x: https://HOST");
    let serve = ["serve", &demo()];
    let kwargs = [("CLARY_TEMPLATE_KWARGS", "[]")];
    clary_env(&serve, &kwargs).code(2).err_has("error: CLARY_TEMPLATE_KWARGS: a JSON object is expected");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("clary.toml").display().to_string();
    std::fs::write(&file, "[serve]\ntemplate_kwargs = \"[]\"\n").unwrap();
    let serve = ["--config", &file, "serve", &demo()];
    clary(&serve).code(2).err_has(&format!("error: {file}: template-kwargs: a JSON object is expected"));
}

#[test]
fn nobody_has_to_read_the_output() {
    use std::process::{Command, Stdio};
    let mut child = Command::new(env!("CARGO_BIN_EXE_clary"))
        .args(["completions", "zsh"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(0));
}
