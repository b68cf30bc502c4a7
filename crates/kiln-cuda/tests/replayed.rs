//! A step on a driver that keeps the calls: the first call goes kernel by kernel, the second makes a graph, further ones launch it, and one at other addresses does not.
//! NVRTC makes the machine code, which the driver does not look at; without NVRTC the tests say so and pass.

mod common;

use std::sync::Arc;

use kiln_compiler::{Options, compile};
use kiln_cuda::CudaTarget;
use kiln_cuda::execute::{CudaExecutable, Gpu, NothingOutside};
use kiln_cuda::runtime::{Device, Storage};
use kiln_cuda::testing::FakeDriver;
use kiln_graph::Graph;

/// A step with state that is updated in place, a fresh input, and a result.
const STEP: &str = "graph @step {
  %state = parameter 0 : f32[1024]
  %batch = parameter 1 : f32[1024]
  %next = add %state, %batch : f32[1024]
  %square = mul %next, %next : f32[1024]
  %loss = reduce sum %square {axes=[0]} : f32[]
  return %next (alias 0), %loss
}";

struct Setup {
    fake: FakeDriver,
    gpu: Arc<Gpu>,
    step: CudaExecutable,
    state: Arc<Storage>,
}

impl Setup {
    fn new() -> Option<Self> {
        let nvrtc = common::nvrtc()?;
        let graph = Graph::parse(STEP).unwrap();
        let fake = FakeDriver::start(1, 64 << 20).unwrap();
        let compiled = compile(&graph, &Options::default(), &CudaTarget::default()).unwrap();
        for function in &compiled.code.functions {
            let pointers = function.text.parameters.len() + usize::from(function.guarded);
            fake.declare(&function.name, &vec![8; pointers]);
        }
        let device = Device::open(fake.driver(), 0).unwrap();
        let gpu = Arc::new(Gpu::new(&device, nvrtc).unwrap());
        let contract = compiled.contract();
        assert_eq!(contract.aliases, [Some(0), None], "the state is updated in place");
        let step = CudaExecutable::from_code("step", compiled.code, contract, &gpu).unwrap();
        let state = gpu.allocate(4096).unwrap();
        fake.calls();
        Some(Self {
            fake,
            gpu,
            step,
            state,
        })
    }

    /// A call with the state in place, a new batch, and new memory for the loss; what it asked of the driver.
    fn call(&self, keep: &mut Vec<Arc<Storage>>) -> Vec<String> {
        let batch = self.gpu.upload(&[1; 4096]).unwrap();
        let loss = self.gpu.allocate(4).unwrap();
        // Nothing is freed, so that no address comes again by chance.
        keep.extend([batch.clone(), loss.clone()]);
        self.fake.calls();
        self.step
            .run(
                &[self.state.clone(), batch],
                &[self.state.clone(), loss],
                &[],
                &NothingOutside,
                false,
            )
            .unwrap();
        self.fake.calls()
    }
}

/// Steps share working memory: the kernels of one are all queued before the first of another, whichever threads ask.
#[test]
fn steps_of_two_threads_do_not_mix() {
    let Some(setup) = Setup::new() else { return };
    let text = include_str!("../../kiln-compiler/tests/cases/batch_norm.kg");
    let body: Vec<&str> = text.lines().filter(|line| !line.starts_with("//")).collect();
    let graph = Graph::parse(&body.join("\n")).unwrap();
    let steps = ["one", "two"].map(|name| {
        let compiled = compile(&graph, &Options::default(), &CudaTarget::default()).unwrap();
        let (contract, mut code) = (compiled.contract(), compiled.code);
        for function in &mut code.functions {
            function.name = format!("{name}_{}", function.name);
            let pointers = function.text.parameters.len() + usize::from(function.guarded);
            setup.fake.declare(&function.name, &vec![8; pointers]);
        }
        CudaExecutable::from_code(name, code, contract, &setup.gpu).unwrap()
    });
    let kernels = steps[0].code().calls.len();
    assert!(kernels > 1, "a step of one kernel cannot be cut");
    setup.fake.calls();
    std::thread::scope(|scope| {
        for step in &steps {
            scope.spawn(|| {
                for _ in 0..40 {
                    let memory = |bytes: &usize| setup.gpu.allocate(*bytes).unwrap();
                    let inputs: Vec<_> = step.code().inputs.iter().map(memory).collect();
                    let outputs: Vec<_> = step.code().outputs.iter().map(memory).collect();
                    let scalars = vec![0; step.code().scalars];
                    step.run(&inputs, &outputs, &scalars, &NothingOutside, false)
                        .unwrap();
                }
            });
        }
    });
    let calls = setup.fake.calls();
    let launched = calls.iter().filter(|call| call.starts_with("cuLaunchKernel"));
    let launched: Vec<bool> = launched.map(|call| call.contains("one_")).collect();
    assert!(launched.contains(&true) && launched.contains(&false));
    for step in launched.chunk_by(|a, b| a == b) {
        assert_eq!(step.len() % kernels, 0, "a step was cut: {calls:#?}");
    }
}

