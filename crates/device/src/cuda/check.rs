//! Compiling every kernel without a card, for builds that must notice a broken or spilling kernel.

use super::compile::{compile, line};
use super::driver::Result;
use super::jobs::in_parallel;
use super::sources::VARIANTS;

/// Architectures that are supported: Ampere, Ada, Hopper, Blackwell.
pub const ARCHS: [&str; 6] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"];

/// What the assembler says about one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelReport {
    /// Architecture, for example `sm_90a`.
    pub arch: String,
    /// File and constants.
    pub file: String,
    /// Entry.
    pub name: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of static shared memory of a block.
    pub shared: u32,
    /// Bytes of stack of a thread.
    pub stack: u32,
    /// Bytes stored and loaded for want of registers.
    pub spills: u32,
}

/// Compiles all kernel files, in the variants that [`VARIANTS`] names, for these architectures, on all
/// processors.
pub fn compile_all(archs: &[String]) -> Result<Vec<KernelReport>> {
    let jobs: Vec<_> =
        archs.iter().flat_map(|arch| VARIANTS.iter().map(move |variant| (arch, variant))).collect();
    let reports = in_parallel(&jobs, |(arch, (file, defines))| {
        let defines: Vec<_> = defines.iter().map(|&(name, value)| (name, value.to_owned())).collect();
        let compiled = compile(file, &defines, arch)?;
        let named = |kernel| KernelReport { arch: (*arch).clone(), file: line(file, &defines), ..kernel };
        Ok(kernels(&compiled.log).into_iter().map(named).collect::<Vec<_>>())
    })?;
    Ok(reports.concat())
}

/// The assembler's words about each entry.
fn kernels(log: &str) -> Vec<KernelReport> {
    let mut found: Vec<KernelReport> = Vec::new();
    for line in log.lines() {
        if let Some(entry) = line.split("entry function '").nth(1) {
            let name = entry.split('\'').next().unwrap_or_default().to_owned();
            let (arch, file) = (String::new(), String::new());
            found.push(KernelReport { arch, file, name, registers: 0, shared: 0, stack: 0, spills: 0 });
            continue;
        }
        let Some(kernel) = found.last_mut() else { continue };
        let number = |unit: &str| number_before(line, unit);
        if line.contains("stack frame") {
            kernel.stack = number(" bytes stack frame");
            kernel.spills = number(" bytes spill stores") + number(" bytes spill loads");
        } else if line.contains("registers") {
            (kernel.registers, kernel.shared) = (number(" registers"), number(" bytes smem"));
        }
    }
    found
}

/// The number right before `unit`, or 0.
fn number_before(line: &str, unit: &str) -> u32 {
    let Some(at) = line.find(unit) else { return 0 };
    let digits = line[..at].bytes().rev().take_while(u8::is_ascii_digit).count();
    line[at - digits..at].parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assemblers_words_are_read() {
        let log = "ptxas info    : Compiling entry function 'one' for 'sm_90a'\n\
                   ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
                   ptxas info    : Used 33 registers, used 1 barriers, 1024 bytes smem\n\
                   ptxas info    : Compiling entry function 'two' for 'sm_90a'\n\
                   ptxas info    : Used 7 registers";
        let kernel = |name: &str, registers, shared, stack, spills| KernelReport {
            arch: String::new(),
            file: String::new(),
            name: name.into(),
            registers,
            shared,
            stack,
            spills,
        };
        assert_eq!(kernels(log), [kernel("one", 33, 1024, 8, 16), kernel("two", 7, 0, 0, 0)]);
    }
}
