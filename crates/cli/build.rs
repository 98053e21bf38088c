//! Says which commit the binary is built from, where there is a repository to ask.

use std::path::Path;
use std::process::Command;

fn main() {
    // A package may be built without its repository and say by CLARY_COMMIT what it is made of.
    println!("cargo:rerun-if-env-changed=CLARY_COMMIT");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src");
    // A file that is named and not there would have the crate built anew every time.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"]);
    if let Some(log) = log.filter(|log| Path::new(log).exists()) {
        println!("cargo:rerun-if-changed={log}");
    }
    let told = std::env::var("CLARY_COMMIT").ok().filter(|commit| !commit.is_empty());
    if let Some(commit) = told.or_else(|| git(&["describe", "--always", "--dirty", "--abbrev=12"])) {
        println!("cargo:rustc-env=CLARY_COMMIT={commit}");
    }
}

/// What git says; `None` without git, or outside of a repository of this project.
fn git(words: &[&str]) -> Option<String> {
    let manifest = std::env::var("CARGO_MANIFEST_DIR").ok()?;
    let run = |words: &[&str]| {
        let output = Command::new("git").args(words).current_dir(&manifest).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        (output.status.success() && !text.is_empty()).then_some(text)
    };
    // An unpacked archive inside of somebody else's repository is not of that repository's commit.
    run(&["ls-files", "--error-unmatch", "Cargo.toml"])?;
    run(words)
}
