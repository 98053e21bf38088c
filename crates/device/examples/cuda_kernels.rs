//! Compiles every CUDA kernel for every architecture that is supported, without a card, and prints registers,
//! shared memory and spills: `cargo run --release -p device --example cuda_kernels [ARCH...]`.
//!
//! With `--ship FOLDER LIST` it compiles the variants that LIST names (`kernels.list` of a kernel cache, a line each) into
//! FOLDER, which a program finds beside itself as `kernels` (`docs/hardware.md`).
//!
//! Needs NVRTC (libnvrtc) where the loader finds it. Fails on a kernel that does not compile or that spills
//! more than a few registers.

use std::path::Path;
use std::process::ExitCode;

/// Bytes stored and loaded for want of registers that are let pass: the division routine of older cards takes a few.
const SPILLS_MAX: u32 = 128;

/// Compiles a list of variants into a folder.
fn ship(folder: &str, list: &str, archs: &[String]) -> ExitCode {
    let text = std::fs::read_to_string(list).map_err(|error| format!("{list}: {error}"));
    let ship =
        |text: String| device::cuda::ship(&text, Path::new(folder), archs).map_err(|error| error.to_string());
    match text.and_then(ship) {
        Ok(count) => {
            println!("{count} kernels in {folder}, for {}", archs.join(", "));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (shipped, archs) = match &words[..] {
        [flag, folder, list, archs @ ..] if flag == "--ship" => (Some((folder, list)), archs.to_vec()),
        _ => (None, words.clone()),
    };
    let archs = if archs.is_empty() { device::cuda::ARCHS.map(str::to_owned).to_vec() } else { archs };
    if let Some((folder, list)) = shipped {
        return ship(folder, list, &archs);
    }
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
