//! The stages of [`Cpu`]: each finds its planes and tables and calls the module of its name.

use quant::Matrix;

use super::{
    Cpu, PickTable, attention, conv, delta_rule,
    experts::{PackedExperts, routed_experts},
    gates,
    kv::KvPages,
    linear::{PackedMatrix, linear},
    norm,
    rope::{self, HeadNorms, RotaryTable},
    route,
    state::States,
    vision, zeros,
};
use crate::{
    Activation, AttentionShape, Between, Buffer, DeltaShape, DeltaState, Device, DeviceError, Draw, Drawn,
    ExpertsRef, KvPool, KvShape, MatrixRef, Memory, Picks, Pixels, Rotary, StatePool, Step, VectorRef,
    step::check_keys,
};

type Result<T = ()> = std::result::Result<T, DeviceError>;

/// Adds to a table and names the place.
fn push<T>(table: &mut Vec<T>, value: T) -> u32 {
    table.push(value);
    table.len() as u32 - 1
}

fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&x| x as f32).collect()
}

impl Cpu {
    fn states(&mut self, pool: StatePool) -> &mut States {
        &mut self.states[pool.0 as usize]
    }

    /// Refuses a step whose places the pool does not have.
    fn check_places(&self, stage: &'static str, pool: StatePool) -> Result {
        let states = &self.states[pool.0 as usize];
        self.step.windows().iter().try_for_each(|window| states.check(stage, window.place).map(drop))
    }

    /// Refuses a step whose pages the pool does not have.
    fn check_pages(&self, stage: &'static str, pool: KvPool) -> Result {
        let pages = &self.kv[pool.0 as usize];
        self.step.windows().iter().try_for_each(|window| pages.check(stage, &window.pages))
    }
}

impl Device for Cpu {
    fn name(&self) -> String {
        let threads = self.workers.pool.threads();
        format!("cpu ({}, {threads} thread{})", self.workers.isa.name(), if threads == 1 { "" } else { "s" })
    }

    fn memory(&self) -> Memory {
        let floats = self.vectors.iter().map(Vec::len).sum::<usize>()
            + self.rotaries.iter().map(|table| table.cos.len() + table.sin.len()).sum::<usize>();
        let matrices = self.matrices.iter().map(PackedMatrix::bytes).sum::<usize>();
        let experts = self.experts.iter().map(PackedExperts::bytes).sum::<usize>();
        let picks = self.picks.iter().map(|picks| 2 * picks.ids.len()).sum::<usize>();
        Memory {
            weights: (4 * floats + matrices + experts) as u64,
            kv: self.kv.iter().map(KvPages::bytes).sum::<usize>() as u64,
            states: self.states.iter().map(States::bytes).sum::<usize>() as u64,
            scratch: (4 * (self.planes.len() + picks)
                + self.activations.bytes()
                + self.expert_scratch.bytes()
                + self.front.bytes()
                + self.queries.bytes()) as u64,
        }
    }

    fn matrix(&mut self, source: &Matrix) -> Result<MatrixRef> {
        let packed = PackedMatrix::new(&self.workers.pool, self.workers.isa, source);
        Ok(MatrixRef(push(&mut self.matrices, packed)))
    }

    fn experts(&mut self, gate: &[Matrix], up: &[Matrix], down: &[Matrix]) -> Result<ExpertsRef> {
        let packed = PackedExperts::new(&self.workers.pool, self.workers.isa, gate, up, down);
        Ok(ExpertsRef(push(&mut self.experts, packed)))
    }

    fn vector(&mut self, values: &[f64]) -> Result<VectorRef> {
        Ok(VectorRef(push(&mut self.vectors, narrow(values))))
    }

    fn rotary(&mut self, cos: &[f64], sin: &[f64], axes: &[u8]) -> Result<Rotary> {
        let whole = cos.len() == sin.len() && (axes.is_empty() || cos.len().is_multiple_of(axes.len()));
        if !whole || axes.iter().any(|&axis| axis > 2) {
            let message = format!("{} cosines, {} sines, axes {axes:?}", cos.len(), sin.len());
            return Err(DeviceError::Failed { stage: "rotary", message });
        }
        let table = RotaryTable { cos: narrow(cos), sin: narrow(sin), axes: axes.to_vec() };
        Ok(Rotary(push(&mut self.rotaries, table)))
    }

