//! Steps of several shapes that share their kernels: against the steps that are compiled alone, bit for bit,
//! and the interpreter, on the host; and through NVRTC, for two generations of devices.

mod common;

use kiln_compiler::Options;
use kiln_cuda::CudaTarget;
use kiln_cuda::build::{CacheFolder, Compiler, Store};
use kiln_cuda::code::{CallKind, Pointer};
use kiln_cuda::family::{Backend, CudaMaker, Family, Outcome, SharedStep, Uncompiled};
use kiln_cuda::testing::host::HostStep;
use kiln_family::Maker as _;
use kiln_graph::testing::difference;
use kiln_graph::{DType, Graph, HostTensor, Scalar, interpret_f64};
use kiln_partition::testing::{Sizes, arguments, decoder_step};

fn maker<B: Backend>(backend: B) -> CudaMaker<B> {
    CudaMaker::new(&Options::default(), &CudaTarget::default(), backend)
}

fn family() -> Family<Uncompiled> {
    Family::new(maker(Uncompiled(Store::disabled())))
}

/// Sizes of a training step over sequences of `length`.
fn sizes(batch: usize, length: usize) -> Sizes {
    Sizes {
        layers: 1,
        batch,
        length,
        width: 32,
        heads: 2,
        hidden: 48,
        vocabulary: 40,
        keep: 0.9,
    }
}

fn step(batch: usize, length: usize) -> (Graph, Vec<HostTensor>, Vec<Scalar>) {
    let graph = decoder_step(sizes(batch, length)).graph;
    let (tensors, scalars) = arguments(&graph, 5);
    (graph, tensors, scalars)
}

fn run(step: &SharedStep, graph: &Graph, tensors: &[HostTensor], scalars: &[Scalar]) -> Vec<Vec<u8>> {
    let host = HostStep::build(&step.code)
        .unwrap()
        .with_aliases(&step.contract.aliases);
    let mut inputs: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.bytes().to_vec()).collect();
    let own = graph.scalars().iter().zip(scalars);
    let bits: Vec<u64> = own
        .map(|(&value, scalar)| scalar.to_bits(graph.dtype(value)))
        .collect();
    host.run(&mut inputs, &bits).unwrap()
}

/// Compiles a step in the family. Its results are those of the step that is compiled alone, and near the
/// interpreter's.
fn check<B: Backend>(
    family: &Family<B>,
    (graph, tensors, scalars): &(Graph, Vec<HostTensor>, Vec<Scalar>),
    what: &str,
) -> Outcome {
    let (shared, outcome) = family.compile_into(graph, None).unwrap();
    let results = run(&shared, graph, tensors, scalars);
    let alone = family.maker.alone(graph).unwrap();
    let expected = run(&alone, graph, tensors, scalars);
    assert!(
        results == expected,
        "{what}: results differ from those of the step alone"
    );
    let interpreted = interpret_f64(graph, tensors, scalars).unwrap();
    for (number, (bytes, expected)) in results.into_iter().zip(&interpreted).enumerate() {
        let ty = graph.ty(graph.outputs[number].value).clone();
        let actual = HostTensor::from_bytes(ty, bytes).unwrap();
        let scale = expected.to_f64s().iter().fold(1.0f64, |a, b| a.max(b.abs()));
        if let Some(found) = difference(&actual, expected, 2e-4 * scale) {
            panic!("{what}: output {number}: {found}");
        }
    }
    outcome
}

#[test]
fn steps_of_many_lengths_share_their_kernels() {
    let family = family();
    assert_eq!(check(&family, &step(2, 20), "length 20"), Outcome::Alone(None));
    let mut compilations = vec![20];
    for length in [12, 31, 16, 27, 9, 24, 40] {
        if check(&family, &step(2, length), &format!("length {length}")) != Outcome::Known {
            compilations.push(length);
        }
    }
    let (graph, ..) = step(2, 25);
    let (shared, _) = family.compile_into(&graph, None).unwrap();
    let is_words = |pointer: &Pointer| matches!(pointer, Pointer::Words(_));
    let calls = format!("{:?}", shared.code.calls);
    assert!(calls.contains("Words"), "no kernel has numbers");
    assert!(!is_words(&Pointer::Table(Vec::new())));
    assert!(compilations.len() <= 3, "compiled at {compilations:?}");
}

