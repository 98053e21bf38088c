//! The Gated DeltaNet mixer (`docs/model.md` section 4).

use device::Device;

use super::network::{Network, Result};
use super::weights::DeltaNet;

impl Network {
    /// From `scratch.normed` to `scratch.update`, advancing the layer's states by the step's windows.
    pub(super) fn delta_net(&self, device: &mut dyn Device, mixer: &DeltaNet, rows: usize) -> Result {
        let (s, d) = (&self.scratch, &self.scratch.delta);
        let pool = self.pools.states[mixer.ordinal];
        let projections = [(mixer.qkv, d.qkv), (mixer.z, d.z), (mixer.a, d.a), (mixer.b, d.b)];
        device.linear(s.normed, rows, &projections)?;
        device.conv(d.qkv, mixer.taps, pool, d.mixed)?;
        device.delta_rule(d.mixed, d.a, d.b, mixer.decay, mixer.dt_bias, pool, d.out)?;
        device.gated_norm(d.out, d.z, rows, mixer.norm, self.config.eps)?;
        device.linear(d.out, rows, &[(mixer.out, s.update)])
    }
}
