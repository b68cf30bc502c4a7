//! One convolution of each kind, on cores without tensors.

use kiln_cuda::execute::Gpu;
use kiln_cuda::testing::host::Differential;
use kiln_graph::testing::Rng;

use crate::common;
use crate::compare::{on_gpu, ways};
use crate::convolution::{Convolution, FLOATS, check, each, parse, square};

/// One of each kind, with what is odd about each.
pub fn convolutions() -> Vec<(&'static str, Convolution)> {
    vec![
        (
            "tiles",
            Convolution {
                low: &[1, 1],
                high: &[1, 1],
                ..square(2, [20, 36], 1, &[9, 7], &[3, 3])
            },
        ),
        (
            "wide tiles",
            Convolution {
                low: &[1, 1],
                high: &[1, 1],
                ..square(1, [68, 132], 1, &[12, 13], &[3, 3])
            },
        ),
        (
            "odd channels",
            Convolution {
                low: &[2, 1],
                high: &[0, 2],
                ..square(2, [3, 17], 1, &[8, 11], &[5, 3])
            },
        ),
        (
            "a flat image with zeros behind it",
            Convolution {
                images: 2,
                channels: [5, 12],
                groups: 1,
                input: &[1, 6, 5],
                window: &[1, 3, 2],
                stride: &[1, 2, 1],
                low: &[0, 1, 0],
                high: &[2, 1, 1],
                dilation: &[1, 1, 2],
            },
        ),
        (
            "one channel",
            Convolution {
                low: &[1, 1],
                high: &[1, 1],
                ..square(3, [1, 1], 1, &[9, 10], &[3, 3])
            },
        ),
        (
            "strides",
            Convolution {
                stride: &[2, 2],
                low: &[1, 1],
                high: &[1, 1],
                ..square(2, [8, 12], 1, &[9, 12], &[3, 3])
            },
        ),
        (
            "uneven strides",
            Convolution {
                stride: &[3, 2],
                low: &[0, 3],
                high: &[2, 1],
                dilation: &[2, 3],
                ..square(2, [8, 10], 1, &[14, 13], &[3, 4])
            },
        ),
        (
            "strides over gaps",
            Convolution {
                stride: &[4, 3],
                ..square(1, [4, 8], 1, &[14, 13], &[2, 1])
            },
        ),
        (
            "dilation equal to strides",
            Convolution {
                stride: &[2, 2],
                dilation: &[2, 2],
                low: &[2, 2],
                high: &[1, 2],
                ..square(1, [4, 4], 1, &[11, 8], &[3, 3])
            },
        ),
        (
            "single elements with strides",
            Convolution {
                stride: &[2, 2],
                ..square(2, [16, 24], 1, &[7, 8], &[1, 1])
            },
        ),
        ("single elements", square(2, [12, 20], 1, &[5, 7], &[1, 1])),
        (
            "single elements of groups",
            square(3, [12, 18], 3, &[5, 3], &[1, 1]),
        ),
        (
            "padded single elements",
            Convolution {
                low: &[1, 0],
                high: &[0, 2],
                ..square(2, [4, 5], 1, &[4, 3], &[1, 1])
            },
        ),
        (
            "groups",
            Convolution {
                low: &[1, 1],
                high: &[1, 1],
                ..square(2, [24, 16], 2, &[6, 7], &[3, 3])
            },
        ),
        (
            "narrow groups",
            Convolution {
                low: &[1, 1],
                high: &[1, 1],
                ..square(2, [12, 18], 6, &[6, 7], &[3, 3])
            },
        ),
        (
            "depthwise",
            Convolution {
                low: &[1, 1],
                high: &[1, 1],
                ..square(2, [12, 12], 12, &[9, 7], &[3, 3])
            },
        ),
        (
            "depthwise with strides",
            Convolution {
                stride: &[2, 3],
                low: &[2, 1],
                high: &[1, 2],
                dilation: &[1, 2],
                ..square(2, [7, 7], 7, &[9, 12], &[4, 3])
            },
        ),
        (
            "depthwise of many",
            Convolution {
                low: &[2, 2],
                high: &[2, 2],
                ..square(1, [160, 160], 160, &[6, 5], &[5, 5])
            },
        ),
        (
            "multiplied depthwise",
            Convolution {
                low: &[1, 1],
                high: &[1, 1],
                ..square(2, [5, 10], 5, &[6, 7], &[3, 3])
            },
        ),
        (
            "deep and small",
            Convolution {
                low: &[1, 1],
                high: &[1, 1],
                ..square(1, [96, 8], 1, &[3, 3], &[3, 3])
            },
        ),
        (
            "deep with strides",
            Convolution {
                stride: &[2, 2],
                low: &[1, 1],
                high: &[1, 1],
                ..square(2, [8, 260], 1, &[5, 4], &[3, 3])
            },
        ),
        (
            "groups of four",
            Convolution {
                low: &[1, 1],
                high: &[1, 1],
                ..square(2, [16, 16], 4, &[6, 7], &[3, 3])
            },
        ),
        (
            "many pixels",
            Convolution {
                low: &[1, 1],
                high: &[1, 1],
                ..square(3, [4, 8], 1, &[27, 29], &[3, 3])
            },
        ),
        ("as large as the image", square(2, [8, 16], 1, &[4, 5], &[4, 5])),
        ("single places", square(3, [8, 12], 1, &[1, 1], &[1, 1])),
        (
            "one dimension",
            Convolution {
                images: 2,
                channels: [8, 12],
                groups: 1,
                input: &[23],
                window: &[5],
                stride: &[2],
                low: &[3],
                high: &[1],
                dilation: &[2],
            },
        ),
        (
            "a wide window",
            Convolution {
                images: 2,
                channels: [2, 3],
                groups: 1,
                input: &[50],
                window: &[31],
                stride: &[1],
                low: &[15],
                high: &[15],
                dilation: &[1],
            },
        ),
        (
            "three dimensions",
            Convolution {
                images: 2,
                channels: [4, 8],
                groups: 1,
                input: &[5, 6, 7],
                window: &[3, 2, 3],
                stride: &[1, 2, 1],
                low: &[1, 0, 1],
                high: &[1, 1, 0],
                dilation: &[1, 1, 2],
            },
        ),
        (
            "three dimensions in phases",
            Convolution {
                images: 1,
                channels: [3, 5],
                groups: 1,
                input: &[6, 5, 7],
                window: &[3, 3, 3],
                stride: &[2, 2, 2],
                low: &[1, 1, 1],
                high: &[1, 1, 1],
                dilation: &[1, 1, 1],
            },
        ),
    ]
}

