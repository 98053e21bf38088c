//! Routed experts: SwiGLU of each (row, expert) pair on its own (`docs/arithmetic.md`, expert output).
//!
//! Pairs are sorted by expert, so that the rows of an expert are neighbours and its weights are read once for
//! all of them. One region of the pool computes gate and up, `silu(gate) * up` and its codes: a task owns
//! whole groups of the hidden columns. A second one computes down into the order of the pairs. A decode step
//! has one row, whose quantized form all experts share; with more rows the forms are copied into blocks per
//! expert.

use quant::Matrix;

use super::{
    isa::{Isa, by_isa},
    linear::{
        Activations, BLOCK_MAX, FormWriter, Inputs, Outputs, PANEL, PackedMatrix, block_rows, blocks,
        group_lengths, row_tasks, task_blocks,
    },
    math::silu,
    pool::{Disjoint, Pool},
};

/// The routed experts of a layer: gate and up `[I, H]`, down `[H, I]` of each.
pub(crate) struct PackedExperts {
    gate: Vec<PackedMatrix>,
    up: Vec<PackedMatrix>,
    down: Vec<PackedMatrix>,
}

impl PackedExperts {
    /// Takes the experts of a layer; matrices of one kind have one shape, encodings may differ.
    ///
    /// # Panics
    /// If counts or shapes do not fit, or there is no expert.
    pub(crate) fn new(pool: &Pool, isa: Isa, gate: &[Matrix], up: &[Matrix], down: &[Matrix]) -> Self {
        let experts = gate.len();
        assert!(experts > 0 && up.len() == experts && down.len() == experts, "as many of each kind");
        let (hidden, width) = (gate[0].rows(), gate[0].cols());
        for matrix in gate.iter().chain(up) {
            assert_eq!((matrix.rows(), matrix.cols()), (hidden, width), "gate and up of one shape");
        }
        for matrix in down {
            assert_eq!((matrix.rows(), matrix.cols()), (width, hidden), "down of one shape");
        }
        let all: Vec<&Matrix> = gate.iter().chain(up).chain(down).collect();
        let mut gate = PackedMatrix::pack(pool, isa, &all);
        let mut up = gate.split_off(experts);
        let down = up.split_off(experts);
        Self { gate, up, down }
    }

    /// Bytes held, as [`PackedMatrix::bytes`].
    pub(crate) fn bytes(&self) -> usize {
        self.gate.iter().chain(&self.up).chain(&self.down).map(PackedMatrix::bytes).sum()
    }

    /// Number of experts.
    pub(crate) fn count(&self) -> usize {
        self.gate.len()
    }

    /// Width of inputs and outputs, `H`.
    pub(crate) fn width(&self) -> usize {
        self.gate[0].cols()
    }

    /// Width between, `I`.
    fn hidden(&self) -> usize {
        self.gate[0].rows()
    }
}

/// Scratch of [`routed_experts`]; made anew by every call.
#[derive(Default)]
pub(crate) struct ExpertScratch {
    /// Pairs in the order of their experts; the rank of a pair is its index here.
    pairs: Vec<u32>,
    /// First rank of each expert, and the end.
    starts: Vec<usize>,
    /// `x`, one row a block.
    rows: Activations,
    /// `x` by rank, in blocks per expert; floats only for dense matrices.
    ranked: Activations,
    ranked_x: Vec<f32>,
    /// Gate, then hidden values; up. `[pairs, I]` by rank.
    gate: Vec<f32>,
    up: Vec<f32>,
    hidden: Activations,
    tasks: Vec<Task>,
}

impl ExpertScratch {
    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.rows.bytes()
            + self.ranked.bytes()
            + self.hidden.bytes()
            + (self.ranked_x.capacity() + self.gate.capacity() + self.up.capacity() + self.pairs.capacity())
                * 4
            + self.starts.capacity() * size_of::<usize>()
            + self.tasks.capacity() * size_of::<Task>()
    }

    /// Sorts pairs by expert, keeping their order inside one.
    fn sort(&mut self, ids: &[u32], experts: usize) {
        self.starts.clear();
        self.starts.resize(experts + 1, 0);
        for &id in ids {
            assert!((id as usize) < experts, "expert {id} of {experts}");
            self.starts[id as usize + 1] += 1;
        }
        for expert in 0..experts {
            self.starts[expert + 1] += self.starts[expert];
        }
        self.pairs.resize(ids.len(), 0);
        let mut next = self.starts.clone();
        for (pair, &id) in ids.iter().enumerate() {
            self.pairs[next[id as usize]] = pair as u32;
            next[id as usize] += 1;
        }
    }
}

