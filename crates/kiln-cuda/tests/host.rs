//! The harness that runs kernels on the host: what CUDA's words do there, and which defects of a kernel it
//! finds.

use kiln_cuda::code::{FunctionText, StepCode};
use kiln_cuda::testing::host::{Differential, HostError, HostStep, one_kernel};
use kiln_graph::{Graph, HostTensor};

/// A step of one kernel that reads input 0 and writes output 0.
struct OneKernel {
    helpers: &'static str,
    input: &'static str,
    output: &'static str,
    body: &'static str,
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
    /// Bytes of input and output.
    bytes: [usize; 2],
}

impl Default for OneKernel {
    fn default() -> Self {
        Self {
            helpers: "",
            input: "const unsigned*",
            output: "unsigned*",
            body: "",
            blocks: 1,
            threads: 64,
            shared_bytes: 0,
            bytes: [256, 256],
        }
    }
}

impl OneKernel {
    fn code(&self) -> StepCode {
        let text = FunctionText {
            helpers: self.helpers.into(),
            parameters: vec![format!("{} in", self.input), format!("{} out", self.output)],
            body: self.body.into(),
            threads: self.threads,
            device_only: false,
            blocks: 0,
        };
        let [input, output] = self.bytes;
        let grid = [self.blocks, 1, 1];
        one_kernel(text, grid, self.shared_bytes, vec![input], vec![output])
    }

    /// The output for `input`, the same whichever thread runs first.
    fn run(&self, input: &[u8]) -> Result<Vec<u8>, HostError> {
        let step = HostStep::build(&self.code()).unwrap();
        let forward = step.run(&mut [input.to_vec()], &[])?.remove(0);
        let backward = step.backward(true).run(&mut [input.to_vec()], &[])?.remove(0);
        assert_eq!(forward, backward, "the order of threads shows");
        Ok(forward)
    }

    /// The output as words, the input counting from 0.
    fn words(&self) -> Vec<u32> {
        words(&self.run(&counting(self.bytes[0] / 4)).unwrap())
    }

    /// What is wrong with it.
    fn fault(&self) -> String {
        match self.run(&counting(self.bytes[0] / 4)) {
            Err(HostError::Fault(text)) => text,
            other => panic!("no fault was found: {other:?}"),
        }
    }
}

fn counting(count: usize) -> Vec<u8> {
    (0..count as u32).flat_map(u32::to_ne_bytes).collect()
}

fn words(bytes: &[u8]) -> Vec<u32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|&word| u32::from_ne_bytes(word)).collect()
}

#[test]
fn threads_and_blocks_have_their_numbers() {
    let kernel = OneKernel {
        body: "unsigned i = blockIdx.x * blockDim.x + threadIdx.x; out[i] = in[i] * 2 + gridDim.x;",
        blocks: 3,
        bytes: [768, 768],
        ..OneKernel::default()
    };
    assert_eq!(kernel.words(), (0..192).map(|i| i * 2 + 3).collect::<Vec<u32>>());
}

#[test]
fn barriers_part_writes_from_reads() {
    // A sum of 64 numbers in shared memory, over again for each block, whose result every thread reads.
    let kernel = OneKernel {
        helpers: "inline unsigned @_sum(unsigned x)
{
    __shared__ unsigned part[64];
    part[threadIdx.x] = x;
    for (int apart = 32; apart; apart /= 2) {
        __syncthreads();
        if (threadIdx.x < apart) part[threadIdx.x] += part[threadIdx.x + apart];
    }
    __syncthreads();
    return part[0];
}
",
        body: "unsigned i = blockIdx.x * 64 + threadIdx.x; out[i] = @_sum(in[i]) + @_sum(1);",
        blocks: 2,
        bytes: [512, 512],
        ..OneKernel::default()
    };
    // One barrier is missing: the second sum may overwrite what others still read.
    let step = HostStep::build(&kernel.code()).unwrap();
    let forward = step.run(&mut [counting(128)], &[]).unwrap();
    let backward = step.backward(true).run(&mut [counting(128)], &[]).unwrap();
    assert_ne!(forward, backward, "a race shows in the order of threads");

    let safe = OneKernel {
        body: "unsigned i = blockIdx.x * 64 + threadIdx.x; unsigned sum = @_sum(in[i]); __syncthreads(); out[i] = sum + @_sum(1);",
        ..kernel
    };
    let sums = [(0..64).sum::<u32>() + 64, (64..128).sum::<u32>() + 64];
    assert_eq!(safe.words(), [vec![sums[0]; 64], vec![sums[1]; 64]].concat());
}

