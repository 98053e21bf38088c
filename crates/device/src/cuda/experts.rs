//! Routed experts on CUDA: `kernels/cuda/experts.cu`.

use std::sync::Arc;

use quant::Matrix;

use super::command::Command;
use super::driver::{Driver, Result};
use super::experts_stream::Stream;
use super::launch::{Args, Launch};
use super::linear::{
    FewPlaces, TILE_OUTPUTS, few_shape, form_of, groups_of, input_words, kernel_of, kinds_of, pair,
};
use super::lower::Lowering;
use super::memory::{Codes, DeviceMemory};
use super::packing::{self, Kind, Place, TILE};
use super::route;
use super::warpgroup;
use crate::{Buffer, DeviceError, ExpertsRef, MatrixRef, Picks};

/// Most kinds of matrix in one layer: what a kernel is compiled for.
const KINDS_MAX: usize = 8;
/// Up to this many pairs the blocks find their pairs themselves (experts.cu, `SHARE_MAX`).
const UNLISTED_MAX: usize = 256;
/// Up to this many rows a launch has the decode form.
const DECODE_ROWS_MAX: usize = 64;
/// Pairs that a block takes at a time: most experts have few, and few rows leave room for more blocks.
const CHUNK: usize = 4;
/// Up to this many rows the blocks choose the experts themselves, a warp a row.
const ROUTED_ROWS_MAX: usize = 8;
/// The same of blocks that do so once and stay.
const STREAM_ROUTED_ROWS_MAX: usize = 32;
/// Tiles of experts: most have few rows.
const EXPERT_TILE_ROWS: usize = 64;
/// Warps along the rows of a tile, and blocks that share a processor.
const EXPERT_TILE: (usize, usize) = (2, 2);
/// Rows of a tile where nobody reads the tiles.
const UNLISTED_TILE: usize = 128;
/// Up to this many pairs one block sorts; of more, blocks of so many threads take so many pairs each.
const SORT_PAIRS_MAX: usize = 2048;
const SORT_BLOCK: u32 = 256;
const SORT_SHARE: usize = 512;
/// Most shared memory of a block; wider experts take one pair at a time.
const SHARED_MAX: usize = 160 << 10;

/// All routed experts of a layer.
pub(super) struct PackedExperts {
    pub(super) count: usize,
    pub(super) width: usize,
    pub(super) inner: usize,
    pub(super) kinds: Vec<Kind>,
    /// Group lengths of gate and up.
    groups: Vec<usize>,
    /// Group lengths of down.
    inner_groups: Vec<usize>,
    memory: DeviceMemory,
    /// `ExpertMatrix` `[gate, up, down][experts]`.
    table: DeviceMemory,
    /// Where expert 0's gate, up and down lie, and how far it is to the next expert's; 0 where they differ.
    pub(super) first: [[u64; 2]; 3],
    pub(super) stride: [u64; 3],
    /// [`Place::tame`] of all.
    tame: bool,
    kind: [u32; 3],
    form: [u32; 3],
}

