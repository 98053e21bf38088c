//! Contracts on the float64 device: its row purity is that of the forward pass itself.

mod support;

use device::KvForm;
use support::*;

#[test]
fn contracts_hold_on_the_float64_device() {
    assert_held(&subject("tiny-b", "reference", KvForm::Int16), &text("tiny-b", 135));
}
