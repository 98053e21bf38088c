//! Commands to launches. A stage's file has a `lower` function that reads handles from [`Lowering`] and
//! pushes launches; nothing here runs anything.

use std::collections::HashMap;
use std::sync::Arc;

use super::command::Command;
use super::driver::{Driver, Facts, Result};
use super::experts::{self, PackedExperts};
use super::kv::{self, KvPages};
use super::launch::{Args, Kernel, Launch};
use super::linear::{self, PackedMatrix};
use super::memory::{Codes, DeviceMemory, Plane, Span, StepAddresses, StepShape};
use super::rope::{self, RotaryTable};
use super::state::{self, States};
use super::warpgroup::Aligned;
use super::{attention, conv, delta_rule, delta_step, draw, rows, vision};
use crate::{Buffer, ExpertsRef, KvPool, MatrixRef, Picks, Rotary, StatePool, VectorRef};

/// A constant vector of f32.
pub(super) struct Vector {
    pub(super) values: DeviceMemory,
    pub(super) len: usize,
}

/// Router picks: ids u32 and weights f32, `[rows_max, k]`.
pub(super) struct PickTable {
    pub(super) k: usize,
    pub(super) rows_max: usize,
    pub(super) ids: DeviceMemory,
    pub(super) weights: DeviceMemory,
}

/// What handles stand for.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) planes: Vec<Plane>,
    pub(super) matrices: Vec<Arc<PackedMatrix>>,
    pub(super) experts: Vec<Arc<PackedExperts>>,
    pub(super) vectors: Vec<Vector>,
    pub(super) rotaries: Vec<Arc<RotaryTable>>,
    pub(super) picks: Vec<PickTable>,
    pub(super) kv: Vec<Arc<KvPages>>,
    pub(super) states: Vec<Arc<States>>,
    /// Whether grouped products are summed without matrix instructions.
    pub(super) plain_sums: bool,
    /// Tokens of the last draws, where there were any.
    pub(super) drawn: Option<DeviceMemory>,
    /// By name, and the plane it belongs to, if any.
    scratch: HashMap<(&'static str, Option<Buffer>), DeviceMemory>,
    /// Scratch that grew: recorded launches may still name the old addresses.
    outgrown: Vec<DeviceMemory>,
}

impl Tables {
    /// Nothing yet.
    pub(super) fn new(plain_sums: bool) -> Self {
        Self { plain_sums, ..Self::default() }
    }

    /// Bytes of scratch.
    pub(super) fn scratch_bytes(&self) -> usize {
        self.scratch.values().chain(&self.outgrown).map(DeviceMemory::bytes).sum()
    }

    /// Did scratch move? Recorded launches name the old place, which lives until [`Self::forget_moved`].
    pub(super) fn moved(&self) -> bool {
        !self.outgrown.is_empty()
    }

    /// Frees scratch that moved. No launch may name it any more.
    pub(super) fn forget_moved(&mut self) {
        self.outgrown.clear();
    }
}

/// A plane as kernels see it: f32 `[rows_max, width]` at `ptr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlaneRef {
    pub(super) ptr: u64,
    pub(super) width: usize,
    pub(super) rows_max: usize,
}

/// Aligned codes of a plane's first rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct AlignedPlane {
    pub(super) rows: usize,
    pub(super) group: usize,
    pub(super) codes: Aligned,
}

/// How a plane is read before it is overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Demand {
    /// As values, or as codes that have to be made of them.
    pub(super) values: bool,
    /// As codes of this group length.
    pub(super) group: Option<usize>,
    /// These aligned only.
    pub(super) aligned: bool,
}

/// Where a stage's `lower` puts its launches.
pub(super) struct Lowering<'a> {
    driver: &'a Arc<dyn Driver>,
    tables: &'a mut Tables,
    shape: StepShape,
    step: StepAddresses,
    /// Address of the upload that spans count from.
    base: u64,
    launches: Vec<Launch>,
    /// Rows of which code shadows hold what their planes hold, by plane and group length.
    fresh: HashMap<(Buffer, usize), usize>,
    /// Aligned rows that hold what planes hold.
    aligned: HashMap<Buffer, AlignedPlane>,
    /// The plane whose query digits are in scratch ([`rope::digits`]).
    digits_of: Option<Buffer>,
}

