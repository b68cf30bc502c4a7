//! Convolutions and pools of every float type, at odd sizes: against the interpreter, the same bits for any
//! number of threads, and in tiles and vectors rather than element by element.

mod support;

use kiln_cpu::{Isa, Toolchain};
use kiln_graph::op::{BinaryOp, ConvDims, Dims, Op, Window};
use kiln_graph::{DType, Graph, Provenance, Shape, TensorType, Value};
use support::{Setup, check_relative};

/// Types, and how far results may be from those of f64, relative to the largest element.
const TYPES: [(DType, f64); 4] = [
    (DType::F64, 1e-13),
    (DType::F32, 1e-5),
    (DType::F16, 4e-3),
    (DType::BF16, 3e-2),
];

/// A convolution: images, extents, channels, kernel, stride, padding, dilation, groups.
struct Case {
    images: usize,
    extents: &'static [usize],
    channels: [usize; 2],
    kernel: usize,
    stride: usize,
    pad: usize,
    dilation: usize,
    groups: usize,
    /// Element type of the results, where it is not the operands'.
    result: Option<DType>,
}

impl Case {
    /// Of one image.
    fn new(extents: &'static [usize], channels: [usize; 2], [kernel, stride, pad]: [usize; 3]) -> Self {
        Self {
            images: 1,
            extents,
            channels,
            kernel,
            stride,
            pad,
            dilation: 1,
            groups: 1,
            result: None,
        }
    }

    fn dims(&self) -> ConvDims {
        let all = |x: usize| self.extents.iter().map(|_| x).collect::<Dims>();
        ConvDims {
            stride: all(self.stride),
            pad_low: all(self.pad),
            pad_high: all(self.pad),
            dilation: all(self.dilation),
            groups: self.groups,
            result: self.result,
        }
    }

    /// The convolution and both gradients: of images in the scheduler's layout, or (`plain`) of arguments.
    fn graph(&self, dtype: DType, plain: bool) -> Graph {
        let at = Provenance::default();
        let mut graph = Graph::new("images");
        let of = |shape: Vec<usize>| TensorType {
            dtype,
            shape: Shape::from(&shape[..]),
        };
        let kernel: Dims = self.extents.iter().map(|_| self.kernel).collect();
        let [from, to] = self.channels;
        let x = graph.parameter(of([&[self.images, from], self.extents].concat()));
        let w = graph.parameter(of([&[to, from / self.groups], &kernel[..]].concat()));
        let add =
            |graph: &mut Graph, op: Op, inputs: &[Value]| graph.add_node(op, inputs, at.clone()).unwrap()[0];
        let first = if plain {
            x
        } else {
            // A kernel of one element for each channel makes an image of the scheduler's layout.
            let shape: Vec<usize> = [from, 1]
                .into_iter()
                .chain(self.extents.iter().map(|_| 1))
                .collect();
            let own = graph.parameter(of(shape));
            let one = Self {
                kernel: 1,
                stride: 1,
                pad: 0,
                dilation: 1,
                groups: from,
                ..*self
            };
            add(&mut graph, Op::Conv(one.dims()), &[x, own])
        };
        let y = add(&mut graph, Op::Conv(self.dims()), &[first, w]);
        let dy = if plain {
            let shape = graph.shape(y).to_vec();
            graph.parameter(of(shape))
        } else {
            halved(&mut graph, y)
        };
        let input = Op::ConvInputGrad {
            conv: self.dims(),
            input: self.extents.iter().copied().collect(),
        };
        let dx = add(&mut graph, input, &[dy, w]);
        let weight = Op::ConvWeightGrad {
            conv: self.dims(),
            kernel,
        };
        let dw = add(&mut graph, weight, &[first, dy]);
        for value in [y, dx, dw] {
            let result = if plain { value } else { halved(&mut graph, value) };
            graph.output(result, None);
        }
        graph
    }
}

/// Half of each element, which is exact. The graph's results are row-major, but the values that they are
/// computed from need not be.
fn halved(graph: &mut Graph, value: Value) -> Value {
    let at = Provenance::default();
    let half = graph.full(0.5, &graph.ty(value).clone(), &at).unwrap();
    graph.binary(BinaryOp::Mul, value, half, &at).unwrap()
}

/// The machine's instruction set or one that it contains, in turns.
fn instruction_set(number: usize) -> Isa {
    let sets = Toolchain::detect().unwrap().isa().contained();
    sets[number % sets.len()]
}

/// Compares with the interpreter; the sources must contain `mark`.
fn check(graph: &Graph, what: &str, isa: Isa, tolerance: f64, mark: &str) {
    check_relative(graph, what, tolerance, |setup| setup.target.isa = isa);
    let mut setup = Setup::detect(2);
    setup.target.isa = isa;
    let sources = setup.compile(graph).unwrap().code;
    assert!(
        sources
            .iter()
            .any(|file| file.name.ends_with(".c") && file.text.contains(mark)),
        "{what}: no source has `{mark}`"
    );
}