#[test]
fn convolutions_and_their_gradients() {
    let mut items = Vec::new();
    for (number, (what, convolution)) in convolutions().into_iter().enumerate() {
        for last in [false, true] {
            // f32 in one layout, the other types in turn in the other.
            let dtype = match (number % 2 == 0) == last {
                true => "f32",
                false => FLOATS[1 + number % 3],
            };
            // Half of the results of 16 bits are not rounded to them.
            let result = match dtype {
                "f16" | "bf16" if number / 3 % 2 == 0 => "f32",
                _ => dtype,
            };
            items.push((what, convolution, dtype, result, last));
        }
    }
    each(&items, |&(what, convolution, dtype, result, last)| {
        let layout = if last { "last" } else { "first" };
        check(
            &convolution.graph_to(dtype, result, last),
            &format!("{what}, {dtype} to {result}, channels {layout}"),
        );
    });
}

/// Convolutions that filter each channel by itself, by strips of places: of lines that strips do not divide,
/// with strides, gaps, windows of several pieces, and in several chunks.
fn in_strips() -> Vec<(&'static str, Convolution)> {
    let padded = |low, high, of| Convolution { low, high, ..of };
    let of = |channels, input, window| square(2, [channels; 2], channels, input, window);
    vec![
        ("usual", padded(&[1, 1], &[1, 1], of(12, &[9, 7], &[3, 3]))),
        (
            "strides",
            Convolution {
                stride: &[2, 2],
                ..padded(&[1, 1], &[1, 1], of(8, &[9, 22], &[3, 3]))
            },
        ),
        (
            "strides that leave elements out",
            Convolution {
                stride: &[2, 3],
                ..padded(&[0, 0], &[0, 1], of(4, &[8, 25], &[2, 2]))
            },
        ),
        (
            "gaps",
            Convolution {
                stride: &[1, 3],
                dilation: &[2, 2],
                ..padded(&[0, 3], &[2, 1], of(8, &[7, 17], &[3, 3]))
            },
        ),
        (
            "windows of seven",
            padded(&[3, 3], &[3, 3], of(8, &[9, 15], &[7, 7])),
        ),
        ("much padding", padded(&[2, 5], &[3, 6], of(4, &[4, 3], &[2, 4]))),
        (
            "one line",
            Convolution {
                stride: &[1],
                dilation: &[1],
                ..padded(&[2], &[2], of(8, &[29], &[5]))
            },
        ),
        (
            "deep images",
            Convolution {
                stride: &[1, 1, 1],
                dilation: &[1, 1, 1],
                ..padded(&[1, 1, 0], &[0, 1, 1], of(4, &[3, 5, 6], &[2, 3, 3]))
            },
        ),
        (
            "even windows",
            padded(&[2, 0], &[1, 1], of(20, &[17, 6], &[4, 2])),
        ),
        ("chunks", padded(&[1, 1], &[1, 1], of(128, &[300, 9], &[3, 3]))),
    ]
}

