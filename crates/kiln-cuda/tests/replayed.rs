//! A step on a fake driver that records its calls: the first call of the step goes kernel by kernel, the
//! second makes a graph, further ones launch it, and a call at other addresses does not. NVRTC makes the
//! machine code, which the driver does not look at; without NVRTC the tests say so and pass.

mod common;

use std::sync::Arc;

use kiln_compiler::{Options, compile};
use kiln_cuda::CudaTarget;
use kiln_cuda::execute::{CudaExecutable, Given, Gpu, NothingOutside, Settled};
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
        let setup = Self::of(STEP)?;
        let aliases = &setup.step.contract().aliases;
        assert_eq!(*aliases, [Some(0), None], "the state is updated in place");
        Some(setup)
    }

    /// The step of a graph whose first argument is 4 KiB of state.
    fn of(text: &str) -> Option<Self> {
        let nvrtc = common::nvrtc()?;
        let graph = Graph::parse(text).unwrap();
        let fake = FakeDriver::start(1, 64 << 20).unwrap();
        let compiled = compile(&graph, &Options::default(), &CudaTarget::default()).unwrap();
        for function in &compiled.code.functions {
            let pointers = function.text.parameters.len() + usize::from(function.guarded);
            fake.declare(&function.name, &vec![8; pointers]);
        }
        let device = Device::open(fake.driver(), 0).unwrap();
        let gpu = Arc::new(Gpu::new(&device, nvrtc).unwrap());
        let contract = compiled.contract();
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

/// Steps share working memory: all kernels of one step are queued before the first kernel of another,
/// whichever threads run them.
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
        // The batch into its slot, the graph, the loss from its slot. There are no scalars.
        assert_eq!(
            asked,
            ["cuMemcpyDtoDAsync", "cuGraphLaunch", "cuMemcpyDtoDAsync"],
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

/// Without what orders streams: the names of the calls.
fn names(calls: &[String]) -> Vec<&str> {
    calls
        .iter()
        .map(|call| call.split(['(', ' ']).next().unwrap_or_default())
        .filter(|call| !call.starts_with("cuEvent") && !call.starts_with("cuStreamWait"))
        .collect()
}

/// Runs a settled step on a batch from the host; returns the driver's calls. The loss goes to `keep`.
fn settled_call(setup: &Setup, settled: &mut Settled, keep: &mut Vec<Arc<Storage>>) -> Vec<String> {
    setup.fake.calls();
    let batch = [1; 4096];
    let results = setup
        .step
        .run_settled(settled, &[Given::Host(&batch)], &[], false)
        .unwrap();
    keep.extend(results);
    setup.fake.calls()
}

#[test]
fn a_settled_step_is_one_copy_and_one_launch() {
    let Some(setup) = Setup::new() else { return };
    let mut keep = Vec::new();
    let settle = |state: &Arc<Storage>| {
        let inputs = vec![Some(state.clone()), None];
        setup.step.settle(inputs, &[Some(0), None]).unwrap()
    };
    let mut settled = settle(&setup.state);
    assert_eq!((settled.fresh(), settled.leaving()), (&[1][..], &[1][..]));
    let first = settled_call(&setup, &mut settled, &mut keep);
    assert_eq!(count(&first, "cuGraphInstantiate"), 1, "{first:#?}");
    for _ in 0..20 {
        let next = settled_call(&setup, &mut settled, &mut keep);
        let asked = [
            "cuMemAllocFromPoolAsync",
            "cuMemcpyHtoDAsync",
            "cuGraphLaunch",
            "cuMemcpyDtoDAsync",
        ];
        assert_eq!(names(&next), asked, "{next:#?}");
    }
    // A result that nobody has any more gives its memory to the next one; one that somebody has does not.
    let taken = keep.pop().unwrap();
    keep.drain(..);
    let free = settled_call(&setup, &mut settled, &mut keep);
    assert_eq!(count(&free, "cuMemAllocFromPoolAsync"), 0, "{free:#?}");
    let other = settled_call(&setup, &mut settled, &mut keep);
    assert_eq!(count(&other, "cuMemAllocFromPoolAsync"), 0, "{other:#?}");
    let addresses: Vec<u64> = keep
        .iter()
        .chain([&taken])
        .map(|result| result.address())
        .collect();
    assert!(addresses[0] != addresses[1] && !addresses[..2].contains(&addresses[2]));
    // A batch that is on the device already is copied there.
    let batch = setup.gpu.upload(&[1; 4096]).unwrap();
    setup.fake.calls();
    keep.extend(
        setup
            .step
            .run_settled(&mut settled, &[Given::Device(&batch)], &[], false)
            .unwrap(),
    );
    let calls = setup.fake.calls();
    assert_eq!(count(&calls, "cuMemcpyHtoDAsync"), 0, "{calls:#?}");
    assert_eq!(count(&calls, "cuMemcpyDtoDAsync"), 2, "{calls:#?}");

    // Whoever settles at the same addresses takes the graph over; calls at these addresses use it meanwhile.
    drop(settled);
    assert!(setup.step.graph_nodes().is_some());
    let plain = setup.call(&mut keep);
    assert_eq!(count(&plain, "cuGraphLaunch"), 1, "{plain:#?}");
    let mut again = settle(&setup.state);
    let calls = settled_call(&setup, &mut again, &mut keep);
    assert_eq!(count(&calls, "cuGraphInstantiate"), 0, "{calls:#?}");

    // State that is elsewhere is another graph.
    drop(again);
    let other = setup.gpu.allocate(4096).unwrap();
    let mut moved = settle(&other);
    let calls = settled_call(&setup, &mut moved, &mut keep);
    assert_eq!(count(&calls, "cuGraphInstantiate"), 1, "{calls:#?}");
    let kernels = calls
        .iter()
        .filter(|call| call.starts_with("cuGraphAddKernelNode"));
    let address = format!("{:x}", other.address());
    assert!(kernels.clone().any(|call| call.contains(&address)), "{calls:#?}");
    let old = format!("{:x}", setup.state.address());
    assert!(!kernels.clone().any(|call| call.contains(&old)), "{calls:#?}");
}

/// Whoever looks at the result of one call waits for that call, and not for the one that was queued behind
/// it.
#[test]
fn a_result_is_read_while_the_next_call_runs() {
    let Some(setup) = Setup::new() else { return };
    let mut keep = Vec::new();
    let inputs = vec![Some(setup.state.clone()), None];
    let mut settled = setup.step.settle(inputs, &[Some(0), None]).unwrap();
    settled_call(&setup, &mut settled, &mut keep);
    let first = settled_call(&setup, &mut settled, &mut keep);
    let recorded = first.iter().rfind(|call| call.starts_with("cuEventRecord"));
    let end = recorded.expect("the end of the call is marked").clone();
    let loss = keep.last().unwrap().clone();
    settled_call(&setup, &mut settled, &mut keep);
    setup.gpu.download(&loss, &mut [0; 4]).unwrap();
    let calls = setup.fake.calls();
    // "cuEventRecord event 29 on stream 4"
    let words: Vec<&str> = end.split(' ').collect();
    let (event, steps) = (words[2], words[5]);
    assert!(calls[0].starts_with("cuStreamWaitEvent") && calls[0].ends_with(&format!("event {event}")));
    let synchronized = format!("cuStreamSynchronize stream {steps}");
    assert!(!calls.contains(&synchronized), "{calls:#?}");
    // What is no result of a call is read behind everything that is queued.
    setup.gpu.download(&setup.state, &mut [0; 4096]).unwrap();
    assert!(setup.fake.calls().contains(&synchronized));
}

/// A step whose state is no output's to take over: each element is computed from many.
const MIXED: &str = "graph @mixed {
  %state = parameter 0 : f32[32,32]
  %batch = parameter 1 : f32[32,32]
  %turned = transpose %state {perm=[1,0]} : f32[32,32]
  %next = add %turned, %batch : f32[32,32]
  %square = mul %next, %next : f32[32,32]
  %loss = reduce sum %square {axes=[0,1]} : f32[]
  return %next, %loss
}";

#[test]
fn state_that_is_not_updated_in_place_has_two_buffers_in_turn() {
    let Some(setup) = Setup::of(MIXED) else { return };
    assert_eq!(setup.step.contract().aliases, [None, None]);
    let mut keep = Vec::new();
    let inputs = vec![Some(setup.state.clone()), None];
    let mut settled = setup.step.settle(inputs, &[Some(0), None]).unwrap();
    assert_eq!(settled.pairs(), [(0, 0)]);
    let own = settled.argument(0).unwrap().address();
    let spare = settled.output(0).unwrap().address();
    assert_ne!(own, spare);
    let first = settled_call(&setup, &mut settled, &mut keep);
    assert_eq!(count(&first, "cuGraphInstantiate"), 2, "{first:#?}");
    assert_eq!(
        settled.argument(0).unwrap().address(),
        spare,
        "the result is the state"
    );
    // The second graph is the first with the two exchanged.
    let nodes: Vec<&str> = first
        .iter()
        .filter(|call| call.starts_with("cuGraphAddKernelNode"))
        .filter_map(|call| call.split_once(" of ")?.1.split_once(" after"))
        .map(|(pointers, _)| pointers)
        .collect();
    let (one, other) = nodes.split_at(nodes.len() / 2);
    let (own, spare) = (format!("{own:x}"), format!("{spare:x}"));
    assert!(one.iter().any(|pointers| pointers.contains(&own)));
    let exchanged = one.iter().map(|pointers| {
        pointers
            .replace(&own, "?")
            .replace(&spare, &own)
            .replace('?', &spare)
    });
    assert_eq!(exchanged.collect::<Vec<_>>(), other);
    // The graphs take turns, and nothing is copied but the batch and the loss.
    let mut launched = Vec::new();
    for _ in 0..4 {
        let next = settled_call(&setup, &mut settled, &mut keep);
        assert_eq!(count(&next, "cuMemcpyDtoDAsync"), 1, "{next:#?}");
        launched.extend(next.into_iter().filter(|call| call.starts_with("cuGraphLaunch")));
    }
    assert_ne!(launched[0], launched[1]);
    assert_eq!(launched[..2], launched[2..]);
}

/// A step with an input of half a MiB, which only its own kernels read.
const LARGE: &str = "graph @large {
  %state = parameter 0 : f32[1024]
  %batch = parameter 1 : f32[128,1024]
  %sums = reduce sum %batch {axes=[0]} : f32[1024]
  %next = add %state, %sums : f32[1024]
  %square = mul %batch, %batch : f32[128,1024]
  %loss = reduce sum %square {axes=[0,1]} : f32[]
  return %next (alias 0), %loss
}";