#[test]
fn lanes_exchange_values() {
    let lane = |i: u32| i % 32;
    let first = |i: u32| i / 32 * 32;
    let cases: [(&'static str, &dyn Fn(u32) -> u32); 8] = [
        ("__shfl_xor_sync(0xffffffffu, x, 5)", &|i| {
            first(i) + (lane(i) ^ 5)
        }),
        ("__shfl_sync(0xffffffffu, x, 7)", &|i| first(i) + 7),
        ("__shfl_up_sync(0xffffffffu, x, 3)", &|i| {
            if lane(i) < 3 { i } else { i - 3 }
        }),
        ("__shfl_down_sync(0xffffffffu, x, 3)", &|i| {
            if lane(i) > 28 { i } else { i + 3 }
        }),
        ("__shfl_down_sync(0xffffffffu, x, 3, 8)", &|i| {
            if i % 8 > 4 { i } else { i + 3 }
        }),
        ("__shfl_sync(0xffffffffu, x, 9, 8)", &|i| i / 8 * 8 + 1),
        ("(unsigned)__shfl_xor_sync(0xffffffffu, (double)x, 1)", &|i| i ^ 1),
        ("__ballot_sync(0xffffffffu, x % 3 == 0)", &|i| {
            (0..32)
                .filter(|other| (first(i) + other) % 3 == 0)
                .map(|other| 1 << other)
                .sum()
        }),
    ];
    let lines: Vec<String> = (0..)
        .zip(&cases)
        .map(|(number, (expression, _))| format!("out[64 * {number} + threadIdx.x] = {expression};\n"))
        .collect();
    let body = format!("unsigned x = in[threadIdx.x]; __syncwarp();\n{}", lines.concat());
    let kernel = OneKernel {
        body: body.leak(),
        bytes: [256, 256 * cases.len()],
        ..OneKernel::default()
    };
    for ((expression, expected), actual) in cases.iter().zip(kernel.words().chunks(64)) {
        assert_eq!(
            actual,
            (0..64).map(expected).collect::<Vec<u32>>(),
            "{expression}"
        );
    }
}

#[test]
fn the_block_reductions_of_the_prelude() {
    let kernel = OneKernel {
        body: "float x = (float)in[threadIdx.x];
float sum = kiln_block<kiln_by_sum, 128>(x), most = kiln_block<kiln_by_max, 128>(x);
out[threadIdx.x] = (unsigned)(sum + most);",
        threads: 128,
        bytes: [512, 512],
        ..OneKernel::default()
    };
    assert_eq!(kernel.words(), vec![127 * 64 + 127; 128]);
}

#[test]
fn dynamic_shared_memory() {
    let reversed = OneKernel {
        body: "unsigned* shared = (unsigned*)kiln_dynamic_shared();
shared[threadIdx.x] = in[threadIdx.x];
__syncthreads();
out[threadIdx.x] = shared[63 - threadIdx.x];",
        shared_bytes: 256,
        ..OneKernel::default()
    };
    assert_eq!(reversed.words(), (0..64).rev().collect::<Vec<u32>>());
    let small = OneKernel {
        shared_bytes: 252,
        ..reversed
    };
    let fault = small.fault();
    assert!(
        fault.contains("outside of the 252 bytes of dynamic shared memory"),
        "{fault}"
    );
    let large = OneKernel {
        shared_bytes: 1 << 18,
        ..small
    };
    assert!(large.fault().contains("asks for 262144 bytes"));
}

#[test]
fn memory_that_nobody_wrote_is_noise() {
    let noise = 0xfff5_fff5;
    let shared = OneKernel {
        body: "__shared__ unsigned part[64];
unsigned old = part[threadIdx.x] + ((unsigned*)kiln_dynamic_shared())[threadIdx.x];
part[threadIdx.x] = ((unsigned*)kiln_dynamic_shared())[threadIdx.x] = 1;
out[blockIdx.x * 64 + threadIdx.x] = old;",
        blocks: 2,
        shared_bytes: 256,
        bytes: [256, 512],
        ..OneKernel::default()
    };
    assert_eq!(
        shared.words(),
        vec![2 * (noise & 0x7fff_ffff); 128],
        "the second block sees nothing of the first"
    );
    let half = OneKernel {
        body: "if (threadIdx.x < 32) out[threadIdx.x] = 1;",
        ..OneKernel::default()
    };
    assert_eq!(half.words(), [vec![1; 32], vec![noise; 32]].concat());
    assert!(
        f32::from_bits(noise).is_nan() && f64::from_bits(u64::from(noise) << 32 | u64::from(noise)).is_nan()
    );
}

#[test]
fn threads_that_disagree_about_a_barrier() {
    let fault = |body: &'static str| {
        OneKernel {
            body,
            ..OneKernel::default()
        }
        .fault()
    };
    let ended = fault("if (threadIdx.x >= 32) return;\n__syncthreads();");
    assert_eq!(
        ended,
        "kernel one, block (0, 0, 0): threads disagree: thread 0 waits for the block at one:6, thread 32 has ended"
    );
    let apart = fault("if (threadIdx.x < 7)\n__syncthreads();\nelse\n__syncthreads();");
    assert!(
        apart.contains("thread 0 waits for the block at one:6, thread 7 waits for the block at one:8"),
        "{apart}"
    );
    let same_line = fault("if (threadIdx.x < 7) __syncthreads(); else __syncthreads();");
    assert!(same_line.contains("threads disagree"), "{same_line}");
    let lanes = fault("if (threadIdx.x != 40) __shfl_sync(0xffffffffu, 1, 0);");
    assert!(
        lanes.contains("thread 32 exchanges values in its warp at one:5, thread 40 has ended"),
        "{lanes}"
    );
    let part = fault("if (threadIdx.x < 16) __shfl_sync(0x0000ffffu, 1, 0);");
    assert!(
        part.contains("exchanges values among a part of its warp (mask 0xffff)"),
        "{part}"
    );
    // Warps may exchange values at places of their own.
    let warps = OneKernel {
        body: "unsigned x = in[threadIdx.x];
if (threadIdx.x < 32) x = __shfl_sync(0xffffffffu, x, 1);
else x = __shfl_sync(0xffffffffu, x, 2) + __shfl_sync(0xffffffffu, x, 0);
out[threadIdx.x] = x;",
        ..OneKernel::default()
    };
    assert_eq!(warps.words(), [vec![1; 32], vec![66; 32]].concat());
}

