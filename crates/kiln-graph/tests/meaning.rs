//! The rules that `kiln_graph::op` states in words, one by one, on cases worked out by hand.

use kiln_graph::op::ExternOp;
use kiln_graph::{DType, Graph, HostTensor, InterpretError, Interpreter, Scalar, interpret, interpret_f64};

const NAN: f64 = f64::NAN;
const INF: f64 = f64::INFINITY;

/// Runs a graph whose parameters `%0`, `%1`, .. are these tensors; `lines` end in a `return`.
fn try_run(lines: &str, inputs: &[HostTensor]) -> Result<Vec<HostTensor>, InterpretError> {
    let parameters: String = inputs
        .iter()
        .enumerate()
        .map(|(index, tensor)| format!("%{index} = parameter {index} : {}\n", tensor.ty()))
        .collect();
    let text = format!("graph @g {{\n{parameters}{lines}\n}}");
    let graph = Graph::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    interpret(&graph, inputs, &[])
}

fn run(lines: &str, inputs: &[HostTensor]) -> Vec<HostTensor> {
    try_run(lines, inputs).unwrap_or_else(|error| panic!("{error}"))
}

fn f32s(shape: impl Into<kiln_graph::Shape>, values: &[f64]) -> HostTensor {
    HostTensor::from_floats(DType::F32, shape, values.iter().copied())
}

fn ints(dtype: DType, shape: impl Into<kiln_graph::Shape>, values: &[i64]) -> HostTensor {
    HostTensor::from_ints(dtype, shape, values.iter().copied())
}

/// Equal numbers, NaN equal to NaN, zeros told apart.
#[track_caller]
fn assert_floats(actual: &HostTensor, expected: &[f64]) {
    let actual = actual.to_f64s();
    let same = |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    assert!(
        actual.len() == expected.len() && actual.iter().zip(expected).all(same),
        "{actual:?} is not {expected:?}"
    );
}

/// A pointwise operation of two integer operands, all pairs given.
#[track_caller]
fn assert_ints(op: &str, dtype: DType, cases: &[(i64, i64, i64)]) {
    let column = |of: fn(&(i64, i64, i64)) -> i64| cases.iter().map(of).collect::<Vec<_>>();
    let (a, b) = (column(|case| case.0), column(|case| case.1));
    let n = cases.len();
    let out = run(
        &format!("%r = {op} %0, %1 : {dtype}[{n}]\nreturn %r"),
        &[ints(dtype, [n], &a), ints(dtype, [n], &b)],
    );
    assert_eq!(out[0].to_i64s(), column(|case| case.2), "{op} of {dtype}");
}

#[test]
fn integers_wrap() {
    let max = i64::MAX;
    assert_ints("add", DType::I64, &[(max, 1, i64::MIN), (-3, 5, 2)]);
    assert_ints("add", DType::U8, &[(250, 10, 4)]);
    assert_ints("sub", DType::U64, &[(0, 1, -1)]); // the bits of u64::MAX
    assert_ints(
        "mul",
        DType::I32,
        &[(1 << 20, 1 << 20, 0), (-7, 3, -21), (65537, 65537, 131_073)],
    );
    assert_ints("mul", DType::U64, &[(-1, -1, 1)]); // (2^64 - 1)^2 = 1 modulo 2^64
    assert_ints("mul", DType::I8, &[(-128, -1, -128)]);
    let out = run(
        "%n = neg %0 : i8[2]\n%a = abs %0 : i8[2]\nreturn %n, %a",
        &[ints(DType::I8, [2], &[-128, 3])],
    );
    assert_eq!(out[0].to_i64s(), [-128, -3]);
    assert_eq!(out[1].to_i64s(), [-128, 3]);
}

#[test]
fn integer_division_truncates_and_remainder_takes_the_divisors_sign() {
    assert_ints(
        "div",
        DType::I32,
        &[(7, 2, 3), (-7, 2, -3), (7, -2, -3), (-7, -2, 3), (5, 0, 0)],
    );
    assert_ints("div", DType::I64, &[(i64::MIN, -1, i64::MIN)]);
    assert_ints("div", DType::U64, &[(-1, 2, i64::MAX)]); // the operand is u64::MAX
    assert_ints(
        "rem",
        DType::I32,
        &[
            (7, 3, 1),
            (-7, 3, 2),
            (7, -3, -2),
            (-7, -3, -1),
            (-6, 3, 0),
            (5, 0, 0),
        ],
    );
    assert_ints("rem", DType::U8, &[(200, 7, 4)]);
}