/// Some columns of one expert for some of its rows.
#[derive(Clone, Copy)]
struct Task {
    expert: usize,
    /// Which columns: counts in steps that [`Plan`] and the matrix say.
    part: usize,
    /// Which rows: [`task_blocks`].
    chunk: usize,
}

/// Lists the tasks of all experts with rows: `parts(expert)` column parts by chunks of rows.
fn list(tasks: &mut Vec<Task>, starts: &[usize], parts: impl Fn(usize) -> usize) {
    tasks.clear();
    for (expert, rows) in starts.windows(2).enumerate() {
        let chunks = row_tasks(rows[1] - rows[0]);
        for part in 0..if chunks > 0 { parts(expert) } else { 0 } {
            tasks.extend((0..chunks).map(|chunk| Task { expert, part, chunk }));
        }
    }
}

/// `out[r * k + i] = down(silu(gate x_r) * up x_r)` with the matrices of expert `ids[r * k + i]`; `x` is
/// `[rows, H]`, `ids` `[rows, k]`, `out` `[rows * k, H]`.
///
/// # Panics
/// If a length does not fit or an id is not an expert's.
pub(crate) fn routed_experts(
    pool: &Pool,
    isa: Isa,
    x: &[f32],
    rows: usize,
    ids: &[u32],
    k: usize,
    experts: &PackedExperts,
    out: &mut [f32],
    scratch: &mut ExpertScratch,
) {
    let width = experts.width();
    assert_eq!(x.len(), rows * width, "input of {rows} rows");
    assert_eq!(ids.len(), rows * k, "{k} experts for each of {rows} rows");
    assert_eq!(out.len(), rows * k * width, "output of {rows} rows");
    if ids.is_empty() {
        return;
    }
    scratch.sort(ids, experts.count());
    let shared = rows == 1 && scratch.starts.windows(2).all(|e| e[1] - e[0] <= 1);
    inputs(pool, isa, x, rows, k, shared, experts, scratch);
    hidden(pool, isa, x, shared, experts, scratch);
    let ExpertScratch { pairs, starts, gate, hidden, tasks, .. } = scratch;
    list(tasks, starts, |expert| experts.down[expert].parts().1);
    let out = Outputs::new(out, width, Some(pairs));
    pool.run(tasks.len(), &|at| {
        let Task { expert, part, chunk } = tasks[at];
        let (first, rows) = (starts[expert], starts[expert + 1] - starts[expert]);
        let inputs = Inputs { x: gate, activations: hidden, floats: None, first, rows };
        let blocks = task_blocks(rows, chunk, row_tasks(rows));
        // SAFETY: each task has its own columns and rows.
        unsafe { experts.down[expert].multiply(isa, part..part + 1, inputs, blocks, &out, first) };
    });
}

/// Quantizes `x`, and arranges it by rank unless all experts share one row.
fn inputs(
    pool: &Pool,
    isa: Isa,
    x: &[f32],
    rows: usize,
    k: usize,
    shared: bool,
    experts: &PackedExperts,
    scratch: &mut ExpertScratch,
) {
    let matrices = || experts.gate.iter().chain(&experts.up);
    let groups = group_lengths(matrices());
    scratch.rows.quantize(pool, isa, x, rows, 1, &groups);
    if shared {
        return;
    }
    let width = experts.width();
    let dense = matrices().any(|matrix| matrix.group().is_none());
    let ExpertScratch { pairs, starts, rows, ranked, ranked_x, .. } = scratch;
    ranked.resize(pairs.len(), width, &groups);
    ranked_x.resize(if dense { pairs.len() * width } else { 0 }, 0.0);
    let writers = ranked.writers();
    let floats = Disjoint::new(ranked_x);
    pool.run(experts.count(), &|expert| {
        let (first, count) = (starts[expert], starts[expert + 1] - starts[expert]);
        for at in 0..blocks(count, BLOCK_MAX) {
            let block = block_rows(count, BLOCK_MAX, at);
            let block = first + block.start..first + block.end;
            for rank in block.clone() {
                let row = pairs[rank] as usize / k;
                for writer in &writers {
                    let source = rows.form(writer.group()).expect("quantized for the same groups");
                    // SAFETY: each rank belongs to one expert, each expert to one task.
                    unsafe { writer.copy(block.clone(), rank, source, row) };
                }
                if dense {
                    // SAFETY: as above.
                    let to = unsafe { floats.range(rank * width..(rank + 1) * width) };
                    to.copy_from_slice(&x[row * width..(row + 1) * width]);
                }
            }
        }
    });
}

