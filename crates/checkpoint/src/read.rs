//! Turns located parts into matrices and vectors, without changing a code or a scale.

use std::thread;

use quant::{Bytes, Encoding, Matrix, Zero, read_float_row};

use crate::{
    Problem,
    folder::Folder,
    locate::{Floats, Layout, Module},
};

/// Threads that transpose; memory bandwidth is the limit from about here.
const THREADS_MAX: usize = 8;
/// A matrix smaller than this is transposed by one thread.
const PANEL_BYTES_MIN: usize = 1 << 20;
/// Output rows of one tile of a transposition: several cache lines of each input row, which lie far apart.
const TILE_ROWS: usize = 64;
/// Elements of each output row in a tile: one cache line of 4-byte ones.
const TILE_INNER: usize = 16;

/// Reads one module.
pub(crate) fn matrix(folder: &Folder, module: &Module) -> Result<Matrix, Problem> {
    matrix_on(folder, module, threads())
}

/// Reads many modules, several at a time.
pub(crate) fn matrices(folder: &Folder, modules: &[Module]) -> Result<Vec<Matrix>, Problem> {
    let workers = threads().min(modules.len());
    if workers <= 1 {
        return modules.iter().map(|m| matrix_on(folder, m, 1)).collect();
    }
    let share = modules.len().div_ceil(workers);
    let parts: Vec<Result<Vec<Matrix>, Problem>> = thread::scope(|scope| {
        let spawn = |part| scope.spawn(move || modules_on_one(folder, part));
        let running: Vec<_> = modules.chunks(share).map(spawn).collect();
        running.into_iter().map(|t| t.join().expect("reading does not panic")).collect()
    });
    let mut all = Vec::with_capacity(modules.len());
    for part in parts {
        all.extend(part?);
    }
    Ok(all)
}

fn modules_on_one(folder: &Folder, modules: &[Module]) -> Result<Vec<Matrix>, Problem> {
    modules.iter().map(|m| matrix_on(folder, m, 1)).collect()
}

fn threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX)
}

fn matrix_on(folder: &Folder, module: &Module, threads: usize) -> Result<Matrix, Problem> {
    let stored = folder.bytes(&module.codes)?;
    let part = |p: &Option<crate::locate::Part>| {
        p.as_ref().map_or_else(|| Ok(Bytes::from(Vec::new())), |p| folder.bytes(p))
    };
    let (rows, cols) = (module.rows, module.cols);
    let (codes, scales) = match &module.layout {
        Layout::Rows => (stored, part(&module.scales)?),
        Layout::Shaped { .. } => {
            check_shape(folder, module)?;
            (stored, part(&module.scales)?)
        }
        Layout::Transposed { .. } => {
            check_zeros(folder, module)?;
            let scales = part(&module.scales)?;
            let transposed = match module.encoding {
                Encoding::Grouped(scheme) if scheme.scales.size() == 4 => transpose::<4>(&scales, rows, 1),
                _ => transpose::<2>(&scales, rows, 1),
            };
            let codes = transpose::<4>(&stored, rows, threads);
            (codes.into(), transposed.into())
        }
        Layout::ChannelsLast { channels } => {
            let Encoding::Dense(dtype) = module.encoding else { unreachable!("located as floats") };
            (channels_second(&stored, rows, *channels, dtype.size()).into(), part(&module.scales)?)
        }
    };
    let matrix = Matrix::new(rows, cols, module.encoding, codes, scales, part(&module.biases)?);
    Ok(matrix.expect("located parts have the sizes of the matrix"))
}

/// `[inner, rows]` elements of `SIZE` bytes become `[rows, inner]`.
fn transpose<const SIZE: usize>(stored: &[u8], rows: usize, threads: usize) -> Vec<u8> {
    let mut out = vec![0; stored.len()];
    let row_bytes = stored.len() / rows;
    let workers = if stored.len() < PANEL_BYTES_MIN { 1 } else { threads };
    let panel_rows = rows.div_ceil(workers).next_multiple_of(TILE_ROWS);
    if workers <= 1 {
        transpose_panel::<SIZE>(stored, rows, 0, &mut out);
        return out;
    }
    thread::scope(|scope| {
        for (panel, out) in out.chunks_mut(panel_rows * row_bytes).enumerate() {
            scope.spawn(move || transpose_panel::<SIZE>(stored, rows, panel * panel_rows, out));
        }
    });
    out
}

