//! The stages of [`Cuda`]: each checks what the host knows and records its command.

use std::sync::Arc;

use quant::Matrix;

use super::driver::Result;
use super::experts::PackedExperts;
use super::kv::KvPages;
use super::linear::PackedMatrix;
use super::lower::{PickTable, Vector};
use super::memory::{DeviceMemory, Plane};
use super::rope::RotaryTable;
use super::state::States;
use super::{Command, Cuda};
use crate::{
    Activation, AttentionShape, Between, Buffer, DeltaShape, DeltaState, Device, DeviceError, Draw, Drawn,
    ExpertsRef, KvPool, KvShape, MatrixRef, Memory, PAGE_TOKENS, Picks, Pixels, Rotary, StatePool, Step,
    VectorRef, WINDOW_ROWS_MAX,
};

/// Longer host rows are copied by themselves instead of with the upload of a list.
const WRITE_BYTES_MAX: usize = 1 << 20;

fn failed<T>(stage: &'static str, message: String) -> Result<T> {
    Err(DeviceError::Failed { stage, message })
}

/// Adds to a table and names the place.
fn push<T>(table: &mut Vec<T>, value: T) -> u32 {
    table.push(value);
    table.len() as u32 - 1
}

fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&x| x as f32).collect()
}

impl Cuda {
    pub(super) fn record(&mut self, command: Command) -> Result {
        self.open_step()?.commands.push(command);
        Ok(())
    }

    /// Byte offset of `row`, if rows of `values` values from there on lie inside the buffer.
    pub(super) fn place(
        &self,
        stage: &'static str,
        buffer: Buffer,
        row: usize,
        values: usize,
    ) -> Result<usize> {
        let plane = &self.tables.planes[buffer.0 as usize];
        let at = row * plane.width;
        if at + values <= plane.rows_max * plane.width {
            return Ok(4 * at);
        }
        let (rows, width) = (plane.rows_max, plane.width);
        failed(stage, format!("{values} values from row {row} of a buffer of {rows} rows of {width}"))
    }

    /// Values of a buffer's rows.
    pub(super) fn width(&self, buffer: Buffer) -> usize {
        self.tables.planes[buffer.0 as usize].width
    }

    /// Refuses a buffer of another width.
    pub(super) fn check_width(&self, stage: &'static str, buffer: Buffer, width: usize) -> Result {
        match self.width(buffer) {
            found if found == width => Ok(()),
            found => failed(stage, format!("rows of {found}, {width} expected")),
        }
    }

    /// Refuses more rows than a buffer has.
    pub(super) fn check_rows(&self, stage: &'static str, rows: usize, buffers: &[Buffer]) -> Result {
        for buffer in buffers {
            let plane = &self.tables.planes[buffer.0 as usize];
            if rows > plane.rows_max {
                return failed(stage, format!("{rows} rows of a buffer of {}", plane.rows_max));
            }
        }
        Ok(())
    }

    fn check_place(&self, stage: &'static str, pool: StatePool, place: u32) -> Result<usize> {
        let places = self.kept[pool.0 as usize].len();
        let at = place as usize;
        if at < places { Ok(at) } else { failed(stage, format!("place {place} of {places}")) }
    }

    /// Refuses a step whose places the pool does not have.
    fn check_places(&self, stage: &'static str, pool: StatePool) -> Result {
        self.reach.place.map_or(Ok(()), |place| self.check_place(stage, pool, place).map(drop))
    }

    fn check_pages(&self, stage: &'static str, pool: KvPool, pages: &[u32]) -> Result {
        let held = self.pages[pool.0 as usize];
        match pages.iter().find(|&&page| page as usize >= held) {
            Some(page) => failed(stage, format!("page {page} of {held}")),
            None => Ok(()),
        }
    }

    /// Refuses a step whose pages the pool does not have.
    pub(super) fn check_step_pages(&self, stage: &'static str, pool: KvPool) -> Result {
        self.check_pages(stage, pool, self.reach.page.as_slice())
    }

