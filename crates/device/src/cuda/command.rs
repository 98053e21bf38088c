//! Stage calls as data. Equal lists of commands under equal step shapes make equal launches, so that a list
//! is lowered once and replayed. Values that change from step to step lie in the upload, named by a [`Span`].

use super::memory::Span;
use crate::{
    Activation, AttentionShape, Buffer, ExpertsRef, KvPool, MatrixRef, Picks, Rotary, StatePool, VectorRef,
};

/// A stage call. Scalars of f32 are kept as bits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Command {
    /// Rows from `row` on take the f32 values of the span.
    Write {
        buffer: Buffer,
        row: usize,
        values: Span,
    },
    /// Zeros a place.
    StateClear {
        pool: StatePool,
        place: u32,
    },
    StateCopy {
        pool: StatePool,
        from: u32,
        to: u32,
    },
    /// Words: place, count, then [`crate::WINDOW_ROWS_MAX`] rows of which `count` are meant.
    StateKeep {
        pool: StatePool,
        words: Span,
    },
    /// Words: count, then pairs (from, to) of keys, `page * 64 + slot`, in order. `count` is part of the
    /// span's size.
    KvKeep {
        pool: KvPool,
        words: Span,
    },
    Embed {
        table: MatrixRef,
        out: Buffer,
    },
    /// Words: a draw of the last ones for each row of `out`.
    EmbedDrawn {
        table: MatrixRef,
        rows: usize,
        draws: Span,
        out: Buffer,
    },
    /// Words: a record of each of `draws` draws; adjustments and masks are behind the step's pages, or at an
    /// address of their own. Results go to the host's memory at `results`, `stride` words a draw, tokens to
    /// `first` and on of those of the last draws.
    Draw {
        logits: Buffer,
        draws: usize,
        records: Span,
        tail: Option<u64>,
        results: u64,
        stride: usize,
        first: usize,
    },
    Norm {
        x: Buffer,
        rows: usize,
        weight: VectorRef,
        eps: u32,
        out: Buffer,
    },
    AddNorm {
        x: Buffer,
        delta: Buffer,
        rows: usize,
        weight: VectorRef,
        eps: u32,
        out: Buffer,
    },
    Linear {
        x: Buffer,
        rows: usize,
        to: Vec<(MatrixRef, Buffer)>,
    },
    Join {
        a: Buffer,
        b: Buffer,
        rows: usize,
        out: Buffer,
    },
    /// Words: a row of `x` for each row of `out`.
    Gather {
        x: Buffer,
        rows: usize,
        from: Span,
        out: Buffer,
    },
    /// Words: `rows` rows of `x`, then the rows of `out` they go to.
    CopyRows {
        x: Buffer,
        rows: usize,
        words: Span,
        out: Buffer,
    },
    Conv {
        x: Buffer,
        taps: VectorRef,
        pool: StatePool,
        out: Buffer,
    },
    DeltaRule {
        mixed: Buffer,
        a: Buffer,
        b: Buffer,
        decay: VectorRef,
        dt_bias: VectorRef,
        pool: StatePool,
        out: Buffer,
    },
    GatedNorm {
        x: Buffer,
        z: Buffer,
        rows: usize,
        weight: VectorRef,
        eps: u32,
    },
    QkNormRope {
        qg: Buffer,
        k: Buffer,
        q_weight: VectorRef,
        k_weight: VectorRef,
        eps: u32,
        rotary: Rotary,
        shape: AttentionShape,
        q: Buffer,
    },
    KvAppend {
        k: Buffer,
        v: Buffer,
        pool: KvPool,
    },
    Attention {
        q: Buffer,
        shape: AttentionShape,
        pool: KvPool,
        out: Buffer,
    },
    OutGate {
        x: Buffer,
        qg: Buffer,
        rows: usize,
        head_dim: usize,
    },
    Route {
        logits: Buffer,
        rows: usize,
        picks: Picks,
    },
    RoutedExperts {
        x: Buffer,
        rows: usize,
        picks: Picks,
        experts: ExpertsRef,
        out: Buffer,
    },
    Swiglu {
        gate: Buffer,
        up: Buffer,
        rows: usize,
        out: Buffer,
    },
    Combine {
        routed: Buffer,
        picks: Picks,
        shared: Buffer,
        gate: Buffer,
        rows: usize,
        out: Buffer,
    },
    /// To row `at` of `to`, from `area` pixels a channel; bytes: levels of the channels, f32, then the pixels
    /// of `rows` rows.
    PatchRows {
        bytes: Span,
        rows: usize,
        area: usize,
        to: Buffer,
        at: usize,
    },
    /// To row `at` of `to`; bytes: a `Between` of kernels/cuda/vision_rows.cu for each of `rows` rows.
    BetweenRows {
        table: VectorRef,
        bytes: Span,
        rows: usize,
        to: Buffer,
        at: usize,
    },
    /// `values` values from row `first` of `from`, to row `at` of `to`.
    CopyValues {
        from: Buffer,
        first: usize,
        values: usize,
        to: Buffer,
        at: usize,
    },
    LayerNorm {
        x: Buffer,
        rows: usize,
        weight: VectorRef,
        bias: VectorRef,
        eps: u32,
        out: Buffer,
    },
    Bias {
        x: Buffer,
        rows: usize,
        bias: VectorRef,
        act: Activation,
    },
    AddBias {
        x: Buffer,
        delta: Buffer,
        rows: usize,
        bias: VectorRef,
    },
    /// `parts`: q, k, v.
    Rope2d {
        qkv: Buffer,
        bias: VectorRef,
        rotary: Rotary,
        shape: AttentionShape,
        parts: [Buffer; 3],
    },
    /// Words: keys and first page of each window, then all pages.
    FullAttention {
        q: Buffer,
        shape: AttentionShape,
        pool: KvPool,
        words: Span,
        out: Buffer,
    },
}

