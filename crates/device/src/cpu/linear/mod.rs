//! Linear layers: grouped integer matrices and dense ones (`docs/arithmetic.md`, building blocks).
//!
//! [`PackedMatrix`] holds the weights in the order the kernels stream them ([`layout`]), [`Activations`] the
//! quantized inputs ([`activations`]); [`linear`] splits the outputs of all matrices of a call over the pool, once.
//! The bits of an output depend on its weights and its row of inputs alone.

mod activations;
mod dense;
mod kernel;
mod layout;
#[cfg(test)]
pub(super) mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

use quant::{Dtype, Encoding, Matrix, Scheme};

pub(crate) use activations::Activations;
pub(super) use activations::{Block, Form, FormWriter, block_rows, blocks};
pub(super) use kernel::{PanelOut, new_panel_out};
pub(super) use layout::PANEL;

use super::{
    isa::Isa,
    pool::{Disjoint, Pool},
};

/// Outputs of a dense matrix computed by one task.
const DENSE_OUTPUTS: usize = 16;
/// Rows computed by one task where a call has many: enough to pay for reading the weights again.
const TASK_ROWS: usize = 96;

enum Packed {
    Grouped(layout::Grouped),
    /// Used as stored: the bytes are shared with the source.
    Dense(Matrix, Dtype),
}

/// A weight matrix `[rows, cols]` in the CPU device's form: packed panels if grouped, as stored if dense.
pub(crate) struct PackedMatrix(Packed);

impl PackedMatrix {
    /// Takes `matrix`. Grouped bytes are copied into the packed form and discarded; dense bytes are shared.
    pub(crate) fn new(pool: &Pool, isa: Isa, matrix: &Matrix) -> Self {
        Self::pack(pool, isa, &[matrix]).pop().expect("one for one")
    }

    /// Takes several matrices; the grouped ones share one allocation.
    pub(crate) fn pack(pool: &Pool, isa: Isa, matrices: &[&Matrix]) -> Vec<Self> {
        let grouped: Vec<(&Matrix, Scheme)> = matrices
            .iter()
            .filter_map(|matrix| match matrix.encoding() {
                Encoding::Grouped(scheme) => Some((*matrix, scheme)),
                Encoding::Dense(_) => None,
            })
            .collect();
        let mut packed = layout::pack(pool, isa, &grouped).into_iter();
        let take = |matrix: &&Matrix| match matrix.encoding() {
            Encoding::Dense(dtype) => Self(Packed::Dense((*matrix).clone(), dtype)),
            Encoding::Grouped(_) => Self(Packed::Grouped(packed.next().expect("one for each grouped one"))),
        };
        matrices.iter().map(take).collect()
    }

    /// Output features.
    pub(crate) fn rows(&self) -> usize {
        match &self.0 {
            Packed::Grouped(grouped) => grouped.rows(),
            Packed::Dense(matrix, _) => matrix.rows(),
        }
    }

    /// Input features.
    pub(crate) fn cols(&self) -> usize {
        match &self.0 {
            Packed::Grouped(grouped) => grouped.cols(),
            Packed::Dense(matrix, _) => matrix.cols(),
        }
    }

    /// Bytes held, padding included; those of a dense matrix are shared with its source.
    pub(crate) fn bytes(&self) -> usize {
        match &self.0 {
            Packed::Grouped(grouped) => grouped.bytes(),
            Packed::Dense(matrix, _) => matrix.bytes(),
        }
    }

    /// Row `row` in f32 by the embedding rule: `fma(s, code, b)`, `s * (code - center)`, or the float widened.
    pub(crate) fn embed_row(&self, row: usize, out: &mut [f32]) {
        match &self.0 {
            Packed::Grouped(grouped) => grouped.embed_row(row, out),
            Packed::Dense(matrix, _) => quant::dequantize_row_f32(matrix, row, out),
        }
    }

    /// Group length of a grouped matrix.
    pub(super) fn group(&self) -> Option<usize> {
        match &self.0 {
            Packed::Grouped(grouped) => Some(grouped.scheme().group),
            Packed::Dense(..) => None,
        }
    }