#[test]
fn integer_powers() {
    assert_ints(
        "pow",
        DType::I32,
        &[
            (2, 10, 1024),
            (-3, 3, -27),
            (0, 0, 1),
            (7, 0, 1),
            (3, 40, 689_956_897),
        ],
    );
    assert_ints(
        "pow",
        DType::I64,
        &[
            (1, -5, 1),
            (-1, -5, -1),
            (-1, -4, 1),
            (2, -1, 0),
            (0, -1, 0),
            (2, 64, 0),
        ],
    );
    assert_ints("pow", DType::U8, &[(3, 5, 243), (2, 8, 0)]);
}

#[test]
fn shifts_past_the_width() {
    assert_ints(
        "shl",
        DType::I8,
        &[(1, 7, -128), (1, 8, 0), (1, -1, 0), (3, 2, 12), (-1, 4, -16)],
    );
    assert_ints(
        "shr",
        DType::I8,
        &[(-8, 1, -4), (-8, 8, -1), (8, 8, 0), (-8, -1, -1), (8, -1, 0)],
    );
    assert_ints("shr", DType::U8, &[(200, 3, 25), (200, 8, 0)]);
    assert_ints("and", DType::I32, &[(-2, 7, 6)]);
    assert_ints("or", DType::U8, &[(8, 3, 11)]);
    assert_ints("xor", DType::I64, &[(-1, 5, -6)]);
    let out = run(
        "%n = not %0 : u8[2]\n%m = not %1 : bool[2]\nreturn %n, %m",
        &[ints(DType::U8, [2], &[0, 5]), ints(DType::Bool, [2], &[0, 1])],
    );
    assert_eq!((out[0].to_i64s(), out[1].to_i64s()), (vec![255, 250], vec![1, 0]));
}

#[test]
fn floats_follow_ieee() {
    let a = f32s([6], &[1.0, -1.0, 0.0, INF, NAN, 5.0]);
    let b = f32s([6], &[0.0, 0.0, 0.0, -INF, 1.0, NAN]);
    let out = run(
        "%d = div %0, %1 : f32[6]\n%s = add %0, %1 : f32[6]\n%x = max %0, %1 : f32[6]\n%n = min %0, %1 : f32[6]\nreturn %d, %s, %x, %n",
        &[a, b],
    );
    assert_floats(&out[0], &[INF, -INF, NAN, NAN, NAN, NAN]);
    assert_floats(&out[1], &[1.0, -1.0, 0.0, NAN, NAN, NAN]);
    assert_floats(&out[2], &[1.0, 0.0, 0.0, INF, NAN, NAN]);
    assert_floats(&out[3], &[0.0, -1.0, 0.0, -INF, NAN, NAN]);

    let out = run(
        "%r = rem %0, %1 : f32[4]\nreturn %r",
        &[
            f32s([4], &[5.5, -5.5, 5.5, -5.5]),
            f32s([4], &[2.0, 2.0, -2.0, -2.0]),
        ],
    );
    assert_floats(&out[0], &[1.5, 0.5, -0.5, -1.5]);

    let x = f32s([8], &[-2.5, -0.5, 0.5, 1.5, 2.5, NAN, -INF, -0.0]);
    let out = run(
        "%r = round %0 : f32[8]\n%t = trunc %0 : f32[8]\n%f = floor %0 : f32[8]\n%s = sign %0 : f32[8]
         %n = is_nan %0 : bool[8]\n%i = is_inf %0 : bool[8]\nreturn %r, %t, %f, %s, %n, %i",
        &[x],
    );
    assert_floats(&out[0], &[-2.0, -0.0, 0.0, 2.0, 2.0, NAN, -INF, -0.0]);
    assert_floats(&out[1], &[-2.0, -0.0, 0.0, 1.0, 2.0, NAN, -INF, -0.0]);
    assert_floats(&out[2], &[-3.0, -1.0, 0.0, 1.0, 2.0, NAN, -INF, -0.0]);
    assert_floats(&out[3], &[-1.0, -1.0, 1.0, 1.0, 1.0, NAN, -1.0, 0.0]);
    assert_eq!(out[4].to_i64s(), [0, 0, 0, 0, 0, 1, 0, 0]);
    assert_eq!(out[5].to_i64s(), [0, 0, 0, 0, 0, 0, 1, 0]);
}

