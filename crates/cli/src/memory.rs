//! How much memory there is, and whether a run fits.

use std::fs;

use model::qwen3_5::{Config, MemoryPlan, Qwen, Settings};

use crate::args::{Ctx, MemoryLimit};
use crate::error::{Exit, Failure, Result};
use crate::table::{self, Table};

/// Bytes that can be had now without pushing others out; `None` where the system does not say.
pub(crate) fn free() -> Option<u64> {
    let available = meminfo(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let group =
        |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse::<u64>().ok();
    Some(match (group("memory.max"), group("memory.current")) {
        (Some(limit), Some(used)) => available.min(limit.saturating_sub(used)),
        _ => available,
    })
}

fn meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Largest amount of memory that this process has held, bytes; `None` where the system does not say.
pub(crate) fn peak() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Bytes a run on this device may use, of the machine's memory or the card's; `None` is no limit, where
/// nobody says what is free. A card that cannot be asked will say why when it is opened.
pub(crate) fn limit(wish: MemoryLimit, device: &str) -> Option<u64> {
    let free = || match device::card(device) {
        Some(ordinal) => device::cuda::card_memory(ordinal).ok().map(|(free, _)| free),
        None => free(),
    };
    match wish {
        MemoryLimit::Bytes(bytes) => Some(bytes),
        MemoryLimit::Percent(percent) => free().map(|free| (free as f64 * percent / 100.0) as u64),
    }
}

/// What was planned for a loaded model, what its device holds now, and on a card all that is taken there, its
/// own needs and other programs included.
pub(crate) fn held(qwen: &Qwen, device: &str) -> String {
    let now = qwen.device().memory();
    let held = now.weights + now.kv + now.states + now.scratch;
    let mut line =
        format!("{} planned, {} held", table::bytes(qwen.memory_plan().total()), table::bytes(held));
    let card = device::card(device).and_then(|ordinal| device::cuda::card_memory(ordinal).ok());
    if let Some((free, total)) = card {
        let taken = table::bytes(total.saturating_sub(free));
        line += &format!("; {taken} of the card's {} taken", table::bytes(total));
    }
    line
}

/// What a run wants to fit into memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish<'a> {
    /// The geometry.
    pub(crate) config: &'a Config,
    /// Whether the MTP layer is loaded.
    pub(crate) mtp: bool,
    /// Bytes of the weights.
    pub(crate) weights: u64,
    /// Bytes that may be used.
    pub(crate) limit: Option<u64>,
    /// K/V pages beyond those that fill every slot. A reply reserves pages up to the end of the context, and
    /// each snapshot keeps a begun page of its own: without further pages no later turn could resume.
    pub(crate) spare_pages: usize,
}

impl Wish<'_> {
    /// Settles the context and makes sure that all fits.
    pub(crate) fn settle(&self, settings: &Settings, ctx: Ctx) -> Result<Settings> {
        let most = self.config.positions_max;
        let settings = match ctx {
            Ctx::Tokens(tokens) if tokens > most => {
                return Err(Failure::usage(format!(
                    "--ctx is {tokens}; this model was trained for {most} tokens"
                ))
                .hint(format!("--ctx {most} is the longest")));
            }
            Ctx::Tokens(tokens) => self.sized(settings, tokens),
            // Where not even one page fits, the check below says so.
            Ctx::Auto => self.sized(settings, self.fits(settings).unwrap_or(1)),
        };
        settings.check(self.config)?;
        self.check(&settings)?;
        Ok(settings)
    }

    /// Settings for this context, spare pages included.
    fn sized(&self, settings: &Settings, context: usize) -> Settings {
        let settings = settings.with_context(context);
        Settings { pages: settings.pages + self.spare_pages, ..settings }
    }

    /// The longest context that fits; `None` if not even a page does.
    pub(crate) fn fits(&self, settings: &Settings) -> Option<usize> {
        let Some(limit) = self.limit else { return Some(self.config.positions_max) };
        let page = MemoryPlan::new(self.config, settings, self.mtp, self.weights).page;
        let limit = limit.saturating_sub(self.spare_pages as u64 * page);
        MemoryPlan::context_that_fits(self.config, settings, self.mtp, self.weights, limit)
    }

    /// Refuses what does not fit, with the budget and with settings that would.
    fn check(&self, settings: &Settings) -> Result {
        let plan = MemoryPlan::new(self.config, settings, self.mtp, self.weights);
        let Some(limit) = self.limit.filter(|limit| plan.total() > *limit) else { return Ok(()) };
        let message = format!(
            "the model does not fit: {} are needed, {} may be used\n{}",
            table::bytes(plan.total()),
            table::bytes(limit),
            budget(&plan, settings).text().trim_end()
        );
        let mut ways = Vec::new();
        if let Some(context) = self.fits(settings) {
            ways.push(format!("--ctx {context}"));
        }
        let int8 = Settings { kv: device::KvForm::Int8, ..settings.clone() };
        if let Some(context) = self.fits(&int8).filter(|_| settings.kv == device::KvForm::Int16) {
            ways.push(format!("--kv int8 --ctx {}", context.min(settings.context)));
        }
        let one = Settings { slots: 1, ..settings.clone() };
        if let Some(context) = self.fits(&one).filter(|_| settings.slots > 1) {
            ways.push(format!("--slots 1 --ctx {}", context.min(settings.context)));
        }
        let needed = plan.total().div_ceil(1 << 20);
        ways.push(format!("--memory-limit {needed}MiB, if the machine has it"));
        Err(Failure::new(Exit::Memory, message).hint(format!("would fit: {}", ways.join("; "))))
    }
}

/// Lines of a memory plan.
pub(crate) fn budget(plan: &MemoryPlan, settings: &Settings) -> Table {
    let mut table = Table::new("<><");
    let slots = if settings.slots == 1 { "1 slot".to_owned() } else { format!("{} slots", settings.slots) };
    let kv = format!("{slots} of {} tokens, {:?}", table::grouped(settings.context as u64), settings.kv);
    table.row(["weights", &table::bytes(plan.weights), ""]);
    table.row(["kv", &table::bytes(plan.kv), &kv.to_lowercase()]);
    let states = format!("{slots} and {} snapshots", settings.snapshots);
    table.row(["states", &table::bytes(plan.states), &states]);
    let scratch = format!("{} rows a step", settings.rows_max);
    table.row(["scratch", &table::bytes(plan.scratch), &scratch]);
    table.row(["total", &table::bytes(plan.total()), ""]);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_says() {
        assert_eq!(meminfo("MemTotal:  9 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(meminfo("MemTotal:  9 kB\n"), None);
        assert_eq!(limit(MemoryLimit::Bytes(5), "cpu"), Some(5));
    }
}
