//! Quantized activations in the order the kernels read them.
//!
//! Rows are taken in *blocks* of a few rows that one kernel call works on. A block of `r` rows is stored as
//! `[quad][row]` of two words, so a kernel walks one contiguous stream whatever `r` is, and rows whose
//! distance is a large power of two never compete for the same cache set. The two words of a quad hold its
//! four codes as the instruction set wants them ([`Order`]). Beside them, `[group][row]`, are the unit and
//! the sum of the codes.

use std::ops::Range;

use quant::{ACTIVATION_BITS, MAGNITUDE_MAX, MAGNITUDE_MIN};

use super::{layout::UNIT, tile::Floats};
use crate::cpu::{
    isa::{Isa, Kind, by_isa},
    math::power_of_two,
    pool::{Disjoint, Pool},
};

/// Most rows of a block.
pub(in crate::cpu) const BLOCK_MAX: usize = 6;
/// Longest group.
const GROUP_MAX: usize = 128;
/// Values below which waking the pool costs more than quantizing alone.
const VALUES_ALONE: usize = 16 * 1024;

/// How the codes `c0..c3` of a quad lie in two words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) enum Order {
    /// 16-bit codes `[c0, c1] [c2, c3]`.
    Plain,
    /// 16-bit codes `[c0, c2] [c1, c3]`, to meet the even and odd bytes of weights.
    EvenOdd,
    /// 8-bit digits `[h0, h1, h2, h3] [l0, l1, l2, l3]`, `code = 256 h + l`.
    HighLow,
}

impl Order {
    pub(in crate::cpu) fn of(isa: Isa) -> Self {
        match isa.kind() {
            Kind::Scalar => Self::Plain,
            Kind::Avx2 | Kind::Avx512 => Self::EvenOdd,
            Kind::Avx512Vnni => Self::HighLow,
        }
    }
}

/// The codes of one quad of one row.
pub(in crate::cpu) type Words = [u32; 2];

/// What kernels need of one group of one row besides its codes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::cpu) struct GroupUnit {
    /// `u`: value = code * unit; NaN for a group that faults.
    pub(in crate::cpu) unit: f32,
    /// `csum`, the sum of the codes.
    pub(in crate::cpu) sum: i32,
    /// `csum * u` in f32.
    pub(in crate::cpu) sum_unit: f32,
}

/// A block of rows as a kernel sees it.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Block<'a> {
    /// Rows of the block, 1 to [`BLOCK_MAX`].
    pub(in crate::cpu) rows: usize,
    /// `[cols / 4][rows]`.
    pub(in crate::cpu) words: &'a [Words],
    /// `[cols / group][rows]`.
    pub(in crate::cpu) groups: &'a [GroupUnit],
}

/// Rows `[rows, cols]` quantized in groups of one length, block after block.
#[derive(Default)]
pub(in crate::cpu) struct Form {
    cols: usize,
    group: usize,
    words: Vec<Words>,
    groups: Vec<GroupUnit>,
}

impl Form {
    /// Sizes the form for `rows` rows; what it held is lost.
    pub(in crate::cpu) fn resize(&mut self, rows: usize, cols: usize, group: usize) {
        assert!(group <= GROUP_MAX && group.is_multiple_of(UNIT), "groups of {group}");
        assert!(cols.is_multiple_of(group), "{cols} columns in groups of {group}");
        (self.cols, self.group) = (cols, group);
        self.words.resize(rows * cols / 4, Words::default());
        self.groups.resize(rows * cols / group, GroupUnit::default());
    }

    /// The block of the rows `rows`.
    pub(in crate::cpu) fn block(&self, rows: Range<usize>) -> Block<'_> {
        let (words, groups) = (self.cols / 4, self.cols / self.group);
        Block {
            rows: rows.len(),
            words: &self.words[rows.start * words..rows.end * words],
            groups: &self.groups[rows.start * groups..rows.end * groups],
        }
    }

    /// The form as parts that tasks fill.
    pub(in crate::cpu) fn writer(&mut self) -> FormWriter<'_> {
        FormWriter {
            cols: self.cols,
            group: self.group,
            words: Disjoint::new(&mut self.words),
            groups: Disjoint::new(&mut self.groups),
        }
    }
}

/// Write access to a [`Form`] for several tasks.
pub(in crate::cpu) struct FormWriter<'a> {
    cols: usize,
    group: usize,
    words: Disjoint<'a, Words>,
    groups: Disjoint<'a, GroupUnit>,
}