    /// Words of a command in the upload; flushes first where they do not fit.
    pub(super) fn words(&mut self, words: &[u32]) -> Result<super::memory::Span> {
        self.make_room(4 * words.len())?;
        Ok(self.upload.push_words(words))
    }

    /// Bytes of the next command, in parts that follow one another.
    pub(super) fn bytes(&mut self, parts: &[&[u8]]) -> Result<super::memory::Span> {
        let bytes = parts.concat();
        self.make_room(bytes.len())?;
        Ok(self.upload.push(&bytes))
    }

    /// Makes room for bytes of the next command.
    pub(super) fn make_room(&mut self, bytes: usize) -> Result {
        if !self.upload.has_room(bytes) {
            self.flush()?;
        }
        self.open_step().map(drop)
    }
}

impl Device for Cuda {
    fn name(&self) -> String {
        let facts = self.driver.facts();
        let sums = if self.tables.plain_sums { ", plain sums" } else { "" };
        format!("cuda:{} ({}, {} multiprocessors{sums})", self.ordinal, facts.name, facts.processors)
    }

    fn memory(&self) -> Memory {
        let t = &self.tables;
        let sum = |bytes: &mut dyn Iterator<Item = usize>| bytes.sum::<usize>() as u64;
        let picks = |p: &PickTable| p.ids.bytes() + p.weights.bytes();
        Memory {
            weights: sum(&mut t.matrices.iter().map(|m| m.bytes()))
                + sum(&mut t.experts.iter().map(|e| e.bytes()))
                + sum(&mut t.vectors.iter().map(|v| v.values.bytes()))
                + sum(&mut t.rotaries.iter().map(|r| r.bytes())),
            kv: sum(&mut t.kv.iter().map(|kv| kv.bytes())),
            states: sum(&mut t.states.iter().map(|s| s.bytes())),
            scratch: sum(&mut t.planes.iter().map(Plane::bytes))
                + sum(&mut t.picks.iter().map(picks))
                + (t.scratch_bytes() + self.area.bytes()) as u64,
        }
    }

    fn matrix(&mut self, source: &Matrix) -> Result<MatrixRef> {
        let packed = PackedMatrix::new(&self.driver, source)?;
        Ok(MatrixRef(push(&mut self.tables.matrices, Arc::new(packed))))
    }

    fn experts(&mut self, gate: &[Matrix], up: &[Matrix], down: &[Matrix]) -> Result<ExpertsRef> {
        let packed = PackedExperts::new(&self.driver, gate, up, down)?;
        Ok(ExpertsRef(push(&mut self.tables.experts, Arc::new(packed))))
    }

    fn vector(&mut self, values: &[f64]) -> Result<VectorRef> {
        let memory = DeviceMemory::of_f32(&self.driver, "vector", &narrow(values))?;
        let vector = Vector { values: memory, len: values.len() };
        Ok(VectorRef(push(&mut self.tables.vectors, vector)))
    }

    fn rotary(&mut self, cos: &[f64], sin: &[f64], axes: &[u8]) -> Result<Rotary> {
        let whole = cos.len() == sin.len() && (axes.is_empty() || cos.len().is_multiple_of(axes.len()));
        if !whole || axes.iter().any(|&axis| axis > 2) {
            let message = format!("{} cosines, {} sines, axes {axes:?}", cos.len(), sin.len());
            return failed("rotary", message);
        }
        let table = RotaryTable::new(&self.driver, &narrow(cos), &narrow(sin), axes)?;
        Ok(Rotary(push(&mut self.tables.rotaries, Arc::new(table))))
    }

    fn buffer(&mut self, rows_max: usize, width: usize) -> Result<Buffer> {
        let plane = Plane::new(&self.driver, rows_max, width)?;
        Ok(Buffer(push(&mut self.tables.planes, plane)))
    }