/// Groups of warps wait for themselves, and one may be rounds ahead of another.
#[test]
fn barriers_of_groups() {
    let groups = OneKernel {
        body: "__shared__ unsigned part[128];
const unsigned group = threadIdx.x / 64;
part[threadIdx.x] = in[threadIdx.x];
kiln_bar_sync(1 + group, 64);
const unsigned other = part[group * 64 + 63 - threadIdx.x % 64];
if (group == 1) kiln_bar_sync(2, 64);
__syncthreads();
out[threadIdx.x] = other + part[threadIdx.x ^ 64];",
        threads: 128,
        bytes: [512, 512],
        ..OneKernel::default()
    };
    let expected = (0..128).map(|i: u32| i / 64 * 64 + 63 - i % 64 + (i ^ 64));
    assert_eq!(groups.words(), expected.collect::<Vec<u32>>());
    let fault = |body: &'static str| {
        OneKernel {
            body,
            threads: 128,
            ..groups
        }
        .fault()
    };
    let shared = fault("kiln_bar_sync(1, threadIdx.x < 64 ? 128 : 64);");
    assert_eq!(
        shared,
        "kernel one, block (0, 0, 0): thread 64 waits for 64 threads at barrier 1, where others wait for 128, at one:5"
    );
    let alone = fault("if (threadIdx.x < 32) kiln_bar_sync(1, 64);");
    assert!(
        alone.contains("thread 0 waits for its group at one:5, thread 32 has ended"),
        "{alone}"
    );
    // What two groups share needs the block's barrier: some order of threads shows it.
    let early = OneKernel {
        body: "__shared__ unsigned part[128];
part[threadIdx.x] = in[threadIdx.x];
kiln_bar_sync(1 + threadIdx.x / 64, 64);
out[threadIdx.x] = part[threadIdx.x ^ 64];",
        ..groups
    };
    let step = HostStep::build(&early.code()).unwrap();
    let run = |step: &HostStep| step.run(&mut [counting(128)], &[]).unwrap();
    let forward = run(&step);
    assert_ne!(forward, run(&step.backward(true)));
}

