//! How far sums, products and convolutions are from their values, on any target: each says in `super::run`
//! what comes of a graph, and how far it may be.

mod norms;

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
    let results = super::run(graph, inputs);
    assert_eq!(results.len(), expected.len());
    let outputs = results.iter().zip(&expected);
    outputs
        .map(|(result, expected)| norms::error(result, expected) / UNIT)
        .collect()
}

/// Remainders of floats are exact before their sign is the divisor's: those of large quotients, of quotients
/// that round to an integer, by infinities and by zero.
pub fn check_remainders() {
    let remainders = |dtype: DType, pairs: &[[f64; 2]], expected: &[f64]| {
        let count = pairs.len();
        let ty = format!("{dtype}[{count}]");
        let text = format!(
            "graph @remainders {{\n%a = parameter 0 : {ty}\n%b = parameter 1 : {ty}\n%r = rem %a, %b : {ty}\nreturn %r\n}}"
        );
        let graph = Graph::parse(&text).unwrap();
        let side = |side: usize| {
            let values: Vec<f64> = pairs.iter().map(|pair| pair[side]).collect();
            HostTensor::from_floats(dtype, [count], values)
        };
        let inputs = [side(0), side(1)];
        for results in [
            super::run(&graph, &inputs),
            interpret_f64(&graph, &inputs, &[]).unwrap(),
        ] {
            let bits = |values: &[f64]| -> Vec<u64> { values.iter().map(|x| x.to_bits()).collect() };
            let found: Vec<f64> = results[0]
                .to_f64s()
                .iter()
                .map(|&x| if x.is_nan() { f64::NAN } else { x })
                .collect();
            assert_eq!(
                bits(&found),
                bits(expected),
                "{dtype}: {found:?}, expected {expected:?}"
            );
        }
    };
    let (infinity, nan) = (f64::INFINITY, f64::NAN);
    let large = f64::from(1e30f32);
    remainders(
        DType::F32,
        &[
            [5.5, 2.0],
            [-5.5, 2.0],
            [5.5, -2.0],
            [-6.0, 2.0],
            [large, 7.0],
            [-large, 7.0],
            [1.0, infinity],
            [-1.0, infinity],
            [1.0, 0.0],
            [infinity, 1.0],
            [2.0, nan],
        ],
        &[
            1.5,
            0.5,
            -0.5,
            -0.0,
            large % 7.0,
            7.0 - large % 7.0,
            1.0,
            infinity,
            nan,
            nan,
            nan,
        ],
    );
    // 0.1 is a little more than a tenth, so a million of it is more than 100000.
    remainders(DType::F64, &[[1e5, 0.1], [1e300, 7.0]], &[1e5 % 0.1, 1e300 % 7.0]);
}

/// Sums over rows, columns and everything, of long and short, even and odd extents, are at most `bound` units
/// off.
pub fn check_long_sums(bound: f64) {
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
        assert!(error <= bound, "sum over {axes} of [{shape}]: {error} units");
    }
}

