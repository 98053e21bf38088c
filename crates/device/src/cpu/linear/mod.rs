//! Linear layers: grouped integer matrices and dense ones (`docs/arithmetic.md`, building blocks).
//!
//! [`PackedMatrix`] holds the weights in the order the kernels stream them ([`layout`]), [`Activations`] the
//! quantized inputs ([`activations`]); [`linear`] splits the outputs of all matrices of a call over the pool,
//! once. The bits of an output depend on its weights and its row of inputs alone.

mod activations;
mod dense;
mod kernel;
mod layout;
#[cfg(test)]
pub(super) mod tests;
mod tile;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

use quant::{Dtype, Encoding, Matrix, Scheme};

pub(crate) use activations::Activations;
pub(super) use activations::{BLOCK_MAX, FormWriter, block_rows, blocks};
pub(super) use layout::PANEL;
pub(super) use tile::Floats;

use super::{
    isa::Isa,
    pool::{Disjoint, Pool},
};

/// Outputs of a dense matrix in one part.
const DENSE_OUTPUTS: usize = 16;
/// Rows computed by one task where a call has many: enough to pay for reading the weights again.
const TASK_ROWS: usize = 96;
/// The same for a dense matrix, whose weights are also widened again, where that leaves enough tasks.
const DENSE_TASK_ROWS: usize = 384;
/// Rows from which dense matrices are worked on in tiles: inputs are packed, and tasks take several parts.
const DENSE_ROWS: usize = 12;
/// Most weights, and most parts, of such a task: widened to f32 they fill about half of a core's own cache.
const DENSE_WEIGHTS: usize = 160 << 10;
const DENSE_PARTS: usize = 8;
/// Tasks a thread should have, so that all end at about the same time.
const THREAD_TASKS: usize = 8;

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

    /// Row `row` in f32 by the embedding rule: `fma(s, code, b)`, `s * (code - center)`, or the float
    /// widened.
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

/// Rows of a call that tasks read, in every form it needs.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    /// `[.., cols]`; only dense matrices look at it.
    pub(super) x: &'a [f32],
    /// Quantized forms of the same rows.
    pub(super) activations: &'a Activations,
    /// The same floats packed, if `first` is 0 and they are.
    pub(super) floats: Option<&'a Floats>,
    /// The first row worked on. Blocks count from here.
    pub(super) first: usize,
    /// Rows worked on.
    pub(super) rows: usize,
}

/// Where tasks write rows of results.
pub(super) struct Outputs<'a> {
    /// `[.., width]`.
    out: Disjoint<'a, f32>,
    width: usize,
    /// Place of each row, if it is not the row itself.
    places: Option<&'a [u32]>,
}

impl<'a> Outputs<'a> {
    pub(super) fn new(out: &'a mut [f32], width: usize, places: Option<&'a [u32]>) -> Self {
        Self { out: Disjoint::new(out), width, places }
    }

    /// The columns `columns` of row `row`.
    ///
    /// # Safety
    /// No other task may use them at the same time.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // as `Disjoint::range`
    pub(super) unsafe fn row(&self, row: usize, columns: Range<usize>) -> &mut [f32] {
        assert!(columns.end <= self.width, "columns {columns:?} of {}", self.width);
        let at = match self.places {
            Some(places) => places[row] as usize,
            None => row,
        } * self.width;
        // SAFETY: the caller's promise.
        unsafe { self.out.range(at + columns.start..at + columns.end) }
    }
}

impl PackedMatrix {
    /// How [`linear`] cuts a call of `rows` rows: parts of a task, and tasks for its rows.
    fn cut(&self, rows: usize, threads: usize) -> (usize, usize) {
        let Packed::Dense(matrix, _) = &self.0 else { return (1, row_tasks(rows)) };
        if rows < DENSE_ROWS {
            return (1, row_tasks(rows));
        }
        let parts = (DENSE_WEIGHTS / (matrix.cols() * DENSE_OUTPUTS).max(1)).clamp(1, DENSE_PARTS);
        let wanted = (threads * THREAD_TASKS).div_ceil(self.parts().1.div_ceil(parts).max(1));
        (parts, wanted.min(row_tasks(rows)).max(rows.div_ceil(DENSE_TASK_ROWS)))
    }

