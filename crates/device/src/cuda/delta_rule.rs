//! The stage `delta_rule` on CUDA (`kernels/cuda/{delta_rule,delta_scan}.cu`).
//!
//! Windows of up to [`WINDOW_ROWS`] rows are one launch that does everything; longer ones get their keys,
//! queries and gates prepared first.

use super::command::Command;
use super::conv;
use super::driver::Result;
use super::launch::{Args, Launch};
use super::lower::Lowering;
use super::state::States;
use crate::{Buffer, StatePool, VectorRef};

const BLOCK: u32 = 256;
/// Twice the `THREADS` of `delta_scan.cu`.
const SCAN_THREADS: u32 = 256;
/// `WINDOW_ROWS` of the kernels.
const WINDOW_ROWS: usize = 32;

/// The kernels' `DeltaInputs`.
struct Inputs([u64; 7]);

impl Inputs {
    fn new(
        c: &mut Lowering<'_>,
        states: &States,
        [mixed, a, b, out]: [Buffer; 4],
        decay: VectorRef,
        dt_bias: VectorRef,
    ) -> Self {
        // The f32 nearest to 1/sqrt(Dk).
        let scale = (1.0 / (states.shape.key_dim as f64).sqrt()) as f32;
        let (mixed, a, b, out) = (c.plane(mixed), c.plane(a), c.plane(b), c.output(out));
        let (decay, dt_bias) = (c.vector(decay).0, c.vector(dt_bias).0);
        Self([mixed.ptr, a.ptr, b.ptr, decay, dt_bias, out.ptr, scale.to_bits() as u64])
    }
}

/// [`crate::Device::delta_rule`].
pub(super) fn lower(
    c: &mut Lowering<'_>,
    mixed: Buffer,
    a: Buffer,
    b: Buffer,
    decay: VectorRef,
    dt_bias: VectorRef,
    pool: StatePool,
    out: Buffer,
) -> Result {
    let (states, shape) = (c.states(pool), c.shape());
    let inputs = Inputs::new(c, &states, [mixed, a, b, out], decay, dt_bias);
    let long = shape.window_rows > WINDOW_ROWS;
    if !long || shape.windows > 1 {
        let args = Args::new().step(&c.step()).words(&states.words()).words(&inputs.0);
        let rows = shape.window_rows.min(WINDOW_ROWS);
        c.push(Launch {
            kernel: states
                .kernel("delta_rule.cu", "delta_window")
                .define("ONE_ROW_WINDOWS", u32::from(shape.window_rows == 1)),
            grid: [states.head_blocks() as u32, shape.windows as u32, 1],
            block: BLOCK,
            shared: (rows * states.row_bytes()) as u32,
            args,
        });
    }
    if !long {
        return Ok(());
    }
    let prepared = prepared(c, &states)?;
    let args = Args::new().words(&states.words()).words(&inputs.0).words(&prepared);
    c.launch(states.kernel("delta_scan.cu", "delta_prepare"), [shape.rows, 1, 1], BLOCK, args);
    scan(c, &states, &inputs, prepared);
    Ok(())
}

/// The place of the kernels' `Prepared`.
fn prepared(c: &mut Lowering<'_>, states: &States) -> Result<[u64; 2]> {
    let (of, rows) = (states.shape, c.shape().rows);
    let qk = c.scratch("delta keys and queries", 4 * rows * of.key_heads * 2 * states.spread())?;
    Ok([qk, c.scratch("delta gates", 4 * rows * of.value_heads * 2)?])
}

/// The rule over long windows.
fn scan(c: &mut Lowering<'_>, states: &States, inputs: &Inputs, prepared: [u64; 2]) {
    let args = Args::new().step(&c.step()).words(&states.words()).words(&inputs.0).words(&prepared);
    let grid = [states.head_blocks(), c.shape().windows, 1];
    c.launch(states.kernel("delta_scan.cu", "delta_scan"), grid, SCAN_THREADS, args);
}

/// Lowers the leading [`Command::Conv`] with the delta rule behind it where one long window's outputs can be
/// prepared for the rule at once (`kernels/cuda/conv_prompt.cu`); says how many.
pub(super) fn lower_prompt(c: &mut Lowering<'_>, commands: &[Command]) -> Result<Option<usize>> {
    let [
        Command::Conv { x, taps, pool, out: mixed },
        Command::DeltaRule { mixed: read, a, b, decay, dt_bias, pool: same, out },
        ref rest @ ..,
    ] = *commands
    else {
        return Ok(None);
    };
    let (states, shape) = (c.states(pool), c.shape());
    let of = states.shape;
    let whole_blocks = (of.key_heads * of.key_dim).is_multiple_of(conv::BLOCK);
    let fits = of.key_dim == states.spread() && conv::BLOCK.is_multiple_of(of.key_dim) && whole_blocks;
    let apart = ![x, a, b].contains(&mixed) && ![x, a, b, mixed].contains(&out);
    let meant = read == mixed && same == pool && shape.windows == 1 && shape.window_rows > WINDOW_ROWS;
    if !(fits && apart && meant) {
        return Ok(None);
    }
    let taps = conv::taps_of(c, taps, &states)?;
    let whole = c.demand(mixed, shape.rows, rest).values;
    let (x, to) = (c.plane(x).ptr, c.output(mixed).ptr);
    let inputs = Inputs::new(c, &states, [mixed, a, b, out], decay, dt_bias);
    let prepared = prepared(c, &states)?;
    let args = Args::new().step(&c.step()).words(&states.words()).words(&inputs.0).words(&prepared);
    let kernel = states.kernel("conv_prompt.cu", "conv_prompt").define("CONV_TAPS", of.conv_taps as u32);
    let grid = [of.channels().div_ceil(conv::BLOCK) + 1, shape.window_rows.div_ceil(conv::CHUNK), 1];
    c.launch(kernel, grid, conv::BLOCK as u32, args.words(&[x, taps, to, u64::from(whole)]));
    conv::advance(c, &states, x);
    scan(c, &states, &inputs, prepared);
    Ok(Some(2))
}
