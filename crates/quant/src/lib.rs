//! What the bytes of a number mean.
//!
//! Float dtypes, grouped integer schemes, the canonical [`Matrix`] every checkpoint format becomes, packing
//! of codes, the reference dequantization and the activation quantizer `Q` (`docs/arithmetic.md`, building
//! blocks). Nothing here knows files, devices or layers.

mod bytes;
mod dequantize;
mod dtype;
mod matrix;
mod pack;
mod quantize;
mod scheme;

pub use bytes::{Bytes, Storage};
pub use dequantize::{dequantize_row_f32, dequantize_row_f64};
pub use dtype::{Dtype, bf16_from_f32, bf16_to_f32, f16_from_f32, f16_to_f32, read_float, read_float_row};
pub use matrix::{Matrix, MatrixError};
pub use pack::{pack_codes, unpack_codes};
pub use quantize::{
    ACTIVATION_BITS, ATTENTION_BITS, ATTENTION_GROUP, MAGNITUDE_MAX, MAGNITUDE_MIN, QuantizedGroup,
    quantize_group,
};
pub use scheme::{BITS_SUPPORTED, Encoding, GROUPS_SUPPORTED, Scheme, Zero};
