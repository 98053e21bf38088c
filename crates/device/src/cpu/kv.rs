//! Paged K/V codes (`docs/arithmetic.md`, K/V cache).
//!
//! Codes are signed bytes, one *digit* plane for int8 and two for int16 (`code = 256 * high + low`, high
//! first). A page holds one attention block of [`PAGE_TOKENS`] keys per head, laid out so that the integer
//! dots of [`super::panels`] need no sum across lanes:
//!
//! * K: `[digit][16-key block][dim pair][16 keys][2 dims]`;
//! * V: `[digit][16-dim block][key pair][16 dims][2 keys]`;
//! * scales: `[64-dim group][64 keys]` of K, then `[64 keys]` of V.

use super::{
    isa::{Isa, by_isa},
    math::ROUND,
    panels::{LANES, PANEL_STEP},
    pool::Disjoint,
    workers::Workers,
};
use crate::{DeviceError, KvShape, PAGE_TOKENS, Step};
use quant::{ATTENTION_GROUP, MAGNITUDE_MAX, MAGNITUDE_MIN};

/// Sizes of one head's block in a page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockLayout {
    /// Width of a head.
    pub(crate) head_dim: usize,
    /// Digit planes: 1 or 2.
    pub(crate) digits: usize,
}

impl BlockLayout {
    /// Dim pairs, the last one padded.
    pub(crate) fn pairs(self) -> usize {
        self.head_dim.div_ceil(2)
    }

    /// Scale groups of K.
    pub(crate) fn groups(self) -> usize {
        self.head_dim.div_ceil(ATTENTION_GROUP)
    }

    /// 16-dim blocks of V, the last one padded.
    pub(crate) fn dim_blocks(self) -> usize {
        self.head_dim.div_ceil(LANES)
    }

    /// Bytes of one digit plane of K.
    pub(crate) fn k_plane(self) -> usize {
        PAGE_TOKENS / LANES * self.pairs() * PANEL_STEP
    }

    /// Bytes of one digit plane of V.
    pub(crate) fn v_plane(self) -> usize {
        self.dim_blocks() * PAGE_TOKENS / 2 * PANEL_STEP
    }

    /// Code bytes of a block.
    pub(crate) fn codes(self) -> usize {
        self.digits * (self.k_plane() + self.v_plane())
    }

    /// Scales of a block.
    pub(crate) fn scales(self) -> usize {
        (self.groups() + 1) * PAGE_TOKENS
    }

    /// Byte of K's `dim` of `key`.
    pub(crate) fn k_at(self, digit: usize, key: usize, dim: usize) -> usize {
        digit * self.k_plane()
            + (key / LANES * self.pairs() + dim / 2) * PANEL_STEP
            + key % LANES * 2
            + dim % 2
    }

    /// Byte of V's `dim` of `key`.
    pub(crate) fn v_at(self, digit: usize, key: usize, dim: usize) -> usize {
        self.digits * self.k_plane()
            + digit * self.v_plane()
            + (dim / LANES * (PAGE_TOKENS / 2) + key / 2) * PANEL_STEP
            + dim % LANES * 2
            + key % 2
    }
}

/// One head's block.
#[derive(Clone, Copy)]
pub(crate) struct Block<'a> {
    pub(crate) codes: &'a [i8],
    pub(crate) scales: &'a [f32],
}

/// Code of one value and the scale of its group.
struct Quantizer {
    scale: f32,
    to_code: f32,
}

impl Quantizer {
    /// `scale = m / L`, `code = rint(x * (L / m))`; below 2^-40 zeros, a fault from 2^40 on.
    #[inline(always)]
    fn of(values: &[f32], limit: f32) -> Self {
        let magnitude = values.iter().fold(0u32, |m, x| m.max(x.to_bits() & 0x7fff_ffff));
        if magnitude < MAGNITUDE_MIN.to_bits() {
            return Self { scale: 0.0, to_code: 0.0 };
        }
        if magnitude >= MAGNITUDE_MAX.to_bits() {
            return Self { scale: f32::NAN, to_code: 0.0 };
        }
        let m = f32::from_bits(magnitude);
        Self { scale: m / limit, to_code: limit / m }
    }

