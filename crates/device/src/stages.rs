//! The [`Device`] trait: memory, states and the named stages of a forward pass.
//!
//! Every stage is row-pure: the bits of a row depend on that row's inputs, its sequence and the weights,
//! never on other rows, the row count or the schedule. `rows` counts the leading rows of the buffers that are
//! worked on; the stages without it work on the rows of the step given to [`Device::begin`]. Faults: a
//! non-finite input (or one of magnitude 2^40 or more) turns the row's results into NaN, up to its logits;
//! nothing panics and no other row changes.

use quant::Matrix;

use crate::{
    AttentionShape, Between, Buffer, DeltaShape, DeltaState, DeviceError, ExpertsRef, KvPool, KvShape,
    MatrixRef, Memory, Picks, Pixels, Rotary, StatePool, Step, VectorRef,
};

type Result<T = ()> = std::result::Result<T, DeviceError>;

/// How a token is drawn from a row of logits (`docs/arithmetic.md`, logits to tokens).
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// Row of the logits buffer.
    pub row: usize,
    /// 0 is greedy: the highest logit, ties to the lowest id.
    pub temperature: f32,
    /// Keep the `top_k` best; 0 keeps all.
    pub top_k: u32,
    /// Then the shortest best prefix with this much probability; 1 keeps all.
    pub top_p: f32,
    /// Then those with at least this share of the best one's probability; 0 keeps all.
    pub min_p: f32,
    /// Key of the draw: seed of the request.
    pub seed: u64,
    /// Key of the draw: choice index.
    pub choice: u32,
    /// Key of the draw: absolute position of the drawn token in its sequence.
    pub position: u64,
    /// Ids from here on are never drawn (rows of the table that the tokenizer cannot produce).
    pub vocabulary: u32,
    /// Changes to the logits of some tokens, ids ascending, before everything else.
    pub adjust: Vec<Adjust>,
    /// Tokens that may be drawn, one bit per id, lowest bit first; `None` allows all. At least one bit must
    /// be set.
    pub mask: Option<Vec<u32>>,
    /// How many of the raw distribution's best tokens to report.
    pub top_logprobs: u32,
}

impl Draw {
    /// The highest logit of row `row`, for position `position`: nothing is adjusted, masked or reported.
    pub fn greedy(row: usize, position: u64, vocabulary: u32) -> Self {
        Self {
            row,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            choice: 0,
            position,
            vocabulary,
            adjust: Vec::new(),
            mask: None,
            top_logprobs: 0,
        }
    }
}

/// What penalties and bias do to the logit of one token, in this order, each one f32 operation: a positive
/// logit is divided by `repetition`, another multiplied; `frequency` is subtracted; `presence` is subtracted;
/// `bias` is added.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adjust {
    /// The token.
    pub token: u32,
    /// Repetition penalty, 1 for none.
    pub repetition: f32,
    /// Frequency penalty times the token's count.
    pub frequency: f32,
    /// Presence penalty.
    pub presence: f32,
    /// Logit bias.
    pub bias: f32,
}

/// What follows a bias (`docs/model.md` section 9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// Nothing.
    None,
    /// GELU by the hyperbolic tangent, inside blocks.
    GeluTanh,
    /// GELU by the error function, in the merger.
    GeluErf,
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// The token; `None` if a logit of the row was not finite.
    pub token: Option<u32>,
    /// Log-probability of the token in the raw distribution (temperature 1, nothing cut).
    pub logprob: f32,
    /// The [`Draw::top_logprobs`] best tokens of the raw distribution with their log-probabilities, best
    /// first.
    pub top: Vec<(u32, f32)>,
}

/// Memory and stages. One queue: calls take effect in order.
///
/// Callers pass handles of this device, and rows and widths of the shapes written below: what does not fit is
/// a mistake of the program, which a device refuses as [`DeviceError::Failed`] or by a panic. Memory that
/// cannot be had is [`DeviceError::OutOfMemory`]. A device that queues may tell a fault of a stage at a later
/// call, and refuses all calls from then on.
pub trait Device: Send {
    /// What people see: `cpu (avx512-vnni, 2 threads)`.
    fn name(&self) -> String;
    /// Bytes held now.
    fn memory(&self) -> Memory;

    // Memory.