impl<'a> Lowering<'a> {
    pub(super) fn new(
        driver: &'a Arc<dyn Driver>,
        tables: &'a mut Tables,
        shape: StepShape,
        step: StepAddresses,
        base: u64,
    ) -> Self {
        Self {
            driver,
            tables,
            shape,
            step,
            base,
            launches: Vec::new(),
            fresh: HashMap::new(),
            aligned: HashMap::new(),
            digits_of: None,
        }
    }

    /// All launches of the list.
    pub(super) fn finish(self) -> Vec<Launch> {
        self.launches
    }

    /// The card.
    pub(super) fn driver(&self) -> &Arc<dyn Driver> {
        self.driver
    }

    /// What the card is.
    pub(super) fn facts(&self) -> &Facts {
        self.driver.facts()
    }

    /// Are grouped products summed without the matrix instruction?
    pub(super) fn plain_sums(&self) -> bool {
        self.tables.plain_sums
    }

    /// The step's sizes.
    pub(super) fn shape(&self) -> StepShape {
        self.shape
    }

    /// The step tables, for [`Args::step`].
    pub(super) fn step(&self) -> StepAddresses {
        self.step
    }

    /// Adds a launch.
    pub(super) fn push(&mut self, launch: Launch) {
        self.launches.push(launch);
    }

    /// Adds a launch without dynamic shared memory.
    pub(super) fn launch(&mut self, kernel: Kernel, grid: [usize; 3], block: u32, args: Args) {
        let grid = grid.map(|n| u32::try_from(n).expect("a grid below 2^32"));
        self.push(Launch { kernel, grid, block, shared: 0, args });
    }

    pub(super) fn plane(&self, buffer: Buffer) -> PlaneRef {
        let plane = &self.tables.planes[buffer.0 as usize];
        PlaneRef { ptr: plane.values.ptr(), width: plane.width, rows_max: plane.rows_max }
    }

    /// Says that a launch writes the plane: its code shadows are stale from here on.
    pub(super) fn written(&mut self, buffer: Buffer) {
        self.fresh.retain(|(of, _), _| *of != buffer);
        self.aligned.remove(&buffer);
        self.digits_of = self.digits_of.filter(|of| *of != buffer);
    }

    /// Says that the last launch left query digits of the plane in scratch.
    pub(super) fn digits_written(&mut self, buffer: Buffer) {
        self.digits_of = Some(buffer);
    }

    /// Are the query digits in scratch those of the plane?
    pub(super) fn has_digits(&self, buffer: Buffer) -> bool {
        self.digits_of == Some(buffer)
    }

    /// [`Self::plane`] of an output.
    pub(super) fn output(&mut self, buffer: Buffer) -> PlaneRef {
        self.written(buffer);
        self.plane(buffer)
    }

    /// Codes of the first `rows` rows in groups of `group`, made by a launch of their own unless they are
    /// there.
    pub(super) fn codes(&mut self, buffer: Buffer, rows: usize, group: usize) -> Result<Codes> {
        let codes = self.shadow(buffer, group)?;
        if self.fresh.get(&(buffer, group)).is_none_or(|&held| held < rows) {
            self.fresh.insert((buffer, group), rows);
            rows::quantize(self, buffer, rows, codes);
        }
        Ok(codes)
    }

    /// The place of codes that the caller's launch writes itself, for [`Self::codes`] to find.
    pub(super) fn codes_written(&mut self, buffer: Buffer, rows: usize, group: usize) -> Result<Codes> {
        self.fresh.insert((buffer, group), rows);
        self.shadow(buffer, group)
    }

    /// The place of codes, whatever it holds.
    pub(super) fn codes_place(&mut self, buffer: Buffer, group: usize) -> Result<Codes> {
        self.shadow(buffer, group)
    }

    /// Aligned codes of the first `rows` rows in groups of `group`, if they are there.
    pub(super) fn aligned(&self, buffer: Buffer, rows: usize, group: usize) -> Option<Aligned> {
        let held = self.aligned.get(&buffer)?;
        (held.rows >= rows && held.group == group).then_some(held.codes)
    }

    /// Says that the last launch, or the caller's, leaves aligned codes of the plane.
    pub(super) fn aligned_written(&mut self, buffer: Buffer, held: AlignedPlane) {
        self.aligned.insert(buffer, held);
    }