    #[inline(always)]
    fn code(&self, x: f32) -> i32 {
        if self.to_code == 0.0 {
            return 0; // x may be infinite or NaN here
        }
        // |x * to_code| is about 2^15 at most, so adding this leaves its nearest integer in the low bits.
        (x * self.to_code + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i32
    }
}

/// Codes of one group; returns its scale.
#[inline(always)]
fn quantize_body(values: &[f32], limit: f32, codes: &mut [i32]) -> f32 {
    let quantizer = Quantizer::of(values, limit);
    for (code, &x) in codes.iter_mut().zip(values) {
        *code = quantizer.code(x);
    }
    quantizer.scale
}
by_isa! { fn quantize(values: &[f32], limit: f32, codes: &mut [i32]) -> f32 = quantize_body }

/// The digit planes of a code, most significant first.
fn digits(code: i32, count: usize) -> [i8; 2] {
    if count == 1 {
        return [code as i8, 0];
    }
    let low = code as i8;
    [((code - low as i32) >> 8) as i8, low]
}

/// Rows of heads from which on threads share them: fewer are done before a thread would wake.
const ROWS_TOGETHER: usize = 64;

/// One key of a head's block.
struct Target<'a> {
    layout: BlockLayout,
    /// Largest code.
    limit: f32,
    key: usize,
    codes: &'a mut [i8],
    scales: &'a mut [f32],
}

/// Quantizes one head of one token; `numbers` is scratch of a head's width.
fn store(isa: Isa, k: &[f32], v: &[f32], numbers: &mut [i32], target: Target<'_>) {
    let Target { layout, limit, key, codes, scales } = target;
    for (group, values) in k.chunks(ATTENTION_GROUP).enumerate() {
        let numbers = &mut numbers[group * ATTENTION_GROUP..][..values.len()];
        scales[group * PAGE_TOKENS + key] = quantize(isa, values, limit, numbers);
    }
    for (dim, &number) in numbers.iter().enumerate() {
        let two = digits(number, layout.digits);
        for digit in 0..layout.digits {
            codes[layout.k_at(digit, key, dim)] = two[digit];
        }
    }
    scales[layout.groups() * PAGE_TOKENS + key] = quantize(isa, v, limit, numbers);
    for (dim, &number) in numbers.iter().enumerate() {
        let two = digits(number, layout.digits);
        for digit in 0..layout.digits {
            codes[layout.v_at(digit, key, dim)] = two[digit];
        }
    }
}

/// K/V pages of one layer.
pub(crate) struct KvPages {
    pub(crate) shape: KvShape,
    pub(crate) layout: BlockLayout,
    codes: Vec<i8>,
    scales: Vec<f32>,
}

impl KvPages {
    /// Zeros.
    pub(crate) fn new(shape: KvShape) -> Result<Self, DeviceError> {
        let layout = BlockLayout { head_dim: shape.head_dim, digits: shape.form.bytes() };
        if shape.head_dim == 0 || shape.kv_heads == 0 {
            let message = format!("{shape:?} is not a K/V shape");
            return Err(DeviceError::Failed { stage: "kv_pool", message });
        }
        let blocks = shape.pages.saturating_mul(shape.kv_heads);
        Ok(Self {
            shape,
            layout,
            codes: super::zeros("kv_pool", blocks.saturating_mul(layout.codes()))?,
            scales: super::zeros("kv_pool", blocks.saturating_mul(layout.scales()))?,
        })
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.codes.len() + 4 * self.scales.len()
    }

    /// Refuses a page outside the pool.
    pub(crate) fn check(&self, stage: &'static str, pages: &[u32]) -> Result<(), DeviceError> {
        match pages.iter().find(|&&page| page as usize >= self.shape.pages) {
            None => Ok(()),
            Some(page) => {
                let message = format!("page {page} of a pool of {}", self.shape.pages);
                Err(DeviceError::Failed { stage, message })
            }
        }
    }

