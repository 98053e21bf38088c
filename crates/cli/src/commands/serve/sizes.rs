//! How many slots, how long, and what is left for the prompt cache.

use device::{PAGE_TOKENS, WINDOW_ROWS_MAX};
use engine::CacheLimits;
use model::qwen3_5::{MemoryPlan, Settings};

use super::options::{CacheSize, ServeArgs, Slots};
use crate::args::{Ctx, Draft};
use crate::error::{Exit, Result};
use crate::load::{self, ROWS_MAX};
use crate::memory::{self, Wish};
use crate::weights::Weights;

/// Most slots that are chosen without being asked for.
const SLOTS_AUTO: usize = 4;
/// A context worth another slot.
const CONTEXT_WORTH: usize = 8192;
/// Largest cache that is chosen without being asked for, bytes.
const CACHE_AUTO: u64 = 4 << 30;
/// Most saved states: far more prompts than slots, and far less bookkeeping than work.
const SNAPSHOTS_MAX: u64 = 256;
/// Most of the longest contexts that the cache's own pages could hold.
const CONTEXTS_CACHED: usize = 16;

/// What was settled.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    /// Of the model.
    pub(crate) model: Settings,
    /// Of the prompt cache.
    pub(crate) cache: CacheLimits,
    /// Bytes that may be used; `None` where the system does not say.
    pub(crate) limit: Option<u64>,
}

/// The option that says how large the cache is, and its value: states and K/V lie where the device computes.
pub(crate) fn cache_option(args: &ServeArgs) -> (&'static str, CacheSize) {
    match device::card(&args.model.machine.device) {
        Some(_) => ("--cache-device", args.work.cache_device),
        None => ("--cache-ram", args.work.cache_ram),
    }
}

/// Settles sizes against the geometry and memory. A cache nobody asked for gives way to all else.
pub(crate) fn settle(weights: &Weights, args: &ServeArgs, image_tokens: usize) -> Result<Sizes> {
    let limit = memory::limit(args.model.machine.memory_limit, &args.model.machine.device);
    let ask = Ask { weights, args, image_tokens, limit };
    let (option, size) = cache_option(args);
    match size {
        CacheSize::Bytes(bytes) => ask.with_cache(bytes).map_err(|failure| match &failure.hint {
            Some(hint) if failure.exit == Exit::Memory && bytes > 0 && ask.with_cache(0).is_ok() => {
                let hint = format!("{hint}; {option} 0");
                failure.hint(hint)
            }
            _ => failure,
        }),
        CacheSize::Auto => {
            let most = ask.cache_auto();
            let mut tries =
                [most, most / 2, most / 4].into_iter().filter_map(|bytes| ask.with_cache(bytes).ok());
            tries.next().map_or_else(|| ask.with_cache(0), Ok)
        }
    }
}

struct Ask<'a> {
    weights: &'a Weights,
    args: &'a ServeArgs,
    /// Most tokens of a picture; 0 takes none.
    image_tokens: usize,
    limit: Option<u64>,
}

impl Ask<'_> {
    fn mtp(&self) -> bool {
        self.args.draft.draft != Draft::Off
    }

    fn base(&self, slots: usize, snapshots: usize) -> Settings {
        Settings {
            slots,
            snapshots,
            context: 1,
            pages: slots,
            kv: load::form(self.args.model.kv),
            rows_max: load::step_rows(&self.args.model.machine.device, ROWS_MAX, self.limit),
            logits_rows_max: (slots * WINDOW_ROWS_MAX).clamp(64, ROWS_MAX),
            mtp: self.mtp(),
            image_tokens: self.image_tokens,
            card: device::card(&self.args.model.machine.device).is_some(),
        }
    }

    /// Costs of a server with one slot of one page.
    fn least(&self) -> MemoryPlan {
        let mtp = self.mtp() && self.weights.parts.mtp;
        MemoryPlan::new(&self.weights.config, &self.base(1, 0), mtp, self.weights.bytes)
    }

    fn cache_auto(&self) -> u64 {
        let left = self.limit.map_or(u64::MAX, |limit| limit.saturating_sub(self.least().total()));
        // Of a card's memory only what the weights leave counts: nothing else runs in it.
        let share = match device::card(&self.args.model.machine.device) {
            Some(_) => u64::MAX,
            None => memory::free().map_or(u64::MAX, |free| free / 5),
        };
        CACHE_AUTO.min(share).min(left / 2)
    }

    /// Half of the cache's memory is for states, the rest for the pages that go with them.
    fn with_cache(&self, bytes: u64) -> Result<Sizes> {
        let least = self.least();
        let snapshots = (bytes / 2 / least.state).min(SNAPSHOTS_MAX);
        let pages = bytes.saturating_sub(snapshots * least.state) / least.page;
        let most = CONTEXTS_CACHED * self.weights.config.positions_max.div_ceil(PAGE_TOKENS);
        let spare_pages = if snapshots == 0 { 0 } else { pages.min(most as u64) as usize };
        let wish = Wish {
            config: &self.weights.config,
            mtp: self.mtp() && self.weights.parts.mtp,
            weights: self.weights.bytes,
            limit: self.limit,
            spare_pages,
        };
        let base = |slots| self.base(slots, snapshots as usize);
        let wanted = match self.args.model.ctx {
            Ctx::Tokens(tokens) => tokens,
            Ctx::Auto => CONTEXT_WORTH.min(self.weights.config.positions_max),
        };
        let slots = match self.args.work.slots {
            Slots::Count(count) => count,
            Slots::Auto => {
                let fits = |slots: &usize| wish.fits(&base(*slots)).is_some_and(|context| context >= wanted);
                (1..=SLOTS_AUTO).rev().find(fits).unwrap_or(1)
            }
        };
        let model = wish.settle(&base(slots), self.args.model.ctx)?;
        // Pages that slots leave free would hold more, but not beyond what was asked for.
        let reserved = snapshots * least.state + spare_pages as u64 * least.page;
        let cache = CacheLimits {
            bytes_max: reserved,
            checkpoint_tokens: self.args.work.checkpoint_every,
            ..CacheLimits::default()
        };
        Ok(Sizes { model, cache, limit: self.limit })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    /// Bytes that the cache may hold with these options.
    fn cache(options: &[&str]) -> u64 {
        let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo");
        let words = [&["clary", "serve", demo, "--memory-limit", "2GiB", "--ctx", "1024"], options].concat();
        let Command::Serve(args) = Cli::try_parse_from(words).expect("they parse").command else {
            panic!("it is serve");
        };
        let weights = Weights::open(demo).expect("it is there");
        settle(&weights, &args, 0).expect("it fits").cache.bytes_max
    }

    #[test]
    fn each_device_has_a_cache_of_its_own_size() {
        let (ram, card) = (["--cache-ram", "64MiB"], ["--cache-device", "32MiB"]);
        let sized = |device, mib: u64| {
            let options = [&["--device", device], &ram[..], &card].concat();
            let bytes = cache(&options);
            assert!(bytes <= mib << 20 && bytes > (mib - 4) << 20, "{device}: {bytes}");
        };
        sized("cpu", 64);
        sized("cuda:0", 32);
        assert_eq!(cache(&["--device", "cuda:0", "--cache-device", "0"]), 0);
        assert!(cache(&["--device", "cuda:0", "--cache-ram", "0"]) > 0);
        assert!(cache(&["--device", "cpu", "--cache-device", "0"]) > 0);
    }
}
