//! Steps of several ranks. On the host harness they compute what the interpreter computes, with collectives put off as
//! long as the step's orders allow. On a fake driver with a fake NCCL they show which calls are made, where they stand
//! in the step's graph, and what happens when other ranks do not take part.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_compiler::buckets::{Buckets, described};
use kiln_compiler::{CompileError, Options, compile};
use kiln_cuda::code::CallKind;
use kiln_cuda::execute::{CudaExecutable, Gpu, NothingOutside, StepError};
use kiln_cuda::ranks::Ranks;
use kiln_cuda::runtime::{Device, Storage};
use kiln_cuda::testing::host::HostStep;
use kiln_cuda::testing::{FakeDriver, fake_library, fake_nccl};
use kiln_cuda::{CudaError, CudaStep, CudaTarget};
use kiln_distributed::Error;
use kiln_graph::{Graph, HostTensor, Scalar, interpret_ranks};
use kiln_partition::testing::{arguments_of_ranks, averaged_decoder, sharded_decoder};

fn compiled(graph: &Graph, buckets: Buckets) -> CudaStep {
    let options = Options {
        buckets,
        ..Options::default()
    };
    compile(graph, &options, &CudaTarget::default()).unwrap()
}

/// The bytes of each output on each rank, which are close to what they mean.
fn checked(graph: &Graph, step: &CudaStep, ranks: usize, tolerance: f64) -> Vec<Vec<Vec<u8>>> {
    let given = arguments_of_ranks(graph, ranks);
    let of: Vec<_> = given
        .iter()
        .map(|(tensors, scalars)| (&tensors[..], &scalars[..]))
        .collect();
    let expected = interpret_ranks(graph, &of).unwrap();
    let bytes = |(tensors, _): &(Vec<HostTensor>, Vec<Scalar>)| {
        tensors.iter().map(|tensor| tensor.bytes().to_vec()).collect()
    };
    let mut inputs: Vec<Vec<Vec<u8>>> = given.iter().map(bytes).collect();
    let numbers = graph.scalars().iter().zip(&given[0].1);
    let bits: Vec<u64> = numbers
        .map(|(&value, scalar)| scalar.to_bits(graph.dtype(value)))
        .collect();
    let outputs = HostStep::of(step).unwrap().run_ranks(&mut inputs, &bits).unwrap();
    for (rank, (outputs, expected)) in outputs.iter().zip(&expected).enumerate() {
        for (number, (bytes, expected)) in outputs.iter().zip(expected).enumerate() {
            let ty = graph.ty(graph.outputs[number].value).clone();
            let actual = HostTensor::from_bytes(ty, bytes.clone()).unwrap();
            let scale = expected.to_f64s().iter().fold(1e-3f64, |a, b| a.max(b.abs()));
            if let Some(found) = kiln_graph::testing::difference(&actual, expected, tolerance * scale) {
                panic!("output {number} of rank {rank}: {found}");
            }
        }
    }
    outputs
}

const BUCKETS: [Buckets; 3] = [
    Buckets { first: 0, others: 0 },
    Buckets {
        first: 2000,
        others: 6000,
    },
    Buckets {
        first: 1 << 20,
        others: 25 << 20,
    },
];

/// Makes sure that `graph` computes what it means, with buckets of the first `sizes` of [`BUCKETS`] bit by
/// bit the same.
fn check(graph: &Graph, ranks: usize, sizes: usize) {
    let mut bits: Option<Vec<Vec<Vec<u8>>>> = None;
    for &buckets in &BUCKETS[..sizes] {
        let outputs = checked(graph, &compiled(graph, buckets), ranks, 3e-4);
        assert!(
            bits.get_or_insert_with(|| outputs.clone()) == &outputs,
            "{buckets} changes bits"
        );
    }
}

#[test]
fn steps_of_several_ranks_compute_what_they_mean() {
    check(&averaged_decoder(2), 2, 3);
    // With three ranks only the shares differ.
    check(&averaged_decoder(3), 3, 1);
}

#[test]
fn ranks_with_shares_compute_what_they_mean() {
    check(&sharded_decoder(2), 2, 3);
    check(&sharded_decoder(3), 3, 2);
}

