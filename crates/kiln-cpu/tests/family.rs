//! Steps of several shapes that share their functions, against the same functions with constants, the steps
//! that are compiled alone, and the interpreter.

use kiln_compiler::Options;
use kiln_cpu::family::Varying;
use kiln_cpu::{
    BuildOptions, Cache, CpuExecutable, CpuTarget, Family, Outcome, StepError, ThreadPool, Toolchain,
};
use kiln_graph::testing::difference;
use kiln_graph::{DType, Graph, HostTensor, Scalar, interpret_f64};
use kiln_partition::testing::{Sizes, arguments, decoder_step};

mod support;

/// A family for `threads` threads, built without optimisation: these tests are about which functions are
/// shared.
fn family(threads: usize) -> Family {
    family_in(threads, &Cache::disabled())
}

fn family_in(threads: usize, cache: &Cache) -> Family {
    family_of(&Options::default(), threads, cache)
}

fn family_of(options: &Options, threads: usize, cache: &Cache) -> Family {
    let toolchain = Toolchain::detect().unwrap();
    let build = BuildOptions {
        level: kiln_cpu::OptLevel::None,
        ..BuildOptions::default()
    };
    let target = CpuTarget::new(&toolchain, threads);
    Family::new(options, &target, &toolchain, cache, &build)
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
    near_within(actual, expected, what, 2e-4);
}

