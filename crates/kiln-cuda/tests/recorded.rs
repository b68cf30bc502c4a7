//! The runtime on a driver that keeps the calls: what is ordered, freed, checked, and said when something
//! fails.

use std::collections::BTreeSet;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use kiln_cuda::CudaError;
use kiln_cuda::runtime::{
    Arguments, Device, GraphBuilder, Kernel, Launch, Module, Node, Parcel, Pinned, StepGraph, Storage, Stream,
};
use kiln_cuda::testing::FakeDriver;
use proptest::collection::vec;
use proptest::prelude::*;

const MEMORY: usize = 1 << 20;

/// A fake driver, its first device, and a stream.
fn start() -> (FakeDriver, Device, Stream) {
    let fake = FakeDriver::start(2, MEMORY).unwrap();
    let device = Device::open(fake.driver(), 0).unwrap();
    let stream = device.stream().unwrap();
    fake.calls();
    (fake, device, stream)
}

/// The kernel `add`, which takes two pointers and a number of 32 bits.
fn add(fake: &FakeDriver, device: &Device) -> Kernel {
    fake.declare("add", &[8, 8, 4]);
    let kernel = Module::load(device, "sums", b"machine code")
        .unwrap()
        .kernel("add")
        .unwrap();
    fake.calls();
    kernel
}