impl PackedExperts {
    /// Group length of the codes that its kernels read first; `None` for dense experts.
    pub(super) fn group(&self) -> Option<usize> {
        self.groups.first().copied()
    }

    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        gate: &[Matrix],
        up: &[Matrix],
        down: &[Matrix],
    ) -> Result<Self> {
        let all: Vec<&Matrix> = gate.iter().chain(up).chain(down).collect();
        let kind = |matrix: &&Matrix| Kind::of(matrix.encoding());
        let kinds = kinds_of(all.iter().map(kind));
        if kinds.len() > KINDS_MAX {
            let message =
                format!("{} ways of storing in one layer's experts, at most {KINDS_MAX}", kinds.len());
            return Err(DeviceError::Failed { stage: "experts", message });
        }
        let groups = groups_of(&kinds_of(all[..2 * gate.len()].iter().map(kind)));
        let inner_groups = groups_of(&kinds_of(down.iter().map(|matrix| Kind::of(matrix.encoding()))));
        let (width, inner) = (gate[0].cols(), gate[0].rows());
        let (memory, places) = packing::load(driver, "experts", &all)?;
        let mut table = Vec::with_capacity(24 * all.len());
        let number = |kind: Kind| kinds.iter().position(|&k| k == kind).unwrap_or(0) as u32;
        let at = |place: &Place| [memory.ptr() + place.codes as u64, memory.ptr() + place.params as u64];
        for (matrix, place) in all.iter().zip(&places) {
            let kind = kind(matrix);
            at(place).into_iter().for_each(|address| table.extend(address.to_le_bytes()));
            table.extend(number(kind).to_le_bytes());
            table.extend(form_of(&groups, kind).to_le_bytes());
        }
        let experts = gate.len();
        let stride = [0, experts, 2 * experts].map(|start: usize| {
            let alike = all[start..start + experts].iter().all(|m| kind(m) == kind(&all[start]));
            let next = if experts > 1 && alike { places[start + 1].params } else { places[start].params };
            (next - places[start].params) as u64
        });
        let first = [0, experts, 2 * experts].map(|start| at(&places[start]));
        let kind_of = |start: usize| number(kind(&all[start]));
        let kind_numbers = [0, experts, 2 * experts].map(kind_of);
        let form = [0, experts, 2 * experts].map(|start| form_of(&groups, kind(&all[start])));
        let table = DeviceMemory::of(driver, "experts", &table)?;
        Ok(Self {
            count: experts,
            width,
            inner,
            kinds,
            groups,
            inner_groups,
            memory,
            table,
            first,
            stride,
            tame: places.iter().all(|place| place.tame),
            kind: kind_numbers,
            form,
        })
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.memory.bytes() + self.table.bytes()
    }

    fn in_warpgroups(&self, c: &Lowering<'_>) -> bool {
        let one = matches!(self.kinds[..], [kind] if !kind.is_wide() && warpgroup::has_form(c, kind));
        self.tame && one
    }

    /// Group length of aligned codes, where [`lower`] reads nothing else of `rows` rows.
    pub(super) fn aligned_group(&self, c: &Lowering<'_>, rows: usize) -> Option<usize> {
        let aligned = rows > DECODE_ROWS_MAX && self.has_prompt_form() && self.in_warpgroups(c);
        self.group().filter(|_| aligned)
    }

    /// The prompt form wants integer codes everywhere, and one length of groups of hidden values.
    fn has_prompt_form(&self) -> bool {
        self.kinds.iter().all(|kind| kind.group().is_some()) && self.inner_groups.len() == 1
    }
}

/// The words of `ExpertArgs` that all kernels of a call share, up to the slices.
struct Call {
    words: Vec<u64>,
    pairs: usize,
    listed: bool,
    /// Pairs that a block takes at a time, and what the kernel is compiled for.
    chunk: usize,
    class: usize,
    rows: usize,
    /// `ROUTE_VALUES` of the kernels, and what they need then: logits, ids and weights.
    route_values: usize,
    route: [u64; 3],
    /// Blocks of the shared expert, and the kernels' `SharedExpert`.
    shared_slots: usize,
    shared: [u64; 7],
}

impl Call {
    fn args(&self, places: &FewPlaces) -> Args {
        let mut words = self.words.clone();
        words.extend([pair(self.chunk, self.rows)]);
        words.extend(places.words());
        words.extend(self.route);
        words.extend(self.shared);
        Args::new().words(&words)
    }
}

/// What the launches of [`crate::Device::routed_experts`] do besides.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Beside {
    /// [`crate::Device::route`] of these logits.
    pub(super) logits: Option<Buffer>,
    /// The shared expert's swiglu and down.
    pub(super) shared: Option<SharedExpert>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SharedExpert {
    pub(super) gate: Buffer,
    pub(super) up: Buffer,
    pub(super) inner: Buffer,
    pub(super) down: MatrixRef,
    pub(super) out: Buffer,
}