    fn buffer(&mut self, rows_max: usize, width: usize) -> Result<Buffer> {
        let values = zeros("buffer", rows_max.saturating_mul(width))?;
        Ok(self.planes.add(width, values))
    }

    fn picks(&mut self, rows_max: usize, k: usize) -> Result<Picks> {
        let count = rows_max.saturating_mul(k);
        let table = PickTable { k, ids: zeros("picks", count)?, weights: zeros("picks", count)? };
        Ok(Picks(push(&mut self.picks, table)))
    }

    fn kv_pool(&mut self, shape: KvShape) -> Result<KvPool> {
        Ok(KvPool(push(&mut self.kv, KvPages::new(shape)?)))
    }

    fn state_pool(&mut self, shape: DeltaShape, places: usize) -> Result<StatePool> {
        Ok(StatePool(push(&mut self.states, States::new(shape, places)?)))
    }

    fn write(&mut self, buffer: Buffer, row: usize, values: &[f64]) -> Result {
        let plane = self.planes.get_mut(buffer);
        let at = row * plane.width;
        for (to, &from) in plane.values[at..at + values.len()].iter_mut().zip(values) {
            *to = from as f32;
        }
        Ok(())
    }

    fn read(&mut self, buffer: Buffer, row: usize, out: &mut [f32]) -> Result {
        let plane = self.planes.get(buffer);
        out.copy_from_slice(&plane.values[row * plane.width..][..out.len()]);
        Ok(())
    }

    fn read_exact(&mut self, buffer: Buffer, row: usize, out: &mut [f64]) -> Result {
        let plane = self.planes.get(buffer);
        for (to, &from) in out.iter_mut().zip(&plane.values[row * plane.width..]) {
            *to = from as f64;
        }
        Ok(())
    }

    fn read_picks(&mut self, picks: Picks, rows: usize) -> Result<(Vec<u32>, Vec<f64>)> {
        let table = &self.picks[picks.0 as usize];
        let weights = table.weights[..rows * table.k].iter().map(|&w| w as f64).collect();
        Ok((table.ids[..rows * table.k].to_vec(), weights))
    }

    fn state_clear(&mut self, pool: StatePool, place: u32) -> Result {
        self.states(pool).clear(place)
    }

    fn state_copy(&mut self, pool: StatePool, from: u32, to: u32) -> Result {
        self.states(pool).copy(from, to)
    }

    fn state_read(&mut self, pool: StatePool, place: u32) -> Result<DeltaState> {
        self.states(pool).read(place)
    }

    fn state_write(&mut self, pool: StatePool, place: u32, state: &DeltaState) -> Result {
        self.states(pool).write(place, state)
    }

    fn state_keep(&mut self, pool: StatePool, place: u32, rows: &[usize]) -> Result {
        let states = &mut self.states[pool.0 as usize];
        let place = states.check_keep(place, rows)?;
        conv::keep(states, place, rows);
        delta_rule::keep(&self.workers, states, place, rows);
        states.kept[place].rows = 0;
        Ok(())
    }

    fn kv_keep(&mut self, pool: KvPool, pages: &[u32], start: usize, rows: &[usize]) -> Result {
        let kv = &mut self.kv[pool.0 as usize];
        kv.check("kv_keep", pages)?;
        kv.keep(pages, start, rows)
    }

    fn kv_export(&mut self, pool: KvPool, page: u32) -> Result<Vec<u8>> {
        let kv = &self.kv[pool.0 as usize];
        kv.check("kv_export", &[page])?;
        Ok(kv.export(page))
    }

    fn kv_import(&mut self, pool: KvPool, page: u32, bytes: &[u8]) -> Result {
        let kv = &mut self.kv[pool.0 as usize];
        kv.check("kv_import", &[page])?;
        kv.import(page, bytes)
    }

    fn begin(&mut self, step: &Step) -> Result {
        self.step.clone_from(step);
        Ok(())
    }

    fn embed(&mut self, table: MatrixRef, out: Buffer) -> Result {
        let table = &self.matrices[table.0 as usize];
        let rows = self.step.rows();
        let outside = |token: &u32| *token as usize >= table.rows();
        if let Some(token) = rows.iter().filter_map(|row| row.token).find(outside) {
            let message = format!("token {token} of a table of {}", table.rows());
            return Err(DeviceError::Failed { stage: "embed", message });
        }
        let out = self.planes.get_mut(out);
        let width = out.width;
        self.workers.rows(out.rows_mut(rows.len()), width, &|first, out| {
            for (row, out) in rows[first..].iter().zip(out.chunks_exact_mut(width)) {
                if let Some(token) = row.token {
                    table.embed_row(token as usize, out);
                }
            }
        });
        Ok(())
    }

