//! The same kernels as machine code.

use kiln_cuda::build::{Compiler, Store};
use kiln_cuda::emit::product::warpgroups::{CAPABILITY, Warpgroups};
use kiln_cuda::testing::host::Differential;
use kiln_graph::Graph;

use crate::bands::pictures_in_bands;
use crate::common;
use crate::convolution::FLOATS;
use crate::kinds::convolutions;
use crate::pools::pools;
use crate::tensor_cores::{convolutions_of_eights, convolutions_of_fours};

/// The same kernels as machine code: one of each kind, or with `KILN_TEST_THOROUGH` in the environment all
/// of them.
#[test]
fn kernels_compile_for_devices() {
    let Some(nvrtc) = common::nvrtc() else { return };
    let mut sources = Vec::new();
    let thorough = std::env::var_os("KILN_TEST_THOROUGH").is_some();
    let mut add = |graph: &Graph| {
        let step = Differential::new(graph).compile().unwrap();
        sources.extend(step.code.sources().0);
    };
    for (number, (what, convolution)) in convolutions().into_iter().enumerate() {
        let usual = ["tiles", "strides", "depthwise", "groups"].contains(&what);
        if usual || thorough {
            add(&convolution.graph(FLOATS[number % 4], true));
        }
        if thorough {
            add(&convolution.graph(FLOATS[(number + 1) % 4], false));
        }
    }
    let rounded: Vec<_> = convolutions_of_fours()
        .iter()
        .filter(|(what, _)| ["wide", "large tiles", "strides"].contains(what) || thorough)
        .flat_map(|(_, convolution)| {
            let graph = convolution.graph("f32", true);
            let mut comparison = Differential::new(&graph);
            comparison.target.tf32 = true;
            comparison.compile().unwrap().code.sources().0
        })
        .collect();
    for (number, (what, pool)) in pools().into_iter().enumerate() {
        if what == "the usual" || thorough {
            add(&pool.graph(FLOATS[number % 4], true));
        }
    }
    sources.extend(rounded);
    let mut in_bands = Vec::new();
    for (_, convolution, types) in pictures_in_bands() {
        let graph = convolution.graph_to(types[0], types[1], true);
        let mut comparison = Differential::new(&graph);
        comparison.target.warpgroups = Warpgroups::Always;
        in_bands.extend(comparison.compile().unwrap().code.sources().0);
    }
    for (_, convolution, types) in convolutions_of_eights().into_iter().rev().take(4) {
        let graph = convolution.graph_to(types[0], types[1], true);
        let mut comparison = Differential::new(&graph);
        comparison.target.tf32 = true;
        sources.extend(comparison.compile().unwrap().code.sources().0);
    }
    for capability in [(8, 0), (9, 0)] {
        let compiler = Compiler::new(nvrtc.clone(), capability, Store::disabled()).unwrap();
        if capability == CAPABILITY {
            sources.append(&mut in_bands);
        }
        let cubins = compiler
            .compile(&sources)
            .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(cubins.len(), sources.len());
    }
}