impl FormWriter<'_> {
    pub(in crate::cpu) fn group(&self) -> usize {
        self.group
    }

    /// Quantizes whole groups of one row: `values` start at column `col` of row `row`, which lies in the
    /// block of the rows `block`.
    ///
    /// # Safety
    /// No other task may write these columns of this block at the same time.
    pub(in crate::cpu) unsafe fn put(
        &self,
        isa: Isa,
        block: Range<usize>,
        row: usize,
        col: usize,
        values: &[f32],
    ) {
        assert!(block.contains(&row) && col.is_multiple_of(self.group));
        assert!(values.len().is_multiple_of(self.group) && col + values.len() <= self.cols);
        // SAFETY: the caller's promise.
        let (words, groups) = unsafe { self.columns(&block, col..col + values.len()) };
        let (rows, row) = (block.len(), row - block.start);
        for (at, values) in values.chunks_exact(self.group).enumerate() {
            let words = &mut words[at * self.group / 4 * rows + row..];
            groups[at * rows + row] = quantize(isa, Order::of(isa), values, rows, words);
        }
    }

    /// Copies row `from` of a form whose blocks are single rows.
    ///
    /// # Safety
    /// No other task may write this block at the same time.
    pub(in crate::cpu) unsafe fn copy(&self, block: Range<usize>, row: usize, source: &Form, from: usize) {
        assert!(block.contains(&row));
        assert_eq!((source.cols, source.group), (self.cols, self.group), "forms of one shape");
        let source = source.block(from..from + 1);
        // SAFETY: the caller's promise.
        let (words, groups) = unsafe { self.columns(&block, 0..self.cols) };
        let (rows, row) = (block.len(), row - block.start);
        for (to, from) in words[row..].iter_mut().step_by(rows).zip(source.words) {
            *to = *from;
        }
        for (to, from) in groups[row..].iter_mut().step_by(rows).zip(source.groups) {
            *to = *from;
        }
    }

    /// Words and units of some columns of a block.
    ///
    /// # Safety
    /// No other task may use them at the same time.
    #[allow(clippy::mut_from_ref)] // as `Disjoint::range`
    unsafe fn columns(&self, block: &Range<usize>, cols: Range<usize>) -> (&mut [Words], &mut [GroupUnit]) {
        let part = |all: usize, from: usize, to: usize| {
            block.start * all + from * block.len()..block.start * all + to * block.len()
        };
        let words = part(self.cols / 4, cols.start / 4, cols.end / 4);
        let groups = part(self.cols / self.group, cols.start / self.group, cols.end / self.group);
        // SAFETY: the caller's promise.
        unsafe { (self.words.range(words), self.groups.range(groups)) }
    }
}

by_isa! {
    /// `Q_14` of one group: [`quant::quantize_group`] with the same results, in a form that vectorizes. The
    /// words of quad `q` go to `words[q * stride]`.
    fn quantize(order: Order, values: &[f32], stride: usize, words: &mut [Words]) -> GroupUnit = quantize_body
}

#[inline(always)]
fn quantize_body(order: Order, values: &[f32], stride: usize, words: &mut [Words]) -> GroupUnit {
    // Known lengths unroll.
    match values.len() {
        32 => quantize_group::<32>(order, values, stride, words),
        64 => quantize_group::<64>(order, values, stride, words),
        128 => quantize_group::<128>(order, values, stride, words),
        len => unreachable!("groups of {len}"),
    }
}

#[inline(always)]
fn quantize_group<const G: usize>(
    order: Order,
    values: &[f32],
    stride: usize,
    words: &mut [Words],
) -> GroupUnit {
    let values: &[f32; G] = values.try_into().expect("checked above");
    let mut codes = [0i16; G];
    let unit = codes_body(values, &mut codes);
    let pair = |low: i16, high: i16| low as u16 as u32 | ((high as u16 as u32) << 16);
    // Loops count, as in `super::kernel`.
    match order {
        Order::Plain => {
            for q in 0..G / 4 {
                let c = &codes[q * 4..q * 4 + 4];
                words[q * stride] = [pair(c[0], c[1]), pair(c[2], c[3])];
            }
        }
        Order::EvenOdd => {
            for q in 0..G / 4 {
                let c = &codes[q * 4..q * 4 + 4];
                words[q * stride] = [pair(c[0], c[2]), pair(c[1], c[3])];
            }
        }
        Order::HighLow => {
            // The low digit is the low byte read as signed; what is left is a multiple of 256.
            let (mut high, mut low) = ([0u8; G], [0u8; G]);
            for k in 0..G {
                high[k] = ((codes[k] + 128) >> 8) as u8;
                low[k] = codes[k] as u8;
            }
            let word = |bytes: &[u8; G], q: usize| {
                u32::from_le_bytes([bytes[q * 4], bytes[q * 4 + 1], bytes[q * 4 + 2], bytes[q * 4 + 3]])
            };
            for q in 0..G / 4 {
                words[q * stride] = [word(&high, q), word(&low, q)];
            }
        }
    }
    unit
}

