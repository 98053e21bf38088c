//! Intel cards: kernel driver, permission, loaders, masks.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::{Check, line};
use crate::table;

const VENDOR: &str = "0x8086";
/// Folders of shared libraries that are looked at.
const LIBRARIES: [&str; 5] =
    ["usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib", "lib/x86_64-linux-gnu"];
const MASKS: [&str; 3] = ["ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR", "SYCL_DEVICE_FILTER"];
/// A region of the card this large holds its whole memory.
const BAR_LARGE: u64 = 1 << 32;

/// A card of this vendor that is more than a display.
struct Card {
    name: String,
    /// Its folder below `sys/class/drm`.
    dir: PathBuf,
    driver: String,
}

pub(super) fn checks(root: &Path) -> Vec<Check> {
    let cards = cards(root);
    if cards.is_empty() {
        return vec![Check::ok("xpu", "no Intel card: not used")];
    }
    let mut checks = Vec::new();
    for card in &cards {
        checks.push(driver(card));
        checks.push(node(root, card));
        checks.push(bar(card));
    }
    checks.push(library(root, "level zero", "libze_loader.so.1", "install the package level-zero (libze1)"));
    checks.push(library(root, "opencl", "libOpenCL.so.1", "install the package ocl-icd-libopencl1"));
    checks.push(runtime(root));
    let masks = MASKS.iter().filter_map(|name| Some((name, std::env::var(name).ok()?)));
    checks.extend(masks.map(|(name, value)| Check::ok("xpu mask", format!("{name}={value}"))));
    checks
}

fn cards(root: &Path) -> Vec<Card> {
    let Ok(entries) = fs::read_dir(root.join("sys/class/drm")) else { return Vec::new() };
    let card = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.to_owned();
        let is_card = name.strip_prefix("card")?.bytes().all(|letter| letter.is_ascii_digit());
        let device = path.join("device");
        if !is_card || line(&device, "vendor")? != VENDOR {
            return None;
        }
        let driver = fs::canonicalize(device.join("driver")).ok();
        let driver = driver.and_then(|path| Some(path.file_name()?.to_str()?.to_owned())).unwrap_or_default();
        Some(Card { name, dir: device, driver })
    };
    let mut cards: Vec<Card> = entries.flatten().filter_map(|entry| card(entry.path())).collect();
    cards.sort_by(|a, b| a.name.cmp(&b.name));
    cards
}

fn driver(card: &Card) -> Check {
    let found = format!("{}: {}", card.name, if card.driver.is_empty() { "none" } else { &card.driver });
    match card.driver.as_str() {
        "xe" | "i915" => Check::ok("xpu driver", found),
        _ => Check::fail("xpu driver", found, "a kernel with the xe or i915 driver is needed"),
    }
}

/// The device file through which programs compute.
fn node(root: &Path, card: &Card) -> Check {
    let entries = fs::read_dir(card.dir.join("drm")).into_iter().flatten().flatten();
    let mut names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let Some(name) = names.find(|name| name.starts_with("renderD")) else {
        return Check::fail("xpu node", "no render node", "load the card's kernel driver");
    };
    let path = root.join("dev/dri").join(&name);
    match File::options().read(true).write(true).open(&path) {
        Ok(_) => Check::ok("xpu node", format!("/dev/dri/{name} can be used")),
        Err(error) => {
            let fix = "usermod -aG render USER, then log in again; in a container pass --device /dev/dri";
            Check::fail("xpu node", format!("/dev/dri/{name}: {error}"), fix)
        }
    }
}

/// Whether the processor sees the card's whole memory.
fn bar(card: &Card) -> Check {
    let text = fs::read_to_string(card.dir.join("resource")).unwrap_or_default();
    let number = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
    let size = |line: &str| {
        let mut words = line.split_whitespace();
        let (from, to) = (number(words.next()?)?, number(words.next()?)?);
        (to > from).then(|| to - from + 1)
    };
    let largest = text.lines().filter_map(size).max().unwrap_or(0);
    let found = format!("largest region {}", table::bytes(largest));
    match largest >= BAR_LARGE {
        true => Check::ok("resizable bar", found),
        false => Check::warn(
            "resizable bar",
            found,
            "switch on Above 4G Decoding and Resizable BAR in the firmware; integrated graphics need none",
        ),
    }
}

fn find(root: &Path, name: &str) -> Option<PathBuf> {
    LIBRARIES.iter().map(|folder| root.join(folder).join(name)).find(|path| path.exists())
}

fn library(root: &Path, what: &'static str, name: &str, fix: &str) -> Check {
    match find(root, name) {
        Some(_) => Check::ok(what, name),
        None => Check::fail(what, format!("{name} is not there"), fix),
    }
}

/// Version of the compute runtime, which is in the name of its file.
fn runtime(root: &Path) -> Check {
    let file = find(root, "libze_intel_gpu.so.1").and_then(|path| fs::canonicalize(path).ok());
    let version = file.as_ref().and_then(|path| path.file_name()?.to_str()?.split(".so.").nth(1));
    match version {
        Some(version) => Check::ok("xpu runtime", version),
        None => Check::fail(
            "xpu runtime",
            "libze_intel_gpu.so.1 is not there",
            "install the package intel-level-zero-gpu (libze-intel-gpu1)",
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::super::State;
    use super::*;

    #[test]
    fn a_machine_with_a_card() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let device = root.join("sys/class/drm/card0/device");
        fs::create_dir_all(device.join("drm/renderD128")).unwrap();
        fs::create_dir_all(root.join("sys/class/drm/card0-DP-1")).unwrap();
        fs::create_dir_all(root.join("drivers/xe")).unwrap();
        fs::create_dir_all(root.join("dev/dri")).unwrap();
        fs::create_dir_all(root.join("usr/lib")).unwrap();
        fs::write(device.join("vendor"), "0x8086\n").unwrap();
        let resource = "0x0000000000000000 0x0000000000ffffff 0x0\n0x4000000000 0x43ffffffff 0x14220c\n";
        fs::write(device.join("resource"), resource).unwrap();
        symlink(root.join("drivers/xe"), device.join("driver")).unwrap();
        let state = |name: &str| {
            let checks = checks(root);
            checks.iter().find(|check| check.name == name).map(|check| (check.state, check.found.clone()))
        };
        assert_eq!(state("xpu driver"), Some((State::Ok, "card0: xe".into())));
        assert_eq!(state("resizable bar"), Some((State::Ok, "largest region 16.0 GiB".into())));
        assert_eq!(state("xpu node").unwrap().0, State::Fail);
        assert_eq!(state("xpu runtime").unwrap().0, State::Fail);
        fs::write(root.join("dev/dri/renderD128"), "").unwrap();
        fs::write(root.join("usr/lib/libze_intel_gpu.so.1.6.30"), "").unwrap();
        symlink("libze_intel_gpu.so.1.6.30", root.join("usr/lib/libze_intel_gpu.so.1")).unwrap();
        assert_eq!(state("xpu node").unwrap().0, State::Ok);
        assert_eq!(state("xpu runtime"), Some((State::Ok, "1.6.30".into())));
        assert_eq!(checks(Path::new("/nowhere")), [Check::ok("xpu", "no Intel card: not used")]);
    }
}
