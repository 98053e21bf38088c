//! What a card's faults come to.

use super::super::compile::Kernels;
use super::super::driver::Driver;
use super::super::ship::ship_by;
use super::super::standin::note_variant;
use super::super::{Cuda, CudaSettings};
use super::{device, stub};
use crate::{Buffer, Device, DeviceError, KvForm, KvShape, Row, Step, VectorRef, Window};

fn fault(stage: &'static str) -> DeviceError {
    DeviceError::Failed { stage, message: "an illegal address".into() }
}

fn step() -> Step {
    let window =
        Window { place: 0, first: 0, rows: 1, start: 0, pages: vec![0], parents: None, commit: true };
    Step::new(vec![Row { token: None, position: [0; 3] }], vec![window]).expect("valid")
}

fn queue(device: &mut Cuda, x: Buffer, weight: VectorRef) -> Result<(), DeviceError> {
    device.begin(&step())?;
    device.norm(x, 1, weight, 1e-6, x)
}

#[test]
fn nothing_runs_after_a_list_that_failed() {
    for stage in ["launch", "load kernels", "upload", "alloc"] {
        let (mut device, stub) = device();
        let (x, weight) = (device.buffer(1, 64).expect("fits"), device.vector(&[1.0; 64]).expect("fits"));
        let scheme =
            quant::Scheme { bits: 4, group: 64, zero: quant::Zero::Symmetric, scales: quant::Dtype::F16 };
        let bytes = |n: usize| vec![0u8; n].into();
        let encoding = quant::Encoding::Grouped(scheme);
        let matrix = quant::Matrix::new(1, 64, encoding, bytes(32), bytes(2), bytes(0)).expect("valid");
        let matrix = device.matrix(&matrix).expect("fits");
        let out = device.buffer(1, 1).expect("fits");
        queue(&mut device, x, weight).expect("only recorded");
        // Memory for its codes is taken when the list is lowered.
        device.linear(x, 1, &[(matrix, out)]).expect("only recorded");
        stub.fail(stage, fault(stage));
        // The step after it is told, though it has no part in it.
        let error = queue(&mut device, x, weight).expect_err("the list before failed").to_string();
        assert!(error.contains("illegal address"), "{error}");
        stub.events();
        for _ in 0..2 {
            let error = device.read(x, 0, &mut [0.0]).expect_err("what it holds is not known").to_string();
            assert!(error.contains("load the model again") && error.contains("illegal address"), "{error}");
            assert!(queue(&mut device, x, weight).is_err());
        }
        assert_eq!(stub.events(), [], "{stage}");
    }
}

#[test]
fn a_refused_call_loses_nothing() {
    let (mut device, _) = device();
    let (x, weight) = (device.buffer(1, 64).expect("fits"), device.vector(&[1.0; 64]).expect("fits"));
    assert!(device.norm(x, 2, weight, 1e-6, x).is_err());
    queue(&mut device, x, weight).expect("goes on");
    device.read(x, 0, &mut [0.0]).expect("goes on");
}

#[test]
fn memory_that_cannot_be_had_is_named_and_what_was_taken_is_given_back() {
    let (mut device, stub) = device();
    let before = stub.allocations();
    let none = || DeviceError::OutOfMemory { stage: "kv", bytes: 1 << 40, device: "cuda".into() };
    stub.fail("alloc", none());
    let shape = KvShape { pages: 4, kv_heads: 2, head_dim: 64, form: KvForm::Int8 };
    let error = device.kv_pool(shape).expect_err("no memory").to_string();
    assert!(error.contains("1099511627776 bytes") && error.contains("--ctx"), "{error}");
    stub.fail("alloc", none());
    assert!(device.picks(4, 2).is_err());
    assert_eq!(stub.allocations(), before);
    device.kv_pool(shape).expect("there is room again");
}

#[test]
fn kernels_that_came_with_the_program_are_loaded_not_compiled() {
    let folder = std::env::temp_dir().join(format!("clary-shipped-device-{}", std::process::id()));
    let archs = ["sm_90a".to_owned()];
    let count = ship_by("sm_90a rows.cu\nsm_80 draw.cu", &folder, &archs, note_variant).expect("writes");
    assert_eq!(count, 1, "the other is for another architecture");
    let stub = stub();
    let driver: std::sync::Arc<dyn Driver> = stub.clone();
    let kernels = Kernels::with(driver.clone(), None, |file, _, _| {
        Err(DeviceError::Failed { stage: "compile kernels", message: format!("{file}: no compiler") })
    });
    let kernels = kernels.shipped(Some(folder.clone()));
    let mut device = Cuda::on(driver, kernels, CudaSettings::of(0)).expect("opens");
    let (x, weight) = (device.buffer(1, 64).expect("fits"), device.vector(&[1.0; 64]).expect("fits"));
    queue(&mut device, x, weight).expect("recorded");
    device.read(x, 0, &mut [0.0]).expect("its kernel was shipped");
    assert_eq!(stub.images().into_iter().collect::<Vec<_>>(), ["rows.cu"]);
    let taps = device.vector(&[1.0; 64]).expect("fits");
    device.layer_norm(x, 1, weight, taps, 1e-6, x).expect("recorded");
    let error = device.read(x, 0, &mut [0.0]).expect_err("its kernel was not").to_string();
    assert!(error.contains("vision_rows.cu") && error.contains("not among the kernels of"), "{error}");
    std::fs::remove_dir_all(folder).expect("was made above");
}
