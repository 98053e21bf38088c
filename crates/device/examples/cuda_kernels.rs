//! Compiles every CUDA kernel for every architecture that is supported, without a card, and prints registers,
//! shared memory and spills: `cargo run --release -p device --example cuda_kernels [ARCH...]`.
//!
//! With `--ship FOLDER LIST` it compiles the variants that LIST names (`packaging/kernels.list`, or that of a
//! kernel cache) into FOLDER, which a program finds beside itself as `kernels` (`docs/hardware.md`).
//!
//! Needs NVRTC (libnvrtc) where the loader finds it. Fails on a kernel that does not compile or that spills
//! registers, but for those of [`SPILLS`].

use std::path::Path;
use std::process::ExitCode;

use device::cuda::KernelReport;

/// A kernel that may spill registers.
struct Spill {
    file: &'static str,
    /// In its constants.
    with: &'static str,
    kernel: &'static str,
    archs: &'static [&'static str],
    /// Most bytes, stored and loaded.
    most: u32,
}

/// All that may: none is in a decode step or a prompt of a Hopper card, but for wide rows that are done
/// again, K/V of 16 bits, pictures, and what attention's filling warps keep between blocks.
const SPILLS: [Spill; 7] = [
    // Two blocks a multiprocessor leave each thread 128 registers; they are worth more than these bytes cost.
    Spill {
        file: "experts.cu",
        with: "ROWS=1",
        kernel: "experts_hidden",
        archs: &["sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a"],
        most: 48,
    },
    Spill {
        file: "experts_prompt.cu",
        with: "BLOCKS=2",
        kernel: "experts_gate_up",
        archs: &device::cuda::ARCHS,
        most: 32,
    },
    Spill {
        file: "vision_attention.cu",
        with: "LAST=8",
        kernel: "full_attention",
        archs: &["sm_80", "sm_86", "sm_89", "sm_90a"],
        most: 76,
    },
    Spill { file: "linear_dense.cu", with: "", kernel: "linear_dense", archs: &["sm_100a"], most: 68 },
    // Sixteen warps leave each thread 128 registers.
    Spill {
        file: "linear_stream.cu",
        with: "WARPS=16",
        kernel: "linear_stream",
        archs: &["sm_100a"],
        most: 16,
    },
    // Values of a whole head and codes of two digits: more than 255 registers.
    Spill {
        file: "attention_prompt.cu",
        with: "DIGITS=2",
        kernel: "attention_prompt",
        archs: &device::cuda::ARCHS,
        most: 200,
    },
    // What the warps that fill stages keep between blocks.
    Spill {
        file: "attention_warpgroup.cu",
        with: "",
        kernel: "attention_warpgroup",
        archs: &["sm_90a"],
        most: 48,
    },
];

/// Most bytes that a kernel may spill.
fn most_spilled(kernel: &KernelReport) -> u32 {
    let is = |one: &&Spill| {
        kernel.file.split(' ').next() == Some(one.file)
            && kernel.file.contains(one.with)
            && kernel.name == one.kernel
            && one.archs.contains(&kernel.arch.as_str())
    };
    SPILLS.iter().find(is).map_or(0, |one| one.most)
}

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
        let most = most_spilled(kernel);
        let mark = match kernel.spills {
            0 => String::new(),
            bytes if bytes <= most => "  spills".into(),
            _ => format!("  SPILLS, at most {most} B expected"),
        };
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
        spilled |= kernel.spills > most;
    }
    println!("{} kernels for {}", report.len(), archs.join(", "));
    if spilled { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
