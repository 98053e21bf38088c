//! The public face of a model folder.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use quant::Matrix;
use serde_json::Value;

use crate::{
    Error, Expected, Format, Kind, Projection, Report, Source, Verified, fingerprint,
    folder::Folder,
    locate::{self, Locator},
    names,
    norms::Norms,
    read, report, verify,
};

/// A model folder with its files open. Cloning shares them.
///
/// Opening reads `config.json`, the index and every header; tensors are read when asked for.
#[derive(Clone)]
pub struct Checkpoint {
    inner: Arc<Inner>,
}

struct Inner {
    dir: PathBuf,
    folder: Folder,
    norms: Norms,
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checkpoint({}, {})", self.dir().display(), self.format())
    }
}

impl Checkpoint {
    /// Opens a folder: finds the format, reads the index and checks every header (`docs/formats.md` 1, 7 and
    /// 8).
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let folder = Folder::open(dir)?;
        let norms = Norms::of(&folder)?;
        Ok(Self { inner: Arc::new(Inner { dir: dir.to_owned(), folder, norms }) })
    }

    fn folder(&self) -> &Folder {
        &self.inner.folder
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.inner.dir
    }

    /// The parsed `config.json`.
    pub fn config(&self) -> &Value {
        self.folder().config.value()
    }

    /// The format `config.json` describes. An MTP sidecar is in MLX layout whatever this is.
    pub fn format(&self) -> Format {
        self.folder().format()
    }

    /// Is this module there, in any form? The name is a canonical path without `.weight`; a full tensor name
    /// and the `experts` of a layer count too.
    pub fn contains(&self, module: &str) -> bool {
        let folder = self.folder();
        if folder.tensors.contains_key(module) || locate::is_present(folder, module) {
            return true;
        }
        let Some(mlp) = module.strip_suffix(".experts") else { return false };
        let inside = [format!("{mlp}.experts."), format!("{mlp}.switch_mlp.")];
        folder.tensors.keys().any(|name| inside.iter().any(|prefix| name.starts_with(prefix)))
    }

    /// Are MTP tensors there?
    pub fn has_mtp(&self) -> bool {
        self.has_prefix(names::MTP)
    }

    /// Are tensors of a vision tower there?
    pub fn has_vision(&self) -> bool {
        self.has_prefix(names::VISUAL)
    }

    fn has_prefix(&self, prefix: &str) -> bool {
        self.folder().tensors.keys().any(|name| name.starts_with(prefix))
    }

    /// Checks presence, shapes and widths of everything expected from headers alone. All problems of the
    /// first kind come in one error.
    pub fn verify(&self, expected: &[Expected]) -> Result<Verified, Error> {
        verify::verify(self.folder(), expected)
    }

    /// Reads every scale, bias, zero point and float of what is expected and refuses those that are not
    /// finite. `progress` gets bytes done and bytes in all.
    pub fn check_values(
        &self,
        expected: &[Expected],
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Error> {
        verify::check_values(self.folder(), expected, progress)
    }

    /// A linear layer's weight `[rows, cols]`; the name is a canonical path without `.weight`. The bytes are
    /// those of the file, except for AutoRound, which is transposed. A patch embedding is flattened to
    /// `[out, channels * time * height * width]`.
    pub fn matrix(&self, module: &str, rows: usize, cols: usize) -> Result<Matrix, Error> {
        let found = Locator::new(self.folder()).module(module, rows, cols)?;
        let found = found.ok_or_else(|| lacks(module, Kind::Matrix { rows, cols }))?;
        Ok(read::matrix(self.folder(), &found)?)
    }

    /// One projection of every routed expert, `[rows, cols]` each, in expert order. `prefix` is the path of
    /// the layer's `mlp`; all three expert layouts are read.
    pub fn experts(
        &self,
        prefix: &str,
        projection: Projection,
        experts: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<Matrix>, Error> {
        let found = Locator::new(self.folder())
            .experts(prefix, projection, experts, (rows, cols), prefix)
            .map_err(|problems| Error::first_kind(problems).expect("a failure has a problem"))?;
        let found = found.ok_or_else(|| lacks(prefix, Kind::Experts { projection, experts, rows, cols }))?;
        Ok(read::matrices(self.folder(), &found)?)
    }

    /// Floats of `shape` in Hugging Face axis order, widened exactly. The name is the full canonical tensor
    /// name.
    pub fn vector(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
        let found = Locator::new(self.folder()).floats(name, shape)?;
        let found = found.ok_or_else(|| lacks(name, Kind::Vector { shape: shape.to_vec() }))?;
        Ok(read::floats(self.folder(), &found)?)
    }

    /// An unquantized tensor of any shape: its canonical shape and its values, as [`Self::vector`] gives
    /// them.
    pub fn tensor_f32(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>), Error> {
        let Some(tensor) = self.folder().tensors.get(name) else {
            return Err(lacks(name, Kind::Vector { shape: Vec::new() }));
        };
        let shape = match tensor.shape[..] {
            [o, t, h, w, c] if tensor.is_channels_last() => vec![o, c, t, h, w],
            [channels, taps, 1] if name.ends_with("conv1d.weight") => vec![channels, 1, taps],
            _ => tensor.shape.clone(),
        };
        let values = self.vector(name, &shape)?;
        Ok((shape, values))
    }

    /// An RMSNorm weight of the offset kind as the multiplier: `1 + w`, or the stored sum, exact in f64
    /// (`docs/formats.md` section 2, rule 1).
    pub fn norm(&self, name: &str, len: usize) -> Result<Vec<f64>, Error> {
        let found = Locator::new(self.folder()).floats(name, &[len])?;
        let found = found.ok_or_else(|| lacks(name, Kind::Norm { len }))?;
        Ok(self.inner.norms.gamma(name, read::floats(self.folder(), &found)?))
    }

    /// A SHA-256 that names the model: over `config.json` as parsed, and of each weight file its name, length
    /// and header and the first [`crate::SAMPLE_BYTES`] of every [`crate::SAMPLE_EVERY`]. Reading all of a
    /// large model would take as long as loading it.
    pub fn fingerprint(&self) -> Result<[u8; 32], Error> {
        fingerprint::fingerprint(self.folder())
    }

    /// What the folder holds.
    pub fn report(&self) -> Report {
        report::report(self.folder())
    }
}

/// Something that was asked for by name is absent.
pub(crate) fn lacks(name: &str, kind: Kind) -> Error {
    verify::missing(&Expected::new(name, kind, "the model")).into()
}

impl Source for Checkpoint {
    fn config(&self) -> &Value {
        self.config()
    }

    fn contains(&self, module: &str) -> bool {
        self.contains(module)
    }

    fn matrix(&self, module: &str, rows: usize, cols: usize) -> Result<Matrix, Error> {
        self.matrix(module, rows, cols)
    }

    fn experts(
        &self,
        prefix: &str,
        projection: Projection,
        experts: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<Matrix>, Error> {
        self.experts(prefix, projection, experts, rows, cols)
    }

    fn vector(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
        self.vector(name, shape)
    }

    fn norm(&self, name: &str, len: usize) -> Result<Vec<f64>, Error> {
        self.norm(name, len)
    }

    fn has_mtp(&self) -> bool {
        self.has_mtp()
    }
}
