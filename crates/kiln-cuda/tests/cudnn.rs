//! Convolutions through a fake cuDNN that records its calls: which engines are chosen, the arguments of a
//! plan's call, and how steps use them.

mod common;

use std::sync::Arc;

use kiln_compiler::{Options, compile};
use kiln_cuda::build::CacheFolder;
use kiln_cuda::convolutions::{Convolution, ConvolutionArguments, Convolver, PlanLimits, Task, Tensor};
use kiln_cuda::execute::{CudaExecutable, Gpu, NothingOutside};
use kiln_cuda::libraries::Nvrtc;
use kiln_cuda::products::Number;
use kiln_cuda::runtime::{Device, GraphBuilder, Storage};
use kiln_cuda::sys::cudnn::{behavior_note, numerical_note};
use kiln_cuda::testing::{FakeDriver, FakeEngine, fake_cudnn, fake_cudnn_descriptors};
use kiln_cuda::{CudaError, CudaTarget};
use kiln_graph::Graph;

/// The stand-in computes no results to look at.
const UNCHECKED: PlanLimits = PlanLimits {
    workspace_bytes: 64 << 20,
    plans: 6,
    runs: 10,
    compiling: false,
    checked: false,
};

/// The driver's answer where memory is short.
const OUT_OF_MEMORY: i32 = 2;
/// The driver's answer where something ended a capture.
const CAPTURE_INVALIDATED: i32 = 901;
/// The library's answer where a plan fails on the device.
const EXECUTION_FAILED: i32 = 5000;

/// Engines of these numerical notes.
fn engines<const COUNT: usize>(notes: [&[i32]; COUNT]) -> Vec<FakeEngine> {
    let engine = |notes: &[i32]| FakeEngine {
        numerical_notes: notes.to_vec(),
        ..FakeEngine::default()
    };
    notes.map(engine).to_vec()
}

/// A convolution of three by three, channels last.
fn convolution(number: Number, tf32: bool) -> Convolution {
    let tensor = |[n, c, h, w]: [i64; 4]| Tensor {
        number,
        extents: vec![n, c, h, w],
        strides: vec![h * w * c, 1, w * c, c],
    };
    Convolution {
        task: Task::Forward,
        x: tensor([2, 16, 8, 8]),
        w: tensor([32, 16, 3, 3]),
        y: tensor([2, 32, 8, 8]),
        stride: vec![1; 2],
        dilation: vec![1; 2],
        low: vec![1; 2],
        high: vec![1; 2],
        tf32,
    }
}

fn text(call: &str, calls: &[String]) -> Vec<String> {
    let of = calls.iter().filter(|line| line.starts_with(call));
    of.cloned().collect()
}

/// The engine that is chosen for a convolution, or the error.
fn chosen(
    engines: &[FakeEngine],
    convolution: &Convolution,
    limits: PlanLimits,
) -> Result<String, CudaError> {
    let fake = FakeDriver::start(1, 64 << 20).unwrap();
    let device = Device::open(fake.driver(), 0).unwrap();
    let stream = device.stream().unwrap();
    let result = {
        let convolver = Convolver::new(&device, fake_cudnn(engines)).unwrap();
        convolver.search(&stream, convolution, limits).and_then(|plan| {
            assert_eq!(plan.library, "9.99.0");
            let prepared = convolver.prepare(convolution, &plan)?;
            let memory = |bytes: usize| Arc::new(Storage::allocate(&stream, bytes).unwrap());
            let (x, w) = (memory(convolution.x.bytes()), memory(convolution.w.bytes()));
            let y = memory(convolution.y.bytes());
            let workspace = memory(prepared.workspace_bytes());
            let mut arguments = ConvolutionArguments {
                x: (&x, 0),
                w: (&w, 0),
                y: (&y, 0),
                workspace: Some((&workspace, 0)),
            };
            fake.calls();
            prepared.run(&stream, &arguments)?;
            let calls = fake.calls();
            // Arguments that are too small are refused before the library sees them.
            arguments.y = (&y, 16);
            let error = prepared.run(&stream, &arguments).unwrap_err();
            assert!(matches!(error, CudaError::Range { .. }), "{error}");
            assert!(text("cudnn", &fake.calls()).is_empty());
            Ok(text("cudnnBackendExecute", &calls).concat())
        })
    };
    assert_eq!(fake_cudnn_descriptors(), 0, "descriptors are destroyed");
    result
}

