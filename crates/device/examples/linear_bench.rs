//! Matrix kernels of the CPU device against what the machine can do at most.
//!
//! `cargo run --release -p device --example linear_bench [instruction sets]`
//!
//! Prints, per instruction set and thread count: a decode row as bytes of weights per second with its share
//! of the read bandwidth, and a prompt as multiply-adds per second with their share of the 16-bit (dense:
//! f32) peak. Times are processor time of the process divided by the threads, best of several runs.

use std::error::Error;

use device::{
    Buffer, Device,
    cpu::{
        Cpu, CpuSettings, Isa,
        probe::{dot16_peak, f32_peak, process_time, read_bandwidth},
    },
};
use quant::{Dtype, Encoding, Matrix, Scheme, Zero};

/// Bytes of weights a decode row walks through, so that no cache holds them.
const WORKING_SET: usize = 400 << 20;
/// Rows of a prompt.
const PROMPT: usize = 512;
const RUNS: usize = 7;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A matrix of arbitrary codes and equal scales.
fn matrix(rows: usize, cols: usize, encoding: Encoding) -> Result<Matrix> {
    let bytes = |count: usize| (0..count).map(|i| (i as u32).wrapping_mul(2654435761) as u8 >> 1);
    Ok(match encoding {
        Encoding::Dense(dtype) => {
            Matrix::dense(rows, cols, dtype, bytes(rows * cols * dtype.size()).collect::<Vec<u8>>().into())?
        }
        Encoding::Grouped(scheme) => {
            let codes: Vec<u8> = bytes(rows * cols / 8 * scheme.bits as usize).collect();
            let scales = vec![0x3c; rows * cols / scheme.group * scheme.scales.size()];
            let biases = if scheme.zero == Zero::Affine { scales.clone() } else { Vec::new() };
            Matrix::new(rows, cols, encoding, codes.into(), scales.into(), biases.into())?
        }
    })
}

/// The shortest run in seconds, and once before to warm up.
fn best(threads: usize, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut shortest = f64::INFINITY;
    for _ in 0..RUNS {
        let start = process_time();
        run()?;
        shortest = shortest.min((process_time() - start).as_secs_f64() / threads as f64);
    }
    Ok(shortest)
}

/// A buffer of `rows` rows with values in the first `filled`.
fn buffer(cpu: &mut Cpu, rows: usize, width: usize) -> Result<Buffer> {
    let buffer = cpu.buffer(rows, width)?;
    let values: Vec<f64> = (0..rows * width).map(|i| (i % 31) as f64 / 8.0 - 2.0).collect();
    cpu.write(buffer, 0, &values)?;
    Ok(buffer)
}

fn bench(settings: CpuSettings, rows: usize, cols: usize, encoding: Encoding, read: f64) -> Result<()> {
    let CpuSettings { threads, isa } = settings;
    let mut cpu = Cpu::new(settings);
    let source = matrix(rows, cols, encoding)?;
    let copies = (WORKING_SET / source.bytes()).max(1);
    // Dense matrices share their bytes with the source, so each needs one of its own.
    let matrices =
        (0..copies).map(|_| Ok(cpu.matrix(&matrix(rows, cols, encoding)?)?)).collect::<Result<Vec<_>>>()?;
    let x = buffer(&mut cpu, PROMPT, cols)?;
    let out = buffer(&mut cpu, PROMPT, rows)?;
    let decode = best(threads, || {
        matrices.iter().try_for_each(|&matrix| cpu.linear(x, 1, &[(matrix, out)]))?;
        Ok(())
    })?;
    let bytes = (copies * source.bytes()) as f64 / decode;
    let prompt = best(threads, || Ok(cpu.linear(x, PROMPT, &[(matrices[0], out)])?))?;
    let products = (PROMPT * rows * cols) as f64 / prompt;
    let peak = match encoding {
        Encoding::Dense(_) => f32_peak(isa, threads),
        Encoding::Grouped(_) => dot16_peak(isa, threads),
    };
    println!(
        "{:12} {threads} threads  {encoding:36} {rows}x{cols}: decode {:5.1} GB/s ({:3.0} % of reads), \
         {PROMPT} rows {:6.1} G multiply-adds/s ({:3.0} % of peak)",
        isa.name(),
        bytes / 1e9,
        100.0 * bytes / read,
        products / 1e9,
        100.0 * products / peak,
    );
    Ok(())
}

fn main() -> Result<()> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |isa: &Isa| names.is_empty() || names.iter().any(|name| name == isa.name());
    let grouped = |bits, group, zero| Encoding::Grouped(Scheme { bits, group, zero, scales: Dtype::Bf16 });
    let encodings = [
        grouped(4, 64, Zero::Affine),
        grouped(4, 128, Zero::Symmetric),
        grouped(4, 32, Zero::Affine),
        grouped(2, 64, Zero::Affine),
        grouped(3, 64, Zero::Affine),
        grouped(5, 64, Zero::Affine),
        grouped(6, 64, Zero::Affine),
        grouped(8, 64, Zero::Affine),
        Encoding::Dense(Dtype::Bf16),
    ];
    // The scalar body is the definition, not a way to run a model.
    let sets = Isa::supported().into_iter().filter(|isa| isa.name() != "scalar").filter(wanted);
    for isa in sets {
        for threads in [1, 2] {
            let read = read_bandwidth(isa, threads);
            println!("{:12} {threads} threads  reads {:.1} GB/s", isa.name(), read / 1e9);
            for encoding in encodings {
                bench(CpuSettings { threads, isa }, 2048, 8192, encoding, read)?;
            }
        }
    }
    Ok(())
}