    fn picks(&mut self, rows_max: usize, k: usize) -> Result<Picks> {
        let zeros = || {
            let bytes = rows_max.saturating_mul(k).saturating_mul(4);
            DeviceMemory::zeros(&self.driver, "picks", bytes)
        };
        let table = PickTable { k, rows_max, ids: zeros()?, weights: zeros()? };
        Ok(Picks(push(&mut self.tables.picks, table)))
    }

    fn kv_pool(&mut self, shape: KvShape) -> Result<KvPool> {
        let pages = KvPages::new(&self.driver, shape)?;
        self.pages.push(shape.pages);
        Ok(KvPool(push(&mut self.tables.kv, Arc::new(pages))))
    }

    fn state_pool(&mut self, shape: DeltaShape, places: usize) -> Result<StatePool> {
        let states = States::new(&self.driver, shape, places)?;
        self.kept.push(vec![0; places]);
        Ok(StatePool(push(&mut self.tables.states, Arc::new(states))))
    }

    fn write(&mut self, buffer: Buffer, row: usize, values: &[f64]) -> Result {
        let at = self.place("write", buffer, row, values.len())?;
        let mut bytes = vec![0; 4 * values.len()];
        for (to, &from) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(values) {
            *to = (from as f32).to_le_bytes();
        }
        if bytes.len() > WRITE_BYTES_MAX {
            self.flush()?;
            return self.tables.planes[buffer.0 as usize].values.upload(at, &bytes);
        }
        self.make_room(bytes.len())?;
        let values = self.upload.push(&bytes);
        self.record(Command::Write { buffer, row, values })
    }

    fn read(&mut self, buffer: Buffer, row: usize, out: &mut [f32]) -> Result {
        let at = self.place("read", buffer, row, out.len())?;
        self.flush()?;
        self.tables.planes[buffer.0 as usize].values.download_f32(at / 4, out)
    }

    fn read_exact(&mut self, buffer: Buffer, row: usize, out: &mut [f64]) -> Result {
        let mut values = vec![0f32; out.len()];
        self.read(buffer, row, &mut values)?;
        for (to, from) in out.iter_mut().zip(values) {
            *to = from as f64;
        }
        Ok(())
    }

    fn read_picks(&mut self, picks: Picks, rows: usize) -> Result<(Vec<u32>, Vec<f64>)> {
        self.flush()?;
        let table = &self.tables.picks[picks.0 as usize];
        if rows > table.rows_max {
            return failed("read_picks", format!("{rows} rows of {}", table.rows_max));
        }
        let (mut ids, mut weights) = (vec![0f32; rows * table.k], vec![0f32; rows * table.k]);
        table.ids.download_f32(0, &mut ids)?;
        table.weights.download_f32(0, &mut weights)?;
        let ids = ids.into_iter().map(f32::to_bits).collect();
        Ok((ids, weights.into_iter().map(f64::from).collect()))
    }

    fn state_clear(&mut self, pool: StatePool, place: u32) -> Result {
        let at = self.check_place("state_clear", pool, place)?;
        self.kept[pool.0 as usize][at] = 0;
        self.record(Command::StateClear { pool, place })
    }

    fn state_copy(&mut self, pool: StatePool, from: u32, to: u32) -> Result {
        self.check_place("state_copy", pool, from)?;
        let at = self.check_place("state_copy", pool, to)?;
        self.kept[pool.0 as usize][at] = 0;
        self.record(Command::StateCopy { pool, from, to })
    }

    fn state_read(&mut self, pool: StatePool, place: u32) -> Result<DeltaState> {
        self.check_place("state_read", pool, place)?;
        self.flush()?;
        self.tables.states[pool.0 as usize].read(place)
    }

    fn state_write(&mut self, pool: StatePool, place: u32, state: &DeltaState) -> Result {
        let at = self.check_place("state_write", pool, place)?;
        self.flush()?;
        self.kept[pool.0 as usize][at] = 0;
        self.tables.states[pool.0 as usize].write(place, state)
    }