/// Values from tables, to the last digit of f32.
#[test]
fn functions_have_their_values() {
    let cases: [(&str, f64, f64); 22] = [
        ("exp", 1.0, std::f64::consts::E),
        ("expm1", 1e-6, 1.000_000_5e-6),
        ("log", 10.0, std::f64::consts::LN_10),
        ("log", 0.0, -INF),
        ("log", -1.0, NAN),
        ("log1p", 1e-6, 9.999_995e-7),
        ("sqrt", 2.0, std::f64::consts::SQRT_2),
        ("sqrt", -1.0, NAN),
        ("rsqrt", 4.0, 0.5),
        ("recip", -0.0, -INF),
        ("sin", 1.0, 0.841_470_984_807_896_5),
        ("cos", 1.0, 0.540_302_305_868_139_7),
        ("tan", 1.0, 1.557_407_724_654_902_2),
        ("asin", 0.5, std::f64::consts::FRAC_PI_6),
        ("acos", 0.5, std::f64::consts::FRAC_PI_3),
        ("sinh", 1.0, 1.175_201_193_643_801_4),
        ("asinh", 1.0, 0.881_373_587_019_543),
        ("acosh", 2.0, 1.316_957_896_924_816_7),
        ("atanh", 0.5, 0.549_306_144_334_054_8),
        ("erf", 0.5, 0.520_499_877_813_046_5),
        ("erf", -2.0, -0.995_322_265_018_952_7),
        ("sigmoid", -100.0, 3.720_076e-44),
    ];
    for (op, x, expected) in cases {
        let out = run(&format!("%r = {op} %0 : f32[1]\nreturn %r"), &[f32s([1], &[x])]);
        let expected = f64::from(expected as f32);
        let actual = out[0].to_f64s()[0];
        // The argument is rounded to f32 too: 1e-6 is off by a part in 10^8.
        let close = actual == expected
            || (actual.is_nan() && expected.is_nan())
            || (actual / expected - 1.0).abs() < 1e-6;
        assert!(close, "{op}({x}) is {actual}, expected {expected}");
    }
}

#[test]
fn comparisons_with_nan() {
    let inputs = [
        f32s([4], &[1.0, NAN, NAN, -0.0]),
        f32s([4], &[2.0, 1.0, NAN, 0.0]),
    ];
    let expected = [
        ("eq", [0, 0, 0, 1]),
        ("ne", [1, 1, 1, 0]),
        ("lt", [1, 0, 0, 0]),
        ("le", [1, 0, 0, 1]),
        ("gt", [0, 0, 0, 0]),
        ("ge", [0, 0, 0, 1]),
    ];
    for (op, expected) in expected {
        let out = run(&format!("%r = compare {op} %0, %1 : bool[4]\nreturn %r"), &inputs);
        assert_eq!(out[0].to_i64s(), expected, "{op}");
    }
    let big = [ints(DType::U64, [1], &[-1]), ints(DType::U64, [1], &[1])];
    assert_eq!(
        run("%r = compare gt %0, %1 : bool[1]\nreturn %r", &big)[0].to_i64s(),
        [1],
        "u64 compares unsigned"
    );
}

#[test]
fn casts_round_saturate_and_wrap() {
    let x = f32s([6], &[2.9, -2.9, 1e20, -1e20, NAN, 300.0]);
    let out = run(
        "%a = cast %0 : i32[6]\n%b = cast %0 : u8[6]\n%c = cast %0 : bool[6]\nreturn %a, %b, %c",
        &[x],
    );
    assert_eq!(
        out[0].to_i64s(),
        [2, -2, i64::from(i32::MAX), i64::from(i32::MIN), 0, 300]
    );
    assert_eq!(out[1].to_i64s(), [2, 0, 255, 0, 0, 255]);
    assert_eq!(out[2].to_i64s(), [1, 1, 1, 1, 1, 1]);
    let out = run(
        "%a = cast %0 : i8[3]\n%b = cast %0 : u64[3]\n%c = cast %0 : bool[3]\n%d = cast %0 : f32[3]\nreturn %a, %b, %c, %d",
        &[ints(DType::I32, [3], &[300, -1, 16_777_217])],
    );
    assert_eq!(out[0].to_i64s(), [44, -1, 1]);
    assert_eq!(out[1].to_vec::<u64>(), Some(vec![300, u64::MAX, 16_777_217]));
    assert_eq!(out[2].to_i64s(), [1, 1, 1]);
    assert_floats(&out[3], &[300.0, -1.0, 16_777_216.0]);
    // 2^24 + 1 in steps: by way of f64 this integer would round twice, and up.
    let twice = ints(DType::I64, [1], &[(1 << 62) + (1 << 38) + 1]);
    let out = run("%a = cast %0 : f32[1]\nreturn %a", &[twice]);
    assert_floats(&out[0], &[((1u64 << 62) as f64) + (1u64 << 39) as f64]);
    let out = run(
        "%a = cast %0 : f16[4]\n%b = cast %0 : bf16[4]\nreturn %a, %b",
        &[f32s([4], &[2049.0, 2051.0, 1e6, 0.1])],
    );
    assert_floats(&out[0], &[2048.0, 2052.0, INF, 0.099_975_585_937_5]);
    assert_floats(&out[1], &[2048.0, 2048.0, 999_424.0, 0.100_097_656_25]);
}