    /// Takes a weight matrix. A device that keeps a form of its own discards the source's bytes; one that
    /// uses them as stored shares them.
    fn matrix(&mut self, source: &Matrix) -> Result<MatrixRef>;
    /// Takes the routed experts of a layer: `gate[e]`, `up[e]` `[I, H]` and `down[e]` `[H, I]`, all of equal
    /// shape.
    fn experts(&mut self, gate: &[Matrix], up: &[Matrix], down: &[Matrix]) -> Result<ExpertsRef>;
    /// Takes a vector; computing devices round it once to f32.
    fn vector(&mut self, values: &[f64]) -> Result<VectorRef>;
    /// Takes rotary tables: cosines and sines `[positions, half]`, and which axis (0 t, 1 h, 2 w) turns each
    /// of the `half` frequencies.
    fn rotary(&mut self, cos: &[f64], sin: &[f64], axes: &[u8]) -> Result<Rotary>;
    /// Activations `[rows_max, width]`, zeros.
    fn buffer(&mut self, rows_max: usize, width: usize) -> Result<Buffer>;
    /// Room for the picks of `rows_max` rows, `k` each.
    fn picks(&mut self, rows_max: usize, k: usize) -> Result<Picks>;
    /// K/V pages of one attention layer.
    fn kv_pool(&mut self, shape: KvShape) -> Result<KvPool>;
    /// States of one delta-net layer for `places` sequences and snapshots, zeros.
    fn state_pool(&mut self, shape: DeltaShape, places: usize) -> Result<StatePool>;
    /// Writes whole rows from `row` on; computing devices round to f32.
    fn write(&mut self, buffer: Buffer, row: usize, values: &[f64]) -> Result;
    /// Reads whole rows from `row` on, as f32 (rounded on the reference device). Waits for the queue.
    fn read(&mut self, buffer: Buffer, row: usize, out: &mut [f32]) -> Result;
    /// Reads whole rows from `row` on, exactly. Waits for the queue.
    fn read_exact(&mut self, buffer: Buffer, row: usize, out: &mut [f64]) -> Result;
    /// Reads picks of `rows` rows: ids and weights `[rows, k]`.
    fn read_picks(&mut self, picks: Picks, rows: usize) -> Result<(Vec<u32>, Vec<f64>)>;

    // States.

    /// Zeros the state and the last input rows of a place.
    fn state_clear(&mut self, pool: StatePool, place: u32) -> Result;
    /// Copies a place over another (snapshots).
    fn state_copy(&mut self, pool: StatePool, from: u32, to: u32) -> Result;
    /// Reads a place: state `[Hv, Dk, Dv]` and input rows. Waits for the queue.
    fn state_read(&mut self, pool: StatePool, place: u32) -> Result<DeltaState>;
    /// Writes a place with what [`Self::state_read`] gave, on this device or another.
    fn state_write(&mut self, pool: StatePool, place: u32, state: &DeltaState) -> Result;
    /// Of the place's last uncommitted window, these rows (a path from its root) are real: advances the state
    /// by them in order, with the bits that committed rows would have given. Clears the kept inputs.
    fn state_keep(&mut self, pool: StatePool, place: u32, rows: &[usize]) -> Result;
    /// The K/V half of keeping: moves the K/V of window row `rows[i]` from place `start + rows[i]` to
    /// `start + i`.
    fn kv_keep(&mut self, pool: KvPool, pages: &[u32], start: usize, rows: &[usize]) -> Result;

    /// Bytes of one page, codes and scales, as the device keeps them.
    fn kv_export(&mut self, pool: KvPool, page: u32) -> Result<Vec<u8>>;
    /// Takes back what [`Self::kv_export`] gave.
    fn kv_import(&mut self, pool: KvPool, page: u32, bytes: &[u8]) -> Result;

    // Stages.

