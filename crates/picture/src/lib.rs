//! Picture preparation (`docs/model.md` section 10, `docs/api.md` 3.3): from the bytes of a file to the
//! patch rows a vision tower takes.
//!
//! [`decode`] turns PNG, JPEG, WebP and GIF bytes into what a person sees, as opaque 8-bit RGB;
//! [`Preprocessor`] holds a checkpoint's sizes and makes [`Prepared`] pictures of them. [`Workers`] runs
//! both beside everything else, on few threads and with a bounded queue. Bytes from outside never panic,
//! and no memory is taken for a picture before its header was held against [`Limits`]. This crate knows no
//! tensors.

mod decode;
mod error;
mod flatten;
mod header;
mod prepare;
mod preprocessor;
mod resize;
mod workers;

pub use decode::{Limits, Rgb, decode, size};
pub use error::{Format, PictureError};
pub use header::format;
pub use prepare::{Prepared, prepare};
pub use preprocessor::{ASPECT_MAX, Preprocessor, PreprocessorError, Target};
pub use workers::{Busy, Ticket, Workers};
