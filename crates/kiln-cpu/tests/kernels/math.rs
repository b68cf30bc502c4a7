//! The vector functions against the C library in double precision, over a dense sample of all f32 bit
//! patterns.

use kiln_cpu::kernels::{KernelText, Param, standalone, vector};
use kiln_cpu::{AlignedBuffer, BuildOptions, Isa, Library, NoHooks, StepArguments, ThreadPool, Toolchain};

use crate::harness::{Random, instruction_sets};

/// Name, bound in ULP, and the exact value in C, of `x` in double.
const FUNCTIONS: [(&str, f64, &str); 11] = [
    ("exp", 1.1, "exp(x)"),
    ("expm1", 1.6, "expm1(x)"),
    ("log", 1.1, "log(x)"),
    ("log1p", 1.1, "log1p(x)"),
    ("tanh", 1.5, "tanh(x)"),
    (
        "sigmoid",
        2.5,
        "(x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)))",
    ),
    ("erf", 1.4, "erf(x)"),
    ("sin", 2.5, "sin(x)"),
    ("cos", 2.5, "cos(x)"),
    ("sqrt", 0.5, "sqrt(x)"),
    ("rsqrt", 1.5, "1 / sqrt(x)"),
];

/// A kernel that applies `vf_<name>` to `len` floats and computes `exact` in double beside it.
fn kernel(name: &str, len: usize, lanes: usize, call: &str, exact: &str) -> KernelText {
    let params = vec![
        Param::new("const float *", "a"),
        Param::new("float *", "out"),
        Param::new("double *", "reference"),
    ];
    let head = format!(
        "void math_{name}(const kiln_runtime *rt, const float *a, float *out, double *reference, char *workspace)"
    );
    assert_eq!(len % lanes, 0);
    let source = format!(
        "{head} {{\n    for (int64_t i = 0; i < {len}; i += {lanes}) vf_store(out + i, {call});\n    for (int64_t i = 0; i < {len}; \
         i++) {{ double x = a[i]; reference[i] = {exact}; }}\n}}\n"
    );
    KernelText {
        name: format!("math_{name}"),
        params,
        prototype: format!("{head};"),
        source,
        helpers: vec![],
        workspace_bytes: 0,
    }
}

/// Runs a kernel; gives results and exact values.
fn evaluate(
    toolchain: &Toolchain,
    isa: Isa,
    kernels: &[KernelText],
    input: &[f32],
    len: usize,
) -> Vec<(Vec<f32>, Vec<f64>)> {
    let built = toolchain
        .build(&standalone::step(kernels, isa), &BuildOptions::default())
        .unwrap();
    let step = Library::load(built.path()).unwrap().step();
    let mut results = vec![(vec![0f32; len], vec![0f64; len]); kernels.len()];
    let outputs: Vec<*mut u8> = results
        .iter_mut()
        .flat_map(|(out, exact)| [out.as_mut_ptr().cast::<u8>(), exact.as_mut_ptr().cast()])
        .collect();
    let inputs = vec![input.as_ptr().cast(); kernels.len()];
    let mut arena = AlignedBuffer::zeroed(0).unwrap();
    let arguments = StepArguments {
        inputs: &inputs,
        outputs: &outputs,
        arena: &mut arena,
        scalars: &[],
    };
    // SAFETY: all buffers have the length that the kernels were generated for.
    unsafe { step.run(&ThreadPool::new(1), arguments, &NoHooks) }.unwrap();
    results
}

/// Distance of `got` from `exact` in units of the last place of f32 at `exact`; infinite if one is NaN, or
/// infinite where the other does not round to it.
fn ulps(exact: f64, got: f32) -> f64 {
    let rounded = exact as f32;
    if exact.is_nan() || got.is_nan() {
        return if exact.is_nan() && got.is_nan() {
            0.0
        } else {
            f64::INFINITY
        };
    }
    if rounded.is_infinite() || got.is_infinite() {
        // At the border of overflow either side of the rounding is within half a unit.
        let largest = rounded.abs().min(got.abs());
        return if rounded == got || (largest == f32::MAX && rounded.signum() == got.signum()) {
            0.0
        } else {
            f64::INFINITY
        };
    }
    let exponent = (rounded.abs().to_bits() >> 23).max(1) as i32 - 127 - 23;
    (exact - f64::from(got)).abs() / f64::powi(2.0, exponent)
}