fn launch(kernel: &Kernel, storage: &Arc<Storage>) -> Launch {
    Launch {
        kernel: kernel.clone(),
        grid: [4, 1, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        arguments: Arguments::new().memory(storage, 0).memory(storage, 16).u32(7),
    }
}

/// What a test has captured.
type Call<'a> = dyn FnOnce(&Stream) -> kiln_cuda::Result<()> + 'a;

/// The number of the node that a call added.
fn number(call: &str) -> usize {
    call.split_whitespace().nth(2).unwrap().parse().unwrap()
}

/// Position of the first line that starts with `start`.
fn place(calls: &[String], start: &str) -> usize {
    calls
        .iter()
        .position(|call| call.starts_with(start))
        .unwrap_or_else(|| panic!("no `{start}` in {calls:#?}"))
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let fake = FakeDriver::start(2, MEMORY).unwrap();
    let error = Device::open(fake.driver(), 2).unwrap_err();
    assert_eq!(
        error.to_string(),
        "there is no device cuda:2: the driver sees 2 (`kiln backends` lists them)"
    );
    let description = fake.driver().describe(1).unwrap();
    assert_eq!(
        description.to_string(),
        "cuda:1      Fake GPU, compute capability 9.0, 0.0 GiB, 132 multiprocessors"
    );
}

#[test]
fn everything_goes_back_to_the_driver() {
    let (fake, device, stream) = start();
    let storage = Storage::allocate(&stream, 64).unwrap();
    let pinned = Pinned::allocate(&device, 64).unwrap();
    assert_eq!((fake.used(), fake.pinned()), (64, 1));
    drop((storage, pinned, stream, device));
    assert_eq!((fake.used(), fake.pinned()), (0, 0));
    let calls = fake.calls();
    assert!(
        place(&calls, "cuMemFreeAsync") < place(&calls, "cuMemPoolDestroy"),
        "{calls:#?}"
    );
    assert!(
        place(&calls, "cuMemPoolDestroy") < place(&calls, "cuDevicePrimaryCtxRelease"),
        "{calls:#?}"
    );
}

#[test]
fn a_use_on_another_stream_waits_for_the_last_one() {
    let (fake, device, first) = start();
    let second = device.stream().unwrap();
    let storage = Storage::allocate(&first, 64).unwrap();
    first.fill(&storage, 0..64, 1).unwrap();
    fake.calls();

    second.fill(&storage, 0..64, 2).unwrap();
    let calls = fake.calls();
    assert_eq!(calls.len(), 3, "{calls:#?}");
    assert!(
        calls[0].starts_with("cuEventRecord") && calls[0].ends_with("on stream 4"),
        "{calls:#?}"
    );
    assert!(calls[1].starts_with("cuStreamWaitEvent stream 5"), "{calls:#?}");
    assert!(calls[2].starts_with("cuMemsetD8Async"), "{calls:#?}");

    // On the same stream there is nothing to wait for, and the storage is freed there.
    second.fill(&storage, 0..64, 3).unwrap();
    drop(storage);
    let calls = fake.calls();
    assert_eq!(
        calls,
        [
            "cuMemsetD8Async 64 bytes to 3 on stream 5",
            "cuMemFreeAsync on stream 5"
        ]
    );
}

#[test]
fn a_use_that_was_ended_is_waited_for_up_to_its_end() {
    let (fake, device, first) = start();
    let second = device.stream().unwrap();
    let storage = Storage::allocate(&first, 64).unwrap();
    storage.end_use().unwrap();
    fake.calls();
    second.fill(&storage, 0..64, 1).unwrap();
    // No event is recorded behind what the first stream was given since.
    let calls = fake.calls();
    assert!(calls[0].starts_with("cuStreamWaitEvent stream 5"), "{calls:#?}");
    assert_eq!(calls.len(), 2, "{calls:#?}");

    // A use on the same stream after the end counts again.
    storage.end_use().unwrap();
    second.fill(&storage, 0..64, 1).unwrap();
    fake.calls();
    first.fill(&storage, 0..64, 2).unwrap();
    let calls = fake.calls();
    assert!(
        calls[0].starts_with("cuEventRecord") && calls[0].ends_with("on stream 5"),
        "{calls:#?}"
    );
}

#[test]
fn copies_carry_bytes_and_pinned_memory_outlives_them() {
    let (fake, device, stream) = start();
    let storage = Storage::allocate(&stream, 8).unwrap();
    let other = Storage::allocate(&stream, 8).unwrap();
    let mut from = Pinned::allocate(&device, 8).unwrap();
    from.write().unwrap().copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
    stream.upload(&from, 2..6, &storage, 1).unwrap();
    stream.copy(&storage, 1..5, &other, 4).unwrap();
    let mut to = Pinned::allocate(&device, 4).unwrap();
    stream.download(&other, 4..8, &mut to, 0).unwrap();
    assert_eq!(to.read().unwrap(), [3, 4, 5, 6]);
    let mut plain = [0; 2];
    stream.read(&other, 6, &mut plain).unwrap();
    assert_eq!(plain, [5, 6]);
    stream.write(&[9], &other, 0).unwrap();
    stream.read(&other, 0, &mut plain[..1]).unwrap();
    assert_eq!(plain[0], 9);
    fake.calls();
    // A copy is under way: freeing waits for it.
    drop(from);
    let calls = fake.calls();
    assert!(
        place(&calls, "cuEventSynchronize") < place(&calls, "cuMemFreeHost"),
        "{calls:#?}"
    );
    // This one was waited for by reading it.
    drop(to);
    assert_eq!(fake.calls(), ["cuMemFreeHost"]);
}

#[test]
fn ranges_outside_their_memory_reach_no_driver() {
    let (fake, device, stream) = start();
    let storage = Storage::allocate(&stream, 8).unwrap();
    let pinned = Pinned::allocate(&device, 4).unwrap();
    fake.calls();
    let error = stream.upload(&pinned, 0..4, &storage, 5).unwrap_err();
    assert_eq!(
        error.to_string(),
        "copying to a device: bytes 5..9 are not all inside the 8 bytes there"
    );
    assert!(stream.upload(&pinned, 2..5, &storage, 0).is_err());
    assert!(stream.fill(&storage, 4..9, 0).is_err());
    assert!(stream.write(&[0; 3], &storage, usize::MAX).is_err());
    assert_eq!(fake.calls(), [""; 0]);
}

#[test]
fn memory_that_is_used_up_is_named_with_all_sizes_and_nothing_is_lost() {
    let (fake, device, stream) = start();
    let half = Storage::allocate(&stream, MEMORY / 2).unwrap();
    fake.calls();
    let error = Storage::allocate(&stream, MEMORY).unwrap_err();
    let calls = fake.calls();
    assert!(
        place(&calls, "cuCtxSynchronize") < place(&calls, "cuMemPoolTrimTo 0"),
        "{calls:#?}"
    );
    assert_eq!(
        error.to_string(),
        "cuda:0 has not 1048576 bytes of memory left: of 1048576 bytes 524288 are free, Kiln's pool holds \
         524288 (524288 of them in use), the rest belongs to others; set a smaller memory budget or batch"
    );
    stream.fill(&half, 0..MEMORY / 2, 1).unwrap();
    drop(half);
    Storage::allocate(&stream, MEMORY).unwrap();
    assert_eq!(device.memory_peak().unwrap(), MEMORY);
    device.reset_memory_peak().unwrap();
    assert_eq!(device.memory_peak().unwrap(), 0);
    fake.fail("cuMemHostAlloc", 2);
    let error = Pinned::allocate(&device, 64).unwrap_err();
    assert!(
        matches!(error, CudaError::OutOfPinnedMemory { asked: 64, .. }),
        "{error}"
    );
}

#[test]
fn two_devices_do_not_meet_in_one_operation() {
    let (fake, _device, stream) = start();
    let other = Device::open(fake.driver(), 1).unwrap();
    let storage = Storage::allocate(&other.stream().unwrap(), 8).unwrap();
    let error = stream.fill(&storage, 0..8, 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "using memory on a stream: cuda:1 and cuda:0 cannot take part in one operation"
    );
    let kernel = add(&fake, &other);
    // SAFETY: the launch is refused.
    let error = unsafe { stream.launch(&launch(&kernel, &Arc::new(storage))) }.unwrap_err();
    assert!(matches!(error, CudaError::TwoDevices { .. }), "{error}");
}

#[test]
fn a_launch_is_checked_against_its_kernel() {
    let (fake, device, stream) = start();
    let kernel = add(&fake, &device);
    let storage = Arc::new(Storage::allocate(&stream, 64).unwrap());
    let good = launch(&kernel, &storage);
    fake.calls();
    let refused = |change: &dyn Fn(&mut Launch), what: &str| {
        let mut bad = good.clone();
        change(&mut bad);
        // SAFETY: the launch is refused.
        let text = unsafe { stream.launch(&bad) }.unwrap_err().to_string();
        assert!(
            text.starts_with("kernel `add` cannot be launched: ") && text.contains(what),
            "{text}"
        );
    };
    refused(&|bad| bad.grid[1] = 0, "have no threads");
    refused(&|bad| bad.block = [32, 32, 1], "at most 512 threads, not 1024");
    refused(
        &|bad| bad.shared_bytes = 232_448,
        "at most 232448 bytes of shared memory, not 233472",
    );
    refused(
        &|bad| bad.arguments = Arguments::new().memory(&storage, 0).u64(1).u64(2),
        "its parameters have [8, 8, 4] bytes, the arguments [8, 8, 8]",
    );
    refused(&|bad| bad.arguments = Arguments::new(), "the arguments []");
    assert_eq!(fake.calls(), [""; 0]);
    // SAFETY: the fake driver runs nothing.
    unsafe { stream.launch(&good) }.unwrap();
    assert_eq!(
        fake.calls(),
        ["cuLaunchKernel add grid [4, 1, 1] block [256, 1, 1] shared 0 on stream 4"]
    );
    let error = Module::load(&device, "sums", b"machine code")
        .unwrap()
        .kernel("sub")
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("kernel `sub` cannot be launched: module `sums`"),
        "{error}"
    );
}