    /// How what a command leaves in the first `rows` rows of a plane is read by those after it.
    pub(super) fn demand(&self, plane: Buffer, rows: usize, rest: &[Command]) -> Demand {
        let mut demand = Demand { values: false, group: None, aligned: true };
        for command in rest {
            if command.reads(plane) {
                let aligned = self.aligned_wanted(command);
                let group = aligned.or_else(|| self.group_wanted(command, plane));
                demand.group = demand.group.or(group);
                demand.values |= aligned.is_none() || group != demand.group;
                demand.aligned &= aligned.is_some() || group != demand.group || group.is_none();
            }
            if command.overwrites(plane, self.shape.rows) >= rows {
                return demand;
            }
        }
        // Who knows what is read after the list?
        demand.values = true;
        demand
    }

    /// Group length of aligned codes, where a command reads its input as nothing else.
    fn aligned_wanted(&self, command: &Command) -> Option<usize> {
        match *command {
            Command::Linear { rows, ref to, .. } => linear::aligned_group(self, rows, to),
            Command::RoutedExperts { rows, experts, .. } => self.experts(experts).aligned_group(self, rows),
            _ => None,
        }
    }

    /// Group length of the codes in which a command reads a plane.
    pub(super) fn group_wanted(&self, command: &Command, plane: Buffer) -> Option<usize> {
        match command {
            Command::Linear { x, to, .. } if *x == plane => {
                to.iter().find_map(|(matrix, _)| self.matrix(*matrix).group())
            }
            Command::RoutedExperts { x, experts, .. } if *x == plane => self.experts(*experts).group(),
            _ => None,
        }
    }

    fn shadow(&mut self, buffer: Buffer, group: usize) -> Result<Codes> {
        self.tables.planes[buffer.0 as usize].codes(self.driver, group)
    }

    /// Address and length of a vector.
    pub(super) fn vector(&self, vector: VectorRef) -> (u64, usize) {
        let vector = &self.tables.vectors[vector.0 as usize];
        (vector.values.ptr(), vector.len)
    }

    pub(super) fn matrix(&self, matrix: MatrixRef) -> Arc<PackedMatrix> {
        self.tables.matrices[matrix.0 as usize].clone()
    }

    pub(super) fn experts(&self, experts: ExpertsRef) -> Arc<PackedExperts> {
        self.tables.experts[experts.0 as usize].clone()
    }

    pub(super) fn rotary(&self, rotary: Rotary) -> Arc<RotaryTable> {
        self.tables.rotaries[rotary.0 as usize].clone()
    }

    pub(super) fn kv(&self, pool: KvPool) -> Arc<KvPages> {
        self.tables.kv[pool.0 as usize].clone()
    }

    pub(super) fn states(&self, pool: StatePool) -> Arc<States> {
        self.tables.states[pool.0 as usize].clone()
    }

    /// Addresses of ids and weights, and `k`.
    pub(super) fn picks(&self, picks: Picks) -> (u64, u64, usize) {
        let table = &self.tables.picks[picks.0 as usize];
        (table.ids.ptr(), table.weights.ptr(), table.k)
    }

    /// Address of the tokens of the last draws; embeddings of them are recorded after a draw.
    pub(super) fn drawn_tokens(&self) -> u64 {
        self.tables.drawn.as_ref().map_or(0, DeviceMemory::ptr)
    }

    /// Address of a command's bytes.
    pub(super) fn span(&self, span: Span) -> u64 {
        span.address(self.base)
    }

    /// Scratch of at least `bytes`, shared by all launches that name it; zeros when made, kept between steps.
    pub(super) fn scratch(&mut self, name: &'static str, bytes: usize) -> Result<u64> {
        self.scratch_of(None, name, bytes)
    }

    /// [`Self::scratch`] of a plane.
    pub(super) fn scratch_of(
        &mut self,
        plane: Option<Buffer>,
        name: &'static str,
        bytes: usize,
    ) -> Result<u64> {
        let key = (name, plane);
        if let Some(memory) = self.tables.scratch.get(&key)
            && memory.bytes() >= bytes
        {
            return Ok(memory.ptr());
        }
        // Steps of an eighth: few moves while steps grow, and little that is never used.
        let step = (bytes.next_power_of_two() / 8).max(1 << 12);
        let memory = DeviceMemory::zeros(self.driver, name, bytes.next_multiple_of(step))?;
        let address = memory.ptr();
        self.tables.outgrown.extend(self.tables.scratch.insert(key, memory));
        Ok(address)
    }