const EVERY_KIND: &str = "graph @kinds {
    %0 = parameter 0 : f32[64]
    %1 = all_reduce %0 {ranks=2} : f32[64]
    %2 = all_reduce %1 {ranks=2} : f32[64]
    %3 = mul %1, %1 : f32[64]
    %4 = all_reduce %3 {ranks=2,mean=true} : f32[64]
    %5 = all_gather %4 {ranks=2} : f32[128]
    %6 = reduce_scatter %5 {ranks=2} : f32[64]
    %7 = broadcast_from %6 {ranks=2,root=1} : f32[64]
    %8 = parameter 1 : i64[3]
    %9 = all_reduce %8 {ranks=2} : i64[3]
    return %2, %4, %5, %7, %1, %9
}";

#[test]
fn every_kind_of_collective_is_a_call() {
    let graph = Graph::parse(EVERY_KIND).unwrap();
    let step = compiled(&graph, Buckets::default());
    checked(&graph, &step, 2, 1e-5);
    assert_eq!(step.code.ranks(), Some(2));
    let kinds = |call: &kiln_cuda::code::StepCall| match &call.kind {
        CallKind::Across { across, .. } => {
            Some((across.kind.clone(), across.elements, across.mean, across.root))
        }
        _ => None,
    };
    let mut kinds: Vec<_> = step.code.calls.iter().filter_map(kinds).collect();
    kinds.sort();
    let expected = [
        ("all_gather", 64, false, 0),
        ("all_reduce", 3, false, 0),
        ("all_reduce", 64, false, 0),
        ("all_reduce", 64, false, 0),
        ("all_reduce", 64, true, 0),
        ("broadcast_from", 64, false, 1),
        ("reduce_scatter", 128, false, 0),
    ];
    assert_eq!(
        kinds,
        expected.map(|(kind, elements, mean, root)| (kind.to_owned(), elements, mean, root))
    );
    // The cache keeps them.
    let text = serde_json::to_string(&step.code).unwrap();
    assert_eq!(
        serde_json::from_str::<kiln_cuda::code::StepCode>(&text).unwrap(),
        step.code
    );
}

#[test]
fn elements_that_nccl_does_not_add_are_an_error() {
    let text = "graph @short {
        %0 = parameter 0 : i16[4]
        %1 = all_reduce %0 {ranks=2} : i16[4]
        return %1
    }";
    let graph = Graph::parse(text).unwrap();
    let error = compile(&graph, &Options::default(), &CudaTarget::default()).unwrap_err();
    assert!(
        matches!(&error, CompileError::Unsupported { op, .. } if op == "all_reduce"),
        "{error}"
    );
}

#[test]
fn gradients_join_their_bucket_without_copies() {
    // A product and a sum write their gradients straight into the bucket.
    let graph = averaged_decoder(2);
    let step = compiled(&graph, Buckets::default());
    assert!(
        described(&step.graph).iter().any(|&(_, sums)| sums > 5),
        "{:?}",
        described(&step.graph)
    );
    let copies = step
        .kernels
        .iter()
        .filter(|kernel| kernel.name.starts_with("copy"));
    let names: Vec<&str> = copies.map(|kernel| kernel.name.as_str()).collect();
    assert!(names.is_empty(), "{names:?}");
}

/// A step on the fake driver, connected as one of two ranks.
struct Setup {
    fake: FakeDriver,
    gpu: Arc<Gpu>,
    step: CudaExecutable,
    inputs: Vec<Arc<Storage>>,
    outputs: Vec<Arc<Storage>>,
    scalars: Vec<u64>,
}

impl Setup {
    fn new(graph: &Graph, buckets: Buckets, timeout: Duration) -> Option<Self> {
        let nvrtc = common::nvrtc()?;
        let fake = FakeDriver::start(1, 256 << 20).unwrap();
        let compiled = compiled(graph, buckets);
        for function in &compiled.code.functions {
            let pointers = function.text.parameters.len() + usize::from(function.guarded);
            fake.declare(&function.name, &vec![8; pointers]);
        }
        let device = Device::open(fake.driver(), 0).unwrap();
        let ranks = Ranks::new(&device, fake_nccl(1, 2).unwrap(), timeout).unwrap();
        let gpu = Arc::new(Gpu::new(&device, nvrtc).unwrap().with_ranks(ranks));
        let contract = compiled.contract();
        let aliases = contract.aliases.clone();
        let step = CudaExecutable::from_code("step", compiled.code, contract, &gpu).unwrap();
        let allocate = |bytes: &usize| gpu.allocate(*bytes).unwrap();
        let inputs: Vec<_> = step.code().inputs.iter().map(allocate).collect();
        let sizes = step.code().outputs.iter().zip(&aliases);
        let outputs = sizes.map(|(bytes, alias)| match alias {
            Some(input) => inputs[*input as usize].clone(),
            None => allocate(bytes),
        });
        Some(Self {
            outputs: outputs.collect(),
            scalars: vec![0; step.code().scalars],
            inputs,
            gpu,
            step,
            fake,
        })
    }