fn count(calls: &[String], start: &str) -> usize {
    calls.iter().filter(|call| call.starts_with(start)).count()
}

#[test]
fn a_step_becomes_a_graph_and_stays_one() {
    let Some(setup) = Setup::new() else { return };
    let kernels = setup.step.code().calls.len();
    let mut keep = Vec::new();

    let first = setup.call(&mut keep);
    assert_eq!(count(&first, "cuLaunchKernel"), kernels, "{first:#?}");
    assert_eq!(count(&first, "cuGraphLaunch"), 0);
    assert_eq!(setup.step.graph_nodes(), None);

    let second = setup.call(&mut keep);
    assert_eq!(count(&second, "cuLaunchKernel"), 0, "{second:#?}");
    assert_eq!(count(&second, "cuGraphAddKernelNode"), kernels);
    assert_eq!(count(&second, "cuGraphLaunch"), 1);
    assert_eq!(setup.step.graph_nodes(), Some(kernels));

    for _ in 0..3 {
        let next = setup.call(&mut keep);
        let asked: Vec<&str> = next
            .iter()
            .map(|call| call.split(['(', ' ']).next().unwrap_or_default())
            .filter(|call| !call.starts_with("cuEvent") && !call.starts_with("cuStreamWait"))
            .collect();
        // The scalars, the batch into its slot, the graph, the loss from its slot.
        assert_eq!(
            asked,
            [
                "cuMemcpyHtoDAsync",
                "cuMemcpyDtoDAsync",
                "cuGraphLaunch",
                "cuMemcpyDtoDAsync"
            ],
            "{next:#?}"
        );
    }
}

#[test]
fn state_that_moved_is_not_the_graph_s() {
    let Some(mut setup) = Setup::new() else { return };
    let kernels = setup.step.code().calls.len();
    let mut keep = Vec::new();
    for _ in 0..3 {
        setup.call(&mut keep);
    }
    keep.push(std::mem::replace(
        &mut setup.state,
        setup.gpu.allocate(4096).unwrap(),
    ));
    let moved = setup.call(&mut keep);
    assert_eq!(count(&moved, "cuGraphLaunch"), 0, "{moved:#?}");
    assert_eq!(count(&moved, "cuLaunchKernel"), kernels);
    let settled = setup.call(&mut keep);
    assert_eq!(count(&settled, "cuGraphInstantiate"), 1, "{settled:#?}");
    assert_eq!(count(&settled, "cuGraphLaunch"), 1);
    let next = setup.call(&mut keep);
    assert_eq!(count(&next, "cuGraphInstantiate"), 0);
    assert_eq!(count(&next, "cuGraphLaunch"), 1);
}

#[test]
fn arguments_that_do_not_fit_are_refused_before_anything_is_queued() {
    let Some(setup) = Setup::new() else { return };
    let small = setup.gpu.allocate(16).unwrap();
    setup.fake.calls();
    let run = |inputs: &[Arc<Storage>]| {
        let outputs = [setup.state.clone(), setup.gpu.allocate(4).unwrap()];
        setup.step.run(inputs, &outputs, &[], &NothingOutside, false)
    };
    let error = run(std::slice::from_ref(&setup.state)).unwrap_err();
    assert_eq!(error.to_string(), "step `step` takes 2 tensors, got 1");
    let error = run(&[setup.state.clone(), small]).unwrap_err();
    assert_eq!(error.to_string(), "step `step` takes 4096 bytes, got 16");
    assert_eq!(count(&setup.fake.calls(), "cuLaunchKernel"), 0);
}
