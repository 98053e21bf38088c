//! The files that ship: options in them exist, and what checks them elsewhere has nothing to say.

use std::fs;
use std::process::Command;

use crate::{clary, project};

fn lines(path: &str) -> Vec<String> {
    let text = fs::read_to_string(project(path)).expect("it is there");
    let joined = text.replace("\\\n", " ");
    joined
        .lines()
        .map(|line| line.trim().to_owned())
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect()
}

/// A command line of a file, over an empty configuration and a model that is not there: it is understood if
/// the model is what is missed.
#[track_caller]
fn understood(words: &[&str]) {
    let dir = tempfile::tempdir().expect("a folder");
    let config = dir.path().join("config.toml").display().to_string();
    fs::write(&config, "").expect("it is written");
    let words: Vec<&str> = words
        .iter()
        .map(|word| match *word {
            "/etc/clary/config.toml" => config.as_str(),
            "${CLARY_MODEL}" | "/model" => "no/such/model",
            word => word,
        })
        .collect();
    clary(&words).code(3).err_has("no/such/model");
}

#[test]
fn the_unit_starts_what_there_is() {
    let lines = lines("packaging/systemd/clary.service");
    let of =
        |key: &str| lines.iter().find_map(|line| line.strip_prefix(key)).unwrap_or_else(|| panic!("{key}"));
    let words: Vec<&str> = of("ExecStart=").split_whitespace().collect();
    assert_eq!(words[0], "/usr/bin/clary");
    understood(&words[1..]);
    for key in
        ["Type=notify", "NoNewPrivileges=yes", "ProtectSystem=strict", "DynamicUser=yes", "WatchdogSec="]
    {
        of(key);
    }
    // A group that is not there keeps the unit from starting: each is made.
    let made = fs::read_to_string(project("packaging/systemd/clary.sysusers.conf")).expect("it is there");
    for group in of("SupplementaryGroups=").split_whitespace() {
        assert!(made.lines().any(|line| line == format!("g {group} - -")), "{group}");
    }
    // The manager's patience is longer than the server's.
    assert_eq!(of("TimeoutStopSec="), "45s");
    let example = fs::read_to_string(project("packaging/systemd/model.example")).expect("it is there");
    assert!(example.starts_with("CLARY_MODEL="));
}

#[test]
fn the_unit_is_one_for_systemd() {
    let dir = tempfile::tempdir().expect("a folder");
    let text = fs::read_to_string(project("packaging/systemd/clary.service")).expect("it is there");
    let unit = dir.path().join("clary.service");
    fs::write(&unit, text.replace("/usr/bin/clary", "/bin/true")).expect("it is written");
    match Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&unit).output() {
        Ok(ran) => {
            let words = String::from_utf8_lossy(&ran.stderr).into_owned();
            // Other units of the machine are none of ours.
            let ours: Vec<&str> = words.lines().filter(|line| line.contains("clary")).collect();
            assert!(ours.is_empty(), "{words}");
        }
        Err(error) => println!("systemd-analyze is not here: {error}"),
    }
}

#[test]
fn the_container_file_keeps_the_usual_rules() {
    let lines = lines("packaging/container/Containerfile");
    let known = [
        "FROM",
        "ARG",
        "WORKDIR",
        "COPY",
        "RUN",
        "USER",
        "EXPOSE",
        "STOPSIGNAL",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    ];
    for line in &lines {
        let word = line.split(' ').next().unwrap_or_default();
        assert!(known.contains(&word), "{line}");
        if let Some(image) = line.strip_prefix("FROM ") {
            let image = image.split(' ').next().unwrap_or_default();
            let tag = image.rsplit_once(':').map(|(_, tag)| tag);
            assert!(tag.is_some_and(|tag| tag != "latest"), "an image has a version: {line}");
        }
    }
    let last = |word: &str| {
        lines.iter().rev().find_map(|line| line.strip_prefix(word)).unwrap_or_else(|| panic!("{word}"))
    };
    let user = last("USER ").split(':').next().and_then(|id| id.parse::<u32>().ok());
    assert!(user.is_some_and(|id| id > 0), "a number that is not root's");
    let list = |text: &str| serde_json::from_str::<Vec<String>>(text.trim()).expect("a list of words");
    assert_eq!(list(last("ENTRYPOINT ")), ["/usr/bin/clary"]);
    let words = list(last("CMD "));
    let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
    // With no key the open address is refused, so the check brings none of its own.
    words.push("--no-auth-i-know");
    understood(&words);
    let health = last("HEALTHCHECK ");
    let words = list(health.split_once("CMD ").expect("it has a command").1);
    let words: Vec<&str> = words.iter().map(String::as_str).skip(1).collect();
    // Nothing listens at this port: the command is understood and fails for that alone.
    clary(&[&words[..], &["--url", "http://127.0.0.1:9"]].concat()).code(6);
}
