//! NVIDIA cards, by the words of the driver and of its own program.

use std::path::Path;
use std::process::Command;

use super::Check;
use crate::load;

/// Oldest driver that is supported.
const DRIVER_MIN: u32 = 550;
const FIELDS: &str = "name,driver_version,compute_cap,memory.total,memory.free,utilization.gpu";

/// A card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Card {
    name: String,
    driver: String,
    compute: String,
    /// MiB.
    total: u64,
    /// MiB.
    free: u64,
    /// Percent of the time.
    busy: Option<u64>,
}

/// Number of cards that can be named as `cuda:N`.
pub(super) fn usable() -> usize {
    device::cuda::cards().unwrap_or(0)
}

/// Cards that the driver's program knows, in its order.
fn cards() -> Vec<Card> {
    ask(&[&format!("--query-gpu={FIELDS}")]).map_or_else(Vec::new, |text| parse(&text))
}

/// What the driver's program says; `None` where it is not there or fails.
fn ask(words: &[&str]) -> Option<String> {
    let ran = Command::new("nvidia-smi").args(words).arg("--format=csv,noheader,nounits").output().ok()?;
    ran.status.success().then(|| String::from_utf8_lossy(&ran.stdout).into_owned())
}

fn parse(text: &str) -> Vec<Card> {
    let card = |line: &str| {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let [name, driver, compute, total, free, busy] = fields[..] else { return None };
        Some(Card {
            name: name.to_owned(),
            driver: driver.to_owned(),
            compute: compute.to_owned(),
            total: total.parse().ok()?,
            free: free.parse().ok()?,
            busy: busy.parse().ok(),
        })
    };
    text.lines().filter_map(card).collect()
}

pub(super) fn checks(root: &Path) -> Vec<Check> {
    let cards = cards();
    let usable = device::cuda::cards();
    let Some(first) = cards.first() else {
        let has_driver = root.join("proc/driver/nvidia").exists();
        let mut checks = vec![unnamed(has_driver, usable.as_ref().copied().map_err(String::as_str))];
        checks.extend(usable.is_ok_and(|count| count > 0).then(kernels));
        return checks;
    };
    let mut checks = vec![driver(&first.driver)];
    checks.extend(cards.iter().enumerate().map(|(index, card)| state(index, card)));
    if let Err(reason) = &usable {
        let fix = "run where the driver's library is the one that is loaded";
        checks.push(Check::fail("cuda", reason.as_str(), fix));
    }
    checks.push(kernels());
    if let Ok(mask) = std::env::var("CUDA_VISIBLE_DEVICES") {
        checks.push(Check::ok("cuda mask", format!("CUDA_VISIBLE_DEVICES={mask}: {}", masked(&mask))));
    }
    let others = ask(&["--query-compute-apps=used_memory"]).unwrap_or_default();
    checks.extend(users(&others));
    checks
}

/// No card is named by nvidia-smi. `usable`: cards that the driver's library shows.
fn unnamed(has_driver: bool, usable: Result<usize, &str>) -> Check {
    match (usable, has_driver) {
        (Ok(count @ 1..), _) => Check::warn(
            "cuda",
            format!("the driver shows {count} of its cards, and nvidia-smi names none"),
            "install the driver's utilities of the same version to see its version, memory and load here",
        ),
        (Ok(0), _) => Check::warn(
            "cuda",
            "the driver shows no card",
            "check CUDA_VISIBLE_DEVICES, and whether the container may use cards",
        ),
        (Err(reason), true) => Check::fail(
            "cuda",
            format!("a driver is loaded; {reason}"),
            "install the driver's libraries and utilities of the same version",
        ),
        (Err(_), false) => Check::ok("cuda", "no NVIDIA driver: not used"),
    }
}

/// Where kernels come from.
fn kernels() -> Check {
    kernels_of(load::kernels().is_some(), device::cuda::compiler())
}

fn kernels_of(shipped: bool, compiler: Result<(i32, i32), String>) -> Check {
    let name = "cuda kernels";
    match (shipped, compiler) {
        (false, Ok((major, minor))) => {
            Check::ok(name, format!("compiled at first use by NVRTC {major}.{minor}"))
        }
        (true, Ok((major, minor))) => {
            Check::ok(name, format!("came with the program, NVRTC {major}.{minor} compiles others"))
        }
        (true, Err(_)) => Check::ok(name, "came with the program; without NVRTC there are no others"),
        (false, Err(reason)) => Check::fail(
            name,
            reason,
            "name the folder of libnvrtc in LD_LIBRARY_PATH, or install a release that has kernels",
        ),
    }
}

