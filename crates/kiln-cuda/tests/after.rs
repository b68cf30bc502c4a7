//! Compares kernels over channels that run behind the sums that they read, in one launch, with the
//! interpreter, and compiles them for every generation of GPUs.

mod common;

use kiln_compiler::{Options, compile};
use kiln_cuda::CudaTarget;
use kiln_cuda::code::StepCode;
use kiln_cuda::testing::host::{Differential, Outcome};
use kiln_graph::testing::random_arguments;
use kiln_graph::{DType, Graph, HostTensor};

/// Columns normalised by their own statistics, with a running mean, behind a look at an index. With the
/// `least` of a column there are sums of two kinds.
fn normalised(rows: usize, width: usize, least: bool) -> Graph {
    let (lines, result) = match least {
        true => (
            format!(
                "  %least = reduce min %x {{axes=[0]}} : f32[{width}]\n  %low = mul %least, %scale : f32[{width}]\n"
            ),
            ", %low",
        ),
        false => (String::new(), ""),
    };
    let text = format!(
        "graph @normalised {{
  %x = parameter 0 : f32[{rows},{width}]
  %running = parameter 1 : f32[{width}]
  %gain = parameter 2 : f32[{width}]
  %table = parameter 3 : f32[30,8]
  %at = parameter 4 : i32[5]
  %share = scalar 0 : f32[]
  %picked = index_select %table, %at {{axis=0}} : f32[5,8]
  %s = reduce sum %x {{axes=[0]}} : f32[{width}]
  %square = mul %x, %x : f32[{rows},{width}]
  %q = reduce sum %square {{axes=[0]}} : f32[{width}]
  %f = broadcast %share {{dims=[]}} : f32[{width}]
  %mean = mul %s, %f : f32[{width}]
  %both = mul %q, %f : f32[{width}]
  %meansquare = mul %mean, %mean : f32[{width}]
  %sum = add %both, %meansquare : f32[{width}]
  %root = sqrt %sum : f32[{width}]
  %scale = div %gain, %root : f32[{width}]
{lines}  %new = add %running, %mean : f32[{width}]
  %ms = broadcast %mean {{dims=[1]}} : f32[{rows},{width}]
  %ss = broadcast %scale {{dims=[1]}} : f32[{rows},{width}]
  %centred = sub %x, %ms : f32[{rows},{width}]
  %y = mul %centred, %ss : f32[{rows},{width}]
  return %new (alias 1), %y, %picked{result}
}}"
    );
    Graph::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Functions that go on behind sums.
fn going_on(code: &StepCode) -> usize {
    let functions = code.functions.iter();
    functions
        .filter(|function| function.text.helpers.contains("@_then"))
        .count()
}

/// Arguments with indices in range.
fn arguments(graph: &Graph, seed: u64) -> (Vec<HostTensor>, Vec<kiln_graph::Scalar>) {
    let (mut tensors, scalars) = random_arguments(graph, seed);
    tensors[4] = HostTensor::from_ints(DType::I32, [5], [0, 29, 3, 3, 7]);
    (tensors, scalars)
}

#[test]
fn statistics_of_channels_are_behind_their_sums() {
    // Whole blocks, a last one that is not, fewer columns than a block has, and an odd number.
    for width in [64, 24, 36, 30, 6, 4, 7, 257] {
        let graph = normalised(4096, width, false);
        let step = compile(&graph, &Options::default(), &CudaTarget::default()).unwrap();
        // Threads that take four elements take no three.
        assert_eq!(going_on(&step.code) > 0, width % 4 == 0, "width {width}");
        common::machine_code(&step.code);
        for seed in 0..2 {
            let (tensors, scalars) = arguments(&graph, seed);
            let comparison = Differential::new(&graph).arguments(tensors, scalars);
            assert_eq!(
                comparison.check(),
                Ok(Outcome::Same),
                "width {width}, seed {seed}"
            );
        }
    }
}

#[test]
fn sums_of_two_kinds_are_added_up_first() {
    for width in [64, 30] {
        let graph = normalised(2048, width, true);
        let (tensors, scalars) = arguments(&graph, 9);
        let comparison = Differential::new(&graph).arguments(tensors, scalars);
        assert_eq!(comparison.check(), Ok(Outcome::Same), "width {width}");
    }
}

#[test]
fn an_index_out_of_range_stops_what_is_behind() {
    let graph = normalised(4096, 64, false);
    let step = compile(&graph, &Options::default(), &CudaTarget::default()).unwrap();
    assert!(going_on(&step.code) > 0, "nothing is behind a sum");
    let (mut tensors, scalars) = arguments(&graph, 3);
    tensors[4] = HostTensor::from_ints(DType::I32, [5], [0, 30, 3, 3, 7]);
    common::stops_unchanged(&step, &tensors, &scalars);
}