#[test]
fn more_shared_memory_is_asked_for_once() {
    let (fake, device, stream) = start();
    let kernel = add(&fake, &device);
    let storage = Arc::new(Storage::allocate(&stream, 64).unwrap());
    let mut large = launch(&kernel, &storage);
    large.shared_bytes = 100_000;
    fake.calls();
    for _ in 0..2 {
        // SAFETY: the fake driver runs nothing.
        unsafe { stream.launch(&large) }.unwrap();
    }
    let calls = fake.calls();
    assert_eq!(calls[0], "cuFuncSetAttribute 8 of add to 100000");
    assert_eq!(calls.len(), 3, "{calls:#?}");
}

#[test]
fn a_fault_names_the_last_launch_and_ends_the_device() {
    let (fake, device, stream) = start();
    let kernel = add(&fake, &device);
    let storage = Arc::new(Storage::allocate(&stream, 64).unwrap());
    // SAFETY: the fake driver runs nothing.
    unsafe { stream.launch(&launch(&kernel, &storage)) }.unwrap();
    fake.fault(700);
    let first = stream.synchronize().unwrap_err();
    assert_eq!(
        first.to_string(),
        "cuda:0 is gone: cuStreamSynchronize reported an illegal memory access was encountered \
         (CUDA_ERROR_ILLEGAL_ADDRESS, 700); the last launch was add. Nothing on this device can be used \
         again in this process: start it anew from the last checkpoint"
    );
    fake.calls();
    // Everything that follows says the same without asking the driver.
    let errors = [
        Storage::allocate(&stream, 8).map(drop).unwrap_err(),
        stream.fill(&storage, 0..8, 0).unwrap_err(),
        device.stream().map(drop).unwrap_err(),
        device.memory().map(drop).unwrap_err(),
        // SAFETY: the launch is refused.
        unsafe { stream.launch(&launch(&kernel, &storage)) }.unwrap_err(),
        GraphBuilder::new(&device, "step").map(drop).unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.to_string(), first.to_string());
    }
    drop((storage, kernel, stream));
    assert_eq!(fake.calls(), [""; 0]);
}

