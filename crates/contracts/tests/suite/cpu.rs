//! Every contract on the CPU device: tiny models, all formats, the demo model, both K/V forms.

use contracts::{check, check_replies};
use device::KvForm;

use crate::support::*;

/// Long enough for every block border, the end of the 512-key span and chunks of 257.
const LONG: usize = 600;
/// Crosses two block borders.
const SHORT: usize = 140;

#[test]
fn contracts_hold_on_tiny_models() {
    for name in ["tiny-a", "tiny-b"] {
        for kv in FORMS {
            assert_held(check, &subject(name, "cpu", kv), &text(name, LONG));
        }
    }
}

#[test]
fn contracts_hold_on_the_demo_model() {
    assert_held(check, &subject("demo", "cpu", KvForm::Int16), &text("demo", LONG));
    assert_held(check, &subject("demo", "cpu", KvForm::Int8), &text("demo", SHORT));
}

#[test]
fn contracts_hold_in_every_format() {
    for format in FORMATS {
        for kv in FORMS {
            assert_held(check, &subject(format, "cpu", kv), &text(format, SHORT));
        }
    }
}

#[test]
fn contracts_hold_in_replies() {
    for name in ["tiny-a", "tiny-b", "mlx-mixed-3bit", "demo"] {
        assert_held(check_replies, &subject(name, "cpu", KvForm::Int8), &text(name, SHORT));
    }
}