#[test]
fn twenty_lengths_and_the_last_batch_take_three_compilations() {
    let family = family();
    let mut compilations = Vec::new();
    let lengths = (0..20).map(|number| (4, 17 + (number * 23) % 47));
    for (batch, length) in lengths.chain([(3, 33), (1, 40)]) {
        let (graph, ..) = step(batch, length);
        let (_, outcome) = family.compile_into(&graph, None).unwrap();
        if outcome != Outcome::Known {
            compilations.push((batch, length));
        }
    }
    // The smaller batches may bring other forms, once.
    let lengths = compilations.iter().filter(|(batch, _)| *batch == 4).count();
    assert!(lengths <= 3, "compiled at {compilations:?}");
    assert!(compilations.len() <= 5, "compiled at {compilations:?}");
}

/// Lengths up to 65, in batches that are padded to their longest, in two orders.
#[test]
fn lengths_of_two_epochs_take_three_compilations() {
    let family = family();
    let mut compilations = Vec::new();
    for (between, first) in [(17, 0), (31, 13)] {
        let lengths: Vec<usize> = (0..60).map(|at| 6 + (first + at * between) % 60).collect();
        for lengths in lengths.chunks(4) {
            let longest = lengths.iter().copied().max().unwrap();
            // Without dropout.
            let sizes = Sizes {
                keep: 1.0,
                ..sizes(lengths.len(), longest)
            };
            let (_, outcome) = family.compile_into(&decoder_step(sizes).graph, None).unwrap();
            if outcome != Outcome::Known {
                compilations.push((lengths.len(), longest, outcome));
            }
        }
    }
    assert!(compilations.len() <= 3, "compiled at {compilations:?}");
}

/// The same kernel twice in a step, as two functions of a step that differ in numbers are.
#[test]
fn two_functions_of_a_step_may_be_one_kernel() {
    let family = family();
    for length in [20, 12] {
        family.compile_into(&step(2, length).0, None).unwrap();
    }
    let (graph, tensors, scalars) = step(2, 26);
    let (mut shared, _) = family.compile_into(&graph, None).unwrap();
    let expected = run(&shared, &graph, &tensors, &scalars);
    let mut launches = vec![0; shared.code.functions.len()];
    for call in &shared.code.calls {
        if let CallKind::Launch {
            function, arguments, ..
        } = &call.kind
            && arguments.iter().any(|it| matches!(it, Pointer::Words(_)))
        {
            launches[*function] += 1;
        }
    }
    let once = launches.iter().position(|&count| count > 1).unwrap();
    let twice = shared.code.functions.len();
    let copy = shared.code.functions[once].clone();
    shared.code.functions.push(copy);
    for call in shared.code.calls.iter_mut().rev() {
        if let CallKind::Launch { function, .. } = &mut call.kind
            && *function == once
        {
            *function = twice;
            break;
        }
    }
    assert_eq!(run(&shared, &graph, &tensors, &scalars), expected);
    // One name for two texts is an error of the step.
    shared.code.functions[twice].text.body.push_str("\n;");
    let error = HostStep::build(&shared.code).unwrap_err();
    assert!(error.contains("different texts"), "{error}");
}

#[test]
fn another_process_starts_from_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let store = || CacheFolder::at(folder.path(), 1 << 30).store("cuda-steps", "data");
    let one = Family::new(maker(Uncompiled(store())));
    for length in [20, 12, 31] {
        one.compile_into(&step(2, length).0, None).unwrap();
    }
    let two = Family::new(maker(Uncompiled(store())));
    let outcome = check(&two, &step(2, 26), "length 26 of another process");
    assert_eq!(outcome, Outcome::Known);
    assert_eq!(two.stats().builds, 0);
}

/// A graph whose kernels a GPU alone runs compiles, too, and no kernel keeps its constants.
#[test]
fn templates_compile_for_two_generations() {
    let Some(nvrtc) = common::nvrtc() else { return };
    for (capability, dtype) in [((8, 0), None), ((9, 0), Some(DType::BF16))] {
        let compiler = Compiler::new(nvrtc.clone(), capability, Store::disabled()).unwrap();
        let target = CudaTarget {
            capability,
            ..CudaTarget::default()
        };
        let options = Options {
            autocast: dtype,
            ..Options::default()
        };
        let family = Family::new(CudaMaker::new(&options, &target, (compiler, Store::disabled())));
        let of = |length| step(2, length).0;
        let first = family.compile_into(&of(20), None).unwrap().1;
        assert_eq!(first, Outcome::Alone(None));
        for length in [28, 36] {
            let (shared, outcome) = family.compile_into(&of(length), None).unwrap();
            let rejects = format!("{outcome:?}").contains("wants constants");
            assert!(!rejects, "{outcome:?}");
            assert!(shared.programs.iter().all(|program| !program.image().is_empty()));
        }
        assert_eq!(family.compile_into(&of(44), None).unwrap().1, Outcome::Known);
    }
}

