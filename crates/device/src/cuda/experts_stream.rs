//! Routed experts of few rows, all stored alike: `kernels/cuda/experts_stream.cu`.

use super::driver::Result;
use super::experts::{Beside, PackedExperts, Routed, SharedExpert};
use super::launch::{Args, Launch};
use super::linear::{kernel_of, pair};
use super::lower::Lowering;
use super::memory::Codes;
use super::packing::{Kind, SLICE};
use super::route;

/// Rows of a launch.
const ROWS_MIN: usize = 2;
const ROWS_MAX: usize = 64;
/// Up to this many rows the blocks keep the rows' codes.
const STAGED_ROWS_MAX: usize = 8;
/// Warps of a block (experts_stream.cu, `WARPS_MAX`), pairs of a share, shares whose hidden values a block
/// keeps.
const WARPS_MAX: usize = 16;
const SHARE_ROWS: usize = 8;
const SHARES_STAGED: usize = 3;
/// Shared memory of the kernels besides.
const STATIC: usize = 128;
/// Stages of a warp's ring, and rows of its own shares that a block keeps where it does not keep all: the
/// first that there is room for. Of few rows all are kept; two stages leave more of the first cache, which is
/// worth more than a third one but from [`DEEP_ROWS_MIN`] rows on.
const FORMS_OF_MANY: [(usize, usize); 4] = [(3, 20), (3, 12), (2, 12), (2, 0)];
const FORMS_OF_FEW: [(usize, usize); 2] = [(3, 0), (2, 0)];
const DEEP_ROWS_MIN: usize = 5;
/// Words of the list of shares before them.
const LIST_WORDS: usize = 4;
/// Words of a share: two numbers, and the pairs, two a word.
const SHARE_WORDS: usize = 2 + SHARE_ROWS / 2;
/// Steps of a stage, of both matrices together, and the inputs that as many of one are.
const STAGE_STEPS: usize = 4;
const COLS_STEP: usize = 256;

/// Offsets into a block's shared memory (experts_stream.cu, `StreamPlaces`).
#[derive(Clone, Copy, Debug)]
struct Places {
    x_at: usize,
    units_at: usize,
    parts_at: usize,
    ids_at: usize,
    shares_at: usize,
    row_stride: usize,
    bytes: usize,
}

/// What decides [`Places`].
struct Shape {
    kind: Kind,
    ring: usize,
    /// Inputs, and matrices over them.
    cols: usize,
    matrices: usize,
    /// Rows that have units, and those whose codes are kept.
    unit_rows: usize,
    code_rows: usize,
    pairs: usize,
    shares: usize,
}

impl Shape {
    /// Warps of a team, one for each slice, and teams of a block.
    fn teams(&self) -> (usize, usize) {
        let slices = self.cols.div_ceil(SLICE);
        (slices, WARPS_MAX / slices)
    }

    fn threads(&self) -> usize {
        let (slices, teams) = self.teams();
        32 * slices * teams
    }

    fn places(&self) -> Places {
        let group = self.kind.group().unwrap_or(COLS_STEP);
        let stage = STAGE_STEPS * 128 * self.kind.bits() + COLS_STEP / group * self.kind.group_bytes();
        // Rows that lanes read together lie in different banks.
        let row_stride = 2 * self.cols + 64;
        let unit = if self.kind.is_wide() { 16 } else { 8 };
        let (slices, teams) = self.teams();
        let mut end = 0;
        let mut take = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(16);
            at
        };
        take(WARPS_MAX * self.ring * stage);
        let x_at = take(self.code_rows * row_stride);
        let units_at = take(self.unit_rows * (self.cols / group + 1) * unit);
        let parts_at = take(teams * 2 * (slices - 1) * self.matrices * 4 * 128);
        let ids_at = take(4 * self.pairs);
        let shares_at = take(4 * SHARE_WORDS * self.shares);
        Places { x_at, units_at, parts_at, ids_at, shares_at, row_stride, bytes: end }
    }
}

impl Places {
    fn words(&self) -> [u64; 3] {
        [
            pair(self.x_at, self.units_at),
            pair(self.parts_at, self.ids_at),
            pair(self.shares_at, self.row_stride),
        ]
    }
}

/// A launch of this form.
pub(super) struct Stream {
    kind: Kind,
    ring: usize,
    staged: bool,
    held: usize,
    hidden: Shape,
    down: Shape,
}