/// Fills `out` with the output rows from `first` on, in tiles that read whole cache lines and write them in
/// full.
fn transpose_panel<const SIZE: usize>(stored: &[u8], rows: usize, first: usize, out: &mut [u8]) {
    let row_bytes = stored.len() / rows;
    let inner = row_bytes / SIZE;
    let mut tile = [[[0u8; SIZE]; TILE_ROWS]; TILE_INNER];
    for (block, out) in out.chunks_mut(TILE_ROWS * row_bytes).enumerate() {
        let row = first + block * TILE_ROWS;
        let height = out.len() / row_bytes;
        for start in (0..inner).step_by(TILE_INNER) {
            let width = TILE_INNER.min(inner - start);
            for (k, line) in tile.iter_mut().enumerate().take(width) {
                let at = ((start + k) * rows + row) * SIZE;
                let source = stored[at..at + height * SIZE].as_chunks::<SIZE>().0;
                line[..height].copy_from_slice(source);
            }
            for n in 0..height {
                let at = n * row_bytes + start * SIZE;
                let target = out[at..at + width * SIZE].as_chunks_mut::<SIZE>().0;
                for (value, line) in target.iter_mut().zip(&tile) {
                    *value = line[n];
                }
            }
        }
    }
}

/// `[outer, inner, channels]` elements become `[outer, channels, inner]`.
fn channels_second(stored: &[u8], outer: usize, channels: usize, size: usize) -> Vec<u8> {
    let inner = stored.len() / size / outer / channels;
    let mut out = Vec::with_capacity(stored.len());
    for block in stored.chunks_exact(inner * channels * size) {
        for channel in 0..channels {
            for at in 0..inner {
                let from = (at * channels + channel) * size;
                out.extend_from_slice(&block[from..from + size]);
            }
        }
    }
    out
}

/// AutoRound: every zero point is the middle. Stored minus one, the middle is `0x77..` or `0x7f..`.
pub(crate) fn check_zeros(folder: &Folder, module: &Module) -> Result<(), Problem> {
    let (Layout::Transposed { zeros }, Encoding::Grouped(scheme)) = (&module.layout, module.encoding) else {
        return Ok(());
    };
    debug_assert_eq!(scheme.zero, Zero::Symmetric);
    let middle = if scheme.bits == 4 { 0x77 } else { 0x7f };
    if folder.bytes(zeros)?.iter().all(|&b| b == middle) {
        return Ok(());
    }
    Err(Problem::Asymmetric { module: module.label() })
}

/// compressed-tensors: `weight_shape` holds rows and columns.
pub(crate) fn check_shape(folder: &Folder, module: &Module) -> Result<(), Problem> {
    let Layout::Shaped { shape } = &module.layout else { return Ok(()) };
    let bytes = folder.bytes(shape)?;
    let numbers = bytes.as_chunks::<8>().0;
    let found = [numbers[0], numbers[1]].map(i64::from_le_bytes);
    let expected = [module.rows, module.cols];
    if found.map(usize::try_from) == expected.map(Ok) {
        return Ok(());
    }
    Err(Problem::WeightShape { module: module.label(), found, expected })
}

/// Reads floats, widened, in canonical axis order.
pub(crate) fn floats(folder: &Folder, floats: &Floats) -> Result<Vec<f32>, Problem> {
    let bytes = folder.bytes(&floats.part)?;
    let mut out = vec![0.0; bytes.len() / floats.dtype.size()];
    match floats.channels_last {
        Some([outer, .., channels]) => {
            let ordered = channels_second(&bytes, outer, channels, floats.dtype.size());
            read_float_row(floats.dtype, &ordered, &mut out);
        }
        None => read_float_row(floats.dtype, &bytes, &mut out),
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rows: usize, inner: usize, threads: usize) {
        let stored: Vec<u8> = (0..(rows * inner) as u32).flat_map(u32::to_le_bytes).collect();
        let out = transpose::<4>(&stored, rows, threads);
        for (at, bytes) in out.as_chunks::<4>().0.iter().enumerate() {
            let (n, k) = (at / inner, at % inner);
            assert_eq!(u32::from_le_bytes(*bytes) as usize, k * rows + n, "[{rows}, {inner}] at [{n}, {k}]");
        }
    }

    #[test]
    fn transposition_moves_every_word() {
        for (rows, inner) in [(1, 1), (16, 16), (17, 3), (3, 17), (32, 64), (100, 37)] {
            check(rows, inner, 1);
        }
        check(1000, 300, 3); // above the limit for panels, the last one short
    }

    #[test]
    fn channels_move_in_front() {
        let stored: Vec<u8> = (0..24).collect();
        let out = channels_second(&stored, 2, 3, 2);
        assert_eq!(
            out,
            [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, 12, 13, 18, 19, 14, 15, 20, 21, 16, 17, 22, 23]
        );
    }
}
