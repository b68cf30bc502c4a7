//! Convolutions on tensor cores: of f32 where products may round, of 16 bits, and of pictures.

use kiln_cuda::CudaTarget;
use kiln_cuda::execute::Gpu;
use kiln_cuda::testing::host::{Differential, Outcome};
use kiln_graph::Graph;

use crate::common;
use crate::compare::{on_gpu, rounding, ways};
use crate::convolution::{Convolution, each, square};
use crate::kinds::convolutions;

/// Convolutions whose channels come in fours, for tensor cores: tiles of each shape with rows, columns and
/// a depth that end inside one.
pub fn convolutions_of_fours() -> Vec<(&'static str, Convolution)> {
    let padded = Convolution {
        low: &[1, 1],
        high: &[1, 1],
        ..square(1, [20, 36], 1, &[9, 7], &[3, 3])
    };
    vec![
        ("small", padded),
        (
            "wide",
            Convolution {
                images: 2,
                channels: [68, 132],
                input: &[10, 9],
                ..padded
            },
        ),
        (
            "large tiles",
            Convolution {
                channels: [36, 128],
                input: &[180, 188],
                window: &[1, 1],
                low: &[1, 0],
                high: &[0, 0],
                ..padded
            },
        ),
        (
            "chunks",
            Convolution {
                channels: [96, 24],
                input: &[6, 90],
                ..padded
            },
        ),
        (
            "strides",
            Convolution {
                images: 2,
                channels: [24, 40],
                stride: &[2, 2],
                ..padded
            },
        ),
        (
            "uneven strides",
            Convolution {
                channels: [16, 20],
                input: &[14, 13],
                window: &[3, 4],
                stride: &[3, 2],
                low: &[0, 3],
                high: &[2, 1],
                dilation: &[2, 3],
                ..padded
            },
        ),
        (
            "single elements with strides",
            Convolution {
                stride: &[2, 2],
                ..square(2, [64, 72], 1, &[7, 8], &[1, 1])
            },
        ),
        (
            "groups",
            Convolution {
                channels: [48, 72],
                groups: 2,
                ..padded
            },
        ),
        (
            "three dimensions",
            Convolution {
                images: 2,
                channels: [16, 32],
                groups: 1,
                input: &[4, 5, 6],
                window: &[3, 2, 3],
                stride: &[1, 2, 1],
                low: &[1, 0, 1],
                high: &[1, 1, 0],
                dilation: &[1, 1, 2],
            },
        ),
    ]
}

/// On tensor cores, in both directions.
#[test]
fn convolutions_that_round_their_operands() {
    let all = convolutions_of_fours();
    each(&all, |(what, convolution)| {
        let graph = convolution.graph("f32", true);
        let outcome = rounding(&graph).check();
        assert_eq!(outcome, Ok(Outcome::Same), "{what}\n{graph}");
    });
}

/// The same convolutions with channels in eights, for tensor cores of 16 bits, and those of pictures, whose
/// channels are padded; each with the types of its operands and results.
pub fn convolutions_of_eights() -> Vec<(String, Convolution, [&'static str; 2])> {
    let types = [["bf16", "bf16"], ["f16", "f32"], ["bf16", "f32"], ["f16", "f16"]];
    let eights = convolutions_of_fours().into_iter().map(|(what, convolution)| {
        let groups = convolution.groups;
        let channels = convolution
            .channels
            .map(|count| groups * (count / groups).next_multiple_of(8));
        (
            what,
            Convolution {
                channels,
                ..convolution
            },
        )
    });
    let picture = Convolution {
        stride: &[2, 2],
        low: &[3, 3],
        high: &[3, 3],
        ..square(2, [3, 24], 1, &[19, 22], &[7, 7])
    };
    let gray = Convolution {
        low: &[1, 0],
        high: &[1, 2],
        ..square(3, [1, 16], 1, &[9, 8], &[5, 3])
    };
    // Rows of windows of an even number of places, rows of the picture that nobody reads, other steps down.
    let wide = Convolution {
        stride: &[1, 4],
        low: &[0, 2],
        high: &[1, 0],
        dilation: &[2, 1],
        ..square(2, [4, 16], 1, &[11, 31], &[3, 4])
    };
    let narrow = Convolution {
        stride: &[3, 2],
        low: &[0, 0],
        high: &[0, 0],
        ..square(3, [1, 40], 1, &[9, 8], &[2, 1])
    };
    let all = eights.chain([
        ("picture", picture),
        ("gray picture", gray),
        ("wide picture", wide),
        ("narrow picture", narrow),
    ]);
    let typed = all.enumerate().map(|(number, (what, convolution))| {
        let types = types[number % 4];
        (
            format!("{what}, {} to {}", types[0], types[1]),
            convolution,
            types,
        )
    });
    typed
        .chain([
            ("picture in TF32".into(), picture, ["f32"; 2]),
            ("gray picture in TF32".into(), gray, ["f32"; 2]),
        ])
        .collect()
}

/// A comparison of a graph of [`convolutions_of_eights`].
fn on_tensor_cores<'a>(graph: &'a Graph, types: [&str; 2]) -> Differential<'a> {
    match types {
        ["f32", _] => rounding(graph),
        _ => Differential::new(graph),
    }
}

