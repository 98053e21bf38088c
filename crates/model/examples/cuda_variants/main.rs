//! The list of CUDA kernel variants that a release compiles before (`packaging/kernels.list`), made from the
//! code: models are loaded onto cards that are not there, and led through everything an engine asks.
//!
//! `cargo run --release -p model --example cuda_variants > packaging/kernels.list` writes it; with
//! `--check LIST` the example fails where LIST is another. Each line names architectures, a kernel file and
//! its constants.

mod blank;
mod subjects;
mod tour;

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;

use device::cuda::rehearsal::CARD_KINDS;

use subjects::{Result, rehearsed, subjects, summed_plainly};

/// The list: variants with all architectures that want them.
fn list() -> Result<String> {
    let mut archs: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for (subjects, plain_sums) in [(subjects()?, false), (summed_plainly()?, true)] {
        for subject in subjects {
            // Hopper cards have been seen to sum exactly.
            for kind in CARD_KINDS.iter().filter(|kind| !(plain_sums && kind.archs.contains(&"sm_90a"))) {
                for variant in rehearsed(kind, &subject, plain_sums)? {
                    archs.entry(variant).or_default().extend(kind.archs);
                }
            }
            let how = if plain_sums { ", plain sums" } else { "" };
            eprintln!("{}{how}: {} variants so far", subject.name, archs.len());
        }
    }
    let line = |(variant, archs): (&String, &BTreeSet<&str>)| {
        let archs: Vec<&str> = archs.iter().copied().collect();
        format!("{} {variant}\n", archs.join(","))
    };
    Ok(archs.iter().map(line).collect())
}

/// Lines of one text that the other lacks.
fn missing<'a>(of: &'a str, from: &str) -> Vec<&'a str> {
    let there: BTreeSet<&str> = from.lines().collect();
    of.lines().filter(|line| !there.contains(line)).collect()
}

fn check(path: &str, list: &str) -> Result<bool> {
    let committed = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let (new, gone) = (missing(list, &committed), missing(&committed, list));
    new.iter().for_each(|line| eprintln!("{path} lacks: {line}"));
    gone.iter().for_each(|line| eprintln!("nothing asks for: {line}"));
    if !new.is_empty() || !gone.is_empty() {
        eprintln!("write it anew: cargo run --release -p model --example cuda_variants > {path}");
    }
    Ok(new.is_empty() && gone.is_empty())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let done = match &words[..] {
        [] => list().map(|list| {
            print!("{list}");
            true
        }),
        [flag, path] if flag == "--check" => list().and_then(|list| check(path, &list)),
        _ => Err("nothing, or --check LIST".into()),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
