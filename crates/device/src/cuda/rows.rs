//! Stages that work row by row: norms, gates, joins, and the codes of activations.

use super::command::Command;
use super::driver::Result;
use super::launch::{Args, Kernel, Launch};
use super::lower::Lowering;
use super::memory::{Codes, Span};
use super::packing::SLICE;
use super::warpgroup;
use crate::{Buffer, Picks, VectorRef};

/// Threads of a block of elementwise kernels.
const BLOCK: u32 = 256;
/// Threads of a normed row where rows are few, and of a normed head.
const NORM_BLOCK: u32 = 512;
const HEAD_BLOCK: u32 = 128;
/// Values of a head that a warp norms by itself.
const WARP_HEAD: usize = 128;
/// From more rows on a stage has its form of `rows_prompt.cu`.
const FEW_ROWS: usize = 64;
/// `SLICES_MAX` of these.
const SLICES_MAX: usize = 8;
/// Commands after a writer in which the reader of its codes is looked for.
const LOOK_AHEAD: usize = 6;

fn kernel(name: &'static str) -> Kernel {
    Kernel::new("rows.cu", name)
}

/// Blocks of [`BLOCK`] threads over `values` values, four a thread.
fn quads(values: usize) -> usize {
    values.div_ceil(4 * BLOCK as usize).max(1)
}

