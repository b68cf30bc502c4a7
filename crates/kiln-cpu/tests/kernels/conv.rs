//! Convolutions and their gradients, of random geometries and layouts.

use kiln_cpu::kernels::conv::{
    self, ConvSpec, Geometry, Image, ImageAxis, PixelEpilogue, Spatial, WeightGradSpec,
};
use kiln_cpu::kernels::element::Storage;
use kiln_cpu::kernels::{KernelText, Param, Width};
use kiln_cpu::{Isa, Toolchain};

use crate::harness::{Random, distance, from_bf16, instruction_sets, run, to_bf16};

#[derive(Debug, Clone)]
struct Case {
    geometry: Geometry,
    /// Whether input and output are channels-last (or channels-first).
    last: [bool; 2],
    /// Whether the images are computed while they are read: `relu(x)`.
    computed: bool,
    /// How images and weight are stored; results are f32.
    storage: Storage,
}

/// Strides of a dense image: image, depth, height, width, channel.
fn strides(channels: usize, [z, y, x]: Spatial, last: bool) -> [i64; 5] {
    let (c, z, y, x) = (channels as i64, z as i64, y as i64, x as i64);
    if last {
        [z * y * x * c, y * x * c, x * c, c, 1]
    } else {
        [c * z * y * x, y * x, x, 1, z * y * x]
    }
}

fn at(strides: [i64; 5], index: [usize; 5]) -> usize {
    strides.iter().zip(index).map(|(&s, i)| s as usize * i).sum()
}

impl Case {
    fn random(random: &mut Random) -> Self {
        let kind = random.below(6);
        Self::of_kind(random, kind)
    }

    fn of_kind(random: &mut Random, kind: usize) -> Self {
        let (groups, group_in, group_out) = match kind {
            0 => (random.pick(&[8, 16, 19, 40]), 1, 1),
            1 => (random.pick(&[2, 4, 5, 8]), 4, 4),
            2 => (2, 1 + random.below(20), 1 + random.below(40)),
            3 => (1, 3, 1 + random.below(40)),
            _ => (1, 1 + random.below(50), 1 + random.below(70)),
        };
        loop {
            let dims = 1 + random.below(2) + usize::from(random.below(6) == 0);
            let mut geometry = Geometry {
                images: 1 + random.below(3),
                groups,
                in_channels: groups * group_in,
                out_channels: groups * group_out,
                input: [1; 3],
                output: [1; 3],
                kernel: [1; 3],
                stride: [1; 3],
                pad: [0; 3],
                dilation: [1; 3],
            };
            let mut fits = true;
            let plain = random.below(5) == 0;
            for d in 3 - dims..3 {
                geometry.input[d] = 1 + random.below(if dims == 3 { 5 } else { 18 });
                if !plain {
                    geometry.kernel[d] = random.pick(&[1, 2, 3, 3, 3, 4, 5]);
                    geometry.stride[d] = random.pick(&[1, 1, 2, 3]);
                    geometry.pad[d] = random.below(geometry.kernel[d] + 1);
                    geometry.dilation[d] = random.pick(&[1, 1, 1, 2]);
                }
                let span = (geometry.kernel[d] - 1) * geometry.dilation[d] + 1;
                // The zeros after the input need not equal those before.
                let padded = geometry.input[d] + geometry.pad[d] + random.below(2) * geometry.pad[d];
                fits &= padded >= span;
                geometry.output[d] = padded.saturating_sub(span) / geometry.stride[d] + 1;
            }
            if fits {
                let last = [random.below(2) == 0, random.below(2) == 0];
                return Self {
                    geometry,
                    last,
                    computed: random.below(3) == 0,
                    storage: Storage::F32,
                };
            }
        }
    }

    fn input(&self) -> [i64; 5] {
        strides(self.geometry.in_channels, self.geometry.input, self.last[0])
    }

    fn output(&self) -> [i64; 5] {
        strides(self.geometry.out_channels, self.geometry.output, self.last[1])
    }

