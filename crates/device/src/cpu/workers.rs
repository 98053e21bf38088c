//! Sharing rows among the pool's threads.

use super::{
    isa::Isa,
    pool::{Disjoint, Pool},
};

/// Values a task should touch so that its start (about a microsecond) does not show.
const TASK_VALUES: usize = 16_384;

/// Works on some rows of two outputs: `(first row, a rows, b rows)`.
type RowsWork<'a> = dyn Fn(usize, &mut [f32], &mut [f32]) + Sync + 'a;

/// Threads and the instruction set they use.
pub(crate) struct Workers {
    pub(crate) pool: Pool,
    pub(crate) isa: Isa,
}

impl Workers {
    /// Calls `work(first, out rows)` over consecutive rows of `out`, some rows a call.
    pub(crate) fn rows(&self, out: &mut [f32], width: usize, work: &(dyn Fn(usize, &mut [f32]) + Sync)) {
        self.rows2(out, width, &mut [], 0, &|first, out, _| work(first, out));
    }

    /// The same over two outputs with equal row counts: `work(first, a rows, b rows)`. `b` may be empty with
    /// width 0.
    pub(crate) fn rows2(
        &self,
        a: &mut [f32],
        a_width: usize,
        b: &mut [f32],
        b_width: usize,
        work: &RowsWork<'_>,
    ) {
        let rows = a.len() / a_width;
        assert_eq!((a.len(), b.len()), (rows * a_width, rows * b_width), "whole rows");
        let chunk = (TASK_VALUES / (a_width + b_width)).max(1);
        let (a, b) = (Disjoint::new(a), Disjoint::new(b));
        self.pool.run(rows.div_ceil(chunk), &|task| {
            let (first, end) = (task * chunk, rows.min((task + 1) * chunk));
            // SAFETY: each task has rows of its own.
            let (a, b) =
                unsafe { (a.range(first * a_width..end * a_width), b.range(first * b_width..end * b_width)) };
            work(first, a, b);
        });
    }
}
