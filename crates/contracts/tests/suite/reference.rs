//! Contracts on the float64 device: its row purity is that of the forward pass itself.

use crate::support::*;
use contracts::check;
use device::KvForm;

#[test]
fn contracts_hold_on_the_float64_device() {
    assert_held(check, &subject("tiny-b", "reference", KvForm::Int16), &text("tiny-b", 135));
}