    /// One head's block of a page.
    pub(crate) fn block(&self, page: u32, head: usize) -> Block<'_> {
        let at = page as usize * self.shape.kv_heads + head;
        let (codes, scales) = (self.layout.codes(), self.layout.scales());
        Block { codes: &self.codes[at * codes..][..codes], scales: &self.scales[at * scales..][..scales] }
    }

    /// [`crate::Device::kv_append`]: `k` and `v` `[rows, kv_heads, head_dim]` of the step's rows.
    pub(crate) fn append(&mut self, workers: &Workers, step: &Step, k: &[f32], v: &[f32]) {
        let KvShape { kv_heads: heads, head_dim: dim, form, .. } = self.shape;
        let layout = self.layout;
        let (codes, scales) = (Disjoint::new(&mut self.codes), Disjoint::new(&mut self.scales));
        let store_head = |head: usize| {
            let mut numbers = vec![0; dim];
            for window in step.windows() {
                for row in 0..window.rows {
                    let (at, place) = ((window.first + row) * heads + head, window.start + row);
                    let block = window.pages[place / PAGE_TOKENS] as usize * heads + head;
                    // SAFETY: a head's blocks are those of one task.
                    let (codes, scales) = unsafe {
                        (
                            codes.range(block * layout.codes()..(block + 1) * layout.codes()),
                            scales.range(block * layout.scales()..(block + 1) * layout.scales()),
                        )
                    };
                    let (k, v) = (&k[at * dim..][..dim], &v[at * dim..][..dim]);
                    let target =
                        Target { layout, limit: form.limit(), key: place % PAGE_TOKENS, codes, scales };
                    store(workers.isa, k, v, &mut numbers, target);
                }
            }
        };
        match step.rows().len() * heads < ROWS_TOGETHER {
            true => (0..heads).for_each(store_head),
            false => workers.pool.run(heads, &store_head),
        }
    }

    /// [`crate::Device::kv_keep`]. A row moves to a place that no later row of an ascending path comes from.
    pub(crate) fn keep(&mut self, pages: &[u32], start: usize, rows: &[usize]) -> Result<(), DeviceError> {
        let places = pages.len() * PAGE_TOKENS;
        let ascends = rows.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascends || rows.last().is_some_and(|last| start + last >= places) {
            let message =
                format!("rows {rows:?} from {start} in {places} places; rows ascend inside the pages");
            return Err(DeviceError::Failed { stage: "kv_keep", message });
        }
        for (to, &from) in rows.iter().enumerate() {
            self.move_token(pages, start + from, start + to);
        }
        Ok(())
    }

    /// Moves a token's K/V from one place of a sequence to another.
    fn move_token(&mut self, pages: &[u32], from: usize, to: usize) {
        if from == to {
            return;
        }
        let mut codes = Vec::new();
        let mut scales = Vec::new();
        for head in 0..self.shape.kv_heads {
            let layout = self.layout;
            let target = pages[to / PAGE_TOKENS] as usize * self.shape.kv_heads + head;
            let target_codes = target * layout.codes()..(target + 1) * layout.codes();
            let target_scales = target * layout.scales()..(target + 1) * layout.scales();
            let source = self.block(pages[from / PAGE_TOKENS], head);
            codes.clear();
            codes.extend_from_slice(source.codes);
            scales.clear();
            scales.extend_from_slice(source.scales);
            let source = Block { codes: &codes, scales: &scales };
            copy_key(
                layout,
                source,
                from % PAGE_TOKENS,
                &mut self.codes[target_codes],
                &mut self.scales[target_scales],
                to % PAGE_TOKENS,
            );
        }
    }

    /// Bytes of one page: codes, then scales little-endian.
    pub(crate) fn export(&self, page: u32) -> Vec<u8> {
        let (codes, scales) = self.page_ranges(page);
        let mut bytes: Vec<u8> = self.codes[codes].iter().map(|&c| c as u8).collect();
        bytes.extend(self.scales[scales].iter().flat_map(|s| s.to_le_bytes()));
        bytes
    }

    /// Takes back what [`Self::export`] gave.
    pub(crate) fn import(&mut self, page: u32, bytes: &[u8]) -> Result<(), DeviceError> {
        let (codes, scales) = self.page_ranges(page);
        let expected = codes.len() + 4 * scales.len();
        if bytes.len() != expected {
            let message = format!("{} bytes for a page, {expected} expected", bytes.len());
            return Err(DeviceError::Failed { stage: "kv_import", message });
        }
        let (code_bytes, scale_bytes) = bytes.split_at(codes.len());
        for (to, &from) in self.codes[codes].iter_mut().zip(code_bytes) {
            *to = from as i8;
        }
        for (to, from) in self.scales[scales].iter_mut().zip(scale_bytes.as_chunks::<4>().0) {
            *to = f32::from_le_bytes(*from);
        }
        Ok(())
    }

    fn page_ranges(&self, page: u32) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let heads = self.shape.kv_heads;
        let (codes, scales, page) =
            (heads * self.layout.codes(), heads * self.layout.scales(), page as usize);
        (page * codes..(page + 1) * codes, page * scales..(page + 1) * scales)
    }
}

/// Copies one key of a block to a key of another.
pub(crate) fn copy_key(
    layout: BlockLayout,
    from: Block<'_>,
    from_key: usize,
    codes: &mut [i8],
    scales: &mut [f32],
    to_key: usize,
) {
    for digit in 0..layout.digits {
        for dim in 0..layout.head_dim {
            codes[layout.k_at(digit, to_key, dim)] = from.codes[layout.k_at(digit, from_key, dim)];
            codes[layout.v_at(digit, to_key, dim)] = from.codes[layout.v_at(digit, from_key, dim)];
        }
    }
    for group in 0..=layout.groups() {
        scales[group * PAGE_TOKENS + to_key] = from.scales[group * PAGE_TOKENS + from_key];
    }
}

#[cfg(test)]
mod tests {
    use super::{super::pool::Pool, *};
    use crate::{KvForm, Row, Window};

    #[test]
    fn digits_join_to_the_code() {
        for code in -32639..=32639 {
            let [high, low] = digits(code, 2);
            assert_eq!(256 * high as i32 + low as i32, code);
        }
        for code in -127..=127 {
            assert_eq!(digits(code, 1)[0] as i32, code);
        }
    }