#[test]
fn reductions_of_nothing_are_neutral() {
    let lines = "%a = reduce sum %0 {axes=[1]} : f32[2]\n%b = reduce prod %0 {axes=[1]} : f32[2]
        %c = reduce max %0 {axes=[1]} : f32[2]\n%d = reduce min %0 {axes=[1]} : f32[2]
        %e = reduce max %1 {axes=[0]} : i32[]\n%f = reduce min %1 {axes=[0]} : i32[]\n%g = reduce max %2 {axes=[0]} : u8[]
        %h = reduce any %3 {axes=[0]} : bool[]\n%i = reduce all %3 {axes=[0]} : bool[]
        return %a, %b, %c, %d, %e, %f, %g, %h, %i";
    let out = run(
        lines,
        &[
            f32s([2, 0], &[]),
            ints(DType::I32, [0], &[]),
            ints(DType::U8, [0], &[]),
            ints(DType::Bool, [0], &[]),
        ],
    );
    for (tensor, expected) in out.iter().zip([0.0, 1.0, -INF, INF]) {
        assert_floats(tensor, &[expected; 2]);
    }
    let rest: Vec<i64> = out[4..].iter().flat_map(HostTensor::to_i64s).collect();
    assert_eq!(rest, [i64::from(i32::MIN), i64::from(i32::MAX), 0, 0, 1]);
}

#[test]
fn reductions_combine_the_named_dimensions() {
    let x = f32s([2, 3, 2], &[1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12.]);
    let lines = "%a = reduce sum %0 {axes=[1]} : f32[2,2]\n%b = reduce sum %0 {axes=[0,2]} : f32[3]
        %c = reduce max %0 {axes=[0,1,2]} : f32[]\n%d = reduce prod %0 {axes=[0]} : f32[3,2]\nreturn %a, %b, %c, %d";
    let out = run(lines, &[x]);
    assert_floats(&out[0], &[9., 12., 27., 30.]);
    assert_floats(&out[1], &[18., 26., 34.]);
    assert_floats(&out[2], &[12.]);
    assert_floats(&out[3], &[7., 16., 27., 40., 55., 72.]);
    let out = run(
        "%a = reduce max %0 {axes=[0]} : f32[]\n%b = reduce min %0 {axes=[0]} : f32[]\nreturn %a, %b",
        &[f32s([3], &[1.0, NAN, 2.0])],
    );
    assert_floats(&out[0], &[NAN]);
    assert_floats(&out[1], &[NAN]);
    let out = run(
        "%a = reduce sum %0 {axes=[0]} : u8[]\nreturn %a",
        &[ints(DType::U8, [3], &[200, 100, 1])],
    );
    assert_eq!(out[0].to_i64s(), [45]);
}

#[test]
fn extremes_are_found_first_and_nan_before_all() {
    let x = f32s([3, 4], &[1., 5., 5., 0., NAN, 1., NAN, 2., 0., -0., 0., -1.]);
    let out = run(
        "%a = arg_reduce max %0 {axis=1} : i64[3]\n%b = arg_reduce min %0 {axis=1} : i32[3]\nreturn %a, %b",
        &[x],
    );
    assert_eq!(out[0].to_i64s(), [1, 0, 0]);
    assert_eq!(out[1].to_i64s(), [3, 0, 3]);
    let empty = try_run(
        "%a = arg_reduce max %0 {axis=0} : i64[3]\nreturn %a",
        &[f32s([2, 3], &[3., 1., 2., 3., 4., 2.])],
    );
    assert_eq!(empty.map(|out| out[0].to_i64s()), Ok(vec![0, 1, 0]));
}

#[test]
fn running_reductions_include_their_own_element() {
    let x = f32s([2, 3], &[1., 2., 3., 4., NAN, 6.]);
    let lines = "%a = cumulative sum %0 {axis=1} : f32[2,3]\n%b = cumulative prod %0 {axis=0} : f32[2,3]
        %c = cumulative max %0 {axis=1} : f32[2,3]\n%d = cumulative min %0 {axis=1} : f32[2,3]\nreturn %a, %b, %c, %d";
    let out = run(lines, &[x]);
    assert_floats(&out[0], &[1., 3., 6., 4., NAN, NAN]);
    assert_floats(&out[1], &[1., 2., 3., 4., NAN, 18.]);
    assert_floats(&out[2], &[1., 2., 3., 4., NAN, NAN]);
    assert_floats(&out[3], &[1., 1., 1., 4., NAN, NAN]);
}