/// The routed experts of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Routed {
    pub(super) x: Buffer,
    pub(super) rows: usize,
    pub(super) picks: Picks,
    pub(super) experts: ExpertsRef,
    pub(super) out: Buffer,
}

impl Routed {
    fn of(command: Option<&Command>) -> Option<Self> {
        match command {
            Some(&Command::RoutedExperts { x, rows, picks, experts, out }) => {
                Some(Self { x, rows, picks, experts, out })
            }
            _ => None,
        }
    }

    /// Could the blocks choose the experts themselves?
    fn chooses(&self, c: &Lowering<'_>, logits: Buffer) -> bool {
        let (experts, k) = (c.experts(self.experts), c.picks(self.picks).2);
        let fits = experts.count == c.plane(logits).width && route::values(experts.count, k).is_ok();
        let few = (1..=ROUTED_ROWS_MAX).contains(&self.rows) && self.rows * k <= UNLISTED_MAX;
        let streams = self.rows <= STREAM_ROUTED_ROWS_MAX && Stream::of(c, &experts, self.rows, k).is_some();
        fits && (few || streams)
    }

    /// The shared expert, where the commands after this one are its swiglu and down and it is made like the
    /// others.
    fn shared(&self, c: &Lowering<'_>, logits: Option<Buffer>, rest: &[Command]) -> Option<SharedExpert> {
        let [Command::Swiglu { gate, up, rows, out: inner }, Command::Linear { x, rows: same, to }, ..] =
            rest
        else {
            return None;
        };
        let &[(down, out)] = to.as_slice() else { return None };
        let (experts, matrix) = (c.experts(self.experts), c.matrix(down));
        let alike = (matrix.rows(), matrix.cols()) == (experts.width, experts.inner)
            && matrix.group().is_some()
            && experts.kinds.contains(&matrix.kind());
        // Blocks write these while others read.
        let read = [Some(self.x), Some(self.out), Some(*gate), Some(*up), logits];
        let apart = *inner != out && ![*inner, out].iter().any(|&of| read.contains(&Some(of)));
        let few = (1..=DECODE_ROWS_MAX).contains(&self.rows);
        let meant = x == inner && [*rows, *same] == [self.rows; 2] && ![gate, up].contains(&&self.out);
        (alike && apart && few && meant).then_some(SharedExpert {
            gate: *gate,
            up: *up,
            inner: *inner,
            down,
            out,
        })
    }
}

/// Lowers the leading [`Command::Route`] or [`Command::RoutedExperts`] with those after it that fit into
/// its launches; says how many.
pub(super) fn lower_run(c: &mut Lowering<'_>, commands: &[Command]) -> Result<usize> {
    let mut run = 1;
    let mut beside = Beside::default();
    if let Command::Route { logits, rows, picks } = commands[0] {
        let next = Routed::of(commands.get(1));
        let fits = |next: &Routed| (next.rows, next.picks) == (rows, picks) && next.chooses(c, logits);
        if !next.is_some_and(|next| fits(&next)) {
            route::lower(c, logits, rows, picks)?;
            return Ok(1);
        }
        beside.logits = Some(logits);
        run = 2;
    }
    let routed = Routed::of(commands.get(run - 1)).expect("called for these commands");
    beside.shared = routed.shared(c, beside.logits, &commands[run..]);
    lower(c, routed, beside)?;
    Ok(run + if beside.shared.is_some() { 2 } else { 0 })
}