#[test]
fn engines_that_round_more_or_vary_are_left_out() {
    use numerical_note::{
        DOWN_CONVERT_INPUTS, FFT, NONDETERMINISTIC, REDUCED_PRECISION_REDUCTION, TENSOR_CORE, WINOGRAD,
    };
    let all = engines([
        &[NONDETERMINISTIC],
        &[DOWN_CONVERT_INPUTS],
        &[TENSOR_CORE, REDUCED_PRECISION_REDUCTION],
        &[FFT],
        &[WINOGRAD],
        &[TENSOR_CORE],
        &[],
    ]);
    let take = |number, tf32| chosen(&all, &convolution(number, tf32), UNCHECKED).unwrap();
    assert_eq!(take(Number::F32, false), "cudnnBackendExecute engine 6");
    assert_eq!(take(Number::F32, true), "cudnnBackendExecute engine 5");
    assert_eq!(take(Number::Bf16, false), "cudnnBackendExecute engine 5");
    let none = chosen(&all[..5], &convolution(Number::F16, false), UNCHECKED);
    let error = none.unwrap_err().to_string();
    assert!(
        error.contains("convolution f16[2x16x8x8] * f16[32x16x3x3] -> f16[2x32x8x8]")
            && error.contains("no engine that is deterministic"),
        "{error}"
    );
}

#[test]
fn working_memory_and_compilation_are_limited() {
    let mut all = engines([&[], &[], &[], &[]]);
    all[0].workspace_bytes = 1 << 20;
    all[1].behavior_notes = vec![behavior_note::RUNTIME_COMPILATION];
    all[2].refuses = true;
    all[3].workspace_bytes = 1 << 10;
    let limits = PlanLimits {
        workspace_bytes: 1 << 16,
        ..UNCHECKED
    };
    let convolution = convolution(Number::Bf16, false);
    let take = |engines: &[FakeEngine]| chosen(engines, &convolution, limits).unwrap();
    assert_eq!(take(&all), "cudnnBackendExecute engine 3");
    // With nothing else, one that compiles does.
    assert_eq!(take(&all[..3]), "cudnnBackendExecute engine 1");
    // But not where channels are no whole vectors.
    let mut narrow = convolution.clone();
    for tensor in [&mut narrow.x, &mut narrow.w] {
        tensor.extents[1] = 2;
        tensor.strides = vec![
            2 * tensor.extents[2] * tensor.extents[3],
            1,
            2 * tensor.extents[3],
            2,
        ];
    }
    assert!(chosen(&all[..3], &narrow, limits).is_err());
    assert!(chosen(&all, &narrow, limits).is_ok());
}

#[test]
fn a_plan_is_of_one_version() {
    let fake = FakeDriver::start(1, 64 << 20).unwrap();
    let device = Device::open(fake.driver(), 0).unwrap();
    let stream = device.stream().unwrap();
    let convolution = convolution(Number::F32, false);
    let convolver = Convolver::new(&device, fake_cudnn(&engines([&[]]))).unwrap();
    let mut plan = convolver.search(&stream, &convolution, UNCHECKED).unwrap();
    plan.library = "9.1.0".into();
    let error = convolver.prepare(&convolution, &plan).unwrap_err().to_string();
    assert!(
        error.contains("the plan is cuDNN 9.1.0's, not 9.99.0's"),
        "{error}"
    );
}

/// Steps of several threads share the library: what one of them captures must not be in the way of another's
/// convolution. The library refuses a stream if the one before is captured.
#[test]
fn a_capture_is_not_in_the_way_of_another_convolution() {
    let fake = FakeDriver::start(1, 64 << 20).unwrap();
    let device = Device::open(fake.driver(), 0).unwrap();
    let stream = device.stream().unwrap();
    let convolution = convolution(Number::F32, false);
    let convolver = Convolver::new(&device, fake_cudnn(&engines([&[]]))).unwrap();
    let plan = convolver.search(&stream, &convolution, UNCHECKED).unwrap();
    let prepared = convolver.prepare(&convolution, &plan).unwrap();
    let memory = |bytes: usize| Arc::new(Storage::allocate(&stream, bytes).unwrap());
    let (x, w) = (memory(convolution.x.bytes()), memory(convolution.w.bytes()));
    let y = memory(convolution.y.bytes());
    let workspace = memory(prepared.workspace_bytes());
    let arguments = ConvolutionArguments {
        x: (&x, 0),
        w: (&w, 0),
        y: (&y, 0),
        workspace: Some((&workspace, 0)),
    };
    let mut here = GraphBuilder::new(&device, "here").unwrap();
    let mut there = GraphBuilder::new(&device, "there").unwrap();
    let node = prepared.capture(&mut here, &[], &arguments).unwrap();
    fake.calls();
    here.capture(&[node], &[], |captured| {
        let error = prepared.run(captured, &arguments).unwrap_err();
        assert!(matches!(error, CudaError::Captured { .. }), "{error}");
        prepared.run(&stream, &arguments)?;
        prepared.capture(&mut there, &[], &arguments).map(drop)
    })
    .unwrap();
    assert_eq!(text("cudnnBackendExecute", &fake.calls()).len(), 2);
    // Nor is a capture that fails.
    fake.fail("cudnnBackendExecute", EXECUTION_FAILED);
    let error = prepared.capture(&mut there, &[], &arguments).unwrap_err();
    assert!(matches!(error, CudaError::Convolution { .. }), "{error}");
    fake.fail("cudnnBackendExecute", 0);
    here.capture(&[node], &[], |_| prepared.run(&stream, &arguments))
        .unwrap();
}

