//! A device around a device: it looks at calls as they pass, or breaks one of them on purpose.

use device::{
    AttentionShape, Buffer, DeltaShape, DeltaState, Device, DeviceError, Draw, Drawn, ExpertsRef, KvPool,
    KvShape, MatrixRef, Memory, Picks, Rotary, StatePool, Step, VectorRef,
};
use quant::Matrix;

pub(crate) type Result<T = ()> = std::result::Result<T, DeviceError>;

/// What happens at the calls that tests care about. By default, what the device does.
pub(crate) trait Hook: Send {
    fn matrix(&mut self, inner: &mut dyn Device, source: &Matrix) -> Result<MatrixRef> {
        inner.matrix(source)
    }
    fn experts(
        &mut self,
        inner: &mut dyn Device,
        gate: &[Matrix],
        up: &[Matrix],
        down: &[Matrix],
    ) -> Result<ExpertsRef> {
        inner.experts(gate, up, down)
    }
    fn state_copy(&mut self, inner: &mut dyn Device, pool: StatePool, from: u32, to: u32) -> Result {
        inner.state_copy(pool, from, to)
    }
    fn state_write(
        &mut self,
        inner: &mut dyn Device,
        pool: StatePool,
        place: u32,
        state: &DeltaState,
    ) -> Result {
        inner.state_write(pool, place, state)
    }
    fn state_keep(&mut self, inner: &mut dyn Device, pool: StatePool, place: u32, rows: &[usize]) -> Result {
        inner.state_keep(pool, place, rows)
    }
    fn kv_keep(
        &mut self,
        inner: &mut dyn Device,
        pool: KvPool,
        pages: &[u32],
        start: usize,
        rows: &[usize],
    ) -> Result {
        inner.kv_keep(pool, pages, start, rows)
    }
    fn begin(&mut self, inner: &mut dyn Device, step: &Step) -> Result {
        inner.begin(step)
    }
    fn linear(
        &mut self,
        inner: &mut dyn Device,
        x: Buffer,
        rows: usize,
        to: &[(MatrixRef, Buffer)],
    ) -> Result {
        inner.linear(x, rows, to)
    }
    fn kv_append(&mut self, inner: &mut dyn Device, k: Buffer, v: Buffer, pool: KvPool) -> Result {
        inner.kv_append(k, v, pool)
    }
    fn routed_experts(
        &mut self,
        inner: &mut dyn Device,
        x: Buffer,
        rows: usize,
        picks: Picks,
        experts: ExpertsRef,
        out: Buffer,
    ) -> Result {
        inner.routed_experts(x, rows, picks, experts, out)
    }
    fn draw(&mut self, inner: &mut dyn Device, logits: Buffer, draws: &[Draw]) -> Result<Vec<Drawn>> {
        inner.draw(logits, draws)
    }
}

/// The device inside, and what happens on the way to it.
pub(crate) struct Wrapped<H> {
    pub(crate) inner: Box<dyn Device>,
    pub(crate) hook: H,
}

