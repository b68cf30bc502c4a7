//! Graphs of convolutions and pools, whose values the scheduler stores channels-last: against the
//! interpreter, and the same bits for any number of threads.

mod support;

use kiln_graph::op::{BinaryOp, CompareOp, ConvDims, Op, ReduceOp, UnaryOp, Window};
use kiln_graph::{DType, Graph, Provenance, Shape, TensorType, Value};
use support::{Setup, check_relative};

/// Builds graphs of images without repeating types.
struct Net {
    graph: Graph,
    at: Provenance,
}

impl Net {
    fn new() -> Self {
        Self {
            graph: Graph::new("images"),
            at: Provenance::default(),
        }
    }

    fn parameter(&mut self, shape: &[usize]) -> Value {
        self.graph.parameter(TensorType {
            dtype: DType::F32,
            shape: Shape::from(shape),
        })
    }

    fn add(&mut self, op: Op, inputs: &[Value]) -> Value {
        self.graph.add_node(op, inputs, self.at.clone()).unwrap()[0]
    }

    fn binary(&mut self, op: BinaryOp, a: Value, b: Value) -> Value {
        self.graph.binary(op, a, b, &self.at).unwrap()
    }

    /// A value for each channel, at every place of an image of the shape of `like`.
    fn by_channel(&mut self, x: Value, like: Value) -> Value {
        let shape = self.graph.shape(like).clone();
        self.add(
            Op::Broadcast {
                shape,
                dims: [1].into_iter().collect(),
            },
            &[x],
        )
    }

    fn relu(&mut self, x: Value) -> Value {
        let ty = self.graph.ty(x).clone();
        let zero = self.graph.full(0.0, &ty, &self.at);
        let zero = zero.unwrap();
        self.binary(BinaryOp::Max, x, zero)
    }

    /// Sum over images and places.
    fn by_channel_sum(&mut self, x: Value) -> Value {
        let axes = (0..self.graph.shape(x).rank())
            .filter(|&axis| axis != 1)
            .collect();
        self.add(
            Op::Reduce {
                op: ReduceOp::Sum,
                axes,
            },
            &[x],
        )
    }

    fn output(&mut self, value: Value) {
        self.graph.output(value, None);
    }
}

fn conv(stride: usize, pad: usize, dilation: usize, groups: usize) -> ConvDims {
    let two = |x: usize| [x, x].into_iter().collect();
    ConvDims {
        stride: two(stride),
        pad_low: two(pad),
        pad_high: two(pad),
        dilation: two(dilation),
        groups,
        result: None,
    }
}

fn window(size: usize, stride: usize, pad: usize) -> Window {
    let two = |x: usize| [x, x].into_iter().collect();
    Window {
        size: two(size),
        stride: two(stride),
        pad_low: two(pad),
        pad_high: two(pad),
        dilation: two(1),
        ceil_mode: false,
    }
}

fn check(graph: &Graph, what: &str, tolerance: f64) {
    check_relative(graph, what, tolerance, |_| ());
}