    fn call(&self) -> Result<Vec<String>, StepError> {
        self.fake.calls();
        self.step
            .run(&self.inputs, &self.outputs, &self.scalars, &NothingOutside, false)?;
        Ok(self.fake.calls())
    }
}

const STEP: &str = "graph @step {
  %weight = parameter 0 : f32[1048576]
  %batch = parameter 1 : f32[1048576]
  %other = parameter 2 : f32[2048]
  %gradient = mul %weight, %batch : f32[1048576]
  %mean = all_reduce %gradient {ranks=2,mean=true} : f32[1048576]
  %next = sub %weight, %mean : f32[1048576]
  %square = mul %other, %other : f32[2048]
  %sum = all_reduce %square {ranks=2} : f32[2048]
  return %next (alias 0), %sum
}";

fn of<'a>(calls: &'a [String], name: &str) -> Vec<&'a str> {
    let own = calls.iter().filter(|call| call.starts_with(name));
    own.map(String::as_str).collect()
}

#[test]
fn collectives_are_nodes_behind_their_gradients_and_in_front_of_updates() {
    let graph = Graph::parse(STEP).unwrap();
    let alone = Buckets { first: 0, others: 0 };
    let Some(setup) = Setup::new(&graph, alone, Duration::from_secs(60)) else {
        return;
    };
    assert!(setup.step.can_settle());
    // Queued one by one: on the steps' stream, in the order of the schedule.
    let first = setup.call().unwrap();
    let order = of(&first, "ncclAllReduce");
    assert_eq!(order.len(), 2, "{first:#?}");
    assert!(
        order[0].starts_with("ncclAllReduce 1048576 of type 7, operation 4"),
        "{order:?}"
    );
    assert!(
        order[1].starts_with("ncclAllReduce 2048 of type 7, operation 0"),
        "{order:?}"
    );
    // In the graph: captured on a stream of the highest priority, once.
    let second = setup.call().unwrap();
    assert_eq!(
        of(&second, "cuStreamCreateWithPriority"),
        ["cuStreamCreateWithPriority -5"]
    );
    let captured = of(&second, "ncclAllReduce");
    assert_eq!(captured.len(), 2, "{second:#?}");
    let places = |line: &str| {
        let (_, places) = line.rsplit_once(", ").unwrap();
        let (from, to) = places.split_once(" -> ").unwrap();
        (from.to_owned(), to.to_owned())
    };
    let (gradient, mean) = places(captured[0]);
    assert_eq!(gradient, mean, "a bucket of one gradient is summed in place");
    // The kernel that makes the gradient, the collective, the update: each after the one before.
    let number = |line: &str| {
        line.split("node ")
            .nth(1)
            .unwrap()
            .split(' ')
            .next()
            .unwrap()
            .to_owned()
    };
    let nodes = of(&second, "cuGraphAddKernelNode");
    let touching: Vec<&&str> = nodes.iter().filter(|line| line.contains(&gradient)).collect();
    let [maker, update] = touching[..] else {
        panic!("{nodes:#?}")
    };
    // Each is a graph of its own.
    assert_eq!(of(&second, "cuStreamBeginCaptureToGraph"), [""; 0]);
    let captures = of(&second, "cuGraphAddChildGraphNode");
    assert_eq!(captures.len(), 2, "{second:#?}");
    let after = |line: &str| line.rsplit_once(" after ").unwrap().1.to_owned();
    assert!(
        after(captures[0]).contains(&number(maker)),
        "{captures:?} {maker}"
    );
    let weight = format!("{:x}", setup.inputs[0].address());
    assert!(update.contains(&weight), "{update}");
    // The update waits for its own collective, which is no kernel node, and for no later one.
    assert!(!after(update).contains(&number(maker)), "{update}");
    assert_ne!(after(update), "[]");
    // Further calls launch the graph: the host calls NCCL no more.
    let third = setup.call().unwrap();
    assert_eq!(
        (
            of(&third, "ncclAllReduce").len(),
            of(&third, "cuGraphLaunch").len()
        ),
        (0, 1),
        "{third:#?}"
    );
}