/// A pool of largest elements and its gradient over images of `size`, and the tensors they are called with.
fn pool(size: usize) -> (Graph, Vec<HostTensor>, Vec<Scalar>) {
    let half = size.div_ceil(2);
    let (x, y) = (format!("[2,6,{size},{size}]"), format!("[2,6,{half},{half}]"));
    let window = "size=[3,3], stride=[2,2], pad_low=[1,1], pad_high=[1,1], dilation=[1,1]";
    let graph = Graph::parse(&format!(
        "graph @pool {{
  %0 = parameter 0 : f32{x}
  %1 = parameter 1 : f32{y}
  %2, %3 = max_pool_with_indices %0 {{{window}}} : f32{y}, i32{y}
  %4 = max_pool_grad %1, %3 {{input=[{size},{size}]}} : f32{x}
  return %2, %4
}}"
    ))
    .unwrap();
    let (tensors, scalars) = arguments(&graph, 5);
    (graph, tensors, scalars)
}

/// Places of images are numbers of their kernels, which divide by them through reciprocals.
#[test]
fn pools_share_their_kernels() {
    let of_host = family();
    for size in [21, 30, 25] {
        check(&of_host, &pool(size), &format!("size {size}"));
    }
    assert_eq!(check(&of_host, &pool(27), "size 27"), Outcome::Known);
    let Some(nvrtc) = common::nvrtc() else { return };
    let compiler = Compiler::new(nvrtc, (9, 0), Store::disabled()).unwrap();
    let of_device = Family::new(maker((compiler, Store::disabled())));
    for size in [21, 30] {
        let (_, outcome) = of_device.compile_into(&pool(size).0, None).unwrap();
        assert!(!format!("{outcome:?}").contains("wants constants"), "{outcome:?}");
    }
}

/// A convolution of windows in Hopper's template, with a nest behind it.
fn windows(height: usize, width: usize) -> Graph {
    let image = format!("[2,64,{height},{width}]");
    let one = "{stride=[1,1], pad_low=[0,0], pad_high=[0,0], dilation=[1,1], groups=1}";
    Graph::parse(&format!(
        "graph @windows {{
  %p = parameter 0 : bf16[2,4,{height},{width}]
  %u = parameter 1 : bf16[64,4,1,1]
  %w = parameter 2 : bf16[64,64,3,3]
  %b = parameter 3 : f32[64]
  %v = parameter 4 : bf16[4,64,1,1]
  %x = conv %p, %u {one} : bf16{image}
  %y = conv %x, %w {{stride=[1,1], pad_low=[1,1], pad_high=[1,1], dilation=[1,1], groups=1}} : bf16{image}
  %f = cast %y : f32{image}
  %bs = broadcast %b {{dims=[1]}} : f32{image}
  %h = add %f, %bs : f32{image}
  %k = cast %h : bf16{image}
  %out = conv %k, %v {one} : bf16[2,4,{height},{width}]
  return %out
}}"
    ))
    .unwrap()
}

/// Extents of images are numbers of the template, which divides by them.
#[test]
fn convolutions_of_windows_have_numbers() {
    let Some(nvrtc) = common::nvrtc() else { return };
    let compiler = Compiler::new(nvrtc, (9, 0), Store::disabled()).unwrap();
    let family = Family::new(maker((compiler, Store::disabled())));
    for (height, width) in [(119, 121), (130, 127)] {
        let (shared, outcome) = family.compile_into(&windows(height, width), None).unwrap();
        assert!(!format!("{outcome:?}").contains("wants constants"), "{outcome:?}");
        let is_template = |text: &str| text.contains("IN_WINDOWS = true");
        let mut functions = shared.code.functions.iter();
        assert!(functions.any(|function| is_template(&function.text.helpers)));
    }
}
