//! The contracts. Each is a function over a model and a text; it uses all slots, pages and snapshots as it
//! likes.

mod chunked;
mod company;
mod devices;
mod drafted;
mod draws;
mod pictures;
mod resumed;
mod served;
mod windows;

pub use chunked::chunked;
pub use company::company;
pub use devices::{Signature, pictured_signature, same_bits, signature};
pub use drafted::drafted;
pub use draws::{scored, seeded};
pub use pictures::pictured;
pub use resumed::{moved, resumed};
pub use served::{served, streams};
pub use windows::{trees, windows};

use model::ModelError;

use crate::{Outcome, Runner};

/// A contract over one model.
pub type Check = fn(&mut Runner<'_>, &[u32]) -> Result<Outcome, ModelError>;

/// Every contract that needs one model only.
pub const ALONE: [Check; 8] = [drafted, company, resumed, scored, seeded, windows, trees, chunked];