#[test]
fn large_inputs_are_read_where_they_are() {
    const BYTES: usize = 4 * 128 * 1024;
    let Some(setup) = Setup::of(LARGE) else { return };
    let mut keep = Vec::new();
    let inputs = vec![Some(setup.state.clone()), None];
    let mut settled = setup.step.settle(inputs, &[Some(0), None]).unwrap();
    let host = vec![1; BYTES];
    let mut call = |given: &[Given<'_>]| {
        setup.fake.calls();
        let run = setup.step.run_settled(&mut settled, given, &[], false);
        keep.extend(run.unwrap());
        setup.fake.calls()
    };
    let pointed_to = |calls: &[String], address: u64| {
        let address = format!("{address:x}");
        let pointed = |call: &&String| call.starts_with("cuGraphExecKernelNodeSetParams");
        let told: Vec<_> = calls.iter().filter(pointed).collect();
        assert!(told.iter().all(|call| call.contains(&address)), "{calls:#?}");
        told.len()
    };
    let used = setup.fake.used();
    let batches = [(); 2].map(|()| setup.gpu.upload(&host).unwrap());
    let first = call(&[Given::Device(&batches[0])]);
    let readers = pointed_to(&first, batches[0].address());
    assert!(readers > 0, "{first:#?}");
    assert!(
        setup.fake.used() < used + 3 * BYTES,
        "no slot for the batch beside the two"
    );
    for batch in [&batches[1], &batches[0]] {
        let calls = call(&[Given::Device(batch)]);
        assert_eq!(pointed_to(&calls, batch.address()), readers);
        assert_eq!(count(&calls, "cuMemcpyDtoD"), 1, "the loss alone: {calls:#?}");
        assert_eq!(Arc::strong_count(batch), 1);
    }
    let same = call(&[Given::Device(&batches[0])]);
    assert_eq!(pointed_to(&same, 0), 0, "{same:#?}");
    // What comes from the host is read where it arrives.
    let from_host = call(&[Given::Host(&host)]);
    assert_eq!(count(&from_host, "cuMemcpyHtoD"), 1, "{from_host:#?}");
    assert_eq!(count(&from_host, "cuMemcpyDtoD"), 1, "{from_host:#?}");
    assert_eq!(count(&from_host, "cuGraphExecKernelNodeSetParams"), readers);
}

