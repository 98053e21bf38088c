//! The mixture of experts (`docs/model.md` section 7).

use device::Device;

use super::network::{Network, Result};
use super::weights::Moe;

impl Network {
    /// From `scratch.normed` to `scratch.update`.
    pub(super) fn moe(&self, device: &mut dyn Device, moe: &Moe, rows: usize) -> Result {
        let (s, m, picks) = (&self.scratch, &self.scratch.moe, self.picks);
        let projections = [
            (moe.router, m.router),
            (moe.shared_gate, m.gate),
            (moe.shared_up, m.up),
            (moe.gate, m.shared_gate),
        ];
        device.linear(s.normed, rows, &projections)?;
        device.route(m.router, rows, picks)?;
        device.routed_experts(s.normed, rows, picks, moe.experts, m.routed)?;
        device.swiglu(m.gate, m.up, rows, m.inner)?;
        device.linear(m.inner, rows, &[(moe.shared_down, m.shared)])?;
        device.combine(m.routed, picks, m.shared, m.shared_gate, rows, s.update)
    }
}
