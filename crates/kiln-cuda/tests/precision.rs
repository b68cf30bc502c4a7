//! How far sums and convolutions in kernels of our own are from their values.
//!
//! A sum over many elements is as far as one or two roundings of the result, whatever its length: one
//! accumulator of f32 that adds n positive numbers is off by some `sqrt(n) / 3` units of 2^-24, so threads,
//! warps and blocks must share the work, each over a short chain. Convolutions add numbers of both signs in
//! one chain of n terms, which is off by some `sqrt(n) / 5` units.

use kiln_cuda::testing::host::{Differential, HostStep};
use kiln_graph::{DType, Graph, HostTensor, TensorType, interpret_f64};

/// The rounding of f32, relative.
const UNIT: f64 = 1.0 / (1u64 << 24) as f64;

/// Numbers between 0 and 1, all of the same sign: rounding errors of their sums do not cancel.
fn positive(ty: &TensorType, seed: u64) -> HostTensor {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1u64 << 24) as f64
    };
    let values: Vec<f64> = (0..ty.numel()).map(|_| next()).collect();
    HostTensor::from_floats(ty.dtype, ty.shape.clone(), values)
}

/// Numbers between -1/2 and 1/2.
fn signed(ty: &TensorType, seed: u64) -> HostTensor {
    let values: Vec<f64> = positive(ty, seed).to_f64s().iter().map(|x| x - 0.5).collect();
    HostTensor::from_floats(ty.dtype, ty.shape.clone(), values)
}

/// Error of each output by norms, in units.
fn errors(graph: &Graph, inputs: &[HostTensor]) -> Vec<f64> {
    let expected = interpret_f64(graph, inputs, &[]).unwrap();
    let comparison = Differential::new(graph).arguments(inputs.to_vec(), Vec::new());
    let host = HostStep::of(&comparison.compile().unwrap()).unwrap();
    let actual = comparison.run(&host).unwrap();
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let outputs = actual.iter().zip(&expected);
    outputs
        .map(|(actual, expected)| {
            let (found, expected) = (actual.to_f64s(), expected.to_f64s());
            let difference = found.iter().zip(&expected).map(|(a, b)| a - b);
            norm(&mut { difference }) / norm(&mut expected.into_iter()) / UNIT
        })
        .collect()
}

/// Rows, columns and everything, of long and short, even and odd extents.
#[test]
fn long_sums_are_shared() {
    for (shape, axes, kept) in [
        ("5,100003", "1", "5"),
        ("3,64,1030", "1,2", "3"),
        ("40,7,7,129", "1,2,3", "40"),
        ("100003,5", "0", "5"),
        ("20000,70", "0", "70"),
        ("4,5001,33", "0,1", "33"),
        ("1000003", "0", ""),
        ("1201,1001", "0,1", ""),
        ("70000,3,5", "0,1,2", ""),
        ("9,100001", "0,1", ""),
    ] {
        let text = format!(
            "graph @sums {{
  %x = parameter 0 : f32[{shape}]
  %sum = reduce sum %x {{axes=[{axes}]}} : f32[{kept}]
  return %sum
}}"
        );
        let graph = Graph::parse(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let ty = graph.ty(graph.parameters()[0]).clone();
        let error = errors(&graph, &[positive(&ty, 1)])[0];
        assert!(error <= 2.0, "sum over {axes} of [{shape}]: {error} units");
    }
}