    fn norm(&mut self, x: Buffer, rows: usize, weight: VectorRef, eps: f32, out: Buffer) -> Result {
        let weight = &self.vectors[weight.0 as usize];
        self.planes.with(out, |out, planes| {
            norm::norm(&self.workers, planes.rows(x, rows), weight, eps, out.rows_mut(rows));
        });
        Ok(())
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
        let mut sum = self.planes.take(x);
        self.planes.with(out, |out, planes| {
            let (delta, weight) = (planes.rows(delta, rows), &self.vectors[weight.0 as usize]);
            norm::add_norm(&self.workers, sum.rows_mut(rows), delta, weight, eps, out.rows_mut(rows));
        });
        self.planes.put(x, sum);
        Ok(())
    }

    fn linear(&mut self, x: Buffer, rows: usize, to: &[(MatrixRef, Buffer)]) -> Result {
        let mut outs: Vec<_> = to.iter().map(|&(_, out)| self.planes.take(out)).collect();
        let mut pairs: Vec<_> = to
            .iter()
            .zip(&mut outs)
            .map(|((matrix, _), out)| (&self.matrices[matrix.0 as usize], out.rows_mut(rows)))
            .collect();
        let (pool, isa) = (&self.workers.pool, self.workers.isa);
        linear(pool, isa, self.planes.rows(x, rows), rows, &mut pairs, &mut self.activations);
        for (&(_, buffer), plane) in to.iter().zip(outs) {
            self.planes.put(buffer, plane);
        }
        Ok(())
    }

    fn join(&mut self, a: Buffer, b: Buffer, rows: usize, out: Buffer) -> Result {
        self.planes.with(out, |out, planes| {
            let (a, b) = (planes.get(a), planes.get(b));
            let halves = a.rows(rows).chunks_exact(a.width).zip(b.rows(rows).chunks_exact(b.width));
            let width = out.width;
            for (out, (x, y)) in out.rows_mut(rows).chunks_exact_mut(width).zip(halves) {
                out[..a.width].copy_from_slice(x);
                out[a.width..].copy_from_slice(y);
            }
        });
        Ok(())
    }

    fn gather(&mut self, x: Buffer, from: &[usize], out: Buffer) -> Result {
        self.planes.with(out, |out, planes| {
            let (x, width) = (planes.get(x), out.width);
            for (out, &row) in out.rows_mut(from.len()).chunks_exact_mut(width).zip(from) {
                out.copy_from_slice(&x.values[row * width..][..width]);
            }
        });
        Ok(())
    }

    fn copy_rows(&mut self, x: Buffer, from: &[usize], out: Buffer, to: &[usize]) -> Result {
        assert_eq!(from.len(), to.len(), "every row copied has its place");
        self.planes.with(out, |out, planes| {
            let (x, width) = (planes.get(x), out.width);
            for (&row, &to) in from.iter().zip(to) {
                out.values[to * width..][..width].copy_from_slice(&x.values[row * width..][..width]);
            }
        });
        Ok(())
    }

    fn conv(&mut self, x: Buffer, taps: VectorRef, pool: StatePool, out: Buffer) -> Result {
        self.check_places("conv", pool)?;
        let rows = self.step.rows().len();
        let states = &mut self.states[pool.0 as usize];
        self.planes.with(out, |out, planes| {
            let values = &self.vectors[taps.0 as usize];
            let x = planes.rows(x, rows);
            conv::conv(&self.workers, &self.step, x, taps, values, states, out.rows_mut(rows));
        });
        Ok(())
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
        let rows = self.step.rows().len();
        let states = &mut self.states[pool.0 as usize];
        self.planes.with(out, |out, planes| {
            let inputs = delta_rule::Inputs {
                mixed: planes.rows(mixed, rows),
                a: planes.rows(a, rows),
                b: planes.rows(b, rows),
                decay: &self.vectors[decay.0 as usize],
                dt_bias: &self.vectors[dt_bias.0 as usize],
            };
            let out = out.rows_mut(rows);
            delta_rule::delta_rule(&self.workers, &self.step, &inputs, states, &mut self.front, out);
        });
        Ok(())
    }