#[test]
fn channels_by_themselves_in_strips() {
    let mut items = Vec::new();
    for (what, convolution) in in_strips() {
        let in_strips = ["f32", "f16", "bf16"];
        items.extend(in_strips.map(|dtype| (what, convolution, dtype)));
    }
    each(&items, |&(what, convolution, dtype)| {
        let graph = convolution.graph(dtype, true);
        let step = Differential::new(&graph).compile().unwrap();
        let has = |constant: &str| {
            let functions = step.code.functions.iter();
            functions
                .filter(|function| function.text.helpers.contains(constant))
                .count()
        };
        assert_eq!(has("constexpr int STRIP ="), 3, "{what}");
        assert_eq!(has("constexpr int STRIPS ="), 1, "{what}");
        // Several threads add the chunks of an element.
        let joined = has("constexpr int CHUNKS = 38;\nconstexpr int LANES = 4;");
        assert_eq!(joined, usize::from(what == "chunks"), "{what}");
        assert_eq!(has("constexpr int CHUNKS = 1;") == 0, what == "chunks", "{what}");
        check(&graph, &format!("{what}, {dtype}"));
    });
}

/// Drawn windows, strides, gaps and paddings, many of which leave elements out or meet padding alone.
#[test]
fn drawn_convolutions_of_channels_by_themselves() {
    let mut rng = Rng::new(17);
    let mut draw = |least: usize, most: usize| least + rng.below((most - least + 1) as u64) as usize;
    let mut items = Vec::new();
    while items.len() < 12 {
        let mut pair = |least: usize, most: [usize; 2]| -> &'static [usize] {
            Box::leak(Box::new(most.map(|most| draw(least, most))))
        };
        let (window, dilation, stride) = (pair(1, [5, 7]), pair(1, [2, 3]), pair(1, [3, 4]));
        let (low, high, input) = (pair(0, [3, 4]), pair(0, [3, 4]), pair(1, [14, 30]));
        let reach = |axis: usize| (window[axis] - 1) * dilation[axis];
        if (0..2).any(|axis| input[axis] + low[axis] + high[axis] <= reach(axis)) {
            continue;
        }
        let channels = 4 * draw(1, 20);
        let convolution = Convolution {
            images: draw(1, 3),
            stride,
            low,
            high,
            dilation,
            ..square(1, [channels; 2], channels, input, window)
        };
        items.push((convolution, ["f32", "f16", "bf16"][items.len() % 3]));
    }
    each(&items, |&(convolution, dtype)| {
        let graph = convolution.graph(dtype, true);
        check(&graph, &format!("a drawn convolution of {dtype}"));
    });
}

#[test]
fn channels_by_themselves_in_strips_on_a_gpu() {
    if common::gpu().is_none() {
        return;
    }
    let gpu = Gpu::get(0).unwrap();
    for (what, convolution) in in_strips() {
        for dtype in ["f32", "bf16"] {
            let graph = convolution.graph(dtype, true);
            let mut comparison = Differential::new(&graph);
            comparison.target = gpu.target();
            let (found, names) = on_gpu(&gpu, &comparison, &graph);
            assert_eq!(comparison.compare(&found), Ok(()), "{what}, {dtype}: {names:?}");
        }
    }
}