impl Stream {
    /// `None` where the form is not for these experts and rows.
    pub(super) fn of(c: &Lowering<'_>, experts: &PackedExperts, rows: usize, k: usize) -> Option<Self> {
        let &[kind] = experts.kinds.as_slice() else { return None };
        kind.group()?;
        let (width, inner, pairs) = (experts.width, experts.inner, rows * k);
        let whole = [width, inner].iter().all(|cols| cols.is_multiple_of(COLS_STEP));
        let slices = width.max(inner).div_ceil(SLICE);
        let alike = experts.stride.iter().all(|&stride| stride > 0);
        if !(ROWS_MIN..=ROWS_MAX).contains(&rows) || !whole || !alike || slices > WARPS_MAX {
            return None;
        }
        let staged = rows <= STAGED_ROWS_MAX;
        // Rows of the shares that a block has a part of.
        let shares_max = pairs.min(experts.count + pairs / SHARE_ROWS);
        let places = SHARE_ROWS * (shares_max.div_ceil(c.facts().processors as usize) + 1);
        let of = |&(ring, held): &(usize, usize)| {
            let hidden = Shape {
                kind,
                ring,
                cols: width,
                matrices: 2,
                unit_rows: if held > 0 { places } else { rows },
                code_rows: if staged { rows } else { held },
                pairs,
                shares: pairs,
            };
            let down_rows = SHARES_STAGED * SHARE_ROWS;
            let down = Shape {
                cols: inner,
                matrices: 1,
                unit_rows: down_rows,
                code_rows: down_rows,
                shares: pairs + rows.div_ceil(SHARE_ROWS),
                ..hidden
            };
            Self { kind, ring, staged, held, hidden, down }
        };
        // Pairs of every expert as bits, and its first share, where rings will be.
        let bits = 4 * experts.count * (1 + pairs.div_ceil(32));
        let fits = |stream: &Self| {
            [&stream.hidden, &stream.down].iter().all(|shape| {
                let places = shape.places();
                places.bytes + STATIC <= c.facts().shared_max as usize
                    && bits <= places.x_at
                    && experts.count <= shape.threads()
            })
        };
        let forms = match (staged, rows >= DEEP_ROWS_MIN) {
            (false, _) => &FORMS_OF_MANY[..],
            (true, true) => &FORMS_OF_FEW,
            (true, false) => &FORMS_OF_FEW[1..],
        };
        forms.iter().map(of).find(fits)
    }

    /// `codes` of the rows; `hidden`: scratch of a row for every pair.
    pub(super) fn lower(
        &self,
        c: &mut Lowering<'_>,
        experts: &PackedExperts,
        codes: Codes,
        hidden: u64,
        routed: &Routed,
        beside: &Beside,
    ) -> Result {
        let (ids, weights, k) = c.picks(routed.picks);
        let mut words = vec![codes.codes, codes.units, codes.sums];
        let logits = beside.logits.map(|logits| c.plane(logits).ptr);
        words.extend([ids, logits.unwrap_or(0), ids, weights, hidden, c.output(routed.out).ptr]);
        words.extend(experts.first.as_flattened());
        words.extend(experts.stride);
        words.extend([pair(routed.rows, k), pair(experts.count, 0)]);
        let route_values = logits.map_or(Ok(0), |_| route::values(experts.count, k))?;
        let shared = match beside.shared {
            Some(SharedExpert { gate, up, inner, down, out }) => {
                let [codes, params] = c.matrix(down).packed();
                let planes = [c.plane(gate).ptr, c.plane(up).ptr, c.output(inner).ptr, c.output(out).ptr];
                let [gate, up, inner, out] = planes;
                [codes, params, gate, up, inner, out, pair(0, routed.rows.div_ceil(SHARE_ROWS))]
            }
            None => [0; 7],
        };
        let pairs = routed.rows * k;
        let list = c.scratch("experts_list", 4 * (LIST_WORDS + SHARE_WORDS * pairs))?;
        for (name, shape) in [("experts_stream_hidden", &self.hidden), ("experts_stream_down", &self.down)] {
            let places = shape.places();
            let mut words = words.clone();
            words.extend(places.words());
            words.extend(shared);
            words.push(list);
            c.push(Launch {
                kernel: kernel_of("experts_stream.cu", name, &[self.kind])
                    .define("ROWS", SHARE_ROWS)
                    .define("EXPERT_WIDTH", experts.width)
                    .define("EXPERT_INNER", experts.inner)
                    .define("RING", self.ring)
                    .define("STAGED", u32::from(self.staged))
                    .define("HELD", self.held)
                    .define("ROUTE_VALUES", route_values),
                grid: [c.facts().processors, 1, 1],
                block: shape.threads() as u32,
                shared: places.bytes as u32,
                args: Args::new().words(&words),
            });
        }
        Ok(())
    }
}
