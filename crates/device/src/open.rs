//! Devices by name.

use std::path::PathBuf;

use crate::{
    Device, DeviceError,
    cpu::{Cpu, CpuSettings},
    cuda::{self, Cuda, CudaSettings},
    reference::Reference,
};

/// What devices are opened with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenSettings {
    /// Threads and instruction set of work on the host.
    pub cpu: CpuSettings,
    /// Folder for compiled kernels of other devices; `None` compiles them in every process.
    pub kernel_cache: Option<PathBuf>,
    /// Folder of compiled kernels that came with the program.
    pub kernels: Option<PathBuf>,
    /// Device memory that `auto` asks of a card before it takes it: weights, caches and activations.
    pub memory: u64,
}

impl From<CpuSettings> for OpenSettings {
    fn from(cpu: CpuSettings) -> Self {
        Self { cpu, kernel_cache: None, kernels: None, memory: 0 }
    }
}

/// What `auto` stands for: the first card with at least `memory` bytes free, else the processor. Asking for
/// no memory is asking for the processor. `has_kernels`: compiled kernels are at hand, so that no compiler is
/// needed.
pub fn best(memory: u64, has_kernels: bool) -> String {
    cuda::card_with_room(memory, has_kernels)
        .map_or_else(|| "cpu".into(), |ordinal| format!("cuda:{ordinal}"))
}

/// The card that a device name means; `None` for devices that are no cards.
pub fn card(name: &str) -> Option<usize> {
    name.strip_prefix("cuda:")?.parse().ok()
}

/// Opens the device `name`: `cpu`, `reference`, `cuda:N` for the card N of this machine, or `auto` for the
/// best one here: the first card with room for [`OpenSettings::memory`], else the processor.
pub fn open(name: &str, settings: impl Into<OpenSettings>) -> Result<Box<dyn Device>, DeviceError> {
    let settings = settings.into();
    match name {
        "cpu" => Ok(Box::new(Cpu::new(settings.cpu))),
        "reference" => Ok(Box::new(Reference::new(settings.cpu.threads))),
        "auto" => open(&best(settings.memory, settings.kernels.is_some()), settings),
        _ => match card(name) {
            Some(ordinal) => {
                let (kernel_cache, kernels) = (settings.kernel_cache, settings.kernels);
                Ok(Box::new(Cuda::open(CudaSettings { kernel_cache, kernels, ..CudaSettings::of(ordinal) })?))
            }
            None => Err(DeviceError::Unavailable {
                name: name.into(),
                reason: "devices: auto, cpu, reference, cuda:0 (cuda:1 for the second card)".into(),
            }),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    #[test]
    fn devices_open_by_name() {
        let settings = CpuSettings { threads: 2, isa: Isa::detect() };
        for (name, begins) in [("cpu", "cpu ("), ("reference", "reference")] {
            let device = open(name, settings).expect("there everywhere");
            assert!(device.name().starts_with(begins), "{}", device.name());
        }
        for name in ["abacus", "cuda", "cuda:x", "cuda:-1"] {
            let error = open(name, settings).err().expect("no such device").to_string();
            assert!(error.contains(name) && error.contains("auto, cpu, reference"), "{error}");
        }
        // No machine has that many; without a driver the error says so.
        let error = open("cuda:999", settings).err().expect("no such card").to_string();
        assert!(
            error.contains("cuda:999") && (error.contains("driver") || error.contains("cards")),
            "{error}"
        );
        // A machine without a card, and one whose cards are too small, fall back.
        let device = open("auto", OpenSettings { memory: u64::MAX, ..settings.into() }).expect("falls back");
        assert!(device.name().starts_with("cpu ("), "{}", device.name());
    }
}
