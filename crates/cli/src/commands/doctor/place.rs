//! The disk that models are read from, and the port.

use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::Check;
use crate::error::Result;
use crate::table;

/// Bytes written and read to learn how fast the disk is.
const PROBE: usize = 64 << 20;
const BLOCK: usize = 1 << 20;
/// Least free space: a small model.
const SPACE_MIN: u64 = 4 << 30;

/// The folder, or the nearest one above it that is there: a store is made by the first `pull`.
pub(super) fn existing(store: &Path) -> PathBuf {
    store.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new(".")).to_owned()
}

/// Looks at the store, or says why there is none, and at the port.
pub(super) fn checks(store: Result<PathBuf>, port: u16) -> Vec<Check> {
    let mut checks = match store {
        Ok(store) => vec![space(&store), speed(&store)],
        Err(failure) => {
            let fix = failure.advice().unwrap_or_default().to_owned();
            vec![Check::warn("disk space", failure.message, fix)]
        }
    };
    checks.push(self::port(port));
    checks
}

fn space(store: &Path) -> Check {
    match rustix::fs::statvfs(store) {
        Ok(disk) => {
            let bytes = disk.f_bavail.saturating_mul(disk.f_frsize);
            let found = format!("{} free at {}", table::bytes(bytes), store.display());
            match bytes < SPACE_MIN {
                true => Check::warn("disk space", found, "make room, or name another folder with --store"),
                false => Check::ok("disk space", found),
            }
        }
        Err(error) => {
            let found = format!("{}: {}", store.display(), io::Error::from(error));
            Check::fail("disk space", found, "name the folder of your models with --store")
        }
    }
}

fn speed(store: &Path) -> Check {
    match probe(store) {
        Ok((write, read)) => {
            let found =
                format!("writes {}/s, reads {}/s (just written)", table::bytes(write), table::bytes(read));
            Check::ok("disk speed", found)
        }
        Err(error) => Check::warn(
            "disk speed",
            format!("{}: {error}", store.display()),
            "models can be read from there, not fetched to it: check the permission",
        ),
    }
}

/// Bytes a second of writing and of reading again.
fn probe(store: &Path) -> io::Result<(u64, u64)> {
    let path = store.join(format!(".clary-doctor.{}.partial", std::process::id()));
    let measured = measure(&path);
    // Its failure to go away is less than what the probe has to say.
    let _ = fs::remove_file(&path);
    measured
}

fn measure(path: &Path) -> io::Result<(u64, u64)> {
    let mut block = vec![0x5a; BLOCK];
    let rate = |start: Instant| (PROBE as f64 / start.elapsed().as_secs_f64()) as u64;
    let start = Instant::now();
    let mut file = fs::File::create_new(path)?;
    for _ in 0..PROBE / BLOCK {
        file.write_all(&block)?;
    }
    file.sync_all()?;
    let write = rate(start);
    let start = Instant::now();
    let mut file = fs::File::open(path)?;
    while file.read(&mut block)? > 0 {}
    Ok((write, rate(start)))
}

fn port(port: u16) -> Check {
    match TcpListener::bind(("127.0.0.1", port)) {
        Ok(_) => Check::ok("port", format!("{port} is free")),
        Err(error) => {
            Check::warn("port", format!("{port}: {error}"), "end what listens there, or serve with --port N")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn folders_and_ports() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(speed(dir.path()).state, State::Ok);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
        assert_eq!(space(&dir.path().join("no")).state, State::Fail);
        assert_eq!(existing(&dir.path().join("no/such")), dir.path());
        assert_eq!(speed(&dir.path().join("no")).state, State::Warn);
        let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let number = taken.local_addr().unwrap().port();
        assert_eq!(port(number).state, State::Warn);
        drop(taken);
        assert_eq!(port(number).state, State::Ok);
    }
}