#[test]
fn movement() {
    let x = f32s([2, 3], &[1., 2., 3., 4., 5., 6.]);
    let lines = "%t = transpose %0 {perm=[1,0]} : f32[3,2]
        %b = broadcast %0 {dims=[0,2]} : f32[2,2,3]
        %s = slice %0 {starts=[0,1], limits=[2,3], steps=[2,1]} : f32[1,2]
        %c = constant 9.0 : f32[]
        %p = pad %0, %c {low=[1,-1], high=[-1,1]} : f32[2,3]
        %f = flip %0 {axes=[0,1]} : f32[2,3]
        %k = concat %0, %f {axis=1} : f32[2,6]
        return %t, %b, %s, %p, %f, %k";
    let out = run(lines, std::slice::from_ref(&x));
    assert_floats(&out[0], &[1., 4., 2., 5., 3., 6.]);
    assert_floats(&out[1], &[1., 2., 3., 1., 2., 3., 4., 5., 6., 4., 5., 6.]);
    assert_floats(&out[2], &[2., 3.]);
    assert_floats(&out[3], &[9., 9., 9., 2., 3., 9.]);
    assert_floats(&out[4], &[6., 5., 4., 3., 2., 1.]);
    assert_floats(&out[5], &[1., 2., 3., 6., 5., 4., 4., 5., 6., 3., 2., 1.]);
    let update = f32s([1, 2], &[8., 9.]);
    let out = run(
        "%u = update_slice %0, %1 {starts=[1,0], steps=[1,2]} : f32[2,3]\nreturn %u",
        &[x, update],
    );
    assert_floats(&out[0], &[1., 2., 3., 8., 5., 9.]);
    let out = run(
        "%a = iota {axis=1} : f32[2,3]\n%b = iota {axis=0} : u8[2,3]\nreturn %a, %b",
        &[],
    );
    assert_floats(&out[0], &[0., 1., 2., 0., 1., 2.]);
    assert_eq!(out[1].to_i64s(), [0, 0, 0, 1, 1, 1]);
    // A pad that crops everything away and puts values in its place.
    let out = run(
        "%c = constant 9.0 : f32[]\n%p = pad %0, %c {low=[-5], high=[4]} : f32[2]\nreturn %p",
        &[f32s([3], &[1., 2., 3.])],
    );
    assert_floats(&out[0], &[9., 9.]);
    let out = run(
        "%c = constant 9.0 : f32[]\n%p = pad %0, %c {low=[4], high=[-5]} : f32[2]\nreturn %p",
        &[f32s([3], &[1., 2., 3.])],
    );
    assert_floats(&out[0], &[9., 9.]);
}

#[test]
fn indexing() {
    let x = f32s([2, 3], &[1., 2., 3., 4., 5., 6.]);
    let indices = ints(DType::I64, [2, 2], &[2, 0, 1, 1]);
    let updates = f32s([2, 2], &[10., 20., 30., 40.]);
    let lines = "%g = gather %0, %1 {axis=1} : f32[2,2]\n%a = scatter assign %0, %1, %2 {axis=1} : f32[2,3]
        %s = scatter add %0, %1, %2 {axis=1} : f32[2,3]\n%m = scatter mul %0, %1, %2 {axis=1} : f32[2,3]
        %x = scatter max %0, %1, %2 {axis=1} : f32[2,3]\n%n = scatter min %0, %1, %2 {axis=1} : f32[2,3]\nreturn %g, %a, %s, %m, %x, %n";
    let out = run(lines, &[x.clone(), indices, updates]);
    assert_floats(&out[0], &[3., 1., 5., 5.]);
    assert_floats(&out[1], &[20., 2., 10., 4., 40., 6.]);
    assert_floats(&out[2], &[21., 2., 13., 4., 75., 6.]);
    assert_floats(&out[3], &[20., 2., 30., 4., 6000., 6.]);
    assert_floats(&out[4], &[20., 2., 10., 4., 40., 6.]);
    assert_floats(&out[5], &[1., 2., 3., 4., 5., 6.]);
    let rows = ints(DType::U8, [3], &[1, 0, 1]);
    let updates = f32s([3, 3], &[10., 20., 30., 40., 50., 60., 70., 80., 90.]);
    let lines =
        "%g = index_select %0, %1 {axis=0} : f32[3,3]\n%a = index_put assign %0, %1, %2 {axis=0} : f32[2,3]
        %s = index_put add %0, %1, %2 {axis=0} : f32[2,3]\nreturn %g, %a, %s";
    let out = run(lines, &[x, rows, updates]);
    assert_floats(&out[0], &[4., 5., 6., 1., 2., 3., 4., 5., 6.]);
    assert_floats(&out[1], &[40., 50., 60., 70., 80., 90.]);
    assert_floats(&out[2], &[41., 52., 63., 84., 105., 126.]);
}