/// Forward and backward of a convolution with normalisation, a pool with indices, a depthwise and a 1x1
/// convolution with a residual, a concatenation and a mean.
#[test]
fn layers_and_their_gradients() {
    for (case, &(images, channels, size, pool)) in
        [(2, 16, 9, 3), (3, 5, 12, 2), (1, 24, 7, 3), (2, 33, 16, 2)]
            .iter()
            .enumerate()
    {
        let mut net = Net::new();
        let x = net.parameter(&[images, 3, size, size]);
        let kernel = net.parameter(&[channels, 3, 3, 3]);
        let (scale, offset) = (net.parameter(&[channels]), net.parameter(&[channels]));
        let depthwise = net.parameter(&[channels, 1, 3, 3]);
        let mix = net.parameter(&[channels, channels, 1, 1]);

        let y = net.add(Op::Conv(conv(1, 1, 1, 1)), &[x, kernel]);
        let sums = net.by_channel_sum(y);
        let (scales, offsets) = (net.by_channel(scale, y), net.by_channel(offset, y));
        let scaled = net.binary(BinaryOp::Mul, y, scales);
        let moved = net.binary(BinaryOp::Add, scaled, offsets);
        let active = net.relu(moved);
        let of = window(pool, 2, pool / 2);
        let pooled = net
            .graph
            .add_node(
                Op::MaxPoolWithIndices {
                    window: of.clone(),
                    dtype: DType::I64,
                },
                &[active],
                net.at.clone(),
            )
            .unwrap()
            .to_vec();
        let (pooled, places) = (pooled[0], pooled[1]);
        let plain = net.add(Op::MaxPool(of), &[active]);
        let filtered = net.add(Op::Conv(conv(1, 1, 1, channels)), &[pooled, depthwise]);
        let mixed = net.add(Op::Conv(conv(1, 0, 1, 1)), &[filtered, mix]);
        let residual = net.binary(BinaryOp::Add, mixed, plain);
        let both = net.add(Op::Concat { axis: 1 }, &[residual, filtered]);
        let mean = Op::AvgPool {
            window: window(3, 1, 1),
            count_include_pad: case % 2 == 0,
        };
        let averaged = net.add(mean, &[both]);

        let shape = net.graph.shape(both).clone();
        let spread = Op::AvgPoolGrad {
            window: window(3, 1, 1),
            count_include_pad: case % 2 == 0,
            input: shape[2..].iter().copied().collect(),
        };
        let d_both = net.add(spread, &[averaged]);
        let slice = Op::Slice {
            starts: [0; 4].into_iter().collect(),
            limits: [images, channels, shape[2], shape[3]].into_iter().collect(),
            steps: [1; 4].into_iter().collect(),
        };
        let d_mixed = net.add(slice, &[d_both]);
        let d_mix = net.add(
            Op::ConvWeightGrad {
                conv: conv(1, 0, 1, 1),
                kernel: [1, 1].into_iter().collect(),
            },
            &[filtered, d_mixed],
        );
        let input = |extent: usize| [extent, extent].into_iter().collect();
        let d_filtered = net.add(
            Op::ConvInputGrad {
                conv: conv(1, 0, 1, 1),
                input: input(shape[2]),
            },
            &[d_mixed, mix],
        );
        let d_depthwise = net.add(
            Op::ConvWeightGrad {
                conv: conv(1, 1, 1, channels),
                kernel: [3, 3].into_iter().collect(),
            },
            &[pooled, d_filtered],
        );
        let d_pooled = net.add(
            Op::ConvInputGrad {
                conv: conv(1, 1, 1, channels),
                input: input(shape[2]),
            },
            &[d_filtered, depthwise],
        );
        let d_active = net.add(Op::MaxPoolGrad { input: input(size) }, &[d_pooled, places]);
        let d_moved = net.binary(BinaryOp::Mul, d_active, active);
        let d_offset = net.by_channel_sum(d_moved);
        let product = net.binary(BinaryOp::Mul, d_moved, y);
        let d_scale = net.by_channel_sum(product);
        let d_kernel = net.add(
            Op::ConvWeightGrad {
                conv: conv(1, 1, 1, 1),
                kernel: [3, 3].into_iter().collect(),
            },
            &[x, d_moved],
        );
        let total = net.by_channel_sum(averaged);
        for value in [
            sums,
            total,
            d_mix,
            d_depthwise,
            d_offset,
            d_scale,
            d_kernel,
            residual,
            places,
        ] {
            net.output(value);
        }
        check(&net.graph, &format!("case {case}"), 3e-5);
    }
}

