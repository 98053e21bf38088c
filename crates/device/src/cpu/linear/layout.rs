//! The packed form of a grouped matrix: what the kernels stream.
//!
//! A *panel* is 32 output rows, two *tiles* of 16; missing rows of the last panel are zeros. In a tile each
//! row owns one 32-bit lane of a 64-byte vector, so a register holds the same inputs of 16 rows and sums
//! never cross lanes. A *unit* is 32 inputs of a tile: one vector per bit of the width. Codes are split in
//! bit planes whose width divides 8 (3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2; low bits in the first plane). In a
//! plane of width `w`, a lane holds `8 / w` fields: `(lane >> w * field) & mask` has in its four bytes the
//! codes of four consecutive inputs, a *quad*. Quad `q` of the unit's 8 is field `q % (8 / w)` of vector
//! `q / (8 / w)` of the plane. The bytes read are exactly the stored bits, and one shift and one mask give
//! bytes for an integer dot instruction.
//!
//! Codes: `[panel][unit][tile][vector][row of the tile]`. Scales and biases, in the stored dtype:
//! `[panel][group][scales of 32 rows, biases of 32 rows]`.

use std::{
    alloc::{Layout, alloc, dealloc, handle_alloc_error},
    ops::Range,
    ptr::NonNull,
    sync::Arc,
};

use quant::{Dtype, Matrix, Scheme, Zero, bf16_to_f32, f16_to_f32, read_float};

use super::{
    activations::Block,
    kernel::{Panel, PanelOut, multiply},
};
use crate::cpu::{
    isa::{Isa, by_isa},
    pool::{Disjoint, Pool},
};

/// Output rows of a panel.
pub(crate) const PANEL: usize = 32;
/// Output rows of a tile.
pub(in crate::cpu) const TILE: usize = 16;
/// Inputs of a unit.
pub(in crate::cpu) const UNIT: usize = 32;
/// Quads of a unit.
pub(in crate::cpu) const QUADS: usize = UNIT / 4;
/// Bytes of one vector.
pub(in crate::cpu) const VECTOR: usize = 64;
/// Inputs of a slice (`docs/arithmetic.md`, grouped matrix).
pub(in crate::cpu) const SLICE: usize = 1024;
/// Stored scales of smaller magnitude are read as 0 (`docs/arithmetic.md`, rule 5): `2^-50`.
const SCALE_MIN: f32 = f32::from_bits((127 - 50) << 23);
/// Panels packed by one task.
const PANELS_PER_TASK: usize = 8;
/// Alignment that lets the system use huge pages, and the size from which that pays.
const HUGE_PAGE: usize = 2 << 20;

/// Widths of the low and the high bit plane; the high one may be 0.
pub(in crate::cpu) const fn planes(bits: usize) -> (usize, usize) {
    match bits {
        3 => (2, 1),
        5 => (4, 1),
        6 => (4, 2),
        _ => (bits, 0),
    }
}

/// The low `width` bits of each of four bytes.
pub(super) const fn plane_mask(width: usize) -> u32 {
    0x0101_0101 * ((1u32 << width) - 1)
}