#[test]
fn an_index_out_of_range_is_an_error() {
    for index in [3, -1, i64::MIN] {
        let inputs = [
            f32s([3], &[1., 2., 3.]),
            ints(DType::I64, [1], &[index]),
            f32s([1], &[0.]),
        ];
        for line in [
            "gather %0, %1 {axis=0} : f32[1]",
            "index_select %0, %1 {axis=0} : f32[1]",
            "scatter add %0, %1, %2 {axis=0} : f32[3]",
            "index_put assign %0, %1, %2 {axis=0} : f32[3]",
        ] {
            let error = try_run(&format!("%r = {line}\nreturn %r"), &inputs).expect_err(line);
            let message = error.to_string();
            assert!(
                message.contains(&format!("index {index} is out of range")),
                "{message}"
            );
            assert!(
                message.contains(line.split(' ').next().unwrap_or(line)),
                "{message}"
            );
        }
    }
    let inputs = [f32s([1, 1, 1], &[1.]), ints(DType::I32, [1, 1, 1], &[4])];
    assert!(
        try_run(
            "%r = max_pool_grad %0, %1 {input=[4]} : f32[1,1,4]\nreturn %r",
            &inputs
        )
        .is_err()
    );
}

#[test]
fn products() {
    let (a, b) = (
        f32s([2, 3], &[1., 2., 3., 4., 5., 6.]),
        f32s([3, 2], &[1., 2., 3., 4., 5., 6.]),
    );
    let out = run("%r = dot_general %0, %1 {a_contract=[1], b_contract=[0]} : f32[2,2]\n%o = dot_general %0, %1 : f32[2,3,3,2]
        %t = dot_general %0, %1 {a_batch=[0], b_batch=[1], a_contract=[1], b_contract=[0]} : f32[2]\nreturn %r, %o, %t", &[a, b]);
    assert_floats(&out[0], &[22., 28., 49., 64.]);
    assert_eq!(out[1].to_f64s()[35], 36.0);
    assert_floats(&out[2], &[22., 64.]);
    let empty = run(
        "%r = dot_general %0, %1 {a_contract=[1], b_contract=[0]} : f32[2,2]\nreturn %r",
        &[f32s([2, 0], &[]), f32s([0, 2], &[])],
    );
    assert_floats(&empty[0], &[0.; 4]);
}

#[test]
fn sorting() {
    let x = f32s([7], &[2., NAN, -1., 2., -0.0, 0.0, NAN]);
    let lines = "%a, %i = sort %0 {axis=0} : f32[7], i64[7]\n%b, %j = sort %0 {axis=0, descending=true} : f32[7], u8[7]
        %c, %k = top_k %0 {axis=0, k=4} : f32[4], i32[4]\nreturn %a, %i, %b, %j, %c, %k";
    let out = run(lines, &[x]);
    assert_floats(&out[0], &[-1., -0., 0., 2., 2., NAN, NAN]);
    assert_eq!(out[1].to_i64s(), [2, 4, 5, 0, 3, 1, 6]);
    assert_floats(&out[2], &[NAN, NAN, 2., 2., -0., 0., -1.]);
    assert_eq!(out[3].to_i64s(), [1, 6, 0, 3, 4, 5, 2]);
    assert_floats(&out[4], &[NAN, NAN, 2., 2.]);
    assert_eq!(out[5].to_i64s(), [1, 6, 0, 3]);
    let out = run(
        "%a, %i = sort %0 {axis=0, descending=true} : i8[3,2], i64[3,2]\nreturn %a, %i",
        &[ints(DType::I8, [3, 2], &[1, 9, -5, 9, 7, 10])],
    );
    assert_eq!(out[0].to_i64s(), [7, 10, 1, 9, -5, 9]);
    assert_eq!(out[1].to_i64s(), [2, 2, 0, 0, 1, 1]);
}

#[test]
fn pooling() {
    let x = f32s([1, 1, 5], &[1., 3., 3., NAN, 2.]);
    let lines = "%m, %i = max_pool_with_indices %0 {size=[2], stride=[1], pad_low=[1], pad_high=[0], dilation=[1]} : f32[1,1,5], i64[1,1,5]
        %c = max_pool %0 {size=[2], stride=[2], pad_low=[0], pad_high=[0], dilation=[1], ceil_mode=true} : f32[1,1,3]
        %d = max_pool %0 {size=[2], stride=[1], pad_low=[0], pad_high=[0], dilation=[2]} : f32[1,1,3]\nreturn %m, %i, %c, %d";
    let out = run(lines, &[x]);
    assert_floats(&out[0], &[1., 3., 3., NAN, NAN]);
    assert_eq!(out[1].to_i64s(), [0, 1, 1, 3, 3]);
    assert_floats(&out[2], &[3., NAN, 2.]);
    assert_floats(&out[3], &[3., NAN, 3.]);

    // Two windows at the right end: one half over the padding, one over what lies beyond it.
    let x = f32s([1, 1, 4], &[2., 4., 6., 8.]);
    let window = "size=[3], stride=[2], pad_low=[1], pad_high=[1], dilation=[1], ceil_mode=true";
    let lines = format!(
        "%a = avg_pool %0 {{{window}, count_include_pad=true}} : f32[1,1,3]\n%b = avg_pool %0 {{{window}}} : f32[1,1,3]
         %g = avg_pool_grad %a {{{window}, count_include_pad=true, input=[4]}} : f32[1,1,4]\nreturn %a, %b, %g"
    );
    let out = run(&lines, &[x]);
    // Windows over padded positions 0..3, 2..5 and 4..7 of [0, 2, 4, 6, 8, 0]; position 6 counts for nobody.
    assert_floats(&out[0], &[2., 6., 4.]);
    assert_floats(&out[1], &[3., 6., 8.]);
    let third = |x: f64| f64::from((x / 3.0) as f32);
    assert_floats(&out[2], &[third(2.), third(8.), 2., 4.]);
}

/// A mean of narrow integers is one of them. A sum that 64 bits do not hold wraps before it is divided.
#[test]
fn means_of_integers_are_of_sums_of_64_bits() {
    let window = "size=[2], stride=[1], pad_low=[0], pad_high=[0], dilation=[1]";
    let mean = |dtype: DType, a: i64, b: i64| {
        let lines = format!("%a = avg_pool %0 {{{window}}} : {dtype}[1,1,1]\nreturn %a");
        run(&lines, &[ints(dtype, [1, 1, 2], &[a, b])])[0].to_i64s()[0]
    };
    assert_eq!(mean(DType::I64, i64::MAX, i64::MAX), -1);
    assert_eq!(mean(DType::I64, i64::MIN, -2), i64::MAX / 2);
    assert_eq!(mean(DType::U64, -1, 7), 3);
    assert_eq!(mean(DType::U64, i64::MAX, i64::MAX), i64::MAX);
    assert_eq!(mean(DType::U8, 200, 201), 200);
    assert_eq!(
        mean(DType::I32, i32::MAX.into(), i32::MAX.into()),
        i32::MAX.into()
    );
    assert_eq!(mean(DType::I8, -3, 0), -1);
}

#[test]
fn attention_sees_what_it_may() {
    // One head, two queries, two keys; zero scores make the weights plain means.
    let (q, k) = (f32s([1, 1, 2, 1], &[0., 0.]), f32s([1, 1, 2, 1], &[1., 2.]));
    let v = f32s([1, 1, 2, 1], &[10., 20.]);
    let mask = f32s([1, 1, 1, 2], &[0., -INF]);
    let lines = "%s = constant 1.0 : f32[]
        %a, %sa = attention %0, %1, %2, %s : f32[1,1,2,1], f32[1,1,2,2]
        %c, %sc = attention %0, %1, %2, %s {causal=true} : f32[1,1,2,1], f32[1,1,2,2]
        %m, %sm = attention %0, %1, %2, %s, %3 {mask=true} : f32[1,1,2,1], f32[1,1,2,2]
        %h = constant true : bool[]
        %hb = broadcast %h {dims=[]} : bool[1,1,1,2]
        %f = constant -3e38 : f32[]
        %n, %sn = attention %0, %1, %2, %s, %hb, %f {hidden=true} : f32[1,1,2,1], f32[1,1,2,2]
        return %a, %sa, %c, %m, %sm, %n, %sn";
    let out = run(lines, &[q.clone(), k.clone(), v.clone(), mask]);
    assert_floats(&out[0], &[15., 15.]);
    assert_floats(&out[1], &[0., 2., 0., 2.]);
    assert_floats(&out[2], &[10., 15.]);
    assert_floats(&out[3], &[10., 10.]);
    assert_floats(&out[4], &[0., 1., 0., 1.]);
    // All hidden by one finite number: equal weights, and statistics that still say so.
    assert_floats(&out[5], &[15., 15.]);
    let fill = f64::from(-3e38f32);
    assert_floats(&out[6], &[fill, 2., fill, 2.]);
    // Every score -inf: the formula gives NaN.
    let mask = f32s([1, 1, 2, 1], &[0., -INF]);
    let lines = "%s = constant 1.0 : f32[]\n%m, %sm = attention %0, %1, %2, %s, %3 {mask=true} : f32[1,1,2,1], f32[1,1,2,2]\nreturn %m";
    assert_floats(&run(lines, &[q, k, v, mask])[0], &[15., NAN]);
}

#[test]
fn rounding_is_once_per_primitive_and_not_at_all_in_f64() {
    let text = "graph @g {\n %0 = parameter 0 : f16[1]\n %1 = constant 0.1 : f16[]\n %2 = broadcast %1 {dims=[]} : f16[1]
        %3 = add %0, %2 : f16[1]\n %4 = sub %3, %0 : f16[1]\n return %4\n}";
    let graph = Graph::parse(text).expect("well formed");
    let input = [HostTensor::from_floats(DType::F16, [1], [100.0])];
    let rounded = interpret(&graph, &input, &[]).expect("runs");
    assert_eq!(rounded[0].ty().dtype, DType::F16);
    assert_floats(&rounded[0], &[0.125]); // f16 numbers near 100 are 1/16 apart
    let exact = interpret_f64(&graph, &input, &[]).expect("runs");
    assert_eq!(exact[0].ty().dtype, DType::F64);
    // The constant is the f16 nearest to 0.1, the sum is not rounded to f16.
    assert!((exact[0].to_f64s()[0] - 0.099_975_585_937_5).abs() < 1e-12);
    // In f64, arguments may be finer than their declared type; otherwise not.
    let fine = [HostTensor::from_floats(DType::F64, [1], [100.001])];
    assert!(interpret_f64(&graph, &fine, &[]).is_ok());
    assert!(matches!(
        interpret(&graph, &fine, &[]),
        Err(InterpretError::TensorType { index: 0, .. })
    ));
}

