//! What generated kernels are made of, on a GPU: numbers, reductions, random numbers. Sources are compiled
//! where NVRTC is; they run where a GPU is.

mod common;

use std::sync::Arc;

use common::{Gpu, bytes, gpu, numbers};
use half::{bf16, f16};
use kiln_cuda::build::{Compiler, Source, Store};
use kiln_cuda::kernels::PRELUDE;
use kiln_cuda::runtime::{Arguments, Kernel, Launch, Storage};
use kiln_graph::DType;
use kiln_graph::philox;

/// Kernels that apply a part of the prelude each.
const PARTS: &str = r#"
extern "C" __global__
void random(kiln_u32* words, float* uniform, kiln_u64 seed, kiln_u64 stream, kiln_u64 first)
{
    kiln_u64 i = blockIdx.x * blockDim.x + threadIdx.x;
    kiln_block4 b = kiln_philox(seed, stream, first + i);
    for (int j = 0; j < 4; j++) {
        words[4 * i + j] = b.word[j];
        uniform[4 * i + j] = kiln_uniform(b.word[j]);
    }
}

extern "C" __global__ void widen(const kiln_f16* halves, const kiln_bf16* brains, float* f, float* b)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    f[i] = kiln_widen(halves[i]);
    b[i] = kiln_widen(brains[i]);
}

extern "C" __global__ void narrow(const float* x, kiln_f16* halves, kiln_bf16* brains)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    halves[i] = kiln_narrow<kiln_f16>(x[i]);
    brains[i] = kiln_narrow<kiln_bf16>(x[i]);
}

// How far `y` is from `x`, as a part of it: infinitely if it is another kind of number.
__device__ float off(float y, double x)
{
    const float infinite = kiln_infinity();
    if (x != x) return y != y ? 0 : infinite;
    if (fabsf((float)x) == infinite) return y == (float)x ? 0 : infinite;
    // What is not normal may be zero.
    if (fabs(x) < 1.2e-38) return fabsf(y) < 1.2e-38f ? 0 : infinite;
    return (float)(fabs(y - x) / fabs(x));
}

extern "C" __global__ void near(const float* x, const float* y, float* errors)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x, count = gridDim.x * blockDim.x;
    const float a = x[i], b = y[i];
    errors[i] = off(kiln_near_exp(a), exp((double)a));
    errors[count + i] = off(kiln_near_sigmoid(a), 1.0 / (1.0 + exp(-(double)a)));
    errors[2 * count + i] = off(kiln_near_erf(a), erf((double)a));
    errors[3 * count + i] = off(kiln_near_sqrt(a), sqrt((double)a));
    errors[4 * count + i] = off(kiln_near_rsqrt(a), 1.0 / sqrt((double)a));
    errors[5 * count + i] = off(kiln_reciprocal(a), 1.0 / (double)a);
    errors[6 * count + i] = off(kiln_near_quotient(a, b), (double)a / (double)b);
    errors[7 * count + i] = off(kiln_divisor(b).near(a), (double)a / (double)b);
}

// Loss and gradient of rows of 1024 logits, each held by the 256 threads of a block.
extern "C" __global__
void cross_entropy(const float* logits, const kiln_u32* labels, float* loss, float* gradient)
{
    kiln_vector<float, 4> v;
    const kiln_u64 at = blockIdx.x * 1024ull + threadIdx.x * 4;
    v.load(logits + at);
    float most = v.at[0];
    for (int j = 1; j < 4; j++) most = kiln_by_max::join(most, v.at[j]);
    most = kiln_block<kiln_by_max, 256>(most);
    const kiln_u32 label = labels[blockIdx.x];
    float sum = 0, right = 0;
    for (int j = 0; j < 4; j++) {
        if (threadIdx.x * 4 + j == label) right = v.at[j];
        v.at[j] = expf(v.at[j] - most);
        sum += v.at[j];
    }
    sum = kiln_block<kiln_by_sum, 256>(sum);
    right = kiln_block<kiln_by_sum, 256>(right);
    for (int j = 0; j < 4; j++) v.at[j] = v.at[j] / sum - (threadIdx.x * 4 + j == label ? 1.0f : 0.0f);
    v.store(gradient + at);
    if (threadIdx.x == 0) loss[blockIdx.x] = logf(sum) + most - right;
}
"#;

fn part(gpu: &Gpu, name: &str) -> Kernel {
    gpu.kernel(name, &format!("{PRELUDE}{PARTS}"))
}

fn upload(gpu: &Gpu, raw: &[u8]) -> Arc<Storage> {
    let storage = Arc::new(Storage::allocate(&gpu.stream, raw.len()).unwrap());
    gpu.stream.write(raw, &storage, 0).unwrap();
    storage
}

/// Memory that no kernel has written: NaN in every type.
fn unwritten(gpu: &Gpu, bytes: usize) -> Arc<Storage> {
    upload(gpu, &vec![0xff; bytes])
}

