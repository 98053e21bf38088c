//! Convolution, delta rule and gated norm of short windows in one launch (`kernels/cuda/delta_step.cu`).

use super::command::Command;
use super::driver::Result;
use super::launch::{Args, Launch};
use super::lower::Lowering;
use super::rows;
use crate::{Buffer, StatePool, VectorRef};

/// Longest window (`STEP_ROWS` of the kernel).
const ROWS_MAX: usize = 8;
/// More windows fill the card with the launches of their own, which hold less of it at a time.
const WINDOWS_MAX: usize = 8;
/// The widest heads that a block and a warp hold.
const VALUE_DIM_MAX: usize = 128;
const KEY_DIM_MAX: usize = 128;

/// The three commands of a layer.
struct Layer {
    x: Buffer,
    taps: VectorRef,
    pool: StatePool,
    mixed: Buffer,
    gates: [Buffer; 2],
    decay: VectorRef,
    dt_bias: VectorRef,
    out: Buffer,
    z: Buffer,
    weight: VectorRef,
    eps: u32,
}

impl Layer {
    /// The leading commands, if they are a layer whose windows are short enough.
    fn of(c: &Lowering<'_>, commands: &[Command]) -> Option<Self> {
        let [
            Command::Conv { x, taps, pool, out: mixed },
            Command::DeltaRule { mixed: read, a, b, decay, dt_bias, pool: same, out },
            Command::GatedNorm { x: normed, z, rows, weight, eps },
            ..,
        ] = *commands
        else {
            return None;
        };
        let (shape, of) = (c.shape(), c.states(pool).shape);
        let chained = read == mixed && same == pool && normed == out && rows == shape.rows;
        let apart = ![x, a, b, z].iter().any(|&buffer| buffer == mixed || buffer == out) && mixed != out;
        let small = shape.window_rows <= ROWS_MAX && shape.windows <= WINDOWS_MAX;
        let fits = of.value_dim.is_multiple_of(4)
            && of.value_dim <= VALUE_DIM_MAX
            && of.key_dim <= KEY_DIM_MAX
            && c.vector(weight).1 == of.value_dim
            && c.vector(taps).1 == of.channels() * of.conv_taps;
        let layer = Self { x, taps, pool, mixed, gates: [a, b], decay, dt_bias, out, z, weight, eps };
        (chained && apart && small && fits).then_some(layer)
    }
}

/// Lowers the leading [`Command::Conv`] with the delta rule and the gated norm behind it, if it can; says
/// how many.
pub(super) fn lower(c: &mut Lowering<'_>, commands: &[Command]) -> Result<Option<usize>> {
    let Some(layer) = Layer::of(c, commands) else { return Ok(None) };
    let Layer { x, taps, pool, mixed, gates, decay, dt_bias, out, z, weight, eps } = layer;
    let (states, step) = (c.states(pool), c.shape());
    let of = states.shape;
    let readers = c.scratch("delta readers", 4 * step.windows * of.key_heads)?;
    // The f32 nearest to 1/sqrt(Dk).
    let scale = (1.0 / (of.key_dim as f64).sqrt()) as f32;
    let [a, b] = gates.map(|buffer| c.plane(buffer).ptr);
    let (x, z) = (c.plane(x).ptr, c.plane(z).ptr);
    let vectors = [taps, decay, dt_bias, weight].map(|vector| c.vector(vector).0);
    let (mixed, plane) = (c.output(mixed).ptr, c.output(out));
    let codes = rows::codes_for(c, out, step.rows, &commands[3..], of.value_dim)?;
    let mut words = vec![x, vectors[0], mixed, a, b, vectors[1], vectors[2], z, vectors[3], plane.ptr];
    words.extend(codes);
    words.extend([readers, scale.to_bits() as u64 | (eps as u64) << 32]);
    let rows = step.window_rows;
    let wide = 2 * of.key_dim + of.value_dim;
    let values = rows * (2 * states.spread() + wide + 2 * of.value_dim + 2) + wide * (2 * of.conv_taps - 1);
    c.push(Launch {
        kernel: states.kernel("delta_step.cu", "delta_step").define("CONV_TAPS", of.conv_taps),
        grid: [of.value_heads as u32, step.windows as u32, 1],
        block: 8 * of.value_dim as u32,
        shared: 4 * values as u32,
        args: Args::new().step(&c.step()).words(&states.words()).words(&words).size(rows),
    });
    Ok(Some(3))
}