/// Mean and variance of channels as batch norm takes them, with an outlier in the middle of the images: at
/// most three roundings each.
#[test]
fn statistics_of_channels_do_not_cancel() {
    let (n, c, side) = (8, 6, 47);
    let count = n * side * side;
    let part = format!("{c},{n},{side},{side}");
    let text = format!(
        "graph @statistics {{
  %x = parameter 0 : f32[{n},{c},{side},{side}]
  %weight = constant 1.0 : f32[]
  %weights = broadcast %weight {{dims=[]}} : f32[{c},1,1,1]
  %z = conv %x, %weights {{stride=[1,1], pad_low=[0,0], pad_high=[0,0], dilation=[1,1], groups={c}}} : f32[{n},{c},{side},{side}]
  %1 = transpose %z {{perm=[1,0,2,3]}} : f32[{part}]
  %2 = reshape %1 : f32[{c},{count}]
  %3 = reduce sum %2 {{axes=[1]}} : f32[{c}]
  %4 = constant {share:?} : f32[]
  %5 = broadcast %4 {{dims=[]}} : f32[{c}]
  %mean = mul %3, %5 : f32[{c}]
  %7 = broadcast %mean {{dims=[1]}} : f32[{n},{c},{side},{side}]
  %8 = sub %z, %7 : f32[{n},{c},{side},{side}]
  %9 = mul %8, %8 : f32[{n},{c},{side},{side}]
  %10 = transpose %9 {{perm=[1,0,2,3]}} : f32[{part}]
  %11 = reshape %10 : f32[{c},{count}]
  %12 = reduce sum %11 {{axes=[1]}} : f32[{c}]
  %var = mul %12, %5 : f32[{c}]
  return %mean, %var
}}",
        share = 1.0 / count as f32
    );
    let graph = Graph::parse(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let ty = graph.ty(graph.parameters()[0]).clone();
    let mut values = positive(&ty, 2).to_f64s();
    for channel in 0..c {
        // Forty deviations from the mean.
        values[((n / 2 * c + channel) * side + side / 2) * side + side / 2] = 12.0;
    }
    let input = HostTensor::from_floats(DType::F32, ty.shape, values);
    for (what, error) in ["mean", "variance"].iter().zip(errors(&graph, &[input])) {
        assert!(error <= 3.0, "{what}: {error} units");
    }
}