/// Each kind of convolution is computed the way that is meant for it.
#[test]
fn each_convolution_has_its_way() {
    let tiles: &[&str] = &["pack", "tiles", "pack", "tiles", "tiles of a weight"];
    let cases: [(&str, &[&str]); 10] = [
        ("tiles", tiles),
        ("strides", tiles),
        ("groups", tiles),
        ("groups of four", tiles),
        (
            "one channel",
            &["pack", "tiles", "pack", "tiles", "tiles of a weight"],
        ),
        ("single elements", &["product", "product", "product"]),
        ("single elements of groups", &["product", "product", "product"]),
        (
            "depthwise",
            &["pack", "depthwise", "pack", "depthwise", "depthwise weight"],
        ),
        ("multiplied depthwise", &["direct", "direct", "tiles of a weight"]),
        (
            "many pixels",
            &["pack", "tiles", "pack", "tiles", "tiles of a weight", "join"],
        ),
    ];
    let all = convolutions();
    for (what, expected) in cases {
        let (_, convolution) = all.iter().find(|(name, _)| *name == what).unwrap();
        let mut found = ways(&Differential::new(&convolution.graph("f32", true)));
        found.retain(|&way| way != "pool");
        assert_eq!(found, expected, "{what}");
    }
}

/// Convolutions of windows on stored images: of every second place, of some channels, transposed, mirrored,
/// repeated.
#[test]
fn convolutions_read_windows() {
    let attributes = "stride=[1,2], pad_low=[1,0], pad_high=[1,1], dilation=[1,1], groups=1";
    let plain = "stride=[1,1], pad_low=[0,0], pad_high=[0,0], dilation=[1,1], groups=1";
    let windows = [
        // The stored image, and what is read of it.
        (
            "[2,8,9,14]",
            "slice %0 {starts=[0,0,1,0], limits=[2,8,9,14], steps=[1,1,1,2]}",
        ),
        (
            "[2,13,8,7]",
            "slice %0 {starts=[0,4,0,0], limits=[2,12,8,7], steps=[1,1,1,1]}",
        ),
        ("[2,8,7,8]", "transpose %0 {perm=[0,3,1,2]}"),
        ("[8,7,8,2]", "transpose %0 {perm=[3,2,0,1]}"),
        ("[2,8,8,7]", "flip %0 {axes=[2,3]}"),
        ("[2,8,1,7]", "broadcast %0 {dims=[0,1,2,3]}"),
    ];
    let mut items = Vec::new();
    for (number, window) in windows.into_iter().enumerate() {
        items.push((window, "f32"));
        items.push((window, FLOATS[1 + number % 3]));
    }
    each(&items, |&((stored, window), dtype)| {
        let (y, w) = (format!("{dtype}[2,12,8,3]"), format!("{dtype}[12,8,3,3]"));
        let text = format!(
            "graph @windows {{
  %0 = parameter 0 : {dtype}{stored}
  %1 = parameter 1 : {w}
  %2 = parameter 2 : {y}
  %3 = parameter 3 : {dtype}[8,4,2,3]
  %4 = {window} : {dtype}[2,8,8,7]
  %5 = conv %4, %1 {{{attributes}}} : {y}
  %6 = conv_weight_grad %4, %2 {{{attributes}, kernel=[3,3]}} : {w}
  %7 = conv_input_grad %4, %3 {{{plain}, input=[9,9]}} : {dtype}[2,4,9,9]
  return %5, %6, %7
}}"
        );
        check(&parse(&text), &format!("{window}, {dtype}"));
    });
}

/// Integers and empty tensors are computed one result a thread.
#[test]
fn convolutions_of_integers_and_of_nothing() {
    let convolution = Convolution {
        stride: &[2, 1],
        low: &[1, 1],
        high: &[1, 0],
        ..square(2, [6, 4], 2, &[7, 6], &[3, 2])
    };
    let nothing = Convolution {
        images: 0,
        ..convolution
    };
    let items = [
        ("i32", convolution),
        ("u8", convolution),
        ("i64", convolution),
        ("f32", nothing),
    ];
    each(&items, |(dtype, convolution)| {
        check(&convolution.graph(dtype, false), dtype)
    });
}
