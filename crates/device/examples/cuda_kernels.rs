//! Compiles every CUDA kernel for every architecture that is supported, without a card, and prints registers,
//! shared memory and spills: `cargo run --release -p device --example cuda_kernels [ARCH...]`.
//!
//! Needs NVRTC (libnvrtc) where the loader finds it. Fails on a kernel that does not compile or that spills
//! more than a few registers.

use std::process::ExitCode;

/// Bytes stored and loaded for want of registers that are let pass: the division routine of older cards takes a few.
const SPILLS_MAX: u32 = 128;

fn main() -> ExitCode {
    let archs: Vec<String> = std::env::args().skip(1).collect();
    let archs = if archs.is_empty() { device::cuda::ARCHS.map(str::to_owned).to_vec() } else { archs };
    let report = match device::cuda::compile_all(&archs) {
        Ok(report) => report,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let mut spilled = false;
    for kernel in &report {
        let mark = if kernel.spills > 0 { "  SPILLS" } else { "" };
        println!(
            "{:8} {:16} {:40} {:4} registers {:6} B shared {:5} B stack {:5} B spilled{mark}",
            kernel.arch,
            kernel.file,
            kernel.name,
            kernel.registers,
            kernel.shared,
            kernel.stack,
            kernel.spills
        );
        spilled |= kernel.spills > SPILLS_MAX;
    }
    println!("{} kernels for {}", report.len(), archs.join(", "));
    if spilled { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
