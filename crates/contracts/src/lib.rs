//! The promises of `docs/api.md` section 1, each as a function over a model, end to end through public
//! interfaces.
//!
//! A [`Subject`] opens a model; [`check`] and [`check_replies`] run every contract over it and give a
//! [`Report`]. The same functions run in the tests of this crate (over the fixtures and the demo model, on
//! every device) and for users on their own machine and checkpoint. Contracts never panic: a difference is a
//! row of the report.
//!
//! Beside them: [`score`] measures how far one model's logits are from another's, [`rewrite`] stores the same
//! weights in another form, [`evaluation`] runs question sets with keys, [`crowd`] asks many prompts at once,
//! [`soak`] keeps an engine busy for long.

mod album;
pub mod contracts;
pub mod crowd;
pub mod evaluation;
mod exact;
mod lane;
mod report;
pub mod rewrite;
pub mod score;
pub mod soak;
mod subject;

pub use album::{ALBUM_TOKENS, Album, IMAGE_ID};
pub use exact::{Exact, exact};
pub use lane::{Lane, Random, RowBits, Runner, deal, random_text, row_bits, rows_at};
pub use report::{Contract, Outcome, Report, Tally};
pub use subject::{Error, Folder, Sizes, Subject, check, check_replies};
