//! The reference device: every stage in float64, nothing rounded.
