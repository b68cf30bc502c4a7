//! What the tests share: the libraries and the GPU of this machine, if it has them.

#![allow(dead_code, reason = "each test takes a part")]

use std::path::Path;

use kiln_cuda::build::{Compiler, Source, Store};
use kiln_cuda::code::StepCode;
use kiln_cuda::libraries::{CublasLt, Driver, Nvrtc};
use kiln_cuda::products::Multiplier;
use kiln_cuda::runtime::{Device, Kernel, Module, Stream};
use kiln_cuda::testing::host::{HostError, HostStep};
use kiln_cuda::{CudaStep, Search};
use kiln_graph::{DType, HostTensor, Scalar};

/// Where the environment says; where `make nvrtc` puts the wheel.
pub fn search() -> Search {
    let wheel = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.nvrtc/nvidia/cu13/lib");
    Search::new(
        move |name| match std::env::var_os(name) {
            None if name == "KILN_CUDA_PATH" && wheel.is_dir() => Some(wheel.clone().into_os_string()),
            value => value,
        },
        true,
    )
}

/// NVRTC; a printed reason if there is none.
pub fn nvrtc() -> Option<Nvrtc> {
    match Nvrtc::open(&search()) {
        Ok(nvrtc) => Some(nvrtc),
        Err(_) => {
            println!("skipped: no NVRTC here (`make nvrtc` fetches it)");
            None
        }
    }
}

/// A GPU with a stream and a compiler.
pub struct Gpu {
    pub device: Device,
    pub stream: Stream,
    pub compiler: Compiler,
}

/// The first GPU; a printed reason if there is none. With `KILN_TEST_CUDA=required` a missing one fails.
pub fn gpu() -> Option<Gpu> {
    let open = || -> kiln_cuda::Result<Gpu> {
        let device = Device::open(&Driver::open(&search())?, 0)?;
        let nvrtc = Nvrtc::open(&search())?;
        Ok(Gpu {
            stream: device.stream()?,
            compiler: Compiler::new(nvrtc, device.description().capability, Store::disabled())?,
            device,
        })
    };
    match open() {
        Ok(gpu) => Some(gpu),
        Err(error) if std::env::var_os("KILN_TEST_CUDA").is_some_and(|value| value == "required") => {
            panic!("{error}");
        }
        Err(error) => {
            let text = error.to_string();
            println!(
                "skipped: no GPU to test on here: {}",
                text.lines().next().unwrap_or_default()
            );
            None
        }
    }
}

impl Gpu {
    /// The kernel `name` of a program in CUDA C++.
    pub fn kernel(&self, name: &str, text: &str) -> Kernel {
        let source = Source {
            name: name.to_owned(),
            text: text.to_owned(),
        };
        let cubins = self.compiler.compile(&[source]).unwrap();
        Module::load(&self.device, name, &cubins[0].image)
            .unwrap()
            .kernel(name)
            .unwrap()
    }

    /// cuBLASLt.
    pub fn multiplier(&self) -> Multiplier {
        Multiplier::new(&self.device, CublasLt::open(&search()).unwrap()).unwrap()
    }
}

/// Numbers as bytes.
pub fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// Bytes as numbers.
pub fn numbers(bytes: &[u8]) -> Vec<f32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|&word| f32::from_ne_bytes(word)).collect()
}

/// Compiles a step for the oldest and the newest generation, if NVRTC is here.
pub fn machine_code(code: &StepCode) {
    let Some(nvrtc) = nvrtc() else { return };
    for capability in [(8, 0), (9, 0)] {
        let compiler = Compiler::new(nvrtc.clone(), capability, Store::disabled()).unwrap();
        let (sources, _) = code.sources();
        compiler
            .compile(&sources)
            .unwrap_or_else(|error| panic!("{error}"));
    }
}

/// Runs a step that is given an index out of range: its first check stops it, and no argument is another one.
pub fn stops_unchanged(step: &CudaStep, tensors: &[HostTensor], scalars: &[Scalar]) {
    let host = HostStep::of(step).unwrap();
    let before: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.bytes().to_vec()).collect();
    let mut inputs = before.clone();
    let bits: Vec<u64> = scalars.iter().map(|scalar| scalar.to_bits(DType::F32)).collect();
    let stopped = host.run(&mut inputs, &bits);
    assert!(
        matches!(stopped, Err(HostError::Index { check: 0, .. })),
        "{stopped:?}"
    );
    assert!(inputs == before, "an argument was overwritten");
}
