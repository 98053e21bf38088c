//! The reference device: every stage in float64, nothing rounded.
//!
//! It computes what `docs/model.md` says, not how `docs/arithmetic.md` rounds it, and judges the errors of
//! the other devices. Weights are dequantized to float64, at load while they are few and where they are used
//! beyond that; K/V and states are float64, whatever form was asked for. Faults travel as NaN as on other
//! devices. Sums have a fixed order, so a row has the same bits in any window, chunk or company here too;
//! other hosts may differ in the last bits, because exponentials come from the platform.

mod attention;
mod delta_rule;
mod draw;
mod linear;
mod memory;
mod moe;
mod parallel;
mod rows;
#[cfg(test)]
mod tests;
mod vision;

use quant::Matrix;

use crate::{
    Activation, AttentionShape, Between, Buffer, DeltaShape, DeltaState, Device, DeviceError, Draw, Drawn,
    ExpertsRef, KvPool, KvShape, MatrixRef, Memory, Picks, Pixels, Rotary, StatePool, Step, VectorRef,
    cpu::Isa,
};
use linear::Weights;
use memory::{ActivationRows, Experts, KvPages, PickRows, RotaryTable, StatePlaces};

type Result<T = ()> = std::result::Result<T, DeviceError>;

/// Magnitudes from here on are faults where other devices quantize (`docs/arithmetic.md`, rule 4).
const MAGNITUDE_MAX: f64 = quant::MAGNITUDE_MAX as f64;

/// The float64 device.
pub struct Reference {
    threads: usize,
    isa: Isa,
    matrices: Vec<Weights>,
    wide_bytes: usize,
    experts: Vec<Experts>,
    vectors: Vec<Vec<f64>>,
    rotaries: Vec<RotaryTable>,
    buffers: Vec<ActivationRows>,
    picks: Vec<PickRows>,
    kv: Vec<KvPages>,
    states: Vec<StatePlaces>,
    step: Step,
}

impl Reference {
    /// An empty device that works with up to `threads` threads (at least one); results do not depend on how
    /// many.
    pub fn new(threads: usize) -> Self {
        Self {
            threads: threads.max(1),
            isa: Isa::detect(),
            matrices: Vec::new(),
            wide_bytes: 0,
            experts: Vec::new(),
            vectors: Vec::new(),
            rotaries: Vec::new(),
            buffers: Vec::new(),
            picks: Vec::new(),
            kv: Vec::new(),
            states: Vec::new(),
            step: Step::new(Vec::new(), Vec::new()).expect("no rows in no windows fit"),
        }
    }
}

fn failed(stage: &'static str, message: impl Into<String>) -> DeviceError {
    DeviceError::Failed { stage, message: message.into() }
}

/// Refuses `found != expected` of `what`.
fn expect(stage: &'static str, what: &str, found: usize, expected: usize) -> Result {
    if found == expected {
        return Ok(());
    }
    Err(failed(stage, format!("{what} is {found}, {expected} expected")))
}

/// Refuses `found >= limit` of `what`.
fn below(stage: &'static str, what: &str, found: usize, limit: usize) -> Result {
    if found < limit {
        return Ok(());
    }
    Err(failed(stage, format!("{what} {found} does not exist, there are {limit}")))
}

impl Device for Reference {
    fn name(&self) -> String {
        format!("reference (float64, {} threads)", self.threads)
    }

    fn memory(&self) -> Memory {
        memory::held(self)
    }

    fn matrix(&mut self, source: &Matrix) -> Result<MatrixRef> {
        self.matrices.push(Weights::new("matrix", source, &mut self.wide_bytes)?);
        Ok(MatrixRef(memory::last(&self.matrices)))
    }

    fn experts(&mut self, gate: &[Matrix], up: &[Matrix], down: &[Matrix]) -> Result<ExpertsRef> {
        self.experts.push(Experts::new(gate, up, down, &mut self.wide_bytes)?);
        Ok(ExpertsRef(memory::last(&self.experts)))
    }

    fn vector(&mut self, values: &[f64]) -> Result<VectorRef> {
        self.vectors.push(values.to_vec());
        Ok(VectorRef(memory::last(&self.vectors)))
    }

    fn rotary(&mut self, cos: &[f64], sin: &[f64], axes: &[u8]) -> Result<Rotary> {
        self.rotaries.push(RotaryTable::new(cos, sin, axes)?);
        Ok(Rotary(memory::last(&self.rotaries)))
    }

