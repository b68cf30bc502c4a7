//! What a machine can do on some threads: multiply registers alone, and read memory.

use std::fmt;
use std::time::{Duration, Instant};

use kiln_cpu::kernels::{KernelText, Param, standalone};
use kiln_cpu::{AlignedBuffer, BuildOptions, Library, NoHooks, Step, StepArguments, ThreadPool, Toolchain};

type Error = Box<dyn std::error::Error>;

/// The best of so many runs.
const RUNS: usize = 9;

/// Bytes that are read: more than caches hold.
const BYTES: usize = 1 << 30;

/// Rates of all threads together.
pub struct Limits {
    /// GFLOP/s of multiply-adds of f32.
    pub f32: f64,
    /// GFLOP/s of products of bf16 that are added to f32: of tiles, pairs or, where there are neither, f32.
    pub bf16: f64,
    /// GB/s read.
    pub reading: f64,
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { f32, bf16, reading } = self;
        write!(
            f,
            "registers alone {f32:.0} GFLOP/s of f32, {bf16:.0} of bf16; reading {reading:.0} GB/s"
        )
    }
}

impl Limits {
    /// Measures on the threads of `pool`.
    pub fn measure(toolchain: &Toolchain, pool: &ThreadPool) -> Result<Self, Error> {
        const ROUNDS: usize = 100_000;
        let threads = pool.threads();
        Ok(Self {
            f32: Peak::of_f32(toolchain, threads, ROUNDS)?.best(pool)?,
            bf16: Peak::of_bf16(toolchain, threads, ROUNDS)?.best(pool)?,
            reading: reading(pool)?,
        })
    }
}

/// Statements of a loop `i` and around it, and the operations of a round.
struct Loop {
    before: String,
    round: String,
    after: String,
    operations: usize,
}

/// Independent multiply-adds of vectors of `number`, each of so many operations.
fn chains(vector: &str, number: &str, multiply: &str, operations: usize) -> Loop {
    const CHAINS: usize = 24;
    let each = |text: &dyn Fn(usize) -> String| (0..CHAINS).map(text).collect::<Vec<_>>().join(" ");
    let sums = each(&|c| format!("c{c} = {{0}},"));
    // The compiler must know nothing of the chains and the factors, or it would join them.
    let hidden = each(&|c| format!("__asm__(\"\" : \"+m\"(c{c}));"));
    let total = each(&|c| format!("all += c{c};"));
    Loop {
        before: format!(
            "{vector} a = ({vector}){{0}} + {number}, b = a; vf {sums} all = {{0}}; {hidden} __asm__(\"\" : \"+m\"(a), \"+m\"(b));"
        ),
        round: each(&|c| format!("c{c} = {multiply}(a, b, c{c});")),
        after: format!("{total} vf_store(out + unit * KILN_LANES, all);"),
        operations: CHAINS * operations,
    }
}

/// Four products of tiles. They hold numbers: a tile that was never loaded is a zero that the unit knows of,
/// and is multiplied in less than half of the time that numbers take where all threads multiply.
fn tiles() -> Loop {
    let zero = (0..4)
        .map(|t| format!("kiln_tile_zero({t}); "))
        .collect::<String>();
    let load = (4..8)
        .map(|t| format!("kiln_tile_load({t}, numbers, 16); "))
        .collect::<String>();
    Loop {
        before: format!(
            "uint32_t numbers[256]; for (int i = 0; i < 256; i++) numbers[i] = 0x3f003f01u + (uint32_t)i % 64; \
             kiln_tiles_begin(); {zero}{load}"
        ),
        round:
            "kiln_tile_dot(0, 4, 6); kiln_tile_dot(1, 4, 7); kiln_tile_dot(2, 5, 6); kiln_tile_dot(3, 5, 7);"
                .into(),
        after: "kiln_tiles_end();".into(),
        operations: 4 * 2 * 16 * 16 * 32,
    }
}

/// A loop on registers alone, ready to run on all threads of a pool.
pub struct Peak {
    step: Step,
    out: AlignedBuffer,
    input: AlignedBuffer,
    arena: AlignedBuffer,
    /// Operations of a run.
    operations: f64,
}

