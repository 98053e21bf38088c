//! Grouped matrices in the order the kernels read them: `kernels/cuda/linear.cuh` says what lies where.

use std::ops::Range;
use std::sync::Arc;
use std::thread;

use quant::{Dtype, Encoding, Matrix, Scheme, Zero, read_float};

use super::driver::{Driver, Result};
use super::memory::DeviceMemory;

/// Outputs of a tile.
pub(super) const TILE: usize = 16;
/// Inputs of a step.
const STEP: usize = 64;
/// Inputs of a slice (`docs/arithmetic.md`, grouped matrix).
pub(super) const SLICE: usize = 1024;
/// Stored scales of smaller magnitude are read as 0 (`docs/arithmetic.md`, rule 5): `2^-50`.
const SCALE_MIN: f32 = f32::from_bits((127 - 50) << 23);
/// Bounds of [`Place::tame`]: `2^40`, `2^-60`.
const TAME_MAX: f32 = f32::from_bits((127 + 40) << 23);
const TAME_BIAS_MIN: f32 = f32::from_bits((127 - 60) << 23);
/// Alignment of the parts of an allocation.
const ALIGN: usize = 256;
/// Stages of the prompt form's pipeline (linear_prompt.cuh, `STAGES`).
const PROMPT_STAGES: usize = 4;
/// Tiles that one turn of a thread packs.
const TILES_PER_TURN: usize = 16;

/// How a matrix is stored, as the number that kernels are compiled for (linear.cuh, `Kind`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Kind(pub(super) u32);

impl Kind {
    pub(super) fn of(encoding: Encoding) -> Self {
        let dtype = |dtype| match dtype {
            Dtype::Bf16 => 0,
            Dtype::F16 => 1,
            Dtype::F32 => 2,
        };
        match encoding {
            Encoding::Dense(stored) => Self(dtype(stored) << 4),
            Encoding::Grouped(s) => {
                let affine = u32::from(s.zero == Zero::Affine);
                Self(s.bits as u32 | dtype(s.scales) << 4 | affine << 6 | (s.group as u32) << 8)
            }
        }
    }

    /// Group length of a grouped kind.
    pub(super) fn group(self) -> Option<usize> {
        (self.bits() > 0).then_some((self.0 >> 8) as usize)
    }

    /// Bits of a code; 0 for dense kinds.
    pub(super) fn bits(self) -> usize {
        (self.0 & 15) as usize
    }

    /// Number of a float type, as kernels know it.
    pub(super) fn dtype(self) -> u32 {
        self.0 >> 4 & 3
    }

    /// Bytes of scales and biases of one group of a tile.
    pub(super) fn group_bytes(self) -> usize {
        let floats = if self.0 >> 6 & 1 == 1 { 2 } else { 1 };
        TILE * floats * if self.dtype() == 2 { 4 } else { 2 }
    }

    /// Bytes of a slice in a warp's shared memory; 0 for dense kinds.
    pub(super) fn slice_bytes(self) -> usize {
        let floats = if self.0 >> 6 & 1 == 1 { 2 } else { 1 };
        let size = if self.0 >> 4 & 3 == 2 { 4 } else { 2 };
        self.group()
            .map_or(0, |group| SLICE / STEP * 128 * self.bits() + SLICE / group * TILE * floats * size)
    }

    /// Bytes that one row's units of a slice take in shared memory; 0 for dense kinds.
    pub(super) fn unit_bytes(self) -> usize {
        self.group().map_or(0, |group| SLICE / group * if self.bits() > 4 { 16 } else { 8 })
    }
}

/// Tiles of the prompt forms (linear_prompt.cuh, `TileShape`; linear_warpgroup.cuh, `RingShape`).
impl Kind {
    /// Is there a warpgroup form?
    pub(super) fn in_warpgroups(self) -> bool {
        matches!((self.bits(), self.group()), (2..=4, Some(64 | 128)) | (5..=8, Some(64)))
    }

    /// Has a code two digits?
    pub(super) fn is_wide(self) -> bool {
        self.bits() > 4
    }

    /// Most rows of a tile of the warpgroup form.
    pub(super) fn ring_rows(self) -> usize {
        if self.is_wide() { 64 } else { 128 }
    }

    /// Bytes of a stage of the warpgroup form's ring.
    pub(super) fn ring_bytes(self) -> usize {
        let rows = self.ring_rows() * (2 * STEP + 3 * 4);
        (rows + 8 * 128 * self.bits() + 8 * self.group_bytes()).next_multiple_of(1024)
    }

    /// Rows of a tile.
    pub(super) fn tile_rows(self) -> usize {
        if self.group() == Some(128) || self.bits() > 4 { 64 } else { 128 }
    }