/// Each line: what is computed, the shapes of its two arguments and of the result, the bound in units. The
/// first argument is what an activation left: numbers of one sign; the second is of both.
#[test]
fn convolutions_add_up_in_short_chains() {
    let window = |stride: usize, pad: usize, groups: usize| {
        format!(
            "stride=[{stride},{stride}], pad_low=[{pad},{pad}], pad_high=[{pad},{pad}], dilation=[1,1], groups={groups}"
        )
    };
    let convolution =
        |stride: usize, pad: usize, groups: usize| format!("conv %x, %w {{{}}}", window(stride, pad, groups));
    let gradient = |kernel: usize, pad: usize, groups: usize| {
        format!(
            "conv_weight_grad %x, %w {{{}, kernel=[{kernel},{kernel}]}}",
            window(1, pad, groups)
        )
    };
    let mut wrong = Vec::new();
    for (operation, x, w, result, bound) in [
        (convolution(2, 1, 1), "2,256,8,8", "64,256,3,3", "2,64,4,4", 5.8),
        (
            convolution(1, 1, 4),
            "2,256,10,10",
            "256,64,3,3",
            "2,256,10,10",
            5.8,
        ),
        (convolution(1, 1, 1), "4,64,40,40", "64,64,3,3", "4,64,40,40", 6.5),
        (convolution(1, 1, 1), "4,256,6,6", "128,256,3,3", "4,128,6,6", 5.8),
        // Sums over pixels.
        (gradient(3, 1, 1), "3,32,40,40", "3,32,40,40", "32,32,3,3", 6.8),
    ] {
        // A convolution that changes nothing has images stored as they are between the layers of a network.
        let image = |name: &str, shape: &str| {
            let channels = shape.split(',').nth(1).unwrap_or_default();
            format!(
                "  %{name}_ones = broadcast %one {{dims=[]}} : f32[{channels},1,1,1]
  %{name} = conv %{name}_given, %{name}_ones {{{}}} : f32[{shape}]\n",
                window(1, 0, channels.parse().unwrap())
            )
        };
        let mut given = "  %one = constant 1.0 : f32[]\n".to_owned();
        for (number, (name, shape, is_image)) in [
            ("x", x, true),
            ("w", w, operation.starts_with("conv_weight_grad")),
        ]
        .into_iter()
        .enumerate()
        {
            let suffix = if is_image { "_given" } else { "" };
            given += &format!("  %{name}{suffix} = parameter {number} : f32[{shape}]\n");
            if is_image {
                given += &image(name, shape);
            }
        }
        let text =
            format!("graph @images {{\n{given}  %result = {operation} : f32[{result}]\n  return %result\n}}");
        let graph = Graph::parse(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let types: Vec<TensorType> = graph.parameters().iter().map(|&x| graph.ty(x).clone()).collect();
        let error = errors(&graph, &[positive(&types[0], 1), signed(&types[1], 2)])[0];
        if error > bound {
            wrong.push(format!(
                "{operation} of [{x}] and [{w}]: {error:.2} units, more than {bound}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Numbers whose quotients are compared: of every size and both signs, and those that are no ordinary ones.
fn dividends() -> Vec<f32> {
    let mut state = 5_u32;
    let mut next = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        state ^ state >> 15
    };
    let special = [
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        49.0,
        1.0,
    ];
    let random = (0..4096 - special.len()).map(|_| f32::from_bits(next()));
    special.into_iter().chain(random).collect()
}

/// A quotient of many numbers by one is the product with its inverse, corrected: it rounds as a division does where nothing
/// is near the ends of the range, and is off by at most a unit elsewhere.
#[test]
fn quotients_by_one_number_round_as_divisions_do() {
    let graph = Graph::parse(
        "graph @quotients {
  %0 = parameter 0 : f32[4096]
  %1 = parameter 1 : f32[]
  %2 = broadcast %1 {dims=[]} : f32[4096]
  %3 = div %0, %2 : f32[4096]
  return %3
}",
    )
    .unwrap();
    let comparison = Differential::new(&graph);
    let step = comparison.compile().unwrap();
    let inverts = |function: &kiln_cuda::code::Function| function.text.body.contains("kiln_divisor");
    assert!(step.code.functions.iter().any(inverts));
    let host = HostStep::of(&step).unwrap();
    let dividends = dividends();
    let bytes = |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|x| x.to_ne_bytes()).collect() };
    let ordinary = |x: f32| (1e-25..1e25).contains(&x.abs());
    for by in [
        3.0,
        49.0,
        -0.1,
        1e-12,
        768.0,
        1e-45,
        -7e-40,
        1.2e-38,
        3e38,
        2e36,
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NAN,
    ] {
        let found = host.run(&mut [bytes(&dividends), bytes(&[by])], &[]).unwrap();
        for (&x, found) in dividends.iter().zip(found[0].chunks_exact(4)) {
            let found = f32::from_ne_bytes(found.try_into().unwrap());
            let expected = x / by;
            let units = (i64::from(found.to_bits()) - i64::from(expected.to_bits())).abs();
            let most = i64::from(!(ordinary(x) && ordinary(by) && ordinary(expected)));
            let both_nan = found.is_nan() && expected.is_nan();
            assert!(
                both_nan || units <= most,
                "{x:e} / {by:e} is {expected:e}, not {found:e}"
            );
        }
    }
}

/// The power of -1/2 is a root's inverse, to within two roundings, and has the power's limits.
#[test]
fn inverse_roots_are_powers() {
    let graph = Graph::parse(
        "graph @roots {
  %0 = parameter 0 : f32[4096]
  %1 = constant -0.5 : f32[]
  %2 = broadcast %1 {dims=[]} : f32[4096]
  %3 = pow %0, %2 : f32[4096]
  return %3
}",
    )
    .unwrap();
    let step = Differential::new(&graph).compile().unwrap();
    let roots = |function: &kiln_cuda::code::Function| function.text.body.contains("kiln_inverse_root");
    assert!(step.code.functions.iter().any(roots));
    let host = HostStep::of(&step).unwrap();
    let numbers = dividends();
    let given: Vec<u8> = numbers.iter().flat_map(|x| x.to_ne_bytes()).collect();
    let found = host.run(&mut [given], &[]).unwrap();
    for (&x, found) in numbers.iter().zip(found[0].chunks_exact(4)) {
        let found = f32::from_ne_bytes(found.try_into().unwrap());
        let expected = f64::from(x).powf(-0.5) as f32;
        let units = (i64::from(found.to_bits()) - i64::from(expected.to_bits())).abs();
        let both_nan = found.is_nan() && expected.is_nan();
        assert!(
            both_nan || units <= 2,
            "{x:e} to the power of -1/2 is {expected:e}, not {found:e}"
        );
    }
}