/// Batch normalisation as programs write it (statistics through a transpose and a reshape, a division by a
/// root), activation, and the gradient that automatic differentiation gives; the channels have means far from
/// zero, which sums of squares must bear.
#[test]
fn normalisation_and_its_gradient() {
    for (case, &(images, channels, size)) in [(2, 16, 9), (3, 7, 12), (1, 40, 5)].iter().enumerate() {
        let mut net = Net::new();
        let x = net.parameter(&[images, 4, size, size]);
        let kernel = net.parameter(&[channels, 4, 3, 3]);
        let (scale, offset, far) = (
            net.parameter(&[channels]),
            net.parameter(&[channels]),
            net.parameter(&[channels]),
        );
        let second = net.parameter(&[channels, channels, 1, 1]);
        let raw = net.add(Op::Conv(conv(1, 1, 1, 1)), &[x, kernel]);
        let fars = net.by_channel(far, raw);
        let large = net.graph.full(8.0, &net.graph.ty(raw).clone(), &net.at).unwrap();
        let fars = net.binary(BinaryOp::Mul, fars, large);
        let y = net.binary(BinaryOp::Add, raw, fars);
        let count = images * size * size;

        let mean_of = |net: &mut Net, value: Value| {
            let turned = net.add(Op::Transpose([1, 0, 2, 3].into_iter().collect()), &[value]);
            let rows = net
                .graph
                .reshape(turned, Shape::from(&[channels, count][..]), &net.at)
                .unwrap();
            let sum = net.add(
                Op::Reduce {
                    op: ReduceOp::Sum,
                    axes: [1].into_iter().collect(),
                },
                &[rows],
            );
            let counts = net
                .graph
                .full(count as f64, &net.graph.ty(sum).clone(), &net.at)
                .unwrap();
            net.binary(BinaryOp::Div, sum, counts)
        };
        let mean = mean_of(&mut net, y);
        let means = net.by_channel(mean, y);
        let centred = net.binary(BinaryOp::Sub, y, means);
        let squares = net.binary(BinaryOp::Mul, centred, centred);
        let variance = mean_of(&mut net, squares);
        let small = net
            .graph
            .full(1e-3, &net.graph.ty(variance).clone(), &net.at)
            .unwrap();
        let shifted = net.binary(BinaryOp::Add, variance, small);
        let root = net.graph.unary(UnaryOp::Sqrt, shifted, &net.at).unwrap();
        let roots = net.by_channel(root, y);
        let unit = net.binary(BinaryOp::Div, centred, roots);
        let (scales, offsets) = (net.by_channel(scale, y), net.by_channel(offset, y));
        let scaled = net.binary(BinaryOp::Mul, unit, scales);
        let moved = net.binary(BinaryOp::Add, scaled, offsets);
        let zeros = net.graph.full(0.0, &net.graph.ty(y).clone(), &net.at).unwrap();
        let off = net.graph.compare(CompareOp::Le, moved, zeros, &net.at).unwrap();
        let active = net.add(Op::Select, &[off, zeros, moved]);
        let result = net.add(Op::Conv(conv(1, 0, 1, 1)), &[active, second]);

        // The gradient of half the sum of squares of the result.
        let input = [size, size].into_iter().collect();
        let d_active = net.add(
            Op::ConvInputGrad {
                conv: conv(1, 0, 1, 1),
                input,
            },
            &[result, second],
        );
        let d_moved = net.add(Op::Select, &[off, zeros, d_active]);
        let d_offset = net.by_channel_sum(d_moved);
        let by_unit = net.binary(BinaryOp::Mul, d_moved, unit);
        let d_scale = net.by_channel_sum(by_unit);
        let d_unit = net.binary(BinaryOp::Mul, d_moved, scales);
        let d_direct = net.binary(BinaryOp::Div, d_unit, roots);
        let squared = net.binary(BinaryOp::Mul, roots, roots);
        let share = net.binary(BinaryOp::Div, centred, squared);
        let product = net.binary(BinaryOp::Mul, d_unit, share);
        let d_root = net.by_channel_sum(product);
        let halved = net.binary(BinaryOp::Div, d_root, root);
        let spread = net.by_channel(halved, y);
        let pulled = net.binary(BinaryOp::Mul, centred, spread);
        let twice = net.binary(BinaryOp::Add, pulled, pulled);
        let d_centred = net.binary(BinaryOp::Sub, d_direct, twice);
        let total = net.by_channel_sum(d_centred);
        let totals = net.by_channel(total, y);
        let d_y = net.binary(BinaryOp::Sub, d_centred, totals);
        let d_kernel = net.add(
            Op::ConvWeightGrad {
                conv: conv(1, 1, 1, 1),
                kernel: [3, 3].into_iter().collect(),
            },
            &[x, d_y],
        );
        let step = net.binary(BinaryOp::Sub, kernel, d_kernel);
        for value in [mean, variance, result, d_offset, d_scale, d_root, step] {
            net.output(value);
        }
        check(&net.graph, &format!("case {case}"), 1e-4);
    }
}