#[test]
fn functions_keep_their_bounds() {
    let toolchain = Toolchain::detect().unwrap();
    for (position, isa) in instruction_sets(&toolchain).into_iter().enumerate() {
        // A prime stride visits every exponent, both signs, and all low bits alike.
        let stride = if position == 0 { 2_003 } else { 20_011 };
        let mut sample: Vec<f32> = (0..=u32::MAX).step_by(stride).map(f32::from_bits).collect();
        sample.resize(sample.len().next_multiple_of(16), 0.0);
        let lanes = vector::lanes(isa);
        let kernels: Vec<KernelText> = FUNCTIONS
            .iter()
            .map(|(name, _, exact)| {
                kernel(
                    name,
                    sample.len(),
                    lanes,
                    &format!("vf_{name}(vf_load(a + i))"),
                    exact,
                )
            })
            .collect();
        let results = evaluate(&toolchain, isa, &kernels, &sample, sample.len());
        for ((name, bound, _), (got, exact)) in FUNCTIONS.iter().zip(&results) {
            // Two roundings more where a multiply-add is not one instruction.
            let bound = if isa.has_fma() || *bound < 1.0 {
                *bound
            } else {
                bound + 0.5
            };
            for ((&x, &got), &exact) in sample.iter().zip(got).zip(exact) {
                let error = ulps(exact, got);
                assert!(
                    error <= bound,
                    "{isa} {name}({x:e}) = {got:e}, exact {exact:e}: {error} ULP"
                );
            }
        }
    }
}

#[test]
fn special_values() {
    let inf = f32::INFINITY;
    let nan = f32::NAN;
    let cases: [(&str, &[(f32, f32)]); 11] = [
        (
            "exp",
            &[
                (0.0, 1.0),
                (-0.0, 1.0),
                (inf, inf),
                (-inf, 0.0),
                (nan, nan),
                (200.0, inf),
                (-200.0, 0.0),
            ],
        ),
        (
            "expm1",
            &[
                (0.0, 0.0),
                (-0.0, -0.0),
                (inf, inf),
                (-inf, -1.0),
                (nan, nan),
                (1e-40, 1e-40),
            ],
        ),
        (
            "log",
            &[
                (1.0, 0.0),
                (0.0, -inf),
                (-0.0, -inf),
                (-1.0, nan),
                (inf, inf),
                (-inf, nan),
                (nan, nan),
            ],
        ),
        (
            "log1p",
            &[
                (0.0, 0.0),
                (-0.0, -0.0),
                (-1.0, -inf),
                (-2.0, nan),
                (inf, inf),
                (nan, nan),
                (1e-40, 1e-40),
            ],
        ),
        (
            "tanh",
            &[
                (0.0, 0.0),
                (-0.0, -0.0),
                (inf, 1.0),
                (-inf, -1.0),
                (nan, nan),
                (1e-40, 1e-40),
            ],
        ),
        ("sigmoid", &[(0.0, 0.5), (inf, 1.0), (-inf, 0.0), (nan, nan)]),
        (
            "erf",
            &[
                (0.0, 0.0),
                (-0.0, -0.0),
                (inf, 1.0),
                (-inf, -1.0),
                (nan, nan),
                (5.0, 1.0),
            ],
        ),
        (
            "sin",
            &[(0.0, 0.0), (-0.0, -0.0), (inf, nan), (-inf, nan), (nan, nan)],
        ),
        (
            "cos",
            &[(0.0, 1.0), (-0.0, 1.0), (inf, nan), (-inf, nan), (nan, nan)],
        ),
        (
            "sqrt",
            &[(0.0, 0.0), (-0.0, -0.0), (-1.0, nan), (inf, inf), (nan, nan)],
        ),
        (
            "rsqrt",
            &[(0.0, inf), (-0.0, -inf), (-1.0, nan), (inf, 0.0), (nan, nan)],
        ),
    ];
    let toolchain = Toolchain::detect().unwrap();
    for isa in instruction_sets(&toolchain) {
        let lanes = vector::lanes(isa);
        for (name, cases) in cases {
            let mut input: Vec<f32> = cases.iter().map(|case| case.0).collect();
            // The other lanes hold something ordinary: special lanes must not disturb them, nor they those.
            input.resize(16, 0.5);
            let kernel = kernel(name, 16, lanes, &format!("vf_{name}(vf_load(a + i))"), "x");
            let (got, _) = &evaluate(&toolchain, isa, &[kernel], &input, 16)[0];
            for (&(x, expected), &got) in cases.iter().zip(got) {
                let same = got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan());
                assert!(same, "{isa} {name}({x:e}) = {got:e}, expected {expected:e}");
            }
            assert!(
                got[cases.len()..].iter().all(|&y| y == got[15]),
                "{isa} {name}: {got:?}"
            );
        }
    }
}

