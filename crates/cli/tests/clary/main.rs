//! The real binary on small models: exit codes, messages, output.

mod exact;
mod inspect;
mod looks;
mod packaging;
mod pictures;
mod pull;
mod receipts;
mod replies;
mod scores;
mod serve;
mod soak;
mod texts;
mod usage;

#[path = "../stub/mod.rs"]
mod stub;

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A file or folder of the project.
fn project(path: &str) -> String {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.join(path).display().to_string()
}

fn demo() -> String {
    project("models/demo")
}

fn tiny() -> String {
    project("fixtures/tiny-a")
}

/// What a run of the binary gave.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ran {
    /// The same, which must have ended with this code.
    #[track_caller]
    fn code(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        assert!(!self.err.contains("panicked"), "{self:#?}");
        if ![0, 130].contains(&code) {
            let is_told = self.err.starts_with("error: ") || self.err.contains("\nerror: ");
            assert!(is_told, "a failure says so: {self:#?}");
            assert!(self.err.contains("\nhint: "), "and how to go on: {self:#?}");
        }
        self
    }

    #[track_caller]
    fn err_has(self, text: &str) -> Self {
        assert!(self.err.contains(text), "{text:?} is not in {self:#?}");
        self
    }

    #[track_caller]
    fn out_has(self, text: &str) -> Self {
        assert!(self.out.contains(text), "{text:?} is not in {self:#?}");
        self
    }

    #[track_caller]
    fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }
}

/// Runs the binary with an empty stdin.
fn clary(args: &[&str]) -> Ran {
    clary_with(args, "")
}

/// Runs the binary with text on stdin.
fn clary_with(args: &[&str], input: &str) -> Ran {
    ran(args, input, &[])
}

/// Runs the binary with variables of the environment.
fn clary_env(args: &[&str], variables: &[(&str, &str)]) -> Ran {
    ran(args, "", variables)
}

fn ran(args: &[&str], input: &str, variables: &[(&str, &str)]) -> Ran {
    let mut child = Command::new(env!("CARGO_BIN_EXE_clary"))
        .args(args)
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let mut stdin = child.stdin.take().expect("stdin is piped");
    // A program that does not read its input closes the pipe.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child.wait_with_output().expect("the binary ends");
    Ran {
        code: output.status.code(),
        out: String::from_utf8(output.stdout).expect("stdout is UTF-8"),
        err: String::from_utf8(output.stderr).expect("stderr is UTF-8"),
    }
}
