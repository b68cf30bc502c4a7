//! Convolutions of pictures in bands, by groups of warps.

use kiln_cuda::CudaTarget;
use kiln_cuda::emit::product::warpgroups::{CAPABILITY, Warpgroups};
use kiln_cuda::execute::Gpu;
use kiln_cuda::testing::host::{Differential, Outcome};

use crate::common;
use crate::compare::{on_gpu, ways};
use crate::convolution::{Convolution, each, square};

/// Pictures whose windows overlap by whole vectors, for groups of warps: rows of several tiles, of parts of
/// one, more channels than a group has, blocks with bands of several images, and types of operands and
/// results.
pub fn pictures_in_bands() -> Vec<(&'static str, Convolution, [&'static str; 2])> {
    let usual = Convolution {
        stride: &[2, 2],
        low: &[3, 3],
        high: &[3, 3],
        ..square(2, [3, 64], 1, &[37, 142], &[7, 7])
    };
    let narrow = Convolution {
        images: 3,
        channels: [1, 24],
        input: &[19, 22],
        ..usual
    };
    let many = Convolution {
        stride: &[2, 2],
        low: &[0, 1],
        high: &[1, 1],
        ..square(2, [4, 104], 1, &[12, 68], &[3, 3])
    };
    // A step down of three, windows with gaps, places that no window meets.
    let gaps = Convolution {
        stride: &[3, 2],
        low: &[2, 0],
        high: &[0, 0],
        dilation: &[2, 1],
        ..square(2, [2, 40], 1, &[20, 34], &[3, 4])
    };
    let blocks = Convolution {
        images: 150,
        input: &[12, 20],
        ..narrow
    };
    vec![
        ("usual", usual, ["bf16"; 2]),
        ("narrow", narrow, ["f16"; 2]),
        ("many channels", many, ["bf16", "f32"]),
        ("gaps", gaps, ["f16"; 2]),
        ("blocks", blocks, ["bf16"; 2]),
    ]
}

#[test]
fn pictures_are_convolved_in_bands() {
    each(&pictures_in_bands(), |(what, convolution, types)| {
        for last in [true, false] {
            // Results must have their channels last, the picture need not.
            let graph = convolution.graph_to(types[0], types[1], last);
            let mut comparison = Differential::new(&graph);
            comparison.target.warpgroups = Warpgroups::Always;
            assert_eq!(comparison.check(), Ok(Outcome::Same), "{what}\n{graph}");
            let found = ways(&comparison);
            let bands = found.iter().filter(|way| way.starts_with("bands")).count();
            let expected = [usize::from(types[1] != "f32") + 1, 0][usize::from(!last)];
            assert_eq!(bands, expected, "{what}: {found:?}");
        }
    });
}

/// The first layer of a network for films: windows without depth over pictures one behind the other, or with
/// one of zeros in front.
#[test]
fn films_are_no_pictures() {
    let film = Convolution {
        stride: &[1, 2, 2],
        low: &[0, 3, 3],
        high: &[0, 3, 3],
        dilation: &[1, 1, 1],
        ..square(2, [3, 16], 1, &[4, 16, 36], &[1, 7, 7])
    };
    let in_front = Convolution {
        stride: &[2, 2, 2],
        low: &[1, 3, 3],
        input: &[1, 16, 36],
        ..film
    };
    for convolution in [film, in_front] {
        let graph = convolution.graph_to("bf16", "bf16", true);
        let mut comparison = Differential::new(&graph);
        comparison.target.warpgroups = Warpgroups::Always;
        assert_eq!(comparison.check(), Ok(Outcome::Same), "{graph}");
        let found = ways(&comparison);
        assert!(!found.iter().any(|way| way.starts_with("bands")), "{found:?}");
    }
}

#[test]
fn pictures_are_convolved_in_bands_on_a_gpu() {
    if common::gpu().is_none() {
        return;
    }
    let gpu = Gpu::get(0).unwrap();
    if gpu.target().capability != CAPABILITY {
        println!("skipped: no groups of warps here");
        return;
    }
    for (what, convolution, types) in pictures_in_bands() {
        let graph = convolution.graph_to(types[0], types[1], true);
        let mut comparison = Differential::new(&graph);
        comparison.target = CudaTarget {
            warpgroups: Warpgroups::Always,
            ..gpu.target()
        };
        let (found, names) = on_gpu(&gpu, &comparison, &graph);
        assert_eq!(comparison.compare(&found), Ok(()), "{what}: {names:?}");
    }
}