#[test]
fn convolutions_and_their_gradients() {
    let two = |groups, case: Case| Case {
        images: 2,
        groups,
        ..case
    };
    let wide = [
        // Many channels and pixels: Winograd's form for f32 registers.
        two(1, Case::new(&[13, 11], [33, 35], [3, 1, 1])),
        two(1, Case::new(&[17, 15], [19, 34], [3, 2, 1])),
        two(1, Case::new(&[23, 9], [3, 18], [5, 2, 2])),
        Case {
            dilation: 2,
            ..two(2, Case::new(&[9, 10], [38, 42], [3, 1, 2]))
        },
        // A product, and few pixels with large weights.
        two(1, Case::new(&[7, 5], [21, 19], [1, 1, 0])),
        two(1, Case::new(&[4, 3], [70, 66], [3, 1, 1])),
        two(1, Case::new(&[37], [17, 20], [4, 3, 1])),
        two(1, Case::new(&[5, 6, 7], [17, 18], [3, 1, 1])),
    ];
    let narrow = [
        two(37, Case::new(&[9, 11], [37, 37], [3, 1, 1])),
        two(19, Case::new(&[12, 9], [19, 19], [3, 2, 1])),
        two(5, Case::new(&[7, 9], [10, 10], [3, 1, 1])),
    ];
    let cases = wide
        .iter()
        .map(|case| (case, true))
        .chain(narrow.iter().map(|case| (case, false)));
    for (number, (case, tiles)) in cases.enumerate() {
        // Each case in two of the types, each type in every other pair of cases.
        let types = TYPES.into_iter().enumerate();
        for (position, (dtype, tolerance)) in types.filter(|(position, _)| (number / 2 + position) % 2 == 0) {
            let plain = (number + position) % 2 == 1;
            let mark = match (dtype, tiles) {
                (DType::F64, true) => "kiln_tile_f64_",
                (DType::F64, false) => "vd_fma(",
                (_, true) => "kiln_tile_",
                (_, false) => "vf_fma(",
            };
            let results = match plain && dtype != dtype.compute() {
                true => [(None, tolerance), (Some(dtype.compute()), 1e-5)].to_vec(),
                false => vec![(None, tolerance)],
            };
            for (result, tolerance) in results {
                let graph = Case { result, ..*case }.graph(dtype, plain);
                let what = format!(
                    "convolution {number} of {dtype}{}",
                    if plain { ", row-major" } else { "" }
                );
                check(
                    &graph,
                    &what,
                    instruction_set(number + position / 2),
                    tolerance,
                    mark,
                );
            }
        }
    }
}

#[test]
fn pools_and_their_gradients() {
    let window_of = |size: usize, stride: usize, pad: usize| {
        let two = |x: usize| [x, x].into_iter().collect::<Dims>();
        Window {
            size: two(size),
            stride: two(stride),
            pad_low: two(pad),
            pad_high: two(pad),
            dilation: two(1),
            ceil_mode: false,
        }
    };
    for (number, (channels, [height, width], window)) in [
        (16, [9, 11], window_of(3, 2, 1)),
        (37, [8, 7], window_of(2, 2, 0)),
        (19, [13, 12], window_of(3, 1, 1)),
    ]
    .into_iter()
    .enumerate()
    {
        for ((dtype, tolerance), plain) in TYPES.into_iter().flat_map(|it| [(it, false), (it, true)]) {
            let at = Provenance::default();
            let mut graph = Graph::new("pools");
            let of = |shape: &[usize]| TensorType {
                dtype,
                shape: Shape::from(shape),
            };
            let mut x = graph.parameter(of(&[2, channels, height, width]));
            if !plain {
                // Changes no element, but makes an image of the scheduler's layout.
                let same = Op::AvgPool {
                    window: window_of(1, 1, 0),
                    count_include_pad: false,
                };
                x = graph.add_node(same, &[x], at.clone()).unwrap()[0];
            }
            let places = Op::MaxPoolWithIndices {
                window: window.clone(),
                dtype: [DType::I64, DType::I32, DType::U16][number],
            };
            let largest = graph.add_node(places, &[x], at.clone()).unwrap().to_vec();
            let input: Dims = [height, width].into_iter().collect();
            let back = Op::MaxPoolGrad { input: input.clone() };
            let mean = Op::AvgPool {
                window: window.clone(),
                count_include_pad: number == 0,
            };
            let spread = Op::AvgPoolGrad {
                window: window.clone(),
                count_include_pad: number == 0,
                input,
            };
            let one =
                |graph: &mut Graph, op, inputs: &[Value]| graph.add_node(op, inputs, at.clone()).unwrap()[0];
            let d_largest = one(&mut graph, back, &[largest[0], largest[1]]);
            let means = one(&mut graph, mean, &[x]);
            let d_means = one(&mut graph, spread, &[means]);
            for value in [largest[0], d_largest, means] {
                let result = if plain { value } else { halved(&mut graph, value) };
                graph.output(result, None);
            }
            graph.output(d_means, None);
            let mark = if dtype == DType::F64 {
                "vd_select"
            } else {
                "vf_select"
            };
            let what = format!(
                "pool {number} of {dtype}{}",
                if plain { ", row-major" } else { "" }
            );
            check(&graph, &what, instruction_set(number), tolerance, mark);
        }
    }
}
