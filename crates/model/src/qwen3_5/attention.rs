//! The gated attention mixer (`docs/model.md` section 5), up to its output projection.

use device::Device;

use super::network::{Network, Result};
use super::weights::Attention;

impl Network {
    /// From `scratch.normed` to the gated heads in `scratch.attention.attended`, appending K/V to the layer's
    /// pages.
    pub(super) fn attend(&self, device: &mut dyn Device, mixer: &Attention, rows: usize) -> Result {
        let (s, a) = (&self.scratch, &self.scratch.attention);
        let (shape, eps) = (self.config.attention, self.config.eps);
        let pool = self.pools.kv[mixer.ordinal];
        device.linear(s.normed, rows, &[(mixer.q, a.qg), (mixer.k, a.k), (mixer.v, a.v)])?;
        device.qk_norm_rope(a.qg, a.k, mixer.q_norm, mixer.k_norm, eps, self.rotary, shape, a.q)?;
        device.kv_append(a.k, a.v, pool)?;
        device.attention(a.q, shape, pool, a.attended)?;
        device.out_gate(a.attended, a.qg, rows, shape)
    }
}