/// [`crate::Device::routed_experts`], and what is beside it.
fn lower(c: &mut Lowering<'_>, routed: Routed, beside: Beside) -> Result {
    let Routed { x, rows, picks, experts, out } = routed;
    if rows == 0 {
        return Ok(());
    }
    let experts = c.experts(experts);
    let (ids, weights, k) = c.picks(picks);
    let pairs = rows * k;
    if rows > DECODE_ROWS_MAX && experts.has_prompt_form() {
        return prompt(c, &experts, x, ids, (rows, k), out);
    }
    let codes = codes_of(c, &experts, x, rows)?;
    let hidden = c.scratch("experts_hidden", 4 * pairs * experts.inner)?;
    if let Some(stream) = Stream::of(c, &experts, rows, k) {
        return stream.lower(c, &experts, codes[0], hidden, &routed, &beside);
    }
    let starts = c.scratch("experts_starts", 4 * (experts.count + 1))?;
    let order = c.scratch("experts_order", 4 * pairs)?;
    let (input, output) = (c.plane(x).ptr, c.output(out).ptr);
    let mut words = vec![experts.table.ptr(), ids, starts, order, input, hidden, output];
    words.extend(input_words(&codes));
    words.extend(experts.first.as_flattened());
    words.extend(experts.stride);
    let numbers: Vec<u32> = experts.kind.into_iter().chain(experts.form).collect();
    words.extend(numbers.chunks(2).map(|two| pair(two[0] as usize, two[1] as usize)));
    words.extend([pair(pairs, k), pair(experts.count, usize::from(pairs > UNLISTED_MAX))]);
    let shared_max = SHARED_MAX.min(c.facts().shared_max as usize);
    let class = if rows == 1 || experts.hidden_places(CHUNK).bytes > shared_max { 1 } else { CHUNK };
    let (chunk, listed) = (rows.min(class), pairs > UNLISTED_MAX);
    let mut call = Call {
        words,
        pairs,
        listed,
        chunk,
        class,
        rows,
        route_values: 0,
        route: [0; 3],
        shared_slots: 0,
        shared: [0; 7],
    };
    if let Some(logits) = beside.logits {
        call.route_values = route::values(experts.count, k)?;
        call.route = [c.plane(logits).ptr, ids, weights];
    }
    if let Some(SharedExpert { gate, up, inner, down, out }) = beside.shared {
        let down = c.matrix(down);
        let kind = experts.kinds.iter().position(|&kind| kind == down.kind()).unwrap_or(0);
        call.shared_slots = rows.div_ceil(chunk);
        let planes = [c.plane(gate).ptr, c.plane(up).ptr, c.output(inner).ptr, c.output(out).ptr];
        let [codes, params] = down.packed();
        let [gate, up, inner, out] = planes;
        call.shared = [codes, params, gate, up, inner, out, pair(kind, call.shared_slots)];
    }
    if call.listed {
        let tiles = c.scratch("experts_tiles", tiles_bytes(&experts, pairs, UNLISTED_TILE))?;
        let taken = c.scratch("experts_taken", 8)?;
        sort(c, &experts, [ids, starts, order, tiles, taken], pairs, UNLISTED_TILE)?;
    }
    lower_hidden(c, &experts, &call);
    lower_down(c, &experts, &call);
    Ok(())
}

/// The rows' codes in all groups that the kernels read.
fn codes_of(c: &mut Lowering<'_>, experts: &PackedExperts, x: Buffer, rows: usize) -> Result<Vec<Codes>> {
    experts.groups.iter().map(|&group| c.codes(x, rows, group)).collect()
}

/// Bytes of a list of tiles of `tile_rows` pairs.
fn tiles_bytes(experts: &PackedExperts, pairs: usize, tile_rows: usize) -> usize {
    8 * (1 + pairs / tile_rows + experts.count)
}

