//! Contracts over the engine's fake model, whose logits are a hash of all history: any slip in position, page
//! or rollback changes them.

use contracts::{Error, Sizes, Subject, check, check_replies, random_text};
use engine::fake::{FakeConfig, FakeDrafts, FakeModel};
use model::{Model, Spec};

use crate::support::assert_held;

struct Fake(FakeDrafts);

impl Subject for Fake {
    fn name(&self) -> String {
        format!("fake model, {:?} drafts", self.0)
    }

    fn open(&self, sizes: Sizes) -> Result<Box<dyn Model>, Error> {
        let settings = sizes.settings(device::KvForm::Int16);
        let config = FakeConfig::default();
        let spec = Spec {
            context_max: settings.context,
            slots: settings.slots,
            snapshots: settings.snapshots,
            pages: settings.pages,
            rows_max: settings.rows_max,
            logits_rows_max: settings.logits_rows_max,
            ..config.spec.clone()
        };
        Ok(Box::new(FakeModel::new(FakeConfig { spec, drafts: self.0, ..config })))
    }
}

#[test]
fn contracts_hold_on_the_fake_model() {
    let text = random_text(64, 300, 2);
    for drafts in [FakeDrafts::Sometimes(60), FakeDrafts::SecondBest, FakeDrafts::Wrong, FakeDrafts::None] {
        assert_held(check, &Fake(drafts), &text);
        assert_held(check_replies, &Fake(drafts), &text);
    }
}