#[test]
fn windows_that_lie_in_the_padding_read_zeros() {
    // With this stride the second window begins behind the image, and all elements are left of the first.
    let one = "stride=[8], pad_low=[3], pad_high=[3], dilation=[1], groups=1";
    let three = "stride=[16], pad_low=[6], pad_high=[6], dilation=[1], groups=1";
    for text in [
        format!(
            "%x = parameter 0 : f32[2,20,1]
             %w = parameter 1 : f32[24,20,1]
             %c = conv %x, %w {{{one}}} : f32[2,24,1]"
        ),
        format!(
            "%x = parameter 0 : f32[2,20,1]
             %d = parameter 1 : f32[2,24,1]
             %c = conv_weight_grad %x, %d {{{one}, kernel=[1]}} : f32[24,20,1]"
        ),
        format!(
            "%x = parameter 0 : f32[2,20,2]
             %w = parameter 1 : f32[24,20,3]
             %c = conv %x, %w {{{three}}} : f32[2,24,1]"
        ),
    ] {
        check(&parsed(&text, "%c"), &text, 1e-5);
    }
}

#[test]
fn windows_may_be_as_large_as_the_image() {
    // The arrays that a thread had on its stack for these grew with the window.
    let pool = "size=[384,384], stride=[384,384], pad_low=[0,0], pad_high=[0,0], dilation=[1,1]";
    let conv = "stride=[1,1], pad_low=[0,0], pad_high=[0,0], dilation=[1,1]";
    for (text, results) in [
        (
            format!(
                "%x = parameter 0 : f32[1,1,384,384]
                 %w = parameter 1 : f32[16,1,1,1]
                 %d = parameter 2 : f32[1,16,1,1]
                 %c = conv %x, %w {{{conv}, groups=1}} : f32[1,16,384,384]
                 %y, %i = max_pool_with_indices %c {{{pool}}} : f32[1,16,1,1], i64[1,16,1,1]
                 %dc = max_pool_grad %d, %i {{input=[384,384]}} : f32[1,16,384,384]
                 %dw = conv_weight_grad %x, %dc {{{conv}, groups=1, kernel=[1,1]}} : f32[16,1,1,1]"
            ),
            "%y, %dw",
        ),
        (
            format!(
                "%x = parameter 0 : f32[1,2,800,800]
                 %d = parameter 1 : f32[1,2,1,1]
                 %dw = conv_weight_grad %x, %d {{{conv}, groups=2, kernel=[800,800]}} : f32[2,1,800,800]"
            ),
            "%dw",
        ),
    ] {
        check(&parsed(&text, results), &text, 1e-4);
    }
}

