//! Devices by name.

use crate::{
    Device, DeviceError,
    cpu::{Cpu, CpuSettings},
    reference::Reference,
};

/// Opens the device `name`: `cpu`, `reference`, or `auto` for the best one here.
pub fn open(name: &str, settings: CpuSettings) -> Result<Box<dyn Device>, DeviceError> {
    match name {
        "auto" | "cpu" => Ok(Box::new(Cpu::new(settings))),
        "reference" => Ok(Box::new(Reference::new(settings.threads))),
        _ => Err(DeviceError::Unavailable {
            name: name.into(),
            reason: "devices here: auto, cpu, reference".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    #[test]
    fn devices_open_by_name() {
        let settings = CpuSettings { threads: 2, isa: Isa::detect() };
        for (name, begins) in [("cpu", "cpu ("), ("auto", "cpu ("), ("reference", "reference")] {
            let device = open(name, settings).expect("there everywhere");
            assert!(device.name().starts_with(begins), "{}", device.name());
        }
        let error = open("abacus", settings).err().expect("no such device").to_string();
        assert!(error.contains("abacus") && error.contains("auto, cpu, reference"), "{error}");
    }
}