/// Memory of packed weights, one allocation, aligned to vectors.
struct Store {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain bytes with one owner.
unsafe impl Send for Store {}
// SAFETY: shared access only reads.
unsafe impl Sync for Store {}

impl Store {
    /// `bytes` zeros, first touched by the pool's threads.
    fn zeroed(pool: &Pool, bytes: usize) -> Self {
        let align = if bytes >= 2 * HUGE_PAGE { HUGE_PAGE } else { VECTOR };
        let layout = Layout::from_size_align(bytes.max(VECTOR), align).expect("sizes of existing matrices");
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        let store = Self { start, layout };
        #[cfg(target_os = "linux")]
        if align == HUGE_PAGE {
            // SAFETY: a hint about memory just allocated; a refusal costs only speed.
            unsafe { libc::madvise(start.as_ptr().cast(), layout.size(), libc::MADV_HUGEPAGE) };
        }
        pool.run(layout.size().div_ceil(HUGE_PAGE), &|task| {
            // Captures the store as a whole, which may be shared.
            let store = &store;
            let at = task * HUGE_PAGE;
            let len = HUGE_PAGE.min(store.layout.size() - at);
            // SAFETY: tasks write parts of their own, inside the allocation.
            unsafe { store.start.as_ptr().add(at).write_bytes(0, len) };
        });
        store
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this size and written by `zeroed`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// A grouped matrix `[rows, cols]` in packed form.
pub(super) struct Grouped {
    rows: usize,
    cols: usize,
    scheme: Scheme,
    store: Arc<Store>,
    codes: Range<usize>,
    params: Range<usize>,
}

impl Grouped {
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn cols(&self) -> usize {
        self.cols
    }

    pub(super) fn scheme(&self) -> Scheme {
        self.scheme
    }

    pub(super) fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }

    /// Bytes of the packed form, padding included.
    pub(super) fn bytes(&self) -> usize {
        self.codes.len() + self.params.len()
    }

    /// Multiplies one panel with one block of rows (`super::kernel`).
    pub(super) fn multiply(&self, isa: Isa, panel: usize, block: Block<'_>, out: &mut PanelOut) {
        let (codes, params) = (self.panel_codes(panel), self.panel_params(panel));
        multiply(isa, Panel { scheme: self.scheme, codes, params }, block, out);
    }

    /// Codes of one panel.
    fn panel_codes(&self, panel: usize) -> &[u8] {
        let bytes = self.codes.len() / self.panels();
        &self.store.bytes()[self.codes.clone()][panel * bytes..][..bytes]
    }

    /// Scales and biases of one panel.
    fn panel_params(&self, panel: usize) -> &[u8] {
        let bytes = self.params.len() / self.panels();
        &self.store.bytes()[self.params.clone()][panel * bytes..][..bytes]
    }

    /// Row `row` in f32 by the embedding rule of `docs/arithmetic.md`: `fma(s, code, b)`, or `s * (code -
    /// center)`.
    pub(super) fn embed_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert_eq!(out.len(), self.cols, "embedding width");
        let (codes, params) = (self.panel_codes(row / PANEL), self.panel_params(row / PANEL));
        let bits = self.scheme.bits as usize;
        let row = row % PANEL;
        for (unit, out) in out.chunks_exact_mut(UNIT).enumerate() {
            let (scale, bias) = group_params(self.scheme, params, unit * UNIT / self.scheme.group, row);
            for (q, out) in out.chunks_exact_mut(4).enumerate() {
                let quad = read_quad(bits, tile_unit(bits, codes, unit, row / TILE), row % TILE, q);
                for (out, code) in out.iter_mut().zip(quad) {
                    *out = match self.scheme.zero {
                        Zero::Affine => scale.mul_add(code as f32, bias),
                        Zero::Symmetric => scale * (code as i32 - self.scheme.center()) as f32,
                    };
                }
            }
        }
    }
}

/// Bytes of a panel's codes and of its scales and biases.
fn panel_bytes(cols: usize, scheme: Scheme) -> (usize, usize) {
    let floats = if scheme.zero == Zero::Affine { 2 } else { 1 };
    (
        cols / UNIT * (PANEL / TILE) * scheme.bits as usize * VECTOR,
        cols / scheme.group * floats * PANEL * scheme.scales.size(),
    )
}

/// The vectors of one unit of one tile, out of a panel's codes.
#[inline(always)]
pub(super) fn tile_unit(bits: usize, codes: &[u8], unit: usize, tile: usize) -> &[u8] {
    &codes[(unit * (PANEL / TILE) + tile) * bits * VECTOR..][..bits * VECTOR]
}

/// The four codes of quad `q` of one row of a tile.
#[inline(always)]
pub(super) fn read_quad(bits: usize, unit: &[u8], lane: usize, q: usize) -> [u8; 4] {
    let field = |first: usize, width: usize| {
        let fields = 8 / width;
        let at = (first + q / fields) * VECTOR + lane * 4;
        let word = u32::from_le_bytes(unit[at..at + 4].try_into().expect("four bytes"));
        (word >> (width * (q % fields))) & plane_mask(width)
    };
    let (low, high) = planes(bits);
    let quad = field(0, low) | if high > 0 { field(low, high) << low } else { 0 };
    quad.to_le_bytes()
}

/// Scale and bias (0 if symmetric) of one group and row, out of a panel's parameters.
#[inline(always)]
pub(super) fn group_params(scheme: Scheme, params: &[u8], group: usize, row: usize) -> (f32, f32) {
    match scheme.zero {
        Zero::Affine => {
            let at = group * 2 * PANEL + row;
            (read_float(scheme.scales, params, at), read_float(scheme.scales, params, at + PANEL))
        }
        Zero::Symmetric => (read_float(scheme.scales, params, group * PANEL + row), 0.0),
    }
}

/// Packs grouped matrices into one allocation, in parallel. Sources are discarded as they are consumed, so
/// the peak is the packed bytes plus what the source's owner keeps resident.
pub(super) fn pack(pool: &Pool, isa: Isa, sources: &[(&Matrix, Scheme)]) -> Vec<Grouped> {
    let mut places = Vec::with_capacity(sources.len());
    let mut end = 0;
    for (source, scheme) in sources {
        let (codes, params) = panel_bytes(source.cols(), *scheme);
        let panels = source.rows().div_ceil(PANEL);
        let mut take = |bytes: usize| {
            let start = end;
            end += (panels * bytes).next_multiple_of(VECTOR);
            start..start + panels * bytes
        };
        places.push((take(codes), take(params)));
    }
    let mut store = Store::zeroed(pool, end);
    let tasks: Vec<(usize, usize)> = sources
        .iter()
        .enumerate()
        .flat_map(|(at, (source, _))| {
            (0..source.rows()).step_by(PANEL * PANELS_PER_TASK).map(move |row| (at, row))
        })
        .collect();
    let memory = Disjoint::new(store.bytes_mut());
    pool.run(tasks.len(), &|task| {
        let (at, first) = tasks[task];
        let (source, scheme) = sources[at];
        let (code_bytes, param_bytes) = panel_bytes(source.cols(), scheme);
        let end = source.rows().min(first + PANEL * PANELS_PER_TASK);
        for row in (first..end).step_by(PANEL) {
            let panel = row / PANEL;
            let (codes, params) = (&places[at].0, &places[at].1);
            let (codes, params) = (codes.start + panel * code_bytes, params.start + panel * param_bytes);
            // SAFETY: every panel belongs to one task, and codes and parameters do not overlap.
            let (codes, params) = unsafe {
                (memory.range(codes..codes + code_bytes), memory.range(params..params + param_bytes))
            };
            pack_panel(isa, source, scheme, row..end.min(row + PANEL), codes, params);
        }
        source.rows_range(first..end).discard();
    });
    let store = Arc::new(store);
    let mut packed = Vec::with_capacity(sources.len());
    for (&(source, scheme), (codes, params)) in sources.iter().zip(places) {
        // Again as a whole: parts of pages at the seams of tasks were kept above.
        source.discard();
        let (rows, cols) = (source.rows(), source.cols());
        packed.push(Grouped { rows, cols, scheme, store: store.clone(), codes, params });
    }
    packed
}

by_isa! {
    /// Packs the rows `rows` of `source` as one panel into zeros.
    fn pack_panel(
        source: &Matrix,
        scheme: Scheme,
        rows: Range<usize>,
        codes: &mut [u8],
        params: &mut [u8],
    ) = pack_panel_body
}

#[inline(always)]
fn pack_panel_body(source: &Matrix, scheme: Scheme, rows: Range<usize>, codes: &mut [u8], params: &mut [u8]) {
    match scheme.bits {
        2 => pack_codes::<2>(source, rows.clone(), codes),
        3 => pack_codes::<3>(source, rows.clone(), codes),
        4 => pack_codes::<4>(source, rows.clone(), codes),
        5 => pack_codes::<5>(source, rows.clone(), codes),
        6 => pack_codes::<6>(source, rows.clone(), codes),
        8 => pack_codes::<8>(source, rows.clone(), codes),
        bits => unreachable!("{bits}-bit matrices do not exist"),
    }
    let groups = source.cols() / scheme.group;
    let size = scheme.scales.size();
    let floats = if scheme.zero == Zero::Affine { 2 } else { 1 };
    for (at, row) in rows.enumerate() {
        for group in 0..groups {
            let from = (row * groups + group) * size;
            let to = (group * floats * PANEL + at) * size;
            let scale = &source.scales()[from..from + size];
            if !is_tiny(scheme.scales, scale) {
                params[to..to + size].copy_from_slice(scale);
            }
            if scheme.zero == Zero::Affine {
                let to = to + PANEL * size;
                params[to..to + size].copy_from_slice(&source.biases()[from..from + size]);
            }
        }
    }
}

/// Whether a stored scale is read as 0.
#[inline(always)]
fn is_tiny(dtype: Dtype, scale: &[u8]) -> bool {
    let value = match dtype {
        Dtype::Bf16 => bf16_to_f32(u16::from_le_bytes([scale[0], scale[1]])),
        Dtype::F16 => f16_to_f32(u16::from_le_bytes([scale[0], scale[1]])),
        Dtype::F32 => f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]),
    };
    value.abs() < SCALE_MIN
}