#[inline(always)]
fn codes_body<const G: usize>(values: &[f32; G], codes: &mut [i16; G]) -> GroupUnit {
    let mut magnitude = 0u32;
    for k in 0..G {
        magnitude = magnitude.max(values[k].to_bits() & 0x7fff_ffff);
    }
    if magnitude < MAGNITUDE_MIN.to_bits() || magnitude >= MAGNITUDE_MAX.to_bits() {
        codes.fill(0);
        let unit = if magnitude < MAGNITUDE_MIN.to_bits() { 0.0 } else { f32::NAN };
        return GroupUnit { unit, sum: 0, sum_unit: unit };
    }
    // 2^(e-1) <= m < 2^e.
    let e = (magnitude >> 23) as i32 - 126;
    let to_code = power_of_two(ACTIVATION_BITS - e);
    let mut sum = 0;
    for k in 0..G {
        let t = values[k] * to_code;
        // Adding 1.5 * 2^23 times the step (1, 2, 4 or 8) rounds to a multiple of the step, ties to even.
        let step_exponent = ((t.to_bits() >> 23) & 0xff).max(127 + 10) - 10;
        let shift = f32::from_bits(((step_exponent + 23) << 23) | 0x0040_0000);
        let rounded = (t + shift) - shift;
        // SAFETY: at most 2^14 in magnitude.
        let value: i32 = unsafe { rounded.to_int_unchecked() };
        codes[k] = value as i16;
        sum += value;
    }
    let unit = power_of_two(e - ACTIVATION_BITS);
    GroupUnit { unit, sum, sum_unit: sum as f32 * unit }
}

/// `rows` rows in blocks of at most `most`: as few as possible, of sizes that differ by one at most.
pub(in crate::cpu) fn blocks(rows: usize, most: usize) -> usize {
    rows.div_ceil(most)
}

/// Rows of block `at` of [`blocks`].
pub(in crate::cpu) fn block_rows(rows: usize, most: usize, at: usize) -> Range<usize> {
    let blocks = blocks(rows, most);
    let (size, longer) = (rows / blocks, rows % blocks);
    let start = |at: usize| at * size + at.min(longer);
    start(at)..start(at + 1)
}

/// Scratch for the quantized forms of one input, one per group length; made anew by every call that uses it.
#[derive(Default)]
pub(crate) struct Activations {
    forms: Vec<Form>,
    /// The input itself, for dense matrices.
    floats: Floats,
}

impl Activations {
    /// Makes room for `rows` rows of `cols` columns in groups of every length in `groups`.
    pub(in crate::cpu) fn resize(&mut self, rows: usize, cols: usize, groups: &[usize]) {
        self.forms.resize_with(groups.len(), Form::default);
        for (form, &group) in self.forms.iter_mut().zip(groups) {
            form.resize(rows, cols, group);
        }
    }

    /// The forms as parts that tasks fill.
    pub(in crate::cpu) fn writers(&mut self) -> Vec<FormWriter<'_>> {
        self.forms.iter_mut().map(Form::writer).collect()
    }

    /// Quantizes `x` `[rows, cols]` for every group length in `groups`, in blocks of at most `most` rows.
    pub(in crate::cpu) fn quantize(
        &mut self,
        pool: &Pool,
        isa: Isa,
        x: &[f32],
        rows: usize,
        most: usize,
        groups: &[usize],
    ) {
        let cols = x.len() / rows;
        self.resize(rows, cols, groups);
        let writers = self.writers();
        let quantize = |at: usize| {
            let block = block_rows(rows, most, at);
            for row in block.clone() {
                for writer in &writers {
                    // SAFETY: every row belongs to one block, every block to one task.
                    unsafe { writer.put(isa, block.clone(), row, 0, &x[row * cols..(row + 1) * cols]) };
                }
            }
        };
        if x.len() * groups.len() <= VALUES_ALONE {
            (0..blocks(rows, most)).for_each(quantize);
        } else {
            pool.run(blocks(rows, most), &quantize);
        }
    }

    /// Packs `x` `[rows, cols]` for dense matrices.
    pub(super) fn pack(&mut self, pool: &Pool, x: &[f32], rows: usize) {
        self.floats.pack(pool, x, rows);
    }

    /// What the last [`Self::pack`] made.
    pub(super) fn floats(&self) -> &Floats {
        &self.floats
    }

    /// The form for groups of that length, if the last [`Self::quantize`] made one.
    pub(in crate::cpu) fn form(&self, group: usize) -> Option<&Form> {
        self.forms.iter().find(|form| form.group == group)
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        let bytes = |form: &Form| {
            form.words.capacity() * size_of::<Words>() + form.groups.capacity() * size_of::<GroupUnit>()
        };
        self.forms.iter().map(bytes).sum::<usize>() + self.floats.bytes()
    }
}
