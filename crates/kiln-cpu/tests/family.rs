//! Steps of several shapes that share their functions, against the same functions with constants, the steps that are
//! compiled alone, and the interpreter.

use kiln_compiler::Options;
use kiln_cpu::{
    BuildOptions, Cache, CpuExecutable, CpuTarget, Family, Outcome, StepError, ThreadPool, Toolchain,
};
use kiln_graph::testing::difference;
use kiln_graph::{Graph, HostTensor, Scalar, interpret_f64};
use kiln_partition::testing::{Sizes, arguments, decoder_step};

mod support;

/// A family for `threads` threads, quick to build.
fn family(threads: usize) -> Family {
    let toolchain = Toolchain::detect().unwrap();
    let build = BuildOptions {
        level: kiln_cpu::OptLevel::Quick,
        ..BuildOptions::default()
    };
    let target = CpuTarget::new(&toolchain, threads);
    Family::new(
        &Options::default(),
        &target,
        &toolchain,
        &Cache::disabled(),
        &build,
    )
}

/// A training step over sequences of `length`.
fn step(batch: usize, length: usize) -> (Graph, Vec<HostTensor>, Vec<Scalar>) {
    let sizes = Sizes {
        layers: 1,
        batch,
        length,
        width: 32,
        heads: 2,
        hidden: 48,
        vocabulary: 40,
        keep: 1.0,
    };
    let graph = decoder_step(sizes).graph;
    let (tensors, scalars) = arguments(&graph, 5);
    (graph, tensors, scalars)
}

fn run(
    executable: &CpuExecutable,
    graph: &Graph,
    tensors: &[HostTensor],
    scalars: &[Scalar],
) -> Vec<HostTensor> {
    support::run(executable, graph, tensors, scalars, 2)
}

fn equal(left: &[HostTensor], right: &[HostTensor], what: &str) {
    for (number, (left, right)) in left.iter().zip(right).enumerate() {
        assert_eq!(left.bytes(), right.bytes(), "{what}: output {number}");
    }
}

fn near(actual: &[HostTensor], expected: &[HostTensor], what: &str) {
    for (number, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let scale = expected.to_f64s().iter().fold(1.0f64, |a, b| a.max(b.abs()));
        if let Some(found) = difference(actual, expected, 2e-4 * scale) {
            panic!("{what}: output {number}: {found}");
        }
    }
}

/// Compiles `graph` in the family and compares what it computes.
fn check(
    family: &Family,
    (graph, tensors, scalars): &(Graph, Vec<HostTensor>, Vec<Scalar>),
    what: &str,
) -> Outcome {
    let (executable, outcome) = family.compile(graph).unwrap();
    let results = run(&executable, graph, tensors, scalars);
    near(&results, &interpret_f64(graph, tensors, scalars).unwrap(), what);
    outcome
}

#[test]
fn steps_of_many_lengths_share_their_functions() {
    let family = family(2);
    assert_eq!(check(&family, &step(2, 20), "length 20"), Outcome::Alone(None));
    let second = check(&family, &step(2, 27), "length 27");
    assert!(matches!(second, Outcome::Built { .. }), "{second:?}");
    // 32 is the width of the model as well, and 40 the size of the vocabulary.
    let lengths = [14, 19, 20, 25, 31, 32, 33, 40, 41, 48];
    for length in lengths {
        let what = format!("length {length}");
        if let Outcome::Built {
            functions, reason, ..
        } = check(&family, &step(2, length), &what)
        {
            println!("{what}: {functions}, {reason}");
        }
    }
    let builds = family.stats().builds;
    assert!(builds <= 3, "{:?}", family.stats());
    for length in lengths {
        let (_, outcome) = family.compile(&step(2, length).0).unwrap();
        assert_eq!(outcome, Outcome::Known, "length {length}");
    }
    assert_eq!(family.stats().builds, builds);
    for length in [23, 32] {
        let (graph, tensors, scalars) = step(2, length);
        let (executable, _) = family.compile(&graph).unwrap();
        let constant = family.compile_constant(&graph).unwrap();
        equal(
            &run(&executable, &graph, &tensors, &scalars),
            &run(&constant, &graph, &tensors, &scalars),
            "variables and constants",
        );
        assert_eq!(executable.contract().aliases, constant.contract().aliases);
    }
}