/// Compares outputs, with a tolerance relative to the largest element of each.
fn near_within(actual: &[HostTensor], expected: &[HostTensor], what: &str, tolerance: f64) {
    for (number, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let scale = expected.to_f64s().iter().fold(1.0f64, |a, b| a.max(b.abs()));
        if let Some(found) = difference(actual, expected, tolerance * scale) {
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

/// One test, because a family costs some ten seconds of the C compiler's time before it shares.
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
    threads_run_two_shapes_at_once(&family);
    lengths_of_another_form_are_built_once(&family);
}

fn threads_run_two_shapes_at_once(family: &Family) {
    let shapes = [step(2, 27), step(2, 31)];
    let executables = shapes
        .each_ref()
        .map(|(graph, ..)| family.compile(graph).unwrap().0);
    let alone = |at: usize| {
        let (graph, tensors, scalars) = &shapes[at];
        support::run(&executables[at], graph, tensors, scalars, 1)
    };
    let expected = [alone(0), alone(1)];
    std::thread::scope(|scope| {
        for at in [0, 1] {
            let (alone, expected) = (&alone, &expected[at]);
            scope.spawn(move || {
                for _ in 0..20 {
                    equal(&alone(at), expected, "beside another shape");
                }
            });
        }
    });
}

fn lengths_of_another_form_are_built_once(family: &Family) {
    let before = family.stats().builds;
    for length in [1, 2, 3] {
        check(family, &step(2, length), &format!("length {length}"));
    }
    let builds = family.stats().builds;
    assert!(builds > before, "these lengths have no form of their own");
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
fn marked_lengths_are_sampled_in_their_range() {
    let length = |input| Varying {
        input,
        dim: 1,
        range: 20..=24,
    };
    // Lengths stand in the first two inputs, as dimension 1.
    let (graph, ..) = step(2, 20);
    let inputs =
        (0..graph.parameters().len()).filter(|&at| graph.shape(graph.parameters()[at]).get(1) == Some(&20));
    let varying: Vec<Varying> = inputs.map(length).collect();
    assert!(!varying.is_empty());
    let family = family(2).with_varying(varying);
    check(&family, &step(2, 20), "length 20");
    check(&family, &step(2, 23), "length 23");
    let builds = family.stats().builds;
    for length in [21, 22, 24] {
        check(&family, &step(2, length), &format!("length {length}"));
    }
    assert!(family.stats().builds <= builds + 1, "{:?}", family.stats());
    check(&family, &step(2, 31), "a length outside of the range");
}

#[test]
fn another_process_starts_from_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let cache = || Cache::at(folder.path(), 1 << 30);
    let one = family_in(2, &cache());
    check(&one, &step(2, 20), "length 20");
    check(&one, &step(2, 27), "length 27");
    // Another process has another family, and the cache.
    let two = family_in(2, &cache());
    let first = step(2, 27);
    assert_eq!(check(&two, &first, "length 27 again"), Outcome::Known);
    assert_eq!(two.stats().builds, 0);
    let (exact, outcome) = two.compile(&step(2, 20).0).unwrap();
    assert_eq!(outcome, Outcome::Known);
    assert!(exact.from_cache, "the step was compiled for exactly this length");
    assert!(two.known(&first.0).unwrap().is_some());
    // What is not there is learnt as ever, and is on disk then.
    check(&two, &step(2, 3), "length 3");
    let three = family_in(2, &cache());
    assert_eq!(check(&three, &step(2, 3), "length 3 again"), Outcome::Known);
    assert_eq!(three.stats().builds, 0);
    // Other kernels are not taken for these.
    // A step that is there for exactly its length keeps nobody from finding the others.
    let exact = family_in(2, &cache());
    check(&exact, &step(2, 20), "length 20, exactly");
    assert_eq!(check(&exact, &step(2, 27), "length 27 after it"), Outcome::Known);
    assert_eq!(exact.stats().builds, 0);
    let four = family_in(2, &cache());
    assert_eq!(check(&four, &images(1, 5), "images"), Outcome::Alone(None));
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

/// Convolutions with their gradients, of every kind that has a template of its own, and pooling, on square
/// images.
fn images(batch: usize, size: usize) -> (Graph, Vec<HostTensor>, Vec<Scalar>) {
    let (half, quarter) = (size.div_ceil(2), size.div_ceil(2).div_ceil(2));
    let eighth = quarter.div_ceil(2);
    let image = |channels: usize, side: usize| format!("f32[{batch},{channels},{side},{side}]");
    let conv = |stride: usize, pad: usize, groups: usize| {
        format!(
            "stride=[{stride},{stride}], pad_low=[{pad},{pad}], pad_high=[{pad},{pad}], dilation=[1,1], groups={groups}"
        )
    };
    let text = format!(
        "graph @images {{
  %0 = parameter 0 : {input}
  %1 = parameter 1 : f32[16,3,7,7]
  %2 = parameter 2 : f32[32,16,3,3]
  %3 = parameter 3 : f32[256,32,3,3]
  %4 = parameter 4 : f32[256,1,3,3]
  %5 = conv %0, %1 {{{first}}} : {halves}
  %6, %7 = max_pool_with_indices %5 {{size=[3,3], stride=[2,2], pad_low=[1,1], pad_high=[1,1], dilation=[1,1]}} : \
         {quarters}, i32[{batch},16,{quarter},{quarter}]
  %8 = conv %6, %2 {{{second}}} : {wide}
  %9 = conv %8, %3 {{{third}}} : {eighths}
  %10 = conv %9, %4 {{{fourth}}} : {eighths}
  %11 = conv_weight_grad %9, %10 {{{fourth}, kernel=[3,3]}} : f32[256,1,3,3]
  %12 = conv_input_grad %10, %4 {{{fourth}, input=[{eighth},{eighth}]}} : {eighths}
  %13 = conv_weight_grad %8, %12 {{{third}, kernel=[3,3]}} : f32[256,32,3,3]
  %14 = conv_input_grad %12, %3 {{{third}, input=[{quarter},{quarter}]}} : {wide}
  %15 = conv_weight_grad %6, %14 {{{second}, kernel=[3,3]}} : f32[32,16,3,3]
  %16 = conv_input_grad %14, %2 {{{second}, input=[{quarter},{quarter}]}} : {quarters}
  %17 = max_pool_grad %16, %7 {{input=[{half},{half}]}} : {halves}
  %18 = conv_weight_grad %0, %17 {{{first}, kernel=[7,7]}} : f32[16,3,7,7]
  %19 = reduce sum %10 {{axes=[2,3]}} : f32[{batch},256]
  return %19, %11, %13, %15, %18
}}
",
        input = image(3, size),
        halves = image(16, half),
        quarters = image(16, quarter),
        wide = image(32, quarter),
        eighths = image(256, eighth),
        first = conv(2, 3, 1),
        second = conv(1, 1, 1),
        third = conv(2, 1, 1),
        fourth = conv(1, 1, 256),
    );
    let graph = Graph::parse(&text).unwrap();
    let (tensors, scalars) = arguments(&graph, 7);
    (graph, tensors, scalars)
}

/// Compiles the images of these batches and sizes in `family`: the first alone, the others with shared
/// kernels. What these compute has the bits of kernels for one shape, and is near what the interpreter
/// computes in f64.
fn check_images(family: &Family, sizes: &[(usize, usize)], tolerance: f64) {
    for (number, &(batch, size)) in sizes.iter().enumerate() {
        let what = format!("batch {batch}, size {size}");
        let (graph, tensors, scalars) = images(batch, size);
        let (executable, outcome) = family.compile(&graph).unwrap();
        println!("{what}: {outcome:?}");
        assert_eq!(
            matches!(outcome, Outcome::Alone(_)),
            number == 0,
            "{what}: {outcome:?}"
        );
        let results = run(&executable, &graph, &tensors, &scalars);
        let expected = interpret_f64(&graph, &tensors, &scalars).unwrap();
        near_within(&results, &expected, &what, tolerance);
        if number > 1 {
            assert_eq!(family.compile(&graph).unwrap().1, Outcome::Known, "{what}");
            let constant = family.compile_constant(&graph).unwrap();
            equal(
                &results,
                &run(&constant, &graph, &tensors, &scalars),
                &format!("{what}: variables and constants"),
            );
        }
    }
}

#[test]
fn convolutions_share_their_kernels() {
    let sizes = [(2, 32), (2, 48), (3, 37), (5, 9), (1, 1)];
    check_images(&family(2), &sizes, 2e-4);
}

/// On AMX these have templates of their own, with strides and for few channels.
#[test]
fn convolutions_of_bf16_share_their_kernels() {
    let options = Options {
        autocast: Some(DType::BF16),
        ..Options::default()
    };
    let sizes = [(2, 32), (2, 48), (1, 37), (5, 9)];
    // Rounded elements may be another largest one of a window, whose gradient then goes elsewhere.
    check_images(&family_of(&options, 2, &Cache::disabled()), &sizes, 0.25);
}
