//! Building kernels, running them on several thread counts, and comparing.

use kiln_cpu::kernels::{KernelText, standalone};
use kiln_cpu::{
    AlignedBuffer, BuildOptions, Isa, Library, NoHooks, OptLevel, StepArguments, ThreadPool, Toolchain,
};
use kiln_graph::{DType, HostTensor};

/// A small generator of pseudo-random numbers (xorshift), so that failures repeat.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Uniform in `0..limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        (((self.next() >> 32) * limit as u64) >> 32) as usize
    }

    /// One of the choices.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// `count` values, roughly normal.
    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count)
            .map(|_| {
                let sum: f64 = (0..4)
                    .map(|_| (self.next() >> 11) as f64 / (1u64 << 53) as f64 - 0.5)
                    .sum();
                (sum * 1.7) as f32
            })
            .collect()
    }
}

/// The instruction sets to test: the machine's and all that it contains, and tiles of AMX, which are memory
/// where the machine has none.
pub fn instruction_sets(toolchain: &Toolchain) -> Vec<Isa> {
    let mut sets = toolchain.isa().contained().to_vec();
    if sets[0] == Isa::Avx512Bf16 {
        sets.insert(0, Isa::AmxBf16);
    }
    sets
}

/// [`run_on`] three threads at most.
pub fn run(
    toolchain: &Toolchain,
    isa: Isa,
    kernels: &[KernelText],
    inputs: &[&[f32]],
    outputs: &[&[f32]],
) -> Vec<Vec<f32>> {
    run_on(3, toolchain, isa, kernels, inputs, outputs)
}

/// Builds `kernels` into one step, runs it on 1 to `most` threads (workspaces filled with NaN), checks that
/// the bits agree, and returns the outputs. `outputs` gives the contents before the run.
pub fn run_on(
    most: usize,
    toolchain: &Toolchain,
    isa: Isa,
    kernels: &[KernelText],
    inputs: &[&[f32]],
    outputs: &[&[f32]],
) -> Vec<Vec<f32>> {
    let options = BuildOptions {
        level: OptLevel::Quick,
        ..BuildOptions::default()
    };
    let built = toolchain
        .build(&standalone::step(kernels, isa), &options)
        .unwrap_or_else(|error| panic!("{error}"));

    let step = Library::load(built.path()).unwrap().step();
    let inputs: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr().cast()).collect();
    let mut first: Option<Vec<Vec<f32>>> = None;
    for threads in 1..=most {
        let mut results: Vec<Vec<f32>> = outputs.iter().map(|output| output.to_vec()).collect();
        let pointers: Vec<*mut u8> = results
            .iter_mut()
            .map(|result| result.as_mut_ptr().cast())
            .collect();
        let mut arena = AlignedBuffer::zeroed(step.signature().arena_bytes as usize).unwrap();
        arena.as_mut_slice().fill(0xff);
        let arguments = StepArguments {
            inputs: &inputs,
            outputs: &pointers,
            arena: &mut arena,
            scalars: &[],
        };
        // SAFETY: the tests hand over as many elements as they told the template.
        unsafe { step.run(&ThreadPool::new(threads), arguments, &NoHooks) }.unwrap();
        match &first {
            None => first = Some(results),
            Some(first) => {
                let bits =
                    |all: &[Vec<f32>]| -> Vec<u32> { all.iter().flatten().map(|x| x.to_bits()).collect() };
                assert_eq!(bits(first), bits(&results), "{threads} threads change the result");
            }
        }
    }
    first.unwrap()
}

/// `values` rounded to bf16, two in the bits of one number: what a kernel that is given `uint16_t *` reads.
pub fn to_bf16(values: &[f32]) -> Vec<f32> {
    let numbers = values.iter().map(|&x| f64::from(x));
    let halves = HostTensor::from_floats(DType::BF16, [values.len()], numbers);
    let bits = |bytes: &[u8]| {
        bytes
            .iter()
            .rev()
            .fold(0, |bits, &byte| bits << 8 | u32::from(byte))
    };
    halves
        .bytes()
        .chunks(4)
        .map(|bytes| f32::from_bits(bits(bytes)))
        .collect()
}

/// The numbers that [`to_bf16`] made of as many.
pub fn from_bf16(bits: &[f32]) -> Vec<f32> {
    let halves = bits
        .iter()
        .flat_map(|x| [x.to_bits() << 16, x.to_bits() & 0xffff_0000]);
    halves.map(f32::from_bits).collect()
}

/// Relative distance `||a - b|| / ||b||`.
pub fn distance(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&a, &b) in a.iter().zip(b) {
        difference += (f64::from(a) - b).powi(2);
        norm += b * b;
    }
    if norm == 0.0 {
        difference.sqrt()
    } else {
        (difference / norm).sqrt()
    }
}