    fn image(&self, pointer: &'static str, strides: [i64; 5]) -> Image<'static> {
        let plain = Image::stored(self.storage, pointer, strides);
        if !self.computed {
            return plain;
        }
        Image::computed(plain.contiguous, move |place| {
            let value = (plain.load)(place);
            match place.width {
                Width::Scalar => format!("sf_max({value}, 0.0f)"),
                Width::Vector => format!("vf_max({value}, (vf){{0}})"),
            }
        })
    }

    /// Forward, input gradient, weight gradient.
    fn kernels(&self, index: usize, isa: Isa) -> Vec<KernelText> {
        let (input, output) = (self.input(), self.output());
        let comment = format!("{self:?}");
        let stored = |name| Param::new(format!("const {} *", self.storage.ctype()), name);
        let spec = |name: &str, image, epilogue| ConvSpec {
            name: format!("{name}{index}"),
            comment: comment.clone(),
            geometry: self.geometry,
            image,
            weight: "weight".into(),
            storage: self.storage,
            epilogue,
            params: vec![stored("first"), stored("weight"), Param::new("float *", "out")],
            threads: 3,
        };
        // The forward result is halved on the way, by a snippet of its own.
        let halved = PixelEpilogue::custom(Some(ImageAxis::Channel), move |place, value| {
            let address = conv::address("out", output, place);
            match place.width {
                Width::Scalar => format!("*({address}) = 0.5f * {value};"),
                Width::Vector => format!("vf_store_stride({address}, {}, 0.5f * {value});", output[4]),
            }
        });
        let weight_grad = WeightGradSpec {
            name: format!("weight_grad{index}"),
            comment: comment.clone(),
            geometry: self.geometry,
            input: self.image("a", input),
            output_grad: self.image("first", output),
            storage: Storage::F32,
            consume: Box::new(|width, index, value| match width {
                Width::Scalar => format!("out[{index}] += {value};"),
                Width::Vector => format!("vf_store(out + {index}, vf_load(out + {index}) + {value});"),
            }),
            params: vec![stored("a"), stored("first"), Param::new("float *", "out")],
            threads: 3,
        };
        vec![
            conv::forward(spec("forward", self.image("first", input), halved), isa),
            conv::input_grad(
                spec(
                    "input_grad",
                    self.image("first", output),
                    PixelEpilogue::store("out", input),
                ),
                isa,
            ),
            conv::weight_grad(weight_grad, isa),
        ]
    }

    /// Calls `body` with the indices of input, output and weight of the products of each tap, the first of
    /// which is given with the number of channels and what comes between two of them, in the input and in the
    /// weight.
    fn each_tap(&self, mut body: impl FnMut([usize; 3], usize, [usize; 2])) {
        let g = &self.geometry;
        let (input, output) = (self.input(), self.output());
        let (group_in, group_out) = (g.in_channels / g.groups, g.out_channels / g.groups);
        let [oz, oy, ox] = g.output;
        let [kz, ky, kx] = g.kernel;
        let between = [input[4] as usize, kz * ky * kx];
        for n in 0..g.images {
            for o in 0..g.out_channels {
                for pixel in 0..oz * oy * ox {
                    let p = [pixel / (oy * ox), pixel / ox % oy, pixel % ox];
                    for t in 0..kz * ky * kx {
                        let k = [t / (ky * kx), t / kx % ky, t % kx];
                        let q = [0, 1, 2]
                            .map(|d| (p[d] * g.stride[d] + k[d] * g.dilation[d]) as i64 - g.pad[d] as i64);
                        if (0..3).any(|d| q[d] < 0 || q[d] >= g.input[d] as i64) {
                            continue;
                        }
                        let channel = o / group_out * group_in;
                        let first = [
                            at(input, [n, q[0] as usize, q[1] as usize, q[2] as usize, channel]),
                            at(output, [n, p[0], p[1], p[2], o]),
                            o * group_in * kz * ky * kx + t,
                        ];
                        body(first, group_in, between);
                    }
                }
            }
        }
    }
}

impl Case {
    /// Half the output, the input gradient, and the weight plus its gradient.
    fn reference(&self, x: &[f32], dy: &[f32], w: &[f32]) -> [Vec<f64>; 3] {
        let seen = |values: &[f32]| -> Vec<f64> {
            let smallest = if self.computed { 0.0 } else { f64::NEG_INFINITY };
            values
                .iter()
                .map(|&value| f64::from(value).max(smallest))
                .collect()
        };
        let mut out = vec![0.0; dy.len()];
        let mut dx = vec![0.0; x.len()];
        let w: Vec<f64> = w.iter().map(|&w| w.into()).collect();
        let mut dw = w.clone();
        let (x, dy) = (seen(x), seen(dy));
        // The tests are hardly optimised.
        self.each_tap(|[mut input, output, mut weight], channels, between| {
            let (gradient, mut sum) = (dy[output], 0.0);
            let mut channel = 0;
            while channel < channels {
                sum += x[input] * w[weight];
                dx[input] += gradient * w[weight];
                dw[weight] += gradient * x[input];
                input += between[0];
                weight += between[1];
                channel += 1;
            }
            out[output] += 0.5 * sum;
        });
        [out, dx, dw]
    }
}

fn check(cases: &[Case], seed: u64) {
    check_within(cases, seed, 1e-6);
}

fn check_within(cases: &[Case], seed: u64, tolerance: f64) {
    let toolchain = Toolchain::detect().unwrap();
    let mut random = Random::new(seed);
    let data: Vec<[Vec<f32>; 3]> = cases
        .iter()
        .map(|case| {
            let g = &case.geometry;
            let pixels = |extents: Spatial| g.images * extents.iter().product::<usize>();
            [
                pixels(g.input) * g.in_channels,
                pixels(g.output) * g.out_channels,
                g.weight_len(),
            ]
            .map(|count| {
                let mut values = random.floats(count);
                if case.storage == Storage::BF16 {
                    let halves = from_bf16(&to_bf16(&values));
                    values.copy_from_slice(&halves[..count]);
                }
                values
            })
        })
        .collect();
    let stored: Vec<[Vec<f32>; 3]> = cases
        .iter()
        .zip(&data)
        .map(|(case, data)| match case.storage {
            Storage::BF16 => data.each_ref().map(|values| to_bf16(values)),
            _ => data.clone(),
        })
        .collect();
    let inputs: Vec<&[f32]> = stored
        .iter()
        .flat_map(|[x, dy, w]| [&x[..], &w[..], &dy[..], &w[..], &x[..], &dy[..]])
        .collect();
    let outputs: Vec<&[f32]> = data
        .iter()
        .flat_map(|[x, dy, w]| [&dy[..], &x[..], &w[..]])
        .collect();
    let references: Vec<[Vec<f64>; 3]> = cases
        .iter()
        .zip(&data)
        .map(|(case, [x, dy, w])| case.reference(x, dy, w))
        .collect();
    let sets = instruction_sets(&toolchain);
    for (position, &isa) in sets.iter().enumerate() {
        // All cases on the widest vectors, and each on one of the narrower sets.
        let chosen: Vec<usize> = (0..cases.len())
            .filter(|i| position == 0 || i % (sets.len() - 1) == position - 1)
            .collect();
        let kernels: Vec<KernelText> = chosen.iter().flat_map(|&i| cases[i].kernels(i, isa)).collect();
        let inputs: Vec<&[f32]> = chosen
            .iter()
            .flat_map(|&i| &inputs[6 * i..][..6])
            .copied()
            .collect();
        let outputs: Vec<&[f32]> = chosen
            .iter()
            .flat_map(|&i| &outputs[3 * i..][..3])
            .copied()
            .collect();
        let results = run(&toolchain, isa, &kernels, &inputs, &outputs);
        for (&i, results) in chosen.iter().zip(results.chunks(3)) {
            let (case, references) = (&cases[i], &references[i]);
            for (name, result, expected) in [
                ("forward", &results[0], &references[0]),
                ("input_grad", &results[1], &references[1]),
                ("weight_grad", &results[2], &references[2]),
            ] {
                let error = distance(result, expected);
                assert!(error < tolerance, "{isa} {name}: error {error} in {case:?}");
            }
        }
    }
}

#[test]
fn random_convolutions_match_f64() {
    let mut random = Random::new(21);
    let cases: Vec<Case> = (0..18).map(|_| Case::random(&mut random)).collect();
    check(&cases, 22);
}

/// Convolutions that only mix channels, which are products of pixels: in each layout, of one to three
/// dimensions.
#[test]
fn pointwise_convolutions_match_f64() {
    let mut random = Random::new(31);
    let extents = [[1, 1, 7], [1, 5, 6], [3, 4, 5], [2, 1, 3], [3, 1, 1]];
    let mut cases = Vec::new();
    for (index, input) in extents.into_iter().enumerate() {
        for layout in 0..4 {
            let mut case = Case::of_kind(&mut random, 5);
            case.geometry.images = 1 + (index + layout) % 3;
            [case.geometry.input, case.geometry.output] = [input; 2];
            for sizes in [
                &mut case.geometry.kernel,
                &mut case.geometry.stride,
                &mut case.geometry.dilation,
            ] {
                *sizes = [1; 3];
            }
            case.geometry.pad = [0; 3];
            case.last = [layout % 2 == 0, layout / 2 == 0];
            cases.push(case);
        }
    }
    check(&cases, 32);
}

/// Convolutions of bf16 with whole tiles of channels, which are products of moved pixels on AMX.
#[test]
fn random_convolutions_of_bf16_match_f64() {
    let mut random = Random::new(41);
    let mut cases: Vec<Case> = (0..240).map(|_| Case::of_kind(&mut random, 4)).collect();
    for case in &mut cases {
        let g = &mut case.geometry;
        g.images = 2 + random.below(2);
        g.in_channels = random.pick(&[32, 64]);
        g.out_channels = random.pick(&[16, 32, 32, 48, 64, 96]);
        case.last = [true; 2];
        case.storage = Storage::BF16;
    }
    // Forward, gradients of the input, and those of the weight: without strides and with them.
    let mut moved = [[0; 3]; 2];
    cases.retain(|case| {
        let kernels = case.kernels(0, Isa::AmxBf16);
        let is_moved = |kernel: &KernelText| kernel.source.contains("tiles of AMX. */");
        let strided = case.geometry.stride != [1; 3];
        let counts = moved[usize::from(strided)].iter_mut().zip(&kernels);
        counts.for_each(|(count, kernel)| *count += usize::from(is_moved(kernel)));
        kernels.iter().any(is_moved)
    });
    assert!(moved.as_flattened().iter().all(|&count| count >= 5), "{moved:?}");
    cases.truncate(16);
    // More images than the gradient of the weight takes at a time.
    // Slices of them, of one image and of several.
    for (images, [in_channels, out_channels], input, stride, some) in [
        (4, [64, 96], [1, 36, 40], [1; 3], " 1 slices, 3 at a time"),
        (4, [64, 96], [1, 72, 77], [1, 2, 3], " 1 slices, 1 at a time"),
        (9, [32, 64], [1, 11, 14], [1; 3], " 9 slices, 1 at a time"),
        (35, [64, 32], [1, 12, 9], [1, 2, 1], " 12 slices, 3 at a time"),
        (17, [32, 32], [1, 76, 76], [1; 3], " 9 slices, 1 at a time"),
    ] {
        let many = Case {
            geometry: Geometry {
                images,
                groups: 1,
                in_channels,
                out_channels,
                input,
                output: [0, 1, 2].map(|d| (input[d] - 1) / stride[d] + 1),
                kernel: [1, 3, 3],
                stride,
                pad: [0, 1, 1],
                dilation: [1; 3],
            },
            last: [true; 2],
            computed: false,
            storage: Storage::BF16,
        };
        assert!(many.kernels(0, Isa::AmxBf16)[2].source.contains(some));
        cases.push(many);
    }
    check_within(&cases, 42, 2e-6);
}

/// Convolutions of bf16 whose channels do not fill tiles: their windows are written out. Images lie channels
/// last and channels first, in memory and computed.
#[test]
fn random_convolutions_of_windows_match_f64() {
    let mut random = Random::new(51);
    let mut cases: Vec<Case> = (0..400).map(|_| Case::of_kind(&mut random, 4)).collect();
    for (number, case) in cases.iter_mut().enumerate() {
        let g = &mut case.geometry;
        g.images = 2 + random.below(2);
        // Few channels of the image, or of the result.
        let some = random.pick(&[32, 32, 64, 96]);
        let few = random.pick(&[1, 2, 3, 3, 5, 8, 16, 17, 31, 33, 48, 80]);
        (g.in_channels, g.out_channels) = if number % 2 == 0 { (some, few) } else { (few, some) };
        case.last = [number % 3 == 0, true];
        case.storage = Storage::BF16;
    }
    let mut written = [[0; 3]; 2];
    cases.retain(|case| {
        let kernels = case.kernels(0, Isa::AmxBf16);
        let has_windows = |kernel: &KernelText| kernel.source.contains(", windows ");
        // Kernels that many shapes share make arrays automatic, so none may rely on `static` to be zero.
        let arrays = kernels.iter().flat_map(|kernel| kernel.source.lines());
        for line in arrays.filter(|line| line.trim_start().starts_with("static const ")) {
            assert_eq!(line.matches('[').count(), line.matches("= {").count(), "{line}");
        }
        let strided = case.geometry.stride != [1; 3];
        let counts = written[usize::from(strided)].iter_mut().zip(&kernels);
        counts.for_each(|(count, kernel)| *count += usize::from(has_windows(kernel)));
        kernels.iter().any(has_windows)
    });
    assert!(
        written.as_flattened().iter().all(|&count| count >= 4),
        "{written:?}"
    );
    cases.truncate(16);
    // Several slices of the pixels, of which the last has an odd number, and several blocks of a slice.
    for (in_channels, kernel, stride) in [(3, [1, 7, 7], [1, 2, 2]), (48, [1, 3, 3], [1; 3])] {
        let input = [1, 67, 71];
        let pad = [0, kernel[1] / 2, kernel[2] / 2];
        let many = Case {
            geometry: Geometry {
                images: 3,
                groups: 1,
                in_channels,
                out_channels: 64,
                input,
                output: [0, 1, 2].map(|d| (input[d] - 1) / stride[d] + 1),
                kernel,
                stride,
                pad,
                dilation: [1; 3],
            },
            last: [in_channels != 3, true],
            computed: false,
            storage: Storage::BF16,
        };
        assert!(!many.kernels(0, Isa::AmxBf16)[2].source.contains(" 1 slices"));
        cases.push(many);
    }
    check_within(&cases, 52, 2e-6);
}

#[test]
fn random_depthwise_convolutions_of_planes_match_f64() {
    let mut random = Random::new(31);
    let mut cases: Vec<Case> = (0..10).map(|_| Case::of_kind(&mut random, 0)).collect();
    // Kernels of which elements have no instructions of their own.
    for (kernel, stride, dilation) in [
        ([1, 9, 11], [1; 3], [1; 3]),
        ([1, 23, 15], [1, 1, 2], [1; 3]),
        ([1, 13, 5], [1, 2, 1], [1, 1, 2]),
    ] {
        let mut case = Case::of_kind(&mut random, 0);
        let input: Spatial = [1, 25, 27];
        case.geometry = Geometry {
            images: 2,
            input,
            output: [0, 1, 2].map(|d| {
                let span = (kernel[d] - 1) * dilation[d] + 1;
                (input[d] + kernel[d] - 1 - span) / stride[d] + 1
            }),
            kernel,
            stride,
            pad: kernel.map(|extent| extent / 2),
            dilation,
            ..case.geometry
        };
        cases.push(case);
    }
    cases.iter_mut().for_each(|case| case.last = [false; 2]);
    for case in &cases {
        let lines = |kernel: &KernelText| kernel.source.lines().count();
        assert!(
            case.kernels(0, Isa::Avx512)
                .iter()
                .all(|kernel| lines(kernel) < 500),
            "{case:?}"
        );
    }
    check(&cases, 32);
}

/// Shapes of image networks, large enough for threads, several chunks, wide and uneven panels.
#[test]
fn network_layers_match_f64() {
    let layer =
        |size: usize, channels: [usize; 2], groups: usize, kernel: usize, stride: usize, last: bool| {
            let pad = kernel / 2;
            Case {
                geometry: Geometry {
                    images: 2,
                    groups,
                    in_channels: channels[0],
                    out_channels: channels[1],
                    input: [1, size, size],
                    output: [
                        1,
                        (size + 2 * pad - kernel) / stride + 1,
                        (size + 2 * pad - kernel) / stride + 1,
                    ],
                    kernel: [1, kernel, kernel],
                    stride: [1, stride, stride],
                    pad: [0, pad, pad],
                    dilation: [1; 3],
                },
                last: [last; 2],
                computed: false,
                storage: Storage::F32,
            }
        };
    check(
        &[
            layer(33, [3, 20], 1, 7, 2, false),
            layer(28, [16, 40], 1, 3, 1, true),
            layer(15, [64, 100], 1, 3, 2, true),
            layer(14, [96, 96], 96, 5, 1, true),
            layer(30, [40, 40], 40, 3, 2, true),
            layer(14, [64, 64], 8, 3, 1, true),
            layer(14, [64, 64], 2, 3, 2, false),
            layer(13, [130, 70], 1, 1, 1, true),
            layer(13, [70, 130], 1, 1, 1, false),
            layer(14, [70, 130], 1, 1, 2, true),
            layer(19, [20, 20], 20, 3, 1, false),
            layer(18, [20, 20], 20, 5, 2, false),
            layer(7, [20, 20], 20, 3, 3, false),
        ],
        7,
    );
}

/// Few pixels, or few of many, and weights of some 300 kB: strides, dilation, padding wider than the window,
/// three dimensions, odd channels, images of either layout, images computed while they are read, a single
/// pixel.
#[test]
fn few_pixels_match_f64() {
    let layer = |images: usize,
                 input: [usize; 3],
                 channels: [usize; 2],
                 kernel: [usize; 3],
                 stride: usize,
                 dilation: usize| {
        let pad = kernel.map(|k| k / 2);
        let output = [0, 1, 2].map(|d| (input[d] + 2 * pad[d] - (kernel[d] - 1) * dilation - 1) / stride + 1);
        Case {
            geometry: Geometry {
                images,
                groups: 1,
                in_channels: channels[0],
                out_channels: channels[1],
                input,
                output,
                kernel,
                stride: [stride; 3],
                pad,
                dilation: [dilation; 3],
            },
            last: [images.is_multiple_of(2); 2],
            computed: images == 3,
            storage: Storage::F32,
        }
    };
    check(
        &[
            layer(3, [1, 3, 3], [96, 80], [1, 3, 3], 1, 1),
            layer(2, [1, 9, 5], [67, 110], [1, 3, 3], 2, 1),
            layer(2, [1, 7, 7], [48, 65], [1, 5, 5], 1, 1),
            layer(1, [1, 1, 1], [90, 101], [1, 3, 3], 1, 1),
            layer(2, [3, 4, 3], [50, 53], [3, 3, 3], 2, 1),
            layer(1, [1, 9, 9], [90, 90], [1, 3, 3], 1, 2),
            layer(2, [1, 15, 12], [300, 260], [1, 1, 1], 2, 1),
            layer(3, [1, 8, 7], [260, 301], [1, 1, 1], 3, 1),
        ],
        29,
    );
}

/// A few channels a group: partial vectors, strides, dilation, rows of kernel elements that need several
/// passes.
#[test]
fn narrow_groups_match_f64() {
    let layer = |group: usize, groups: usize, kernel: [usize; 3], stride: usize, last: bool| {
        let pad = kernel.map(|k| k / 2);
        let input = [if kernel[0] > 1 { 4 } else { 1 }, 11, 14];
        Case {
            geometry: Geometry {
                images: 2,
                groups,
                in_channels: group * groups,
                out_channels: group * groups,
                input,
                output: [0, 1, 2].map(|d| (input[d] + 2 * pad[d] - kernel[d]) / stride + 1),
                kernel,
                stride: [stride; 3],
                pad,
                dilation: [1; 3],
            },
            last: [last; 2],
            computed: false,
            storage: Storage::F32,
        }
    };
    check(
        &[
            layer(4, 9, [1, 3, 3], 1, true),
            layer(8, 4, [1, 3, 3], 2, true),
            layer(2, 21, [1, 5, 5], 1, false),
            layer(8, 5, [1, 7, 7], 1, true),
            layer(4, 8, [2, 3, 1], 2, true),
            layer(1, 19, [1, 3, 9], 1, true),
        ],
        31,
    );
}

/// Large 3x3 convolutions of stride 1, which take Winograd's form: blocks of a thread's own and shared ones,
/// extents that tiles do not divide, padding of all widths, images computed while they are read.
#[test]
fn tiled_convolutions_match_f64() {
    let layer =
        |images: usize, [height, width]: [usize; 2], channels: [usize; 2], pad: usize, computed: bool| Case {
            geometry: Geometry {
                images,
                groups: 1,
                in_channels: channels[0],
                out_channels: channels[1],
                input: [1, height, width],
                output: [1, height + 2 * pad - 2, width + 2 * pad - 2],
                kernel: [1, 3, 3],
                stride: [1; 3],
                pad: [0, pad, pad],
                dilation: [1; 3],
            },
            last: [true; 2],
            computed,
            storage: Storage::F32,
        };
    check_within(
        &[
            layer(2, [29, 13], [64, 48], 1, false),
            layer(3, [9, 23], [48, 96], 0, true),
            layer(1, [12, 12], [128, 112], 2, false),
            layer(9, [7, 6], [96, 64], 1, false),
            layer(2, [22, 42], [32, 64], 1, true),
            layer(6, [3, 3], [256, 128], 1, false),
        ],
        51,
        4e-6,
    );
}