/// Lists pairs and tiles by expert. `at`: ids, starts, order, tiles, and how many of the tiles are taken.
fn sort(
    c: &mut Lowering<'_>,
    experts: &PackedExperts,
    at: [u64; 5],
    pairs: usize,
    tile_rows: usize,
) -> Result {
    let [ids, starts, order, tiles, taken] = at;
    let lists = [starts, order, tiles, taken, pair(pairs, experts.count), tile_rows as u64];
    let launch = |name, blocks: usize, block, args| Launch {
        kernel: kernel_of("experts_sort.cu", name, &[]),
        grid: [blocks as u32, 1, 1],
        block,
        shared: 4 * experts.count as u32,
        args,
    };
    if pairs <= SORT_PAIRS_MAX {
        c.push(launch("experts_sort", 1, 1024, Args::new().ptr(ids).words(&lists)));
        return Ok(());
    }
    let blocks = pairs.div_ceil(SORT_SHARE);
    let counted = c.scratch("experts_counts", 4 * blocks * experts.count)?;
    let args = Args::new().ptr(ids).ptr(counted);
    let sizes = args.clone().size(pairs).size(experts.count).size(SORT_SHARE);
    c.push(launch("experts_count", blocks, SORT_BLOCK, sizes));
    c.push(launch("experts_place", blocks, SORT_BLOCK, args.words(&lists).size(SORT_SHARE)));
    Ok(())
}

impl PackedExperts {
    /// Shared memory of `experts_hidden`: two matrices, each perhaps with units of its own.
    fn hidden_places(&self, class: usize) -> FewPlaces {
        let (_, tiles) = few_shape(self.width);
        FewPlaces::of(&self.kinds, class, [2 * tiles; 2], self.width, class > 1)
    }
}

/// `silu(gate x) * up x` of every pair.
fn lower_hidden(c: &mut Lowering<'_>, experts: &PackedExperts, call: &Call) {
    let (warps, tiles) = few_shape(experts.width);
    let places = experts.hidden_places(call.class);
    let grid = grid(experts, call, experts.inner, tiles);
    push(c, experts, call, ("experts_hidden", grid), (warps, tiles), &places);
}

/// The products with down, of hidden values that each block quantizes itself.
fn lower_down(c: &mut Lowering<'_>, experts: &PackedExperts, call: &Call) {
    let (warps, tiles) = few_shape(experts.inner);
    let places = FewPlaces::of(&experts.kinds, call.class, [tiles; 2], experts.inner, true);
    let mut grid = grid(experts, call, experts.width, tiles);
    grid[1] += call.shared_slots as u32;
    push(c, experts, call, ("experts_down", grid), (warps, tiles), &places);
}

