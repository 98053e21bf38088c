//! A folder on disk becomes named canonical tensors, without changing a code or a scale (`docs/formats.md`).
//!
//! This crate knows file formats and tensor names; shapes are told to it by the model as a list of
//! [`Expected`] things. Enter at [`Checkpoint::open`]; the model reads through [`Source`], behind which
//! weights may also be synthetic.

mod checkpoint;
mod config;
mod container;
mod error;
mod expected;
mod fingerprint;
mod folder;
mod formats;
mod index;
mod json;
mod locate;
mod names;
mod norms;
mod read;
mod report;
mod synth;
mod verify;
mod warning;

pub use checkpoint::Checkpoint;
pub use config::{Config, parse_config};
pub use container::{Entry, StoredDtype, parse_header};
pub use error::{Error, HeaderProblem, PROBLEMS_SHOWN, Problem, UnsupportedKind};
pub use expected::{Expected, Format, Kind, Projection, Source};
pub use fingerprint::{SAMPLE_BYTES, SAMPLE_EVERY};
pub use index::{Index, parse_index};
pub use report::{DtypeReport, FileReport, MtpReport, Report, SchemeReport};
pub use synth::{Recipe, Synth, write};
pub use verify::Verified;
pub use warning::Warning;