    fn state_keep(&mut self, pool: StatePool, place: u32, rows: &[usize]) -> Result {
        let at = self.check_place("state_keep", pool, place)?;
        let held = self.kept[pool.0 as usize][at];
        let ordered = rows.windows(2).all(|pair| pair[0] < pair[1]);
        if !ordered || rows.last().is_some_and(|&last| last >= held) {
            let message = format!("rows {rows:?} of place {place}, whose window has {held}; rows ascend");
            return failed("state_keep", message);
        }
        let mut words = vec![place, rows.len() as u32];
        words.extend(rows.iter().map(|&row| row as u32));
        words.resize(2 + WINDOW_ROWS_MAX, 0);
        let words = self.words(&words)?;
        self.kept[pool.0 as usize][at] = 0;
        self.record(Command::StateKeep { pool, words })
    }

    fn kv_keep(&mut self, pool: KvPool, pages: &[u32], start: usize, rows: &[usize]) -> Result {
        self.check_pages("kv_keep", pool, pages)?;
        let ordered = rows.windows(2).all(|pair| pair[0] < pair[1]);
        let end = rows.last().map_or(start, |last| start + last + 1);
        if !ordered || rows.len() > WINDOW_ROWS_MAX || end > pages.len() * PAGE_TOKENS {
            let message = format!("rows {rows:?} from place {start} of {} pages; rows ascend", pages.len());
            return failed("kv_keep", message);
        }
        let key =
            |place: usize| pages[place / PAGE_TOKENS] * PAGE_TOKENS as u32 + (place % PAGE_TOKENS) as u32;
        let mut words = vec![rows.len() as u32];
        for (to, &from) in rows.iter().enumerate() {
            words.extend([key(start + from), key(start + to)]);
        }
        words.resize(1 + 2 * WINDOW_ROWS_MAX, 0);
        let words = self.words(&words)?;
        self.record(Command::KvKeep { pool, words })
    }

    fn kv_export(&mut self, pool: KvPool, page: u32) -> Result<Vec<u8>> {
        self.check_pages("kv_export", pool, &[page])?;
        self.flush()?;
        self.tables.kv[pool.0 as usize].export(page)
    }

    fn kv_import(&mut self, pool: KvPool, page: u32, bytes: &[u8]) -> Result {
        self.check_pages("kv_import", pool, &[page])?;
        self.flush()?;
        self.tables.kv[pool.0 as usize].import(page, bytes)
    }

    fn begin(&mut self, step: &Step) -> Result {
        self.begin_step(step)
    }

    fn embed(&mut self, table: MatrixRef, out: Buffer) -> Result {
        let rows = self.tables.matrices[table.0 as usize].rows();
        let tokens = self.step.rows().iter().filter_map(|row| row.token);
        if let Some(token) = tokens.into_iter().find(|&token| token as usize >= rows) {
            return failed("embed", format!("token {token} of a table of {rows}"));
        }
        self.check_rows("embed", self.shape.rows, &[out])?;
        self.record(Command::Embed { table, out })
    }

    fn norm(&mut self, x: Buffer, rows: usize, weight: VectorRef, eps: f32, out: Buffer) -> Result {
        self.check_rows("norm", rows, &[x, out])?;
        self.record(Command::Norm { x, rows, weight, eps: eps.to_bits(), out })
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
        self.check_rows("add_norm", rows, &[x, delta, out])?;
        self.record(Command::AddNorm { x, delta, rows, weight, eps: eps.to_bits(), out })
    }

    fn linear(&mut self, x: Buffer, rows: usize, to: &[(MatrixRef, Buffer)]) -> Result {
        self.check_rows("linear", rows, &[x])?;
        to.iter().try_for_each(|(_, out)| self.check_rows("linear", rows, &[*out]))?;
        self.record(Command::Linear { x, rows, to: to.to_vec() })
    }

    fn join(&mut self, a: Buffer, b: Buffer, rows: usize, out: Buffer) -> Result {
        self.check_rows("join", rows, &[a, b, out])?;
        self.record(Command::Join { a, b, rows, out })
    }

