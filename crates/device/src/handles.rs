//! Opaque handles to device memory, and the shapes they are made from. A handle is valid on the device that
//! made it.

/// Row-major activations `[rows_max, width]`, f32 on computing devices, f64 on the reference device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buffer(pub(crate) u32);

/// A weight matrix, in the device's own layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixRef(pub(crate) u32);

/// The routed experts of one layer: gate, up and down matrices of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertsRef(pub(crate) u32);

/// A constant vector (norm weights, taps, decay).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VectorRef(pub(crate) u32);

/// Rotary cosines and sines `[positions, half]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotary(pub(crate) u32);

/// Router picks `[rows_max, k]`: expert ids and weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Picks(pub(crate) u32);

/// Paged K/V codes of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvPool(pub(crate) u32);

/// Recurrent and convolution states of one delta-net layer, one place per slot or snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatePool(pub(crate) u32);

/// Form of K/V codes (`docs/arithmetic.md`, K/V cache). The reference device keeps f64 instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvForm {
    /// Signed 8-bit codes up to 127.
    Int8,
    /// 16-bit codes up to 32639, two signed bytes.
    Int16,
}

impl KvForm {
    /// Bytes of one code.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Int8 => 1,
            Self::Int16 => 2,
        }
    }

    /// The largest code, `L`.
    pub const fn limit(self) -> f32 {
        match self {
            Self::Int8 => 127.0,
            Self::Int16 => 32639.0,
        }
    }
}

/// Heads of a gated attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`. Query head `h` uses `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// A K/V pool: `pages` pages of [`crate::PAGE_TOKENS`] tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvShape {
    /// Pages.
    pub pages: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Form of the codes.
    pub form: KvForm,
}

/// Heads of a Gated DeltaNet layer (`docs/model.md` section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeltaShape {
    /// Key heads `Hk`.
    pub key_heads: usize,
    /// Value heads `Hv`; a multiple of `Hk`. Value head `h` uses key head `h / (Hv / Hk)`.
    pub value_heads: usize,
    /// `Dk`.
    pub key_dim: usize,
    /// `Dv`.
    pub value_dim: usize,
    /// Taps of the causal convolution.
    pub conv_taps: usize,
}

impl DeltaShape {
    /// Convolution channels `C = 2 Hk Dk + Hv Dv`: q, k, v blocks in this order.
    pub const fn channels(self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Values of one recurrent state, `[Hv, Dk, Dv]`.
    pub const fn recurrent(self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }

    /// Values of one convolution state, `[conv_taps - 1, C]`, oldest row first.
    pub const fn conv(self) -> usize {
        (self.conv_taps - 1) * self.channels()
    }
}

/// The state of one place of a [`StatePool`], widened.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaState {
    /// `[Hv, Dk, Dv]`.
    pub recurrent: Vec<f64>,
    /// `[conv_taps - 1, C]`, oldest row first.
    pub conv: Vec<f64>,
}

/// Bytes a device holds, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Weight matrices and vectors.
    pub weights: u64,
    /// K/V pages.
    pub kv: u64,
    /// Recurrent and convolution states.
    pub states: u64,
    /// Activations and everything else.
    pub scratch: u64,
}