#[test]
fn an_error_that_is_no_fault_leaves_the_device_usable() {
    let (fake, _device, stream) = start();
    let storage = Storage::allocate(&stream, 8).unwrap();
    fake.fail("cuMemsetD8Async", 1);
    let error = stream.fill(&storage, 0..8, 0).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("cuMemsetD8Async failed while filling memory of a device"),
        "{error}"
    );
    fake.fail("cuMemsetD8Async", 0);
    stream.fill(&storage, 0..8, 0).unwrap();
}

#[test]
fn a_graph_has_the_edges_it_was_given() {
    let (fake, device, stream) = start();
    let kernel = add(&fake, &device);
    let (one, two) = (
        Arc::new(Storage::allocate(&stream, 64).unwrap()),
        Arc::new(Storage::allocate(&stream, 64).unwrap()),
    );
    let mut graph = GraphBuilder::new(&device, "train_step").unwrap();
    fake.calls();
    let zeros = graph.fill(&[], &one, 0..64, 0).unwrap();
    // SAFETY: the fake driver runs nothing.
    let first = unsafe { graph.kernel(&[zeros], &launch(&kernel, &one)) }.unwrap();
    let copy = graph.copy(&[zeros, zeros], &one, 0..16, &two, 48).unwrap();
    let both = graph.join(&[copy, first]).unwrap();
    let captured = graph
        .capture(&[both], &[&one, &two], |stream| {
            // SAFETY: the fake driver runs nothing.
            unsafe { stream.launch(&launch(&kernel, &one)) }?;
            // SAFETY: as above.
            unsafe { stream.launch(&launch(&kernel, &two)) }
        })
        .unwrap();
    // SAFETY: as above.
    unsafe { graph.kernel(&[captured], &launch(&kernel, &two)) }.unwrap();
    let calls = fake.calls();
    let nodes: Vec<&String> = calls
        .iter()
        .filter(|call| call.starts_with("cuGraphAdd"))
        .collect();
    let [zeros, first, copy, both, last] = nodes[..] else {
        panic!("{calls:#?}")
    };
    assert!(zeros.contains("64 bytes to 0 after []"), "{zeros}");
    assert!(first.contains("add grid [4, 1, 1] block [256, 1, 1]"), "{first}");
    assert!(first.ends_with(&format!("after [{}]", number(zeros))), "{first}");
    assert!(
        copy.ends_with(&format!("16 bytes after [{}]", number(zeros))),
        "{copy}"
    );
    assert!(
        both.ends_with(&format!("after [{}, {}]", number(first), number(copy))),
        "{both}"
    );
    let begin = &calls[place(&calls, "cuStreamBeginCaptureToGraph")];
    assert!(begin.ends_with(&format!("after [{}]", number(both))), "{begin}");
    // The second of the two captured launches is what the last kernel comes after: numbers rise.
    assert!(last.ends_with(&format!("after [{}]", number(last) - 1)), "{last}");

    let mut step = graph.instantiate(&stream).unwrap();
    assert_eq!(step.nodes(), 7);
    fake.calls();
    // What is captured uses no storage before it is launched: they are still this stream's, and nothing is
    // waited for.
    for _ in 0..2 {
        step.launch().unwrap();
        let calls = fake.calls();
        assert_eq!(calls.len(), 1, "{calls:#?}");
        assert!(calls[0].starts_with("cuGraphLaunch graph "), "{calls:#?}");
    }

    // The graph keeps what it uses, and is waited for before anything of it goes.
    drop((one, two, kernel));
    assert_eq!(fake.calls(), [""; 0]);
    drop(step);
    let calls = fake.calls();
    assert!(
        place(&calls, "cuStreamSynchronize") < place(&calls, "cuGraphExecDestroy"),
        "{calls:#?}"
    );
    assert!(
        place(&calls, "cuGraphExecDestroy") < place(&calls, "cuMemFreeAsync"),
        "{calls:#?}"
    );
    assert_eq!(fake.used(), 0);
}

