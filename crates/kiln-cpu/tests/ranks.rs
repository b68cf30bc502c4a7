//! Compiled steps on several ranks, which are threads here: collectives in buckets, started and waited for.

mod support;

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::{Barrier, Mutex};

use kiln_compiler::CompileError;
use kiln_compiler::buckets::{Buckets, described};
use kiln_cpu::{CpuExecutable, StepHooks, ThreadPool};
use kiln_graph::collective::combine;
use kiln_graph::{
    Collective, CollectiveKind, Graph, HostTensor, Op, Phase, Scalar, TensorType, interpret_ranks,
};
use kiln_partition::testing::{arguments, arguments_of_ranks, averaged_decoder, sharded_decoder};
use support::{Memory, Setup, build};

/// Where ranks meet: the operand of each, and what all of them get.
struct Meeting {
    barrier: Barrier,
    operands: Mutex<Vec<Option<HostTensor>>>,
}

/// A collective that was started: where its result will be, and where its operand is.
struct Started {
    collective: Collective,
    at: *mut u8,
    operand: (*mut u8, TensorType),
}

/// The functions that a rank's step calls. A started collective is computed at its wait, from the elements
/// that its operand's memory has then: a kernel that wrote there in between shows in the result.
struct Rank<'a> {
    number: usize,
    step: &'a CpuExecutable,
    meeting: &'a Meeting,
    started: RefCell<Vec<Started>>,
    /// How many were under way at once, at most.
    most: RefCell<usize>,
}

impl Rank<'_> {
    fn meet(&self, collective: Collective, operand: HostTensor) -> HostTensor {
        self.meeting.operands.lock().unwrap()[self.number] = Some(operand);
        self.meeting.barrier.wait();
        let all: Vec<HostTensor> = self
            .meeting
            .operands
            .lock()
            .unwrap()
            .iter()
            .flatten()
            .cloned()
            .collect();
        self.meeting.barrier.wait();
        combine(&collective, &all).unwrap()[self.number].clone()
    }
}

impl StepHooks for Rank<'_> {
    fn call_extern(&self, index: usize, buffers: *mut *mut c_void) -> Result<(), String> {
        let call = &self.step.contract().externs[index];
        let ty = |(dtype, dims): &(String, Vec<usize>)| TensorType::new(dtype.parse().unwrap(), dims.clone());
        let (operand, result) = (ty(&call.inputs[0]), ty(&call.outputs[0]));
        // SAFETY: the step passes one pointer for the operand and one for the result, each to a buffer of
        // its type's size.
        let (from, to) = unsafe {
            let to = buffers.add(call.inputs.len());
            ((*buffers).cast::<u8>(), (*to).cast::<u8>())
        };
        // SAFETY: as above.
        let read = |at: *mut u8, ty: &TensorType| unsafe {
            let bytes = std::slice::from_raw_parts(at, ty.bytes()).to_vec();
            HostTensor::from_bytes(ty.clone(), bytes).unwrap()
        };
        // SAFETY: as above.
        let write = |tensor: &HostTensor| unsafe { to.copy_from(tensor.bytes().as_ptr(), result.bytes()) };
        let call = call.collective.expect("all that is outside are collectives");
        match call.collective() {
            Some(collective) if collective.started => {
                let operand_at = match collective.kind.is_in_place() {
                    true => {
                        write(&read(from, &operand));
                        to
                    }
                    false => from,
                };
                let mut started = self.started.borrow_mut();
                started.push(Started {
                    collective,
                    at: to,
                    operand: (operand_at, operand),
                });
                let most = self.most.borrow().max(started.len());
                self.most.replace(most);
            }
            Some(collective) => write(&self.meet(collective, read(from, &operand))),
            None => {
                let mut started = self.started.borrow_mut();
                let position = started.iter().position(|one| one.at == from);
                let one = started.remove(position.expect("what is waited for was started"));
                drop(started);
                let (at, ty) = &one.operand;
                write(&self.meet(one.collective, read(*at, ty)));
            }
        }
        Ok(())
    }
}

