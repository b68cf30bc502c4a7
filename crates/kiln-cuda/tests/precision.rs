//! How far sums and convolutions in kernels of our own are from their values.
//!
//! A sum over many elements is as far as one or two roundings of the result, whatever its length: one
//! accumulator of f32 that adds n positive numbers is off by some `sqrt(n) / 3` units of 2^-24, so threads,
//! warps and blocks must share the work, each over a short chain. Convolutions add numbers of both signs in
//! one chain of n terms, which is off by some `sqrt(n) / 5` units.

#[path = "../../kiln-compiler/tests/targets/precision.rs"]
mod target;

use kiln_cuda::testing::host::{Differential, HostStep, Outcome};
use kiln_graph::{DType, Graph, HostTensor};
use target::{convolution, gradient};

/// The results of a graph.
fn run(graph: &Graph, inputs: &[HostTensor]) -> Vec<HostTensor> {
    let comparison = Differential::new(graph).arguments(inputs.to_vec(), Vec::new());
    let host = HostStep::of(&comparison.compile().unwrap()).unwrap();
    comparison.run(&host).unwrap()
}

#[test]
fn remainders_are_exact() {
    target::check_remainders();
}

/// NVRTC joins a plain product with the sum behind it, which compilers of the host are told not to do: two
/// kernels would disagree about one value.
#[test]
fn products_are_rounded_before_they_are_added_to() {
    for (dtype, product) in [
        ("f32", "__fmul_rn("),
        ("bf16", "__fmul_rn("),
        ("f64", "__dmul_rn("),
    ] {
        let text = format!(
            "graph @joined {{
               %x = parameter 0 : {dtype}[100]
               %y = parameter 1 : {dtype}[100]
               %product = mul %x, %y : {dtype}[100]
               %sum = add %product, %y : {dtype}[100]
               return %sum
             }}"
        );
        let step = Differential::new(&Graph::parse(&text).unwrap())
            .compile()
            .unwrap();
        let bodies = step
            .code
            .functions
            .iter()
            .map(|function| function.text.body.as_str());
        let products: usize = bodies.map(|body| body.matches(product).count()).sum();
        assert!(products > 0, "{dtype}");
    }
}

#[test]
fn long_sums_are_shared() {
    target::check_long_sums(2.0);
}

#[test]
fn updates_of_16_bits_round_once() {
    target::check_updates_of_16_bits();
}

#[test]
fn statistics_of_channels_do_not_cancel() {
    target::check_statistics_of_channels();
}

#[test]
fn convolutions_add_up_in_short_chains() {
    target::check_products(&[
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
    ]);
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

/// A quotient of many numbers by one is the product with its inverse, corrected: it rounds as a division does
/// where nothing is near the ends of the range, and is off by at most a unit elsewhere.
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

/// The number of bf16, of 8 significant bits, nearest to an integer; of two the one with the even last bit.
fn nearest(x: i128) -> f64 {
    let size = x.unsigned_abs();
    let cut = (128 - size.leading_zeros()).saturating_sub(8);
    let (kept, rest, half) = (size >> cut, size & ((1 << cut) - 1), (1 << cut) >> 1);
    let up = cut > 0 && (rest > half || (rest == half && kept % 2 == 1));
    let rounded = ((kept + u128::from(up)) << cut) as f64;
    if x < 0 { -rounded } else { rounded }
}

/// Integers become numbers of bf16 in one rounding: f32, and for 64 bits f64, would make of a number beside
/// the middle of two results the middle itself.
#[test]
fn integers_round_to_bf16_once() {
    assert_eq!(nearest(33_685_505), 33_816_576.0);
    for (dtype, most) in [
        (DType::I32, i128::from(i32::MAX)),
        (DType::U32, i128::from(u32::MAX)),
        (DType::I64, i128::from(i64::MAX)),
        (DType::U64, i128::from(u64::MAX)),
    ] {
        let least = if dtype.is_signed_int() { -most - 1 } else { 0 };
        let mut numbers = vec![0, 33_685_505, least, most];
        for bits in 8..64 {
            for kept in [129, 170, 255] {
                let middle = (i128::from(kept) << (bits - 7)) + (1_i128 << (bits - 8));
                let beside = [0, 1, 2, 1 << (bits / 3), 1 << (bits / 2)];
                numbers.extend(beside.iter().flat_map(|off| [middle + off, middle - off]));
            }
        }
        let signed: Vec<i128> = numbers.iter().flat_map(|&x| [x, -x]).collect();
        let numbers: Vec<i128> = signed
            .into_iter()
            .filter(|x| (least..=most).contains(x))
            .collect();
        let count = numbers.len();
        let graph = Graph::parse(&format!(
            "graph @casts {{
  %0 = parameter 0 : {dtype}[{count}]
  %1 = cast %0 : bf16[{count}]
  return %1
}}"
        ))
        .unwrap();
        let given = HostTensor::from_ints(dtype, [count], numbers.iter().map(|&x| x as i64));
        let found = run(&graph, std::slice::from_ref(&given));
        for (&x, found) in numbers.iter().zip(found[0].to_f64s()) {
            assert_eq!(found, nearest(x), "{x} of {dtype}");
        }
        if dtype.size() == 4 {
            let comparison = Differential::new(&graph).arguments(vec![given], Vec::new());
            assert_eq!(comparison.tolerances(&[0.0]).check(), Ok(Outcome::Same));
        }
    }
}