    fn gather(&mut self, x: Buffer, from: &[usize], out: Buffer) -> Result {
        if from.is_empty() {
            return Ok(());
        }
        self.check_rows("gather", from.len(), &[out])?;
        from.iter().try_for_each(|&row| self.check_rows("gather", row + 1, &[x]))?;
        let words: Vec<u32> = from.iter().map(|&row| row as u32).collect();
        let span = self.words(&words)?;
        self.record(Command::Gather { x, rows: from.len(), from: span, out })
    }

    fn copy_rows(&mut self, x: Buffer, from: &[usize], out: Buffer, to: &[usize]) -> Result {
        if from.len() != to.len() || x == out {
            return failed("copy_rows", format!("{} rows to {} places", from.len(), to.len()));
        }
        from.iter().try_for_each(|&row| self.check_rows("copy_rows", row + 1, &[x]))?;
        to.iter().try_for_each(|&row| self.check_rows("copy_rows", row + 1, &[out]))?;
        if from.is_empty() {
            return Ok(());
        }
        let words: Vec<u32> = from.iter().chain(to).map(|&row| row as u32).collect();
        let words = self.words(&words)?;
        self.record(Command::CopyRows { x, rows: from.len(), words, out })
    }

    fn conv(&mut self, x: Buffer, taps: VectorRef, pool: StatePool, out: Buffer) -> Result {
        self.check_places("conv", pool)?;
        self.make_kept_room(pool)?;
        self.check_rows("conv", self.shape.rows, &[x, out])?;
        self.record(Command::Conv { x, taps, pool, out })
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
        self.check_places("delta_rule", pool)?;
        self.make_kept_room(pool)?;
        self.check_rows("delta_rule", self.shape.rows, &[mixed, a, b, out])?;
        let kept = &mut self.kept[pool.0 as usize];
        for window in self.step.windows() {
            kept[window.place as usize] = if window.commit { 0 } else { window.rows };
        }
        self.record(Command::DeltaRule { mixed, a, b, decay, dt_bias, pool, out })
    }

    fn gated_norm(&mut self, x: Buffer, z: Buffer, rows: usize, weight: VectorRef, eps: f32) -> Result {
        self.check_rows("gated_norm", rows, &[x, z])?;
        self.record(Command::GatedNorm { x, z, rows, weight, eps: eps.to_bits() })
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
        self.tables.rotaries[rotary.0 as usize].check("qk_norm_rope", self.reach.position)?;
        self.check_rows("qk_norm_rope", self.shape.rows, &[qg, k, q])?;
        let eps = eps.to_bits();
        self.record(Command::QkNormRope { qg, k, q_weight, k_weight, eps, rotary, shape, q })
    }

    fn kv_append(&mut self, k: Buffer, v: Buffer, pool: KvPool) -> Result {
        self.check_step_pages("kv_append", pool)?;
        self.check_rows("kv_append", self.shape.rows, &[k, v])?;
        self.record(Command::KvAppend { k, v, pool })
    }

    fn attention(&mut self, q: Buffer, shape: AttentionShape, pool: KvPool, out: Buffer) -> Result {
        self.check_step_pages("attention", pool)?;
        self.check_rows("attention", self.shape.rows, &[q, out])?;
        self.record(Command::Attention { q, shape, pool, out })
    }

    fn out_gate(&mut self, x: Buffer, qg: Buffer, rows: usize, shape: AttentionShape) -> Result {
        self.check_rows("out_gate", rows, &[x, qg])?;
        self.record(Command::OutGate { x, qg, rows, head_dim: shape.head_dim })
    }

    fn route(&mut self, logits: Buffer, rows: usize, picks: Picks) -> Result {
        self.check_rows("route", rows, &[logits])?;
        self.record(Command::Route { logits, rows, picks })
    }

