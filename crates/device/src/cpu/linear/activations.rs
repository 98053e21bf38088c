//! Quantized activations in the order the kernels read them.
//!
//! Rows are taken in *blocks* of a few rows that one kernel call works on. A block of `r` rows is stored as
//! `[quad][row][2 words]`, so a kernel walks one contiguous stream whatever `r` is, and rows whose distance is a
//! large power of two never compete for the same cache set. The two words of a quad hold its four codes as the
//! instruction set wants them ([`Order`]). Beside them, `[group][row]`, are the unit and the sum of the codes.

use std::ops::Range;

use quant::{ACTIVATION_BITS, MAGNITUDE_MAX, MAGNITUDE_MIN};

use super::layout::UNIT;
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
    /// `[cols / 4][rows][2]`.
    pub(in crate::cpu) words: &'a [u32],
    /// `[cols / group][rows]`.
    pub(in crate::cpu) groups: &'a [GroupUnit],
}

/// Rows `[rows, cols]` quantized in groups of one length, block after block.
#[derive(Default)]
pub(in crate::cpu) struct Form {
    cols: usize,
    group: usize,
    words: Vec<u32>,
    groups: Vec<GroupUnit>,
}

impl Form {
    /// Sizes the form for `rows` rows; what it held is lost.
    pub(in crate::cpu) fn resize(&mut self, rows: usize, cols: usize, group: usize) {
        assert!(group <= GROUP_MAX && group.is_multiple_of(UNIT), "groups of {group}");
        assert!(cols.is_multiple_of(group), "{cols} columns in groups of {group}");
        (self.cols, self.group) = (cols, group);
        self.words.resize(rows * cols / 2, 0);
        self.groups.resize(rows * cols / group, GroupUnit::default());
    }

    /// The block of the rows `rows`.
    pub(in crate::cpu) fn block(&self, rows: Range<usize>) -> Block<'_> {
        let (words, groups) = (self.cols / 2, self.cols / self.group);
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
    words: Disjoint<'a, u32>,
    groups: Disjoint<'a, GroupUnit>,
}

impl FormWriter<'_> {
    pub(in crate::cpu) fn group(&self) -> usize {
        self.group
    }

    /// Quantizes whole groups of one row: `values` start at column `col` of row `row`, which lies in the block of the
    /// rows `block`.
    ///
    /// # Safety
    /// No other task may write these columns of this row at the same time.
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
        let (rows, row) = (block.len(), row - block.start);
        let order = Order::of(isa);
        let words = block.start * self.cols / 2;
        let groups = block.start * (self.cols / self.group);
        let mut codes = [0i16; GROUP_MAX];
        for (at, values) in values.chunks_exact(self.group).enumerate() {
            let col = col + at * self.group;
            let codes = &mut codes[..self.group];
            let at = groups + col / self.group * rows + row;
            // SAFETY: the caller's promise; one element of this row.
            unsafe { self.groups.set(at, quantize(isa, values, codes)) };
            for (quad, codes) in codes.chunks_exact(4).enumerate() {
                let at = words + ((col / 4 + quad) * rows + row) * 2;
                // SAFETY: the caller's promise; the two words of this row.
                let words = unsafe { self.words.range(at..at + 2) };
                words.copy_from_slice(&arrange(order, codes.try_into().expect("four codes")));
            }
        }
    }

    /// Copies row `from` of a form whose blocks are single rows.
    ///
    /// # Safety
    /// No other task may write row `row` at the same time.
    pub(in crate::cpu) unsafe fn copy(&self, block: Range<usize>, row: usize, source: &Form, from: usize) {
        assert!(block.contains(&row));
        assert_eq!((source.cols, source.group), (self.cols, self.group), "forms of one shape");
        let source = source.block(from..from + 1);
        let (rows, row) = (block.len(), row - block.start);
        let words = block.start * self.cols / 2;
        for (quad, pair) in source.words.chunks_exact(2).enumerate() {
            let at = words + (quad * rows + row) * 2;
            // SAFETY: the caller's promise; the two words of this row.
            unsafe { self.words.range(at..at + 2) }.copy_from_slice(pair);
        }
        let groups = block.start * (self.cols / self.group);
        for (group, unit) in source.groups.iter().enumerate() {
            // SAFETY: the caller's promise; one element of this row.
            unsafe { self.groups.set(groups + group * rows + row, *unit) };
        }
    }
}

#[inline(always)]
fn arrange(order: Order, [a, b, c, d]: [i16; 4]) -> [u32; 2] {
    let pair = |low: i16, high: i16| low as u16 as u32 | (high as u16 as u32) << 16;
    match order {
        Order::Plain => [pair(a, b), pair(c, d)],
        Order::EvenOdd => [pair(a, c), pair(b, d)],
        Order::HighLow => {
            // The low digit is the low byte read as signed; what is left is a multiple of 256.
            let high = |code: i16| ((code + 128) >> 8) as u8;
            let low = |code: i16| code as u8;
            [[a, b, c, d].map(high), [a, b, c, d].map(low)].map(u32::from_le_bytes)
        }
    }
}

by_isa! {
    /// `Q_14` of one group: [`quant::quantize_group`] with the same results, in a form that vectorizes.
    fn quantize(values: &[f32], codes: &mut [i16]) -> GroupUnit = quantize_body
}

#[inline(always)]
fn quantize_body(values: &[f32], codes: &mut [i16]) -> GroupUnit {
    let magnitude = values.iter().fold(0u32, |m, x| m.max(x.to_bits() & 0x7fff_ffff));
    if magnitude < MAGNITUDE_MIN.to_bits() || magnitude >= MAGNITUDE_MAX.to_bits() {
        codes.fill(0);
        let unit = if magnitude < MAGNITUDE_MIN.to_bits() { 0.0 } else { f32::NAN };
        return GroupUnit { unit, sum: 0, sum_unit: unit };
    }
    // 2^(e-1) <= m < 2^e.
    let e = (magnitude >> 23) as i32 - 126;
    let to_code = power_of_two(ACTIVATION_BITS - e);
    let mut sum = 0;
    for (code, &x) in codes.iter_mut().zip(values) {
        let t = x * to_code;
        // Adding 1.5 * 2^23 times the step (1, 2, 4 or 8) rounds to a multiple of the step, ties to even.
        let step_exponent = ((t.to_bits() >> 23) & 0xff).max(127 + 10) - 10;
        let shift = f32::from_bits((step_exponent + 23) << 23 | 0x0040_0000);
        let rounded = (t + shift) - shift;
        // SAFETY: at most 2^14 in magnitude.
        let value: i32 = unsafe { rounded.to_int_unchecked() };
        *code = value as i16;
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

    /// The form for groups of that length, if the last [`Self::quantize`] made one.
    pub(in crate::cpu) fn form(&self, group: usize) -> Option<&Form> {
        self.forms.iter().find(|form| form.group == group)
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        let bytes = |form: &Form| form.words.capacity() * 4 + form.groups.capacity() * size_of::<GroupUnit>();
        self.forms.iter().map(bytes).sum()
    }
}
