//! Stages that work row by row: norms, gates, joins, and the codes of activations.

use super::launch::{Args, Kernel};
use super::lower::Lowering;
use super::memory::{Codes, Span};
use crate::{Buffer, Picks, VectorRef};

/// Threads of a block.
const BLOCK: u32 = 256;
/// `Codes` that ask for nothing.
const NO_CODES: [u64; 4] = [0; 4];

fn kernel(name: &'static str) -> Kernel {
    Kernel::new("rows.cu", name)
}

/// Blocks of [`BLOCK`] threads over `values` values, four a thread.
fn quads(values: usize) -> usize {
    values.div_ceil(4 * BLOCK as usize).max(1)
}

/// Rows from `row` on take the values of the span.
pub(super) fn write(c: &mut Lowering<'_>, buffer: Buffer, row: usize, values: Span) {
    let (plane, from) = (c.output(buffer), c.span(values));
    let count = values.bytes as usize / 4;
    let args = Args::new().ptr(plane.ptr + 4 * (row * plane.width) as u64).ptr(from).size(count);
    c.launch(kernel("copy_values"), [quads(count), 1, 1], BLOCK, args);
}

/// Codes of the first `rows` rows of a plane.
pub(super) fn quantize(c: &mut Lowering<'_>, x: Buffer, rows: usize, codes: Codes) {
    let plane = c.plane(x);
    let args = Args::new().ptr(plane.ptr).size(plane.width).words(&codes.words());
    c.launch(kernel("quantize_rows"), [quads(plane.width), rows, 1], BLOCK, args);
}

/// [`crate::Device::norm`].
pub(super) fn norm(c: &mut Lowering<'_>, x: Buffer, rows: usize, weight: VectorRef, eps: u32, out: Buffer) {
    let (from, (weight, width), to) = (c.plane(x), c.vector(weight), c.output(out));
    let args = Args::new().ptr(from.ptr).ptr(0).ptr(weight).size(width);
    let args = args.f32(f32::from_bits(eps)).ptr(to.ptr).words(&NO_CODES);
    c.launch(kernel("norm_rows"), [rows, 1, 1], BLOCK, args);
}

/// [`crate::Device::add_norm`].
pub(super) fn add_norm(
    c: &mut Lowering<'_>,
    x: Buffer,
    delta: Buffer,
    rows: usize,
    weight: VectorRef,
    eps: u32,
    out: Buffer,
) {
    let (sum, (weight, width), to) = (c.output(x), c.vector(weight), c.output(out));
    let args = Args::new().ptr(sum.ptr).ptr(c.plane(delta).ptr).ptr(weight).size(width);
    let args = args.f32(f32::from_bits(eps)).ptr(to.ptr).words(&NO_CODES);
    c.launch(kernel("norm_rows"), [rows, 1, 1], BLOCK, args);
}

/// [`crate::Device::join`].
pub(super) fn join(c: &mut Lowering<'_>, a: Buffer, b: Buffer, rows: usize, out: Buffer) {
    let (a, b, out) = (c.plane(a), c.plane(b), c.output(out));
    let args = Args::new().ptr(a.ptr).size(a.width).ptr(b.ptr).size(b.width).ptr(out.ptr);
    c.launch(kernel("join_rows"), [quads(out.width), rows, 1], BLOCK, args);
}

/// [`crate::Device::gather`].
pub(super) fn gather(c: &mut Lowering<'_>, x: Buffer, rows: usize, from: Span, out: Buffer) {
    let (x, from, out) = (c.plane(x), c.span(from), c.output(out));
    let args = Args::new().ptr(x.ptr).size(x.width).ptr(from).ptr(0).ptr(out.ptr);
    c.launch(kernel("gather_rows"), [quads(x.width), rows, 1], BLOCK, args);
}

/// [`crate::Device::copy_rows`]; `words` holds the rows of `x`, then those of `out`.
pub(super) fn copy_rows(c: &mut Lowering<'_>, x: Buffer, rows: usize, words: Span, out: Buffer) {
    let (x, from, out) = (c.plane(x), c.span(words), c.output(out));
    let args = Args::new().ptr(x.ptr).size(x.width).ptr(from).ptr(from + 4 * rows as u64).ptr(out.ptr);
    c.launch(kernel("gather_rows"), [quads(x.width), rows, 1], BLOCK, args);
}

/// [`crate::Device::gated_norm`].
pub(super) fn gated_norm(
    c: &mut Lowering<'_>,
    x: Buffer,
    z: Buffer,
    rows: usize,
    weight: VectorRef,
    eps: u32,
) {
    let (z, (weight, head), x) = (c.plane(z), c.vector(weight), c.output(x));
    let args = Args::new().ptr(x.ptr).ptr(z.ptr).ptr(weight).size(head).f32(f32::from_bits(eps));
    c.launch(kernel("gated_norm_heads"), [rows * x.width / head, 1, 1], BLOCK, args);
}

/// [`crate::Device::out_gate`].
pub(super) fn out_gate(c: &mut Lowering<'_>, x: Buffer, qg: Buffer, rows: usize, head_dim: usize) {
    let (qg, x) = (c.plane(qg), c.output(x));
    let args = Args::new().ptr(x.ptr).ptr(qg.ptr).size(x.width).size(head_dim).words(&NO_CODES);
    c.launch(kernel("out_gate_rows"), [quads(x.width), rows, 1], BLOCK, args);
}

/// [`crate::Device::swiglu`].
pub(super) fn swiglu(c: &mut Lowering<'_>, gate: Buffer, up: Buffer, rows: usize, out: Buffer) {
    let (gate, up, out) = (c.plane(gate), c.plane(up), c.output(out));
    let args = Args::new().ptr(gate.ptr).ptr(up.ptr).ptr(out.ptr).size(out.width).words(&NO_CODES);
    c.launch(kernel("swiglu_rows"), [quads(out.width), rows, 1], BLOCK, args);
}

/// [`crate::Device::combine`].
pub(super) fn combine(
    c: &mut Lowering<'_>,
    routed: Buffer,
    picks: Picks,
    shared: Buffer,
    gate: Buffer,
    rows: usize,
    out: Buffer,
) {
    let (_, weights, k) = c.picks(picks);
    let (routed, shared, gate, out) = (c.plane(routed), c.plane(shared), c.plane(gate), c.output(out));
    let args = Args::new().ptr(routed.ptr).ptr(weights).size(k).ptr(shared.ptr).ptr(gate.ptr);
    c.launch(kernel("combine_rows"), [quads(out.width), rows, 1], BLOCK, args.ptr(out.ptr).size(out.width));
}