#[test]
fn writes_outside_of_a_buffer() {
    let behind = OneKernel {
        body: "out[threadIdx.x + 1] = 0;",
        ..OneKernel::default()
    };
    assert_eq!(
        behind.fault(),
        "kernel one writes outside of output 0 (256 bytes)"
    );
    let before = OneKernel {
        body: "out[(int)threadIdx.x - 1] = 0;",
        ..OneKernel::default()
    };
    assert_eq!(
        before.fault(),
        "kernel one writes outside of output 0 (256 bytes)"
    );
    let input = OneKernel {
        body: "((unsigned*)in)[threadIdx.x] = 3;",
        ..OneKernel::default()
    };
    assert_eq!(input.fault(), "kernel one overwrites input 0");
    let stack = OneKernel {
        body: "volatile unsigned all[1 << 16]; for (int i = 0; i < (1 << 16); i++) all[i] = i; out[threadIdx.x] = all[in[threadIdx.x]];",
        ..OneKernel::default()
    };
    assert!(stack.fault().contains("bytes of stack"));
}

#[test]
fn accesses_that_a_device_refuses() {
    let fault = |body: &'static str| {
        OneKernel {
            body,
            ..OneKernel::default()
        }
        .fault()
    };
    let aligned = fault("*(uint4*)(out + threadIdx.x % 32) = make_uint4(1, 1, 1, 1);");
    assert!(
        aligned
            .starts_with("kernel one, block (0, 0, 0): thread 1 does what C++ leaves undefined: an access"),
        "{aligned}"
    );
    let missing = fault("if (threadIdx.x == 5) *(volatile int*)((char*)out + (1ull << 40)) = 1;");
    assert_eq!(
        missing,
        "kernel one, block (0, 0, 0): thread 5 touches memory that is not there"
    );
    let shifted = fault("out[threadIdx.x] = 1u << in[threadIdx.x];");
    assert!(
        shifted.contains("thread 32 does what C++ leaves undefined"),
        "{shifted}"
    );
    let overflown = fault("out[threadIdx.x] = (int)in[threadIdx.x] + 0x7fffffe0;");
    assert!(overflown.contains("thread 32 "), "{overflown}");
    let cast = fault("out[threadIdx.x] = (int)(1e9f * in[threadIdx.x]);");
    assert!(cast.contains("thread 3 "), "{cast}");
    let divided = fault("out[threadIdx.x] = 7 / in[63 - threadIdx.x];");
    assert!(divided.contains("thread 63 "), "{divided}");
}