    /// Lowers commands in order.
    pub(super) fn lower(&mut self, commands: &[Command]) -> Result {
        let mut rest = commands;
        while let Some(command) = rest.first() {
            let run = match command {
                Command::StateKeep { .. } => self.keep_states(rest)?,
                Command::KvKeep { .. } => self.keep_keys(rest)?,
                Command::Conv { .. } => self.delta_net(rest)?,
                Command::QkNormRope { .. } => self.norm_and_append(rest)?,
                Command::Route { .. } | Command::RoutedExperts { .. } => experts::lower_run(self, rest)?,
                Command::Write { .. }
                | Command::Norm { .. }
                | Command::AddNorm { .. }
                | Command::Join { .. }
                | Command::Gather { .. }
                | Command::CopyRows { .. }
                | Command::GatedNorm { .. }
                | Command::OutGate { .. }
                | Command::Swiglu { .. }
                | Command::Combine { .. } => rows::lower(self, rest)?,
                _ => {
                    self.one(command)?;
                    1
                }
            };
            rest = &rest[run..];
        }
        Ok(())
    }

    /// Lowers the leading run of [`Command::StateKeep`], all layers together; says how many.
    fn keep_states(&mut self, commands: &[Command]) -> Result<usize> {
        let of = |command: &Command| match *command {
            Command::StateKeep { pool, words } => Some((pool, words)),
            _ => None,
        };
        let keeps: Vec<_> = commands.iter().map_while(of).collect();
        state::lower_keep(self, &keeps)?;
        Ok(keeps.len())
    }

    /// Lowers the leading run of [`Command::KvKeep`], all layers together; says how many.
    fn keep_keys(&mut self, commands: &[Command]) -> Result<usize> {
        let of = |command: &Command| match *command {
            Command::KvKeep { pool, words } => Some((pool, words)),
            _ => None,
        };
        let keeps: Vec<_> = commands.iter().map_while(of).collect();
        kv::lower_keep(self, &keeps)?;
        Ok(keeps.len())
    }

    /// Lowers [`Command::QkNormRope`], together with the [`Command::KvAppend`] of its keys if that follows.
    fn norm_and_append(&mut self, commands: &[Command]) -> Result<usize> {
        let Command::QkNormRope { qg, k, q_weight, k_weight, eps, rotary, shape, q } = commands[0] else {
            unreachable!("called for this command");
        };
        let append = match commands.get(1) {
            Some(&Command::KvAppend { k: keys, v, pool }) if keys == k && v != k => {
                Some((v, self.kv(pool).words()))
            }
            _ => None,
        };
        let (eps, weights) = (f32::from_bits(eps), [q_weight, k_weight]);
        rope::lower(self, [qg, k, q], weights, eps, rotary, shape, append)?;
        Ok(1 + append.is_some() as usize)
    }

    /// Lowers [`Command::Conv`], together with the rest of its layer where windows are short.
    fn delta_net(&mut self, commands: &[Command]) -> Result<usize> {
        if let Some(run) = delta_step::lower(self, commands)? {
            return Ok(run);
        }
        if let Some(run) = delta_rule::lower_prompt(self, commands)? {
            return Ok(run);
        }
        let Command::Conv { x, taps, pool, out } = commands[0] else {
            unreachable!("called for this command");
        };
        conv::lower(self, x, taps, pool, out)?;
        Ok(1)
    }

    fn one(&mut self, command: &Command) -> Result {
        use Command as C;
        match *command {
            C::Embed { table, out } => linear::lower_embed(self, table, None, out),
            C::EmbedDrawn { table, rows, draws, out } => {
                linear::lower_embed(self, table, Some((rows, draws)), out)
            }
            C::Linear { x, rows, ref to } => linear::lower(self, x, rows, to),
            C::Draw { .. } => draw::lower(self, command),
            _ if command.of_pictures() => vision::lower(self, command),
            _ => self.of_sequences(command),
        }
    }

    /// Stages that look at states, pages or positions.
    fn of_sequences(&mut self, command: &Command) -> Result {
        use Command as C;
        match *command {
            C::StateClear { pool, place } => state::lower_clear(self, pool, place),
            C::StateCopy { pool, from, to } => state::lower_copy(self, pool, from, to),
            C::DeltaRule { mixed, a, b, decay, dt_bias, pool, out } => {
                delta_rule::lower(self, mixed, a, b, decay, dt_bias, pool, out)
            }
            C::KvAppend { k, v, pool } => kv::lower_append(self, k, v, pool),
            C::Attention { q, shape, pool, out } => attention::lower(self, q, shape, pool, out),
            _ => unreachable!("all other commands are lowered above"),
        }
    }
}