/// To wait for a whole device ends the captures of all threads: who waits does so before or behind them. A
/// module that is dropped waits, too.
#[test]
fn who_waits_for_the_device_waits_for_captures() {
    let (fake, device, stream) = start();
    let storage = Arc::new(Storage::allocate(&stream, 8).unwrap());
    // The process has one context of a device, however often it is opened.
    let other = Device::open(fake.driver(), 0).unwrap();
    let module = Module::load(&other, "sums", b"machine code").unwrap();
    fake.calls();
    let begun = Barrier::new(3);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            begun.wait();
            other.synchronize()
        });
        scope.spawn(|| {
            begun.wait();
            drop(module);
        });
        let mut graph = GraphBuilder::new(&device, "step").unwrap();
        graph
            .capture(&[], &[&storage], |stream| {
                begun.wait();
                std::thread::sleep(Duration::from_millis(50));
                stream.fill(&storage, 0..8, 0)
            })
            .unwrap();
        waits.join().unwrap().unwrap();
    });
    let calls = fake.calls();
    let (ends, waits) = (
        place(&calls, "cuStreamEndCapture"),
        place(&calls, "cuCtxSynchronize"),
    );
    assert!(ends < waits, "{calls:#?}");
    place(&calls, "cuModuleUnload");
}

#[test]
fn a_capture_that_fails_ends_and_says_why() {
    let (fake, device, stream) = start();
    let storage = Arc::new(Storage::allocate(&stream, 8).unwrap());
    let mut graph = GraphBuilder::new(&device, "step").unwrap();
    fake.calls();
    let refuse = |_: &Stream| {
        Err(CudaError::Range {
            action: "a call",
            start: 0,
            end: 1,
            size: 0,
        })
    };
    let error = graph.capture(&[], &[&storage], refuse).unwrap_err();
    assert!(error.to_string().starts_with("a call"), "{error}");
    place(&fake.calls(), "cuStreamEndCapture");
    // The graph may have a part of the call.
    let error = graph.fill(&[], &storage, 0..8, 0).unwrap_err();
    assert!(
        error.to_string().starts_with("graph `step` is incomplete"),
        "{error}"
    );
    assert!(matches!(
        graph.instantiate(&stream),
        Err(CudaError::IncompleteGraph { .. })
    ));

    // What a graph must not hold reaches no driver.
    let mut pinned = Pinned::allocate(&device, 8).unwrap();
    let mut plain = [0; 8];
    let mut calls: Vec<Box<Call<'_>>> = vec![
        Box::new(|stream| stream.upload(&Pinned::allocate(&device, 8)?, 0..8, &storage, 0)),
        Box::new(|stream| stream.download(&storage, 0..8, &mut pinned, 0)),
        Box::new(|stream| stream.write(&[1; 8], &storage, 0)),
        Box::new(|stream| stream.read(&storage, 0, &mut plain)),
        Box::new(|stream| Storage::allocate(stream, 8).map(drop)),
    ];
    fake.calls();
    for call in calls.drain(..) {
        let mut graph = GraphBuilder::new(&device, "step").unwrap();
        let error = graph.capture(&[], &[&storage], call).unwrap_err();
        assert!(matches!(error, CudaError::Captured { .. }), "{error}");
    }
    let reached = fake.calls();
    assert!(
        !reached
            .iter()
            .any(|call| call.starts_with("cuMemcpy") || call.starts_with("cuMemAlloc"))
    );

    let mut graph = GraphBuilder::new(&device, "step").unwrap();
    graph.fill(&[], &storage, 0..8, 0).unwrap();
    let mut other = GraphBuilder::new(&device, "other").unwrap();
    let foreign = other.fill(&[], &storage, 0..8, 0).unwrap();
    let later = other.fill(&[foreign], &storage, 0..8, 0).unwrap();
    let error = graph.join(&[later]).unwrap_err();
    assert!(error.to_string().contains("a node of another graph"), "{error}");
    let mut step = graph.instantiate(&stream).unwrap();
    step.launch().unwrap();
    fake.fault(719);
    let error = stream.synchronize().unwrap_err();
    assert!(
        error
            .to_string()
            .contains("the last launch was graph `step` of 1 nodes"),
        "{error}"
    );
}