/// Mean and variance of channels as batch norm takes them, with an outlier in the middle of the images: at
/// most three roundings each.
pub fn check_statistics_of_channels() {
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

/// Elements of 16 bits that many updates meet are rounded once: ones add up to a number at which each further
/// one would be lost.
pub fn check_updates_of_16_bits() {
    const COUNT: usize = 2560;
    // Changes no element, but makes an image of the scheduler's layout.
    let window = "size=[1,1], stride=[1,1], pad_low=[0,0], pad_high=[0,0], dilation=[1,1]";
    for dtype in [DType::F16, DType::BF16] {
        let text = format!(
            "graph @updates {{
  %x = parameter 0 : {dtype}[4,40]
  %u = parameter 1 : {dtype}[{COUNT},40]
  %i = parameter 2 : i64[{COUNT},40]
  %j = parameter 3 : i64[{COUNT}]
  %scattered = scatter add %x, %i, %u {{axis=0}} : {dtype}[4,40]
  %put = index_put add %x, %j, %u {{axis=0}} : {dtype}[4,40]
  %zero = constant 0.0 : {dtype}[]
  %zeros = broadcast %zero {{dims=[]}} : {dtype}[4,40]
  %started = index_put add %zeros, %j, %u {{axis=0}} : {dtype}[4,40]
  %dy = parameter 4 : {dtype}[1,2,40,64]
  %at = parameter 5 : i32[1,2,40,64]
  %plane = max_pool_grad %dy, %at {{input=[5,3]}} : {dtype}[1,2,5,3]
  %image = avg_pool %dy {{{window}}} : {dtype}[1,2,40,64]
  %largest = max_pool_grad %image, %at {{input=[5,3]}} : {dtype}[1,2,5,3]
  %channels = abs %largest : {dtype}[1,2,5,3]
  %dv = parameter 6 : {dtype}[1,2,8,8,40]
  %in = parameter 7 : i32[1,2,8,8,40]
  %volume = max_pool_grad %dv, %in {{input=[5,3,2]}} : {dtype}[1,2,5,3,2]
  return %scattered, %put, %started, %plane, %channels, %volume
}}"
        );
        let graph = Graph::parse(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let parameters = graph.parameters().iter().enumerate();
        let inputs: Vec<HostTensor> = parameters
            .map(|(number, &value)| {
                let ty = graph.ty(value);
                let (elements, shape) = (ty.numel(), ty.shape.clone());
                match ty.dtype.is_float() {
                    true => {
                        let each = if number == 0 { 0.0 } else { 1.0 };
                        HostTensor::from_floats(dtype, shape, std::iter::repeat_n(each, elements))
                    }
                    false => HostTensor::from_ints(ty.dtype, shape, std::iter::repeat_n(1, elements)),
                }
            })
            .collect();
        let expected = interpret_f64(&graph, &inputs, &[]).unwrap();
        for (number, (result, expected)) in super::run(&graph, &inputs).iter().zip(&expected).enumerate() {
            let (result, expected) = (result.to_f64s(), expected.to_f64s());
            assert!(
                expected.contains(&(COUNT as f64)),
                "result {number}: {expected:?}"
            );
            assert_eq!(result, expected, "result {number} of {dtype}");
        }
    }
}

/// What is computed, the shapes of its two arguments and of the result, and the bound in units.
pub type Case = (String, &'static str, &'static str, &'static str, f64);

fn window(stride: usize, pad: usize, groups: usize) -> String {
    format!(
        "stride=[{stride},{stride}], pad_low=[{pad},{pad}], pad_high=[{pad},{pad}], dilation=[1,1], groups={groups}"
    )
}

/// A convolution.
pub fn convolution(stride: usize, pad: usize, groups: usize) -> String {
    format!("conv %x, %w {{{}}}", window(stride, pad, groups))
}

/// The gradient of a convolution's weights.
pub fn gradient(kernel: usize, pad: usize, groups: usize) -> String {
    format!(
        "conv_weight_grad %x, %w {{{}, kernel=[{kernel},{kernel}]}}",
        window(1, pad, groups)
    )
}

/// Each case is at most its bound off. The first argument is what an activation left, numbers of one sign;
/// the second has both.
pub fn check_products(cases: &[Case]) {
    let mut wrong = Vec::new();
    for (operation, x, w, result, bound) in cases {
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
            ("x", x, operation.starts_with("conv")),
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
        let text = format!(
            "graph @products {{\n{given}  %result = {operation} : f32[{result}]\n  return %result\n}}"
        );
        let graph = Graph::parse(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let types: Vec<TensorType> = graph.parameters().iter().map(|&x| graph.ty(x).clone()).collect();
        let error = errors(&graph, &[positive(&types[0], 1), signed(&types[1], 2)])[0];
        if error > *bound {
            wrong.push(format!(
                "{operation} of [{x}] and [{w}]: {error:.2} units, more than {bound}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