fn download(gpu: &Gpu, storage: &Storage) -> Vec<u8> {
    let mut raw = vec![0; storage.bytes()];
    gpu.stream.read(storage, 0, &mut raw).unwrap();
    raw
}

fn run(gpu: &Gpu, kernel: Kernel, blocks: u32, threads: u32, arguments: Arguments) {
    let launch = Launch {
        kernel,
        grid: [blocks, 1, 1],
        block: [threads, 1, 1],
        shared_bytes: 0,
        arguments,
    };
    // SAFETY: every test gives storages for `blocks * threads` elements.
    unsafe { gpu.stream.launch(&launch) }.unwrap();
}

/// Numbers between -1 and 1.
fn random(count: usize, seed: u64) -> Vec<f32> {
    (0..count as u64)
        .map(|i| 2.0 * philox::uniform(seed, 0, i, DType::F32) as f32 - 1.0)
        .collect()
}

#[test]
fn sources_compile_for_every_generation() {
    let Some(nvrtc) = common::nvrtc() else { return };
    let sources = [Source {
        name: "parts".into(),
        text: format!("{PRELUDE}{PARTS}"),
    }];
    for capability in [(8, 0), (9, 0)] {
        let compiler = Compiler::new(nvrtc.clone(), capability, Store::disabled()).unwrap();
        compiler
            .compile(&sources)
            .unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn random_numbers_have_the_bits_of_every_target() {
    let Some(gpu) = gpu() else { return };
    let kernel = part(&gpu, "random");
    let count = 1024_u64;
    for (seed, stream, first) in [(0, 0, 0), (42, 7, 1 << 33), (u64::MAX, u64::MAX, u64::MAX - 5000)] {
        let words = unwritten(&gpu, count as usize * 16);
        let uniform = unwritten(&gpu, count as usize * 16);
        let arguments = Arguments::new()
            .memory(&words, 0)
            .memory(&uniform, 0)
            .u64(seed)
            .u64(stream)
            .u64(first);
        run(&gpu, kernel.clone(), 4, 256, arguments);
        let words: Vec<u32> = download(&gpu, &words)
            .as_chunks::<4>()
            .0
            .iter()
            .map(|word| u32::from_ne_bytes(*word))
            .collect();
        let expected: Vec<u32> = (0..count)
            .flat_map(|i| philox::block(seed, stream, first + i))
            .collect();
        assert_eq!(words, expected);
        if first == 0 {
            let expected: Vec<f32> = (0..4 * count)
                .map(|i| philox::uniform(seed, stream, i, DType::F32) as f32)
                .collect();
            assert_eq!(numbers(&download(&gpu, &uniform)), expected);
        }
    }
}

#[test]
fn sixteen_bits_become_thirty_two_and_back() {
    let Some(gpu) = gpu() else { return };
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
    let patterns = upload(&gpu, &all);
    let (f, b) = (unwritten(&gpu, 4 << 16), unwritten(&gpu, 4 << 16));
    let arguments = Arguments::new()
        .memory(&patterns, 0)
        .memory(&patterns, 0)
        .memory(&f, 0)
        .memory(&b, 0);
    run(&gpu, part(&gpu, "widen"), 256, 256, arguments);
    let same = |one: f32, other: f32| one.to_bits() == other.to_bits() || one.is_nan() && other.is_nan();
    for (bits, (f, b)) in (0..=u16::MAX).zip(
        numbers(&download(&gpu, &f))
            .into_iter()
            .zip(numbers(&download(&gpu, &b))),
    ) {
        assert!(same(f, f16::from_bits(bits).to_f32()), "{bits:#06x}: {f}");
        assert!(same(b, bf16::from_bits(bits).to_f32()), "{bits:#06x}: {b}");
    }
    // All exponents, ties, infinities and NaN: random patterns, and each 16-bit pattern with a half of its
    // last bit.
    let mut x: Vec<f32> = (0..1 << 18)
        .map(|i| f32::from_bits(philox::block(1, 2, i)[0]))
        .collect();
    x.extend((0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16 | 0x8000)));
    x.extend((0..=u16::MAX).map(|bits| f32::from_bits(f16::from_bits(bits).to_f32().to_bits() | 0x1000)));
    let values = upload(&gpu, &bytes(&x));
    let (f, b) = (unwritten(&gpu, 2 * x.len()), unwritten(&gpu, 2 * x.len()));
    let arguments = Arguments::new().memory(&values, 0).memory(&f, 0).memory(&b, 0);
    run(&gpu, part(&gpu, "narrow"), x.len() as u32 / 256, 256, arguments);
    let words = |raw: Vec<u8>| -> Vec<u16> {
        raw.as_chunks::<2>()
            .0
            .iter()
            .map(|word| u16::from_ne_bytes(*word))
            .collect()
    };
    for ((x, f), b) in x
        .iter()
        .zip(words(download(&gpu, &f)))
        .zip(words(download(&gpu, &b)))
    {
        assert!(
            same(f16::from_bits(f).to_f32(), f16::from_f32(*x).to_f32()),
            "{x:e}: {f:#06x}"
        );
        assert!(
            same(bf16::from_bits(b).to_f32(), bf16::from_f32(*x).to_f32()),
            "{x:e}: {b:#06x}"
        );
    }
}

/// Functions whose results are rounded to 16 bits have errors that such a rounding hides.
#[test]
fn functions_that_are_a_little_off() {
    let Some(gpu) = gpu() else { return };
    // Every size, both zeros, infinities and NaN.
    let pattern = |seed: u64, i: u64| f32::from_bits(philox::block(seed, 0, i)[0]);
    let special = [
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        1.0,
        f32::MAX,
        f32::MIN_POSITIVE,
    ];
    let mut x: Vec<f32> = (0..1 << 18).map(|i| pattern(3, i)).collect();
    x.extend(random(1 << 16, 5).iter().map(|x| 10.0 * x));
    x.extend(random(1 << 16, 6).iter().map(|x| 90.0 * x));
    let mut y: Vec<f32> = (0..x.len() as u64).map(|i| pattern(4, i)).collect();
    for (place, (a, b)) in special.iter().flat_map(|a| special.map(|b| (*a, b))).enumerate() {
        (x[place], y[place]) = (a, b);
    }
    let errors = unwritten(&gpu, 8 * 4 * x.len());
    let (left, right) = (upload(&gpu, &bytes(&x)), upload(&gpu, &bytes(&y)));
    let arguments = Arguments::new()
        .memory(&left, 0)
        .memory(&right, 0)
        .memory(&errors, 0);
    run(&gpu, part(&gpu, "near"), x.len() as u32 / 256, 256, arguments);
    let errors = numbers(&download(&gpu, &errors));
    let names = [
        "exp",
        "sigmoid",
        "erf",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "quotient",
        "by a divisor",
    ];
    for (name, errors) in names.iter().zip(errors.chunks(x.len())) {
        let exponential = matches!(*name, "exp" | "sigmoid");
        for ((&error, &a), &b) in errors.iter().zip(&x).zip(&y) {
            // The last exponents before infinity may give it.
            if exponential && (87.0..89.0).contains(&a.abs()) {
                continue;
            }
            let most = if exponential {
                2.0_f32.powi(-20) + a.abs().min(90.0) * 2.0_f32.powi(-23)
            } else {
                2.0_f32.powi(-20)
            };
            assert!(error <= most, "{name} of {a:e} and {b:e} is off by {error:e}");
        }
    }
}

#[test]
fn a_row_in_registers_has_loss_and_gradient() {
    let Some(gpu) = gpu() else { return };
    let kernel = part(&gpu, "cross_entropy");
    assert_eq!(kernel.usage().local_bytes, 0);
    let rows = 300;
    let mut logits: Vec<f32> = random(rows * 1024, 5).iter().map(|x| x * 20.0).collect();
    // The last row has a NaN, which its loss and gradient must show.
    *logits.last_mut().unwrap() = f32::NAN;
    let labels: Vec<u32> = (0..rows as u32).map(|row| row * 37 % 1024).collect();
    let (x, y) = (
        upload(&gpu, &bytes(&logits)),
        upload(
            &gpu,
            &labels
                .iter()
                .flat_map(|label| label.to_ne_bytes())
                .collect::<Vec<u8>>(),
        ),
    );
    let launch = || {
        let (loss, gradient) = (unwritten(&gpu, rows * 4), unwritten(&gpu, rows * 4096));
        let arguments = Arguments::new()
            .memory(&x, 0)
            .memory(&y, 0)
            .memory(&loss, 0)
            .memory(&gradient, 0);
        run(&gpu, kernel.clone(), rows as u32, 256, arguments);
        (download(&gpu, &loss), download(&gpu, &gradient))
    };
    let (loss, gradient) = launch();
    assert!(launch() == (loss.clone(), gradient.clone()), "two runs differ");
    let (loss, gradient) = (numbers(&loss), numbers(&gradient));
    for row in 0..rows - 1 {
        let x: Vec<f64> = logits[row * 1024..][..1024].iter().map(|&x| x.into()).collect();
        let most = x.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = x.iter().map(|x| (x - most).exp()).sum();
        let label = labels[row] as usize;
        let expected = sum.ln() + most - x[label];
        assert!(
            (f64::from(loss[row]) - expected).abs() <= 2e-6 * expected.abs().max(1.0),
            "{row}"
        );
        for (j, x) in x.iter().enumerate() {
            let expected = (x - most).exp() / sum - f64::from(u8::from(j == label));
            assert!(
                (f64::from(gradient[row * 1024 + j]) - expected).abs() <= 1e-6,
                "{row}, {j}"
            );
        }
    }
    assert!(loss[rows - 1].is_nan() && gradient[(rows - 1) * 1024].is_nan());
}