/// Where there is no memory to try plans on, the first one is taken as it is, which the plan says.
#[test]
fn a_plan_that_was_not_tried_says_so() {
    let fake = FakeDriver::start(1, 64 << 20).unwrap();
    let device = Device::open(fake.driver(), 0).unwrap();
    let stream = device.stream().unwrap();
    let convolver = Convolver::new(&device, fake_cudnn(&engines([&[], &[]]))).unwrap();
    let convolution = convolution(Number::F32, false);
    let search = |limits| convolver.search(&stream, &convolution, limits);
    let tried = search(UNCHECKED).unwrap();
    assert_eq!(tried.timed, 2);
    fake.fail("cuMemAllocFromPoolAsync", OUT_OF_MEMORY);
    fake.calls();
    let plan = search(PlanLimits::default()).unwrap();
    assert_eq!((plan.timed, plan.microseconds), (0, 0.0));
    assert!(text("cudnnBackendExecute", &fake.calls()).is_empty());
    fake.fail("cuMemAllocFromPoolAsync", 0);
    let error = search(PlanLimits::default()).unwrap_err().to_string();
    assert!(error.contains("plans compute something else"), "{error}");
}

/// A convolution with strides, channels first, and what the library needs none of.
const STEP: &str = "graph @step {
  %x = parameter 0 : f32[2,16,8,8]
  %w = parameter 1 : f32[32,16,3,3]
  %y = conv %x, %w {stride=[2,2], pad_low=[1,1], pad_high=[1,1], dilation=[1,1], groups=1} : f32[2,32,4,4]
  %z = mul %y, %y : f32[2,32,4,4]
  return %z
}";

/// A process in which the step of [`STEP`] meets a device.
#[derive(Clone, Copy)]
struct Process {
    /// The notes of the library's engine.
    notes: &'static [i32],
    /// Whether results of plans are looked at.
    checks: bool,
    /// Bytes of the device's memory.
    memory: usize,
    /// What a plan's call answers.
    answer: i32,
}

/// One that takes what the stand-in computes.
const TRUSTS: Process = Process {
    notes: &[],
    checks: false,
    memory: 64 << 20,
    answer: 0,
};
/// One that looks, and finds that the stand-in computes nothing.
const LOOKS: Process = Process {
    checks: true,
    ..TRUSTS
};

impl Process {
    /// Whether the library computes the convolution, and how often plans were called until that was known.
    fn meets(self, nvrtc: &Nvrtc, cache: &CacheFolder) -> (bool, usize) {
        let fake = FakeDriver::start(1, self.memory).unwrap();
        let target = CudaTarget {
            cudnn: true,
            ..CudaTarget::default()
        };
        let compiled = compile(&Graph::parse(STEP).unwrap(), &Options::default(), &target).unwrap();
        for function in &compiled.code.functions {
            let pointers = function.text.parameters.len() + usize::from(function.guarded);
            fake.declare(&function.name, &vec![8; pointers]);
        }
        let device = Device::open(fake.driver(), 0).unwrap();
        let gpu = Gpu::in_cache(&device, nvrtc.clone(), cache).unwrap();
        let gpu = gpu.with_cudnn(Some(fake_cudnn(&engines([self.notes]))));
        let gpu = Arc::new(match self.checks {
            true => gpu,
            false => gpu.without_checks_of_plans(),
        });
        fake.fail("cudnnBackendExecute", self.answer);
        let contract = compiled.contract();
        let step = CudaExecutable::from_code("step", compiled.code, contract, &gpu).unwrap();
        let is_taken = step.contract().kernels[0].name.starts_with("cuDNN convolution");
        (is_taken, text("cudnnBackendExecute", &fake.calls()).len())
    }
}