    fn gated_norm(&mut self, x: Buffer, z: Buffer, rows: usize, weight: VectorRef, eps: f32) -> Result {
        self.planes.with(x, |x, planes| {
            let (z, width) = (planes.rows(z, rows), x.width);
            let weight = &self.vectors[weight.0 as usize];
            gates::gated_norm(&self.workers, x.rows_mut(rows), width, z, weight, eps);
        });
        Ok(())
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
        let rows = self.step.rows();
        let mut keys = self.planes.take(k);
        let result = self.planes.with(q, |q, planes| {
            let norms = HeadNorms {
                q_weight: &self.vectors[q_weight.0 as usize],
                k_weight: &self.vectors[k_weight.0 as usize],
                eps,
                shape,
            };
            rope::qk_norm_rope(
                &self.workers,
                rows,
                planes.rows(qg, rows.len()),
                keys.rows_mut(rows.len()),
                q.rows_mut(rows.len()),
                &norms,
                &self.rotaries[rotary.0 as usize],
                &mut self.angles,
            )
        });
        self.planes.put(k, keys);
        result
    }

    fn kv_append(&mut self, k: Buffer, v: Buffer, pool: KvPool) -> Result {
        self.check_pages("kv_append", pool)?;
        let rows = self.step.rows().len();
        let (k, v) = (self.planes.rows(k, rows), self.planes.rows(v, rows));
        self.kv[pool.0 as usize].append(&self.workers, &self.step, k, v);
        Ok(())
    }

    fn attention(&mut self, q: Buffer, shape: AttentionShape, pool: KvPool, out: Buffer) -> Result {
        self.check_pages("attention", pool)?;
        let rows = self.step.rows().len();
        self.planes.with(out, |out, planes| {
            let (q, kv) = (planes.rows(q, rows), &self.kv[pool.0 as usize]);
            let queries = &mut self.queries;
            let out = out.rows_mut(rows);
            attention::attention(&self.workers, &self.step, q, shape, kv, None, queries, out);
        });
        Ok(())
    }

    fn out_gate(&mut self, x: Buffer, qg: Buffer, rows: usize, shape: AttentionShape) -> Result {
        self.planes.with(x, |x, planes| {
            let (qg, width) = (planes.rows(qg, rows), x.width);
            gates::out_gate(&self.workers, x.rows_mut(rows), width, qg, shape.head_dim);
        });
        Ok(())
    }

    fn route(&mut self, logits: Buffer, rows: usize, picks: Picks) -> Result {
        let logits = self.planes.get(logits);
        let table = &mut self.picks[picks.0 as usize];
        route::route(&self.workers, logits.rows(rows), logits.width, table, &mut self.router_keys);
        Ok(())
    }

    fn routed_experts(
        &mut self,
        x: Buffer,
        rows: usize,
        picks: Picks,
        experts: ExpertsRef,
        out: Buffer,
    ) -> Result {
        let (picks, experts) = (&self.picks[picks.0 as usize], &self.experts[experts.0 as usize]);
        self.planes.with(out, |out, planes| {
            routed_experts(
                &self.workers.pool,
                self.workers.isa,
                planes.rows(x, rows),
                rows,
                &picks.ids[..rows * picks.k],
                picks.k,
                experts,
                out.rows_mut(rows * picks.k),
                &mut self.expert_scratch,
            );
        });
        Ok(())
    }

    fn swiglu(&mut self, gate: Buffer, up: Buffer, rows: usize, out: Buffer) -> Result {
        self.planes.with(out, |out, planes| {
            let (gate, up, width) = (planes.rows(gate, rows), planes.rows(up, rows), out.width);
            gates::swiglu(&self.workers, gate, up, width, out.rows_mut(rows));
        });
        Ok(())
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
        let picks = &self.picks[picks.0 as usize];
        self.planes.with(out, |out, planes| {
            let (routed, shared) = (planes.rows(routed, rows * picks.k), planes.rows(shared, rows));
            let (gate, width) = (planes.rows(gate, rows), out.width);
            route::combine(&self.workers, routed, picks, shared, gate, width, out.rows_mut(rows));
        });
        Ok(())
    }

    fn draw(&mut self, logits: Buffer, draws: &[Draw]) -> Result<Vec<Drawn>> {
        self.later.clear();
        self.draw_rows(logits, draws)
    }

