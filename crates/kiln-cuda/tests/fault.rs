//! A kernel that fails, on a GPU. The device is gone afterwards, so this test has a process of its own.

mod common;

use std::sync::Arc;

use kiln_cuda::CudaError;
use kiln_cuda::runtime::{Arguments, Launch, Storage};

#[test]
fn a_kernel_that_fails_takes_its_device_along() {
    let Some(gpu) = common::gpu() else { return };
    let text = "extern \"C\" __global__ void astray(float* x, unsigned long long far) { x[far] = 1; }";
    let kernel = gpu.kernel("astray", text);
    let storage = Arc::new(Storage::allocate(&gpu.stream, 64).unwrap());
    let launch = Launch {
        kernel,
        grid: [1, 1, 1],
        block: [1, 1, 1],
        shared_bytes: 0,
        arguments: Arguments::new().memory(&storage, 0).u64(1 << 60),
    };
    // SAFETY: not kept: the kernel writes where nothing is, which the device notices.
    unsafe { gpu.stream.launch(&launch) }.unwrap();
    let first = gpu.stream.synchronize().unwrap_err();
    let CudaError::Lost(lost) = &first else {
        panic!("{first}")
    };
    assert_eq!(lost.last, "the last launch was astray");
    println!("{first}");
    for error in [
        Storage::allocate(&gpu.stream, 8).map(drop).unwrap_err(),
        gpu.stream.fill(&storage, 0..8, 0).unwrap_err(),
        gpu.device.memory().map(drop).unwrap_err(),
    ] {
        assert_eq!(error.to_string(), first.to_string());
    }
}