#[test]
fn nccl_that_cannot_be_captured_is_queued_call_by_call() {
    let graph = Graph::parse(STEP).unwrap();
    let Some(setup) = Setup::new(&graph, Buckets::default(), Duration::from_secs(60)) else {
        return;
    };
    setup.fake.fail("cuStreamEndCapture", 901);
    assert!(!setup.step.can_settle());
    setup.fake.fail("cuStreamEndCapture", 0);
    for _ in 0..3 {
        let calls = setup.call().unwrap();
        assert!(of(&calls, "cuGraphLaunch").is_empty(), "{calls:#?}");
        assert!(!of(&calls, "ncclAllReduce").is_empty(), "{calls:#?}");
    }
}

#[test]
fn a_step_of_ranks_that_are_not_connected_is_refused() {
    let Some(nvrtc) = common::nvrtc() else { return };
    let fake = FakeDriver::start(1, 64 << 20).unwrap();
    let compiled = compiled(&Graph::parse(STEP).unwrap(), Buckets::default());
    let device = Device::open(fake.driver(), 0).unwrap();
    let gpu = Arc::new(Gpu::new(&device, nvrtc).unwrap());
    let contract = compiled.contract();
    let error = CudaExecutable::from_code("step", compiled.code, contract, &gpu).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the step is one of 2 ranks, and cuda:0 is connected with 1"
    );
}

#[test]
fn a_library_that_adds_wrongly_is_refused() {
    let fake = FakeDriver::start(1, 64 << 20).unwrap();
    let device = Device::open(fake.driver(), 0).unwrap();
    // The fake computes nothing: the trial sees it.
    let world = kiln_distributed::init().unwrap();
    let error = Ranks::connect(&device, Ok(fake_library().unwrap()), &world).unwrap_err();
    assert!(error.to_string().contains("NCCL 2.28.9 adds wrongly"), "{error}");
    // The watch may be the last to let go of it.
    let begun = std::time::Instant::now();
    while of(&fake.calls(), "ncclCommDestroy").is_empty() {
        assert!(
            begun.elapsed() < std::time::Duration::from_secs(20),
            "it is never destroyed"
        );
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let error =
        Ranks::connect(&device, Err(CudaError::NoDevice { asked: 0, present: 0 }), &world).unwrap_err();
    assert!(matches!(error, CudaError::NoDevice { .. }), "{error}");
}

/// Waits until the watch has given up.
fn given_up(setup: &Setup) -> CudaError {
    let begun = Instant::now();
    loop {
        if let Err(error) = setup.gpu.ranks().unwrap().check() {
            return error;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "nobody gives up");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn whoever_waits_too_long_says_so_and_ends_nccl() {
    let graph = Graph::parse(STEP).unwrap();
    let Some(setup) = Setup::new(&graph, Buckets::default(), Duration::from_millis(100)) else {
        return;
    };
    // What is queued never happens: `CUDA_ERROR_NOT_READY`.
    setup.fake.fail("cuEventQuery", 600);
    setup.call().unwrap();
    let error = given_up(&setup);
    assert!(
        matches!(&error, CudaError::Ranks(Error::Stuck { rank: 1, .. })),
        "{error}"
    );
    let text = "rank 1 waited 0.1 s for the collectives of step `step`, and so did all other ranks";
    assert_eq!(error.to_string(), text);
    // Nothing that came of it is read, and nothing more is queued.
    let begun = Instant::now();
    let mut ended = false;
    while !ended && begun.elapsed() < Duration::from_secs(20) {
        ended = !of(&setup.fake.calls(), "ncclCommAbort").is_empty();
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(ended, "NCCL is aborted");
    let read = setup
        .gpu
        .download(&setup.outputs[1], &mut vec![0; 8192])
        .unwrap_err();
    assert_eq!(read.to_string(), text);
    assert_eq!(setup.call().unwrap_err().to_string(), text);
    assert!(of(&setup.fake.calls(), "nccl").is_empty());
}

#[test]
fn nobody_waits_for_an_abort_that_does_not_return() {
    let graph = Graph::parse(STEP).unwrap();
    let Some(setup) = Setup::new(&graph, Buckets::default(), Duration::from_millis(300)) else {
        return;
    };
    // Two calls: the second one makes the step's graph.
    setup.call().unwrap();
    setup.call().unwrap();
    // As NCCL does while there is a graph that has its calls.
    setup.fake.block("ncclCommAbort");
    setup.fake.fail("cuEventQuery", 600);
    setup.call().unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| setup.gpu.download(&setup.outputs[1], &mut vec![0; 8192]));
        let error = given_up(&setup);
        assert!(
            matches!(error, CudaError::Ranks(Error::Stuck { rank: 1, .. })),
            "{error}"
        );
        // The kernels end.
        setup.fake.fail("cuEventQuery", 0);
        let read = waiting.join().unwrap().unwrap_err();
        assert_eq!(read.to_string(), error.to_string());
    });
    // The device lives on, and everything is freed.
    setup.gpu.device().synchronize().unwrap();
    let Setup { fake, gpu, step, .. } = setup;
    drop((step, gpu));
    assert!(!of(&fake.calls(), "cuGraphExecDestroy").is_empty());
}

#[test]
fn kernels_that_do_not_end_are_left_behind() {
    let graph = Graph::parse(STEP).unwrap();
    let Some(setup) = Setup::new(&graph, Buckets::default(), Duration::from_millis(100)) else {
        return;
    };
    setup.fake.fail("cuEventQuery", 600);
    setup.call().unwrap();
    // This one does not ask about ranks.
    let waited = setup.gpu.stream().synchronize().unwrap_err();
    assert!(
        waited
            .to_string()
            .contains("cuda:0 is gone: ncclCommAbort reported"),
        "{waited}"
    );
    assert!(matches!(given_up(&setup), CudaError::Ranks(Error::Stuck { .. })));
    assert_eq!(
        setup.call().unwrap_err().to_string(),
        given_up(&setup).to_string()
    );
}

#[test]
fn a_call_of_nccls_that_waits_for_a_rank_is_ended() {
    let graph = Graph::parse(STEP).unwrap();
    let Some(setup) = Setup::new(&graph, Buckets::default(), Duration::from_millis(100)) else {
        return;
    };
    setup.fake.block("ncclAllReduce");
    let text = "rank 1 waited 0.1 s for all_reduce of 1048576 f32, and so did all other ranks";
    assert_eq!(setup.call().unwrap_err().to_string(), text);
}

#[test]
fn leaving_the_ranks_takes_limited_time() {
    let fake = FakeDriver::start(1, 64 << 20).unwrap();
    let device = Device::open(fake.driver(), 0).unwrap();
    fake.block("ncclCommDestroy");
    let begun = Instant::now();
    let ranks = Ranks::new(&device, fake_nccl(1, 2).unwrap(), Duration::from_millis(100)).unwrap();
    drop(ranks);
    while of(&fake.calls(), "ncclCommDestroy").is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(20), "it is never destroyed");
        std::thread::sleep(Duration::from_millis(5));
    }
    fake.release("ncclCommDestroy");
}