/// A batch that is also the state, which the step overwrites, is read as it was in front of the call.
#[test]
fn a_large_input_that_is_also_overwritten_is_copied() {
    let text = LARGE.replace(
        "%state = parameter 0 : f32[1024]",
        "%state = parameter 0 : f32[128,1024]",
    );
    let text = text.replace(
        "%next = add %state, %sums : f32[1024]",
        "%next = add %state, %batch : f32[128,1024]",
    );
    let text = text.replace("  %sums = reduce sum %batch {axes=[0]} : f32[1024]\n", "");
    let Some(setup) = Setup::of(&text) else { return };
    let state = setup.gpu.allocate(4 * 128 * 1024).unwrap();
    let inputs = vec![Some(state.clone()), None];
    let mut settled = setup.step.settle(inputs, &[Some(0), None]).unwrap();
    setup.fake.calls();
    setup
        .step
        .run_settled(&mut settled, &[Given::Device(&state)], &[], false)
        .unwrap();
    let calls = setup.fake.calls();
    let copied = format!("{} bytes", 4 * 128 * 1024);
    let copies = calls
        .iter()
        .filter(|call| call.starts_with("cuMemcpyDtoD") && call.contains(&copied));
    assert_eq!(copies.count(), 1, "{calls:#?}");
    // All that the kernels read as the batch is the copy, which no pointer of the nodes as they were made is.
    let made = calls
        .iter()
        .filter(|call| call.starts_with("cuGraphAddKernelNode"));
    let made: Vec<&str> = made.flat_map(|call| pointers(call)).collect();
    let told = calls
        .iter()
        .filter(|call| call.starts_with("cuGraphExecKernelNodeSetParams"));
    for told in told {
        let changed = pointers(told).filter(|pointer| !made.contains(pointer));
        let unset = pointers(told).filter(|pointer| *pointer == "0");
        assert!(changed.count() > 0 && unset.count() == 0, "{calls:#?}");
    }
}