#[test]
fn a_length_of_another_form_is_built_once() {
    let family = family(2);
    check(&family, &step(2, 20), "length 20");
    check(&family, &step(2, 27), "length 27");
    for length in [1, 2, 3] {
        check(&family, &step(2, length), &format!("length {length}"));
    }
    let builds = family.stats().builds;
    for length in [1, 2, 3] {
        let (_, outcome) = family.compile(&step(2, length).0).unwrap();
        assert_eq!(outcome, Outcome::Known);
    }
    assert_eq!(family.stats().builds, builds);
}

#[test]
fn the_last_batch_of_an_epoch_shares_too() {
    let family = family(2);
    check(&family, &step(8, 16), "batch 8");
    check(&family, &step(5, 16), "batch 5");
    let builds = family.stats().builds;
    for batch in [3, 4, 6, 7] {
        check(&family, &step(batch, 16), &format!("batch {batch}"));
    }
    assert!(family.stats().builds <= builds + 1, "{:?}", family.stats());
}

#[test]
fn threads_run_two_shapes_at_once() {
    let family = family(1);
    let shapes = [step(2, 20), step(2, 27), step(2, 31)];
    let executables: Vec<CpuExecutable> = shapes
        .iter()
        .map(|(graph, ..)| family.compile(graph).unwrap().0)
        .collect();
    let alone = |at: usize| {
        let (graph, tensors, scalars) = &shapes[at];
        support::run(&executables[at], graph, tensors, scalars, 1)
    };
    let expected = [alone(1), alone(2)];
    std::thread::scope(|scope| {
        for at in [1, 2] {
            let (alone, expected) = (&alone, &expected[at - 1]);
            scope.spawn(move || {
                for _ in 0..20 {
                    equal(&alone(at), expected, "beside another shape");
                }
            });
        }
    });
}

/// Rows of a table by indices, of `count` indices.
fn look_up(count: usize) -> Graph {
    Graph::parse(&format!(
        "graph @look_up {{\n  %0 = parameter 0 : f32[10,4]\n  %1 = parameter 1 : i32[{count}]\n  %2 = index_select %0, %1 {{axis=0}} : \
         f32[{count},4]\n  return %2\n}}\n"
    ))
    .unwrap()
}

#[test]
fn an_index_out_of_range_is_an_error() {
    let family = family(2);
    for count in [5, 7, 9] {
        let graph = look_up(count);
        let (executable, _) = family.compile(&graph).unwrap();
        let table = HostTensor::from_floats(
            kiln_graph::DType::F32,
            kiln_graph::Shape::new([10, 4]),
            vec![1.5; 40],
        );
        let run = |index: i64| {
            let mut indices = vec![3; count];
            indices[count - 1] = index;
            let indices =
                HostTensor::from_ints(kiln_graph::DType::I32, kiln_graph::Shape::new([count]), indices);
            support::Memory::new(&executable, &graph, &[table.clone(), indices], &[])
                .try_run(&ThreadPool::new(1))
        };
        run(9).unwrap();
        for outside in [10, -1] {
            let error = run(outside).unwrap_err();
            assert!(matches!(error, StepError::Index(_)), "{error}");
        }
    }
}

#[test]
fn shapes_without_elements_are_steps_too() {
    let family = family(2);
    for count in [5, 7, 0, 1] {
        let graph = look_up(count);
        let (executable, _) = family.compile(&graph).unwrap();
        let (tensors, scalars) = arguments(&graph, 3);
        near(
            &run(&executable, &graph, &tensors, &scalars),
            &interpret_f64(&graph, &tensors, &scalars).unwrap(),
            "a look-up",
        );
    }
}
