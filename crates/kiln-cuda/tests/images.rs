//! Runs generated convolutions and pools on the host and compares them with the interpreter: odd shapes,
//! strides, dilations, groups and paddings, in one to three dimensions, of every type, with channels first
//! or last. Where NVRTC is installed it compiles the same kernels.

mod common;

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_compiler::Options;
use kiln_cuda::CudaTarget;
use kiln_cuda::build::{Compiler, Store};
use kiln_cuda::code::{CallKind, StepCall};
use kiln_cuda::emit::product::warpgroups::{CAPABILITY, Warpgroups};
use kiln_cuda::execute::{CudaExecutable, Gpu, NothingOutside};
use kiln_cuda::runtime::Storage;
use kiln_cuda::testing::host::{Differential, Outcome, differential};
use kiln_graph::op::Window;
use kiln_graph::{Graph, HostTensor, TensorType, interpret_f64};

const FLOATS: [&str; 4] = ["f32", "f64", "f16", "bf16"];

/// A convolution, one entry for each spatial dimension.
#[derive(Clone, Copy)]
struct Convolution {
    images: usize,
    /// Channels of the input and of the result.
    channels: [usize; 2],
    groups: usize,
    input: &'static [usize],
    window: &'static [usize],
    stride: &'static [usize],
    low: &'static [usize],
    high: &'static [usize],
    dilation: &'static [usize],
}

/// A square convolution of two dimensions with the same numbers in both.
fn square(
    images: usize,
    channels: [usize; 2],
    groups: usize,
    input: &'static [usize],
    window: &'static [usize],
) -> Convolution {
    Convolution {
        images,
        channels,
        groups,
        input,
        window,
        stride: &[1, 1],
        low: &[0, 0],
        high: &[0, 0],
        dilation: &[1, 1],
    }
}

/// `[a,b,..]`.
fn list(numbers: &[usize]) -> String {
    format!("{numbers:?}").replace(' ', "")
}

/// `a,b,..`.
fn bare(numbers: &[usize]) -> String {
    list(numbers).trim_matches(['[', ']']).to_owned()
}

/// Lines of a graph that change no element: a pool of single elements, which stores an image with its
/// channels last.
fn same(name: &str, of: &str, ty: &str, dimensions: usize) -> String {
    let (ones, zeros) = (list(&vec![1; dimensions]), list(&vec![0; dimensions]));
    format!(
        "  %{name} = avg_pool %{of} {{size={ones}, stride={ones}, pad_low={zeros}, pad_high={zeros}, dilation={ones}}} : {ty}\n"
    )
}

impl Convolution {
    fn output(&self) -> Vec<usize> {
        (0..self.input.len())
            .map(|axis| {
                let reach = self.dilation[axis] * (self.window[axis] - 1) + 1;
                (self.input[axis] + self.low[axis] + self.high[axis] - reach) / self.stride[axis] + 1
            })
            .collect()
    }

    /// The convolution and both gradients; channels first, or last.
    fn graph(&self, dtype: &str, last: bool) -> Graph {
        self.graph_to(dtype, dtype, last)
    }

    /// The same with results of type `to_type`.
    fn graph_to(&self, dtype: &str, to_type: &str, last: bool) -> Graph {
        let [from, to] = self.channels;
        let dims = self.input.len();
        let attributes = format!(
            "stride={}, pad_low={}, pad_high={}, dilation={}, groups={}{}",
            list(self.stride),
            list(self.low),
            list(self.high),
            list(self.dilation),
            self.groups,
            if to_type == dtype {
                String::new()
            } else {
                format!(", result={to_type}")
            }
        );
        let x = format!("{dtype}[{},{from},{}]", self.images, bare(self.input));
        let y = format!("{dtype}[{},{to},{}]", self.images, bare(&self.output()));
        let w = format!("{dtype}[{to},{},{}]", from / self.groups, bare(self.window));
        let result_of = |ty: &String| ty.replacen(dtype, to_type, 1);
        let (to_x, to_y, to_w) = (result_of(&x), result_of(&y), result_of(&w));
        let mut text = format!(
            "graph @convolution {{\n  %0 = parameter 0 : {x}\n  %1 = parameter 1 : {w}\n  %2 = parameter 2 : {y}\n"
        );
        let (mut image, mut gradient) = ("0", "2");
        if last {
            text += &same("3", "0", &x, dims);
            text += &same("4", "2", &y, dims);
            (image, gradient) = ("3", "4");
        }
        let _ = writeln!(text, "  %5 = conv %{image}, %1 {{{attributes}}} : {to_y}");
        let _ = writeln!(
            text,
            "  %6 = conv_input_grad %{gradient}, %1 {{{attributes}, input={}}} : {to_x}",
            list(self.input)
        );
        let _ = writeln!(
            text,
            "  %7 = conv_weight_grad %{image}, %{gradient} {{{attributes}, kernel={}}} : {to_w}",
            list(self.window)
        );
        if last {
            text += &same("8", "5", &to_y, dims);
            text += &same("9", "6", &to_x, dims);
            text += "  return %8, %9, %7\n}";
        } else {
            text += "  return %5, %6, %7\n}";
        }
        parse(&text)
    }
}

