//! The stage `route` on CUDA (`kernels/cuda/route.cu`).

use super::driver::Result;
use super::launch::{Args, Kernel};
use super::lower::Lowering;
use crate::{Buffer, DeviceError, Picks};

/// Lanes of a warp: most picks of a row, and most experts of a lane.
const LANES: usize = 32;

/// Experts of a lane, `ROUTE_VALUES` of the kernels, for `k` picks of `experts`.
pub(super) fn values(experts: usize, k: usize) -> Result<usize> {
    if k == 0 || k > LANES.min(experts) || experts > LANES * LANES {
        let message =
            format!("{k} picks of {experts} experts; supported: up to {LANES} of {}", LANES * LANES);
        return Err(DeviceError::Failed { stage: "route", message });
    }
    Ok(experts.div_ceil(LANES).next_power_of_two())
}

/// [`crate::Device::route`].
pub(super) fn lower(c: &mut Lowering<'_>, logits: Buffer, rows: usize, picks: Picks) -> Result {
    let logits = c.plane(logits);
    let (experts, (ids, weights, k)) = (logits.width, c.picks(picks));
    let values = values(experts, k)?;
    let kernel = Kernel::new("route.cu", "route").define("ROUTE_VALUES", values as u32);
    let args = Args::new().ptr(logits.ptr).size(experts).size(k).ptr(ids).ptr(weights);
    c.launch(kernel, [rows, 1, 1], LANES as u32, args);
    Ok(())
}