/// Kernels are pointed to memory that is elsewhere at each launch; the graph keeps it until a launch is queued.
#[test]
fn kernels_are_pointed_to_memory_that_moves() {
    let (fake, device, stream) = start();
    let kernel = add(&fake, &device);
    let memory = || Arc::new(Storage::allocate(&stream, 64).unwrap());
    let own = memory();
    let reader = |offset: usize| {
        let arguments = Arguments::new().memory(&own, 0);
        Launch {
            arguments: arguments.moving(5, offset).u32(7),
            ..launch(&kernel, &own)
        }
    };
    let mut graph = GraphBuilder::new(&device, "step").unwrap();
    // SAFETY: the fake driver runs nothing.
    let nodes = unsafe {
        let first = graph.kernel(&[], &reader(0)).unwrap();
        let second = graph.kernel(&[first], &launch(&kernel, &own)).unwrap();
        graph.kernel(&[second], &reader(16)).unwrap();
        fake.calls()
    };
    let [first, _, third] = [0, 1, 2].map(|place| {
        let mut added = nodes
            .iter()
            .filter(|call| call.starts_with("cuGraphAddKernelNode"));
        number(added.nth(place).unwrap())
    });
    let mut step = graph.instantiate(&stream).unwrap();
    // SAFETY: the fake driver runs nothing.
    let point = |step: &mut StepGraph, memory: u32, to: &Arc<Storage>| unsafe { step.point(memory, to) };
    fake.calls();
    let error = step.launch().unwrap_err();
    assert!(
        error
            .to_string()
            .contains("nobody has said where its memory 5 is"),
        "{error}"
    );
    assert_eq!(fake.calls(), [""; 0]);

    let (one, other) = (memory(), memory());
    fake.calls();
    let pointed = |node: usize, offset: u64, to: &Arc<Storage>| {
        let pointers = [own.address(), to.address() + offset];
        format!("node {node} add grid [4, 1, 1] block [256, 1, 1] of {pointers:x?}")
    };
    for to in [&one, &other] {
        point(&mut step, 5, to).unwrap();
        assert_eq!(Arc::strong_count(to), 2);
        step.launch().unwrap();
        assert_eq!(Arc::strong_count(to), 1, "the launch is queued");
        let calls = fake.calls();
        assert_eq!(calls.len(), 3, "{calls:#?}");
        assert!(calls[0].ends_with(&pointed(first, 0, to)), "{calls:#?}");
        assert!(calls[1].ends_with(&pointed(third, 16, to)), "{calls:#?}");
        assert!(calls[2].starts_with("cuGraphLaunch"), "{calls:#?}");
    }
    // At the same place nothing changes, but it must be said; memories that nobody reads are nobody's concern.
    point(&mut step, 5, &other).unwrap();
    point(&mut step, 6, &one).unwrap();
    step.launch().unwrap();
    assert_eq!(fake.calls().len(), 1);
    assert!(step.launch().is_err());

    // After an error all kernels are told again, those of the address before too.
    fake.fail("cuGraphExecKernelNodeSetParams", 1);
    assert!(point(&mut step, 5, &one).is_err());
    assert!(step.launch().is_err());
    fake.fail("cuGraphExecKernelNodeSetParams", 0);
    fake.calls();
    point(&mut step, 5, &other).unwrap();
    assert_eq!(fake.calls().len(), 2);

    // Memory that was last used on another stream is waited for.
    let copies = device.stream().unwrap();
    let arrived = Arc::new(Storage::allocate(&copies, 64).unwrap());
    fake.calls();
    point(&mut step, 5, &arrived).unwrap();
    step.launch().unwrap();
    let calls = fake.calls();
    assert!(
        place(&calls, "cuStreamWaitEvent") < place(&calls, "cuGraphLaunch"),
        "{calls:#?}"
    );
}