#[test]
fn poolings_of_large_windows_are_loops() {
    // Overlapping and not, with the index, and the means' gradients.
    let line = "size=[70], stride=[35], pad_low=[9], pad_high=[9], dilation=[2]";
    let plane = "size=[9,10], stride=[4,5], pad_low=[1,0], pad_high=[2,3], dilation=[1,2]";
    // Means have no dilation.
    let means_of_a_line = line.replace("dilation=[2]", "dilation=[1]");
    let means_of_a_plane = plane.replace("dilation=[1,2]", "dilation=[1,1]");
    for (text, results) in [
        (
            format!(
                "%x = parameter 0 : f32[2,3,300]
                 %d = parameter 1 : f32[2,3,8]
                 %y = max_pool %x {{{line}}} : f32[2,3,6]
                 %z, %i = max_pool_with_indices %x {{{line}}} : f32[2,3,6], i64[2,3,6]
                 %a = avg_pool %x {{{means_of_a_line}, count_include_pad=false}} : f32[2,3,8]
                 %g = avg_pool_grad %d {{{means_of_a_line}, count_include_pad=false, input=[300]}} : f32[2,3,300]"
            ),
            "%y, %z, %i, %a, %g",
        ),
        (
            format!(
                "%x = parameter 0 : f32[2,3,21,40]
                 %d = parameter 1 : f32[2,3,4,7]
                 %y, %i = max_pool_with_indices %x {{{plane}}} : f32[2,3,4,5], i64[2,3,4,5]
                 %a = avg_pool %x {{{means_of_a_plane}, count_include_pad=true}} : f32[2,3,4,7]
                 %g = avg_pool_grad %d {{{means_of_a_plane}, count_include_pad=true, input=[21,40]}} : f32[2,3,21,40]"
            ),
            "%y, %i, %a, %g",
        ),
    ] {
        check(&parsed(&text, results), &text, 1e-5);
    }
}

#[test]
fn the_mean_of_nothing_is_zero() {
    let text = "%x = parameter 0 : f32[1,1,2,2,2]
                %y = avg_pool %x {size=[1,1,1], stride=[1,1,1], pad_low=[1,0,0], pad_high=[0,0,0], dilation=[1,1,1]} : f32[1,1,3,2,2]";
    check(&parsed(text, "%y"), text, 1e-6);
}

/// Neither the sum nor the number of elements fits the type.
#[test]
fn means_of_narrow_integers_are_computed_in_64_bits() {
    let window = "size=[300], stride=[100], pad_low=[0], pad_high=[0], dilation=[1], count_include_pad=false";
    for dtype in [DType::U8, DType::I8, DType::I16, DType::U32, DType::I64] {
        let text = format!(
            "%x = parameter 0 : {dtype}[2,3,600]
             %d = parameter 1 : {dtype}[2,3,4]
             %y = avg_pool %x {{{window}}} : {dtype}[2,3,4]
             %g = avg_pool_grad %d {{{window}, input=[600]}} : {dtype}[2,3,600]"
        );
        check(&parsed(&text, "%y, %g"), &text, 1e-6);
    }
}

/// A graph of these lines.
fn parsed(lines: &str, results: &str) -> Graph {
    let text = format!("graph @g {{\n{lines}\nreturn {results}\n}}");
    Graph::parse(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// A kernel has working memory for no more planes than there are, however many threads it may meet.
#[test]
fn poolings_of_few_planes_take_no_memory_for_more() {
    let text = "%d = parameter 0 : bf16[1,1,256,256]
         %i = parameter 1 : i64[1,1,256,256]
         %g = max_pool_grad %d, %i {input=[512,512]} : bf16[1,1,512,512]";
    let bytes = |threads: usize| {
        let step = Setup::detect(threads).compile(&parsed(text, "%g")).unwrap();
        step.plan.arena_bytes
    };
    let (plane, few) = (512 * 512 * 4, bytes(1));
    assert!(few >= plane && few < 2 * plane, "{few} bytes");
    assert_eq!(bytes(16), few);
}

/// The templates number places in 32 bits; what a plane has more of is for plain loops.
#[test]
fn places_of_large_planes_are_numbered_in_64_bits() {
    let window = "size=[2,2], stride=[2,2], pad_low=[0,0], pad_high=[0,0], dilation=[1,1]";
    for (height, is_plain) in [(65536, true), (32766, false)] {
        let (x, y) = (
            format!("[1,1,{height},65536]"),
            format!("[1,1,{},32768]", height / 2),
        );
        let text = format!(
            "%x = parameter 0 : f32{x}
             %y, %i = max_pool_with_indices %x {{{window}}} : f32{y}, i64{y}"
        );
        let step = Setup::detect(2).compile(&parsed(&text, "%y, %i")).unwrap();
        let counts = step
            .code
            .iter()
            .any(|file| file.text.contains("int64_t at = -1;"));
        assert_eq!(counts, is_plain, "{x}");
    }
}