    fn buffer(&mut self, rows_max: usize, width: usize) -> Result<Buffer> {
        self.buffers.push(ActivationRows::new(rows_max, width)?);
        Ok(Buffer(memory::last(&self.buffers)))
    }

    fn picks(&mut self, rows_max: usize, k: usize) -> Result<Picks> {
        self.picks.push(PickRows::new(rows_max, k)?);
        Ok(Picks(memory::last(&self.picks)))
    }

    fn kv_pool(&mut self, shape: KvShape) -> Result<KvPool> {
        self.kv.push(KvPages::new(shape));
        Ok(KvPool(memory::last(&self.kv)))
    }

    fn state_pool(&mut self, shape: DeltaShape, places: usize) -> Result<StatePool> {
        self.states.push(StatePlaces::new(shape, places)?);
        Ok(StatePool(memory::last(&self.states)))
    }

    fn write(&mut self, buffer: Buffer, row: usize, values: &[f64]) -> Result {
        let range = memory::row_range(self, "write", buffer, row, values.len())?;
        self.buffers[buffer.0 as usize].values[range].copy_from_slice(values);
        Ok(())
    }

    fn read(&mut self, buffer: Buffer, row: usize, out: &mut [f32]) -> Result {
        let range = memory::row_range(self, "read", buffer, row, out.len())?;
        for (out, &value) in out.iter_mut().zip(&self.buffers[buffer.0 as usize].values[range]) {
            *out = value as f32;
        }
        Ok(())
    }

    fn read_exact(&mut self, buffer: Buffer, row: usize, out: &mut [f64]) -> Result {
        let range = memory::row_range(self, "read_exact", buffer, row, out.len())?;
        out.copy_from_slice(&self.buffers[buffer.0 as usize].values[range]);
        Ok(())
    }

    fn read_picks(&mut self, picks: Picks, rows: usize) -> Result<(Vec<u32>, Vec<f64>)> {
        let picks = memory::picks(self, "read_picks", picks, rows)?;
        Ok((picks.ids[..rows * picks.k].to_vec(), picks.weights[..rows * picks.k].to_vec()))
    }

    fn state_clear(&mut self, pool: StatePool, place: u32) -> Result {
        delta_rule::state_clear(self, pool, place)
    }

    fn state_copy(&mut self, pool: StatePool, from: u32, to: u32) -> Result {
        delta_rule::state_copy(self, pool, from, to)
    }

    fn state_read(&mut self, pool: StatePool, place: u32) -> Result<DeltaState> {
        let place = memory::place(self, "state_read", pool, place)?;
        Ok(DeltaState { recurrent: place.recurrent.clone(), conv: place.conv.clone() })
    }

    fn state_write(&mut self, pool: StatePool, place: u32, state: &DeltaState) -> Result {
        delta_rule::state_write(self, pool, place, state)
    }

    fn state_keep(&mut self, pool: StatePool, place: u32, rows: &[usize]) -> Result {
        delta_rule::state_keep(self, pool, place, rows)
    }

    fn kv_keep(&mut self, pool: KvPool, pages: &[u32], start: usize, rows: &[usize]) -> Result {
        attention::kv_keep(self, pool, pages, start, rows)
    }

    fn kv_export(&mut self, pool: KvPool, page: u32) -> Result<Vec<u8>> {
        attention::kv_export(self, pool, page)
    }

    fn kv_import(&mut self, pool: KvPool, page: u32, bytes: &[u8]) -> Result {
        attention::kv_import(self, pool, page, bytes)
    }

    fn begin(&mut self, step: &Step) -> Result {
        self.step = step.clone();
        Ok(())
    }

    fn embed(&mut self, table: MatrixRef, out: Buffer) -> Result {
        rows::embed(self, table, out)
    }

    fn norm(&mut self, x: Buffer, rows: usize, weight: VectorRef, eps: f32, out: Buffer) -> Result {
        rows::norm(self, x, rows, weight, eps, out)
    }

    fn add_norm(
        &mut self,
        x: Buffer,
        delta: Buffer,
        rows: usize,
        weight: VectorRef,
        eps: f32,
        out: Buffer,
    ) -> Result {
        rows::add(self, x, delta, rows)?;
        rows::norm(self, x, rows, weight, eps, out)
    }

    fn linear(&mut self, x: Buffer, rows: usize, to: &[(MatrixRef, Buffer)]) -> Result {
        linear::linear(self, x, rows, to)
    }

    fn join(&mut self, a: Buffer, b: Buffer, rows: usize, out: Buffer) -> Result {
        rows::join(self, a, b, rows, out)
    }

    fn gather(&mut self, x: Buffer, from: &[usize], out: Buffer) -> Result {
        rows::gather(self, x, from, out)
    }

