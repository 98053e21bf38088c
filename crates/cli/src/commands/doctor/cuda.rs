//! NVIDIA cards, by the words of the driver's own program.

use std::path::Path;
use std::process::Command;

use super::Check;

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

/// Cards that the driver knows, in its order.
pub(super) fn cards() -> Vec<Card> {
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
    if cards.is_empty() {
        return vec![match root.join("proc/driver/nvidia").exists() {
            true => Check::fail(
                "cuda",
                "a driver is loaded, and nvidia-smi names no card",
                "install the driver's utilities of the same version; check CUDA_VISIBLE_DEVICES",
            ),
            false => Check::ok("cuda", "no NVIDIA driver: not used"),
        }];
    }
    let mut checks = vec![driver(&cards[0].driver)];
    checks.extend(cards.iter().enumerate().map(|(index, card)| state(index, card)));
    if let Ok(mask) = std::env::var("CUDA_VISIBLE_DEVICES") {
        checks.push(Check::ok("cuda mask", format!("CUDA_VISIBLE_DEVICES={mask}: {}", masked(&mask))));
    }
    let others = ask(&["--query-compute-apps=used_memory"]).unwrap_or_default();
    checks.extend(users(&others));
    checks
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
    fn masks() {
        assert_eq!(masked("2,0"), "cuda:0 to cuda:1 are 2, 0");
        assert_eq!(masked(""), "no card is visible");
        assert_eq!(masked("-1"), "no card is visible");
    }
}
