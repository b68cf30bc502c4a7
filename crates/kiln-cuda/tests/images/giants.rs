//! Planes and weights of more elements than 32 bits count: what they are compiled to, for no test has their
//! memory.

use kiln_compiler::{CompileError, Options};
use kiln_cuda::build::{Compiler, Store};
use kiln_cuda::emit::product::warpgroups::Warpgroups;
use kiln_cuda::{CudaStep, CudaTarget};
use kiln_graph::Graph;

use crate::common;
use crate::convolution::parse;

fn compile(graph: &Graph) -> Result<CudaStep, CompileError> {
    let target = CudaTarget {
        warpgroups: Warpgroups::Never,
        ..CudaTarget::default()
    };
    kiln_compiler::compile(graph, &Options::default(), &target)
}

/// The text of each function of a step, which NVRTC compiles too where it is.
fn functions(graph: &Graph) -> Vec<String> {
    let step = compile(graph).unwrap();
    if let Some(nvrtc) = common::nvrtc() {
        let compiler = Compiler::new(nvrtc, (9, 0), Store::disabled()).unwrap();
        let compiled = compiler.compile(&step.code.sources().0);
        compiled.unwrap_or_else(|error| panic!("{error}\n{graph}"));
    }
    let texts = step.code.functions.iter();
    texts.map(|function| function.text.helpers.clone()).collect()
}

const WIDE: &str = "typedef long long Index;";

/// An index of a pool is the number of a place, which has more than 32 bits here.
#[test]
fn indices_of_planes_of_more_than_32_bits() {
    let window = "size=[2,2], stride=[2,2], pad_low=[0,0], pad_high=[0,0], dilation=[1,1]";
    let (x, y) = ("[1,1,65538,65536]", "[1,1,32769,32768]");
    let graph = parse(&format!(
        "graph @planes {{
  %0 = parameter 0 : f16{x}
  %1 = parameter 1 : f16{y}
  %2 = parameter 2 : i64{y}
  %3, %4 = max_pool_with_indices %0 {{{window}}} : f16{y}, i64{y}
  %5 = max_pool_grad %1, %4 {{input=[65538,65536]}} : f16{x}
  %6 = max_pool_grad %1, %2 {{input=[65538,65536]}} : f16{x}
  return %3, %4, %5, %6
}}"
    ));
    let texts = functions(&graph);
    let of = |mark: &str| texts.iter().find(|text| text.contains(mark)).expect(mark);
    let forward = of("where[j] = here");
    assert!(forward.contains("Index where[VECTOR];") && forward.contains("Index here = ((Index)p0"));
    let backward = of("at.at[j] == here");
    assert!(backward.contains("((Count)(x.at[0] + b0) * RESULT1"));
    let any = of("slot_at(Index place)");
    assert!(any.contains("constexpr Index PLACES = 4295098368;"), "{any}");
    for text in [forward, backward, any] {
        assert!(text.contains(WIDE), "{text}");
    }
}

/// Places of one dimension are counted in 32 bits; more are refused by name.
#[test]
fn a_dimension_of_more_than_32_bits_is_refused() {
    let pool = "graph @line {
  %0 = parameter 0 : i8[1,1,3000000000]
  %1 = max_pool %0 {size=[2], stride=[2], pad_low=[0], pad_high=[0], dilation=[1]} : i8[1,1,1500000000]
  return %1
}";
    let convolution = "graph @line {
  %0 = parameter 0 : f16[1,1,3000000000]
  %1 = parameter 1 : f16[1,1,2]
  %2 = conv %0, %1 {stride=[1], pad_low=[0], pad_high=[0], dilation=[1], groups=1} : f16[1,1,2999999999]
  return %2
}";
    let gradient = "graph @line {
  %0 = parameter 0 : f16[1,1,3000000000]
  %1 = parameter 1 : f16[1,1,2999999999]
  %2 = conv_weight_grad %0, %1 {stride=[1], pad_low=[0], pad_high=[0], dilation=[1], groups=1, kernel=[2]} : f16[1,1,2]
  return %2
}";
    for (text, name, first) in [
        (pool, "max_pool", "i8[1,1,3000000000]"),
        (convolution, "conv", "f16[1,1,3000000000]"),
        (gradient, "conv_weight_grad", "f16[1,1,3000000000]"),
    ] {
        match compile(&parse(text)) {
            Err(CompileError::Unsupported { op, types, .. }) => {
                assert_eq!(op, name);
                assert!(types.starts_with(first), "{types}");
            }
            other => panic!("{:?}", other.map(|step| step.graph)),
        }
    }
}

/// A convolution of small images and its weight's gradient.
fn convolution(dtype: &str, [x, w, y]: [&str; 3], attributes: &str, groups: usize) -> Graph {
    parse(&format!(
        "graph @weights {{
  %0 = parameter 0 : {dtype}[{x}]
  %1 = parameter 1 : {dtype}[{w}]
  %2 = parameter 2 : {dtype}[{y}]
  %3 = conv %0, %1 {{{attributes}, groups={groups}}} : {dtype}[{y}]
  %4 = conv_weight_grad %0, %2 {{{attributes}, groups={groups}, kernel=[3,3]}} : {dtype}[{w}]
  return %3, %4
}}"
    ))
}

#[test]
fn weights_of_more_than_32_bits_of_small_images() {
    let attributes = |padding: usize| {
        format!("stride=[1,1], pad_low=[{padding},{padding}], pad_high=[{padding},{padding}], dilation=[1,1]")
    };
    let dense = ["1,16384,4,4", "16384,16384,3,3", "1,16384,2,2"];
    let each = ["1,300000000,1,1", "300000000,1,3,3", "1,300000000,1,1"];
    // The weight has 31 bits, and more where its one result is packed as four.
    let one = ["1,67000000,3,3", "1,67000000,3,3", "1,1,1,1"];
    let cases = [
        ("i32", dense, 0, 1),
        ("f32", dense, 0, 1),
        ("bf16", dense, 0, 1),
        ("f32", each, 1, 300_000_000),
        ("f32", one, 0, 1),
    ];
    for (dtype, shapes, padding, groups) in cases {
        let texts = functions(&convolution(dtype, shapes, &attributes(padding), groups));
        assert!(texts.len() >= 2, "{texts:?}");
        for text in texts {
            assert!(text.contains(WIDE), "{dtype} of {shapes:?}:\n{text}");
        }
    }
    // Smaller ones are counted in 32 bits, which are faster.
    let small = ["1,64,4,4", "64,64,3,3", "1,64,2,2"];
    for text in functions(&convolution("f32", small, &attributes(0), 1)) {
        assert!(text.contains("typedef int Index;"), "{text}");
    }
}