    fn copy_rows(&mut self, x: Buffer, from: &[usize], out: Buffer, to: &[usize]) -> Result {
        rows::copy_rows(self, x, from, out, to)
    }

    fn conv(&mut self, x: Buffer, taps: VectorRef, pool: StatePool, out: Buffer) -> Result {
        delta_rule::conv(self, x, taps, pool, out)
    }

    fn delta_rule(
        &mut self,
        mixed: Buffer,
        a: Buffer,
        b: Buffer,
        decay: VectorRef,
        dt_bias: VectorRef,
        pool: StatePool,
        out: Buffer,
    ) -> Result {
        delta_rule::delta_rule(self, mixed, a, b, decay, dt_bias, pool, out)
    }

    fn gated_norm(&mut self, x: Buffer, z: Buffer, rows: usize, weight: VectorRef, eps: f32) -> Result {
        rows::gated_norm(self, x, z, rows, weight, eps)
    }

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
    ) -> Result {
        attention::qk_norm_rope(self, qg, k, q_weight, k_weight, eps, rotary, shape, q)
    }

    fn kv_append(&mut self, k: Buffer, v: Buffer, pool: KvPool) -> Result {
        attention::kv_append(self, k, v, pool)
    }

    fn attention(&mut self, q: Buffer, shape: AttentionShape, pool: KvPool, out: Buffer) -> Result {
        attention::attention(self, q, shape, pool, out)
    }

    fn out_gate(&mut self, x: Buffer, qg: Buffer, rows: usize, shape: AttentionShape) -> Result {
        attention::out_gate(self, x, qg, rows, shape)
    }

    fn route(&mut self, logits: Buffer, rows: usize, picks: Picks) -> Result {
        moe::route(self, logits, rows, picks)
    }

    fn routed_experts(
        &mut self,
        x: Buffer,
        rows: usize,
        picks: Picks,
        experts: ExpertsRef,
        out: Buffer,
    ) -> Result {
        moe::routed_experts(self, x, rows, picks, experts, out)
    }

    fn swiglu(&mut self, gate: Buffer, up: Buffer, rows: usize, out: Buffer) -> Result {
        moe::swiglu(self, gate, up, rows, out)
    }

    fn combine(
        &mut self,
        routed: Buffer,
        picks: Picks,
        shared: Buffer,
        gate: Buffer,
        rows: usize,
        out: Buffer,
    ) -> Result {
        moe::combine(self, routed, picks, shared, gate, rows, out)
    }

    fn draw(&mut self, logits: Buffer, draws: &[Draw]) -> Result<Vec<Drawn>> {
        draws.iter().map(|draw| draw::draw(memory::row(self, "draw", logits, draw.row)?, draw)).collect()
    }

    fn patch_rows(&mut self, pixels: Pixels<'_>, to: Buffer, at: usize) -> Result {
        vision::patch_rows(self, pixels, to, at)
    }

    fn between_rows(&mut self, table: VectorRef, between: &[Between], to: Buffer, at: usize) -> Result {
        vision::between_rows(self, table, between, to, at)
    }

    fn copy_values(&mut self, from: Buffer, first: usize, rows: usize, to: Buffer, at: usize) -> Result {
        vision::copy_values(self, from, first, rows, to, at)
    }

    fn layer_norm(
        &mut self,
        x: Buffer,
        rows: usize,
        weight: VectorRef,
        bias: VectorRef,
        eps: f32,
        out: Buffer,
    ) -> Result {
        vision::layer_norm(self, x, rows, weight, bias, eps, out)
    }

    fn bias(&mut self, x: Buffer, rows: usize, bias: VectorRef, act: Activation) -> Result {
        vision::bias(self, x, rows, bias, act)
    }

    fn add_bias(&mut self, x: Buffer, delta: Buffer, rows: usize, bias: VectorRef) -> Result {
        vision::add_bias(self, x, delta, rows, bias)
    }

    fn rope_2d(
        &mut self,
        qkv: Buffer,
        bias: VectorRef,
        rotary: Rotary,
        shape: AttentionShape,
        q: Buffer,
        k: Buffer,
        v: Buffer,
    ) -> Result {
        vision::rope_2d(self, qkv, bias, rotary, shape, [q, k, v])
    }

    fn full_attention(
        &mut self,
        q: Buffer,
        shape: AttentionShape,
        pool: KvPool,
        keys: &[usize],
        out: Buffer,
    ) -> Result {
        vision::full_attention(self, q, shape, pool, keys, out)
    }
}