/// The edges of a call that added a node, or began to.
fn edges(call: &str) -> Vec<usize> {
    let (_, list) = call.split_once("after [").unwrap();
    let numbers = list.trim_end_matches(']').split(", ");
    numbers
        .filter(|number| !number.is_empty())
        .map(|number| number.parse().unwrap())
        .collect()
}

/// The nodes that `build` gives a graph, by the driver's number, each with those that it comes after.
fn nodes(
    fake: &FakeDriver,
    device: &Device,
    build: impl FnOnce(&mut GraphBuilder),
) -> Vec<(usize, Vec<usize>)> {
    let mut graph = GraphBuilder::new(device, "step").unwrap();
    fake.calls();
    build(&mut graph);
    let calls = fake.calls();
    let added = calls.iter().filter(|call| call.starts_with("cuGraphAdd"));
    added.map(|call| (number(call), edges(call))).collect()
}

/// The most nodes of which none comes after another: as many as sequences that together have all nodes, which
/// by Dilworth's theorem are all nodes less the most pairs of one node and a later one, each node once as the
/// one and once as the other.
fn width(nodes: &[(usize, Vec<usize>)]) -> usize {
    let place = |number: &usize| nodes.iter().position(|(node, _)| node == number).unwrap();
    let mut before: Vec<BTreeSet<usize>> = Vec::new();
    for (_, after) in nodes {
        let direct: Vec<usize> = after.iter().map(place).collect();
        let all = direct.iter().flat_map(|&node| before[node].iter().copied());
        before.push(all.chain(direct.iter().copied()).collect());
    }
    /// Finds a partner for `node`, and others for those whose partner it takes.
    fn pair(
        node: usize,
        before: &[BTreeSet<usize>],
        partners: &mut [Option<usize>],
        tried: &mut BTreeSet<usize>,
    ) -> bool {
        before[node].iter().any(|&earlier| {
            let free = tried.insert(earlier)
                && partners[earlier].is_none_or(|later| pair(later, before, partners, tried));
            if free {
                partners[earlier] = Some(node);
            }
            free
        })
    }
    let mut partners = vec![None; nodes.len()];
    let pairs = (0..nodes.len()).filter(|&node| pair(node, &before, &mut partners, &mut BTreeSet::new()));
    nodes.len() - pairs.count()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// More than eight fail where kernels use local memory and other processes use the device.
    #[test]
    fn a_graph_has_at_most_eight_branches(
        // How many nodes before each is one that it comes after.
        back in vec(vec(1..40_usize, 0..3), 1..80),
    ) {
        let asked = |next: usize| back[next].iter().filter_map(move |&back| next.checked_sub(back));
        let (fake, device, stream) = start();
        let storage = Arc::new(Storage::allocate(&stream, 64).unwrap());
        let found = nodes(&fake, &device, |graph| {
            let mut all: Vec<Node> = Vec::new();
            for next in 0..back.len() {
                let after: Vec<Node> = asked(next).map(|node| all[node]).collect();
                all.push(graph.fill(&after, &storage, 0..8, 0).unwrap());
            }
        });
        for (next, (_, after)) in found.iter().enumerate() {
            let wanted: BTreeSet<usize> = asked(next).map(|node| found[node].0).collect();
            prop_assert!(wanted.iter().all(|node| after.contains(node)));
            prop_assert!(after.len() <= wanted.len() + 1);
        }
        // The eighth is kept free.
        prop_assert!(width(&found) <= 7);
    }
}