#[test]
fn convolutions_of_16_bits_and_of_pictures() {
    each(&convolutions_of_eights(), |(what, convolution, types)| {
        for last in [true, false] {
            // Channels that come first are only read by copies of pictures.
            let is_picture = what.contains("picture");
            if !last && !is_picture {
                continue;
            }
            let graph = convolution.graph_to(types[0], types[1], last);
            let comparison = on_tensor_cores(&graph, *types);
            assert_eq!(comparison.check(), Ok(Outcome::Same), "{what}\n{graph}");
            let found = ways(&comparison);
            let count = |kind: &str| found.iter().filter(|&&way| way == kind).count();
            let counts = ["copy", "tensor pack", "tensor tiles", "tensor tiles of a weight"].map(count);
            match (is_picture, last) {
                (true, true) => assert_eq!(counts, [4, 1, 1, 1], "{what}: {found:?}"),
                (true, false) => assert!(counts[2] <= 1, "{what}: {found:?}"),
                (false, _) => assert_eq!(counts, [0, 2, 2, 1], "{what}: {found:?}"),
            }
        }
    });
}

#[test]
fn convolutions_of_16_bits_and_of_pictures_on_a_gpu() {
    if common::gpu().is_none() {
        return;
    }
    let gpu = Gpu::get(0).unwrap();
    for (what, convolution, types) in convolutions_of_eights() {
        let graph = convolution.graph_to(types[0], types[1], true);
        let mut comparison = on_tensor_cores(&graph, types);
        // Our own kernels, and whatever is chosen beside a library.
        for cudnn in [false, true] {
            comparison.target = CudaTarget {
                tf32: types[0] == "f32",
                cudnn: cudnn && gpu.target().cudnn,
                ..gpu.target()
            };
            let (found, names) = on_gpu(&gpu, &comparison, &graph);
            assert_eq!(comparison.compare(&found), Ok(()), "{what}: {names:?}");
        }
    }
}

/// The same on a GPU, where there is one: the host's versions of the GPU's instructions follow the manual,
/// and may misread it.
#[test]
fn convolutions_that_round_their_operands_on_a_gpu() {
    if common::gpu().is_none() {
        return;
    }
    let gpu = Gpu::get(0).unwrap();
    for (what, convolution) in convolutions_of_fours() {
        let graph = convolution.graph("f32", true);
        let comparison = rounding(&graph);
        let (found, _) = on_gpu(&gpu, &comparison, &graph);
        assert_eq!(comparison.compare(&found), Ok(()), "{what}");
    }
}

/// Tensor cores compute what they are meant for, and nothing where products must not round.
#[test]
fn tensor_cores_have_channels_in_fours() {
    let tensor = ["tensor pack", "tensor tiles", "tensor tiles of a weight"];
    let way = |graph: &Graph, tf32: bool| {
        let mut comparison = Differential::new(graph);
        comparison.target.tf32 = tf32;
        ways(&comparison)
    };
    for (what, convolution) in convolutions_of_fours() {
        let graph = convolution.graph("f32", true);
        let found = way(&graph, true);
        let count = |kind: &str| found.iter().filter(|&&way| way == kind).count();
        assert_eq!(tensor.map(count), [2, 2, 1], "{what}: {found:?}");
        assert!(
            way(&graph, false).iter().all(|way| !tensor.contains(way)),
            "{what}"
        );
    }
    let (_, odd) = convolutions()[2];
    let found = way(&odd.graph("f32", true), true);
    assert!(found.iter().all(|way| !tensor.contains(way)), "{found:?}");
}