#[test]
fn arguments_are_checked() {
    let graph =
        Graph::parse("graph @g {\n %0 = parameter 0 : f32[1]\n %1 = scalar 0 : f32[]\n return %0, %1\n}")
            .expect("well formed");
    let x = f32s([1], &[1.0]);
    let scalar = [Scalar::Float(0.1)];
    let run = |tensors: &[HostTensor], scalars: &[Scalar]| interpret(&graph, tensors, scalars);
    assert!(matches!(
        run(&[], &scalar),
        Err(InterpretError::TensorCount {
            expected: 1,
            given: 0,
            ..
        })
    ));
    assert!(matches!(
        run(std::slice::from_ref(&x), &[]),
        Err(InterpretError::ScalarCount {
            expected: 1,
            given: 0,
            ..
        })
    ));
    assert!(matches!(
        run(&[f32s([2], &[1., 2.])], &scalar),
        Err(InterpretError::TensorType { .. })
    ));
    let out = run(&[x], &scalar).expect("fits");
    assert_floats(&out[1], &[f64::from(0.1f32)]);
}

#[test]
fn operations_kept_whole_need_a_handler() {
    let text = "graph @g {\n %0 = parameter 0 : f32[2]\n %1, %2 = extern \"twice\" %0 {attributes=\"k=2\"} : f32[2], i64[]\n return %1, %2\n}";
    let graph = Graph::parse(text).expect("well formed");
    let input = [f32s([2], &[1., 2.])];
    let error = interpret(&graph, &input, &[]).expect_err("nothing knows it");
    assert!(error.to_string().contains("`twice`"), "{error}");
    let mut handler = |op: &ExternOp, x: &[HostTensor]| {
        assert_eq!((op.name.as_str(), op.attributes.as_str()), ("twice", "k=2"));
        let doubled = x[0].to_f64s().into_iter().map(|x| 2.0 * x);
        Ok(vec![
            HostTensor::from_floats(DType::F32, [2], doubled),
            HostTensor::scalar(DType::I64, Scalar::Int(7)),
        ])
    };
    let out = Interpreter::new(&graph)
        .with_extern(&mut handler)
        .run(&input, &[])
        .expect("the handler runs it");
    assert_floats(&out[0], &[2., 4.]);
    assert_eq!(out[1].to_i64s(), [7]);
    let mut wrong = |_: &ExternOp, _: &[HostTensor]| Ok(vec![]);
    let error = Interpreter::new(&graph)
        .with_extern(&mut wrong)
        .run(&input, &[])
        .expect_err("results are missing");
    assert!(matches!(error, InterpretError::Extern { .. }), "{error}");
}

#[test]
fn every_value_can_be_had() {
    let text =
        "graph @g {\n %0 = parameter 0 : f32[2]\n %1 = neg %0 : f32[2]\n %2 = neg %1 : f32[2]\n return %2\n}";
    let graph = Graph::parse(text).expect("well formed");
    let values = Interpreter::new(&graph)
        .run_values(&[f32s([2], &[1., 2.])], &[])
        .expect("runs");
    assert_eq!(values.len(), 3);
    assert_floats(&values[1], &[-1., -2.]);
}