/// The pointers among the arguments of a kernel's node.
fn pointers(call: &str) -> impl Iterator<Item = &str> {
    let (_, list) = call.split_once(" of [").expect("a node of a kernel");
    let (list, _) = list.split_once(']').expect("the end of the list");
    list.split(", ")
}

#[test]
fn what_does_not_fit_is_not_settled() {
    let Some(setup) = Setup::new() else { return };
    let small = setup.gpu.allocate(16).unwrap();
    let error = setup
        .step
        .settle(vec![Some(small), None], &[Some(0), None])
        .unwrap_err();
    assert_eq!(error.to_string(), "step `step` takes 4096 bytes, got 16");
    let error = setup.step.settle(vec![None], &[Some(0), None]).unwrap_err();
    assert_eq!(error.to_string(), "step `step` takes 2 tensors, got 1");
    // State that each call is given is returned by each call.
    let mut settled = setup.step.settle(vec![None, None], &[Some(0), None]).unwrap();
    assert_eq!((settled.fresh(), settled.leaving()), (&[0, 1][..], &[0, 1][..]));
    let error = setup
        .step
        .run_settled(&mut settled, &[Given::Host(&[0; 4096])], &[], false)
        .unwrap_err();
    assert_eq!(error.to_string(), "step `step` takes 2 fresh tensors, got 1");
}

#[test]
fn a_larger_arena_is_another_graph() {
    let Some(setup) = Setup::new() else { return };
    let mut keep = Vec::new();
    let inputs = vec![Some(setup.state.clone()), None];
    let mut settled = setup.step.settle(inputs, &[Some(0), None]).unwrap();
    settled_call(&setup, &mut settled, &mut keep);
    // A step that needs more working memory moves the arena, which the graph's kernels have by address.
    let compiled = compile(
        &Graph::parse(STEP).unwrap(),
        &Options::default(),
        &CudaTarget::default(),
    )
    .unwrap();
    let contract = compiled.contract();
    let mut code = compiled.code;
    code.arena_bytes += 1 << 20;
    let large = CudaExecutable::from_code("large", code, contract, &setup.gpu).unwrap();
    let storages = [setup.state.clone(), setup.gpu.upload(&[0; 4096]).unwrap()];
    let outputs = [setup.state.clone(), setup.gpu.allocate(4).unwrap()];
    large
        .run(&storages, &outputs, &[], &NothingOutside, false)
        .unwrap();
    let calls = settled_call(&setup, &mut settled, &mut keep);
    assert_eq!(count(&calls, "cuGraphInstantiate"), 1, "{calls:#?}");
    assert_eq!(count(&calls, "cuGraphLaunch"), 1, "{calls:#?}");
}
