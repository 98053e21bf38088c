//! How a matrix is stored: dense floats, or grouped integer codes with a scale per group.

use crate::Dtype;

/// Code widths with kernels, in bits.
pub const BITS_SUPPORTED: [u8; 6] = [2, 3, 4, 5, 6, 8];
/// Group lengths with kernels, in input columns.
pub const GROUPS_SUPPORTED: [usize; 3] = [32, 64, 128];

/// Where the zero of a group is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Zero {
    /// `value = scale * code + bias`, a float bias per group in the scales' dtype (MLX).
    Affine,
    /// `value = scale * (code - 2^(bits-1))` (AutoRound and compressed-tensors, symmetric).
    Symmetric,
}

/// A grouped integer scheme: unsigned codes of `bits` bits, one scale (and bias) per `group` columns of a
/// row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scheme {
    /// Bits of a code: one of [`BITS_SUPPORTED`].
    pub bits: u8,
    /// Columns that share a scale: one of [`GROUPS_SUPPORTED`].
    pub group: usize,
    /// Where the zero is.
    pub zero: Zero,
    /// Dtype of scales and biases, as stored.
    pub scales: Dtype,
}

impl Scheme {
    /// Half of the code range, `2^(bits-1)`: centered codes are `code - center`.
    pub const fn center(self) -> i32 {
        1 << (self.bits - 1)
    }
}

/// How the values of a matrix are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// One float per value.
    Dense(Dtype),
    /// Grouped integer codes.
    Grouped(Scheme),
}

impl std::fmt::Display for Encoding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Dense(dtype) => f.write_str(dtype.name()),
            Self::Grouped(s) => {
                let zero = match s.zero {
                    Zero::Affine => "affine",
                    Zero::Symmetric => "symmetric",
                };
                write!(f, "{}-bit g{} {zero} ({} scales)", s.bits, s.group, s.scales.name())
            }
        }
    }
}