fn parse(text: &str) -> Graph {
    Graph::parse(text).unwrap_or_else(|error| panic!("{error}:\n{text}"))
}

/// Runs `graph` on the host and compares.
fn check(graph: &Graph, what: &str) {
    if let Err(error) = differential(graph) {
        panic!("{what}: {error}\n{graph}");
    }
}

/// Runs `work` on all of `items`, on two threads: most of the time goes into the host's compiler.
fn each<T: Sync>(items: &[T], work: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    work(item);
                }
            });
        }
    });
}

/// One of each kind, with what is odd about each.
fn convolutions() -> Vec<(&'static str, Convolution)> {
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

/// With cuDNN: the copies for the library and from it. The host's stand-in for the library computes
/// convolutions by plain loops.
#[test]
fn convolutions_in_the_library() {
    let mut items = Vec::new();
    for (number, (what, convolution)) in convolutions().into_iter().enumerate() {
        for last in [false, true] {
            let dtype = ["f32", "f16", "bf16"][(number + usize::from(last)) % 3];
            items.push((what, convolution, dtype, last));
        }
    }
    each(&items, |&(what, convolution, dtype, last)| {
        let graph = convolution.graph(dtype, last);
        let mut comparison = Differential::new(&graph);
        comparison.target.cudnn = true;
        let what = format!("{what}, {dtype}, channels last: {last}");
        match comparison.check() {
            Ok(Outcome::Same) => {}
            other => panic!("{what}: {other:?}\n{graph}"),
        }
        let step = comparison.compile().unwrap();
        let either = |call: &StepCall| matches!(call.kind, CallKind::Either { .. });
        let asked = step.code.calls.iter().filter(|call| either(call)).count();
        // The library does not get depthwise convolutions, those of f32 with few channels, or those of
        // pictures that tensor cores compute.
        let depthwise = convolution.groups > 1 && convolution.channels == [convolution.groups; 2];
        let few = dtype == "f32" && convolution.channels[0] < 4;
        let padded = convolution.groups == 1
            && !convolution.channels[0].is_multiple_of(8)
            && convolution.channels[0] < 16
            && convolution.channels[1].is_multiple_of(8);
        match dtype {
            _ if depthwise || few => assert_eq!(asked, 0, "{what}"),
            "f16" | "bf16" if padded => assert!((1..=3).contains(&asked), "{what}: {asked}"),
            _ => assert_eq!(asked, 3, "{what}"),
        }
        let names: Vec<&str> = step.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
        let named = names.iter().filter(|name| name.starts_with("cuDNN ")).count();
        assert_eq!(named, asked, "{what}: {names:?}");
    });
}

/// What computes each kernel of a step: the constants by which the templates are told apart.
fn ways(comparison: &Differential<'_>) -> Vec<&'static str> {
    let step = comparison.compile().unwrap();
    let calls = step.code.calls.iter().map(|call| match &call.kind {
        CallKind::Product { .. } => "product",
        CallKind::Launch { function, .. } => {
            let text = &step.code.functions[*function].text.helpers;
            let has = |constant: &str| text.contains(&format!("constexpr int {constant} ="));
            match () {
                () if has("ROW_WARPS") && has("HOP0") => "tensor tiles",
                () if has("ROW_WARPS") => "tensor tiles of a weight",
                () if text.contains("packed_element(from[") => "tensor pack",
                () if has("BANDS") && has("PARTS") => "bands of a weight",
                () if has("BANDS") => "bands",
                () if has("EACH") || has("PLACES") => "copy",
                () if has("PIXEL_TILES") && has("HOP0") => "tiles",
                () if has("ROW_TILES") => "tiles of a weight",
                () if has("CHANNEL_TILES") => "depthwise weight",
                () if has("OUT_PADDED") && has("VECTOR") => "depthwise",
                () if has("OUT_PADDED") => "pack",
                () if has("CHUNKS") => "join",
                () if has("OUT") => "direct",
                () => "pool",
            }
        }
        other => panic!("{other:?}"),
    });
    calls.collect()
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

/// Convolutions whose channels come in fours, for tensor cores: tiles of each shape with rows, columns and
/// a depth that end inside one.
fn convolutions_of_fours() -> Vec<(&'static str, Convolution)> {
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

/// A comparison where products may round their operands, to within some roundings of 10 bits.
fn rounding(graph: &Graph) -> Differential<'_> {
    let mut comparison = Differential::new(graph);
    comparison.target.tf32 = true;
    let (tensors, scalars) = comparison.given();
    let expected = interpret_f64(graph, tensors, scalars).unwrap();
    let largest = expected.iter().map(|tensor| {
        let values = tensor.to_f64s();
        2e-3 * values.iter().fold(0.0, |most: f64, x| most.max(x.abs()))
    });
    let tolerances: Vec<f64> = largest.collect();
    comparison.tolerances(&tolerances)
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
fn convolutions_of_eights() -> Vec<(String, Convolution, [&'static str; 2])> {
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

/// Pictures whose windows overlap by whole vectors, for groups of warps: rows of several tiles, of parts of one, more
/// channels than a group has, blocks with bands of several images, and types of operands and results.
fn pictures_in_bands() -> Vec<(&'static str, Convolution, [&'static str; 2])> {
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

/// What `graph` gives on a GPU, in two runs of equal bits, and the names of its kernels.
fn on_gpu(gpu: &Arc<Gpu>, comparison: &Differential<'_>, graph: &Graph) -> (Vec<HostTensor>, Vec<String>) {
    let executable = CudaExecutable::new(graph, &Options::default(), &comparison.target, gpu).unwrap();
    let upload = |tensor: &HostTensor| gpu.upload(tensor.bytes()).unwrap();
    let inputs: Vec<_> = comparison.given().0.iter().map(upload).collect();
    let types = graph.outputs.iter().map(|output| graph.ty(output.value));
    let run = || -> Vec<HostTensor> {
        let types = types.clone();
        let memory = |ty: &TensorType| gpu.upload(&vec![0xff; ty.bytes()]).unwrap();
        let outputs: Vec<_> = types.clone().map(memory).collect();
        executable
            .run(&inputs, &outputs, &[], &NothingOutside, false)
            .unwrap();
        let read = |(ty, storage): (&TensorType, &Arc<Storage>)| {
            let mut bytes = vec![0; ty.bytes()];
            gpu.download(storage, &mut bytes).unwrap();
            HostTensor::from_bytes(ty.clone(), bytes).unwrap()
        };
        types.zip(&outputs).map(read).collect()
    };
    let (first, second) = (run(), run());
    for (one, other) in first.iter().zip(&second) {
        assert_eq!(one.bytes(), other.bytes(), "two runs have other bits\n{graph}");
    }
    let kernels = &executable.contract().kernels;
    (first, kernels.iter().map(|kernel| kernel.name.clone()).collect())
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

/// Every convolution on a GPU with cuDNN, in every type that the library is asked for.
#[test]
fn convolutions_in_the_library_on_a_gpu() {
    if common::gpu().is_none() {
        return;
    }
    let gpu = Gpu::get(0).unwrap();
    if !gpu.target().cudnn {
        println!("skipped: no cuDNN here");
        return;
    }
    let (mut taken, mut asked, mut wrong) = (0, 0, Vec::new());
    let all = convolutions().into_iter().chain(convolutions_of_fours());
    for (number, (what, convolution)) in all.enumerate() {
        for (kind, (dtype, tf32)) in [("f32", false), ("f32", true), ("f16", false), ("bf16", false)]
            .into_iter()
            .enumerate()
        {
            let last = (number + kind) % 4 != 0;
            let graph = convolution.graph(dtype, last);
            let mut comparison = match tf32 {
                true => rounding(&graph),
                false => Differential::new(&graph),
            };
            comparison.target = CudaTarget { tf32, ..gpu.target() };
            let (found, names) = on_gpu(&gpu, &comparison, &graph);
            let is_taken = |name: &&String| name.starts_with("cuDNN ");
            let count = names.iter().filter(is_taken).count();
            (taken, asked) = (taken + count, asked + 3);
            if let Err(error) = comparison.compare(&found) {
                wrong.push(format!(
                    "{what}, {dtype}, TF32 {tf32}, channels last {last}: {error}, of {names:?}"
                ));
            }
        }
    }
    println!("cuDNN computes {taken} of {asked} convolutions");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(
        taken > asked / 2,
        "cuDNN computes {taken} of {asked} convolutions"
    );
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

/// A pool, and the type of its indices.
#[derive(Clone, Copy)]
struct Pool {
    images: usize,
    channels: usize,
    input: &'static [usize],
    size: &'static [usize],
    stride: &'static [usize],
    low: &'static [usize],
    high: &'static [usize],
    dilation: &'static [usize],
    ceil: bool,
    padding: bool,
    indices: &'static str,
}

impl Pool {
    fn window(&self) -> Window {
        let dims = |list: &[usize]| list.iter().copied().collect();
        Window {
            size: dims(self.size),
            stride: dims(self.stride),
            pad_low: dims(self.low),
            pad_high: dims(self.high),
            dilation: dims(self.dilation),
            ceil_mode: self.ceil,
        }
    }

    fn output(&self) -> Vec<usize> {
        let window = self.window();
        (0..self.input.len())
            .map(|axis| window.output_extent(axis, self.input[axis]).unwrap())
            .collect()
    }

    /// All pools and their gradients; channels first, or last.
    fn graph(&self, dtype: &str, last: bool) -> Graph {
        let dims = self.input.len();
        let window = |dilation: &[usize]| {
            let [size, stride, low, high] = [self.size, self.stride, self.low, self.high].map(list);
            let ceil = if self.ceil { ", ceil_mode=true" } else { "" };
            format!(
                "size={size}, stride={stride}, pad_low={low}, pad_high={high}, dilation={}{ceil}",
                list(dilation)
            )
        };
        let input = list(self.input);
        let x = format!("[{},{},{}]", self.images, self.channels, bare(self.input));
        let y = format!("[{},{},{}]", self.images, self.channels, bare(&self.output()));
        let (x, i, y) = (
            format!("{dtype}{x}"),
            format!("{}{y}", self.indices),
            format!("{dtype}{y}"),
        );
        let plain = window(self.dilation);
        let mean = format!(
            "{plain}{}",
            if self.padding {
                ", count_include_pad=true"
            } else {
                ""
            }
        );
        let mut text = format!("graph @pool {{\n  %0 = parameter 0 : {x}\n  %1 = parameter 1 : {y}\n");
        let (mut image, mut gradient) = ("0", "1");
        if last {
            text += &same("2", "0", &x, dims);
            text += &same("3", "1", &y, dims);
            (image, gradient) = ("2", "3");
        }
        let _ = writeln!(text, "  %4 = max_pool %{image} {{{plain}}} : {y}");
        let _ = writeln!(
            text,
            "  %5, %6 = max_pool_with_indices %{image} {{{plain}}} : {y}, {i}"
        );
        let _ = writeln!(
            text,
            "  %7 = max_pool_grad %{gradient}, %6 {{input={input}}} : {x}"
        );
        let _ = writeln!(text, "  %8 = avg_pool %{image} {{{mean}}} : {y}");
        let _ = writeln!(
            text,
            "  %9 = avg_pool_grad %{gradient} {{{mean}, input={input}}} : {x}"
        );
        // In one layout the indices are a result, in the other they are not and are stored as images are.
        if last {
            for (name, of, ty) in [
                ("10", "4", &y),
                ("11", "5", &y),
                ("12", "7", &x),
                ("13", "8", &y),
                ("14", "9", &x),
            ] {
                text += &same(name, of, ty, dims);
            }
            text += "  return %10, %11, %12, %13, %14\n}";
        } else {
            text += "  return %4, %5, %6, %7, %8, %9\n}";
        }
        parse(&text)
    }
}

fn pools() -> Vec<(&'static str, Pool)> {
    let usual = Pool {
        images: 2,
        channels: 8,
        input: &[9, 11],
        size: &[3, 3],
        stride: &[2, 2],
        low: &[1, 1],
        high: &[1, 1],
        dilation: &[1, 1],
        ceil: false,
        padding: true,
        indices: "i64",
    };
    vec![
        ("the usual", usual),
        (
            "odd channels",
            Pool {
                channels: 7,
                padding: false,
                indices: "i32",
                ..usual
            },
        ),
        (
            "one channel",
            Pool {
                channels: 1,
                indices: "u32",
                ..usual
            },
        ),
        (
            "side by side",
            Pool {
                channels: 12,
                input: &[8, 6],
                size: &[2, 2],
                low: &[0, 0],
                high: &[0, 0],
                ..usual
            },
        ),
        (
            "overlapping",
            Pool {
                channels: 4,
                stride: &[1, 1],
                padding: false,
                ..usual
            },
        ),
        (
            "rounded up",
            Pool {
                input: &[8, 10],
                low: &[0, 1],
                high: &[0, 1],
                ceil: true,
                padding: false,
                ..usual
            },
        ),
        (
            "rounded up, padding counted",
            Pool {
                channels: 3,
                input: &[8, 10],
                stride: &[3, 2],
                high: &[0, 1],
                ceil: true,
                ..usual
            },
        ),
        (
            "padding alone",
            Pool {
                input: &[4, 5],
                size: &[2, 2],
                low: &[2, 3],
                high: &[2, 2],
                padding: false,
                ..usual
            },
        ),
        (
            "gaps between windows",
            Pool {
                size: &[2, 1],
                stride: &[3, 4],
                low: &[0, 0],
                high: &[0, 0],
                ..usual
            },
        ),
        (
            "the whole image",
            Pool {
                channels: 20,
                input: &[5, 7],
                size: &[5, 7],
                stride: &[1, 1],
                low: &[0, 0],
                high: &[0, 0],
                ..usual
            },
        ),
        (
            "small indices",
            Pool {
                channels: 2,
                input: &[17, 18],
                indices: "u8",
                ..usual
            },
        ),
        (
            "one dimension",
            Pool {
                input: &[19],
                size: &[4],
                stride: &[3],
                low: &[2],
                high: &[1],
                dilation: &[1],
                ..usual
            },
        ),
        (
            "three dimensions",
            Pool {
                channels: 4,
                input: &[5, 4, 6],
                size: &[2, 3, 2],
                stride: &[2, 1, 2],
                low: &[1, 1, 0],
                high: &[0, 1, 1],
                dilation: &[1, 1, 1],
                ..usual
            },
        ),
        (
            "dilation",
            Pool {
                input: &[9, 12],
                low: &[1, 2],
                high: &[2, 1],
                dilation: &[2, 3],
                stride: &[1, 2],
                ..usual
            },
        ),
    ]
}

#[test]
fn pools_and_their_gradients() {
    let mut items = Vec::new();
    for (number, (what, pool)) in pools().into_iter().enumerate() {
        if what == "small indices" {
            // Indices of 8 bits wrap, which only the forward pool may meet.
            continue;
        }
        items.push((what, pool, FLOATS[number % 4], true));
        // Integers every second time.
        let first = match number % 2 {
            0 => FLOATS[(number / 2 + 1) % 4],
            _ => ["i32", "u8", "i64", "i16", "u64"][number / 2 % 5],
        };
        items.push((what, pool, first, false));
    }
    each(&items, |&(what, pool, dtype, last)| {
        let layout = if last { "last" } else { "first" };
        check(
            &pool.graph(dtype, last),
            &format!("pool {what}, {dtype}, channels {layout}"),
        );
    });
}

/// Gradients of a pool from indices that no pool of the graph made: many of one place, in any order.
#[test]
fn gradients_from_any_indices() {
    let items = [
        ("f32", "i64", 1000),
        ("bf16", "i32", 3),
        ("i32", "i64", 1),
        ("f64", "u8", 70_000),
    ];
    each(&items, |&(dtype, indices, channels)| {
        let (y, x) = ([2, channels, 3, 2], [5, 4]);
        let shape = bare(&y);
        let graph = parse(&format!(
            "graph @indices {{\n  %0 = parameter 0 : {dtype}[{shape}]\n  %1 = parameter 1 : {indices}[{shape}]\n  \
             %2 = max_pool_grad %0, %1 {{input={}}} : {dtype}[2,{channels},{}]\n  return %2\n}}",
            list(&x),
            bare(&x)
        ));
        let types: Vec<_> = graph
            .parameters()
            .iter()
            .map(|&value| graph.ty(value).clone())
            .collect();
        let values = (0..types[0].numel()).map(|i| ((i * 7919) % 23) as i64 - 11);
        let places = (0..types[1].numel()).map(|i| ((i * i * 31 + i / 3) % 20 / 3) as i64);
        let of = |number: usize, list: Vec<i64>| {
            let ty: &kiln_graph::TensorType = &types[number];
            match ty.dtype.is_float() {
                true => HostTensor::from_floats(ty.dtype, ty.shape.clone(), list.iter().map(|&x| x as f64)),
                false => HostTensor::from_ints(ty.dtype, ty.shape.clone(), list),
            }
        };
        let tensors = vec![of(0, values.collect()), of(1, places.collect())];
        let outcome = Differential::new(&graph).arguments(tensors, Vec::new()).check();
        assert_eq!(outcome, Ok(Outcome::Same), "{dtype} at {indices}");
    });
}

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