/// What a later process may answer otherwise is not kept for it.
#[test]
fn only_what_is_so_for_good_is_kept() {
    let Some(nvrtc) = common::nvrtc() else { return };
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| CacheFolder::at(place.path().join(name), 1 << 20);

    // A plan that there was no memory to try. The next process tries it, and what it finds stays so.
    let cache = at("memory");
    let full = Process {
        memory: 4 << 10,
        ..LOOKS
    };
    assert_eq!(full.meets(&nvrtc, &cache), (true, 0));
    assert_eq!(LOOKS.meets(&nvrtc, &cache), (false, 1));
    assert_eq!(TRUSTS.meets(&nvrtc, &cache), (false, 0));

    // A plan that failed, and does not any more.
    let cache = at("failure");
    let fails = Process {
        answer: EXECUTION_FAILED,
        ..TRUSTS
    };
    assert_eq!(fails.meets(&nvrtc, &cache), (false, 1));
    let (is_taken, calls) = TRUSTS.meets(&nvrtc, &cache);
    assert!(is_taken && calls > 0);
    assert_eq!(LOOKS.meets(&nvrtc, &cache), (true, 0));

    // No engine that does.
    let cache = at("engine");
    let varies = Process {
        notes: &[numerical_note::NONDETERMINISTIC],
        ..TRUSTS
    };
    assert_eq!(varies.meets(&nvrtc, &cache), (false, 0));
    assert_eq!(TRUSTS.meets(&nvrtc, &cache), (false, 0));
}

/// A step calls the library for convolutions that the library takes, both in calls one by one and in a
/// graph, and runs its own kernels for the others; the report says which.
#[test]
fn a_step_has_the_library_or_its_own_kernels() {
    let Some(nvrtc) = common::nvrtc() else { return };
    let graph = Graph::parse(STEP).unwrap();
    let target = CudaTarget {
        cudnn: true,
        ..CudaTarget::default()
    };
    let failing = ("cudnnBackendExecute", EXECUTION_FAILED);
    let ended = ("cuStreamEndCapture", CAPTURE_INVALIDATED);
    for (takes, (fails, answer)) in [(true, failing), (true, ended), (false, failing)] {
        let fake = FakeDriver::start(1, 64 << 20).unwrap();
        let compiled = compile(&graph, &Options::default(), &target).unwrap();
        for function in &compiled.code.functions {
            let pointers = function.text.parameters.len() + usize::from(function.guarded);
            fake.declare(&function.name, &vec![8; pointers]);
        }
        let device = Device::open(fake.driver(), 0).unwrap();
        let notes: &[i32] = if takes {
            &[]
        } else {
            &[numerical_note::NONDETERMINISTIC]
        };
        let library = fake_cudnn(&engines([notes]));
        let gpu = Gpu::in_cache(&device, nvrtc.clone(), &CacheFolder::disabled()).unwrap();
        let gpu = Arc::new(gpu.with_cudnn(Some(library)).without_checks_of_plans());
        let contract = compiled.contract();
        assert!(contract.kernels[0].name.starts_with("cuDNN convolution"));
        let step = CudaExecutable::from_code("step", compiled.code, contract, &gpu).unwrap();
        let name = &step.contract().kernels[0].name;
        assert_eq!(name.starts_with("cuDNN convolution"), takes, "{name}");
        let memory = |bytes: &usize| gpu.allocate(*bytes).unwrap();
        let inputs: Vec<_> = step.code().inputs.iter().map(memory).collect();
        let outputs: Vec<_> = step.code().outputs.iter().map(memory).collect();
        for run in 0..3 {
            fake.calls();
            if run == 1 {
                // A capture that fails, or that another thread ends, is tried again.
                fake.fail_next(fails, answer);
            }
            step.run(&inputs, &outputs, &[], &NothingOutside, false).unwrap();
            let calls = fake.calls();
            // Call by call, captured, and in the graph.
            let expected = [1, 2, 0][run] * usize::from(takes);
            assert_eq!(
                text("cudnnBackendExecute", &calls).len(),
                expected,
                "run {run}: {calls:#?}"
            );
            let captured = text("cuStreamBeginCaptureToGraph", &calls).len();
            let expected = [0, 2, 0][run] * usize::from(takes);
            assert_eq!(captured, expected, "run {run}: {calls:#?}");
            assert_eq!(text("cuGraphLaunch", &calls).len(), usize::from(run > 0));
        }
    }
}
