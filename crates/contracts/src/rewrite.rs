//! The same weights stored in another form: where the arithmetic promises equal bits, whole models show it.
//!
//! A group's product is made of centered codes, a scale and a combined bias (`docs/arithmetic.md`, grouped
//! matrix). *Wider* codes are shifted by the difference of the centers, so the centered ones stay; a stored
//! bias goes down by that many scales, so the combined one stays, provided the new bias is exact. A
//! *symmetric* matrix is an affine one with bias `-2^(bits-1) * scale`: its combined bias is 0, and an fma
//! with 0 changes nothing.

use std::cell::Cell;

use checkpoint::{Error, Projection, Source};
use quant::{BITS_SUPPORTED, Dtype, Encoding, Matrix, Scheme, Zero, pack_codes, read_float, unpack_codes};
use serde_json::Value;

/// Another form of grouped matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The next wider codes; 8-bit ones stay.
    Wider,
    /// Affine where it was symmetric.
    Affine,
}

/// A matrix in another form, or `None` where that does not apply or would not be exact. Scales become f32.
pub fn rewrite(matrix: &Matrix, form: Form) -> Option<Matrix> {
    let Encoding::Grouped(scheme) = matrix.encoding() else { return None };
    let to = Scheme { scales: Dtype::F32, ..scheme };
    let to = match form {
        Form::Wider => Scheme { bits: *BITS_SUPPORTED.iter().find(|bits| **bits > scheme.bits)?, ..to },
        Form::Affine if scheme.zero == Zero::Symmetric => Scheme { zero: Zero::Affine, ..to },
        Form::Affine => return None,
    };
    let shift = to.center() - scheme.center();
    let mut stream = Vec::new();
    let mut codes = vec![0u8; matrix.cols()];
    for row in 0..matrix.rows() {
        unpack_codes(scheme.bits, matrix.row_codes(row), &mut codes);
        codes.iter_mut().for_each(|code| *code += shift as u8);
        pack_codes(to.bits, &codes, &mut stream);
    }
    let groups = matrix.rows() * (matrix.cols() / scheme.group);
    let scale = |at: usize| read_float(scheme.scales, matrix.scales(), at);
    // An affine bias moves with its codes; a symmetric matrix made affine gets the bias that centers it.
    let bias = |at: usize| {
        let (old, steps) = match scheme.zero {
            Zero::Affine => (read_float(scheme.scales, matrix.biases(), at), shift),
            Zero::Symmetric => (0.0, to.center()),
        };
        let exact = f64::from(old) - f64::from(steps) * f64::from(scale(at));
        (f64::from(exact as f32) == exact).then_some(exact as f32)
    };
    let scales: Vec<u8> = (0..groups).flat_map(|at| scale(at).to_le_bytes()).collect();
    let biases = match to.zero {
        Zero::Symmetric => Vec::new(),
        Zero::Affine => {
            let biases: Option<Vec<f32>> = (0..groups).map(bias).collect();
            biases?.into_iter().flat_map(f32::to_le_bytes).collect()
        }
    };
    let encoding = Encoding::Grouped(to);
    Matrix::new(matrix.rows(), matrix.cols(), encoding, stream.into(), scales.into(), biases.into()).ok()
}

/// A source whose grouped matrices are rewritten. All experts of one projection are, or none.
pub struct Rewritten<'a> {
    source: &'a dyn Source,
    form: Form,
    /// Matrices that were given in the other form.
    changed: Cell<usize>,
}

impl<'a> Rewritten<'a> {
    /// Over another source.
    pub fn new(source: &'a dyn Source, form: Form) -> Self {
        Self { source, form, changed: Cell::new(0) }
    }

    /// Matrices given in the other form so far.
    pub fn changed(&self) -> usize {
        self.changed.get()
    }

    fn all(&self, matrices: Vec<Matrix>) -> Vec<Matrix> {
        let rewritten: Option<Vec<Matrix>> =
            matrices.iter().map(|matrix| rewrite(matrix, self.form)).collect();
        match rewritten {
            Some(rewritten) => {
                self.changed.set(self.changed.get() + rewritten.len());
                rewritten
            }
            None => matrices,
        }
    }
}

impl Source for Rewritten<'_> {
    fn config(&self) -> &Value {
        self.source.config()
    }

    fn contains(&self, module: &str) -> bool {
        self.source.contains(module)
    }

    fn matrix(&self, module: &str, rows: usize, cols: usize) -> Result<Matrix, Error> {
        let matrix = self.source.matrix(module, rows, cols)?;
        Ok(self.all(vec![matrix]).swap_remove(0))
    }

    fn experts(
        &self,
        prefix: &str,
        projection: Projection,
        experts: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<Matrix>, Error> {
        Ok(self.all(self.source.experts(prefix, projection, experts, rows, cols)?))
    }

    fn vector(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
        self.source.vector(name, shape)
    }

    fn norm(&self, name: &str, len: usize) -> Result<Vec<f64>, Error> {
        self.source.norm(name, len)
    }

    fn has_mtp(&self) -> bool {
        self.source.has_mtp()
    }
}