/// What [`the_process_ends`] starts; nothing where nobody does.
#[test]
fn a_process_that_nccl_holds() {
    if std::env::var_os("KILN_HELD").is_none() {
        return;
    }
    extern "C" fn hold() {
        std::thread::sleep(Duration::from_secs(1000));
    }
    // SAFETY: the handler lives as long as the process.
    unsafe { libc::atexit(hold) };
    let fake = FakeDriver::start(1, 64 << 20).unwrap();
    let device = Device::open(fake.driver(), 0).unwrap();
    let options = kiln_distributed::Options {
        timeout: Duration::from_millis(100),
        ..Default::default()
    };
    let world = kiln_distributed::init_with(options).unwrap();
    fake.block("ncclCommInitRank");
    let error = Ranks::connect(&device, Ok(fake_library().unwrap()), &world).unwrap_err();
    println!("said: {error}");
    std::process::exit(7);
}

#[test]
fn the_process_ends() {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["a_process_that_nccl_holds", "--exact", "--nocapture"])
        .env("KILN_HELD", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("said: rank 0 waited 0.1 s for NCCL's start, and so did all other ranks"),
        "{text}"
    );
    assert_eq!(output.status.code(), Some(7), "{text}");
}

#[test]
fn what_nccl_reports_later_ends_the_step() {
    let graph = Graph::parse(STEP).unwrap();
    let Some(setup) = Setup::new(&graph, Buckets::default(), Duration::from_secs(60)) else {
        return;
    };
    setup.fake.fail("cuEventQuery", 600);
    // `ncclRemoteError`.
    setup.fake.fail("ncclCommGetAsyncError", 6);
    setup.call().unwrap();
    let error = given_up(&setup);
    assert!(
        matches!(&error, CudaError::Ranks(Error::Nccl { code: 6, .. })),
        "{error}"
    );
}