/// Powers: every pair of special values, and random pairs of all magnitudes.
#[test]
fn powers_match_c() {
    let mut values = vec![
        0.0,
        1.0,
        2.0,
        3.0,
        0.5,
        1.5,
        1e-40,
        8_388_607.0,
        16_777_216.0,
        1.000_000_1,
        3e38,
        1e10,
        f32::INFINITY,
    ];
    values.extend(values.clone().iter().map(|v| -v));
    values.push(f32::NAN);
    let mut pairs: Vec<(f32, f32)> = values
        .iter()
        .flat_map(|&x| values.iter().map(move |&y| (x, y)))
        .collect();
    let mut random = Random::new(9);
    for i in 0..200_000 {
        pairs.push(if i % 2 == 0 {
            (
                f32::from_bits(random.next() as u32),
                f32::from_bits(random.next() as u32),
            )
        } else {
            (
                random.below(4_000_000) as f32 * 1e-6,
                random.below(2_000_000) as f32 * 1e-4 - 100.0,
            )
        });
    }
    pairs.resize(pairs.len().next_multiple_of(16), (1.0, 1.0));
    let count = pairs.len();
    let input: Vec<f32> = pairs
        .iter()
        .map(|p| p.0)
        .chain(pairs.iter().map(|p| p.1))
        .collect();
    let toolchain = Toolchain::detect().unwrap();
    for isa in instruction_sets(&toolchain) {
        let call = format!("vf_pow(vf_load(a + i), vf_load(a + i + {count}))");
        let kernel = kernel(
            "pow",
            count,
            vector::lanes(isa),
            &call,
            &format!("pow(x, a[i + {count}])"),
        );
        let (got, exact) = &evaluate(&toolchain, isa, &[kernel], &input, count)[0];
        for ((&(x, y), &got), &exact) in pairs.iter().zip(got).zip(exact) {
            let error = ulps(exact, got);
            assert!(
                error <= 0.6,
                "{isa} pow({x:e}, {y:e}) = {got:e}, exact {exact:e}: {error} ULP"
            );
        }
    }
}

/// One value at a time gives the same bits as a lane; half precision survives a round trip and rounds to
/// nearest even.
#[test]
fn scalars_and_half_precision_agree_with_vectors() {
    let toolchain = Toolchain::detect().unwrap();
    let len = 1 << 16;
    // All f16 and bf16 bit patterns, as floats and back.
    let halves: Vec<f32> = (0..len as u32).map(|h| f32::from_bits(h << 16)).collect();
    for isa in instruction_sets(&toolchain) {
        let scalar = "({ vf y; for (int l = 0; l < KILN_LANES; l++) y[l] = sf_tanh(a[i + l]); y; })";
        let both = format!(
            "vf_select(({scalar} == vf_tanh(vf_load(a + i))) | (vf_load(a + i) != vf_load(a + i)), (vf){{0}}, vf_set1(1.0f))"
        );
        let bf16 = "({ vf y; for (int l = 0; l < KILN_LANES; l++) y[l] = bf16_from_sf(a[i + l]) == (uint16_t)(i + l) || a[i + l] != \
                    a[i + l] ? 0.0f : 1.0f; y; })";
        let f16 = "({ vf y; for (int l = 0; l < KILN_LANES; l++) { float x = sf_from_f16((uint16_t)(i + l)); y[l] = f16_from_sf(x) == \
                   (uint16_t)(i + l) || x != x ? 0.0f : 1.0f; } y; })";
        let lanes = vector::lanes(isa);
        let kernels = [
            kernel("same", len, lanes, &both, "0"),
            kernel("bf16", len, lanes, bf16, "0"),
            kernel("f16", len, lanes, f16, "0"),
        ];
        for (index, (wrong, _)) in evaluate(&toolchain, isa, &kernels, &halves, len)
            .iter()
            .enumerate()
        {
            assert_eq!(wrong.iter().position(|&w| w != 0.0), None, "{isa}, check {index}");
        }
    }
}