    /// Bytes of a block's shared memory, for tiles of `rows` rows.
    pub(super) fn tile_bytes(self, rows: usize) -> usize {
        let groups = if self.group() == Some(32) { 2 } else { 1 };
        let stage =
            rows * 2 * STEP + 8 * 128 * self.bits() + 8 * groups * self.group_bytes() + groups * rows * 8;
        PROMPT_STAGES * stage
    }
}

/// Where the parts of a matrix lie in its allocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Codes; a dense matrix has none.
    pub(super) codes: usize,
    /// Scales and biases; the floats of a dense matrix.
    pub(super) params: usize,
    /// Are scales and biases of a size that lets units be put on slice sums instead of groups: up to `2^40`
    /// and, of biases, 0 or at least `2^-60`? Then every sum is a multiple of the least subnormal in either
    /// order.
    pub(super) tame: bool,
}

/// Bytes of one tile: codes, then scales and biases.
fn tile_bytes(cols: usize, scheme: Scheme) -> (usize, usize) {
    let floats = if scheme.zero == Zero::Affine { 2 } else { 1 };
    (
        cols.div_ceil(STEP) * 128 * scheme.bits as usize,
        cols / scheme.group * TILE * floats * scheme.scales.size(),
    )
}

/// Matrices on a card, packed one after another into an allocation.
pub(super) fn load(
    driver: &Arc<dyn Driver>,
    stage: &'static str,
    sources: &[&Matrix],
) -> Result<(DeviceMemory, Vec<Place>)> {
    if !driver.keeps() {
        let (bytes, places) = lay_out(sources);
        return Ok((DeviceMemory::zeros(driver, stage, bytes)?, places));
    }
    let (bytes, places) = pack(sources);
    Ok((DeviceMemory::of(driver, stage, &bytes)?, places))
}

/// Bytes of an allocation for matrices, and where each lies.
fn lay_out(sources: &[&Matrix]) -> (usize, Vec<Place>) {
    let mut places = Vec::with_capacity(sources.len());
    let mut end = 0;
    for source in sources {
        let mut take = |bytes: usize| {
            let start = end;
            end += bytes.next_multiple_of(ALIGN);
            start
        };
        places.push(match source.encoding() {
            Encoding::Dense(_) => Place { codes: 0, params: take(source.codes().len()), tame: false },
            Encoding::Grouped(scheme) => {
                let (codes, params) = tile_bytes(source.cols(), scheme);
                let tiles = source.rows().div_ceil(TILE);
                Place { codes: take(codes * tiles), params: take(params * tiles), tame: true }
            }
        });
    }
    (end, places)
}

/// Packs matrices on all processors. Sources are discarded as they are consumed.
fn pack(sources: &[&Matrix]) -> (Vec<u8>, Vec<Place>) {
    let (end, mut places) = lay_out(sources);
    let mut bytes = vec![0u8; end];
    let mut jobs = jobs(sources, &places, &mut bytes);
    let threads = thread::available_parallelism().map_or(1, |n| n.get()).min(jobs.len().max(1));
    let share = jobs.len().div_ceil(threads).max(1);
    thread::scope(|scope| {
        for jobs in jobs.chunks_mut(share) {
            scope.spawn(|| jobs.iter_mut().for_each(Job::run));
        }
    });
    for job in jobs {
        places[job.which].tame &= job.tame;
    }
    sources.iter().for_each(|source| source.discard());
    (bytes, places)
}

/// Some tiles of one matrix, or all of a dense one.
struct Job<'a> {
    source: &'a Matrix,
    tiles: Range<usize>,
    codes: &'a mut [u8],
    params: &'a mut [u8],
    /// Which of the sources, and whether these tiles' scales and biases are tame ([`Place::tame`]).
    which: usize,
    tame: bool,
}

