//! The gated attention mixer (`docs/model.md` section 5), up to its output projection.

use device::Device;

use super::network::{Network, Result};
use super::weights::Attention;

impl Network {
    /// From `scratch.normed` to the gated heads in `scratch.attention.attended`, appending K/V to the layer's
    /// pages.
    pub(super) fn attend(&self, device: &mut dyn Device, mixer: &Attention, rows: usize) -> Result {
        let (s, a, shape) = (&self.scratch, &self.scratch.attention, self.config.attention);
        device.linear(s.normed, rows, &[(mixer.q, a.qg), (mixer.k, a.k), (mixer.v, a.v)])?;
        self.append(device, mixer)?;
        device.attention(a.q, shape, self.pools.kv[mixer.ordinal], a.attended)?;
        device.out_gate(a.attended, a.qg, rows, shape)
    }

    /// Only the K/V of `scratch.normed`, for rows whose results nobody wants.
    pub(super) fn append_only(&self, device: &mut dyn Device, mixer: &Attention, rows: usize) -> Result {
        let (s, a) = (&self.scratch, &self.scratch.attention);
        device.linear(s.normed, rows, &[(mixer.k, a.k), (mixer.v, a.v)])?;
        // The queries are whatever the buffer holds; nothing reads them.
        self.append(device, mixer)
    }

    /// Norms and rotates q and k and appends K/V.
    fn append(&self, device: &mut dyn Device, mixer: &Attention) -> Result {
        let (a, shape, eps) = (&self.scratch.attention, self.config.attention, self.config.eps);
        device.qk_norm_rope(a.qg, a.k, mixer.q_norm, mixer.k_norm, eps, self.rotary, shape, a.q)?;
        device.kv_append(a.k, a.v, self.pools.kv[mixer.ordinal])
    }
}
