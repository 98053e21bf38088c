//! The test that a card's matrix instruction sums integers exactly, which all grouped matrices rest on. It
//! runs when a card is opened. On a card that fails it, kernels sum with plain multiplies and adds: slower,
//! the same bits.

use std::path::PathBuf;
use std::sync::Arc;

use super::compile::Kernels;
use super::driver::{Card, Driver, Result};
use super::launch::{Args, Kernel, Launch};
use super::memory::DeviceMemory;
use super::warpgroup;

/// Groups compared when a card is opened.
const GROUPS: u32 = 4096;
/// Groups of a block.
const BLOCK_GROUPS: u32 = 8;

/// Groups of warpgroups that are compared, 30 to 120 times as much work as those of warps.
const WARPGROUP_SHARE: u32 = 32;
/// Shared memory of a block of these: 128 columns of 128 codes, and alignment.
const WARPGROUP_BYTES: u32 = 128 * 128 * 2 + 1024;

/// Of the sums of `groups` groups of each length, how many are not the exact integer; worst cases are among
/// them.
pub(super) fn wrong_sums(driver: &Arc<dyn Driver>, kernels: &mut Kernels, groups: u32) -> Result<u32> {
    let wrong = DeviceMemory::zeros(driver, "exact sums", 4)?;
    for depth in [32, 64, 128] {
        let kernel = Kernel::new("exact.cu", "inexact_sums");
        let (grid, args) = ([groups.div_ceil(BLOCK_GROUPS), 1, 1], Args::new().ptr(wrong.ptr()).u32(depth));
        let launch = Launch { kernel, grid, block: 32 * BLOCK_GROUPS, shared: 0, args };
        driver.launch(&[kernels.prepare(launch)?], false)?;
    }
    for depth in [64, 128].into_iter().filter(|_| driver.facts().capability == warpgroup::CAPABILITY) {
        let kernel = Kernel::new("exact.cu", "inexact_warpgroup_sums");
        let (grid, args) = ([groups / WARPGROUP_SHARE, 1, 1], Args::new().ptr(wrong.ptr()).u32(depth));
        let launch = Launch { kernel, grid, block: 128, shared: WARPGROUP_BYTES, args };
        driver.launch(&[kernels.prepare(launch)?], false)?;
    }
    let mut count = [0; 4];
    wrong.download(0, &mut count)?;
    Ok(u32::from_le_bytes(count))
}

/// Are the sums of the card exact?
pub(super) fn holds(driver: &Arc<dyn Driver>, kernels: &mut Kernels) -> Result<bool> {
    Ok(wrong_sums(driver, kernels, GROUPS)? == 0)
}

/// Compares sums of `groups` groups on card `ordinal` with integers; the number that differ.
pub fn inexact_sums(ordinal: usize, groups: u32, kernel_cache: Option<PathBuf>) -> Result<u32> {
    let driver: Arc<dyn Driver> = Card::open(ordinal)?;
    let mut kernels = Kernels::new(driver.clone(), kernel_cache);
    wrong_sums(&driver, &mut kernels, groups)
}