impl Command {
    /// Does it look at what is in the plane, or leave some of it? Commands that are never between the planes
    /// of a sequence's layers are taken to do so.
    pub(super) fn reads(&self, plane: Buffer) -> bool {
        use Command as C;
        match *self {
            C::StateClear { .. } | C::StateCopy { .. } | C::StateKeep { .. } | C::KvKeep { .. } => false,
            C::Norm { x, .. } | C::Linear { x, .. } | C::Conv { x, .. } | C::RoutedExperts { x, .. } => {
                x == plane
            }
            C::AddNorm { x, delta, .. } => [x, delta].contains(&plane),
            C::DeltaRule { mixed, a, b, .. } => [mixed, a, b].contains(&plane),
            C::GatedNorm { x, z, .. } => [x, z].contains(&plane),
            C::QkNormRope { qg, k, .. } => [qg, k].contains(&plane),
            C::KvAppend { k, v, .. } => [k, v].contains(&plane),
            C::Attention { q, .. } => q == plane,
            C::OutGate { x, qg, .. } => [x, qg].contains(&plane),
            C::Route { logits, .. } => logits == plane,
            C::Swiglu { gate, up, .. } => [gate, up].contains(&plane),
            C::Combine { routed, shared, gate, .. } => [routed, shared, gate].contains(&plane),
            _ => true,
        }
    }

    /// How many of the plane's first rows it writes, of `rows` that the step has.
    pub(super) fn overwrites(&self, plane: Buffer, step_rows: usize) -> usize {
        use Command as C;
        match *self {
            C::Norm { out, rows, .. }
            | C::AddNorm { out, rows, .. }
            | C::Swiglu { out, rows, .. }
            | C::Combine { out, rows, .. }
                if out == plane =>
            {
                rows
            }
            C::Linear { rows, ref to, .. } if to.iter().any(|&(_, out)| out == plane) => rows,
            C::Conv { out, .. } | C::DeltaRule { out, .. } | C::Attention { out, .. } if out == plane => {
                step_rows
            }
            _ => 0,
        }
    }

    /// Does it follow a window, before the next step of its sequence?
    pub(super) fn keeps(&self) -> bool {
        use Command as C;
        matches!(self, C::StateKeep { .. } | C::KvKeep { .. } | C::Gather { .. } | C::CopyRows { .. })
    }

    /// Does it read or change states of delta-net layers?
    pub(super) fn touches_states(&self) -> bool {
        use Command as C;
        matches!(
            self,
            C::StateClear { .. }
                | C::StateCopy { .. }
                | C::StateKeep { .. }
                | C::Conv { .. }
                | C::DeltaRule { .. }
        )
    }

    /// Is it a stage of the vision tower alone? Their lists differ for every chunk of a picture.
    pub(super) fn of_pictures(&self) -> bool {
        matches!(
            self,
            Self::PatchRows { .. }
                | Self::BetweenRows { .. }
                | Self::CopyValues { .. }
                | Self::LayerNorm { .. }
                | Self::Bias { .. }
                | Self::AddBias { .. }
                | Self::Rope2d { .. }
                | Self::FullAttention { .. }
        )
    }
}