/// Vectors convert to and from half precision as single values do, over a sample of all floats.
#[test]
fn half_precision_vectors_agree_with_scalars() {
    let toolchain = Toolchain::detect().unwrap();
    let mut sample: Vec<f32> = (0..=u32::MAX).step_by(40_009).map(f32::from_bits).collect();
    sample.resize(sample.len().next_multiple_of(16), 0.0);
    for isa in instruction_sets(&toolchain) {
        let kernels = ["bf16", "f16"].map(|format| {
            let call = format!(
                "({{ uint16_t h[KILN_LANES]; vf v = vf_load(a + i), y; vf_store_{format}(h, v); vf back = vf_load_{format}(h);\n    for (int l = \
                 0; l < KILN_LANES; l++) y[l] = v[l] != v[l] ? back[l] == back[l] : h[l] != {format}_from_sf(v[l]) || back[l] != \
                 sf_from_{format}(h[l]); y; }})"
            );
            kernel(format, sample.len(), vector::lanes(isa), &call, "0")
        });
        let results = evaluate(&toolchain, isa, &kernels, &sample, sample.len());
        for (format, (wrong, _)) in ["bf16", "f16"].iter().zip(&results) {
            let first = wrong.iter().position(|&w| w != 0.0).map(|i| sample[i]);
            assert_eq!(first, None, "{isa} {format}");
        }
    }
}

/// The exponential of doubles down to the least that is not zero, against the C library's in more than double
/// precision.
#[test]
fn falling_exponential_of_doubles() {
    const LEN: usize = 1 << 16;
    let toolchain = Toolchain::detect().unwrap();
    for isa in instruction_sets(&toolchain) {
        let half = vector::lanes(isa) / 2;
        let head = "void math_exp_down(const kiln_runtime *rt, const float *a, float *out, double *reference, char *workspace)";
        // Units in the last place; then what becomes of zero, of numbers below, and of NaN.
        let source = format!(
            "{head} {{\n    for (int64_t i = 0; i < {LEN}; i += {half}) {{\n        vd x;\n        for (int l = 0; l < {half}; l++) x[l] \
             = -(double)(i + l) * (708.0 / {LEN});\n        vd_store(reference + i, vd_exp_down(x));\n    }}\n    for (int64_t i = 0; i < {LEN}; i++) {{\n        \
             const long double exact = expl(-(double)i * (708.0 / {LEN}));\n        reference[i] = (double)(fabsl(reference[i] - exact) / ldexpl(1, \
             ilogbl(exact) - 52));\n    }}\n    out[0] = vd_exp_down(vd_set1(0.0))[0];\n    out[1] = vd_exp_down(vd_set1(-708.1))[0];\n    out[2] = \
             vd_exp_down(vd_set1(-KILN_INF))[0];\n    out[3] = vd_exp_down(vd_set1(KILN_NAN))[0];\n}}\n"
        );
        let kernel = KernelText {
            source,
            prototype: format!("{head};"),
            ..kernel("exp_down", LEN, half, "", "")
        };
        let (special, errors) = evaluate(&toolchain, isa, &[kernel], &[0.0; LEN], LEN).remove(0);
        let bound = if isa.has_fma() { 1.1 } else { 1.6 };
        for (at, error) in errors.iter().enumerate() {
            assert!(*error <= bound, "{isa}: element {at} is off by {error} ULP");
        }
        assert_eq!(special[..3], [1.0, 0.0, 0.0], "{isa}");
        assert!(special[3].is_nan(), "{isa}");
    }
}