    fn routed_experts(
        &mut self,
        x: Buffer,
        rows: usize,
        picks: Picks,
        experts: ExpertsRef,
        out: Buffer,
    ) -> Result {
        self.check_rows("routed_experts", rows, &[x])?;
        self.check_rows("routed_experts", rows * self.tables.picks[picks.0 as usize].k, &[out])?;
        self.record(Command::RoutedExperts { x, rows, picks, experts, out })
    }

    fn swiglu(&mut self, gate: Buffer, up: Buffer, rows: usize, out: Buffer) -> Result {
        self.check_rows("swiglu", rows, &[gate, up, out])?;
        self.record(Command::Swiglu { gate, up, rows, out })
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
        self.check_rows("combine", rows, &[shared, gate, out])?;
        self.check_rows("combine", rows * self.tables.picks[picks.0 as usize].k, &[routed])?;
        self.record(Command::Combine { routed, picks, shared, gate, rows, out })
    }

    fn draw(&mut self, logits: Buffer, draws: &[Draw]) -> Result<Vec<Drawn>> {
        self.forget_draws();
        self.draw_later(logits, draws)?;
        self.drawn()
    }

    fn draws_later(&self) -> bool {
        true
    }

    fn draw_later(&mut self, logits: Buffer, draws: &[Draw]) -> Result {
        self.queue_draws(logits, draws)
    }

    fn start(&mut self) -> Result {
        self.flush()
    }

    fn drawn(&mut self) -> Result<Vec<Drawn>> {
        self.take_drawn()
    }

    fn embed_drawn(&mut self, table: MatrixRef, from: &[usize], out: Buffer) -> Result {
        self.check_rows("embed_drawn", from.len(), &[out])?;
        let held = self.drawn_count();
        if let Some(draw) = from.iter().find(|&&draw| draw >= held) {
            return failed("embed_drawn", format!("draw {draw} of {held}"));
        }
        let words: Vec<u32> = from.iter().map(|&draw| draw as u32).collect();
        let draws = self.words(&words)?;
        self.record(Command::EmbedDrawn { table, rows: from.len(), draws, out })
    }

    fn patch_rows(&mut self, pixels: Pixels<'_>, to: Buffer, at: usize) -> Result {
        self.record_patch_rows(pixels, to, at)
    }

    fn between_rows(&mut self, table: VectorRef, between: &[Between], to: Buffer, at: usize) -> Result {
        self.record_between_rows(table, between, to, at)
    }

    fn copy_values(&mut self, from: Buffer, first: usize, rows: usize, to: Buffer, at: usize) -> Result {
        self.record_copy_values(from, first, rows, to, at)
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
        let stage = "layer_norm";
        self.check_rows(stage, rows, &[x, out])?;
        self.check_width(stage, out, self.width(x))?;
        self.check_vector(stage, weight, self.width(x))?;
        self.check_vector(stage, bias, self.width(x))?;
        self.record(Command::LayerNorm { x, rows, weight, bias, eps: eps.to_bits(), out })
    }

    fn bias(&mut self, x: Buffer, rows: usize, bias: VectorRef, act: Activation) -> Result {
        self.check_rows("bias", rows, &[x])?;
        self.check_vector("bias", bias, self.width(x))?;
        self.record(Command::Bias { x, rows, bias, act })
    }

    fn add_bias(&mut self, x: Buffer, delta: Buffer, rows: usize, bias: VectorRef) -> Result {
        self.check_rows("add_bias", rows, &[x, delta])?;
        self.check_width("add_bias", delta, self.width(x))?;
        self.check_vector("add_bias", bias, self.width(x))?;
        self.record(Command::AddBias { x, delta, rows, bias })
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
        self.record_rope_2d(qkv, bias, rotary, shape, [q, k, v])
    }

    fn full_attention(
        &mut self,
        q: Buffer,
        shape: AttentionShape,
        pool: KvPool,
        keys: &[usize],
        out: Buffer,
    ) -> Result {
        self.record_full_attention(q, shape, pool, keys, out)
    }
}