/// Columns of the hidden values that one task computes: whole groups of the down matrix, whole panels of gate
/// and up.
fn hidden_step(experts: &PackedExperts, expert: usize) -> usize {
    experts.down[expert].group().unwrap_or(PANEL).max(PANEL)
}

/// Computes `silu(gate) * up` of every pair, and its codes for the down matrices.
fn hidden(
    pool: &Pool,
    isa: Isa,
    x: &[f32],
    shared: bool,
    experts: &PackedExperts,
    scratch: &mut ExpertScratch,
) {
    let columns = experts.hidden();
    let ExpertScratch { pairs, starts, rows, ranked, ranked_x, gate, up, hidden, tasks } = scratch;
    gate.resize(pairs.len() * columns, 0.0);
    up.resize(pairs.len() * columns, 0.0);
    hidden.resize(pairs.len(), columns, &group_lengths(experts.down.iter()));
    list(tasks, starts, |expert| columns.div_ceil(hidden_step(experts, expert)));
    let writers = hidden.writers();
    let (gate, up) = (Outputs::new(gate, columns, None), Outputs::new(up, columns, None));
    pool.run(tasks.len(), &|at| {
        let task = tasks[at];
        let (first, count) = (starts[task.expert], starts[task.expert + 1] - starts[task.expert]);
        let inputs = match shared {
            true => Inputs { x, activations: rows, floats: None, first: 0, rows: 1 },
            false => Inputs { x: ranked_x, activations: ranked, floats: None, first, rows: count },
        };
        // SAFETY: each task has its own columns and rows.
        unsafe { hidden_task(isa, experts, task, inputs, first, &gate, &up, &writers) };
    });
}

/// One task of [`hidden`].
///
/// # Safety
/// No other task may compute these columns of these rows at the same time.
unsafe fn hidden_task(
    isa: Isa,
    experts: &PackedExperts,
    task: Task,
    inputs: Inputs<'_>,
    first: usize,
    gate: &Outputs<'_>,
    up: &Outputs<'_>,
    writers: &[FormWriter<'_>],
) {
    let Task { expert, part, chunk } = task;
    let step = hidden_step(experts, expert);
    let columns = part * step..experts.hidden().min((part + 1) * step);
    let task_blocks = task_blocks(inputs.rows, chunk, row_tasks(inputs.rows));
    for (matrix, out) in [(&experts.gate[expert], gate), (&experts.up[expert], up)] {
        let (size, _) = matrix.parts();
        let parts = columns.start / size..columns.end.div_ceil(size);
        // SAFETY: the caller's promise; a step is made of whole parts.
        unsafe { matrix.multiply(isa, parts, inputs, task_blocks.clone(), out, first) };
    }
    let group = experts.down[expert].group();
    let writer = writers.iter().find(|writer| Some(writer.group()) == group);
    for block in task_blocks {
        let block = block_rows(inputs.rows, BLOCK_MAX, block);
        let block = first + block.start..first + block.end;
        for rank in block.clone() {
            // SAFETY: the caller's promise.
            unsafe {
                let values = gate.row(rank, columns.clone());
                swiglu(isa, values, up.row(rank, columns.clone()));
                if let Some(writer) = writer {
                    writer.put(isa, block.clone(), rank, columns.start, values);
                }
            }
        }
    }
}

by_isa! {
    /// `gate = silu(gate) * up`.
    fn swiglu(gate: &mut [f32], up: &[f32]) = swiglu_body
}

#[inline(always)]
fn swiglu_body(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = silu(*gate) * up;
    }
}

#[cfg(test)]
mod tests {
    use quant::{Dtype, Scheme, Zero};

    use super::*;
    use crate::cpu::linear::tests::{Random, activations, assert_bits, dense, grouped, naive};

    /// Experts of one layer, kinds apart.
    struct Layer {
        gate: Vec<Matrix>,
        up: Vec<Matrix>,
        down: Vec<Matrix>,
    }