    /// Starts a step: the windows that the following stages work on.
    fn begin(&mut self, step: &Step) -> Result;
    /// `out[r] = table[token of row r]`; rows without a token are left as written.
    fn embed(&mut self, table: MatrixRef, out: Buffer) -> Result;
    /// RMSNorm: `out = x / rms(x) * weight` over whole rows; `weight` is the multiplier.
    fn norm(&mut self, x: Buffer, rows: usize, weight: VectorRef, eps: f32, out: Buffer) -> Result;
    /// `x += delta`, then [`Self::norm`] of `x` into `out`.
    fn add_norm(
        &mut self,
        x: Buffer,
        delta: Buffer,
        rows: usize,
        weight: VectorRef,
        eps: f32,
        out: Buffer,
    ) -> Result;
    /// `out = x W^T` for several matrices over the same input.
    fn linear(&mut self, x: Buffer, rows: usize, to: &[(MatrixRef, Buffer)]) -> Result;
    /// `out[r] = [a[r], b[r]]`: the width of `out` is the sum of theirs.
    fn join(&mut self, a: Buffer, b: Buffer, rows: usize, out: Buffer) -> Result;
    /// `out[i] = x[from[i]]`, whole rows of one width.
    fn gather(&mut self, x: Buffer, from: &[usize], out: Buffer) -> Result;
    /// `out[to[i]] = x[from[i]]`, exactly; the other rows of `out` stay. `x` and `out` are different buffers
    /// of one width, `from` and `to` have one length, and no row stands twice in `to`.
    fn copy_rows(&mut self, x: Buffer, from: &[usize], out: Buffer, to: &[usize]) -> Result;
    /// Causal depthwise convolution and silu over the step's rows, `[rows, C]` to `[rows, C]`; `taps` is
    /// `[C, conv_taps]`, the last tap for the current token. Keeps the pool's last input rows.
    fn conv(&mut self, x: Buffer, taps: VectorRef, pool: StatePool, out: Buffer) -> Result;
    /// Gated delta rule over the step's rows. `mixed` `[rows, C]` from [`Self::conv`] (q, k, v blocks; q and
    /// k are L2-normalized here, eps 1e-6), `a` and `b` `[rows, Hv]`, `decay = exp(A_log)` and `dt_bias`
    /// `[Hv]`; `out` `[rows, Hv Dv]`.
    fn delta_rule(
        &mut self,
        mixed: Buffer,
        a: Buffer,
        b: Buffer,
        decay: VectorRef,
        dt_bias: VectorRef,
        pool: StatePool,
        out: Buffer,
    ) -> Result;
    /// Per head of `weight.len()` values: `x = RMSNorm(x) * weight * silu(z)`, in place.
    fn gated_norm(&mut self, x: Buffer, z: Buffer, rows: usize, weight: VectorRef, eps: f32) -> Result;
    /// Norms and rotates q and k of the step's rows. `qg` is `[rows, heads, 2, head_dim]`, query then gate;
    /// the query goes to `q` `[rows, heads, head_dim]`, k `[rows, kv_heads, head_dim]` is changed in place.
    fn qk_norm_rope(
        &mut self,
        qg: Buffer,
        k: Buffer,
        q_weight: VectorRef,
        k_weight: VectorRef,
        eps: f32,
        rotary: Rotary,
        shape: AttentionShape,
        q: Buffer,
    ) -> Result;
    /// Quantizes k and v of the step's rows into their windows' pages.
    fn kv_append(&mut self, k: Buffer, v: Buffer, pool: KvPool) -> Result;
    /// Causal attention of the step's rows over their sequences, their own rows included; `out` like `q`.
    fn attention(&mut self, q: Buffer, shape: AttentionShape, pool: KvPool, out: Buffer) -> Result;
    /// `x *= sigmoid(gate)` with the gates of `qg`, in place.
    fn out_gate(&mut self, x: Buffer, qg: Buffer, rows: usize, shape: AttentionShape) -> Result;
    /// The `k` best experts of each row of router logits, best first (ties to the lower id), weights summing
    /// to 1.
    fn route(&mut self, logits: Buffer, rows: usize, picks: Picks) -> Result;
    /// SwiGLU experts: `out[r * k + i] = down(silu(gate x_r) * up x_r)` of row r's i-th pick.
    fn routed_experts(
        &mut self,
        x: Buffer,
        rows: usize,
        picks: Picks,
        experts: ExpertsRef,
        out: Buffer,
    ) -> Result;
    /// `out = silu(gate) * up`, `[rows, I]` each.
    fn swiglu(&mut self, gate: Buffer, up: Buffer, rows: usize, out: Buffer) -> Result;
    /// `out[r] = sum_i weight_i * routed[r * k + i] + sigmoid(gate[r]) * shared[r]`, picks in rank order, the
    /// shared expert last; `gate` is `[rows, 1]`.
    fn combine(
        &mut self,
        routed: Buffer,
        picks: Picks,
        shared: Buffer,
        gate: Buffer,
        rows: usize,
        out: Buffer,
    ) -> Result;
    /// Draws tokens from rows of logits.
    fn draw(&mut self, logits: Buffer, draws: &[Draw]) -> Result<Vec<Drawn>>;