/// Cuts the allocation into jobs.
fn jobs<'a>(sources: &[&'a Matrix], places: &[Place], bytes: &'a mut [u8]) -> Vec<Job<'a>> {
    let mut jobs = Vec::new();
    let mut rest = bytes;
    let mut at = 0;
    // Parts lie in ascending order: each begins at or after the end of the one before.
    let mut take = |start: usize, len: usize| {
        let (_, after) = std::mem::take(&mut rest).split_at_mut(start - at);
        let (part, after) = after.split_at_mut(len);
        (rest, at) = (after, start + len);
        part
    };
    for (which, (&source, place)) in sources.iter().zip(places).enumerate() {
        let Encoding::Grouped(scheme) = source.encoding() else {
            let params = take(place.params, source.codes().len());
            jobs.push(Job { source, tiles: 0..0, codes: &mut [], params, which, tame: true });
            continue;
        };
        let (code_bytes, param_bytes) = tile_bytes(source.cols(), scheme);
        let tiles = source.rows().div_ceil(TILE);
        let codes = take(place.codes, code_bytes * tiles);
        let params = take(place.params, param_bytes * tiles);
        let turns = codes
            .chunks_mut(code_bytes * TILES_PER_TURN)
            .zip(params.chunks_mut(param_bytes * TILES_PER_TURN));
        for (turn, (codes, params)) in turns.enumerate() {
            let first = turn * TILES_PER_TURN;
            let tiles = first..tiles.min(first + TILES_PER_TURN);
            jobs.push(Job { source, tiles, codes, params, which, tame: true });
        }
    }
    jobs
}

impl Job<'_> {
    fn run(&mut self) {
        let Encoding::Grouped(scheme) = self.source.encoding() else {
            self.params.copy_from_slice(self.source.codes());
            return;
        };
        let (code_bytes, param_bytes) = tile_bytes(self.source.cols(), scheme);
        let tiles = self.codes.chunks_exact_mut(code_bytes).zip(self.params.chunks_exact_mut(param_bytes));
        for (tile, (codes, params)) in self.tiles.clone().zip(tiles) {
            for row in tile * TILE..self.source.rows().min((tile + 1) * TILE) {
                let stream = self.source.row_codes(row);
                match scheme.bits {
                    2 => pack_row::<2>(stream, row % TILE, codes),
                    3 => pack_row::<3>(stream, row % TILE, codes),
                    4 => pack_row::<4>(stream, row % TILE, codes),
                    5 => pack_row::<5>(stream, row % TILE, codes),
                    6 => pack_row::<6>(stream, row % TILE, codes),
                    8 => pack_row::<8>(stream, row % TILE, codes),
                    bits => unreachable!("{bits}-bit matrices do not exist"),
                }
                self.tame &= pack_params(self.source, scheme, row, params);
            }
        }
    }
}

/// Widths of the low and the high bit plane; the high one may be 0.
const fn planes(bits: usize) -> (usize, usize) {
    match bits {
        3 => (2, 1),
        5 => (4, 1),
        6 => (4, 2),
        8 => (4, 4),
        _ => (bits, 0),
    }
}

/// Packs one row's bit stream into a tile of zeros.
fn pack_row<const BITS: usize>(stream: &[u8], row: usize, codes: &mut [u8]) {
    let (low, high) = planes(BITS);
    let (g, h) = (row % 8, row / 8);
    for (eight, bytes) in stream.chunks_exact(BITS).enumerate() {
        // Eight codes: of lane 4 g + q, unit t.
        let (step, t, lane) = (eight / 8, eight / 4 % 2, 4 * g + eight % 4);
        let mut word = [0u8; 8];
        word[..BITS].copy_from_slice(bytes);
        let word = u64::from_le_bytes(word);
        let step = &mut codes[step * 128 * BITS..][..128 * BITS];
        put(step, low, lane, t, h, fields(word, BITS, 0, low));
        if high > 0 {
            put(&mut step[128 * low..], high, lane, t, h, fields(word, BITS, low, high));
        }
    }
}

/// Bits `shift .. shift + width` of eight codes as pairs: the first of pair p in field p of the low 16 bits,
/// the second in field p of the high ones.
#[inline(always)]
fn fields(word: u64, bits: usize, shift: usize, width: usize) -> u32 {
    let mask = (1u64 << width) - 1;
    let mut out = 0;
    for j in 0..8 {
        let field = (word >> (j * bits + shift)) & mask;
        out |= (field as u32) << (width * (j / 2) + 16 * (j % 2));
    }
    out
}

/// Puts the fields of one lane, unit and half of the tile into a plane of a step.
#[inline(always)]
fn put(plane: &mut [u8], width: usize, lane: usize, t: usize, h: usize, fields: u32) {
    let (word, shift) = match width {
        4 => (2 * t + h, 0),
        2 => (t, 8 * h),
        _ => (0, 4 * h + 8 * t),
    };
    let at = &mut plane.as_chunks_mut::<4>().0[lane * width + word];
    *at = (u32::from_le_bytes(*at) | fields << shift).to_le_bytes();
}