    impl Layer {
        fn new(experts: usize, mut make: impl FnMut(usize, bool) -> Matrix) -> Self {
            let mut kind = |down: bool| (0..experts).map(|expert| make(expert, down)).collect();
            Self { gate: kind(false), up: kind(false), down: kind(true) }
        }

        fn naive(&self, expert: usize, x: &[f32]) -> Vec<f32> {
            let gate = naive(&self.gate[expert], x);
            let up = naive(&self.up[expert], x);
            let hidden: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| silu(*g) * u).collect();
            naive(&self.down[expert], &hidden)
        }
    }

    /// Every instruction set, pools of 1 and 2 threads, each row count, against each pair on its own.
    fn check(layer: &Layer, random: &mut Random, counts: &[usize], k: usize) {
        let experts = layer.gate.len();
        let width = layer.gate[0].cols();
        let most = *counts.iter().max().expect("some counts");
        let x = activations(random, most, width);
        let ids: Vec<u32> = (0..most)
            .flat_map(|_| {
                let first = random.below(experts) as u32;
                (0..k as u32).map(move |i| (first + i * i) % experts as u32)
            })
            .collect();
        let expected: Vec<f32> = ids
            .iter()
            .enumerate()
            .flat_map(|(pair, &id)| layer.naive(id as usize, &x[pair / k * width..][..width]))
            .collect();
        let pools = [Pool::new(1), Pool::new(2)];
        for isa in Isa::supported() {
            let packed = PackedExperts::new(&pools[1], isa, &layer.gate, &layer.up, &layer.down);
            let mut scratch = ExpertScratch::default();
            for &rows in counts {
                let pairs = rows * k;
                let mut out = vec![f32::NAN; pairs * width];
                let (x, ids) = (&x[..rows * width], &ids[..pairs]);
                routed_experts(&pools[rows % 2], isa, x, rows, ids, k, &packed, &mut out, &mut scratch);
                assert_bits(&out, &expected[..pairs * width], &format!("{} {rows} rows", isa.name()));
            }
            assert!(packed.bytes() > 0 && scratch.bytes() > 0);
        }
    }

    #[test]
    fn every_pair_equals_the_expert_alone() {
        let mut random = Random(21);
        let counts: Vec<usize> = (1..=17).chain([64]).collect();
        for (bits, group) in [(4, 64), (3, 32), (8, 128)] {
            let scheme = Scheme { bits, group, zero: Zero::Affine, scales: Dtype::Bf16 };
            let mut weights = Random(bits as u64);
            let layer = Layer::new(5, |_, down| {
                let (rows, cols) = if down { (256, 128) } else { (128, 256) };
                grouped(&mut weights, rows, cols, scheme)
            });
            check(&layer, &mut random, &counts, 3);
        }
    }

    #[test]
    fn encodings_may_differ_between_experts() {
        let mut random = Random(22);
        let mut weights = Random(23);
        let of = |bits, group, zero| Scheme { bits, group, zero, scales: Dtype::F16 };
        let schemes = [of(4, 32, Zero::Symmetric), of(6, 128, Zero::Affine), of(2, 64, Zero::Affine)];
        let mut at = 0;
        let layer = Layer::new(4, |_, down| {
            let (rows, cols) = if down { (128, 384) } else { (384, 128) };
            at += 1;
            match at % 4 {
                3 => dense(&mut weights, rows, cols, Dtype::Bf16),
                at => grouped(&mut weights, rows, cols, schemes[at]),
            }
        });
        check(&layer, &mut random, &[1, 2, 7, 40], 2);
    }

    #[test]
    fn dense_experts_of_odd_sizes() {
        let mut random = Random(24);
        let mut weights = Random(25);
        let layer = Layer::new(3, |_, down| {
            let (rows, cols) = if down { (40, 50) } else { (50, 40) };
            dense(&mut weights, rows, cols, Dtype::F32)
        });
        check(&layer, &mut random, &[1, 5], 1);
    }

    #[test]
    fn many_rows_of_one_expert_and_repeated_picks() {
        let mut random = Random(26);
        let scheme = Scheme { bits: 4, group: 64, zero: Zero::Symmetric, scales: Dtype::Bf16 };
        let mut weights = Random(27);
        let layer = Layer::new(1, |_, down| {
            let (rows, cols) = if down { (64, 128) } else { (128, 64) };
            grouped(&mut weights, rows, cols, scheme)
        });
        // The one expert twice in every row: more rows than one task takes.
        check(&layer, &mut random, &[1, 110], 2);
    }
}