/// Seven branches run as they are; an eighth waits for the one that was continued the longest ago.
#[test]
fn branches_beyond_the_limit_follow_the_one_that_is_idle_longest() {
    let (fake, device, stream) = start();
    let storage = Arc::new(Storage::allocate(&stream, 64).unwrap());
    let found = nodes(&fake, &device, |graph| {
        let mut add = |after: &[Node]| graph.fill(after, &storage, 0..8, 0).unwrap();
        let roots: Vec<Node> = (0..7).map(|_| add(&[])).collect();
        let both = add(&[roots[0], roots[1], roots[0]]);
        for root in &roots[3..] {
            add(&[*root]);
        }
        add(&[]);
        // After the branches of 0 and 1, of which `both` continued one.
        add(&[both]);
        add(&[both]);
        graph.join(&[]).unwrap();
    });
    let place = |number: &usize| found.iter().position(|(node, _)| node == number).unwrap();
    let edges: Vec<Vec<usize>> = found
        .iter()
        .map(|(_, after)| after.iter().map(place).collect())
        .collect();
    let wanted: [&[usize]; 16] = [
        &[],
        &[],
        &[],
        &[],
        &[],
        &[],
        &[],
        &[0, 1],
        &[3],
        &[4],
        &[5],
        &[6],
        // The branch of node 0 was continued the longest ago.
        &[0],
        &[7],
        &[2, 7],
        &[8],
    ];
    assert_eq!(edges, wanted);
}

/// What other devices wait for has a branch of its own.
#[test]
fn calls_that_others_wait_for_follow_only_each_other() {
    let (fake, device, stream) = start();
    let storage = Arc::new(Storage::allocate(&stream, 64).unwrap());
    let found = nodes(&fake, &device, |graph| {
        let roots: Vec<Node> = (0..7)
            .map(|_| graph.fill(&[], &storage, 0..8, 0).unwrap())
            .collect();
        let nothing = |_: &Stream| Ok(());
        graph.capture_apart(&[roots[6]], &[&storage], nothing).unwrap();
        graph.capture_apart(&[], &[&storage], nothing).unwrap();
        graph.fill(&[], &storage, 0..8, 0).unwrap();
    });
    let edges: Vec<&[usize]> = found[7..].iter().map(|(_, after)| &after[..]).collect();
    let number = |place: usize| found[place].0;
    assert_eq!(edges, [[number(6)], [number(7)], [number(0)]]);
}

#[test]
fn parcels_are_copied_in_order_from_a_ring() {
    let (fake, _device, stream) = start();
    let mut parcel = Parcel::new(&stream, 16).unwrap();
    let send = |parcel: &mut Parcel, call: u64| {
        let write = |block: &mut [u8]| block.copy_from_slice(&call.to_ne_bytes());
        parcel.send(&stream, 8, write).unwrap();
    };
    for call in 0..20 {
        send(&mut parcel, call);
        let mut now = [0; 8];
        stream.read(parcel.storage(), 0, &mut now).unwrap();
        assert_eq!(u64::from_ne_bytes(now), call);
    }
    // The ring has eight blocks: eight calls are queued without waiting, the ninth waits for the first.
    let mut fresh = Parcel::new(&stream, 16).unwrap();
    let waits = || {
        fake.calls()
            .iter()
            .any(|call| call.starts_with("cuEventSynchronize"))
    };
    fake.calls();
    (0..8).for_each(|call| send(&mut fresh, call));
    assert!(!waits());
    send(&mut fresh, 8);
    assert!(waits());
    fresh
        .send(&stream, 0, |_| unreachable!("nothing to write"))
        .unwrap();
    assert_eq!(fake.calls(), [""; 0]);
    assert!(fresh.send(&stream, 17, |_| ()).is_err());
}