/// Scales and biases of one row into its tile; says whether they are tame ([`Place::tame`]).
fn pack_params(source: &Matrix, scheme: Scheme, row: usize, params: &mut [u8]) -> bool {
    let mut tame = true;
    let (size, groups) = (scheme.scales.size(), source.cols() / scheme.group);
    let floats = if scheme.zero == Zero::Affine { 2 } else { 1 };
    let (g, h) = (row % 8, row / 8 % 2);
    for group in 0..groups {
        let from = row * groups + group;
        let to = (group * 8 + g) * 2 * floats + h;
        let scale = read_float(scheme.scales, source.scales(), from);
        let tiny = scale.abs() < SCALE_MIN;
        tame &= scale.abs() <= TAME_MAX;
        if !tiny {
            params[to * size..][..size].copy_from_slice(&source.scales()[from * size..][..size]);
        }
        if scheme.zero == Zero::Affine {
            params[(to + 2) * size..][..size].copy_from_slice(&source.biases()[from * size..][..size]);
            let bias = read_float(scheme.scales, source.biases(), from);
            let center = (1u32 << (scheme.bits - 1)) as f32;
            // Exact products: as the one fma of the kernels.
            let centered = (center * if tiny { 0.0 } else { scale } + bias).abs();
            tame &= centered == 0.0 || (TAME_BIAS_MIN..=TAME_MAX).contains(&centered);
        }
    }
    tame
}

#[cfg(test)]
mod tests {
    use quant::{BITS_SUPPORTED, unpack_codes};

    use super::*;

    fn byte(random: &mut u64) -> u8 {
        *random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*random >> 40) as u8
    }

    fn word(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[4 * at..4 * at + 4].try_into().expect("four bytes"))
    }

    /// The code at a place, by the text of linear.cuh: plane after plane of a step.
    fn code(bits: usize, codes: &[u8], steps: usize, row: usize, col: usize) -> u8 {
        let step = (row / 16 * steps + col / 64) * 32 * bits;
        let (g, h, t, q, j) = (row % 8, row / 8 % 2, col / 32 % 2, col / 8 % 4, col % 8);
        let (p, odd) = (j / 2, j % 2);
        let plane = |first: usize, width: usize| {
            let (of, field) = match width {
                4 => (2 * t + h, p),
                2 => (t, p + 4 * h),
                _ => (0, p + 4 * h + 8 * t),
            };
            let word = word(codes, step + 32 * first + (4 * g + q) * width + of);
            (word >> (width * field + 16 * odd)) as usize & ((1 << width) - 1)
        };
        let (low, high) = planes(bits);
        (plane(0, low) | if high > 0 { plane(low, high) << low } else { 0 }) as u8
    }

    #[test]
    fn every_code_and_scale_has_its_place() {
        let mut random = 5;
        for bits in BITS_SUPPORTED {
            for (group, zero) in [(32, Zero::Affine), (64, Zero::Symmetric)] {
                let (rows, cols) = (21, if group == 32 { 96 } else { 128 });
                let scheme = Scheme { bits, group, zero, scales: Dtype::Bf16 };
                let mut bytes = |n: usize| (0..n).map(|_| byte(&mut random)).collect::<Vec<u8>>();
                let floats = rows * cols / group * 2;
                let (codes, scales) = (bytes(rows * cols / 8 * bits as usize), bytes(floats));
                let biases = bytes(if zero == Zero::Affine { floats } else { 0 });
                let encoding = Encoding::Grouped(scheme);
                let source = Matrix::new(rows, cols, encoding, codes.into(), scales.into(), biases.into());
                let source = source.expect("a valid matrix");
                let (packed, places) = pack(&[&source, &source]);
                let place = places[1];
                for row in 0..rows {
                    let mut expected = vec![0; cols];
                    unpack_codes(bits, source.row_codes(row), &mut expected);
                    let found =
                        |col| code(bits as usize, &packed[place.codes..], cols.div_ceil(64), row, col);
                    assert_eq!((0..cols).map(found).collect::<Vec<_>>(), expected, "{bits} bits, row {row}");
                    for at in 0..cols / group {
                        let floats = if zero == Zero::Affine { 4 } else { 2 };
                        let to = ((row / 16 * (cols / group) + at) * 8 + row % 8) * floats + row / 8 % 2;
                        let half = |at: usize| &packed[place.params + 2 * at..][..2];
                        let from = row * (cols / group) + at;
                        let tiny = read_float(Dtype::Bf16, source.scales(), from).abs() < SCALE_MIN;
                        let scale = if tiny { &[0, 0] } else { &source.scales()[2 * from..][..2] };
                        assert_eq!(half(to), scale, "scale {at} of row {row}");
                        if zero == Zero::Affine {
                            assert_eq!(
                                half(to + 2),
                                &source.biases()[2 * from..][..2],
                                "bias {at} of row {row}"
                            );
                        }
                    }
                }
            }
        }
    }
}