    /// Computes the parts `parts` of [`Self::parts`] for the row blocks `range` of `inputs`; the results of
    /// its first row go to row `to` of `out`.
    ///
    /// # Safety
    /// No other task may compute the same part for the same blocks at the same time.
    pub(super) unsafe fn multiply(
        &self,
        isa: Isa,
        parts: Range<usize>,
        inputs: Inputs<'_>,
        range: Range<usize>,
        out: &Outputs<'_>,
        to: usize,
    ) {
        let (size, _) = self.parts();
        let outputs = |parts: Range<usize>| parts.start * size..self.rows().min(parts.end * size);
        let block_rows = |block: usize| block_rows(inputs.rows, BLOCK_MAX, block);
        match &self.0 {
            Packed::Dense(matrix, dtype) => {
                let x = &inputs.x[inputs.first * matrix.cols()..];
                // SAFETY: the caller's promise.
                unsafe {
                    dense::multiply(
                        isa,
                        matrix,
                        *dtype,
                        outputs(parts),
                        x,
                        inputs.floats,
                        inputs.rows,
                        range,
                        out,
                        to,
                    )
                };
            }
            Packed::Grouped(grouped) => {
                let group = grouped.scheme().group;
                let form = inputs.activations.form(group).expect("every group length was quantized");
                let mut results = kernel::new_panel_out();
                for part in parts {
                    let outputs = outputs(part..part + 1);
                    for rows in range.clone().map(block_rows) {
                        let block = form.block(inputs.first + rows.start..inputs.first + rows.end);
                        grouped.multiply(isa, part, block, &mut results);
                        for (row, results) in rows.zip(&results) {
                            // SAFETY: the caller's promise.
                            let out = unsafe { out.row(to + row, outputs.clone()) };
                            out.copy_from_slice(&results[..outputs.len()]);
                        }
                    }
                }
            }
        }
    }
}

/// Row blocks of task `at` of `tasks`.
pub(super) fn task_blocks(rows: usize, at: usize, tasks: usize) -> Range<usize> {
    let blocks = blocks(rows, BLOCK_MAX);
    at * blocks / tasks..(at + 1) * blocks / tasks
}

/// Tasks that `rows` rows are split into, each for all outputs of a part.
pub(super) fn row_tasks(rows: usize) -> usize {
    rows.div_ceil(TASK_ROWS)
}

/// `out = x W^T` for several matrices over the same input `x` `[rows, cols]`; each `out` is `[rows,
/// matrix.rows()]`.
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
    for (matrix, out) in to.iter() {
        assert_eq!(x.len(), rows * matrix.cols(), "input of {rows} rows");
        assert_eq!(out.len(), rows * matrix.rows(), "output of {rows} rows");
    }
    let groups = group_lengths(to.iter().map(|(matrix, _)| *matrix));
    scratch.quantize(pool, isa, x, rows, BLOCK_MAX, &groups);
    let packed = rows >= DENSE_ROWS && to.iter().any(|(matrix, _)| matrix.group().is_none());
    if packed {
        scratch.pack(pool, x, rows);
    }
    let scratch = &*scratch;
    let inputs = Inputs { x, activations: scratch, floats: packed.then(|| scratch.floats()), first: 0, rows };
    // Tasks in the order of the weights: (matrix, parts), with all rows of a part next to each other.
    let mut ends = Vec::with_capacity(to.len());
    let mut end = 0;
    let mut targets = Vec::with_capacity(to.len());
    for (matrix, out) in to.iter_mut() {
        let (parts, chunks) = matrix.cut(rows, pool.threads());
        end += matrix.parts().1.div_ceil(parts) * chunks;
        ends.push(end);
        targets.push((*matrix, parts, chunks, Outputs::new(out, matrix.rows(), None)));
    }
    pool.run(end, &|task| {
        let at = ends.partition_point(|&end| end <= task);
        let (matrix, parts, chunks, out) = &targets[at];
        let task = task - if at > 0 { ends[at - 1] } else { 0 };
        let blocks = task_blocks(rows, task % chunks, *chunks);
        let first = task / chunks * parts;
        let parts = first..matrix.parts().1.min(first + parts);
        // SAFETY: each task has its own parts of one output and its own rows.
        unsafe { matrix.multiply(isa, parts, inputs, blocks, out, 0) };
    });
}

/// The different group lengths of some matrices.
pub(super) fn group_lengths<'a>(matrices: impl Iterator<Item = &'a PackedMatrix>) -> Vec<usize> {
    let mut lengths = Vec::new();
    for length in matrices.filter_map(PackedMatrix::group) {
        if !lengths.contains(&length) {
            lengths.push(length);
        }
    }
    lengths
}