fn push(
    c: &mut Lowering<'_>,
    experts: &PackedExperts,
    call: &Call,
    (name, grid): (&'static str, [u32; 3]),
    (warps, tiles): (usize, usize),
    places: &FewPlaces,
) {
    c.push(Launch {
        kernel: kernel_of("experts.cu", name, &experts.kinds)
            .define("ROWS", call.class)
            .define("EXPERT_WIDTH", experts.width)
            .define("EXPERT_INNER", experts.inner)
            .define("ROUTE_VALUES", call.route_values)
            .define("THREADS", 32 * warps)
            .define("TILES", tiles),
        grid,
        block: 32 * warps as u32,
        shared: places.bytes as u32,
        args: call.args(places),
    });
}

/// Blocks of outputs by pairs, or by experts where the pairs are listed.
fn grid(experts: &PackedExperts, call: &Call, outputs: usize, tiles: usize) -> [u32; 3] {
    let shares = if call.listed { experts.count } else { call.pairs };
    [outputs.div_ceil(tiles * TILE) as u32, shares as u32, 1]
}

/// What the warpgroup form is made for.
fn shape_of(experts: &PackedExperts, pairs: usize, k: usize) -> warpgroup::ExpertShape {
    let PackedExperts { count, width, inner, .. } = *experts;
    warpgroup::ExpertShape { kind: experts.kinds[0], count, width, inner, pairs, k }
}

/// All of a long prompt's rows: `kernels/cuda/experts_prompt.cu`, or the warpgroup form and its repairs.
fn prompt(
    c: &mut Lowering<'_>,
    experts: &PackedExperts,
    x: Buffer,
    ids: u64,
    (rows, k): (usize, usize),
    out: Buffer,
) -> Result {
    let (pairs, group) = (rows * k, experts.inner_groups[0]);
    let in_warpgroups = experts.in_warpgroups(c);
    let least = |f: fn(Kind) -> usize| experts.kinds.iter().map(|&kind| f(kind)).min().unwrap_or(0);
    let (tile_rows, (row_warps, blocks)) = match in_warpgroups {
        true => (experts.kinds[0].ring_rows(), (2, 1)),
        false => (least(Kind::tile_rows).min(EXPERT_TILE_ROWS), EXPERT_TILE),
    };
    let shared = experts.kinds.iter().map(|kind| kind.tile_bytes(tile_rows)).max().unwrap_or(0);
    let starts = c.scratch("experts_starts", 4 * (experts.count + 1))?;
    let order = c.scratch("experts_order", 4 * pairs)?;
    let tiles = c.scratch("experts_tiles", tiles_bytes(experts, pairs, tile_rows))?;
    let gate_up = c.scratch("experts_gate_up", 8 * pairs * experts.inner)?;
    let inner_codes = c.scratch("experts_inner_codes", 2 * pairs * experts.inner)?;
    let units = c.scratch("experts_inner_units", 4 * pairs * experts.inner / group)?;
    let sums = c.scratch("experts_inner_sums", 4 * pairs * experts.inner / group)?;
    let taken = c.scratch("experts_taken", 8)?;
    sort(c, experts, [ids, starts, order, tiles, taken], pairs, tile_rows)?;
    let lists = [experts.table.ptr(), starts, order, tiles];
    let planes = [gate_up, c.output(out).ptr];
    let mut words = [lists.as_slice(), &planes].concat();
    let (ring, codes) = match in_warpgroups {
        true => {
            let shape = shape_of(experts, pairs, k);
            let words = [lists.as_slice(), &[taken], &planes].concat();
            let plain = [inner_codes, units, sums];
            let (ring, codes) = warpgroup::Experts::new(c, shape, x, rows, &words, plain)?;
            (Some(ring), vec![codes])
        }
        false => (None, codes_of(c, experts, x, rows)?),
    };
    words.extend(input_words(&codes));
    words.extend([inner_codes, units, sums, pair(pairs, k), pair(experts.count, experts.width)]);
    words.push(pair(experts.inner, tile_rows));
    words.extend(ring.as_ref().map_or([0; 2], |ring| ring.wide));
    let places = (pairs / tile_rows + experts.count).min(pairs);
    let columns = |outputs: usize| if ring.is_some() { 1 } else { outputs.div_ceil(TILE_OUTPUTS) };
    let places = if ring.is_some() { places.min(c.facts().processors as usize) } else { places };
    let launch = |name, grid: [usize; 3], block: usize, shared: usize| Launch {
        kernel: kernel_of("experts_prompt.cu", name, &experts.kinds)
            .define("INNER_GROUP", group)
            .define("TILE_ROWS", tile_rows)
            .define("ROW_WARPS", row_warps)
            .define("BLOCKS", blocks),
        grid: grid.map(|n| n as u32),
        block: block as u32,
        shared: shared as u32,
        args: Args::new().words(&words),
    };
    let product = |name, columns| launch(name, [columns, places, 1], 128 * row_warps, shared);
    ring.iter().for_each(|ring| ring.gate_up(c));
    c.push(product("experts_gate_up", 2 * columns(experts.inner)));
    match &ring {
        Some(ring) => ring.hidden(c),
        None => c.push(launch("experts_inner", [pairs, 1, 1], 256, 0)),
    }
    ring.iter().for_each(|ring| ring.down(c));
    c.push(product("experts_down_prompt", columns(experts.width)));
    Ok(())
}