    fn draws_later(&self) -> bool {
        true
    }

    fn draw_later(&mut self, logits: Buffer, draws: &[Draw]) -> Result {
        let drawn = self.draw_rows(logits, draws)?;
        self.drawn_tokens = drawn.iter().map(|drawn| drawn.token.unwrap_or(0)).collect();
        self.later.extend(drawn);
        Ok(())
    }

    fn drawn(&mut self) -> Result<Vec<Drawn>> {
        Ok(std::mem::take(&mut self.later))
    }

    fn embed_drawn(&mut self, table: MatrixRef, from: &[usize], out: Buffer) -> Result {
        let (table, held) = (&self.matrices[table.0 as usize], self.drawn_tokens.len());
        if let Some(draw) = from.iter().find(|&&draw| draw >= held) {
            let message = format!("draw {draw} of {held}");
            return Err(DeviceError::Failed { stage: "embed_drawn", message });
        }
        let out = self.planes.get_mut(out);
        let width = out.width;
        for (&draw, out) in from.iter().zip(out.rows_mut(from.len()).chunks_exact_mut(width)) {
            table.embed_row(self.drawn_tokens[draw] as usize, out);
        }
        Ok(())
    }

    fn patch_rows(&mut self, pixels: Pixels<'_>, to: Buffer, at: usize) -> Result {
        let to = self.planes.get_mut(to);
        let [rows, area] = pixels.layout("patch_rows", to.width)?;
        let out = to.span("patch_rows", at, rows)?;
        vision::patch_rows(&self.workers, pixels, area, out);
        Ok(())
    }

    fn between_rows(&mut self, table: VectorRef, between: &[Between], to: Buffer, at: usize) -> Result {
        let (table, to) = (&self.vectors[table.0 as usize], self.planes.get_mut(to));
        Between::check("between_rows", between, table.len(), to.width)?;
        let (width, out) = (to.width, to.span("between_rows", at, between.len())?);
        vision::between_rows(&self.workers, table, between, width, out);
        Ok(())
    }

    fn copy_values(&mut self, from: Buffer, first: usize, rows: usize, to: Buffer, at: usize) -> Result {
        self.planes.copy_values(from, first, rows, to, at)
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
        let (weight, bias) = (&self.vectors[weight.0 as usize], &self.vectors[bias.0 as usize]);
        self.planes.with(out, |out, planes| {
            let x = planes.rows(x, rows);
            vision::layer_norm(&self.workers, x, weight, bias, eps, out.rows_mut(rows));
        });
        Ok(())
    }

    fn bias(&mut self, x: Buffer, rows: usize, bias: VectorRef, act: Activation) -> Result {
        let x = self.planes.get_mut(x).rows_mut(rows);
        vision::bias(&self.workers, x, &self.vectors[bias.0 as usize], act);
        Ok(())
    }

    fn add_bias(&mut self, x: Buffer, delta: Buffer, rows: usize, bias: VectorRef) -> Result {
        let bias = &self.vectors[bias.0 as usize];
        self.planes.with(x, |x, planes| {
            vision::add_bias(&self.workers, x.rows_mut(rows), planes.rows(delta, rows), bias);
        });
        Ok(())
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
        let rows = self.step.rows();
        let mut out = [q, k, v].map(|buffer| self.planes.take(buffer));
        let result = vision::rope_2d(
            &self.workers,
            rows,
            self.planes.rows(qkv, rows.len()),
            &self.vectors[bias.0 as usize],
            shape,
            &self.rotaries[rotary.0 as usize],
            &mut self.angles,
            out.each_mut(),
        );
        for (buffer, plane) in [q, k, v].into_iter().zip(out) {
            self.planes.put(buffer, plane);
        }
        result
    }

    fn full_attention(
        &mut self,
        q: Buffer,
        shape: AttentionShape,
        pool: KvPool,
        keys: &[usize],
        out: Buffer,
    ) -> Result {
        let stage = "full_attention";
        self.check_pages(stage, pool)?;
        check_keys(stage, &self.step, keys)?;
        let rows = self.step.rows().len();
        self.planes.with(out, |out, planes| {
            let (q, kv, out) = (planes.rows(q, rows), &self.kv[pool.0 as usize], out.rows_mut(rows));
            let queries = &mut self.queries;
            attention::attention(&self.workers, &self.step, q, shape, kv, Some(keys), queries, out);
        });
        Ok(())
    }
}