/// Packs the codes of a panel: unit by unit, so that every line is written once.
#[inline(always)]
fn pack_codes<const BITS: usize>(source: &Matrix, rows: Range<usize>, codes: &mut [u8]) {
    let stream = source.codes();
    let row_bytes = stream.len() / source.rows();
    for unit in 0..source.cols() / UNIT {
        for tile in 0..PANEL / TILE {
            let mut lines = [[0u32; TILE]; BITS];
            for lane in 0..TILE {
                let row = rows.start + tile * TILE + lane;
                if row < rows.end {
                    let from = row * row_bytes + unit * UNIT * BITS / 8;
                    let words = spread::<BITS>(&stream[from..from + UNIT * BITS / 8]);
                    for vector in 0..BITS {
                        lines[vector][lane] = words[vector];
                    }
                }
            }
            let to = (unit * (PANEL / TILE) + tile) * BITS * VECTOR;
            let to = codes[to..to + BITS * VECTOR].as_chunks_mut::<4>().0;
            for vector in 0..BITS {
                for lane in 0..TILE {
                    to[vector * TILE + lane] = lines[vector][lane].to_le_bytes();
                }
            }
        }
    }
}

/// One row's bit stream of a unit as the words of its lane.
#[inline(always)]
fn spread<const BITS: usize>(stream: &[u8]) -> [u32; BITS] {
    let (low, high) = planes(BITS);
    let mut lanes = [0u32; BITS];
    for q in 0..QUADS {
        // A quad begins at a byte or in its middle and is at most four bytes long.
        let bit = q * 4 * BITS;
        let mut word = 0u64;
        for byte in bit / 8..(bit + 4 * BITS).div_ceil(8) {
            word |= (stream[byte] as u64) << (8 * (byte - bit / 8));
        }
        let word = word >> (bit % 8);
        let mask = (1u64 << BITS) - 1;
        let mut quad = 0u32;
        for j in 0..4 {
            quad |= (((word >> (j * BITS)) & mask) << (8 * j)) as u32;
        }
        lanes[q / (8 / low)] |= (quad & plane_mask(low)) << (low * (q % (8 / low)));
        if high > 0 {
            lanes[low + q / (8 / high)] |= ((quad >> low) & plane_mask(high)) << (high * (q % (8 / high)));
        }
    }
    lanes
}