impl Peak {
    /// Multiply-adds of f32, `rounds` times on each of `threads` threads.
    pub fn of_f32(toolchain: &Toolchain, threads: usize, rounds: usize) -> Result<Self, Error> {
        let lanes = toolchain.isa().lanes().max(4);
        Self::new(
            toolchain,
            threads,
            rounds,
            &chains("vf", "0.5f", "vf_fma", 2 * lanes),
        )
    }

    /// Products of bf16 that are added to f32: of tiles, pairs or, where there are neither, f32.
    pub fn of_bf16(toolchain: &Toolchain, threads: usize, rounds: usize) -> Result<Self, Error> {
        let isa = toolchain.isa();
        match (isa.has_tiles(), isa.has_bf16_pairs()) {
            (true, _) => Self::new(toolchain, threads, rounds, &tiles()),
            (_, true) => {
                let pairs = chains("vu", "0x3f003f00u", "vf_dot_bf16", 4 * isa.lanes());
                Self::new(toolchain, threads, rounds, &pairs)
            }
            _ => Self::of_f32(toolchain, threads, rounds),
        }
    }

    fn new(toolchain: &Toolchain, threads: usize, rounds: usize, of: &Loop) -> Result<Self, Error> {
        let Loop {
            before,
            round,
            after,
            operations,
        } = of;
        let head = "void peak(const kiln_runtime *rt, const float *left, const float *right, float *out, char *workspace)";
        let source = format!(
            "static void peak_part(void *ctx, int64_t begin, int64_t end, int thread) {{\n    float *out = *(float **)ctx;\n    for (int64_t unit = \
             begin; unit < end; unit++) {{\n        {before}\n        for (int64_t i = 0; i < {rounds}; i++) {{ {round} }}\n        {after}\n    }}\n}}\n{head} {{\n    \
             rt->parallel_for(rt->pool, {threads}, 1, peak_part, &out);\n}}\n"
        );
        let kernel = KernelText {
            name: "peak".into(),
            params: [
                ("const float *", "left"),
                ("const float *", "right"),
                ("float *", "out"),
            ]
            .map(|(ctype, name)| Param::new(ctype, name))
            .to_vec(),
            prototype: format!("{head};"),
            source,
            helpers: Vec::new(),
            workspace_bytes: 0,
        };
        let files = standalone::step(&[kernel], toolchain.isa());
        let built = toolchain.build(&files, &BuildOptions::default())?;
        Ok(Self {
            step: Library::load(built.path())?.step(),
            out: AlignedBuffer::zeroed(64 * threads)?,
            input: AlignedBuffer::zeroed(64)?,
            arena: AlignedBuffer::zeroed(0)?,
            operations: (operations * rounds * threads) as f64,
        })
    }

    /// GFLOP/s of a run.
    pub fn rate(&mut self, pool: &ThreadPool) -> Result<f64, Error> {
        let arguments = StepArguments {
            inputs: &[self.input.as_ptr(); 2],
            outputs: &[self.out.as_mut_ptr()],
            arena: &mut self.arena,
            scalars: &[],
        };
        let start = Instant::now();
        // SAFETY: the kernel reads nothing and writes a vector for each thread.
        unsafe { self.step.run(pool, arguments, &NoHooks) }?;
        Ok(self.operations / start.elapsed().as_nanos() as f64)
    }

    /// The best of some runs.
    fn best(mut self, pool: &ThreadPool) -> Result<f64, Error> {
        (0..RUNS).try_fold(0.0, |best: f64, _| Ok(best.max(self.rate(pool)?)))
    }
}

/// GB/s of a sum over more memory than caches hold.
fn reading(pool: &ThreadPool) -> Result<f64, Error> {
    let mut memory = AlignedBuffer::zeroed(BYTES)?;
    memory.as_mut_slice().fill(1);
    let bytes = memory.as_slice();
    let mut best = Duration::MAX;
    for _ in 0..RUNS {
        let start = Instant::now();
        pool.parallel_for(BYTES, 4096, |begin, end, _| {
            let words = bytes[begin..end].chunks_exact(8);
            let sum = words.fold(0u64, |sum, word| {
                sum.wrapping_add(u64::from_ne_bytes(word.try_into().unwrap_or_default()))
            });
            std::hint::black_box(sum);
        });
        best = best.min(start.elapsed());
    }
    Ok(BYTES as f64 / best.as_nanos() as f64)
}