/// The outputs of each rank, and how many collectives were under way at once.
fn run(
    graph: &Graph,
    step: &CpuExecutable,
    ranks: &[(Vec<HostTensor>, Vec<Scalar>)],
) -> (Vec<Vec<HostTensor>>, usize) {
    let meeting = Meeting {
        barrier: Barrier::new(ranks.len()),
        operands: Mutex::new(vec![None; ranks.len()]),
    };
    let one = |number: usize, (tensors, scalars): &(Vec<HostTensor>, Vec<Scalar>)| {
        let mut memory = Memory::new(step, graph, tensors, scalars);
        let rank = Rank {
            number,
            step,
            meeting: &meeting,
            started: RefCell::default(),
            most: RefCell::default(),
        };
        memory.run_with(&ThreadPool::new(1), &rank).unwrap();
        (memory.results(), rank.most.into_inner())
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = ranks
            .iter()
            .enumerate()
            .map(|(number, arguments)| scope.spawn(move || one(number, arguments)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let most = results.iter().map(|(_, most)| *most).max().unwrap_or(0);
    (results.into_iter().map(|(outputs, _)| outputs).collect(), most)
}

/// Makes sure that the step computes what it means with buckets of any size, bit by bit the same.
fn check(graph: &Graph, ranks: usize) {
    let ranks = arguments_of_ranks(graph, ranks);
    let of: Vec<_> = ranks
        .iter()
        .map(|(tensors, scalars)| (&tensors[..], &scalars[..]))
        .collect();
    let expected = interpret_ranks(graph, &of).unwrap();
    let mut bits: Option<Vec<Vec<u8>>> = None;
    for buckets in [
        Buckets { first: 0, others: 0 },
        Buckets {
            first: 2000,
            others: 6000,
        },
        Buckets::default(),
    ] {
        let step = build(graph, |setup| setup.options.buckets = buckets).unwrap();
        let (outputs, most) = run(graph, &step, &ranks);
        assert!(
            most > 1 || buckets == Buckets::default(),
            "{most} under way at once"
        );
        for (rank, outputs) in outputs.iter().enumerate() {
            for (number, (actual, expected)) in outputs.iter().zip(&expected[rank]).enumerate() {
                let scale = expected.to_f64s().iter().fold(1e-3f64, |a, b| a.max(b.abs()));
                if let Some(found) = kiln_graph::testing::difference(actual, expected, 3e-4 * scale) {
                    panic!("{buckets}: output {number} of rank {rank}: {found}");
                }
            }
        }
        // Buckets change no bit.
        let own: Vec<Vec<u8>> = outputs
            .iter()
            .flatten()
            .map(|tensor| tensor.bytes().to_vec())
            .collect();
        assert!(
            bits.get_or_insert_with(|| own.clone()) == &own,
            "{buckets} changes bits"
        );
    }
}

#[test]
fn ranks_compute_what_the_graph_means() {
    check(&averaged_decoder(2), 2);
}

#[test]
fn ranks_with_shares_compute_what_the_graph_means() {
    check(&sharded_decoder(2), 2);
}

#[test]
fn shares_that_are_filled_up_travel_in_buckets() {
    check(&sharded_decoder(3), 3);
}

#[test]
fn shares_start_early_and_are_joined_behind_their_updates() {
    let graph = sharded_decoder(2);
    let mut setup = Setup::detect(1);
    setup.options.buckets = Buckets {
        first: 2000,
        others: 6000,
    };
    let step = setup.compile(&graph).unwrap();
    let text = || step.schedule.to_text(&step.graph);
    let kernels: Vec<Option<(&str, Collective)>> = step
        .schedule
        .kernels
        .iter()
        .map(|kernel| {
            let node = step.graph.node(*kernel.nodes.first()?);
            match node.op {
                Op::Collective(it) => Some((node.op.name(), it)),
                Op::CollectiveWait => match step.graph.def(node.inputs[0]).op {
                    Op::Collective(it) => Some((node.op.name(), it)),
                    _ => None,
                },
                _ => None,
            }
        })
        .collect();
    let all = |name: &str, kind: CollectiveKind| -> Vec<usize> {
        let is = |number: &usize| kernels[*number].is_some_and(|(own, it)| own == name && it.kind == kind);
        (0..kernels.len()).filter(is).collect()
    };
    let reductions = all("reduce_scatter", CollectiveKind::ReduceScatter);
    let sums = all("collective_wait", CollectiveKind::ReduceScatter);
    let gathers = all("all_gather", CollectiveKind::AllGather);
    let waits = all("collective_wait", CollectiveKind::AllGather);
    assert!(reductions.len() > 3 && gathers.len() > 3, "{}", text());
    assert_eq!((reductions.len(), gathers.len()), (sums.len(), waits.len()));
    // Gradients travel while the backward pass goes on.
    let products = |range: std::ops::Range<usize>| {
        let is = |number: &usize| {
            let nodes = &step.schedule.kernels[*number].nodes;
            nodes
                .iter()
                .any(|&node| step.graph.node(node).op.is_contraction())
        };
        range.filter(is).count()
    };
    assert!(products(reductions[0]..sums[0]) > 5, "{}", text());
    // Parameters are gathered while gradients are waited for, and no more than three buckets are under way.
    assert!(gathers[0] < sums[2], "{}", text());
    for (number, &wait) in waits.iter().enumerate() {
        let started = gathers.iter().filter(|&&gather| gather < wait).count();
        assert!(started - number <= 3, "{}", text());
        assert!(started > number + 1 || started == gathers.len(), "{}", text());
    }
}

#[test]
fn buckets_start_early_and_updates_follow_their_wait() {
    let graph = averaged_decoder(2);
    let mut setup = Setup::detect(1);
    setup.options.buckets = Buckets {
        first: 2000,
        others: 6000,
    };
    let step = setup.compile(&graph).unwrap();
    let buckets = described(&step.graph);
    assert!(buckets.len() > 2, "{buckets:?}");
    assert!(
        buckets[0].0 <= 2000 && buckets.iter().all(|&(bytes, sums)| bytes <= 6000 || sums == 1),
        "{buckets:?}"
    );
    let is = |number: usize, what: &str| {
        let kernel = &step.schedule.kernels[number];
        kernel
            .nodes
            .iter()
            .any(|&node| step.graph.node(node).op.name() == what)
    };
    let all = |what: &str| -> Vec<usize> {
        (0..step.schedule.kernels.len())
            .filter(|&k| is(k, what))
            .collect()
    };
    let (starts, waits) = (all("all_reduce"), all("collective_wait"));
    assert_eq!((starts.len(), waits.len()), (buckets.len(), buckets.len()));
    let backward = |number: usize| {
        let kernel = &step.schedule.kernels[number];
        kernel.nodes.iter().any(|&node| {
            let data = step.graph.node(node);
            data.provenance.phase == Phase::Backward && data.op.is_contraction()
        })
    };
    let between = (starts[0]..waits[0]).filter(|&number| backward(number)).count();
    assert!(
        between > 5,
        "{between} products of the backward pass hide the first bucket:\n{}",
        step.schedule.to_text(&step.graph)
    );
    assert!(starts.last() < waits.first());
    let updates = (waits[0]..*waits.last().unwrap())
        .filter(|&number| !waits.contains(&number))
        .count();
    assert!(updates > 0, "updates run while later buckets travel");
}

#[test]
fn what_a_sum_of_a_sum_needs_is_waited_for_first() {
    let text = "graph @twice {
        %0 = parameter 0 : f32[64]
        %1 = all_reduce %0 {ranks=2} : f32[64]
        %2 = all_reduce %1 {ranks=2} : f32[64]
        %3 = mul %1, %1 : f32[64]
        %4 = all_reduce %3 {ranks=2,mean=true} : f32[64]
        %5 = all_gather %4 {ranks=2} : f32[128]
        %6 = reduce_scatter %5 {ranks=2} : f32[64]
        %7 = broadcast_from %6 {ranks=2,root=1} : f32[64]
        return %2, %4, %5, %7, %1
    }";
    let graph = Graph::parse(text).unwrap();
    let ranks = arguments_of_ranks(&graph, 2);
    let of: Vec<_> = ranks
        .iter()
        .map(|(tensors, scalars)| (&tensors[..], &scalars[..]))
        .collect();
    let expected = interpret_ranks(&graph, &of).unwrap();
    let step = build(&graph, |_| {}).unwrap();
    let (outputs, _) = run(&graph, &step, &ranks);
    for (actual, expected) in outputs.iter().flatten().zip(expected.iter().flatten()) {
        if let Some(found) = kiln_graph::testing::difference(actual, expected, 1e-5) {
            panic!("{found}");
        }
    }
}

#[test]
fn without_a_way_to_other_ranks_a_step_fails_by_name() {
    let graph = averaged_decoder(2);
    let step = build(&graph, |_| {}).unwrap();
    let (tensors, scalars) = arguments(&graph, 1);
    let error = Memory::new(&step, &graph, &tensors, &scalars)
        .try_run(&ThreadPool::new(1))
        .unwrap_err();
    assert!(error.to_string().contains("gave no way"), "{error}");
    // What is not meant for several ranks compiles as it did.
    assert!(matches!(
        build(&Graph::new("nothing"), |_| {}),
        Ok(_) | Err(kiln_cpu::StepError::Compile(CompileError::Unsupported { .. }))
    ));
}