/// A comparison finds an element that is off by a little more than rounding, and one that is NaN.
#[test]
fn differences_from_the_interpreter() {
    let graph =
        Graph::parse("graph @sum {\n %x = parameter 0 : f32[3]\n %y = add %x, %x : f32[3]\n return %y\n}")
            .unwrap();
    let x = HostTensor::from_vec([3], [1.0f32, 2.0, 3.0]);
    let comparison = Differential::new(&graph).arguments(vec![x], Vec::new());
    let compare = |y: [f32; 3]| comparison.compare(&[HostTensor::from_vec([3], y)]);
    assert_eq!(compare([2.0, 4.0, 6.0]), Ok(()));
    assert_eq!(compare([2.0, 4.000_001, 6.0]), Ok(()));
    for wrong in [4.001, f32::NAN] {
        let error = compare([2.0, wrong, 6.0]).unwrap_err();
        let expected = format!("element 1 of f32[3] is {}, expected 4", f64::from(wrong));
        assert!(
            error.starts_with("output 0 ") && error.contains(&expected),
            "{error}"
        );
    }
}

#[test]
fn launches_that_no_device_takes() {
    let fault = |threads, blocks| {
        OneKernel {
            threads,
            blocks,
            ..OneKernel::default()
        }
        .fault()
    };
    assert!(fault(48, 1).contains("it has 48 threads in a block"));
    assert!(fault(2048, 1).contains("it has 2048 threads in a block"));
    assert!(fault(64, 0).contains("its grid is empty"));
}

#[test]
fn kernels_that_only_a_gpu_runs_are_named() {
    let mut code = OneKernel::default().code();
    code.functions[0].text.device_only = true;
    assert_eq!(
        HostStep::build(&code).unwrap_err(),
        "kernel one runs on a GPU alone"
    );
}

/// The prelude's conversions, as the host runs them, against the crate `half`.
#[test]
fn every_number_of_16_bits_is_widened_and_rounded() {
    let kernel = OneKernel {
        helpers: "template <class T> inline void @_both(unsigned bits, float near, unsigned* widened, unsigned* rounded)
{
    T x;
    x.bits = (kiln_u16)bits;
    *widened = __float_as_uint(kiln_widen(x));
    *rounded = kiln_narrow<T>(near).bits;
}
",
        input: "const float*",
        body: "unsigned i = blockIdx.x * 256 + threadIdx.x;
@_both<kiln_f16>(i, in[i], out + i, out + 65536 + i);
@_both<kiln_bf16>(i, in[i], out + 2 * 65536 + i, out + 3 * 65536 + i);",
        blocks: 256,
        threads: 256,
        bytes: [4 << 16, 16 << 16],
        ..OneKernel::default()
    };
    let step = HostStep::build(&kernel.code()).unwrap();
    // Around every number, and halfway between two.
    let inputs: Vec<(&str, Vec<f32>)> = vec![
        (
            "f16",
            (0..=u16::MAX).map(|i| half::f16::from_bits(i).to_f32()).collect(),
        ),
        (
            "bf16",
            (0..=u16::MAX)
                .map(|i| half::bf16::from_bits(i).to_f32())
                .collect(),
        ),
        (
            "between f16",
            (0..=u16::MAX)
                .map(|i| {
                    between(
                        half::f16::from_bits(i).to_f32(),
                        half::f16::from_bits(i ^ 1).to_f32(),
                    )
                })
                .collect(),
        ),
        (
            "between bf16",
            (0..=u16::MAX)
                .map(|i| {
                    between(
                        half::bf16::from_bits(i).to_f32(),
                        half::bf16::from_bits(i.wrapping_add(1)).to_f32(),
                    )
                })
                .collect(),
        ),
        (
            "just above",
            (0..=u16::MAX)
                .map(|i| {
                    f32::from_bits(
                        between(
                            half::f16::from_bits(i).to_f32(),
                            half::f16::from_bits(i.wrapping_add(1)).to_f32(),
                        )
                        .to_bits()
                        .wrapping_add(1),
                    )
                })
                .collect(),
        ),
        (
            "anything",
            (0..=u32::from(u16::MAX))
                .map(|i| f32::from_bits(i.wrapping_mul(0x9e37_79b9)))
                .collect(),
        ),
    ];
    for (what, numbers) in inputs {
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let results = words(&step.run(&mut [bytes], &[]).unwrap()[0]);
        for (i, &number) in numbers.iter().enumerate() {
            let bits = i as u16;
            let [f16, f16_of, bf16, bf16_of] = [0, 1, 2, 3].map(|part| results[part * 65536 + i]);
            let same = |actual: u32, expected: f32| {
                assert!(
                    f32::from_bits(actual) == expected && actual == expected.to_bits()
                        || f32::from_bits(actual).is_nan() && expected.is_nan(),
                    "{bits:#x} widens to {expected:e}, not {:e}",
                    f32::from_bits(actual)
                );
            };
            same(f16, half::f16::from_bits(bits).to_f32());
            same(bf16, half::bf16::from_bits(bits).to_f32());
            let rounded = [
                half::f16::from_f32(number).to_bits(),
                half::bf16::from_f32(number).to_bits(),
            ];
            let expected = if number.is_nan() { [0x7fff; 2] } else { rounded };
            assert_eq!(
                [f16_of, bf16_of],
                expected.map(u32::from),
                "{what}: {number:e} of {i:#x}"
            );
        }
    }
}