/// Rows from `row` on take the values of the span.
fn write(c: &mut Lowering<'_>, buffer: Buffer, row: usize, values: Span) {
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

/// [`crate::Device::join`].
fn join(c: &mut Lowering<'_>, a: Buffer, b: Buffer, rows: usize, out: Buffer) {
    let (a, b, out) = (c.plane(a), c.plane(b), c.output(out));
    let args = Args::new().ptr(a.ptr).size(a.width).ptr(b.ptr).size(b.width).ptr(out.ptr);
    c.launch(kernel("join_rows"), [quads(out.width), rows, 1], BLOCK, args);
}

/// [`crate::Device::gather`].
fn gather(c: &mut Lowering<'_>, x: Buffer, rows: usize, from: Span, out: Buffer) {
    let (x, from, out) = (c.plane(x), c.span(from), c.output(out));
    let args = Args::new().ptr(x.ptr).size(x.width).ptr(from).ptr(0).ptr(out.ptr);
    c.launch(kernel("gather_rows"), [quads(x.width), rows, 1], BLOCK, args);
}

/// [`crate::Device::copy_rows`]; `words` holds the rows of `x`, then those of `out`.
fn copy_rows(c: &mut Lowering<'_>, x: Buffer, rows: usize, words: Span, out: Buffer) {
    let (x, from, out) = (c.plane(x), c.span(words), c.output(out));
    let args = Args::new().ptr(x.ptr).size(x.width).ptr(from).ptr(from + 4 * rows as u64).ptr(out.ptr);
    c.launch(kernel("gather_rows"), [quads(x.width), rows, 1], BLOCK, args);
}

/// Lowers the leading command, a stage of this file, with those after it that fit into its launch; says how
/// many.
pub(super) fn lower(c: &mut Lowering<'_>, commands: &[Command]) -> Result<usize> {
    use Command as C;
    let rest = &commands[1..];
    match commands[0] {
        C::Write { buffer, row, values } => write(c, buffer, row, values),
        C::Join { a, b, rows, out } => join(c, a, b, rows, out),
        C::Gather { x, rows, from, out } => gather(c, x, rows, from, out),
        C::CopyRows { x, rows, words, out } => copy_rows(c, x, rows, words, out),
        C::Norm { x, rows, weight, eps, out } => {
            norm(c, Sum { x, delta: None, mix: [0; 5] }, rows, (weight, eps), out, rest)?;
        }
        C::AddNorm { x, delta, rows, weight, eps, out } => {
            norm(c, Sum { x, delta: Some(delta), mix: [0; 5] }, rows, (weight, eps), out, rest)?;
        }
        C::GatedNorm { x, z, rows, weight, eps } => gated_norm(c, x, z, rows, (weight, eps), rest)?,
        C::OutGate { x, qg, rows, head_dim } => {
            let (width, gates) = (c.plane(x).width, c.plane(qg).ptr);
            if in_slices(rows, width) && head_dim.is_multiple_of(4) && SLICE.is_multiple_of(head_dim) {
                let args = Args::new().ptr(c.output(x).ptr).ptr(gates).size(width).size(head_dim);
                by_slices(c, "out_gate_many", args, rows, x, rest)?;
                return Ok(1);
            }
            let args = Args::new().ptr(c.output(x).ptr).ptr(gates).size(width).size(head_dim);
            elementwise(c, "out_gate_rows", args, rows, x, rest)?;
        }
        C::Swiglu { gate, up, rows, out } => {
            let args = Args::new().ptr(c.plane(gate).ptr).ptr(c.plane(up).ptr);
            let to = c.output(out);
            if in_slices(rows, to.width) {
                by_slices(c, "swiglu_many", args.size(to.width), rows, out, rest)?;
                return Ok(1);
            }
            elementwise(c, "swiglu_rows", args.ptr(to.ptr).size(to.width), rows, out, rest)?;
        }
        C::Combine { routed, picks, shared, gate, rows, out } => {
            let mix = mix(c, routed, picks, shared, gate);
            if let Some(&C::AddNorm { x, delta, rows: same, weight, eps, out: normed }) = rest.first()
                && (delta, same) == (out, rows)
            {
                let sum = Sum { x, delta: Some(delta), mix };
                norm(c, sum, rows, (weight, eps), normed, &rest[1..])?;
                return Ok(2);
            }
            let out = c.output(out);
            let args = Args::new().words(&mix).ptr(out.ptr).size(out.width);
            c.launch(kernel("combine_rows"), [quads(out.width), rows, 1], BLOCK, args);
        }
        _ => unreachable!("only stages of this file are lowered here"),
    }
    Ok(1)
}

/// The kernels' `Mix`.
fn mix(c: &Lowering<'_>, routed: Buffer, picks: Picks, shared: Buffer, gate: Buffer) -> [u64; 5] {
    let (_, weights, k) = c.picks(picks);
    [c.plane(routed).ptr, weights, c.plane(shared).ptr, c.plane(gate).ptr, k as u64]
}

/// Codes that the writer of `out` makes for the next reader, or none. `width`: values that are quantized
/// together hold whole groups.
pub(super) fn codes_for(
    c: &mut Lowering<'_>,
    out: Buffer,
    rows: usize,
    rest: &[Command],
    width: usize,
) -> Result<[u64; 4]> {
    let group = rest.iter().take(LOOK_AHEAD).find_map(|command| c.group_wanted(command, out));
    match group.filter(|&group| width.is_multiple_of(group)) {
        Some(group) => Ok(c.codes_written(out, rows, group)?.words()),
        None => Ok([0; 4]),
    }
}

/// A launch over quads of rows whose last parameter is the codes of `out`.
fn elementwise(
    c: &mut Lowering<'_>,
    name: &'static str,
    args: Args,
    rows: usize,
    out: Buffer,
    rest: &[Command],
) -> Result {
    let width = c.plane(out).width;
    let codes = codes_for(c, out, rows, rest, width)?;
    // Narrow rows have whole warps enough for their quads.
    let block = (width.div_ceil(4).next_multiple_of(32) as u32).clamp(32, BLOCK);
    c.launch(kernel(name), [quads(width), rows, 1], block, args.words(&codes));
    Ok(())
}

/// Is there a form of `rows_prompt.cu`?
fn in_slices(rows: usize, width: usize) -> bool {
    rows > FEW_ROWS && width.is_multiple_of(4) && width.div_ceil(SLICE) <= SLICES_MAX
}

/// Shared memory of a row there (slices.cuh, `held_row`).
fn held_bytes(width: usize) -> u32 {
    5 * (width.div_ceil(SLICE) * SLICE) as u32
}

/// Where rows of `out` go: address of the plane, or 0 where nobody reads it, and the kernels' `RowCodes`.
fn outputs(c: &mut Lowering<'_>, out: Buffer, rows: usize, rest: &[Command]) -> Result<(u64, [u64; 9])> {
    let (to, demand) = (c.plane(out), c.demand(out, rows, rest));
    let mut words = [0; 9];
    let Some(group) = demand.group.filter(|&group| to.width.is_multiple_of(group)) else {
        return Ok((to.ptr, words));
    };
    let codes = match demand.aligned {
        true => {
            words[4..].copy_from_slice(&warpgroup::aligned_written(c, out, rows, group)?.row_words());
            c.codes_place(out, group)?
        }
        false => c.codes_written(out, rows, group)?,
    };
    words[..4].copy_from_slice(&codes.words());
    Ok((if demand.values { to.ptr } else { 0 }, words))
}

/// A launch of a block a row, whose last parameters are the row's places.
fn by_slices(
    c: &mut Lowering<'_>,
    name: &'static str,
    args: Args,
    rows: usize,
    out: Buffer,
    rest: &[Command],
) -> Result {
    let width = c.plane(out).width;
    let (to, codes) = outputs(c, out, rows, rest)?;
    c.push(Launch {
        kernel: Kernel::new("rows_prompt.cu", name),
        grid: [rows as u32, 1, 1],
        block: BLOCK.min(width.div_ceil(4).next_multiple_of(32) as u32),
        shared: held_bytes(width),
        args: args.ptr(to).words(&codes),
    });
    Ok(())
}

/// What is normed: `x`, after `delta` was added to it, which may be mixed in the same launch.
struct Sum {
    x: Buffer,
    delta: Option<Buffer>,
    mix: [u64; 5],
}

/// [`crate::Device::norm`] and [`crate::Device::add_norm`].
fn norm(
    c: &mut Lowering<'_>,
    sum: Sum,
    rows: usize,
    (weight, eps): (VectorRef, u32),
    out: Buffer,
    rest: &[Command],
) -> Result {
    let (weight, width) = c.vector(weight);
    if in_slices(rows, width) {
        return norm_many(c, sum, rows, (weight, width, eps), out, rest);
    }
    let delta = match sum.delta {
        Some(delta) if sum.mix[0] != 0 => c.output(delta).ptr,
        Some(delta) => c.plane(delta).ptr,
        None => 0,
    };
    if sum.delta.is_some() {
        c.written(sum.x);
    }
    let (x, to) = (c.plane(sum.x), c.output(out));
    let codes = codes_for(c, out, rows, rest, width)?;
    let args = Args::new().ptr(x.ptr).ptr(delta).words(&sum.mix).ptr(weight).size(width);
    c.push(Launch {
        kernel: kernel("norm_rows"),
        grid: [rows as u32, 1, 1],
        block: NORM_BLOCK,
        shared: 4 * width.next_multiple_of(4) as u32,
        args: args.f32(f32::from_bits(eps)).ptr(to.ptr).words(&codes),
    });
    Ok(())
}

/// [`norm`] of many rows, whose width is a multiple of 4.
fn norm_many(
    c: &mut Lowering<'_>,
    sum: Sum,
    rows: usize,
    (weight, width, eps): (u64, usize, u32),
    out: Buffer,
    rest: &[Command],
) -> Result {
    let (mut delta, mut mixed) = (0, 0);
    if let Some(of) = sum.delta {
        c.written(sum.x);
        match sum.mix[0] {
            0 => delta = c.plane(of).ptr,
            _ if c.demand(of, rows, rest).values => mixed = c.output(of).ptr,
            _ => c.written(of),
        }
    }
    c.written(out);
    let x = c.plane(sum.x).ptr;
    let summed: Vec<u64> = [x, delta, mixed].into_iter().chain(sum.mix).collect();
    let args = Args::new().words(&summed);
    let (to, codes) = outputs(c, out, rows, rest)?;
    let name = if sum.mix[0] == 0 { "norm_rows_many" } else { "norm_mixed_many" };
    c.push(Launch {
        kernel: Kernel::new("rows_prompt.cu", name),
        grid: [rows as u32, 1, 1],
        block: BLOCK,
        shared: held_bytes(width),
        args: args.ptr(weight).size(width).f32(f32::from_bits(eps)).ptr(to).words(&codes),
    });
    Ok(())
}

/// [`crate::Device::gated_norm`].
fn gated_norm(
    c: &mut Lowering<'_>,
    x: Buffer,
    z: Buffer,
    rows: usize,
    (weight, eps): (VectorRef, u32),
    rest: &[Command],
) -> Result {
    let (z, (weight, head), to) = (c.plane(z), c.vector(weight), c.output(x));
    let from = Args::new().ptr(to.ptr).ptr(z.ptr).ptr(weight);
    if head == WARP_HEAD && in_slices(rows, to.width) {
        let args = from.size(to.width).f32(f32::from_bits(eps));
        return by_slices(c, "gated_norm_many", args, rows, x, rest);
    }
    let codes = codes_for(c, x, rows, rest, head)?;
    let (args, heads) = (from, to.width / head);
    if head == WARP_HEAD {
        let args = args.size(heads).size(rows * heads).f32(f32::from_bits(eps)).words(&codes);
        let grid = [(rows * heads).div_ceil(BLOCK as usize / 32), 1, 1];
        c.launch(Kernel::new("gated_norm.cu", "gated_norm_128"), grid, BLOCK, args);
        return Ok(());
    }
    let args = args.size(head).f32(f32::from_bits(eps));
    let grid = [heads, rows, 1];
    c.launch(kernel("gated_norm_heads"), grid, HEAD_BLOCK, args.words(&codes));
    Ok(())
}