    // Draws whose tokens the next steps take before the host has seen them.

    /// Are there [`Self::draw_later`], [`Self::drawn`] and [`Self::embed_drawn`]?
    fn draws_later(&self) -> bool {
        false
    }
    /// [`Self::draw`] whose answer waits for [`Self::drawn`]; [`Self::draw`] forgets what waits.
    fn draw_later(&mut self, _logits: Buffer, _draws: &[Draw]) -> Result {
        no_later_draws("draw_later")
    }
    /// Begins with what was queued, where that would wait until the host wants to see something.
    fn start(&mut self) -> Result {
        Ok(())
    }
    /// The answers that wait, in order. Waits for the queue.
    fn drawn(&mut self) -> Result<Vec<Drawn>> {
        no_later_draws("drawn")
    }
    /// `out[i] = table[token of draw from[i]]` of the last [`Self::draw_later`]; token 0 where a draw gave
    /// none.
    fn embed_drawn(&mut self, _table: MatrixRef, _from: &[usize], _out: Buffer) -> Result {
        no_later_draws("embed_drawn")
    }

    // Stages of the vision tower (`docs/model.md` section 9). A device without them refuses pictures by name.

    /// Rows of a picture's patches, from row `at` of `to` on: the value of every pixel, each channel's
    /// `frames` times.
    fn patch_rows(&mut self, _pixels: Pixels<'_>, _to: Buffer, _at: usize) -> Result {
        no_pictures("patch_rows")
    }
    /// Rows between rows of `table` `[n, width of to]`, from row `at` of `to` on: bilinear in f64, rounded
    /// once.
    fn between_rows(&mut self, _table: VectorRef, _between: &[Between], _to: Buffer, _at: usize) -> Result {
        no_pictures("between_rows")
    }
    /// Copies `rows` rows of `from`, from row `first` on, to row `at` on of `to`. Where widths differ the
    /// values are taken as they lie in memory; whole rows of `to` are filled.
    fn copy_values(&mut self, _from: Buffer, _first: usize, _rows: usize, _to: Buffer, _at: usize) -> Result {
        no_pictures("copy_values")
    }
    /// LayerNorm: `out = (x - mean) / sqrt(var + eps) * weight + bias` over whole rows.
    fn layer_norm(
        &mut self,
        _x: Buffer,
        _rows: usize,
        _weight: VectorRef,
        _bias: VectorRef,
        _eps: f32,
        _out: Buffer,
    ) -> Result {
        no_pictures("layer_norm")
    }
    /// `x = act(x + bias)`, in place.
    fn bias(&mut self, _x: Buffer, _rows: usize, _bias: VectorRef, _act: Activation) -> Result {
        no_pictures("bias")
    }
    /// `x += delta + bias`, in place.
    fn add_bias(&mut self, _x: Buffer, _delta: Buffer, _rows: usize, _bias: VectorRef) -> Result {
        no_pictures("add_bias")
    }
    /// Of the step's rows: adds `bias` to `qkv` `[rows, 3, heads, head_dim]`, turns every q and k head, and
    /// parts them to `q`, `k` and `v` `[rows, heads, head_dim]`. The table has `head_dim / 2` frequencies:
    /// entry `j` turns with entry `j + head_dim / 2`.
    fn rope_2d(
        &mut self,
        _qkv: Buffer,
        _bias: VectorRef,
        _rotary: Rotary,
        _shape: AttentionShape,
        _q: Buffer,
        _k: Buffer,
        _v: Buffer,
    ) -> Result {
        no_pictures("rope_2d")
    }
    /// Attention without a mask: the step's rows see the first `keys[w]` places of their window's pages,
    /// whatever their own index; `out` like `q`.
    fn full_attention(
        &mut self,
        _q: Buffer,
        _shape: AttentionShape,
        _pool: KvPool,
        _keys: &[usize],
        _out: Buffer,
    ) -> Result {
        no_pictures("full_attention")
    }
}

/// The answer of a device that answers draws at once.
fn no_later_draws<T>(stage: &'static str) -> Result<T> {
    Err(DeviceError::Failed { stage, message: "this device answers draws at once: ask draws_later".into() })
}

/// The answer of a device that lacks a stage of the vision tower.
fn no_pictures(stage: &'static str) -> Result {
    let message = "this device does not compute pictures; choose another device or --vision off".into();
    Err(DeviceError::Failed { stage, message })
}