/// The error function of values that are rounded to 16 bits, as the host runs it.
#[test]
fn the_error_function_is_a_little_off() {
    const COUNT: usize = 1 << 15;
    let kernel = OneKernel {
        input: "const float*",
        body: "unsigned i = blockIdx.x * 256 + threadIdx.x;
const double exact = erf((double)in[i]);
const float near = kiln_near_erf(in[i]);
out[i] = __float_as_uint(near);
out[32768 + i] = __float_as_uint((float)(fabs(near - exact) / fabs(exact)));",
        blocks: 128,
        threads: 256,
        bytes: [4 * COUNT, 8 * COUNT],
        ..OneKernel::default()
    };
    let step = HostStep::build(&kernel.code()).unwrap();
    // 2^-30 to 2^18 in steps of 2^-8 of an octave, of both signs, and what is no number.
    let size =
        |i: usize| 2.0_f32.powf((i / 2) as f32 / 256.0 - 30.0) * if i.is_multiple_of(2) { 1.0 } else { -1.0 };
    let mut x: Vec<f32> = (0..COUNT).map(size).collect();
    let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    x[..special.len()].copy_from_slice(&special);
    let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_ne_bytes()).collect();
    let results = words(&step.run(&mut [bytes], &[]).unwrap()[0]);
    let results: Vec<f32> = results.into_iter().map(f32::from_bits).collect();
    assert_eq!(
        results[..2].iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
        [0, 1 << 31]
    );
    assert!(results[4].is_nan());
    for place in 2..COUNT {
        let (x, error) = (x[place], results[COUNT + place]);
        assert!(
            x.is_nan() || error <= 2.0_f32.powi(-20),
            "{x:e} is off by {error:e}"
        );
    }
}

fn between(a: f32, b: f32) -> f32 {
    ((f64::from(a) + f64::from(b)) / 2.0) as f32
}

/// Searches of lists of almost 2^31 items. An item here is known by its address, so that the list needs no
/// memory.
#[test]
fn searches_do_not_overflow() {
    let kernel = OneKernel {
        helpers: "struct @_Item {
    char byte;
    kiln_u32 key() const { return (kiln_u32)(kiln_u64)this; }
    bool before(const @_Item& other) const { return (kiln_u64)this < (kiln_u64)&other; }
};
",
        body: "const @_Item* items = (const @_Item*)((kiln_u64)in[1] << 16);
if (threadIdx.x == 0) out[0] = kiln_first_of<@_Item, int>(items, 1000000000, 2000000000, 65536u + 1500000000u);
if (threadIdx.x == 1) out[1] = kiln_merge_split<@_Item, int>(items, 2000000000, items + 3000000000ll, 100, 2000000000);
if (threadIdx.x > 1) out[threadIdx.x] = 0;",
        ..OneKernel::default()
    };
    assert_eq!(kernel.words()[..2], [1_500_000_000, 2_000_000_000]);
}