/// Methods that only pass on.
macro_rules! pass {
    ($($name:ident(&$($mutability:ident)?; $($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {
        $(fn $name(&$($mutability)? self, $($arg: $ty),*) -> $ret {
            self.inner.$name($($arg),*)
        })*
    };
}

/// Methods that go through the hook.
macro_rules! hook {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {
        $(fn $name(&mut self, $($arg: $ty),*) -> $ret {
            self.hook.$name(&mut *self.inner, $($arg),*)
        })*
    };
}

impl<H: Hook> Device for Wrapped<H> {
    hook! {
        matrix(source: &Matrix) -> Result<MatrixRef>;
        experts(gate: &[Matrix], up: &[Matrix], down: &[Matrix]) -> Result<ExpertsRef>;
        state_copy(pool: StatePool, from: u32, to: u32) -> Result;
        state_write(pool: StatePool, place: u32, state: &DeltaState) -> Result;
        state_keep(pool: StatePool, place: u32, rows: &[usize]) -> Result;
        kv_keep(pool: KvPool, pages: &[u32], start: usize, rows: &[usize]) -> Result;
        begin(step: &Step) -> Result;
        linear(x: Buffer, rows: usize, to: &[(MatrixRef, Buffer)]) -> Result;
        kv_append(k: Buffer, v: Buffer, pool: KvPool) -> Result;
        routed_experts(x: Buffer, rows: usize, picks: Picks, experts: ExpertsRef, out: Buffer) -> Result;
        draw(logits: Buffer, draws: &[Draw]) -> Result<Vec<Drawn>>;
    }

    pass! {
        name(&;) -> String;
        memory(&;) -> Memory;
        vector(&mut; values: &[f64]) -> Result<VectorRef>;
        rotary(&mut; cos: &[f64], sin: &[f64], axes: &[u8]) -> Result<Rotary>;
        buffer(&mut; rows_max: usize, width: usize) -> Result<Buffer>;
        picks(&mut; rows_max: usize, k: usize) -> Result<Picks>;
        kv_pool(&mut; shape: KvShape) -> Result<KvPool>;
        state_pool(&mut; shape: DeltaShape, places: usize) -> Result<StatePool>;
        write(&mut; buffer: Buffer, row: usize, values: &[f64]) -> Result;
        read(&mut; buffer: Buffer, row: usize, out: &mut [f32]) -> Result;
        read_exact(&mut; buffer: Buffer, row: usize, out: &mut [f64]) -> Result;
        read_picks(&mut; picks: Picks, rows: usize) -> Result<(Vec<u32>, Vec<f64>)>;
        state_clear(&mut; pool: StatePool, place: u32) -> Result;
        state_read(&mut; pool: StatePool, place: u32) -> Result<DeltaState>;
        kv_export(&mut; pool: KvPool, page: u32) -> Result<Vec<u8>>;
        kv_import(&mut; pool: KvPool, page: u32, bytes: &[u8]) -> Result;
        embed(&mut; table: MatrixRef, out: Buffer) -> Result;
        norm(&mut; x: Buffer, rows: usize, weight: VectorRef, eps: f32, out: Buffer) -> Result;
        add_norm(
            &mut; x: Buffer, delta: Buffer, rows: usize, weight: VectorRef, eps: f32, out: Buffer
        ) -> Result;
        join(&mut; a: Buffer, b: Buffer, rows: usize, out: Buffer) -> Result;
        gather(&mut; x: Buffer, from: &[usize], out: Buffer) -> Result;
        copy_rows(&mut; x: Buffer, from: &[usize], out: Buffer, to: &[usize]) -> Result;
        conv(&mut; x: Buffer, taps: VectorRef, pool: StatePool, out: Buffer) -> Result;
        delta_rule(
            &mut; mixed: Buffer, a: Buffer, b: Buffer, decay: VectorRef, dt_bias: VectorRef, pool: StatePool,
            out: Buffer
        ) -> Result;
        gated_norm(&mut; x: Buffer, z: Buffer, rows: usize, weight: VectorRef, eps: f32) -> Result;
        qk_norm_rope(
            &mut; qg: Buffer, k: Buffer, q_weight: VectorRef, k_weight: VectorRef, eps: f32, rotary: Rotary,
            shape: AttentionShape, q: Buffer
        ) -> Result;
        attention(&mut; q: Buffer, shape: AttentionShape, pool: KvPool, out: Buffer) -> Result;
        out_gate(&mut; x: Buffer, qg: Buffer, rows: usize, shape: AttentionShape) -> Result;
        route(&mut; logits: Buffer, rows: usize, picks: Picks) -> Result;
        swiglu(&mut; gate: Buffer, up: Buffer, rows: usize, out: Buffer) -> Result;
        combine(
            &mut; routed: Buffer, picks: Picks, shared: Buffer, gate: Buffer, rows: usize, out: Buffer
        ) -> Result;
    }
}
