//! Processor, memory, limits of the process.

use std::fs;
use std::num::NonZero;
use std::path::Path;
use std::thread::available_parallelism;

use device::cpu::Isa;

use super::{Check, line};
use crate::{load, memory, table};

/// Least open files: the server takes 512 connections, a model has some dozen files.
const FILES_MIN: u64 = 1024;

pub(super) fn checks(root: &Path) -> Vec<Check> {
    vec![processor(root), memory(root), files(root), huge_pages(root)]
}

fn processor(root: &Path) -> Check {
    let info = fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
    let isa = Isa::detect().name();
    let usable = available_parallelism().map_or(1, NonZero::get);
    let threads = load::threads(None);
    let found = format!("{}; {isa}; {threads} threads of {usable}", name.unwrap_or("unknown").trim());
    match isa {
        "scalar" => Check::warn("processor", found, "a processor with AVX2 is many times as fast"),
        _ => Check::ok("processor", found),
    }
}

fn memory(root: &Path) -> Check {
    let info = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let total = info.lines().find_map(|line| {
        let number = line.strip_prefix("MemTotal:")?.split_whitespace().next()?;
        number.parse::<u64>().ok()?.checked_mul(1024)
    });
    let (Some(total), Some(free)) = (total, memory::free()) else {
        let fix = "name --memory-limit in bytes";
        return Check::warn("memory", "the system does not say what is free", fix);
    };
    let group = line(root, "sys/fs/cgroup/memory.max").and_then(|text| text.parse::<u64>().ok());
    let limit = group.map(|bytes| format!(", {} for this group", table::bytes(bytes))).unwrap_or_default();
    let found = format!("{} free of {}{limit}", table::bytes(free), table::bytes(total));
    match free < total / 10 {
        true => Check::warn("memory", found, "end other programs: models take what is free at start"),
        false => Check::ok("memory", found),
    }
}

/// Soft limit of a row of `/proc/self/limits`; `None` is no limit.
fn soft_limit(text: &str, name: &str) -> Option<u64> {
    let row = text.lines().find_map(|line| line.strip_prefix(name))?;
    row.split_whitespace().next()?.parse().ok()
}

fn files(root: &Path) -> Check {
    let text = fs::read_to_string(root.join("proc/self/limits")).unwrap_or_default();
    let locked = soft_limit(&text, "Max locked memory").map_or("unlimited".to_owned(), table::bytes);
    match soft_limit(&text, "Max open files") {
        Some(files) if files < FILES_MIN => {
            let fix = format!("ulimit -n {FILES_MIN}, or LimitNOFILE= in the service");
            Check::warn("limits", format!("{files} open files; {locked} of locked memory"), fix)
        }
        Some(files) => Check::ok("limits", format!("{files} open files; {locked} of locked memory")),
        None => Check::ok("limits", format!("open files unlimited; {locked} of locked memory")),
    }
}

fn huge_pages(root: &Path) -> Check {
    let Some(modes) = line(root, "sys/kernel/mm/transparent_hugepage/enabled") else {
        return Check::ok("huge pages", "this kernel has none");
    };
    let chosen = modes.split('[').nth(1).and_then(|rest| rest.split(']').next()).unwrap_or("unknown");
    match chosen {
        "never" => Check::warn(
            "huge pages",
            "never",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root",
        ),
        _ => Check::ok("huge pages", chosen),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn what_the_system_says() {
        let limits = "Limit  Soft Limit  Hard Limit  Units\nMax locked memory 8388608 8388608 bytes\n\
                      Max open files    256    4096   files\n";
        let root = machine(&[
            ("proc/self/limits", limits),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
        ]);
        let files = files(root.path());
        assert_eq!(
            (files.state, files.found.as_str()),
            (State::Warn, "256 open files; 8.0 MiB of locked memory")
        );
        assert_eq!(huge_pages(root.path()).state, State::Warn);
        let root = machine(&[
            ("proc/self/limits", "Max open files  unlimited unlimited files\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
        ]);
        assert_eq!(super::files(root.path()).state, State::Ok);
        assert_eq!(huge_pages(root.path()), Check::ok("huge pages", "madvise"));
        assert_eq!(memory(root.path()).state, State::Warn);
    }
}