fn driver(version: &str) -> Check {
    let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
    match major {
        Some(major) if major >= DRIVER_MIN => {
            Check::ok("cuda driver", format!("{version} (needs {DRIVER_MIN})"))
        }
        _ => Check::fail("cuda driver", version, format!("install driver {DRIVER_MIN} or later")),
    }
}

fn state(index: usize, card: &Card) -> Check {
    let gib = |mib: u64| mib as f64 / 1024.0;
    let Card { name, compute, total, free, busy, .. } = card;
    let busy_text = busy.map(|busy| format!(", {busy} % busy")).unwrap_or_default();
    let (free_gib, total_gib) = (gib(*free), gib(*total));
    let found = format!(
        "cuda:{index} {name}, compute {compute}, {free_gib:.1} of {total_gib:.1} GiB free{busy_text}"
    );
    match *free < total / 2 {
        true => Check::warn("cuda card", found, "end what else uses the card, or name a smaller --ctx"),
        false => Check::ok("cuda card", found),
    }
}

/// Other programs on the cards, without their names.
fn users(text: &str) -> Option<Check> {
    let used: Vec<u64> = text.lines().filter_map(|line| line.trim().parse().ok()).collect();
    let (count, mib) = (used.len(), used.iter().sum::<u64>());
    let plural = if count == 1 { "" } else { "s" };
    (count > 0).then(|| {
        let found = format!("{count} other program{plural}, {:.1} GiB", mib as f64 / 1024.0);
        Check::warn("cuda users", found, "nvidia-smi names them")
    })
}

/// What a mask leaves visible.
fn masked(mask: &str) -> String {
    let shown: Vec<&str> = mask.split(',').map(str::trim).take_while(|name| *name != "-1").collect();
    match shown.as_slice() {
        [] | [""] => "no card is visible".to_owned(),
        names => format!("cuda:0 to cuda:{} are {}", names.len() - 1, names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn the_words_of_the_driver() {
        let text = "NVIDIA A, 570.1.2, 9.0, 143771, 143000, 0\nOld, 470.1, 7.5, 8192, 100, [N/A]\nbroken\n";
        let cards = parse(text);
        assert_eq!(cards.len(), 2);
        assert_eq!(state(0, &cards[0]).state, State::Ok);
        let full = state(1, &cards[1]);
        assert_eq!((full.state, full.found.contains("0.1 of 8.0 GiB free")), (State::Warn, true), "{full:?}");
        assert_eq!(driver(&cards[0].driver).state, State::Ok);
        assert_eq!(driver(&cards[1].driver).state, State::Fail);
        assert_eq!(users("100\n924\n").unwrap().found, "2 other programs, 1.0 GiB");
        assert_eq!(users(""), None);
    }

    #[test]
    fn cards_that_only_the_drivers_library_shows() {
        let missing = Err("no NVIDIA driver: libcuda was not found");
        for (has_driver, usable, state, says) in [
            (false, Ok(2), State::Warn, "shows 2"),
            (true, Ok(0), State::Warn, "no card"),
            (true, missing, State::Fail, "libcuda"),
            (false, missing, State::Ok, "not used"),
        ] {
            let check = unnamed(has_driver, usable);
            assert_eq!((check.state, check.found.contains(says)), (state, true), "{check:?}");
        }
    }

    #[test]
    fn where_kernels_come_from() {
        let none = || Err("NVRTC was not found".to_owned());
        for (shipped, compiler, state) in [
            (false, Ok((13, 0)), State::Ok),
            (true, Ok((13, 0)), State::Ok),
            (true, none(), State::Ok),
            (false, none(), State::Fail),
        ] {
            assert_eq!(kernels_of(shipped, compiler).state, state, "{shipped}");
        }
    }

    #[test]
    fn masks() {
        assert_eq!(masked("2,0"), "cuda:0 to cuda:1 are 2, 0");
        assert_eq!(masked(""), "no card is visible");
        assert_eq!(masked("-1"), "no card is visible");
    }
}