    #[test]
    fn quantizer_edges() {
        let check = |values: &[f32], limit: f32, scale: f32, codes: &[i32]| {
            let quantizer = Quantizer::of(values, limit);
            assert_eq!(quantizer.scale.to_bits(), scale.to_bits(), "{values:?}");
            let found: Vec<i32> = values.iter().map(|&x| quantizer.code(x)).collect();
            assert_eq!(found, codes, "{values:?}");
        };
        check(&[0.0, -0.0], 127.0, 0.0, &[0, 0]);
        check(&[MAGNITUDE_MIN.next_down(), 0.0], 127.0, 0.0, &[0, 0]);
        check(&[-MAGNITUDE_MIN, 0.0], 127.0, MAGNITUDE_MIN / 127.0, &[-127, 0]);
        check(&[f32::INFINITY, 1.0], 127.0, f32::NAN, &[0, 0]);
        check(&[f32::NAN, 1.0], 32639.0, f32::NAN, &[0, 0]);
        check(&[MAGNITUDE_MAX, 1.0], 32639.0, f32::NAN, &[0, 0]);
        check(&[1.0, 0.5, -1.0], 32639.0, 1.0 / 32639.0, &[32639, 16320, -32639]);
    }

    #[test]
    fn no_magnitude_leaves_the_code_range() {
        let mut bits = MAGNITUDE_MIN.to_bits();
        while bits < MAGNITUDE_MAX.to_bits() {
            let m = f32::from_bits(bits);
            for limit in [127.0, 32639.0] {
                assert_eq!(Quantizer::of(&[m], limit).code(-m), -(limit as i32));
            }
            bits += 12_347;
        }
    }

    /// Stores one key of head 1.
    fn put(pool: &mut KvPages, page: usize, key: usize, k: &[f32], v: &[f32]) {
        let (layout, limit) = (pool.layout, pool.shape.form.limit());
        let block = page * pool.shape.kv_heads + 1;
        let codes = &mut pool.codes[block * layout.codes()..][..layout.codes()];
        let scales = &mut pool.scales[block * layout.scales()..][..layout.scales()];
        let mut numbers = vec![0; layout.head_dim];
        store(Isa::detect(), k, v, &mut numbers, Target { layout, limit, key, codes, scales });
    }

    /// Many rows, which threads share, and the same rows one step after another.
    #[test]
    fn threads_write_what_one_does() {
        let shape = KvShape { pages: 4, kv_heads: 3, head_dim: 40, form: KvForm::Int16 };
        let rows = 90;
        let values: Vec<f32> = (0..rows * 3 * 40).map(|i| (i as f32 * 0.37).sin()).collect();
        let step = |first: usize, rows: usize| {
            let list = (first..first + rows).map(|at| Row { token: None, position: [at as u32; 3] });
            let window = Window {
                place: 0,
                first: 0,
                rows,
                start: first,
                pages: vec![3, 1],
                parents: None,
                commit: true,
            };
            Step::new(list.collect(), vec![window]).expect("a valid step")
        };
        let workers = Workers { pool: Pool::new(3), isa: Isa::detect() };
        let [mut together, mut apart] = [(); 2].map(|()| KvPages::new(shape).expect("valid"));
        assert!(rows * 3 >= ROWS_TOGETHER && 3 < ROWS_TOGETHER);
        together.append(&workers, &step(0, rows), &values, &values);
        for row in 0..rows {
            let values = &values[row * 120..][..120];
            apart.append(&workers, &step(row, 1), values, values);
        }
        for page in [1, 3] {
            assert_eq!(together.export(page), apart.export(page));
        }
    }

    #[test]
    fn pages_round_trip_and_keys_move() {
        for (form, head_dim) in [(KvForm::Int8, 72), (KvForm::Int16, 33)] {
            let mut pool = KvPages::new(KvShape { pages: 3, kv_heads: 2, head_dim, form }).expect("valid");
            let values: Vec<f32> = (0..head_dim).map(|i| (i as f32 * 0.7).sin()).collect();
            let other: Vec<f32> = (0..head_dim).map(|i| (i as f32 * 0.3).cos()).collect();
            put(&mut pool, 0, 6, &values, &other);
            let bytes = pool.export(0);
            assert!(pool.import(1, &bytes[1..]).is_err());
            pool.import(1, &bytes).expect("whole page");
            assert_eq!(pool.export(1), bytes);
            // The same token at place 3 through a move and by storing it there.
            pool.move_token(&[2, 0], 70, 3);
            let mut direct = KvPages::new(pool.shape).expect("valid");
            put(&mut direct, 2, 3, &values, &other);
            assert_eq!(pool.export(2), direct.export(2));
        }
    }
}