    /// Outputs that one unit of work covers, and how many such units the matrix has.
    pub(super) fn parts(&self) -> (usize, usize) {
        match &self.0 {
            Packed::Grouped(grouped) => (PANEL, grouped.panels()),
            Packed::Dense(matrix, _) => (DENSE_OUTPUTS, matrix.rows().div_ceil(DENSE_OUTPUTS)),
        }
    }
}

/// What several tasks read: the inputs of a call in every form it needs.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    /// `[rows, cols]`.
    pub(super) x: &'a [f32],
    /// Rows.
    pub(super) rows: usize,
    /// Quantized forms.
    pub(super) activations: &'a Activations,
}

impl PackedMatrix {
    /// Computes part `part` of [`Self::parts`] for the row blocks `range` into `out` `[rows, self.rows()]`.
    ///
    /// # Safety
    /// No other task may compute the same part for the same blocks at the same time.
    pub(super) unsafe fn multiply(
        &self,
        isa: Isa,
        part: usize,
        inputs: Inputs<'_>,
        range: Range<usize>,
        out: &Disjoint<'_, f32>,
    ) {
        let width = self.rows();
        let (size, _) = self.parts();
        let outputs = part * size..width.min((part + 1) * size);
        match &self.0 {
            Packed::Dense(matrix, dtype) => {
                let rows =
                    block_rows(inputs.rows, range.start).start..block_rows(inputs.rows, range.end - 1).end;
                // SAFETY: the caller's promise.
                unsafe { dense::multiply(isa, matrix, *dtype, outputs, inputs.x, rows, out) };
            }
            Packed::Grouped(grouped) => {
                let group = grouped.scheme().group;
                let form = inputs.activations.form(group).expect("every group length was quantized");
                let mut results = new_panel_out();
                for block in range {
                    let rows = block_rows(inputs.rows, block);
                    grouped.multiply(isa, part, form.block(rows.clone()), &mut results);
                    for (row, results) in rows.zip(&results) {
                        let at = row * width;
                        // SAFETY: the caller's promise.
                        let out = unsafe { out.range(at + outputs.start..at + outputs.end) };
                        out.copy_from_slice(&results[..outputs.len()]);
                    }
                }
            }
        }
    }
}

/// `out = x W^T` for several matrices over the same input `x` `[rows, cols]`; each `out` is `[rows, matrix.rows()]`.
///
/// # Panics
/// If a length does not fit.
pub(crate) fn linear(
    pool: &Pool,
    isa: Isa,
    x: &[f32],
    rows: usize,
    to: &mut [(&PackedMatrix, &mut [f32])],
    scratch: &mut Activations,
) {
    if rows == 0 || to.is_empty() {
        return;
    }
    let mut groups: Vec<usize> = Vec::new();
    for (matrix, out) in to.iter() {
        assert_eq!(x.len(), rows * matrix.cols(), "input of {rows} rows");
        assert_eq!(out.len(), rows * matrix.rows(), "output of {rows} rows");
        groups.extend(matrix.group().filter(|group| !groups.contains(group)));
    }
    scratch.quantize(pool, isa, x, rows, &groups);
    let inputs = Inputs { x, rows, activations: scratch };
    let blocks = blocks(rows);
    let chunks = rows.div_ceil(TASK_ROWS);
    let chunk = |at: usize| at * blocks / chunks..(at + 1) * blocks / chunks;
    // Tasks in the order of the weights: (matrix, part), with all chunks of rows of a part next to each other.
    let mut ends = Vec::with_capacity(to.len());
    let mut end = 0;
    let mut targets = Vec::with_capacity(to.len());
    for (matrix, out) in to.iter_mut() {
        end += matrix.parts().1 * chunks;
        ends.push(end);
        targets.push((*matrix, Disjoint::new(out)));
    }
    pool.run(end, &|task| {
        let at = ends.partition_point(|&end| end <= task);
        let (matrix, out) = &targets[at];
        let task = task - if at > 0 { ends[at - 1] } else { 0 };
        // SAFETY: each task has its own part of one output and its own rows.
        unsafe { matrix.multiply(isa, task / chunks, inputs, chunk(task % chunks), out) };
    });
}
